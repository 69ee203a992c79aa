# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode over the ranks of a torch.distributed group that share the keys of every sequence.

Keys lie in turn: the key at position p is on rank ``p % world``, at the local position ``p // world``, so that all
ranks have equally many whatever the lengths are. A rank attends over its own keys, and the ranks' results are combined
by their log-sum-exps, which all of them gather. A rank that fails ends the others' collectives with torch's time-out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kvarn import ops


class ContextParallel:
    """One rank's part in decoding.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.

    Notes
    -----
    ``lengths`` of the methods are int32 Tensors [B], the same on all ranks: tokens of each sequence cached before the
    step. A rank's collection has ``local(lengths)`` as its ``cache_lengths``. A step is one token a sequence.
    """

    def __init__(self, group: Any = None) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def local(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of the first ``lengths`` tokens of each sequence this rank has, int32 [B]."""
        return ((lengths + (self.world - 1 - self.rank)) // self.world).to(torch.int32)

    def own(self, lengths: torch.Tensor) -> torch.Tensor:
        """1 for each sequence whose token at position ``lengths[b]`` is this rank's, else 0, int32 [B]."""
        return (lengths % self.world == self.rank).to(torch.int32)

    def append(
        self, collection: Any, layer: int, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Store the step's keys and values that are this rank's.

        Parameters
        ----------
        collection : KV cache collection
            With values, without scales.
        key, value : Tensor [B, H, D]
            The cache's dtype; the same on all ranks.
        """
        own = self.own(lengths)
        ops.store_padded(collection.get_key_cache(layer), key[:, None], own)
        ops.store_padded(collection.get_value_cache(layer), value[:, None], own)

    def attention(
        self, collection: Any, layer: int, query: torch.Tensor, lengths: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attention of the step's queries over the keys of all ranks.

        Parameters
        ----------
        query : Tensor [B, Hq, D]
            The same on all ranks.
        **options
            ``scale``, ``softcap`` and ``schedule`` of ``kv.ops.attention``. There are no windows: positions on a rank
            are not those of the sequence.

        Returns
        -------
        Tensor [B, Hq, D]
            The same on all ranks.
        """
        for name in options.keys() - {"scale", "softcap", "schedule"}:
            raise TypeError(f"ContextParallel.attention takes scale, softcap and schedule, got {name}")
        rows = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        keys = torch.zeros_like(rows)
        keys[1:] = self.own(lengths).cumsum(0)
        out, lse = ops.attention(
            collection, layer, query, rows, mask="null", kv_offsets=keys, return_lse=True, **options
        )
        both = torch.cat([out.float(), lse[..., None]], dim=-1)
        parts = [torch.empty_like(both) for _ in range(self.world)]
        dist.all_gather(parts, both, group=self.group)
        whole = torch.stack(parts)
        sums = whole[..., -1]
        weights = torch.exp(sums - torch.logsumexp(sums, 0)).nan_to_num(0.0)  # no key at all: zeros
        return (weights[..., None] * whole[..., :-1]).sum(0).to(query.dtype)


__all__ = ["ContextParallel"]
