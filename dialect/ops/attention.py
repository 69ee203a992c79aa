# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tier 1: attention over caches.

Query row i of sequence b stands at position cache_length(b) + i; masks speak of absolute positions, and a
key at or past the visible tokens is never seen. Masked scores are minus infinity: a row that sees no key
gives zeros (and a log-sum-exp of minus infinity).
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
FUNCTION = re.compile(r"\w+@\w+")  # the name of a function of positions, which the process that gave it keeps
ARRAYS = ("array0", "array1", "array2", "array3")
BLOCK_TILE = ("block_rows", "block_keys")  # the attributes of an attention with a block mask
ARRAY_ELEMENTS = ("f32", "f16", "bf16", "i32", "i8")
ROWS = {3: "T", 4: "B, S"}  # the extents of rows of a ragged batch and of a padded one, by the dimensions of a query
BLOCKS = Buffer("tiles, heads, most")  # of a block mask: numbers of tiles, behind how many there are


def is_function(name: str | None) -> bool:
    """Whether a mask is a function's name, and not one of :data:`MASKS`."""
    return name is not None and FUNCTION.fullmatch(name) is not None


def score_of(op: Any) -> str:
    """The name of the function that changes an attention's scores; empty where there is none."""
    attributes = op.operation.attributes
    return verify.string(attributes["score"]) or "" if "score" in attributes else ""


def arrays_of(op: Any) -> list[ir.Value | None]:
    """The arrays that an attention's functions read, first those of the score's."""
    return [getattr(op, name) for name in ARRAYS]


def functions_fit(op: Any) -> bool:
    """Whether the score is a function's name, and the arrays are what functions may read."""
    attributes = op.operation.attributes
    if "score" in attributes and not is_function(verify.string(attributes["score"])):
        return verify.fail(op, f"score must be the name of a function, NAME@DIGEST, got {attributes['score']}")
    arrays = arrays_of(op)
    given = [a is not None for a in arrays]
    if any(given) and "score" not in attributes and not is_function(verify.string(op.mask)):
        return verify.fail(op, "arrays must be those of a score or mask that is a function, got neither")
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
    """The extents of an attention's block mask's tiles, query rows and keys; None where it has none."""
    attributes = op.operation.attributes
    if "block_rows" not in attributes:
        return None
    return tuple(ir.IntegerAttr(attributes[name]).value for name in BLOCK_TILE)  # type: ignore[return-value]


def _tile_extents(op: Any, names: tuple[str, str]) -> bool:
    """Whether the extents of tiles are there, 2 or more."""
    attributes = op.operation.attributes
    for name in names:
        extent = verify.integer(attributes[name]) if name in attributes else None
        if extent is None or not 2 <= extent < 2**15:
            return verify.fail(
                op, f"{name} must be in [2, 32767], got {attributes[name] if name in attributes else 'none'}"
            )
    return True


def mask_is_valid(op: Any, functions: bool = False) -> bool:
    """Whether mask is known and its window or chunk is given where the mask needs one."""
    if functions and is_function(verify.string(op.mask)):
        return True
    if not verify.one_of(op, "mask", MASKS):
        return False
    mask, span = verify.string(op.mask), verify.integer(op.span)
    if mask not in ("causal", "null") and (span is None or span < 1):
        return verify.fail(op, f"span (the window or chunk) must be positive for mask {mask}, got {op.span}")
    return True


class _Attention(Kv.Operation):
    """What every form of attention takes, over keys and values in the place of ``keys`` and ``values``, with query rows
    where ``extents`` says.
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
    """Attention over a collection's layer, of a ragged batch or a padded one."""

    collection: Operand[CollectionType] = in_place_of("keys")
    layer: Operand[I32] = in_place_of("values")
    pages: Operand[Any] | None = None
    page_counts: Operand[Any] | None = None
    block_mask: Operand[Any] | None = None
    mask: ir.StringAttr
    span: ir.IntegerAttr
    softcap: ir.FloatAttr

    def verify_form(self, extents: str, rank: int) -> bool:
        """Whether the operands fit, where the rows' extents are an operand of this name."""
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

    Attributes: mask (causal, null, sliding_window, chunked, chunked_causal), span (window or chunk width), softcap (0:
    none; else scores become softcap * tanh(score / softcap)). Optional operands: sinks [Hq] f32, one more logit in
    each row's denominator; lse [T, Hq] f32, the log-sum-exp out; kv_offsets [B+1], cross attention: sequence b has
    cache_length(b) + kv_offsets[b+1] - kv_offsets[b] keys; alibi_slopes [Hq] f32: slope * (key's position - query's)
    is added to every score, after the softcap; prior [T, Hq, D] and prior_lse [T, Hq] f32, the result of the same
    queries over other keys, which is combined with that over these. The query has the cache's float type, or
    f16/bf16/f32 over an 8-bit cache, and the output the query's type or f32. Over f8e4m3 without scales the query may
    be f8e4m3 too, and the output f16, bf16 or f32; an integer cache needs scales. The schedule's entry max_queries
    bounds the new tokens of every sequence.

    A mask ``NAME@DIGEST`` is a function of (b, h, q, k, *arrays), and so is the attribute score, where it is there, of
    (score, b, h, q, k, *arrays): of the scaled score, after softcap and slopes. Such a string stands for the function's
    code and all that it closes over, so that caches of compiled code tell functions apart by the IR alone; the
    function itself is kept by the process that gave it, which expands the op. (A traced function in the IR would need
    tiles of a size that only a schedule decides.) array0 to array3 are what they read, the score's first. They are
    optional operands of their own, since values of one variadic operand would have to have one type.

    pages [B, H, K] i32, over collections with pages: a sequence's queries of a KV head then see tokens of the pages
    that it lists and no other, as far as the mask lets them. A page is a column of the sequence's row of the lookup
    table, in any order; negative ones and those past the row name nothing, and one that is listed twice counts twice.
    page_counts [B, H] i32: how many entries of a list count, from the first on; at most K do.

    block_mask, with a mask that is a function: what kv.block_mask wrote for the same mask, arrays,
    queries and lengths, and with the attributes block_rows and block_keys, the extents of its tiles. Tiles that it does
    not list are not visited; the mask is not asked about tiles that it calls whole.
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

    Token t of sequence b stands at position cache_length(b) + t. lse: [B, Smax, Hq]. Everything else is as in
    kv.attention, where sequence b has valid_lengths[b] new tokens.
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
    """Which tiles of keys each tile of query rows sees by a mask that is a function: what attention walks over.

    collection: one, of latent rows too, or an operand of keys, of which the lengths count. query: [T, Hq, D] with
    row_offsets, or [B, S, Hq, D] with valid_lengths, of which only the extents are read; kv_offsets, mask and
    array0 to array3 as in kv.attention. A tile of query rows is ``rows`` of one KV head (tokens times its query
    heads, as attention numbers them), one of keys is ``keys`` tokens. blocks: i32 [tiles, 1 or H, 1 + most],
    written: for each tile of rows, and KV head, how many tiles of keys it sees anything in, and then these in
    ascending order, each as twice its number, plus 1 where every row of the tile sees every key of it. Where the
    mask depends on the query head blocks have H in dimension 1, else 1 will do.

    pages and page_counts, as in kv.attention: only tiles of these pages are listed, in the lists' order, for each KV
    head. keys divides the page size.
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
    """kv.attention whose keys and values are attention operands: of caches, dense or ragged buffers.

    keys, values: operands with the same parameters, and not of scales. Over caches everything is as in
    kv.attention. Dense and ragged operands hold every key, the step's own too: sequence b has cache_length(b) keys,
    its queries are the last ones, so that query i of n stands at position cache_length(b) - n + i; kv_offsets is
    refused. block_mask is as in kv.attention, of the keys' operand.

    (An operation of its own, since kv.attention names a layer of a collection, which operands have not.)
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
    """What a query may be of besides floats: the cache's elements, where products take both as they are."""
    return (spec.dtype.mlir,) if spec.dtype is f8e4m3 and not spec.quantized else ()


def _attends(op: Any, spec: CacheSpec, rank: int = 3) -> bool:
    """Whether the query, the output and the rest of an attention fit the keys and values.

    The last two of ``rank`` dimensions are heads and elements, those before them number the rows.
    """
    if not read_as_floats(op, spec):
        return False
    elements = FLOATS if spec.dtype.bits == 8 else (spec.dtype.mlir,)
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
    """Whether the lists of pages, where there are, fit the collection and the mask."""
    if op.pages is None:
        return op.page_counts is None or verify.fail(op, "page_counts needs pages, whose entries it counts")
    if not spec.paged:
        return verify.fail(op, f"pages needs a collection with pages, got a {spec.kind} one")
    return page_lists(op, spec)


def listed_tiles(op: Any) -> bool:
    """Whether the block mask, where there is one, fits the mask, and its tiles' extents are there."""
    attributes = op.operation.attributes
    if op.block_mask is None:
        given = [name for name in BLOCK_TILE if name in attributes]
        return not given or verify.fail(op, f"{given[0]} needs block_mask, whose tiles it is of")
    if not is_function(verify.string(op.mask)):
        return verify.fail(op, f"block_mask needs a mask that is a function, got {op.mask}")
    if getattr(op, "pages", None) is not None:
        return verify.fail(op, "block_mask and pages must not both be given: each says which keys are visited")
    return fit(op, {"block_mask": BLOCKS}) and _tile_extents(op, BLOCK_TILE)


def page_lists(op: Any, spec: CacheSpec) -> bool:
    """Whether pages is [B, H, K] and page_counts, where it is there, [B, H], both i32."""
    return fit(op, {"pages": Buffer("B, H, K"), "page_counts": Buffer("B, H")}, spec)


def rows_end(op: Any, rank: int, heads: int, value_size: int) -> bool:
    """Whether the sinks, the log-sum-exp and the result over other keys fit an output's rows."""
    if (op.prior is None) != (op.prior_lse is None):
        return verify.fail(op, "prior and prior_lse must both be given or neither, got one")
    per_row = Buffer(f"{ROWS[rank]}, Hq", FLOAT32)
    buffers = {"sinks": Buffer("Hq", FLOAT32), "lse": per_row, "prior_lse": per_row}
    buffers["prior"] = Buffer(f"{ROWS[rank]}, Hq, V", FLOAT32)
    return fit(op, buffers, Hq=heads, V=value_size)
