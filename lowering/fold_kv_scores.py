# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute weights from products: what changes scores and is a number a row costs one multiplication and addition.

Where weights begin with the maximum so far (``skip-kv-maxima``), only the branch that looks for another maximum needs
scores themselves. So what is computed is not the score, then that times a number, less the maximum, but the sum of
products that all of it is (:mod:`affine_tiles`): what is added to a row, or multiplies it, is computed once for the
row. A bias that is one number a row, a temperature and a scale then cost no instruction of an element, and what is
linear in a difference of positions one (``kv.tile_ramp``). The branch has these differences instead of scores.

A row that has seen nothing has no maximum to be less than: its scores stay as they are, and its warp takes the branch.
Branches that choose among scores, and masks, stay: what they choose among is computed in this form. Scores that take as
many instructions in it stay as they are.

Before:  %x = %s * scale + kv.tile_broadcast %bias ; %p = exp2(%x * unit - kv.tile_broadcast %m)
         scf.if %any { %top = max(%x) * unit ; ... exp2(%x * unit - kv.tile_broadcast %m2) }
After:   %y = %s * (scale * unit) + kv.tile_broadcast (%bias * unit - %m) ; %p = exp2(%y)
         scf.if %any { %top = max(%y) + %m ; ... exp2(%y - kv.tile_broadcast (%m2 - %m)) }
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from .affine_tiles import MINUS, NOTHING, ONE, Emitter, Form, Row, form_of, number, of
from .pass_base import kv_pass
from .remarks import remark
from .rewrite import defining_op, ops_named, walk
from .rewrites import performs
from .tile_ir import backward, drop, element, filled, is_elementwise, rank, tiled, users
from .tile_math import CONTRACT

LN2 = math.log(2.0)
UNSEEN = -1.0e37  # maxima below are of rows that have seen nothing
_CHOOSES = ("kv.tile_mask", "scf.if")


@dataclass
class Guess:
    """Where weights began with the maximum so far: ``branch`` looks for another, ``moves`` the maximum to it, and
    computes ``powers`` again.
    """

    branch: ir.Operation
    moves: ir.Operation
    powers: list[ir.Operation]


@dataclass
class Weights:
    """Weights of an online softmax: ``power``, ``score * unit - maximum``, is what 2 is raised to.

    ``largest`` is of the scores of a row, ``top`` the same in powers of two; without a ``guess`` maxima come first.
    """

    power: ir.Operation
    unit: Row
    largest: ir.Operation
    top: ir.Operation
    guess: Guess | None

    @property
    def scaled(self) -> ir.Value:
        return self.power.operands[0]

    @property
    def score(self) -> ir.Value:
        return self.largest.operands[0]

    @property
    def maximum(self) -> ir.Value:
        return self.power.operands[1].owner.operands[0]


def weights_of(exp2: ir.Operation) -> Weights | None:
    """The weights that an op makes; None of another op, and of scores that are used for more than weights."""
    power = defining_op(exp2.operands[0])
    if rank(exp2.result) != 2 or power is None or not _is_less_rows(power):
        return None
    scaled = power.operands[0]
    unit, score = unit_of(scaled)
    again = [op for op in users(scaled) if op != power and _is_less_rows(op)]
    known = [power, *again] if score == scaled else [defining_op(scaled)]
    rest = [op for op in users(score) if op not in known]
    if len(rest) != 1 or not _is_largest(rest[0]) or any(op not in (power, *again, *rest) for op in users(scaled)):
        return None
    largest = top = rest[0]
    if unit != ONE:
        products = users(largest.result)
        if len(products) != 1 or products[0].name != "arith.mulf" or of(products[0].operands[1]) != unit:
            return None
        (top,) = products
    branch = largest.parent.operation
    if largest.block == power.block:
        return None if again else Weights(power, unit, largest, top, None)
    moves = _moves(top, power.operands[1].owner.operands[0])
    inside = branch.name == "scf.if" and branch.block == power.block
    if moves is None or not inside or any(op.parent.operation != branch for op in again):
        return None
    asks = defining_op(branch.operands[0])
    guessed = asks is not None and asks.name == "kv.warp_any"
    return Weights(power, unit, largest, top, Guess(branch, moves, again)) if guessed else None


def _is_less_rows(op: ir.Operation) -> bool:
    """Whether an op takes one number a row off a tile."""
    spread = defining_op(op.operands[1]) if op.name == "arith.subf" and rank(op.result) == 2 else None
    return (
        spread is not None
        and spread.name == "kv.tile_broadcast"
        and ir.IntegerAttr(spread.attributes["dimension"]).value == 0
    )


def _is_largest(op: ir.Operation) -> bool:
    return op.name == "kv.tile_reduce" and ir.StringAttr(op.attributes["kind"]).value == "max"


def _moves(top: ir.Operation, maximum: ir.Value) -> ir.Operation | None:
    """The select that moves a maximum to the largest score in powers of two; None where that is used otherwise."""
    found = [op for op in users(top.result) if op.name == "arith.select"]
    used = [op for op in users(top.result) if op.name != "arith.select" and users(op.results[0])]
    if len(found) != 1 or used or list(found[0].operands)[1:] != [top.result, maximum]:
        return None
    return found[0]


def unit_of(value: ir.Value) -> tuple[Row, ir.Value]:
    """(the number by which all elements are multiplied, what is multiplied)."""
    op = defining_op(value)
    if op is not None and op.name == "arith.mulf":
        form = form_of(op.operands[1])
        if not form.terms and form.constant.is_scalar:
            return form.constant, op.operands[0]
    return ONE, value


# --- forms of scores --------------------------------------------------------------------------------


def choices(value: ir.Value) -> list[ir.Value]:
    """What a tile of scores is, by branches and masks: tiles of their own, each once."""
    op = defining_op(value)
    chosen = [value] if op is None or op.name not in _CHOOSES else [x for v in chosen_by(op) for x in choices(v)]
    return list(dict.fromkeys(chosen))


def chosen_by(op: ir.Operation) -> list[ir.Value]:
    """The scores that a mask or the sides of a branch have."""
    return [op.operands[0]] if op.name == "kv.tile_mask" else [end.operands[0] for end in _ends(op)]


def _ends(branch: ir.Operation) -> list[ir.Operation]:
    return [region.blocks[0].operations[len(region.blocks[0].operations) - 1].operation for region in branch.regions]


def choosing(value: ir.Value) -> list[ir.Operation]:
    """The branches and masks that choose what a tile of scores is, each once."""
    op = defining_op(value)
    if op is None or op.name not in _CHOOSES:
        return []
    return list(dict.fromkeys([op, *(x for v in chosen_by(op) for x in choosing(v))]))


def saved(form: Form) -> int:
    """Instructions of an element that a form saves of those of a power: more than one for each term."""
    return form.cost + 1 - max(len(form.terms), 1)


def why_not(w: Weights) -> str | None:
    """Why weights stay as they are."""
    choosers = choosing(w.score)
    if any(op.name == "scf.if" and len(op.results) > 1 for op in choosers):
        return "a branch has more than scores"
    inside = [*choosers, *(end for op in choosers if op.name == "scf.if" for end in _ends(op))]
    for op in choosers:
        known = [*inside, w.largest, defining_op(w.scaled), *users(w.scaled)]
        if any(user not in known for user in users(op.results[0])):
            return "scores are used for more than weights and their maximum"
    if any(defining_op(x) is None for x in choices(w.score)):
        return "scores are handed on"
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
    """Compute what is linear in a difference of positions by one instruction, if an op is the last of its chain."""
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
    """Make a natural logarithm one of base 2, which is an instruction, times a number."""
    if op.name == "math.log":
        type_ = op.results[0].type
        with ir.InsertionPoint(op), op.location:
            base2 = ir.Operation.create("math.log2", [type_], list(op.operands)).result
            made = arith.mulf(base2, Emitter(rows, type_).spread(number(LN2)), fastmath=CONTRACT)
        op.results[0].replace_all_uses_with(made)
        op.erase()


# --- the pass ---------------------------------------------------------------------------------------


def compute_powers(w: Weights, less: ir.Value | None = None) -> ir.Value:
    """Have branches and masks choose among powers of two, less a number a row, in place of scores; those."""
    emitter = Emitter(w.maximum.type, w.score.type)
    choosers, found = choosing(w.score), w.score
    inside = [op for op in choosers if op.name == "kv.tile_mask"]
    inside += [end for op in choosers if op.name == "scf.if" for end in _ends(op)]
    for value, uses in {x: list(x.uses) for x in choices(w.score)}.items():
        maker, form = defining_op(value), form_of(value).scaled(w.unit)
        offset = NOTHING if less is None else of(less) * MINUS
        with ir.InsertionPoint.after(maker), w.power.location:
            made = emitter.tile(Form(form.terms, form.constant + offset))
        for use in uses:
            owner = use.owner.operation
            if owner in inside and (owner.name == "scf.yield" or use.operand_number == 0):
                owner.operands[use.operand_number] = made
        if value == w.score:  # nothing chooses
            found = made
        drop(value)
    return found


def fold(w: Weights, guess: Guess) -> None:
    """Compute weights, and in the branch those with another maximum, of powers."""
    maximum, scaled = w.maximum, w.scaled
    with ir.InsertionPoint.at_block_begin(w.power.block), w.power.location:
        zero, lowest = (filled(maximum.type, x) for x in (0.0, UNSEEN))
        unseen = arith.cmpf(arith.CmpFPredicate.OLT, maximum, lowest)
        less = arith.select(unseen, zero, maximum)
    power = w.largest.operands[0] = compute_powers(w, less)
    condition = defining_op(guess.branch.operands[0])
    with ir.InsertionPoint(condition), condition.location:
        condition.operands[0] = arith.ori(condition.operands[0], unseen)
    with ir.InsertionPoint(guess.moves), guess.moves.location:
        guess.moves.operands[0] = arith.ori(guess.moves.operands[0], unseen)
        top = arith.addf(w.largest.result, less, fastmath=CONTRACT)
        guess.moves.operands[1] = arith.maxnumf(top, maximum)  # of a row that sees nothing here either: what it was
    for op in guess.powers:
        spread = defining_op(op.operands[1])
        with ir.InsertionPoint(op), op.location:
            moved = arith.subf(spread.operands[0], less, fastmath=CONTRACT)
            op.operands[0], op.operands[1] = power, _spread_again(spread, moved)
        drop(spread.results[0])
    spread = w.power.operands[1]
    w.power.result.replace_all_uses_with(power)
    w.power.erase()
    drop(spread)
    if scaled != power:
        drop(scaled)


def scale(w: Weights) -> None:
    """Compute weights whose maximum comes first as the others of the kernel, to the bit: of scores in powers of two."""
    scaled = w.scaled
    w.power.operands[0] = w.largest.operands[0] = compute_powers(w)
    if w.top != w.largest:
        w.top.result.replace_all_uses_with(w.largest.result)
        w.top.erase()
    if scaled != w.scaled:
        drop(scaled)


def _spread_again(spread: ir.Operation, rows: ir.Value) -> ir.Value:
    copy = spread.clone()
    copy.operands[0] = rows
    return copy.result


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        found = [w for w in map(weights_of, ops_named(function, "math.exp2")) if w is not None]
        guessed = [(w, w.guess) for w in found if w.guess is not None]
        for w, _ in guessed:
            for op in ops_of(w):
                split_logarithm(op, w.maximum.type)
        for op in walk(function)[1:] if guessed else ():  # also where maxima come first
            make_ramp(op, guessed[0][0].maximum.type)
        folded = False
        for w, guess in guessed:
            why = why_not(w)
            if why is not None:
                remark(w.power, "missed", f"weights are computed of scores: {why}")
            elif performs(w.power, "fold"):
                remark(w.power, "passed", "weights are computed of products")
                fold(w, guess)
                folded = True
        for w in found if folded else ():
            if w.guess is None and why_not(w) is None:
                scale(w)
