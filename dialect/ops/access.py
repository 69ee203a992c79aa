# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations that read and write elements and scales of a cache.

Indices are (batch, head, token, dim), i32. ``width`` consecutive elements of the head dimension make a
vector; width 1 a scalar. The caller keeps dim + width within the head and dim a multiple of width. The
optional operand ``page`` is the token's physical page, when a pass or the kernel has looked it up.
"""

from typing import Any

from mlir import ir

from .. import dtypes, layout, types, verify
from ..base import Kv
from ..effects import LooksUpPage, Pure, ReadsCache, ReadsScales, WritesElements, WritesScales
from ..ext import I32, Operand, Result
from ..layout import CacheSpec
from .common import as_i32, i64_attr

OOB = ("drop", "trap", "unchecked")


class _Access(Kv.Operation):
    """An access to consecutive elements, or scales, of one token and head."""

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    token: Operand[I32]
    dim: Operand[I32]


class LoadOp(_Access, name="load", traits=[LooksUpPage, ReadsCache]):
    """Read ``width`` elements, dequantized: the stored value times its scale when the cache has scales.

    The result's element type is the storage type, or a float type to convert to; a quantized cache needs a float type
    other than the storage type. All lanes of a quantized load share one granule. An out-of-range page id reads the null
    page. For a scales operand the elements are the scales, from granule dim // granularity up.
    """

    page: Operand[I32] | None = None
    width: ir.IntegerAttr
    out: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0])
        if spec is None:
            return False
        result = self.operation.results[0]
        width = verify.width(self, spec, result, spec.data_size, "result")
        if width is None:
            return False
        element = verify.element_and_width(result.type)[0]
        if spec.quantized:
            if element == spec.dtype.mlir and spec.dtype.bits == 8:
                return verify.fail(
                    self, f"dequantizes, so the result must not have the storage type {element}: use kv.load_raw"
                )
            if spec.packed and isinstance(result.type, ir.VectorType) and width % 2:
                return verify.fail(self, f"width must be even where elements share bytes, got {result.type}")
            if spec.dtype.code and width > dtypes.CODED and width % dtypes.CODED:
                return verify.fail(self, f"width must divide {dtypes.CODED} or be a multiple of it, got {width}")
            if spec.granularity % width and spec.granularity < spec.head_size:
                return verify.fail(
                    self,
                    f"width must divide the granularity {spec.granularity}, so that one scale serves all lanes, "
                    f"got {width}",
                )
        return element == spec.data_dtype.mlir or verify.scalar_float(self, element, "result element")


class LoadRawOp(_Access, name="load_raw", traits=[LooksUpPage, ReadsCache]):
    """Read ``width`` stored values of a quantized cache, without dequantization.

    Of packed elements these are bytes, from that of element dim on.
    """

    page: Operand[I32] | None = None
    width: ir.IntegerAttr
    out: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0])
        if spec is None or not verify.needs_scales(self, spec):
            return False
        result = self.operation.results[0]
        if verify.width(self, spec, result, spec.stored_size, "result") is None:
            return False
        return _element_is(self, result, spec.dtype.unit.mlir, "result")


class StoreOp(_Access, name="store", traits=[LooksUpPage, WritesElements]):
    """Write a scalar or vector of the storage type, or of bytes of packed elements; no quantization.

    Attribute oob, for a page id out of [0, N): ``drop`` writes nothing, ``trap`` stops the kernel,
    ``unchecked`` trusts the table.
    """

    value: Operand[Any]
    page: Operand[I32] | None = None
    oob: ir.StringAttr

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0], ("cache",))
        if spec is None:
            return False
        return _stores(self, spec.dtype.unit.mlir, spec.stored_size)


class LoadScaleOp(_Access, name="load_scale", traits=[LooksUpPage, ReadsScales]):
    """Read ``width`` consecutive scales from granule dim // granularity up; each is followed by its zero, if any.

    The result is zero for scales operands, ragged operands, and dense operands without scales (in their element type):
    kernels may call it on every operand.
    """

    page: Operand[I32] | None = None
    width: ir.IntegerAttr
    out: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0])
        if spec is None or not (layout.loads_no_scales(spec) or verify.needs_scales(self, spec)):
            return False
        result = self.operation.results[0]
        if verify.width(self, spec, result, spec.num_scales, "result") is None:
            return False
        return _element_is(self, result, layout.scale_type(spec).mlir, "result")


class StoreScaleOp(_Access, name="store_scale", traits=[LooksUpPage, WritesScales]):
    """Write a scalar or vector of scales from granule dim // granularity up; ``oob`` as in kv.store."""

    value: Operand[Any]
    page: Operand[I32] | None = None
    oob: ir.StringAttr

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0], ("cache",))
        if spec is None or not verify.needs_scales(self, spec):
            return False
        return _stores(self, spec.scale_dtype.mlir, spec.num_scales)


class CastOp(Kv.Operation, name="cast", traits=[Pure]):
    """Convert scalars, vectors or tiles where one element type is an 8-bit float or an 8-bit integer.

    A conversion to an 8-bit type rounds to nearest even and saturates to the largest finite value. Other conversions
    are ops of arith.
    """

    value: Operand[Any]
    out: Result[Any]

    def verify_invariants(self) -> bool:
        source, lanes = verify.element_and_shape(self.operation.operands[0].type)
        target, out_lanes = verify.element_and_shape(self.operation.results[0].type)
        if lanes != out_lanes or lanes == 0:
            return verify.fail(self, f"must keep the number of lanes, got {lanes} and {out_lanes}")
        for text in (source, target):
            try:
                dtypes.by_mlir(text)
            except ValueError:
                return verify.fail(self, f"must convert between element types of the dialect, got {text}")
        return True


def _stores(op: Any, element: str, most: int) -> bool:
    value = op.operation.operands[5]
    if not 1 <= verify.element_and_width(value.type)[1] <= most:
        return verify.fail(op, f"value must be a scalar or a vector of at most {most} lanes, got {value.type}")
    return _element_is(op, value, element, "value") and verify.one_of(op, "oob", OOB)


def _element_is(op: Any, value: ir.Value, element: str, what: str) -> bool:
    got = verify.element_and_width(value.type)[0]
    return got == element or verify.fail(op, f"{what} must have element type {element}, got {got}")


# --- wrappers --------------------------------------------------------------------------------------


def _indices(*values: Any) -> list[ir.Value]:
    return [as_i32(v) for v in values]


def load(
    cache: ir.Value,
    batch: Any,
    head: Any,
    token: Any,
    dim: Any,
    width: int = 1,
    dtype: dtypes.DType | None = None,
    page: ir.Value | None = None,
) -> ir.Value:
    """Read ``width`` elements as ``dtype`` (default: the storage type, or f32 from a quantized cache)."""
    spec = types.spec_of(cache.type)
    dtype = dtype or (dtypes.f32 if spec.quantized else spec.data_dtype)
    result = types.value_type(dtype, width)
    return LoadOp(cache, *_indices(batch, head, token, dim), i64_attr(width), result, page=page).operation.results[0]


def load_raw(
    cache: ir.Value, batch: Any, head: Any, token: Any, dim: Any, width: int = 1, page: ir.Value | None = None
) -> ir.Value:
    """Read ``width`` stored values of a quantized cache."""
    result = types.value_type(types.spec_of(cache.type).dtype.unit, width)
    return LoadRawOp(cache, *_indices(batch, head, token, dim), i64_attr(width), result, page=page).operation.results[0]


def store(
    cache: ir.Value,
    batch: Any,
    head: Any,
    token: Any,
    dim: Any,
    value: ir.Value,
    oob: str = "drop",
    page: ir.Value | None = None,
) -> None:
    """Write a value of the storage type."""
    StoreOp(cache, *_indices(batch, head, token, dim), value, ir.StringAttr.get(oob), page=page)


def load_scale(
    cache: ir.Value, batch: Any, head: Any, token: Any, dim: Any, width: int = 1, page: ir.Value | None = None
) -> ir.Value:
    """Read ``width`` scales, in the scale type."""
    spec: CacheSpec = types.spec_of(cache.type)
    if spec.scale_dtype is None and not layout.loads_no_scales(spec):
        raise ValueError("load_scale needs a quantized cache (one with a scale type), got one without scales")
    result = types.value_type(layout.scale_type(spec), width)
    made = LoadScaleOp(cache, *_indices(batch, head, token, dim), i64_attr(width), result, page=page)
    return made.operation.results[0]


def store_scale(
    cache: ir.Value,
    batch: Any,
    head: Any,
    token: Any,
    dim: Any,
    value: ir.Value,
    oob: str = "drop",
    page: ir.Value | None = None,
) -> None:
    """Write scales of the scale type."""
    StoreScaleOp(cache, *_indices(batch, head, token, dim), value, ir.StringAttr.get(oob), page=page)


def cast(value: ir.Value, dtype: dtypes.DType) -> ir.Value:
    """Convert a scalar, vector or tile to ``dtype``; saturates to 8-bit types."""
    result = types.element_type(dtype)
    if isinstance(value.type, ir.ShapedType):
        shape = ir.ShapedType(value.type).shape
        tile = isinstance(value.type, ir.RankedTensorType)
        result = ir.RankedTensorType.get(shape, result) if tile else ir.VectorType.get(shape, result)
    return CastOp(value, result).operation.results[0]
