# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of tiles, quantized to a cache with scales: a row per thread, as ``kv.append`` writes heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import CacheSpec, lowbit
from kvarn.dsl import functional
from kvarn.dsl.handles import Cache
from kvarn.dsl.values import Value, vector
from kvarn.lowering.kernels.append.quantize import Quantizer
from kvarn.lowering.kernels.common import Group

from .ir import WARPGROUP
from .lines import Lines
from .threads import Threads, scalar

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


def write_rows(op: Any, cache: Cache, lines: Lines, threads: Threads) -> None:
    """Write the rows of a tile in shared memory to tokens before ``count``."""
    batch, head, first, count = (scalar(x) for x in (op.batch, op.head, op.first, op.count))
    with functional.loop(threads.thread, lines.rows, threads.consumers * WARPGROUP) as row:
        token = first + row

        def read(column: int, width: int, row: Value = row) -> Any:
            found = [lines.load(row, column + i) for i in range(width)]
            return vector(f32, found) if width > 1 else found[0]

        with functional.when((token >= 0) & (token < count)):
            write_row(cache, batch, head, token, read)
