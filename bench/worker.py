# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run one group of measurements in a subprocess: kvarn's rows, a group of peers, or the peak rates.

A library's crash then costs one measurement: the start of each is recorded, and after a crash the group restarts
without it. Records go to a file, one JSON object per line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kvarn.measure import timing_log
from kvarn.measure.arrays import Arrays, arrays

from . import kvarn_rows, peers, timing
from .cases import RANGE, SMALL, TABLE, Row
from .problems import problem
from .report import NOT_OFFERED

LOST = 3  # exit status: the GPU's context is lost, and the process must be restarted
_FATAL = (
    "illegal memory access",
    "CUDA error",
    "device-side assert",
    "misaligned address",
    "CUDA_ERROR_ILLEGAL",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_MISALIGNED",
    "unspecified launch failure",
)
ROWS = {row.name: row for row in (*TABLE, *RANGE, *SMALL)}


class ContextLostError(RuntimeError):
    """The CUDA context is lost after a failed kernel."""


class Sink:
    """Output of records; it knows which measurements earlier processes of the group started and finished."""

    def __init__(self, path: Path) -> None:
        before = read_records(path)
        self._begun = {tuple(r["mark"]) for r in before if "mark" in r}
        self._done = {tuple(r["done"]) for r in before if "done" in r}
        self._file = path.open("a")

    def close(self) -> None:
        self._file.close()

    def put(self, record: dict[str, Any]) -> None:
        """Write a record; raises ContextLostError after the record of a lost context."""
        lost = record.pop("lost", False)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if lost:
            raise ContextLostError(record["note"])

    def begin(self, *what: str) -> bool:
        """Record that a measurement starts; returns False if an earlier process started it."""
        if what in self._begun:
            return False
        self.put({"mark": list(what)})
        return True

    def wants(self, group: str, row: str) -> bool:
        """Whether a row has measurements left; not after a crash while making its data."""
        if (group, row) in self._done:
            return False
        return (group, row) not in self._begun or any(b[:2] == (group, row) and len(b) == 3 for b in self._begun)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a truncated last line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def record_of(row: Row, who: str, **found: Any) -> dict[str, Any]:
    """The record of a row by ``who``; not marked as correct unless ``found`` says so."""
    return {"kind": row.kind, "case": row.name, "who": who, "ok": False, **found}


def measure(offer: kvarn_rows.Offer, p: Any, library: Arrays) -> dict[str, Any]:
    """Check an offer, time it and check it again; returns the record.

    The second check detects state that is valid for the first call only: counters, plans, workspaces.
    """
    row: Row = p.row
    made = record_of(row, offer.who, bytes=p.bytes, flops=p.flops)
    begin = time.perf_counter()
    call = offer.make()
    kvarn_rows.filled(call, p)
    made["setup_s"] = time.perf_counter() - begin
    errors = [(offer.error or p.error)()]
    made |= timing.timed(call, p.layers, library)
    getattr(call, "restore", lambda: None)()
    errors.append(offer.checked(call, p))
    # max() may drop a NaN.
    made["error"] = None if any(e != e for e in errors) else max(errors)
    made["ok"] = made["error"] is not None and made["error"] <= offer.tolerance
    if not made["ok"]:
        made["note"] = (
            "the result is wrong" if made["error"] is not None else "the result has NaN in it, or not all was written"
        )
    return made


def run_rows(group: str, rows: list[Row], library: Arrays, sink: Sink, deadline: float) -> None:
    """Measure the rows of a group until the deadline."""
    for row in rows:
        if group != "kvarn" and not peers.takes(group, row):
            if sink.wants(group, row.name):
                sink.put(record_of(row, group, note=NOT_OFFERED))
                sink.put({"done": [group, row.name]})
        elif deadline - time.time() < 3:
            sink.put(record_of(row, group, note="no time left"))
        elif sink.wants(group, row.name):
            _run_row(group, row, library, sink)
            sink.put({"done": [group, row.name]})
            gc.collect()
            library.free()


def _run_row(group: str, row: Row, library: Arrays, sink: Sink) -> None:
    """Measure all offers of a group for one row; the tensors are freed on return."""
    sink.begin(group, row.name)
    try:
        p = problem(library, row, split=group != "kvarn")
        for offer in kvarn_rows.offers(p) if group == "kvarn" else peers.offers(group, p):
            if sink.begin(group, row.name, offer.who):
                try:
                    record = measure(offer, p, library)
                except Exception as error:
                    record = _failure(row, offer.who, error)
                sink.put(record)
    except ContextLostError:
        raise
    except Exception as error:
        sink.put(_failure(row, group, error))


def _failure(row: Row, who: str, error: Exception) -> dict[str, Any]:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    lost = any(t in str(error) for t in _FATAL)
    return record_of(row, who, note=text, trace=traceback.format_exc()[-2000:], lost=lost)


def machine(library: Any) -> dict[str, Any]:
    """Properties of the machine."""
    return {"kind": "machine", **timing_log.machine(library), **timing_log.clocks()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One group of measurements: used by python -m bench.")
    parser.add_argument("group", choices=("kvarn", "ceilings", *peers.GROUPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="", help="names, comma-separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=float("inf"))
    options = parser.parse_args(argv)
    sink = Sink(options.out)
    with contextlib.closing(sink):
        return _run(options, sink)


def _run(options: argparse.Namespace, sink: Sink) -> int:
    try:
        library = arrays(options.device)
        timing.warm_up(library)
        if options.group == "ceilings":
            sink.put(machine(library))
            for record in timing.ceilings(library):
                sink.put(record)
        else:
            rows = [ROWS[name] for name in options.rows.split(",") if name]
            run_rows(options.group, rows, library, sink, options.deadline)
    except ContextLostError as error:
        print(f"the GPU's context is lost: {error}", file=sys.stderr)
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
