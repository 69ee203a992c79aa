# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused rotary embedding and RMS norm of queries and keys.

Conventions as in :mod:`operations`. freqs is [positions, R] f32 with interleaved (cos, sin) pairs, R even. The
attribute interleaved rotates pairs (2k, 2k+1) of the last R dims of a head; without it, pairs (k, k + R/2) of the first
R. The other dims are not changed.
"""

from typing import Any

from mlir import ir

from .. import verify
from ..buffers import FLOATS, Buffer, WithBuffers, queryable, storable
from ..contents import Counts, Lengths, Offsets
from ..effects import ReadsMemory, TierOne, UpdatesCache, WritesCache, WritesMemory
from ..ext import I32, Operand, in_place_of
from ..layout import CacheSpec
from ..types import CollectionType
from .operations import not_mla

GAMMAS = {"q_gamma": Buffer("D", FLOATS), "k_gamma": Buffer("D", FLOATS)}


class RopeAppendOp(WithBuffers, name="rope_append", traits=[TierOne, WritesCache, ReadsMemory, WritesMemory]):
    """Rotate query and key by position, write key and value to the cache, the query to query_out.

    query, query_out: [T, Hq, D]; freqs: [positions, R] f32, interleaved (cos, sin) pairs, R <= D even. interleaved
    rotates pairs (2k, 2k+1) of the last R dims; without it, pairs (k, k + R/2) of the first R. Optional q_gamma,
    k_gamma [D]: RMS norm with eps before the rotation. Quantization is as in kv.append.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    key: Operand[Any]
    value: Operand[Any]
    row_offsets: Operand[Any]
    freqs: Operand[Any]
    query_out: Operand[Any]
    q_gamma: Operand[Any] | None = None
    k_gamma: Operand[Any] | None = None
    interleaved: ir.BoolAttr
    eps: ir.FloatAttr

    contents = (Offsets("row_offsets", "query"), Lengths("collection", ("row_offsets",)))

    buffers = {
        "query": Buffer("T, Hq, D", queryable), "query_out": Buffer("T, Hq, D", queryable),
        "key": Buffer("T, H, D", storable), "value": Buffer("T, H, D", storable), "row_offsets": Buffer("B + 1"),
        **GAMMAS,
    }  # fmt: skip

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        assert spec is not None
        if not not_mla(self, spec):
            return False
        if (self.q_gamma is None) != (self.k_gamma is None):
            return verify.fail(self, "takes both q_gamma and k_gamma, or neither")
        return super().verify_buffers(spec) and freqs_table(self, self.freqs, spec.head_size)


def freqs_table(op: Any, value: ir.Value, head_size: int) -> bool:
    """Whether an operand is [positions, R] f32 with R static, even and at most the head size."""
    if not verify.memref(op, value, 2, ("f32",), "freqs"):
        return False
    type_ = ir.MemRefType(value.type)
    if type_.is_dynamic_dim(1):
        return verify.fail(op, "freqs must have a static extent R in dimension 1, got a dynamic one")
    size = type_.shape[1]
    return (size % 2 == 0 and 0 < size <= head_size) or verify.fail(
        op, f"freqs must have an even R of at most {head_size} in dimension 1, got {size}"
    )


class _InPlace(WithBuffers):
    """An operation that rotates or normalises the keys of a cache in place."""

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        assert spec is not None
        found = rotates_in_place(self, spec) and super().verify_buffers(spec)
        return found and (self.freqs is None or freqs_table(self, self.freqs, spec.head_size))


class _Rope(_InPlace):
    """Rotation of queries and of a cache's new keys; ``extents`` names the operand with the row offsets or lengths."""

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    extents: Operand[Any]
    freqs: Operand[Any]
    query_out: Operand[Any]
    position_ids: Operand[Any] | None = None
    interleaved: ir.BoolAttr
    mrope_section: ir.DenseI64ArrayAttr


class RopeOp(_Rope, name="rope", traits=[TierOne, UpdatesCache, ReadsMemory, WritesMemory]):
    """Rotate the query to query_out and the keys of the new tokens in place; operands as in kv.rope_append.

    The optional position_ids [sections, T] i32 with mrope_section (pairs per section) replace the positions.
    """

    row_offsets: Operand[Any] = in_place_of("extents")

    contents = (Offsets("row_offsets", "query"), Lengths("collection", ("row_offsets",)))

    buffers = {
        "query": Buffer("T, Hq, Dq", FLOATS), "query_out": Buffer("T, Hq, Dq", FLOATS),
        "row_offsets": Buffer("B + 1"), "position_ids": Buffer("sections, T"),
    }  # fmt: skip


class RopePaddedOp(_Rope, name="rope_padded", traits=[TierOne, UpdatesCache, ReadsMemory, WritesMemory]):
    """kv.rope for a padded batch: query, query_out [B, Smax, Hq, D]; tokens t >= valid_lengths[b] are not written.

    Optional position_ids [sections, B, Smax] i32.
    """

    valid_lengths: Operand[Any] = in_place_of("extents")

    contents = (Counts("valid_lengths", (("query", 1),)), Lengths("collection", ("valid_lengths",)))

    buffers = {
        **dict.fromkeys(("query", "query_out"), Buffer("B, S, Hq, Dq", FLOATS, counted=True)),
        "valid_lengths": Buffer("B"), "position_ids": Buffer("sections, B, S"),
    }  # fmt: skip


class QkNormOp(_InPlace, name="qk_norm", traits=[TierOne, UpdatesCache, ReadsMemory, WritesMemory]):
    """RMS-normalise each head of the query to query_out, and of the new tokens' keys in place, in one launch.

    x * rsqrt(mean(x^2) + eps) * (gamma + weight_offset), gammas [D]; with freqs, followed by the rotation of kv.rope.
    The index operands, all or none, are the query and collection of an indexer with the same head size, which are
    normalised and rotated too.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    row_offsets: Operand[Any]
    query_out: Operand[Any]
    q_gamma: Operand[Any]
    k_gamma: Operand[Any]
    freqs: Operand[Any] | None = None
    index_collection: Operand[CollectionType] | None = None
    index_query: Operand[Any] | None = None
    index_query_out: Operand[Any] | None = None
    index_q_gamma: Operand[Any] | None = None
    index_k_gamma: Operand[Any] | None = None
    interleaved: ir.BoolAttr
    eps: ir.FloatAttr
    weight_offset: ir.FloatAttr

    contents = (
        Offsets("row_offsets", "query"),
        Lengths("collection", ("row_offsets",)),
        Lengths("index_collection", ("row_offsets",)),
    )

    buffers = {
        **dict.fromkeys(("query", "query_out"), Buffer("T, Hq, D", FLOATS)),
        **dict.fromkeys(("index_query", "index_query_out"), Buffer("T, Hi, D", FLOATS)),
        **GAMMAS, **{f"index_{n}": buffer for n, buffer in GAMMAS.items()}, "row_offsets": Buffer("B + 1"),
    }  # fmt: skip

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        assert spec is not None
        index = [getattr(self, n) for n in INDEX]
        if len({v is None for v in index}) > 1:
            return verify.fail(self, f"takes {', '.join(INDEX)} together, or none of them")
        if self.index_collection is not None:
            other = verify.handle(self, self.index_collection, ("collection",))
            if other is None or not rotates_in_place(self, other):
                return False
            if other.head_size != spec.head_size:
                got = f"{spec.head_size}, got {other.head_size}"
                return verify.fail(self, f"index_collection must have the collection's head size {got}")
        return super().verify_buffers(spec)


INDEX = ("index_collection", "index_query", "index_query_out", "index_q_gamma", "index_k_gamma")


def rotates_in_place(op: Any, spec: CacheSpec) -> bool:
    """Whether the keys of a collection can be updated in place."""
    if spec.quantized:
        return verify.fail(op, "needs a cache without scales: rotate before quantizing with kv.rope_append")
    return spec.dtype.is_float or verify.fail(op, f"needs a cache of floats, got element type {spec.dtype.mlir}")
