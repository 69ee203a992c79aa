# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops over the elements of a head, one by one, go by vectors: a load of several elements, a lane for each."""

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, scf, vector

from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import ops_named


@dataclass(frozen=True)
class Options:
    max_width: int = 8


def constant(value):
    """The integer that a value is; None when it is none at compile time."""
    op = value.owner
    known = not isinstance(op, ir.Block) and op.name == "arith.constant"
    return op.attributes["value"].value if known else None


@kv_pass(Options)
def run(module, options):
    for op in ops_named(module, "kv.load"):
        load, loop = op.opview, op.parent.operation
        if loop.name != "scf.for" or load.width.value != 1:
            continue
        begin, end, step = (constant(v) for v in list(loop.operands)[:3])
        whole = None not in (begin, end) and begin % options.max_width == end % options.max_width == 0
        if load.dim != loop.regions[0].blocks[0].arguments[0] or step != 1 or not whole:
            remark(loop, "missed", "not a loop over elements, one by one")
            continue
        remark(loop, "passed", "widened", width=options.max_width)
        widen(loop, options.max_width)


def widen(loop, width):
    """A copy of the body for each lane of a step."""
    body = loop.regions[0].blocks[0]
    with ir.InsertionPoint(loop), loop.location:
        step = arith.constant(loop.operands[2].type, width)
        made = scf.ForOp(*list(loop.operands)[:2], step, list(loop.operands)[3:])
    first, carried, vectors = made.induction_variable, list(made.inner_iter_args), {}
    with ir.InsertionPoint(made.body):
        for lane in range(width):
            with loop.location:
                d = arith.addi(first, arith.constant(first.type, lane))
            values = dict(zip(body.arguments, [d, *carried], strict=True))
            for n, op in enumerate(body.operations):
                if op.operation.name == "scf.yield":
                    carried = [values.get(v, v) for v in op.operands]
                elif op.operation.name == "kv.load" and op.dim == body.arguments[0] and op.width.value == 1:
                    with op.location:
                        if n not in vectors:
                            vectors[n] = load_vector(op, [values.get(v, v) for v in op.operands], first, width)
                        values[op.out] = vector.extract(vectors[n], [], [lane])
                else:
                    new = op.operation.clone()
                    for i, v in enumerate(new.operands):
                        new.operands[i] = values.get(v, v)
                    values.update(zip(op.operation.results, new.results, strict=True))
        with loop.location:
            scf.yield_(carried)
    for old, new in zip(loop.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    loop.erase()


def load_vector(op, operands, first, width):
    """The load of a step, from its first element on."""
    operands[4] = first
    attributes = dict(op.operation.attributes)
    attributes["width"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), width)
    return ir.Operation.create("kv.load", [ir.VectorType.get([width], op.out.type)], operands, attributes).result
