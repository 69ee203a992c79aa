# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Let blocks take work items from a queue, so that no block has long items left when the others are done.

The iterations of a loop with ``kv.take_work_item`` are divided among blocks: block i takes i, i + blocks, and so on. If
work items take different times (causal tiles of a prompt, sequences of all lengths), some blocks end late. With a
queue, a counter in device memory, a block takes the next item when it is ready for one: a thread of the producer
fetches its number one iteration ahead (near the end, when its last copy has started), and all roles read it. The
counter is 0 again after all blocks have fetched. If blocks may start late (``late``), the first items are fetched too.

Kernels without a producer keep the static division.

Before:  scf.for %i = %block to %n step %blocks { %t = kv.take_work_item %counter, %i, %n ; ... }        (in every role)
After:   scf.while (%t = %block, %use = 0) { scf.condition %t < %n }
         do { ... ; kv.queue_fetch %queue, %use, %n (by one thread) ; %next = kv.queue_next %queue, %use }
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops import staging
from kvarn.lowering.index import const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import defining_op, enclosing, is_inside, ops_named
from kvarn.lowering.tiles.ir import producers_of, schedule_of, tiled, users

from .specialize_kv_warps import ROLES

WARPS = 4  # per warpgroup
# Exactly one of these roles is in a block: its first thread fetches.
FETCHERS = {"producer", staging.PRODUCER_WARPS[0], staging.PRODUCER_GROUPS[0]}


def role_of(loop: ir.Operation) -> str:
    """The role that runs a loop; "" if all threads do."""
    branch, inside = enclosing(loop, "scf.if"), loop
    while branch is not None:
        condition = defining_op(branch.operands[0])
        if condition is not None and condition.name == "kv.is_role":
            role = ir.StringAttr(condition.attributes["role"]).value
            if ROLES in branch.attributes:
                return role if _within(inside, branch.regions[0]) else "consumer"
            return role
        inside, branch = branch, enclosing(branch, "scf.if")
    return ""


def _within(op: ir.Operation, region: ir.Region) -> bool:
    return op.block.region == region


def warps_of(role: str, consumers: int, producers: int = 1) -> int:
    """The number of warps of a role."""
    if role == "consumer":
        return WARPS * consumers
    if role in staging.PRODUCER_REST:
        return WARPS * producers - staging.PRODUCER_REST[role]
    if role in staging.PRODUCER_GROUPS:
        return WARPS
    return 1 if role in staging.PRODUCER_WARPS else WARPS * producers


def ends_soon(number: ir.Value, count: ir.Value, blocks: ir.Value) -> ir.Value:
    """Whether the last work items are near, which are fetched late so that busy blocks leave them to others.

    Near means four items per block: with few query rows, a sequence has up to as many items without rows as with rows.
    """
    return arith.cmpi(arith.CmpIPredicate.sge, arith.addi(number, arith.muli(blocks, const(4))), count)


def fetch_if(condition: ir.Value, queue: ir.Value, use: ir.Value, count: ir.Value) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        staging.QueueFetchOp(queue, use, count)
        scf.yield_([])


def division_of(loop: ir.Operation, taken: ir.Operation) -> list[ir.Value] | None:
    """(the block's first item, the end, the distance of its items) of a loop over work items; None if it has no such.

    The iteration is the loop's variable, or ``first + i * step`` of a variable i that counts from 0.
    """
    variable, iteration = loop.regions[0].blocks[0].arguments[0], taken.operands[1]
    if iteration == variable:
        return list(loop.operands)[:3]
    made = defining_op(iteration)
    if made is None or made.name != "arith.addi" or len(users(variable)) != 1:
        return None
    for first, distance in (made.operands, list(made.operands)[::-1]):
        scaled = defining_op(distance)
        if scaled is None or scaled.name != "arith.muli" or variable not in list(scaled.operands):
            continue
        (step,) = (x for x in scaled.operands if x != variable)
        bounds = [first, taken.operands[2], step]
        if not any((op := defining_op(x)) is not None and is_inside(op, loop) for x in bounds):
            return bounds
    return None


def take(loop: ir.Operation, taken: ir.Operation, queue: ir.Value, fetches: bool, division: Sequence[ir.Value]) -> None:
    """Replace a role's loop by one that takes work items from the queue.

    The queue's numbers start at the number of blocks, since each block has an item without it. If blocks have none, all
    numbers are larger by the number of blocks than those of the items.
    """
    block, late = loop.regions[0].blocks[0], "late" in taken.attributes
    lower, upper, step = division
    iteration = taken.operands[1]
    inits = list(loop.operands)[3:]
    types = [lower.type, lower.type, *(v.type for v in inits)]
    with ir.InsertionPoint(loop), loop.location:
        if late:
            upper = arith.addi(upper, step)
            if fetches:
                staging.QueueFetchOp(queue, const(0), upper)
            lower = staging.QueueNextOp(queue, const(0)).operation.results[0]
        made = scf.WhileOp(types, [lower, const(int(late)), *inits])
        before, after = (region.blocks.append(*types) for region in made.regions)
        with ir.InsertionPoint(before):
            more = arith.cmpi(arith.CmpIPredicate.slt, before.arguments[0], upper)
            scf.condition(more, list(before.arguments))
        number, use, *carried = after.arguments
        with ir.InsertionPoint(after):
            last = ends_soon(number, upper, step) if fetches else None
            if last is not None:
                fetch_if(arith.xori(last, const(1, 1)), queue, use, upper)
            item = arith.subi(number, step) if late else number
        ops = [op.operation for op in block.operations]
        for old, new in zip(block.arguments, [item, *carried], strict=True):
            old.replace_all_uses_with(new)
        for op in ops[:-1]:
            after.append(op)
        with ir.InsertionPoint(after):
            if last is not None:
                fetch_if(last, queue, use, upper)
            following = staging.QueueNextOp(queue, use).operation.results[0]
            scf.yield_([following, arith.addi(use, const(1)), *ops[-1].operands])
        ops[-1].erase()
    taken.results[0].replace_all_uses_with(item)
    if defining_op(iteration) is not None:  # computed from a variable that is the item now
        iteration.replace_all_uses_with(item)
    taken.erase()
    for old, new in zip(loop.results, list(made.results)[2:], strict=True):
        old.replace_all_uses_with(new)
    loop.erase()


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        taken = ops_named(function, "kv.take_work_item")
        loops = [(enclosing(op, "scf.for"), op) for op in taken]
        if not loops or any(loop is None or op.block != loop.regions[0].blocks[0] for loop, op in loops):
            continue
        roles = [role_of(loop) for loop, _ in loops]
        divisions = [division_of(loop, op) for loop, op in loops if loop is not None]
        if "" in roles or not FETCHERS.intersection(roles) or None in divisions:
            continue
        schedule = schedule_of(function)
        consumers, producers = schedule.get("consumers", 2), producers_of(schedule)
        with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), function.location:
            readers = sum(warps_of(role, consumers, producers) for role in roles)
            queue = staging.make_queue(taken[0].operands[0], readers)
        for (loop, op), role, division in zip(loops, roles, divisions, strict=True):
            take(loop, op, queue, role in FETCHERS, division)
