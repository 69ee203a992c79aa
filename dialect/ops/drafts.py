# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fused operation for speculative decoding: the cache update after verification."""

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
    """Compact the accepted tokens of a step: new token i of a sequence becomes a copy of its accepted token i.

    The step's n tokens of sequence b, n = row_offsets[b + 1] - row_offsets[b], start at position cache_length(b).
    accepted [B, M] i32 lists the tokens to keep by their number in the step, in ascending order; [T] i32 has the list
    of sequence b from row_offsets[b] up. A list ends before its first entry outside of [0, n). Keys, values and scales
    are copied without conversion, in one layer or, without that operand, in all layers. Nothing else is written.
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
