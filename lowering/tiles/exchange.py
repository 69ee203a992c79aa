# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What warps that stand beside one another exchange through shared memory: for distribute-kv-tiles.

Where the warps of a product share its rows, each has some of the columns. A fold of rows, and a tile that the next
product reads whole, go through memory of their own, which each use writes, all wait, and each reads. Between its uses
all have to wait once more, which what else makes them wait often does already.
"""

from __future__ import annotations

from collections.abc import Callable

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import f32
from kvarn.dialect.register_layout import ROW, RegisterLayout
from kvarn.dsl import functional
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value

from .barriers import sync_consumers
from .copy_groups import AWAITED
from .threads import Threads, shuffled

EXCHANGES = ("kv.tile_reduce", "kv.tile_reduce_lanes", "kv.tile_share")
BETWEEN = "kv.between"  # on exchanges between whose uses all threads wait for one another anyway


def mark(op: ir.Operation) -> None:
    """Say of an exchange whether something else in its block, which comes once a use too, makes all threads wait."""
    if op.name in EXCHANGES:
        others = (o.operation for o in op.block.operations if o.operation != op)
        if any(_waits_for_all(other) for other in others):
            op.attributes[BETWEEN] = ir.UnitAttr.get()


def _waits_for_all(op: ir.Operation) -> bool:
    if op.name in EXCHANGES:
        return "kv.partial" not in op.attributes
    return op.name == "kv.copy_wait" or (op.name == "kv.consumer_wait" and AWAITED not in op.attributes)


def begin(op: ir.Operation, threads: Threads) -> None:
    """Everybody has read what lies in the memory of an exchange."""
    if BETWEEN not in op.attributes:
        sync_consumers(threads)


def folded_over_warps(
    values: list[ir.Value],
    layouts: tuple[RegisterLayout, RegisterLayout],
    place: Pointer,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
    threads: Threads,
) -> list[ir.Value]:
    """A number for each of a thread's rows, folded over the warps that have other columns of them: in their order.

    ``layouts`` are those of the rows that numbers are given of, and of those that the thread is to have them of.
    ``threads`` stand as the first one's.
    """
    given, wanted = (
        [layout.thread_offset(threads.lane, threads.warp)[ROW] + row for row in layout.rows_a_thread]
        for layout in layouts
    )
    alike = sum(1 << bit for bit, basis in enumerate(layouts[0].lane_bases) if not basis[ROW])
    with functional.when((threads.lane & alike) == 0):
        for value, row in zip(values, given, strict=True):
            (place + (row * threads.across + threads.column_warp) * f32.itemsize).store(Value(value, f32))
    sync_consumers(threads)
    found = []
    for row in wanted:
        first, *others = [x.ir for x in (place + row * (threads.across * f32.itemsize)).load(f32, threads.across)]
        for x in others:
            first = combine(first, x)
        found.append(first)
    return found


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
