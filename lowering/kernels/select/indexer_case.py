# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Shared by the kernels of kv.index_scores: the case, the visible tokens of a row, the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, cdiv

from ..common import at_most
from .row_products import TILE_ROWS

CHUNK = 1024  # tokens per block
OPERAND_BYTES = 32 << 10  # the most shared memory of a row's heads
UNSEEN = float("-inf")


@dataclass(frozen=True)
class Case:
    """What the kernels are specialised for: the keys, the query, its heads, the alignment of its rows.

    ``early``: kernels wait for the previous ones themselves (PDL).
    """

    spec: CacheSpec
    query: DType
    heads: int
    alignment: int
    early: bool

    @property
    def size(self) -> int:
        return self.spec.head_size

    @property
    def narrow(self) -> bool:
        """Whether keys are 8-bit."""
        return self.spec.converted

    @property
    def head_tiles(self) -> int:
        return cdiv(self.heads, TILE_ROWS)


@kv.func
def seen_tokens(collection: Any, queries: Any, row: Any) -> tuple[Any, Any]:
    """(sequence, number of visible tokens) of a query row; 0 tokens for a row of no sequence."""
    b, seen = kv.i32(0), kv.i32(0)
    if queries.in_range(row):
        b = queries.sequence(row)
        seen = at_most(collection.cache_length(b) + queries.token(b, row) + 1, collection.token_capacity())
    return b, seen


@kv.func
def relu(x: Any) -> Any:
    """max(x, 0), but NaN for NaN."""
    return kv.where(x < 0.0, 0.0, x)
