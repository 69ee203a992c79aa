# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused attention over latent rows (MLA), and the operations of a prefill over decompressed chunks."""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..buffers import FLOAT32, Buffer, WithBuffers, fit, stored
from ..contents import Counts, Lengths, Offsets
from ..effects import ReadsCache, ReadsMemory, TierOne, WritesMemory
from ..ext import F32, I32, Operand
from ..layout import CacheSpec
from ..types import CollectionType
from .attention import functions_fit, listed_tiles, mask_is_valid, rows_end, score_of, stored_elements
from .operations import FLOATS, read_as_floats

LEAST_INLINE = 16  # elements per scale within a row, at least: as many as a kernel reads at a time


def is_latent(op: Any, spec: CacheSpec) -> bool:
    return spec.is_mla or verify.fail(op, "needs an MLA collection (is_mla = true)")


def rope_columns(spec: CacheSpec, columns: int) -> int:
    """The number of a query's columns that multiply the bf16 keys after 8-bit latent rows of D bytes; 0 if impossible.

    The query then has C + R columns and the row C + 2 R bytes, with C even and at most one scale.
    """
    rope = spec.head_size - columns
    content = columns - rope
    fits = spec.is_mla and spec.dtype.bits == 8 and rope > 0 and content > 0 and content % 2 == 0
    return rope if fits and (not spec.quantized or spec.num_scales == 1) else 0


def inline_scales_of(op: Any) -> int:
    """Elements per scale, for scales within latent rows; 0 without."""
    attributes = op.operation.attributes
    return verify.integer(attributes["inline_scales"]) or 0 if "inline_scales" in attributes else 0


def inline_content(spec: CacheSpec, columns: int, elements: int) -> int:
    """The number C of a query's columns that multiply 8-bit elements, for rows with scales in them; 0 if impossible.

    A row has C elements, an f32 scale per ``elements`` of them, and R bf16 keys, for a query of C + R columns.
    """
    scaled = 2 * columns - spec.head_size  # C less the bytes of the scales
    fits = spec.is_mla and spec.dtype.bits == 8 and spec.dtype.is_float and not spec.quantized and scaled > 0
    if not fits or elements < LEAST_INLINE or elements & (elements - 1) or scaled % (elements - 4):
        return 0
    content = scaled // (elements - 4) * elements
    return content if content <= columns else 0


def latent_columns(op: Any, spec: Any, value_size: int) -> int:
    """Columns that a query over latent rows must have: those of a row, or its own if the last are bf16."""
    query = op.query.type
    if not isinstance(query, ir.MemRefType) or ir.MemRefType(query).rank != 3 or ir.MemRefType(query).is_dynamic_dim(2):
        return spec.head_size
    columns = ir.MemRefType(query).shape[2]
    if inline_scales_of(op):
        return columns if inline_content(spec, columns, inline_scales_of(op)) >= value_size else -1
    rope = rope_columns(spec, columns)
    return columns if rope and value_size <= columns - rope else spec.head_size


class MlaAttentionOp(Kv.Operation, name="mla_attention", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """Attention over latent rows: scores use the whole row, values are its first value_size columns.

    query: [T, Hq, D]; out: [T, Hq, value_size]; mask as in kv.attention. Over an 8-bit cache the query may have R
    columns fewer than a row has bytes: its last R columns then multiply the bf16 keys in the last 2 R bytes of the row,
    which share the row's one scale. A row of 640 bytes has 512 8-bit columns and 64 bf16 columns.

    The optional attribute inline_scales is the number of elements per f32 scale, for scales that are stored in the row
    between the 8-bit elements and the bf16 keys; these keys then have no scale. A row of 656 bytes with inline_scales =
    128 has 512 columns, 4 scales and 64 columns.

    Over rows of f8e4m3 without scales or bf16 keys the query may be f8e4m3 too, with an output of f16, bf16 or f32.

    Optional operands for paged collections: indices [T, K] i32, rows of the pool as page * page_size + slot. A query
    row then attends to exactly the rows in its list, except negative and out-of-range ones; the mask must be null.
    topk_lengths [T] i32: the number of a row's indices that are valid, at most K.

    sinks [Hq] f32, lse [T, Hq] f32, prior [T, Hq, value_size] f32 and prior_lse [T, Hq] f32 are as in kv.attention; the
    output may be f32. The attribute score, a mask function, and their operands array0 to array3 are too, but are
    refused with indices, whose rows have no positions.

    kv_offsets [B+1], refused with indices: sequence b has cache_length(b) + kv_offsets[b+1] - kv_offsets[b] keys.

    block_mask and the attributes block_rows and block_keys are as in kv.attention, for a mask function.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    row_offsets: Operand[Any]
    scale: Operand[F32]
    out: Operand[Any]
    indices: Operand[Any] | None = None
    topk_lengths: Operand[Any] | None = None
    sinks: Operand[Any] | None = None
    lse: Operand[Any] | None = None
    prior: Operand[Any] | None = None
    prior_lse: Operand[Any] | None = None
    kv_offsets: Operand[Any] | None = None
    array0: Operand[Any] | None = None
    array1: Operand[Any] | None = None
    array2: Operand[Any] | None = None
    array3: Operand[Any] | None = None
    block_mask: Operand[Any] | None = None
    value_size: ir.IntegerAttr
    mask: ir.StringAttr
    span: ir.IntegerAttr

    contents = (
        Offsets("row_offsets", "query"),
        Offsets("kv_offsets"),
        Lengths("collection", ("kv_offsets", "row_offsets")),
    )

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None or not is_latent(self, spec):
            return False
        size = verify.integer(self.value_size)
        if size is None or not 0 < size <= spec.head_size:
            return verify.fail(self, f"value_size must be in [1, {spec.head_size}], got {self.value_size}")
        if latent_columns(self, spec, size) < 0:
            return verify.fail(
                self,
                f"inline_scales needs rows of C 8-bit floats, at least {size}, a scale for every "
                f"{inline_scales_of(self)} of them (a power of two of {LEAST_INLINE} or more) and R bf16, for a query "
                f"of C + R columns, got rows of {spec.head_size} x {spec.dtype.mlir} and {self.query.type}",
            )
        elements = FLOATS if spec.converted else (spec.dtype.mlir,)
        columns = latent_columns(self, spec, size)
        packed = columns != spec.head_size or inline_scales_of(self)  # rows with more than one element type
        stored = () if packed else stored_elements(spec)
        query = Buffer("T, Hq, C", (*elements, *stored))
        out = Buffer("T, Hq, V", tuple(dict.fromkeys((*elements, "f32"))))
        return (
            fit(self, {"query": query, "out": out}, C=columns, V=size)
            and rows_end(self, 3, ir.MemRefType(self.query.type).shape[1], size)
            and fit(self, {"row_offsets": Buffer("B + 1"), "kv_offsets": Buffer("B + 1")})
            and mask_is_valid(self, functions=True)
            and functions_fit(self)
            and listed_tiles(self)
            and self._lists(spec)
        )

    def _lists(self, spec: CacheSpec) -> bool:
        """Whether the lists of rows, if any, are legal."""
        if self.indices is None:
            return self.topk_lengths is None or verify.fail(self, "topk_lengths needs indices")
        if not spec.paged:
            return verify.fail(self, f"indices needs a collection of pages, got a {spec.kind} one")
        if verify.string(self.mask) != "null":
            return verify.fail(self, f"indices says what a row sees: mask must be null, got {self.mask}")
        if score_of(self):
            return verify.fail(
                self, "indices names rows without positions: there must be no score, which asks for them"
            )
        if self.kv_offsets is not None:
            return verify.fail(self, "indices says what a row sees: kv_offsets must not be given")
        return fit(self, {"indices": Buffer("T, K"), "topk_lengths": Buffer("T")})


class MlaPrefillPlanOp(WithBuffers, name="mla_prefill_plan", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Chunks of at most buffer_tokens cached + new tokens: offsets [C, B+1], cache offsets [C, B], lengths [C], i32."""

    row_offsets: Operand[Any]
    cache_lengths: Operand[Any]
    buffer_row_offsets: Operand[Any]
    cache_offsets: Operand[Any]
    buffer_lengths: Operand[Any]
    buffer_tokens: ir.IntegerAttr

    contents = (Offsets("row_offsets"), Counts("cache_lengths"))

    buffers = {
        "cache_lengths": Buffer("B"),
        "row_offsets": Buffer("B + 1"),
        "buffer_lengths": Buffer("C"),
        "buffer_row_offsets": Buffer("C, B + 1"),
        "cache_offsets": Buffer("C, B"),
    }

    def verify_invariants(self) -> bool:
        tokens = verify.integer(self.buffer_tokens)
        if tokens is None or tokens < 1:
            return verify.fail(self, f"buffer_tokens must be a positive integer, got {self.buffer_tokens}")
        return self.verify_buffers()


class MlaDecompressOp(WithBuffers, name="mla_decompress", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """Copy a chunk of latent rows to out [Tb, D]: out[i] = K(b, 0, i - row_offsets[b] + cache_offsets[b])."""

    cache: Operand[Any]
    row_offsets: Operand[Any]
    cache_offsets: Operand[Any]
    out: Operand[Any]

    contents = (Offsets("row_offsets", "out"), Counts("cache_offsets"))

    buffers = {"row_offsets": Buffer("B + 1"), "cache_offsets": Buffer("B"), "out": Buffer("rows, D", stored)}

    def verify_buffers(self, spec: CacheSpec | None = None) -> bool:
        if spec is not None and spec.num_heads != 1:
            return verify.fail(self, f"needs a cache of one head, got {spec.num_heads}")
        return super().verify_buffers(spec)


class MlaPrefillChunkOp(
    Kv.Operation, name="mla_prefill_chunk", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]
):
    """Causal attention over one chunk of decompressed keys, whose last columns are columns of the latent rows.

    query: [T, Hq, Dn + R]; key: [Tb, Hq, Dn] and value: [Tb, Hq, Dv], of the query's type; out: [T, Hq, Dv]; lse:
    [T, Hq] f32, the log-sum-exp out. Rows buffer_row_offsets[b] to buffer_row_offsets[b + 1] of key and value are
    sequence b's tokens from cache_offsets[b] up, as in kv.mla_decompress; the last R columns of a token's key are those
    of its latent row, or with bf16_rope the bf16 values in its last 2 R bytes, which share the row's one scale. Query i
    of sequence b is at position cache_length(b) + i.

    With accumulate, out and lse contain the result over other keys on entry, and the combined result afterwards.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    row_offsets: Operand[Any]
    key: Operand[Any]
    value: Operand[Any]
    buffer_row_offsets: Operand[Any]
    cache_offsets: Operand[Any]
    scale: Operand[F32]
    out: Operand[Any]
    lse: Operand[Any]
    bf16_rope: ir.BoolAttr
    accumulate: ir.BoolAttr

    contents = (
        Offsets("row_offsets", "query"),
        Lengths("collection", ("row_offsets",)),
        Offsets("buffer_row_offsets", "key"),
        Counts("cache_offsets"),
    )

    alike = {
        "key": Buffer("Tb, Hq, Dn", "query"), "value": Buffer("Tb, Hq, V", "query"), "out": Buffer("T, Hq, V", "query"),
    }  # fmt: skip

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None or not is_latent(self, spec) or not read_as_floats(self, spec):
            return False
        for name in ("bf16_rope", "accumulate"):
            if not isinstance(getattr(self, name), ir.BoolAttr):
                return verify.fail(self, f"{name} must be true or false, got {getattr(self, name)}")
        elements = FLOATS if spec.converted else (spec.dtype.mlir,)
        tables = {n: Buffer("B + 1") for n in ("row_offsets", "buffer_row_offsets", "cache_offsets")}
        return (
            fit(self, {"query": Buffer("T, Hq, C", elements), **self.alike})
            and self._fits(spec)
            and fit(self, {**tables, "lse": Buffer("T, Hq", FLOAT32)})
        )

    def _fits(self, spec: CacheSpec) -> bool:
        """Whether heads and columns agree, and the latent rows have the columns that complete the keys."""
        for name, dims in (("query", (1, 2)), ("key", (2,)), ("value", (2,))):
            for dim in dims:
                if ir.MemRefType(getattr(self, name).type).is_dynamic_dim(dim):
                    return verify.fail(self, f"{name} must have a static dimension {dim}, got a dynamic one")
        _, heads, columns = ir.MemRefType(self.query.type).shape
        nope, value_size = (ir.MemRefType(x.type).shape[2] for x in (self.key, self.value))
        problem = chunk_problem(spec, columns, nope, self.bf16_rope.value)
        return (problem is None or verify.fail(self, problem)) and fit(self, self.alike, Hq=heads, V=value_size)


def chunk_problem(spec: CacheSpec, columns: int, nope: int, bf16_rope: bool) -> str | None:
    """Why the last columns of keys of this width cannot be columns of the latent rows; None when they can."""
    rope = columns - nope
    if nope < 1 or not 0 < rope <= spec.head_size:
        return (
            f"query must have more columns than key, which has some, at most the row's {spec.head_size} more: "
            f"got {columns} and {nope}"
        )
    if bf16_rope and rope_columns(spec, spec.head_size - rope) != rope:
        scales = spec.num_scales if spec.quantized else 0
        return (
            f"bf16_rope needs 8-bit rows of at most one scale, whose last {2 * rope} bytes follow an even number of "
            f"other bytes, got rows of {spec.head_size} {spec.dtype.mlir} with {scales} scales"
        )
    return None
