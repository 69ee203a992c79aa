# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Math functions of the host target that stay in vector registers; those of the C library are calls per lane."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32


def exp2(x: Any) -> Any:
    """2 ** x of f32 to a few units in the last place; 0 below 2 ** -125, NaN for NaN. Scalar or vector."""
    clamped = kv.math.min(kv.math.max(x, -125.0), 128.0)
    whole = kv.math.floor(clamped + 0.5)
    f = clamped - whole  # in [-1/2, 1/2]: the series of e^(f ln 2) needs seven terms
    p = f * 1.5403530e-4 + 1.3333558e-3
    for c in (9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        p = p * f + c
    half = kv.bitcast((kv.i32(whole) + 126) << 23, f32)  # 2 ** 128 is no f32, but half of it is
    return kv.where(x < -125.0, 0.0, kv.where(x == x, (p + p) * half, x))
