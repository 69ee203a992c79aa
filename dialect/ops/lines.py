# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations along the lines of tiles whose elements depend on one another: running sums, totals, unit triangles.

Kernels use them; on GPUs they go through shared memory of their own, a line per thread.
"""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..ext import Operand, Result
from .common import i64_attr
from .staging import Synchronizes
from .tile import KINDS, same_type, tile_of

SCANS = ("add", "mul")
SCANNED = ("f32", "i32")
MOST_SOLVED = 64  # rows of a triangle: its columns are in the registers of a thread, a block of them at a time


class TileScanOp(Kv.Operation, name="tile_scan", traits=[Synchronizes]):
    """The running sum or product of a vector, or of every column (axis 0) or row (axis 1) of a tile.

    Attributes: kind, ``add`` or ``mul``; axis, the dimension along which elements accumulate, 0 for a vector. Each
    result contains its own element. Elements: f32 or i32. The result has the operand's type.
    """

    source: Operand[Any]
    kind: ir.StringAttr
    axis: ir.IntegerAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        source = tile_of(self.source)
        if source is None or str(source.element_type) not in SCANNED:
            return verify.fail(self, f"the operand must be a tile of {' or '.join(SCANNED)}, got {self.source.type}")
        if not verify.one_of(self, "kind", SCANS):
            return False
        if verify.integer(self.axis) not in range(source.rank):
            return verify.fail(self, f"axis must be below the operand's rank {source.rank}, got {self.axis}")
        return same_type(self, self.source)


class TileTotalOp(Kv.Operation, name="tile_total", traits=[Synchronizes]):
    """The maximum, minimum or sum of the elements of a vector, as a scalar that all threads have.

    Attribute: kind, as of ``kv.tile_reduce``. Elements: f32 or i32.
    """

    source: Operand[Any]
    kind: ir.StringAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        source, result = tile_of(self.source), self.operation.results[0].type
        if source is None or source.rank != 1 or str(source.element_type) not in SCANNED:
            return verify.fail(self, f"the operand must be a vector of {' or '.join(SCANNED)}, got {self.source.type}")
        if not verify.one_of(self, "kind", KINDS):
            return False
        return result == source.element_type or verify.fail(
            self, f"the result must be {source.element_type}, got {result}"
        )


class ConvertLayoutOp(Kv.Operation, name="convert_layout", traits=[Synchronizes]):
    """A vector in another layout: an element per row of tiles where it had one per column, or the reverse.

    ``assign-kv-layouts`` makes it for vectors that are not cheap to compute twice. Elements: f32 or i32.
    """

    source: Operand[Any]
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        source, result = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or source.rank != 1 or str(source.element_type) not in SCANNED:
            return verify.fail(self, f"the operand must be a vector of {' or '.join(SCANNED)}, got {self.source.type}")
        if result is None or list(result.shape) != list(source.shape) or result.element_type != source.element_type:
            got = self.operation.results[0].type
            return verify.fail(self, f"the result must have the operand's extents and elements, got {got}")
        return True


class TileSolveOp(Kv.Operation, name="tile_solve", traits=[Synchronizes]):
    """X of (I + L) X = B, where L is strictly lower triangular.

    Operands: a square tile of f32 with at most 64 rows, a multiple of 16, of which the elements below the diagonal are
    L and the others are not read; B, a tile of f32 of as many rows. The result has B's type.
    """

    lower: Operand[Any]
    right: Operand[Any]
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        lower, right = tile_of(self.lower), tile_of(self.right)
        for what, type_ in (("the triangle", lower), ("the right side", right)):
            if type_ is None or type_.rank != 2 or str(type_.element_type) != "f32":
                return verify.fail(self, f"{what} must be a tile of rank 2 of f32, got {type_}")
        assert lower is not None
        assert right is not None
        rows, columns = lower.shape
        if rows != columns or rows % 16 or rows > MOST_SOLVED:
            return verify.fail(
                self, f"the triangle must be square with 16, 32, 48 or {MOST_SOLVED} rows, got {rows} x {columns}"
            )
        if right.shape[0] != rows:
            return verify.fail(self, f"the right side must have the triangle's {rows} rows, got {right.shape[0]}")
        return same_type(self, self.right)


def tile_scan(source: ir.Value, kind: str, axis: int) -> ir.Value:
    """The running sum or product along an axis."""
    return TileScanOp(source, ir.StringAttr.get(kind), i64_attr(axis), source.type).operation.results[0]


def tile_total(source: ir.Value, kind: str) -> ir.Value:
    """The reduction of a vector to a scalar."""
    result = ir.RankedTensorType(source.type).element_type
    return TileTotalOp(source, ir.StringAttr.get(kind), result).operation.results[0]


def convert_layout(source: ir.Value) -> ir.Value:
    """A vector in a layout that is not chosen yet."""
    return ConvertLayoutOp(source, source.type).operation.results[0]


def tile_solve(lower: ir.Value, right: ir.Value) -> ir.Value:
    """X of (I + L) X = B."""
    return TileSolveOp(lower, right, right.type).operation.results[0]
