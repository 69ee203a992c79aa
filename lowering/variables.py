# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Module variables of kernels, through which the runtime tells loaded code the addresses of its records.

A record identifies its kernel, or its access, by a number; an attribute of the kernel maps the numbers to texts, which
the runtime reads when it loads the code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mlir import ir
from mlir.dialects import llvm

from kvarn.dialect.dtypes import i64
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value

from .index import pointer
from .rewrite import enclosing


def declare_variable(function: ir.Operation, name: str) -> None:
    """Declare an 8-byte variable in a kernel's module, 0 until it is set; all kernels of the module share it."""
    scope = enclosing(function, "gpu.module")
    if scope is None:
        return
    block = scope.regions[0].blocks[0]
    if any("sym_name" in op.attributes and ir.StringAttr(op.attributes["sym_name"]).value == name for op in block):
        return
    with ir.InsertionPoint.at_block_begin(block), scope.location:
        array = ir.Type.parse("!llvm.array<8 x i8>")
        llvm.mlir_global(
            array, name, ir.Attribute.parse("#llvm.linkage<external>"), alignment=8, addr_space=1,
            value=ir.StringAttr.get(bytes(8)),
        )  # fmt: skip


def variable(name: str) -> Value:
    """The value of a variable of the kernel's module, i64."""
    symbol = llvm.mlir_addressof(pointer(1), ir.FlatSymbolRefAttr.get(name))
    return Pointer(symbol, 1).load(i64)


def number_of(text: str) -> int:
    """The 56-bit number for a text in records, the same in every process and module."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def note_texts(function: ir.Operation, name: str, texts: Mapping[int, str]) -> None:
    """Store the texts of a kernel's numbers in its attribute ``kv.<name>``."""
    with ir.Location.unknown():
        described = {str(number): ir.StringAttr.get(text) for number, text in texts.items()}
        function.attributes[f"kv.{name}"] = ir.DictAttr.get(described)
