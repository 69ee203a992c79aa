# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of many rows in memory by few rows, by mma.m16n8k16, without copying the many rows to shared memory.

The many rows are the first operand. A lane loads a contiguous quarter of each of its rows and uses it as its fragments,
four columns per k-step, which permutes the columns. The few rows are the second operand: they are in shared memory with
the same permutation, eight rows per tile, converted once for all warps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, i32
from kvarn.lowering.target import Target

from ..common import BYTES, WARP

TILE_ROWS = 8  # of the few rows
STEP = 16  # columns per k-step
MOST_COLUMNS = 256  # per row, so that a lane's columns stay in registers


def takes(size: int, target: Target) -> bool:
    """Whether a target (sm_80 and later) multiplies rows of ``size`` columns."""
    return not target.is_host and target.has("cp_async") and size % 64 == 0 and size <= MOST_COLUMNS


@dataclass(frozen=True)
class RowProducts:
    """Rows of ``size`` columns, a multiple of 64; ``tiles`` tiles of few rows; products of ``dtype``, f16 or bf16."""

    size: int
    tiles: int
    dtype: DType

    @property
    def steps(self) -> int:
        return self.size // STEP

    @property
    def part(self) -> int:
        """Columns per lane."""
        return self.size // 4

    @property
    def words(self) -> int:
        """Words of shared memory for the few rows."""
        return self.tiles * self.steps * WARP * 2

    @kv.func
    def fill(self, memory: Any, threads: int, four: Callable[..., Any], state: Any) -> None:
        """Store the few rows to shared memory: ``four(state, row, column)`` gives four columns as f32."""
        for i in range(kv.thread_id.x, self.words // 2, threads):
            lane, step, tile = i % WARP, i // WARP % self.steps, i // WARP // self.steps
            x = four(state, tile * TILE_ROWS + lane // 4, lane % 4 * self.part + step * 4)
            memory.store(i * 2, value=kv.bitcast(self.dtype(x), i32))

    @kv.func
    def few(self, memory: Any, tile: Any, step: Any, lane: Any) -> Any:
        """The second operand of a k-step."""
        pair = (memory.ptr(0) + ((tile * self.steps + step) * WARP + lane) * 8).load(i32, 2)
        return [pair[0], pair[1]]

    @kv.func
    def read(self, row: Any, itemsize: int, lane: Any) -> Any:
        """A lane's columns of the row at an address: its words, in loads of four."""
        at, words = row + (lane & 3) * (self.part * itemsize), []
        for i in kv.static(range(self.part * itemsize // BYTES)):
            four = (at + i * BYTES).load(i32, 4)
            words += [four[j] for j in range(4)]
        return words

    @kv.func
    def many(self, low: Any, high: Any, widen: Any = None) -> Any:
        """The first operand of every k-step, for rows r and r + 8 from :meth:`read`; ``widen`` converts 8-bit words."""
        found = []
        for step in kv.static(range(self.steps)):
            a, b = (
                widen(words[step]) if widen is not None else [words[2 * step], words[2 * step + 1]]
                for words in (low, high)
            )
            found.append([a[0], b[0], a[1], b[1]])
        return found
