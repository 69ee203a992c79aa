# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles: small arrays that belong to a whole thread block, with NumPy's operators, shapes and names.

A kernel over tiles says what is computed, not which thread computes it: passes choose layouts, copies and instructions,
and the host runs the same kernel. Shapes are static. ``x[:, None]`` makes a vector a column that broadcasts against
rows, ``x[None, :]`` a row; elementwise operators, ``kv.where``, ``kv.math`` and casts accept tiles like scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, bool_, f8e4m3, f8e5m2, f32, i8, i32

from . import intervals
from .builder import state
from .intervals import Interval
from .values import Numeric, Value, as_value, constant, describe, joined, literal, plain, stretched

__all__ = ["Tile", "concatenate", "dot", "full", "masked", "solve_unit_lower", "tile_index", "two_terms"]

Shape = tuple[int, ...]


class Tile(Numeric):
    """An array of one or two dimensions, distributed over the thread block.

    Attributes
    ----------
    shape : tuple of int
        In a matrix, an extent of 1 marks a vector that broadcasts along that dimension.
    """

    __slots__ = ("bounds", "dtype", "lanes")

    def __init__(self, value: ir.Value, dtype: DType, shape: Shape, bounds: Interval | None = None) -> None:
        self.ir, self.dtype, self.lanes = value, dtype, shape  # type: ignore[assignment]
        state.tiled = True
        self.bounds = bounds or intervals.of_dtype(dtype)

    @property
    def shape(self) -> Shape:
        return self.lanes  # type: ignore[return-value]

    @property
    def T(self) -> Transposed:
        """The transpose, for an operand of :func:`dot`."""
        if len(self.shape) != 2 or 1 in self.shape:
            raise TypeError(f"only a matrix has a transpose, got {describe(self)}")
        return Transposed(self)

    def __getitem__(self, index: Any) -> Tile:
        """``x[:, None]`` or ``x[None, :]`` of a vector; ``x[:, 16:32]`` of a matrix, by constants."""
        every = slice(None)
        if len(self.shape) == 2 and 1 not in self.shape and isinstance(index, tuple) and len(index) == 2:
            if all(isinstance(part, slice) for part in index):
                return self._sliced(index)
        if len(self.shape) == 1 and index == (every, None):
            return Tile(self.ir, self.dtype, (*self.shape, 1), self.bounds)
        if len(self.shape) == 1 and index == (None, every):
            return Tile(self.ir, self.dtype, (1, *self.shape), self.bounds)
        raise TypeError(
            f"tiles are indexed as x[:, None] or x[None, :] of a vector, x[:, 16:32] of a matrix, got {describe(self)}"
        )

    def __iter__(self) -> Any:
        raise TypeError("a tile cannot be iterated: its elements lie in many threads")

    def _sliced(self, index: tuple[slice, ...]) -> Tile:
        bounds = []
        for part, extent in zip(index, self.shape, strict=True):
            ends = [plain(x) for x in (part.start, part.stop, part.step)]
            if any(x is not None and (isinstance(x, bool) or not isinstance(x, int)) for x in ends):
                raise TypeError(f"slices of tiles are by constants, got {part} of {describe(self)}")
            start, stop, step = slice(*ends).indices(extent)
            if step != 1 or stop - start < 2:
                raise ValueError(f"a slice of a tile has step 1 and at least 2 elements, got {part} of {extent}")
            bounds.append((start, stop - start))
        (row, rows), (column, columns) = bounds
        if (rows, columns) == self.shape:
            return self
        return Tile(ops.tile_slice(self.ir, row, column, rows, columns), self.dtype, (rows, columns), self.bounds)

    def max(self, axis: int | None = None) -> Any:
        """The maximum of every row (axis 1) or column (axis 0); of a vector, a scalar."""
        return self._reduce("max", axis)

    def min(self, axis: int | None = None) -> Any:
        """The minimum of every row (axis 1) or column (axis 0); of a vector, a scalar."""
        return self._reduce("min", axis)

    def sum(self, axis: int | None = None) -> Any:
        """The sum of every row (axis 1) or column (axis 0), in unspecified order; of a vector, a scalar."""
        return self._reduce("add", axis)

    def any(self, axis: int) -> Tile:
        """Whether an element of every row (axis 1) or column (axis 0) of a bool tile is true."""
        if self.dtype is not bool_:
            raise TypeError(f"any is of bool tiles, got {describe(self)}: compare first, as in (x > 0).any(axis=1)")
        return f32(self).max(axis) > 0.5

    def cumsum(self, axis: int = 0) -> Tile:
        """Running sums along an axis, each with its own element; of a vector along axis 0. f32 or i32."""
        return self._scan("add", axis)

    def cumprod(self, axis: int = 0) -> Tile:
        """Running products along an axis, each with its own element; of a vector along axis 0. f32 or i32."""
        return self._scan("mul", axis)

    def _scan(self, kind: str, axis: int) -> Tile:
        if 1 in self.shape or axis not in range(len(self.shape)):
            raise TypeError(f"running sums take a vector and axis 0, or a matrix and axis 0 or 1, got {describe(self)}")
        if self.dtype not in (f32, i32):
            raise TypeError(f"running sums are of f32 or i32, got {describe(self)}: convert it, as in kv.f32(x)")
        return Tile(ops.tile_scan(self.ir, kind, axis), self.dtype, self.shape)

    def _reduce(self, kind: str, axis: int | None) -> Any:
        if len(self.shape) == 1 and axis in (None, 0) and self.dtype in (f32, i32):
            return Value(ops.tile_total(self.ir, kind), self.dtype)
        if len(self.shape) != 2 or 1 in self.shape or axis not in (0, 1):
            raise TypeError(
                f"reductions take a matrix and axis 0 or 1, or a vector of f32 or i32, got {describe(self)}, {axis!r}"
            )
        bounds = self.bounds
        if kind == "add" and not self.dtype.is_float:
            bounds = intervals.wrapped(*(x * self.shape[axis] for x in bounds), self.dtype)
        return Tile(ops.tile_reduce(self.ir, kind, axis), self.dtype, (self.shape[1 - axis],), bounds)

    def __repr__(self) -> str:
        return f"<{'x'.join(map(str, self.shape))} x {self.dtype.name} tile>"


Numeric.of_shape = Tile


class Transposed:
    """The transpose of a tile, as an operand of :func:`dot`."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile


# --- functions -----------------------------------------------------------------------------------


def tile_index(extent: int) -> Tile:
    """The positions 0, 1, ..., ``extent`` - 1 as an i32 vector."""
    _extents((extent,))
    return Tile(ops.tile_index(extent), i32, (extent,), (0, extent - 1))


def full(shape: int | Sequence[int], value: Any, dtype: DType = f32) -> Tile:
    """A tile filled with a number or a scalar of ``dtype``."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    _extents(shape)
    value = plain(value)
    if isinstance(value, Numeric):
        return stretched(as_value(value, dtype, "the value of a tile"), shape)
    return constant(value, dtype, shape)


def masked(scores: Tile, mask: Tile) -> Tile:
    """The scores where ``mask`` is true, minus infinity elsewhere.

    The caller guarantees that an iteration of the enclosing loop whose mask is false everywhere leaves the
    loop-carried values unchanged, as in a softmax. Passes skip such iterations.
    """
    if not isinstance(scores, Tile) or not scores.dtype.is_float:
        raise TypeError(f"kv.masked takes a float tile, got {describe(scores)}")
    return Tile(ops.tile_mask(scores.ir, mask_of(mask, scores.shape)), scores.dtype, scores.shape)


def dot(a: Tile | Transposed, b: Tile | Transposed, c: Tile | None = None) -> Tile:
    """``c + a @ b`` in f32, or in i32 for i8; ``a`` and ``b`` may be ``tile.T``.

    ``a`` is M x K, ``b`` K x N of the same dtype, ``c`` M x N f32 (default: zeros). Tensor cores multiply 16- and 8-bit
    floats, f32 (three products of tf32) and i8 (``b`` as ``tile.T``). If ``a`` is the M x 2K result of
    :func:`two_terms`, both terms are multiplied, and a transposed ``b`` may be f8e5m2.
    """
    transposed = isinstance(b, Transposed)
    right = b.tile if isinstance(b, Transposed) else b
    if isinstance(a, Transposed):
        source = a.tile
        a = Tile(ops.tile_transpose(source.ir), source.dtype, source.shape[::-1], source.bounds)
    for name, x in (("a", a), ("b", right)):
        if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape:
            raise TypeError(f"{name} of kv.dot must be a matrix tile, got {describe(x)}")
    of_bytes = transposed and a.dtype is f8e4m3
    known = a.dtype.is_float or a.dtype is i8
    if not (a.dtype is right.dtype or (of_bytes and right.dtype is f8e5m2)) or not known:
        both = f"{a.dtype.name} and {right.dtype.name}"
        raise TypeError(f"kv.dot needs two tiles of one float type or i8, got {both}: convert, as in kv.bf16(x)")
    sums = f32 if a.dtype.is_float else i32
    k, n = right.shape[::-1] if transposed else right.shape
    if a.shape[1] != k and not (of_bytes and a.shape[1] == 2 * k):
        raise ValueError(f"kv.dot of {a.shape} and {(k, n)}: the inner extents must match")
    shape = (a.shape[0], n)
    if c is not None and (not isinstance(c, Tile) or c.dtype is not sums or c.shape != shape):
        raise TypeError(f"c of kv.dot must be an {sums.name} tile of shape {shape}, got {describe(c)}")
    return Tile(ops.dot(a.ir, right.ir, None if c is None else c.ir, transposed), sums, shape)


def two_terms(x: Tile, shift: Any = None) -> tuple[Tile, Tile]:
    """Split bf16 rows into two terms of f8e4m3: (both terms side by side, M x 2K; a power of two per row, f32).

    Each row is the sum of its terms times its power of two; elements below 2^-9 of the row's maximum have an error of
    2^-17 of the maximum. K is rounded up to a multiple of 32; all columns move right by ``shift``, 0 or 8. The result
    multiplies 8-bit tiles without conversion; ``x`` must be a loaded tile and must not be used afterwards. GPUs only.
    """
    if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape or x.dtype is not bf16:
        raise TypeError(f"kv.two_terms takes a matrix tile of bf16, got {describe(x)}")
    terms, powers = ops.tile_terms(x.ir, None if shift is None else as_value(shift, i32, "shift").ir)
    return Tile(terms, f8e4m3, tuple(ir.RankedTensorType(terms.type).shape)), Tile(powers, f32, x.shape[:1])


def concatenate(left: Tile, right: Tile) -> Tile:
    """Concatenate the columns of two tiles of the same rows, in multiples of 8 columns.

    If ``left`` are rows of a buffer (:meth:`Buffer.load_rows`) with a multiple of 128 bytes of columns, ``right`` as
    many tokens of a cache (:meth:`Cache.tile`), and neither has another use, the result is copied as one tile: as the
    second operand of ``kv.dot`` on GPUs with wgmma.
    """
    for name, x in (("left", left), ("right", right)):
        if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape:
            raise TypeError(f"{name} of kv.concatenate must be a matrix tile, got {describe(x)}")
    if left.shape[0] != right.shape[0] or left.dtype is not right.dtype:
        both = f"{describe(left)} and {describe(right)}"
        raise TypeError(f"kv.concatenate takes tiles of the same rows and type, got {both}")
    return Tile(ops.tile_concatenate(left.ir, right.ir), left.dtype, (left.shape[0], left.shape[1] + right.shape[1]))


def solve_unit_lower(lower: Tile, right: Tile) -> Tile:
    """X of ``(I + L) X = right``, where L are the elements of ``lower`` below the diagonal; the others are not read.

    ``lower`` is a square f32 tile of 16, 32, 48 or 64 rows, ``right`` an f32 tile of as many rows. With the identity as
    ``right``, X is the inverse.
    """
    for name, x in (("lower", lower), ("right", right)):
        if not isinstance(x, Tile) or len(x.shape) != 2 or 1 in x.shape or x.dtype is not f32:
            raise TypeError(f"{name} of kv.solve_unit_lower must be a matrix tile of f32, got {describe(x)}")
    rows, columns = lower.shape
    if rows != columns or rows % 16 or rows > 64 or right.shape[0] != rows:
        raise ValueError(
            f"kv.solve_unit_lower takes a square triangle of 16, 32, 48 or 64 rows and as many rows of the right side, "
            f"got {lower.shape} and {right.shape}"
        )
    return Tile(ops.tile_solve(lower.ir, right.ir), f32, right.shape)


def _extents(shape: Sequence[int]) -> None:
    if not 1 <= len(shape) <= 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in shape):
        raise ValueError(f"a tile has one or two extents of at least 2, known at compile time, got {tuple(shape)!r}")


# --- indices and masks of buffer accesses by tile ---------------------------------------------------


def mask_of(mask: Any, shape: Shape) -> ir.Value:
    """A mask as a tile of the given shape; True selects every element."""
    if mask is True or mask is None:
        return literal(True, bool_, shape)
    if not isinstance(mask, Numeric) or mask.dtype is not bool_:
        raise TypeError(f"a mask must be a bool tile, got {describe(mask)}")
    joined("a mask", mask.lanes, shape)
    return stretched(mask, shape).ir


def index_tiles(indices: Sequence[Any], shape: Shape) -> list[ir.Value]:
    """Index tiles, each broadcast to the given shape."""
    found = []
    for x in indices:
        value = as_value(x, i32, "an index") if not isinstance(x, Numeric) or x.dtype.bits == 32 else i32(x)
        if isinstance(value, Value) or isinstance(value, Tile):
            found.append(stretched(value, shape).ir)
        else:
            raise TypeError(f"an index of tiles' elements must be an i32 scalar or tile, got {describe(x)}")
    return found


def shape_of_indices(what: str, *indices: Any) -> Shape:
    """The shape that the indices and other operands broadcast to."""
    shape: Any = 0
    for x in indices:
        if isinstance(x, Numeric):
            shape = joined(what, shape, x.lanes)
    return shape
