# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One pass per MLIR rewriter: greedy driver, PDL, transform dialect: python examples/rewrites.py

The first two make the page lookup of every cache load an explicit op; the third unrolls the loop around the load.
"""

from __future__ import annotations

from typing import Any

from mlir import ir, rewrite
from mlir.dialects.transform import interpreter

import kvarn as kv
from kvarn.dialect import kv as dialect, ops


@kv.kernel
def norms(keys: kv.KVCache, out: kv.Buffer[kv.f32, 2]):
    b, h, d = kv.block_id.x, kv.block_id.y, kv.thread_id.x * 8
    total = 0.0
    for t in range(keys.cache_length(b)):
        x = keys.load(b, h, t, d, width=8, dtype=kv.f32)
        total += (x * x).reduce("add")
    out[b, h] = kv.warp_reduce(total, "add")


def give_page(load: Any, rewriter: Any) -> bool | None:
    """Rewrite kv.load without a page to kv.page and kv.load with it."""
    if load.page is not None:
        return True  # no match
    with rewriter.ip, load.location:
        page = ops.page(load.cache, load.batch, load.token)
        operands, attributes = [*load.operation.operands, page], dict(load.operation.attributes)
        rewriter.replace_op(load.operation, ir.Operation.create("kv.load", [load.out.type], operands, attributes))
    return None


def give_pages(module: ir.Module) -> None:
    """Apply ``give_page`` with the greedy driver."""
    patterns = rewrite.RewritePatternSet(module.context)
    patterns.add(dialect.LoadOp, give_page)
    rewrite.apply_patterns_and_fold_greedily(module, patterns.freeze())


PATTERN = """
pdl.pattern @give_page : benefit(1) {
  %cache = pdl.operand
  %batch = pdl.operand
  %head = pdl.operand
  %token = pdl.operand
  %dim = pdl.operand
  %width = pdl.attribute
  %i32 = pdl.type : i32
  %type = pdl.type
  %load = pdl.operation "kv.load"(%cache, %batch, %head, %token, %dim :
      !pdl.value, !pdl.value, !pdl.value, !pdl.value, !pdl.value) {"width" = %width} -> (%type : !pdl.type)
  pdl.rewrite %load {
    %lookup = pdl.operation "kv.page"(%cache, %batch, %token : !pdl.value, !pdl.value, !pdl.value) -> (%i32 : !pdl.type)
    %page = pdl.result 0 of %lookup
    %new = pdl.operation "kv.load"(%cache, %batch, %head, %token, %dim, %page :
        !pdl.value, !pdl.value, !pdl.value, !pdl.value, !pdl.value, !pdl.value) {"width" = %width}
        -> (%type : !pdl.type)
    pdl.replace %load with %new
  }
}
"""


def give_pages_by_pdl(module: ir.Module) -> None:
    pattern = ir.Module.parse(PATTERN)  # must outlive its patterns
    rewrite.apply_patterns_and_fold_greedily(module, rewrite.PDLModule(pattern).freeze())


SCRIPT = """
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%module: !transform.any_op {transform.readonly}) {
    %load = transform.structured.match ops{["kv.load"]} in %module : (!transform.any_op) -> !transform.any_op
    %loop = transform.get_parent_op %load {op_name = "scf.for"} : (!transform.any_op) -> !transform.any_op
    transform.loop.unroll %loop {factor = 4} : !transform.any_op
    transform.yield
  }
}
"""


def unroll(module: ir.Module) -> None:
    """Apply a script of the transform dialect."""
    script = ir.Module.parse(SCRIPT)
    interpreter.apply_named_sequence(module, script.body.operations[0], script)


def main() -> str:
    specs = kv.CacheSpec("paged", kv.bf16, num_heads=8, head_size=256, page_size=16), kv.Buffer[kv.f32, 2]
    made, same, unrolled = (
        kv.compile(norms, *specs, target="sm_90a", passes={"before:hoist-kv-lookups": function})
        for function in (give_pages, give_pages_by_pdl, unroll)
    )
    assert made.stages["give-pages"].count('"kv.page"') == 1
    assert same.stages["give-pages-by-pdl"] == made.stages["give-pages"]
    assert unrolled.stages["unroll"].count('"kv.load"') == 5  # four, and one in the remainder loop
    return made.asm["ptx"]


if __name__ == "__main__":
    print(main())
