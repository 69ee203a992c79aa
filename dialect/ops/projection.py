# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused projections: products whose columns are queries, and keys and values that are written to a cache.

C = x weight^T, [rows, N], with one row per token. Its columns form bands of whole heads, in this order: queries, keys,
values and, with an index collection, the indexer's queries and keys. Rotation, norms and quantization are as in
:mod:`rotary` and :mod:`operations`.
"""

from dataclasses import dataclass
from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..buffers import Buffer, fit, storable
from ..contents import Counts, Lengths, Offsets
from ..dtypes import DType, bf16, by_mlir, by_name
from ..effects import ReadsMemory, TierOne, WritesCache, WritesMemory
from ..ext import I32, Operand, in_place_of
from ..layout import CacheSpec
from ..types import CollectionType
from .operations import FLOATS, not_mla, offsets
from .rotary import GAMMAS, freqs_table
from .weight_groups import FORMATS, PLAIN, PLAIN_TYPES, Groups, groups_of, packed

SCALED = "f8e4m3"  # the element type of x and weight that scales need
SCALED_MLIR = "f8E4M3FN"
SCALINGS = ("none", "tensor", "row", "block", "group")
BLOCK = 128  # elements of K, and rows of the weight, per scale with scaling block


@dataclass(frozen=True)
class Band:
    """Columns of a product that are heads of one kind, from column ``first`` up."""

    kind: str
    first: int
    heads: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.heads * self.size


def bands_of(
    spec: CacheSpec, columns: int, query: tuple[int, int] | None, index: tuple[CacheSpec, tuple[int, int]] | None
) -> list[Band] | str:
    """The bands of a product with ``columns`` columns, or what is wrong with it.

    ``query``: (heads, head size); ``index``: the spec of an index collection, and (heads, head size) of its queries.
    """
    wanted: list[tuple[str, int, int]] = []
    if query is not None:
        wanted.append(("query", *query))
    wanted.append(("key", spec.num_heads, spec.head_size))
    # Without queries the weight may have columns for keys only.
    if not spec.is_mla and not (query is None and index is None and columns == spec.row_size):
        wanted.append(("value", spec.num_heads, spec.head_size))
    if index is not None:
        keys, queries = index
        wanted += [("index_query", *queries), ("index_key", keys.num_heads, keys.head_size)]
    found, first = [], 0
    for kind, heads, size in wanted:
        found.append(Band(kind, first, heads, size))
        first += heads * size
    if first == columns:
        return found
    parts = " + ".join(f"{b.heads * b.size} of {b.kind.replace('_', ' ')}" for b in found)
    return f"weight must have {first} rows ({parts}), got {columns}"


class _Projection(Kv.Operation):
    """A product into a cache; ``extents`` names the operand with the batch's row offsets or lengths."""

    collection: Operand[CollectionType]
    layer: Operand[I32]
    x: Operand[Any]
    weight: Operand[Any]
    extents: Operand[Any]
    query_out: Operand[Any] | None = None
    bias: Operand[Any] | None = None
    x_scale: Operand[Any] | None = None
    weight_scale: Operand[Any] | None = None
    weight_min: Operand[Any] | None = None
    tensor_scale: Operand[Any] | None = None
    freqs: Operand[Any] | None = None
    q_gamma: Operand[Any] | None = None
    k_gamma: Operand[Any] | None = None
    index_collection: Operand[CollectionType] | None = None
    index_query_out: Operand[Any] | None = None
    scaling: ir.StringAttr
    weight_format: ir.StringAttr
    interleaved: ir.BoolAttr
    eps: ir.FloatAttr

    def heads_of(self, value: ir.Value | None) -> tuple[int, int] | None:
        """(heads, head size) of a query operand with static extents; None without one."""
        if value is None:
            return None
        shape = ir.MemRefType(value.type).shape
        return shape[1], shape[2]

    def verify_rows(self, table: str) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None:
            return False
        if not verify.one_of(self, "scaling", SCALINGS) or not verify.one_of(self, "weight_format", FORMATS):
            return False
        if not self._verify_elements():
            return False
        x, weight = ir.MemRefType(self.x.type), ir.MemRefType(self.weight.type)
        queries = ((self.query_out, "query_out"), (self.index_query_out, "index_query_out"))
        for value, name in queries:
            if value is None:
                continue
            if not verify.memref(self, value, 3, FLOATS, name):
                return False
            type_ = ir.MemRefType(value.type)
            if type_.is_dynamic_dim(1) or type_.is_dynamic_dim(2):
                return verify.fail(self, f"{name} must have static heads and head size, got {type_}")
        return (
            self._verify_bands(spec, weight.shape[0])
            and self._verify_types(spec, str(x.element_type))
            and self._verify_scales(str(x.element_type))
            and self._verify_turns(spec)
            and offsets(self, getattr(self, table), table)
        )

    def _verify_elements(self) -> bool:
        """Whether x and weight have the same K and compatible types."""
        grouped = self.scaling.value == "group"
        elements = (*FLOATS, SCALED_MLIR)
        of_x = (*elements, "i8") if grouped else elements
        of_weight = tuple(dict.fromkeys(by_name(n).mlir for n in PLAIN_TYPES)) if grouped else elements
        if not all(
            verify.memref(self, v, 2, types, n)
            for v, types, n in ((self.x, of_x, "x"), (self.weight, of_weight, "weight"))
        ):
            return False
        x, weight = ir.MemRefType(self.x.type), ir.MemRefType(self.weight.type)
        if x.is_dynamic_dim(1) or weight.is_dynamic_dim(0) or weight.is_dynamic_dim(1):
            return verify.fail(self, f"x and weight must have static K, and weight static N, got {x} and {weight}")
        name, one = self.weight_format.value, (x.element_type == weight.element_type)
        if not grouped:
            if packed(name):
                return verify.fail(self, f"needs scaling group with weight_format {name}, got {self.scaling.value}")
            if x.shape[1] != weight.shape[1] or not one:
                return verify.fail(self, f"x and weight must have one K and one element type, got {x} and {weight}")
            return True
        if packed(name) and str(weight.element_type) != "i8":
            return verify.fail(self, f"weight must have bytes of two elements with weight_format {name}, got {weight}")
        if quantized_x(self) and not (
            one and (name in (PLAIN, "e2m1")) and (name != PLAIN or x.element_type != ir.IntegerType.get_signless(8))
        ):
            return verify.fail(
                self,
                "x must be of floats, or f8E4M3FN as a weight of weight_format plain, or bytes as one of e2m1, "
                f"got {x} with {weight} and weight_format {name}",
            )
        if k_of(self, self.x) != k_of(self, self.weight):
            return verify.fail(self, f"x and weight must have one K, got {x} and {weight} of weight_format {name}")
        return True

    def _verify_bands(self, spec: CacheSpec, columns: int) -> bool:
        index = None
        if (self.index_collection is None) != (self.index_query_out is None):
            return verify.fail(self, "takes both index_collection and index_query_out, or neither")
        if self.index_collection is not None:
            other = verify.handle(self, self.index_collection, ("collection",))
            if other is None or not not_mla(self, spec):
                return False
            index = other, self.heads_of(self.index_query_out)
        found = bands_of(spec, columns, self.heads_of(self.query_out), index)
        if isinstance(found, str):
            return verify.fail(self, found)
        if self.bias is None:
            return True
        return verify.memref(self, self.bias, 1, FLOATS, "bias") and verify.static_dim(
            self, self.bias, 0, columns, "bias"
        )

    def _verify_types(self, spec: CacheSpec, element: str) -> bool:
        """Whether all bands accept the type that products are rounded to."""
        rounded = rounding_of(self).mlir
        outs = [(v, n) for v, n in ((self.query_out, "query_out"), (self.index_query_out, "index_query_out")) if v]
        for value, name in outs:
            if str(ir.MemRefType(value.type).element_type) != rounded:
                return verify.fail(self, f"{name} must have elements of type {rounded}, got {value.type}")
        if element in FLOATS and rounded != element:
            return verify.fail(self, f"query_out must have the element type of x, {element}, got {rounded}")
        specs = [(spec, "collection")]
        if self.index_collection is not None:
            specs.append((verify.handle(self, self.index_collection, ("collection",)), "index_collection"))
        for one, name in specs:
            if rounded not in storable(one):
                return verify.fail(
                    self, f"{name} must take {rounded}, which products are rounded to, got {one.dtype.mlir}"
                )
        return True

    def _verify_scales(self, element: str) -> bool:
        scaling = self.scaling.value
        given = [v is not None for v in (self.x_scale, self.weight_scale)]
        if scaling == "group":
            return self._verify_groups()
        if self.weight_min is not None or self.tensor_scale is not None:
            return verify.fail(self, f"takes weight_min and tensor_scale with scaling group, got {scaling}")
        if (scaling == "none") == any(given) or len(set(given)) > 1:
            return verify.fail(self, f"takes x_scale and weight_scale unless scaling is none, got scaling {scaling}")
        if scaling == "none":
            return True
        if element != SCALED_MLIR:
            return verify.fail(self, f"takes scales with x and weight of {SCALED_MLIR}, got {element}")
        return all(
            verify.memref(self, v, 2, ("f32",), n)
            for v, n in ((self.x_scale, "x_scale"), (self.weight_scale, "weight_scale"))
        )

    def _verify_groups(self) -> bool:
        if self.weight_scale is None or (self.x_scale is None) == quantized_x(self):
            return verify.fail(
                self, "takes weight_scale with scaling group, and x_scale where x is of f8E4M3FN or bytes"
            )
        for name in ("x", "weight"):
            if getattr(self, f"{name}_scale") is not None:
                found = groups_in(self, name)
                if isinstance(found, str):
                    return verify.fail(self, found)
        if self.weight_min is not None and self.weight_min.type != self.weight_scale.type:
            return verify.fail(self, f"weight_min must be of the type of weight_scale, got {self.weight_min.type}")
        return self.tensor_scale is None or (
            verify.memref(self, self.tensor_scale, 2, ("f32",), "tensor_scale")
            and all(verify.static_dim(self, self.tensor_scale, i, 1, "tensor_scale") for i in range(2))
        )

    def _verify_turns(self, spec: CacheSpec) -> bool:
        """Whether rotation and norms match the cache's head size."""
        if (self.q_gamma is None) != (self.k_gamma is None):
            return verify.fail(self, "takes both q_gamma and k_gamma, or neither")
        if self.freqs is None and self.q_gamma is None:
            return True
        if not not_mla(self, spec):
            return False
        if self.query_out is None:
            return verify.fail(self, "needs query_out with freqs or gammas")
        return (
            fit(self, {"query_out": Buffer("T, Hq, D", FLOATS)}, spec)
            and (self.freqs is None or freqs_table(self, self.freqs, spec.head_size))
            and fit(self, GAMMAS, spec)
        )


def quantized_x(op: Any) -> bool:
    """Whether x is quantized too, with group scales of its own."""
    return str(ir.MemRefType(op.x.type).element_type) not in FLOATS


def k_of(op: Any, buffer: ir.Value) -> int:
    """Elements per row of x or of the weight, counting two per byte if packed."""
    type_ = ir.MemRefType(buffer.type)
    return type_.shape[1] * (2 if packed(op.weight_format.value) and str(type_.element_type) == "i8" else 1)


def groups_in(op: Any, name: str) -> Groups | str:
    """The groups of ``x`` or ``weight``, or what is wrong with their scales."""
    scale, of = getattr(op, f"{name}_scale"), getattr(op, name)
    if not isinstance(scale.type, ir.MemRefType):
        return f"{name}_scale must be a memref, got {scale.type}"
    type_, rows = ir.MemRefType(scale.type), ir.MemRefType(of.type)
    shape = [None if type_.is_dynamic_dim(i) else type_.shape[i] for i in range(type_.rank)]
    count = None if rows.is_dynamic_dim(0) else rows.shape[0]
    try:
        element = by_mlir(str(type_.element_type)).name
    except ValueError:
        element = str(type_.element_type)
    return groups_of(shape, element, count, k_of(op, of), f"{name}_scale")


def rounded_to(spec: CacheSpec, x: DType, out: DType | None) -> DType:
    """The type that products are rounded to: that of the queries, or of a float cache, or of x, or bf16."""
    if out is not None:
        return out
    if not spec.quantized and spec.dtype.name in FLOATS:
        return spec.dtype
    return x if x.name in FLOATS else bf16


def rounding_of(op: Any) -> DType:
    """The type that an op's products are rounded to."""
    spec = verify.handle(op, op.collection, ("collection",))
    assert spec is not None
    out = op.query_out if op.query_out is not None else op.index_query_out
    return rounded_to(spec, _element(op.x), None if out is None else _element(out))


def _element(value: ir.Value) -> DType:
    return by_mlir(str(ir.MemRefType(value.type).element_type))


class ProjectAppendOp(_Projection, name="project_append", traits=[TierOne, WritesCache, ReadsMemory, WritesMemory]):
    """Multiply the new tokens by a weight; write queries to query_out, keys and values to the cache.

    x: [T, K]; weight: [N, K] of x's type; both have contiguous rows (precondition). C = x weight^T in f32, times
    scales, plus bias [N], rounded to the type of query_out. Its columns are, in this order, queries [T, Hq, Dq], keys
    (only D columns for an MLA collection), values and, with an index collection, index queries and index keys. Without
    query_out there are no query columns, and N = H * D leaves out the values too. freqs and gammas are as in
    kv.rope_append; they do not apply to an index collection. scaling: ``tensor``, x_scale and weight_scale [1, 1] f32;
    ``row``, [T, 1] and [N, 1]; ``block``, [T, ceil(K / 128)] and [ceil(N / 128), ceil(K / 128)].

    ``group``: the weight's elements, 8-bit or by weight_format 4-bit in bytes [N, K / 2], have scales per group of K,
    weight_scale [N, K / g] or in the layout of sm_100, and optional minima weight_min of the same type, which are
    subtracted (``weight_groups``). x is of floats, or of the weight's element type with an x_scale of its own. Weights
    are rounded to x's type, or to bf16 for a quantized x; products are multiplied by tensor_scale [1, 1].
    """

    row_offsets: Operand[Any] = in_place_of("extents")

    contents = (
        Offsets("row_offsets", "x"),
        Lengths("collection", ("row_offsets",)),
        Lengths("index_collection", ("row_offsets",)),
    )

    def verify_invariants(self) -> bool:
        return self.verify_rows("row_offsets")


class ProjectAppendPaddedOp(
    _Projection, name="project_append_padded", traits=[TierOne, WritesCache, ReadsMemory, WritesMemory]
):
    """kv.project_append for a padded batch: x [B * S, K], query_out [B * S, Hq, Dq], with S rows per sequence.

    All query rows are written; keys and values of tokens t >= valid_lengths[b] are not.
    """

    valid_lengths: Operand[Any] = in_place_of("extents")

    contents = (
        Counts("valid_lengths", (("x", 0),)),
        Lengths("collection", ("valid_lengths",)),
        Lengths("index_collection", ("valid_lengths",)),
    )

    def verify_invariants(self) -> bool:
        return self.verify_rows("valid_lengths")
