# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversion of 8-bit and 4-bit elements to pairs of bf16 or f16, and multiplication by their scales.

The conversion instructions have a fraction of the throughput of integer and fma instructions, and the time of a decode
over 8-bit keys is dominated by conversions. So most conversions are byte permutes and packed fma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, i8, i32, u4
from kvarn.dsl import ptx
from kvarn.dsl.ptx import inline_asm
from kvarn.dsl.values import Value, bitcast, cast, literal, where

_HIGH_HALVES = 0x7632  # prmt: the high halves of two words
_HIGH_HALF = -0x10000
_HIGH_TWICE = 0x3232  # prmt: the high half of a word, twice


def pairs_of(word: Value, stored: DType, dtype: DType) -> list[Value]:
    """Convert four 8-bit elements to two words of two bf16 or f16, exactly; e4m3 to bf16 turns NaN into 480."""
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


BytePairs = tuple[tuple[int, int], tuple[int, int]]  # two pairs of bytes of a word, one chosen at run time
HALVES: BytePairs = ((0, 1), (2, 3))
EVERY_SECOND: BytePairs = ((0, 2), (1, 3))


def pair_of(word: Value, second: Value, pairs: BytePairs, stored: DType, dtype: DType) -> Value:
    """Convert one pair of 8-bit elements of a word to bf16 or f16, exactly: the ``second`` of ``pairs`` or the first.

    The byte selector of the prmt that the conversion needs anyway chooses the pair. NaN as in :func:`pairs_of`.
    """

    def chosen(selector: Callable[[int, int], int]) -> Value:
        return where(second, selector(*pairs[1]), selector(*pairs[0]))

    def below(i: int, j: int) -> int:
        """The selector of bytes i and j, each below a byte of the other operand."""
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
    """Convert two f16 to bf16; their mantissas must fit bf16."""
    wide = cast(bitcast(pair, f16), f32)  # the high halves hold the whole mantissa
    return ptx.prmt(*(bitcast(wide[i], i32) for i in range(2)), _HIGH_HALVES)


def _i8x2_to_bf16x2(word: Value, selector: int | Value) -> Value:
    """Convert two i8 to bf16: with the byte 0x43 above it, each is a bf16 of 128 plus its low seven bits."""
    chosen = hex(selector) if isinstance(selector, int) else "$2"
    given = [word.ir] if isinstance(selector, int) else [word.ir, selector.ir]
    # Subtract 128, or 256 if x is negative: the sign bit of x is the lowest bit of the exponent.
    text = (
        f"{{ .reg .b32 x, s, c; prmt.b32 x, $1, 0x43434343, {chosen}; and.b32 s, x, 0xFF80FF80; "
        "and.b32 x, x, 0xFF7FFF7F; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $0, s, c, x; }"
    )
    return Value(inline_asm(text, "=r" + ",r" * len(given), given, "i32"), i32)


def times(pairs: Sequence[Value], scale: Value, dtype: DType) -> list[Value]:
    """Multiply pairs by an f32 scale. bf16 uses the scale's leading 16 bits and the next 16, and rounds once."""
    if dtype is f16:
        wide = [cast(bitcast(pair, f16), f32) for pair in pairs]
        return [ptx.pack_f16x2(x[0] * scale, x[1] * scale) for x in wide]
    bits = bitcast(scale, i32)
    rest = scale - bitcast(bits & _HIGH_HALF, f32)
    both = [ptx.prmt(x, 0, _HIGH_TWICE).ir for x in (bits, bitcast(rest, i32))]  # prmt truncates
    text = (
        "{ .reg .b32 part; mov.b32 part, 0x80008000; "  # -0: the neutral element
        "fma.rn.bf16x2 part, $1, $3, part; fma.rn.bf16x2 $0, $1, $2, part; }"
    )
    return [Value(inline_asm(text, "=r,r,r,r", [x.ir, *both], "i32"), i32) for x in pairs]


def converted(words: Sequence[Value], factors: Sequence[Value], stored: DType, dtype: DType) -> list[Value]:
    """Convert words of elements to words of two ``dtype``, times scales, one per equal part of them.

    Of u4, ``factors`` is the word (scale, zero) of all of them.
    """
    if stored is u4:
        return with_zeros(words, factors[0], dtype)
    pairs = [pair for word in words for pair in pairs_of(word, stored, dtype)]
    if not factors:
        return pairs
    each = len(pairs) // len(factors)
    return [x for i, factor in enumerate(factors) for x in times(pairs[i * each : (i + 1) * each], factor, dtype)]


# --- elements of 4 bits ----------------------------------------------------------------------------

# 4 bits become a number in the mantissa of a half: the bits above them, and minus the value of these bits.
_ABOVE = {bf16: (0x43434343, {0: 0xC300C300, 8: 0xC308C308}), f16: (0x64646464, {0: 0xE400E400, 8: 0xE408E408})}
_ONE = {bf16: 0x3F803F80, f16: 0x3C003C00}
# e2m1: the right shift of its exponent and mantissa, the mask afterwards, the factor that corrects the exponent.
_E2M1 = {bf16: (6, 0x01C001C0, 0x7E807E80), f16: (3, 0x0E000E00, 0x74007400)}


def _word(bits: int) -> Value:
    return Value(literal(bits - (1 << 32) if bits >> 31 else bits, i32), i32)


def fma_pairs(a: Value, b: Value, c: Value, dtype: DType) -> Value:
    """a * b + c for two packed ``dtype``, each rounded once."""
    return Value(inline_asm(f"fma.rn.{dtype.name}x2 $0, $1, $2, $3;", "=r,r,r,r", [a.ir, b.ir, c.ir], "i32"), i32)


def pairs_of_four_bits(word: Value, weight_format: str, dtype: DType) -> list[Value]:
    """Convert eight 4-bit elements to four words of two bf16 or f16, exactly; formats as in ``weight_groups``.

    The order is that of :func:`in_order_of_four_bits`: the low nibbles of all bytes, then the high nibbles.
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


def with_zeros(words: Sequence[Value], pair: Value, dtype: DType) -> list[Value]:
    """Convert words of eight u4 to words of two neighbours: (element + zero) * scale, from a word (scale, zero).

    An element becomes 128 + n of bf16, or 1024 + n of f16, by bytes. In bf16, which rounds scales too, scales and what
    is added to products have two terms each.
    """
    of = cast(bitcast(pair, f16), f32)
    scale, zero = of[0], of[1]
    if dtype is bf16:
        above, terms = 0x43434343, list(zip(_two_terms(scale), _two_terms((zero - 128.0) * scale), strict=True))
    else:
        offset = zero * scale
        above, terms = 0x64646464, [(ptx.pack_f16x2(scale, scale), ptx.pack_f16x2(offset, offset))]
    one, found = _word(_ONE[dtype]), []
    for word in words:
        even, odd = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        for half in (0x5140, 0x7362):  # neighbours side by side, in bytes
            of_bytes = ptx.prmt(even, odd, half)
            for selector in (0x4140, 0x4342):
                x = ptx.prmt(of_bytes, _word(above), selector)
                if dtype is f16:
                    x = fma_pairs(x, one, _word(0xE400E400), dtype)
                parts = [fma_pairs(x, factor, more, dtype) for factor, more in terms]
                found.append(parts[0] if dtype is f16 else fma_pairs(parts[0], one, parts[1], dtype))
    return found


def _two_terms(x: Value) -> list[Value]:
    """Words of two equal bf16: the leading 16 bits of an f32, and of the rest."""
    bits = bitcast(x, i32)
    rest = x - bitcast(bits & _HIGH_HALF, f32)
    return [ptx.prmt(part, 0, _HIGH_TWICE) for part in (bits, bitcast(rest, i32))]


def in_order_of_four_bits(words: Sequence[Value]) -> list[Value]:
    """Reorder eight 16-bit elements as :func:`pairs_of_four_bits` orders a weight's: 0 2, 4 6, 1 3, 5 7."""
    return [ptx.prmt(words[i], words[i + 1], selector) for selector in (0x5410, 0x7632) for i in (0, 2)]


def scaled_pairs(pairs: Sequence[Value], scale: Value, low: Value | None, exact: bool, dtype: DType) -> list[Value]:
    """Pairs times ``scale`` minus ``low``, rounded; ``exact``: both are exact in ``dtype``, so packed fma is used."""
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
