# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of a stream, for the PTX interpreter: which earlier kernels may still run when a kernel accesses memory.

A kernel with a programmatic launch may start as soon as every block of the previous kernel has run
``griddepcontrol.launch_dependents`` or has ended; kernels that such a block knew to be over are over.
``griddepcontrol.wait`` waits for the end of the previous kernel, and for earlier ones only if a thread of the previous
kernel waited for them. A thread that has neither waited, nor synchronised with one that has, must not access what a
kernel that may still run writes, nor write what that kernel reads. Any other launch starts when all earlier work is
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import Marks, Memory
from .ptx_parser import EmulationError, Instruction

if TYPE_CHECKING:
    from .block import Block
    from .cluster import Cluster
    from .memory import Fields

_NUMBERS = np.iinfo(np.uint16).max  # of kernels whose accesses can be distinguished
_NONE: frozenset[int] = frozenset()


@dataclass(eq=False)
class Launched:
    """A kernel of a stream.

    Attributes
    ----------
    number : int
        In its stream, from 1.
    name : str
    running : set of int
        Earlier kernels that may still run when it starts.
    left : set of int
        Earlier kernels that may still run after it has waited.
    arrays : sequence of numpy.ndarray
        Its memory, kept alive while it may run.
    unordered : sequence of numpy.ndarray
        Memory that kernels may share without order.
    waited : bool
        Whether one of its threads has waited.
    eager : bool
        Whether a block allowed the next kernel to start, or ended, before it knew that earlier kernels were over.
    """

    number: int
    name: str
    running: frozenset[int]
    left: frozenset[int]
    arrays: Sequence[np.ndarray]
    ahead: dict[int, Launched]
    unordered: Sequence[np.ndarray] = ()
    waited: bool = False
    eager: bool = False
    marks: list[Marks] = field(default_factory=list)

    # --- actions of its threads

    def wait(self, t: Block, lanes: Any) -> None:
        """Threads wait for the previous kernel."""
        t.clocks.wait_for_ahead(t.clocks.warps_of(t, lanes))
        self.waited = True

    def let_start(self, t: Block, lanes: Any) -> None:
        """Threads allow the next kernel to start, for their block."""
        if not t.lets_start:
            t.lets_start = True
            self.eager |= not t.clocks.know_ahead(t.clocks.warps_of(t, lanes)).all()

    def ended(self, c: Cluster) -> None:
        """All threads of a cluster have ended."""
        for t in c.blocks:
            if not t.lets_start:
                self.eager |= not c.clocks.know_ahead(c.clocks.warps_of(t, slice(None))).any()

    # --- accesses

    def concerns(self, t: Block) -> bool:
        """Whether accesses of a block must be checked."""
        if not t.knows_ahead:
            first = t.rank * t.clocks.per_block
            t.knows_ahead = bool(t.clocks.know_ahead(slice(first, first + t.clocks.per_block)).all())
        return not t.knows_ahead or bool(self.left)

    def check(self, t: Block, i: Instruction, address: np.ndarray, size: int, lanes: Any, write: bool) -> None:
        """Check accesses [n] of ``size`` bytes by threads [n], or by copies that they are about to start."""
        if not self.concerns(t):
            return
        known = t.clocks.know_ahead(t.clocks.of(t.threads[lanes]))
        for rows, running in ((~known, self.running), (known, self.left)):
            if running and rows.any():
                at = (address[rows].astype(np.int64)[:, None] + np.arange(size)).ravel()
                self._check(t.cluster.fields, i, at, running, write)

    def _check(self, fields: Fields, i: Instruction, at: np.ndarray, running: frozenset[int], write: bool) -> None:
        for marks in self.marks:
            here = at[(at >= marks.low) & (at < marks.high)]
            if not len(here):
                continue
            for what, by in (("writes", marks.written), *((("reads", marks.read),) if write else ())):
                numbers = by[here - marks.low]
                wrong = np.isin(numbers, list(running)) if len(running) > 1 else numbers == next(iter(running))
                for array in self.unordered if wrong.any() else ():
                    low, high = np.lib.array_utils.byte_bounds(array)
                    wrong &= (here < low) | (here >= high)
                if wrong.any():
                    first = here[wrong][:1]
                    raise EmulationError(
                        f"{i.short}: kernel {self.name} {'writes' if write else 'reads'} "
                        f"{fields.names[int(fields.of(first)[0])]} at {int(first[0]):#x}, which kernel "
                        f"{self.ahead[int(numbers[wrong][0])].name} before it {what} and may still run: no "
                        "griddepcontrol.wait comes before"
                    )


class Stream:
    """Kernels launched one after another."""

    def __init__(self) -> None:
        self._count = 0
        self._last: Launched | None = None
        self._flying: dict[int, Launched] = {}  # that a later kernel may find running

    @property
    def left(self) -> frozenset[int]:
        """Kernels that may still run when a kernel has waited for the last one."""
        last = self._last
        return _NONE if last is None else last.left if last.waited else last.running

    def launch(
        self, name: str, programmatic: bool, memory: Memory, arrays: Sequence[np.ndarray],
        unordered: Sequence[np.ndarray] = (), followed: bool = True,
    ) -> Launched:  # fmt: skip
        """Register a kernel that is about to run.

        Parameters
        ----------
        name : str
        programmatic : bool
            Whether it may start before the previous kernel has ended.
        memory : Memory
            Records the kernel's reads and writes.
        arrays, unordered : sequence of numpy.ndarray
            Its memory, and the part of it that kernels may share without order.
        followed : bool
            Whether another kernel may start before it has ended.
        """
        if self._count == _NUMBERS:
            self.__init__()
        running = left = _NONE
        before = self._last
        if programmatic and before is not None:
            running = (before.running if before.eager else before.left) | {before.number}
            left = self.left
        self._count += 1
        ahead = {n: self._flying[n] for n in running | left}
        for kernel in self._flying.values():
            kernel.ahead = {}
        found = Launched(self._count, name, running, left, arrays, ahead, unordered)
        if followed or running:
            earlier = [marks for kernel in ahead.values() for marks in kernel.marks]
            found.marks = memory.note(found.number, earlier)
        self._last, self._flying = found, {**ahead, found.number: found}
        return found


__all__ = ["Launched", "Stream"]
