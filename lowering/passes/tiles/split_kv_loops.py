# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Skip tiles that are fully masked, and omit the mask in tiles where nothing is masked.

The pass analyses position comparisons: the mask of a ``kv.tile_mask`` is split into its comparisons, and for each the
bounds of both sides over the tile are computed as scalars. If a side is linear in the loop's variable, the comparison
bounds the iterations that are not fully masked (by the contract of ``kv.tile_mask``), and the loop's range shrinks to
the intersection over a conjunction's parts, or the union over a disjunction's. If all parts of a conjunction, or one
part of a disjunction, are true in the whole tile, a branch omits the mask and everything that it reads. Parts that are
not understood, such as equalities or array reads, restrict nothing and are never true in a whole tile.

Before:  scf.for %j = %c0 to %n {
           %k = %j * 128 + kv.tile_index ; %seen = arith.cmpi sle, %k, %q ; kv.tile_mask %x, %seen }
After:   scf.for %j = %c0 to min(%n, (high(%q) + 128) / 128) {
           scf.if (%j * 128 + 127 <= low(%q)) { %x } else { kv.tile_mask ... } }
"""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops.tile import TileMaskOp
from kvarn.dsl import intervals
from kvarn.lowering.index import const
from kvarn.lowering.memory_effects import may_write, writes
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, erase_unused, is_inside, ops_named, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import backward, cloned, constant_int, element, is_tile, shape, tiled

P = arith.CmpIPredicate
_MIRRORED = {P.slt: P.sgt, P.sle: P.sge, P.sgt: P.slt, P.sge: P.sle}
_HANDED_ON = ("kv.tile_broadcast", "tensor.splat")
_PREDICATES = {2: P.slt, 3: P.sle, 4: P.sgt, 5: P.sge}
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1  # of an i32
_FAR = 1 << 24  # numbers from here on may overflow 32 bits when positions are added
_TILE = 1 << 12  # the largest factor of a loop's variable in a position
# Positions end near 2**30, and positions of queries start below zero if there are more queries than keys: 32 bits
# suffice for the sum or difference of two positions and a small number.
_POSITION = (-_FAR // 2, (1 << 30) - _FAR)
_ANY = (_LEAST, _MOST)


@dataclass(frozen=True)
class Options:
    """skip: skip fully masked tiles; unmask: omit masks where nothing is masked."""

    skip: bool = True
    unmask: bool = True


class Unknown(Exception):
    """A value's bounds are unknown."""


@dataclass(frozen=True)
class Linear:
    """``factor * induction variable + base``; the base is a number, or a value defined before the loop.

    ``span`` is the range of the elements. If computed elements may overflow 32 bits, bounds are computed in 64 bits,
    and ``wraps`` is the condition, before the loop, that they do: then elements are different, and nothing is known.
    """

    factor: int
    base: ir.Value | int
    span: intervals.Interval = _POSITION
    wraps: ir.Value | None = None

    @staticmethod
    def number(value: int) -> Linear:
        return Linear(0, value, (value, value))

    def __sub__(self, other: Linear) -> Linear:
        """The difference of two sides, clamped to 32 bits, so that a number that means "no bound" stays one."""
        span, wraps = spanned("-", self.span, other.span), _or(self.wraps, other.wraps)
        return Linear(self.factor - other.factor, _arith("-", self.base, other.base, not fits(span)), span, wraps)

    @property
    def far(self) -> bool:
        return not fits(self.span)


def spanned(op: str, a: intervals.Interval, b: intervals.Interval) -> intervals.Interval:
    found = [_numbers(op, x, y) for x in a for y in b]
    return min(found), max(found)


def fits(span: intervals.Interval) -> bool:
    """Whether 32 bits suffice for these numbers plus a tile."""
    return _LEAST + _TILE <= span[0] and span[1] <= _MOST - _TILE


def _numbers(op: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def _or(a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    if a is None or b is None:
        return b if a is None else a
    return a if a == b else arith.ori(a, b)


def _value(x: ir.Value | int) -> ir.Value:
    return const(min(max(x, _LEAST), _MOST)) if isinstance(x, int) else x


def _wide(x: ir.Value | int) -> ir.Value:
    return const(x, 64) if isinstance(x, int) else arith.extsi(ir.IntegerType.get_signless(64), x)


def _narrow(wide: ir.Value) -> ir.Value:
    held = arith.maxsi(arith.minsi(wide, const(_MOST, 64)), const(_LEAST, 64))
    return arith.trunci(ir.IntegerType.get_signless(32), held)


_OPS = {"+": arith.addi, "-": arith.subi, "*": arith.muli}


def _arith(op: str, a: ir.Value | int, b: ir.Value | int, saturating: bool = False) -> ir.Value | int:
    """``a op b``, a number if both are; in 32 bits, or clamped to them."""
    if isinstance(a, int) and isinstance(b, int):
        return _numbers(op, a, b)
    if op in "+-" and isinstance(b, int) and b == 0:
        return a
    if not saturating:
        return _OPS[op](_value(a), _value(b))
    return _narrow(_OPS[op](_wide(a), _wide(b)))


class Bounds:
    """The minimum and the maximum of integer tiles, as :class:`Linear` in a loop's variable.

    Values are emitted at the current insertion point, before the loop. ``moving`` is a number of the loop's body that
    replaces the induction variable, such as the position of a tile in a list.
    """

    def __init__(self, loop: ir.Operation, moving: ir.Value | None = None):
        self.loop, self.induction = loop, loop.regions[0].blocks[0].arguments[0]
        self.variable = self.induction if moving is None else moving
        self._found: dict[ir.Value, tuple[Linear, Linear]] = {}

    def of(self, value: ir.Value) -> tuple[Linear, Linear]:
        """(low, high) of a scalar or a tile; Unknown if they cannot be determined."""
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def _compute(self, value: ir.Value) -> tuple[Linear, Linear]:
        if value == self.variable:
            return Linear(1, 0), Linear(1, 0)
        if value == self.induction:
            raise Unknown
        known = constant_int(value)
        if known is not None:
            return Linear.number(known), Linear.number(known)
        op, kind = defining_op(value), element(value) if is_tile(value) else value.type
        if str(kind) not in ("i32", "index"):  # positions are i32
            raise Unknown
        if not is_tile(value) and self._before(value):
            found = Linear(0, value, _POSITION if is_near(value) else _ANY)
            return found, found
        if op is None:
            raise Unknown
        rule = getattr(self, "_" + op.name.replace(".", "_"), None)
        if rule is None:
            raise Unknown
        return rule(op)

    def _before(self, value: ir.Value) -> bool:
        """Whether a value is defined before the loop."""
        maker = defining_op(value) or ir.BlockArgument(value).owner.owner.operation
        return not is_inside(maker, self.loop)

    def _memref_load(self, op: ir.Operation) -> tuple[Linear, Linear]:
        """A number that every iteration reads and none writes: read before the loop, if there is an iteration."""
        same = op.parent.operation == self.loop and all(map(self._before, op.operands))
        if not same or any(map(writes_buffers, walk(self.loop)[1:])):
            raise Unknown
        some = arith.cmpi(P.slt, *list(self.loop.operands)[:2])
        branch = scf.IfOp(some, [op.result.type], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([op.clone().result])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([const(0)])
        return Linear(0, branch.results[0], _ANY), Linear(0, branch.results[0], _ANY)

    def _kv_tile_index(self, op: ir.Operation) -> tuple[Linear, Linear]:
        last = shape(op.results[0])[0] - 1
        return Linear(0, 0, (0, last)), Linear(0, last, (0, last))

    def _kv_tile_broadcast(self, op: ir.Operation) -> tuple[Linear, Linear]:
        return self.of(op.operands[0])

    _tensor_splat = _arith_index_cast = _kv_tile_broadcast

    def _arith_addi(self, op: ir.Operation) -> tuple[Linear, Linear]:
        (a, b), (c, d) = self.of(op.operands[0]), self.of(op.operands[1])
        span = intervals.either(a.span, c.span) if any(map(self._of_kernel, op.operands)) else None
        return self._made("+", (a, c), (b, d), span)

    def _of_kernel(self, value: ir.Value) -> bool:
        """Whether the kernel computed a number before the loop, so that sums with it are positions."""
        op = defining_op(value)
        while op is not None and op.name in _HANDED_ON:
            value = op.operands[0]
            op = defining_op(value)
        return not is_tile(value) and self._before(value) and constant_int(value) is None and is_near(value)

    def _arith_subi(self, op: ir.Operation) -> tuple[Linear, Linear]:
        (a, b), (c, d) = self.of(op.operands[0]), self.of(op.operands[1])
        return self._made("-", (a, d), (b, c))

    def _arith_muli(self, op: ir.Operation) -> tuple[Linear, Linear]:
        for one, other in ((0, 1), (1, 0)):
            by = constant_int(op.operands[other])
            if by is not None and by >= 0:
                low, high = self.of(op.operands[one])
                number, span = Linear.number(by), None
                # The first position of a tile, from the loop's variable: functions get positions as tiles.
                if abs(low.factor) == 1 and not is_tile(op.result) and by <= _TILE:
                    span = _POSITION
                return self._made("*", (low, number), (high, number), span)
        raise Unknown

    def _made(
        self,
        op: str,
        of_low: tuple[Linear, Linear],
        of_high: tuple[Linear, Linear],
        span: intervals.Interval | None = None,
    ) -> tuple[Linear, Linear]:
        """The bounds after an operation on both bounds, including the condition that one of them wraps around.

        ``span`` is the range of the elements, if it is known otherwise.
        """
        if span is None:
            span = spanned(op, of_low[0].span, of_low[1].span)
        wraps: ir.Value | None = None
        for x in (*of_low, *of_high):
            wraps = _or(wraps, x.wraps)
        factors = [
            x.factor * y.base if op == "*" else x.factor + (y.factor if op == "+" else -y.factor)
            for x, y in (of_low, of_high)
        ]
        if max(map(abs, factors)) > _MOST:
            raise Unknown
        if fits(span):
            bases = [_arith(op, x.base, y.base) for x, y in (of_low, of_high)]
        else:
            wides = [_OPS[op](_wide(x.base), _wide(y.base)) for x, y in (of_low, of_high)]
            bases, span = [_narrow(x) for x in wides], _ANY
            last = const(_POSITION[1]) if self.variable != self.induction else self.loop.operands[1]
            for wide, factor, beyond, most in zip(wides, factors, (P.slt, P.sgt), (_LEAST, _MOST), strict=True):
                # The bound is at the first iterations, which start at zero or below.
                if factor and (factor < 0) == (beyond == P.slt):
                    wide = _OPS["+"](wide, _OPS["*"](_wide(last), const(factor, 64)))
                wraps = _or(wraps, arith.cmpi(beyond, wide, const(most, 64)))
        low, high = (Linear(f, base, span, wraps) for f, base in zip(factors, bases, strict=True))
        return low, high

    def _monotone(self, op: ir.Operation) -> tuple[Linear, Linear]:
        """An op that is monotone in its first operand, with a positive constant: applied to both bounds.

        An unsigned op is monotone for non-negative numbers.
        """
        by = constant_int(op.operands[1])
        if by is None or not (0 <= by < 32 if "shr" in op.name else by > 0):
            raise Unknown
        low, high = self.of(op.operands[0])
        if low.factor:
            raise Unknown
        if op.name.endswith("ui") and not is_counted(op.operands[0]):
            wraps = _or(low.wraps, arith.cmpi(P.slt, _value(low.base), const(0)))
            low, high = replace(low, wraps=wraps), replace(high, wraps=wraps)
        least, most = (x >> by if "shr" in op.name else x // by for x in low.span)
        return self._each(op, [(low, high)], [const(by)], (least, most + 1))

    _arith_divsi = _arith_divui = _arith_floordivsi = _arith_shrsi = _arith_shrui = _monotone

    def _extremum(self, op: ir.Operation) -> tuple[Linear, Linear]:
        pairs = [self.of(x) for x in op.operands]
        return self._each(op, pairs, [], functools.reduce(intervals.either, (low.span for low, _ in pairs)))

    _arith_minsi = _arith_maxsi = _extremum

    def _each(self, op: ir.Operation, bounds: list, others: list, span: intervals.Interval) -> tuple[Linear, Linear]:
        if any(x.factor for pair in bounds for x in pair):
            raise Unknown
        made, wraps = [], functools.reduce(_or, (low.wraps for low, _ in bounds))
        for side in range(2):
            operands = [_value(pair[side].base) for pair in bounds]
            result = ir.Operation.create(op.name, [operands[0].type], [*operands, *others]).result
            made.append(Linear(0, result, span, wraps))
        return made[0], made[1]

    def _arith_andi(self, op: ir.Operation) -> tuple[Linear, Linear]:
        for x in op.operands:
            mask = constant_int(x)
            if mask is not None and mask >= 0:
                return Linear(0, 0, (0, mask)), Linear(0, mask, (0, mask))
        raise Unknown

    def _arith_remsi(self, op: ir.Operation) -> tuple[Linear, Linear]:
        by = constant_int(op.operands[1])
        if by is None or by < 1:
            raise Unknown
        counts = op.name == "arith.remui" or is_counted(op.operands[0])
        span = 0 if counts else 1 - by, by - 1
        return Linear(0, span[0], span), Linear(0, span[1], span)

    _arith_remui = _arith_remsi


def is_counted(value: ir.Value) -> bool:
    """Whether an integer is known to be non-negative."""
    op, known = defining_op(value), constant_int(value)
    if op is None or known is not None:
        return known is not None and known >= 0
    if op.name == "kv.tile_index" or (op.name == "arith.remui" and (constant_int(op.operands[1]) or -1) > 0):
        return True
    if op.name in ("arith.maxsi", "arith.andi"):
        return any(map(is_counted, op.operands))
    if op.name in _HANDED_ON:
        return is_counted(op.operands[0])
    return False


def is_near(value: ir.Value) -> bool:
    """Whether a number from before a loop has at most the magnitude of positions.

    Array elements, and results of functions of scalars, are not known to be. Numbers that a kernel computes from its
    own lengths and offsets are.
    """
    op = defining_op(value)
    return op is None or (op.name != "memref.load" and not _is_any(value))


def _is_any(value: ir.Value) -> bool:
    op, known = defining_op(value), constant_int(value)
    if op is None or known is not None or not op.name.startswith("arith."):
        return known is not None and abs(known) >= _FAR
    if intervals.ANY in op.attributes or op.name == "arith.shli":
        return True
    if op.name == "arith.muli" and any(abs(constant_int(x) or 0) > _TILE for x in op.operands):
        return True
    return any(map(_is_any, op.operands))


def writes_buffers(op: ir.Operation) -> bool:
    """Whether an op may write a buffer; names may alias."""
    if not may_write(op.name):
        return False
    found = writes(op)
    return found.everything or bool(found.buffers)


@dataclass(frozen=True)
class Comparison:
    """``left predicate right`` with the bounds of both sides."""

    predicate: P
    left: tuple[Linear, Linear]
    right: tuple[Linear, Linear]

    @staticmethod
    def known(op: ir.Operation, bounds: Bounds) -> Comparison | None:
        """The comparison of an op; None for other ops, and for unknown bounds."""
        if op.name != "arith.cmpi":
            return None
        try:
            return Comparison.of(op, bounds)
        except Unknown:
            return None

    @staticmethod
    def of(op: ir.Operation, bounds: Bounds) -> Comparison:
        predicate = _PREDICATES.get(ir.IntegerAttr(op.attributes["predicate"]).value)
        if predicate is None:
            raise Unknown
        left, right = bounds.of(op.operands[0]), bounds.of(op.operands[1])
        if predicate in (P.sgt, P.sge):
            predicate, left, right = _MIRRORED[predicate], right, left
        return Comparison(predicate, left, right)

    @property
    def strict(self) -> int:
        return 1 if self.predicate == P.slt else 0

    @property
    def wraps(self) -> ir.Value | None:
        """Whether elements of a side wrap around, so that nothing is known."""
        return functools.reduce(_or, (x.wraps for x in (*self.left, *self.right)))

    def always(self, variable: ir.Value) -> ir.Value:
        """Whether it is true for all elements of an iteration's tile."""
        holds, wraps = self._always(variable), self.wraps
        return holds if wraps is None else arith.andi(holds, arith.xori(wraps, const(1, 1)))

    def _always(self, variable: ir.Value) -> ir.Value:
        difference = self.right[0] - self.left[1]
        factor = difference.factor
        if abs(factor) > _TILE:
            moved = _OPS["*"](_wide(variable), const(factor, 64))
            wide = _OPS["-"](_wide(self.right[0].base), _wide(self.left[1].base))
            return arith.cmpi(P.sge, _OPS["+"](moved, wide), const(self.strict, 64))
        if difference.far and factor:  # the sum may overflow 32 bits
            moved = _arith("*", variable, factor)
            return arith.cmpi(P.sge, _value(moved), _value(_arith("-", self.strict, difference.base, True)))
        total = _arith("+", _arith("*", variable, factor), difference.base) if factor else difference.base
        return arith.cmpi(P.sge, _value(total), const(self.strict))

    def range(self) -> Range:
        """The iterations in which it may be true for some element."""
        found, wraps = self._range(), self.wraps
        if wraps is None:
            return found
        low, high = (
            None if x is None else arith.select(wraps, const(end), x)
            for x, end in ((found.low, 0), (found.high, _MOST))
        )
        return Range(low, high)

    def _range(self) -> Range:
        difference = self.right[1] - self.left[0]  # some element is true only if this is at least `strict`
        by, far = abs(difference.factor), difference.far
        if by > _TILE:
            return self._wide_range(difference.factor)
        if difference.factor < 0:  # iterations i with by * i > base - strict are fully masked
            last = _arith("-", difference.base, self.strict, far)
            return Range(high=arith.divui(arith.maxsi(_value(_arith("+", last, by, far)), const(0)), const(by)))
        if difference.factor > 0:  # iterations i with by * i < strict - base are fully masked
            first = arith.maxsi(_value(_arith("-", self.strict, difference.base, far)), const(0))
            return Range(low=arith.divui(arith.addi(first, const(by - 1)), const(by)))
        return Range()

    def _wide_range(self, factor: int) -> Range:
        """The same in 64 bits, which suffice for products of positions and any number."""
        base = _OPS["-"](_wide(self.right[1].base), _wide(self.left[0].base))
        least = const(self.strict, 64)
        first = _OPS["+"](_OPS["-"](base, least), const(-factor, 64)) if factor < 0 else _OPS["-"](least, base)
        first = arith.maxsi(first, const(0, 64))
        if factor < 0:
            return Range(high=_narrow(arith.divui(first, const(-factor, 64))))
        return Range(low=_narrow(arith.divui(arith.addi(first, const(factor - 1, 64)), const(factor, 64))))


@dataclass(frozen=True)
class Range:
    """The iterations that a mask may not fully mask: from ``low`` to before ``high``; None: unknown."""

    low: ir.Value | None = None
    high: ir.Value | None = None

    def __and__(self, other: Range) -> Range:
        return Range(_of_known(arith.maxsi, self.low, other.low), _of_known(arith.minsi, self.high, other.high))

    def __or__(self, other: Range) -> Range:
        return Range(_of_both(arith.minsi, self.low, other.low), _of_both(arith.maxsi, self.high, other.high))


def _of_known(op: Any, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    return op(a, b) if a is not None and b is not None else b if a is None else a


def _of_both(op: Any, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    return None if a is None or b is None else op(a, b)


def range_of(mask: ir.Value, bounds: Bounds, within: Range) -> Range:
    """The part of a range that a mask may not fully mask, by its comparisons; other parts count as true."""
    op = defining_op(mask)
    if op is None:
        return within
    if op.name in _HANDED_ON:
        return range_of(op.operands[0], bounds, within)
    if op.name == "arith.andi":
        return range_of(op.operands[1], bounds, range_of(op.operands[0], bounds, within))
    if op.name == "arith.ori":
        left, right = (range_of(x, bounds, Range()) for x in op.operands)
        return within & (left | right)
    comparison = Comparison.known(op, bounds)
    return within if comparison is None else within & comparison.range()


def narrow(loop: ir.Operation, mask: ir.Value, bounds: Bounds) -> None:
    """Shrink a loop of step 1 to the iterations that are not fully masked."""
    found = range_of(mask, bounds, Range(loop.operands[0], loop.operands[1]))
    loop.operands[0], loop.operands[1] = found.low, found.high


@dataclass(frozen=True)
class Whole:
    """The conditions for an unmasked tile: all of the parts, or any of them."""

    parts: tuple[Comparison | Whole, ...]
    every: bool = True

    def holds(self, variable: ir.Value) -> ir.Value:
        """Whether they are true, at the insertion point."""
        found: ir.Value | None = None
        for part in self.parts:
            one = part.always(variable) if isinstance(part, Comparison) else part.holds(variable)
            found = one if found is None else (arith.andi if self.every else arith.ori)(found, one)
        return const(int(self.every), 1) if found is None else found


def whole_of(mask: ir.Value, bounds: Bounds) -> Comparison | Whole | None:
    """The condition that a mask is true in a whole tile, by its comparisons; None if it never is."""
    op = defining_op(mask)
    if op is None:
        return None
    if op.name in _HANDED_ON:
        return whole_of(op.operands[0], bounds)
    if op.name == "arith.constant":
        return None if constant_int(mask) in (None, 0) else Whole(())
    if op.name in ("arith.andi", "arith.ori"):
        parts = [whole_of(x, bounds) for x in op.operands]
        known = tuple(part for part in parts if part is not None)
        every = op.name == "arith.andi"
        return None if not known or (every and len(known) < len(parts)) else Whole(known, every)
    return Comparison.known(op, bounds)


def conditions(mask: ir.Value) -> list[ir.Operation | None]:
    """The ops of a mask's conditions; None for one that is a block argument."""
    op = defining_op(mask)
    if op is not None and op.name in (*_HANDED_ON, "arith.andi", "arith.ori"):
        return [found for x in op.operands for found in conditions(x)]
    return [] if op is not None and op.name == "arith.constant" else [op]


def joined(mask: ir.Value) -> list[ir.Value]:
    """The masks of a conjunction; a mask of another form alone."""
    op = defining_op(mask)
    return [mask] if op is None or op.name != "arith.andi" else [x for v in op.operands for x in joined(v)]


def divide(op: ir.Operation, bounds: Bounds) -> Comparison | Whole | None:
    """Mask by unknown parts first, so that this op has only comparisons; returns their condition for a whole tile."""
    parts = joined(op.operands[1])
    known = [v for v in parts if whole_of(v, bounds) is not None]
    rest = [v for v in parts if v not in known]
    if not known or not rest or not performs(op, "divide"):
        return None
    with ir.InsertionPoint(op), op.location:
        unknown, comparisons = (functools.reduce(arith.andi, of) for of in (rest, known))
        op.operands[0] = TileMaskOp(op.operands[0], unknown, op.result.type).operation.result
        op.operands[1] = comparisons
    return whole_of(comparisons, bounds)


def guard(op: ir.Operation, variable: ir.Value, seen: Comparison | Whole) -> None:
    """Omit a mask where the whole tile is unmasked; its parts move into the other branch."""
    scores, mask = op.operands
    with ir.InsertionPoint(op), op.location:
        whole = Whole((seen,)).holds(variable)
        branch = scf.IfOp(whole, [scores.type], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([scores])
        with ir.InsertionPoint(branch.else_block):
            parts = backward([defining_op(mask)], lambda o: o.results and is_tile(o.results[0]) and _positional(o))
            values: dict[ir.Value, ir.Value] = {}
            for part in sorted(parts, key=_order(parts)):
                cloned(part, values)
            values[scores] = scores
            scf.yield_([cloned(op, values).result])
    op.result.replace_all_uses_with(branch.results[0])
    op.erase()
    # Ops that only the mask used would be merged with the copies, and computed where they are not needed.
    erase_unused(sorted(parts, key=_order(parts)))


def _positional(op: ir.Operation) -> bool:
    return str(element(op.results[0])) in ("i1", "i32")


def _order(ops: Set[ir.Operation]):
    """A sort key that puts operands first."""
    depth: dict[ir.Operation, int] = {}

    def of(op: ir.Operation) -> int:
        if op not in depth:
            makers = [defining_op(x) for x in op.operands]
            depth[op] = 1 + max((of(m) for m in makers if m is not None and m in ops), default=0)
        return depth[op]

    return of


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        for op in ops_named(function, "kv.tile_mask"):
            loop = enclosing(op, "scf.for")
            if loop is None or str(loop.operands[0].type) != "i32":  # positions are i32
                continue
            mask = op.operands[1]
            with ir.InsertionPoint(loop), op.location:
                bounds = Bounds(loop)
                seen, parts = whole_of(mask, bounds), conditions(mask)
                compared = sum(x is not None and Comparison.known(x, bounds) is not None for x in parts)
                # If a branch omits the mask, masked keys may be visible.
                always, step = op.parent.operation == loop, constant_int(loop.operands[2])
                if options.skip and always and step == 1 and performs(loop, "narrow"):
                    narrow(loop, mask, bounds)
                if seen is None and options.unmask:
                    seen = divide(op, bounds)
            if seen is None and always:
                why = f"{compared} of {len(parts)} conditions compare positions"
                remark(op, "missed", f"every tile is masked: {why}")
            elif seen is not None and options.unmask and performs(op, "unmask"):
                remark(op, "passed", "tiles that the mask does not touch are not masked", conditions=len(parts))
                guard(op, loop.regions[0].blocks[0].arguments[0], seen)
