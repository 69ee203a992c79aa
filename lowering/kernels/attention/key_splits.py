# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Key splits of attention over tiles: how the keys of a tile of query rows are split, and the combine kernel.

Split s of a tile of query rows has the tiles of keys from ``first + s * each`` up; with a block mask, the entries at
those positions of its list. The number of splits follows from the keys that the tile's own rows attend to (or from the
list) and from the schedule's bound. If the schedule gives the bound, instead of the shapes of a launch, a sequence's
result is therefore the same, bit for bit, in every batch.

A split stores its unnormalised output o in f32, its maximum m in powers of two and its sum of weights l. The combine
kernel adds the splits in order, one warp per row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import cdiv

from .arguments import AttentionArguments
from .case import Case
from .key_tiles import KeyTiles
from .partials import LOWEST, finished, log_sum_exp, weight, with_prior
from .queries import TilesOfMany, tiles_of_many
from .specialisation import TileArguments, TileKernel

MOST_SPLITS = 32  # one lane of a warp has the m and l of each
WARPS = 4
COMBINING = 8  # blocks per multiprocessor where each combines several rows
WIDTH = 4  # elements of a row per load of a lane
TOGETHER = 4  # splits whose loads a warp has in flight


@kv.func
def key_range(case: Case, keys: int, rows: int, start: Any, row0: Any, count: Any, num_keys: Any) -> tuple[Any, Any]:
    """The range of key tiles for rows [row0, row0 + rows) of a sequence's ``count`` rows, as (first, end)."""
    end = case.mask.end(start + (kv.math.min(row0 + rows, count) - 1) // case.group, num_keys)
    low = kv.i32(case.mask.first(start + row0 // case.group)) // keys
    return low, kv.math.max((end + (keys - 1)) // keys, low)


@kv.func
def quotient(a: Any, b: Any) -> Any:
    """``a // b`` of non-negative numbers, in fewer instructions than signed division."""
    return kv.i32(kv.u32(a) // kv.u32(b))


@kv.func
def split_tiles(least: int, low: Any, high: Any, max_splits: Any) -> Any:
    """Key tiles per split of [low, high): at least ``least``, or all of them."""
    tiles = high - low
    return kv.where(tiles < 2 * least, tiles, kv.math.max(quotient(tiles + (max_splits - 1), max_splits), least))


@kv.func
def split_of(least: int, low: Any, high: Any, max_splits: Any, split: Any) -> tuple[Any, Any, Any]:
    """(first tile, end, whether there are other splits) of a split of the key tiles [low, high)."""
    each = split_tiles(least, low, high, max_splits)
    first = kv.math.min(low + split * each, high)
    return first, kv.math.min(first + each, high), high - low > each


@kv.func
def splits_of(t: TileArguments, many: TilesOfMany, heads: int) -> Any:
    """The most splits per tile in a divided batch."""
    if t.most_split_tiles is None:
        return t.splits
    most = kv.where(many.alone, t.splits_alone, t.splits)
    return kv.math.clamp(quotient(t.most_split_tiles * t.splits, kv.math.max(many.count * heads, 1)), 1, most)


@kv.func
def partial_row(tile: Any, max_splits: Any, split: Any, rows: int) -> Any:
    """The first row of the partial result of a split of a tile."""
    return (tile * max_splits + split) * rows


@kv.func
def weights_of(ends, row, pitch, num_splits, lane):
    """(m, l) of a row, and the weight of the lane's split: 2^(its m - the row's m); ``pitch``: rows between splits."""
    mine, total = kv.f32(LOWEST), kv.f32(0.0)
    if lane < num_splits:
        mine, total = ends[row + lane * pitch, 0], ends[row + lane * pitch, 1]
    m = kv.warp_reduce(mine, "max")
    mine = weight(mine, m)
    return m, kv.warp_reduce(total * mine, "add"), mine


def combine_kernel(s: TileKernel, programmatic: bool = True) -> Any:
    """The kernel that combines the partial results of a tile kernel.

    Each warp has one row. Rows of tiles with a single split are already in the output. ``programmatic``: the kernel may
    be launched before the previous one ends (PDL).
    """
    case, rows, keys, least, most = s.case, s.rows, s.keys, s.least, s.most
    FIRST, V = s.first_column, s.values
    vectors_per_lane = cdiv(V, 32 * WIDTH)

    @kv.func
    def combine_row(a, t, queries, tile, r, place, lane):
        """Combine row r of a tile; ``place``: the tile's number and KV head, and as :func:`case.tile_place`."""
        (number, head, b, base, row0, count), splits = place, t.splits
        if row0 + r < count:
            start, num_keys = a.start(case, queries, b)
            if a.block_mask is None:
                low, high = key_range(case, keys, rows, start, row0, count, num_keys)
            else:
                low, high = kv.i32(0), KeyTiles(a.block_mask, keys).count(number, head)
            each = split_tiles(least, low, high, splits)
            if high - low > each:
                num_splits = quotient(high - low + (each - 1), each)
                row, token = partial_row(tile, splits, 0, rows) + r, (row0 + r) // case.group
                h = head * case.group + (row0 + r) % case.group
                m, l, mine = weights_of(t.ends, row, rows, num_splits, lane)
                place = (*queries.at(base, token), h)
                before = None if a.prior is None else a.prior_lse[place]
                m, l, factor, of_prior = finished(m, l, None if a.sinks is None else a.sinks[h], before)
                for n in kv.static(range(vectors_per_lane)):
                    d = kv.math.min((n * 32 + lane) * WIDTH, V - WIDTH)  # the last lanes repeat the last elements
                    o = kv.vector(f32, WIDTH)
                    for s in range(0, num_splits, TOGETHER):
                        held = [
                            t.partials.load(row + kv.math.min(s + j, num_splits - 1) * rows, d, width=WIDTH)
                            for j in range(TOGETHER)
                        ]
                        for j in kv.static(range(TOGETHER)):
                            o = o + held[j] * kv.where(s + j < num_splits, kv.shuffle_idx(mine, (s + j) & 31), 0.0)
                    o = o * factor
                    if a.prior is not None:
                        earlier = a.prior.load(*place, FIRST + d, width=WIDTH, alignment=case.alignment_of(f32))
                        o = with_prior(o, earlier, of_prior)
                    a.out.store(*place, FIRST + d, value=case.out(o), alignment=case.alignment_of(case.out))
                if a.lse is not None:
                    if lane == 0:
                        a.lse[place] = log_sum_exp(m, l)

    @kv.kernel(block=(32 * WARPS, 1, 1))
    def attention_tiles_combine(a: AttentionArguments, t: TileArguments):
        lane, warp = kv.lane_id(), kv.warp_id()
        queries, tiles = a.queries(case, most), t.tiles
        item = kv.block_id.x * WARPS + warp
        if s.sequences == 0:
            tile, r = item // rows, item % rows
            number, head = tiles - 1 - tile // case.spec.num_heads, tile % case.spec.num_heads
            b, base, row0, count = queries.tile(number, case.group, rows)
            if programmatic:
                kv.griddepcontrol_wait()  # partial results are visible from here on; the lengths are older
            combine_row(a, t, queries, tile, r, (number, head, b, base, row0, count), lane)
        else:
            many = tiles_of_many(queries, s.sequences, case.group, rows, WARPS)
            t = replace(t, splits=splits_of(t, many, case.spec.num_heads))
            items = kv.where(t.splits > 1, many.count * (case.spec.num_heads * rows), 0)
            if programmatic:  # blocks without rows end at once, but for one, so that this kernel ends after the others
                if (kv.block_id.x * WARPS < items) | (kv.block_id.x == 0):
                    kv.griddepcontrol_wait()
            for i in range(item, items, kv.grid_dim.x * WARPS):
                tile, r = i // rows, i % rows
                b, base, row0, count = many.tile(many.count - 1 - tile // case.spec.num_heads)
                number, head = many.number_in_batch(b, row0), tile % case.spec.num_heads
                combine_row(a, t, queries, tile, r, (number, head, b, base, row0, count), lane)

    return attention_tiles_combine
