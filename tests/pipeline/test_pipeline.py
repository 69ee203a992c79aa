# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipeline: what may be left out, configured and inserted, and where it may be entered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from kvarn.lowering import pipeline, registry
from kvarn.lowering.pass_base import as_pass

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


@pytest.fixture
def deleted(monkeypatch):
    """The name of a pass that earlier versions had."""
    monkeypatch.setitem(registry.DELETED, "sort-kv-tiles", "narrow-kv-tiles does its work")
    return "sort-kv-tiles"


WARNING = "pass 'sort-kv-tiles' is ignored: narrow-kv-tiles does its work; the name is an error from the next release"


@pytest.mark.parametrize(
    "given",
    [
        {"disable": ["sort-kv-tiles"]},
        {"disable": ["sort-kv-tiles", "hoist-kv-lookups"]},
        {"options": {"sort-kv-tiles": "width=8"}},
        {"disable": ["sort-kv-tiles"], "options": {"sort-kv-tiles": "width=8"}},
        {"passes": {"after:hoist-kv-lookups": "sort-kv-tiles{width=8}"}},
        {"passes": {"before:hoist-kv-lookups": ["cse", "sort-kv-tiles"]}},
    ],
)
def test_the_name_of_a_deleted_pass_is_ignored_with_one_warning_at_the_callers_line(deleted, given):
    left_out = {"disable": ["hoist-kv-lookups"]} if "hoist-kv-lookups" in given.get("disable", ()) else {}
    passes = {"passes": {"before:hoist-kv-lookups": "cse"}} if "cse" in str(given) else {}
    wanted = kv.compile(triple, F32, target="host", **left_out, **passes)
    with pytest.warns(DeprecationWarning, match=WARNING) as warned:
        made = kv.compile(triple, F32, target="host", **given)
    with pytest.warns(DeprecationWarning, match=WARNING) as of_context, kv.pipeline(**given):
        inside = kv.compile(triple, F32, target="host")
    assert list(made.stages) == list(inside.stages) == list(wanted.stages)
    assert made.asm["llvm"] == inside.asm["llvm"] == wanted.asm["llvm"]
    for found in (warned, of_context):
        assert [w.filename for w in found] == [__file__]


def test_kv_opt_ignores_deleted_passes_with_a_warning(deleted, tmp_path, capsys):
    from kvarn.tools import kv_opt

    source = tmp_path / "k.mlir"
    source.write_text(str(kv.compile(triple, F32, target="host").stages["input"]))

    def output(*arguments):
        assert kv_opt.main([str(source), *arguments]) == 0
        return capsys.readouterr().out

    for old, now in (
        (["--kv-pipeline", "--target=host", "--disable=sort-kv-tiles"], ["--kv-pipeline", "--target=host"]),
        (["--pass-pipeline=builtin.module(sort-kv-tiles,cse)"], ["--pass-pipeline=builtin.module(cse)"]),
        (["--sort-kv-tiles=width=8", "--cse"], ["--cse"]),
    ):
        with pytest.warns(DeprecationWarning, match=WARNING) as warned:
            found = output(*old)
        assert len(warned) == 1
        assert found == output(*now)


@pytest.fixture
def renamed(monkeypatch):
    """(The name that plan-kv-access had in an earlier version, the warning about it.)"""
    monkeypatch.setitem(registry.RENAMED, "widen-kv-access", "plan-kv-access")
    return "widen-kv-access", "the pass 'widen-kv-access' is 'plan-kv-access' now; the old name goes"


@pytest.mark.parametrize(
    ("key", "of"),
    [
        ("disable", lambda name: [name]),
        ("options", lambda name: {name: "read-only=false"}),
        ("passes", lambda name: {f"before:{name}": "cse"}),
    ],
)
def test_a_pass_is_found_by_its_earlier_name_with_a_warning_at_the_callers_line(renamed, key, of):
    old, warning = renamed
    wanted = kv.compile(triple, F32, target="sm_90a", **{key: of("plan-kv-access")})
    with pytest.warns(DeprecationWarning, match=warning) as warned:
        made = kv.compile(triple, F32, target="sm_90a", **{key: of(old)})
    assert list(made.stages) == list(wanted.stages)
    assert made.asm["ptx"] == wanted.asm["ptx"]
    assert [w.filename for w in warned] == [__file__]


def test_the_pipeline_is_entered_after_a_pass_by_its_earlier_name(renamed):
    old, warning = renamed
    stage = kv.compile(triple, F32, target="sm_90a").stages["plan-kv-access"]
    wanted = kv.compile(stage, target="sm_90a", start_after="plan-kv-access")
    with pytest.warns(DeprecationWarning, match=warning):
        made = kv.compile(stage, target="sm_90a", start_after=old)
    assert made.asm["ptx"] == wanted.asm["ptx"]


def test_kv_opt_knows_passes_by_their_earlier_names(renamed, tmp_path, capsys):
    from kvarn.tools import kv_opt

    old, warning = renamed
    source = tmp_path / "k.mlir"
    source.write_text(kv.compile(triple, F32, target="sm_90a").asm["kv"])

    def output(*flags):
        assert kv_opt.main([str(source), *flags]) == 0
        return capsys.readouterr().out

    for flags in (
        ["--{}"],
        ["--pass-pipeline=builtin.module({},cse)"],
        ["--kv-pipeline", "--target=sm_90a", "--disable={}"],
        ["--kv-pipeline", "--target=sm_90a", "--stop-after={}"],
    ):
        wanted = output(*(flag.replace("{}", "plan-kv-access") for flag in flags))
        with pytest.warns(DeprecationWarning, match=warning):
            assert output(*(flag.replace("{}", old) for flag in flags)) == wanted


def test_names_of_the_language_from_earlier_versions_warn():
    for old, new in (("beside", "concatenate"), ("take_round", "take_work_item")):
        with pytest.warns(DeprecationWarning, match=f"'{old}' is '{new}' now"):
            assert getattr(kv, old) is getattr(kv, new)


def test_a_pass_of_ones_own_may_have_the_name_of_a_deleted_one(deleted):
    def sort_kv_tiles(module):
        pass

    loaded = registry.register(as_pass(sort_kv_tiles))
    try:
        made = kv.compile(triple, F32, target="host", passes={"after:hoist-kv-lookups": loaded.name})
        assert deleted in made.stages
    finally:
        registry._extra.pop(loaded.name)


def test_options_with_spaces_and_quotes_reach_a_pass_whole():
    """One parser reads options, of kv-opt's flags and of ``options=``."""
    steps = pipeline.steps("host", pipeline.Settings(options={"plan-kv-access": "read-only=false  max-alignment='8'"}))
    plan = next(s for s in steps if s.name == "plan-kv-access")
    assert (plan.options.read_only, plan.options.max_alignment) == (False, 8)


ONLY_WHAT_IS_ASKED = """
import runpy, sys
import kvarn as kv

kernel = runpy.run_path(sys.argv[1])["scale_keys"]
kv.compile(kernel, kv.CacheSpec("paged", kv.bf16, 8, 128, 16), kv.f32, target="sm_90a")
of_tiles = [m for m in sys.modules if m.startswith("kvarn.lowering.passes.tiles.")]
of_operations = [m for m in sys.modules if m.startswith("kvarn.lowering.kernels.") and m.endswith(".expansion")]
assert not of_tiles + of_operations, of_tiles + of_operations
"""


def test_a_kernel_of_ones_own_imports_no_pass_of_tiles_and_no_built_in_kernel():
    example = Path(__file__).parents[2] / "examples" / "scale_keys.py"
    run = subprocess.run(
        [sys.executable, "-c", ONLY_WHAT_IS_ASKED, str(example)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KVARN_CACHE_SIZE": "0"},
    )
    assert run.returncode == 0, run.stderr
