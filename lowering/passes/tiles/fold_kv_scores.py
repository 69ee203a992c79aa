# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute weights directly from products: per-row score modifications then cost one fused multiply-add per element.

If weights start from the current maximum (``skip-kv-maxima``), only the branch that looks for a new maximum needs the
scores themselves. So instead of the score, times a scale, minus the maximum, the pass computes the equivalent sum of
products (:mod:`tiles.affine`): factors and addends that are uniform over a row are combined once per row. A bias per
row, a temperature and a scale then cost no instruction per element, and a function that is linear in a position
difference costs one (``kv.tile_ramp``). The branch gets these differences instead of scores.


A row that has attended to no key has no maximum to subtract; for a row with a large maximum, the rounding error of the
maximum would exceed its score differences (:mod:`tiles.score_weights`). Their scores stay as they are, and the warp
takes the branch. Branches and masks that select among scores stay, and select among the new form. If one of the scores
is a product plus a number per row, such as the bias of far keys, its multiply-add moves after the branches, where it is
hidden by the exponentials: a far tile then costs as much as one without a bias. Scores that would take as many
instructions in the new form stay unchanged.

Before:  %x = %s * scale + kv.tile_broadcast %bias ; %p = exp2(%x * %c - kv.tile_broadcast %m)
         scf.if %any { %top = max(%x) * %c ; ... exp2(%x * %c - kv.tile_broadcast %m2) }
         %x = scf.if %far { %s * scale + kv.tile_broadcast %bias } else { %s * scale + kv.tile_windows %table }
After:   %y = %s * (scale * %c) + kv.tile_broadcast (%bias * %c - %m) ; %p = exp2(%y)
         scf.if %any { %top = max(%y) + %m ; ... exp2(%y - kv.tile_broadcast (%m2 - %m)) }
         %x, %factor, %row = scf.if %far { %s, scale * %c, %bias * %c - %m } else { ... + %table * %c, 1, -%m }
         %y = %x * %factor + kv.tile_broadcast %row
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, math as mlir_math, scf

from kvarn.dialect.ops.tile import TileMaskOp
from kvarn.dialect.ops.weights import LARGEST
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, ops_named, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles import score_weights
from kvarn.lowering.tiles.affine import COLUMNS, MINUS, NOTHING, ONE, ZERO, Emitter, Form, Row, form_of, number, of
from kvarn.lowering.tiles.fast_math import CONTRACT
from kvarn.lowering.tiles.ir import backward, drop, element, filled, is_elementwise, rank, tiled, users

LN2 = math.log(2.0)
_CHOOSES = ("kv.tile_mask", "scf.if")


@dataclass
class Guess:
    """Where weights start from the current maximum: ``branch`` looks for a new one, ``moves`` selects it, and the
    branch recomputes ``powers``.
    """

    branch: ir.Operation
    moves: ir.Operation
    powers: list[ir.Operation]


@dataclass
class Weights:
    """Weights of an online softmax: ``power``, the exponent ``score * scale_log2 - maximum``, or a ``kv.tile_weights``
    whose maximum is computed first.

    ``largest`` is the maximum of a row's scores, ``top`` the same in powers of two; there is no ``guess`` if the
    maximum is computed first.
    """

    power: ir.Operation
    scale_log2: Row
    largest: ir.Operation
    top: ir.Operation
    guess: Guess | None

    @property
    def scaled(self) -> ir.Value:
        """The scores in powers of two, or unscaled for ``kv.tile_weights``."""
        return self.power.operands[0]

    @property
    def score(self) -> ir.Value:
        return self.largest.operands[0]

    @property
    def maximum(self) -> ir.Value:
        whole = self.power.name == score_weights.NAME
        return self.power.operands[2] if whole else self.power.operands[1].owner.operands[0]


def first_weights_of(op: ir.Operation) -> Weights | None:
    """The weights of a ``kv.tile_weights`` whose maximum is computed first; None otherwise."""
    score, scale_log2 = op.operands[0], of(op.operands[1])
    rest = [user for user in users(score) if user != op]
    if len(rest) != 1 or not _is_largest(rest[0]) or rest[0].block != op.block or scale_log2 == ONE:
        return None
    products = users(rest[0].result)
    if len(products) != 1 or products[0].name != "arith.mulf" or of(products[0].operands[1]) != scale_log2:
        return None
    return Weights(op, scale_log2, rest[0], products[0], None)


def weights_of(exp2: ir.Operation) -> Weights | None:
    """The weights that an op computes; None for another op, or if the scores have other uses."""
    power = defining_op(exp2.operands[0])
    if rank(exp2.result) != 2 or power is None or not _is_less_rows(power):
        return None
    scaled = power.operands[0]
    scale_log2, score = scale_of(scaled)
    again = [op for op in users(scaled) if op != power and _is_less_rows(op)]
    exact = [op for op in users(score) if op.name == score_weights.NAME]
    known = [*([power, *again] if score == scaled else [defining_op(scaled)]), *exact]
    again += exact
    rest = [op for op in users(score) if op not in known]
    if len(rest) != 1 or not _is_largest(rest[0]) or any(op not in (power, *again, *rest) for op in users(scaled)):
        return None
    largest = top = rest[0]
    if scale_log2 != ONE:
        products = users(largest.result)
        if len(products) != 1 or products[0].name != "arith.mulf" or of(products[0].operands[1]) != scale_log2:
            return None
        (top,) = products
        bounds = users(top.result)
        if len(bounds) == 1 and score_weights.product_of(bounds[0].results[0]) == top != bounds[0]:
            (top,) = bounds
    branch = largest.parent.operation
    if largest.block == power.block:
        return None if again else Weights(power, scale_log2, largest, top, None)
    moves = _moves(top, power.operands[1].owner.operands[0])
    inside = branch.name == "scf.if" and branch.block == power.block
    if moves is None or not inside or any(op.parent.operation != branch for op in again):
        return None
    asks = defining_op(branch.operands[0])
    guessed = asks is not None and asks.name == "kv.warp_any"
    return Weights(power, scale_log2, largest, top, Guess(branch, moves, again)) if guessed else None


def _is_less_rows(op: ir.Operation) -> bool:
    """Whether an op subtracts one number per row from a tile."""
    spread = defining_op(op.operands[1]) if op.name == "arith.subf" and rank(op.result) == 2 else None
    return (
        spread is not None
        and spread.name == "kv.tile_broadcast"
        and ir.IntegerAttr(spread.attributes["dimension"]).value == 0
    )


def _is_largest(op: ir.Operation) -> bool:
    return op.name == "kv.tile_reduce" and ir.StringAttr(op.attributes["kind"]).value == "max"


def _moves(top: ir.Operation, maximum: ir.Value) -> ir.Operation | None:
    """The select that moves a maximum to the largest score in powers of two, or keeps it if that is larger.

    None if the largest score has other uses.
    """
    used = [op for op in users(top.result) if op.name == "arith.select" or users(op.results[0])]
    if len(used) == 1 and used[0].name == "arith.maxnumf" and used[0].operands[1] == maximum:
        (top,), used = used, users(used[0].result)
    alone = len(used) == 1 and used[0].name == "arith.select"
    return used[0] if alone and list(used[0].operands)[1:] == [top.result, maximum] else None


def scale_of(value: ir.Value) -> tuple[Row, ir.Value]:
    """(the common factor of all elements, the tile that it multiplies)."""
    op = defining_op(value)
    if op is not None and op.name == "arith.mulf":
        form = form_of(op.operands[1])
        if not form.terms and form.constant.is_scalar:
            return form.constant, op.operands[0]
    return ONE, value


@dataclass(frozen=True)
class Options:
    """late: move multiply-adds that are uniform over rows after the branches that select among scores."""

    late: bool = True


# --- forms of scores --------------------------------------------------------------------------------


def choices(value: ir.Value) -> list[ir.Value]:
    """The tiles among which branches and masks select a tile of scores, each once."""
    op = defining_op(value)
    chosen = [value] if op is None or op.name not in _CHOOSES else [x for v in chosen_by(op) for x in choices(v)]
    return list(dict.fromkeys(chosen))


def chosen_by(op: ir.Operation) -> list[ir.Value]:
    """The scores that a mask or the sides of a branch yield."""
    return [op.operands[0]] if op.name == "kv.tile_mask" else [end.operands[0] for end in _ends(op)]


def _ends(branch: ir.Operation) -> list[ir.Operation]:
    return [region.blocks[0].operations[len(region.blocks[0].operations) - 1].operation for region in branch.regions]


def choosing(value: ir.Value) -> list[ir.Operation]:
    """The branches and masks that select a tile of scores, each once."""
    op = defining_op(value)
    if op is None or op.name not in _CHOOSES:
        return []
    return list(dict.fromkeys([op, *(x for v in chosen_by(op) for x in choosing(v))]))


def saved(form: Form) -> int:
    """Instructions per element that a form saves over computing the power; each term costs one more."""
    return form.cost + 1 - max(len(form.terms), 1)


def why_not(w: Weights) -> str | None:
    """Why weights stay unchanged."""
    choosers = choosing(w.score)
    if any(op.name == "scf.if" and len(op.results) > 1 for op in choosers):
        return "a branch yields more than scores"
    inside = [*choosers, *(end for op in choosers if op.name == "scf.if" for end in _ends(op))]
    for op in choosers:
        known = [*inside, w.largest, defining_op(w.scaled), *users(w.scaled), *(w.guess.powers if w.guess else ())]
        if any(user not in known for user in users(op.results[0])):
            return "scores have uses besides weights and their maximum"
    if any(defining_op(x) is None for x in choices(w.score)):
        return "scores have other uses"
    if w.guess is None:
        return None
    gains = [saved(form_of(x)) for x in choices(w.score)]
    return "scores take as few instructions" if min(gains) < 0 or max(gains) <= 0 else None


def ops_of(w: Weights) -> list[ir.Operation]:
    """The ops that compute elements of scores, in order."""
    makers = [op for op in map(defining_op, choices(w.score)) if op is not None]
    cone = backward(makers, lambda op: is_elementwise(op) and rank(op.results[0]) == 2)
    blocks = dict.fromkeys(op.block for op in makers)
    return [o.operation for block in blocks for o in block.operations if o.operation in cone]


def make_ramp(op: ir.Operation, rows: ir.Type) -> None:
    """Compute a chain that is linear in a position difference by one instruction, at the last op of the chain."""
    known = is_elementwise(op) and rank(op.results[0]) == 2 and str(element(op.results[0])) == "f32"
    form = form_of(op.results[0]) if known else Form(())
    if not form.terms or not form.is_ramp or form.cost < 2:
        return
    following = users(op.results[0])
    if all(len(f.results) == 1 and rank(f.results[0]) == 2 and form_of(f.results[0]).is_ramp for f in following):
        return
    if performs(op, "ramp"):
        with ir.InsertionPoint(op), op.location:
            op.results[0].replace_all_uses_with(Emitter(rows, op.results[0].type).tile(form))
        drop(op.results[0])


def split_logarithm(op: ir.Operation, rows: ir.Type) -> None:
    """Split a natural logarithm into one of base 2, which is an instruction, and a factor."""
    if op.name == "math.log":
        type_ = op.results[0].type
        with ir.InsertionPoint(op), op.location:
            base2 = ir.Operation.create("math.log2", [type_], list(op.operands)).result
            made = arith.mulf(base2, Emitter(rows, type_).spread(number(LN2)), fastmath=CONTRACT)
        op.results[0].replace_all_uses_with(made)
        op.erase()


def in_powers(constant: Row, scale_log2: Row, emitter: Emitter) -> Row:
    """A row's addend times the scale, finite for finite numbers, emitted at the insertion point."""
    made = constant * scale_log2
    if constant.op != "of" or scale_log2 == ONE:
        return made
    product, number_of_row = emitter.row(made), constant.of[0]
    if rank(product) and not rank(number_of_row):
        number_of_row = emitter.vector(number_of_row)

    def alike(x: float) -> ir.Value:
        return filled(product.type, x) if rank(product) else arith.constant(product.type, x)

    finite = arith.cmpf(arith.CmpFPredicate.OLT, mlir_math.absf(number_of_row), alike(math.inf))
    held = arith.minnumf(arith.maxnumf(product, alike(-LARGEST)), alike(LARGEST))
    return Row("of", (arith.select(finite, held, product),))


# --- the pass ---------------------------------------------------------------------------------------


def compute_powers(w: Weights, less: ir.Value | None = None) -> ir.Value:
    """Make branches and masks select among powers of two, minus a number per row; returns the result."""
    emitter = Emitter(w.maximum.type, w.score.type)
    choosers, found = choosing(w.score), w.score
    inside = [op for op in choosers if op.name == "kv.tile_mask"]
    inside += [end for op in choosers if op.name == "scf.if" for end in _ends(op)]
    old = {x: list(x.uses) for x in choices(w.score)}
    for value, uses in old.items():
        maker, form = defining_op(value), form_of(value)
        offset = NOTHING if less is None else of(less) * MINUS
        with ir.InsertionPoint.after(maker), w.power.location:
            constant = in_powers(form.constant, w.scale_log2, emitter)
            made = emitter.tile(Form(form.scaled(w.scale_log2).terms, constant + offset))
        for use in uses:
            owner = use.owner.operation
            if owner in inside and (owner.name == "scf.yield" or use.operand_number == 0):
                owner.operands[use.operand_number] = made
        if value == w.score:  # nothing selects
            found = made
    drop(*old)
    return found


def fold(w: Weights, guess: Guess, late: bool) -> None:
    """Compute the weights, and in the branch those under a new maximum, from powers."""
    maximum, scaled = w.maximum, w.scaled
    with ir.InsertionPoint.at_block_begin(w.power.block), w.power.location:
        large = score_weights.large(maximum)
        less = arith.select(large, filled(maximum.type, 0.0), maximum)
    chosen = Chosen(w, less) if late and is_late(w) and performs(w.power, "late") else None
    power = w.largest.operands[0] = compute_powers(w, less) if chosen is None else chosen.power()
    condition = defining_op(guess.branch.operands[0])
    with ir.InsertionPoint(condition), condition.location:
        condition.operands[0] = arith.ori(condition.operands[0], large)
    with ir.InsertionPoint(guess.moves), guess.moves.location:
        guess.moves.operands[0] = arith.ori(guess.moves.operands[0], large)
        top = arith.addf(w.largest.result, less, fastmath=CONTRACT)
        top = arith.minnumf(top, filled(maximum.type, LARGEST))
        guess.moves.operands[1] = arith.maxnumf(top, maximum)  # a row without keys here keeps its maximum
    for op in guess.powers:
        exact = op.name == score_weights.NAME
        spread = None if exact else defining_op(op.operands[1])
        moved_to = op.operands[2] if exact else spread.operands[0]
        with ir.InsertionPoint(op), op.location:
            moved = arith.subf(moved_to, less, fastmath=CONTRACT)
            # The largest score has weight 1, however large it is.
            moved = arith.select(score_weights.large(moved_to), w.largest.result, moved)
            moved = arith.select(large, moved_to, moved)
            if exact:
                one = filled(maximum.type, 1.0)
                op.result.replace_all_uses_with(score_weights.fused(power, one, moved))
            else:
                op.operands[0], op.operands[1] = power, _spread_again(spread, moved)
        if exact:
            op.erase()
        else:
            drop(spread.results[0])
    spread = w.power.operands[1]
    w.power.result.replace_all_uses_with(power)
    w.power.erase()
    drop(spread)
    if scaled != power:
        drop(scaled)
    if chosen is not None:
        chosen.erase_old()


def scale(w: Weights) -> None:
    """Compute weights whose maximum comes first bit-identically to the other weights: from scores in powers of two."""
    scaled = w.scaled
    w.power.operands[0] = w.largest.operands[0] = compute_powers(w)
    if w.power.name == score_weights.NAME:
        with ir.InsertionPoint(w.power), w.power.location:
            w.power.operands[1] = filled(w.maximum.type, 1.0)
    if w.top != w.largest:
        w.top.result.replace_all_uses_with(w.largest.result)
        w.top.erase()
    if scaled != w.scaled:
        drop(scaled)


def _spread_again(spread: ir.Operation, rows: ir.Value) -> ir.Value:
    copy = spread.clone()
    copy.operands[0] = rows
    return copy.result


# --- branches with scores that are one product per row -----------------------------------------------


@dataclass
class Late:
    """Powers whose multiply-add by numbers per row is still pending: ``tile * factor + constant``."""

    tile: ir.Value
    factor: Row
    constant: Row


def is_late(w: Weights) -> bool:
    """Whether branches select among scores of which some are one product per row: then the multiply-add can follow the
    selection, where exponentials hide it.
    """
    choosers = any(op.name == "scf.if" for op in choosing(w.score))
    return choosers and any(_is_product_of_rows(form_of(x)) for x in choices(w.score))


def _is_product_of_rows(form: Form) -> bool:
    return len(form.terms) == 1 and form.terms[0][0] != COLUMNS


def is_positive(row: Row) -> bool:
    """Whether a number per row is known to be positive."""
    if row.op == "number":
        return row.of[0] > 0
    if row.op in ("*", "+"):
        return all(map(is_positive, row.of))
    return row.op == "of" and _positive(row.of[0])


def _positive(value: ir.Value) -> bool:
    op = defining_op(value)
    if op is None:
        return False
    if op.name == "arith.constant" or op.name == "tensor.splat":
        found = of(value)
        return found.op == "number" and found.of[0] > 0 if op.name == "arith.constant" else _positive(op.operands[0])
    if op.name == "kv.tile_terms":  # its units are powers of two
        return value == op.results[1]
    if op.name == "arith.mulf":
        return all(map(_positive, op.operands))
    if op.name in ("arith.maxnumf", "arith.maximumf"):
        return any(map(_positive, op.operands))
    if op.name == "scf.if":
        place = list(op.results).index(value)
        return all(_positive(end.operands[place]) for end in _ends(op))
    return False


class Chosen:
    """Makes branches and masks select among the tiles of :class:`Late`."""

    def __init__(self, w: Weights, less: ir.Value) -> None:
        self.w, self.less, self.emitter = w, less, Emitter(w.maximum.type, w.score.type)
        self.choosers, self.leaves = choosing(w.score), choices(w.score)
        self._found: dict[ir.Value, Late] = {}

    def erase_old(self) -> None:
        """Erase the branches and masks that selected among scores, unused ones first."""
        left = list(self.choosers)
        while left:
            op = next(op for op in left if not users(op.results[0]))
            left.remove(op)
            op.erase()
        drop(*self.leaves)

    def power(self) -> ir.Value:
        """The powers of two, minus a number per row, of everything that is selected from."""
        late = self.of(self.w.score)
        with ir.InsertionPoint.after(defining_op(late.tile)), self.w.power.location:
            return self.emitter.tile(Form(((late.tile, late.factor),), late.constant))

    def of(self, value: ir.Value) -> Late:
        if value not in self._found:
            op = defining_op(value)
            make = {"kv.tile_mask": self._masked, "scf.if": self._chosen}.get(op.name)
            self._found[value] = self._leaf(value) if make is None else make(op)
        return self._found[value]

    def _leaf(self, value: ir.Value) -> Late:
        form = form_of(value)
        with ir.InsertionPoint.after(defining_op(value)), self.w.power.location:
            constant = in_powers(form.constant, self.w.scale_log2, self.emitter) + of(self.less) * MINUS
        form = form.scaled(self.w.scale_log2)
        if _is_product_of_rows(form):
            ((tile, factor),) = form.terms
            return Late(tile, factor, constant)
        with ir.InsertionPoint.after(defining_op(value)), self.w.power.location:
            return Late(self.emitter.tile(Form(form.terms)), ONE, constant)

    def _masked(self, op: ir.Operation) -> Late:
        late = self.of(op.operands[0])
        with ir.InsertionPoint(op), op.location:
            if not is_positive(late.factor):
                late = Late(self.emitter.tile(Form(((late.tile, late.factor),), late.constant)), ONE, ZERO)
            masked = TileMaskOp(late.tile, op.operands[1], op.result.type).operation.result
        return Late(masked, late.factor, late.constant)

    def _chosen(self, branch: ir.Operation) -> Late:
        """A branch that also yields its rows' numbers if the sides differ in them."""
        sides = [self.of(end.operands[0]) for end in _ends(branch)]
        differ = [name for name in ("factor", "constant") if len({getattr(side, name) for side in sides}) > 1]
        found: list[list[ir.Value]] = []
        for side, end in zip(sides, _ends(branch), strict=True):
            with ir.InsertionPoint(end), branch.location:
                found.append([side.tile, *(self.emitter.row(getattr(side, name)) for name in differ)])
        for place in range(1, 1 + len(differ)):
            if any(rank(values[place]) for values in found):
                for values, end in zip(found, _ends(branch), strict=True):
                    with ir.InsertionPoint(end), branch.location:
                        values[place] = self.emitter.vector(values[place])
        with ir.InsertionPoint(branch), branch.location:
            made = scf.IfOp(branch.operands[0], [x.type for x in found[0]], has_else=True)
        for block, end, values in zip((made.then_block, made.else_block), _ends(branch), found, strict=True):
            with ir.InsertionPoint(block), end.location:
                last = scf.YieldOp(values)
            for op in [o.operation for o in end.block.operations][:-1]:
                op.move_before(last.operation)
        numbers = {name: of(x) for name, x in zip(differ, list(made.results)[1:], strict=True)}
        return Late(made.results[0], numbers.get("factor", sides[0].factor), numbers.get("constant", sides[0].constant))


def scale_tables(function: ir.Operation) -> None:
    """Scale a table's contents instead of its reads, if all reads are multiplied by the same number."""
    for table in ops_named(function, "kv.make_table"):
        using = users(table.result)
        stores = [op for op in using if op.name == "kv.table_store"]
        products = [users(op.result) for op in using if op.name == "kv.tile_windows"]
        if any(len(found) != 1 or found[0].name != "arith.mulf" for found in products):
            continue
        factors = {_factor(product, table.result) for (product,) in products}
        factor = factors.pop() if len(factors) == 1 else None
        if factor is None or not performs(table, "scale table"):
            continue
        for op in stores:
            with ir.InsertionPoint(op), op.location:
                op.operands[0] = arith.mulf(op.operands[0], filled(op.operands[0].type, factor), fastmath=CONTRACT)
        for (product,) in products:
            product.result.replace_all_uses_with(_windows(product, table.result))
            product.erase()


def _windows(product: ir.Operation, table: ir.Value) -> ir.Value:
    """The operand of a product that is read from a table."""
    makers = [(x, defining_op(x)) for x in product.operands]
    read = [(x, m) for x, m in makers if m is not None and m.name == "kv.tile_windows"]
    return next(x for x, m in read if m.operands[0] == table)


def _factor(product: ir.Operation, table: ir.Value) -> float | None:
    """The number that multiplies the read of a table."""
    others = [x for x in product.operands if x != _windows(product, table)]
    found = form_of(others[0]) if others else Form((), NOTHING)
    return found.constant.of[0] if not found.terms and found.constant.op == "number" else None


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        made = [
            *map(weights_of, ops_named(function, "math.exp2")),
            *map(first_weights_of, ops_named(function, score_weights.NAME)),
        ]
        found = [w for w in made if w is not None]
        guessed = [(w, w.guess) for w in found if w.guess is not None]
        for w, _ in guessed:
            for op in ops_of(w):
                split_logarithm(op, w.maximum.type)
        for op in walk(function)[1:] if guessed else ():  # also if maxima come first
            make_ramp(op, guessed[0][0].maximum.type)
        folded = False
        for w, guess in guessed:
            why = why_not(w)
            if why is not None:
                remark(w.power, "missed", f"weights are computed from scores: {why}")
            elif performs(w.power, "fold"):
                remark(w.power, "passed", "weights are computed directly from products")
                fold(w, guess, options.late)
                folded = True
        for w in found if folded else ():
            if w.guess is None and why_not(w) is None:
                scale(w)
        if folded:
            scale_tables(function)
