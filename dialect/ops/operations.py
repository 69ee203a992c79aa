# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused write and copy operations on whole caches, used outside of kernels.

All are destination-style on memrefs. T is the number of new tokens in the batch, H the KV heads, D the head size, B
the sequences; ``row_offsets`` [B+1] delimit the sequences' rows. Token i of sequence b is at position
cache_length(b) + i. The optional attribute ``schedule`` says how the op is expanded; passes and tuners set it. No
operation changes the cache lengths.
"""

from typing import Any

from mlir import ir

from .. import layout, verify
from ..base import Kv
from ..buffers import FLOAT32, FLOATS, Buffer, WithBuffers, storable, stored
from ..contents import Counts, Lengths, Offsets
from ..effects import ReadsCache, ReadsMemory, TierOne, UpdatesCache, UpdatesMemory, WritesCache, WritesMemory
from ..ext import I32, Operand
from ..layout import FA3, CacheSpec
from ..types import CollectionType


def offsets(op: Any, value: ir.Value, name: str = "row_offsets") -> bool:
    return verify.memref(op, value, 1, ("i32",), name)


class AppendOp(WithBuffers, name="append", traits=[TierOne, WritesCache, ReadsMemory]):
    """Write the new tokens' keys and values. key, value: [T, H, D].

    A cache with scales quantizes with one scale per granule: its largest magnitude divided by the storage type's
    largest finite value, or the given scales [T, H, G]. With tensor_scales [2], keys are first divided by the first,
    values by the second. A cache with zeros takes no scales: a granule's zero is its
    least value. An 8-bit cache without scales has scale 1: floats are converted with saturation. An MLA collection has
    no values: only the key is written, and value is absent.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    key: Operand[Any]
    row_offsets: Operand[Any]
    value: Operand[Any] | None = None
    key_scale: Operand[Any] | None = None
    value_scale: Operand[Any] | None = None
    tensor_scales: Operand[Any] | None = None

    contents = (Offsets("row_offsets", "key"), Lengths("collection", ("row_offsets",)))

    buffers = {
        "key": Buffer("T, H, D", storable), "value": Buffer("T, H, D", storable), "row_offsets": Buffer("B + 1"),
        "key_scale": Buffer("T, H, scales", FLOATS), "value_scale": Buffer("T, H, scales", FLOATS),
        "tensor_scales": Buffer("2", FLOAT32),
    }  # fmt: skip

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        assert spec is not None
        if (self.value is None) != spec.is_mla:
            has = "no value operand" if spec.is_mla else "a value operand"
            return verify.fail(self, f"takes {has} for this collection (is_mla = {str(spec.is_mla).lower()})")
        if self.tensor_scales is not None and not spec.takes_tensor_scales:
            return verify.fail(self, "takes tensor_scales for a cache of at most 8 bits without zeros only")
        if self.tensor_scales is not None and self.key_scale is not None:
            return verify.fail(self, "takes key_scale or tensor_scales, not both")
        scaled = self.key_scale is not None or self.value_scale is not None
        if scaled and spec.zero:
            return verify.fail(
                self, "computes scales and zeros of this cache itself: leave key_scale and value_scale out"
            )
        return (not scaled or verify.needs_scales(self, spec)) and super().verify_buffers(spec)


class StoreRaggedOp(WithBuffers, name="store_ragged", traits=[TierOne, WritesCache, ReadsMemory]):
    """Write x [T, H, D] of the storage type to the new tokens of one cache."""

    cache: Operand[Any]
    x: Operand[Any]
    row_offsets: Operand[Any]

    contents = (Offsets("row_offsets", "x"), Lengths("cache", ("row_offsets",)))

    buffers = {"x": Buffer("T, H, D", stored), "row_offsets": Buffer("B + 1")}


class StorePaddedOp(WithBuffers, name="store_padded", traits=[TierOne, WritesCache, ReadsMemory]):
    """Write x [B, Smax, H, D] to the new tokens; tokens t >= valid_lengths[b] are not written."""

    cache: Operand[Any]
    x: Operand[Any]
    valid_lengths: Operand[Any]

    contents = (Counts("valid_lengths", (("x", 1),)), Lengths("cache", ("valid_lengths",)))

    buffers = {"x": Buffer("B, S, H, D", stored, counted=True), "valid_lengths": Buffer("B")}


class RmsNormOp(Kv.Operation, name="rms_norm", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Normalise the new tokens of one cache in place: x * rsqrt(mean(x^2) + eps) * (gamma + weight_offset).

    gamma: [C], C <= D (the first C dims of each head) or C = H*D (the whole row).
    """

    cache: Operand[Any]
    gamma: Operand[Any]
    row_offsets: Operand[Any]
    total_tokens: Operand[I32]
    eps: ir.FloatAttr
    weight_offset: ir.FloatAttr
    multiply_before_cast: ir.BoolAttr

    contents = (Offsets("row_offsets"), Lengths("cache", ("row_offsets",)))

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.cache, ("cache",))
        if spec is None:
            return False
        if spec.quantized or not spec.dtype.is_float:
            return verify.fail(self, "needs a float cache without scales")
        if not verify.memref(self, self.gamma, 1, FLOATS, "gamma"):
            return False
        gamma = ir.MemRefType(self.gamma.type)
        size, row = spec.head_size, spec.row_size
        if not gamma.is_dynamic_dim(0) and not (0 < gamma.shape[0] <= size or gamma.shape[0] == row):
            return verify.fail(self, f"gamma must have at most {size} or exactly {row} elements, got {gamma.shape[0]}")
        return offsets(self, self.row_offsets)


class _Addition(WithBuffers):
    """Addition to cached keys and values."""

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        assert spec is not None
        return not_mla(self, spec) and super().verify_buffers(spec)


class RaddOp(_Addition, name="radd", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Add a [Tn, 2*H*D] (K half, V half) to the tokens of a slice of the batch.

    row_offsets is the slice of the batch's offsets (it may start above 0), batch_offset the slice's first sequence.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    a: Operand[Any]
    row_offsets: Operand[Any]
    batch_offset: Operand[I32]

    contents = (Offsets("row_offsets", "a", from_first=True), Lengths("collection", ("row_offsets",), "batch_offset"))

    buffers = {"a": Buffer("Tn, 2 * H * D", stored), "row_offsets": Buffer("n + 1")}


class Iadd2mOp(_Addition, name="iadd_2m", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Add kv [2m, H*D]: rows [0, m) to K, [m, 2m) to V, of the first m new tokens of the batch."""

    collection: Operand[CollectionType]
    layer: Operand[I32]
    kv: Operand[Any]
    row_offsets: Operand[Any]

    contents = (Offsets("row_offsets"), Lengths("collection", ("row_offsets",)))

    buffers = {"kv": Buffer("2 m, H * D", stored), "row_offsets": Buffer("n + 1")}


def not_mla(op: Any, spec: CacheSpec) -> bool:
    return not spec.is_mla or verify.fail(op, "needs a collection with values (is_mla = false)")


def read_as_floats(op: Any, spec: CacheSpec) -> bool:
    if spec.dtype.is_float or spec.quantized:
        return True
    return verify.fail(op, f"needs a float cache or one with scales, got element type {spec.dtype.mlir}")


class GatherOp(WithBuffers, name="gather", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """Copy tokens out of one cache, bit-exact: out[r, j] = cache(b(r), :, token_ids[r, j], :).

    token_ids: [R, Ns] i32 positions, >= 0; row_offsets [B+1] delimit the rows r of each sequence; out: [R, Ns, H, D],
    or bytes [R, Ns, H, D / 2] of a cache whose elements share bytes.
    """

    cache: Operand[Any]
    token_ids: Operand[Any]
    row_offsets: Operand[Any]
    out: Operand[Any]

    contents = (Offsets("row_offsets", "token_ids"),)

    buffers = {
        "token_ids": Buffer("R, Ns", counted=True),
        "out": Buffer("R, Ns, H, D stored", stored),
        "row_offsets": Buffer("B + 1"),
    }


class CopyPagesOp(WithBuffers, name="copy_pages", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Copy whole pages of a pool, all layers, K and V and scales: page destination[i] = page source[i].

    source, destination: [n] i32. Pairs with an id out of [0, N) are skipped. No destination may be a source or repeat.
    """

    collection: Operand[CollectionType]
    source: Operand[Any]
    destination: Operand[Any]

    buffers = {"source": Buffer("n"), "destination": Buffer("n")}


class TransferPagesOp(WithBuffers, name="transfer_pages", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Copy pages from one pool to another: page destination_pages[i] = page source_pages[i].

    The pools have the same type except for the strides of tokens and heads. K, V and scales are copied, of one layer
    or, without that operand, of all layers. source_pages, destination_pages: [n] i32; pairs with an id outside of its
    pool are skipped. fa3 pools take no layer, since all layers share their pages.
    """

    source_pool: Operand[CollectionType]
    destination_pool: Operand[CollectionType]
    source_pages: Operand[Any]
    destination_pages: Operand[Any]
    layer: Operand[I32] | None = None

    buffers = {"source_pages": Buffer("n"), "destination_pages": Buffer("n")}

    def verify_invariants(self) -> bool:
        source = verify.handle(self, self.source_pool, ("collection",))
        destination = None if source is None else verify.handle(self, self.destination_pool, ("collection",))
        if source is None or destination is None:
            return False
        if layout.packed(source) != layout.packed(destination):
            return verify.fail(
                self,
                "pools must be of the same type but for strides, "
                f"got {self.source_pool.type} and {self.destination_pool.type}",
            )
        if self.layer is not None and source.kind == FA3:
            return verify.fail(self, "takes no layer for fa3 pools, since all layers share their pages")
        return self.verify_buffers()


class ConvertOp(Kv.Operation, name="convert", traits=[TierOne, UpdatesCache]):
    """Copy every cached token of one cache to the same position of another, converting kind, layout and dtype.

    Tokens without a page in one of the tables are skipped.
    """

    source: Operand[Any]
    destination: Operand[Any]

    contents = (Lengths("source"),)

    def verify_invariants(self) -> bool:
        source = verify.handle(self, self.source, ("cache",))
        destination = None if source is None else verify.handle(self, self.destination, ("cache",))
        if source is None or destination is None:
            return False
        if source.rotation or destination.rotation:
            return verify.fail(self, "takes no cache of rotated blocks, whose loads give rotated values: use kv.append")
        shapes = [(spec.num_heads, spec.head_size) for spec in (source, destination)]
        return shapes[0] == shapes[1] or verify.fail(
            self,
            "source and destination must have the same heads and head size, "
            f"got {shapes[0][0]} x {shapes[0][1]} and {shapes[1][0]} x {shapes[1][1]}",
        )


class RemapSparseIndicesOp(WithBuffers, name="remap_sparse_indices", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Encode logical tokens as page*P + slot: a negative t stays; a page past the table or >= invalid_id gives -1.

    logical, out: [R, Ks] i32; row_offsets [B+1]; lookup_table [B, C] i32.
    """

    logical: Operand[Any]
    row_offsets: Operand[Any]
    lookup_table: Operand[Any]
    invalid_id: Operand[I32]
    out: Operand[Any]
    page_size: ir.IntegerAttr

    contents = (Offsets("row_offsets", "logical"),)

    buffers = {
        "row_offsets": Buffer("B + 1"), "logical": Buffer("R, Ks"), "lookup_table": Buffer("B, C"),
        "out": Buffer("R, Ks"),
    }  # fmt: skip

    def verify_invariants(self) -> bool:
        size = verify.integer(self.page_size)
        if size is None or size < 1:
            return verify.fail(self, f"page_size must be a positive integer, got {self.page_size}")
        return self.verify_buffers()


class CacheRowOffsetsOp(WithBuffers, name="cache_row_offsets", traits=[TierOne, ReadsMemory, WritesMemory]):
    """out[n] = sum over j < n of cache_lengths[j] + row_offsets[j+1] - row_offsets[j]; out: [B+1] i32."""

    row_offsets: Operand[Any]
    cache_lengths: Operand[Any]
    out: Operand[Any]

    contents = (Offsets("row_offsets"), Counts("cache_lengths"))

    buffers = {"cache_lengths": Buffer("B"), "row_offsets": Buffer("B + 1"), "out": Buffer("B + 1")}


class SplitPrefixesOp(WithBuffers, name="split_prefixes", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Tables for a batch whose sequences share prefixes: one set for the prefixes, one for the suffixes. All are i32.

    Group g has the sequences [sequences[g], sequences[g+1]) of lookup_table [B, columns] and cache_lengths [B];
    sequences before the first group belong to it, those after the last group to the last. The sequences of a group
    share lengths[g] // page_size pages. Written for the prefixes: prefix_table [G, columns], the pages of the group's
    first sequence; prefix_lengths [G], the tokens in them; prefix_rows [G+1], the groups' offsets in the rows of
    row_offsets [B+1]; prefix_keys [G+1], zeros, since a prefix has no new keys. Written for the suffixes: suffix_table
    [B, columns], the remaining pages; suffix_lengths [B], the cached tokens in them.
    """

    lookup_table: Operand[Any]
    cache_lengths: Operand[Any]
    row_offsets: Operand[Any]
    sequences: Operand[Any]
    lengths: Operand[Any]
    prefix_table: Operand[Any]
    prefix_lengths: Operand[Any]
    prefix_rows: Operand[Any]
    prefix_keys: Operand[Any]
    suffix_table: Operand[Any]
    suffix_lengths: Operand[Any]
    page_size: ir.IntegerAttr

    contents = (Offsets("row_offsets"), Offsets("sequences", "cache_lengths"), Counts("lengths"))

    buffers = {
        "lookup_table": Buffer("B, columns"), "lengths": Buffer("G"), "cache_lengths": Buffer("B"),
        "row_offsets": Buffer("B + 1"), "sequences": Buffer("G + 1"), "prefix_table": Buffer("G, columns"),
        "prefix_lengths": Buffer("G"), "prefix_rows": Buffer("G + 1"), "prefix_keys": Buffer("G + 1"),
        "suffix_table": Buffer("B, columns"), "suffix_lengths": Buffer("B"),
    }  # fmt: skip

    def verify_invariants(self) -> bool:
        size = verify.integer(self.page_size)
        if size is None or size < 1:
            return verify.fail(self, f"page_size must be positive, got {self.page_size}")
        return self.verify_buffers()


class IncrementCacheLengthsOp(WithBuffers, name="increment_cache_lengths", traits=[TierOne, UpdatesMemory]):
    """cache_lengths[b] += row_offsets[b+1] - row_offsets[b], in place, between steps."""

    cache_lengths: Operand[Any]
    row_offsets: Operand[Any]

    contents = (Offsets("row_offsets"), Counts("cache_lengths"))

    buffers = {"cache_lengths": Buffer("B"), "row_offsets": Buffer("B + 1")}
