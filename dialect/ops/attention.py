# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused attention over caches.

Query row i of sequence b is at position cache_length(b) + i; masks use absolute positions, and no row attends to a key
at or past the sequence's length. Masked scores are minus infinity: a row that attends to no key gives zeros (and a
log-sum-exp of minus infinity).
"""

import re
from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..buffers import FLOAT32, Buffer, fit
from ..contents import Counts, Lengths, Offsets
from ..dtypes import f8e4m3
from ..effects import ReadsCache, ReadsMemory, TierOne, WritesMemory
from ..ext import F32, I32, Operand, in_place_of
from ..layout import SCALES, CacheSpec
from ..types import CollectionType
from .operations import FLOATS, not_mla, offsets, read_as_floats

MASKS = ("causal", "null", "sliding_window", "chunked", "chunked_causal")
FUNCTION = re.compile(r"\w+@\w+")  # a function of positions by its name; the process that defined it has the code
ARRAYS = ("array0", "array1", "array2", "array3")
BLOCK_TILE = ("block_rows", "block_keys")  # the attributes of an attention with a block mask
ARRAY_ELEMENTS = ("f32", "f16", "bf16", "i32", "i8")
ROWS = {3: "T", 4: "B, S"}  # the row dimensions of a ragged batch and of a padded one, by the rank of the query
BLOCKS = Buffer("tiles, heads, most")  # of a block mask: a count of key tiles, then their numbers


def is_function(name: str | None) -> bool:
    """Whether a mask is the name of a function, not one of :data:`MASKS`."""
    return name is not None and FUNCTION.fullmatch(name) is not None


def score_of(op: Any) -> str:
    """The name of the function that changes an attention's scores; empty without one."""
    attributes = op.operation.attributes
    return verify.string(attributes["score"]) or "" if "score" in attributes else ""


def arrays_of(op: Any) -> list[ir.Value | None]:
    """The arrays that an attention's functions read; those of the score function come first."""
    return [getattr(op, name) for name in ARRAYS]


def functions_fit(op: Any) -> bool:
    """Whether the score is the name of a function, and the arrays have types that functions may read."""
    attributes = op.operation.attributes
    if "score" in attributes and not is_function(verify.string(attributes["score"])):
        return verify.fail(op, f"score must be the name of a function, NAME@DIGEST, got {attributes['score']}")
    arrays = arrays_of(op)
    given = [a is not None for a in arrays]
    if any(given) and "score" not in attributes and not is_function(verify.string(op.mask)):
        return verify.fail(op, "arrays need a score or mask that is a function, got neither")
    if given != sorted(given, reverse=True):
        return verify.fail(op, f"arrays must be given from array0 on, got one after {ARRAYS[given.index(False)]}")
    for name, array in zip(ARRAYS, arrays, strict=True):
        if array is None:
            continue
        if not isinstance(array.type, ir.MemRefType):
            return verify.fail(op, f"{name} must be a memref, got {array.type}")
        if not verify.memref(op, array, ir.MemRefType(array.type).rank, ARRAY_ELEMENTS, name):
            return False
    return True


def block_tile(op: Any) -> tuple[int, int] | None:
    """The tile extents of an attention's block mask, (query rows, keys); None without a block mask."""
    attributes = op.operation.attributes
    if "block_rows" not in attributes:
        return None
    return tuple(ir.IntegerAttr(attributes[name]).value for name in BLOCK_TILE)  # type: ignore[return-value]


def _tile_extents(op: Any, names: tuple[str, str]) -> bool:
    """Whether the tile extents are present and at least 2."""
    attributes = op.operation.attributes
    for name in names:
        extent = verify.integer(attributes[name]) if name in attributes else None
        if extent is None or not 2 <= extent < 2**15:
            return verify.fail(
                op, f"{name} must be in [2, 32767], got {attributes[name] if name in attributes else 'none'}"
            )
    return True


def mask_is_valid(op: Any, functions: bool = False) -> bool:
    """Whether the mask is known, and has a span (window or chunk) if it needs one."""
    if functions and is_function(verify.string(op.mask)):
        return True
    if not verify.one_of(op, "mask", MASKS):
        return False
    mask, span = verify.string(op.mask), verify.integer(op.span)
    if mask not in ("causal", "null") and (span is None or span < 1):
        return verify.fail(op, f"span (the window or chunk) must be positive for mask {mask}, got {op.span}")
    return True


class _Attention(Kv.Operation):
    """The operands that all forms of attention share. Subclasses declare ``keys`` and ``values``; ``extents`` names the
    operand with the batch's row offsets or lengths.
    """

    keys: Operand[Any]
    values: Operand[Any]
    query: Operand[Any]
    extents: Operand[Any]
    scale: Operand[F32]
    out: Operand[Any]
    sinks: Operand[Any] | None = None
    lse: Operand[Any] | None = None
    kv_offsets: Operand[Any] | None = None
    alibi_slopes: Operand[Any] | None = None
    prior: Operand[Any] | None = None
    prior_lse: Operand[Any] | None = None
    array0: Operand[Any] | None = None
    array1: Operand[Any] | None = None
    array2: Operand[Any] | None = None
    array3: Operand[Any] | None = None


class _CacheAttention(_Attention):
    """Attention over one layer of a collection, for a ragged or a padded batch."""

    collection: Operand[CollectionType] = in_place_of("keys")
    layer: Operand[I32] = in_place_of("values")
    pages: Operand[Any] | None = None
    page_counts: Operand[Any] | None = None
    block_mask: Operand[Any] | None = None
    mask: ir.StringAttr
    span: ir.IntegerAttr
    softcap: ir.FloatAttr

    def verify_form(self, extents: str, rank: int) -> bool:
        """Whether the operands are legal; ``extents`` is the operand with the row offsets or lengths."""
        spec = verify.handle(self, self.collection, ("collection",))
        return (
            spec is not None
            and not_mla(self, spec)
            and _attends(self, spec, rank)
            and offsets(self, getattr(self, extents), extents)
            and _chosen_pages(self, spec)
            and listed_tiles(self)
        )


class AttentionOp(_CacheAttention, name="attention", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """softmax(scale * Q K^T + mask) V over one layer; query, out: [T, Hq, D], Hq a multiple of H.

    Attributes: mask (causal, null, sliding_window, chunked, chunked_causal), span (width of the window or chunk),
    softcap (0: none; otherwise scores become softcap * tanh(score / softcap)). Optional operands: sinks [Hq] f32, an
    extra logit in each row's denominator; lse [T, Hq] f32, the log-sum-exp output; kv_offsets [B+1], cross attention:
    sequence b has cache_length(b) + kv_offsets[b+1] - kv_offsets[b] keys; alibi_slopes [Hq] f32: slope * (key position
    - query position) is added to every score after the softcap; prior [T, Hq, D] and prior_lse [T, Hq] f32, the result
    of the same queries over other keys, which is combined with this one. The query has the cache's float type, or
    f16/bf16/f32 over an 8-bit cache; the output has the query's type or f32. Over f8e4m3 without scales the query may
    be f8e4m3 too, with an output of f16, bf16 or f32; an integer cache needs scales. The schedule entry max_queries
    bounds the new tokens of every sequence.

    The mask may also be a function of (b, h, q, k, *arrays), written ``NAME@DIGEST``; the attribute score too is
    a function of (score, b, h, q, k, *arrays), whose score is scaled and has softcap and slopes applied. The digest
    covers the function's code and everything that it captures, so that the compile cache can tell functions apart by
    the IR alone; the function itself is known only to the process that defined it, which expands the op. (The IR cannot
    contain the traced function, whose tile sizes depend on the schedule.) The functions read array0 to array3, the
    score function's arrays first. They are separate operands, since a variadic one has a single type.

    pages [B, H, K] i32, for collections with pages: the queries of a KV head attend only to tokens of the pages in its
    list, and only as far as the mask allows. An entry is a column of the sequence's row of the lookup table, in any
    order; negative and out-of-range entries are ignored, and a page that is listed twice counts twice. page_counts
    [B, H] i32: the number of entries of a list that are valid, at most K.

    block_mask, for a mask that is a function: the output of kv.block_mask for the same mask, arrays, queries and
    lengths; the attributes block_rows and block_keys are the extents of its tiles. Tiles that it does not list are
    skipped; the mask is not evaluated in tiles that it marks as whole.
    """

    row_offsets: Operand[Any] = in_place_of("extents")

    contents = (
        Offsets("row_offsets", "query"),
        Offsets("kv_offsets"),
        Lengths("collection", ("kv_offsets", "row_offsets")),
    )

    def verify_invariants(self) -> bool:
        return self.verify_form("row_offsets", 3)


class AttentionPaddedOp(
    _CacheAttention, name="attention_padded", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]
):
    """kv.attention of a padded batch: query, out [B, Smax, Hq, D]; tokens t >= valid_lengths[b] are skipped.

    Token t of sequence b is at position cache_length(b) + t. lse: [B, Smax, Hq]. Everything else is as in kv.attention
    with valid_lengths[b] new tokens of sequence b.
    """

    valid_lengths: Operand[Any] = in_place_of("extents")

    contents = (
        Counts("valid_lengths", (("query", 1),)),
        Offsets("kv_offsets"),
        Lengths("collection", ("kv_offsets", "valid_lengths")),
    )

    def verify_invariants(self) -> bool:
        return self.verify_form("valid_lengths", 4)


class BlockMaskOp(Kv.Operation, name="block_mask", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """The tiles of keys that each tile of query rows attends to under a mask function; attention visits only those.

    collection: a collection, also of latent rows, or an operand of keys; only its lengths are read. query: [T, Hq, D]
    with row_offsets, or [B, S, Hq, D] with valid_lengths; only its extents are read. kv_offsets, mask and array0 to
    array3 are as in kv.attention. A tile of query rows has ``rows`` rows of one KV head (tokens times its query heads,
    in the order of attention), a tile of keys has ``keys`` tokens. The output blocks, i32 [tiles, 1 or H, 1 + most],
    has per tile of rows and KV head the number of key tiles that are not fully masked, then the tiles in ascending
    order, each as twice its number, plus 1 if no element of it is masked. Dimension 1 must be H if the mask depends on
    the query head, and may be 1 otherwise.

    pages and page_counts are as in kv.attention: per KV head, only tiles of these pages are listed, in the order of the
    list. keys divides the page size.
    """

    collection: Operand[Any]
    query: Operand[Any]
    blocks: Operand[Any]
    row_offsets: Operand[Any] | None = None
    valid_lengths: Operand[Any] | None = None
    kv_offsets: Operand[Any] | None = None
    array0: Operand[Any] | None = None
    array1: Operand[Any] | None = None
    array2: Operand[Any] | None = None
    array3: Operand[Any] | None = None
    pages: Operand[Any] | None = None
    page_counts: Operand[Any] | None = None
    mask: ir.StringAttr
    rows: ir.IntegerAttr
    keys: ir.IntegerAttr

    contents = (
        Offsets("row_offsets", "query"),
        Counts("valid_lengths", (("query", 1),)),
        Offsets("kv_offsets"),
        Lengths("collection", ("kv_offsets", "row_offsets", "valid_lengths")),
    )

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection", "operand"))
        if spec is None:
            return False
        if self.kv_offsets is not None and not spec.of_cache:
            return verify.fail(self, f"kv_offsets needs a cache, got a {spec.kind} operand, which has all keys")
        if not is_function(verify.string(self.mask)):
            return verify.fail(self, f"mask must be the name of a function, NAME@DIGEST, got {self.mask}")
        if (self.row_offsets is None) == (self.valid_lengths is None):
            return verify.fail(self, "row_offsets or valid_lengths must be given, and not both")
        padded = self.row_offsets is None
        name = "valid_lengths" if padded else "row_offsets"
        rank = 4 if padded else 3
        if not verify.memref(self, self.query, rank, None, "query"):
            return False
        query = ir.MemRefType(self.query.type)
        if query.is_dynamic_dim(rank - 2) or query.shape[rank - 2] % spec.num_heads:
            return verify.fail(self, f"query must have a static multiple of the {spec.num_heads} KV heads, got {query}")
        return (
            functions_fit(self)
            and _tile_extents(self, ("rows", "keys"))
            and fit(self, {name: Buffer("B + 1"), "kv_offsets": Buffer("B + 1"), "blocks": BLOCKS})
            and _chosen_pages(self, spec)
            and self._pages_of_tiles(spec)
        )

    def _pages_of_tiles(self, spec: CacheSpec) -> bool:
        keys = verify.integer(self.keys)
        fits = self.pages is None or (keys is not None and spec.page_size % keys == 0)
        return fits or verify.fail(self, f"keys must divide a listed page's {spec.page_size} tokens, got {keys}")


class OperandAttentionOp(_Attention, name="operand_attention", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """kv.attention whose keys and values are attention operands: caches, dense or ragged buffers.

    keys, values: operands of equal parameters, other than scales. Over caches everything is as in kv.attention. Dense
    and ragged operands contain all keys, including those of the step: sequence b has cache_length(b) keys, and its n
    queries are the last ones, so that query i is at position cache_length(b) - n + i; kv_offsets is refused. block_mask
    is as in kv.attention, for the operand of keys.

    (This is a separate operation because kv.attention takes a layer of a collection, which operands do not have.)
    """

    row_offsets: Operand[Any] = in_place_of("extents")
    block_mask: Operand[Any] | None = None
    mask: ir.StringAttr
    span: ir.IntegerAttr
    softcap: ir.FloatAttr

    contents = (
        Offsets("row_offsets", "query"),
        Offsets("kv_offsets"),
        Lengths("keys", ("kv_offsets", "row_offsets")),
        Lengths("values", ("kv_offsets", "row_offsets")),
    )

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.keys, ("operand",))
        if spec is None or verify.handle(self, self.values, ("operand",)) is None:
            return False
        if self.keys.type != self.values.type:
            return verify.fail(
                self, f"keys and values must be operands of one type, got {self.keys.type} and {self.values.type}"
            )
        if spec.kind == SCALES:
            return verify.fail(self, "needs operands of keys and values, got one that shows a cache's scales")
        if self.kv_offsets is not None and not spec.of_cache:
            return verify.fail(self, f"kv_offsets needs operands of caches, got {spec.kind} ones, which have all keys")
        return not_mla(self, spec) and _attends(self, spec) and offsets(self, self.row_offsets) and listed_tiles(self)


def stored_elements(spec: CacheSpec) -> tuple[str, ...]:
    """Element types of a query besides floats: the cache's own, where products take both unconverted."""
    return (spec.dtype.mlir,) if spec.dtype is f8e4m3 and not spec.quantized else ()


def _attends(op: Any, spec: CacheSpec, rank: int = 3) -> bool:
    """Whether query, output and the other operands of an attention match the keys and values.

    The last two of ``rank`` dimensions are heads and elements; the dimensions before them number the rows.
    """
    if not read_as_floats(op, spec):
        return False
    elements = FLOATS if spec.converted else (spec.dtype.mlir,)
    of_rows = f"{ROWS[rank]}, Hq, D"
    query = Buffer(of_rows, (*elements, *stored_elements(spec)))
    out = Buffer(of_rows, tuple(dict.fromkeys((*elements, "f32"))))
    if not fit(op, {"query": query, "out": out}, spec):
        return False
    query_type, dim = ir.MemRefType(op.query.type), rank - 2
    if query_type.is_dynamic_dim(dim):
        return verify.fail(op, f"query must have a static number of heads in dimension {dim}, got a dynamic one")
    heads = query_type.shape[dim]
    if heads % spec.num_heads:
        return verify.fail(op, f"query heads must be a multiple of the {spec.num_heads} KV heads, got {heads}")
    return (
        mask_is_valid(op, functions=True)
        and functions_fit(op)
        and fit(op, {"out": out, "alibi_slopes": Buffer("Hq", FLOAT32)}, spec, Hq=heads)
        and rows_end(op, rank, heads, spec.head_size)
        and fit(op, {"kv_offsets": Buffer("B + 1")})
    )


def _chosen_pages(op: Any, spec: CacheSpec) -> bool:
    """Whether the page lists, if any, match the collection and the mask."""
    if op.pages is None:
        return op.page_counts is None or verify.fail(op, "page_counts needs pages")
    if not spec.paged:
        return verify.fail(op, f"pages needs a collection with pages, got a {spec.kind} one")
    return page_lists(op, spec)


def listed_tiles(op: Any) -> bool:
    """Whether the block mask, if any, matches the mask and has its tile extents."""
    attributes = op.operation.attributes
    if op.block_mask is None:
        given = [name for name in BLOCK_TILE if name in attributes]
        return not given or verify.fail(op, f"{given[0]} needs block_mask")
    if not is_function(verify.string(op.mask)):
        return verify.fail(op, f"block_mask needs a mask that is a function, got {op.mask}")
    if getattr(op, "pages", None) is not None:
        return verify.fail(op, "block_mask and pages must not both be given: each says which keys are visited")
    return fit(op, {"block_mask": BLOCKS}) and _tile_extents(op, BLOCK_TILE)


def page_lists(op: Any, spec: CacheSpec) -> bool:
    """Whether pages is [B, H, K] i32 and page_counts, if present, [B, H] i32."""
    return fit(op, {"pages": Buffer("B, H, K"), "page_counts": Buffer("B, H")}, spec)


def rows_end(op: Any, rank: int, heads: int, value_size: int) -> bool:
    """Whether sinks, log-sum-exp and prior results match the rows of an output."""
    if (op.prior is None) != (op.prior_lse is None):
        return verify.fail(op, "prior and prior_lse must both be given or neither, got one")
    per_row = Buffer(f"{ROWS[rank]}, Hq", FLOAT32)
    buffers = {"sinks": Buffer("Hq", FLOAT32), "lse": per_row, "prior_lse": per_row}
    buffers["prior"] = Buffer(f"{ROWS[rank]}, Hq, V", FLOAT32)
    return fit(op, buffers, Hq=heads, V=value_size)
