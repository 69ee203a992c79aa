# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn trace SCRIPT.py``: run a program, and write a timeline of its kernels' phases."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kvarn.files import FileError, error_line, write_output
from kvarn.timeline.recording import Timeline, tracing

from .pass_options import given_name, given_path


def table(found: Timeline, most: int = 24) -> str:
    """The phases as rows of text."""
    rows = found.phases()
    unit, per = ("instructions", 1.0) if found.unit == "instructions" else ("us", 1e3)
    out = [f"{'kernel':24} {'phase':28} {'times':>8} {'mean ' + unit:>18} {'share of a warp':>16}"]
    for kernel, label, times, mean, share in rows[:most]:
        out.append(f"{kernel[:24]:24} {label[:28]:28} {times:8d} {mean / per:18.3f} {100 * share:15.1f}%")
    if len(rows) > most:
        out.append(f"and {len(rows) - most} more")
    if found.dropped:
        out.append(f"{found.dropped} warps were not recorded: raise --warps")
    if found.overwritten:
        out.append(f"{found.overwritten} marks were overwritten by later ones: raise --marks")
    return "\n".join(out)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvarn trace",
        description="Run a Python program, and write a timeline of its kernels' phases. Phases are "
        "'with kv.trace(\"name\"):' in kernels, and the waits and copies of kernels over tiles.",
    )
    parser.add_argument("-o", "--output", type=given_path, default=Path("trace.json"), metavar="FILE",
                        help="file of trace events for https://ui.perfetto.dev (default: trace.json)")  # fmt: skip
    parser.add_argument("--svg", type=given_path, metavar="FILE", help="also draw one launch")
    parser.add_argument("--launch", type=int, metavar="N", help="the launch to draw (default: the longest)")
    parser.add_argument("--rows", type=int, default=48, metavar="N", help="warps to draw (default: 48)")
    parser.add_argument("--warps", type=int, default=4096, metavar="N", help="warps to record (default: 4096)")
    parser.add_argument("--marks", type=int, default=2048, metavar="N",
                        help="recorded marks per warp, the last ones; a power of two (default: 2048)")  # fmt: skip
    parser.add_argument(
        "--emulate", type=given_name, metavar="TARGET", help="run kernels in the emulator, for a target such as sm_90a"
    )
    parser.add_argument("script", type=given_name, metavar="SCRIPT.py", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        raise ValueError(f"the program must be a file, got {options.script}")
    with contextlib.ExitStack() as stack:
        if options.emulate:
            from kvarn.emulator import emulated

            stack.enter_context(emulated(options.emulate, races=False))
        traced = stack.enter_context(tracing(warps=options.warps, marks=options.marks))
        _run(options.script, options.arguments)
    found = traced.timeline
    found.save(options.output)
    if options.svg is not None:
        write_output(options.svg, found.svg(options.rows, options.launch))
    print(table(found))
    print(f"wrote {options.output}" + (f" and {options.svg}" if options.svg is not None else ""))
    return 0


def _run(script: str, arguments: list[str]) -> None:
    """Run a program like ``python SCRIPT ARGUMENTS``; an exit with success is no error."""
    before, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RuntimeError(f"{script} ended with {ended.code}") from None
    except Exception as error:
        raise FileError(f"{script} failed: {error_line(error, script)} (KVARN_DEBUG=1 shows more)") from error
    finally:
        sys.argv, sys.path[0] = before, path
