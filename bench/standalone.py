# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What measurements that run by themselves share: where they run, and what becomes of their lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvarn.measure import arrays as array_kinds
from kvarn.measure.timing import first_line, timed, warm_up

from .kvarn_rows import filled

Lines = Sequence[dict[str, Any]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of where to run, and of a file for the lines."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "host", "numpy"), help="default: the GPU where there is one")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def device_of(options: argparse.Namespace) -> str:
    """The device that was asked for, or the GPU where there is one."""
    from kvarn.runtime import driver

    return options.device or ("cuda" if driver.status().usable else "host")


def run_all(
    options: argparse.Namespace, cases: Iterable[Any], lines: Callable[[Any, Any], Iterable[dict[str, Any]]],
    shown: Callable[[Lines], str],
) -> int:  # fmt: skip
    """Print the lines of every case, those of (arrays, case), and write all to the file; 0 if all are right."""
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


def measured(
    p: Any, call: Callable[[int], Any], error: Callable[[], float], tolerance: float, work: float = 0
) -> dict[str, Any]:
    """A call's record: its ``error`` in outputs of NaN, its time and the rate of ``work``; or why there is none."""
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
