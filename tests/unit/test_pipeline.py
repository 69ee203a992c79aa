# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipeline: what may be left out, configured and inserted, and where it may be entered."""

from __future__ import annotations

import numpy as np
import pytest

import kvarn as kv
from kvarn.lowering import pipeline

F32 = kv.Buffer[kv.f32, 1]


@kv.kernel
def triple(x: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    x[i] = x[i] * 3.0


# --- leaving out and configuring -----------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_every_optional_pass_may_be_left_out_alone_and_all_together(target):
    names = [s.name for s in pipeline.default_steps(target) if s.optional]
    assert names
    for left_out in ([], *([name] for name in names), names):
        kernel = kv.compile(triple, F32, target=target, disable=left_out)
        assert not set(left_out) & set(kernel.stages)
        if target == "host":
            x = np.ones(4, np.float32)
            kernel[1, 4](x)
            assert x.tolist() == [3.0] * 4


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_every_other_pass_is_refused_up_front_with_the_optional_ones(target):
    steps = pipeline.default_steps(target)
    for step in steps:
        if not step.optional:
            with pytest.raises(ValueError, match=rf"only optional passes .*hoist-kv-lookups.*, got {step.name}, which"):
                kv.compile("not even parsed", target=target, disable=[step.name])


def test_options_that_a_pass_does_not_have_are_refused_up_front():
    with pytest.raises(ValueError, match=r"option of plan-kv-access must be one of .*read-only.*, got 'zork'"):
        kv.compile("not even parsed", target="host", options={"plan-kv-access": "zork=1"})
    with pytest.raises(ValueError, match="simplify-kernels is a group of MLIR's passes, whose options are fixed"):
        kv.compile("not even parsed", target="host", options={"simplify-kernels": "top-down=false"})


def test_options_with_spaces_and_quotes_reach_a_pass_whole():
    """One parser reads options, of kv-opt's flags and of ``options=``."""
    steps = pipeline.steps("host", pipeline.Settings(options={"plan-kv-access": "read-only=false  max-alignment='8'"}))
    plan = next(s for s in steps if s.name == "plan-kv-access")
    assert (plan.options.read_only, plan.options.max_alignment) == (False, 8)
