# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel report as text: one line per pass, the parameters, the instruction mix, the assembler's statistics."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.artifact import Artifact

from .stages import Stage, changed

if TYPE_CHECKING:
    from .facts import KernelReport

# Data movement, matrix products and waits are counted by full name, other instructions by category.
_TELLING = re.compile(
    r"(?:ld|st)\.|ldu\.|cp\.|ldmatrix|stmatrix|movmatrix|mma\.|wgmma\.|tcgen05\.|atom\.|red\.|bar\.|barrier|mbarrier|fence|membar|"
    r"shfl|vote|redux|call|setmaxnreg|griddepcontrol|prefetch|nanosleep|trap|elect"
)
_KINDS = (
    ("exponentials, roots and quotients", re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div\.\S*f\d\d)")),
    ("comparisons and selections", re.compile(r"(setp|selp|set|slct|min|max|testp)\b")),
    ("conversions and moves", re.compile(r"(cvt|cvta|mov|prmt|isspacep|mapa)\b")),
    ("branches", re.compile(r"(bra|brx|ret|exit)\b")),
    ("arithmetic of floats", re.compile(r"\w+\.(?:\S*\.)?(f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\b")),
    ("arithmetic of integers and bits", re.compile(r"\w+\.(?:\S*\.)?(u|s|b|pred)\d*\b")),
)
_WIDEST = 240  # characters per line
LINE, INDENT = 160, 6  # characters of a line, and of space before what a line continues
_COMMENT, _BRACES = re.compile(r"//.*"), re.compile(r"[{}]")
_OPCODE = re.compile(r"(?:[$\w]+:\s*)*(?:@!?\S+\s+)?([a-z][\w.:]*)")


def described(report: KernelReport) -> Iterator[str]:
    """The whole report, in lines of at most 160 characters."""
    for line in _described(report):
        for part in line.splitlines() or [""]:
            yield from textwrap.wrap(part, LINE, subsequent_indent=" " * INDENT) or [""]


def _described(report: KernelReport) -> Iterator[str]:
    yield f"{report.kernel.name} for {report.kernel.target}"
    if report.stages:
        yield ""
        yield from describe_stages(report.stages)
    yield ""
    yield from map(_cut, describe_abi(report.kernel.artifact))
    yield ""
    yield from describe_code(report)
    if report.report is not None:
        yield ""
        yield str(report.report)


def _cut(line: str) -> str:
    """Truncate a long line: sizes of scratch memory may be formulas of a thousand characters."""
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 1]}… ({len(line):,} characters, whole with --html)"


def describe_stages(stages: Sequence[Stage]) -> Iterator[str]:
    """The table of passes."""
    width = max(len(s.name) for s in stages)
    yield f"{'pass':{width}}  {'ms':>6}  {'ops':>5}  what changed"
    previous = stages[0]
    for stage in stages:
        text = "" if stage is previous else changed(stage, previous)
        yield f"{stage.name:{width}}  {stage.seconds * 1e3:6.1f}  {stage.counts.total():5d}  {text}".rstrip()
        previous = stage
    yield f"{'together':{width}}  {sum(s.seconds for s in stages) * 1e3:6.1f}"


def describe_patterns(counted: Any) -> Iterator[str]:
    """The number of applications of each rule of each pass."""
    width = max((len(name) for name, _ in counted.counts), default=4)
    yield f"{'pass':{width}}  {'times':>6}  rule"
    for (name, rule), times in counted.counts.items():
        yield f"{name:{width}}  {times:6}  {rule}"


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
        yield f"step {number}: {step.entry} over grid {written(step.grid, artifact)}"
    for workspace in artifact.workspaces:
        zeroed = ", zeroed" if workspace.zeroed else ""
        yield f"scratch {workspace.name}: {written(workspace.bytes, artifact)} bytes{zeroed}"


def written(expression: Any, artifact: Artifact) -> str:
    """An expression of a step in infix notation."""
    signs = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
             "ge": ">=", "gt": ">", "and": "and"}  # fmt: skip
    if not isinstance(expression, tuple):
        return str(expression)
    if not isinstance(expression[0], str):
        return f"({', '.join(written(e, artifact) for e in expression)})"
    op, *operands = expression
    if op == "arg":
        return f"{artifact.args[operands[0]].name}.{operands[1]}"
    if op == "device":
        return str(operands[0])
    parts = [written(o, artifact) for o in operands]
    if op in signs:
        return f"({parts[0]} {signs[op]} {parts[1]})"
    return f"{op}({', '.join(parts)})"


def instruction_mix(ptx: str) -> Counter[str]:
    """Counts of PTX instructions: the most informative by name, others by category; ``"other"`` is the remainder."""
    text = "\n".join(line for line in _COMMENT.sub("", ptx).splitlines() if not line.lstrip().startswith("."))
    found: Counter[str] = Counter()
    for statement in _BRACES.sub(" ", text).split(";")[:-1]:
        opcode = _OPCODE.match(statement.strip())
        if opcode is not None:
            name = opcode[1]
            kind = next((kind for kind, pattern in _KINDS if pattern.match(name)), "other")
            found[name if _TELLING.match(name) else kind] += 1
    return found


def sorted_mix(mix: Mapping[str, int]) -> list[tuple[str, int]]:
    """Instructions with their counts, the most frequent first, ``"other"`` last."""
    return sorted(mix.items(), key=lambda item: (item[0] == "other", -item[1], item[0]))


def describe_code(report: KernelReport) -> Iterator[str]:
    """Sizes, the instruction mix and the assembler's statistics."""
    artifact = report.kernel.artifact
    if artifact.target == "host":
        yield "target host: the CPU's JIT compiles it on the first run"
        return
    mix = instruction_mix(str(artifact.code["ptx"]))
    yield f"PTX ISA {artifact.isa} for {artifact.target}: {mix.total()} instructions"
    for name, count in sorted_mix(mix):
        yield f"  {count:5d}  {name}"
    if report.no_figures:
        yield f"registers and spills: {report.no_figures}"
        return
    for name, figures in report.assembled.kernels.items():
        yield (
            f"{name}: {figures.registers} registers, {figures.spill_stores} + {figures.spill_loads} bytes spilled "
            f"and reloaded, {figures.shared_bytes} bytes of static shared memory ({report.assembled.tool})"
        )


__all__ = [
    "describe_abi", "describe_code", "describe_patterns", "describe_stages", "described", "instruction_mix",
    "sorted_mix", "written",
]  # fmt: skip
