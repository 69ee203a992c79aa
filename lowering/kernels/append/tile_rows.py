# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of tiles, quantized to a cache with scales: a row per thread, as ``kv.append`` writes heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvarn.dialect.layout import CacheSpec, lowbit
from kvarn.dsl.handles import Cache

from ..common import Group
from .quantize import Quantizer

WIDEST, MOST_GRANULES = 16, 16


def why_not(spec: CacheSpec) -> str | None:
    """Why rows cannot be quantized to a cache; None if they can."""
    if spec.granules > MOST_GRANULES:
        return f"a head has at most {MOST_GRANULES} scales, got {spec.granules}"
    return None if _quantizer(spec, False).in_registers else "granules must divide the head, into at most 16 vectors"


def _quantizer(spec: CacheSpec, on_host: bool) -> Quantizer:
    """One thread per granule."""
    width = min(WIDEST, lowbit(math.gcd(spec.granularity, spec.head_size)))
    return Quantizer(spec, width, Group(1), on_host)


def write_row(
    cache: Cache, batch: Any, head: Any, token: Any, read: Callable[[int, int], Any], on_host: bool = False
) -> None:
    """Quantize a head; ``read(d, n)`` gives n f32 elements from d up."""
    quantizer = _quantizer(cache.spec, on_host)
    for granule in range(cache.spec.granules):
        held = quantizer.read(read, granule)
        quantizer.write(cache, batch, head, token, granule, True, held, read)
