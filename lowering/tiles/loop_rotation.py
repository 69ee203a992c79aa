# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops of two products that can be rotated: for pipeline-kv-loops, which does it.

The second product needs the first, and adds to a tile that the loop carries (Q K^T, softmax, P V). What is said here is
which ops of the body go with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.lowering.rewrite import defining_op, walk

from .copy_groups import AWAITED
from .ir import ROW_SUMS, backward, element, rank, users

NARROWS = ("arith.truncf", "kv.cast")  # weights to the element type of products
WAITS = ("kv.consumer_wait", "kv.tile_clear", "kv.tile_columns")  # for a tile, and what is made of it in place
_WRITES = ("memref.store", "kv.tile_scatter", "kv.tile_store_rows", "kv.store_tile")


@dataclass
class Rotation:
    """A loop of two products, and which they are."""

    loop: ir.Operation
    first: ir.Operation
    second: ir.Operation
    sums: tuple[ir.Operation, ...] = ()  # the product that sums up rows of the second's weights, up to what is carried

    @property
    def collected(self) -> list[ir.Value]:
        """The carried values that need the second product, or the sums of its weights."""
        return [self.second.result, *(op.result for op in self.sums[-1:])]

    @property
    def block(self) -> ir.Block:
        return self.loop.regions[0].blocks[0]

    @property
    def ops(self) -> list[ir.Operation]:
        """The body's ops, the yield left out."""
        found = [op.operation for op in self.block.operations]
        return found[:-1]

    @property
    def yielded(self) -> list[ir.Value]:
        found = [op.operation for op in self.block.operations]
        return list(found[-1].operands)


def rotation_of(loop: ir.Operation) -> Rotation | None:
    """How a loop can be rotated; None when it has another form."""
    block = loop.regions[0].blocks[0]
    dots = [op.operation for op in block.operations if op.operation.name == "kv.dot"]
    sums = [op for op in dots if ROW_SUMS in op.attributes]
    dots = [op for op in dots if op not in sums]
    if len(dots) != 2 or dots[1].opview.c is None:
        return None
    while sums and (following := users(sums[-1].result)[0]).name != "scf.yield":
        sums.append(following)  # the product, a column of it, and the sums that are carried
    made = Rotation(loop, *dots, tuple(sums))
    inside = set(made.ops)
    needs = backward([dots[1]], inside.__contains__)
    result = dots[1].result
    # The accumulator is carried, and nothing else of the body reads it.
    if dots[0] not in needs or result not in made.yielded or len(users(result)) != 1:
        return None
    weights = defining_op(dots[1].opview.a)
    if weights is not None and weights.name == "kv.tile_share":  # read in shared memory, where the next ones go
        return None
    return made if _separates_stages(made) else None


def _separates_stages(r: Rotation) -> bool:
    """Let the second product wait for columns of the first one's tile by itself, with nothing left to wait for.

    False where the buffer has one stage: the next tile comes beside the second product.
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
    """The ops that go with a product's second operand: the wait for its tile, what clears it, its release."""
    found, made = [], defining_op(tile)
    while made is not None and made.name in WAITS:
        found.append(made)
        if made.name == "kv.consumer_wait":
            found += [op for op in r.ops if _frees(op, made.operands[0])]
            break
        made = defining_op(made.operands[0])
    return found


def lagging(r: Rotation) -> list[ir.Operation]:
    """The second product, sums of its weights, and the ops that go with it."""
    found = [r.second, *r.sums, *of_tile(r, r.second.opview.b)]
    return [op for op in r.ops if op in found]


def only_stage(r: Rotation) -> list[ir.Operation]:
    """What releases the first product's tile of a buffer with one stage: the next comes beside the other product."""
    frees = [op for op in of_tile(r, r.first.opview.b) if op.name == "kv.consumer_release"]
    return [op for op in frees if ir.IntegerAttr(defining_op(op.operands[0]).attributes["stages"]).value == 1]


def _frees(op: ir.Operation, buffer: ir.Value) -> bool:
    """Whether an op releases a buffer's stage, or fills it again."""
    if op.name == "kv.consumer_release":
        return op.operands[0] == buffer
    return any(x.name == "kv.copy_start" and x.operands[0] == buffer for x in walk(op)[1:])


def late(r: Rotation, lag: set[ir.Operation]) -> set[ir.Operation]:
    """What must wait for the second product: what reads its accumulator, and its first operand's last conversion.

    The registers of the first operand are read while the product is under way.
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
    """The numbers of the block that an iteration reads of memory that the loop does not write, at places that the
    number of the iteration tells.
    """
    inside = set(r.ops)
    reads = [op for op in r.ops if op.name == "memref.load"]
    if any(op.name in _WRITES for op in walk(r.loop)):
        return []
    return [op for op in reads if all(o == op or _computes(o) for o in backward([op], inside.__contains__))]


def _computes(op: ir.Operation) -> bool:
    return op.name.startswith("arith.") and not isinstance(op.results[0].type, ir.RankedTensorType)


def sums_of(r: Rotation, results: set[ir.Value]) -> list[ir.Value]:
    """The carried vectors among ``results`` that need the second product's weights."""
    weights = defining_op(r.second.opview.a)
    if weights is not None and weights.name in NARROWS:
        weights = defining_op(weights.operands[0])
    inside = set(r.ops)
    found = [v for v in dict.fromkeys(r.yielded) if v in results and rank(v) == 1 and str(element(v)) == "f32"]
    return [v for v in found if weights in backward([defining_op(v)], inside.__contains__)]
