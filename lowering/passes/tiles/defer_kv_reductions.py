# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keep sums that a loop carries as partial sums per thread, and reduce them over a row's lanes once, after the loop.

A carried vector that starts as zeros and becomes ``itself * factor + sum of a tile's rows`` is linear in the sums: each
thread may keep the sums of its own columns, since all of them have the same factors.

Before:  scf.for iter_args(%l = 0) { %l2 = %l * %alpha + kv.tile_reduce %p {kind = "add", axis = 1} ; yield %l2 }
After:   scf.for iter_args(%l = 0) { ... kv.tile_reduce %p {kv.partial} ... } ; kv.tile_reduce_lanes %l {kind = "add"}
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.dialect.ops.tile import TileReduceLanesOp
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import rank, splat_of, tiled, users


def sum_of(loop: ir.Operation, number: int) -> ir.Operation | None:
    """The reduction whose sums a carried vector accumulates; None for any other vector."""
    block = loop.regions[0].blocks[0]
    carried, init = block.arguments[1 + number], loop.operands[3 + number]
    start = splat_of(init)
    if rank(init) != 1 or start is None or ir.FloatAttr(start).value != 0.0:
        return None
    end = block.operations[len(block.operations) - 1].operation.operands[number]
    total = defining_op(end)
    if total is None or total.name != "arith.addf" or len(users(end)) != 1:
        return None
    kept, added = (defining_op(x) for x in total.operands)
    if added is None or added.name != "kv.tile_reduce":
        kept, added = added, kept
    if added is None or kept is None or added.name != "kv.tile_reduce" or kept.name != "arith.mulf":
        return None
    kind = ir.StringAttr(added.attributes["kind"]).value
    if kind != "add" or ir.IntegerAttr(added.attributes["axis"]).value != 1 or carried not in list(kept.operands):
        return None
    alone = len(users(carried)) == len(users(kept.result)) == len(users(added.result)) == 1
    return added if alone else None


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        for loop in ops_named(function, "scf.for"):
            for number in range(len(loop.results)):
                if (
                    rank(loop.results[number]) != 1
                    or str(ir.RankedTensorType(loop.results[number].type).element_type) != "f32"
                ):
                    continue
                found = sum_of(loop, number)
                if found is None or not performs(found, "defer"):
                    continue
                remark(found, "passed", "lanes are summed after the loop")
                found.attributes["kv.partial"] = ir.UnitAttr.get()
                result = loop.results[number]
                uses = list(result.uses)
                with ir.InsertionPoint.after(loop), loop.location:
                    whole = TileReduceLanesOp(result, ir.StringAttr.get("add"), result.type).operation.results[0]
                for use in uses:
                    use.owner.operands[use.operand_number] = whole
