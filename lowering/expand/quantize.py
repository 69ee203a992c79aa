# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Quantizing one granule of a head by one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn import dsl as kv

from .common import converted, single


@kv.func
def quantized_granule(
    cache: Any, b: Any, h: Any, position: Any, g: Any, read: Callable[[Any], Any], width: int, known: Any = None
) -> None:
    """Write granule g of a head and its scale; ``read(d)`` gives ``width`` f32 elements, ``known`` a scale to use."""
    spec = cache.spec
    start = g * spec.granularity
    stop = start + spec.granularity
    if spec.head_size % spec.granularity:
        stop = kv.math.min(stop, spec.head_size)
    if known is None:
        largest = kv.vector(kv.f32, width)
        for d in range(start, stop, width):
            largest = kv.math.max(largest, abs(read(d)))
        scale = largest.reduce("max") * (1.0 / spec.dtype.largest)
    else:
        scale = known
    stored, inverse = scale_and_inverse(scale, spec.scale_dtype)
    cache.store_scale(b, h, position, start, stored)
    for d in range(start, stop, width):
        cache.store(b, h, position, d, single(converted(read(d) * inverse, spec.dtype)))


@kv.func
def scale_and_inverse(scale: Any, dtype: Any) -> tuple[Any, Any]:
    """A scale as it is stored, and one over it; a scale of zero, which dequantizes nothing, becomes one."""
    rounded = kv.f32(dtype(kv.where(scale == 0.0, 1.0, scale)))
    rounded = kv.where(rounded == 0.0, 1.0, rounded)
    return dtype(rounded), 1.0 / rounded
