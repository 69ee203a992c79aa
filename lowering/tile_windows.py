# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Windows of vectors in shared memory: what distribute-kv-tiles makes of ``kv.tile_windows``.

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
from kvarn.dialect.register_layout import RegisterLayout
from kvarn.dsl import ptx
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, where

from .pass_base import fail
from .tile_ir import WARPGROUP
from .tile_memory import GROUP_BARRIER
from .tile_threads import Threads, elements, from_elements, scalar

ITEM = 4  # bytes of an element
PAIR = 2  # elements of an access
PADDING = 16  # bytes of a warpgroup's memory beside the copies


def bytes_of(length: int) -> int:
    """Shared memory of a warpgroup for the windows of so many elements."""
    return 2 * ITEM * length + PADDING


@dataclass(frozen=True)
class Windows:
    """Where a thread's rows of a tile begin in shared memory, for those who read its elements."""

    rows: Sequence[Pointer]
    layout: RegisterLayout

    def lanes(self, wanted: Sequence[int]) -> ir.Value:
        """A vector of some of the thread's elements: whole pairs of neighbours."""
        found = []
        for register in wanted[::PAIR]:
            _, column = self.layout.register_offset(register)
            loaded = (self.rows[self.layout.row_registers[register]] + ITEM * column).load(f32, PAIR)
            found += [loaded[0].ir, loaded[1].ir]
        return from_elements(found)


def staged(op: Any, place: Pointer, vector: RegisterLayout, layout: RegisterLayout, threads: Threads) -> Windows:
    """Write the vector; where the windows of a thread's rows begin."""
    if (0, 1) not in layout.register_bases or layout.register_bases[0] != (0, 1):
        fail(op, f"needs a layout in which threads hold pairs of columns, got {layout}")
    second = ITEM * vector.shape[1]  # where the copy begins, whose first element is nobody's
    barrier = threads.group + GROUP_BARRIER
    mine = place + threads.group * bytes_of(vector.shape[1])
    own = vector.thread_offset(threads.lane, threads.warp)[1]
    ptx.syncwarp()
    ptx.named_barrier(barrier, WARPGROUP)  # all have read what was there
    target = mine + ITEM * own
    for register, x in enumerate(elements(op.source)):
        at = target + ITEM * vector.register_offset(register)[1]
        at.store(Value(x, f32))
        (at + (second + ITEM)).store(Value(x, f32))
    ptx.syncwarp()
    ptx.named_barrier(barrier, WARPGROUP)
    column, rows = layout.thread_offset(threads.lane, threads.warp)[1], []
    for start in map(scalar, elements(op.starts)):
        odd = start & 1
        rows.append(mine + (ITEM * (start - odd + column) + where(odd == 1, second + PAIR * ITEM, 0)))
    return Windows(rows, layout)
