# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Clean up between the tile passes: upstream's cse, canonicalize and loop-invariant code motion.

Runs only on modules with tiles; other kernels have been cleaned up already.

*Masks.* If a column must be below a bound per row and below a number that is the same for all rows, the minimum of both
becomes the row's bound: one comparison per element instead of two, in each masked tile.

*Branches.* Positions that only one branch uses are computed in it. LLVM moves them only into a branch that follows
directly, so those of masks would be computed for every tile (60 of an iteration's 700 instructions).

Before:  %k1 = arith.muli %j, %c128 ; %k2 = arith.muli %j, %c128 ; uses of %k1 and %k2
         (%column <= kv.tile_broadcast %bound) and kv.tile_broadcast (%column < %n)
         %k = %first + kv.tile_index ; scf.if %near { uses of %k }
After:   %k1 = arith.muli %j, %c128 ; uses of %k1
         %column <= kv.tile_broadcast min(%bound, %n - 1)
         scf.if %near { %k = %first + kv.tile_index ; uses of %k }
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlir import ir
from mlir.dialects import arith, tensor
from mlir.passmanager import PassManager

from kvarn.dialect.ops.tile import TileBroadcastOp
from kvarn.lowering.index import const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import defining_op, ops_named, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import drop, element, is_position, rank, tiled, users

_CANONICALIZE = (
    "canonicalize{max-iterations=10 max-num-rewrites=-1 region-simplify=normal test-convergence=false top-down=true}"
)
PIPELINE = f"builtin.module(cse,{_CANONICALIZE},cse,loop-invariant-code-motion)"

P = arith.CmpIPredicate
_LOWEST = -(2**31)


class OfRows(NamedTuple):
    """``columns <= bounds``, with a number per column and per row; ``op`` compares all elements."""

    op: ir.Operation
    columns: ir.Value
    bounds: ir.Value


class OfAll(NamedTuple):
    """``columns < number``."""

    columns: ir.Value
    number: ir.Value


def broadcast(value: ir.Value, dimension: int) -> ir.Value | None:
    """The vector that a tile repeats; None for other tiles."""
    op = defining_op(value)
    if op is None or op.name != "kv.tile_broadcast" or op.opview.dimension.value != dimension:
        return None
    return op.operands[0]


def comparison(value: ir.Value, predicate: arith.CmpIPredicate) -> tuple[ir.Value, ir.Value] | None:
    """The operands of a comparison of 32-bit numbers."""
    op = defining_op(value)
    if op is None or op.name != "arith.cmpi" or op.opview.predicate.value != predicate:
        return None
    left, right = op.operands
    element = ir.RankedTensorType(left.type).element_type if isinstance(left.type, ir.RankedTensorType) else left.type
    return (left, right) if str(element) == "i32" else None


def of_rows(value: ir.Value) -> OfRows | None:
    found = comparison(value, P.sle)
    columns, bounds = (None, None) if found is None else (broadcast(found[0], 1), broadcast(found[1], 0))
    return None if columns is None or bounds is None else OfRows(defining_op(value), columns, bounds)


def of_all(value: ir.Value) -> OfAll | None:
    vector = broadcast(value, 1)
    found = None if vector is None else comparison(vector, P.slt)
    number = None if found is None else defining_op(found[1])
    if number is None or number.name != "tensor.splat":
        return None
    return OfAll(found[0], number.operands[0])  # type: ignore[index]


def conditions(mask: ir.Value) -> list[ir.Value]:
    """The masks whose conjunction a mask is."""
    op = defining_op(mask)
    if op is None or op.name != "arith.andi":
        return [mask]
    return [x for operand in op.operands for x in conditions(operand)]


def join_bounds(mask: ir.Operation) -> None:
    """Compare a mask's columns once if they are compared with both a bound per row and a number."""
    parts = conditions(mask.operands[1])
    for one in parts:
        all_ = of_all(one)
        if all_ is None:
            continue
        for other in parts:
            rows = of_rows(other)
            if rows is None or rows.columns != all_.columns or not performs(mask, "join bounds"):
                continue
            with ir.InsertionPoint(mask), rows.op.location:
                last = arith.subi(arith.maxsi(all_.number, const(_LOWEST + 1)), const(1))
                least = arith.minsi(rows.bounds, tensor.splat(rows.bounds.type, last, []))
                every = TileBroadcastOp(least, rows.op.operands[1].owner.opview.dimension, rows.op.operands[1].type)
                made = arith.cmpi(P.sle, rows.op.operands[0], every.operation.results[0])
                for rest in parts:
                    if rest not in (one, other):
                        made = arith.andi(made, rest)
                old = mask.operands[1]
                mask.operands[1] = made
                drop(old)
            return


def within(op: ir.Operation, block: ir.Block) -> ir.Operation | None:
    """The op of a block that is, or contains, an op; None for an op outside of the block."""
    while not op.name.endswith(".func"):
        if op.block == block:
            return op
        op = op.parent.operation
    return None


def sink(op: ir.Operation) -> None:
    """Move positions into the only branch that uses them."""
    if op.name == "arith.constant" or not is_position(op) or len(op.results) != 1:
        return
    result = op.results[0]
    if not rank(result) or str(element(result)) not in ("i1", "i32"):
        return
    using = users(result)
    branches = {within(user, op.block) for user in using}
    branch = branches.pop() if len(branches) == 1 else None
    if branch is None or branch.name != "scf.if" or branch in using:
        return
    for region in branch.regions:
        inside = [within(user, block) for block in region.blocks for user in using]
        if inside and all(user is not None for user in inside) and performs(op, "sink"):
            op.move_before(next(o.operation for o in region.blocks[0].operations if o.operation in inside))
            sink(op)
            return


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    kernels = list(tiled(module))
    for kernel in kernels:
        for mask in ops_named(kernel, "kv.tile_mask"):
            join_bounds(mask)
    if kernels:
        PassManager.parse(PIPELINE).run(module.operation)
    for kernel in kernels:
        for op in reversed(walk(kernel)):
            sink(op)
