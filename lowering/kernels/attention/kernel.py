# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles: one kernel for every cache kind, operand, mask and score modification.

A tile is ``rows`` query rows (tokens times the group) of one KV head; a source (:mod:`attention.sources`) delivers its
keys in tiles of ``keys`` keys. A block processes one tile of rows after another: exactly one if there are as many
blocks as tiles, otherwise the blocks are persistent. Where few rows attend to many keys, several blocks split the keys
of a tile of rows, and key_splits.py combines their partial results. This file is the algorithm; the passes from
split-kv-loops to distribute-kv-tiles decide, by the schedule, which tiles are masked or skipped, and how copies,
products and the softmax are executed and overlapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import cdiv
from kvarn.dialect.ops.sharing import LINES
from kvarn.dialect.shared_layout import CHUNK
from kvarn.dsl import functions
from kvarn.dsl.builder import types
from kvarn.dsl.softmax import online_softmax
from kvarn.dsl.tiles import Tile
from kvarn.lowering.rewrite import defining_op
from kvarn.lowering.tiles.ir import HIDES

from ..base import Expansion
from .arguments import AttentionArguments
from .case import Case
from .key_splits import partial_row, quotient, splits_of
from .partials import LOG2E, LOWEST, finished, log_sum_exp, with_prior
from .queries import tiles_of, tiles_of_many
from .softmax import modified, modifies
from .sources import source_of
from .specialisation import TileArguments, TileKernel

# Query rows and keys per tile on the host: small enough for the L1 cache.
HOST_ROWS, HOST_KEYS = 16, 32


@dataclass(frozen=True)
class Work:
    """A work item: a split of the keys of tile ``tile`` over all heads, which is tile ``number`` of a KV head."""

    tile: Any
    number: Any
    head: Any
    split: Any


@kv.func
def work_items(s, t, tiles):
    """The work items of this block, in order, of ``tiles`` tiles of rows."""
    heads = s.case.spec.num_heads
    number_of_tiles = tiles * heads
    items = number_of_tiles if t.splits is None else number_of_tiles * t.splits
    last_item, step = (items, kv.grid_dim.x) if s.persistent else (kv.block_id.x + 1, 1)
    if s.sequences and not s.persistent:
        last_item = kv.math.min(last_item, items)
    for i in range(kv.block_id.x, last_item, step):
        work = i if t.queue is None else kv.take_work_item(t.queue, i, items, late=s.overlaps)
        split = 0 if t.splits is None else quotient(work, number_of_tiles)
        tile = work - split * number_of_tiles  # blocks that read the same keys run at the same time
        if s.case.chunk is None:
            number, head = tile // heads, tile % heads
        else:
            number, head = tile % tiles, tile // tiles  # within a chunk, head by head
        yield Work(tile, tiles - 1 - number, head, split)  # the longest first


@dataclass(frozen=True)
class QueryRows:
    """A tile of query rows of a sequence and KV head.

    Attributes
    ----------
    number, head : i32
        The tile's number over all sequences of the batch, and the KV head.
    b, row0, count : i32
        The sequence, the tile's first row in it, and its rows.
    start, num_keys : i32
        The absolute position of the sequence's first query, and its keys; 0 for a tile without rows.
    exists : bool [M]
        Which rows exist; the others repeat an existing row.
    h, at : i32 [M]
        Query heads and absolute positions.
    place : tuple
        The rows' indices in the query, the output and the log-sum-exp.
    """

    number: Any
    head: Any
    b: Any
    row0: Any
    count: Any
    start: Any
    num_keys: Any
    exists: Any
    h: Any
    at: Any
    place: tuple[Any, ...]


@kv.func
def rows_of(s, a, queries, many, work):
    """The query rows of a work item; ``many``: the numbering of the tiles of a divided batch."""
    group, number = s.case.group, work.number
    if many is None:
        b, base, row0, count = queries.tile(number, group, s.rows)
    else:
        b, base, row0, count = many.tile(number)
        number = many.number_in_batch(b, row0)
    start, num_keys = a.start(s.case, queries, b)
    num_keys = kv.where(row0 < count, num_keys, 0)
    row = row0 + kv.tile_index(s.rows)
    exists, row = row < count, kv.math.max(kv.math.min(row, count - 1), 0)
    token, h = row // group, work.head * group + row % group
    place = (*queries.at(base, token), h)
    return QueryRows(number, work.head, b, row0, count, start, num_keys, exists, h, start + token, place)


def columns_of(place: tuple[Any, ...]) -> list[Any]:
    """The indices of rows as columns, which broadcast against a row of indices."""
    return [i[:, None] if isinstance(i, Tile) else i for i in place]


@kv.func
def scaled_query(s, a, rows):
    """(query rows, factor of a score before functions modify it, factor that makes scores powers of two)."""
    if s.case.aligned or s.on_host:
        q = a.query.load_rows(*rows.place, mask=rows.exists, columns=s.query_columns, stored=s.case.size)
    else:
        d = kv.tile_index(s.query_columns)[None, :]
        q = a.query.gather(*columns_of(rows.place), d, mask=rows.exists[:, None] & (d < s.case.size))
    if s.dtype is not s.case.query:
        q = s.dtype(q)
    if a.scale < 0.0:  # maxima and masks precede the scale
        q = -q
    positive = kv.math.max(kv.math.abs(a.scale), 1.0e-30)
    scale_log2, factor = kv.f32(LOG2E) if modifies(s.case) else positive * LOG2E, positive
    if s.stored_keys:
        q, powers = kv.two_terms(q, rows.head * s.case.size % CHUNK if s.aligned else None)
        factor = (powers * positive)[:, None]
        if not modifies(s.case):
            scale_log2 = powers * scale_log2
    return q, factor, scale_log2


def hide_values(o: Tile) -> None:
    """Declare that values are undefined where their weights are zero."""
    defining_op(o.ir).attributes[HIDES] = types().attribute("unit")


@kv.func
def write_result(s, a, rows, m, l, o):
    """Write the normalised rows, combined with a sink and a prior result, and the log-sum-exp."""
    head, place, exists = rows.h, rows.place, rows.exists
    accumulates = s.case.chunk is not None and s.case.chunk.accumulate
    prior, prior_lse = (a.out, a.lse) if accumulates else (a.prior, a.prior_lse)
    before = None if prior is None else prior_lse.gather(*place, mask=exists)
    m, l, factor, of_prior = finished(m, l, None if a.sinks is None else a.sinks[head], before, kv.math.exp2)
    o = o * factor[:, None]
    if prior is not None:
        d, of_prior = kv.tile_index(s.value_columns)[None, :], of_prior[:, None]
        there = exists[:, None] & (of_prior != 0.0) & (d < s.values)
        o = with_prior(o, kv.f32(prior.gather(*columns_of(place), d + s.first_column, mask=there)), of_prior)
    if s.case.aligned or s.on_host:
        stored = {"stored": s.values, "first_column": s.first_column}
        a.out.store_rows(*place, value=s.case.out(o), mask=exists, **stored)
    else:
        d = kv.tile_index(s.value_columns)[None, :]
        there = exists[:, None] & (d < s.values)
        a.out.scatter(*columns_of(place), d + s.first_column, value=s.case.out(o), mask=there)
    if a.lse is not None:
        a.lse.scatter(*place, value=log_sum_exp(m, l), mask=exists)


@kv.func
def write_partial(s, t, rows, tile, split, some, m, l, o):
    """Store a split's partial result for the combine kernel; ``some``: whether the split has any key."""
    slot, written = partial_row(tile, t.splits, split, s.rows) + kv.tile_index(s.rows), rows.exists & some
    t.partials.store_rows(slot, value=o, mask=written)
    t.ends.scatter(slot, 0, value=m, mask=written)
    t.ends.scatter(slot, 1, value=l, mask=written)


def attention_kernel(s: TileKernel) -> Any:
    """The kernel for a specialisation."""
    scores_read = functions.registered(s.case.score).arrays if s.case.score else 0
    _ = s.case.mask.function  # refuses a function that this process does not know before anything is traced
    options = {} if s.min_blocks is None else {"min_blocks": s.min_blocks}

    @kv.kernel(block=(s.threads, 1, 1), **options)
    def attention(a: AttentionArguments, t: TileArguments):
        queries, arrays = a.queries(s.case, s.most), a.arrays
        if s.overlaps:  # the kernel of the sequences of few tokens has waited for earlier kernels, if it was launched
            if a.few < 1:
                kv.griddepcontrol_wait()
        many, tiles = None, t.tiles
        if s.sequences:
            many = tiles_of_many(queries, s.sequences, s.case.group, s.rows, s.threads // 32)
            tiles = many.count
            t = replace(t, splits=splits_of(t, many, s.case.spec.num_heads))
        for work in work_items(s, t, tiles):
            rows = rows_of(s, a, queries, many, work)
            q, factor, scale_log2 = scaled_query(s, a, rows)
            keys = source_of(s, a, t, rows, work.split, q.shape[1] // (2 if s.stored_keys else 1))
            first, end, several = keys.part()
            m, l, o = kv.full(s.rows, LOWEST), kv.full(s.rows, 0.0), kv.full((s.rows, s.value_columns), 0.0)
            for tile in keys.tiles(first, end):
                at = rows.b, rows.h[:, None], rows.at[:, None], tile.at[None, :]
                x = kv.dot(q, tile.k.T)
                if modifies(s.case):
                    x = modified(s.case, x * factor, *at, a.slopes, arrays)
                with kv.trace("mask"):
                    x = keys.hide(x, tile, at, arrays[scores_read:])
                with kv.trace("softmax"):
                    m, l, p, alpha = online_softmax(m, l, x, scale_log2, *s.slack)
                o = kv.dot(s.of_weights(p), tile.v, o * alpha[:, None])
                if s.on_host:
                    hide_values(o)
            if several:
                write_partial(s, t, rows, work.tile, work.split, first < end, m, l, o)
            elif work.split == 0:
                write_result(s, a, rows, m, l, o)
        if s.overlaps:  # a kernel that waits for this one waits for both, for which one block suffices
            if kv.block_id.x == 0:
                kv.griddepcontrol_wait()

    return attention


# --- the host --------------------------------------------------------------------------------------


def host_keys(case: Case) -> int:
    """Keys per tile on the host; with lists of pages a divisor of the page size; 0 if no tile extent fits."""
    if not case.pages:
        return HOST_KEYS
    page = case.spec.page_size
    fitting = [n for n in range(min(page, HOST_KEYS), 1, -1) if page % n == 0]
    return next(iter(fitting), page if 2 <= page <= 2 * HOST_KEYS else 0)


def host_rows(case: Case, schedule: Mapping[str, Any]) -> int:
    """Query rows per tile on the host: the smallest that gives the fewest tiles per sequence."""
    total = max(1, schedule.get("max_queries", HOST_ROWS) * case.group)
    return max(2, cdiv(total, cdiv(total, HOST_ROWS)))


def fits_host(case: Case) -> bool:
    """Whether the case has tiles, whose extents are at least 2, and whose rows are not rotated."""
    extents, chunk = [case.size, case.value_size], case.chunk
    if chunk is not None:  # keys are tiles side by side
        extents.append(chunk.rope if chunk.nope % LINES == 0 else 0)
    return min(extents) >= 2 and host_keys(case) > 0 and not case.spec.rotation


def launch_host(case: Case, at: Expansion, op: Any) -> None:
    """Launch the kernel on the host, where a block has one thread."""
    rows, keys = case.blocks or (host_rows(case, at.schedule), host_keys(case))
    tiles = tiles_of(op, at, case.group, rows)
    kernel = attention_kernel(TileKernel(case, rows, keys, threads=1, on_host=True))
    args = [AttentionArguments.of(op), TileArguments(tiles)]
    at.launch(kernel, args, (tiles * case.spec.num_heads, 1, 1), (1, 1, 1), key=(case, rows, keys))
