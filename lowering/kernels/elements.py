# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stored elements of 8 and 4 bits as f16, in words: the reader of records in registers.

A 4-bit element is not converted: masked out of its word it is a subnormal f16, ``n * 2^-24``, or ``n * 2^-20`` where
its bits are four places higher. Products of f16 take subnormal operands exactly, so the factors go elsewhere: that of
all elements into their scales, and that of every other element into the query or the finished output. A word of 8
elements takes four masks and a shift.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv
from kvarn.dialect.dtypes import DType, u4
from kvarn.dsl import ptx

SCALED_BY = 2.0**24  # what a masked 4-bit element must be multiplied by
# The factors of the words that a word of 4-bit elements becomes, beyond the inverse of SCALED_BY.
FACTORS_OF_WORD = (1.0, 16.0, 1.0, 16.0)
_LOW, _HIGH = 0x000F000F, 0x00F000F0


@kv.func
def widened(dtype: DType, word: Any) -> list[Any]:
    """The elements of a word as pairs of f16: neighbours of 8 bits; of 4 bits elements j and j + 4, in order of j."""
    if dtype is kv.i8:
        return kv.cvt_i8x4_to_f16x4(word)
    if dtype is kv.f8e5m2:
        return kv.cvt_e5m2x4_to_f16x4(word)
    if dtype is u4:
        upper = word >> 8
        return [word & _LOW, word & _HIGH, upper & _LOW, upper & _HIGH]
    return kv.cvt_e4m3x4_to_f16x4(word)


@kv.func
def widened_columns(dtype: DType, word: Any) -> list[Any]:
    """A word with 16 bits of each of two tokens: per element of a token, the pair of both tokens' as f16."""
    return widened(dtype, word if dtype is u4 else kv.prmt(word, 0, 0x3120))


@kv.func
def offsets(first: Any, second: Any) -> list[Any]:
    """What two words (scale, zero) add to elements, zeros times scales: the rounded pair of f16, and its remainders."""
    scales, zeros = kv.prmt(first, second, 0x5410), kv.prmt(first, second, 0x7632)
    rounded = kv.bitcast(kv.bitcast(scales, kv.f16) * kv.bitcast(zeros, kv.f16), kv.i32)
    text = "{ .reg .b32 x; neg.f16x2 x, $3; fma.rn.f16x2 $0, $1, $2, x; }"
    return [rounded, ptx.instruction(text, "=r,r,r,r", [scales.ir, zeros.ir, rounded.ir], kv.i32)]


def ones(value: float) -> int:
    """A word of two equal f16."""
    import struct

    return int.from_bytes(struct.pack("<e", value) * 2, "little")
