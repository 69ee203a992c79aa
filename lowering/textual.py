# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Textual pipelines in which kv passes and upstream passes mix, and how they are run.

MLIR's own pipeline parser does not know Python passes, so the text is split into steps at its top level: each
is one kv pass, one upstream pass (or pipeline), or one upstream pass inside the anchors that it is nested in.
``gpu.module(a,b),c`` is three steps. Every step runs in a ``PassManager`` of its own on the whole module, which
is what lets a driver look at the module between any two passes.

    steps = parse("builtin.module(verify-kv,lower-kv-access{target=sm_90a},cse)")
    for step in steps:
        run_step(step, module)

Everything that MLIR would abort or raise on is checked here first and raised as :class:`PipelineError`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlir import ir
from mlir.passmanager import PassManager

import kvarn.lowering as registry

from .pass_base import NoOptions, Pass, PassFailure

ANCHOR = "builtin.module"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_RESTRICTED = re.compile(r"restricted to '([^']+)' on a PassManager intended to run on")


class PipelineError(ValueError):
    """A pipeline that cannot be parsed: what is wrong, and where."""


class PassError(Exception):
    """A pass failed. Its diagnostics have been emitted; ``step`` is where."""

    def __init__(self, step: Step, message: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline.

    Attributes
    ----------
    name : str
        The pass's name on a command line.
    text : str
        The step as a pipeline writes it, every option spelled out.
    kv : Pass or None
        The kv pass; None for an upstream one.
    options : object
        Options of the kv pass.
    group : str or None
        The line of the default pipeline that the step is a part of.
    ends_group : bool
        Whether it is the last of its group.
    """

    name: str
    text: str
    kv: Pass | None = None
    options: Any = None
    group: str | None = None
    ends_group: bool = True

    @property
    def title(self) -> str:
        """The class-like name of a kv pass, as banners write it: LowerKvAccess."""
        return "".join(word.capitalize() for word in self.name.split("-"))


class PassHandle(NoOptions):
    """What a pass of a user's file gets as its second argument: a way to fail."""

    def __init__(self) -> None:
        object.__setattr__(self, "failed", False)

    failed: bool

    def signal_pass_failure(self) -> None:
        """Mark the pass as failed; it stops the pipeline once the pass returns."""
        object.__setattr__(self, "failed", True)


# --- parsing ---------------------------------------------------------------------------------------


@dataclass
class _Element:
    """``name{options}`` or ``name(inner)``."""

    name: str
    options: str
    inner: list[_Element] | None


def parse(pipeline: str) -> list[Step]:
    """The steps of a pipeline, with or without the ``builtin.module(...)`` around it.

    Needs a current context. Raises :class:`PipelineError`.
    """
    reader = _Reader(pipeline)
    elements = reader.elements()
    if reader.position != len(pipeline):
        raise reader.error("expected ',' or the end of the pipeline")
    if len(elements) == 1 and elements[0].inner is not None and elements[0].name in (ANCHOR, "any"):
        elements = elements[0].inner
    return [step for element in elements for step in _steps(element, ())]


def flag(name: str, options: str = "") -> list[Step]:
    """The step of a command-line flag ``--name=options``: a pass that runs on another op is nested for the user."""
    step_options = options.strip()
    if step_options.startswith("{") and step_options.endswith("}"):
        step_options = step_options[1:-1]
    return _steps(_Element(name, step_options, None), (), nest=True)


def text(steps: Sequence[Step]) -> str:
    """The pipeline of some steps, every option spelled out."""
    return f"{ANCHOR}({','.join(step.text for step in steps)})"


class _Reader:
    """Splits a pipeline's text; knows brackets, quotes and nothing of passes."""

    def __init__(self, source: str) -> None:
        self.source, self.position = source, 0

    def error(self, message: str) -> PipelineError:
        return PipelineError(f"{message}\n{self.source}\n{' ' * self.position}^")

    def space(self) -> None:
        while self.position < len(self.source) and self.source[self.position].isspace():
            self.position += 1

    def at(self, character: str) -> bool:
        self.space()
        if self.source.startswith(character, self.position):
            self.position += 1
            return True
        return False

    def elements(self) -> list[_Element]:
        found: list[_Element] = []
        self.space()
        if self.position == len(self.source) or self.source[self.position] == ")":
            return found
        while True:
            found.append(self.element())
            if not self.at(","):
                return found

    def element(self) -> _Element:
        self.space()
        match = _NAME.match(self.source, self.position)
        if match is None:
            raise self.error("expected the name of a pass")
        self.position = match.end()
        if self.at("("):
            inner = self.elements()
            if not self.at(")"):
                raise self.error("expected ')'")
            return _Element(match.group(), "", inner)
        return _Element(match.group(), self.options(), None)

    def options(self) -> str:
        """The text between balanced braces, or nothing."""
        if not self.at("{"):
            return ""
        start, depth, quote = self.position, 1, ""
        for i in range(start, len(self.source)):
            c = self.source[i]
            if quote:
                quote = "" if c == quote else quote
            elif c in "\"'":
                quote = c
            elif c in "{}":
                depth += 1 if c == "{" else -1
                if depth == 0:
                    self.position = i + 1
                    return self.source[start:i]
        raise self.error("expected '}'")


def split_options(options: str) -> dict[str, str]:
    """``a=b c="d e" f`` as a dictionary; a name without a value is ``true``."""
    found: dict[str, str] = {}
    for match in re.finditer(r"""([\w.-]+)(?:=("[^"]*"|'[^']*'|\{[^}]*\}|[^\s]*))?""", options):
        name, value = match.group(1), match.group(2)
        if value is None:
            value = "true"
        elif len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found


def _steps(element: _Element, anchors: tuple[str, ...], nest: bool = False) -> list[Step]:
    if element.inner is not None:
        return [step for inner in element.inner for step in _steps(inner, (*anchors, element.name))]
    found = find(element.name)
    if found is not None:
        if anchors:
            raise PipelineError(
                f"pass '{element.name}' runs on {ANCHOR} only: write it at the top level of the pipeline, "
                f"got it inside {anchors[-1]}(...)"
            )
        try:
            options = found.options(split_options(element.options))
        except ValueError as error:
            raise PipelineError(str(error)) from None
        return [Step(element.name, found.describe(options), found, options)]
    body = element.name + (f"{{{element.options}}}" if element.options else "")
    canonical = _upstream(_nested(body, anchors), element.name, nest and not anchors)
    return [Step(element.name, canonical)]


def _nested(body: str, anchors: Sequence[str]) -> str:
    for anchor in reversed(anchors):
        body = f"{anchor}({body})"
    return body


def find(name: str) -> Pass | None:
    """The kv pass of a name, or None; a pass module that cannot be imported is a :class:`PipelineError`."""
    try:
        return registry.find(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(f"pass '{name}' cannot be loaded: {error}") from error


def _upstream(body: str, name: str, nest: bool) -> str:
    """An upstream element as MLIR prints it; PipelineError when MLIR does not take it."""
    manager = PassManager(ANCHOR)
    try:
        manager.add(body)
    except ValueError as error:
        restricted = _RESTRICTED.search(str(error))
        if nest and restricted:
            return _upstream(f"{restricted.group(1)}({body})", name, False)
        if f"'{name}' does not refer to a registered pass" in str(error):
            raise PipelineError(_unknown(name)) from None
        raise PipelineError(_first_line(str(error))) from None
    printed = str(manager)
    return re.sub(r"\s+", " ", printed[len(ANCHOR) + 1 : -1]).replace("{ ", "{")


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, registry.names(), 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"'{name}' does not refer to a registered pass or pass pipeline{hint}"


def _first_line(message: str) -> str:
    """MLIR's message without its own prefix and its echo of the text."""
    lines = [line for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "cannot be parsed"
    return first.partition("error: ")[2] or first


# --- running ---------------------------------------------------------------------------------------


def run_step(
    step: Step,
    module: ir.Module,
    *,
    verify: bool = True,
    configure: Callable[[PassManager], None] | None = None,
    tracebacks: bool = False,
) -> None:
    """Run one step on a module.

    Parameters
    ----------
    verify : bool
        Whether MLIR verifies the module after the pass.
    configure : callable, optional
        Gets the step's ``PassManager`` before it runs, to turn printing or statistics on.
    tracebacks : bool
        Whether the error for an exception in a kv pass shows where it was raised.

    Raises
    ------
    PassError
        When the pass fails; its diagnostics have been emitted to the context's handler.
    """
    problem: list[str] = []
    manager = PassManager(ANCHOR)
    if step.kv is None:
        manager.add(step.text)
    else:
        call = _callback(step, module, problem, tracebacks)
        manager.add(call, name=step.title, argument=step.name, description=step.kv.summary)
    manager.enable_verifier(verify)
    if configure is not None:
        configure(manager)
    try:
        manager.run(module.operation)
    except ir.MLIRError as error:
        raise PassError(step, problem[0] if problem else str(error)) from error


def _callback(step: Step, module: ir.Module, problem: list[str], tracebacks: bool) -> Callable[[Any, Any], None]:
    """The function that MLIR calls for a kv pass. It never raises: an exception must not cross the C++ frames."""

    def call(_: Any, external: Any) -> None:
        handle = PassHandle()
        try:
            assert step.kv is not None
            step.kv.run(module, handle if step.kv.options_class is NoOptions else step.options)
            if handle.failed:
                problem.append(f"pass '{step.name}' signalled failure")
        except PassFailure as failure:
            problem.append(str(failure))
        except ir.MLIRError as error:
            problem.append(str(error))
        except Exception as error:
            sentence = f"pass '{step.name}' raised {type(error).__name__}: {error}"
            if tracebacks:
                sentence += "\n" + traceback.format_exc().rstrip()
            module.operation.location.emit_error(sentence)
            problem.append(sentence)
        if problem:
            external.signal_pass_failure()

    return call


# --- passes of users -------------------------------------------------------------------------------


def load_pass(path: str | Path) -> Pass:
    """Register the pass of a Python file: its name is the stem with ``-`` for ``_``, its body ``run(module, pass_)``.

    ``run`` may be decorated with ``kv_pass`` to take options. Raises :class:`PipelineError`.
    """
    path = Path(path)
    name = path.stem.replace("_", "-")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise PipelineError(f"--load-pass: a pass file's stem must be a name such as count_loads, got {path.stem!r}")
    spec = importlib.util.spec_from_file_location(f"kvarn_user_pass_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PipelineError(f"--load-pass: expected a Python file, got {path}")
    loaded = importlib.util.module_from_spec(spec)
    # inspect.getmodule, which kv_pass reads the summary with, looks the module up by name.
    sys.modules[spec.name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise PipelineError(
            f"--load-pass: {path} cannot be run: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error
    run = getattr(loaded, "run", None)
    if not callable(run):
        raise PipelineError(f"--load-pass: {path} must define run(module, pass_)")
    summary = (loaded.__doc__ or "").strip().partition("\n")[0]
    try:
        return registry.register(name, run, summary)
    except ValueError as error:
        raise PipelineError(f"--load-pass: {error}") from None
