# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where in the pipeline IR stands: after which of its passes, as far as those say that have run.

A stage is the name of the last pass that the IR has seen, as ``start_after`` of ``kv.compile`` takes it; None before
the first. IR that a pass of the pipeline is about to get stands after the step before that pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.env import OWNERSHIP
from kvarn.lowering import pipeline
from kvarn.lowering.pipeline_parser import Step

TRACE = 64  # marks of a warp: the pipeline that traces has two passes more


class Stages:
    """The stages of a target's pipeline, those of checks and traces included."""

    def __init__(self, target: str) -> None:
        self._target, self._names = target, [s.name for s in pipeline.default_steps(target, OWNERSHIP, TRACE)]
        always = pipeline.default_steps(target)
        self._unchecked = {s.name for s in pipeline.default_steps(target, trace=TRACE)}
        self._needed = {s.name for s in always if not s.optional}

    def check(self, stage: str) -> str:
        """The stage; ValueError for one that the pipeline does not have."""
        if stage not in self._names:
            raise ValueError(f"a stage of {self._target} is one of {', '.join(self._names)}, got {stage!r}")
        return stage

    def before(self, steps: Sequence[Step]) -> str | None:
        """The stage of IR that is given to some steps: before the earliest of them in the pipeline."""
        known = [self._names.index(name) for name in map(name_of, steps) if name in self._names]
        return self._names[min(known) - 1] if known and min(known) > 0 else None

    def after(self, step: Step, stage: str | None) -> str | None:
        """The stage of what a step left of IR at ``stage``.

        It is the step's, unless one that must run between the two has not: that one is still to come. What is not of
        the pipeline changes no stage.
        """
        name, begin = name_of(step), self._names.index(stage) + 1 if stage is not None else 0
        if name not in self._names[begin:]:
            return stage
        end = self._names.index(name)
        return stage if self._needed & set(self._names[begin:end]) else name

    def without_checks(self, stage: str | None) -> str | None:
        """The stage in the pipeline without checks: the last one that both have passed."""
        passed = self._names[: self._names.index(stage) + 1] if stage is not None else []
        return next((name for name in reversed(passed) if name in self._unchecked), None)


def name_of(step: Step) -> str:
    """What the pipeline calls a step, or the group of passes that it is of."""
    return step.group or step.name


__all__ = ["TRACE", "Stages", "name_of"]
