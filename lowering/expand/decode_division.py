# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How decode attention divides a batch among ranges, and where partial results lie: for its kernel and its merge."""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv

from .decode_schedule import Config


def division(c: Config) -> SimpleNamespace:
    """The functions of the division, for a configuration."""
    H, TT = c.heads, c.tile

    @kv.func
    def extent(collection, row_offsets, b):
        """(keys, first visible key, position of query 0, queries) of a sequence; nothing when it has no query."""
        start = collection.cache_length(b)
        n = row_offsets[b + 1] - row_offsets[b]
        keys = kv.where(n > 0, start + n, 0)
        first = start * 0
        if c.mask == "sliding_window":
            first = kv.math.max(start - (c.span - 1), 0)
        if c.chunked:
            first = (start // c.span) * c.span
        return keys, kv.math.min(first, keys), start, n

    @kv.func
    def tile_count(collection, row_offsets, b):
        keys, first, _, _ = extent(collection, row_offsets, b)
        return kv.where(keys > 0, (keys + (TT - 1)) // TT - first // TT, 0)

    @kv.func
    def ranges_of(most, total):
        """Ranges that the batch is cut into: as many as there are blocks, while each gets some tiles."""
        return kv.math.max(kv.math.min(most, total // c.min_tiles), 1)

    @kv.func
    def range_start(r, total, ranges):
        """First tile of a range: the first ``total % ranges`` ranges have one tile more than the others."""
        return (total // ranges) * r + kv.math.min(r, total % ranges)

    @kv.func
    def range_with(tile, total, ranges):
        """The range that a tile of the batch belongs to."""
        each, longer = total // ranges, total % ranges
        edge = (each + 1) * longer
        return kv.where(tile < edge, tile // (each + 1), longer + (tile - edge) // kv.math.max(each, 1))

    @kv.func
    def count_tiles(collection, row_offsets, batch, prefix, sums, warps):
        """prefix[b] = tiles of the sequences before b; returns the total."""
        tid, lane, warp = kv.thread_id.x, kv.lane_id(), kv.warp_id()
        if tid == 0:
            prefix[0] = 0
        running = kv.i32(0)
        for base in range(0, batch, (32 * warps)):
            b = base + tid
            n = kv.i32(0)
            if b < batch:
                n = tile_count(collection, row_offsets, b)
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
        return running

    @kv.func
    def piece_of(partials, which, head, lane):
        """Where a lane's part of a partial result starts."""
        return partials.address(0) + (kv.i64(which * H + head) * (c.quads * 32 * 16) + kv.i64(lane * 16))

    @kv.func
    def partial_of(partials, prefix, b, head, r, total, ranges, lane):
        """Where a range left its part of a sequence: in slot 0 when the range starts in the sequence, else in 1."""
        begins = range_start(r, total, ranges)
        return piece_of(partials, r * 2 + kv.where(begins >= prefix[b], 0, 1), head, lane)

    return SimpleNamespace(
        extent=extent, ranges_of=ranges_of, range_start=range_start, range_with=range_with, count_tiles=count_tiles,
        piece_of=piece_of, partial_of=partial_of,
    )  # fmt: skip
