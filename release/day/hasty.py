# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Wrong on purpose: looks up the page of the token before."""

from mlir import ir
from mlir.dialects import arith

from kvarn.lowering.rewrite import ops_named
from kvarn.lowering.rewrite_counts import performs


def hasty(module):
    for op in ops_named(module, "kv.page"):
        if performs(op, "shift"):
            with ir.InsertionPoint(op), op.location:
                i32 = op.operands[2].type
                before = arith.subi(op.operands[2], arith.constant(i32, 1))
                op.operands[2] = arith.maxsi(before, arith.constant(i32, 0))
