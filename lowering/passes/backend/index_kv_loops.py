# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Give loops over 32-bit integers an induction variable of type index, which upstream's scf.for passes need.

Loops of kernels are over i32, but scf-for-loop-peeling, scf-parallel-loop-tiling and the affine passes support only
index. No built-in pipeline runs this pass: insert it before such passes, with lower-affine after them. The values in
the body and the comparison of the bounds do not change.

Before:  scf.for %i = %a to %b step %c : i32 { use(%i) }
After:   scf.for %n = index(%a) to index(%b) step index(%c) { %i = arith.index_cast %n : index to i32 ; use(%i) }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.lowering.pass_base import NoOptions, kv_pass
from kvarn.lowering.rewrite import ops_named


def _index(loop: ir.Operation) -> None:
    """Change one loop over integers in place."""
    cast = arith.index_castui if "unsignedCmp" in loop.attributes else arith.index_cast
    index = ir.IndexType.get()
    body = loop.regions[0].blocks[0]
    counter = body.arguments[0]
    narrow = counter.type
    with loop.location:
        with ir.InsertionPoint(loop):
            for i in range(3):  # lower bound, upper bound, step
                loop.operands[i] = cast(index, loop.operands[i])
        counter.set_type(index)
        with ir.InsertionPoint.at_block_begin(body):
            seen = cast(narrow, counter)
        counter.replace_all_uses_except(seen, seen.owner.operation)


@kv_pass(NoOptions)
def run(module: ir.Module, options: Any) -> None:
    """Change every loop with integer bounds."""
    for loop in ops_named(module, "scf.for"):
        if isinstance(loop.operands[0].type, ir.IntegerType):
            _index(loop)
