# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory of kernels: buffer arguments, shared arrays, and pointers with byte offsets.

Bounds are not checked at run time; indices known at compile time are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bool_, f32, i8, i32, i64, u8
from kvarn.dialect.layout import lowbit

from . import intervals, tiles
from .builder import OfTrace, emit, emit_value, types
from .values import (
    Numeric,
    Value,
    Vector,
    as_value,
    cast,
    describe,
    i32_value,
    index_value,
    literal,
    plain,
    stretched,
    wrap,
)

__all__ = [
    "Buffer", "BufferSpec", "Pointer", "ReadOnlyBuffer", "Shared", "atomic_add", "fence", "pointer_of", "shared",
    "take_work_item",
]  # fmt: skip

GLOBAL, SHARED = 1, 3
_DYNAMIC_OFFSET = -(2**31)  # llvm.getelementptr's mark of a run-time index
_ORDERS = {"relaxed": 2, "acquire": 4, "release": 5, "acq_rel": 6}  # llvm.AtomicOrdering
_SCOPES = {"block": "block", "device": "device", "system": ""}
_ATOMICS = {
    "xchg": 0, "add": 1, "sub": 2, "and": 3, "or": 5, "xor": 6, "max": 7, "min": 8, "umax": 9, "umin": 10,
    "fadd": 11, "fmax": 13, "fmin": 14, "inc": 15, "dec": 16,
}  # fmt: skip


@dataclass(frozen=True)
class BufferSpec:
    """``kv.Buffer[dtype, rank]``: the annotation and the spec of a buffer argument.

    The last dimension is contiguous; the other strides are run-time values. ``kv.ReadOnlyBuffer[...]`` makes a
    ``readonly`` spec: no kernel writes the array while this one runs.
    """

    dtype: DType
    rank: int
    readonly: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            raise TypeError(f"kv.Buffer[dtype, rank] needs a dtype such as kv.f32, got {self.dtype!r}")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"the rank of a kv.Buffer must be a positive int, got {self.rank!r}")

    def __repr__(self) -> str:
        return f"kv.{'ReadOnly' if self.readonly else ''}Buffer[{self.dtype!r}, {self.rank}]"

    def mlir_type(self) -> ir.Type:
        """The memref type in the current context."""
        shape = "?x" * self.rank
        strides = ", ".join(["?"] * (self.rank - 1) + ["1"])
        return types().type(f"memref<{shape}{storage(self.dtype).mlir}, strided<[{strides}]>, 1>")


def _has_tile(index: Any) -> bool:
    return any(isinstance(i, tiles.Tile) for i in (index if isinstance(index, tuple) else (index,)))


class Buffer(OfTrace):
    """An array argument of a kernel, in device memory.

    ``b[i, j]`` reads and ``b[i, j] = v`` writes an element, ``b.load(i, j, width=8)`` and ``b.store(i, j, value=v)``
    vectors along the last dimension; ``b.shape[k]`` is an i32. ``kv.Buffer[kv.f32, 2]`` is the annotation.
    """

    __slots__ = ("dtype", "rank", "readonly")

    def __class_getitem__(cls, item: Any) -> BufferSpec:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError(f"kv.Buffer takes a dtype and a rank, as kv.Buffer[kv.f32, 2], got {item!r}")
        return BufferSpec(*item, readonly=issubclass(cls, ReadOnlyBuffer))

    def __init__(self, value: ir.Value, spec: BufferSpec) -> None:
        self.ir, self.dtype, self.rank, self.readonly = value, spec.dtype, spec.rank, spec.readonly

    @property
    def shape(self) -> Shape:
        """Extents, as i32 values."""
        return Shape(self)

    @property
    def ndim(self) -> int:
        return self.rank

    def __getitem__(self, index: Any) -> Any:
        if _has_tile(index):
            return self.gather(*(index if isinstance(index, tuple) else (index,)))
        element = types().of(storage(self.dtype))
        loaded = emit_value("memref.load", element, [self.ir, *self._indices(index)])
        return from_storage(Value(loaded, storage(self.dtype)), self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        if _has_tile(index):
            self.scatter(*(index if isinstance(index, tuple) else (index,)), value=value)
            return
        self._check_written()
        value = to_storage(as_value(value, self.dtype, f"what is stored in a {self!r}"))
        if value.lanes:
            instead = ".scatter(index_tile, value=v)" if isinstance(value, tiles.Tile) else ".store(..., value=v)"
            raise TypeError(f"one element is stored here, got {describe(value)}: use {instead}")
        emit("memref.store", (), [value.ir, self.ir, *self._indices(index)])

    def load(self, *index: Any, width: int = 1, alignment: int | None = None) -> Any:
        """``width`` consecutive elements from ``index`` on: a vector, or a scalar for width 1.

        The caller guarantees ``alignment``, in bytes; by default the access is naturally aligned (at most 16).
        """
        _check_width(width)
        if width == 1:
            return self[index]
        s = storage(self.dtype)
        attributes = {"alignment": types().i64_attr(_alignment(self.dtype, width, alignment))}
        loaded = emit_value("vector.load", types().of(s, width), [self.ir, *self._indices(index)], attributes)
        return from_storage(Vector(loaded, s, width), self.dtype)

    def store(self, *index: Any, value: Any, alignment: int | None = None) -> None:
        """Write a scalar, or a vector to consecutive elements from ``index`` on."""
        self._check_written()
        value = as_value(value, self.dtype, f"what is stored in a {self!r}")
        if not value.lanes:
            self[index] = value
            return
        attributes = {"alignment": types().i64_attr(_alignment(self.dtype, value.lanes, alignment))}
        emit("vector.store", (), [to_storage(value).ir, self.ir, *self._indices(index)], attributes)

    def load_rows(
        self, *index: Any, mask: Any = True, columns: int, stored: int | None = None, first_column: int = 0
    ) -> tiles.Tile:
        """The rows ``self[index][:columns]`` as a tile, for index vectors (tiles of one dimension) or scalars.

        Rows whose ``mask`` is false, and columns from ``stored`` on, are zeros and are not read. The tile's first
        column is ``first_column`` of the buffer, a multiple of 16.
        """
        self._check_rank((*index, 0))
        shape = tiles.shape_of_indices("an index", *index, mask)
        made = ops.tile_load_rows(
            self.ir, tiles.index_tiles(index, shape), tiles.mask_of(mask, shape), columns, stored, first_column
        )
        return tiles.Tile(made, self.dtype, (*shape, columns))

    def store_rows(
        self, *index: Any, value: tiles.Tile, mask: Any = True, stored: int | None = None, first_column: int = 0
    ) -> None:
        """Write a tile of rows: the counterpart of :meth:`load_rows`. Rows whose ``mask`` is false are not written.

        Columns are written from ``first_column`` on, a multiple of 16.
        """
        self._check_written()
        self._check_rank((*index, 0))
        shape = tiles.shape_of_indices("an index", *index, mask)
        value = as_value(value, self.dtype, f"what is stored in a {self!r}")
        ops.tile_store_rows(
            value.ir, self.ir, tiles.index_tiles(index, shape), tiles.mask_of(mask, shape), stored, first_column
        )

    def gather(self, *index: Any, mask: Any = True) -> tiles.Tile:
        """``self[index]`` for every element of index tiles; where ``mask`` is false, 0 without a read."""
        self._check_rank(index)
        shape = tiles.shape_of_indices("an index", *index, mask)
        made = ops.tile_gather(self.ir, tiles.index_tiles(index, shape), tiles.mask_of(mask, shape))
        return tiles.Tile(made, self.dtype, shape)

    def scatter(self, *index: Any, value: Any, mask: Any = True) -> None:
        """Write ``self[index]`` for every element of index tiles where ``mask`` is true."""
        self._check_written()
        self._check_rank(index)
        value = as_value(value, self.dtype, f"what is stored in a {self!r}")
        shape = tiles.shape_of_indices("an index", *index, mask, value)
        value = stretched(value, shape)
        ops.tile_scatter(value.ir, self.ir, tiles.index_tiles(index, shape), tiles.mask_of(mask, shape))

    def address(self, *index: Any) -> Pointer:
        """Pointer to an element."""
        self._check_rank(index)
        return Pointer(ops.buffer_address(self.ir, [i32_value(i) for i in index]), GLOBAL)

    def _check_written(self) -> None:
        if self.readonly:
            raise TypeError(f"what is declared {self!r} is not written: declare it kv.Buffer to write to it")

    def _check_rank(self, index: Sequence[Any]) -> None:
        if len(index) != self.rank:
            raise TypeError(f"a buffer of rank {self.rank} needs {self.rank} indices, got {len(index)}")

    def _indices(self, index: Any) -> list[ir.Value]:
        index = index if isinstance(index, tuple) else (index,)
        self._check_rank(index)
        for i in index:
            if isinstance(i, slice):
                raise TypeError("a buffer has no slices: use .load(..., width=n) for consecutive elements")
            if isinstance(plain(i), int) and i < 0:
                raise IndexError(f"an index of a buffer must not be negative, got {i}")
        return [index_value(i) for i in index]

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a buffer cannot be iterated: loop with range(b.shape[0])")

    def __repr__(self) -> str:
        return repr(BufferSpec(self.dtype, self.rank, self.readonly))


class ReadOnlyBuffer(Buffer):
    """Annotation of an array argument that nothing writes while the kernel runs: ``kv.ReadOnlyBuffer[kv.f32, 2]``.

    Its loads take the read-only path (``ld.global.nc``) even if the kernel writes other buffers. A launch is refused if
    a written argument shares its memory.
    """

    __slots__ = ()


class Shape:
    """The extents of a buffer, as i32 values that are read on demand."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return self.buffer.rank

    def __getitem__(self, dimension: int) -> Value:
        if not isinstance(dimension, int):
            raise TypeError(f"a dimension must be a Python int, got {describe(dimension)}")
        if not -len(self) <= dimension < len(self):
            raise IndexError(f"a buffer of rank {len(self)} has no dimension {dimension}")
        t = types()
        extent = emit_value("memref.dim", t.index, [self.buffer.ir, index_value(dimension % len(self))])
        return Value(emit_value("arith.index_cast", t.i32, [extent]), i32, nonneg=True)

    def __iter__(self) -> Iterator[Value]:
        return iter([self[i] for i in range(len(self))])


# --- element types in memory ---------------------------------------------------------------------


def storage(dtype: DType) -> DType:
    """The element type of a buffer in memory: a bool takes a byte."""
    return i8 if dtype is bool_ else dtype


def from_storage(value: Any, dtype: DType) -> Any:
    return value if value.dtype is dtype else cast(value, dtype)


def to_storage(value: Any) -> Any:
    return cast(value, u8) if value.dtype is bool_ else value


def _check_width(width: Any) -> None:
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be a positive int known at compile time, got {describe(width)}")


def _alignment(dtype: DType, width: int, alignment: int | None) -> int:
    natural = min(lowbit(width * dtype.itemsize), 16)
    if alignment is None:
        return natural
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, in bytes, got {alignment!r}")
    return alignment


# --- pointers ------------------------------------------------------------------------------------


class Pointer(OfTrace):
    """An address in device (``space`` 1) or shared (3) memory. ``p + n`` is ``n`` *bytes* further.

    Offsets are i32 or i64; a device pointer sign-extends an i32 offset.
    """

    __slots__ = ("space",)

    def __init__(self, value: ir.Value, space: int) -> None:
        self.ir, self.space = value, space

    def __add__(self, offset: Any) -> Pointer:
        offset = plain(offset)
        t = types()
        if isinstance(offset, int):
            if offset == 0:
                return self
            if not -(2**31) < offset < 2**31:
                offset = Value(literal(offset, i64), i64)
        elif not isinstance(offset, Value) or not offset.dtype.is_integer:
            raise TypeError(f"a pointer moves by an integer number of bytes, got {describe(offset)}")
        operands, constant = [self.ir], _DYNAMIC_OFFSET
        if isinstance(offset, int):
            constant = offset
        else:
            if offset.dtype.kind == "u" and offset.dtype.bits == 32 and self.space == GLOBAL:
                offset = cast(offset, i64)  # getelementptr would sign-extend it
            operands.append(offset.ir)
        moved = emit_value(
            "llvm.getelementptr",
            t.pointers[self.space],
            operands,
            {"elem_type": ir.TypeAttr.get(t.i8), "rawConstantIndices": ir.DenseI32ArrayAttr.get([constant])},
        )
        return Pointer(moved, self.space)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def load(
        self, dtype: DType, width: int = 1, *, invariant: bool = False, alignment: int | None = None,
        order: str | None = None, scope: str = "device",
    ) -> Any:  # fmt: skip
        """``width`` elements of ``dtype`` at this address: a scalar or, for width > 1, a vector.

        Parameters
        ----------
        invariant : bool
            Nothing writes this memory while the kernel runs, so the load may take the read-only path.
        alignment : int
            Alignment of the address in bytes; natural (at most 16) by default.
        order : {"relaxed", "acquire"}, optional
            Make the load atomic, at ``scope`` ("block", "device", "system"); width 1 only.
        """
        _check_width(width)
        s = _bits_type(dtype)
        attributes = self._access(dtype, width, alignment, order, scope)
        if invariant:
            if order:
                raise ValueError("an invariant load cannot be atomic")
            attributes["invariant"] = types().unit
        lanes = width if width > 1 else 0
        loaded = wrap(emit_value("llvm.load", types().of(s, lanes), [self.ir], attributes), s, lanes)
        return from_storage(_reinterpret(loaded, dtype) if dtype is not bool_ else loaded, dtype)

    def store(
        self, value: Any, dtype: DType | None = None, *, alignment: int | None = None,
        order: str | None = None, scope: str = "device",
    ) -> None:  # fmt: skip
        """Write a scalar or a vector at this address; ``order`` is ``"relaxed"`` or ``"release"``."""
        value = to_storage(as_value(value, dtype, "what is stored"))
        attributes = self._access(value.dtype, max(value.lanes, 1), alignment, order, scope)
        emit("llvm.store", (), [_reinterpret(value, _bits_type(value.dtype)).ir, self.ir], attributes)

    def atomic(self, op: str, value: Any, *, order: str = "relaxed", scope: str = "device") -> Value:
        """Apply an atomic read-modify-write and return the old value.

        ``op`` is "add", "max", "min" (floats too), "xchg", "sub", "and", "or", "xor", "inc" (to 0 above ``value``)
        or "dec". ``order`` is "relaxed", "acquire", "release" or "acq_rel".
        """
        value = as_value(value, None, "the operand of an atomic")
        if value.lanes or value.dtype.bits < 16 or value.dtype is bool_:
            raise TypeError(f"an atomic takes a scalar of 16, 32 or 64 bits, got {describe(value)}")
        prefix = (
            "f"
            if value.dtype.is_float and op != "xchg"
            else "u"
            if value.dtype.kind == "u" and op in ("max", "min")
            else ""
        )
        if prefix + op not in _ATOMICS:
            raise ValueError(f"atomic {op} of {value.dtype.name} is not one of the atomic operations")
        attributes = self._order(order, scope)
        attributes |= {
            "bin_op": types().i64_attr(_ATOMICS[prefix + op]),
            "alignment": types().i64_attr(value.dtype.itemsize),
        }
        # The NVPTX back end drops the ordering of atomicrmw (atom.global.add for acq_rel), so fences express it.
        attributes["ordering"] = types().i64_attr(_ORDERS["relaxed"])
        if order in ("release", "acq_rel"):
            fence(scope)
        old = emit_value("llvm.atomicrmw", value.ir.type, [self.ir, value.ir], attributes)
        if order in ("acquire", "acq_rel"):
            fence(scope)
        return Value(old, value.dtype)

    def _access(self, dtype: DType, width: int, alignment: int | None, order: str | None, scope: str) -> dict[str, Any]:
        attributes = {
            "alignment": types().i64_attr(_alignment(dtype, width, alignment)),
            "ordering": types().i64_attr(0),
        }
        if order is None:
            return attributes
        if width != 1:
            raise ValueError(f"an atomic access has width 1, got {width}")
        return attributes | self._order(order, scope)

    @staticmethod
    def _order(order: str, scope: str) -> dict[str, Any]:
        if order not in _ORDERS or scope not in _SCOPES:
            raise ValueError(
                f"order must be one of {', '.join(_ORDERS)} and scope one of {', '.join(_SCOPES)}, "
                f"got {order!r} and {scope!r}"
            )
        attributes = {"ordering": types().i64_attr(_ORDERS[order])}
        if _SCOPES[scope]:
            attributes["syncscope"] = ir.StringAttr.get(_SCOPES[scope])
        return attributes

    def address(self) -> Value:
        """The address as an integer: i64, or i32 for shared memory."""
        dtype = i32 if self.space == SHARED else i64
        return Value(emit_value("llvm.ptrtoint", types().of(dtype), [self.ir]), dtype, nonneg=True)

    def __repr__(self) -> str:
        return f"<{'shared' if self.space == SHARED else 'device'} pointer>"


def fence(scope: str = "device") -> None:
    """Order this thread's memory accesses (acquire and release) for "block", "device" or "system"."""
    if scope not in _SCOPES:
        raise ValueError(f"scope must be one of {', '.join(_SCOPES)}, got {scope!r}")
    attributes = {"ordering": types().i64_attr(_ORDERS["acq_rel"])}
    if _SCOPES[scope]:
        attributes["syncscope"] = ir.StringAttr.get(_SCOPES[scope])
    emit("llvm.fence", (), (), attributes)


def pointer_of(address: Any, space: int = GLOBAL) -> Pointer:
    """A pointer from an integer address."""
    value = as_value(address, None, "an address")
    return Pointer(emit_value("llvm.inttoptr", types().pointers[space], [value.ir]), space)


def _bits_type(dtype: DType) -> DType:
    """The type that LLVM loads for a dtype: 8-bit floats and bools are loaded as bytes."""
    return u8 if dtype is bool_ or (dtype.is_float and dtype.bits == 8) else dtype


def _reinterpret(value: Any, dtype: DType) -> Any:
    """The same bits as another dtype of equal width."""
    if value.dtype is dtype or value.dtype.mlir == dtype.mlir:
        return wrap(value.ir, dtype, value.lanes)
    return wrap(emit_value("arith.bitcast", types().of(dtype, value.lanes), [value.ir]), dtype, value.lanes)


# --- shared memory -------------------------------------------------------------------------------


class Shared:
    """An array in shared memory, row-major.

    ``s[i, j]``, ``s[i, j] = v``, ``s.load(i, width=4)``, ``s.store(i, value=v)``, ``s.ptr(i, j)``.
    """

    __slots__ = ("base", "dtype", "shape")

    def __init__(self, base: Pointer, shape: tuple[int, ...], dtype: DType) -> None:
        self.base, self.shape, self.dtype = base, shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def ptr(self, *index: Any) -> Pointer:
        """Pointer to an element; without an index, to the first element."""
        index = index or (0,) * len(self.shape)
        if len(index) != len(self.shape):
            raise TypeError(
                f"a shared array of rank {len(self.shape)} needs {len(self.shape)} indices, got {len(index)}"
            )
        stride, known, offset = self.dtype.itemsize, 0, None
        for i, extent in zip(reversed(index), reversed(self.shape), strict=True):
            i = plain(i)
            if isinstance(i, int) and not isinstance(i, bool):
                if not 0 <= i < extent:
                    raise IndexError(f"index must be in [0, {extent}), got {i}")
                known += i * stride
            elif isinstance(i, Value):
                part = Value(i32_value(i), i32, bounds=intervals.wrapped(*i.bounds, i32)) * stride
                offset = part if offset is None else part + offset
            else:
                raise TypeError(f"an index of a shared array must be an integer, got {describe(i)}")
            stride *= extent
        return (self.base if offset is None else self.base + offset) + known

    def __getitem__(self, index: Any) -> Value:
        return self.ptr(*(index if isinstance(index, tuple) else (index,))).load(self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        value = as_value(value, self.dtype, "what is stored in a shared array")
        if value.lanes:
            raise TypeError(f"one element is stored here, got {describe(value)}: use .store(..., value=v)")
        self.ptr(*(index if isinstance(index, tuple) else (index,))).store(value)

    def load(self, *index: Any, width: int = 1, alignment: int | None = None) -> Any:
        """``width`` consecutive elements from ``index`` on."""
        return self.ptr(*index).load(self.dtype, width, alignment=alignment)

    def store(self, *index: Any, value: Any, alignment: int | None = None) -> None:
        """Write a scalar or vector from ``index`` on."""
        self.ptr(*index).store(as_value(value, self.dtype, "what is stored in a shared array"), alignment=alignment)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a shared array cannot be iterated: loop with range(len(s))")

    def __repr__(self) -> str:
        return f"<shared {'x'.join(map(str, self.shape))} {self.dtype.name}>"


def shared(shape: int | Sequence[int], dtype: DType, alignment: int = 16) -> Shared:
    """Allocate uninitialised shared memory of the block. Arguments are compile-time; ``alignment`` in bytes."""
    extents = (shape,) if isinstance(shape, int | Numeric) else tuple(shape)
    for n in extents:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"extents of shared memory must be positive ints known at compile time, got {describe(n)}")
    if not isinstance(dtype, DType):
        raise TypeError(f"kv.shared needs a dtype such as kv.f32, got {describe(dtype)}")
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, in bytes, got {alignment!r}")
    size = math.prod(extents) * dtype.itemsize
    if max(size, alignment) >= 1 << 31:
        raise ValueError(f"shared memory must have less than 2**31 bytes, got {extents} of {dtype.name}")
    pointer = ops.alloc_shared(size, max(alignment, dtype.itemsize))
    return Shared(Pointer(pointer, SHARED), extents, dtype)


def _add_tile(target: Any, index: tuple[Any, ...], value: Any, mask: Any) -> None:
    """Add the elements of a tile to a buffer's."""
    if not isinstance(target, Buffer):
        raise TypeError(f"kv.atomic_add of a tile needs a buffer, got {describe(target)}")
    target._check_written()
    target._check_rank(index)
    if target.dtype not in (f32, i32):
        raise TypeError(f"kv.atomic_add of a tile needs a buffer of f32 or i32, got {target.dtype.name}")
    value = as_value(value, target.dtype, "the operand of an atomic")
    shape = tiles.shape_of_indices("an index", *index, mask, value)
    value = stretched(value, shape)
    ops.tile_scatter(value.ir, target.ir, tiles.index_tiles(index, shape), tiles.mask_of(mask, shape), add=True)


def atomic_add(target: Any, index: Any, value: Any, mask: Any = True) -> Any:
    """``target[index] += value`` atomically, for a buffer or a shared array; returns the old element.

    With index tiles, for every element of a buffer: ``kv.atomic_add(out, (i[:, None], j[None, :]), x)``, where ``mask``
    is true, without a result.
    """
    index = index if isinstance(index, tuple) else (index,)
    if _has_tile(index) or isinstance(value, tiles.Tile):
        return _add_tile(target, index, value, mask)
    if mask is not True:
        raise TypeError("kv.atomic_add takes a mask with index tiles only: write if around it")
    if isinstance(target, Shared):
        return target.ptr(*index).atomic(
            "add", as_value(value, target.dtype, "the operand of an atomic"), scope="block"
        )
    if not isinstance(target, Buffer):
        raise TypeError(
            f"kv.atomic_add needs a buffer or a shared array, got {describe(target)}: pointers have .atomic(...)"
        )
    target._check_written()
    value = as_value(value, target.dtype, "the operand of an atomic")
    if target.dtype.bits < 16:
        raise TypeError(f"an atomic takes elements of 16, 32 or 64 bits, got {target.dtype.name}")
    kind = types().i64_attr(0 if target.dtype.is_float else 1)  # arith::AtomicRMWKind addf, addi
    old = emit_value("memref.atomic_rmw", value.ir.type, [value.ir, target.ir, *target._indices(index)], {"kind": kind})
    return Value(old, target.dtype)


def take_work_item(counter: Any, iteration: Any, count: Any, late: bool = False) -> Value:
    """The work item of this iteration of ``for item in range(kv.block_id.x, count, kv.grid_dim.x)``, below ``count``.

    Every work item goes to one iteration of one block. If the compiler can use a dynamic queue (``queue-kv-work``),
    blocks that finish early take more of them; otherwise the result is ``iteration``. The computation must not depend
    on which block takes an item.

    Parameters
    ----------
    counter : Buffer[i8, 1]
        Four bytes of device memory, aligned to 4 and zero before the first launch; each launch leaves them zero.
        Concurrent launches need separate counters.
    iteration, count : i32
        The loop's variable and its end.
    late : bool
        Whether blocks may start when others have processed several items, as beside another kernel: a block then has no
        item of its own, and takes the first one from the queue, too.
    """
    if not isinstance(counter, Buffer) or counter.dtype.bits != 8:
        raise TypeError(f"the counter of work items must be a kv.Buffer[kv.i8, 1], got {describe(counter)}")
    number = ops.take_work_item(counter.ir, i32_value(iteration, "iteration"), i32_value(count, "count"), late)
    return Value(number, i32, nonneg=True)
