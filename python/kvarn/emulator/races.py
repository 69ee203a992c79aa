# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Races and reads of nothing in shared memory, for the PTX interpreter.

Every warp has a vector clock: of each other actor, how much of what it did this warp knows to be over. Barriers pass
clocks on: whoever waits gets those of whoever arrived. An mbarrier is an actor too, which has written what the copies
that report to it bring. An access races when the last writer of a place (for a write: its readers too) is at a time
that the warp's clock does not hold, in whatever order the warps happened to run. Threads of one warp are taken for
ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .block import Block
    from .cluster import Cluster

WARP = 32
_NOBODY = -1
Tell = Callable[[str, int, str, int], None]  # kind, instruction, message, how many places


class _Shared:
    """Of each grain of a block's shared memory: its last writer, and when each warp read it last."""

    def __init__(self, count: int, warps: int) -> None:
        self.writer = np.full(count, _NOBODY, np.int16)
        self.written = np.zeros(count, np.int32)  # the writer's clock
        self.by = np.zeros(count, np.int32)  # the instruction
        self.read = np.zeros((warps, count), np.int32)
        self.reading = np.zeros((warps, count), np.int32)


class Races:
    """What the warps of a cluster know of each other.

    Parameters
    ----------
    cluster : Cluster
    tell : callable
        Gets what is found.
    """

    def __init__(self, cluster: Cluster, tell: Tell) -> None:
        self.cluster, self.tell = cluster, tell
        self.per_block = -(-int(np.prod(cluster.block)) // WARP)
        self.warps = self.per_block * int(np.prod(cluster.shape))
        self.grain = cluster.kernel.grain
        self.clocks = np.zeros((self.warps, self.warps + 16), np.int32)
        self.clocks[np.arange(self.warps), np.arange(self.warps)] = 1
        self.columns: dict[int, int] = {}  # of mbarriers, by address
        self.phases: dict[int, int] = {}  # that are over
        self.gathered: dict[Any, np.ndarray] = {}  # by barrier: what those that arrived know
        self.opened: dict[Any, np.ndarray] = {}
        self.shared: dict[int, _Shared] = {}  # by rank

    # --- who knows what

    def of(self, threads: np.ndarray) -> np.ndarray:
        """The warps of threads of the cluster."""
        return threads // 1024 * self.per_block + threads % 1024 // WARP

    def warps_of(self, block: Block, lanes: Any) -> np.ndarray:
        return np.unique(self.of(block.threads[lanes]))

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
            found = self.columns[barrier] = self.warps + len(self.columns)
            if found >= self.clocks.shape[1]:
                self.clocks = np.pad(self.clocks, ((0, 0), (0, self.clocks.shape[1])))
        return found

    def snapshot(self, warp: int) -> np.ndarray:
        """What a warp knows now, which is all that a copy knows that it starts."""
        return self.clocks[warp].copy()

    # --- accesses

    def memory(self, block: Block) -> _Shared:
        found = self.shared.get(block.rank)
        if found is None:
            found = self.shared[block.rank] = _Shared(-(-len(block.shared) // self.grain), self.warps)
        return found

    def grains(self, at: np.ndarray) -> np.ndarray:
        """Grains [n, k] of bytes [n, size] that lie one after the other."""
        return at.reshape(len(at), -1)[:, :: self.grain] // self.grain

    def read(self, block: Block, at: np.ndarray, threads: np.ndarray, pc: int) -> None:
        """Threads [n] read bytes [n, size]."""
        s, g, warps = self.memory(block), self.grains(at), self.of(threads)
        writer = s.writer[g]
        nothing = writer == _NOBODY
        if nothing.any():
            self._unwritten(block, g, nothing, warps, pc)
        late = ~nothing & (self.clocks[warps[:, None], writer] < s.written[g])
        if late.any():
            self._race(block, g, late, warps, pc, "reads", s)
        s.read[warps[:, None], g] = self.clocks[warps, warps][:, None]
        s.reading[warps[:, None], g] = pc

    def write(self, block: Block, at: np.ndarray, data: np.ndarray, threads: np.ndarray, pc: int) -> None:
        """Threads [n] are about to write bytes [n, size]."""
        s, g, warps = self.memory(block), self.grains(at), self.of(threads)
        self._check_write(block, s, g, self.clocks[warps], warps, pc, _changes(block, at, data, self.grain))
        s.writer[g], s.written[g], s.by[g] = warps[:, None], self.clocks[warps, warps][:, None], pc

    def write_async(
        self, block: Block, at: np.ndarray, data: np.ndarray, barrier: int, knows: np.ndarray, pc: int
    ) -> None:
        """A copy that reports to an mbarrier is about to write; ``knows``: the clock of who started it."""
        s, g, column = self.memory(block), self.grains(at), self.column(barrier)
        rows = np.zeros((len(g), self.clocks.shape[1]), np.int32)
        rows[:, : len(knows)] = knows
        self._check_write(block, s, g, rows, None, pc, _changes(block, at, data, self.grain), column)
        s.writer[g], s.written[g], s.by[g] = column, self.phases.get(barrier, 0) + 1, pc

    def _check_write(
        self, block: Block, s: _Shared, g: np.ndarray, rows: np.ndarray, warps: np.ndarray | None, pc: int,
        changes: np.ndarray, own: int = _NOBODY,
    ) -> None:  # fmt: skip
        writer = s.writer[g]
        known = np.take_along_axis(rows, np.maximum(writer, 0).astype(np.int64), 1) >= s.written[g]
        # The same bytes again do no harm.
        over = (writer != _NOBODY) & (writer != own) & ~known & changes
        if over.any():
            self._race(block, g, over, warps, pc, "overwrites", s)
        late = (s.read[:, g] > rows[:, : self.warps].T[:, :, None]) & changes  # [readers, n, k]
        if late.any():
            reader, row, k = (int(x[0]) for x in np.nonzero(late))
            place, by = g[row, k], s.reading[reader, g[row, k]]
            message = f"overwrites {{place}}, which {self._named(reader)} reads"
            who = None if warps is None else warps[row]
            self._tell("race", block, int(place), pc, who, message, int(by), int(late.any(0).sum()))

    # --- what is found

    def _unwritten(self, block: Block, g: np.ndarray, where: np.ndarray, warps: np.ndarray, pc: int) -> None:
        row, k = (int(x[0]) for x in np.nonzero(where))
        message = "reads {place}, which nobody wrote"
        self._tell("unwritten", block, int(g[row, k]), pc, warps[row], message, None, int(where.sum()))

    def _race(
        self, block: Block, g: np.ndarray, where: np.ndarray, warps: np.ndarray | None, pc: int, verb: str, s: _Shared
    ) -> None:
        row, k = (int(x[0]) for x in np.nonzero(where))
        place = int(g[row, k])
        message = f"{verb} {{place}}, which {self._named(int(s.writer[place]))} writes"
        who = None if warps is None else warps[row]
        self._tell("race", block, place, pc, who, message, int(s.by[place]), int(where.sum()))

    def _named(self, actor: int) -> str:
        if actor < self.warps:
            return f"warp {actor % self.per_block}"
        barrier = next(a for a, column in self.columns.items() if column == actor)
        return f"a copy that reports to {self.cluster.place(barrier)}"

    def _tell(
        self, kind: str, block: Block, place: int, pc: int, warp: Any, message: str, by: int | None, count: int
    ) -> None:
        code = block.kernel.code
        who = "a copy" if warp is None else f"warp {int(warp) % self.per_block}"
        text = f"{who} {message.format(place=block.kernel.symbol(place * self.grain))}"
        if by is not None:
            text += f" by {code[by].short} ({code[by].where}), and no barrier orders the two"
        self.tell(kind, pc, text, count)


def _most(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The later of two clocks, which may be of unlike lengths."""
    if len(a) < len(b):
        a, b = b, a
    found = a.copy()
    found[: len(b)] = np.maximum(found[: len(b)], b)
    return found


def _changes(block: Block, at: np.ndarray, data: np.ndarray, grain: int) -> np.ndarray:
    """Whether a write changes the grains [n, k] that it writes."""
    at = at.reshape(len(at), -1)
    differ = block.shared[at] != data.reshape(at.shape)
    return differ.reshape(len(at), -1, grain).any(2) if grain > 1 else differ


__all__ = ["Races"]
