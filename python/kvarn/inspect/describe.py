# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passport of a kernel as text: a line a pass, the parameters, the mix of instructions, the assembler's figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.artifact import Artifact

from .stages import Stage, changed

if TYPE_CHECKING:
    from .facts import Passport

# What moves data or does matrix work; the rest of the PTX is counted as one.
_TELLING = re.compile(
    r"\b((?:ld|st)\.(?:global|shared|local|param)\S*|cp\.async\S*|ldmatrix\S*|stmatrix\S*|mma\.sync\S*|wgmma\.\S+|"
    r"atom\.\S+|red\.\S+|bar\.sync|barrier\S*|mbarrier\S*|shfl\S*|call\S*)"
)


def described(passport: Passport) -> Iterator[str]:
    """The whole report, by lines."""
    yield f"{passport.kernel.name} for {passport.kernel.target}"
    if passport.stages:
        yield ""
        yield from describe_stages(passport.stages)
    yield ""
    yield from describe_abi(passport.kernel.artifact)
    yield ""
    yield from describe_code(passport)
    if passport.report is not None:
        yield ""
        yield str(passport.report)


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
    """How often each rule of each pass was applied."""
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
    """An expression of a step as people write it."""
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
    """Telling instructions of PTX with how often they stand there, and ``"other"`` for the rest."""
    found: Counter[str] = Counter()
    for line in ptx.splitlines():
        line = line.partition("//")[0].strip()
        if not line.endswith(";") or line.startswith("."):
            continue
        telling = _TELLING.search(line)
        found[telling[1].rstrip(";") if telling else "other"] += 1
    return found


def sorted_mix(mix: Mapping[str, int]) -> list[tuple[str, int]]:
    """Instructions with their counts, the most frequent first, ``"other"`` last."""
    return sorted(mix.items(), key=lambda item: (item[0] == "other", -item[1], item[0]))


def describe_code(passport: Passport) -> Iterator[str]:
    """Sizes, the instruction mix and the assembler's figures."""
    artifact = passport.kernel.artifact
    if artifact.target == "host":
        yield "target host: the CPU's JIT compiles it on the first run"
        return
    mix = instruction_mix(str(artifact.code["ptx"]))
    yield f"PTX ISA {artifact.isa} for {artifact.target}: {mix.total()} instructions"
    for name, count in sorted_mix(mix):
        yield f"  {count:5d}  {name}"
    if passport.no_figures:
        yield f"registers and spills: {passport.no_figures}"
        return
    for name, figures in passport.assembled.kernels.items():
        yield (
            f"{name}: {figures.registers} registers, {figures.spill_stores} + {figures.spill_loads} bytes spilled "
            f"and reloaded, {figures.shared_bytes} bytes of static shared memory ({passport.assembled.tool})"
        )


__all__ = [
    "describe_abi", "describe_code", "describe_patterns", "describe_stages", "described", "instruction_mix",
    "sorted_mix", "written",
]  # fmt: skip
