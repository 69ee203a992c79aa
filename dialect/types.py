# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The types of the kv dialect, and their translation to and from specs.

A type has static parameters only; pointers, strides and lengths are the value's run-time fields
(``layout.cache_fields``), which ``flatten-kv-types`` turns into kernel parameters.
"""

import functools
from typing import Any

from mlir import ir

from . import layout, page_orders, tma_layout
from .base import Kv
from .dtypes import DType, by_mlir, stored_by_mlir
from .layout import CacheSpec
from .tma_layout import TmaSpec


class _Handle(Kv.Type):
    """The parameters that all handles share: those of a ``CacheSpec``."""

    kind: ir.StringAttr
    element: ir.TypeAttr
    num_heads: ir.IntegerAttr
    head_size: ir.IntegerAttr
    is_mla: ir.BoolAttr
    page: Any
    scale: ir.TypeAttr
    granularity: Any


class CollectionType(_Handle, name="collection"):
    """All layers, K and V, of one pool.

    ``!kv.collection<kind, element, heads, head_size, mla, page, scale, granularity>``. The page is the page size
    ``P : i64`` or, where tokens and heads are not packed, ``array<i64: P, token stride, head stride>`` (in elements).
    The element is ``ui4``, ``f4E2M1FN``, ``!kv.codebook`` or ``!kv.code`` where elements share bytes. The scale is a
    type, ``none``, or ``vector<2x...>`` for a scale and a zero. The granularity is ``array<i64: granularity, elements
    per block>`` where blocks are rotated.
    """


class CacheType(_Handle, name="cache"):
    """One layer's K or V. The parameters are those of its collection."""


class OperandType(_Handle, name="operand"):
    """Keys or values as an attention kernel reads them: a cache, a cache's scales, a dense or a ragged buffer.

    ``kind`` is the cache's, or ``"scales"``, ``"dense"``, ``"ragged"`` (``layout.OperandData``).
    """


class CodebookType(Kv.Type, name="codebook"):
    """The 4-bit elements of a cache that stand for 16 ascending numbers of f16: ``!kv.codebook<array<f32: ...>>``."""

    numbers: Any


class CodeType(Kv.Type, name="code"):
    """The elements of a cache that a user's own functions read and write: ``!kv.code<name, bits, largest>``."""

    name: ir.StringAttr
    bits: ir.IntegerAttr
    largest: ir.StringAttr


class RowsType(Kv.Type, name="rows"):
    """Row indices of the pages of a tile: the result of ``kv.populate``. ``!kv.rows<tile_rows, page_size>``."""

    tile_rows: ir.IntegerAttr
    page_size: ir.IntegerAttr


class TmaType(Kv.Type, name="tma"):
    """A TMA descriptor that the host builds; it is a grid constant of the kernel.

    ``!kv.tma<form, element, box, tile, swizzle>``: form is the constructor (tiled, ragged, rope, gather4,
    rope_gather4, scale), box the extents that one copy moves, tile the extents in shared memory that one load fills
    (both
    slowest dimension first), swizzle in bytes (16 means none). See ``tma_layout.TmaSpec``.
    """

    form: ir.StringAttr
    element: ir.TypeAttr
    box: ir.DenseI64ArrayAttr
    tile: ir.DenseI64ArrayAttr
    swizzle: ir.IntegerAttr


_SPEC_TYPES = {"cache": CacheType, "collection": CollectionType, "operand": OperandType}


def _spec_text(spec: CacheSpec) -> str:
    scale = spec.scale_dtype.mlir if spec.scale_dtype else "none"
    if spec.zero:
        scale = f"vector<2x{scale}>"
    granularity = f"{spec.granularity} : i64"
    if spec.rotation:
        granularity = f"array<i64: {spec.granularity}, {spec.rotation}>"
    mla = "true" if spec.is_mla else "false"
    page = f"{spec.page_size} : i64"
    if spec.strides is not None:
        page = f"array<i64: {spec.page_size}, {spec.strides[0]}, {spec.strides[1]}>"
    return (
        f'"{spec.kind}", {spec.dtype.mlir}, {spec.num_heads} : i64, {spec.head_size} : i64, {mla}, '
        f"{page}, {scale}, {granularity}"
    )


def _typed(name: str, spec: CacheSpec) -> ir.Type:
    return ir.Type.parse(f"!kv.{name}<{_spec_text(spec)}>")


def cache_type(spec: CacheSpec) -> ir.Type:
    """``!kv.cache`` of a spec, in the current context."""
    return _typed("cache", spec)


def collection_type(spec: CacheSpec) -> ir.Type:
    """``!kv.collection`` of a spec, in the current context."""
    return _typed("collection", spec)


def operand_type(spec: CacheSpec) -> ir.Type:
    """``!kv.operand`` of a spec, in the current context."""
    return _typed("operand", spec)


def type_name(type_: ir.Type) -> str | None:
    """``"cache"``, ``"collection"``, ``"operand"``, ``"rows"``, ``"tma"`` or ``"stages"``; None outside the dialect."""
    text = str(type_)
    return text[4:].partition("<")[0] if text.startswith("!kv.") else None


@functools.lru_cache(maxsize=512)
def _parse_spec(text: str) -> CacheSpec | str:
    """The spec in a printed type, or what is wrong with it."""
    from .ext import split_parameters

    parts = split_parameters(text[text.index("<") + 1 : -1])
    if len(parts) != 8:
        return f"expected 8 parameters, got {len(parts)}"
    try:
        kind = _string(parts[0])
        element, (scale, zero) = stored_by_mlir(parts[1]), _scale(parts[6])
        heads, head_size = (_integer(parts[i]) for i in (2, 3))
        granularity, rotation = _granularity(parts[7])
        page, strides = _page(parts[5])
        if parts[4] not in ("true", "false"):
            return f"is_mla must be true or false, got {parts[4]}"
        spec = layout.spec_class(kind) if text.startswith("!kv.operand") else CacheSpec
        found = spec(
            kind, element, heads, head_size, page, parts[4] == "true", scale, granularity, strides, zero, rotation
        )
        if strides is not None and found.strides is None:
            return f"page must be written {page} : i64 where tokens and heads are packed, got {parts[5]}"
        return found
    except ValueError as error:
        return str(error)


def _string(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        raise ValueError(f"expected a string parameter, got {text}")
    return text[1:-1]


def _integer(text: str) -> int:
    digits, _, suffix = text.partition(" : ")
    if suffix != "i64" or not digits.lstrip("-").isdigit():
        raise ValueError(f"expected an i64 parameter, got {text}")
    return int(digits)


def _granularity(text: str) -> tuple[int, int]:
    """The granularity and, where blocks are rotated, their elements."""
    if not text.startswith("array<"):
        return _integer(text), 0
    found = _integers(text, "granularity")
    if len(found) != 2 or not found[1]:
        raise ValueError(f"granularity must be a number, or an array of it and the elements of a block, got {text}")
    return found[0], found[1]


def _scale(text: str) -> tuple[DType | None, bool]:
    """The type of the scales, if there are any, and whether each is followed by a zero."""
    pair = text.removeprefix("vector<2x").removesuffix(">")
    return (None if text == "none" else by_mlir(pair), pair != text)


def _page(text: str) -> tuple[int, tuple[int, int] | None]:
    """The page size and, where they are given, the strides of tokens and heads."""
    if not text.startswith("array<"):
        return _integer(text), None
    found = _integers(text, "page")
    if len(found) != 3:
        raise ValueError(f"page must be the page size, or an array of it, the token and the head stride, got {text}")
    return found[0], found[1:]


page_orders.listeners.append(lambda order: _parse_spec.cache_clear())


def spec_or_problem(type_: ir.Type) -> CacheSpec | str:
    """The spec of a cache, collection or operand type, or a sentence that says what is wrong."""
    text = str(type_)
    if type_name(type_) not in _SPEC_TYPES or "<" not in text:
        return f"expected a !kv.cache, !kv.collection or !kv.operand type, got {text}"
    return _parse_spec(text)


def spec_of(type_: ir.Type) -> CacheSpec:
    """The spec of a cache, collection or operand type.

    Raises
    ------
    ValueError
        When the type is of another kind or its parameters are wrong.
    """
    spec = spec_or_problem(type_)
    if isinstance(spec, str):
        raise ValueError(spec)
    return spec


def type_problem(type_: ir.Type) -> str | None:
    """What is wrong with the parameters of a kv type, or None; IRDL itself checks only their number."""
    name, text = type_name(type_), str(type_)
    if name in _SPEC_TYPES:
        spec = spec_or_problem(type_)
        return spec if isinstance(spec, str) else None
    if name == "tma":
        found = _parse_tma(text)
        return found if isinstance(found, str) else None
    if name in ("codebook", "code"):
        return f"a {name} is the element type of a cache, and no value has it, got {text}"
    if "<" not in text:
        return None  # a type without parameters
    from .ext import split_parameters

    parts = split_parameters(text[text.index("<") + 1 : -1])
    try:
        tile_rows, page_size = (_integer(p) for p in parts)
    except ValueError as error:
        return str(error)
    problems = layout.populate_problems(tile_rows, page_size, tile_rows)
    return problems[0] if problems else None


_SWIZZLES = {bytes_: name for name, bytes_ in tma_layout.SWIZZLE_BYTES.items()}


def _integers(text: str, name: str) -> tuple[int, ...]:
    inside = text.removeprefix("array<i64: ").removesuffix(">").split(", ")
    if not text.startswith("array<i64: ") or not all(x.lstrip("-").isdigit() for x in inside):
        raise ValueError(f"{name} must be a non-empty array of i64, got {text}")
    return tuple(map(int, inside))


@functools.lru_cache(maxsize=512)
def _parse_tma(text: str) -> TmaSpec | str:
    """The spec in a printed ``!kv.tma``, or what is wrong with it."""
    from .ext import split_parameters

    parts = split_parameters(text[text.index("<") + 1 : -1])
    try:
        form, element, swizzle = _string(parts[0]), by_mlir(parts[1]), _integer(parts[4])
        if swizzle not in _SWIZZLES:
            return f"swizzle must be one of {', '.join(map(str, _SWIZZLES))}, got {swizzle}"
        return TmaSpec(form, element, _integers(parts[2], "box"), _integers(parts[3], "tile"), _SWIZZLES[swizzle])
    except (ValueError, IndexError) as error:
        return str(error)


def tma_type(spec: TmaSpec) -> ir.Type:
    """``!kv.tma`` of a descriptor's spec, in the current context."""
    box, tile = (", ".join(map(str, extents)) for extents in (spec.box, spec.tile))
    return ir.Type.parse(
        f'!kv.tma<"{spec.form}", {spec.dtype.mlir}, array<i64: {box}>, array<i64: {tile}>, '
        f"{tma_layout.SWIZZLE_BYTES[spec.swizzle]} : i64>"
    )


def tma_spec_of(type_: ir.Type) -> TmaSpec:
    """The spec of a ``!kv.tma``; ValueError for another type or wrong parameters."""
    found = _parse_tma(str(type_)) if type_name(type_) == "tma" else f"expected a !kv.tma type, got {type_}"
    if isinstance(found, str):
        raise ValueError(found)
    return found


def fields_of(type_: ir.Type) -> tuple[layout.Field, ...]:
    """Run-time fields of a value of this type: a handle or a buffer (memref)."""
    if isinstance(type_, ir.MemRefType):
        return layout.buffer_fields(ir.MemRefType(type_).rank)
    if type_name(type_) == "tma":
        return tma_layout.FIELDS
    return layout.HANDLE_FIELDS[type_name(type_) or ""](spec_of(type_))


def rows_type(tile_rows: int, page_size: int) -> ir.Type:
    """``!kv.rows`` in the current context."""
    return ir.Type.parse(f"!kv.rows<{tile_rows} : i64, {page_size} : i64>")


def rows_parameters(type_: ir.Type) -> tuple[int, int]:
    """(tile rows, page size) of a ``!kv.rows`` type."""
    tile_rows, page_size = RowsType(type_).parameters
    return ir.IntegerAttr(tile_rows).value, ir.IntegerAttr(page_size).value


def element_type(dtype: DType) -> ir.Type:
    """The MLIR type of a dtype in the current context."""
    return ir.Type.parse(dtype.mlir)


def value_type(dtype: DType, width: int) -> ir.Type:
    """The scalar type for width 1, else the vector type."""
    element = element_type(dtype)
    return element if width == 1 else ir.VectorType.get([width], element)


def field_type(field: layout.Field) -> ir.Type:
    """The MLIR type of a run-time field."""
    text: Any = {"ptr": "!llvm.ptr<1>", "i32": "i32", "i64": "i64", "tensormap": "!llvm.ptr"}[field.type]
    return ir.Type.parse(text)
