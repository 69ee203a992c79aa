# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Vector clocks of the warps of a cluster, for the PTX interpreter.

Every warp has a vector clock with an entry for each other actor: how much of its work the warp knows to be over.
Barriers pass clocks from arriving to waiting warps. An mbarrier is an actor too, as the writer of what the copies that
signal it write. The earlier kernels of the stream are one more: a warp knows that they are over after
``griddepcontrol.wait``, its own or that of a warp with which it synchronised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .block import Block
    from .cluster import Cluster

WARP = 32


class Clocks:
    """Vector clocks of the warps of a cluster.

    Parameters
    ----------
    cluster : Cluster
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.per_block = -(-int(np.prod(cluster.block)) // WARP)
        self.warps = self.per_block * int(np.prod(cluster.shape))
        self.ahead = self.warps  # the column of the earlier kernels
        self.clocks = np.zeros((self.warps, self.warps + 16), np.int32)
        self.clocks[np.arange(self.warps), np.arange(self.warps)] = 1
        self.columns: dict[int, int] = {}  # columns of mbarriers, by address
        self.phases: dict[int, int] = {}  # completed phases
        self.gathered: dict[Any, np.ndarray] = {}  # by barrier: the maximum of the arriving warps' clocks
        self.opened: dict[Any, np.ndarray] = {}

    def of(self, threads: np.ndarray) -> np.ndarray:
        """The warps of threads of the cluster."""
        return threads // 1024 * self.per_block + threads % 1024 // WARP

    def warps_of(self, block: Block, lanes: Any) -> np.ndarray:
        return np.flatnonzero(np.bincount(self.of(block.threads[lanes])))

    def synchronize(self, warps: np.ndarray) -> None:
        """Synchronise warps that all waited for each other."""
        self.clocks[warps] = self.clocks[warps].max(0)
        self.clocks[warps, warps] += 1

    def arrive(self, barrier: Any, warps: np.ndarray) -> None:
        """Merge the clocks of arriving warps into a barrier."""
        row = self.clocks[warps].max(0)
        before = self.gathered.get(barrier)
        self.gathered[barrier] = row if before is None else _most(before, row)
        self.clocks[warps, warps] += 1

    def open(self, barrier: Any, copies: bool = False) -> None:
        """Complete a phase of a barrier; ``copies``: an mbarrier, which orders what copies wrote."""
        row = self.gathered.pop(barrier, np.zeros(1, np.int32))
        if copies:
            column = self.column(barrier)
            self.phases[barrier] = self.phases.get(barrier, 0) + 1
            row = _most(row, np.zeros(column + 1, np.int32))
            row[column] = self.phases[barrier]
        self.opened[barrier] = row

    def passed(self, barrier: Any, warps: np.ndarray) -> None:
        """Merge a barrier's clock into warps that waited for it."""
        row = self.opened.get(barrier)
        if row is not None:
            self.clocks[warps, : len(row)] = np.maximum(self.clocks[warps, : len(row)], row)

    def column(self, barrier: int) -> int:
        found = self.columns.get(barrier)
        if found is None:
            found = self.columns[barrier] = self.ahead + 1 + len(self.columns)
            if found >= self.clocks.shape[1]:
                self.clocks = np.pad(self.clocks, ((0, 0), (0, self.clocks.shape[1])))
        return found

    def wait_for_ahead(self, warps: np.ndarray) -> None:
        """Record that warps have waited for the earlier kernels."""
        self.clocks[warps, self.ahead] = 1

    def know_ahead(self, warps: Any) -> np.ndarray:
        """Which warps know that the earlier kernels are over."""
        return self.clocks[warps, self.ahead] > 0

    def snapshot(self, warp: int) -> np.ndarray:
        """The current clock of a warp, which is also that of a copy that it starts."""
        return self.clocks[warp].copy()


def _most(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The maximum of two clocks of possibly different lengths."""
    if len(a) < len(b):
        a, b = b, a
    found = a.copy()
    found[: len(b)] = np.maximum(found[: len(b)], b)
    return found


__all__ = ["Clocks"]
