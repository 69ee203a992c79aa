# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute softmax weights with the old running maximum, and compute the row maximum only if a weight is too large.

An online softmax needs the maximum of each row of scores before any weight: a comparison per element, and shuffles
between the lanes of a row. If the kernel changes m only when a score exceeds it by more than some slack, m rarely
changes. So the pass computes the weights with the old m. The partial row sums, which each thread has anyway, show
whether a weight exceeds 2^slack. Only a warp that has such a row branches to the original code, which computes the
maximum and the weights again; m changes for the rows whose sums were too large, independently of the warp's other rows.

- m may also be set to a constant below the row maximum. Other updates of m are left alone, and so are weights that are
  converted after a wait for products.
- If the sums are of rounded weights (``sum-kv-weights``), a weight that is too large saturates, and is found by that.
- For ``kv.tile_weights`` the weights with the old m use its fast form (:mod:`tiles.score_weights`). A warp with a row
  whose m is large, or -inf, takes the branch as well.

Before:  %m2 = select (max(%x) * scale_log2 > %m + 8), max(%x) * scale_log2, %m ; %a = exp2(%m - %m2)
         %p = kv.tile_weights %x, scale_log2, %m2 ; %l2 = %l * %a + sum(%p)
After:   %p0 = exp2(%x * scale_log2 - %m) ; %s0 = sum(%p0) ; %l0 = %l + %s0
         %m2, %a, %p, %l2 = scf.if (kv.warp_any %s0 > 255 or |%m| > 2^27) { the original ops } else { %m, 1, %p0, %l0 }
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops.staging import TileReadyOp
from kvarn.dialect.ops.tile import TileReduceLanesOp, WarpAnyOp
from kvarn.dialect.ops.weights import tile_saturated
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles import score_weights
from kvarn.lowering.tiles.affine import of
from kvarn.lowering.tiles.ir import (
    SWAPPED,
    WGMMA,
    backward,
    cloned,
    element,
    filled,
    instruction_of,
    rank,
    schedule_of,
    splat_of,
    tiled,
    users,
)

MOST_SLACK = 127.0  # weights of more are no f32
SATURATES = math.log2(448.0)  # the slack of weights up to e4m3's largest number
PARTIAL = "kv.partial"  # on sums over the elements of each thread only
_ENDS = ("kv.dot", "kv.dot_start", "scf.yield")


@dataclass
class Softmax:
    """The ops of one online-softmax update.

    Attributes
    ----------
    before : list of Operation
        Ops that only the new maximum needs.
    after : list of Operation
        The select that updates m, then the ops that depend on it, up to the weights that products take.
    factor : Operation
        The rescale factor alpha of earlier sums.
    total : Operation
        The row sums of the weights, or the rounded weights.
    slack : float
        How far, in log2, a score may exceed m before m is updated.
    """

    before: list[ir.Operation]
    after: list[ir.Operation]
    factor: ir.Operation
    total: ir.Operation
    slack: float

    @property
    def select(self) -> ir.Operation:
        return self.after[0]

    @property
    def guarded(self) -> bool:
        """Whether weights with the old m are valid only for rows whose m is not large."""
        return any(op.name == score_weights.NAME for op in self.after)

    @property
    def results(self) -> list[ir.Value]:
        """The results that other ops use."""
        inside = set(self.after)
        return [op.results[0] for op in self.after if any(user not in inside for user in users(op.results[0]))]


def top_of(select: ir.Operation) -> ir.Value:
    """The row maximum to which a select sets m, possibly minus a constant."""
    moved = defining_op(select.operands[1])
    if moved is not None and moved.name == "arith.subf" and splat_of(moved.operands[1]) is not None:
        return moved.operands[0]
    return select.operands[1]


def slack_of(select: ir.Operation) -> float | None:
    """How far the row maximum may exceed m before a select updates m; None for another select."""
    condition, _, kept = select.operands
    compared, top = defining_op(condition), top_of(select)
    if rank(top) != 1 or defining_op(kept) is not None or compared is None or compared.name != "arith.cmpf":
        return None
    predicate = ir.IntegerAttr(compared.attributes["predicate"]).value
    bound = defining_op(compared.operands[1])
    if predicate != int(arith.CmpFPredicate.OGT) or compared.operands[0] != top or bound is None:
        return None
    splat = splat_of(bound.operands[1]) if bound.name == "arith.addf" and bound.operands[0] == kept else None
    slack = None if splat is None else ir.FloatAttr(splat).value
    return slack if slack is not None and 0.0 <= slack < MOST_SLACK else None


def softmax_of(select: ir.Operation) -> Softmax | str | None:
    """The softmax whose m a select updates; a string that says why it is left alone; None for another select."""
    slack = slack_of(select)
    if slack is None:
        return None
    top, kept = top_of(select), select.operands[2]
    ops = [op.operation for op in select.block.operations]
    factor = next((op for op in ops if _is_factor(op, kept, select.result)), None)
    after, reached, waited = [select], {select}, False
    behind = set[ir.Operation]()  # products of weights, and what depends on them
    for op in ops[ops.index(select) + 1 :]:
        waited = waited or op.name == "kv.dot_wait"
        makers = [defining_op(v) for v in op.operands]
        if any(maker in behind or (op.name in _ENDS and maker in reached) for maker in makers):
            behind.add(op)
            continue
        if op.name in _ENDS or op.regions or _spreads(op, factor) or (waited and op.name == "kv.tile_ready"):
            continue
        if any(maker in reached for maker in makers):
            if waited:
                return "weights are converted behind a wait for products"
            reached.add(op)
            after.append(op)
    totals = [op for op in after if op.name == "kv.tile_reduce"]
    if not totals and math.isclose(slack, SATURATES, rel_tol=1e-6):
        totals = [op for op in after if op.name == "kv.cast" and str(element(op.result)) == "f8E4M3FN"]
    elif any(ir.StringAttr(op.attributes["kind"]).value != "add" for op in totals):
        totals = []
    if factor is None or len(totals) != 1:
        return "its weights are not summed exactly once"
    if not _are_weights(defining_op(totals[0].operands[0]), select.result, top):
        return "its sums are not of exponentials of the scores that the maximum is of"
    inside = set(ops)
    needed = backward([defining_op(v) for v in select.operands[:2]], lambda o: o in inside and not o.regions)
    before: list[ir.Operation] = []
    for op in reversed(ops[: ops.index(select)]):
        if op in needed and all(u == select or u in before for u in users(op.results[0])):
            before.append(op)
    return Softmax(before[::-1], after, factor, totals[0], slack)


def _is_factor(op: ir.Operation, old: ir.Value, new: ir.Value) -> bool:
    """Whether an op computes alpha = exp2(old m - new m)."""
    difference = defining_op(op.operands[0]) if op.name == "math.exp2" and rank(op.results[0]) == 1 else None
    return difference is not None and difference.name == "arith.subf" and list(difference.operands) == [old, new]


def _spreads(op: ir.Operation, factor: ir.Operation | None) -> bool:
    """Whether an op broadcasts alpha, for the accumulator of a product that is not moved."""
    source = defining_op(op.operands[0]) if op.name == "kv.tile_broadcast" else None
    while source is not None and source.name == "kv.tile_ready":  # of a loop that was rotated
        source = defining_op(source.operands[0])
    return source is not None and factor is not None and source == factor


def _are_weights(op: ir.Operation | None, maximum: ir.Value, top: ir.Value) -> bool:
    """Whether an op computes 2^(y - maximum) where ``top`` is the largest y of a row."""
    if op is not None and op.name == score_weights.NAME:
        scores, scale_log2, under = op.operands
        product = score_weights.product_of(top)
        alike = product is not None and product.name == "arith.mulf" and of(product.operands[1]) == of(scale_log2)
        return alike and under == maximum and _is_largest(defining_op(product.operands[0]), scores)
    difference = defining_op(op.operands[0]) if op is not None and op.name == "math.exp2" else None
    if difference is None or difference.name != "arith.subf":
        return False
    spread = defining_op(difference.operands[1])
    if spread is None or spread.name != "kv.tile_broadcast" or spread.operands[0] != maximum:
        return False
    scores, largest = defining_op(difference.operands[0]), defining_op(top)
    if scores is not None and largest is not None and scores.name == largest.name == "arith.mulf":
        if not _alike(scores.operands[1], largest.operands[1]):
            return False
        source, largest = scores.operands[0], defining_op(largest.operands[0])
    else:
        source = difference.operands[0]
    return _is_largest(largest, source)


def _is_largest(op: ir.Operation | None, tile: ir.Value) -> bool:
    found = op is not None and op.name == "kv.tile_reduce" and op.operands[0] == tile
    return found and ir.StringAttr(op.attributes["kind"]).value == "max"


def _alike(a: ir.Value, b: ir.Value) -> bool:
    """Whether a tile and a vector have the same element in each row: one splat, or the vector broadcast."""
    one, other = splat_of(a), splat_of(b)
    if one is not None and other is not None:
        return one == other
    made = [defining_op(v) for v in (a, b)]
    if made[0] is not None and made[0].name == "kv.tile_broadcast":
        return rank(b) == 1 and made[0].operands[0] == b
    return (
        all(op is not None and op.name == "tensor.splat" for op in made) and made[0].operands[0] == made[1].operands[0]
    )


def guess(s: Softmax) -> None:
    """Rewrite a softmax to compute its weights with the old m first."""
    kept, results = s.select.operands[2], s.results
    with ir.InsertionPoint.after(s.after[-1]), s.after[-1].location:
        one = filled(kept.type, 1.0)
        most = filled(kept.type, 2.0**s.slack - 1.0)  # below 2^slack by more than the error of exp2
        same: dict[ir.Value, ir.Value] = {s.select.result: kept, s.factor.result: one}
        for op in s.after:
            if op.result in same or op == defining_op(s.factor.operands[0]):
                continue
            others = [v for v in op.operands if v not in same or same[v] != one]
            if op.name == score_weights.NAME:
                same[op.result] = score_weights.fused(*op.operands[:2], kept)
            elif op.name == "kv.tile_ready" or (op.name == "arith.mulf" and len(others) == 1):
                (other,) = others or op.operands
                same[op.result] = same.get(other, other)
            else:
                cloned(op, same)
        for v in results:
            same[v] = _packed(same[v])
        total, rounded = same[s.total.result], s.total.name != "kv.tile_reduce"
        large = tile_saturated(total, kept) if rounded else arith.cmpf(arith.CmpFPredicate.OGT, total, most)
        if s.guarded:
            large = arith.ori(large, score_weights.large(kept))
        grown = WarpAnyOp(large).operation.results[0]
        branch = scf.IfOp(grown, [v.type for v in results], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            moved: dict[ir.Value, ir.Value] = {}
            for op in s.before:
                cloned(op, moved)
            moved[s.select.result] = _moved(s, total, most, moved)
            for op in s.after[1:]:
                if op.name == "kv.tile_ready":  # the end of the branch orders it
                    moved[op.result] = moved[op.operands[0]]
                else:
                    cloned(op, moved)
            scf.yield_([_packed(moved[v]) for v in results])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([same[v] for v in results])
    for old, new in zip(results, branch.results, strict=True):
        old.replace_all_uses_except(new, [*s.before, *s.after])
    for op in reversed([*s.before, *s.after]):
        op.erase()
    at = branch.operation
    for op in [o.operation for o in at.block.operations]:
        if op == branch.operation:
            break
        if op.name == "kv.tile_broadcast" and op.operands[0] in list(branch.results):
            op.move_after(at)
            at = op


def _moved(s: Softmax, total: ir.Value, most: ir.Value, values: dict[ir.Value, ir.Value]) -> ir.Value:
    """The new m in the branch: updated for rows with a weight that was too large, as their sums show."""
    if s.total.name != "kv.tile_reduce":
        return cloned(s.select, values).result
    if PARTIAL in s.total.attributes:
        total = TileReduceLanesOp(total, ir.StringAttr.get("max"), total.type).operation.results[0]
    moves, top, kept = arith.cmpf(arith.CmpFPredicate.OGT, total, most), *s.select.operands[1:]
    top = values.get(top, top)
    if s.guarded:  # the sums of rows with a large m are meaningless
        moves, top = arith.ori(moves, score_weights.large(kept)), arith.maxnumf(top, kept)
    return arith.select(moves, top, kept)


def _packed(value: ir.Value) -> ir.Value:
    """Pin converted weights: LLVM would sink the conversion below the branch, and keep them in f32 until then."""
    return value if rank(value) < 2 else TileReadyOp(value, value.type).operation.results[0]


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        schedule = schedule_of(function)
        if instruction_of(function) != WGMMA or schedule.get(SWAPPED) or schedule.get("across", 1) > 1:
            continue  # if warps share a row, its maximum is a barrier of all warps, and none may branch around it
        for op in ops_named(function, "arith.select"):
            found = softmax_of(op) if op.block.owner.operation.name == "scf.for" else None
            if isinstance(found, str):
                remark(op, "missed", f"the row maximum is computed for every tile: {found}")
            elif found is not None and performs(op, "skip"):
                remark(op, "passed", "the row maximum is computed only where a weight is too large")
                guess(found)
