# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn explain``: what happens to a kernel, pass by pass, and what comes out.

A line a pass: its time, how many operations it left, and which kinds came and went. Then the parameters of the
compiled function, the mix of memory and matrix instructions in the PTX, and the assembler's figures where an
assembler is installed. ``--pass NAME`` shows the IR after one pass, ``--diff NAME`` what it changed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.artifact import Artifact

from .cli import UsageError, add_kernel_options, complete_specs, find_kernel
from .pass_options import passes_of

_MOST_KINDS = 6  # kinds of operations that a line names
# What moves data or does matrix work; the rest of the PTX is counted as one.
_TELLING = re.compile(
    r"\b((?:ld|st)\.(?:global|shared|local|param)\S*|cp\.async\S*|ldmatrix\S*|stmatrix\S*|mma\.sync\S*|wgmma\.\S+|"
    r"atom\.\S+|red\.\S+|bar\.sync|barrier\S*|mbarrier\S*|shfl\S*|call\S*)"
)


@dataclass(frozen=True)
class Stage:
    """The module after one pass."""

    name: str
    reason: str
    seconds: float
    counts: Counter[str]
    text: str


def count_operations(module: Any) -> Counter[str]:
    """Operations of a module by name, everything nested in it counted."""
    found: Counter[str] = Counter()

    def visit(operation: Any) -> None:
        found[operation.name] += 1
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    visit(module.operation)
    return found


def run_stages(source: str, target: str, settings: Any = None) -> list[Stage]:
    """Run the pipeline on kv IR, keeping what each pass leaves; the first stage is the input."""
    from kvarn import compiler
    from kvarn.lowering import pipeline, remarks, rewrites, runner

    context = compiler.context()
    with compiler.diagnosed(context):
        steps = pipeline.steps(target, settings)
        with rewrites.collect(), remarks.collect():
            runner.run(compiler.parse(source), steps)  # passes are imported on first use
        module = compiler.parse(source)
        stages = [Stage("input", "the traced kernel, or the file", 0.0, count_operations(module), str(module))]
        reasons = {step.name: step.reason for step in steps}
        start = time.perf_counter()

        def observe(name: str, module: Any) -> None:
            nonlocal start
            seconds = time.perf_counter() - start
            stages.append(Stage(name, reasons[name], seconds, count_operations(module), str(module)))
            start = time.perf_counter()

        runner.run(module, steps, observer=observe)
    return stages


def change(before: Counter[str], after: Counter[str]) -> str:
    """Which kinds of operations came and went: ``"-4 kv.load, +4 vector.load"``; the largest changes first."""
    delta = {name: after[name] - before[name] for name in {*before, *after} if after[name] != before[name]}
    ordered = sorted(delta.items(), key=lambda item: (-abs(item[1]), item[0]))
    named = [f"{count:+d} {name}" for name, count in ordered[:_MOST_KINDS]]
    return ", ".join(named + ([f"and {len(ordered) - _MOST_KINDS} kinds more"] if len(ordered) > _MOST_KINDS else []))


def describe_stages(stages: Sequence[Stage]) -> Iterator[str]:
    """The table of passes."""
    width = max(len(s.name) for s in stages)
    yield f"{'pass':{width}}  {'ms':>6}  {'ops':>5}  what changed"
    previous = stages[0]
    for stage in stages:
        if stage is previous:
            text = ""
        elif stage.text == previous.text:
            text = "nothing"
        else:
            text = change(previous.counts, stage.counts) or "attributes or order only"
        yield f"{stage.name:{width}}  {stage.seconds * 1e3:6.1f}  {stage.counts.total():5d}  {text}".rstrip()
        previous = stage
    yield f"{'together':{width}}  {sum(s.seconds for s in stages) * 1e3:6.1f}"


def describe_patterns(counted: Any) -> Iterator[str]:
    """How often each rule of each pass was applied."""
    width = max((len(name) for name, _ in counted.counts), default=4)
    yield f"{'pass':{width}}  {'times':>6}  rule"
    for (name, rule), times in counted.counts.items():
        yield f"{name:{width}}  {times:6}  {rule}"


def assembler_remarks(kernel: Any) -> Iterator[tuple[str, str]]:
    """What the assembler has to say, as kind and message."""
    from kvarn.runtime import assemble

    try:
        made = kernel.assembled
    except assemble.MissingToolError:
        return
    except assemble.AssemblyError as error:
        yield "missed", str(error)
        return
    for name, figures in made.kernels.items():
        spilled = figures.spill_stores + figures.spill_loads
        if spilled:
            yield "missed", f"{name} spills {spilled} bytes: {figures.registers} registers are not enough"
        else:
            yield "analysis", f"{name} has {figures.registers} registers, no spills"
    yield from (("analysis", line.strip()) for line in made.log.splitlines() if "warning" in line.lower())


def describe_abi(artifact: Artifact) -> Iterator[str]:
    """The compiled functions and their parameters."""
    for entry in artifact.entries:
        facts = [f"block {'x'.join(map(str, entry.block))}" if entry.block else "any block"]
        if entry.shared_bytes:
            facts.append(f"{entry.shared_bytes} bytes of dynamic shared memory")
        if entry.cluster:
            facts.append(f"clusters of {'x'.join(map(str, entry.cluster))}")
        if entry.attributes.get("programmatic"):
            facts.append("programmatic launch")
        yield f"{entry.name}: {', '.join(facts)}"
        for i, arg in enumerate(entry.args):
            fields = ", ".join(f"{p.field}: {p.type}" for p in entry.params if p.arg == i)
            notes = [arg.kind] + (["written"] if arg.written else [])
            notes += [f"{arg.alignment}-byte aligned"] if arg.alignment > 1 else []
            yield f"  {arg.name} ({', '.join(notes)}): {fields or 'not used'}"
    for number, step in enumerate(artifact.steps, 1):
        yield f"step {number}: {step.entry} over grid {_written(step.grid, artifact)}"
    for workspace in artifact.workspaces:
        zeroed = ", zeroed" if workspace.zeroed else ""
        yield f"scratch {workspace.name}: {_written(workspace.bytes, artifact)} bytes{zeroed}"


def _written(expression: Any, artifact: Artifact) -> str:
    """An expression of a step as people write it."""
    signs = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
             "ge": ">=", "gt": ">", "and": "and"}  # fmt: skip
    if not isinstance(expression, tuple):
        return str(expression)
    if not isinstance(expression[0], str):
        return f"({', '.join(_written(e, artifact) for e in expression)})"
    op, *operands = expression
    if op == "arg":
        return f"{artifact.args[operands[0]].name}.{operands[1]}"
    if op == "device":
        return str(operands[0])
    parts = [_written(o, artifact) for o in operands]
    if op in signs:
        return f"({parts[0]} {signs[op]} {parts[1]})"
    return f"{op}({', '.join(parts)})"


def instruction_mix(ptx: str) -> Counter[str]:
    """Telling instructions of PTX with how often they stand there, and ``"other"`` for the rest."""
    found: Counter[str] = Counter()
    for line in ptx.splitlines():
        line = line.partition("//")[0].strip()
        if not line.endswith(";") or line.startswith("."):
            continue
        telling = _TELLING.search(line)
        found[telling[1].rstrip(";") if telling else "other"] += 1
    return found


def describe_code(kernel: Any) -> Iterator[str]:
    """Sizes, the instruction mix and the assembler's figures."""
    if kernel.target == "host":
        yield "target host: the CPU's JIT compiles it on the first run"
        return
    ptx = kernel.artifact.code["ptx"]
    mix = instruction_mix(ptx)
    yield f"PTX ISA {kernel.artifact.isa} for {kernel.target}: {mix.total()} instructions"
    for name, count in sorted(mix.items(), key=lambda item: (item[0] == "other", -item[1], item[0])):
        yield f"  {count:5d}  {name}"
    from kvarn.runtime import assemble

    try:
        made = kernel.assembled
    except assemble.MissingToolError as e:
        yield f"registers and spills: {e}"
        return
    for name, figures in made.kernels.items():
        yield (
            f"{name}: {figures.registers} registers, {figures.spill_stores} + {figures.spill_loads} bytes spilled "
            f"and reloaded, {figures.shared_bytes} bytes of static shared memory ({made.tool})"
        )


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
    options = parser.parse_args(argv)
    from kvarn import compiler
    from kvarn.lowering import remarks, rewrites

    if options.kernel.endswith(".mlir"):
        path = Path(options.kernel)
        if not path.is_file():
            raise UsageError(f"there is no file {options.kernel!r}")
        what, specs = path.read_text(), []
    else:
        what = find_kernel(options.kernel)
        specs = complete_specs(what, options.spec, options.static)
    kernel = compiler.compile(what, *specs, target=options.target, passes=passes_of(options), disable=options.disable)
    source = compiler.with_places(compiler.as_module(what, specs, compiler.context()))
    with remarks.collect() as said, rewrites.collect() as counted:
        stages = run_stages(source, kernel.target, kernel.settings)
    if options.patterns:
        print("\n".join(describe_patterns(counted)))
        return 0
    if options.remarks_filter is not None or options.remarks is not None:
        if kernel.target != "host":
            for kind, message in assembler_remarks(kernel):
                said.add(remarks.Remark("ptxas", kind, "ptx", message))
        found = said.matching(options.remarks_filter or "")
        print(remarks.written(found, options.remarks or "text"), end="")
        return 0
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
    print(f"{kernel.name} for {kernel.target}\n")
    for section in (describe_stages(stages), describe_abi(kernel.artifact), describe_code(kernel)):
        print("\n".join(section) + "\n")
    return 0
