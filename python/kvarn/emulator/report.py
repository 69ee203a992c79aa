# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The report of a run in the emulator: instructions, traffic, bank conflicts, divergence, hazards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import Fields
from .ptx_parser import Instruction, Kernel

WARP = 32
SECTOR = 32
_BANKS = 32


class EmulationHazard(Exception):
    """Raised by :meth:`Report.check`: the kernel is wrong, though its results may be right."""


@dataclass
class Traffic:
    """Traffic between a kernel and a part of its arguments.

    Attributes
    ----------
    read, written : int
        Bytes requested by threads, counted each time.
    read_sectors, written_sectors : int
        Sectors of 32 bytes per warp instruction: the requests to L2 without an L1.
    requests : int
        Warp instructions; TMA copies individually.
    """

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0
    requests: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def sectors(self) -> int:
        return self.read_sectors + self.written_sectors

    def add(self, bytes: int, sectors: int, requests: int, write: bool) -> None:
        if write:
            self.written, self.written_sectors = self.written + bytes, self.written_sectors + sectors
        else:
            self.read, self.read_sectors = self.read + bytes, self.read_sectors + sectors
        self.requests += requests


@dataclass
class Hazard:
    """An error in a kernel that its results may not show.

    Attributes
    ----------
    kind : {"race", "unwritten"}
        Unordered accesses to shared memory; a read of shared memory that was never written.
    message : str
    source : str
        File and line of the kernel, if the PTX has them.
    line : int
        PTX line.
    count : int
        Number of locations, over all occurrences.
    """

    kind: str
    message: str
    source: str
    line: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.source or f'PTX line {self.line}'}: {self.kind}: {self.message} ({self.count} times)"


class Counts:
    """Counts per instruction of one kernel, summed over its blocks and launches."""

    def __init__(self, kernel: Kernel) -> None:
        n = len(kernel.code)
        self.kernel = kernel
        self.warps = np.zeros(n, np.int64)  # executions by a warp
        self.threads = np.zeros(n, np.int64)
        self.diverged = np.zeros(n, np.int64)  # branches that split a warp
        self.wavefronts = np.zeros(n, np.int64)  # wavefronts of accesses to shared memory
        self.needed = np.zeros(n, np.int64)  # wavefronts required by the access widths
        self.shared_bytes = np.zeros(n, np.int64)
        self.traffic: dict[tuple[int, str], Traffic] = {}
        self.blocks = self.launches = 0

    def ran(self, first: int, end: int, warps: int, threads: int) -> None:
        """Count the instructions from ``first`` to ``end`` (exclusive), run by the same threads."""
        self.warps[first:end] += warps
        self.threads[first:end] += threads

    def device(self, pc: int, fields: Fields, address: np.ndarray, size: int, lanes: np.ndarray, write: bool) -> None:
        """Count an access of lanes [n] to device memory, ``size`` bytes each."""
        sectors = np.unique((address.astype(np.int64) // SECTOR) * 64 + lanes // WARP)
        requests = len(np.unique(lanes // WARP))
        of_sector = fields.of(np.maximum(sectors // 64 * SECTOR, 0))
        of_lane = fields.of(address.astype(np.int64))
        # A sector may begin before the part for which it was read.
        stray = of_sector == len(fields.fields)
        if stray.any():
            of_sector[stray] = np.bincount(of_lane).argmax()
        lanes_of, sectors_of = (np.bincount(x, minlength=len(fields.names)) for x in (of_lane, of_sector))
        for n in np.flatnonzero(lanes_of + sectors_of).tolist():
            found = self.traffic.setdefault((pc, fields.names[n]), Traffic())
            found.add(int(lanes_of[n]) * size, int(sectors_of[n]), requests, write)

    def copied(self, pc: int, fields: Fields, address: np.ndarray, size: int, write: bool) -> None:
        """Count a TMA copy of elements [n] of ``size`` bytes."""
        if not len(address):
            return
        address = address.astype(np.int64)
        sectors = np.unique(np.concatenate([address, address + size - 1]) // SECTOR)
        name = fields.names[int(fields.of(address[:1])[0])]
        self.traffic.setdefault((pc, name), Traffic()).add(len(address) * size, len(sectors), 1, write)

    def shared(self, pc: int, address: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Count an access of lanes [n] to shared memory: its wavefronts."""
        phases = max(size // 4, 1)  # groups of lanes served one after another
        group = lanes // max(WARP // phases, 1)
        words = (address.astype(np.int64) // 4)[:, None] + np.arange(phases)
        keys = np.unique(group.astype(np.int64)[:, None] * (1 << 32) + words)
        where, counts = np.unique(keys // (1 << 32) * _BANKS + keys % _BANKS, return_counts=True)
        first = np.flatnonzero(np.diff(where // _BANKS, prepend=-1))
        self.wavefronts[pc] += int(np.maximum.reduceat(counts, first).sum())
        self.needed[pc] += len(first)
        self.shared_bytes[pc] += size * len(lanes)


@dataclass
class LineCounts:
    """Counts of one line of a kernel; attributes as in :class:`Report`."""

    source: str
    instructions: int = 0
    threads: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    bank_conflicts: int = 0
    divergent_branches: int = 0


class Report:
    """Counts of a run, accumulated over launches and operations.

    Attributes
    ----------
    target : str
    kernels : dict of str to Counts
        By kernel name; launches of one kernel are summed.
    hazards : list of Hazard
    """

    def __init__(self, target: str, races: bool = True) -> None:
        self.target, self.races = target, races
        self.kernels: dict[str, Counts] = {}
        self._codes: dict[tuple[str, str], Counts] = {}
        self._hazards: dict[tuple[str, int, str], Hazard] = {}

    # --- sums over all kernels

    @property
    def hazards(self) -> list[Hazard]:
        return list(self._hazards.values())

    @property
    def instructions(self) -> int:
        """Instructions issued by warps."""
        return sum(int(c.warps.sum()) for c in self.kernels.values())

    @property
    def by_opcode(self) -> Counter[str]:
        """Warp instructions by opcode, such as ``"ld.global.v4.b32"``."""
        found: Counter[str] = Counter()
        for i, warps, _ in self._executed():
            found[".".join(i.name)] += warps
        return found

    @property
    def active_lanes(self) -> float:
        """Average share of a warp's threads that are active in an instruction; 1 without divergence."""
        warps = sum(int(c.warps.sum()) for c in self.kernels.values())
        return sum(int(c.threads.sum()) for c in self.kernels.values()) / (WARP * warps) if warps else 1.0

    @property
    def divergent_branches(self) -> int:
        """Branches that split a warp."""
        return sum(int(c.diverged.sum()) for c in self.kernels.values())

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Traffic by part of the arguments: ``"cache.blocks"``, ``"collection.keys"``, ``"out"``, ..."""
        found: dict[str, Traffic] = {}
        for counts in self.kernels.values():
            for (_, name), t in counts.traffic.items():
                _sum(found.setdefault(name, Traffic()), t)
        return dict(sorted(found.items(), key=lambda item: -item[1].bytes))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes read and written, by part of the arguments."""
        return {name: t.bytes for name, t in self.traffic.items()}

    @property
    def sectors(self) -> dict[str, int]:
        """Sectors of 32 bytes read and written, by part of the arguments."""
        return {name: t.sectors for name, t in self.traffic.items()}

    @property
    def shared_bytes(self) -> int:
        """Bytes that threads read from and wrote to shared memory."""
        return sum(int(c.shared_bytes.sum()) for c in self.kernels.values())

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts of accesses to shared memory beyond those required by their widths."""
        return sum(int((c.wavefronts - c.needed).sum()) for c in self.kernels.values())

    @property
    def lines(self) -> list[LineCounts]:
        """Counts by line of the kernel if the PTX has source lines, else by PTX line; most work first."""
        found: dict[str, LineCounts] = {}
        for counts in self.kernels.values():
            sources = [i.source or f"PTX line {i.line}" for i in counts.kernel.code]
            conflicts = counts.wavefronts - counts.needed
            for n in np.flatnonzero(counts.warps).tolist():
                line = found.setdefault(sources[n], LineCounts(sources[n]))
                line.instructions += int(counts.warps[n])
                line.threads += int(counts.threads[n])
                line.bank_conflicts += int(conflicts[n])
                line.divergent_branches += int(counts.diverged[n])
            for (n, _), t in counts.traffic.items():
                _sum(found.setdefault(sources[n], LineCounts(sources[n])).traffic, t)
        return sorted(found.values(), key=lambda line: -line.instructions)

    def check(self) -> Report:
        """Raise :class:`EmulationHazard` if there are hazards; returns the report."""
        if self.hazards:
            raise EmulationHazard("\n".join(map(str, self.hazards)))
        return self

    def to_dict(self) -> dict[str, Any]:
        """As numbers, strings, lists and dictionaries, for JSON."""
        return {
            "target": self.target, "instructions": self.instructions, "by_opcode": dict(self.by_opcode.most_common()),
            "active_lanes": self.active_lanes, "divergent_branches": self.divergent_branches,
            "traffic": {name: vars(t) for name, t in self.traffic.items()}, "shared_bytes": self.shared_bytes,
            "bank_conflicts": self.bank_conflicts,
            "kernels": {n: {"blocks": c.blocks, "launches": c.launches} for n, c in self.kernels.items()},
            "hazards": [vars(h) for h in self.hazards],
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self._described())

    __repr__ = __str__

    # --- updates

    def counts(self, kernel: Kernel, name: str) -> Counts:
        """The counts of a kernel's launches."""
        found = self._codes.get((name, kernel.text))
        if found is None:
            free = name
            while free in self.kernels:  # another kernel of the same name
                free += "'"
            found = self._codes[name, kernel.text] = self.kernels[free] = Counts(kernel)
        found.launches += 1
        return found

    def tell(self, kernel: Kernel, kind: str, pc: int, message: str, count: int) -> None:
        """Record a hazard at an instruction; the first of a kind is described, others are counted."""
        i = kernel.code[pc]
        found = self._hazards.get((kind, pc, kernel.text))
        if found is None:
            self._hazards[kind, pc, kernel.text] = Hazard(kind, f"{message}; {i.short}", i.source, i.line, count)
        else:
            found.count += count

    # ---

    def _executed(self) -> Iterator[tuple[Instruction, int, int]]:
        for counts in self.kernels.values():
            for n in np.flatnonzero(counts.warps).tolist():
                yield counts.kernel.code[n], int(counts.warps[n]), int(counts.threads[n])

    def _described(self) -> Iterator[str]:
        launched = (
            ", ".join(f"{name} ({c.blocks} block{'s' * (c.blocks != 1)})" for name, c in self.kernels.items())
            or "nothing"
        )
        yield f"emulated for {self.target}: {launched}"
        yield (
            f"  {self.instructions:,} instructions of warps, {self.active_lanes:.1%} of their lanes active, "
            f"{self.divergent_branches:,} divergent branches"
        )
        yield f"  {self.shared_bytes:,} bytes of shared memory accessed, {self.bank_conflicts:,} bank conflicts"
        if self.traffic:
            width = max(map(len, self.traffic))
            yield f"  {'device memory':{width}}  {'bytes read':>14}  {'sectors':>11}  {'written':>14}  {'sectors':>11}"
        for name, t in self.traffic.items():
            yield f"  {name:{width}}  {t.read:14,}  {t.read_sectors:11,}  {t.written:14,}  {t.written_sectors:11,}"
        yield from (f"  {h}" for h in self.hazards)
        if not self.hazards:
            yield "  no hazards" if self.races else "  hazards were not checked"


def _sum(to: Traffic, other: Traffic) -> None:
    for name, value in vars(other).items():
        setattr(to, name, getattr(to, name) + value)


__all__ = ["Counts", "EmulationHazard", "Hazard", "LineCounts", "Report", "Traffic"]
