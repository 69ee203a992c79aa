# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A wrong pass, which docs/debugging.md looks for: pages are looked up for the token after the one that is read."""

from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.lowering.rewrite import ops_named
from kvarn.lowering.rewrite_counts import performs


def run(module: ir.Module, pass_: Any) -> None:
    for page in ops_named(module, "kv.page"):
        if performs(page, "shift"):
            with ir.InsertionPoint(page), page.location:
                token = page.operands[2]
                page.operands[2] = arith.addi(token, arith.constant(token.type, 1))
