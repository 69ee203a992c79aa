# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute long chains of tile ops a few registers at a time: for distribute-kv-tiles.

A thread has 64 elements of a tile of scores. A mask or a score that is a chain of many ops on all of them would need 64
registers for every op: more than are left by the accumulators, and the assembler does not reorder that much. So the
ops that compute masked scores, and scores that read arrays, are emitted for 8 registers after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import ub, vector

from kvarn.lowering.rewrite import defining_op, ops_named

from . import memory as tile_memory
from .ir import attributes_of, backward, is_elementwise, rank, score_of, users
from .threads import shuffled, splat
from .windows import Windows

CHUNK = 8
_READ = ("kv.tile_gather", "kv.tile_windows")
_TILES = (*_READ, "kv.tile_broadcast", "tensor.splat")
_COMPUTED = ("llvm.call_intrinsic",)


@dataclass(frozen=True)
class Gather:
    """A gather that its users emit where they need its elements."""

    buffer: ir.Value
    mask: ir.Value
    indices: list[ir.Value]


class Chunks:
    """The ops of a kernel whose results are computed in chunks, and the deferred gathers."""

    def __init__(self, function: ir.Operation):
        self.deferred: dict[ir.Value, Gather | Windows] = {}
        self.roots: set[ir.Value] = set()  # tiles before distribution
        self.waiting: set[ir.Value] = set()
        for op in ops_named(function, "kv.tile_mask", *_READ):
            if rank(op.results[0]) == 2:
                self._add(op if op.name == "kv.tile_mask" else score_of(op))

    def _add(self, root: ir.Operation) -> None:
        block = root.block
        if root.name in _READ:
            return  # nothing is computed from it here
        if root.name != "kv.tile_mask":
            following = users(root.results[0])
            if any(user.name == "kv.tile_mask" and user.block == block for user in following):
                return  # it belongs to the mask
        cone = backward([root], lambda op: op.block == block and (is_elementwise(op) or op.name in _TILES))
        escaping = [op for op in cone if op != root and any(user not in cone for user in users(op.results[0]))]
        outside = backward(escaping, cone.__contains__) if escaping else set()
        self.roots.add(root.results[0])
        self.waiting |= {
            op.results[0] for op in cone if op.name in _READ and rank(op.results[0]) == 2 and op not in outside
        }

    def defer(self, read: Gather | Windows, type_: ir.Type) -> ir.Value:
        """A placeholder for the elements of a tile that is read where they are needed, of this type."""
        stand_in = ub.PoisonOp(type_).result
        self.deferred[stand_in] = read
        return stand_in

    def computed(self, value: ir.Value) -> ir.Value:
        """A vector, computed in chunks at the insertion point."""
        made = ub.PoisonOp(value.type).result
        for lanes, part in self.parts(value):
            made = vector.insert_strided_slice(part, made, [lanes.start], [1])
        return made

    def parts(self, value: ir.Value) -> Iterator[tuple[range, ir.Value]]:
        """The lanes of a vector, a few at a time: (indices, values), computed at the insertion point on demand."""
        lanes = ir.VectorType(value.type).shape[0]
        parts = _Parts(self, ir.InsertionPoint.current.block)
        for start in range(0, lanes, CHUNK):
            some = range(start, min(start + CHUNK, lanes))
            yield some, parts.of(value, tuple(some))


class _Parts:
    """Some lanes of vectors, computed from the lanes that they need of other vectors in the block."""

    def __init__(self, chunks: Chunks, block: ir.Block):
        self.chunks, self.block = chunks, block
        self._found: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}

    def of(self, value: ir.Value, lanes: tuple[int, ...]) -> ir.Value:
        key = value, lanes
        if key not in self._found:
            self._found[key] = self._compute(value, lanes)
        return self._found[key]

    def _compute(self, value: ir.Value, lanes: tuple[int, ...]) -> ir.Value:
        waiting = self.chunks.deferred.get(value)
        if isinstance(waiting, Windows):
            return waiting.lanes(lanes)
        if waiting is not None:
            return tile_memory.gathered(
                waiting.buffer, self.of(waiting.mask, lanes), [self.of(v, lanes) for v in waiting.indices]
            )
        op, type_ = defining_op(value), ir.VectorType(value.type)
        small = ir.VectorType.get([len(lanes)], type_.element_type)
        if op is not None and op.block == self.block:
            whole = all(isinstance(v.type, ir.VectorType) and v.type.shape == type_.shape for v in op.operands)
            if op.operands and whole and (is_elementwise(op) or op.name in _COMPUTED):
                operands = [self.of(v, lanes) for v in op.operands]
                return ir.Operation.create(op.name, [small], operands, attributes_of(op)).result
            if op.name == "vector.broadcast" and not isinstance(op.operands[0].type, ir.VectorType):
                return splat(op.operands[0], len(lanes))
            if op.name == "vector.shuffle" and op.operands[0] == op.operands[1]:
                mask = list(ir.DenseI64ArrayAttr(op.attributes["mask"]))
                source = [mask[i] for i in lanes]
                if str(type_.element_type) != "i1":  # row and column numbers are few, predicates fewer
                    return vector.shuffle(op.operands[0], op.operands[1], source)
                needed = tuple(sorted(set(source)))
                return shuffled(self.of(op.operands[0], needed), [needed.index(i) for i in source])
        if lanes == tuple(range(type_.shape[0])):
            return value
        return vector.shuffle(value, value, list(lanes))
