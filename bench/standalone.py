# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Common parts of the standalone benchmarks: the device option, and the output of their lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvarn.measure import arrays as array_kinds
from kvarn.measure.timing import first_line, timed, warm_up

from .kvarn_rows import filled
from .report import table

Lines = Sequence[dict[str, Any]]
Number = tuple[str, str | Callable[[dict[str, Any]], float | None], str]  # header, key or function, format


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with options for the device and an output file."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "host", "numpy"), help="(default: the GPU, if there is one)")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def device_of(options: argparse.Namespace) -> str:
    """The device of the options; by default the GPU, if there is one."""
    from kvarn.runtime import driver

    return options.device or ("cuda" if driver.status().usable else "host")


def run_all(
    options: argparse.Namespace, cases: Iterable[Any], lines: Callable[[Any, Any], Iterable[dict[str, Any]]],
    shown: Callable[[Lines], str],
) -> int:  # fmt: skip
    """Print the lines of every case, from ``lines(arrays, case)``, and write them to the file; 0 if all are correct."""
    arrays = array_kinds.arrays(device_of(options))
    warm_up(arrays)
    found: list[dict[str, Any]] = []
    for case in cases:
        new = list(lines(arrays, case))
        arrays.free()
        found += new
        print(shown(new), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(line["ok"] for line in found) else 1


def shown(found: Lines, *columns: str | Number) -> str:
    """Lines as a table: text columns by key, number columns, and whether each line is correct."""
    cells = [[c if isinstance(c, str) else c[0] for c in columns] + ["checked"]]
    for line in found:
        checked = "ok" if line["ok"] else line.get("note") or "wrong"
        cells.append([*(line[c] if isinstance(c, str) else _number(line, c) for c in columns), checked])
    return table(cells)


def _number(line: dict[str, Any], column: Number) -> str:
    _, key, form = column
    value = line.get(key) if isinstance(key, str) else key(line)
    return "—" if value is None else format(value, form)


def over(line: dict[str, Any], us: float) -> float | None:
    """A line's time divided by ``us``, if it was timed."""
    return line["us"] / us if "us" in line else None


def measured(
    p: Any, call: Callable[[int], Any], error: Callable[[], float], tolerance: float, work: float = 0
) -> dict[str, Any]:
    """A call's record: its ``error`` with outputs set to NaN first, its time, the rate of ``work``; or the failure."""
    record: dict[str, Any] = {"ok": False}
    try:
        filled(call, p)
        record["error"] = error()
        record |= timed(call, p.layers, p.arrays)
        record["ok"] = record["error"] <= tolerance
        if work:
            record["rate"] = work / record["us"] / 1e6
    except Exception as problem:
        record["note"] = f"{type(problem).__name__}: {first_line(problem)}"
    return record
