# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Results of the latent kernel with swapped operands: from the warpgroups' accumulators to rows of the output.

They go through shared memory, in place of the keys: as f32 if two blocks combine theirs, otherwise in the output type.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32

from ..attention.partials import normalizer, weight
from . import stored as latent_stored
from .block_sizes import blocks_of, consumers_of
from .common import CHUNK, NEVER, LatentConfig, lse_of, pack, write_rows, writes_partials

PAD = 16  # padding bytes between rows


def pitch_of(c: LatentConfig) -> int:
    """Bytes from row to row."""
    return c.case.value_size * (4 if blocks_of(c) > 1 else c.part.itemsize) + PAD


@kv.func
def put_columns(c, place, o, inverse, box, warp, lane):
    """Store a box's columns of the result to shared memory: f32 for another block to combine, or the output type."""
    for n in kv.static(range(c.rows // 8)):
        for x in kv.static(range(2)):
            row = place + (8 * n + (lane & 3) * 2 + x) * pitch_of(c)
            upper, lower = o[4 * n + x] * inverse[n][x], o[4 * n + 2 + x] * inverse[n][x]
            if c.stored:
                dim = latent_stored.column_of(box, warp, lane)
                if blocks_of(c) > 1:
                    (row + dim * 4).store(kv.vector(f32, [upper, lower]))
                else:
                    (row + dim * 2).store(pack(c.part, upper, lower))
            else:
                dim = box * 64 + warp * 16 + (lane >> 2)
                (row + dim * 4).store(upper)
                (row + (dim + 8) * 4).store(lower)


@kv.func
def write_own(c, ring, ends, parts, out, place, splits, split, some, thread):
    """Write the block's result; ``some``: whether it has any keys."""
    chunks, threads = c.case.value_size // CHUNK, consumers_of(c)
    count, found = c.rows * chunks, []
    for first in kv.static(range(0, count, threads)):
        row, column = place_of(thread + first, chunks, count)
        found.append((ring + (row * pitch_of(c) + column * c.part.itemsize)).load(c.part, CHUNK))
    for n in kv.static(range(len(found))):
        if thread + n * threads < count:
            row, column = place_of(thread + n * threads, chunks, count)
            vector = kv.where(some, found[n], c.part(kv.vector(f32, CHUNK)))
            write_rows(c, vector, parts, out, place, row, column, splits, split)
    if writes_partials(c, splits):
        if thread < c.rows:
            lse_of(c, parts, kv.grid_dim.x, place[0], splits, split, thread).store((ends + thread * 4).load(kv.f32))


def place_of(i: Any, chunks: int, count: int) -> tuple[Any, Any]:
    """(row, first column) of chunk i of a result; past the end, of the last chunk."""
    i = kv.math.min(i, count - 1)
    return i // chunks, i % chunks * CHUNK


@kv.func
def combine_in_cluster(c, ring, ends, rank, parts, out, place, splits, split, thread):
    """Combine half of the columns of both blocks' results, and write them."""
    half = c.case.value_size // 2
    chunks = half // CHUNK
    for i in range(thread, c.rows * chunks, consumers_of(c)):
        row, column = i // chunks, rank * half + i % chunks * CHUNK
        mine, theirs = (ends + row * 4).load(kv.f32), kv.load_cluster(ends + row * 4, rank ^ 1, f32)
        top = kv.math.max(mine, theirs)
        a, b = weight(mine, top, mine != NEVER), weight(theirs, top, theirs != NEVER)
        total = a + b
        inverse = normalizer(total)
        x, y = [], []
        for q in kv.static(range(2)):
            at = ring + (row * pitch_of(c) + (column + 4 * q) * 4)
            x, y = x + list(at.load(kv.f32, 4)), y + list(kv.load_cluster(at, rank ^ 1, f32, 4))
        both = [kv.where(a == 0.0, 0.0, x[k]) * a + kv.where(b == 0.0, 0.0, y[k]) * b for k in range(CHUNK)]
        vector = c.part(kv.vector(f32, [v * inverse for v in both]))
        write_rows(c, vector, parts, out, place, row, column, splits, split)
        if writes_partials(c, splits):
            if column == 0:
                lse = kv.where(total == 0.0, NEVER, top + kv.math.log2(total))
                lse_of(c, parts, kv.grid_dim.x, place[0], splits, split, row).store(lse)
