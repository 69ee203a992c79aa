# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stored elements of 8 and 4 bits as f16, in words: the reader of records in registers.

A u4 is not converted: masked out of its word it is a subnormal f16, ``n * 2^-24``, or ``n * 2^-20`` where its bits are
four places higher. Products of f16 take subnormal operands exactly, so the factors go elsewhere: that of all elements
into their scales, and that of every other element into the query or the finished output. A word of 8 elements takes
four masks and a shift.

An f4e2m1 has its exponent and mantissa moved to the low places of those of an f16, which is the number times 2^-14. A
codebook's numbers are f16: two ``prmt`` each look up their low and high bytes, of four elements at a time.
"""

from __future__ import annotations

import struct
from typing import Any

import kvarn as kv
from kvarn.dialect.dtypes import DType, f4e2m1, f8e4m3, f8e5m2, u4
from kvarn.dsl import ptx

_LOW, _HIGH = 0x000F000F, 0x00F000F0
# Shifts to the left that move the sign of element j of a half word to bit 15, and its other bits to bits 9 to 11.
_SIGNS, _SIZES = (12, 8, 4, 0), (9, 5, 1, -3)


def scaled_by(dtype: DType) -> float:
    """What the f16 that stands for an element must be multiplied by."""
    return 2.0**24 if dtype is u4 else 2.0**14 if dtype is f4e2m1 else 1.0


def factors_of_word(dtype: DType) -> tuple[float, ...]:
    """The factors of the words that a word of 4-bit elements becomes, beyond the inverse of :func:`scaled_by`."""
    return (1.0, 16.0, 1.0, 16.0) if dtype is u4 else (1.0,) * 4


@kv.func
def widened(dtype: DType, word: Any) -> list[Any]:
    """The elements of a word as pairs of f16: neighbours of 8 bits; of 4 bits elements j and j + 4, in order of j."""
    if dtype is kv.i8:
        return kv.cvt_i8x4_to_f16x4(word)
    if dtype is f8e5m2:
        return kv.cvt_e5m2x4_to_f16x4(word)
    if dtype is u4:
        upper = word >> 8
        return [word & _LOW, word & _HIGH, upper & _LOW, upper & _HIGH]
    if dtype is f4e2m1:
        return [moved(word, j) for j in range(4)]
    if dtype.table:
        return looked_up(dtype, word)
    return kv.cvt_e4m3x4_to_f16x4(word)


@kv.func
def moved(word: Any, j: int) -> Any:
    """The f4e2m1 elements j and j + 4 of a word, as a pair of f16 that are the numbers times 2^-14."""
    shift = _SIZES[j]
    size = word << shift if shift > 0 else kv.bitcast(kv.bitcast(word, kv.u32) >> -shift, kv.i32)
    return ((word << _SIGNS[j]) & _bits(0x80008000)) | (size & 0x0E000E00)


@kv.func
def looked_up(dtype: DType, word: Any) -> list[Any]:
    """The elements j and j + 4 of a word, in order of j, as pairs of f16 of a table."""
    low, high = bytes_of(dtype.table, 0, word), bytes_of(dtype.table, 1, word)
    found = []
    for j in kv.static(range(4)):
        pairs = [kv.prmt(low[half], high[half], 0x40 + 0x11 * j) for half in range(2)]
        found.append(kv.prmt(pairs[0], pairs[1], 0x5410))
    return found


@kv.func
def bytes_of(table: Any, which: int, word: Any) -> list[Any]:
    """A byte of the f16 of each element of a word, the low (``which`` 0) or the high one: two words of four."""
    quads = quads_of(table, which)
    index, found = word & 0x77777777, []
    upper = kv.bitcast(kv.bitcast(word, kv.u32) >> 3, kv.i32) & 0x11111111  # 1 for elements of the table's upper half
    for half in kv.static(range(2)):
        at, above = (x if half == 0 else kv.bitcast(kv.bitcast(x, kv.u32) >> 16, kv.i32) for x in (index, upper))
        mask = kv.prmt(0xFF00, 0, above)
        found.append((kv.prmt(quads[2], quads[3], at) & mask) | (kv.prmt(quads[0], quads[1], at) & ~mask))
    return found


def quads_of(table: tuple[float, ...], which: int) -> list[int]:
    """The low (``which`` 0) or high bytes of 16 numbers of f16, as four words."""
    of = bytes(struct.pack("<e", x)[which] for x in table)
    return [_bits(int.from_bytes(of[i : i + 4], "little")) for i in range(0, 16, 4)]


def _bits(word: int) -> int:
    """A word as a signed number."""
    return word - 2**32 if word >= 2**31 else word


@kv.func
def widened_columns(dtype: DType, word: Any) -> list[Any]:
    """A word with 16 bits of each of two tokens: per element of a token, the pair of both tokens' as f16."""
    return widened(dtype, word if dtype.packed else kv.prmt(word, 0, 0x3120))


def halves(dtype: DType, word: Any) -> tuple[Any, Any]:
    """(bytes 0 and 2, bytes 1 and 3) of a word of 8-bit elements as f16."""
    if dtype is f8e4m3:
        first, second = kv.cvt_e4m3x4_to_f16x4(kv.prmt(word, kv.i32(0), 0x3120))
        return first, second
    if dtype is f8e5m2:
        return kv.prmt(word, kv.i32(0), 0x2404), word & kv.i32(0xFF00FF00 - (1 << 32))
    signless = word ^ kv.i32(0x80808080 - (1 << 32))  # byte x + 128 under the byte 0x64 is the f16 1024 + 128 + x
    first, second = (kv.prmt(signless, kv.i32(0x64646464), selector) for selector in (0x4240, 0x4341))
    offset = kv.i32(0x64806480)
    text = "sub.f16x2 $0, $1, $2;"
    first, second = (ptx.instruction(text, "=r,r,r", [x.ir, offset.ir], kv.i32) for x in (first, second))
    return first, second


@kv.func
def offsets(first: Any, second: Any) -> list[Any]:
    """What two words (scale, zero) add to elements, zeros times scales: the rounded pair of f16, and its remainders."""
    scales, zeros = kv.prmt(first, second, 0x5410), kv.prmt(first, second, 0x7632)
    rounded = kv.bitcast(kv.bitcast(scales, kv.f16) * kv.bitcast(zeros, kv.f16), kv.i32)
    text = "{ .reg .b32 x; neg.f16x2 x, $3; fma.rn.f16x2 $0, $1, $2, x; }"
    return [rounded, ptx.instruction(text, "=r,r,r,r", [scales.ir, zeros.ir, rounded.ir], kv.i32)]


def ones(value: float) -> int:
    """A word of two equal f16."""
    return int.from_bytes(struct.pack("<e", value) * 2, "little")
