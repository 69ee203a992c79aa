# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lay out a kernel's shared-memory allocations in one dynamic array.

An external array of the kernel's module is the dynamic shared memory; each allocation becomes an offset in it, in the
order of decreasing alignment and then program order, so that no padding is needed. Allocations with disjoint lifetimes
do not share memory: a kernel that wants to reuse memory allocates once. The total is recorded as ``kv.shared_bytes``,
which the loader passes at launch.

Before:  %p = "kv.alloc_shared"() {bytes = 4096, alignment = 128}
After:   %s = llvm.mlir.addressof @kv_shared ; %p = llvm.getelementptr %s[offset]
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import llvm

from kvarn.dialect import layout
from kvarn.lowering.index import pointer
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import enclosing, kernels, ops_named

SYMBOL = "kv_shared"


def declare(scope: ir.Operation, alignment: int) -> None:
    """Declare the dynamic shared array at the start of a kernel's module, with the largest alignment needed."""
    block = scope.regions[0].blocks[0]
    for op in block.operations:
        operation = op.operation
        if operation.name == "llvm.mlir.global" and ir.StringAttr(operation.attributes["sym_name"]).value == SYMBOL:
            before = ir.IntegerAttr(operation.attributes["alignment"])
            operation.attributes["alignment"] = ir.IntegerAttr.get(before.type, max(before.value, alignment))
            return
    with ir.InsertionPoint.at_block_begin(block), scope.location:
        array = ir.Type.parse("!llvm.array<0 x i8>")
        linkage = ir.Attribute.parse("#llvm.linkage<external>")
        llvm.mlir_global(array, SYMBOL, linkage, alignment=max(128, alignment), addr_space=3)


def check_outermost(op: ir.Operation) -> None:
    """Refuse an allocation in a loop or branch; ``map-gpu-to-host`` does so, too, so that targets agree."""
    if enclosing(op, "scf.for", "scf.while", "scf.if", "scf.parallel") is not None:
        fail(op, "must be outside loops and branches: shared memory lives as long as the thread block")


def offsets(function: ir.Operation) -> tuple[list[tuple[ir.Operation, int]], int]:
    """(allocation, offset) of a kernel's dynamic shared memory, and the total bytes."""
    total, found = 0, []
    for op in sorted(ops_named(function, "kv.alloc_shared"), key=_alignment, reverse=True):
        start = layout.align_up(total, _alignment(op))
        total = start + ir.IntegerAttr(op.attributes["bytes"]).value
        found.append((op, start))
    # Rounded to 16 bytes: LLVM may widen the last load of an allocation up to its alignment.
    return found, layout.align_up(total, 16)


def _alignment(op: ir.Operation) -> int:
    return ir.IntegerAttr(op.attributes["alignment"]).value


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    i64 = ir.IntegerType.get_signless(64)
    for function in kernels(module):
        found, total = offsets(function)
        if not found and "kv.shared_bytes" in function.attributes:
            continue  # already allocated: the pipeline was entered after this pass
        for op, start in found:
            scope = enclosing(op, "gpu.module")
            if scope is None:
                fail(op, "must be inside a gpu.module")
            check_outermost(op)
            declare(scope, _alignment(op))
            with ir.InsertionPoint(op), op.location:
                base = llvm.mlir_addressof(pointer(3), ir.FlatSymbolRefAttr.get(SYMBOL))
                constant = ir.DenseI32ArrayAttr.get([start])
                value = llvm.getelementptr(pointer(3), base, [], constant, ir.IntegerType.get_signless(8), None)
            op.results[0].replace_all_uses_with(value)
            op.erase()
        with ir.Location.unknown():
            function.attributes["kv.shared_bytes"] = ir.IntegerAttr.get(i64, total)
