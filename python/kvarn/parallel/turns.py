# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A step's queries over the keys of one rank, as a batch whose masks are those of any attention.

Every ``world``-th query of a sequence sees one more of a rank's keys: of the queries i, i + world, i + 2 world, ... the
last key that each sees comes right behind that of the one before. So they are a sequence of their own, with the same
pages, under a causal mask; and a window of ``n * world`` positions is one of n of the rank's keys, since that many of
any ``n * world`` positions are the rank's. A step of B sequences is a batch of ``world * B``, a decode one of B.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect.layout import cdiv


class Turns(NamedTuple):
    """The batch of a step.

    Attributes
    ----------
    lengths : int32 Tensor [N]
        Keys before the first query of each of its sequences.
    row_offsets : int32 Tensor [N + 1]
    order : int64 Tensor [T], or None
        The rows of the step, in those of the batch; None for the step's own. Queries without keys are the last.
    blind : bool Tensor [T, 1], or None
        Rows of the step whose query sees no key of the rank; None on rank 0, which has the first key, in a decode.
    copies : int
        How often each of the step's sequences comes.
    """

    lengths: torch.Tensor
    row_offsets: torch.Tensor
    order: torch.Tensor | None
    blind: torch.Tensor | None
    copies: int

    def collection(self, of: Any, title: str) -> PagedKVCacheCollection:
        """The batch's view of a rank's pages."""
        if not isinstance(of, PagedKVCacheCollection):
            raise TypeError(f"{title} with a window, or over latent rows, needs pages, got a {type(of).__name__}")
        table = of.lookup_table if self.order is None else of.lookup_table.repeat_interleave(self.copies, 0)
        return of.with_tables(self.lengths, table, max_seq_length=cdiv(of.max_seq_length, self.copies))


def decode_turns(counts: torch.Tensor, row_offsets: torch.Tensor, rank: int) -> Turns:
    """The batch of one query a sequence, which sees ``counts`` [B] of the rank's keys."""
    blind = counts[:, None] == 0 if rank else None
    return Turns((counts - 1).clamp_(min=0), row_offsets, None, blind, 1)


def prefill_turns(parallel: Any, lengths: torch.Tensor, row_offsets: torch.Tensor, rows: int) -> Turns:
    """The batch of queries at positions ``lengths[b]`` and on, in rows ``row_offsets[b]`` and on of ``rows``."""
    world, batch, device = parallel.world, lengths.shape[0], lengths.device
    row = torch.arange(rows, dtype=torch.int32, device=device)
    b = torch.searchsorted(row_offsets[1:], row, right=True).clamp_(max=batch - 1)
    i = row - row_offsets[b]
    outside = (row < row_offsets[0]) | (row >= row_offsets[-1])
    blind = outside | (parallel.local(lengths[b] + i + 1) == 0)
    turn = torch.where(blind, batch * world, b * world + i % world)
    counts = torch.zeros(batch * world + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, turn, torch.ones_like(row))
    offsets = torch.zeros_like(counts)
    torch.cumsum(counts[:-1], 0, dtype=torch.int32, out=offsets[1:])
    # Of a turn, the first query that is not blind: the next one sees one more.
    first = lengths[:, None] + torch.arange(world, dtype=torch.int32, device=device) + 1
    before = (parallel.local(first.flatten()) - 1).clamp_(min=0)
    return Turns(before, offsets, torch.argsort(turn, stable=True), blind[:, None], world)


__all__ = ["Turns", "decode_turns", "prefill_turns"]
