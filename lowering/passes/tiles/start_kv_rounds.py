# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Let rounds start soon: read before waiting, and compute numbers again that a warp has no registers for.

A block that takes one tile of query rows after the other (``queue-kv-rounds``) starts each with a chain of reads that
wait for one another: the number of the round, its sequence, what a list says. No product is under way meanwhile.

*Numbers.* What one instruction computes of a kernel's arguments is kept for all rounds in registers that a warp has 63
of. ptxas puts what they have no room for to memory, and whoever starts a round reads it back before the rest of the
chain. Where a role uses more than ``most`` such numbers, each round computes them again where it needs them.

*Reads.* What a round reads behind the wait for its query rows, and needs these not, is read before it, as soon as its
place is known: how many tiles a list has, beside the search for the sequence, and the bias of far keys. By default it
is done where rounds use so many numbers and query rows are split into terms (``kv.tile_terms``), behind whose barrier
these reads come otherwise.

Before:  %last = arith.subi %extent, %c1
         scf.while (%round) { %b = scf.while { ... } ; %q = kv.consumer_wait %rows ; %t = kv.tile_terms %q
                              %k = arith.minsi %h, %last ; %n = memref.load %list[%round, %k] ; ... }
After:   scf.while (%round) { %last = arith.subi (mov %extent), %c1 ; %k = arith.minsi %h, %last
                              %n = memref.load %list[%round, %k] ; %b = scf.while { ... }
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
    """reads: read before rounds wait (default: where query rows are split into terms and rounds use many numbers);
    most: numbers of arguments that a role's rounds may keep in registers."""

    reads: bool | None = None
    most: int = 4


def rounds(function: ir.Operation) -> list[ir.Block]:
    """The bodies of the loops that take their rounds from a queue, one of each role."""
    loops = ops_named(function, "scf.while")
    bodies = [loop.regions[1].blocks[0] for loop in loops]
    return [body for body in bodies if any(op.operation.name == "kv.queue_next" for op in body.operations)]


def ops_of(block: ir.Block) -> list[ir.Operation]:
    return [op.operation for op in block.operations]


# --- reads -------------------------------------------------------------------------------------------


def moves(op: ir.Operation) -> bool:
    """Whether an op only reads and computes, and so may stand before a wait."""
    if op.name == "scf.if":
        return len(op.results) > 0 and all(x.name == "scf.yield" or moves(x) for x in walk(op)[1:])
    return op.name in READS or op.name.startswith(("arith.", "memref.dim", "tensor.splat")) or is_position(op)


def reads(op: ir.Operation) -> bool:
    return any(x.name in READS for x in walk(op))


def ahead_of(wait: ir.Operation) -> list[ir.Operation]:
    """What stands behind a wait, does not need it, and may stand before it: up to what multiplies."""
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
    """Move a read, with what its place is computed from, right behind the last op that it needs or that may write."""
    ops = ops_of(read.block)
    inside = set(ops)
    needed = backward([read], lambda op: op in inside and moves(op) and not reads(op))
    anchors = {defining_op(v) for op in needed for x in walk(op) for v in x.operands} - needed
    anchors |= {op for op in ops[: ops.index(read)] if any(may_write(x.name) and writes(x) for x in walk(op))}
    first = 1 + max((ops.index(op) for op in anchors if op in inside), default=-1)
    while moves(ops[first]) and ops[first] != read:  # beside other reads
        first += 1
    for op in ops[first + 1 :]:
        if op in needed:
            op.move_before(ops[first])


def read_ahead(body: ir.Block) -> None:
    """Read before a round waits for its rows."""
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
    """An i32 or an f32 that LLVM cannot tell from others: what is computed of it is computed where it stands."""
    kind = "f" if isinstance(x.type, ir.F32Type) else "r"
    return inline_asm("mov.b32 $0, $1;", f"={kind},{kind}", [x], str(x.type), effects=True)


class Numbers:
    """The numbers of a kernel's arguments that its rounds use, and where."""

    def __init__(self, function: ir.Operation) -> None:
        self.top = function.regions[0].blocks[0]
        self.order = ops_of(self.top)

    def slice_of(self, value: ir.Value) -> set[ir.Operation]:
        """The ops that compute such a number; none of another value."""
        maker = defining_op(value)
        if maker is None or maker.block != self.top or maker.name not in _NUMBERS:
            return set()
        if str(value.type) not in ("i1", "i32"):
            return set()
        needed = backward([maker], lambda op: op.block == self.top)
        return needed if all(op.name in (*_NUMBERS, *_EXTENTS) for op in needed) else set()

    def used(self, body: ir.Block) -> set[ir.Value]:
        """Those that a round uses."""
        return {v for op in ops_of(body) for x in walk(op) for v in x.operands if self.slice_of(v)}

    def again(self, value: ir.Value) -> ir.Value:
        """One, computed again at the insertion point of what LLVM cannot take for the arguments."""
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
    """A round's ops: before its loop over keys, that loop with the branch that it is in, and behind it."""
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
    """Have each part of a round compute the numbers that it uses."""
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
        bodies, numbers = rounds(function), Numbers(function)
        many = any(len(numbers.used(body)) > options.most for body in bodies)
        if (many and splits_rows(function)) if options.reads is None else options.reads:
            for body in bodies:
                read_ahead(body)
        if many and performs(function, "numbers"):
            for body in bodies:
                compute_again(body, numbers)
