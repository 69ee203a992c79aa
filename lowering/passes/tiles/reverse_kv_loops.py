# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Iterate from the last keys to the first if scores depend on the distance of query and key.

Such scores usually fall with the distance: from the first keys to the last, a row's largest score would grow from tile
to tile, and each tile would look for a maximum and rescale (``skip-kv-maxima``, ``skip-kv-rescales``). From the last
keys up, the first maximum stays.

Loops with a table (``tabulate-kv-scores``) keep their order: the table of the last keys is made during products, and
the first tile would wait for it.

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
    """Replace the variable in the body by that of the iteration at the mirrored position."""
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
    """every: reverse every loop over key tiles, to measure the effect of the order."""

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
                why = "scores depend on distances" if by_distance else "the option every is set"
                remark(loop, "passed", f"iterates from the last keys to the first: {why}")
                reverse(loop)
