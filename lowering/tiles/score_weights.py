# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What becomes of ``kv.tile_weights``: the weights of scores under a maximum, of every finite score.

The exact form needs a product, a difference and what holds products within f32. Where a maximum is moderate, one
multiplication and subtraction that is rounded once does: it takes the maximum off the exact product, so that weights
are off by one factor a row, of half a unit in the last place of the maximum. Where a maximum is :func:`large` that
factor could be anything up to infinity. So a warp branches to the exact form where one of its rows has a large maximum,
or none yet, and there too each row is computed by its own form: the bits of a row do not depend on other rows. Where
branches do not pay, on the host, both forms are computed and each element takes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mlir import ir
from mlir.dialects import arith, math as mlir_math, scf

from kvarn.dialect.ops.tile import WarpAnyOp
from kvarn.dialect.ops.weights import LARGE, LARGEST
from kvarn.lowering.rewrite import defining_op, ops_named

from .affine import ONE, Emitter, of
from .fast_math import CONTRACT
from .ir import filled, splat_of

NAME = "kv.tile_weights"


def large(maximum: ir.Value) -> ir.Value:
    """Where a maximum is too large for the fast form, by its last place. The one of a row that saw no score yet is."""
    return arith.cmpf(arith.CmpFPredicate.OGT, mlir_math.absf(maximum), filled(maximum.type, LARGE))


def product_of(top: ir.Value) -> ir.Operation | None:
    """The op whose result a largest score in powers of two is, but for the bound of such scores."""
    op = defining_op(top)
    bounded = op is not None and op.name == "arith.minnumf" and splat_of(op.operands[1]) is not None
    return defining_op(op.operands[0]) if bounded and op is not None else op


def fused(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of rows whose maximum is not large."""
    emitter, factor = Emitter(maximum.type, scores.type), of(unit)
    if factor == ONE:  # scores may be products, which are not to be taken apart
        return mlir_math.exp2(arith.subf(scores, emitter.spread(of(maximum))))
    powers = arith.mulf(scores, emitter.spread(factor), fastmath=CONTRACT)
    return mlir_math.exp2(arith.subf(powers, emitter.spread(of(maximum)), fastmath=CONTRACT))


def powers(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """What 2 is raised to: of any rows. Half of it is computed, of which no product is more than f32 holds."""
    emitter = Emitter(maximum.type, scores.type)

    def repeated(rows: ir.Value) -> ir.Value:
        return emitter.spread(of(arith.mulf(rows, filled(rows.type, 0.5))))

    half = arith.mulf(scores, repeated(unit))
    for hold, within, end in ((arith.maxnumf, "OGT", -LARGEST), (arith.minnumf, "OLT", LARGEST)):  # finite ones
        held = hold(half, filled(scores.type, end / 2))
        infinite = filled(scores.type, math.copysign(math.inf, end))
        half = arith.select(arith.cmpf(arith.CmpFPredicate[within], scores, infinite), held, half)
    less = arith.subf(half, repeated(maximum))
    return arith.addf(less, less)


def powers_by_row(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """What 2 is raised to, by the form of each row: its bits do not depend on the maxima of other rows."""
    emitter = Emitter(maximum.type, scores.type)
    under = emitter.spread(of(maximum))
    less = mlir_math.fma(scores, emitter.spread(of(unit)), arith.negf(under))
    return arith.select(large(under), powers(scores, unit, maximum), less)


def chosen(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of any rows, both forms computed."""
    return mlir_math.exp2(powers_by_row(scores, unit, maximum))


def guarded(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of any rows, the exact form computed in a branch that a warp takes where one of its rows needs it."""
    if of(unit) == ONE:
        return fused(scores, unit, maximum)
    some = WarpAnyOp(large(maximum)).operation.results[0]
    branch = scf.IfOp(some, [scores.type, unit.type, maximum.type], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        less = powers_by_row(scores, unit, maximum)
        scf.yield_([less, filled(unit.type, 1.0), filled(maximum.type, 0.0)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([scores, unit, maximum])
    return fused(*branch.results)


def expand(function: ir.Operation, form: Callable[[ir.Value, ir.Value, ir.Value], ir.Value]) -> None:
    """Replace the op wherever a kernel has it."""
    for op in ops_named(function, NAME):
        with ir.InsertionPoint(op), op.location:
            op.result.replace_all_uses_with(form(*op.operands))
        op.erase()
