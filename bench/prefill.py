# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of prompts: the data of attention over many new tokens."""

from __future__ import annotations

import numpy as np

from kvarn.dialect import dtypes
from kvarn.measure.arrays import Arrays
from kvarn.measure.attention_problem import AttentionProblem, Cached, DecodeProblem, Pages

from .cases import Prefill, Row


class PrefillProblem(AttentionProblem):
    """A :class:`Prefill` row: one layer, whose work is far longer than its reads."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Prefill)
        self.arrays, self.row = arrays, row
        self.queries, self.lengths = (np.array(x) for x in zip(*shape.lengths, strict=True))
        pages = Pages(self.lengths, shape.page, arrays)
        self.cached = Cached(arrays, row, pages, 1, split)
        tokens = int(self.queries.sum())
        self.query = arrays.normal((tokens, shape.query_heads, shape.size), "bf16")
        self.out = arrays.empty(self.query.shape, "bf16")
        self.scale = shape.size**-0.5
        pairs = sum(n * (k - n) + n * (n + 1) // 2 for n, k in shape.lengths)
        self.flops = 4 * pairs * shape.query_heads * shape.size
        item = dtypes.by_name(row.dtype).itemsize
        self.bytes = (
            4 * tokens * shape.query_heads * shape.size + 2 * int(self.lengths.sum()) * shape.heads * shape.size * item
        )
        self.offsets = arrays.integers(np.concatenate([[0], self.queries.cumsum()]))
        self.device_lengths = arrays.integers(self.lengths)
        self.longest, self.newest = int(self.lengths.max()), int(self.queries.max())

    def sequences(self) -> list[int]:
        return sorted({0, len(self.lengths) - 1})

    def heads_of(self, heads: int) -> list[tuple[slice, int]]:
        """One query head each, since the scores of a long prompt are many."""
        group = self.query.shape[1] // heads
        last = self.query.shape[1] - 1
        return [(slice(0, 1), 0), (slice(last, last + 1), last // group)]

    keys_of = DecodeProblem.keys_of
