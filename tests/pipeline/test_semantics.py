# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ``--check-semantics-each`` and ``--check-semantics-of`` know of the pipeline and of lengths."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvarn.compilation import driver as compiler
from kvarn.lowering import pipeline_parser
from kvarn.tools import edges
from kvarn.tools.stages import Stages

INPUTS = Path(__file__).resolve().parents[1] / "lowering" / "Inputs"


def steps(text: str):
    with compiler.context():
        return pipeline_parser.parse(text)


@pytest.mark.parametrize(
    ("target", "passes", "before", "after"),
    [
        ("sm_90a", "pipeline-kv-loops", "defer-kv-reductions", ["pipeline-kv-loops"]),
        ("sm_90a", "verify-kv", None, ["verify-kv"]),
        ("sm_90a", "cse,canonicalize", None, [None, None]),
        ("sm_90a", "cse,plan-kv-access", "vectorize-kv-lookups", ["vectorize-kv-lookups", "plan-kv-access"]),
        ("host", "map-gpu-to-host", "flatten-kv-types", ["map-gpu-to-host"]),
        # Optional passes between two may be left out, those that must run are still to come.
        ("sm_90a", "split-kv-loops,assign-kv-layouts", "simplify-kernels", ["split-kv-loops", "assign-kv-layouts"]),
        ("sm_90a", "split-kv-loops,plan-kv-access", "simplify-kernels", ["split-kv-loops", "split-kv-loops"]),
        ("sm_90a", "plan-kv-access,hoist-kv-lookups", "expand-kv-tma", ["plan-kv-access", "plan-kv-access"]),
    ],
)
def test_a_stage_follows_from_the_passes_that_run(target, passes, before, after):
    stages, run = Stages(target), steps(passes)
    stage = stages.before(run)
    assert stage == before
    for step, expected in zip(run, after, strict=True):
        stage = stages.after(step, stage)
        assert stage == expected


def test_a_check_stands_after_the_step_before_it_in_the_pipeline_without_checks():
    assert Stages("sm_90a").without_checks("check-kv-access") == "extract-kv-program"
    assert Stages("sm_90a").without_checks("check-kv-waits") == "lower-kv-tma"
    assert Stages("sm_90a").without_checks(None) is None
    with pytest.raises(ValueError, match="a stage of host is one of"):
        Stages("host").check("lower-kv-tma-maps")


def _kernels():
    spec = importlib.util.spec_from_file_location("input_kernels", INPUTS / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {kernel.__name__: (kernel, specs) for kernel, specs in module.SPECS.items()}


@pytest.mark.parametrize(("name", "extents"), [("rows", (16, 64)), ("biased", (16, 64)), ("attention", (64,))])
def test_edges_are_of_the_pages_and_tiles_of_a_kernel(name, extents):
    if name == "attention":
        module = compiler.parse((INPUTS / "attention.mlir").read_text())
    else:
        kernel, specs = _kernels()[name]
        module = kernel.trace(specs, context=compiler.context())
    with module.context:
        assert edges.extents_of(module) == extents


@pytest.mark.parametrize("new", [1, 5])
def test_cached_and_all_tokens_are_one_off_every_multiple(new):
    cached = edges.around([16], new)
    for edge in (15, 16, 17, 31, 32, 33):
        assert edge in cached
        assert edge - new in cached
    assert {0, 1} <= set(cached)
    assert set(cached) <= {n for batch in edges.batches(cached, 3) for n in batch}
