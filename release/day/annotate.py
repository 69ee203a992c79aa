# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Say on each kernel how many bytes its loads take, once each."""

from mlir import ir

from kvarn.dialect import types
from kvarn.lowering.rewrite import kernels, ops_named


def run(module):
    for kernel in kernels(module):
        loads = [op.opview for op in ops_named(kernel, "kv.load")]
        total = sum(load.width.value * types.spec_of(load.cache.type).dtype.itemsize for load in loads)
        kernel.attributes["kv.bytes"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), total)
