# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower conversions to and from 8-bit types.

sm_89 and later convert pairs in hardware (``cvt.rn.f16x2.e4m3x2``, ``cvt.rn.satfinite.e4m3x2.f32``). Elsewhere, and on
the host, integer arithmetic on whole vectors gives the same results: conversion to an 8-bit float rounds to nearest
even and saturates; NaN stays NaN. f16 represents every 8-bit float exactly, so widening goes through f16. An e8m0 scale
is a power of two: widening puts its byte into f32's exponent, narrowing rounds up to keep quantized values in range.

Before:  %y = "kv.cast"(%x) : vector<8xf8E4M3FN> -> vector<8xf32>
After:   four cvt.rn.f16x2.e4m3x2, then arith.extf (with hardware = false: shifts, masks and one multiplication)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm, math as mlir_math, vector

from kvarn.dialect import dtypes, types, verify
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import Rules

RULES = Rules()


@dataclass(frozen=True)
class Options:
    """hardware: use the conversion instructions of sm_89 and later."""

    hardware: bool = False


@dataclass(frozen=True)
class Float8:
    """The parameters of an 8-bit float that conversions need."""

    ptx: str
    mantissa: int
    bias: int
    largest: float
    nan: int

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def magic(self) -> float:
        """A float32 whose unit in the last place is this type's subnormal step: adding it rounds to the step."""
        return 2.0 ** (1 - self.bias - self.mantissa + 23)


FORMATS = {"f8E4M3FN": Float8("e4m3", 3, 7, 448.0, 0x7F), "f8E5M2": Float8("e5m2", 2, 15, 57344.0, 0x7F)}


def like(value: ir.Value, element: str) -> ir.Type:
    """A scalar or vector type with the shape of a value and another element type."""
    type_ = ir.Type.parse(element)
    return ir.VectorType.get(ir.VectorType(value.type).shape, type_) if isinstance(value.type, ir.VectorType) else type_


def splat(type_: ir.Type, number: float) -> ir.Value:
    """A constant of a scalar or vector type."""
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    attribute = (
        ir.IntegerAttr.get(element, int(number))
        if isinstance(element, ir.IntegerType)
        else ir.FloatAttr.get(element, number)
    )
    if isinstance(type_, ir.VectorType):
        attribute = ir.DenseElementsAttr.get_splat(type_, attribute)
    return arith.constant(type_, attribute)


def float_bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def as_bytes(value: ir.Value) -> ir.Value:
    return arith.bitcast(like(value, "i8"), value)


# --- software ------------------------------------------------------------------------------------


def widen_to_f16(value: ir.Value, source: str) -> ir.Value:
    """An 8-bit float as f16, exactly."""
    bytes_ = as_bytes(value)
    wide = arith.extui(like(value, "i16"), bytes_)
    t = wide.type
    if source == "f8E5M2":  # the upper byte of an f16
        return arith.bitcast(like(value, "f16"), arith.shli(wide, splat(t, 8)))
    sign = arith.shli(arith.andi(wide, splat(t, 0x80)), splat(t, 8))
    magnitude = arith.andi(wide, splat(t, 0x7F))
    # In f16's 5-bit exponent field the value is 2^-8 of the right one, also for subnormals.
    small = arith.bitcast(like(value, "f16"), arith.shli(magnitude, splat(t, 7)))
    scaled = arith.bitcast(t, arith.mulf(small, splat(small.type, 256.0)))
    is_nan = arith.cmpi(arith.CmpIPredicate.eq, magnitude, splat(t, 0x7F))
    return arith.bitcast(small.type, arith.ori(sign, arith.select(is_nan, splat(t, 0x7E00), scaled)))


def narrow_from_f32(value: ir.Value, target: str) -> ir.Value:
    """f32 rounded to an 8-bit float, to nearest even, with saturation."""
    form = FORMATS[target]
    bits = arith.bitcast(like(value, "i32"), value)
    t, f = bits.type, value.type
    sign = arith.andi(arith.shrui(bits, splat(t, 24)), splat(t, 0x80))
    magnitude_bits = arith.andi(bits, splat(t, 0x7FFFFFFF))
    is_nan = arith.cmpi(arith.CmpIPredicate.ugt, magnitude_bits, splat(t, 0x7F800000))
    largest = splat(t, float_bits(form.largest))
    clamped = arith.minui(magnitude_bits, largest)
    dropped = 23 - form.mantissa
    odd = arith.andi(arith.shrui(clamped, splat(t, dropped)), splat(t, 1))
    rounded = arith.addi(arith.addi(clamped, splat(t, (1 << (dropped - 1)) - 1)), odd)
    normal = arith.subi(arith.shrui(rounded, splat(t, dropped)), splat(t, (127 - form.bias) << form.mantissa))
    magic = splat(f, form.magic)
    stepped = arith.addf(arith.bitcast(f, clamped), magic)
    subnormal = arith.subi(arith.bitcast(t, stepped), splat(t, float_bits(form.magic)))
    is_small = arith.cmpi(arith.CmpIPredicate.ult, clamped, splat(t, float_bits(form.smallest_normal)))
    code = arith.select(is_small, subnormal, normal)
    code = arith.ori(sign, arith.select(is_nan, splat(t, form.nan), code))
    return arith.bitcast(like(value, target), arith.trunci(like(value, "i8"), code))


def e8m0_to_f32(value: ir.Value) -> ir.Value:
    """2^(code - 127); code 255 is NaN, code 0 the subnormal 2^-127."""
    code = arith.extui(like(value, "i32"), as_bytes(value))
    t = code.type
    bits = arith.shli(code, splat(t, 23))
    bits = arith.select(arith.cmpi(arith.CmpIPredicate.eq, code, splat(t, 255)), splat(t, 0x7FC00000), bits)
    bits = arith.select(arith.cmpi(arith.CmpIPredicate.eq, code, splat(t, 0)), splat(t, 0x00400000), bits)
    return arith.bitcast(like(value, "f32"), bits)


def f32_to_e8m0(value: ir.Value) -> ir.Value:
    """The smallest power of two that is not below the magnitude; at most 2^127."""
    bits = arith.andi(arith.bitcast(like(value, "i32"), value), splat(like(value, "i32"), 0x7FFFFFFF))
    t = bits.type
    up = arith.shrui(arith.addi(bits, splat(t, 0x7FFFFF)), splat(t, 23))
    code = arith.minui(up, splat(t, 254))
    is_nan = arith.cmpi(arith.CmpIPredicate.ugt, bits, splat(t, 0x7F800000))
    code = arith.select(is_nan, splat(t, 255), code)
    return arith.bitcast(like(value, "f8E8M0FNU"), arith.trunci(like(value, "i8"), code))


def f32_to_i8(value: ir.Value, signed: bool = True) -> ir.Value:
    """Round to nearest even and saturate to [-128, 127]; NaN becomes 0."""
    f = value.type
    low, high = splat(f, -128.0), splat(f, 127.0)
    rounded = mlir_math.roundeven(arith.minnumf(arith.maxnumf(value, low), high))
    is_nan = arith.cmpf(arith.CmpFPredicate.UNO, value, value)
    return arith.trunci(
        like(value, "i8"), arith.fptosi(like(value, "i32"), arith.select(is_nan, splat(f, 0.0), rounded))
    )


# --- hardware ------------------------------------------------------------------------------------


def inline(result: str, operands: list[ir.Value], text: str, constraints: str) -> ir.Value:
    """Side-effect-free inline PTX."""
    return llvm.inline_asm(ir.Type.parse(result), operands, text, constraints)


def pairs(value: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """The lanes in pairs; an odd last lane is paired with itself."""
    lanes = lanes_of(value)
    return [(lanes[i], lanes[min(i + 1, len(lanes) - 1)]) for i in range(0, len(lanes), 2)]


def lanes_of(value: ir.Value) -> list[ir.Value]:
    if not isinstance(value.type, ir.VectorType):
        return [value]
    return [vector.extract(value, [], [i]) for i in range(ir.VectorType(value.type).shape[0])]


def joined(lanes: list[ir.Value], type_: ir.Type) -> ir.Value:
    return vector.from_elements(type_, lanes) if isinstance(type_, ir.VectorType) else lanes[0]


def hardware_widen(value: ir.Value, source: str) -> ir.Value:
    """8-bit floats to f16, one instruction per pair."""
    result, count = like(value, "f16"), len(lanes_of(value))
    i8x2, f16x2 = ir.VectorType.get([2], ir.Type.parse("i8")), ir.VectorType.get([2], ir.Type.parse("f16"))
    bytes_, out = as_bytes(value), []
    for start in range(0, count, 2):
        if isinstance(value.type, ir.VectorType) and start + 1 < count:
            pair = vector.extract_strided_slice(i8x2, bytes_, [start], [2], [1]) if count > 2 else bytes_
        else:
            lane = lanes_of(bytes_)[start]
            pair = vector.from_elements(i8x2, [lane, lane])
        word = llvm.bitcast(ir.Type.parse("i16"), pair)
        two = inline("i32", [word], f"cvt.rn.f16x2.{FORMATS[source].ptx}x2 $0, $1;", "=r,h")
        out += lanes_of(llvm.bitcast(f16x2, two))
    return joined(out[:count], result)


def hardware_narrow(value: ir.Value, target: str) -> ir.Value:
    """f32 to 8-bit floats with saturation, one instruction per pair."""
    i8x2, out = ir.VectorType.get([2], ir.Type.parse("i8")), []
    for low, high in pairs(value):
        text = f"cvt.rn.satfinite.{FORMATS[target].ptx}x2.f32 $0, $2, $1;"
        out += lanes_of(llvm.bitcast(i8x2, inline("i16", [low, high], text, "=h,f,f")))
    bytes_ = joined(out[: len(lanes_of(value))], like(value, "i8"))
    return arith.bitcast(like(value, target), bytes_)


# --- the rule --------------------------------------------------------------------------------------


def to_f32(value: ir.Value, source: dtypes.DType, options: Options) -> ir.Value:
    """Any element type as f32, exactly (64-bit types: rounded)."""
    f32 = like(value, "f32")
    if source.mlir in FORMATS:
        half = hardware_widen(value, source.mlir) if options.hardware else widen_to_f16(value, source.mlir)
        return arith.extf(f32, half)
    if source.name == "f8e8m0":
        return e8m0_to_f32(value)
    if source.is_float:
        return value if source.bits == 32 else arith.extf(f32, value) if source.bits < 32 else arith.truncf(f32, value)
    return arith.sitofp(f32, value)


@RULES.lowers("kv.cast")
def lower_cast(op: Any, options: Options) -> ir.Value:
    value, result = op.value, op.operation.results[0].type
    if value.type == result:
        return value
    source = dtypes.by_mlir(verify.element_and_width(value.type)[0])
    target = dtypes.by_mlir(verify.element_and_width(result)[0])
    if source.mlir in FORMATS and target.name == "f16":
        return hardware_widen(value, source.mlir) if options.hardware else widen_to_f16(value, source.mlir)
    wide = to_f32(value, source, options)
    if target.mlir in FORMATS:
        return hardware_narrow(wide, target.mlir) if options.hardware else narrow_from_f32(wide, target.mlir)
    if target.name == "f8e8m0":
        return f32_to_e8m0(wide)
    if target.name == "i8":
        return f32_to_i8(wide)
    if target.is_float:
        return (
            wide if target.bits == 32 else arith.truncf(result, wide) if target.bits < 32 else arith.extf(result, wide)
        )
    if target.is_integer:
        return arith.fptosi(result, wide)
    fail(op, f"cannot convert {types.element_type(source)} to {types.element_type(target)}")


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    RULES.apply(module, options, leave=lambda name: True)
