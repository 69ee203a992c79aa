# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversions that the wrapper functions share."""

from typing import Any

from mlir import ir
from mlir.dialects import arith


def as_i32(value: Any) -> ir.Value:
    """An i32 value: the value itself, or a constant from a Python int."""
    if isinstance(value, int):
        return arith.constant(ir.IntegerType.get_signless(32), value)
    return value


def i64_attr(value: int) -> ir.IntegerAttr:
    """An i64 attribute from a Python int."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
