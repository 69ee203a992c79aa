# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check that no kv ops, kv types or tile ops are left before the upstream part of the pipeline.

Otherwise an op that no pass lowered would fail in an upstream pass, far from the cause.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.lowering.pass_base import PassFailure, kv_pass
from kvarn.lowering.rewrite import functions, walk

# Prefixes of ops that no upstream pass of the tail lowers.
_OURS = ("kv.", "tensor.", "linalg.", "bufferization.", "memref.alloc")
# Non-kv ops that may have kv types; verify-kv refuses all others.
_CASTS = ("builtin.unrealized_conversion_cast",)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    found = walk(module, lambda name: (name.startswith(_OURS) and name != "memref.alloca") or name in _CASTS)
    left = [op for op in found if op.name not in _CASTS]
    for op in left:
        op.location.emit_error(f"'{op.name}' op was not lowered by any pass of the pipeline")
    if left:
        names = ", ".join(sorted({op.name for op in left}))
        raise PassFailure(f"no pass lowered {names}")
    for op in found:
        refuse_types(op, [result.type for result in op.results])
    for function in functions(module):
        for block in function.regions[0].blocks:
            refuse_types(function, [argument.type for argument in block.arguments])


def refuse_types(op: ir.Operation, types: list[ir.Type]) -> None:
    """Fail at an op with a value of a kv type."""
    for type_ in types:
        if str(type_).startswith("!kv."):
            op.location.emit_error(f"'{op.name}' op still has a value of type {type_}")
            raise PassFailure(f"{op.name} still has a value of type {type_}")
