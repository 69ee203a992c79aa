# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Walk from the last keys to the first where scores are computed of the distance of a query and a key.

Such scores mostly fall with the distance: from the first keys to the last a row's largest score would grow from tile to
tile, and every time a maximum would be looked for and sums rescaled (``skip-kv-maxima``, ``skip-kv-rescales``). From
the last keys on the first maximum stays.

What a table has (``tabulate-kv-scores``) is left in its order: that of the last keys is made during products, and would
be waited for in the first tile.

Before:  scf.for %j = %low to %high { ... %j * 128 ... }
After:   scf.for %i = %low to %high { %j = %low + %high - 1 - %i ; ... %j * 128 ... }
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith

from kvarn.lowering.index import const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.differences import difference_of
from kvarn.lowering.tiles.ir import constant_int, rank, tiled


def is_distance(op: ir.Operation) -> bool:
    """Whether an op makes a tile of floats that are distances."""
    if rank(op.results[0]) != 2:
        return False
    if op.name == "arith.subf":
        return difference_of(op.results[0]) is not None
    inner = defining_op(op.operands[0])
    return op.name == "arith.sitofp" and inner is not None and inner.name == "arith.subi"


def reverse(loop: ir.Operation) -> None:
    """Let the body see the variable of the iteration that is as far from the end as this from the begin."""
    body = loop.regions[0].blocks[0]
    variable = body.arguments[0]
    lower, upper = list(loop.operands)[:2]
    with ir.InsertionPoint(loop), loop.location:
        last = arith.subi(arith.addi(lower, upper), const(1))
    with ir.InsertionPoint.at_block_begin(body), loop.location:
        mirrored = arith.subi(last, variable)
    variable.replace_all_uses_except(mirrored, defining_op(mirrored))


@dataclass(frozen=True)
class Options:
    """every: reverse every loop over tiles of keys, to see what the order costs."""

    every: bool = False


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        for loop in ops_named(function, "scf.for"):
            steps = str(loop.operands[0].type) == "i32" and constant_int(loop.operands[2]) == 1
            if not steps or not any(op.parent.operation == loop for op in ops_named(loop, "kv.dot")):
                continue
            by_distance = any(map(is_distance, ops_named(loop, "arith.subf", "arith.sitofp")))
            if (by_distance or options.every) and performs(loop, "reverse"):
                why = "scores are computed of distances" if by_distance else "every loop is asked for"
                remark(loop, "passed", f"from the last keys to the first: {why}")
                reverse(loop)
