# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles as sums of products, each of a tile and a number per row: for fold-kv-scores.

Numbers per row are expressions; the caller decides where they are emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.tile import TileBroadcastOp, TileRampOp
from kvarn.dialect.ops.weights import LARGEST
from kvarn.lowering.rewrite import defining_op

from .differences import difference_of, from_base
from .fast_math import CONTRACT
from .ir import filled, is_tile, rank, splat_of, splat_tile, users

COLUMNS = "columns"  # in place of a tile: the column's index


@dataclass(frozen=True)
class Row:
    """A number per row: ``op`` is "number" (a Python number), "nothing", "of" (a scalar or vector of f32), "count" (two
    i32, the first minus the second), "+" or "*" (of two rows).
    """

    op: str
    of: tuple

    def __add__(self, other: Row) -> Row:
        if self == ZERO or other == ZERO:
            return other if self == ZERO else self
        return self if other == NOTHING else Row("+", (self, other))

    def __mul__(self, other: Row) -> Row:
        if ZERO in (self, other):
            return ZERO
        if ONE in (self, other):
            return other if self == ONE else self
        if self.op == other.op == "number":
            return number(self.of[0] * other.of[0])
        return Row("*", (self, other))

    @property
    def is_scalar(self) -> bool:
        """Whether it is a single number or value for all rows, not an expression."""
        return self.op == "number" or (self.op == "of" and not rank(self.of[0]))


def number(x: float) -> Row:
    """An f32 number; a finite number beyond f32's range becomes the largest score in powers of two."""
    return Row("number", (min(max(float(x), -LARGEST), LARGEST) if math.isfinite(x) else float(x),))


def of(value: ir.Value) -> Row:
    """The row of a scalar or of a vector along the rows; a constant becomes a number."""
    op = defining_op(value)
    if op is not None and op.name == "tensor.splat":
        return of(op.operands[0])
    known = splat_of(value) if is_tile(value) else None
    if op is not None and op.name == "arith.constant" and not is_tile(value):
        known = op.attributes["value"]
    return Row("of", (value,)) if known is None else number(ir.FloatAttr(known).value)


ZERO, ONE, MINUS = number(0.0), number(1.0), number(-1.0)
NOTHING = Row("nothing", ())  # 0 that is really added, so that products are rounded as with another addend


@dataclass(frozen=True)
class Form:
    """``sum(coefficient * tile) + constant``; ``cost``: instructions per element that it replaces."""

    terms: tuple[tuple[ir.Value | str, Row], ...]
    constant: Row = ZERO
    cost: int = 0

    def scaled(self, by: Row) -> Form:
        return replace(self, terms=tuple((tile, c * by) for tile, c in self.terms), constant=self.constant * by)

    def __add__(self, other: Form) -> Form:
        terms = dict(self.terms)
        for tile, coefficient in other.terms:
            terms[tile] = terms.get(tile, ZERO) + coefficient
        return Form(tuple(terms.items()), self.constant + other.constant, self.cost + other.cost)

    @property
    def is_ramp(self) -> bool:
        return all(tile == COLUMNS for tile, _ in self.terms)


def form_of(value: ir.Value) -> Form:
    """The form of a tile of f32; the tile itself if nothing else is known."""
    op, opaque = defining_op(value), Form(((value, ONE),))
    if op is None:
        return opaque
    if op.name == "tensor.splat" or splat_of(value) is not None:
        return Form((), of(value))
    if op.name == "kv.tile_broadcast":
        along_rows = ir.IntegerAttr(op.attributes["dimension"]).value == 0
        return Form((), of(op.operands[0])) if along_rows else opaque
    if op.name == "kv.tile_ramp":
        return Form(((COLUMNS, of(op.operands[1])),), of(op.operands[0]), 1)
    if op.name == "arith.subf" and difference_of(value) is not None:
        return _difference(op)
    if op.name == "arith.negf":
        found = form_of(op.operands[0]).scaled(MINUS)
        return replace(found, cost=found.cost + 1)
    if op.name in ("arith.addf", "arith.subf"):
        left, right = map(form_of, op.operands)
        found = left + (right.scaled(MINUS) if op.name == "arith.subf" else right)
        products = [x for x in op.operands if _is_product(x) and len(users(x)) == 1]
        return replace(found, cost=found.cost + 1 - bool(products))  # one of them is contracted
    if op.name == "arith.mulf":
        for one, other in ((0, 1), (1, 0)):
            factor, rest = form_of(op.operands[one]), form_of(op.operands[other])
            # A product of a sum may cancel where the sum of products would not; positions are close to each other.
            if not factor.terms and (rest.is_ramp or (len(rest.terms) == 1 and rest.constant == ZERO)):
                return replace(rest.scaled(factor.constant), cost=rest.cost + 1)
    return opaque


def _is_product(value: ir.Value) -> bool:
    op = defining_op(value)
    return op is not None and op.name == "arith.mulf"


def _difference(op: ir.Operation) -> Form:
    """The form of the difference of a query's and keys' float positions, in either order, with a common origin."""
    found, constant = [], ZERO
    for value, sign in zip(op.operands, (ONE, MINUS), strict=True):
        spread = defining_op(value)
        if ir.IntegerAttr(spread.attributes["dimension"]).value == 0:
            constant += of(spread.operands[0]) * sign
            continue
        known, counted = difference_of(op.result), from_base(spread.operands[0])
        assert known is not None
        assert counted is not None
        constant += Row("count", (known.first, counted[1])) * sign
        found.append((COLUMNS, sign))
    return Form(tuple(found), constant, 1)


class Emitter:
    """Emits rows, and tiles of forms, at the insertion point."""

    def __init__(self, rows: ir.Type, tile: ir.Type):
        self.rows, self.tile_type = rows, tile

    def row(self, row: Row) -> ir.Value:
        """A scalar or a vector of f32."""
        if row.op in ("number", "nothing"):
            return arith.constant(ir.F32Type.get(), row.of[0] if row.of else 0.0)
        if row.op == "of":
            return row.of[0]
        if row.op == "count":
            return arith.sitofp(ir.F32Type.get(), arith.subi(*row.of))
        if row.op == "+" and row.of[1].op == "*" and row.of[1].of[1] == MINUS:
            return self._joined(arith.subf, row.of[0], row.of[1].of[0])
        return self._joined(arith.addf if row.op == "+" else arith.mulf, *row.of)

    def _joined(self, op: Callable[..., ir.Value], *rows: Row) -> ir.Value:
        made = [self.row(row) for row in rows]
        if any(map(rank, made)):
            made = [self.vector(x) for x in made]
        return op(*made, fastmath=CONTRACT)

    def vector(self, value: ir.Value) -> ir.Value:
        """A vector along the rows, from a scalar or a vector."""
        if not rank(value):
            return splat_tile(self.rows, value)
        if value.type != self.rows:
            raise ValueError(f"needs vectors of {self.rows}, got {value.type}")
        return value

    def spread(self, row: Row) -> ir.Value:
        """The tile that repeats a row's numbers."""
        if row.op in ("number", "nothing"):
            return filled(self.tile_type, row.of[0] if row.of else 0.0)
        made = self.row(row)
        if not rank(made):
            return splat_tile(self.tile_type, made)
        return TileBroadcastOp(self.vector(made), i64_attr(0), self.tile_type).operation.results[0]

    def tile(self, form: Form) -> ir.Value:
        """A form's tile: one multiply-add per element and term."""
        terms = dict(form.terms)
        step = terms.pop(COLUMNS, None)
        if step is not None:
            rows = [self.vector(self.row(row)) for row in (form.constant, step)]
            total = TileRampOp(*rows, self.tile_type).operation.results[0]
        else:
            total = None if form.constant == ZERO else self.spread(form.constant)
        for tile, coefficient in reversed(terms.items()):
            term = tile if coefficient == ONE else arith.mulf(tile, self.spread(coefficient), fastmath=CONTRACT)
            total = term if total is None else arith.addf(term, total, fastmath=CONTRACT)
        return self.spread(ZERO) if total is None else total
