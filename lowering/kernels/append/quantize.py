# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantization of the granules of a head: the scale, and the stored values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect import codes
from kvarn.dialect.dtypes import CODED, bounds, f16
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.records import MOST_VALUE
from kvarn.dsl import ptx

from .. import hadamard
from ..base import Expansion
from ..common import WARP, Group, converted, single

_HELD = 16  # the most chunks that a thread has in registers
_PACKED_BASES = -sum(0x4B400000 << 4 * i for i in range(8)) % 2**32  # less the bits of 1.5 * 2^23 in each place
MOST_PACKED = 32  # packed elements of a thread: what it stores at once
_SMALLEST = 2.0**-127  # the smallest scale with a finite reciprocal


@dataclass(frozen=True)
class Quantizer:
    """How the granules of a cache are written: by a group of threads each, in chunks of ``width`` elements.

    This is the only writer of quantized records: append, RoPE + append, convert and project + append call it.

    ``divides``: whether to use the target's division. It is slow on GPUs, which multiply by the reciprocal and correct
    the quotient once, with the same rounding as the division.
    """

    spec: CacheSpec
    width: int
    group: Group
    divides: bool

    @staticmethod
    def of(spec: CacheSpec, width: int, at: Expansion) -> Quantizer:
        """The quantizer for a cache; ``width`` divides head size and granularity."""
        group = Group.dividing(at, spec.granularity // width)
        found = Quantizer(spec, width, group, at.target.is_host)
        return found if found.in_registers else Quantizer(spec, width, Group(1), at.target.is_host)

    @staticmethod
    def of_rows(spec: CacheSpec, width: int, at: Expansion) -> Quantizer:
        """The quantizer for heads that are read in vectors of ``width`` elements, or of a multiple of it.

        A thread has up to a copy's bytes of packed elements, 32: most of the work per token is done once per thread,
        and fewer lanes share a group. It has fewer where a token's heads would not fill a warp.
        """
        if spec.packed and not at.target.is_host:
            most = math.gcd(spec.granularity, MOST_PACKED)
            while width < most and spec.num_heads * spec.head_size >= 2 * width * WARP:
                width *= 2
        return Quantizer.of(spec, width, at)

    @property
    def chunks(self) -> int:
        """Chunks of a granule per thread."""
        return self.spec.granularity // self.width // self.group.lanes

    @property
    def in_registers(self) -> bool:
        """Whether a thread keeps its chunks in registers from computing the scale until writing.

        Those of packed elements always are: zeros and rotations need all of them.
        """
        return self.spec.head_size % self.spec.granularity == 0 and (self.spec.packed or self.chunks <= _HELD)

    @property
    def threads(self) -> int:
        """Threads per head."""
        return self.spec.granules * self.group.lanes

    @kv.func
    def read(self, read: Callable[[Any, int], Any], part: Any) -> list[Any]:
        """The chunks of thread ``part`` of a head, if they are kept; ``read(d, n)`` gives n f32 elements."""
        first, step = self.first(part), self.group.lanes * self.width
        return [read(first + k * step, self.width) for k in kv.static(range(self.chunks if self.in_registers else 0))]

    @kv.func
    def first(self, part: Any) -> Any:
        """The first dim of a thread."""
        return part // self.group.lanes * self.spec.granularity + part % self.group.lanes * self.width

    @kv.func
    def write(
        self, cache: Any, b: Any, h: Any, position: Any, part: Any, active: Any, held: list[Any],
        read: Callable[[Any, int], Any], known: Any = None,
    ) -> None:  # fmt: skip
        """Write the chunks of thread ``part`` of a head, rotated, and the scale: the granule's or, if given, ``known``.

        Every thread of a warp must call it; threads that are not ``active`` write nothing.
        """
        first, step, own = self.first(part), self.group.lanes * self.width, known is None
        if self.spec.rotation:
            lanes = self.group.lanes
            held = hadamard.of_vectors(held, self.spec.rotation, lanes, kv.lane_id() if lanes > 1 else None)
        if self.spec.zero:
            self.write_with_zero(cache, b, h, position, part, active, held)
        elif self.in_registers:
            if own:
                largest = abs(held[0])
                for x in held[1:]:
                    largest = kv.math.max(largest, abs(x))
                known = self.scale_of(self.group.max(largest.reduce("max")))
            scale, in_cache = stored_scale(known, self.spec)
            inverse = 1.0 / kv.math.max(scale, _SMALLEST)
            if active:
                for k in kv.static(range(self.chunks)):
                    cache.store(b, h, position, first + k * step, single(self.stored(held[k], scale, inverse, own)))
                if part % self.group.lanes == 0:
                    cache.store_scale(b, h, position, first, in_cache)
        elif active:  # one thread per granule, which may be a short one at the head's end
            stop = kv.math.min(first + self.spec.granularity, self.spec.head_size)
            if own:
                most = kv.vector(kv.f32, self.width)
                for d in range(first, stop, self.width):
                    most = kv.math.max(most, abs(read(d, self.width)))
                known = self.scale_of(most.reduce("max"))
            scale, in_cache = stored_scale(known, self.spec)
            inverse = 1.0 / kv.math.max(scale, _SMALLEST)
            cache.store_scale(b, h, position, first, in_cache)
            for d in range(first, stop, self.width):
                cache.store(b, h, position, d, single(self.stored(read(d, self.width), scale, inverse, own)))

    @kv.func
    def write_with_zero(self, cache: Any, b: Any, h: Any, position: Any, part: Any, active: Any, held: Any) -> None:
        """:meth:`write` for a granule with a zero: its least value, in units of the scale.

        Granules divide the head and are in registers.
        """
        first, step, dtype = self.first(part), self.group.lanes * self.width, self.spec.scale_dtype
        least, greatest = held[0], held[0]
        for x in held[1:]:
            least, greatest = kv.math.min(least, x), kv.math.max(greatest, x)
        ends = -self.group.max((-least).reduce("max")), self.group.max(greatest.reduce("max"))
        least, greatest = (kv.math.max(kv.math.min(x, MOST_VALUE), -MOST_VALUE) for x in ends)
        reach = kv.math.max((greatest - least) * (1.0 / self.spec.dtype.largest), kv.math.abs(least) * 2.0**-15)
        scale, in_cache = stored_scale(reach, self.spec)
        inverse = 1.0 / scale
        zero = dtype(least * inverse)
        if active:
            for k in kv.static(range(self.chunks)):
                elements = self.elements(held[k], inverse, kv.f32(zero))
                cache.store(b, h, position, first + k * step, single(elements))
            if part % self.group.lanes == 0:
                cache.store_scale(b, h, position, first, kv.from_lanes([in_cache, zero], dtype))

    @kv.func
    def elements(self, x: Any, inverse: Any, zero: Any) -> Any:
        """f32 values, a multiple of 8, times a factor less the zero, rounded to 4-bit elements, as bytes of two."""
        # In a sum with this number an f32 is rounded to a whole one, in the sum's lowest bits.
        base, most = 1.5 * 2**23, self.spec.dtype.largest
        if self.divides:
            return self.packed(kv.bitcast(clamped(kv.math.fma(x, inverse, -zero), most) + base, kv.u32), _PACKED_BASES)
        # GPUs saturate to 0 and 1 on the way, so a sixteenth is computed.
        factor, less, codes = inverse * 0.0625, zero * -0.0625, []
        for i in kv.static(range(self.width)):
            part = kv.math.min(ptx.fma_saturated(x[i], factor, less), most / 16)
            codes.append(kv.bitcast(kv.math.fma(part, kv.f32(16.0), kv.f32(base)), kv.u32))
        return self.packed(codes, _PACKED_BASES)

    @kv.func
    def packed(self, codes: Any, base: int = 0) -> Any:
        """4-bit elements, a multiple of 8 in u32, as bytes of two; eight of them are added to ``base``."""
        words = []
        for n in kv.static(range(0, self.width, 8)):
            word = kv.u32(base)
            for i in kv.static(range(8)):
                word = word + (codes[n + i] << 4 * i)
            words.append(word)
        return kv.bitcast(kv.from_lanes(words, kv.u32), kv.u8)

    @kv.func
    def nearest(self, x: Any) -> Any:
        """f32 values, a multiple of 8, as the nearest 4-bit elements of a table, as bytes of two."""
        limits, signed = bounds(self.spec.dtype)
        size, codes = abs(x) if signed else x, kv.vector(kv.u32, self.width)
        for limit in kv.static(limits):
            codes = codes + kv.where(size >= limit, kv.u32(1), kv.u32(0))
        if signed:
            codes = codes + ((kv.bitcast(x, kv.u32) >> 28) & 8)
        return self.packed(codes)

    @kv.func
    def scale_of(self, largest: Any) -> Any:
        """The scale of a granule by its largest magnitude."""
        return largest / self.spec.dtype.largest

    @kv.func
    def stored(self, x: Any, scale: Any, inverse: Any, own: bool) -> Any:
        """f32 elements divided by a scale, in the storage type; with the granule's own scale no quotient overflows."""
        if self.divides:
            return self.rounded(x / scale, x)
        quotient = x * inverse
        corrected = kv.math.fma(kv.math.fma(-quotient, scale, x), inverse, quotient)
        if not own:  # an infinite quotient saturates; it has no remainder for a correction
            corrected = kv.where(abs(quotient) < 1e30, corrected, quotient)
        return self.rounded(corrected, x)

    @kv.func
    def rounded(self, quotients: Any, x: Any) -> Any:
        """f32 values ``x``, divided by their scale, in the storage type."""
        if not self.spec.packed:
            return converted(quotients, self.spec.dtype)
        quotients = kv.where(quotients == 0.0, x * 0.0, quotients)  # the correction of a zero has lost its sign
        return self.coded(quotients) if self.spec.dtype.code else self.nearest(quotients)

    @kv.func
    def coded(self, quotients: Any) -> Any:
        """f32 values, a multiple of 8, as the bytes of a user's own elements."""
        encode, lanes = codes.of(self.spec.dtype.code).encoded, []
        for n in kv.static(range(0, self.width, CODED)):
            data = encode(kv.from_lanes([quotients[n + i] for i in range(CODED)], kv.f32))
            lanes.extend([data[i] for i in range(self.spec.dtype.bits)])
        return kv.from_lanes(lanes, kv.u8)


@kv.func
def clamped(x: Any, most: float) -> Any:
    """x, at least 0 and at most ``most``."""
    return kv.math.max(kv.math.min(x, most), 0.0)


@kv.func
def stored_scale(scale: Any, spec: CacheSpec) -> tuple[Any, Any]:
    """A scale for divisions, in f32, and as it is stored; a zero scale divides as one, and is stored so, too, unless
    the record keeps zero scales.
    """
    dtype = spec.scale_dtype
    if spec.record.keeps_zero_scales:
        in_cache = dtype(scale)
        rounded = kv.f32(in_cache)
        return kv.where(rounded == 0.0, 1.0, rounded), in_cache
    if spec.packed and dtype is f16:  # other types saturate, or have the range of f32
        scale = kv.math.min(scale, dtype.largest)
    rounded = kv.f32(dtype(kv.where(scale == 0.0, 1.0, scale)))
    rounded = kv.where(rounded == 0.0, 1.0, rounded)
    return rounded, dtype(rounded)
