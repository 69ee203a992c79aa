# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The split-KV scheduler of decode attention and the addresses of partial results, for both of its kernels.

The tiles of the batch, sequence after sequence, are divided into work units, one per group of blocks. A work unit's
part of one sequence is a *split*. A sequence with several splits gets one partial result per split. There are two ways:

- Even division: all work units have equally many tiles. A sequence's splits are numbered by their units, and their
  bounds depend on the other sequences of the batch.
- Fixed splits: a sequence's splits depend on its own length alone, so that its result is the same, bit for bit, in
every
  batch. Work units start and end at split bounds. A sequence has up to ``c.most_splits`` splits, enough for even units
  and for one sequence to fill the device; half as many if they would be shorter than ``c.split``, and fewer if they
  would have less than two tiles. :mod:`decode.fixed_splits` adds their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.lowering.kernels.common import at_most
from kvarn.lowering.kernels.scans import sums_before
from kvarn.lowering.schedules.decode import DecodeConfig

from ..chosen_pages import chosen_pages
from ..key_splits import quotient
from ..key_tiles import KeyTiles, TilesOfSequences


@dataclass(frozen=True)
class Own:
    """A warp's part of every sequence: some query rows, and columns, of a KV head.

    Attributes
    ----------
    part, head, row0, column0 : i32
        The number of the part, the KV head, and the first query row and column.
    lane : i32
    sums : pointer
        Shared memory: the lane's part of the warp's sums of fixed splits.
    """

    part: Any
    head: Any
    row0: Any
    column0: Any
    lane: Any
    sums: Any = None


@dataclass(frozen=True)
class OneSequence:
    """Replaces the table of tile counts for at most one sequence."""

    total: Any

    @kv.func
    def __getitem__(self, b: Any) -> Any:
        """Tiles of the sequences before b."""
        return kv.where(b > 0, self.total, 0)


def lists_of(c: DecodeConfig, a: Any, queries: Any) -> Any:
    """The lists of pages or key tiles in a kernel's arguments; None where every key is visited."""
    if c.case.blocks is None:
        return chosen_pages(a.collection, a.pages, a.page_counts)
    rows, keys = c.case.blocks
    tiles = KeyTiles(a.block_mask, keys)
    return TilesOfSequences(tiles, queries, c.case.group, rows, a.collection.token_capacity())


def split_kv(c: DecodeConfig) -> SimpleNamespace:
    """The functions of the scheduler, for a configuration."""
    TT = c.tile
    # Whether sequences of equal length are split alike; a warp that adds sums of fixed splits lacks the registers.
    ALIKE = c.max_batch > 1 and not (c.split and not c.combine)

    @kv.func
    def place_of(part):
        """(KV head, first query row, first column of the head) of a warp's part of a token."""
        column0 = part % c.slices * c.size if c.slices > 1 else 0
        part = part // c.slices if c.slices > 1 else part
        return part // c.parts, part % c.parts * c.warp_rows, column0

    @kv.func
    def extent(collection, queries, b):
        """(keys, first visible key, position of query 0, queries) of a sequence; zeros without queries."""
        start = collection.cache_length(b)
        n = queries.length(b)
        keys = kv.where(n > 0, at_most(start + queries.new_keys(b), collection.token_capacity()), 0)
        return keys, kv.math.min(c.case.mask.first(start), keys), start, n

    @kv.func
    def first_tile(first):
        """The sequence's first tile; with lists, whose tiles are consecutive, tile 0."""
        return 0 if c.case.by_lists else first // TT

    @kv.func
    def tile_count(collection, queries, chosen, b):
        keys, first, _, n = extent(collection, queries, b)
        tiles = (keys + (TT - 1)) // TT - first // TT
        if chosen is not None:  # every KV head of a sequence has as many tiles as the longest of its lists
            tiles = (chosen.longest(chosen.of(b), c.heads) * chosen.unit + (TT - 1)) // TT
        elif queries.kv_offsets is None:
            return kv.where(keys > 0, tiles, 0)
        # Queries without visible keys get one tile, fully masked, so that their rows are written.
        return kv.where(n > 0, kv.math.max(tiles, 1), 0)

    @kv.func
    def count_tiles(collection, queries, chosen, batch, warps):
        """Tiles of the sequences before each sequence, and of all sequences."""
        if c.max_batch == 1:  # no synchronisation is needed
            total = kv.i32(0)
            if batch > 0:
                total = tile_count(collection, queries, chosen, kv.i32(0))
            return OneSequence(total), total
        return sums_before(partial(tile_count, collection, queries, chosen), batch, c.max_batch, warps)

    @kv.func
    def work_units(max_units, total, tile_indptr, batch):
        """The work units of the batch: one per group of blocks, if each gets enough tiles.

        If all sequences have equally many tiles, using slightly fewer units may split no sequence, or all alike, so
        that no block waits at the end for its neighbour's partial result. In a ``period`` of tiles, which is one of
        these sequences or groups of sequences, or the whole batch, the first ``longer`` units have ``each`` + 1 tiles.
        """
        count = kv.math.max(kv.math.min(max_units, quotient(total, c.min_tiles)), 1)
        if c.max_batch > 1:
            if (total > 0) & (total == tile_indptr[1] * batch):  # an empty batch must not divide by zero
                alike = quotient(count, batch) * batch
                if batch > count:
                    few = quotient(batch - 1, count) + 1  # whole sequences per unit
                    alike = quotient(batch, few)
                    alike = kv.where(alike * few == batch, alike, 0)
                count = kv.where(alike * 16 >= count * 15, alike, count)
        period, per = total, count
        if ALIKE:
            if (batch > 0) & (total == tile_indptr[1] * batch):
                if quotient(count, batch) * batch == count:
                    period, per = tile_indptr[1], quotient(count, batch)
        each = quotient(period, per)
        longer = period - each * per
        return SimpleNamespace(count=count, total=total, period=period, per=per, each=each, longer=longer)

    @kv.func
    def units_of_one(max_units, total, tile_indptr, batch):
        """The work units of one sequence in fixed splits: one split each, or several if there are more splits."""
        each = tiles_of_split(tile_indptr, 0)
        if max_units < c.most_splits:
            each = each * kv.math.max(quotient(split_count(tile_indptr, 0, each) + (max_units - 1), max_units), 1)
        return SimpleNamespace(count=max_units, total=total, period=total, per=max_units, each=each, longer=kv.i32(0))

    @kv.func
    def partial_at(partials, which, head, lane):
        """The address of a lane's part of a partial result."""
        return partials.address(0) + (kv.i64(which * c.row_groups + head) * (c.quads * 32 * 16) + kv.i64(lane * 16))

    @kv.func
    def unit_start(units, r):
        """First tile of a work unit."""
        before = kv.i32(0)
        if ALIKE:
            periods = quotient(r, units.per)
            before, r = periods * units.period, r - periods * units.per
        return before + units.each * r + kv.math.min(r, units.longer)

    @kv.func
    def sequence_from(tile_indptr, b, batch_tile):
        """The sequence of a tile of the batch, searched from b up; sequences without tiles are skipped."""
        b = b + 1
        while tile_indptr[b + 1] <= batch_tile:
            b = b + 1
        return b

    # --- even division ---------------------------------------------------------------------------

    @kv.func
    def even_bounds(units, r):
        """(first tile, end) of a work unit."""
        return unit_start(units, r), unit_start(units, r + 1)

    @kv.func
    def unit_with(units, tile):
        """The work unit of a tile of the batch."""
        before = kv.i32(0)
        if ALIKE:
            periods = quotient(tile, kv.math.max(units.period, 1))
            before, tile = periods * units.per, tile - periods * units.period
        edge = (units.each + 1) * units.longer
        if tile < edge:
            found = quotient(tile, units.each + 1)
        else:
            found = units.longer + quotient(tile - edge, kv.math.max(units.each, 1))
        return before + found

    @kv.func
    def units_of(units, tile_indptr, b):
        return unit_with(units, tile_indptr[b]), unit_with(units, tile_indptr[b + 1] - 1)

    @kv.func
    def even_partial_of(units, partials, tile_indptr, b, head, split, lane):
        """A unit stores at most two results: slot 0 for the sequence it starts in, slot 1 for one that it ends in."""
        slot = kv.where(unit_start(units, split) >= tile_indptr[b], 0, 1)
        return partial_at(partials, split * 2 + slot, head, lane)

    # --- fixed splits ----------------------------------------------------------------------------

    @kv.func
    def tiles_of_split(tile_indptr, b):
        """Tiles per split of a sequence; the last split may have fewer."""
        tiles = tile_indptr[b + 1] - tile_indptr[b]
        half = kv.math.max(quotient(tiles + (c.most_splits // 2 - 1), c.most_splits // 2), 2)
        return kv.math.max(
            quotient(tiles + (c.most_splits - 1), c.most_splits), kv.math.min(half, kv.i32(c.split_tiles))
        )

    @kv.func
    def split_count(tile_indptr, b, each):
        return quotient(tile_indptr[b + 1] - tile_indptr[b] + (each - 1), each)

    @kv.func
    def nearest_split(tile_indptr, b, tile, each):
        """The tile of the batch at which a split of the sequence starts, or the sequence ends, nearest to a tile."""
        split = quotient(tile - tile_indptr[b] + (each >> 1), each)
        return kv.math.min(tile_indptr[b] + split * each, tile_indptr[b + 1])

    @kv.func
    def sequences_with(tile_indptr, batch, tiles):
        """The sequences of two tiles of the batch; both searches run at the same time."""
        low, high = [kv.i32(0), kv.i32(0)], [batch, batch]
        while (high[0] - low[0] > 1) | (high[1] - low[1] > 1):
            for i in kv.static(range(2)):
                middle = (low[i] + high[i]) >> 1
                above = tile_indptr[middle] > tiles[i]
                low[i], high[i] = kv.where(above, low[i], middle), kv.where(above, middle, high[i])
        return low

    @kv.func
    def fixed_bounds(units, tile_indptr, batch, r):
        """(first tile, end, sequence of the first tile) of a work unit, rounded to split bounds."""
        if c.max_batch == 1:
            begin, end = [kv.math.min(unit_start(units, x), units.total) for x in (r, r + 1)]
            return begin, end, kv.i32(0)
        tiles, found = [unit_start(units, x) for x in (r, r + 1)], []
        sequences = sequences_with(tile_indptr, batch, [tiles[0], kv.math.min(tiles[1], units.total - 1)])
        for tile, b in kv.static(zip(tiles, sequences, strict=True)):
            nearest = nearest_split(tile_indptr, b, tile, tiles_of_split(tile_indptr, b))
            found.append(kv.where(tile < units.total, nearest, units.total))
        b = sequences[0]
        if (tile_indptr[b + 1] <= found[0]) & (found[0] < units.total):  # the nearest split bound is the sequence's end
            b = sequence_from(tile_indptr, b, found[0])
        return found[0], found[1], b

    @kv.func
    def split_of(tile_indptr, b, batch_tile, each):
        """The split that starts with a tile, or the number of splits if the sequence ends there."""
        return quotient(batch_tile - tile_indptr[b] + (each - 1), each)

    @kv.func
    def first_unit_of(units, tile_indptr, b):
        return unit_with(units, tile_indptr[b])

    @kv.func
    def split_at(units, tile_indptr, b, r, each, count):
        """The first split of a work unit in a sequence; 0 or the number of splits if it starts in another one."""
        tile = kv.math.max(unit_start(units, r) - tile_indptr[b], 0)
        return kv.where(tile < tile_indptr[b + 1] - tile_indptr[b], quotient(tile + (each >> 1), each), count)

    @kv.func
    def fixed_partial_of(partials, r, split, head, lane):
        """A unit stores at most two results: slot 0 for the sequence it starts in, slot 1 for one that it ends in.

        ``split`` is the unit's first split of the sequence.
        """
        return partial_at(partials, r * 2 + kv.i32(split == 0), head, lane)

    @kv.func
    def slot_of(partials, slot, head, lane):
        """The address of a lane's part of a split's partial result, where every split is stored."""
        return partial_at(partials, slot, head, lane)

    return SimpleNamespace(
        place_of=place_of, extent=extent, sequence_from=sequence_from, first_tile=first_tile, count_tiles=count_tiles,
        work_units=units_of_one if c.split and c.max_batch == 1 else work_units, even_bounds=even_bounds,
        # (first, last) unit with tiles of a sequence; the address of a partial result
        units_of=units_of, partial_of=even_partial_of,
        # For fixed splits:
        fixed_bounds=fixed_bounds, tiles_of_split=tiles_of_split, split_count=split_count, split_of=split_of,
        split_at=split_at, slot_of=slot_of, first_unit_of=first_unit_of, fixed_partial_of=fixed_partial_of,
    )  # fmt: skip
