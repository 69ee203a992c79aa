# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of a bf16 tile in shared memory, replaced by two 8-bit terms: for distribute-kv-tiles.

Panels of both tiles have the same lines of 128 bytes, so a row stays in its line: the lanes that share it all read
before one of them writes.
"""

from __future__ import annotations

from kvarn.dialect.dtypes import bf16, f32, i32
from kvarn.dialect.ops.terms import columns_of_term
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, gpu, ptx
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, vector, where

from . import two_terms
from .barriers import sync_for_products
from .ir import WARP
from .threads import Threads

WARP_ROWS = 16  # rows per warp of a tile of products
TOGETHER = 16  # columns per lane: 16 bytes of each term


def split_rows(
    place: Pointer, layout: SharedLayout, powers: Pointer, threads: Threads, shift: Value | None
) -> list[Value]:
    """Replace a tile by its two terms, each warp for its 16 rows; returns the powers of this thread's two rows.

    ``powers``: shared memory for one f32 per row; ``shift``: columns by which the tile is moved up, a multiple of 8.
    """
    columns = columns_of_term(layout.columns)
    terms = SharedLayout(layout.rows, 2 * columns, 1, layout.swizzle)
    loaded, parts = layout.columns // TOGETHER, columns // TOGETHER
    lanes = 1 << (parts - 1).bit_length()
    own, part = threads.warp * WARP_ROWS + threads.lane // lanes, threads.lane % lanes
    with functional.loop(0, ptx.unknown(WARP_ROWS), WARP // lanes) as first:
        ptx.stay_rolled()
        row = Value((own + first).ir, i32, nonneg=True)
        words = []
        for k in range(2):
            chunk = 2 * part + k - (0 if shift is None else shift >> 3)
            exists = (chunk >= 0) & (chunk < 2 * loaded)
            held = (place + layout.chunk_offset(row, where(exists, chunk, 0))).load(i32, CHUNK // 4)
            words += [where(exists, held[i], 0) for i in range(CHUNK // 4)]
        most = gpu.warp_reduce(two_terms.largest(bf16, words), "max", lanes)
        factor, power = two_terms.powers_of(most)
        both = two_terms.terms_of(two_terms.scaled(words, factor))
        ptx.syncwarp()
        with functional.when(part < parts):
            for number, term in enumerate(both):
                to = terms.chunk_offset(row, number * parts + part)
                (place + to).store(vector(i32, term))
        with functional.when(part == 0):
            (powers + row * f32.itemsize).store(power)
    sync_for_products(threads)
    held = threads.warp * WARP_ROWS + (threads.lane >> 2)
    return [(powers + (held + 8 * u) * f32.itemsize).load(f32) for u in range(2)]
