# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lookup tables in shared memory: the lowering of ``kv.make_table``, ``kv.table_store`` and ``kv.tile_windows``.

Each warpgroup writes the table to shared memory of its own. The row of a tile is a window of the table, of which its
threads load two neighbouring elements at a time. Such pairs are aligned if the window begins at an even element; for
windows that begin at odd ones there is a second copy of the table, shifted by one element.
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
PADDING = 16  # bytes per warpgroup after both copies
ALIGNMENT = 16
# The distance of the windows of neighbouring heads avoids bank conflicts between the rows of a warp.
BANKS, PAIRS = 32, 8


def extents(distances: int, heads: int) -> tuple[int, int]:
    """(elements from one head's window to the next, elements in total) of a table of ``distances`` per head."""
    pitch = distances if heads == 1 else align_up(distances - PAIRS, BANKS) + PAIRS
    return pitch, align_up(heads * pitch, WARPGROUP)


def span_of(pitch: int, heads: int) -> int:
    """Elements that are computed per head: ``pitch``, or the next power of two if that is less than twice as many.

    The threads of a warpgroup hold consecutive elements. With a power of two each register belongs to one head, and its
    distance is known at compile time.
    """
    span = max(WARPGROUP, 1 << (pitch - 1).bit_length())
    return span if heads > 1 and span < 2 * pitch else pitch


def bytes_of(length: int) -> int:
    """Bytes of shared memory per warpgroup for a table of ``length`` elements."""
    return 2 * ITEM * length + PADDING


@dataclass(frozen=True)
class Windows:
    """The windows of a thread's rows in shared memory, from which it loads ``run`` elements at a time."""

    rows: Sequence[Pointer]
    layout: RegisterLayout
    run: int

    def lanes(self, wanted: Sequence[int]) -> ir.Value:
        """Load some of the thread's elements of the tile, in pairs or one by one."""
        found = []
        for register in wanted[:: self.run]:
            _, column = self.layout.register_offset(register)
            place = self.rows[self.layout.row_registers[register]] + ITEM * column
            found += [place.load(f32).ir] if self.run == 1 else [x.ir for x in place.load(f32, self.run)]
        return from_elements(found)


def store(op: Any, vector: RegisterLayout, threads: Threads) -> None:
    """Write a table to the memory of the warpgroup, twice: the second copy is shifted by one element."""
    length, span, pitch = op.length.value, op.span.value, op.pitch.value
    mine = _of_group(op.place, length, threads)
    own = vector.thread_offset(threads.lane, threads.warp)[1]
    sync_group(threads)  # the previous table has been read
    target = mine + ITEM * own
    for register, x in enumerate(elements(op.source)):
        part, first = divmod(vector.register_offset(register)[1], span)

        def put(x: ir.Value = x, place: int = part * pitch + first) -> None:
            at = target + ITEM * place
            at.store(Value(x, f32))
            (at + ITEM * (length + 1)).store(Value(x, f32))  # the first element of the shifted copy is unused

        if first + WARPGROUP <= pitch or span == pitch:
            put()
        elif first < pitch:
            functional.if_(own < pitch - first, put)
    sync_group(threads)


def windows(op: Any, layout: RegisterLayout, threads: Threads) -> Windows:
    """The windows of a thread's rows."""
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
