# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stored 8-bit elements as words of two 16-bit ones, by ordinary instructions, and times their scales.

The instructions that convert take 2 to 4 cycles of a warp, those that multiply pairs one: the time of a tile of a
decode's keys is that of its conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32
from kvarn.dsl import ptx
from kvarn.dsl.ptx import inline_asm
from kvarn.dsl.values import Value, bitcast, cast, literal, where

_HIGH_HALVES = 0x7632  # of two words
_HIGH_HALF = -0x10000
_HIGH_TWICE = 0x3232  # the high half of a word in both


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
    return [_widened(pair) for pair in found]


BytePairs = tuple[tuple[int, int], tuple[int, int]]  # which two bytes of a word, by what is known at run time
HALVES: BytePairs = ((0, 1), (2, 3))
EVERY_SECOND: BytePairs = ((0, 2), (1, 3))


def pair_of(word: Value, second: Value, pairs: BytePairs, stored: DType, dtype: DType) -> Value:
    """Two stored elements of a word, the ``second`` of both pairs or the first, as a word of two bf16 or f16, exactly.

    A selector of bytes, which the conversion needs anyway, chooses them. Of e4m3 as bf16 as in :func:`pairs_of`.
    """

    def chosen(selector: Callable[[int, int], int]) -> Value:
        return where(second, selector(*pairs[1]), selector(*pairs[0]))

    def below(i: int, j: int) -> int:
        """Bytes of the word below a byte of another."""
        return i | 4 << 4 | j << 8 | 4 << 12

    if dtype is bf16 and stored is f8e4m3:  # as ptx.cvt_e4m3x4_to_bf16x4
        text = (
            "{ .reg .b32 x; prmt.b32 x, $1, 0, $2; shl.b32 x, x, 4; and.b32 x, x, 0x87F087F0; "
            "fma.rn.bf16x2 $0, x, $3, $4; }"
        )
        with_signs = chosen(lambda i, j: i | (8 + i) << 4 | j << 8 | (8 + j) << 12)
        given = [word, with_signs, _word(0x7B807B80), _word(0x80008000)]
        return Value(inline_asm(text, "=r,r,r,r,r", [x.ir for x in given], "i32"), i32)
    if dtype is bf16 and stored is i8:
        return _i8x2_to_bf16x2(word, chosen(below))
    if stored is i8:  # as ptx.cvt_i8x4_to_f16x4
        text = "{ .reg .b32 x; xor.b32 x, $1, 0x80808080; prmt.b32 x, x, 0x64646464, $2; sub.f16x2 $0, x, $3; }"
        given = [word, chosen(below), _word(0x64806480)]
        return Value(inline_asm(text, "=r,r,r,r", [x.ir for x in given], "i32"), i32)
    if stored is f8e5m2:
        found = ptx.prmt(word, 0, chosen(lambda i, j: 4 | i << 4 | 4 << 8 | j << 12))
    else:
        found = ptx.cvt_e4m3x2_to_f16x2(ptx.prmt(word, 0, chosen(lambda i, j: i | j << 4 | 0x4400)))
    return found if dtype is f16 else _widened(found)


def _widened(pair: Value) -> Value:
    """Two f16, of as few digits as a bf16 has, as two bf16."""
    wide = cast(bitcast(pair, f16), f32)  # whose high halves have all digits
    return ptx.prmt(*(bitcast(wide[i], i32) for i in range(2)), _HIGH_HALVES)


def _i8x2_to_bf16x2(word: Value, selector: int | Value) -> Value:
    """Two bytes, chosen with the byte 0x43 above each, which makes a bf16 of 128 or more of them, as two bf16."""
    chosen = hex(selector) if isinstance(selector, int) else "$2"
    given = [word.ir] if isinstance(selector, int) else [word.ir, selector.ir]
    # 128 + x's low seven bits, minus 128, or of a negative x 256: x's bit of 128 is the lowest of the exponent.
    text = (
        f"{{ .reg .b32 x, s, c; prmt.b32 x, $1, 0x43434343, {chosen}; and.b32 s, x, 0xFF80FF80; "
        "and.b32 x, x, 0xFF7FFF7F; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $0, s, c, x; }"
    )
    return Value(inline_asm(text, "=r" + ",r" * len(given), given, "i32"), i32)


def times(pairs: Sequence[Value], scale: Value, dtype: DType) -> list[Value]:
    """Pairs times an f32. Of bf16 rounded once, but for what 16 bits more of the scale leave out."""
    if dtype is f16:
        wide = [cast(bitcast(pair, f16), f32) for pair in pairs]
        return [ptx.pack_f16x2(x[0] * scale, x[1] * scale) for x in wide]
    bits = bitcast(scale, i32)
    rest = scale - bitcast(bits & _HIGH_HALF, f32)
    both = [ptx.prmt(x, 0, _HIGH_TWICE).ir for x in (bits, bitcast(rest, i32))]  # packing rounds, and takes two cycles
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


# --- elements of 4 bits ----------------------------------------------------------------------------

# What makes a number of 4 bits in a half's mantissa: the bits above it, and minus the number that they are.
_ABOVE = {bf16: (0x43434343, {0: 0xC300C300, 8: 0xC308C308}), f16: (0x64646464, {0: 0xE400E400, 8: 0xE408E408})}
_ONE = {bf16: 0x3F803F80, f16: 0x3C003C00}
# Of e2m1: how far its exponent and mantissa move down, their bits then, and the power of two that is missing.
_E2M1 = {bf16: (6, 0x01C001C0, 0x7E807E80), f16: (3, 0x0E000E00, 0x74007400)}


def _word(bits: int) -> Value:
    return Value(literal(bits - (1 << 32) if bits >> 31 else bits, i32), i32)


def fma_pairs(a: Value, b: Value, c: Value, dtype: DType) -> Value:
    """a * b + c of two halves of ``dtype``, each rounded once."""
    return Value(inline_asm(f"fma.rn.{dtype.name}x2 $0, $1, $2, $3;", "=r,r,r,r", [a.ir, b.ir, c.ir], "i32"), i32)


def pairs_of_four_bits(word: Value, weight_format: str, dtype: DType) -> list[Value]:
    """Eight elements of 4 bits as four words of two bf16 or f16, exactly; see ``weight_groups``.

    Their order is that of :func:`in_order_of_four_bits`: bytes of the same half of a byte stand together.
    """
    found, low = [], 0x0F0F0F0F
    if weight_format == "e2m1":
        shift, mask, factor = _E2M1[dtype]
        zero = _word(0)
        for half in ((word << 4) & _word(low << 4), word & _word(low << 4)):
            for selector in (0x1404, 0x3424):  # an element in the high byte of each half of a word
                pair = ptx.prmt(half, zero, selector)
                bits = (pair & _word(0x80008000)) | ((pair >> shift) & mask)
                found.append(fma_pairs(bits, _word(factor), _word(0x80008000), dtype))
        return found
    if weight_format == "int4":
        word = word ^ _word(0x88888888)
    above, offsets = _ABOVE[dtype]
    offset = _word(offsets[0 if weight_format == "uint4" else 8])
    for half in (word & low, (word >> 4) & low):
        for selector in (0x4140, 0x4342):  # an element in the low byte of each half, below the byte of ``above``
            bits = ptx.prmt(half, _word(above), selector)
            found.append(fma_pairs(bits, _word(_ONE[dtype]), offset, dtype))
    return found


def in_order_of_four_bits(words: Sequence[Value]) -> list[Value]:
    """Eight 16-bit elements in four words, as :func:`pairs_of_four_bits` has those of a weight: 0 2, 4 6, 1 3, 5 7."""
    return [ptx.prmt(words[i], words[i + 1], selector) for selector in (0x5410, 0x7632) for i in (0, 2)]


def scaled_pairs(pairs: Sequence[Value], scale: Value, low: Value | None, exact: bool, dtype: DType) -> list[Value]:
    """Pairs times an f32, minus another, rounded; ``exact``: ``dtype`` has both, so that pairs are multiplied."""
    if not exact:
        found = []
        for pair in pairs:
            wide = cast(bitcast(pair, dtype), f32)
            both = [wide[i] * scale if low is None else wide[i] * scale - low for i in range(2)]
            found.append(ptx.pack_f16x2(*both) if dtype is f16 else ptx.pack_bf16x2(*both))
        return found
    pack = ptx.pack_f16x2 if dtype is f16 else ptx.pack_bf16x2
    factor = pack(scale, scale)
    rest = _word(0x80008000) if low is None else pack(-low, -low)
    return [fma_pairs(pair, factor, rest, dtype) for pair in pairs]
