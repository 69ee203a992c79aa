# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Software pipelining of copies by cp.async groups and block barriers: for pipeline-kv-loops.

It serves kernels with products by mma.sync, which have no producer. In iteration i the block waits once for all of its
tiles; by then every thread has read the tiles of iteration i - 1, whose stages the copies of iteration i + lead reuse
(lead is the number of stages minus one). They start after the first product, so that it does not wait for page lookups.

Before:  scf.for %i { kv.producer_acquire ; kv.copy_start %k, %i ; %t = kv.consumer_wait ; kv.dot ... }
After:   kv.copy_wait ; scf.if { kv.copy_start %k, first } ; kv.copy_commit
         scf.for %i { kv.copy_wait {pending} ; %t = kv.consumer_wait {kv.awaited} ; kv.dot
         scf.if (%i + lead < end) { kv.copy_start %k, %i + lead } ; kv.copy_commit ; ... }
"""

from __future__ import annotations

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.ops import staging
from kvarn.dialect.ops.common import i64_attr
from kvarn.lowering.index import const
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op

from .copies import SLOTS
from .ir import backward, cloned

AWAITED = "kv.awaited"  # on waits for tiles that an earlier kv.copy_wait has waited for
_LOOKUPS = ("kv.tile_row_pages",)


def prefetch_groups(loop: ir.Operation) -> None:
    """Make a loop's copies start some iterations ahead."""
    block = loop.regions[0].blocks[0]
    lower, upper, step = list(loop.operands)[:3]
    ops = [op.operation for op in block.operations][:-1]
    copies = [op for op in ops if op.name == "kv.copy_start"]
    if not copies:
        return
    buffers = [defining_op(copy.operands[0]) for copy in copies]
    lead = min(ir.IntegerAttr(made.attributes["stages"]).value for made in buffers) - 1
    staged = [copy for copy, made in zip(copies, buffers, strict=True) if _kind(made) == "staged"]
    lead = min(lead, SLOTS) if staged else lead
    needed = backward(copies, lambda o: o in ops)
    why = None
    if lead < 1:
        why = "its buffers have one stage"
    elif any(op.regions for op in needed):
        why = "the tiles' addresses are computed in branches"
    elif any(v in list(block.arguments)[1:] for op in needed for v in op.operands):
        why = "the tiles' addresses depend on loop-carried values"
    if why is not None:
        remark(loop, "missed", f"copies do not start ahead of their use: {why}")
        return
    ordered = [op for op in ops if op in needed]
    early = backward([op for op in ordered if op.name in _LOOKUPS], needed.__contains__)

    def emit(some: list[ir.Operation], index: ir.Value, values: dict[ir.Value, ir.Value] | None = None) -> dict:
        values = {block.arguments[0]: index} if values is None else values
        for op in some:
            with op.location:
                cloned(op, values)
        return values

    def ahead(index: ir.Value, count: int) -> ir.Value:
        return arith.addi(index, arith.muli(step, const(count))) if count else index

    def start(index: ir.Value, values: dict[ir.Value, ir.Value] | None) -> None:
        """Start the copies of an iteration, if it exists; ``values`` are its lookups."""
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, index, upper))
        with ir.InsertionPoint(branch.then_block):
            emit(ordered if values is None else [op for op in ordered if op not in early], index, values)
            scf.yield_([])
        staging.CopyCommitOp()

    with ir.InsertionPoint(loop), loop.location:
        staging.CopyWaitOp(i64_attr(0))  # the previous loop's tiles have been read
        for i in range(lead):
            start(ahead(lower, i), None)
    with ir.InsertionPoint.at_block_begin(block), loop.location:
        for copy in staged:
            maker = defining_op(copy.operands[1])
            of_number = backward([maker], needed.__contains__) if maker in needed else ()
            found = emit([op for op in ordered if op in of_number], block.arguments[0])
            staging.CopyFinishOp(copy.operands[0], found.get(copy.operands[1], copy.operands[1]), i64_attr(lead - 1))
        staging.CopyWaitOp(i64_attr(lead - 1))
        later = ahead(block.arguments[0], lead)
        last = arith.minsi(later, arith.subi(upper, step))  # no lookups past the end of a list of tiles
        values = emit([op for op in ordered if op in early], last)
    product = next((op for op in ops if op.name == "kv.dot"), ops[-1])
    with ir.InsertionPoint.after(product), loop.location:
        start(later, values)
    for op in [op for op in ops if op.name == "kv.consumer_wait"]:
        op.attributes[AWAITED] = ir.UnitAttr.get()
    for op in reversed(ops):
        if op.name in ("kv.copy_start", "kv.producer_acquire") or (
            op.name in _LOOKUPS and not any(True for _ in op.result.uses)
        ):
            op.erase()


def _kind(buffer: ir.Operation) -> str:
    return ir.StringAttr(buffer.attributes["copy"]).value
