# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Race detection, and detection of reads of unwritten shared memory, for the PTX interpreter.

An access races if the last writer of its location (for a write also each reader) is at a time that the warp's vector
clock (``kvarn.emulator.clocks``) does not cover, whatever the order in which the warps ran. Threads of one warp count
as ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import Clocks

if TYPE_CHECKING:
    from .block import Block
    from .cluster import Cluster

_NOBODY = -1
Tell = Callable[[str, int, str, int], None]  # kind, instruction, message, number of locations


class _Shared:
    """For each grain of a block's shared memory: its last writer, and the time of each warp's last read."""

    def __init__(self, count: int, warps: int) -> None:
        self.writer = np.full(count, _NOBODY, np.int16)
        self.written = np.zeros(count, np.int32)  # the writer's clock
        self.by = np.zeros(count, np.int32)  # the instruction
        self.read = np.zeros((warps, count), np.int32)
        self.reading = np.zeros((warps, count), np.int32)


class Races(Clocks):
    """Detection of unordered accesses to shared memory.

    Parameters
    ----------
    cluster : Cluster
    tell : callable
        Receives the findings.
    """

    def __init__(self, cluster: Cluster, tell: Tell) -> None:
        super().__init__(cluster)
        self.tell, self.grain = tell, cluster.kernel.grain
        self.shared: dict[int, _Shared] = {}  # by rank

    # --- accesses

    def memory(self, block: Block) -> _Shared:
        found = self.shared.get(block.rank)
        if found is None:
            found = self.shared[block.rank] = _Shared(-(-len(block.shared) // self.grain), self.warps)
        return found

    def grains(self, at: np.ndarray) -> np.ndarray:
        """Grains [n, k] of contiguous bytes [n, size]."""
        return at.reshape(len(at), -1)[:, :: self.grain] // self.grain

    def read(self, block: Block, at: np.ndarray, threads: np.ndarray, pc: int) -> None:
        """Record that threads [n] read bytes [n, size]."""
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
        """Record that threads [n] are about to write bytes [n, size]."""
        s, g, warps = self.memory(block), self.grains(at), self.of(threads)
        self._check_write(block, s, g, self.clocks[warps], warps, pc, _changes(block, at, data, self.grain))
        s.writer[g], s.written[g], s.by[g] = warps[:, None], self.clocks[warps, warps][:, None], pc

    def write_async(
        self, block: Block, at: np.ndarray, data: np.ndarray, barrier: int, knows: np.ndarray, pc: int
    ) -> None:
        """Record that a copy that signals an mbarrier is about to write; ``knows``: the clock of its starter."""
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
        # Writing equal bytes is harmless.
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

    # --- findings

    def _unwritten(self, block: Block, g: np.ndarray, where: np.ndarray, warps: np.ndarray, pc: int) -> None:
        row, k = (int(x[0]) for x in np.nonzero(where))
        message = "reads {place}, which was never written"
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
        return f"a copy that signals {self.cluster.place(barrier)}"

    def _tell(
        self, kind: str, block: Block, place: int, pc: int, warp: Any, message: str, by: int | None, count: int
    ) -> None:
        code = block.kernel.code
        who = "a copy" if warp is None else f"warp {int(warp) % self.per_block}"
        text = f"{who} {message.format(place=block.kernel.symbol(place * self.grain))}"
        if by is not None:
            text += f" by {code[by].short} ({code[by].where}), and no barrier orders the two"
        self.tell(kind, pc, text, count)


def _changes(block: Block, at: np.ndarray, data: np.ndarray, grain: int) -> np.ndarray:
    """Whether a write changes the grains [n, k]."""
    at = at.reshape(len(at), -1)
    differ = block.shared[at] != data.reshape(at.shape)
    return differ.reshape(len(at), -1, grain).any(2) if grain > 1 else differ


__all__ = ["Races"]
