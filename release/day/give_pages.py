# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Give each load its page, by the greedy driver of MLIR."""

from mlir import ir, rewrite

from kvarn.dialect import kv, ops
from kvarn.lowering.pass_base import kv_pass


def give(load, rewriter):
    if load.page is not None:
        return True  # no match
    with rewriter.ip, load.location:
        page = ops.page(load.cache, load.batch, load.token)
        operands, attributes = [*load.operation.operands, page], dict(load.operation.attributes)
        rewriter.replace_op(load.operation, ir.Operation.create("kv.load", [load.out.type], operands, attributes))


@kv_pass()
def give_pages(module):
    patterns = rewrite.RewritePatternSet(module.context)
    patterns.add(kv.LoadOp, give)
    rewrite.apply_patterns_and_fold_greedily(module, patterns.freeze())
