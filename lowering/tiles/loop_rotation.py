# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Analysis of loops of two products that pipeline-kv-loops can rotate.

The second product needs the first, and adds to an accumulator that the loop carries (Q K^T, softmax, P V). The analysis
says which ops of the body move with the second product.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.lowering.rewrite import defining_op, walk

from .copy_groups import AWAITED
from .ir import ROW_SUMS, backward, element, rank, users

NARROWS = ("arith.truncf", "kv.cast")  # from f32 weights to the element type of products
WAITS = ("kv.consumer_wait", "kv.tile_clear", "kv.tile_columns")  # waits for a tile, and ops that work on it in place
_WRITES = ("memref.store", "kv.tile_scatter", "kv.tile_store_rows", "kv.store_tile")


@dataclass
class Rotation:
    """A loop that can be rotated, and its two products."""

    loop: ir.Operation
    first: ir.Operation
    second: ir.Operation
    sums: tuple[ir.Operation, ...] = ()  # the product with ones that sums the weights, and ops from there to the yield

    @property
    def collected(self) -> list[ir.Value]:
        """The yielded values that depend on the second product or on the sums of its weights."""
        return [self.second.result, *(op.result for op in self.sums[-1:])]

    @property
    def block(self) -> ir.Block:
        return self.loop.regions[0].blocks[0]

    @property
    def ops(self) -> list[ir.Operation]:
        """The ops of the body without the yield."""
        found = [op.operation for op in self.block.operations]
        return found[:-1]

    @property
    def yielded(self) -> list[ir.Value]:
        found = [op.operation for op in self.block.operations]
        return list(found[-1].operands)


def rotation_of(loop: ir.Operation) -> Rotation | None:
    """The rotation of a loop; None if it has another form."""
    block = loop.regions[0].blocks[0]
    dots = [op.operation for op in block.operations if op.operation.name == "kv.dot"]
    sums = [op for op in dots if ROW_SUMS in op.attributes]
    dots = [op for op in dots if op not in sums]
    if len(dots) != 2 or dots[1].opview.c is None:
        return None
    while sums and (following := users(sums[-1].result)[0]).name != "scf.yield":
        sums.append(following)  # the product, its column, the addition to the carried sums
    if any(_has_one_place(op.operation) for op in block.operations):
        return None
    made = Rotation(loop, *dots, tuple(sums))
    inside = set(made.ops)
    needs = backward([dots[1]], inside.__contains__)
    result = dots[1].result
    # The accumulator must be yielded, and have no other use in the body.
    if dots[0] not in needs or result not in made.yielded or len(users(result)) != 1:
        return None
    weights = defining_op(dots[1].opview.a)
    if weights is not None and weights.name == "kv.tile_share":  # in shared memory, which the next weights overwrite
        return None
    return made if _separates_stages(made) else None


def _has_one_place(op: ir.Operation) -> bool:
    """Whether an op writes or reads a tile in shared memory that has no stages: the next iteration overwrites it."""
    if op.name == "kv.tile_share":
        return any(use.operand_number != 0 for use in op.results[0].uses)
    return op.name in ("kv.tile_unshare", "kv.tile_transpose")


def _separates_stages(r: Rotation) -> bool:
    """If V is a column range of the key tile, give the second product a reference to the stage of its own.

    The clone of the wait is marked as already awaited. False if the buffer has one stage: the next tile would overwrite
    V while the second product runs.
    """
    columns = defining_op(r.second.opview.b)
    if columns is None or columns.name != "kv.tile_columns":
        return True
    wait = defining_op(columns.operands[0])
    while wait is not None and wait.name != "kv.consumer_wait":
        wait = defining_op(wait.operands[0]) if wait.name in WAITS else None
    if wait is None or ir.IntegerAttr(defining_op(wait.operands[0]).attributes["stages"]).value < 2:
        return False
    if len(users(columns.result)) > 1:
        return False
    with ir.InsertionPoint(r.second), r.second.location:
        again = wait.clone()
        again.attributes[AWAITED] = ir.UnitAttr.get()
        copy = columns.clone()
        copy.operands[0] = again.result
    r.second.operands[1] = copy.result
    columns.erase()
    return True


def of_tile(r: Rotation, tile: ir.Value) -> list[ir.Operation]:
    """The ops that belong to operand B of a product: the wait for its tile, its clearing, its release."""
    found, made = [], defining_op(tile)
    while made is not None and made.name in WAITS:
        found.append(made)
        if made.name == "kv.consumer_wait":
            found += [op for op in r.ops if _frees(op, made.operands[0])]
            break
        made = defining_op(made.operands[0])
    return found


def lagging(r: Rotation) -> list[ir.Operation]:
    """The ops that lag by one iteration: the second product, sums of its weights, waits for and releases of B."""
    found = [r.second, *r.sums, *of_tile(r, r.second.opview.b)]
    return [op for op in r.ops if op in found]


def only_stage(r: Rotation) -> list[ir.Operation]:
    """The releases of the first product's B if its buffer has one stage, to be refilled during the second product."""
    frees = [op for op in of_tile(r, r.first.opview.b) if op.name == "kv.consumer_release"]
    return [op for op in frees if ir.IntegerAttr(defining_op(op.operands[0]).attributes["stages"]).value == 1]


def _frees(op: ir.Operation, buffer: ir.Value) -> bool:
    """Whether an op releases a stage of a buffer, or starts the next copy to it."""
    if op.name == "kv.consumer_release":
        return op.operands[0] == buffer
    return any(x.name == "kv.copy_start" and x.operands[0] == buffer for x in walk(op)[1:])


def late(r: Rotation, lag: set[ir.Operation]) -> set[ir.Operation]:
    """The ops that must wait for the second product: users of its accumulator, and the conversion of its operand A.

    The product reads the registers of A while it runs, so that they may not be overwritten.
    """
    carried = [r.block.arguments[1 + r.yielded.index(v)] for v in r.collected]
    found: set[ir.Operation] = set()
    for op in r.ops:
        if op not in lag and any(v in carried or defining_op(v) in found for v in op.operands):
            found.add(op)
    conversion = defining_op(r.second.opview.a)
    if conversion is not None and conversion.name in NARROWS and len(users(conversion.result)) == 1:
        found.add(conversion)
    return found


def loads_of(r: Rotation) -> list[ir.Operation]:
    """Scalar loads of the body whose address depends on the loop index only, if the loop writes no memory."""
    inside = set(r.ops)
    reads = [op for op in r.ops if op.name == "memref.load"]
    if any(op.name in _WRITES for op in walk(r.loop)):
        return []
    return [op for op in reads if all(o == op or _computes(o) for o in backward([op], inside.__contains__))]


def _computes(op: ir.Operation) -> bool:
    return op.name.startswith("arith.") and not isinstance(op.results[0].type, ir.RankedTensorType)


def sums_of(r: Rotation, results: set[ir.Value]) -> list[ir.Value]:
    """The yielded f32 vectors among ``results`` that depend on the weights of the second product."""
    weights = defining_op(r.second.opview.a)
    if weights is not None and weights.name in NARROWS:
        weights = defining_op(weights.operands[0])
    inside = set(r.ops)
    found = [v for v in dict.fromkeys(r.yielded) if v in results and rank(v) == 1 and str(element(v)) == "f32"]
    return [v for v in found if weights in backward([defining_op(v)], inside.__contains__)]
