# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute scalars and vectors instead of whole tiles where scores and masks do not need tiles.

*Hoist.* A gather of a vector with loop-invariant indices moves before the loop.

*Distances.* The conversion of a position difference to float becomes a difference of converted vectors, with positions
counted from the tile's first query row, so that the result is equally exact.

If a list names the key tiles, their positions take the place of the loop's variable here.

*Far tiles.* An index that is clamped to the end of an array (``min``), or a ``where`` on a position comparison, is
uniform in tiles that are far enough from the diagonal. A branch for these tiles computes the score with that index: its
gathers have a scalar or vector index, and read only that. So a bias by distance gathers only in the tiles near the
diagonal, and an array need not be longer than the largest distance that it distinguishes.

Before:  scf.for %j { %i = min(%q - %k, 127) ; %bias = kv.tile_gather %table, %h, %i ; %y = %x + %bias }
After:   %far = kv.tile_gather %table, %h, 127 : tensor<64xf32>
         scf.for %j { %y = scf.if (low(%q - %k) >= 127) { %x + kv.tile_broadcast %far }
                           else { ... %bias = kv.tile_gather %table, %h, %i ; %x + %bias } }
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith, memref, scf

from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.tile import TileBroadcastOp, tile_type
from kvarn.lowering.index import const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, erase_unused, is_inside, ops_named, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import (
    attributes_of,
    backward,
    cloned,
    constant_int,
    element,
    is_position,
    is_tile,
    rank,
    score_of,
    shape,
    splat_of,
    splat_tile,
    tiled,
)

from .split_kv_loops import Bounds, Comparison, Unknown, fits, spanned, writes_buffers

P = arith.CmpIPredicate


@dataclass(frozen=True)
class Options:
    """hoist: move loop-invariant reads before loops; distances: convert positions instead of their differences; far:
    split far tiles from near ones."""

    hoist: bool = True
    distances: bool = True
    far: bool = True


def _before(value: ir.Value, loop: ir.Operation) -> bool:
    maker = defining_op(value) or ir.BlockArgument(value).owner.owner.operation
    return not is_inside(maker, loop)


def _has_iterations(loop: ir.Operation) -> ir.Value:
    return arith.cmpi(P.slt, *list(loop.operands)[:2])


def _and_iterates(mask: ir.Value, loop: ir.Operation) -> ir.Value:
    """The mask of a vector that is read before a loop, false if the loop has no iteration."""
    some = splat_tile(mask.type, _has_iterations(loop))
    return arith.andi(mask, some)


def _may_trap(op: ir.Operation) -> bool:
    """Whether an op divides by a number that may be zero where no iteration would divide."""
    divides = any(word in op.name for word in ("div", "rem")) and not op.name.endswith("f")
    return divides and constant_int(op.operands[1]) in (None, 0)


def moving(loop: ir.Operation, ops: Iterable[ir.Operation]) -> ir.Value | None:
    """The only number that the loop's body computes other than from its variable, and that ops depend on, or None.

    It is the position of a tile in an ascending list.
    """
    with ir.InsertionPoint(loop), loop.location:
        bounds, unknown = Bounds(loop), set()
        of_tiles = (op for op in ops if op.results and is_tile(op.results[0]))
        for value in (v for op in of_tiles for v in op.operands if not is_tile(v) and str(v.type) == "i32"):
            if not _before(value, loop):
                try:
                    bounds.of(value)
                except Unknown:
                    unknown.add(value)
    return unknown.pop() if len(unknown) == 1 else None


# --- hoist -------------------------------------------------------------------------------------------


def hoist(gather: ir.Operation, loop: ir.Operation) -> None:
    """Move a gather, with the computation of its indices, before a loop; it reads only if there is an iteration."""
    block = gather.block
    needed = backward([gather], lambda op: op.block == block and is_position(op))
    inputs = {v for op in needed for v in op.operands if defining_op(v) not in needed}
    if not all(_before(v, loop) for v in inputs) or any(map(_may_trap, needed)):
        return
    if not performs(gather, "hoist"):
        return
    for op in [o.operation for o in block.operations]:
        if op in needed:
            op.move_before(loop)
    with ir.InsertionPoint(gather), gather.location:
        gather.operands[1] = _and_iterates(gather.opview.mask, loop)
    remark(gather, "passed", "an array's elements for the rows are read before the loop")


# --- distances ---------------------------------------------------------------------------------------


def _first_row(vectors: list[ir.Value], loop: ir.Operation) -> ir.Value | None:
    """The minimum of the loop-invariant vector, computed before the loop; None unless both vectors are known.

    None also if numbers computed from them, or their difference, may wrap around, which floats do not.
    """
    makers = backward([m for m in map(defining_op, vectors) if m is not None], is_position)
    bounds, found = Bounds(loop, moving(loop, makers)), None
    try:
        lows = [bounds.of(value)[0] for value in vectors]
    except Unknown:
        return None
    if any(low.wraps is not None for low in lows) or not fits(spanned("-", *(low.span for low in lows))):
        return None
    for low in lows:
        if not low.factor and found is None:
            found = const(low.base) if isinstance(low.base, int) else low.base
    return found


def convert_positions(op: ir.Operation, loop: ir.Operation) -> None:
    """Replace a conversion of ``a - b``, one along rows and one along columns, by conversions of two vectors."""
    difference = defining_op(op.operands[0])
    sides = (
        [] if difference is None or difference.name != "arith.subi" else [defining_op(v) for v in difference.operands]
    )
    repeated = [side for side in sides if side is not None and side.name == "kv.tile_broadcast"]
    if len(repeated) != 2:
        return
    with ir.InsertionPoint(loop), op.location:
        base = _first_row([side.operands[0] for side in repeated], loop)
    if base is None or not performs(op, "distances"):
        return
    found, result = [], op.results[0]
    with ir.InsertionPoint(op), op.location:
        for side in repeated:
            vector = side.operands[0]
            start = splat_tile(vector.type, base)
            numbers = tile_type(shape(vector), element(result))
            converted = ir.Operation.create("arith.sitofp", [numbers], [arith.subi(vector, start)]).result
            found.append(TileBroadcastOp(converted, side.attributes["dimension"], result.type).operation.results[0])
        result.replace_all_uses_with(arith.subf(*found))
    op.erase()


# --- far tiles ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """A tile that is uniform, or one of two tiles, in the iterations where ``holds`` is true."""

    found: ir.Value
    value: ir.Value
    comparison: Comparison

    def holds(self, variable: ir.Value) -> ir.Value:
        return self.comparison.always(variable)


def edge_of(op: ir.Operation, bounds: Bounds) -> Edge | None:
    """Whether an op makes a tile that is simpler far from the loop's end; None for any other op."""
    try:
        if op.name in ("arith.minsi", "arith.maxsi"):
            for one, other in ((0, 1), (1, 0)):
                end = op.operands[other]
                if scalar_of(end) is None:
                    continue
                of, (low, high) = bounds.of(op.operands[one]), bounds.of(end)
                least = op.name == "arith.minsi"
                # The end of the range is at the first iteration: the index falls from it, or rises to it.
                if of[0].factor == of[1].factor and (of[0].factor < 0 if least else of[0].factor > 0):
                    pair = ((low, high), of) if least else (of, (low, high))
                    return Edge(op.results[0], end, Comparison(P.sle, *pair))
        if op.name == "arith.select":
            condition = defining_op(op.operands[0])
            known = None if condition is None else Comparison.known(condition, bounds)
            if known is not None:
                rises = known.right[0].factor - known.left[0].factor
                if rises > 0:  # true near the end, never far from it
                    never = Comparison(P.sle if known.strict else P.slt, known.right, known.left)
                    return Edge(op.results[0], op.operands[2], never)
                if rises < 0:
                    return Edge(op.results[0], op.operands[1], known)
    except Unknown:
        pass
    return None


def scalar_of(value: ir.Value) -> ir.Value | None:
    """The scalar that a tile repeats; None for other tiles."""
    op = defining_op(value)
    if op is not None and op.name == "tensor.splat":
        return op.operands[0]
    if op is None or op.name != "arith.constant" or splat_of(value) is None:
        return None
    with ir.InsertionPoint(op), op.location:
        return ir.Operation.create("arith.constant", [element(value)], [], {"value": splat_of(value)}).result


class Narrowed:
    """The contents of tiles in the smallest form: a scalar, a vector (with its dimension) or a tile.

    Values are made at the insertion point, loop-invariant ones before the loop. ``instead`` maps values to
    replacements, ``within`` has the ops that may be duplicated.
    """

    def __init__(self, loop: ir.Operation, instead: dict[ir.Value, ir.Value], within: set[ir.Operation]):
        self.loop, self.instead, self.within = loop, instead, within
        self.saved = 0  # gathers that read less
        self._found: dict[ir.Value, tuple[Any, ir.Value]] = {}

    def of(self, value: ir.Value) -> tuple[Any, ir.Value]:
        """(None, 0, 1 or "tile"; the scalar, the vector along that dimension, or the tile)."""
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def tile(self, value: ir.Value) -> ir.Value:
        return self._as(self.of(value), "tile", value)

    def _place(self, *needed: ir.Value) -> ir.InsertionPoint:
        return ir.InsertionPoint(self.loop) if all(_before(v, self.loop) for v in needed) else ir.InsertionPoint.current

    def _as(self, found: tuple[Any, ir.Value], form: Any, like: ir.Value) -> ir.Value:
        """A value in a form at least as large as its own; ``like`` has the tile's extents."""
        own, value = found
        if own == form:
            return value
        kind = element(value) if is_tile(value) else value.type
        if own is None:
            extents = shape(like) if form == "tile" else (shape(like)[form],)
            with ir.InsertionPoint.current if form == "tile" else self._place(value):
                return splat_tile(tile_type(extents, kind), value)
        return TileBroadcastOp(value, i64_attr(own), tile_type(shape(like), kind)).operation.results[0]

    def _compute(self, value: ir.Value) -> tuple[Any, ir.Value]:
        if value in self.instead:
            return self.of(self.instead[value])
        op = defining_op(value)
        if op is None or not is_tile(value) or rank(value) != 2:
            return ("tile" if is_tile(value) else None), value
        repeated = scalar_of(value)
        if repeated is not None:
            return None, repeated
        if op.name == "kv.tile_broadcast":
            repeated = scalar_of(op.operands[0])
            if repeated is not None:
                return None, repeated
            return ir.IntegerAttr(op.attributes["dimension"]).value, op.operands[0]
        return self._again(op, value) if op in self.within else ("tile", value)

    def _again(self, op: ir.Operation, value: ir.Value) -> tuple[Any, ir.Value]:
        """An op applied to the smaller operands."""
        buffers = list(op.operands)[:1] if op.name == "kv.tile_gather" else []
        parts = [self.of(x) for x in list(op.operands)[len(buffers) :]]
        forms = {form for form, _ in parts if form is not None}
        form = None if not forms else forms.pop() if len(forms) == 1 else "tile"
        self.saved += bool(buffers) and form != "tile"
        made = [self._as(part, form, value) for part in parts]
        if buffers and form is None:
            with self._place(*made):
                return None, self._load(buffers[0], *made, element(value))
        kind = element(value)
        if form is not None:
            kind = tile_type(shape(value) if form == "tile" else (shape(value)[form],), kind)
        with ir.InsertionPoint.current if form == "tile" or _may_trap(op) else self._place(*made):
            before = ir.InsertionPoint.current.ref_operation  # None at the end of a block
            if buffers and before is not None and before == self.loop:
                made[0] = _and_iterates(made[0], self.loop)
            return form, ir.Operation.create(op.name, [kind], [*buffers, *made], attributes_of(op)).result

    def _load(self, buffer: ir.Value, mask: ir.Value, *rest: Any) -> ir.Value:
        *indices, kind = rest
        at = [arith.index_cast(ir.IndexType.get(), x) for x in indices]
        branch = scf.IfOp(arith.andi(mask, _has_iterations(self.loop)), [kind], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([memref.load(buffer, at)])
        with ir.InsertionPoint(branch.else_block):
            zero = ir.IntegerAttr.get(kind, 0) if isinstance(kind, ir.IntegerType) else ir.FloatAttr.get(kind, 0.0)
            scf.yield_([ir.Operation.create("arith.constant", [kind], [], {"value": zero}).result])
        return branch.results[0]


def split_far(loop: ir.Operation, score: ir.Operation) -> None:
    """Compute a score in a separate branch where an edge makes its gathers smaller."""
    block = score.block
    cone = backward([score], lambda op: op.block == block and (is_position(op) or op.name == "kv.tile_gather"))
    with ir.InsertionPoint(loop), score.location:
        bounds = Bounds(loop, moving(loop, (op for op in cone if is_position(op))))
        found = [edge_of(op, bounds) for op in cone if op.results and rank(op.results[0]) == 2]
    edges = [e for e in found if e is not None]
    if not edges or not performs(score, "far"):
        return
    order = [o.operation for o in block.operations]
    with ir.InsertionPoint(score), score.location:
        far: ir.Value | None = None
        for edge in edges:
            holds = edge.holds(bounds.variable)
            far = holds if far is None else arith.andi(far, holds)
        branch = scf.IfOp(far, [score.results[0].type], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            narrowed = Narrowed(loop, {e.found: e.value for e in edges}, cone)
            scf.yield_([narrowed.tile(score.results[0])])
        if not narrowed.saved:
            branch.operation.erase()
            return
        with ir.InsertionPoint(branch.else_block):
            values: dict[ir.Value, ir.Value] = {}
            near = [op for op in order if op in cone and is_tile(op.results[0])]
            for op in near:
                cloned(op, values)
            scf.yield_([values[score.results[0]]])
    score.results[0].replace_all_uses_with(branch.results[0])
    erase_unused(near)
    remark(loop, "passed", "in tiles far from the end arrays are read once per row", edges=len(edges))


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        for loop in ops_named(function, "scf.for"):
            if str(loop.operands[0].type) != "i32" or any(map(writes_buffers, walk(loop)[1:])):
                continue
            block = loop.regions[0].blocks[0]
            for op in [o.operation for o in block.operations]:
                if options.hoist and op.name == "kv.tile_gather" and rank(op.results[0]) == 1:
                    hoist(op, loop)
            for op in [o.operation for o in block.operations] if options.distances else ():
                if op.name == "arith.sitofp" and rank(op.results[0]) == 2:
                    convert_positions(op, loop)
            scores: list[ir.Operation] = []
            for op in [o.operation for o in block.operations]:
                if op.name == "kv.tile_gather" and rank(op.results[0]) == 2:
                    score = score_of(op)
                    if score not in scores:
                        scores.append(score)
            for score in scores if options.far else ():
                split_far(loop, score)
