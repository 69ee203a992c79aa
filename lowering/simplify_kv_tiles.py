# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Clean up between the passes over tiles: upstream's cse, canonicalize and loop-invariant code motion.

Only where a module computes with tiles: other kernels have been cleaned up and would pay for it again.

Before:  %k1 = arith.muli %j, %c128 ; %k2 = arith.muli %j, %c128 ; uses of %k1 and %k2
After:   %k1 = arith.muli %j, %c128 ; uses of %k1
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.passmanager import PassManager

from .pass_base import kv_pass
from .tile_ir import tiled

_CANONICALIZE = (
    "canonicalize{max-iterations=10 max-num-rewrites=-1 region-simplify=normal test-convergence=false top-down=true}"
)
PIPELINE = f"builtin.module(cse,{_CANONICALIZE},cse,loop-invariant-code-motion)"


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    if any(True for _ in tiled(module)):
        PassManager.parse(PIPELINE).run(module.operation)
