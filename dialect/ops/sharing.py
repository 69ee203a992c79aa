# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles in shared memory that several warps access: tiles shared from registers, views of columns, joined columns.

``assign-kv-layouts`` and ``select-kv-copies`` make all of them except ``kv.tile_concatenate``; kernels may use them.
"""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import Pure, ReadsMemory
from ..ext import Operand, Result
from ..shared_layout import TILE_SWIZZLE
from .common import i64_attr
from .staging import Synchronizes
from .tile import IN_SHARED, SHARED, layout_of, same_type, tile_of, tile_type

SHAREABLE = ("bf16", "f16", "f32", "i8")  # elements of computed tiles that are copied to shared memory
LINES = 8  # columns of an accumulator, and rows in a swizzle's period


class TileShareOp(Kv.Operation, name="tile_share", traits=[Synchronizes]):
    """Copy a tile from registers to shared memory, after all warps have read the previous one.

    For computed operands that products read from shared memory: B, a transposed A, and A where warps share the output
    columns, so that each warp needs all columns of A. Operand: a tile of 16-bit floats, f32 or i8 in registers. Result:
    the tile with the layout ``shared``, valid until the next share.
    """

    source: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, tile = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or source.rank != 2 or str(source.element_type) not in SHAREABLE:
            kinds = ", ".join(SHAREABLE)
            return verify.fail(self, f"the operand must be a tile of rank 2 of {kinds}, got {self.source.type}")
        if layout_of(source) in IN_SHARED:
            return verify.fail(self, f"the operand must be a tile in registers, got {source}")
        wanted = tile_type(source.shape, source.element_type, SHARED)
        return tile == wanted or verify.fail(self, f"the result must be {wanted}, got {self.operation.results[0].type}")


class TileUnshareOp(Kv.Operation, name="tile_unshare", traits=[ReadsMemory]):
    """Read a tile in shared memory to registers: each thread the elements of the result's layout.

    For loaded tiles that arithmetic reads. Operand: a tile with the layout ``shared``. Result: its elements in a
    register layout.
    """

    source: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, tile = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or source.rank != 2 or layout_of(source) != SHARED:
            return verify.fail(self, f"the operand must be a tile of rank 2 in shared memory, got {self.source.type}")
        if tile is None or list(tile.shape) != list(source.shape) or tile.element_type != source.element_type:
            got = self.operation.results[0].type
            return verify.fail(self, f"the result must have the operand's extents and elements, got {got}")
        layout = layout_of(tile)
        return layout not in IN_SHARED or verify.fail(self, f"the result must be a tile in registers, got {tile}")


class TileColumnsOp(Kv.Operation, name="tile_columns", traits=[Pure]):
    """A view of some columns of a tile in shared memory, such as MLA values, which are columns of the keys.

    Attribute: first_column, a multiple of a swizzle atom's 128 bytes, or of 8 in a transposed tile. Same rows.
    """

    source: Operand[Any]
    first_column: ir.IntegerAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, tile = tile_of(self.source), tile_of(self.operation.results[0])
        for what, type_ in (("the operand", source), ("the result", tile)):
            if type_ is None or type_.rank != 2 or layout_of(type_) not in IN_SHARED:
                return verify.fail(self, f"{what} must be a tile of rank 2 with the layout {SHARED}, got {type_}")
        assert source is not None
        assert tile is not None
        if layout_of(source) != layout_of(tile):
            return verify.fail(self, f"the result must have the operand's layout, got {source} and {tile}")
        if source.shape[0] != tile.shape[0] or source.element_type != tile.element_type:
            return verify.fail(self, f"the result must have the operand's rows and elements, got {source} and {tile}")
        first = verify.integer(self.first_column)
        atom = atom_columns(source.element_type) if layout_of(source) == SHARED else LINES
        if first is None or first < 0 or first % atom or first + tile.shape[1] > source.shape[1]:
            return verify.fail(
                self,
                f"columns must start at a multiple of {atom} and be within the operand's {source.shape[1]}, got "
                f"{tile.shape[1]} from {self.first_column} on",
            )
        return True


class TileConcatenateOp(Kv.Operation, name="tile_concatenate", traits=[Pure]):
    """The columns of two loaded tiles side by side: keys whose last columns come from other rows.

    Operands: rows of a buffer (``kv.tile_load_rows``) of a multiple of 128 bytes, and tokens of a cache
    (``kv.tile_load``), from any column up; both have the same number of rows and no other use. Both are copied to one
    tile in shared memory, for the second operand of products by wgmma, on GPUs whose kernels have a producer. Tiles in
    registers, of multiples of 8 columns, are joined there. The tokens may start anywhere in a page.
    """

    left: Operand[Any]
    right: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        left, right, tile = (tile_of(x) for x in (self.left, self.right, self.operation.results[0]))
        if any(type_ is None or type_.rank != 2 for type_ in (left, right, tile)):
            return verify.fail(self, f"needs tiles of rank 2, got {self.left.type} and {self.right.type}")
        assert left is not None
        assert right is not None
        if left.shape[0] != right.shape[0] or left.element_type != right.element_type:
            return verify.fail(self, f"the operands must have the same rows and elements, got {left} and {right}")
        step = atom_columns(left.element_type) if layout_of(left) == SHARED else LINES
        if left.shape[1] % step:
            return verify.fail(self, f"the first operand must have a multiple of {step} columns, got {left.shape[1]}")
        layout = layout_of(left) if tile is None or layout_of(left) == SHARED else layout_of(tile)
        wanted = tile_type([left.shape[0], left.shape[1] + right.shape[1]], left.element_type, layout)
        return tile == wanted or verify.fail(self, f"the result must be {wanted}, got {self.operation.results[0].type}")


class TileSliceOp(Kv.Operation, name="tile_slice", traits=[Pure]):
    """Some rows and columns of a tile: from first_row and first_column on, as many as the result has.

    On GPUs every thread selects of its registers: columns start at a multiple of 8, rows at a multiple of the rows that
    all warps have at a time.
    """

    source: Operand[Any]
    first_row: ir.IntegerAttr
    first_column: ir.IntegerAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, tile = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or tile is None or (source.rank, tile.rank) != (2, 2):
            return verify.fail(self, f"needs tiles of rank 2, got {self.source.type}")
        if source.element_type != tile.element_type:
            return verify.fail(self, f"the result must have the operand's elements, got {source} and {tile}")
        for first, extent, whole in zip((self.first_row, self.first_column), tile.shape, source.shape, strict=True):
            start = verify.integer(first)
            if start is None or start < 0 or start + extent > whole:
                return verify.fail(self, f"must be within the operand's {whole}, got {extent} from {first} on")
        return True


class TileAddColumnsOp(Kv.Operation, name="tile_add_columns", traits=[Pure]):
    """Add a tile to some columns of an accumulator, by ordinary f32 additions.

    Operands: a tile of f32 in registers, and a tile of the same rows with at most as many columns. Attribute:
    first_column, a multiple of 8. The result has the first operand's type.
    """

    source: Operand[Any]
    added: Operand[Any]
    first_column: ir.IntegerAttr
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, added = tile_of(self.source), tile_of(self.added)
        for what, type_ in (("the operand", source), ("the added tile", added)):
            if type_ is None or type_.rank != 2 or str(type_.element_type) != "f32" or layout_of(type_) in IN_SHARED:
                return verify.fail(self, f"{what} must be a tile of rank 2 of f32 in registers, got {type_}")
        assert source is not None
        assert added is not None
        if source.shape[0] != added.shape[0] or layout_of(source) != layout_of(added):
            return verify.fail(self, f"the added tile needs the operand's rows and layout, got {source} and {added}")
        first = verify.integer(self.first_column)
        if first is None or first < 0 or first % LINES or first + added.shape[1] > source.shape[1]:
            return verify.fail(
                self,
                f"columns must start at a multiple of {LINES} and be within the operand's {source.shape[1]}, got "
                f"{added.shape[1]} from {self.first_column} on",
            )
        return same_type(self, self.source)


def atom_columns(element: ir.Type) -> int:
    """Columns per swizzle atom of tiles in shared memory."""
    return 8 * TILE_SWIZZLE // element.width


def tile_unshare(source: ir.Value) -> ir.Value:
    """A tile of shared memory in registers, in a layout that is not chosen yet."""
    type_ = ir.RankedTensorType(source.type)
    return TileUnshareOp(source, tile_type(type_.shape, type_.element_type)).operation.results[0]


def tile_slice(source: ir.Value, first_row: int, first_column: int, rows: int, columns: int) -> ir.Value:
    """Some rows and columns of a tile."""
    result = tile_type([rows, columns], ir.RankedTensorType(source.type).element_type)
    return TileSliceOp(source, i64_attr(first_row), i64_attr(first_column), result).operation.results[0]


def tile_columns(source: ir.Value, first_column: int, columns: int) -> ir.Value:
    """A view of columns of a tile in shared memory."""
    type_ = ir.RankedTensorType(source.type)
    result = tile_type([type_.shape[0], columns], type_.element_type, layout_of(type_))
    return TileColumnsOp(source, i64_attr(first_column), result).operation.results[0]


def tile_concatenate(left: ir.Value, right: ir.Value) -> ir.Value:
    """The columns of two loaded tiles side by side."""
    a, b = (ir.RankedTensorType(x.type) for x in (left, right))
    result = tile_type([a.shape[0], a.shape[1] + b.shape[1]], a.element_type)
    return TileConcatenateOp(left, right, result).operation.results[0]


def add_columns(source: ir.Value, added: ir.Value, first_column: int) -> ir.Value:
    """``source`` with ``added`` added to its columns from ``first_column`` up."""
    return TileAddColumnsOp(source, added, i64_attr(first_column), source.type).operation.results[0]
