# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a warpgroup, for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect.shared_layout import SharedLayout

# Rows and columns of B's tile, whether its rows are B's steps, and whether A is in registers.
PRODUCTS = [
    (64, 64, False, True), (64, 128, False, False), (8, 64, False, True), (128, 128, False, False),
    (64, 64, True, True), (32, 128, True, True), (64, 192, True, False), (128, 64, True, False),
]  # fmt: skip


def product_kernel(dtype: Any, rows: int, columns: int, trans: bool, registers: bool) -> Any:
    """C = A B + 1: A is [64, steps], B's tile [rows, columns], all f32 in memory and ``dtype`` in the product."""
    steps, width = (rows, columns) if trans else (columns, rows)
    size = dtype.itemsize
    tile_b, tile_a = SharedLayout(rows, columns, size, 128), SharedLayout(64, steps, size, 128)

    @kv.func
    def fill(tile, layout, x):
        for i in range(kv.thread_id.x, x.shape[0] * x.shape[1], kv.block_dim.x):
            row, column = i // x.shape[1], i % x.shape[1]
            (tile + layout.offset(row, column)).store(dtype(x[row, column]))

    @kv.kernel(block=128)
    def product(a, b, c):
        lane, warp = kv.lane_id(), kv.warp_id()
        shared_b = kv.shared(rows * columns * 2, kv.u8, alignment=1024).ptr()
        shared_a = kv.shared(64 * steps * 2, kv.u8, alignment=1024).ptr()
        fill(shared_b, tile_b, b)
        if not registers:
            fill(shared_a, tile_a, a)
        kv.fence_proxy_async()
        kv.barrier()
        row, column = warp * 16 + (lane >> 2), (lane & 3) * 2
        of_b = tile_b.row_steps() if trans else tile_b.k_steps()
        if registers:
            left, places = [], of_b
            for k in kv.static(range(steps // 16)):
                words = []
                for w in kv.static(range(4)):
                    at = (row + 8 * (w % 2), k * 16 + column + 8 * (w // 2))
                    pair = [a[at[0], at[1] + i] for i in range(2)]
                    words.append(kv.pack_bf16x2(*pair) if dtype is kv.bf16 else kv.pack_f16x2(*pair))
                left.append(words)
        else:
            left, places = kv.wgmma_descriptor(shared_a), list(zip(tile_a.k_steps(), of_b, strict=True))
        right = kv.wgmma_descriptor(shared_b, leading=rows * 128 if trans else 0)
        # In two halves: the first begins with zeros, the second adds to it.
        half = len(places) // 2
        d = kv.wgmma(width, left[:half] if registers else left, right, places[:half], dtype, trans)
        d = [x + 1.0 for x in d]
        d = kv.wgmma(d, left[half:] if registers else left, right, places[half:], dtype, trans)
        for i in kv.static(range(len(d))):
            c[row + 8 * (i // 2 % 2), i // 4 * 8 + column + i % 2] = d[i]

    return product


def check_product(run: Callable[..., Any], dtype: Any, rows: int, columns: int, trans: bool, registers: bool) -> None:
    """Small integers, whose products and sums are exact; ``run(kernel, a, b, c)`` gives c."""
    steps, width = (rows, columns) if trans else (columns, rows)
    rng = np.random.default_rng(rows + columns)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((64, steps), (rows, columns)))
    c = run(product_kernel(dtype, rows, columns, trans, registers), a, b, np.zeros((64, width), np.float32))
    np.testing.assert_array_equal(c, a @ (b if trans else b.T) + 1)


def started_kernel(dtype: Any, columns: int) -> Any:
    """Two products under way, of A transposed from shared memory: C[i] = A[i]^T B^T, A [2, 64, 64], B [columns, 64]."""
    tile_b, tile_a = SharedLayout(columns, 64, 2, 128), SharedLayout(64, 64, 2, 128)
    steps = list(zip(tile_a.row_steps(), tile_b.k_steps(), strict=True))

    @kv.kernel(block=128)
    def started(a, b, c):
        lane, warp = kv.lane_id(), kv.warp_id()
        shared_b = kv.shared(tile_b.bytes, kv.u8, alignment=1024).ptr()
        shared_a = kv.shared(2 * tile_a.bytes, kv.u8, alignment=1024).ptr()
        for i in range(kv.thread_id.x, 128 * 64, kv.block_dim.x):
            row, column = i // 64, i % 64
            place = shared_a + (row // 64 * tile_a.bytes + tile_a.offset(row % 64, column))
            place.store(dtype(a[row, column]))
            if row < columns:
                (shared_b + tile_b.offset(row, column)).store(dtype(b[row, column]))
        kv.fence_proxy_async()
        kv.barrier()
        right = kv.wgmma_descriptor(shared_b)
        d = [
            kv.wgmma_start(columns, kv.wgmma_descriptor(shared_a + k * tile_a.bytes), right, steps, dtype, trans_a=True)
            for k in range(2)
        ]
        row, column = warp * 16 + (lane >> 2), (lane & 3) * 2
        d[0], d[1] = kv.wgmma_wait(1, d[0], d[1])
        for i in kv.static(range(columns // 2)):
            c[row + 8 * (i // 2 % 2), i // 4 * 8 + column + i % 2] = d[0][i]
        last = kv.wgmma_wait(0, d[1])[0]
        for i in kv.static(range(columns // 2)):
            c[64 + row + 8 * (i // 2 % 2), i // 4 * 8 + column + i % 2] = last[i]

    return started


def check_started(run: Callable[..., Any], dtype: Any, columns: int) -> None:
    """As :func:`check_product`."""
    rng = np.random.default_rng(columns)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((128, 64), (columns, 64)))
    c = run(started_kernel(dtype, columns), a, b, np.zeros((128, columns), np.float32))
    np.testing.assert_array_equal(c, np.concatenate([a[:64].T @ b.T, a[64:].T @ b.T]))
