# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of tiles by mma.sync, where there is no wgmma: for distribute-kv-tiles.

A warp has rows of 16 and multiplies for itself. B comes from shared memory by ldmatrix, fragment by fragment; A from
registers, where an accumulator of 16-bit elements is what the instruction takes, or from shared memory likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, vector

from kvarn.dialect.dtypes import by_mlir, f32
from kvarn.dialect.ops.tile import COLUMN_STEP as STEP  # of a product's K, and of its N by one ldmatrix
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dialect.tile_layout import WARP_ROWS
from kvarn.dsl import machine
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value

from .tile_products import words
from .tile_threads import Threads, elements, from_elements, scalar

ROWS = WARP_ROWS  # of a warp's fragment of A


@dataclass(frozen=True)
class Product:
    """What a product is specialised for.

    Attributes
    ----------
    k, n : int
        Extents.
    element : str
        ``bf16`` or ``f16``.
    b : SharedLayout
    transpose_b : bool
        Whether the rows of B's tile are the product's columns.
    a : SharedLayout, optional
        None where A is in registers.
    """

    k: int
    n: int
    element: str
    b: SharedLayout
    transpose_b: bool
    a: SharedLayout | None


def fragments(place: Pointer, layout: SharedLayout, threads: Threads) -> list[list[Value]]:
    """A warp's rows of a tile in shared memory as A, four words a k-step."""
    first = layout.steps(place, threads.warp * ROWS + (threads.lane & 15), threads.lane >> 4)
    return [machine.ldmatrix(layout.step(first, k)) for k in range(layout.columns // STEP)]


def loaded(place: Pointer, layout: SharedLayout, threads: Threads, element: ir.Type) -> ir.Value:
    """A warp's rows of a tile in shared memory as what a thread holds of an accumulator."""
    found = from_elements([w.ir for step in fragments(place, layout, threads) for w in step])
    return vector.bitcast(ir.VectorType.get([2 * ir.VectorType(found.type).shape[0]], element), found)


def multiply(product: Product, a: ir.Value, b: ir.Value, c: ir.Value | None, threads: Threads) -> ir.Value:
    """The product: ``a`` a vector, or a pointer to a tile; ``b`` a pointer; what a thread holds of the accumulator."""
    dtype, lane, layout = by_mlir(product.element), threads.lane, product.b
    tile = Pointer(b, SHARED)
    if c is None:
        zero = arith.constant(ir.F32Type.get(), 0.0)
        sums = [Value(zero, f32)] * (product.n // 2)
    else:
        sums = [Value(x, f32) for x in elements(c)]
    if product.a is None:
        flat = [scalar(w) for w in words(a)]
        left = [flat[4 * k : 4 * k + 4] for k in range(product.k // STEP)]
    else:
        left = None
        row = threads.warp * ROWS + machine.unknown(lane & 15)  # addresses would be held through the loop
        rows = product.a.steps(Pointer(a, SHARED), row, lane >> 4)
    if product.transpose_b:  # rows of the tile are columns of the product: two of its fragments of 8, both halves of k
        first = layout.steps(tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)
    else:
        first = layout.steps(tile, lane & 15, lane >> 4)
    for k in range(product.k // STEP):
        own = left[k] if left is not None else machine.ldmatrix(product.a.step(rows, k))
        for n in range(product.n // STEP):
            if product.transpose_b:
                w = machine.ldmatrix(layout.step(first, k, n * STEP))
            else:
                w = machine.ldmatrix(layout.step(first, n, k * STEP), trans=True)
            for half in range(2):
                at = 8 * n + 4 * half
                sums[at : at + 4] = machine.mma_m16n8k16(own, w[2 * half : 2 * half + 2], sums[at : at + 4], dtype)
    return from_elements([x.ir for x in sums])


def store(fragments: list[ir.Value], place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Words of a warp's rows to a tile in shared memory, one a row and eight columns: stmatrix of older targets."""
    for u in range(2):
        row = threads.warp * ROWS + (threads.lane >> 2) + 8 * u
        for chunk in range(layout.columns // 8):
            (place + layout.chunk_offset(row, chunk) + (threads.lane & 3) * 4).store(scalar(fragments[2 * chunk + u]))
