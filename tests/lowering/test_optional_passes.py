# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Each optional pass that transforms code changes a program of ``bench.identity``: it is there for something."""

from __future__ import annotations

import functools
import json

import pytest

from bench import pass_worth
from kvarn.env import OWNERSHIP
from kvarn.lowering import pipeline

WORTH = json.loads(pass_worth.FILE.read_text(encoding="utf-8"))
# The program with the fewest instructions that each pass changes.
CHANGED = {
    name: min((r for r in WORTH.values() if name in r["without"]), key=lambda r: r["instructions"])["program"]
    for name in dict.fromkeys(name for r in WORTH.values() for name in r["without"])
}


@functools.cache
def _makers():
    return pass_worth.makers()


@functools.cache
def _ptx(program: str, without: tuple[str, ...] = ()) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVARN_ALWAYS_COMPILE", "1")
        return pass_worth.ptx_of(_makers()[program], without)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "program"), CHANGED.items(), ids=str)
def test_an_optional_pass_changes_a_program(name, program):
    assert _ptx(program, (name,)) != _ptx(program)


@pytest.mark.thorough
@pytest.mark.parametrize("program", sorted(set(CHANGED.values())))
def test_a_program_is_compiled_alike_twice(program):
    """Else a pass may seem to change it."""
    assert _ptx.__wrapped__(program) == _ptx(program)


def test_every_optional_pass_that_transforms_code_changes_a_program_of_the_table():
    """Checks and instrumentation are there on request alone."""
    assert set(CHANGED) == set(pass_worth.passes())


def test_the_table_has_the_programs_that_are_compared():
    assert {title: r["program"] for title, r in WORTH.items()} == pass_worth.PROGRAMS


@pytest.mark.parametrize("target", [pass_worth.TARGET, "host"])
def test_what_is_optional_and_no_transform_runs_on_request_alone(target):
    always = pipeline.default_steps(target)
    assert {s.purpose for s in always if s.optional} == {"transform"}
    asked = {s.purpose for s in pipeline.default_steps(target, OWNERSHIP, 1) if s.name not in {s.name for s in always}}
    assert asked == {"check", "instrumentation"}
