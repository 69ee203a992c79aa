# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn explain``: what happens to a kernel, pass by pass, and what comes out.

A line a pass: its time, how many operations it left, and which kinds came and went. Then the parameters of the
compiled function, the mix of memory and matrix instructions in the PTX, and the assembler's figures where an
assembler is installed. ``--pass NAME`` shows the IR after one pass, ``--diff NAME`` what it changed, ``--html FILE``
writes everything as a page (``kvarn.tools.passport``).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cli import UsageError, add_kernel_options, compile_named
from .input_options import add_input_options, values_of

if TYPE_CHECKING:
    from .passport import Passport


def passport_of(options: argparse.Namespace) -> Passport:
    """The passport of what the options name."""
    kernel = compile_named(options)
    return kernel.explain(report=emulated(kernel, options) if options.emulate else None, threads=threads_of(options))


def threads_of(options: argparse.Namespace) -> int | None:
    """Threads of the block that was asked for."""
    if options.block is None:
        return None
    x, y, z = options.block
    return x * y * z


def emulated(kernel: Any, options: argparse.Namespace) -> Any:
    """The report of a run on random arguments."""
    from kvarn import compiler
    from kvarn.emulator.report import Report

    from . import random_inputs, semantics

    if kernel.target == "host":
        raise UsageError("--emulate runs GPU code: give a GPU target, such as --target sm_90a")
    shapes = random_inputs.buffer_shapes(compiler.parse(kernel.asm["kv"]))
    inputs = random_inputs.InputOptions(**values_of(options))
    arguments = random_inputs.random_arguments(kernel.artifact.args, shapes, inputs)
    report = Report(kernel.target)
    launch = semantics.Launch(options.grid, options.block)
    semantics.run_artifact(kernel.artifact, list(arguments.values()), launch, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvarn explain", description="Report on a kernel, pass by pass.")
    add_kernel_options(parser)
    parser.add_argument("--pass", dest="show", metavar="PASS", help="print the IR after a pass, and nothing else")
    parser.add_argument(
        "--remarks-filter",
        metavar="RE",
        help="print the remarks of the passes that match (ptxas too), and nothing else",
    )
    parser.add_argument(
        "--remarks", choices=("text", "yaml", "json"), help="the form of remarks; without a filter, of all passes"
    )  # fmt: skip
    parser.add_argument(
        "--patterns", action="store_true", help="print how often each rule of each pass was applied, and nothing else"
    )
    parser.add_argument("--diff", metavar="PASS", help="print what a pass changed in the IR, and nothing else")
    parser.add_argument("--html", metavar="FILE", help="write a page with everything, which needs nothing else")
    parser.add_argument(
        "--emulate", action="store_true", help="run the kernel in the emulator on random arguments, and count"
    )
    add_input_options(parser.add_argument)
    options = parser.parse_args(argv)
    from kvarn.lowering import remarks

    from .passport import describe

    passport = passport_of(options)
    if options.html:
        print(f"wrote {passport.save(options.html)}")
        return 0
    if options.patterns:
        print("\n".join(describe.describe_patterns(passport.run.rewrites)))
        return 0
    if options.remarks_filter is not None or options.remarks is not None:
        found = remarks.filtered(passport.remarks, options.remarks_filter or "")
        print(remarks.written(found, options.remarks or "text"), end="")
        return 0
    stages = passport.stages
    names = [s.name for s in stages]
    for wanted in filter(None, (options.show, options.diff)):
        if wanted not in names:
            raise UsageError(f"pass must be one of {', '.join(names)}, got {wanted!r}")
    if options.show:
        print(stages[names.index(options.show)].text)
        return 0
    if options.diff:
        i = names.index(options.diff)
        before, after = stages[i - 1].text if i else "", stages[i].text
        sys.stdout.writelines(
            difflib.unified_diff(
                before.splitlines(True), after.splitlines(True), f"before {options.diff}", f"after {options.diff}"
            )
        )
        return 0
    print(f"{passport}\n")
    return 0
