# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Helpers of the cache operations' kernels: vectors, division of work among threads, ragged batches, heads."""

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

THREADS = 256  # per block on a GPU
BYTES = 16  # widest access
WARP = 32


def row_alignment(op: Any) -> int:
    """Alignment in bytes of every row of an operation's data buffers."""
    attributes = op.operation.attributes
    return ir.IntegerAttr(attributes["kv.row_alignment"]).value if "kv.row_alignment" in attributes else BYTES


def vector_width(*extents: int, types: tuple[DType, ...]) -> int:
    """Elements per access: the largest power of two that divides every extent, up to 16 bytes.

    With types of different sizes at most 8 lanes, which are one or two accesses of the wider type.
    """
    return min(lowbit(math.gcd(*extents)), most_lanes(types))


def most_lanes(types: tuple[DType, ...]) -> int:
    """Elements of the widest access to buffers of these types; see :func:`vector_width`."""
    bits = {t.bits if t.packed else t.itemsize * 8 for t in types}
    return BYTES * 8 // bits.pop() if len(bits) == 1 and not any(t.code for t in types) else 8


@dataclass(frozen=True)
class Rows:
    """Access to data buffers in vectors of ``width`` elements, given the rows' ``alignment``."""

    width: int
    alignment: int

    @kv.func
    def load(self, buffer: Any, *index: Any, width: int = 0) -> Any:
        """``width`` elements (default: the rows' width) as a vector. The last index is a multiple of the width."""
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
        """Alignment in bytes of an access with this many lanes."""
        return min(self.alignment, BYTES, lowbit(lanes * dtype.itemsize))


@dataclass(frozen=True)
class Work:
    """The division of work among threads: a block of ``threads`` processes ``tokens`` tokens of ``items`` items each.

    An item is what a thread processes at a time: a vector of a row, a pair of a rotation, its share of a quantized
    head. On the host a block is one thread, which processes all items of a token.
    """

    items: int
    threads: int
    tokens: int

    @staticmethod
    def of(at: Expansion, items: int, threads: int = THREADS) -> Work:
        """The division for an operation's target and schedule, with ``threads`` per block by default."""
        threads = 1 if at.target.is_host else at.schedule.get("threads", threads)
        return Work(items, threads, max(1, threads // items))

    @property
    def step(self) -> int:
        """The distance from an item of a thread to its next item of the same token."""
        return self.threads if self.tokens == 1 else self.items

    def blocks(self, tokens: Any) -> Any:
        """The number of blocks for ``tokens``, at compile time or run time."""
        return (tokens + (self.tokens - 1)) // self.tokens

    @kv.func
    def place(self) -> tuple[Any, Any]:
        """This thread's (token, first item) in the first iteration; the item is past the last for an idle thread."""
        thread = kv.thread_id.x
        if self.tokens == 1:
            return kv.block_id.x, thread
        slot = thread // self.items
        item = kv.where(slot < self.tokens, thread - slot * self.items, self.items)
        return kv.block_id.x * self.tokens + slot, item


@dataclass(frozen=True)
class Group:
    """``lanes`` neighbouring threads that reduce values together: a power of two up to a warp; 1 on the host.

    All threads of a warp take part in a reduction, so kernels pad their items to whole warps (:func:`whole_warps`),
    which makes conditions on tokens and on kinds of items uniform within a warp.
    """

    lanes: int

    @staticmethod
    def dividing(at: Expansion, chunks: int) -> Group:
        """The largest group that divides ``chunks`` evenly among its lanes."""
        return Group(1 if at.target.is_host else min(lowbit(chunks), WARP))

    @staticmethod
    def covering(at: Expansion, chunks: int) -> Group:
        """The smallest group with one lane per chunk, at most a warp."""
        return Group(1 if at.target.is_host else min(1 << (chunks - 1).bit_length(), WARP))

    @property
    def distances(self) -> tuple[int, ...]:
        """The shuffle distances of the steps of a reduction."""
        return tuple(1 << n for n in reversed(range(self.lanes.bit_length() - 1)))

    @kv.func
    def sum(self, x: Any) -> Any:
        """The sum over the lanes, in every lane."""
        for distance in kv.static(self.distances):
            x = x + kv.shuffle_xor(x, distance)
        return x

    @kv.func
    def max(self, x: Any) -> Any:
        """The maximum over the lanes, in every lane."""
        for distance in kv.static(self.distances):
            x = kv.math.max(x, kv.shuffle_xor(x, distance))
        return x


def whole_warps(at: Expansion, items: int) -> int:
    """Items padded so that no warp has items of two kinds."""
    return items if at.target.is_host else align_up(items, WARP)


@kv.func
def head_and_lane(item: Any, heads: int, per_head: int) -> tuple[Any, Any, Any]:
    """(head, part of the head, whether it is not padding) of an item; padding repeats the last head."""
    h = item // per_head
    return kv.math.min(h, heads - 1), item % per_head, h < heads


@kv.func
def advance(slots: int, slot: Any, phase: Any, count: Any) -> tuple[Any, Any]:
    """(slot, phase of its barriers) in a circular buffer, ``count`` uses later; ``count`` is at most ``slots``."""
    slot = slot + count
    over = slot >= slots
    return kv.where(over, slot - slots, slot), kv.where(over, phase ^ 1, phase)


@kv.func
def narrowed(table: Any, low: Any, high: Any, value: Any) -> tuple[Any, Any]:
    """[low, high) narrowed to the last entry of an ascending table that is <= value; an empty range stays empty.

    If no entry is <= value, the first entry of the range remains.
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
    """An i32 clamped to [0, bound], where a negative number counts as an unsigned one above 2^31.

    For numbers read from memory, which must not lead out of a buffer whatever their value.
    """
    return kv.i32(kv.math.min(kv.u32(x), kv.u32(bound)))


@kv.func
def sequence_of(offsets: Any, row: Any, rows: Any = None) -> tuple[Any, Any, Any]:
    """The sequence of a row of a ragged batch: (b, whether it has one, its number in the sequence).

    b is the largest with offsets[b] <= row, so that empty sequences are skipped. ``rows``, an estimate of the batch's
    row count, starts the search where an even batch would have the row, so that one lookup often suffices.
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
    """Whether the target's kernels may be scheduled before the previous kernel ends (:func:`begin`)."""
    return at.target.has("pdl")


@kv.func
def begin(early: bool) -> None:
    """Wait for the previous kernels, then let the next kernel be scheduled, which itself waits here."""
    if early:
        kv.griddepcontrol_wait()
        kv.griddepcontrol_launch_dependents()


@kv.func
def in_range(cache: Any, position: Any) -> Any:
    """Whether a sequence has room for a position, as far as is known without the lookup table.

    A continuous cache's region alone decides, so nothing is read for other positions, whose stores are dropped.
    """
    if cache.kind == CONTINUOUS:
        return (position >= 0) & (position < cache.field("capacity"))
    return True


@kv.func
def converted(x: Any, dtype: DType) -> Any:
    """x as another type, through f32 where there is no direct conversion."""
    if x.dtype is dtype:
        return x
    if dtype.is_integer and x.dtype.is_float:
        return dtype(kv.f32(x))
    return dtype(x)


@kv.func
def single(x: Any) -> Any:
    """A one-lane vector as a scalar, which is what accesses of width 1 take."""
    return x[0] if len(x) == 1 else x


@kv.func
def as_vector(x: Any) -> Any:
    """The result of an access as a vector, also for width 1: the inverse of :func:`single`."""
    return x if isinstance(x, kv.Vector) else kv.vector(x.dtype, [x])


# --- heads: sources and destinations of f32 elements -----------------------------------------------


class StoredHead:
    """One head of a token in any storage; ``load(d, n)`` gives stored elements."""

    load: Callable[[Any, int], Any]

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32."""
        return kv.f32(self.load(d, n))


@dataclass(frozen=True)
class Head(StoredHead):
    """One head of a token in a buffer [T, heads, size]."""

    rows: Rows
    buffer: Any
    token: Any
    head: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d up, without conversion."""
        return self.rows.load(self.buffer, self.token, self.head, d, width=n)

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Write f32 elements from dim d up, converted."""
        self.rows.store(self.buffer, self.token, self.head, d, value=converted(x, self.buffer.dtype))


@dataclass(frozen=True)
class NormalHead:
    """A head as RMS norm transforms it: times a scale and, per element, the weight gamma [size] + offset."""

    head: Any
    scale: Any
    gamma: Any
    rows: Rows
    offset: float

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32."""
        weight = kv.f32(self.rows.load(self.gamma, d, width=n))
        if self.offset:
            weight = weight + self.offset
        return self.head.read(d, n) * self.scale * weight


@dataclass(frozen=True)
class CachedHead:
    """One head of a token in a cache; :meth:`read` and :meth:`write` need a cache without scales."""

    cache: Any
    b: Any
    position: Any
    head: Any
    page: Any = None  # the unclamped page, where it is known

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32."""
        return as_vector(kv.f32(self.cache.load(self.b, self.head, self.position, d, width=n)))

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Write f32 elements from dim d up, converted."""
        stored = single(converted(x, self.cache.dtype))
        self.cache.store(self.b, self.head, self.position, d, stored, page=self.page)


@kv.func
def inverse_rms(head: Any, size: int, width: int, eps: float, group: Group, lane: Any) -> Any:
    """rsqrt(mean(x^2) + eps) of the first ``size`` elements of a head, computed by a group of threads."""
    total = kv.vector(kv.f32, width)
    for d in range(lane * width, size, group.lanes * width):
        x = head.read(d, width)
        total = kv.math.fma(x, x, total)
    return kv.math.rsqrt(group.sum(total.reduce("add")) * (1.0 / size) + eps)
