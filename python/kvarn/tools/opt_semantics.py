# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``--check-semantics-each`` and ``--check-semantics-of``: check that passes preserve a kernel's answer.

IR at every level of the pipeline is accepted. Its stage follows from the passes that run (``kvarn.tools.stages``), and
the remaining pipeline lowers it (``kvarn.tools.semantics``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .stages import Stages, name_of

if TYPE_CHECKING:
    from mlir import ir

    from kvarn.lowering.pipeline_parser import Step

    from .semantics import Checker


class WrongAnswer(Exception):
    """A kernel cannot be run, or a pass changed its answer; the message says which."""


@dataclass(frozen=True)
class Checks:
    """The checks of all sources.

    Attributes
    ----------
    checker : callable
        ``checker(text, module, stage)``: a Checker of a source.
    stages : Stages
    stage : callable
        ``stage(module)``: the stage of a source.
    only : tuple of str
        The passes to check, which must change the IR; if empty, every pass that changes it.
    """

    checker: Callable[[str, Any, str | None], Checker]
    stages: Stages
    stage: Callable[[Any], str | None]
    only: tuple[str, ...] = ()

    def of(self, module: ir.Module) -> Run:
        """The checks of one source before any pass; WrongAnswer if it cannot be run."""
        text = _located(module)
        try:
            stage = self.stage(module)
            checker = self.checker(text, module, stage)
        except (ValueError, RuntimeError) as error:
            raise WrongAnswer(f"the kernel cannot be run: {error}") from None
        if not self.only and not checker.is_own:
            _demand(checker.problem(text, stage), "the answer is wrong before any pass")
        return Run(self, checker, text, stage)


@dataclass
class Run:
    """The checks of one source. ``text`` and ``stage`` are those after the last whole step."""

    checks: Checks
    checker: Checker
    text: str
    stage: str | None

    def after(self, step: Step, module: ir.Module) -> None:
        """Check the IR after a step; WrongAnswer if the step changed the answer."""
        if not step.ends_group:
            return
        only, name = self.checks.only, step.name
        stage, before = self.checks.stages.after(step, self.stage), self.stage
        text, was = _located(module), self.text
        self.text, self.stage = text, stage
        if only and not {name, name_of(step)} & set(only):
            return
        if text == was:
            _demand("nothing was checked" if only else "", f"pass '{name}' left the kernel as it was")
            return
        problem = self.checker.problem(text, stage)
        if problem and only:
            # Earlier passes were not checked, and required passes lower every stage.
            too = f"the answer is wrong before pass '{name}' too: an earlier or a required pass is at fault"
            _demand(self.checker.problem(was, before), too)
        _demand(problem, f"pass '{name}' changed the answer")


def _demand(problem: str, what: str) -> None:
    if problem:
        raise WrongAnswer(f"{what}: {problem}")


def _located(module: ir.Module) -> str:
    return importlib.import_module("kvarn.compilation.driver").with_locations(module)


__all__ = ["Checks", "Run", "WrongAnswer"]
