# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables in shared memory of a function of a position difference, for all differences that occur in a tile.

``tabulate-kv-scores`` makes them from scores; kernels may use them too.
"""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import MEMORY, READ, AllocatesShared, Effect, EffectModel
from ..ext import Operand, Result
from .staging import LANES, WARPGROUP_WARPS, Synchronizes
from .tile import tile_of


class _ReadsTable(EffectModel):
    """Reads shared memory that the kernel has written."""

    effects = (Effect(READ, MEMORY),)


class MakeTableOp(Kv.Operation, name="make_table", traits=[AllocatesShared]):
    """Allocate shared memory at the kernel's start for tables of functions: one f32 vector of ``length`` per warpgroup.

    Attribute: length. Result: a pointer to the table.
    """

    length: ir.IntegerAttr
    place: Result[Any]

    def verify_invariants(self) -> bool:
        return _table_length(self) and _in_shared(self, self.operation.results[0])


class TableStoreOp(Kv.Operation, name="table_store", traits=[Synchronizes]):
    """Write a vector of f32 to a warpgroup's table, with a barrier before and after.

    Element n of the vector is written to ``n // span * pitch + n % span`` if ``n % span`` is below ``pitch``; other
    elements are dropped. Attributes: length, the table's; span, pitch.
    """

    source: Operand[Any]
    place: Operand[Any]
    length: ir.IntegerAttr
    span: ir.IntegerAttr
    pitch: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        if type_ is None or type_.rank != 1 or str(type_.element_type) != "f32":
            return verify.fail(self, f"the operand must be a vector of f32, got {self.source.type}")
        length, span, pitch = self.length.value, self.span.value, self.pitch.value
        if not 1 <= pitch <= span or type_.shape[0] % span or type_.shape[0] // span * pitch > length:
            got = f"span = {span}, pitch = {pitch}, {type_.shape[0]} elements and length = {length}"
            why = (
                "pitch must be 1 to span, span divide the operand's elements, and the table have pitch elements of each"
            )
            return verify.fail(self, f"{why}, got {got}")
        return _table_length(self) and _in_shared(self, self.place)


class TileWindowsOp(Kv.Operation, name="tile_windows", traits=[_ReadsTable]):
    """A tile whose rows are windows of a table: element (i, j) is the table's element ``starts[i] + j``.

    Any function of a position difference has this form: its few distinct values repeat along the tile's diagonals, and
    each is computed once. Operands: place, of a table; starts, one i32 per row, from which the table has at least as
    many elements as the tile has columns. Attribute: length, the table's.
    """

    place: Operand[Any]
    starts: Operand[Any]
    length: ir.IntegerAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile, starts = tile_of(self.operation.results[0]), tile_of(self.starts)
        if tile is None or tile.rank != 2 or str(tile.element_type) != "f32":
            return verify.fail(
                self, f"the result must be a tile of rank 2 of f32, got {self.operation.results[0].type}"
            )
        if starts is None or list(starts.shape) != [tile.shape[0]] or str(starts.element_type) != "i32":
            return verify.fail(self, f"the starts must be {tile.shape[0]}xi32, got {self.starts.type}")
        if not _table_length(self) or not _in_shared(self, self.place):
            return False
        length = verify.integer(self.length)
        fits = length is not None and length >= tile.shape[1]
        return fits or verify.fail(self, f"length must be at least a row's {tile.shape[1]} elements, got {length}")


def _table_length(op: Any) -> bool:
    """Whether a table's length is a multiple of a warpgroup's threads."""
    length, threads = verify.integer(op.length), LANES * WARPGROUP_WARPS
    good = length is not None and length > 0 and length % threads == 0
    return good or verify.fail(op, f"length must be a positive multiple of {threads}, got {op.length}")


def _in_shared(op: Any, place: ir.Value) -> bool:
    return str(place.type) == "!llvm.ptr<3>" or verify.fail(op, f"place must be !llvm.ptr<3>, got {place.type}")
