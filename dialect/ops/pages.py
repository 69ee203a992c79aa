# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tier 1: which pages of a sequence a query is to see: summaries of pages, and the choice by them."""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..contents import Lengths, Offsets
from ..effects import ReadsCache, ReadsMemory, TierOne, UpdatesMemory, WritesMemory
from ..ext import I32, Operand
from ..layout import CacheSpec
from ..types import CollectionType
from .attention import page_lists
from .operations import FLOATS, not_mla, offsets, token_rows

MIN_MAX, MEAN = 2, 1  # rows of a summary


def summarized(op: Any, spec: CacheSpec) -> bool:
    """Whether a collection has pages and keys of its own, and summaries [N, L, H, R, D] are theirs."""
    if not spec.paged:
        return verify.fail(op, f"needs a collection with pages, got a {spec.kind} one")
    if not spec.dtype.is_float and not spec.quantized:
        return verify.fail(op, f"needs a float cache or one with scales, got element type {spec.dtype.mlir}")
    right = not_mla(op, spec) and verify.memref(op, op.summaries, 5, FLOATS, "summaries")
    if not right:
        return False
    type_ = ir.MemRefType(op.summaries.type)
    if type_.is_dynamic_dim(3) or type_.shape[3] not in (MIN_MAX, MEAN):
        return verify.fail(op, f"summaries must have 2 rows (minimum, maximum) or 1 (mean) a head, got {type_}")
    return verify.static_dim(op, op.summaries, 2, spec.num_heads, "summaries") and verify.static_dim(
        op, op.summaries, 4, spec.head_size, "summaries"
    )


class SummarizePagesOp(Kv.Operation, name="summarize_pages", traits=[TierOne, ReadsCache, ReadsMemory, UpdatesMemory]):
    """Summarize the keys of the pages that the step's new tokens lie in, new and cached tokens of them.

    summaries: [N, L, H, R, D] of floats, by pages of the pool: R = 2 rows, the least and the largest element of any
    key, rounded outwards; or R = 1, the mean key. Of a page only tokens below cache_length(b) + new tokens count. A NaN
    makes what it is part of NaN. Pages outside the pool are not written.
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
    """Choose up to K pages of each sequence and KV head by the largest score that a key in them may have.

    query: [T, Hq, D] floats; summaries as of kv.summarize_pages; pages: [B, H, K] i32, written: columns of the
    sequence's row of the lookup table, ascending, -1 behind the last; page_counts: [B, H] i32, written: how many there
    are. A page's score is the largest over the sequence's queries and the KV head's query heads of sum_d
    max(q_d min_d, q_d max_d), or of q . mean; ties go to the lower page, NaN counts as the largest. The first ``first``
    and the last ``last`` pages of a sequence are always among them. A sequence without new tokens has none.
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
        if not token_rows(self, self.query, None, spec.head_size, FLOATS, "query"):
            return False
        query = ir.MemRefType(self.query.type)
        if query.is_dynamic_dim(1) or query.shape[1] % spec.num_heads:
            return verify.fail(self, f"query must have a static multiple of the {spec.num_heads} KV heads, got {query}")
        return offsets(self, self.row_offsets) and page_lists(self, spec)
