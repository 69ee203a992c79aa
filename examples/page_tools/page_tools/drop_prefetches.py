# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A pass that removes every ``kv.prefetch_page``, to measure their effect."""

from mlir import ir

from kvarn.lowering.rewrite import ops_named
from kvarn.lowering.rewrite_counts import performs


def run(module: ir.Module) -> None:
    for op in ops_named(module, "kv.prefetch_page"):
        if performs(op, "drop"):
            op.erase()
