# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Query rows as sums of two e4m3 terms, for products with unconverted 8-bit keys.

A bf16 has 8 bits of significand, an e4m3 has 4: a row, times a power of two, is the sum of two e4m3 rows, exactly
except for elements below 2^-9 of the row's largest, whose error is 2^-17 of it. Both products together cost as much as
one of bf16, and no key is converted.

Written with functions of the kernel language, which emit ops in a pass as they do in a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.dialect.dtypes import DType, bf16, f16, f32, i32
from kvarn.dsl import math, ptx
from kvarn.dsl.ptx import inline_asm
from kvarn.dsl.values import Value, bitcast

TOP = 7  # the largest element of a row is scaled to 2^TOP to 2^(TOP + 1); e4m3's maximum is 448
LEAST_BITS = 41  # of the exponent of a row's largest element, so that all powers of two are normal


def word(text: str, constraints: str, operands: Sequence[Any]) -> Value:
    """A word from inline PTX."""
    return Value(inline_asm(text, constraints, [x.ir for x in operands], "i32"), i32)


def two_of(dtype: DType, held: Any) -> list[Any]:
    """The elements of a word of bf16 or f16, as f32."""
    if dtype is bf16:
        return [bitcast(x, f32) for x in (held << 16, held & i32(-(1 << 16)))]
    return [f32(x) for x in bitcast(held, f16)]


def largest(dtype: DType, words: Sequence[Any]) -> Any:
    """The largest magnitude of words of bf16 or f16."""
    most, *rest = [held & i32(0x7FFF7FFF) for held in words]
    for one in rest:
        most = word(f"max.{dtype.name}x2 $0, $1, $2;", "=r,r,r", [most, one])
    first, second = two_of(dtype, most)
    return math.max(first, second)


def powers_of(most: Any, top: int = TOP) -> tuple[Any, Any]:
    """(factor of a row, inverse factor), powers of two, from the row's largest magnitude.

    The largest element is scaled to 2^top to 2^(top + 1).
    """
    bits = math.max(bitcast(most, i32) >> 23, LEAST_BITS)
    return bitcast((2 * 127 + top - bits) << 23, f32), bitcast((bits - top) << 23, f32)


def scaled(words: Sequence[Any], factor: Any) -> list[Any]:
    """Words of bf16 times a power of two."""
    pair = ptx.pack_bf16x2(factor, factor)
    return [word("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, pair]) for x in words]


def terms_of(words: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The e4m3 words whose sum an even number of words of scaled bf16 is: the first terms, the second terms.

    The first term has the upper four bits of the significand, the second the rest.
    """
    first, second = [], []
    for held in words:
        both = ptx.pack_f16x2(*two_of(bf16, held))
        upper = both & i32(0xFF80FF80 - (1 << 32))
        first.append(upper)
        second.append(word("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [both, upper]))
    return _bytes_of(first), _bytes_of(second)


def _bytes_of(pairs: Sequence[Any]) -> list[Any]:
    """Words of four e4m3, from two pairs of f16 each."""
    text = [f"cvt.rn.satfinite.e4m3x2.f16x2 {to}, ${number};" for to, number in (("a", 1), ("b", 2))]
    joined = f"{{ .reg .b16 a, b; {' '.join(text)} mov.b32 $0, {{a, b}}; }}"
    return [word(joined, "=r,r,r", pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
