# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Textual pipelines that mix kv passes and upstream passes.

MLIR's pipeline parser does not know Python passes, so the text is split into steps at its top level: each is one kv
pass, one upstream pass (or pipeline), or one upstream pass inside the anchors that it is nested in.
``gpu.module(a,b),c`` is three steps. ``runner`` runs every step in its own ``PassManager`` on the whole module, so that
a driver can inspect the module between any two passes.

    steps = parse("builtin.module(verify-kv,lower-kv-access{clamp=false},cse)")
    runner.run(module, steps)

Everything that MLIR would abort or raise on is checked here first and raised as :class:`PipelineError`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlir.passmanager import PassManager

from kvarn.lowering import registry

from .pass_base import Pass

ANCHOR = "builtin.module"
TRANSFORM, CHECK, INSTRUMENTATION = "transform", "check", "instrumentation"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_RESTRICTED = re.compile(r"restricted to '([^']+)' on a PassManager intended to run on")


class PipelineError(ValueError):
    """A pipeline that cannot be parsed: the problem, and its position."""


@dataclass(frozen=True)
class Step:
    """One step of a pipeline: a Python pass, or upstream passes that run together.

    Attributes
    ----------
    name : str
        The pass's name on a command line; for a group of upstream passes, its name in stop points and dumps.
    text : str
        The step as written inside ``builtin.module(...)``.
    reason : str
        Why it is at its position in a target's pipeline.
    optional : bool
        Whether a target's pipeline is correct without it.
    purpose : {"transform", "check", "instrumentation"}
        Its purpose. An optional transform changes some program (tests/lowering/test_optional_passes.py).
    upstream : bool
        Whether it is a step of MLIR's passes.
    group : str or None
        The step of a target's pipeline that this one is part of.
    ends_group : bool
        Whether it is the last of its group.
    given : Pass or None
        The pass itself, if it cannot be found by name.
    """

    name: str
    text: str
    reason: str = ""
    optional: bool = False
    purpose: str = TRANSFORM
    upstream: bool = False
    group: str | None = None
    ends_group: bool = True
    given: Pass | None = field(default=None, compare=False)

    @functools.cached_property
    def kv(self) -> Pass | None:
        """The Python pass of the step, imported now; None for upstream passes."""
        if self.upstream:
            return None
        found = self.given or find(self.name)
        if found is None:
            raise PipelineError(_unknown(self.name))
        return found

    @functools.cached_property
    def options(self) -> Any:
        """The options of the pass; ValueError for unknown ones."""
        assert self.kv is not None
        return self.kv.options(split_options(_braced(self.text)))

    @property
    def title(self) -> str:
        """The class-like name of a kv pass for banners: LowerKvAccess."""
        return "".join(word.capitalize() for word in self.name.split("-"))

    def split(self) -> list[Step]:
        """The passes of the step one by one, with all options. Needs a current context."""
        if self.upstream:
            parts = parse(self.text)
            return [dataclasses.replace(step, group=self.name, ends_group=step is parts[-1]) for step in parts]
        assert self.kv is not None
        return [dataclasses.replace(self, text=self.kv.describe(self.options), group=self.name)]


def of_pass(found: Pass, options: str = "") -> Step:
    """The step of a given pass; PipelineError for unknown options."""
    step = Step(found.name, f"{found.name}{{{options}}}" if options else found.name, given=found)
    try:
        step.options  # noqa: B018
    except ValueError as error:
        raise PipelineError(str(error)) from None
    return step


def with_options(step: Step, given: Mapping[str, str]) -> str:
    """The text of a kv step with added or changed options; ValueError for unknown ones."""
    assert step.kv is not None
    return step.kv.describe(step.kv.options({**split_options(_braced(step.text)), **given}))


def _braced(text: str) -> str:
    """The options in a pass's text, without the braces."""
    return text.partition("{")[2].removesuffix("}")


# --- parsing ---------------------------------------------------------------------------------------


@dataclass
class _Element:
    """``name{options}`` or ``name(inner)``."""

    name: str
    options: str
    inner: list[_Element] | None


def parse(pipeline: str) -> list[Step]:
    """The steps of a pipeline, with or without ``builtin.module(...)`` around it.

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
    """The step of a command-line flag ``--name=options``; a pass on another op is nested automatically."""
    step_options = options.strip()
    if step_options.startswith("{") and step_options.endswith("}"):
        step_options = step_options[1:-1]
    return _steps(_Element(name, step_options, None), (), nest=True)


def text(steps: Sequence[Step]) -> str:
    """The pipeline of some steps, with all options."""
    return f"{ANCHOR}({','.join(step.text for step in steps)})"


class _Reader:
    """Splits a pipeline's text by brackets and quotes; it knows nothing of passes."""

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
        """The text between balanced braces, or an empty one."""
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
    name = registry.current(element.name)
    found = find(name)
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
        return [Step(name, found.describe(options))]
    if registry.deleted(element.name):
        return []
    body = element.name + (f"{{{element.options}}}" if element.options else "")
    canonical = _upstream(_nested(body, anchors), element.name, nest and not anchors)
    return [Step(element.name, canonical, upstream=True)]


def _nested(body: str, anchors: Sequence[str]) -> str:
    for anchor in reversed(anchors):
        body = f"{anchor}({body})"
    return body


def find(name: str) -> Pass | None:
    """The kv pass with a name, or None; PipelineError if the pass's module cannot be imported."""
    try:
        return registry.find(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(f"pass '{name}' cannot be loaded: {error}") from error


def _upstream(body: str, name: str, nest: bool) -> str:
    """An upstream element as MLIR prints it; PipelineError if MLIR refuses it."""
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
