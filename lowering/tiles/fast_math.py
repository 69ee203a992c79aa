# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Math functions of tiles by approximate instructions: for distribute-kv-tiles.

Results are within two units in the last place of base 2; weights are rounded to 16 bits next. tanh has a relative error
of 1e-5. Functions of values outside of tiles use the library.
"""

from __future__ import annotations

import math

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.dtypes import f32
from kvarn.dsl import ptx
from kvarn.dsl.scores import capped
from kvarn.dsl.values import Value, Vector

from .ir import filled
from .threads import elements, from_elements

LOG2E, CONTRACT = math.log2(math.e), arith.FastMathFlags.contract


def _fast_exp2(x: ir.Value) -> ir.Value:
    # By intrinsic name: convert-gpu-to-nvvm would turn the op into a call of the library's exact function.
    return ptx.intrinsic("llvm.exp2", [x.type], [x], "afn").result


def _fast_log2(x: ir.Value) -> ir.Value:
    return from_elements([ptx.lg2(Value(e, f32)).ir for e in elements(x)])


def _times(x: ir.Value, factor: float) -> ir.Value:
    return arith.mulf(x, filled(x.type, factor), fastmath=CONTRACT)


def _fast_tanh(x: ir.Value) -> ir.Value:
    lanes = ir.VectorType(x.type).shape[0]

    def exp2(y: Vector) -> Vector:
        return Vector(_fast_exp2(y.ir), f32, lanes)

    def inverse(y: Vector) -> Vector:
        flags = ir.Attribute.parse("#arith.fastmath<arcp,afn>")
        return Vector(arith.divf(filled(x.type, 1.0), y.ir, fastmath=flags), f32, lanes)

    return capped(Vector(x, f32, lanes), exp2=exp2, inverse=inverse).ir


FAST = {
    "math.exp2": _fast_exp2,
    "math.exp": lambda x: _fast_exp2(_times(x, LOG2E)),
    "math.log2": _fast_log2,
    "math.log": lambda x: _times(_fast_log2(x), 1.0 / LOG2E),
    "math.tanh": _fast_tanh,
}
