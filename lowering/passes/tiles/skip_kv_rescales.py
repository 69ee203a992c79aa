# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Skip the rescale of an accumulator if no row of the warp needs it.

Running maxima rarely move after the first tiles, and then the factors are exactly 1. The product of an accumulator and
a factor per row moves into a branch that a warp takes only if one of its rows has a factor other than 1.

Before:  %o2 = arith.mulf %o, (kv.tile_broadcast %alpha)
After:   %o2 = scf.if (kv.warp_any %alpha != 1) { arith.mulf %o, (kv.tile_broadcast %alpha) } else { %o }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops.tile import WarpAnyOp
from kvarn.dsl import ptx
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import cloned, filled, rank, splat_of, tiled

_FACTORS = ("math.exp2", "math.exp")  # give 1 for 0, which is the difference if a maximum did not move


def factor_of(op: ir.Operation) -> tuple[ir.Value, ir.Operation] | None:
    """(the tile, the broadcast of the factors) of a rescale; None for other products."""
    if rank(op.result) != 2 or enclosing(op, "scf.for") is None:
        return None
    for one, other in ((0, 1), (1, 0)):
        spread = defining_op(op.operands[other])
        if spread is None or spread.name != "kv.tile_broadcast":
            continue
        made = defining_op(spread.operands[0])
        while made is not None and made.name == "kv.tile_ready":  # in a pipelined loop
            made = defining_op(made.operands[0])
        factors = made is not None and (made.name in _FACTORS or known(spread.operands[0]) is not None)
        if ir.IntegerAttr(spread.attributes["dimension"]).value == 0 and factors:
            return op.operands[one], spread
    return None


def known(factors: ir.Value) -> ir.Value | None:
    """The condition that a warp has factors other than 1, if a branch on it computes them."""
    made = defining_op(factors)
    if made is None or made.name != "scf.if":
        return None
    condition = defining_op(made.operands[0])
    number = list(made.results).index(factors)
    otherwise = made.regions[1].blocks[0]
    one = splat_of(otherwise.operations[len(otherwise.operations) - 1].operation.operands[number])
    if condition is None or condition.name != "kv.warp_any" or one is None or ir.FloatAttr(one).value != 1.0:
        return None
    return made.operands[0]


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        for op in ops_named(function, "arith.mulf"):
            found = factor_of(op)
            if found is None or not performs(op, "skip"):
                continue
            tile, spread = found
            remark(op, "passed", "rescale is skipped where no maximum moved")
            factors = spread.operands[0]
            with ir.InsertionPoint(op), op.location:
                moved = known(factors)
                if moved is None:
                    one = filled(factors.type, 1.0)
                    moved = WarpAnyOp(arith.cmpf(arith.CmpFPredicate.UNE, factors, one)).operation.results[0]
                branch = scf.IfOp(moved, [op.result.type], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    if known(factors) is not None:
                        ptx.syncwarp()  # otherwise ptxas predicates a branch whose condition is known early
                    values: dict[ir.Value, ir.Value] = {}
                    cloned(spread, values)
                    scf.yield_([cloned(op, values).result])
                with ir.InsertionPoint(branch.else_block):
                    scf.yield_([tile])
            op.result.replace_all_uses_with(branch.results[0])
            op.erase()
