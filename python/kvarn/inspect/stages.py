# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An observed run of the pipeline: the module after each pass, times, remarks, and code with source lines."""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvarn.artifact import Artifact

from . import shared
from .source_map import Line, ir_lines

_MOST_KINDS = 6  # kinds of operations listed per line
INPUT = "input"


@dataclass(frozen=True)
class Stage:
    """The module after one pass.

    Attributes
    ----------
    name, reason : str
        The pass, and the reason for its place in the pipeline.
    seconds : float
    counts : Counter of str
        Operations by name.
    text : str
    located : str
        The text with locations.
    """

    name: str
    reason: str
    seconds: float
    counts: Counter[str]
    text: str
    located: str = ""

    @functools.cached_property
    def lines(self) -> list[Line]:
        return ir_lines(self.located or self.text)


@dataclass
class Run:
    """The observations of a compilation.

    Attributes
    ----------
    stages : list of Stage
        The first is the input.
    seconds : float
        Total time, including translation to PTX.
    artifact : Artifact or None
        Its PTX has source lines.
    shared : list of shared.Block
    remarks : kvarn.lowering.remarks.Remarks
    rewrites : kvarn.lowering.rewrite_counts.Rewrites
    """

    stages: list[Stage] = field(default_factory=list)
    seconds: float = 0.0
    artifact: Artifact | None = None
    shared: list[shared.Block] = field(default_factory=list)
    remarks: Any = None
    rewrites: Any = None


def count_operations(module: Any) -> Counter[str]:
    """Operations of a module by name, including all nested ones."""
    from kvarn.lowering.rewrite import walk

    return Counter(op.name for op in walk(module))


def run_stages(source: str, target: str, settings: Any = None) -> Run:
    """Run the pipeline on kv IR with locations, and keep the module after each pass."""
    from kvarn.compilation import driver as compiler
    from kvarn.lowering import pipeline, remarks, rewrite_counts as rewrites, runner
    from kvarn.lowering.target import by_name

    context, chosen = compiler.context(), by_name(target)
    found = Run()
    with compiler.diagnosed(context):
        steps = pipeline.steps(chosen, settings)
        with rewrites.collect(), remarks.collect():
            runner.run(compiler.parse(source), steps)  # passes are imported on first use
        module = compiler.parse(source)
        found.stages.append(_stage(INPUT, "the traced kernel, or the file", 0.0, module))
        reasons = {step.name: step.reason for step in steps}
        following = dict(zip([INPUT, *(s.name for s in steps)], [s.name for s in steps], strict=False))
        watched = start = 0.0

        def observe(name: str, module: Any) -> None:
            nonlocal start, watched
            end = time.perf_counter()
            found.stages.append(_stage(name, reasons[name], end - start, module))
            if following.get(name) == shared.STAGE:
                found.shared = shared.blocks_of(module)
            start = time.perf_counter()
            watched += start - end

        begin = start = time.perf_counter()
        with remarks.collect() as found.remarks, rewrites.collect() as found.rewrites:
            found.artifact = compiler.lower(module, chosen, steps, observer=observe, lineinfo=not chosen.is_host)
        found.seconds = time.perf_counter() - begin - watched
    return found


def _stage(name: str, reason: str, seconds: float, module: Any) -> Stage:
    located = str(module.operation.get_asm(enable_debug_info=True))
    return Stage(name, reason, seconds, count_operations(module), str(module), located)


def change(before: Counter[str], after: Counter[str]) -> str:
    """The changes by kind of operation, ``"-4 kv.load, +4 vector.load"``, the largest first."""
    delta = {name: after[name] - before[name] for name in {*before, *after} if after[name] != before[name]}
    ordered = sorted(delta.items(), key=lambda item: (-abs(item[1]), item[0]))
    named = [f"{count:+d} {name}" for name, count in ordered[:_MOST_KINDS]]
    return ", ".join(named + ([f"and {len(ordered) - _MOST_KINDS} more kinds"] if len(ordered) > _MOST_KINDS else []))


def changed(stage: Stage, previous: Stage) -> str:
    """The changes of a pass by kind of operation, in words."""
    if stage.text == previous.text:
        return "nothing"
    return change(previous.counts, stage.counts) or "attributes or order only"


__all__ = ["INPUT", "Run", "Stage", "change", "changed", "count_operations", "run_stages"]
