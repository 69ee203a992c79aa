# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stage of IR in the pipeline, inferred from the passes that have run.

A stage is the name of the last pass of the pipeline that has run on the IR, as in ``start_after`` of ``kv.compile``;
None before the first pass. Input of a pass has the stage of the step before that pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.env import OWNERSHIP
from kvarn.lowering import pipeline, registry
from kvarn.lowering.pipeline_parser import Step

TRACE = 64  # marks per warp: the tracing pipeline has two more passes


class Stages:
    """The stages of a target's pipeline, including those of checks and traces."""

    def __init__(self, target: str) -> None:
        self._target, self._names = target, [s.name for s in pipeline.default_steps(target, OWNERSHIP, TRACE)]
        always = pipeline.default_steps(target)
        self._unchecked = {s.name for s in pipeline.default_steps(target, trace=TRACE)}
        self._needed = {s.name for s in always if not s.optional}

    def check(self, stage: str) -> str:
        """The stage, by its name now; ValueError if the pipeline does not have it."""
        stage = registry.current(stage)
        if stage not in self._names:
            raise ValueError(f"a stage of {self._target} is one of {', '.join(self._names)}, got {stage!r}")
        return stage

    def before(self, steps: Sequence[Step]) -> str | None:
        """The stage of the input of some steps: before the earliest of them in the pipeline."""
        known = [self._names.index(name) for name in map(name_of, steps) if name in self._names]
        return self._names[min(known) - 1] if known and min(known) > 0 else None

    def after(self, step: Step, stage: str | None) -> str | None:
        """The stage after a step on IR at ``stage``.

        It is the step's, unless a required step between the two has not run. Steps outside of the pipeline do not
        change the stage.
        """
        name, begin = name_of(step), self._names.index(stage) + 1 if stage is not None else 0
        if name not in self._names[begin:]:
            return stage
        end = self._names.index(name)
        return stage if self._needed & set(self._names[begin:end]) else name

    def without_checks(self, stage: str | None) -> str | None:
        """The stage in the pipeline without checks: the last common pass."""
        passed = self._names[: self._names.index(stage) + 1] if stage is not None else []
        return next((name for name in reversed(passed) if name in self._unchecked), None)


def name_of(step: Step) -> str:
    """The pipeline's name of a step, or of its group."""
    return step.group or step.name


__all__ = ["TRACE", "Stages", "name_of"]
