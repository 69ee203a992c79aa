# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A record of 6 bits by functions of its own: e2m3, a sign, two bits of exponent and three of mantissa."""

from __future__ import annotations

from typing import Any

import kvarn as kv


def encode(x: Any) -> Any:
    """Eight numbers as six bytes, with four codes in three bytes each, the first in the low bits."""
    size = kv.math.min(abs(x), 7.5)
    # Added to a number whose last place is 2^-3, 2^-2 or 2^-1, a size is rounded to a multiple of that place.
    big = kv.where(size < 2.0, 1.5 * 2.0**20, kv.where(size < 4.0, 1.5 * 2.0**21, 1.5 * 2.0**22))
    n = kv.u32((size + big - big) * 8.0)
    code = kv.where(n < 16, n, kv.where(n < 32, (n >> 1) + 8, (n >> 2) + 16)) | ((kv.bitcast(x, kv.u32) >> 26) & 32)
    found = []
    for first in (0, 4):
        word = code[first] | (code[first + 1] << 6) | (code[first + 2] << 12) | (code[first + 3] << 18)
        found.extend([kv.u8((word >> 8 * i) & 255) for i in range(3)])
    return kv.from_lanes(found, kv.u8)


def decode(data: Any) -> Any:
    """The inverse."""
    found = []
    for first in (0, 3):
        low, middle, high = (kv.u32(data[first + i]) for i in range(3))
        word = low | (middle << 8) | (high << 16)
        for i in range(4):
            code = (word >> 6 * i) & 31
            n = kv.where(code < 16, code, kv.where(code < 24, (code - 8) << 1, (code - 16) << 2))
            sign = 1.0 - 2.0 * kv.f32((word >> (6 * i + 5)) & 1)
            found.append(sign * kv.f32(n) * 0.125)
    return kv.from_lanes(found, kv.f32)


CODE = kv.Code("e2m3", 6, 7.5, encode, decode)
