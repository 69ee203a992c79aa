# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies and page lookups of a loop that start some iterations before their use: for pipeline-kv-loops.

If consumers copy, the copy of iteration i + stages starts when iteration i has released its stage. A producer finishes
a cp.async copy after it has started one or two more, and looks up a tile's pages one iteration before its copy.
"""

from __future__ import annotations

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops import staging
from kvarn.dialect.ops.common import i64_attr
from kvarn.lowering.index import const
from kvarn.lowering.rewrite import defining_op, walk
from kvarn.lowering.rewrite_counts import performs

from .ir import backward, constant_int, emit

PREFETCHED = "kv.prefetched"  # on copies that an earlier iteration starts
LOOKUPS = ("kv.tile_pages", "kv.tile_row_pages")


def prefetch_copies(loop: ir.Operation) -> None:
    """Start copies before the loop, and in it as soon as a stage is released."""
    block = loop.regions[0].blocks[0]
    lower, upper, step = list(loop.operands)[:3]
    while True:
        ops = [op.operation for op in block.operations][:-1]
        copy = next((op for op in ops if op.name == "kv.copy_start" and PREFETCHED not in op.attributes), None)
        if copy is None:
            return
        acquire = next(op for op in ops if op.name == "kv.producer_acquire" and op.operands[0] == copy.operands[0])
        release = next(
            (op for op in ops if op.name == "kv.consumer_release" and op.operands[0] == copy.operands[0]), None
        )
        stages = ir.IntegerAttr(defining_op(copy.operands[0]).attributes["stages"]).value
        needed = backward([acquire, copy], lambda o, ops=ops: o in ops and not o.regions)
        ordered = [op for op in ops if op in needed]
        copy.attributes[PREFETCHED] = ir.UnitAttr.get()
        with ir.InsertionPoint(loop), copy.location:
            filled = arith.minsi(upper, arith.addi(lower, arith.muli(step, const(stages))))
            prologue = scf.ForOp(lower, filled, step)
            with ir.InsertionPoint(prologue.body):
                emit(ordered, {block.arguments[0]: prologue.induction_variable})
                scf.yield_([])
        anchor = ops[-1] if release is None else release
        with ir.InsertionPoint.after(anchor), copy.location:
            later = arith.addi(block.arguments[0], arith.muli(step, const(stages)))
            more = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, later, upper))
            with ir.InsertionPoint(more.then_block):
                emit(ordered, {block.arguments[0]: later})
                scf.yield_([])
        copy.erase()
        acquire.erase()


# Copies that stay in flight while an earlier one is finished, by how buffers are filled; all slots but one if staged.
LAG = {"cp_async": 1, "staged": 2, "transposed": 2}


def finish_later(loop: ir.Operation, slots: int) -> None:
    """Let a producer's cp.async copies overlap: each is finished after one or two later copies have started.

    Converted copies need their stage only when they finish, so they may be in flight before consumers have released it.
    """
    block = loop.regions[0].blocks[0]
    lower, upper, step = list(loop.operands)[:3]
    ops = [op.operation for op in block.operations][:-1]
    copies = [op for op in ops if op.name == "kv.copy_start"]
    kinds = {ir.StringAttr(defining_op(copy.operands[0]).attributes["copy"]).value for copy in copies}
    every = [op for op in walk(loop) if op.name == "kv.copy_start"]
    if len(kinds) != 1 or not kinds <= set(LAG) or len(every) != len(copies) or constant_int(step) != 1:
        return
    if len({copy.operands[0] for copy in copies}) != len(copies):
        return
    kind, k = kinds.pop(), len(copies)
    if kind == "cp_async" and any(copy.opview.pages is not None for copy in copies):
        return  # their completion is signalled by the copies themselves
    stages = min(ir.IntegerAttr(defining_op(copy.operands[0]).attributes["stages"]).value for copy in copies)
    # The only stage of a buffer is free only after consumers have the tile that would be finished later.
    if (kind == "cp_async" and stages < 2) or not performs(loop, "finish"):
        return
    lag, first = (slots - 1) * k if kind == "staged" else min(LAG[kind], k), block.arguments[0]
    acquires = {op.operands[0]: op for op in ops if op.name == "kv.producer_acquire"}

    def finish(target: ir.Operation, n: ir.Value, pending: int) -> None:
        if kind in ("staged", "transposed"):
            staging.ProducerAcquireOp(target.operands[0], n)
        staging.CopyFinishOp(target.operands[0], n, i64_attr(pending))

    def guarded(condition: ir.Value, target: ir.Operation, n: ir.Value, pending: int) -> None:
        branch = scf.IfOp(condition)
        with ir.InsertionPoint(branch.then_block):
            finish(target, n, pending)
            scf.yield_([])

    number = copies[0].operands[1]  # of this iteration, the same for all buffers
    maker = defining_op(number)
    needed = backward([maker], lambda o: o in ops) if maker is not None and maker in ops else set()
    with ir.InsertionPoint.after(loop), loop.location:
        last = {first: arith.subi(upper, const(1))}
        emit([op for op in ops if op in needed], last)
        for m in range(lag - 1, -1, -1):
            before, i = divmod(k - 1 - m, k)
            some = arith.cmpi(arith.CmpIPredicate.sge, arith.addi(last[first], const(before)), lower)
            guarded(some, copies[i], arith.addi(last.get(number, number), const(before)), m)
    for position, copy in enumerate(copies):
        before, i = divmod(position - lag, k)
        with ir.InsertionPoint.after(copy), copy.location:
            n = arith.addi(copy.operands[1], const(before))
            if before:
                some = arith.cmpi(arith.CmpIPredicate.sge, arith.addi(first, const(before)), lower)
                guarded(some, copies[i], n, lag)
            else:
                finish(copies[i], n, lag)
    if kind in ("staged", "transposed"):
        for copy in copies:
            acquires[copy.operands[0]].erase()


def prefetch_lookups(loop: ir.Operation) -> None:
    """Carry the pages of an iteration's tiles, looked up in the previous one, whose waits hide the latency."""
    block = loop.regions[0].blocks[0]
    ops = [op.operation for op in block.operations][:-1]
    lookups = [op for op in ops if op.name in LOOKUPS]
    if not lookups or len(loop.results):
        return
    needed = backward(lookups, lambda o: o in ops and not o.regions)
    ordered = [op for op in ops if op in needed]
    lower, upper, step = list(loop.operands)[:3]
    with ir.InsertionPoint(loop), loop.location:
        values: dict[ir.Value, ir.Value] = {block.arguments[0]: lower}
        emit(ordered, values)
        rotated = scf.ForOp(lower, upper, step, [values[op.result] for op in lookups])
        with ir.InsertionPoint(rotated.body):
            values = {block.arguments[0]: rotated.induction_variable}
            carried = dict(zip([op.result for op in lookups], rotated.inner_iter_args, strict=True))
            following: dict[ir.Value, ir.Value] = {block.arguments[0]: arith.addi(rotated.induction_variable, step)}
            emit(ordered, following)
            values.update(carried)
            emit([op for op in ops if op not in lookups], values)
            scf.yield_([following[op.result] for op in lookups])
    loop.erase()
