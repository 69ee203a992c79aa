# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles: the one kernel for every cache kind, operand, mask and score modification.

A tile is ``rows`` query rows (tokens times the group) of one KV head, which walk over tiles of ``keys`` keys. A block
takes one after the other: with as many blocks as tiles each has one, with fewer they are persistent. Where few rows
walk far, the keys of a tile are split among several blocks, whose partial results key_splits.py combines. What is
written here is the algorithm; which tiles are masked or left out, what copies, what multiplies, what overlaps is
decided by the passes from split-kv-loops to distribute-kv-tiles, by the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, f32, i32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.attention import arrays_of
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.dialect.shared_layout import CHUNK
from kvarn.dialect.tma_layout import joins_heads
from kvarn.dsl import functions
from kvarn.dsl.tiles import Tile
from kvarn.lowering.row_reads import is_in_pool

from .attention_common import Case, asks, caches_of, end_key, first_key, has_first, mask_of, start_of
from .attention_queries import queries_of, tiles_of
from .base import Expansion
from .chosen_pages import chosen_pages
from .key_splits import key_range, partial_row, quotient, split_of
from .key_tiles import BY_POSITIONS, KeyTiles
from .partial_results import LOG2E, LOWEST, finished, log_sum_exp, with_prior
from .softmax import SLACK, arrays_read, modified, modifies, online_softmax, outer_of, seen_by, seen_by_positions

# Query rows and keys of a tile on the host: what stays in its first caches.
HOST_ROWS, HOST_KEYS = 16, 32
# Of weights of 8 bits, which end at 2^-9 and at 448: powers of two that the largest are moved to, so that fewer of the
# others become zeros, and from which on they are moved. Of equal scores a thread's 32 to 48 weights of a row stay below
# the second together, or skip-kv-maxima would look for a maximum in every tile.
NARROW_WEIGHTS, NARROW_SLACK = 3.0, math.log2(448.0)


def attention_kernel(
    case: Case, rows: int, keys: int, threads: int, options: dict[str, Any], clean: bool = False, least: int = 1,
    bounded: bool = False, looped: bool = True, section: tuple[int, int] | None = None, most: int | None = None,
    stored_keys: bool = False, weights: DType | None = None,
) -> Any:  # fmt: skip
    """The kernel of a case, for tiles of ``rows`` query rows and ``keys`` keys.

    With ``partials``, rows of f32 values, and ``ends``, (m, l) of each, the keys are cut into up to ``splits`` splits:
    of tiles that have several, with ``least`` tiles of keys or more each, partial results stay there
    (:mod:`key_splits`).

    ``clean``: values that no row of a tile sees are zeros, whatever they were: a weight of zero times NaN is NaN; and
    heads are taken as they are. Otherwise they have columns of zeros up to whole steps of the products.
    ``bounded``: so are values past the last that a tile's last row sees, as far as the mask says. ``looped``: a block
    may take several tiles of rows; else there are as many blocks as tiles. ``section``: (first, how many) columns of
    values, and of the output, that this kernel has; without, all of them. ``most``: no sequence has more query tokens.
    ``stored_keys``: 8-bit keys are multiplied as they are, by a query of two terms. ``weights``: what they are rounded
    to, and values converted to; without, the query's type.
    """
    FIRST, values = section or (0, case.value_size)
    M, N, G, D, V = rows, keys, case.group, case.size, values
    if not clean:
        D, V = align_up(D, COLUMN_STEP), align_up(V, COLUMN_STEP)
    narrow = case.query.bits == 8
    dtype = f32 if clean and narrow else case.query  # of what is multiplied
    of_weights = weights or dtype
    slack, above = (SLACK, 0.0) if clean or not narrow else (NARROW_SLACK, NARROW_WEIGHTS)
    modifying, score_arrays = modifies(case), functions.registered(case.score).arrays if case.score else 0
    aligned = stored_keys and joins_heads(case.spec)
    of_row = {"rope": case.rope, "inline_scales": case.inline}
    mask_of(case)  # one that was not given in this process is refused before anything is traced

    @kv.func
    def finish(out, lse, sinks, prior, prior_lse, h, place, exists, m, l, o):
        before = None if prior is None else prior_lse.gather(*place, mask=exists)
        m, l, factor, of_prior = finished(m, l, None if sinks is None else sinks[h], before, kv.math.exp2)
        o = o * factor[:, None]
        if prior is not None:
            d, of_prior = kv.tile_index(V)[None, :], of_prior[:, None]
            there = exists[:, None] & (of_prior != 0.0) & (d < values)
            at = [i[:, None] if isinstance(i, Tile) else i for i in place]
            o = with_prior(o, prior.gather(*at, d + FIRST, mask=there), of_prior)
        out.store_rows(*place, value=case.out(o), mask=exists, stored=values, first_column=FIRST)
        if lse is not None:
            lse.scatter(*place, value=log_sum_exp(m, l), mask=exists)

    @kv.func
    def named(cache, lists, b, first, count):
        """Which keys of a tile are rows of the pool."""
        at = first + kv.tile_index(N)
        return is_in_pool(cache, lists.gather(b, kv.math.min(at, count - 1), mask=at < count))

    @kv.func
    def masked_in_part(x, whole, told, at, num_keys, arrays):
        if ~whole:
            if told:
                x = kv.masked(x, seen_by_positions(case, *at, num_keys))
            else:
                x = kv.masked(x, seen_by(case, *at, num_keys, arrays))
        return x

    @kv.kernel(block=(threads, 1, 1), **options)
    def attention(
        collection: kv.Optional[kv.KVCacheCollection], layer: kv.Optional[kv.i32],
        key_operand: kv.Optional[kv.MHAOperand], value_operand: kv.Optional[kv.MHAOperand],
        query: kv.Buffer[case.query, case.rank], extents: kv.Buffer[i32, 1], kv_offsets: kv.Optional[kv.Buffer[i32, 1]],
        scale: kv.f32, out: kv.Buffer[case.out, case.rank], sinks: kv.Optional[kv.Buffer[f32, 1]],
        lse: kv.Optional[kv.Buffer[f32, case.rank - 1]], slopes: kv.Optional[kv.Buffer[f32, 1]],
        prior: kv.Optional[kv.Buffer[f32, case.rank]], prior_lse: kv.Optional[kv.Buffer[f32, case.rank - 1]],
        tiles: kv.i32, key_map: kv.Optional[kv.TensorMap], value_map: kv.Optional[kv.TensorMap],
        partials: kv.Optional[kv.Buffer[f32, 2]], ends: kv.Optional[kv.Buffer[f32, 2]], splits: kv.Optional[kv.i32],
        queue: kv.Optional[kv.Buffer[kv.i8, 1]], array0=None, array1=None, array2=None, array3=None,
        pages=None, page_counts=None, block_mask=None, lists=None, list_counts=None,
    ):  # fmt: skip
        queries = queries_of(case.padded, extents, query, kv_offsets, lists, list_counts, most)
        number_of_tiles = tiles * case.spec.num_heads
        units = number_of_tiles if splits is None else number_of_tiles * splits
        last_unit, step = (units, kv.grid_dim.x) if looped else (kv.block_id.x + 1, 1)
        for i in range(kv.block_id.x, last_unit, step):
            work = i if queue is None else kv.take_round(queue, i, units)
            split = 0 if splits is None else quotient(work, number_of_tiles)
            tile = work - split * number_of_tiles  # those who read the same keys, at one time
            number, head = tiles - 1 - tile // case.spec.num_heads, tile % case.spec.num_heads  # the longest first
            b, base, row0, count = queries.tile(number, G, M)
            k_rows, v_rows = caches_of(case, collection, layer, key_operand, value_operand)
            start, num_keys = start_of(case, collection or key_operand, value_operand, queries, b)
            num_keys = kv.where(row0 < count, num_keys, 0)
            row = row0 + kv.tile_index(M)
            exists, row = row < count, kv.math.max(kv.math.min(row, count - 1), 0)
            token, h = row // G, head * G + row % G
            q_at = (start + token)[:, None]
            begin = first_key(case, start + row0 // G)
            q = query.load_rows(*queries.at(base, token), h, mask=exists, columns=D, stored=case.size)
            if dtype is not case.query:
                q = dtype(q)
            if scale < 0.0:  # maxima are found before scores are scaled, and masks hide before that too
                q = -q
            positive = kv.math.max(kv.math.abs(scale), 1.0e-30)
            arrays = arrays_read(array0, array1, array2, array3)
            m, l, o = kv.full(M, LOWEST), kv.full(M, 0.0), kv.full((M, V), 0.0)
            unit, factor = kv.f32(LOG2E) if modifying else positive * LOG2E, positive
            if stored_keys:
                q, powers = kv.two_terms(q, head * case.size % CHUNK if aligned else None)
                factor = (powers * positive)[:, None]
                if not modifying:
                    unit = powers * unit
            end = num_keys
            if clean or bounded:
                end = end_key(case, start + (kv.math.min(row0 + M, count) - 1) // G, num_keys)
            first_tile, end_tile = 0, (num_keys + (N - 1)) // N
            several, chosen, listed = False, chosen_pages(collection, pages, page_counts), kv.i32(0)
            if chosen is not None:
                if num_keys > 0:
                    listed = chosen.count(b, head)
                end_tile = listed * (case.spec.page_size // N)
            blocks = None if block_mask is None else KeyTiles(block_mask, N)
            if blocks is not None:
                end_tile = blocks.count(number, head)
            if splits is not None:
                if blocks is None:
                    low, high = key_range(case, N, M, start, row0, count, num_keys)
                else:
                    low, high = kv.i32(0), end_tile
                first_tile, end_tile, several = split_of(least, low, high, splits, split)
            for j in range(first_tile, end_tile):
                of_tile, first, first_at, until = {"rows": N, "dtype": dtype, **of_row}, j * N, j * N, end
                if lists is not None:
                    of_tile = {**of_tile, "lists": lists}
                if chosen is not None:
                    per_page = case.spec.page_size // N
                    first_at = chosen.first_token_of(b, head, j // per_page)
                    there = first_at < num_keys
                    first_at = kv.where(there, first_at + j % per_page * N, first_at)
                    first, until = kv.where(there, first_at, 0), kv.where(there, end, 0)
                if blocks is not None:
                    entry = blocks.entry(number, head, j)
                    first_at, there, whole = blocks.of(entry, num_keys)
                    told = outer_of(case) is not None and (entry & BY_POSITIONS) != 0
                    first, until = kv.where(there, first_at, 0), kv.where(there, end, 0)
                of_keys = {**of_tile, "columns": D}
                if stored_keys:
                    of_keys = {**of_tile, "columns": q.shape[1] // 2, "dtype": case.spec.dtype, "aligned": aligned}
                k = k_rows.tile(b, head, first, until, tail="any", descriptor=key_map, **of_keys)
                of_values = {"columns": V, "first_column": FIRST, "descriptor": value_map}
                of_tile = {**of_tile, "dtype": of_weights}
                v = v_rows.tile(b, head, first, until, begin=begin, **of_values, **of_tile)
                k_at = (first_at + kv.tile_index(N))[None, :]
                x = kv.dot(q, k.T)
                at = b, h[:, None], q_at, k_at
                if modifying:
                    x = modified(case, x * factor, *at, slopes, arrays)
                with kv.trace("mask"):
                    if blocks is None or clean:
                        seen = seen_by(case, *at, num_keys, arrays[score_arrays:])
                        if lists is not None:
                            seen = seen & named(k_rows, lists, b, first, num_keys)[None, :]
                        x = kv.masked(x, seen)
                    else:
                        x = masked_in_part(x, whole, told, at, num_keys, arrays[score_arrays:])
                if clean and (has_first(case) or asks(case)):
                    some = kv.where(seen, kv.full((M, N), 1), 0).max(axis=0)
                    v = kv.where((some > 0)[:, None], v, 0.0)
                with kv.trace("softmax"):
                    m, l, p, alpha = online_softmax(m, l, x, unit, slack, above)
                o = kv.dot(of_weights(p), v, o * alpha[:, None])
            place = (*queries.at(base, token), h)
            if splits is None:
                finish(out, lse, sinks, prior, prior_lse, h, place, exists, m, l, o)
            else:
                if several:
                    slot = partial_row(tile, splits, split, M) + kv.tile_index(M)
                    written = exists & (first_tile < end_tile)
                    partials.store_rows(slot, value=o, mask=written)
                    ends.scatter(slot, 0, value=m, mask=written)
                    ends.scatter(slot, 1, value=l, mask=written)
                elif split == 0:
                    finish(out, lse, sinks, prior, prior_lse, h, place, exists, m, l, o)

    return attention


# --- the host --------------------------------------------------------------------------------------


def host_keys(case: Case) -> int:
    """Keys of a tile on the host: of lists of pages as many as divide a page; 0 where no extent of a tile does."""
    if not case.pages:
        return HOST_KEYS
    page = case.spec.page_size
    fitting = [n for n in range(min(page, HOST_KEYS), 1, -1) if page % n == 0]
    return next(iter(fitting), page if 2 <= page <= 2 * HOST_KEYS else 0)


def host_rows(case: Case, schedule: Mapping[str, Any]) -> int:
    """Query rows of a tile on the host: of the fewest tiles that hold a sequence's rows, the smallest."""
    total = max(1, schedule.get("max_queries", HOST_ROWS) * case.group)
    return max(2, cdiv(total, cdiv(total, HOST_ROWS)))


def fits_host(case: Case) -> bool:
    """Whether the case is one of tiles: their extents are at least 2."""
    return min(case.size, case.value_size) >= 2 and host_keys(case) > 0


def launch_host(case: Case, at: Expansion, op: Any, args: list[Any], lists: list[Any]) -> None:
    """Launch the kernel on the host, where a block is one thread: ``args`` are those of the kernel before ``tiles``."""
    rows, keys = case.blocks or (host_rows(case, at.schedule), host_keys(case))
    tiles = tiles_of(op, at, case.group, rows)
    kernel = attention_kernel(case, rows, keys, 1, {}, clean=True)
    args = [*args, tiles, None, None, None, None, None, None, *arrays_of(op), *lists]
    at.launch(kernel, args, (tiles * case.spec.num_heads, 1, 1), (1, 1, 1), key=(case, rows, keys))
