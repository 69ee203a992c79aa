# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running sums and solves of unit triangles, for distribute-kv-tiles.

A tile goes to shared memory of the op's own as rows of f32 or i32, with a pitch of one element more than a row, so that
neither rows nor columns conflict. Threads take a line each, whose elements depend on one another, and the tile comes
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import DType, by_mlir, f32
from kvarn.dialect.layout import align_up
from kvarn.dialect.register_layout import RegisterLayout
from kvarn.dsl import functional, math as kv_math
from kvarn.dsl.gpu import shuffle_up, shuffle_xor
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, constant, where

from .barriers import sync_consumers
from .ir import WARP, WARPGROUP
from .threads import Threads, elements, from_elements

BLOCK = 16  # rows of a triangle that a thread solves at a time: they are in registers
WIDE = 4  # f32 of one access
_COMBINE: dict[tuple[str, bool], Callable[..., ir.Value]] = {
    ("add", True): arith.addf, ("add", False): arith.addi, ("mul", True): arith.mulf, ("mul", False): arith.muli,
}  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """A tile or vector of 4-byte elements in shared memory.

    Attributes
    ----------
    pitch : int
        Elements from one row to the next; of a ``transposed`` tile, from one column to the next.
    """

    place: Pointer
    rows: int
    columns: int
    pitch: int
    dtype: DType
    transposed: bool = False

    def at(self, row: Any, column: Any) -> Pointer:
        line, within = (column, row) if self.transposed else (row, column)
        return self.place + (line * self.pitch + within) * f32.itemsize

    def load(self, row: Any, column: Any) -> Value:
        return self.at(row, column).load(self.dtype)

    def store(self, row: Any, column: Any, value: Any) -> None:
        self.at(row, column).store(value)

    def put(self, value: ir.Value, layout: RegisterLayout, threads: Threads) -> None:
        """Write the elements of every thread; threads that hold the same elements write the same."""
        row, column = layout.thread_offset(threads.lane, threads.warp)
        lanes = [bit for bit, basis in enumerate(layout.lane_bases) if basis == (0, 0)]
        with functional.when((threads.lane & sum(1 << bit for bit in lanes)) == 0):
            for register, element in enumerate(elements(value)):
                down, right = layout.register_offset(register)
                self.store(row + down, column + right, Value(element, self.dtype))

    def get(self, layout: RegisterLayout, threads: Threads) -> ir.Value:
        row, column = layout.thread_offset(threads.lane, threads.warp)
        offsets = [layout.register_offset(register) for register in range(layout.registers)]
        return from_elements([self.load(row + down, column + right).ir for down, right in offsets])


def scan(lines: Lines, kind: str, axis: int, threads: Threads) -> None:
    """Replace elements by running sums or products along an axis; a vector is one row or one column."""

    def combine(x: Value, y: Value) -> Value:
        return Value(_COMBINE[kind, lines.dtype.is_float](x.ir, y.ir), lines.dtype)

    if 1 in (lines.rows, lines.columns):
        _scan_vector(lines, combine, 0 if kind == "add" else 1, threads)
        return
    count, extent = (lines.columns, lines.rows) if axis == 0 else (lines.rows, lines.columns)
    with functional.loop(threads.thread, count, threads.consumers * WARPGROUP) as line:
        total = lines.load(0, line) if axis == 0 else lines.load(line, 0)
        for at in range(1, extent):
            place = (at, line) if axis == 0 else (line, at)
            total = combine(total, lines.load(*place))
            lines.store(*place, total)


def _scan_vector(lines: Lines, combine: Callable[[Value, Value], Value], neutral: int, threads: Threads) -> None:
    """The first warp scans a vector: each lane a run of elements, then the runs by shuffles."""
    extent = lines.rows * lines.columns
    run = -(-extent // WARP)
    zero = constant(neutral, lines.dtype)

    def place(i: Any) -> tuple[Any, Any]:
        return (i, 0) if lines.columns == 1 else (0, i)

    with functional.when(threads.warp == 0):
        first, totals = threads.lane * run, list[Value]()
        for i in range(run):
            held = lines.load(*place(kv_math.min(first + i, extent - 1)))
            held = where(first + i < extent, held, zero)
            totals.append(combine(totals[-1], held) if totals else held)
        before = totals[-1]
        for step in (1, 2, 4, 8, 16):
            other = shuffle_up(before, step)
            before = where(threads.lane >= step, combine(other, before), before)
        before = shuffle_up(before, 1)
        for i, total in enumerate(totals):
            with functional.when(first + i < extent):
                lines.store(*place(first + i), where(threads.lane > 0, combine(before, total), total))


def total(lines: Lines, combine: Callable[[ir.Value, ir.Value], ir.Value], threads: Threads) -> ir.Value:
    """The reduction of a vector: every warp reads all of it, each lane a part."""
    extent, found = lines.rows * lines.columns, None
    for first in range(0, extent, WARP):
        at = threads.lane + first
        element = lines.load(*((at, 0) if lines.columns == 1 else (0, at))) if extent >= first + WARP else None
        if element is None:  # lanes behind the last element repeat it, or add nothing
            last = kv_math.min(at, extent - 1)
            element = lines.load(*((last, 0) if lines.columns == 1 else (0, last)))
            if combine in (arith.addf, arith.addi):
                element = where(at < extent, element, constant(0, lines.dtype))
        found = element if found is None else Value(combine(found.ir, element.ir), lines.dtype)
    for bit in (16, 8, 4, 2, 1):
        found = Value(combine(found.ir, shuffle_xor(found, bit).ir), lines.dtype)
    return found.ir


def solve(triangle: Lines, right: Lines, threads: Threads) -> None:
    """Replace ``right`` by X of (I + L) X = right, a column per thread, 16 rows in registers at a time.

    The triangle is transposed in memory, so that a thread reads four of its factors at once.
    """
    with functional.loop(threads.thread, right.columns, threads.consumers * WARPGROUP) as column:
        for begin in range(0, triangle.rows, BLOCK):
            held = [right.load(begin + i, column) for i in range(BLOCK)]
            if begin:

                def subtract(earlier: Value, *held: Value, begin: int = begin) -> tuple[Value, ...]:
                    x = right.load(earlier, column)
                    factors = _factors(triangle, begin, earlier, range(BLOCK))
                    return tuple(h - factors[i] * x for i, h in enumerate(held))

                held = list(functional.for_(0, begin, body=subtract, init=tuple(held)))
            for j in range(BLOCK):
                right.store(begin + j, column, held[j])
                factors = _factors(triangle, begin, begin + j, range(j + 1, BLOCK))
                for i in range(j + 1, BLOCK):
                    held[i] = held[i] - factors[i] * held[j]


def _factors(triangle: Lines, first: int, column: Any, rows: range) -> dict[int, Value]:
    """The elements of a column of the triangle, of some rows from ``first`` on."""
    found = {}
    for quad in sorted({row // WIDE for row in rows}):
        some = triangle.at(first + WIDE * quad, column).load(f32, WIDE)
        found.update({WIDE * quad + i: some[i] for i in range(WIDE)})
    return found


Written = tuple[ir.Value, RegisterLayout, Lines]  # a tile, its layout, and the shared memory that it is written to


def write(given: Sequence[Written], threads: Threads) -> None:
    """Write tiles to shared memory, for all threads to read.

    The first barrier is for the previous use of the memory.
    """
    sync_consumers(threads)
    for value, layout, lines in given:
        lines.put(value, layout, threads)
    sync_consumers(threads)


def exchanged(given: Sequence[Written], work: Callable[[], None], threads: Threads) -> ir.Value:
    """Write tiles to shared memory, work on them, and read the last one back."""
    write(given, threads)
    work()
    sync_consumers(threads)
    _, layout, lines = given[-1]
    return lines.get(layout, threads)


def lines_of(layout: RegisterLayout, element: ir.Type, transposed: bool, allocate: Callable[[int], Pointer]) -> Lines:
    """Shared memory for a tile: rows are one element longer than the tile's, except those of vectors and triangles."""
    rows, columns = layout.shape
    pitch = rows if transposed else 1 if 1 in (rows, columns) else columns + 1
    lines = columns if transposed else max(rows, columns) if pitch == 1 else rows
    size = align_up(lines * pitch * f32.itemsize, WIDE * f32.itemsize)
    return Lines(allocate(size), rows, columns, pitch, by_mlir(str(element)), transposed)
