# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the warps of a cluster know of each other, for the PTX interpreter.

Every warp has a vector clock: of each other actor, how much of what it did this warp knows to be over. Barriers pass
clocks on: whoever waits gets those of whoever arrived. An mbarrier is an actor too, which has written what the copies
that report to it bring; and so are the kernels ahead in the stream, of which a warp knows that they are over when it
has run ``griddepcontrol.wait`` or heard of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .block import Block
    from .cluster import Cluster

WARP = 32


class Clocks:
    """What the warps of a cluster know of each other.

    Parameters
    ----------
    cluster : Cluster
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.per_block = -(-int(np.prod(cluster.block)) // WARP)
        self.warps = self.per_block * int(np.prod(cluster.shape))
        self.ahead = self.warps  # the column of the kernels ahead
        self.clocks = np.zeros((self.warps, self.warps + 16), np.int32)
        self.clocks[np.arange(self.warps), np.arange(self.warps)] = 1
        self.columns: dict[int, int] = {}  # of mbarriers, by address
        self.phases: dict[int, int] = {}  # that are over
        self.gathered: dict[Any, np.ndarray] = {}  # by barrier: what those that arrived know
        self.opened: dict[Any, np.ndarray] = {}

    def of(self, threads: np.ndarray) -> np.ndarray:
        """The warps of threads of the cluster."""
        return threads // 1024 * self.per_block + threads % 1024 // WARP

    def warps_of(self, block: Block, lanes: Any) -> np.ndarray:
        return np.flatnonzero(np.bincount(self.of(block.threads[lanes])))

    def synchronize(self, warps: np.ndarray) -> None:
        """Warps that all wait for each other go on."""
        self.clocks[warps] = self.clocks[warps].max(0)
        self.clocks[warps, warps] += 1

    def arrive(self, barrier: Any, warps: np.ndarray) -> None:
        """Warps tell a barrier what they did."""
        row = self.clocks[warps].max(0)
        before = self.gathered.get(barrier)
        self.gathered[barrier] = row if before is None else _most(before, row)
        self.clocks[warps, warps] += 1

    def open(self, barrier: Any, copies: bool = False) -> None:
        """A phase of a barrier is over; ``copies``: it is an mbarrier, which shows what copies wrote."""
        row = self.gathered.pop(barrier, np.zeros(1, np.int32))
        if copies:
            column = self.column(barrier)
            self.phases[barrier] = self.phases.get(barrier, 0) + 1
            row = _most(row, np.zeros(column + 1, np.int32))
            row[column] = self.phases[barrier]
        self.opened[barrier] = row

    def passed(self, barrier: Any, warps: np.ndarray) -> None:
        """Warps have waited for a barrier."""
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
        """Warps have waited for the kernels ahead."""
        self.clocks[warps, self.ahead] = 1

    def know_ahead(self, warps: Any) -> np.ndarray:
        """Which warps know that the kernels ahead are over."""
        return self.clocks[warps, self.ahead] > 0

    def snapshot(self, warp: int) -> np.ndarray:
        """What a warp knows now, which is all that a copy knows that it starts."""
        return self.clocks[warp].copy()


def _most(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The later of two clocks, which may be of unlike lengths."""
    if len(a) < len(b):
        a, b = b, a
    found = a.copy()
    found[: len(b)] = np.maximum(found[: len(b)], b)
    return found


__all__ = ["Clocks"]
