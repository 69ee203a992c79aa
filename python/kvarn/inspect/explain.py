# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn explain``: the compilation of a kernel, pass by pass, and its result.

It prints one line per pass (time, number of operations, changes by kind), the parameters of the compiled function, the
instruction mix of the PTX, and the assembler's statistics if an assembler is installed. ``--pass NAME`` prints the IR
after a pass, ``--diff NAME`` its changes, ``--html FILE`` writes the whole report as a page (``kvarn.inspect``).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.tools.cli import UsageError, add_kernel_options, compile_named
from kvarn.tools.input_options import add_input_options, values_of
from kvarn.tools.pass_options import given_name

if TYPE_CHECKING:
    from . import KernelReport


def report_of(options: argparse.Namespace) -> KernelReport:
    """The report of the kernel that the options select."""
    kernel = compile_named(options)
    return kernel.explain(report=emulated(kernel, options) if options.emulate else None, threads=threads_of(options))


def threads_of(options: argparse.Namespace) -> int | None:
    """Threads per block, if the options give them."""
    if options.block is None:
        return None
    x, y, z = options.block
    return x * y * z


def emulated(kernel: Any, options: argparse.Namespace) -> Any:
    """The emulator's report of a run on random arguments."""
    from kvarn.compilation import driver as compiler
    from kvarn.emulator.report import Report
    from kvarn.tools import random_inputs, semantics

    if kernel.target == "host":
        raise UsageError("--emulate runs GPU code: give a GPU target, such as --target sm_90a")
    shapes = random_inputs.buffer_shapes(compiler.parse(kernel.asm["kv"]))
    inputs = random_inputs.InputOptions(**values_of(options))
    arguments = random_inputs.random_arguments(kernel.artifact.args, shapes, inputs)
    report = Report(kernel.target)
    launch = semantics.Launch(options.grid, options.block)
    semantics.run_artifact(kernel.artifact, list(arguments.values()), launch, report)
    return report


_VALUE = re.compile(r"%[\w$.-]+")
_DEFINED = re.compile(r"(%[\w$.-]+)(?::\d+)?(?=(?:, %[\w$.-]+(?::\d+)?)* = )")


def difference(before: str, after: str, name: str, context: int = 3) -> Iterator[str]:
    """The changes of a pass as a unified diff. A renumbered value is not a change."""
    old, new = before.splitlines(True), after.splitlines(True)
    masked = [[_VALUE.sub("%", line) for line in lines] for lines in (old, new)]
    matcher = difflib.SequenceMatcher(None, masked[0], masked[1])
    numbers: dict[str, str] = {}
    changed: list[tuple[int, int, int, int]] = []  # ranges of old and new lines
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind != "equal":
            changed.append((i1, i2, j1, j2))
            continue
        changed += [
            (i, i + 1, j, j + 1)
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True)
            if not _same(old[i], new[j], numbers)
        ]
    if changed:
        yield from (f"--- before {name}\n", f"+++ after {name}\n")
    for hunk in _hunks(changed, context):
        (i1, _, j1, _), (_, i2, _, j2) = hunk[0], hunk[-1]
        lead = min(context, i1, j1)
        end = min(i2 + context, len(old)), min(j2 + context, len(new))
        yield f"@@ -{i1 - lead + 1},{end[0] - i1 + lead} +{j1 - lead + 1},{end[1] - j1 + lead} @@\n"
        at = j1 - lead
        for i1, i2, j1, j2 in hunk:
            yield from (f" {line}" for line in new[at:j1])
            yield from (f"-{line}" for line in old[i1:i2])
            yield from (f"+{line}" for line in new[j1:j2])
            at = j2
        yield from (f" {line}" for line in new[at : end[1]])


def _same(old: str, new: str, numbers: dict[str, str]) -> bool:
    """Whether two lines that are equal except for numbers name the same values; records the new numbers."""
    pairs = list(zip(_VALUE.findall(old), _VALUE.findall(new), strict=True))
    defined = {m[1] for m in _DEFINED.finditer(old)}
    if old.lstrip().startswith(("^", "gpu.func", "func.func", "llvm.func")):
        defined.update(x for x, _ in pairs)
    same = all(numbers.get(x, x if x == y else "") == y for x, y in pairs if x not in defined)
    numbers.update(pairs)
    return same


def _hunks(changed: list[tuple[int, int, int, int]], context: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Groups of changes whose contexts touch."""
    hunk: list[tuple[int, int, int, int]] = []
    for change in changed:
        if hunk and change[0] - hunk[-1][1] > 2 * context:
            yield hunk
            hunk = []
        hunk.append(change)
    if hunk:
        yield hunk


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvarn explain", description="Report how a kernel is compiled, pass by pass.")
    add_kernel_options(parser)
    parser.add_argument("--pass", dest="show", type=given_name, metavar="PASS", help="print only the IR after a pass")
    parser.add_argument(
        "--remarks-filter", metavar="RE", help="print only the remarks of matching passes (also of ptxas)"
    )
    parser.add_argument(
        "--remarks", choices=("text", "yaml", "json"), help="format of remarks; without a filter, of all passes"
    )
    parser.add_argument(
        "--patterns", action="store_true", help="print only how often each rule of each pass was applied"
    )
    parser.add_argument("--diff", type=given_name, metavar="PASS", help="print only the changes of a pass to the IR")
    parser.add_argument(
        "--html", type=given_name, metavar="FILE", help="write the whole report as a self-contained page"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="also run the kernel in the emulator on random arguments"
    )
    add_input_options(parser.add_argument)
    options = parser.parse_args(argv)
    if not options.emulate:
        given = {"--grid": options.grid, "--lengths": options.lengths, "--new": options.new, "--seed": options.seed}
        given |= {} if options.op else {"--arg": options.arg}
        names = [name for name, value in given.items() if value]
        if names:
            raise UsageError(f"{', '.join(names)} must be used with --emulate")
    from kvarn.lowering import remarks

    from . import describe

    report = report_of(options)
    if options.html:
        print(f"wrote {report.save(options.html)}")
        return 0
    if options.patterns:
        print("\n".join(describe.describe_patterns(report.run.rewrites)))
        return 0
    if options.remarks_filter is not None or options.remarks is not None:
        found = remarks.filtered(report.remarks, options.remarks_filter or "")
        print(remarks.written(found, options.remarks or "text"), end="")
        return 0
    stages = report.stages
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
        sys.stdout.writelines(difference(before, after, options.diff))
        return 0
    print(f"{report}\n")
    return 0
