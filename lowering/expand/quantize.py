# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantizing granules of a head: the scale, and the stored values under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec

from .base import Expansion
from .common import converted, single


@dataclass(frozen=True)
class Quantizer:
    """How the granules of a cache are written, ``width`` elements at a time.

    ``divides``: whether the target's own division is used. GPUs have a slow one; there the quotient is the product
    with the reciprocal, corrected once, which rounds as the division does.
    """

    spec: CacheSpec
    width: int
    divides: bool

    @staticmethod
    def of(spec: CacheSpec, width: int, at: Expansion) -> Quantizer:
        return Quantizer(spec, width, at.target.is_host)

    @kv.func
    def granule(self, cache: Any, b: Any, h: Any, position: Any, g: Any, read: Callable[[Any, int], Any], known: Any = None) -> None:
        """Write granule g of a head and its scale, by one thread; ``read(d, n)`` gives n f32 elements, ``known`` a scale to use."""
        start = g * self.spec.granularity
        stop = start + self.spec.granularity
        if self.spec.head_size % self.spec.granularity:
            stop = kv.math.min(stop, self.spec.head_size)
        if known is None:
            largest = kv.vector(kv.f32, self.width)
            for d in range(start, stop, self.width):
                largest = kv.math.max(largest, abs(read(d, self.width)))
            scale = self.scale_of(largest.reduce("max"))
        else:
            scale = known
        scale, stored = stored_scale(scale, self.spec.scale_dtype)
        inverse = 1.0 / scale
        cache.store_scale(b, h, position, start, stored)
        for d in range(start, stop, self.width):
            cache.store(b, h, position, d, single(self.stored(read(d, self.width), scale, inverse)))

    @kv.func
    def scale_of(self, largest: Any) -> Any:
        """The scale of a granule by its largest magnitude."""
        return largest / self.spec.dtype.largest

    @kv.func
    def stored(self, x: Any, scale: Any, inverse: Any) -> Any:
        """f32 elements over a scale, in the storage type."""
        if self.divides:
            return converted(x / scale, self.spec.dtype)
        quotient = x * inverse
        rest = kv.math.fma(-quotient, scale, x)
        corrected = kv.math.fma(rest, inverse, quotient)
        # Where the quotient overflows there is no rest; it saturates as it is.
        return converted(kv.where(abs(quotient) < 1e30, corrected, quotient), self.spec.dtype)


@kv.func
def stored_scale(scale: Any, dtype: DType) -> tuple[Any, Any]:
    """A scale as it is stored, in f32 and in its type; a scale of zero, which dequantizes nothing, becomes one."""
    rounded = kv.f32(dtype(kv.where(scale == 0.0, 1.0, scale)))
    rounded = kv.where(rounded == 0.0, 1.0, rounded)
    return rounded, dtype(rounded)
