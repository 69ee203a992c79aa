# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the expansions of the cache operations share: vectors, the division of tokens among threads, the ragged batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, lowbit

from .base import Expansion

THREADS = 256  # of a block on a GPU
BYTES = 16  # of the widest access


def row_alignment(at: Expansion) -> int:
    """Bytes that the rows of the operation's data buffers are aligned to."""
    attributes = at.op.operation.attributes
    return ir.IntegerAttr(attributes["kv.row_alignment"]).value if "kv.row_alignment" in attributes else BYTES


def vector_width(*extents: int, types: tuple[DType, ...]) -> int:
    """Elements of one access: a power of two that divides every extent and whose widest form is not above 16 bytes.

    Types of one and of two or more bytes meet in a conversion, where 8 lanes keep the wider side at one or two accesses.
    """
    widest = max(t.itemsize for t in types)
    most = BYTES // widest if len({t.itemsize for t in types}) == 1 else 8
    return min(lowbit(math.gcd(*extents)), most)


@dataclass(frozen=True)
class Rows:
    """Data buffers as a kernel reads and writes them: vectors of ``width`` elements at the alignment that rows have."""

    width: int
    alignment: int

    @kv.func
    def load(self, buffer: Any, *index: Any) -> Any:
        """``width`` elements; always a vector."""
        if self.width == 1:
            return kv.vector(buffer.dtype, [buffer[index]])
        return buffer.load(*index, width=self.width, alignment=self._of(buffer))

    @kv.func
    def store(self, buffer: Any, *index: Any, value: Any) -> None:
        if self.width == 1:
            buffer[index] = value[0]
        else:
            buffer.store(*index, value=value, alignment=self._of(buffer))

    def _of(self, buffer: Any) -> int:
        return min(self.alignment, BYTES, lowbit(self.width * buffer.dtype.itemsize))


@dataclass(frozen=True)
class Work:
    """How the pieces of tokens are divided: a block of ``threads`` does ``tokens`` tokens of ``pieces`` pieces each.

    On the host a block is one thread, which does all the pieces of a token.
    """

    pieces: int
    threads: int
    tokens: int

    @staticmethod
    def of(at: Expansion, pieces: int, threads: int = THREADS) -> Work:
        """The division for an operation's target and schedule (``threads``: of a block)."""
        threads = 1 if at.target.is_host else int(at.schedule.get("threads", threads))
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads of the schedule must be in [1, 1024], got {threads}")
        return Work(pieces, threads, max(1, threads // pieces))

    @property
    def step(self) -> int:
        """From a thread's piece to its next of the same token."""
        return self.threads if self.tokens == 1 else self.pieces

    def blocks(self, tokens: Any) -> Any:
        """Blocks for so many tokens, at compile or run time."""
        return (tokens + (self.tokens - 1)) // self.tokens

    @kv.func
    def place(self) -> tuple[Any, Any]:
        """This thread's (token of the grid's first pass, first piece); a thread that has nothing to do gets a piece past the last."""
        thread = kv.thread_id.x
        if self.tokens == 1:
            return kv.block_id.x, thread
        slot = thread // self.pieces
        piece = kv.where(slot < self.tokens, thread - slot * self.pieces, self.pieces)
        return kv.block_id.x * self.tokens + slot, piece


@kv.func
def sequence_of(offsets: Any, row: Any) -> tuple[Any, Any, Any]:
    """The sequence of a row of a ragged batch: (b, whether it has one, its place in the sequence).

    b is the largest with offsets[b] <= row, so that empty sequences are passed over.
    """
    low, high = kv.i32(0), offsets.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[middle] <= row:
            low = middle
        else:
            high = middle
    first = offsets[low]
    return low, (first <= row) & (row < offsets[high]), row - first


@kv.func
def holds(cache: Any, position: Any) -> Any:
    """Whether a sequence may have this position: pages are tested by the store itself, a continuous region is not."""
    if cache.kind == CONTINUOUS:
        return (position >= 0) & (position < cache.field("capacity"))
    return True


@kv.func
def converted(x: Any, dtype: DType) -> Any:
    """x as another type; through f32 where the two do not convert directly."""
    if x.dtype is dtype:
        return x
    if dtype.is_integer and x.dtype.is_float:
        return dtype(kv.f32(x))
    return dtype(x)


@kv.func
def single(x: Any) -> Any:
    """A vector of one lane as a scalar, which is what accesses of width one take."""
    return x[0] if len(x) == 1 else x
