# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Access to a tile by thread: the tile is copied to shared memory, from which threads read rows."""

from __future__ import annotations

from typing import Any

from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, f16
from kvarn.dialect.shared_layout import TILE_SWIZZLE, SharedLayout

from .memory import SHARED, Pointer
from .tiles import Tile
from .values import describe

__all__ = ["staged"]


class Staged:
    """A tile in shared memory. Each warp may read the 16 rows that it owned as registers, by row number."""

    __slots__ = ("_layout", "dtype", "place", "shape")

    def __init__(self, place: Pointer, dtype: DType, shape: tuple[int, ...]) -> None:
        self.place, self.dtype, self.shape = place, dtype, shape
        self._layout = SharedLayout(shape[0], shape[1], dtype.itemsize, TILE_SWIZZLE)

    def load(self, row: Any, column: Any, width: int) -> Any:
        """``width`` elements of a row, at most 16 bytes; ``column``, a multiple of ``width``, is not negative."""
        return (self.place + self._layout.offset(row, column)).load(self.dtype, width)


def staged(tile: Tile, first_column: int = 0, columns: int | None = None) -> Staged:
    """Copy columns of a bf16 or f16 tile (by default all) to shared memory, for reads across the lanes of a warp.

    The contents stay valid until as many columns are staged again.
    """
    if not isinstance(tile, Tile) or len(tile.shape) != 2 or 1 in tile.shape:
        raise TypeError(f"kv.staged takes a matrix tile, got {describe(tile)}")
    if tile.dtype not in (bf16, f16):
        raise TypeError(f"kv.staged takes a tile of bf16 or f16, got {tile.dtype.name}")
    columns = tile.shape[1] - first_column if columns is None else columns
    return Staged(Pointer(ops.tile_stage(tile.ir, first_column, columns), SHARED), tile.dtype, (tile.shape[0], columns))
