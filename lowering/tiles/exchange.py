# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What warps exchange through shared memory: for distribute-kv-tiles.

Where the warps of a product share its rows, each has some of the columns; where they are stacked, each has some of the
rows. A fold over what several warps have, and a tile that the next product reads whole, go through memory of their own,
which each use writes, all wait, and each reads. Between its uses all have to wait once more, which what else makes them
wait often does already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import f32
from kvarn.dialect.register_layout import COLUMN, ROW, RegisterLayout
from kvarn.dsl import functional
from kvarn.dsl.gpu import shuffle_xor
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, where

from .barriers import sync_consumers
from .copy_groups import AWAITED
from .threads import Threads, register_layout, shuffled

SCATTERED = 3  # bits of lanes from which on shuffles halve what lanes have: for fewer, selects cost what they save
WIDEST = 4  # f32 of one access
EXCHANGES = ("kv.tile_reduce", "kv.tile_reduce_lanes", "kv.tile_share")
BETWEEN = "kv.between"  # on exchanges between whose uses all threads wait for one another anyway


def mark(op: ir.Operation, grouped: bool) -> None:
    """Say of an exchange whether something else in its block, which comes once a use too, makes all threads wait.

    Where tiles are waited for by groups of copies (``grouped``), all threads do; at an mbarrier none waits for others.
    """
    if op.name in EXCHANGES:
        others = (o.operation for o in op.block.operations if o.operation != op)
        if any(_waits_for_all(other, grouped) for other in others):
            op.attributes[BETWEEN] = ir.UnitAttr.get()


def _waits_for_all(op: ir.Operation, grouped: bool) -> bool:
    if op.name == "kv.tile_reduce":
        axis, layout = op.opview.axis.value, register_layout(op.operands[0].type)
        return "kv.partial" not in op.attributes and layout.warps_along(axis) > 1
    if op.name in EXCHANGES:
        return "kv.partial" not in op.attributes
    return grouped and (op.name == "kv.copy_wait" or (op.name == "kv.consumer_wait" and AWAITED not in op.attributes))


def begin(op: ir.Operation, threads: Threads) -> None:
    """Everybody has read what lies in the memory of an exchange."""
    if BETWEEN not in op.attributes:
        sync_consumers(threads)


@dataclass(frozen=True)
class Folded:
    """Numbers that a lane has of places, how far each lies from the thread's first, and the bits of lanes alike."""

    values: list[ir.Value]
    at: list[Any]
    alike: list[int]


@dataclass(frozen=True)
class Fold:
    """A reduction: the elements of every row (``axis`` 1) or column (0) of a tile, by ``combine``.

    Attributes
    ----------
    threads : Threads
        As they stand for the tile.
    """

    axis: int
    combine: Callable[[ir.Value, ir.Value], ir.Value]
    threads: Threads

    @property
    def kept(self) -> int:
        """The axis of the result: along it a thread has some places, a number for each."""
        return 1 - self.axis

    @property
    def warps(self) -> int:
        """How many warps have other elements of the same row or column."""
        return self.threads.across if self.axis == COLUMN else self.threads.stack

    def over_lanes(self, values: list[ir.Value], layout: RegisterLayout) -> Folded:
        """Numbers of a thread's places, each folded over the lanes that have other elements for it.

        Where warps have others yet, and many lanes have one place, every shuffle halves what a lane has: it keeps the
        numbers of some places, and gives those of the others away.
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
            pairs = [(Value(a, f32), Value(b, f32)) for a, b in zip(values[::2], values[1::2], strict=True)]
            sent = [shuffle_xor(where(upper, low, high), 1 << bit) for low, high in pairs]
            kept = [where(upper, high, low) for low, high in pairs]
            values = [self.combine(a.ir, b.ir) for a, b in zip(kept, sent, strict=True)]
            moved = where(upper, distances.pop(), 0)
            at, along = [moved + x for x in at[::2]], along[::2]
        alike = alike if scatters else bits
        return Folded([self._over(x, alike) for x in values], at, alike)

    def _over(self, value: ir.Value, bits: list[int]) -> ir.Value:
        for bit in bits:
            value = self.combine(value, shuffle_xor(Value(value, f32), 1 << bit).ir)
        return value

    def over_warps(
        self, lanes: Folded, layouts: tuple[RegisterLayout, RegisterLayout], place: Pointer
    ) -> list[ir.Value]:
        """Numbers of a thread's places, folded over the warps that have other elements for them: in their order.

        ``layouts`` are those of the places that lanes have numbers of, and of those that the thread is to have them of.
        """
        lane, warp = self.threads.lane, self.threads.warp
        given, wanted = (
            [layout.thread_offset(lane, warp)[self.kept] + x for x in at]
            for layout, at in zip(layouts, (lanes.at, layouts[1].places_a_thread(self.kept)), strict=True)
        )
        number = self.threads.column_warp if self.axis == COLUMN else self.threads.row_warp
        with functional.when((lane & sum(1 << bit for bit in lanes.alike)) == 0):
            for value, at in zip(lanes.values, given, strict=True):
                (place + (at * self.warps + number) * f32.itemsize).store(Value(value, f32))
        sync_consumers(self.threads)
        found = []
        for at in wanted:
            start = place + at * (self.warps * f32.itemsize)
            parts = [min(WIDEST, self.warps - first) for first in range(0, self.warps, WIDEST)]
            numbers = [(start + WIDEST * f32.itemsize * i).load(f32, count) for i, count in enumerate(parts)]
            found.append(functools.reduce(self.combine, [x.ir for some in numbers for x in some]))
        return found


def fold_of(op: Any, axis: int, threads: Threads) -> Fold:
    """How a reduction of tiles folds numbers along an axis."""
    return Fold(axis, _COMBINE[op.kind.value], threads)


_COMBINE = {"max": arith.maxnumf, "min": arith.minnumf, "add": arith.addf}


# --- rows of tiles whose warps are stacked otherwise -------------------------------------------------


def _which(held: int, layout: RegisterLayout, threads: Threads) -> Value:
    """Which part of the ``held`` rows that a thread has of a vector are those that it has of a tile."""
    parts = held // len(layout.rows_a_thread)
    stack = layout.warps_along(ROW)
    return (threads.warp & (stack - 1)) >> ((stack // parts).bit_length() - 1)


def rows_of(value: ir.Value, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """What a thread has of a vector of rows for a tile of which its warp has fewer of them."""
    held, own = ir.VectorType(value.type).shape[0], len(layout.rows_a_thread)
    if held == own:
        return value
    which, found = _which(held, layout, threads), shuffled(value, range(own))
    for part in range(1, held // own):
        other = shuffled(value, range(part * own, (part + 1) * own))
        found = arith.select((which == part).ir, other, found)
    return found


def among_rows(values: list[ir.Value], held: int, layout: RegisterLayout, threads: Threads) -> list[ir.Value]:
    """A thread's sums of rows of a tile among the ``held`` rows that it has of vectors; zeros for the others."""
    own = len(values)
    if held == own:
        return values
    which, zero = _which(held, layout, threads), arith.constant(ir.F32Type.get(), 0.0)
    return [arith.select((which == n // own).ir, values[n % own], zero) for n in range(held)]
