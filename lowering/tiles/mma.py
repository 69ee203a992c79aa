# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of tiles by mma.sync, for targets without wgmma and for f32; for distribute-kv-tiles.

Each warp multiplies its own 16 rows. Fragments of B are loaded from shared memory by ldmatrix. A is in registers (a
16-bit accumulator has the register layout of operand A) or loaded by ldmatrix too.

f32 is multiplied as 3xTF32: each element is split into two tf32 terms, high and low, and high*high, high*low and
low*high are summed, which is accurate to f32 rounding but for what the instruction truncates in its sums. A k-step has
8 columns, in the order in which the registers of an accumulator are operand A. Fragments come by ordinary loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlir import ir
from mlir.dialects import arith, vector

from kvarn.dialect.dtypes import by_mlir, f32, i32
from kvarn.dialect.ops.tile import COLUMN_STEP as STEP  # K per instruction, and N per ldmatrix
from kvarn.dialect.register_layout import ROW
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dialect.tile_layout import WARP_ROWS
from kvarn.dsl import ptx
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value, bitcast, constant

from .products import Product, words
from .threads import Threads, elements, from_elements, scalar

ROWS = WARP_ROWS  # of a fragment of A
COLUMNS = 8  # of a fragment of B
STEP_F32 = 8  # K per tf32 instruction
REPRESENTABLE = -0x2000  # mask of the f32 bits that tf32 keeps
TOGETHER_F32 = 4  # fragments of B whose sums are computed in parallel


def fragments(place: Pointer, layout: SharedLayout, threads: Threads) -> list[list[Value]]:
    """A warp's fragments of operand A from shared memory, four words per k-step."""
    first = layout.steps(place, threads.warp * ROWS + (threads.lane & 15), threads.lane >> 4)
    repeated = range(0, layout.rows, threads.warps * ROWS)
    return [ptx.ldmatrix(layout.step(first, k, row)) for row in repeated for k in range(layout.columns // STEP)]


def loaded(place: Pointer, layout: SharedLayout, threads: Threads, element: ir.Type) -> ir.Value:
    """A warp's rows of a tile from shared memory, as the elements of an accumulator."""
    found = from_elements([w.ir for step in fragments(place, layout, threads) for w in step])
    return vector.bitcast(ir.VectorType.get([2 * ir.VectorType(found.type).shape[0]], element), found)


def multiply(product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None, threads: Threads) -> ir.Value:
    """Multiply: ``a`` is a vector or a pointer to a tile, ``b`` a pointer; returns the thread's accumulator."""
    tile, threads = Pointer(b, SHARED), replace(threads, across=product.across)
    dtype = i32 if product.element == "i8" else f32
    if c is None:
        sums = [constant(0, dtype)] * product.accumulator.registers
    else:
        sums = [Value(x, dtype) for x in elements(c)]
    take = _of_f32 if product.element == "f32" else _of_16_bits
    take(product, a, tile, sums, threads)
    return from_elements([x.ir for x in sums])


def _of_16_bits(product: Product, a: ir.Value, tile: Pointer, sums: list[Value], threads: Threads) -> None:
    """Add a product of 16-bit operands to ``sums``, the thread's accumulator; of i8 a k-step has twice the elements."""
    dtype, lane, layout, across = by_mlir(product.element), threads.lane, product.b, threads.across
    stacks, blocks = product.accumulator.repetitions[ROW], product.n // (COLUMNS * across)  # of this warp
    left = _left(product, a, threads)
    if product.transpose_b:  # one ldmatrix loads two fragments of 8 columns, with both halves of k
        row = (lane & 7) + (lane >> 4) * 8
        first = layout.steps(tile, row if across == 1 else row + threads.column_warp * STEP, (lane >> 3) & 1)
    else:
        high = lane >> 4
        first = layout.steps(tile, lane & 15, high if across == 1 else high + threads.column_warp * 2, across)
    for k in range(product.k * dtype.bits // (STEP * 16)):
        own = [left(k, r) for r in range(stacks)]
        for n, block in enumerate(range(0, blocks, 2)):
            several = min(2, blocks - block)
            if product.transpose_b:
                w = ptx.ldmatrix(layout.step(first, k, n * STEP * across), 2 * several)
            else:
                w = ptx.ldmatrix(layout.step(first, n, k * STEP, across), 2 * several, trans=True)
            for r in range(stacks):
                for half in range(several):
                    at = 4 * (r * blocks + block + half)
                    right = w[2 * half : 2 * half + 2]
                    if dtype.bits == 8:
                        sums[at : at + 4] = ptx.mma_m16n8k32_i8(own[r], right, sums[at : at + 4])
                    else:
                        sums[at : at + 4] = ptx.mma_m16n8k16(own[r], right, sums[at : at + 4], dtype)


def _left(product: Product, a: ir.Value, threads: Threads) -> Callable[[int, int], list[Value]]:
    """A function of (k-step, repetition of the warps along rows) that gives the fragment of A."""
    lane, layout = threads.lane, product.a
    if layout is None:
        flat = [scalar(w) for w in words(a)]
        steps = product.k // STEP
        return lambda k, r: flat[4 * (r * steps + k) :][:4]
    place, down = Pointer(a, SHARED), threads.stack * ROWS
    if not product.transpose_a:
        row = threads.row_warp * ROWS + ptx.unknown(lane & 15)  # else LLVM hoists addresses out of the loop
        rows = layout.steps(place, row, lane >> 4)
        return lambda k, r: ptx.ldmatrix(layout.step(rows, k, r * down))
    row, own = ptx.unknown((lane & 7) + (lane >> 4) * 8), threads.row_warp * 2 + ((lane >> 3) & 1)
    columns = layout.steps(place, row, own, threads.stack)
    return lambda k, r: ptx.ldmatrix(layout.step(columns, r, k * STEP, threads.stack), trans=True)


def _of_f32(product: Product, a: ir.Value, tile: Pointer, sums: list[Value], threads: Threads) -> None:
    """Add a product of f32 operands to ``sums`` by 3xTF32; lane 4 g + c has rows g, g + 8 of A and column g of B."""
    g, c, layout = threads.lane >> 2, threads.lane & 3, product.b
    held = [Value(x, f32) for x in elements(a)] if product.a is None else []
    # Pointers to the elements of a lane in the first rows; other rows are at constant offsets.
    rows: list[Pointer] = []
    down: list[list[Pointer]] = []  # of a transposed A: by the parity of k and the half of the rows
    if product.a is not None and product.transpose_a:
        column = threads.warp * ROWS + ptx.unknown(g)
        down = [
            [Pointer(a, SHARED) + product.a.offset(2 * c + i, column + 8 * half) for half in range(2)] for i in (0, 1)
        ]
    elif product.a is not None:
        row = threads.warp * ROWS + ptx.unknown(g)
        rows = _along_a_row(product.a, Pointer(a, SHARED), row, 2 * c)
    if product.transpose_b:
        of_b = [_along_a_row(layout, tile, g, 2 * c)]
    else:
        of_b = [_along_a_row(layout, tile, 2 * c + i, g) for i in range(2)]

    def left(k: int) -> tuple[list[Value], list[Value]]:
        if product.a is None:  # registers are (g, 2 c), (g, 2 c + 1) and those of row g + 8
            return _parts([held[4 * k + i] for i in (0, 2, 1, 3)])
        if down:
            further = STEP_F32 * k * product.a.pitch
            return _parts([(place + further).load(f32) for of_parity in down for place in of_parity])
        low, high = (_step(product.a, rows, k, first).load(f32, 2) for first in (0, 8))
        return _parts([low[0], high[0], low[1], high[1]])

    def right(k: int, n: int) -> tuple[list[Value], list[Value]]:
        if product.transpose_b:
            pair = _step(layout, of_b[0], k, 8 * n).load(f32, 2)
            return _parts([pair[0], pair[1]])
        return _parts([_step(layout, row, n, STEP_F32 * k).load(f32) for row in of_b])

    # The instruction truncates its sums: sums over many tiles are added by ordinary additions.
    steps, tiles = range(product.k // STEP_F32), product.n // 8
    together = TOGETHER_F32 if product.a is None else tiles
    parts = [left(k) for k in steps] if product.a is None else []
    for first in range(0, tiles, together):
        several = range(first, min(first + together, tiles))
        zero = Value(arith.constant(ir.F32Type.get(), 0.0), f32)
        found = {n: [zero] * 4 for n in several}
        for k in steps:
            a_high, a_low = parts[k] if parts else left(k)
            for n in several:
                b_high, b_low = right(k, n)
                for x, y in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):  # the smallest first
                    found[n] = ptx.mma_m16n8k8_tf32(x, y, found[n])
        for n in several:
            sums[4 * n : 4 * n + 4] = [x + y for x, y in zip(sums[4 * n : 4 * n + 4], found[n], strict=True)]


def _along_a_row(layout: SharedLayout, tile: Pointer, row: Value, column: Value) -> list[Pointer]:
    """Pointers to an element of every 8 columns of a row, for one period of the swizzle; ``column`` is below 8."""
    steps = max(1, layout.swizzle // (STEP_F32 * f32.itemsize))
    return [tile + layout.offset(row, STEP_F32 * step + column) for step in range(steps)]


def _step(layout: SharedLayout, pointers: list[Pointer], step: int, rows: int) -> Pointer:
    """The pointer of a k-step, ``rows`` (a multiple of 8) further down: a constant offset from ``pointers``."""
    first = step % len(pointers)
    return pointers[first] + layout.offset(0, STEP_F32 * (step - first)) + rows * layout.pitch


def _parts(values: list[Value]) -> tuple[list[Value], list[Value]]:
    """Split f32 into (high, low) tf32 terms."""
    high = [bitcast(bitcast(x, i32) & REPRESENTABLE, f32) for x in values]
    return high, [x - y for x, y in zip(values, high, strict=True)]


def store(fragments: list[ir.Value], place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Store a warp's words of a tile to shared memory by ordinary stores, for targets without stmatrix."""
    across, stacks = threads.across, layout.rows // (ROWS * threads.stack)
    chunks = layout.columns // (8 * across)  # of this warp, two adjacent ones
    for r in range(stacks):
        for u in range(2):
            row = (threads.row_warp + r * threads.stack) * ROWS + (threads.lane >> 2) + 8 * u
            for own in range(chunks):
                chunk = own if across == 1 else own // 2 * (2 * across) + own % 2 + threads.column_warp * 2
                word = fragments[2 * (r * chunks + own) + u]
                (place + layout.chunk_offset(row, chunk) + (threads.lane & 3) * 4).store(scalar(word))
