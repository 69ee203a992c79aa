# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Variables of kernels' modules, by which the runtime tells code that is loaded where its records lie.

A record names its kernel, or its access, by a number; which text that stands for is an attribute of the kernel, of
which the runtime learns when it loads the code.
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
    """A variable of 8 bytes in a kernel's module, 0 until somebody sets it: one for all kernels of the module."""
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
    """What a variable of the kernel's module holds, i64."""
    symbol = llvm.mlir_addressof(pointer(1), ir.FlatSymbolRefAttr.get(name))
    return Pointer(symbol, 1).load(i64)


def number_of(text: str) -> int:
    """The number that stands for a text in records: of 56 bits, in every process and module the same."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def note_texts(function: ir.Operation, name: str, texts: Mapping[int, str]) -> None:
    """Put the texts of a kernel's numbers into its attribute ``kv.<name>``."""
    with ir.Location.unknown():
        described = {str(number): ir.StringAttr.get(text) for number, text in texts.items()}
        function.attributes[f"kv.{name}"] = ir.DictAttr.get(described)
