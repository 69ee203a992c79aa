# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables in shared memory and windows of them: what distribute-kv-tiles makes of ``kv.tile_windows`` and its kin.

A warpgroup writes the vector to memory of its own, and its threads read their rows' elements there, two neighbours at a
time. These are aligned where the window begins at an even element; for the others there is a copy that begins one
element later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import align_up
from kvarn.dialect.register_layout import RegisterLayout
from kvarn.dsl import functional
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value, where

from .barriers import sync_group
from .exchange import rows_of
from .ir import WARPGROUP
from .threads import Threads, elements, from_elements, scalar

ITEM = 4  # bytes of an element
PAIR = 2  # elements of an access
PADDING = 16  # bytes of a warpgroup's memory beside the copies
ALIGNMENT = 16
# Windows of neighbouring heads begin so far from one another that a warp's pairs of columns lie in other banks.
BANKS, PAIRS = 32, 8


def extents(distances: int, heads: int) -> tuple[int, int]:
    """(elements from one head's window to the next's, elements of all) of a table of so many distances and heads."""
    pitch = distances if heads == 1 else align_up(distances - PAIRS, BANKS) + PAIRS
    return pitch, align_up(heads * pitch, WARPGROUP)


def span_of(pitch: int, heads: int) -> int:
    """Elements that are computed for each head: those of its window, or more where it is then known what a thread has.

    A warpgroup's threads hold one element after the other: of spans of a power of two a register has one head's, and
    those of several heads the same distance.
    """
    span = max(WARPGROUP, 1 << (pitch - 1).bit_length())
    return span if heads > 1 and span < 2 * pitch else pitch


def bytes_of(length: int) -> int:
    """Shared memory of a warpgroup for the windows of so many elements."""
    return 2 * ITEM * length + PADDING


@dataclass(frozen=True)
class Windows:
    """Where a thread's rows of a tile begin in shared memory, for those who read its elements: ``run`` at a time."""

    rows: Sequence[Pointer]
    layout: RegisterLayout
    run: int

    def lanes(self, wanted: Sequence[int]) -> ir.Value:
        """A vector of some of the thread's elements: whole pairs of neighbours, or single ones."""
        found = []
        for register in wanted[:: self.run]:
            _, column = self.layout.register_offset(register)
            place = self.rows[self.layout.row_registers[register]] + ITEM * column
            found += [place.load(f32).ir] if self.run == 1 else [x.ir for x in place.load(f32, self.run)]
        return from_elements(found)


def store(op: Any, vector: RegisterLayout, threads: Threads) -> None:
    """A warpgroup's threads write a table of their own, and the copy."""
    length, span, pitch = op.length.value, op.span.value, op.pitch.value
    mine = _of_group(op.place, length, threads)
    own = vector.thread_offset(threads.lane, threads.warp)[1]
    sync_group(threads)  # all have read what was there
    target = mine + ITEM * own
    for register, x in enumerate(elements(op.source)):
        part, first = divmod(vector.register_offset(register)[1], span)

        def put(x: ir.Value = x, place: int = part * pitch + first) -> None:
            at = target + ITEM * place
            at.store(Value(x, f32))
            (at + ITEM * (length + 1)).store(Value(x, f32))  # of the copy the first element is nobody's

        if first + WARPGROUP <= pitch or span == pitch:
            put()
        elif first < pitch:
            functional.if_(own < pitch - first, put)
    sync_group(threads)


def windows(op: Any, layout: RegisterLayout, threads: Threads) -> Windows:
    """Where the windows of a thread's rows begin."""
    run = PAIR if layout.register_bases[:1] == ((0, 1),) else 1
    length = op.length.value
    mine, second = _of_group(op.place, length, threads), ITEM * length
    column, rows = layout.thread_offset(threads.lane, threads.warp)[1], []
    for start in map(scalar, elements(rows_of(op.starts, layout, threads))):
        odd = start & 1
        rows.append(mine + (ITEM * (start - odd + column) + where(odd == 1, second + PAIR * ITEM, 0)))
    return Windows(rows, layout, run)


def _of_group(place: ir.Value, length: int, threads: Threads) -> Pointer:
    return Pointer(place, SHARED) + threads.group * bytes_of(length)
