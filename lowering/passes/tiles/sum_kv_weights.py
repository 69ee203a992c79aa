# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sum 8-bit weights by the tensor cores, next to the product that uses them.

An online softmax sums the weights of a row with one addition per element, and then rounds them to 8 bits for the
product. A product of the rounded weights with ones is their sum, at a sixteenth of the cost of the values' product. It
is also the sum of the numbers that multiply the values: e4m3 is coarser for larger numbers, so that the sum of the
rounded weights is 0.9993 of the sum of the exact ones.

The schedule's ``row_sums`` enables it if the sums have no other use: a log-sum-exp needs the exact weights. Every
thread of a row gets the whole sum. If products are added outside of the tensor cores (``promote-kv-sums``), this one
precedes them and is added in the same way.

Before:  scf.for iter_args(%l, %o) { %l2 = %l * %alpha + kv.tile_reduce %p {kind = "add"}
         %p8 = kv.cast %p ; kv.dot %p8, %v, %o * %alpha {kv.promoted = 64} }
After:   %ones = kv.tile_ones
         scf.for iter_args(%l, %o) { %p8 = kv.cast %p
         %l2 = %l * %alpha + kv.tile_reduce (kv.dot %p8, %ones {kv.row_sums}) {kind = "max", kv.partial} ; kv.dot ... }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.tile import DotOp, TileReduceOp, layout_of, tile_type
from kvarn.dialect.ops.weights import COLUMNS, tile_ones
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import PROMOTED, ROW_SUMS, schedule_of, shape, tiled, users

from .defer_kv_reductions import sum_of


def promoted_sum(dot: ir.Operation) -> ir.Operation | None:
    """The sum of a product's exact weights that its loop accumulates; None if there is none."""
    loop, narrowed = enclosing(dot, "scf.for"), defining_op(dot.opview.a)
    if loop is None or dot.block != loop.regions[0].blocks[0] or narrowed is None or narrowed.name != "kv.cast":
        return None
    found = (sum_of(loop, number) for number in range(len(loop.results)))
    return next((op for op in found if op is not None and op.operands[0] == narrowed.operands[0]), None)


def by_product(dot: ir.Operation, total: ir.Operation, ones: ir.Value) -> None:
    """Replace a sum of weights by the product of the rounded weights with ``ones``."""
    weights, (old,) = dot.opview.a, users(total.result)
    kept = next(x for x in old.operands if x != total.result)
    type_ = ir.RankedTensorType(dot.result.type)
    with ir.InsertionPoint(dot), total.location:
        of_rows = tile_type([type_.shape[0], COLUMNS], type_.element_type, layout_of(type_))
        product = DotOp(weights, ones, ir.BoolAttr.get(True), of_rows)
        product.operation.attributes[ROW_SUMS] = ir.UnitAttr.get()
        # All columns are equal: a thread takes one of its own.
        one = TileReduceOp(product.operation.results[0], ir.StringAttr.get("max"), i64_attr(1), total.result.type)
        one.operation.attributes["kv.partial"] = ir.UnitAttr.get()
        whole = arith.addf(kept, one.operation.results[0], fastmath=arith.FastMathFlags.contract)
    old.result.replace_all_uses_with(whole)
    old.erase()
    total.erase()


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        if not schedule_of(function).get("row_sums", False):
            continue
        ones: dict[int, ir.Value] = {}
        for dot in ops_named(function, "kv.dot"):
            total = promoted_sum(dot) if PROMOTED in dot.attributes else None
            if total is None or not performs(dot, "sum"):
                continue
            keys = shape(dot.opview.a)[1]
            if keys not in ones:
                with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), function.location:
                    ones[keys] = tile_ones(COLUMNS, keys)
            by_product(dot, total, ones[keys])
            remark(dot, "passed", "weights are summed by the tensor cores")
