# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stored 8-bit elements as words of two 16-bit ones, by ordinary instructions, and times their scales.

The instructions that convert take 2 to 4 cycles of a warp (measured on an H200), those that multiply pairs one: the
time of a tile of a decode's keys is that of its conversions.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32
from kvarn.dsl import ptx
from kvarn.dsl.ptx import inline_asm
from kvarn.dsl.values import Value, bitcast, cast

_HIGH_HALVES = 0x7632  # of two words
_HIGH_HALF = -0x10000


def pairs_of(word: Value, stored: DType, dtype: DType) -> list[Value]:
    """Four stored elements in a word as two words of two bf16 or f16, exactly; of e4m3 as bf16 a NaN becomes 480."""
    if dtype is bf16 and stored is f8e4m3:
        return ptx.cvt_e4m3x4_to_bf16x4(word)
    if dtype is bf16 and stored is i8:
        return [_i8x2_to_bf16x2(word, selector) for selector in (0x4140, 0x4342)]
    if stored is i8:
        found = ptx.cvt_i8x4_to_f16x4(word)
    elif stored is f8e5m2:  # the high byte of an f16
        found = [ptx.prmt(word, 0, selector) for selector in (0x1404, 0x3424)]
    else:
        found = ptx.cvt_e4m3x4_to_f16x4(word)
    if dtype is f16:
        return found
    wide = [cast(bitcast(pair, f16), f32) for pair in found]  # whose high halves have all digits
    return [ptx.prmt(*(bitcast(x[i], i32) for i in range(2)), _HIGH_HALVES) for x in wide]


def _i8x2_to_bf16x2(word: Value, selector: int) -> Value:
    """Two bytes, chosen with the byte 0x43 above each, which makes a bf16 of 128 or more of them, as two bf16."""
    # 128 + x's low seven bits, minus 128, or of a negative x 256: x's bit of 128 is the lowest of the exponent.
    text = (
        f"{{ .reg .b32 x, s, c; prmt.b32 x, $1, 0x43434343, {selector:#x}; and.b32 s, x, 0xFF80FF80; "
        "and.b32 x, x, 0xFF7FFF7F; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $0, s, c, x; }"
    )
    return Value(inline_asm(text, "=r,r", [word.ir], "i32"), i32)


def times(pairs: Sequence[Value], scale: Value, dtype: DType) -> list[Value]:
    """Pairs times an f32. Of bf16 rounded once, but for what 16 bits more of the scale leave out."""
    if dtype is f16:
        wide = [cast(bitcast(pair, f16), f32) for pair in pairs]
        return [ptx.pack_f16x2(x[0] * scale, x[1] * scale) for x in wide]
    high = ptx.pack_bf16x2(scale, scale)
    rest = scale - bitcast(high & _HIGH_HALF, f32)
    both = [high.ir, ptx.pack_bf16x2(rest, rest).ir]
    text = (
        "{ .reg .b32 part; mov.b32 part, 0x80008000; "  # -0, which adds nothing
        "fma.rn.bf16x2 part, $1, $3, part; fma.rn.bf16x2 $0, $1, $2, part; }"
    )
    return [Value(inline_asm(text, "=r,r,r,r", [x.ir, *both], "i32"), i32) for x in pairs]


def converted(words: Sequence[Value], factors: Sequence[Value], stored: DType, dtype: DType) -> list[Value]:
    """Words of four stored elements as words of two of ``dtype``, times their scales, each of an equal part of them."""
    pairs = [pair for word in words for pair in pairs_of(word, stored, dtype)]
    if not factors:
        return pairs
    each = len(pairs) // len(factors)
    return [x for i, factor in enumerate(factors) for x in times(pairs[i * each : (i + 1) * each], factor, dtype)]
