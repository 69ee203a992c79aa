# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tier 1: what speculative decoding does to the caches after a step."""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..contents import Lengths, Offsets
from ..effects import ReadsMemory, TierOne, UpdatesCache
from ..ext import I32, Operand
from ..types import CollectionType
from .operations import offsets


class CommitOp(Kv.Operation, name="commit", traits=[TierOne, UpdatesCache, ReadsMemory]):
    """Move the accepted tokens of a step together: new token i of a sequence becomes a copy of accepted token i.

    The step's n tokens of sequence b, row_offsets[b + 1] - row_offsets[b], lie at cache_length(b) and on. accepted
    [B, M] i32 lists those that stay by their number in the step, in ascending order; [T] i32: the list of sequence b
    stands from row_offsets[b] on. A list ends before its first entry outside of [0, n). Keys, values and scales move as
    they are stored, of one layer or, without that operand, of all layers. Nothing else is written.
    """

    collection: Operand[CollectionType]
    accepted: Operand[Any]
    row_offsets: Operand[Any]
    layer: Operand[I32] | None = None

    contents = (Offsets("row_offsets"), Lengths("collection", ("row_offsets",)))

    def verify_invariants(self) -> bool:
        if verify.handle(self, self.collection, ("collection",)) is None:
            return False
        accepted = self.accepted.type
        if not isinstance(accepted, ir.MemRefType) or ir.MemRefType(accepted).rank not in (1, 2):
            return verify.fail(self, f"accepted must be a memref of rank 1 or 2, got {accepted}")
        rank = ir.MemRefType(accepted).rank
        return verify.memref(self, self.accepted, rank, ("i32",), "accepted") and offsets(self, self.row_offsets)
