# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of tiles by the fast instructions: for distribute-kv-tiles.

Two units in the last place of what is computed in base 2; weights are rounded to 16 bits next. What is no number of a
tile is the library's.
"""

from __future__ import annotations

import math

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import f32
from kvarn.dsl import ptx
from kvarn.dsl.values import Value

from .ir import filled
from .threads import elements, from_elements

LOG2E, CONTRACT = math.log2(math.e), arith.FastMathFlags.contract


def _fast_exp2(x: ir.Value) -> ir.Value:
    # By name: convert-gpu-to-nvvm takes the op for a call of the library's exact function.
    return ptx.intrinsic("llvm.exp2", [x.type], [x], "afn").result


def _fast_log2(x: ir.Value) -> ir.Value:
    return from_elements([ptx.lg2(Value(e, f32)).ir for e in elements(x)])


def _times(x: ir.Value, factor: float) -> ir.Value:
    return arith.mulf(x, filled(x.type, factor), fastmath=CONTRACT)


def _fast_tanh(x: ir.Value) -> ir.Value:
    """1 - 2 / (1 + e^2x): exact at both ends, and within 2^-22 of it between them."""
    one, two = (filled(x.type, v) for v in (1.0, 2.0))
    below = arith.addf(_fast_exp2(_times(x, 2.0 * LOG2E)), one, fastmath=CONTRACT)
    quotient = arith.divf(two, below, fastmath=ir.Attribute.parse("#arith.fastmath<arcp,afn>"))
    return arith.subf(one, quotient, fastmath=CONTRACT)


FAST = {
    "math.exp2": _fast_exp2,
    "math.exp": lambda x: _fast_exp2(_times(x, LOG2E)),
    "math.log2": _fast_log2,
    "math.log": lambda x: _times(_fast_log2(x), 1.0 / LOG2E),
    "math.tanh": _fast_tanh,
}
