# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pass TMA descriptors by value: mark descriptor parameters as grid constants, after conversion to LLVM functions.

``record-kv-abi`` removes parameter attributes from functions, and leaves the indices of descriptors in an attribute for
this pass. A marked parameter is 128 bytes of the kernel's parameter space, which copies read in place. Functions of the
gpu dialect cannot have one of the marks, and lose the other in the conversion.

Before:  llvm.func @k(%m: !llvm.ptr) attributes {tensormap_params = array<i32: 0>}
After:   llvm.func @k(%m: !llvm.ptr {llvm.align = 64, llvm.byval = !llvm.array<16 x i64>, nvvm.grid_constant})
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import in_modules

ATTRIBUTE = "tensormap_params"


def mark(function: ir.Operation, numbers: list[int]) -> None:
    """Mark parameters of one kernel."""
    given = [ir.DictAttr.get({})] * len(function.regions[0].blocks[0].arguments)
    if "arg_attrs" in function.attributes:
        given = list(ir.ArrayAttr(function.attributes["arg_attrs"]))
    descriptor = {
        "llvm.byval": ir.TypeAttr.get(ir.Type.parse("!llvm.array<16 x i64>")),
        "llvm.align": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 64),
        "nvvm.grid_constant": ir.UnitAttr.get(),
    }
    if not all(0 <= number < len(given) for number in numbers):
        fail(function, f"{ATTRIBUTE} must be numbers of its {len(given)} parameters, got {numbers}")
    for number in numbers:
        given[number] = ir.DictAttr.get({**{a.name: a.attr for a in ir.DictAttr(given[number])}, **descriptor})
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(given)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in in_modules(module, "llvm.func"):
        if ATTRIBUTE in function.attributes:
            with function.location:
                mark(function, list(ir.DenseI32ArrayAttr(function.attributes[ATTRIBUTE])))
            del function.attributes[ATTRIBUTE]
