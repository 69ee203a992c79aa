# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the expansions of the cache operations share: vectors, the work of threads, groups, the ragged batch, heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, align_up, lowbit

from .base import Expansion

THREADS = 256  # of a block on a GPU
BYTES = 16  # of the widest access
WARP = 32


def row_alignment(op: Any) -> int:
    """Bytes that every row of an operation's data buffers is aligned to."""
    attributes = op.operation.attributes
    return ir.IntegerAttr(attributes["kv.row_alignment"]).value if "kv.row_alignment" in attributes else BYTES


def vector_width(*extents: int, types: tuple[DType, ...]) -> int:
    """Elements of one access: a power of two that divides every extent.

    16 bytes; where types of different sizes meet 8 lanes, which the wider side takes in one or two accesses.
    """
    return min(lowbit(math.gcd(*extents)), most_lanes(types))


def most_lanes(types: tuple[DType, ...]) -> int:
    """Elements of the widest access of buffers of some types; see :func:`vector_width`."""
    sizes = {t.itemsize for t in types}
    return BYTES // sizes.pop() if len(sizes) == 1 else 8


@dataclass(frozen=True)
class Rows:
    """How a kernel reads and writes data buffers: in vectors of ``width`` at the ``alignment`` that rows have."""

    width: int
    alignment: int

    @kv.func
    def load(self, buffer: Any, *index: Any, width: int = 0) -> Any:
        """``width`` elements (default: the rows'); always a vector. The last index is a multiple of the width."""
        lanes = width or self.width
        if lanes == 1:
            return kv.vector(buffer.dtype, [buffer[index]])
        return buffer.load(*index, width=lanes, alignment=self.aligned(lanes, buffer.dtype))

    @kv.func
    def store(self, buffer: Any, *index: Any, value: Any) -> None:
        """Write a vector; the last index is a multiple of its width."""
        if len(value) == 1:
            buffer[index] = value[0]
        else:
            buffer.store(*index, value=value, alignment=self.aligned(len(value), buffer.dtype))

    def aligned(self, lanes: int, dtype: DType) -> int:
        """Bytes that an access of so many lanes is aligned to."""
        return min(self.alignment, BYTES, lowbit(lanes * dtype.itemsize))


@dataclass(frozen=True)
class Work:
    """How threads share the items of tokens: a block of ``threads`` does ``tokens`` tokens of ``items`` items each.

    An item is what a thread does at a time: a vector of a row, a unit of a rotation, its share of a quantized head. On
    the host a block is one thread, which does all the items of a token.
    """

    items: int
    threads: int
    tokens: int

    @staticmethod
    def of(at: Expansion, items: int, threads: int = THREADS) -> Work:
        """The one for an operation's target and schedule (``threads``: of a block)."""
        threads = 1 if at.target.is_host else at.schedule.get("threads", threads)
        return Work(items, threads, max(1, threads // items))

    @property
    def step(self) -> int:
        """From an item of a thread to its next of the same token."""
        return self.threads if self.tokens == 1 else self.items

    def blocks(self, tokens: Any) -> Any:
        """Blocks for so many tokens, at compile or run time."""
        return (tokens + (self.tokens - 1)) // self.tokens

    @kv.func
    def place(self) -> tuple[Any, Any]:
        """This thread's token of the grid's first pass, and its first item: past the last when it has none."""
        thread = kv.thread_id.x
        if self.tokens == 1:
            return kv.block_id.x, thread
        slot = thread // self.items
        item = kv.where(slot < self.tokens, thread - slot * self.items, self.items)
        return kv.block_id.x * self.tokens + slot, item


@dataclass(frozen=True)
class Group:
    """``lanes`` neighbouring threads that reduce values together: a power of two up to a warp; 1 on the host.

    Every thread of a warp takes part in a reduction, so kernels pad their items to whole warps (:func:`whole_warps`):
    conditions on tokens and on kinds of items then hold for a warp or do not.
    """

    lanes: int

    @staticmethod
    def dividing(at: Expansion, chunks: int) -> Group:
        """The largest group whose lanes have equally many of some chunks."""
        return Group(1 if at.target.is_host else min(lowbit(chunks), WARP))

    @staticmethod
    def covering(at: Expansion, chunks: int) -> Group:
        """The smallest group that has a lane for each chunk, or a warp."""
        return Group(1 if at.target.is_host else min(1 << (chunks - 1).bit_length(), WARP))

    @property
    def distances(self) -> tuple[int, ...]:
        """Distances of the lanes that exchange values, step by step."""
        return tuple(1 << n for n in reversed(range(self.lanes.bit_length() - 1)))

    @kv.func
    def sum(self, x: Any) -> Any:
        """The sum over the lanes, in each of them."""
        for distance in kv.static(self.distances):
            x = x + kv.shuffle_xor(x, distance)
        return x

    @kv.func
    def max(self, x: Any) -> Any:
        """The largest of the lanes' values, in each of them."""
        for distance in kv.static(self.distances):
            x = kv.math.max(x, kv.shuffle_xor(x, distance))
        return x


def whole_warps(at: Expansion, items: int) -> int:
    """Items padded so that a warp has no items of two kinds."""
    return items if at.target.is_host else align_up(items, WARP)


@kv.func
def head_and_lane(item: Any, heads: int, per_head: int) -> tuple[Any, Any, Any]:
    """(head, part of the head, whether it is no padding) of an item; padding repeats the last head."""
    h = item // per_head
    return kv.math.min(h, heads - 1), item % per_head, h < heads


@kv.func
def advance(slots: int, slot: Any, phase: Any, count: Any) -> tuple[Any, Any]:
    """(slot, phase of its barriers) ``count`` uses later, up to ``slots``, in a circular buffer of so many."""
    slot = slot + count
    over = slot >= slots
    return kv.where(over, slot - slots, slot), kv.where(over, phase ^ 1, phase)


@kv.func
def narrowed(table: Any, low: Any, high: Any, value: Any) -> tuple[Any, Any]:
    """[low, high) narrowed to the last entry of an ascending table that is at most a value; an empty one stays empty.

    Where no entry is, the first one is what is left.
    """
    while high - low > 1:
        middle = (low + high) >> 1
        if table[middle] <= value:
            low = middle
        else:
            high = middle
    return low, high


@kv.func
def at_most(x: Any, bound: Any) -> Any:
    """An i32 brought into [0, bound], a negative one, which stands for an unsigned one past 31 bits, to the bound.

    For what is read from memory and must not lead out of a buffer, whatever it is.
    """
    return kv.i32(kv.math.min(kv.u32(x), kv.u32(bound)))


@kv.func
def sequence_of(offsets: Any, row: Any, rows: Any = None) -> tuple[Any, Any, Any]:
    """The sequence of a row of a ragged batch: (b, whether it has one, its place in the sequence).

    b is the largest with offsets[b] <= row, so that empty sequences are passed over. ``rows``, about as many as the
    batch has, lets the search begin where an even batch has the row: one look then ends it, also in a decode step.
    """
    low, high = kv.i32(0), offsets.shape[0] - 1
    if rows is not None:
        if high > 1:
            guess = kv.math.min(kv.i32((kv.f32(row) + 0.5) * (kv.f32(high) / kv.f32(rows))), high - 1)
            first, after = offsets[guess], offsets[guess + 1]
            if first <= row:
                low = guess
                if row < after:
                    high = guess + 1
            else:
                high = guess
    low, high = narrowed(offsets, low, high, row)
    first = offsets[low]
    return low, (first <= row) & (row < offsets[high]), row - first


def starts_early(at: Expansion) -> bool:
    """Whether kernels of the target may be scheduled before the one ahead of them ends; see :func:`begin`."""
    return at.target.has("pdl")


@kv.func
def begin(early: bool) -> None:
    """Wait for the kernels ahead; let the next one be scheduled, which waits in its turn."""
    if early:
        kv.griddepcontrol_wait()
        kv.griddepcontrol_launch_dependents()


@kv.func
def holds(cache: Any, position: Any) -> Any:
    """Whether a sequence may have this position, as far as is known without the table; stores drop what they may not.

    Of a continuous cache the region says it, and nothing need be read for what would be dropped.
    """
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


@kv.func
def as_vector(x: Any) -> Any:
    """What an access gives as a vector, of width one too: the inverse of :func:`single`."""
    return x if isinstance(x, kv.Vector) else kv.vector(x.dtype, [x])


# --- heads: where f32 elements come from and go to -------------------------------------------------


class StoredHead:
    """One head of a token, wherever it lies: ``load(d, n)`` gives elements as they are stored."""

    load: Callable[[Any, int], Any]

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d on, f32."""
        return kv.f32(self.load(d, n))


@dataclass(frozen=True)
class Head(StoredHead):
    """One head of a token of a buffer [T, heads, size]."""

    rows: Rows
    buffer: Any
    token: Any
    head: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d on, as they are stored."""
        return self.rows.load(self.buffer, self.token, self.head, d, width=n)

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Put f32 elements from dim d on, converted."""
        self.rows.store(self.buffer, self.token, self.head, d, value=converted(x, self.buffer.dtype))


@dataclass(frozen=True)
class NormalHead:
    """A head times a scale and by element a weight, gamma [size] + offset: what RMS norm makes of it."""

    head: Any
    scale: Any
    gamma: Any
    rows: Rows
    offset: float

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d on, f32."""
        weight = kv.f32(self.rows.load(self.gamma, d, width=n))
        if self.offset:
            weight = weight + self.offset
        return self.head.read(d, n) * self.scale * weight


@dataclass(frozen=True)
class CachedHead:
    """One head of a token of a cache; :meth:`read` and :meth:`write` are of a cache without scales."""

    cache: Any
    b: Any
    position: Any
    head: Any
    page: Any = None  # its raw one, where it is known

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d on, f32."""
        return as_vector(kv.f32(self.cache.load(self.b, self.head, self.position, d, width=n)))

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Put f32 elements from dim d on, converted."""
        stored = single(converted(x, self.cache.dtype))
        self.cache.store(self.b, self.head, self.position, d, stored, page=self.page)


@kv.func
def inverse_rms(head: Any, size: int, width: int, eps: float, group: Group, lane: Any) -> Any:
    """rsqrt(mean(x^2) + eps) of the first ``size`` elements of a head, by the threads of a group."""
    total = kv.vector(kv.f32, width)
    for d in range(lane * width, size, group.lanes * width):
        x = head.read(d, width)
        total = kv.math.fma(x, x, total)
    return kv.math.rsqrt(group.sum(total.reduce("add")) * (1.0 / size) + eps)
