# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Exchange of values between warps through shared memory, for distribute-kv-tiles.

The warps of a product divide its rows, its columns, or both. A reduction across warps, and a tile that the next product
reads whole, go through shared memory of their own: write, barrier, read. Before the next write a second barrier is
needed, which is left out if another op of the loop already synchronizes all threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import DType, by_mlir, f32
from kvarn.dialect.register_layout import COLUMN, ROW, RegisterLayout
from kvarn.dsl import functional
from kvarn.dsl.gpu import shuffle_xor
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, where

from .barriers import sync_consumers
from .copy_groups import AWAITED
from .ir import users
from .threads import Threads, register_layout, shuffled

SCATTERED = 3  # lane bits from which a reduce-scatter by shuffles pays: with fewer, its selects cost what it saves
WIDEST = 4  # f32 of one access
EXCHANGES = ("kv.tile_reduce", "kv.tile_reduce_lanes", "kv.tile_share")
BETWEEN = "kv.between"  # on exchanges between whose uses another op synchronizes all threads


def mark(op: ir.Operation, grouped: bool) -> None:
    """Mark an exchange if another op of its block, executed once per use, synchronizes all threads.

    Waits for tiles do if they are waits for cp.async groups (``grouped``), followed by a barrier; waits for an mbarrier
    do not. A shared tile is read until its last use: an op between the tile and that use does not count.
    """
    if op.name in EXCHANGES:
        every = [o.operation for o in op.block.operations]
        own = every.index(op)
        last = max((every.index(_in_block(user, op.block)) for user in users(op.results[0])), default=own)
        reading = range(own, last + 1) if op.name == "kv.tile_share" else range(own, own + 1)
        if any(_waits_for_all(other, grouped) for at, other in enumerate(every) if at not in reading):
            op.attributes[BETWEEN] = ir.UnitAttr.get()


def _in_block(op: ir.Operation, block: ir.Block) -> ir.Operation:
    """The op of a block that an op is, or is inside of."""
    while op.block != block:
        op = op.parent.operation
    return op


def _waits_for_all(op: ir.Operation, grouped: bool) -> bool:
    if op.name == "kv.tile_reduce":
        axis, layout = op.opview.axis.value, register_layout(op.operands[0].type)
        return "kv.partial" not in op.attributes and layout.warps_along(axis) > 1
    if op.name in EXCHANGES:
        return "kv.partial" not in op.attributes
    return grouped and (op.name == "kv.copy_wait" or (op.name == "kv.consumer_wait" and AWAITED not in op.attributes))


def begin(op: ir.Operation, threads: Threads) -> None:
    """Wait until all threads have read the previous contents of an exchange, unless another op ensures it."""
    if BETWEEN not in op.attributes:
        sync_consumers(threads)


@dataclass(frozen=True)
class Folded:
    """The result of folding over lanes.

    ``values`` are those that this lane has, ``at`` their rows or columns relative to the thread's first, and ``alike``
    the lane bits in which lanes have the same values.
    """

    values: list[ir.Value]
    at: list[Any]
    alike: list[int]


@dataclass(frozen=True)
class Fold:
    """A reduction of every row (``axis`` 1) or column (``axis`` 0) of a tile.

    Attributes
    ----------
    combine : callable
        The reduction of two scalars.
    dtype : DType
        Of the elements, f32 or i32.
    threads : Threads
        With the division of warps of this tile.
    """

    axis: int
    combine: Callable[[ir.Value, ir.Value], ir.Value]
    threads: Threads
    dtype: DType = f32

    @property
    def kept(self) -> int:
        """The axis of the result, 0 for rows and 1 for columns."""
        return 1 - self.axis

    @property
    def warps(self) -> int:
        """The number of warps that share a row or column."""
        return self.threads.across if self.axis == COLUMN else self.threads.stack

    def over_lanes(self, values: list[ir.Value], layout: RegisterLayout) -> Folded:
        """Fold a thread's partial values over the lanes that share a row or column.

        If warps are folded next and many lanes share a row, this is a reduce-scatter: each shuffle halves the values of
        a lane, which keeps one half of its rows and sends the other.
        """
        along = list(layout.places_a_thread(self.kept))
        at: list[Any] = list(along)
        bits = [bit for bit, basis in enumerate(layout.lane_bases) if not basis[self.kept]]
        scatters, alike = self.warps > 1 and len(bits) >= SCATTERED, list[int]()
        for bit in bits if scatters else ():
            distances = {b - a for a, b in zip(along[::2], along[1::2], strict=False)}
            if len(along) % 2 or len(distances) != 1:
                alike.append(bit)
                continue
            upper = ((self.threads.lane >> bit) & 1) == 1
            pairs = [
                (Value(a, self.dtype), Value(b, self.dtype)) for a, b in zip(values[::2], values[1::2], strict=True)
            ]
            sent = [shuffle_xor(where(upper, low, high), 1 << bit) for low, high in pairs]
            kept = [where(upper, high, low) for low, high in pairs]
            values = [self.combine(a.ir, b.ir) for a, b in zip(kept, sent, strict=True)]
            moved = where(upper, distances.pop(), 0)
            at, along = [moved + x for x in at[::2]], along[::2]
        alike = alike if scatters else bits
        return Folded([self._over(x, alike) for x in values], at, alike)

    def _over(self, value: ir.Value, bits: list[int]) -> ir.Value:
        for bit in bits:
            value = self.combine(value, shuffle_xor(Value(value, self.dtype), 1 << bit).ir)
        return value

    def over_warps(
        self, lanes: Folded, layouts: tuple[RegisterLayout, RegisterLayout], place: Pointer
    ) -> list[ir.Value]:
        """Fold values over the warps that share a row or column, in the order of the warps.

        ``layouts``: (of the tile, whose rows the lanes have values of; of the result, whose rows the thread needs).
        """
        lane, warp = self.threads.lane, self.threads.warp
        given, wanted = (
            [layout.thread_offset(lane, warp)[self.kept] + x for x in at]
            for layout, at in zip(layouts, (lanes.at, layouts[1].places_a_thread(self.kept)), strict=True)
        )
        number = self.threads.column_warp if self.axis == COLUMN else self.threads.row_warp
        with functional.when((lane & sum(1 << bit for bit in lanes.alike)) == 0):
            for value, at in zip(lanes.values, given, strict=True):
                (place + (at * self.warps + number) * f32.itemsize).store(Value(value, self.dtype))
        sync_consumers(self.threads)
        found = []
        for at in wanted:
            start = place + at * (self.warps * f32.itemsize)
            parts = [min(WIDEST, self.warps - first) for first in range(0, self.warps, WIDEST)]
            numbers = [(start + WIDEST * f32.itemsize * i).load(self.dtype, count) for i, count in enumerate(parts)]
            found.append(functools.reduce(self.combine, [x.ir for some in numbers for x in some]))
        return found


def fold_of(op: Any, axis: int, threads: Threads) -> Fold:
    """The fold of a ``kv.tile_reduce`` along an axis."""
    element = ir.VectorType(op.source.type).element_type
    return Fold(axis, _COMBINE[op.kind.value][str(element) != "f32"], threads, by_mlir(str(element)))


# By kind: of floats and of integers.
_COMBINE = {"max": (arith.maxnumf, arith.maxsi), "min": (arith.minnumf, arith.minsi), "add": (arith.addf, arith.addi)}


# --- tiles whose warps divide rows differently -------------------------------------------------------


def _which(held: int, layout: RegisterLayout, threads: Threads) -> Value:
    """Which part of the ``held`` rows of a vector are the rows that the thread has of a tile."""
    parts = held // len(layout.rows_a_thread)
    stack = layout.warps_along(ROW)
    return (threads.warp & (stack - 1)) >> ((stack // parts).bit_length() - 1)


def rows_of(value: ir.Value, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """The part of a thread's row vector for the rows that it has of a tile, whose warps divide rows more finely."""
    held, own = ir.VectorType(value.type).shape[0], len(layout.rows_a_thread)
    if held == own:
        return value
    which, found = _which(held, layout, threads), shuffled(value, range(own))
    for part in range(1, held // own):
        other = shuffled(value, range(part * own, (part + 1) * own))
        found = arith.select((which == part).ir, other, found)
    return found


def among_rows(values: list[ir.Value], held: int, layout: RegisterLayout, threads: Threads) -> list[ir.Value]:
    """Expand a thread's row sums of a tile to the ``held`` rows of its row vectors, with zeros elsewhere."""
    own = len(values)
    if held == own:
        return values
    type_ = values[0].type
    zero = arith.constant(type_, 0.0 if isinstance(type_, ir.FloatType) else 0)
    which = _which(held, layout, threads)
    return [arith.select((which == n // own).ir, values[n % own], zero) for n in range(held)]
