# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m mutants [AREA | AREA/NAME ...] [--jobs N]``: plant each fault in a copy of the tree, and run its tests.

The exit status is 1 when a fault survived, when its tests fail without it too, or when one says nothing: it does not
import, or its tests do not end.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import queue
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .copies import Copy
from .faults import AREAS, OF_TORCH, Fault, faults
from .picked import named


def without_faults(copy: Copy, chosen: list[Fault]) -> dict[str, str]:
    """Why names of tests say nothing: tests that fail in the sources as they are, or that do not run."""
    names = tuple(dict.fromkeys(name for fault in chosen for name in fault.tests))
    by_name: dict[str, set[str]] = {name: set() for name in names}
    for ran in copy.run(names, all_of_them=True, seconds=3600):
        for name in named(ran.test, list(names)):
            by_name[name].add(ran.outcome)
    bad = {name: found - {"passed", "skipped"} for name, found in by_name.items()}
    return {
        name: "fails without the fault too" if bad[name] else "does not run in make check"
        for name, found in by_name.items()
        if bad[name] or "passed" not in found
    }


# Times of files with faults: Python keeps the code of a file by its size and the second in which it was written.
_SECONDS = itertools.count(1_000_000_000)


def with_fault(copy: Copy, fault: Fault) -> tuple[str, str]:
    """(caught, SURVIVED or BROKEN, by which test or why)."""
    path, text = fault.planted()
    file = copy.root / path
    whole, begun = file.read_bytes(), file.stat().st_mtime
    try:
        file.write_text(text)
        os.utime(file, (next(_SECONDS),) * 2)
        found = copy.run(fault.tests)
    except (TimeoutError, ValueError) as error:
        return "BROKEN", str(error)
    finally:
        file.write_bytes(whole)
        os.utime(file, (begun,) * 2)
    for ran in found:
        if ran.outcome == "failed":
            return "caught", f"by {ran.test}"
        if ran.outcome == "broken":
            return "BROKEN", f"{ran.test}: {ran.error}"
    return "SURVIVED", f"{sum(ran.outcome == 'passed' for ran in found)} tests pass"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description="Plant faults, and see that tests fail.")
    parser.add_argument("name", nargs="*", help=f"areas ({', '.join(AREAS)}) or faults (area/name); default: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many copies are tested at a time; default: 2")
    options = parser.parse_args()
    chosen = [f for f in faults() if not options.name or {f.name, f.name.partition("/")[0]} & set(options.name)]
    if not chosen:
        parser.error("no fault has such a name")
    if importlib.util.find_spec("transformers") is None:
        everything, chosen = chosen, [f for f in chosen if not f.name.startswith(f"{OF_TORCH}/")]
        if len(chosen) < len(everything):
            print(f"{len(everything) - len(chosen)} faults of {OF_TORCH} are left out: try them with VENV=.venv-torch")
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kvarn-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for i in range(options.jobs):
            (Path(folder) / str(i)).mkdir()
            copies.put(Copy(Path(folder) / str(i)))

        def in_a_copy(what, *arguments):
            copy = copies.get()
            try:
                return what(copy, *arguments)
            finally:
                copies.put(copy)

        def tried(fault: Fault) -> tuple[Fault, str, str]:
            start = time.monotonic()
            word, why = in_a_copy(with_fault, fault)
            print(f"{word:8} {fault.name:40} {time.monotonic() - start:4.0f} s  {why}", flush=True)
            return fault, word, why

        silent = pool.submit(in_a_copy, without_faults, chosen)
        results = list(pool.map(tried, chosen))
        idle = silent.result()
    for name, why in idle.items():
        print(f"{name} {why}")
    good = sum(word == "caught" and not idle.keys() & set(fault.tests) for fault, word, _ in results)
    print(f"{good} of {len(chosen)} planted faults are caught, in {time.monotonic() - started:.0f} s")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
