# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ctrl-C while something is compiled is KeyboardInterrupt for the caller, wherever in a pass it comes."""

import subprocess
import sys

import numpy as np
import pytest

import kvarn as kv
from kvarn.lowering import rewrite
from kvarn.lowering.passes.kv import verify_kv


@kv.kernel
def triple(x: kv.Buffer[kv.f32, 1]):
    x[kv.thread_id.x] = x[kv.thread_id.x] * 3.0


def interrupted(*_):
    raise KeyboardInterrupt


def in_the_pass(module):
    raise KeyboardInterrupt


def in_a_walk_of_its_own(module):
    module.operation.walk(interrupted)


def in_a_walk_by_name(module):
    rewrite.walk(module, interrupted)


def in_a_rule(module):
    rules = rewrite.Rules()
    rules.lowers("arith.constant", "func.return")(interrupted)
    rules.apply(module, leave=lambda name: True)


def in_the_verifier(module):
    before, verify_kv._Checker.visit = verify_kv._Checker.visit, interrupted
    try:
        verify_kv.count_problems(module)
    finally:
        verify_kv._Checker.visit = before


PASSES = [in_the_pass, in_a_walk_of_its_own, in_a_walk_by_name, in_a_rule, in_the_verifier]


def by_compile(passes):
    kv.compile(triple, kv.Buffer[kv.f32, 1], target="sm_90a", passes=passes)


def by_a_launch(passes):
    with kv.pipeline(passes):
        triple[1, 4](np.ones(4, np.float32))


def by_emulate(passes):
    with kv.pipeline(passes):
        triple.emulate(1, 4, np.ones(4, np.float32))


def by_an_operation(passes):
    blocks = np.zeros((2, 2, 1, 16, 1, 64), np.float32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[0]], np.uint32), 1, 4)
    with kv.pipeline(passes):
        kv.ops.store_ragged(pool.get_key_cache(0), np.ones((1, 1, 64), np.float32), np.array([0, 1], np.uint32))


@pytest.mark.parametrize("call", [by_compile, by_a_launch, by_emulate, by_an_operation])
@pytest.mark.parametrize("where", PASSES)
def test_ctrl_c_in_a_pass_stays_one_and_the_next_call_is_right(where, call):
    with pytest.raises(KeyboardInterrupt):
        call({"after:verify-kv": where})
    call(None)


def test_an_error_in_a_callback_is_none():
    def fails(module):
        module.operation.walk(lambda op: 1 / 0)

    with pytest.raises(kv.KernelError, match="ZeroDivisionError"):
        by_compile({"after:verify-kv": fails})


def test_kv_opt_ends_by_ctrl_c(tmp_path):
    (tmp_path / "stops.py").write_text(
        "def stops(op):\n    raise KeyboardInterrupt\n\ndef run(module):\n    module.operation.walk(stops)\n"
    )
    (tmp_path / "k.mlir").write_text("func.func @f() {\n  return\n}\n")
    command = [sys.executable, "-m", "kvarn.tools.kv_opt", "k.mlir", "--load-pass=stops.py", "--stops"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
