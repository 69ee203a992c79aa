# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timelines of launches: the phases of each warp.

``with kv.tracing() as t:`` compiles kernels launched inside with their phases (``with kv.trace("softmax"):`` in
kernels, and the waits and copies of tile kernels) and collects the marks that warps record. ``t.timeline`` has them
afterwards; ``t.save(...)`` writes them for Perfetto or as a drawing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvarn
from kvarn import settings
from kvarn.dialect import trace_layout as at
from kvarn.files import write_output
from kvarn.runtime import timeline
from kvarn.runtime.binding import HOST
from kvarn.runtime.host import cycles

NOMINAL = 1.0  # clock cycles per nanosecond if the clock rate is unknown
_APART = 3600 * 10**9  # nanoseconds; clocks further apart have different origins


class Span(NamedTuple):
    """A phase of a warp.

    Attributes
    ----------
    launch : int
        Index of the launch, from 0.
    kernel, label : str
    block, warp : int
        Linear indices in the grid and in the block.
    processor : int
        The multiprocessor; 0 on the host.
    begin, end : float
        Nanoseconds since the first mark; in the emulator, instructions of the warp since the start of its block.
    depth : int
        Number of enclosing phases.
    """

    launch: int
    kernel: str
    label: str
    block: int
    warp: int
    processor: int
    begin: float
    end: float
    depth: int


@dataclass(frozen=True)
class Timeline:
    """The phases of all warps.

    Attributes
    ----------
    spans : tuple of Span
        Sorted by begin. A phase whose begin mark was overwritten in the ring starts at the first mark left.
    dropped : int
        Warps without a record, above ``kv.tracing(warps=)``.
    overwritten : int
        Marks that did not fit a warp's ring (``kv.tracing(marks=)``); the last marks are kept.
    unit : str
        ``"ns"``, or ``"instructions"`` in the emulator.
    """

    spans: tuple[Span, ...]
    dropped: int = 0
    overwritten: int = 0
    unit: str = "ns"

    def phases(self) -> list[tuple[str, str, int, float, float]]:
        """Rows of (kernel, label, times, mean, share of its warps' time), the largest share first."""
        sums: dict[tuple[str, str], list[float]] = {}
        lives: dict[tuple[str, int, int, int], list[float]] = {}
        for s in self.spans:
            sums.setdefault((s.kernel, s.label), []).append(s.end - s.begin)
            life = lives.setdefault((s.kernel, s.launch, s.block, s.warp), [s.begin, s.end])
            life[0], life[1] = min(life[0], s.begin), max(life[1], s.end)
        whole: dict[str, float] = {}
        for (kernel, *_), (begin, end) in lives.items():
            whole[kernel] = whole.get(kernel, 0.0) + end - begin
        rows = [(k, label, len(v), sum(v) / len(v), sum(v) / (whole[k] or 1.0)) for (k, label), v in sums.items()]
        return sorted(rows, key=lambda row: (-whole[row[0]], row[0], -row[4]))

    def perfetto(self) -> dict[str, Any]:
        """The spans as trace events for https://ui.perfetto.dev: one process per multiprocessor, one row per warp."""
        events: list[dict[str, Any]] = []
        rows: dict[tuple[int, int, int, int], int] = {}
        names: dict[int, str] = {}
        for s in self.spans:
            names[s.processor] = "host" if self.unit == "ns" and s.processor < 0 else f"SM {s.processor}"
            row = rows.setdefault((s.processor, s.launch, s.block, s.warp), len(rows))
            events.append({
                "ph": "X", "name": s.label, "cat": s.kernel, "pid": s.processor, "tid": row,
                "ts": s.begin / 1e3, "dur": max(s.end - s.begin, 0.0) / 1e3,
                "args": {"launch": s.launch, "kernel": s.kernel, "block": s.block, "warp": s.warp},
            })  # fmt: skip
        for processor, name in names.items():
            events.append({"ph": "M", "name": "process_name", "pid": processor, "args": {"name": name}})
        for (processor, launch, block, warp), row in rows.items():
            name = f"launch {launch}, block {block}, warp {warp}"
            events.append({"ph": "M", "name": "thread_name", "pid": processor, "tid": row, "args": {"name": name}})
        return {"displayTimeUnit": "ns", "traceEvents": events}

    def svg(self, rows: int = 48, launch: int | None = None) -> str:
        """A drawing of one launch, by default the longest: one row per warp, at most ``rows``, of the first blocks."""
        from kvarn.timeline.drawing import drawing

        return drawing(self, rows, launch)

    def save(self, path: str | Path) -> Path:
        """Write a drawing if the suffix is ``.svg``, else trace events in JSON; returns the path."""
        found = Path(path)
        text = self.svg() if found.suffix == ".svg" else json.dumps(self.perfetto())
        write_output(found, text)
        return found


class Tracing:
    """The object that ``kv.tracing`` yields."""

    _read: Callable[[], Timeline] | None = None

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The phases recorded inside, after the end of the context. Reading a million spans takes some seconds."""
        if self._read is None:
            raise RuntimeError("the timeline is available after the end of the context of kv.tracing")
        return self._read()

    def save(self, path: str | Path) -> Path:
        """Write the timeline: see :meth:`Timeline.save`."""
        return self.timeline.save(path)


@contextlib.contextmanager
def tracing(*, warps: int = 4096, marks: int = 2048) -> Iterator[Tracing]:
    """Record the phases of the warps of kernels that this thread launches inside.

    Kernels are compiled again with their marks. Other launches, including those of captured graphs, are not recorded;
    the context ends after all running kernels.

    Parameters
    ----------
    warps : int
        Largest number of warps of all launches on a device; later ones are not recorded.
    marks : int
        Marks per warp, two per phase, a power of two. The last marks are kept.

    Yields
    ------
    Tracing

    Raises
    ------
    ValueError
        For invalid numbers, and inside another such context.
    """
    if not isinstance(marks, int) or marks < 2 or marks & (marks - 1):
        raise ValueError(f"marks must be a power of two of at least 2, got {marks!r}")
    if not isinstance(warps, int) or warps < 1:
        raise ValueError(f"warps must be positive, got {warps!r}")
    emulated = settings.emulation() is not None
    made, clocks = Tracing(), [(time.time_ns(), cycles())]
    timeline.begin(warps, marks)
    try:
        with kvarn.pipelines.tracing(marks):
            yield made
    finally:
        found = timeline.end()
        clocks.append((time.time_ns(), cycles()))
        buffers, on_host = [words for _, words in found], [ordinal == HOST for ordinal, _ in found]
        made._read = functools.partial(read, buffers, on_host, marks, clocks, emulated)


# --- from marks to spans ---------------------------------------------------------------------------


def read(
    buffers: Sequence[np.ndarray], on_host: Sequence[bool], marks: int, clocks: Any, emulated: bool = False
) -> Timeline:
    """The timeline of mark buffers.

    Parameters
    ----------
    buffers : sequence of int64 arrays
        In the layout of ``kvarn.dialect.trace_layout``.
    on_host : sequence of bool
        Whether each buffer's clock is the host processor's.
    marks : int
        Marks per ring.
    clocks : two pairs of int
        Nanoseconds and clock of the host before and after.
    emulated : bool
        Whether host buffers come from the emulator.
    """
    spans: list[Span] = []
    launches: dict[tuple[int, int, int], int] = {}
    dropped = overwritten = 0
    for place, (words, host) in enumerate(zip(buffers, on_host, strict=True)):
        taken = int(words[at.TAKEN])
        records = words[at.RECORDS :].reshape(-1, at.record_words(marks))
        dropped += max(taken - len(records), 0)
        records = records[: min(taken, len(records))]
        if not len(records):
            continue
        rate = 1.0 if host and emulated else _rate(clocks) if host else _device_rate(records)
        # Nanoseconds since 1970 exceed a float's precision (256 ns), so integers are subtracted first.
        since = clocks[0][1] if host else int(records[:, at.BEGIN_NS].min())
        behind = 0 if host or abs(since - clocks[0][0]) > _APART else since - clocks[0][0]
        order = np.argsort(records[:, at.BEGIN_NS], kind="stable")
        for record in records[order]:
            key = (place, int(record[at.GRID]), int(record[at.KERNEL]))
            launch = launches.setdefault(key, len(launches))
            begin = float(int(record[at.BEGIN_NS]) - since + behind)
            if host:
                begin = float(record[at.BEGIN_CLOCK]) if emulated else begin / rate
            overwritten += max(int(record[at.COUNT]) - marks, 0)
            spans += _of_warp(record, marks, launch, begin, rate, host and not emulated)
    first = min((s.begin for s in spans), default=0.0) if not emulated else 0.0
    shifted = [s._replace(begin=s.begin - first, end=s.end - first) for s in spans]
    return Timeline(
        tuple(sorted(shifted, key=lambda s: (s.begin, s.depth))),
        dropped,
        overwritten,
        "instructions" if emulated else "ns",
    )


def _rate(clocks: Any) -> float:
    """Clock cycles per nanosecond on the host."""
    (ns, clock), (later, end) = clocks
    return (end - clock) / max(later - ns, 1) or NOMINAL


def _device_rate(records: np.ndarray) -> float:
    """Clock cycles per nanosecond on a GPU, from the longest interval between two readings by one processor."""
    whole = records[records[:, at.END_NS] > 0]
    best, rate = 0, NOMINAL
    for processor in np.unique(whole[:, at.PROCESSOR]):
        mine = whole[whole[:, at.PROCESSOR] == processor]
        ns = np.concatenate([mine[:, at.BEGIN_NS], mine[:, at.END_NS]])
        clock = np.concatenate([mine[:, at.BEGIN_CLOCK], mine[:, at.END_CLOCK]])
        a, b = int(ns.argmin()), int(ns.argmax())
        if ns[b] - ns[a] > best:
            best, rate = int(ns[b] - ns[a]), float(clock[b] - clock[a]) / float(ns[b] - ns[a])
    return rate


def _of_warp(record: np.ndarray, marks: int, launch: int, begin: float, rate: float, host: bool) -> Iterator[Span]:
    """The phases of one warp's record."""
    kernel, labels = timeline.kernels.get(int(record[at.KERNEL]), ("a kernel", ()))
    count = int(record[at.COUNT])
    ring = record[at.RING :]
    kept = [int(ring[i % marks]) for i in range(max(count - marks, 0), count)]
    mask = (1 << (64 - at.CLOCK_SHIFT)) - 1
    start = int(record[at.BEGIN_CLOCK])
    who = (int(record[at.BLOCK]), int(record[at.WARP]), -1 if host else int(record[at.PROCESSOR]))
    times = [begin + (((word >> at.CLOCK_SHIFT) - start) & mask) / rate for word in kept]
    opened: list[tuple[int, float]] = []
    for word, moment in zip(kept, times, strict=True):
        label, ends = divmod(word & ((1 << at.CLOCK_SHIFT) - 1), 2)
        if not ends:
            opened.append((label, moment))
            continue
        while opened and opened[-1][0] != label:  # the end mark was never reached
            opened.pop()
        since = opened.pop()[1] if opened else times[0]
        yield Span(launch, kernel, _name(labels, label), *who, since, moment, len(opened))


def _name(labels: Sequence[str], label: int) -> str:
    return labels[label] if label < len(labels) else f"phase {label}"


__all__ = ["Span", "Timeline", "Tracing", "read", "tracing"]
