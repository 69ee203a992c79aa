# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How decode attention divides a batch among blocks, and where partial results lie: for its kernel and its merge.

The tiles of the batch, sequence after sequence, are cut into ranges, one a group of blocks. What a range has of one
sequence is a *piece*, and each piece of a sequence of several leaves a partial result. There are two ways to cut:

- evenly: ranges of equally many tiles. A sequence's pieces are numbered by their ranges, and where it is cut depends on
  the sequences around it.
- in fixed splits: a sequence is cut by its own length alone, whatever else is in the batch, so that its result is the
  same bit for bit. Ranges begin and end at splits. A split is an eighth of the sequence, at least 128 and at most
  ``c.split`` tokens, more only where a sequence would have more splits than the workspace holds (``most``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kvarn as kv

from .attention_common import last_not_above
from .common import at_most
from .decode_schedule import SHORT_SPLITS, Config


@dataclass(frozen=True)
class OneSequence:
    """What stands for the table of tiles where there is one sequence at most."""

    total: Any

    @kv.func
    def __getitem__(self, b: Any) -> Any:
        """Tiles of the sequences before b."""
        return kv.where(b > 0, self.total, 0)


def division(c: Config) -> SimpleNamespace:
    """The functions of the division, for a configuration."""
    TT, LONGEST, SHORTEST = c.tile, c.split_tokens // c.tile, max(min(c.split, 128) // c.tile, 1)

    @kv.func
    def extent(collection, queries, b):
        """(keys, first visible key, position of query 0, queries) of a sequence; nothing when it has no query."""
        start = collection.cache_length(b)
        n = queries.length(b)
        keys = kv.where(n > 0, at_most(start + n, collection.token_capacity()), 0)
        first = start * 0
        if c.mask == "sliding_window":
            first = kv.math.max(start - (c.span - 1), 0)
        if c.chunked:
            first = (start // c.span) * c.span
        return keys, kv.math.min(first, keys), start, n

    @kv.func
    def tile_count(collection, queries, b):
        keys, first, _, _ = extent(collection, queries, b)
        return kv.where(keys > 0, (keys + (TT - 1)) // TT - first // TT, 0)

    @kv.func
    def count_tiles(collection, queries, batch, warps):
        """Tiles of the sequences before each, and of all."""
        if c.max_batch == 1:  # no thread waits for another
            total = kv.i32(0)
            if batch > 0:
                total = tile_count(collection, queries, kv.i32(0))
            return OneSequence(total), total
        prefix, sums = kv.shared(c.max_batch + 1, kv.i32), kv.shared(warps, kv.i32)
        tid, lane, warp = kv.thread_id.x, kv.lane_id(), kv.warp_id()
        if tid == 0:
            prefix[0] = 0
        running = kv.i32(0)
        for base in range(0, batch, (32 * warps)):
            b = base + tid
            n = kv.i32(0)
            if b < batch:
                n = tile_count(collection, queries, b)
            x = n
            for k in kv.static((1, 2, 4, 8, 16)):
                y = kv.shuffle_up(x, k)
                x = kv.where(lane >= k, x + y, x)
            if lane == 31:
                sums[warp] = x
            kv.barrier()
            for w in kv.static(range(warps)):
                s = sums[w]
                x = x + kv.where(warp > w, s, 0)
            if b < batch:
                prefix[b + 1] = running + x
            for w in kv.static(range(warps)):
                running = running + sums[w]
            kv.barrier()
        return prefix, running

    @kv.func
    def quotient(a, b):
        return kv.i32(kv.u32(a) // kv.u32(b))  # what is divided here is not negative: fewer instructions

    @kv.func
    def cut_of(most_ranges, most, total, prefix, batch):
        """How the batch is cut: as many ranges as there are blocks, while each gets some tiles.

        When every sequence has the same tiles, a few ranges fewer may cut none of them, or all alike, and no block
        waits at the end for what its neighbour left. The first ``longer`` ranges have a tile more than ``each``.
        """
        ranges = kv.math.max(kv.math.min(most_ranges, quotient(total, c.min_tiles)), 1)
        if c.max_batch > 1:
            if (total > 0) & (total == prefix[1] * batch):  # without sequences there is nothing to divide by
                alike = quotient(ranges, batch) * batch
                if batch > ranges:
                    few = quotient(batch - 1, ranges) + 1  # whole sequences of a range
                    alike = quotient(batch, few)
                    alike = kv.where(alike * few == batch, alike, 0)
                ranges = kv.where(alike * 16 >= ranges * 15, alike, ranges)
        each = quotient(total, ranges)
        return SimpleNamespace(ranges=ranges, total=total, each=each, longer=total - each * ranges, most=most)

    @kv.func
    def partial_at(partials, which, head, lane):
        """Where a lane's part of a partial result starts."""
        return partials.address(0) + (kv.i64(which * c.work_heads + head) * (c.quads * 32 * 16) + kv.i64(lane * 16))

    @kv.func
    def range_start(cut, r):
        """First tile of a range."""
        return cut.each * r + kv.math.min(r, cut.longer)

    # --- evenly ----------------------------------------------------------------------------------

    @kv.func
    def even_bounds(cut, prefix, batch, r):
        return range_start(cut, r), range_start(cut, r + 1)

    @kv.func
    def even_piece_end(cut, prefix, b, at, end):
        return end

    @kv.func
    def range_with(cut, tile):
        """The range that a tile of the batch belongs to."""
        edge = (cut.each + 1) * cut.longer
        if tile < edge:
            found = quotient(tile, cut.each + 1)
        else:
            found = cut.longer + quotient(tile - edge, kv.math.max(cut.each, 1))
        return found

    @kv.func
    def even_pieces(cut, prefix, b):
        return range_with(cut, prefix[b]), range_with(cut, prefix[b + 1] - 1)

    @kv.func
    def even_piece_of(cut, prefix, b, at, r):
        return r

    @kv.func
    def even_partial_of(cut, partials, prefix, b, head, piece, lane):
        """A range leaves at most two: in slot 0 of the sequence that it starts in, in slot 1 of one that it ends in."""
        slot = kv.where(range_start(cut, piece) >= prefix[b], 0, 1)
        return partial_at(partials, piece * 2 + slot, head, lane)

    # --- in fixed splits -------------------------------------------------------------------------

    @kv.func
    def split_tiles(cut, prefix, b):
        """Tiles of a split of a sequence."""
        tiles = prefix[b + 1] - prefix[b]
        each = kv.math.min(kv.math.max(quotient(tiles + (SHORT_SPLITS - 1), SHORT_SPLITS), SHORTEST), LONGEST)
        return kv.math.max(quotient(tiles + (cut.most - 1), cut.most), each)

    @kv.func
    def nearest_split(cut, prefix, batch, tile):
        found = cut.total
        if tile < cut.total:
            b = last_not_above(prefix, batch, tile)
            each = split_tiles(cut, prefix, b)
            split = quotient(tile - prefix[b] + (each >> 1), each)
            found = kv.math.min(prefix[b] + split * each, prefix[b + 1])
        return found

    @kv.func
    def split_bounds(cut, prefix, batch, r):
        begin, end = range_start(cut, r), range_start(cut, r + 1)
        return nearest_split(cut, prefix, batch, begin), nearest_split(cut, prefix, batch, end)

    @kv.func
    def split_of(cut, prefix, b, at, r):
        return quotient(at - prefix[b], split_tiles(cut, prefix, b))

    @kv.func
    def split_end(cut, prefix, b, at, end):
        each = split_tiles(cut, prefix, b)
        return kv.math.min(prefix[b] + (quotient(at - prefix[b], each) + 1) * each, end)

    @kv.func
    def splits(cut, prefix, b):
        tiles = prefix[b + 1] - prefix[b]
        return tiles * 0, quotient(tiles - 1, split_tiles(cut, prefix, b))

    @kv.func
    def split_partial_of(cut, partials, prefix, b, head, piece, lane):
        return partial_at(partials, b * cut.most + piece, head, lane)

    return SimpleNamespace(
        extent=extent, count_tiles=count_tiles, cut_of=cut_of,
        # (first tile, end) of a range; where a piece ends, given the end of the range's part of the sequence; (first,
        # last) piece of a sequence; the piece that begins at a tile; where a piece's partial result lies
        bounds=split_bounds if c.split else even_bounds, piece_end=split_end if c.split else even_piece_end,
        pieces=splits if c.split else even_pieces, piece_of=split_of if c.split else even_piece_of,
        partial_of=split_partial_of if c.split else even_partial_of,
    )  # fmt: skip
