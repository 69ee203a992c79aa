# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Each optional pass that transforms code changes a program of ``bench.identity``: it is there for something."""

from __future__ import annotations

import functools

import pytest

import kvarn as kv
from bench import identity
from bench.identity_programs import programs
from kvarn import dispatch
from kvarn.compilation.specialisation import Specialisation
from kvarn.env import OWNERSHIP
from kvarn.lowering import pipeline

TARGET = "sm_90a"
CHANGES = {
    "kernel first_rows": ("vectorize-kv-lookups",),
    "kernel negate": ("hoist-kv-lookups", "plan-kv-access", "simplify-addresses"),
    "small_prefill": ("defer-kv-reductions", "pipeline-kv-loops"),
    "attention, f8 x f8 0:kv.attention": (
        "simplify-kernels", "split-kv-loops", "specialize-kv-warps", "promote-kv-sums", "sum-kv-weights",
        "queue-kv-work", "skip-kv-maxima", "skip-kv-rescales", "simplify-kv-tiles",
    ),
    "attention, f8, alibi 0:kv.attention": ("reverse-kv-loops",),
    "attention, mask and score 0:kv.attention": (
        "narrow-kv-tiles", "tabulate-kv-scores", "fold-kv-scores", "start-kv-work",
    ),
}  # fmt: skip


@functools.cache
def _made():
    return {name: make for name, _, make in programs()}


@functools.cache
def _ptx(program: str, without: tuple[str, ...] = ()) -> str:
    """A program's PTX, as ``bench.identity`` compares it."""
    with pytest.MonkeyPatch.context() as patch, kv.pipeline(disable=without):
        patch.setenv("KVARN_ALWAYS_COMPILE", "1")
        what = _made()[program](TARGET)
        if isinstance(what, Specialisation):
            artifact = dispatch.compile_operation(what).artifact
        else:
            artifact = kv.compile(*what, target=TARGET).artifact
    return identity.plain(str(artifact.code["ptx"]), "", on_host=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program, names in CHANGES.items() for name in names], ids=str
)
def test_an_optional_pass_changes_a_program(program, name):
    assert _ptx(program, (name,)) != _ptx(program)


@pytest.mark.thorough
@pytest.mark.parametrize("program", CHANGES)
def test_a_program_is_compiled_alike_twice(program):
    """Else a pass may seem to change it."""
    assert _ptx.__wrapped__(program) == _ptx(program)


def test_every_optional_pass_that_transforms_code_is_tested():
    """Checks and instrumentation are there on request alone."""
    steps = [s for target in (TARGET, "host") for s in pipeline.default_steps(target, OWNERSHIP, 1)]
    wanted = {s.name for s in steps if s.optional and s.purpose == "transform"}
    assert wanted == {name for names in CHANGES.values() for name in names}


@pytest.mark.parametrize("target", [TARGET, "host"])
def test_what_is_optional_and_no_transform_runs_on_request_alone(target):
    always = pipeline.default_steps(target)
    assert {s.purpose for s in always if s.optional} == {"transform"}
    asked = {s.purpose for s in pipeline.default_steps(target, OWNERSHIP, 1) if s.name not in {s.name for s in always}}
    assert asked == {"check", "instrumentation"}
