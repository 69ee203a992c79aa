# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory traffic and arithmetic of a kernel's PTX: per loop, without running it, and in a run of the emulator.

Statically, an iteration of a loop executes each of its instructions once, in all threads of a warp. Instructions of an
inner loop count for that loop only. TMA copies have their size where the kernel expects their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarn.emulator import ptx_parser as ptx_text
from kvarn.emulator.report import Counts

WARP = 32
_WAIT = 8  # upper limit of instructions of a loop that only polls a barrier
SECTOR = 32  # bytes
_BITS = re.compile(r"\.[busf](\d+)$|\.b(\d+)$")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_LANES = {"f16x2": 2, "bf16x2": 2, "f32x2": 2}
_FLOATS = ("f16", "bf16", "f32", "f64", *_LANES)


@dataclass
class Work:
    """The work of a warp's threads.

    Attributes
    ----------
    instructions : float
        Per warp.
    read, written : float
        Bytes of device memory.
    unknown : int
        Number of copies whose size the PTX does not state.
    vector, tensor : float
        Floating-point operations outside and inside of tensor cores; a multiply-add counts as two.
    """

    instructions: float = 0
    read: float = 0
    written: float = 0
    unknown: int = 0
    vector: float = 0
    tensor: float = 0

    @property
    def bytes(self) -> float:
        return self.read + self.written

    @property
    def flops(self) -> float:
        return self.vector + self.tensor

    @property
    def intensity(self) -> float | None:
        """Operations per byte; None without traffic or arithmetic."""
        return self.flops / self.bytes if self.bytes and self.flops else None

    def add(self, other: Work, times: float = 1) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value * times)


def access_bytes(name: str) -> int:
    """Bytes per thread of a PTX load or store: ``ld.global.nc.v4.b32`` is 16."""
    lanes = re.search(r"\.v(\d)\b", name)
    bits = _BITS.search(name)
    return (int(lanes[1]) if lanes else 1) * int(next(g for g in bits.groups() if g)) // 8 if bits else 0


def operations(i: ptx_text.Instruction) -> tuple[float, float]:
    """Floating-point operations of one instruction in a warp: outside and inside of tensor cores."""
    head, types = i.name[0], [p for p in i.name if p in _FLOATS]
    if head in ("mma", "wgmma") and (shape := _SHAPE.search(".".join(i.name))):
        m, n, k = map(int, shape.groups())
        return 0, 2.0 * m * n * k / (4 if head == "wgmma" else 1)  # issued by a warpgroup of four warps
    if head in ("fma", "mad", "add", "sub", "mul", "max", "min", "div", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh"):
        if types:
            return WARP * (2.0 if head in ("fma", "mad") else 1.0) * _LANES.get(types[-1], 1), 0
    return 0, 0


def constants_of(kernel: ptx_text.Kernel) -> dict[str, int]:
    """The registers that are written once, with a constant."""
    written: dict[str, str] = {}
    for i in kernel.code:
        for register in ptx_text.parts(i.operands[0]) if i.operands else ():
            number = i.operands[1] if i.name[0] == "mov" and len(i.operands) > 1 and i.guard is None else ""
            written[register] = "" if register in written else number
    return {register: int(number) for register, number in written.items() if number.isdigit()}


def work_of(i: ptx_text.Instruction, constants: Mapping[str, int]) -> Work:
    """The work of one instruction executed by all threads of a warp; ``constants`` are values by register."""
    head, full = i.name[0], ".".join(i.name)
    vector, tensor = operations(i)
    found = Work(1, vector=vector, tensor=tensor)
    if head in ("ld", "st", "atom", "red") and i.space == "global" and "param" not in i.name and "const" not in i.name:
        size = WARP * access_bytes(full)
        found.read += size * (head in ("ld", "atom"))
        found.written += size * (head != "ld")
    elif i.name[:2] == ("cp", "async") and "bulk" not in i.name:
        size = i.operands[2] if len(i.operands) > 2 else ""
        if size.isdigit():
            found.read += WARP * int(size)
        elif size or ("commit_group" not in i.name and "wait_group" not in i.name and "wait_all" not in i.name):
            found.unknown += "mbarrier" not in i.name
    elif head == "mbarrier" and "expect_tx" in i.name and i.operands:
        size = i.operands[-1]
        known = constants.get(size, int(size) if size.isdigit() else None)
        found.read += known or 0  # one thread expects the bytes of all
        found.unknown += known is None
    elif full.startswith("cp.async.bulk") and ".global.shared" in full:
        found.unknown += 1  # a TMA store, for which no bytes are expected
    return found


# --- loops -----------------------------------------------------------------------------------------


@dataclass
class Loop:
    """A loop of the PTX.

    Attributes
    ----------
    first, last : int
        Indices of its first and last instruction in the kernel's code.
    depth : int
        1 for an outermost loop.
    line : int
        PTX line of its first instruction.
    source : str
        File and line of the first instruction with a source line; "" if there is none.
    work : Work
        Per iteration, without inner loops.
    waits : bool
        Whether it only polls a barrier.
    """

    first: int
    last: int
    depth: int
    line: int
    source: str
    work: Work = field(default_factory=Work)
    waits: bool = False


def loops_of(kernel: ptx_text.Kernel) -> tuple[list[Loop], Work]:
    """The loops of a kernel, outer before inner ones, and the work outside of all loops."""
    starts, after = _blocks(kernel)
    bodies = _natural_loops(after)
    blocks = {header: sorted(body) for header, body in bodies.items()}
    ends = [*starts[1:], len(kernel.code)]
    found, outside = [], Work()
    constants = constants_of(kernel)
    order = sorted(bodies, key=lambda header: (-len(bodies[header]), header))
    inner: dict[int, Loop] = {}  # block -> its innermost loop
    for header in order:
        depth = 1 + sum(header in bodies[other] and other != header for other in bodies)
        code = [kernel.code[n] for b in blocks[header] for n in range(starts[b], ends[b])]
        source = next((i.source for i in code if i.source and not i.source.endswith(":0")), "")
        waits = len(code) <= _WAIT and any(
            i.name[:2] in (("mbarrier", "try_wait"), ("mbarrier", "test_wait")) for i in code
        )
        loop = Loop(starts[blocks[header][0]], ends[blocks[header][-1]] - 1, depth, code[0].line, source, waits=waits)
        found.append(loop)
        inner.update(dict.fromkeys(bodies[header], loop))
    for b, start in enumerate(starts):
        to = inner[b].work if b in inner else outside
        for i in kernel.code[start : ends[b]]:
            to.add(work_of(i, constants))
    return sorted(found, key=lambda loop: (loop.first, loop.depth)), outside


def _blocks(kernel: ptx_text.Kernel) -> tuple[list[int], list[list[int]]]:
    """The first instruction of each basic block, and its successors."""
    code, leaders = kernel.code, {0}
    for n, i in enumerate(code):
        if i.name[0] == "bra":
            leaders |= {kernel.labels[i.operands[0]], n + 1}
        elif i.name[0] in ("ret", "exit"):
            leaders.add(n + 1)
    starts = sorted(s for s in leaders if s < len(code))
    number = {s: b for b, s in enumerate(starts)}
    after = []
    for b, _ in enumerate(starts):
        end = starts[b + 1] if b + 1 < len(starts) else len(code)
        last = code[end - 1]
        follows = []
        if last.name[0] == "bra":
            follows.append(number.get(kernel.labels[last.operands[0]], -1))
        if last.name[0] not in ("bra", "ret", "exit") or last.guard is not None:
            follows.append(number.get(end, -1))
        after.append([f for f in follows if f >= 0])
    return starts, after


def _natural_loops(after: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """The blocks of each natural loop, by header: those that reach a back edge to the header, which dominates them."""
    n = len(after)
    before: list[list[int]] = [[] for _ in range(n)]
    for b, follows in enumerate(after):
        for f in follows:
            before[f].append(b)
    reached, stack = {0}, [0]
    while stack:
        for f in after[stack.pop()]:
            if f not in reached:
                reached.add(f)
                stack.append(f)
    every = (1 << n) - 1
    dominators = [1 if b == 0 else every for b in range(n)]  # bit sets
    changed = True
    while changed:
        changed = False
        for b in range(1, n):
            of = every
            for p in before[b]:
                if p in reached:
                    of &= dominators[p]
            of |= 1 << b
            changed |= of != dominators[b]
            dominators[b] = of
    found: dict[int, set[int]] = {}
    for b in reached:
        for header in after[b]:
            if dominators[b] >> header & 1:
                body, stack = found.setdefault(header, {header}), [b]
                while stack:
                    inside = stack.pop()
                    if inside not in body:
                        body.add(inside)
                        stack += [p for p in before[inside] if p in reached]
    return found


# --- a run -------------------------------------------------------------------------------------------


def ran(counts: Counts) -> Work:
    """The work of a kernel in the emulator: requested bytes, and operations of the active threads."""
    found = Work(int(counts.warps.sum()))
    for n, threads in _executed(counts):
        vector, tensor = operations(counts.kernel.code[n])
        found.vector += vector * threads / WARP
        found.tensor += tensor * threads / WARP
    for t in counts.traffic.values():
        found.read += t.read
        found.written += t.written
    return found


def _executed(counts: Any) -> Iterator[tuple[int, int]]:
    for n, threads in enumerate(counts.threads.tolist()):
        if threads:
            yield n, threads


__all__ = ["Loop", "Work", "access_bytes", "constants_of", "loops_of", "operations", "ran", "work_of"]
