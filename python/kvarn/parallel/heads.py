# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Head parallelism: each rank has some KV heads of every token, and attends with their query heads."""

from __future__ import annotations

from typing import Any

import torch

from .ranks import Ranks


class HeadParallel:
    """Head parallelism on one rank.

    Attention needs no communication: ``kv.ops`` over a collection of ``num_heads`` KV heads, with the query heads from
    :meth:`own`. Whether outputs are gathered depends on the next layer: a projection whose rows are distributed over
    ranks by heads takes them directly.

    Parameters
    ----------
    total_heads : int
        KV heads of the model. Either a multiple of the number of ranks, or a divisor of it: consecutive ranks then have
        the same KV head, each with a share of its query heads.
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.
    timeout : float
        Seconds after which a collective raises an error that names the missing ranks.

    Attributes
    ----------
    num_heads : int
        KV heads of this rank.
    first_head : int
    """

    def __init__(self, total_heads: int, group: Any = None, *, timeout: float = 60.0) -> None:
        self.ranks = ranks = Ranks(group, timeout, "HeadParallel")
        if total_heads < 1 or (total_heads % ranks.world and ranks.world % total_heads):
            raise ValueError(
                f"total_heads must be a multiple of the {ranks.world} ranks, or they a multiple of it, "
                f"got {total_heads}"
            )
        self.total_heads, self.num_heads = total_heads, max(1, total_heads // ranks.world)
        self.first_head = ranks.rank * total_heads // ranks.world

    def own(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """The rank's heads of keys, values or queries, as a view.

        Parameters
        ----------
        x : Tensor [..., heads, D]
            KV heads, or query heads in the order of their KV heads.
        """
        heads, total, world = x.shape[dim], self.total_heads, self.ranks.world
        if heads == total:
            return x.narrow(dim, self.first_head, self.num_heads)
        if heads % total or heads % world:
            raise ValueError(
                f"x must have {total} KV heads, or query heads that are a multiple of them and of the {world} ranks, "
                f"got {heads} in dimension {dim}"
            )
        return x.narrow(dim, self.ranks.rank * heads // world, heads // world)

    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """All query heads of an output on every rank.

        Parameters
        ----------
        out : Tensor [T, Hq / world, D]

        Returns
        -------
        Tensor [T, Hq, D]

        Raises
        ------
        RankError
            If a rank is missing.
        """
        world, (rows, heads, size) = self.ranks.world, out.shape
        whole = torch.empty(world, rows, heads, size, dtype=out.dtype, device=out.device)
        self.ranks.all_gather(whole, out.contiguous(), "HeadParallel.gather")()
        return whole.transpose(0, 1).reshape(rows, world * heads, size)

    def synchronize(self) -> None:
        """As in :meth:`ContextParallel.synchronize`."""
        self.ranks.synchronize("HeadParallel.synchronize")


__all__ = ["HeadParallel"]
