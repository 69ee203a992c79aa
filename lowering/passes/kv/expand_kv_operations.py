# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand fused operations into kernels and launches of them.

Each operation's expansion (``lowering/kernels``) is written in the DSL; the kernels go to ``gpu.module @kernels``, and
the launches replace the operation. The schedule attribute chooses among variants; for missing entries the expansion
chooses by target. On request, kernels that check the contents of the operations' tables
(``lowering/kernels/tables/contents``) are launched first.

Before:  func.func @append(%c: !kv.collection<...>, ...) { "kv.append"(%c, %layer, %k, %off, %v) ... }
After:   func.func @append(...) { gpu.launch_func @kernels::@append blocks in (...) threads in (...) args(...) }
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import effects
from kvarn.lowering import kernels as expand
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import kv_ops, ops_named
from kvarn.lowering.target import by_name


@dataclass(frozen=True)
class Options:
    """target: the target of the kernels. check: also launch checks of the tables' contents. ownership: also launch
    reads of what attention will read, for ``check-kv-ownership``."""

    target: str = "sm_90a"
    check: bool = False
    ownership: bool = False


def kernel_module(module: ir.Module) -> ir.Operation:
    """``gpu.module @kernels``, which is created if it does not exist."""
    for op in ops_named(module, "gpu.module"):
        return op
    module.operation.attributes["gpu.container_module"] = ir.UnitAttr.get()
    made = ir.Operation.parse("gpu.module @kernels {}", context=module.context)
    module.body.append(made)
    return made


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target = by_name(options.target)
    found = [op for op in kv_ops(module) if effects.has(op.name, effects.TierOne)]
    if not found:
        return
    with ir.Location.unknown():
        kernels = kernel_module(module)
    traced: dict = {}
    for op in found:
        expansion = expand.expansion(op.name)
        if expansion is None:
            fail(op, "has no expansion")
        with ir.InsertionPoint(op), op.location:
            try:
                place = Expansion(op.opview, kernels, target, traced)
                if options.check:
                    from kvarn.lowering.kernels.tables import (
                        contents,
                    )  # the checks' kernels, which few programs ask for

                    contents.launch_checks(op.opview, place)
                if options.ownership:
                    from kvarn.lowering.kernels.attention import touched_pages

                    touched_pages.launch_reads(op.opview, place)
                expansion(op.opview, place)
            except (ValueError, TypeError, NotImplementedError) as error:
                fail(op, f"cannot be expanded for {target.name}: {error}")
        op.erase()
