# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Start work items earlier: read before waiting, and recompute scalars for which a warp has no registers.

A persistent block (``queue-kv-work``) starts each work item with a chain of dependent reads: the item's number, its
sequence, an entry of a list. No product is in flight meanwhile.

*Numbers.* Scalars that one instruction computes from kernel arguments are kept for all work items in uniform registers,
of which a warp has 63. ptxas spills the rest to memory, and each work item reloads them before the rest of its chain.
If a role uses more than ``most`` such scalars, each work item recomputes them where it needs them.

*Reads.* Reads of a work item after the wait for its query rows, which do not depend on these, move before the wait, as
soon as their addresses are known: the number of tiles in a list next to the search for the sequence, and the bias of
far keys. By default this applies if work items use many such scalars and query rows are split into terms
(``kv.tile_terms``), whose barrier otherwise precedes the reads.

Before:  %last = arith.subi %extent, %c1
         scf.while (%item) { %b = scf.while { ... } ; %q = kv.consumer_wait %rows ; %t = kv.tile_terms %q
                              %k = arith.minsi %h, %last ; %n = memref.load %list[%item, %k] ; ... }
After:   scf.while (%item) { %last = arith.subi (mov %extent), %c1 ; %k = arith.minsi %h, %last
                              %n = memref.load %list[%item, %k] ; %b = scf.while { ... }
                              %q = kv.consumer_wait %rows ; %t = kv.tile_terms %q ; ... }
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlir import ir

from kvarn.dsl.ptx import inline_asm
from kvarn.lowering.memory_effects import may_write, writes
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import defining_op, ops_named, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import backward, cloned, is_position, splits_rows, tiled

READS = ("memref.load", "kv.tile_gather")
_PRODUCTS = ("scf.for", "kv.dot", "kv.dot_start")
_NUMBERS = ("arith.addi", "arith.subi", "arith.cmpf")  # of arguments and constants
_EXTENTS = ("memref.dim", "arith.index_cast", "arith.constant")


@dataclass(frozen=True)
class Options:
    """reads: read before work items wait (default: if query rows are split into terms and work items use many scalars);
    most: scalars of arguments that a role's work items may keep in registers."""

    reads: bool | None = None
    most: int = 4


def item_loops(function: ir.Operation) -> list[ir.Block]:
    """The bodies of the loops that take work items from a queue, one per role."""
    loops = ops_named(function, "scf.while")
    bodies = [loop.regions[1].blocks[0] for loop in loops]
    return [body for body in bodies if any(op.operation.name == "kv.queue_next" for op in body.operations)]


def ops_of(block: ir.Block) -> list[ir.Operation]:
    return [op.operation for op in block.operations]


# --- reads -------------------------------------------------------------------------------------------


def moves(op: ir.Operation) -> bool:
    """Whether an op only reads and computes, so that it may precede a wait."""
    if op.name == "scf.if":
        return len(op.results) > 0 and all(x.name == "scf.yield" or moves(x) for x in walk(op)[1:])
    return op.name in READS or op.name.startswith(("arith.", "memref.dim", "tensor.splat")) or is_position(op)


def reads(op: ir.Operation) -> bool:
    return any(x.name in READS for x in walk(op))


def ahead_of(wait: ir.Operation) -> list[ir.Operation]:
    """The ops after a wait that do not depend on it and may precede it, up to the first product."""
    ops, needs, found = ops_of(wait.block), {wait}, []
    for op in ops[ops.index(wait) + 1 :]:
        if any(x.name in _PRODUCTS for x in walk(op)):
            break
        if any(defining_op(v) in needs for x in walk(op) for v in x.operands):
            needs.add(op)
        elif moves(op):
            found.append(op)
        else:
            break
    return found


def raise_read(read: ir.Operation) -> None:
    """Move a read, with the computation of its address, after the last op that it depends on or that may write."""
    ops = ops_of(read.block)
    inside = set(ops)
    needed = backward([read], lambda op: op in inside and moves(op) and not reads(op))
    anchors = {defining_op(v) for op in needed for x in walk(op) for v in x.operands} - needed
    anchors |= {op for op in ops[: ops.index(read)] if any(may_write(x.name) and writes(x) for x in walk(op))}
    first = 1 + max((ops.index(op) for op in anchors if op in inside), default=-1)
    while moves(ops[first]) and ops[first] != read:  # next to other reads
        first += 1
    for op in ops[first + 1 :]:
        if op in needed:
            op.move_before(ops[first])


def read_ahead(body: ir.Block) -> None:
    """Read before a work item waits for its rows."""
    wait = next((op for op in ops_of(body) if op.name == "kv.consumer_wait"), None)
    found = [] if wait is None else ahead_of(wait)
    if wait is None or not any(map(reads, found)) or not performs(wait, "read ahead"):
        return
    for op in found:
        op.move_before(wait)
    for op in found:
        if reads(op):
            raise_read(op)


# --- numbers -----------------------------------------------------------------------------------------


def hidden(x: ir.Value) -> ir.Value:
    """An opaque i32 or f32 for LLVM, so that values computed from it are computed in place."""
    kind = "f" if isinstance(x.type, ir.F32Type) else "r"
    return inline_asm("mov.b32 $0, $1;", f"={kind},{kind}", [x], str(x.type), effects=True)


class Numbers:
    """The scalars of a kernel's arguments that its work items use, and their uses."""

    def __init__(self, function: ir.Operation) -> None:
        self.top = function.regions[0].blocks[0]
        self.order = ops_of(self.top)

    def slice_of(self, value: ir.Value) -> set[ir.Operation]:
        """The ops that compute such a scalar; empty for another value."""
        maker = defining_op(value)
        if maker is None or maker.block != self.top or maker.name not in _NUMBERS:
            return set()
        if str(value.type) not in ("i1", "i32"):
            return set()
        needed = backward([maker], lambda op: op.block == self.top)
        return needed if all(op.name in (*_NUMBERS, *_EXTENTS) for op in needed) else set()

    def used(self, body: ir.Block) -> set[ir.Value]:
        """The scalars that a work item uses."""
        return {v for op in ops_of(body) for x in walk(op) for v in x.operands if self.slice_of(v)}

    def again(self, value: ir.Value) -> ir.Value:
        """A scalar, recomputed at the insertion point from opaque copies of the arguments."""
        values: dict[ir.Value, ir.Value] = {}
        needed = self.slice_of(value)
        for op in self.order:
            if op not in needed:
                continue
            if op.name in _NUMBERS:
                values.update({v: hidden(v) for v in op.operands if defining_op(v) is None and v not in values})
            cloned(op, values)
            if op.name == "arith.index_cast":
                values[op.result] = hidden(values[op.result])
        return values[value]


def parts_of(body: ir.Block) -> Iterator[list[ir.Operation]]:
    """A work item's ops: before its loop over keys, the loop with its branch, and after it."""
    part: list[ir.Operation] = []
    for op in ops_of(body):
        if any(x.name == "scf.for" for x in walk(op)):
            yield part
            yield [op]
            part = []
        else:
            part.append(op)
    yield part


def compute_again(body: ir.Block, numbers: Numbers) -> None:
    """Make each part of a work item recompute the scalars that it uses."""
    for part in parts_of(body):
        made: dict[ir.Value, ir.Value] = {}
        for op in part:
            for x in walk(op):
                for i, value in enumerate(x.operands):
                    if value not in made and numbers.slice_of(value):
                        with ir.InsertionPoint(op), op.location:
                            made[value] = numbers.again(value)
                    if value in made:
                        x.operands[i] = made[value]


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        bodies, numbers = item_loops(function), Numbers(function)
        many = any(len(numbers.used(body)) > options.most for body in bodies)
        if (many and splits_rows(function)) if options.reads is None else options.reads:
            for body in bodies:
                read_ahead(body)
        if many and performs(function, "numbers"):
            for body in bodies:
                compute_again(body, numbers)
