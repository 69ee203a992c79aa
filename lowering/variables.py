# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Variables of kernels' modules, by which the runtime tells code that is loaded where its records lie."""

from __future__ import annotations

from mlir import ir
from mlir.dialects import llvm


def declare_variable(scope: ir.Operation, name: str) -> None:
    """A variable of 8 bytes in a kernel's module, 0 until somebody sets it."""
    block = scope.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block), scope.location:
        array = ir.Type.parse("!llvm.array<8 x i8>")
        llvm.mlir_global(
            array, name, ir.Attribute.parse("#llvm.linkage<external>"), alignment=8, addr_space=1,
            value=ir.StringAttr.get(bytes(8)),
        )  # fmt: skip
