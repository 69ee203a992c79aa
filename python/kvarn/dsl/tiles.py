# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles: arrays that a whole thread block holds, with NumPy's operators, shapes and names.

A kernel over tiles says what is computed, not which thread does it: passes choose layouts, copies and instructions, and
the host runs the same kernel. Shapes are static. ``x[:, None]`` turns a vector into a column that broadcasts against
rows, ``x[None, :]`` into a row; elementwise operators, ``kv.where``, ``kv.math`` and casts take tiles as they take
scalars and vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, bool_, f8e4m3, f8e5m2, f32, i32

from . import intervals
from .builder import state
from .intervals import Interval
from .values import Numeric, Value, as_value, constant, describe, joined, literal, plain, stretched

__all__ = ["Tile", "beside", "dot", "full", "masked", "tile_index", "two_terms"]

Shape = tuple[int, ...]


class Tile(Numeric):
    """An array of one or two dimensions that the thread block holds.

    Attributes
    ----------
    shape : tuple of int
        An extent of 1 beside another marks a vector that broadcasts along that dimension.
    """

    __slots__ = ("bounds", "dtype", "ir", "lanes")

    def __init__(self, value: ir.Value, dtype: DType, shape: Shape, bounds: Interval | None = None) -> None:
        self.ir, self.dtype, self.lanes = value, dtype, shape  # type: ignore[assignment]
        state.tiled = True
        self.bounds = bounds or intervals.of_dtype(dtype)

    @property
    def shape(self) -> Shape:
        return self.lanes  # type: ignore[return-value]

    @property
    def T(self) -> Transposed:
        """The transpose, as the second operand of :func:`dot`."""
        if len(self.shape) != 2 or 1 in self.shape:
            raise TypeError(f"only a matrix has a transpose, got {describe(self)}")
        return Transposed(self)

    def __getitem__(self, index: Any) -> Tile:
        """``x[:, None]`` and ``x[None, :]`` of a vector."""
        every = slice(None)
        if len(self.shape) == 1 and index == (every, None):
            return Tile(self.ir, self.dtype, (*self.shape, 1), self.bounds)
        if len(self.shape) == 1 and index == (None, every):
            return Tile(self.ir, self.dtype, (1, *self.shape), self.bounds)
        raise TypeError(f"tiles are indexed as x[:, None] or x[None, :] of a vector only, got {describe(self)}")

    def __iter__(self) -> Any:
        raise TypeError("a tile cannot be iterated: its elements lie in many threads")

    def max(self, axis: int) -> Tile:
        """The largest element of every row (axis 1) or column (axis 0)."""
        return self._reduce("max", axis)

    def min(self, axis: int) -> Tile:
        """The least element of every row (axis 1) or column (axis 0)."""
        return self._reduce("min", axis)

    def sum(self, axis: int) -> Tile:
        """The sum of every row (axis 1) or column (axis 0), in any order."""
        return self._reduce("add", axis)

    def _reduce(self, kind: str, axis: int) -> Tile:
        if len(self.shape) != 2 or 1 in self.shape or axis not in (0, 1):
            raise TypeError(f"reductions take a matrix and axis 0 or 1, got {describe(self)} and {axis!r}")
        bounds = self.bounds
        if kind == "add" and not self.dtype.is_float:
            bounds = intervals.held(*(x * self.shape[axis] for x in bounds), self.dtype)
        return Tile(ops.tile_reduce(self.ir, kind, axis), self.dtype, (self.shape[1 - axis],), bounds)

    def __repr__(self) -> str:
        return f"<{'x'.join(map(str, self.shape))} x {self.dtype.name} tile>"


Numeric.of_shape = Tile


class Transposed:
    """A tile whose columns are meant where rows stand."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile


# --- functions -----------------------------------------------------------------------------------


def tile_index(extent: int) -> Tile:
    """0, 1, ..., ``extent`` - 1: positions in a tile, an i32 vector."""
    _extents((extent,))
    return Tile(ops.tile_index(extent), i32, (extent,), (0, extent - 1))


def full(shape: int | Sequence[int], value: Any, dtype: DType = f32) -> Tile:
    """A tile of one value, a number or a scalar of ``dtype``."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    _extents(shape)
    value = plain(value)
    if isinstance(value, Numeric):
        return stretched(as_value(value, dtype, "the value of a tile"), shape)
    return constant(value, dtype, shape)


def masked(scores: Tile, mask: Tile) -> Tile:
    """Scores where the mask holds, minus infinity elsewhere.

    A promise goes with it: an iteration of the loop around it whose mask holds nowhere changes nothing that the loop
    carries, as in a softmax. Passes leave such iterations out.
    """
    if not isinstance(scores, Tile) or not scores.dtype.is_float:
        raise TypeError(f"kv.masked takes a float tile, got {describe(scores)}")
    return Tile(ops.tile_mask(scores.ir, mask_of(mask, scores.shape)), scores.dtype, scores.shape)


def dot(a: Tile, b: Tile | Transposed, c: Tile | None = None) -> Tile:
    """``c + a @ b`` in f32; ``b`` may be ``tile.T``.

    ``a`` is M x K, ``b`` K x N of the same dtype, ``c`` M x N f32 (zeros without). Matrix units take 16- and 8-bit
    floats. Of :func:`two_terms` ``a`` is M x 2K, and both are multiplied; ``b``, transposed, may be of f8e5m2.
    """
    transposed = isinstance(b, Transposed)
    right = b.tile if isinstance(b, Transposed) else b
    for name, x in (("a", a), ("b", right)):
        if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape:
            raise TypeError(f"{name} of kv.dot must be a matrix tile, got {describe(x)}")
    of_bytes = transposed and a.dtype is f8e4m3
    if not (a.dtype is right.dtype or (of_bytes and right.dtype is f8e5m2)) or not a.dtype.is_float:
        raise TypeError(f"kv.dot needs two tiles of one float type, got {a.dtype.name} and {right.dtype.name}")
    k, n = right.shape[::-1] if transposed else right.shape
    if a.shape[1] != k and not (of_bytes and a.shape[1] == 2 * k):
        raise ValueError(f"kv.dot of {a.shape} and {(k, n)}: the inner extents must match")
    shape = (a.shape[0], n)
    if c is not None and (not isinstance(c, Tile) or c.dtype is not f32 or c.shape != shape):
        raise TypeError(f"c of kv.dot must be an f32 tile of shape {shape}, got {describe(c)}")
    return Tile(ops.dot(a.ir, right.ir, None if c is None else c.ir, transposed), f32, shape)


def two_terms(x: Tile, shift: Any = None) -> tuple[Tile, Tile]:
    """Rows of bf16 that were loaded as (two terms of f8e4m3 beside one another, M x 2K; a power of two a row, f32).

    Their sum times that is ``x``, but for elements below 2^-9 of the row's largest, which have an error of 2^-17 of
    that. K is rounded up to a multiple of 32; all columns stand ``shift`` further on, 0 or 8. For products with 8-bit
    tiles as they are stored; ``x`` itself is gone. GPUs only.
    """
    if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape or x.dtype is not bf16:
        raise TypeError(f"kv.two_terms takes a matrix tile of bf16, got {describe(x)}")
    terms, units = ops.tile_terms(x.ir, None if shift is None else as_value(shift, i32, "shift").ir)
    return Tile(terms, f8e4m3, tuple(ir.RankedTensorType(terms.type).shape)), Tile(units, f32, x.shape[:1])


def beside(left: Tile, right: Tile) -> Tile:
    """The columns of two loaded tiles beside one another: of ``kv.dot``'s second operand, on GPUs with wgmma.

    ``left`` are rows of a buffer (:meth:`Buffer.load_rows`) with columns of whole 128 bytes, ``right`` as many tokens
    of a cache (:meth:`Cache.tile`), from any on. Nothing else reads either.
    """
    for name, x in (("left", left), ("right", right)):
        if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape:
            raise TypeError(f"{name} of kv.beside must be a matrix tile, got {describe(x)}")
    if left.shape[0] != right.shape[0] or left.dtype is not right.dtype:
        raise TypeError(f"kv.beside takes tiles of the same rows and type, got {describe(left)} and {describe(right)}")
    return Tile(ops.tile_beside(left.ir, right.ir), left.dtype, (left.shape[0], left.shape[1] + right.shape[1]))


def _extents(shape: Sequence[int]) -> None:
    if not 1 <= len(shape) <= 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in shape):
        raise ValueError(f"a tile has one or two extents of at least 2, known at compile time, got {tuple(shape)!r}")


# --- what buffers do with tiles --------------------------------------------------------------------


def mask_of(mask: Any, shape: Shape) -> ir.Value:
    """A mask as a tile of a shape; True stands for every element."""
    if mask is True or mask is None:
        return literal(True, bool_, shape)
    if not isinstance(mask, Numeric) or mask.dtype is not bool_:
        raise TypeError(f"a mask must be a bool tile, got {describe(mask)}")
    joined("a mask", mask.lanes, shape)
    return stretched(mask, shape).ir


def index_tiles(indices: Sequence[Any], shape: Shape) -> list[ir.Value]:
    """Indices of tiles' elements, each broadcast to a shape."""
    found = []
    for x in indices:
        value = as_value(x, i32, "an index") if not isinstance(x, Numeric) or x.dtype.bits == 32 else i32(x)
        if isinstance(value, Value) or isinstance(value, Tile):
            found.append(stretched(value, shape).ir)
        else:
            raise TypeError(f"an index of tiles' elements must be an i32 scalar or tile, got {describe(x)}")
    return found


def shape_of_indices(what: str, *indices: Any) -> Shape:
    """The shape that the indices, and whatever else is given, broadcast to."""
    shape: Any = 0
    for x in indices:
        if isinstance(x, Numeric):
            shape = joined(what, shape, x.lanes)
    return shape
