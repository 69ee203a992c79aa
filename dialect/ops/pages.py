# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused operations that select the pages or tokens that a query attends to, and that compute the selection's inputs."""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..buffers import FLOAT32, Buffer, WithBuffers, fit
from ..contents import Lengths, Offsets
from ..effects import ReadsCache, ReadsMemory, TierOne, UpdatesMemory, WritesMemory
from ..ext import I32, Operand
from ..layout import CacheSpec
from ..types import CollectionType
from .attention import page_lists
from .operations import FLOATS, not_mla, offsets, read_as_floats

MIN_MAX, MEAN = 2, 1  # rows per summary


def summarized(op: Any, spec: CacheSpec) -> bool:
    """Whether a collection has pages and keys, and summaries [N, L, H, R, D] match it."""
    if not spec.paged:
        return verify.fail(op, f"needs a collection with pages, got a {spec.kind} one")
    if not read_as_floats(op, spec) or not not_mla(op, spec):
        return False
    if not fit(op, {"summaries": Buffer("N, L, H, R, D", FLOATS)}, spec):
        return False
    type_ = ir.MemRefType(op.summaries.type)
    if type_.is_dynamic_dim(3) or type_.shape[3] not in (MIN_MAX, MEAN):
        return verify.fail(op, f"summaries must have 2 rows (minimum, maximum) or 1 (mean) a head, got {type_}")
    return True


class SummarizePagesOp(Kv.Operation, name="summarize_pages", traits=[TierOne, ReadsCache, ReadsMemory, UpdatesMemory]):
    """Summarize the keys of all pages that contain new tokens of the step, including the cached tokens in them.

    summaries: [N, L, H, R, D] of floats, indexed by the pool's pages: R = 2 rows, the smallest and the largest value
    per element over all keys, rounded outwards; or R = 1, the mean key. Only tokens below cache_length(b) + new tokens
    count. A NaN in a key makes the elements that it contributes to NaN. Pages outside the pool are not written.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    summaries: Operand[Any]
    row_offsets: Operand[Any]

    contents = (Offsets("row_offsets"), Lengths("collection", ("row_offsets",)))

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        return spec is not None and summarized(self, spec) and offsets(self, self.row_offsets)


class SelectPagesOp(Kv.Operation, name="select_pages", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """Select up to K pages per sequence and KV head, by an upper bound of the score of any key in a page.

    query: [T, Hq, D] floats; summaries as in kv.summarize_pages; pages: [B, H, K] i32, written: columns of the
    sequence's row of the lookup table, ascending, then -1; page_counts: [B, H] i32, written: the number of selected
    pages. A page's score is the maximum over the sequence's queries and the KV head's query heads of sum_d max(q_d
    min_d, q_d max_d), or of q . mean; ties go to the lower page, NaN counts as the largest. The first ``first`` and the
    last ``last`` pages of a sequence are always selected. A sequence without new tokens selects none.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    row_offsets: Operand[Any]
    summaries: Operand[Any]
    pages: Operand[Any]
    page_counts: Operand[Any]
    first: ir.IntegerAttr
    last: ir.IntegerAttr

    contents = (Offsets("row_offsets", "query"), Lengths("collection", ("row_offsets",)))

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None or not summarized(self, spec):
            return False
        for name in ("first", "last"):
            count = verify.integer(self.operation.attributes[name])
            if count is None or count < 0:
                return verify.fail(self, f"{name} must be 0 or more, got {self.operation.attributes[name]}")
        if not fit(self, {"query": Buffer("T, Hq, D", FLOATS)}, spec):
            return False
        query = ir.MemRefType(self.query.type)
        if query.is_dynamic_dim(1) or query.shape[1] % spec.num_heads:
            return verify.fail(self, f"query must have a static multiple of the {spec.num_heads} KV heads, got {query}")
        return offsets(self, self.row_offsets) and page_lists(self, spec)


class IndexScoresOp(Kv.Operation, name="index_scores", traits=[TierOne, ReadsCache, ReadsMemory, WritesMemory]):
    """Scores of tokens for sparse attention: out[t, s] = sum_h weights[t, h] * relu(query[t, h] . key[s]).

    collection: keys of one head, such as those of MLA; query: [T, Hi, D] of its float type, over 8-bit keys f8e4m3,
    f16, bf16 or f32; weights: [T, Hi] f32; out: [T, L] f32. Query row i of sequence b scores the tokens up to its
    position, cache_length(b) + i; the other columns are minus infinity. All columns are written, also in rows that
    belong to no sequence, which score no token.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    query: Operand[Any]
    weights: Operand[Any]
    row_offsets: Operand[Any]
    out: Operand[Any]

    contents = (Offsets("row_offsets", "query"), Lengths("collection", ("row_offsets",)))

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None:
            return False
        if spec.num_heads != 1:
            return verify.fail(self, f"needs a collection with one KV head, got {spec.num_heads}")
        if not read_as_floats(self, spec):
            return False
        elements = (*FLOATS, "f8E4M3FN") if spec.converted else (spec.dtype.mlir,)
        if not fit(self, {"query": Buffer("T, Hi, D", elements)}, spec):
            return False
        query = ir.MemRefType(self.query.type)
        if query.is_dynamic_dim(1):
            return verify.fail(self, f"query must have a static number of heads in dimension 1, got {query}")
        buffers = {"weights": Buffer("T, Hi", FLOAT32), "row_offsets": Buffer("B + 1"), "out": Buffer("T, L", FLOAT32)}
        return fit(self, buffers, Hi=query.shape[1])


class SelectTokensOp(WithBuffers, name="select_tokens", traits=[TierOne, ReadsMemory, WritesMemory]):
    """Select up to K columns of each row by the largest scores: ascending, then -1.

    scores: [T, L] f32; tokens: [T, K] i32 and counts: [T] i32, both written. Ties go to the lower column, NaN counts
    as the largest, and minus infinity is never chosen.
    """

    scores: Operand[Any]
    tokens: Operand[Any]
    counts: Operand[Any]

    buffers = {"scores": Buffer("T, L", ("f32",)), "tokens": Buffer("T, K"), "counts": Buffer("T")}
