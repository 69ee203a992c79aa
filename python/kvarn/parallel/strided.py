# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A step's queries over the keys of one rank, grouped by position modulo the number of ranks.

The queries i, i + world, i + 2 world, ... of a sequence see, one after another, one more key of a rank. They are
therefore a sequence of their own, over the same pages, under a causal mask; and a window of ``n * world`` positions
becomes a window of n keys, since any ``n * world`` positions contain n keys of the rank. A step of B sequences becomes
a batch of ``world * B`` sequences, a decode step one of B.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect.layout import cdiv


class StridedQueries(NamedTuple):
    """The strided batch of a step.

    Attributes
    ----------
    lengths : int32 Tensor [N]
        Keys before the first query of each of its sequences.
    row_offsets : int32 Tensor [N + 1]
    order : int64 Tensor [T], or None
        The step's rows in the order of the batch; None if the order is the same. Queries without keys come last.
    sees_no_key : bool Tensor [T, 1], or None
        Rows of the step whose query sees no key of the rank; None on rank 0, which has the first key, in a decode step.
    copies : int
        Number of strided sequences per sequence of the step.
    """

    lengths: torch.Tensor
    row_offsets: torch.Tensor
    order: torch.Tensor | None
    sees_no_key: torch.Tensor | None
    copies: int

    def collection(self, of: Any, title: str) -> PagedKVCacheCollection:
        """The batch's view of a rank's pages."""
        if not isinstance(of, PagedKVCacheCollection):
            raise TypeError(f"{title} with a window, or over latent rows, needs pages, got a {type(of).__name__}")
        table = of.lookup_table if self.order is None else of.lookup_table.repeat_interleave(self.copies, 0)
        return of.with_tables(self.lengths, table, max_seq_length=cdiv(of.max_seq_length, self.copies))


def decode_queries(counts: torch.Tensor, row_offsets: torch.Tensor, rank: int) -> StridedQueries:
    """The strided batch of one query per sequence, which sees ``counts`` [B] of the rank's keys."""
    sees_no_key = counts[:, None] == 0 if rank else None
    return StridedQueries((counts - 1).clamp_(min=0), row_offsets, None, sees_no_key, 1)


def prefill_queries(parallel: Any, lengths: torch.Tensor, row_offsets: torch.Tensor, rows: int) -> StridedQueries:
    """The strided batch of queries at positions from ``lengths[b]`` on, in rows from ``row_offsets[b]`` on."""
    world, batch, device = parallel.world, lengths.shape[0], lengths.device
    row = torch.arange(rows, dtype=torch.int32, device=device)
    b = torch.searchsorted(row_offsets[1:], row, right=True).clamp_(max=batch - 1)
    i = row - row_offsets[b]
    outside = (row < row_offsets[0]) | (row >= row_offsets[-1])
    sees_no_key = outside | (parallel.local(lengths[b] + i + 1) == 0)
    group = torch.where(sees_no_key, batch * world, b * world + i % world)
    counts = torch.zeros(batch * world + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, group, torch.ones_like(row))
    offsets = torch.zeros_like(counts)
    torch.cumsum(counts[:-1], 0, dtype=torch.int32, out=offsets[1:])
    # The first query of each residue that sees a key; the next one sees one more.
    first = lengths[:, None] + torch.arange(world, dtype=torch.int32, device=device) + 1
    before = (parallel.local(first.flatten()) - 1).clamp_(min=0)
    return StridedQueries(before, offsets, torch.argsort(group, stable=True), sees_no_key[:, None], world)


__all__ = ["StridedQueries", "decode_queries", "prefill_queries"]
