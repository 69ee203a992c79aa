# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What passes know of an op is what its class declares: tiers, accesses, writes and addresses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mlir import ir

from kvarn.dialect import effects, kv
from kvarn.lowering import kernels
from kvarn.lowering.passes.kv import verify_kv

TIER_ONE = effects.tier_one()


def test_the_operations_of_tier_one_are_those_that_are_expanded():
    assert sorted(TIER_ONE) == sorted(kernels.operations())
    assert len(TIER_ONE) == 37


@pytest.mark.parametrize("name", TIER_ONE)
def test_no_operation_of_tier_one_may_stand_in_a_kernel(name):
    context = kv.make_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse("gpu.module @m { gpu.func @k() kernel { gpu.return } }")
        function = module.body.operations[0].operation.regions[0].blocks[0].operations[0]
        with ir.InsertionPoint.at_block_begin(function.operation.regions[0].blocks[0]):
            ir.Operation.create(name)
        assert verify_kv.count_problems(module) == 1
    found = [text for _, text, _ in kv.context_diagnostics(context)]
    assert found == [f"'{name}' op must be outside kernels (gpu.func): it becomes kernels of its own"]
    kv.context_diagnostics(context).clear()


def test_every_operation_of_tier_one_writes_something():
    """It has no result: one that only reads is dead code for upstream passes, and would write to read-only buffers."""
    found = {name: effects.of_class(effects.class_of(name)) for name in effects.tier_one()}
    idle = [name for name, of in found.items() if of and not any(e.kind == effects.WRITE for e in of.effects)]
    assert idle == []


def test_every_op_declares_its_effects():
    undeclared = [c.OPERATION_NAME for c in kv.Kv.operations if effects.of_class(c) is None]
    assert undeclared == []


def test_an_op_that_looks_up_a_page_has_the_fields_that_the_trait_promises():
    found = [c for c in kv.Kv.operations if effects.LooksUpPage in c.TRAITS]
    assert len(found) == 7
    for op_class in found:
        names = {f.name: f for f in op_class.FIELDS}
        assert {"cache", "batch", "token"} <= names.keys()
        assert names["page"].optional


# An op of another package, known by its declaration alone. In a process of its own: declarations are for its life.
OTHER_PACKAGE = """
import sys
from typing import Any
from mlir import ir
from kvarn.dialect.base import Kv
from kvarn.dialect.effects import *
from kvarn.dialect import effects
from kvarn.dialect.ext import I32, Operand, Result

class StampOp(Kv.Operation, name="stamp", traits=[{traits}]):
    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    token: Operand[I32]
    dim: Operand[I32]
    value: Operand[Any]
    page: Operand[I32] | None = None

from kvarn.tools import kv_opt
sys.exit(kv_opt._main(sys.argv[1:], lambda text: None))
"""
KERNEL = """
!c = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @m {
  gpu.func @k(%c: !c, %b: i32, %x: bf16) kernel {
    "kv.stamp"(%c, %b, %b, %b, %b, %x) : (!c, i32, i32, i32, i32, bf16) -> ()
    %y = "kv.load"(%c, %b, %b, %b, %b) {width = 1 : i64} : (!c, i32, i32, i32, i32) -> bf16
    gpu.return
  }
}
"""


def run_with(traits: str, *flags: str) -> dict[str, str]:
    """The lines of the two accesses after some passes, and the whole text."""
    code = OTHER_PACKAGE.replace("{traits}", traits).replace("import *", "import LooksUpPage, Pure, WritesElements")
    done = subprocess.run([sys.executable, "-c", code, *flags], input=KERNEL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {name: line for line in done.stdout.splitlines() for name in ("stamp", "load") if f'"kv.{name}"' in line}
    return {**lines, "all": done.stdout}


def test_an_op_of_another_package_gets_the_passes_that_its_declaration_asks_for():
    found = run_with("LooksUpPage, WritesElements", "--check-kv-access", "--hoist-kv-lookups", "--plan-kv-access")
    assert "kv.stamp: the token's page must be in the pool" in found["all"]
    assert found["stamp"].count("i32") == 5  # a page has joined the operands
    assert '"kv.raw_page"' in found["all"]  # which is not clamped, since it writes
    assert "kv.alignment" in found["stamp"]
    assert "kv.read_only" not in found["load"]


def test_an_op_without_effects_leaves_loads_read_only_and_one_that_declares_none_does_not():
    assert "kv.read_only" in run_with("Pure", "--plan-kv-access")["load"]
    assert "kv.read_only" not in run_with("", "--plan-kv-access")["load"]
