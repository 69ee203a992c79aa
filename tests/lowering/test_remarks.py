# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Remarks of passes: the reason that a pass had is in what it says, with the line of the kernel."""

from __future__ import annotations

import json

import pytest
from reference.tile_attention import Choice, batch, case_of, trace

import kvarn as kv
from kvarn.compilation import driver as compiler
from kvarn.lowering import pipeline, remarks, rewrite, runner
from kvarn.tools.cli import main


def remarks_of(kernel, *specs, disable=()):
    """What the passes say of a kernel, as (pass, kind, message)."""
    context = compiler.context()
    settings = pipeline.Settings(disable=frozenset(disable))
    with compiler.diagnosed(context), remarks.collect() as found:
        module = compiler.as_module(kernel, specs, context)
        runner.run(module, pipeline.steps("sm_90a", settings))
    return [(r.pass_name, r.kind, r.message) for r in found.matching()]


def spec(head_size=64, dtype=kv.bf16, page_size=16):
    return kv.CacheSpec("paged", dtype, num_heads=2, head_size=head_size, page_size=page_size)


@kv.kernel
def copies(source: kv.KVCache, to: kv.KVCache, width: int):
    b = kv.block_id.x
    for t in range(source.cache_length(b)):
        to.store(b, 0, 5, 0, source.load(b, 0, t, 0, width=width))


def test_a_narrow_access_says_why():
    found = remarks_of(copies, spec(65), spec(65), 1)
    assert ("plan-kv-access", "missed", "store width is 2 bytes, of 16: 1 elements of 2 bytes") in found
    found = remarks_of(copies, spec(60), spec(60), 8)
    assert ("plan-kv-access", "missed", "load of 16 bytes is 2 of 8: head size is 60, width 8") in found
    found = remarks_of(copies, spec(64), spec(64), 8)
    assert ("plan-kv-access", "passed", "load of 16 bytes in 1 of 16") in found
    message = "not by the read-only path: the kernel writes bf16 through a cache"
    assert ("plan-kv-access", "missed", message) in found


def test_a_lookup_says_whether_it_left_the_loop():
    found = remarks_of(copies, spec(), spec(), 8)
    assert ("hoist-kv-lookups", "missed", "lookup stays in its loop: the token changes in it") in found  # of the load
    assert ("hoist-kv-lookups", "passed", "lookup moved out of 1 loop") in found  # of the store
    assert not [r for r in remarks_of(copies, spec(), spec(), 8, disable=["hoist-kv-lookups"]) if "hoist" in r[0]]


@pytest.mark.parametrize(
    ("choice", "shape", "expected"),
    [
        (Choice(), {}, ("select-kv-copies", "passed", "is copied by TMA in 2 stages")),
        (Choice(maps=False), {}, ("select-kv-copies", "missed", "by cp.async, in 2 stages: the kernel has no")),
        (Choice(maps=False), {"dtype": "f8e4m3"}, ("select-kv-copies", "missed", "f8E4M3FN becomes bf16")),
        (Choice(maps=False), {"dtype": "f8e4m3", "kind": "continuous"}, ("select-kv-copies", "missed", "in pages")),
        (Choice(), {}, ("split-kv-loops", "passed", "tiles that the mask does not touch are not masked")),
        (Choice(), {}, ("pipeline-kv-loops", "passed", "overlaps the first of the next")),
        (Choice(), {}, ("skip-kv-rescales", "passed", "rescale is skipped where no maximum moved")),
        (Choice(), {}, ("defer-kv-reductions", "passed", "lanes are summed after the loop")),
    ],
    ids=lambda x: x[0] + x[2][:12] if isinstance(x, tuple) else "",
)  # fmt: skip
def test_the_passes_over_tiles_say_what_they_did(choice, shape, expected):
    b = batch([40], [9], **shape)
    with remarks.collect() as found:
        module = trace(case_of(b), b.problem.collection.spec, choice)
        runner.run(module, pipeline.steps("sm_90a"))
    assert [r for r in found.matching() if (r.pass_name, r.kind) == expected[:2] and expected[2] in r.message], (
        remarks.written(found.matching())
    )


def test_equal_remarks_of_a_place_are_one_with_a_count():
    @kv.kernel
    def unrolled(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
        for k in kv.static(range(3)):
            out[k] = cache.load(0, 0, k, 0, dtype=kv.f32)

    with compiler.diagnosed(compiler.context()), remarks.collect() as found:
        module = compiler.as_module(unrolled, (spec(), kv.Buffer[kv.f32, 1]), compiler.context())
        runner.run(module, pipeline.steps("sm_90a"))
    (load,) = [r for r in found.matching("plan") if "width is 2" in r.message]
    assert load.count == 3
    assert load.location.file == __file__
    assert str(load).endswith("[plan-kv-access] (3 times)")


def test_a_pass_of_ones_own_makes_remarks():
    def mine(module):
        for op in module.body.operations:
            kv.remark(op, "missed", "there is nothing to do", size=3)

    with kv.pipeline({"after:verify-kv": mine}), remarks.collect() as found:
        kv.compile(copies, spec(), spec(), 4, target="sm_90a", options={"plan-kv-access": "max-alignment=4"})
    if not found.matching("mine"):  # the compile cache had it
        pytest.fail("a pass that was inserted did not run")
    (remark,) = found.matching("mine")
    assert (remark.pass_name, remark.kind, remark.values) == ("mine", "missed", (("size", 3),))
    with pytest.raises(ValueError, match="kind of a remark must be one of passed, missed, analysis"):
        kv.remark(None, "perhaps", "")


def test_a_remark_of_an_erased_operation_is_refused_also_where_nobody_listens():
    def drop(module):
        for op in rewrite.ops_named(module, "memref.store"):
            op.erase()
            kv.remark(op, "passed", "dropped")

    with pytest.raises(kv.KernelError, match="must be of an op that is there, and this one was erased"):
        kv.compile(store_one, kv.Buffer[kv.f32, 1], target="sm_90a", passes={"after:verify-kv": drop})


@kv.kernel
def store_one(x: kv.Buffer[kv.f32, 1]):
    x[0] = 1.0


def test_explain_prints_remarks_and_patterns(tmp_path, capsys):
    file = tmp_path / "kernel.py"
    file.write_text(
        "import kvarn as kv\n\n@kv.kernel\ndef f(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):\n"
        "    out[0] = cache.load(0, 0, 0, 0, dtype=kv.f32)\n"
    )
    command = ["explain", f"{file}:f", "--target=sm_90a"]
    command += ["--spec", "paged(bf16, num_heads=2, head_size=64, page_size=16)"]
    assert main([*command, "--remarks-filter", "plan"]) == 0
    assert f"{file}:5:14: remark: missed: load width is 2 bytes" in capsys.readouterr().out
    assert main([*command, "--remarks", "json", "--remarks-filter", "missed"]) == 0
    (remark,) = json.loads(capsys.readouterr().out)
    assert remark["location"] == {"file": str(file), "line": 5, "column": 14}
    assert remark["values"] == {"access_bytes": 2, "bytes": 2}
    assert main([*command, "--patterns"]) == 0
    assert "lower-kv-access        1  kv.load" in capsys.readouterr().out
