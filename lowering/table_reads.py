# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Read what a table is made of in steps, with other work between: for pipeline-kv-loops.

A table of a bias by buckets reads the bucket of a distance, then the bias at the bucket: each read waits for the one
before. Made behind the start of both products it took 500 ns there, of which products hide 170 (H200). So the first
read starts before the tile's keys are waited for, the second between the starts of the two products, and behind them
the table is only written.

Before:  scf.if %near { %i = kv.tile_gather %buckets, %d ; %x = kv.tile_gather %bias, %i ; kv.table_store %x, %t }
After:   %i = scf.if %near { kv.tile_gather %buckets, %d } else { 0 }
         %x = scf.if %near { kv.tile_gather %bias, %i } else { 0 }
         scf.if %near { kv.table_store %x, %t }
"""

from __future__ import annotations

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.dtypes import i32
from kvarn.dsl import ptx
from kvarn.dsl.values import Value

from .index import const
from .rewrite import defining_op, walk
from .tile_ir import backward, cloned, splat_tile

GATHER = "kv.tile_gather"
STEPS = 2  # reads that other work stands between; what is read after more of them comes with the last


def contains(op: ir.Operation, name: str) -> bool:
    return any(inner.name == name for inner in walk(op))


def levels_of(ops: list[ir.Operation]) -> dict[ir.Operation, int]:
    """After how many reads, one needing the other, an op of a list can be computed."""
    found: dict[ir.Operation, int] = {}
    inside = set(ops)
    for op in ops:
        makers = {m for o in walk(op) for m in map(defining_op, o.operands) if m in inside and m != op}
        found[op] = max((found[m] + contains(m, GATHER) for m in makers if m in found), default=0)
    return found


def split_branch(branch: ir.Operation) -> None:
    """Let a branch that reads and stores be one branch for each step of its reads, and one that stores."""
    block = branch.regions[0].blocks[0]
    ops = [op.operation for op in block.operations][:-1]
    levels = levels_of(ops)
    values: dict[ir.Value, ir.Value] = {}
    with ir.InsertionPoint(branch), branch.location:
        for level in sorted({levels[op] for op in ops if op.name == GATHER}):
            reads = [op for op in ops if op.name == GATHER and levels[op] == level]
            made = scf.IfOp(branch.operands[0], [op.results[0].type for op in reads], has_else=True)
            with ir.InsertionPoint(made.then_block):
                scf.yield_(_again(ops, reads, values))
            with ir.InsertionPoint(made.else_block):
                scf.yield_([_zeros(op.results[0].type) for op in reads])
            values.update(zip((op.results[0] for op in reads), made.results, strict=True))
        stores = scf.IfOp(branch.operands[0])
        with ir.InsertionPoint(stores.then_block):
            _again(ops, [op for op in ops if not op.results], values)
            scf.yield_([])
    branch.erase()


def _again(ops: list[ir.Operation], wanted: list[ir.Operation], known: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Copies of ops with what they need of a block that is not known yet; the results of those that have one."""
    values, inside = dict(known), set(ops)
    needed = backward(wanted, lambda op: op in inside and not (op.results and op.results[0] in known))
    for op in ops:
        if op in needed:
            cloned(op, values)
    return [values[op.results[0]] for op in wanted if op.results]


def _zeros(type_: ir.Type) -> ir.Value:
    """What stands for what was not read; LLVM must not know it, or what is computed of a read would stand beside it."""
    zero, kind = ptx.unknown(Value(const(0), i32)).ir, ir.RankedTensorType(type_).element_type
    return splat_tile(type_, zero if zero.type == kind else arith.bitcast(kind, zero))


def split_reads(ops: list[ir.Operation]) -> None:
    """Split the branches among ops that read arrays and store tables."""
    for op in ops:
        ends = op.name == "scf.if" and not op.results and not len(op.regions[1].blocks)
        if ends and contains(op, GATHER) and contains(op, "kv.table_store") and not _branches(op):
            split_branch(op)


def _branches(op: ir.Operation) -> bool:
    return any(inner.regions for inner in walk(op)[1:] if inner != op)


def in_steps(tables: list[ir.Operation]) -> list[list[ir.Operation]]:
    """The ops that make tables: those of each of the :data:`STEPS` of reads, with what they need, and the rest."""
    levels, left, found = levels_of(tables), list(tables), []
    for step in range(STEPS):
        reads = [
            op for op in left if levels[op] == step and contains(op, GATHER) and not contains(op, "kv.table_store")
        ]
        needed = backward(reads, set(left).__contains__) if reads else set()
        found.append([op for op in left if op in needed])
        left = [op for op in left if op not in needed]
    return [*found, left]
