# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn bisect``: a fault planted in any pass is found, and what it does; right pipelines pass."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from mlir import ir
from mlir.dialects import arith

import kvarn as kv
from kvarn.compilation import driver as compiler
from kvarn.lowering import pipeline, rewrite_counts
from kvarn.lowering.rewrite import ops_named
from kvarn.lowering.target import by_name
from kvarn.ops import writes
from kvarn.tools import bisect, edges, kv_opt, random_inputs
from kvarn.tools.cli import find_kernel, main
from kvarn.tools.random_inputs import InputOptions
from kvarn.tools.semantics import Checker, Launch, ReferenceLowering, computes_narrowly

SPEC = kv.CacheSpec("paged", kv.f16, num_heads=2, head_size=64, page_size=16)


@kv.kernel
def norms(cache: kv.KVCache, out: kv.Buffer[kv.f32, 2]):
    b, h = kv.block_id.x, kv.thread_id.x
    x = kv.f32(0.0)
    for t in range(cache.cache_length(b)):
        for d in kv.static(range(0, 64, 8)):
            v = cache.load(b, h, t, d, width=8, dtype=kv.f32)
            x += v[0] * v[0] + v[1] * v[1] + v[6] * v[7]
    out[b, h] = x


@pytest.fixture(scope="module")
def rest():
    with ReferenceLowering() as found:
        yield found


@pytest.fixture(scope="module")
def setups(rest):
    """The kernel's IR, a checker and the steps of a target."""
    made = {}
    for target in ("sm_90a", "host"):
        with compiler.diagnosed(compiler.context()):
            text = compiler.with_locations(compiler.as_module(norms, (SPEC, kv.Buffer[kv.f32, 2]), compiler.context()))
        checker = Checker(text, target, rest, InputOptions({"out": "3x2"}), Launch((3, 1, 1), (2, 1, 1)))
        made[target] = SimpleNamespace(text=text, checker=checker, steps=pipeline.steps(target))
    return made


def sabotaged(step, rewrite):
    """The step, whose pass changes something after it did its work."""
    right = step.kv

    def wrong(module, options):
        right.run(module, options)
        rewrite(module)

    options = right.options_class
    return dataclasses.replace(step, given=dataclasses.replace(right, function=wrong, options_class=options))


def forget_a_summand(module):
    """x + y becomes x, at the last sum of floats."""
    sums = ops_named(module, "arith.addf", "llvm.fadd")
    assert sums
    sums[-1].results[0].replace_all_uses_with(sums[-1].operands[0])
    sums[-1].erase()


def drop_a_write(module):
    """The first store to device memory goes."""
    stores = [s for s in ops_named(module, "llvm.store") if "ptr<1>" in str(s.operands[1].type)]
    stores[0].erase()


OURS = {t: [s.name for s in pipeline.default_steps(t) if not s.upstream] for t in ("sm_90a", "host")}


@pytest.mark.parametrize(("target", "at"), [("sm_90a", 0), ("sm_90a", -1), ("host", -1)])
def test_a_fault_planted_in_a_pass_is_found(setups, target, at):
    """Also in one that must run: what lowers the stages is another process, whose passes are as they were."""
    s, name = setups[target], OURS[target][at]
    steps = [sabotaged(step, forget_a_summand) if step.name == name else step for step in s.steps]
    fault = bisect.first_fault(s.text, steps, s.checker)
    assert fault is not None
    assert (fault.name, fault.problem.partition(":")[0]) == (name, "out")


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_the_pipeline_is_right(setups, target):
    s, told = setups[target], {}
    assert bisect.first_fault(s.text, s.steps, s.checker, told.__setitem__) is None
    assert set(told.values()) == {"ok", "unchanged"}
    assert list(told.values()).count("ok") > 5


def test_the_rewrite_that_does_it_is_found(setups):
    """Loads of one of eight places lose their page: the ``first`` load's is the first that matters."""
    s, first = setups["sm_90a"], 3

    def shift(module):
        for n, op in enumerate(ops_named(module, "kv.page")):
            if rewrite_counts.performs(op, "shift"):
                with ir.InsertionPoint(op), op.location:
                    far = arith.constant(ir.IntegerType.get_signless(32), 0 if n < first - 1 else 32)
                    op.operands[2] = arith.addi(op.operands[2], far)

    steps = []
    for step in s.steps:
        more = dataclasses.replace(pipeline.insertions({"after:verify-kv": shift})[0].steps[0])
        steps += [step, more] if step.name == "hoist-kv-lookups" else [step]
    hoist = next(i for i, step in enumerate(steps) if step.name == "hoist-kv-lookups")
    # Without merging there are eight look-ups.
    steps[hoist] = dataclasses.replace(steps[hoist], text="hoist-kv-lookups{merge=false hoist=false}")
    fault = bisect.first_fault(s.text, steps, s.checker)
    assert fault is not None
    assert (fault.name, fault.number) == ("shift", first)
    assert fault.rewrites >= 8
    assert "shift of 'kv.page' at loc(" in fault.rewrite
    assert "test_bisect.py" in fault.rewrite


def test_an_operation_is_compared_with_the_host(rest):
    blocks = np.zeros((4, 2, 2, 16, 2, 64), np.float16)
    pool = kv.PagedKVCacheCollection(blocks, np.array([9], np.uint32), np.array([[0]], np.uint32), 2, 16)
    x, offsets = np.zeros((2, 2, 64), np.float16), np.array([0, 2], np.uint32)
    text = writes._APPEND.compile((pool, 0, x, offsets, x), target="sm_90a").asm["kv"]
    checker = Checker(text, "sm_90a", rest, InputOptions(lengths=(9,), new=(2,)))
    assert checker.source == "the host"
    steps = pipeline.steps(by_name("sm_90a"))
    assert bisect.first_fault(text, steps, checker) is None
    steps = [sabotaged(s, drop_a_write) if s.name == "lower-kv-tma" else s for s in steps]
    fault = bisect.first_fault(text, steps, checker)
    assert fault is not None
    assert fault.name == "lower-kv-tma"


# --- the command -----------------------------------------------------------------------------------

KERNEL = """
import kvarn as kv

@kv.kernel
def double(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    t = kv.thread_id.x
    out[t] = cache.load(0, 0, t, 3, dtype=kv.f32) * 2.0

def right(arguments):
    cache = arguments["cache"]
    for t in range(16):
        arguments["out"][t] = 2.0 * float(cache.load(0, 0, t, 3))

def wrong(arguments):
    arguments["out"][:] = 0
"""
BROKEN = '''
"""Adds one to every head."""
from mlir import ir
from mlir.dialects import arith
from kvarn.lowering.rewrite import ops_named

def run(module, pass_):
    for op in ops_named(module, "kv.load"):
        with ir.InsertionPoint(op), op.location:
            op.operands[2] = arith.constant(ir.IntegerType.get_signless(32), 1)
'''


def test_the_command_names_the_pass_unless_the_model_says_that_it_was_wrong_before(written, capsys):
    command = ["bisect", "kernel.py:double", *COMMAND[:-1]]
    assert main([*command, "--load-pass", "next_head.py", "--insert-before", "hoist-kv-lookups=next-head"]) == 1
    assert "next-head is the first pass that changed the answer" in capsys.readouterr().out
    assert main([*command, "--model", "kernel.py:right"]) == 0
    assert "no pass changed the answer" in capsys.readouterr().out
    assert main([*command, "--model", "kernel.py:wrong"]) == 1
    assert "the answer is wrong before any pass" in capsys.readouterr().out


COMMAND = ["--spec", "cache=paged(f16, num_heads=2, head_size=64, page_size=16)", "--grid", "1", "--block", "16"]
COMMAND += ["--arg", "out=16", "--target", "sm_90a", "--insert-before"]


@pytest.fixture
def written(tmp_path, monkeypatch, rest):
    """The folder of a kernel and of passes: one that is wrong, and some that end in other ways.

    Stages are lowered by the process that other tests have started.
    """
    monkeypatch.setattr(bisect, "ReferenceLowering", lambda trusted: contextlib.nullcontext(rest))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    for name in ("next_head", "head_behind"):  # a test's own: a process keeps the passes that it has loaded
        (tmp_path / f"{name}.py").write_text(BROKEN)
    for name, text in ENDS.items():
        (tmp_path / f"{name}.py").write_text(f"import os, signal, sys\n\ndef run(module, options):\n    {text}\n")
    return tmp_path


ENDS = {"dies": "os.kill(os.getpid(), signal.SIGKILL)", "raises": "raise KeyError('x')"}


@pytest.mark.parametrize(("name", "told"), [("dies", "SIGKILL"), ("raises", "KeyError")])
def test_a_pass_that_ends_its_process_is_named(written, capsys, name, told):
    """As one is that raises; the command goes on and tells it."""
    loaded = ["--load-pass", f"{name}.py", *COMMAND, f"hoist-kv-lookups={name}"]
    assert main(["bisect", "kernel.py:double", *loaded]) == 1
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{name} fails: ")]
    assert len(last) == 1
    assert told in last[0]


def test_what_is_saved_says_what_it_is_run_on_and_can_be_made_smaller(written, capsys):
    loaded = ["--load-pass", "head_behind.py", *COMMAND, "hoist-kv-lookups=head-behind"]
    saved = ["--save", "made/found", "--reduce", "made/small.mlir"]  # in a folder that is not there yet
    assert main(["bisect", "kernel.py:double", *loaded, *saved]) == 1
    assert "error" not in capsys.readouterr().err
    before, small = (written / "made" / name for name in ("found.before.mlir", "small.mlir"))
    assert len(small.read_text()) < len(before.read_text())
    for file in (before, small):
        wrong = ["--load-pass=head_behind.py", "--head-behind", "--check-semantics-each"]
        assert kv_opt.main([str(file), *wrong]) == 1
        assert "pass 'head-behind' changed the answer" in capsys.readouterr().err
        assert kv_opt.main([str(file), "--hoist-kv-lookups", "--check-semantics-each"]) == 0
        capsys.readouterr()


# --- the lengths that are chosen ---------------------------------------------------------------------


@pytest.mark.parametrize(("extents", "group"), [((16, 64, 128), 1), ((64, 128), 4), ((48, 64, 128, 192), 8)])
def test_lengths_are_chosen_around_the_extents_of_pages_and_tiles(extents, group):
    shape = edges.Shape(extents, group)
    ((lengths, new),) = edges.chosen(shape, 3)
    largest = max(extents)
    assert {largest + d for d in (-16, -8, -1, 0, 1, 8, 16)} <= set(lengths)
    assert all({extent - 1, extent + 1} <= set(lengths) for extent in extents)
    passed = {(n, n + x) for n, x in zip(lengths, new, strict=True)}
    assert (largest - 8, largest + 1) in passed, "no step passes the edge of a tile by a token"
    assert {shape.query_tile - 1, shape.query_tile + 1} <= set(new)
    for most_new, most_batch in ((1, None), (1, 4), (8, 7)):
        found = edges.chosen(edges.Shape(extents, group, most_new, most_batch), 3)
        assert max(x for _, new in found for x in new) <= max(most_new, 3)
        assert max(len(lengths) for lengths, _ in found) <= (most_batch or 100)


@pytest.mark.parametrize(("narrow", "text"), [(False, "x * x"), (True, "kv.f32(kv.bf16(x)) * x")])
def test_what_computes_in_32_bits_may_differ_by_the_order_of_sums_alone(tmp_path, narrow, text):
    (tmp_path / "k.py").write_text(
        f"import kvarn as kv\n\n@kv.kernel\ndef squares(c: kv.KVCache, out: kv.Buffer[kv.f32, 1]):\n"
        f"    x = c.load(0, 0, 0, kv.thread_id.x, dtype=kv.f32)\n    out[kv.thread_id.x] = {text}\n"
    )
    spec = kv.CacheSpec("paged", kv.bf16, 1, 32, 4)
    made = find_kernel(f"{tmp_path}/k.py:squares").trace([spec, kv.Buffer[kv.f32, 1]])
    assert computes_narrowly(made) == narrow
    x = np.float32([1.0, 100.0])
    assert bool(random_inputs.difference(x, x * np.float32(1.0005), fine=not narrow)) == (not narrow)


def test_a_difference_is_told_and_a_rounding_is_none():
    x = np.array([1.0, np.nan, 3.0], np.float16)
    assert random_inputs.difference(x, x * np.float16(1.001)) == ""
    assert random_inputs.difference(x, np.array([1.0, 2.0, 3.0], np.float16)).startswith("1 of 3 elements differ")
    assert random_inputs.difference(x, np.array([np.nan, np.nan, 3.0], np.float16)).startswith("1 of 3 elements differ")
    assert random_inputs.difference(np.array([1, 2]), np.array([1, 3])) == (
        "1 of 2 elements differ, the first at [1]: 3 is not 2"
    )
