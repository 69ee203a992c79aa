# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lowering of ``kv.tile_weights``: the weights of all finite scores under a maximum.

The exact form needs a product, a difference and clamps of the product to f32's range. For a moderate maximum one fused
multiply-subtract suffices: it subtracts the maximum from the exact product, so that all weights of a row are off by one
factor, due to half a unit in the last place of the maximum. For a :func:`large` maximum that factor is unbounded. So a
warp branches to the exact form if one of its rows has a large maximum, or none yet; even there each row uses its own
form, so that the bits of a row do not depend on other rows. Where branches do not pay off, on the host, both forms are
computed and each element selects one.
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
    """Where a maximum is too large for the fast form, by its last place; also the initial maximum of a row."""
    return arith.cmpf(arith.CmpFPredicate.OGT, mlir_math.absf(maximum), filled(maximum.type, LARGE))


def product_of(top: ir.Value) -> ir.Operation | None:
    """The product of which a largest score in powers of two is the clamped result."""
    op = defining_op(top)
    bounded = op is not None and op.name == "arith.minnumf" and splat_of(op.operands[1]) is not None
    return defining_op(op.operands[0]) if bounded and op is not None else op


def fused(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of rows whose maximum is not large."""
    emitter, factor = Emitter(maximum.type, scores.type), of(scale_log2)
    if factor == ONE:  # scores may be products, which must not be contracted
        return mlir_math.exp2(arith.subf(scores, emitter.spread(of(maximum))))
    powers = arith.mulf(scores, emitter.spread(factor), fastmath=CONTRACT)
    return mlir_math.exp2(arith.subf(powers, emitter.spread(of(maximum)), fastmath=CONTRACT))


def powers(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The exponents of 2 for any rows. They are computed from half of the product, which cannot overflow f32."""
    emitter = Emitter(maximum.type, scores.type)

    def repeated(rows: ir.Value) -> ir.Value:
        return emitter.spread(of(arith.mulf(rows, filled(rows.type, 0.5))))

    half = arith.mulf(scores, repeated(scale_log2))
    for hold, within, end in ((arith.maxnumf, "OGT", -LARGEST), (arith.minnumf, "OLT", LARGEST)):  # finite ones
        held = hold(half, filled(scores.type, end / 2))
        infinite = filled(scores.type, math.copysign(math.inf, end))
        half = arith.select(arith.cmpf(arith.CmpFPredicate[within], scores, infinite), held, half)
    less = arith.subf(half, repeated(maximum))
    return arith.addf(less, less)


def powers_by_row(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The exponents of 2, by the form of each row, so that a row's bits do not depend on the maxima of other rows."""
    emitter = Emitter(maximum.type, scores.type)
    under = emitter.spread(of(maximum))
    less = mlir_math.fma(scores, emitter.spread(of(scale_log2)), arith.negf(under))
    return arith.select(large(under), powers(scores, scale_log2, maximum), less)


def chosen(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of any rows, with both forms computed."""
    return mlir_math.exp2(powers_by_row(scores, scale_log2, maximum))


def guarded(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of any rows, with the exact form in a branch for warps in which a row needs it."""
    if of(scale_log2) == ONE:
        return fused(scores, scale_log2, maximum)
    some = WarpAnyOp(large(maximum)).operation.results[0]
    branch = scf.IfOp(some, [scores.type, scale_log2.type, maximum.type], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        less = powers_by_row(scores, scale_log2, maximum)
        scf.yield_([less, filled(scale_log2.type, 1.0), filled(maximum.type, 0.0)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([scores, scale_log2, maximum])
    return fused(*branch.results)


def expand(function: ir.Operation, form: Callable[[ir.Value, ir.Value, ir.Value], ir.Value]) -> None:
    """Replace the op throughout a kernel."""
    for op in ops_named(function, NAME):
        with ir.InsertionPoint(op), op.location:
            op.result.replace_all_uses_with(form(*op.operands))
        op.erase()
