# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Let rounds start soon: read what a round needs before it waits for its query rows.

A block that takes one tile of query rows after the other (``queue-kv-rounds``) starts each with a chain of reads that
wait for one another: the number of the round, its sequence, what a list says. No product is under way meanwhile.

What a round reads behind the wait for its query rows, and needs these not, is read before it; and every read stands as
high as what it needs allows: how many tiles a list has, beside the search for the sequence, and the bias of far keys.

Where query rows are split into terms (``kv.tile_terms``) reads behind the wait come behind a barrier besides. It is
done there, where tables are made: T5's buckets and one document by a block mask take 1.097 of plain causal, 1.107
without (H200, 8 x 4096, fp8 pages). Documents alone took 1.025 for 1.016: registers are few, and two went to memory.

Before:  scf.while (%round) { %b = scf.while { ... } ; %q = kv.consumer_wait %rows ; %t = kv.tile_terms %q
                              %n = memref.load %list[%round] ; %far = kv.tile_gather %bias, %h, %last ; ... }
After:   scf.while (%round) { %n = memref.load %list[%round] ; %b = scf.while { ... }
                              %far = kv.tile_gather %bias, %h, %last ; %q = kv.consumer_wait %rows
                              %t = kv.tile_terms %q ; ... }
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from .memory_effects import may_write, writes
from .pass_base import kv_pass
from .rewrite import defining_op, ops_named, walk
from .rewrites import performs
from .tabulate_kv_scores import makes_tables
from .tile_ir import backward, is_position, tiled

READS = ("memref.load", "kv.tile_gather")
_COMPUTES = (
    "arith.", "memref.dim", "tensor.splat", "kv.tile_broadcast", "kv.field", "kv.key_cache", "kv.value_cache",
    "kv.cache_length",
)  # fmt: skip
_PRODUCTS = ("scf.for", "kv.dot", "kv.dot_start")


@dataclass(frozen=True)
class Options:
    """every: also in kernels that make no tables, or whose query rows are not split into terms."""

    every: bool = False


def rounds(function: ir.Operation) -> list[ir.Block]:
    """The bodies of the loops that take their rounds from a queue, one of each role."""
    loops = ops_named(function, "scf.while")
    bodies = [loop.regions[1].blocks[0] for loop in loops]
    return [body for body in bodies if any(op.operation.name == "kv.queue_next" for op in body.operations)]


def ops_of(block: ir.Block) -> list[ir.Operation]:
    return [op.operation for op in block.operations]


def moves(op: ir.Operation) -> bool:
    """Whether an op only reads and computes, and so may stand before a wait."""
    if op.name == "scf.if":
        return len(op.results) > 0 and all(x.name == "scf.yield" or moves(x) for x in walk(op)[1:])
    return op.name in READS or op.name.startswith(_COMPUTES) or is_position(op)


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
    for op in ops_of(body):
        if op == wait:
            return
        if reads(op):
            raise_read(op)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        splits = len(ops_named(function, "kv.tile_terms")) > 0
        if options.every or (splits and makes_tables(function)):
            for body in rounds(function):
                read_ahead(body)
