# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations that make handles and read their run-time fields. All of them are pure.

The lookup table and the lengths never change while a kernel runs, so reading them is pure too.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import dtypes, layout, types, verify
from ..base import Kv
from ..effects import Pure, ViewsHandle
from ..ext import I1, I32, I64, Operand, Result, in_place_of, infer_result
from ..layout import DENSE, FA3, SCALES, OperandData
from ..types import CollectionType
from .common import as_i32


class _Make(Kv.Operation):
    """The run-time fields that collections and caches share; a subclass declares the pointer to the first element."""

    first: Operand[Any]
    stride0: Operand[I64]
    num_blocks: Operand[I32]
    capacity: Operand[I32]
    lookup: Operand[Any]
    lookup_stride: Operand[I64]
    lookup_columns: Operand[I32]
    lengths: Operand[Any]
    batch: Operand[I32]
    max_seq_length: Operand[I32]
    max_cache_length: Operand[I32]


class MakeCollectionOp(_Make, name="make_collection", traits=[Pure]):
    """Make a collection from its run-time fields, in the order of ``layout.collection_fields``.

    Operands: one per field (``!llvm.ptr<1>``, i32 or i64); those of the scales only for a quantized collection.
    Result: the collection. No effects. (Each field is a separate operand because all values of a variadic operand have
    one type on MLIR 22.1.)
    """

    blocks: Operand[Any] = in_place_of("first")
    num_layers: Operand[I32]
    kv_stride: Operand[I64]
    layer_stride: Operand[I64]
    lookup_layer_stride: Operand[I64]
    scales: Operand[Any] | None = None
    scales_stride0: Operand[I64] | None = None
    scales_kv_stride: Operand[I64] | None = None
    scales_layer_stride: Operand[I64] | None = None
    collection: Result[Any]

    def verify_invariants(self) -> bool:
        result = self.operation.results[0]
        spec = verify.handle(self, result, ("collection",))
        return spec is not None and _fields_match(self, result.type)


class MakeCacheOp(_Make, name="make_cache", traits=[Pure]):
    """Make a cache from its run-time fields, in the order of ``layout.cache_fields``; as kv.make_collection.

    No effects.
    """

    base: Operand[Any] = in_place_of("first")
    scales: Operand[Any] | None = None
    scales_stride0: Operand[I64] | None = None
    cache: Result[Any]

    def verify_invariants(self) -> bool:
        result = self.operation.results[0]
        spec = verify.handle(self, result, ("cache",))
        return spec is not None and _fields_match(self, result.type)


def _fields_match(op: Any, type_: ir.Type) -> bool:
    expected, given = types.fields_of(type_), list(op.operation.operands)
    if len(expected) != len(given):
        return verify.fail(op, f"takes {len(expected)} fields for {type_}, got {len(given)}")
    for field, value in zip(expected, given, strict=True):
        if value.type != types.field_type(field):
            return verify.fail(op, f"field {field.name} must be {types.field_type(field)}, got {value.type}")
    return True


class KeyCacheOp(Kv.Operation, name="key_cache", traits=[ViewsHandle, Pure]):
    """The keys of one layer: base + layer * layer_stride.

    Operands: collection; layer, i32 in [0, L) (not checked on a device). Result: the cache. No effects.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    cache: Result[Any]

    def verify_invariants(self) -> bool:
        return _view_matches(self, value=False)


class ValueCacheOp(Kv.Operation, name="value_cache", traits=[ViewsHandle, Pure]):
    """The values of one layer: base + kv_stride + layer * layer_stride. An MLA collection has none."""

    collection: Operand[CollectionType]
    layer: Operand[I32]
    cache: Result[Any]

    def verify_invariants(self) -> bool:
        return _view_matches(self, value=True)


def _view_matches(op: Any, value: bool) -> bool:
    spec = verify.handle(op, op.operation.operands[0], ("collection",))
    if spec is None:
        return False
    if value and spec.is_mla:
        return verify.fail(op, "needs a collection with values: an MLA one has only latent keys (is_mla = true)")
    viewed = verify.handle(op, op.operation.results[0], ("cache",))
    if viewed is None:
        return False
    return viewed == spec or verify.fail(
        op,
        f"result must have the parameters of the collection {types.cache_type(spec)}, "
        f"got {op.operation.results[0].type}",
    )


class MakeOperandOp(Kv.Operation, name="make_operand", traits=[ViewsHandle, Pure]):
    """A cache as a read-only operand of an attention kernel; with a result of kind "scales", the cache's scales.

    No effects. (IRDL has one symbol table for types and operations, and ``operand`` is the name of the type.)
    """

    cache: Operand[Any]
    view: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0], ("cache",))
        seen = None if spec is None else verify.handle(self, self.operation.results[0], ("operand",))
        if seen is None:
            return False
        if seen.kind == SCALES and spec.quantized and seen == layout.scales_data(spec):
            return True
        wanted, got = types.operand_type(spec), self.operation.results[0].type
        return seen == spec or verify.fail(self, f"result must have the cache's parameters {wanted}, got {got}")


class BufferOperandOp(Kv.Operation, name="buffer_operand", traits=[ViewsHandle, Pure]):
    """A matrix [T, H * D] as a dense operand of one sequence, with T tokens of H heads of D elements.

    So a tile of some rows and D columns is a tile of one head's tokens, and is copied like one. Operand: a buffer of
    rank 2 with contiguous rows of H * D elements (precondition). No effects.
    """

    buffer: Operand[Any]
    view: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.results[0], ("operand",))
        if spec is None:
            return False
        if spec.kind != DENSE or spec.quantized or spec.strides is not None:
            got = self.operation.results[0].type
            return verify.fail(self, f"result must be a dense operand with packed rows and no scales, got {got}")
        return verify.memref(self, self.buffer, 2, (spec.dtype.mlir,), "the buffer") and verify.static_dim(
            self, self.buffer, 1, spec.row_size, "the buffer"
        )


class FieldOp(Kv.Operation, name="field", traits=[Pure]):
    """One run-time field of a handle or buffer.

    Attribute field: its name in ``layout.cache_fields``, ``collection_fields`` or ``buffer_fields``.
    """

    handle: Operand[Any]
    field: ir.StringAttr
    out: Result[Any]

    def verify_invariants(self) -> bool:
        value = self.operation.operands[0]
        if not isinstance(value.type, ir.MemRefType) and types.type_name(value.type) != "tma":
            if verify.handle(self, value, verify.ANY_HANDLE) is None:
                return False
        fields = {f.name: f for f in types.fields_of(value.type)}
        name = verify.string(self.operation.attributes["field"])
        if name not in fields:
            return verify.fail(self, f"field must be one of {', '.join(fields)}, got {name}")
        expected, got = types.field_type(fields[name]), self.operation.results[0].type
        return expected == got or verify.fail(self, f"field {name} must have type {expected}, got {got}")


class DeviceAttributeOp(Kv.Operation, name="device_attribute", traits=[Pure]):
    """A property of the device that a program runs on, used outside of kernels.

    Attribute attribute: ``multiprocessors``, ``shared_bytes`` or ``l2_bytes``.
    """

    attribute: ir.StringAttr
    value: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "attribute", ("multiprocessors", "shared_bytes", "l2_bytes", "warp_size"))


class OfHandle(Kv.Operation):
    """An operation on any kind of handle, without further rules."""

    cache: Operand[Any]

    def verify_invariants(self) -> bool:
        return verify.handle(self, self.operation.operands[0], verify.ANY_HANDLE) is not None


class CacheLengthOp(OfHandle, name="cache_length", traits=[Pure]):
    """Tokens of a sequence that were cached before this step: cache_lengths[b]. batch is in [0, B).

    For a dense or ragged operand, all tokens of the sequence: lengths[b] or S, offsets[b + 1] - offsets[b].
    """

    batch: Operand[I32]
    length: Result[I32] = infer_result()


class CacheLengthsOp(Kv.Operation, name="cache_lengths", traits=[Pure]):
    """The lengths of all sequences, [B]: a pointer to 32-bit integers."""

    cache: Operand[Any]
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        known = verify.handle(self, self.operation.operands[0], verify.ANY_HANDLE) is not None
        return known and verify.global_pointer(self)


class MaxPromptLengthOp(OfHandle, name="max_prompt_length", traits=[Pure]):
    """The field max_seq_length: the longest count of new tokens in the batch."""

    length: Result[I32] = infer_result()


class MaxContextLengthOp(OfHandle, name="max_context_length", traits=[Pure]):
    """The field max_cache_length: the longest cached + new tokens in the batch. For a dense operand, S."""

    length: Result[I32] = infer_result()


class IsEmptyOp(OfHandle, name="is_empty", traits=[Pure]):
    """max_cache_length == 0. The field includes the step's new tokens: with any, the cache is not empty."""

    empty: Result[I1] = infer_result()


def rows_cache(op: Any) -> Any:
    """The spec of the op's cache if its kind has rows; None after an error."""
    spec = verify.handle(op, op.operation.operands[0])
    if spec is not None and spec.kind == FA3:
        verify.fail(op, "needs a paged or continuous cache: an fa3 cache has no rows")
        return None
    return spec


class OfRows(Kv.Operation):
    """An operation on a cache or operand that has rows."""

    cache: Operand[Any]

    def verify_invariants(self) -> bool:
        return rows_cache(self) is not None


class NumRowsOp(OfRows, name="num_rows", traits=[Pure]):
    """Rows that the cache's view spans, (N-1)*S + P. An fa3 cache has no rows.

    For a dense operand (B-1)*S' + S, with S' rows from one sequence to the next; for a ragged operand its rows.
    """

    rows: Result[I32] = infer_result()


# --- wrappers --------------------------------------------------------------------------------------


def make_collection(spec: Any, fields: Sequence[ir.Value]) -> ir.Value:
    """A collection from its ``CacheSpec`` and run-time fields."""
    named = dict(zip((f.name for f in layout.collection_fields(spec)), fields, strict=True))
    return MakeCollectionOp(**named, collection=types.collection_type(spec)).operation.results[0]


def make_cache(spec: Any, fields: Sequence[ir.Value]) -> ir.Value:
    """A cache from its ``CacheSpec`` and run-time fields."""
    named = dict(zip((f.name for f in layout.cache_fields(spec)), fields, strict=True))
    return MakeCacheOp(**named, cache=types.cache_type(spec)).operation.results[0]


def key_cache(collection: ir.Value, layer: Any) -> ir.Value:
    """The key cache of a layer."""
    return KeyCacheOp(collection, as_i32(layer), types.cache_type(types.spec_of(collection.type))).operation.results[0]


def value_cache(collection: ir.Value, layer: Any) -> ir.Value:
    """The value cache of a layer; ValueError for an MLA collection."""
    spec = types.spec_of(collection.type)
    if spec.is_mla:
        raise ValueError("value_cache needs a collection with values, got an MLA one (is_mla = true)")
    return ValueCacheOp(collection, as_i32(layer), types.cache_type(spec)).operation.results[0]


def operand(cache: ir.Value, scales: bool = False) -> ir.Value:
    """The cache (or its scales) as an attention operand."""
    spec = types.spec_of(cache.type)
    view = types.operand_type(layout.scales_data(spec) if scales else spec)
    return MakeOperandOp(cache, view).operation.results[0]


def field(handle: ir.Value, name: str) -> ir.Value:
    """One run-time field of a cache, operand or collection."""
    fields = {f.name: f for f in types.fields_of(handle.type)}
    if name not in fields:
        raise ValueError(f"field must be one of {', '.join(fields)}, got {name!r}")
    attribute = ir.StringAttr.get(name)
    return FieldOp(handle, attribute, types.field_type(fields[name])).operation.results[0]


def device_attribute(name: str) -> ir.Value:
    """A property of the device that the program will run on, i32."""
    return DeviceAttributeOp(ir.StringAttr.get(name)).operation.results[0]


def cache_length(cache: ir.Value, batch: Any) -> ir.Value:
    """Cached tokens of a sequence, i32."""
    return CacheLengthOp(cache, as_i32(batch)).operation.results[0]


def cache_lengths(cache: ir.Value) -> ir.Value:
    """Pointer to the lengths of all sequences."""
    return CacheLengthsOp(cache, ir.Type.parse("!llvm.ptr<1>")).operation.results[0]


def max_prompt_length(cache: ir.Value) -> ir.Value:
    """Longest count of new tokens in the batch, i32."""
    return MaxPromptLengthOp(cache).operation.results[0]


def max_context_length(cache: ir.Value) -> ir.Value:
    """Longest cached + new tokens in the batch, i32."""
    return MaxContextLengthOp(cache).operation.results[0]


def is_empty(cache: ir.Value) -> ir.Value:
    """max_cache_length == 0, i1."""
    return IsEmptyOp(cache).operation.results[0]


def num_rows(cache: ir.Value) -> ir.Value:
    """Rows that the view spans, i32."""
    return NumRowsOp(cache).operation.results[0]


def buffer_operand(buffer: ir.Value, heads: int, size: int) -> ir.Value:
    """A buffer [T, heads * size] as a dense operand of one sequence."""
    element = dtypes.by_mlir(str(ir.MemRefType(buffer.type).element_type))
    view = types.operand_type(OperandData(DENSE, element, heads, size))
    return BufferOperandOp(buffer, view).operation.results[0]
