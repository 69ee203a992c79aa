# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Count the cache loads of every kernel, and annotate each with its loop depth.

A user-defined pass in one file. Run it with

    kv-opt --load-pass=examples/count_loads.py --count-loads kernel.mlir

The file's stem is the pass's name. ``run`` gets the module and changes it in place: this pass writes the number of
loads to each kernel (``kv.loads``) and the depth to each load (``kv.loop_depth``).
"""

from mlir import ir

from kvarn.lowering.rewrite import enclosing, kernels, ops_named

LOOPS = ("scf.for", "scf.while")


def depth(op: ir.Operation) -> int:
    """The number of loops around an op."""
    loops = 0
    around = enclosing(op, *LOOPS)
    while around is not None:
        loops += 1
        around = enclosing(around, *LOOPS)
    return loops


def run(module: ir.Module, pass_) -> None:
    """Annotate every kernel with its number of ``kv.load`` ops."""
    i32 = ir.IntegerType.get_signless(32)
    for kernel in kernels(module):
        loads = ops_named(kernel, "kv.load", "kv.load_raw")
        kernel.attributes["kv.loads"] = ir.IntegerAttr.get(i32, len(loads))
        for load in loads:
            load.attributes["kv.loop_depth"] = ir.IntegerAttr.get(i32, depth(load))
