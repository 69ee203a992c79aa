# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check that no kv op or type is left: the last pass of ours, after which the upstream tail takes over.

Without it, an op that no pass knows would come out of the tail as an error far from its cause.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from .pass_base import PassFailure, kv_pass
from .rewrite import walk


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    left = walk(module, lambda name: name.startswith("kv."))
    for op in left:
        op.location.emit_error(f"'{op.name}' op was not lowered by any pass of the pipeline")
    if left:
        names = ", ".join(sorted({op.name for op in left}))
        raise PassFailure(f"no pass lowered {names}")
    for op in walk(module, lambda name: True):
        for value in (*op.operands, *op.results):
            if str(value.type).startswith("!kv."):
                op.location.emit_error(f"'{op.name}' op still has a value of type {value.type}")
                raise PassFailure(f"{op.name} still has a value of type {value.type}")
