# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of tiles by the fast instructions: for distribute-kv-tiles.

Two units in the last place of what is computed in base 2; weights are rounded to 16 bits next. tanh is within 1e-5 of
itself. What is no number of a tile is the library's.
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
    # By name: convert-gpu-to-nvvm takes the op for a call of the library's exact function.
    attributes = {
        "intrin": ir.StringAttr.get("llvm.exp2"),
        "fastmathFlags": ir.Attribute.parse("#llvm.fastmath<afn>"),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0]),
    }
    return ir.Operation.create("llvm.call_intrinsic", [x.type], [x], attributes).result


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
