# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pass of docs/writing-passes.md that a pattern of MLIR's greedy driver makes."""

from mlir import ir, rewrite

from kvarn.dialect import kv as dialect
from kvarn.dialect import ops


def give_page(load, rewriter):
    """kv.load without a page -> kv.page and kv.load with it."""
    if load.page is not None:
        return True  # no match
    with rewriter.ip, load.location:
        page = ops.page(load.cache, load.batch, load.token)
        operands, attributes = [*load.operation.operands, page], dict(load.operation.attributes)
        rewriter.replace_op(load.operation, ir.Operation.create("kv.load", [load.out.type], operands, attributes))


def give_pages(module):
    patterns = rewrite.RewritePatternSet(module.context)
    patterns.add(dialect.LoadOp, give_page)
    rewrite.apply_patterns_and_fold_greedily(module, patterns.freeze())
