# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of the buffers of a cache or collection, run when one is made.

They do not read the contents of buffers, so they are the same for host and device memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from kvarn.dialect import dtypes, layout
from kvarn.runtime.binding import is_torch
from kvarn.runtime.buffers import BufferView, view

_MAX_I32 = 2**31 - 1


def count(value: Any, name: str) -> int:
    """A non-negative 32-bit host integer."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer on the host, got {type(value).__name__}") from None
    if not 0 <= number <= _MAX_I32:
        raise ValueError(f"{name} must be in [0, {_MAX_I32}], got {number}")
    return number


def positive(value: Any, name: str) -> int:
    """A positive 32-bit host integer."""
    number = count(value, name)
    if number < 1:
        raise ValueError(f"{name} must be positive, got {number}")
    return number


def index(value: Any, extent: int, name: str) -> int:
    """An integer in [0, extent). A bool is refused, since ``True`` is unlikely to mean layer 1."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not 0 <= number < extent:
        raise IndexError(f"{name} must be in [0, {extent}), got {number}")
    return number


def pool_view(obj: Any, name: str) -> BufferView:
    """View a pool, which lies within its storage: ``untyped_storage().resize_`` may have made a tensor's shorter."""
    buffer = view(obj, name=name)
    if buffer.data and is_torch(type(obj)):  # a tensor that torch traces has no address
        _within_storage(obj, name)
    return buffer


def _within_storage(tensor: Any, name: str) -> None:
    storage = tensor.untyped_storage()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() - storage.data_ptr() + (last + 1) * tensor.element_size()
    if end > storage.nbytes() and tensor.numel():
        raise ValueError(
            f"{name} must lie within its storage, got shape {list(tensor.shape)}, which needs {end} bytes, over a "
            f"storage of {storage.nbytes()}: it has been resized since; make another tensor"
        )


def pool(
    obj: Any, name: str, dims: Sequence[str], outer: int, row_major: bool = True, empty: bool = False
) -> tuple[BufferView, tuple[int, ...]]:
    """View a pool of pages and return its strides, in elements.

    Parameters
    ----------
    obj : array-like
    name : str
        For messages.
    dims : sequence of str
        Names of the dimensions.
    outer : int
        Number of leading dimensions with arbitrary strides; the others must be packed.
    row_major : bool
        Whether outer strides must be multiples of a row, the last two dimensions: pages are numbered by rows.
    empty : bool
        Whether the extents may be zero.

    Returns
    -------
    tuple of (BufferView, tuple of int)
        Dimensions of extent 1 have the stride of a packed buffer, whatever the buffer says.
    """
    buffer = pool_view(obj, name)
    wanted = f"[{', '.join(dims)}]"
    if buffer.rank != len(dims):
        raise ValueError(f"{name} must have {len(dims)} dimensions {wanted}, got shape {tuple(buffer.shape)}")
    for extent, dim in zip(buffer.shape, dims, strict=True):
        if extent < 1 and not (empty and dim in ("sequences", "tokens")):
            raise ValueError(
                f"{name} must have a positive extent in every dimension of {wanted}, got {extent} for {dim}"
            )
        if extent > _MAX_I32:
            raise ValueError(f"{name}: extents must be below 2**31, got {extent} for {dim}")
    strides, packed = [], 1
    for axis in range(buffer.rank - 1, -1, -1):
        extent, stride = buffer.shape[axis], buffer.strides[axis]
        if extent == 1 or buffer.size == 0:
            stride = packed
        if axis >= outer and stride != packed:
            raise ValueError(
                f"{name}: the last {buffer.rank - outer} dimensions of {wanted} must be packed (dimension {axis}, "
                f"{dims[axis]}, needs a stride of {packed} elements), got strides {tuple(buffer.strides)}; "
                f"make the pool contiguous there"
            )
        strides.append(stride)
        packed = max(packed, stride * extent)
    strides.reverse()
    no_overlap(buffer, strides, name)
    row = buffer.shape[-1] * buffer.shape[-2]
    for axis in range(outer if row_major else 0):
        if strides[axis] % row:
            raise ValueError(
                f"{name}: strides of the outer dimensions must be multiples of one token's {row} elements "
                f"({dims[-2]} * {dims[-1]}), got {strides[axis]} for {dims[axis]}"
            )
    return buffer, tuple(strides)


def no_overlap(buffer: BufferView, strides: Sequence[int], name: str) -> None:
    """Refuse negative strides and broadcast or overlapping dimensions: a write to one page would change another."""
    span = 1
    if buffer.size == 0:
        return
    for stride, extent in sorted(zip(strides, buffer.shape, strict=True)):
        if extent == 1:
            continue
        if stride < span:
            raise ValueError(
                f"{name}: elements must not overlap and strides must be positive, got shape {tuple(buffer.shape)} "
                f"with strides {tuple(buffer.strides)}"
            )
        span += stride * (extent - 1)


def aligned(buffer: BufferView, multiple: int, name: str) -> None:
    if buffer.data % multiple:
        raise ValueError(
            f"{name} must start at a multiple of {multiple} bytes (vector loads and TMA need it), got address "
            f"{buffer.data:#x}; do not slice the pool's first dimensions off an unaligned buffer"
        )


def aligned_granules(buffer: BufferView, strides: Sequence[int], dims: Sequence[str], outer: int) -> None:
    """Check that base and outer strides of scales allow vector reads, up to 16 bytes, of a token's scales of a head."""
    granules, item = buffer.shape[-1], buffer.dtype.itemsize
    multiple = min(16, layout.lowbit(granules * item))
    aligned(buffer, multiple, "scales")
    for stride, dim in zip(strides[:outer], dims, strict=False):
        if stride * item % multiple:
            raise ValueError(
                f"scales: strides of the outer dimensions must be multiples of {multiple} bytes (the {granules} scales "
                f"of a token and head are read as vectors), got {stride} elements of {item} bytes for {dim}"
            )


def table(obj: Any, name: str, dims: Sequence[str]) -> tuple[BufferView, tuple[int, ...]]:
    """View a table of 32-bit integers with a contiguous last dimension, and return its strides."""
    buffer = view(obj, name=name)
    wanted = f"[{', '.join(dims)}]"
    if buffer.dtype not in (dtypes.u32, dtypes.i32):
        raise TypeError(f"{name} must be uint32 or int32, got {buffer.dtype.name}")
    if buffer.rank != len(dims):
        raise ValueError(
            f"{name} must have {len(dims)} dimension{'s' * (len(dims) > 1)} {wanted}, got shape {tuple(buffer.shape)}"
        )
    if any(extent > _MAX_I32 for extent in buffer.shape):
        raise ValueError(f"{name}: extents must be below 2**31, got shape {tuple(buffer.shape)}")
    if buffer.data % buffer.dtype.itemsize:
        raise ValueError(
            f"{name} must start at a multiple of {buffer.dtype.itemsize} bytes, got address {buffer.data:#x}"
        )
    strides, packed = [], 1
    for axis in range(buffer.rank - 1, -1, -1):
        extent, stride = buffer.shape[axis], buffer.strides[axis]
        if extent <= 1 or buffer.size == 0:
            stride = packed
        last = axis == buffer.rank - 1
        if stride != 1 if last else stride < packed:
            raise ValueError(
                f"{name}: dimension {axis} of {wanted} must have a stride of {'1' if last else f'at least {packed}'} "
                f"elements, got strides {tuple(buffer.strides)}"
            )
        strides.append(stride)
        packed = max(packed, stride * extent, 1)
    return buffer, tuple(reversed(strides))


def same_device(named: Iterable[tuple[str, BufferView]]) -> tuple[str, int]:
    """The common device of several buffers; ValueError if there are two."""
    (first, reference), *rest = named
    for name, buffer in rest:
        if buffer.device != reference.device:
            raise ValueError(
                f"all buffers must be on one device: {first} is on {_place(reference)}, {name} on {_place(buffer)}"
            )
    return reference.device


def _place(buffer: BufferView) -> str:
    return "the CPU" if buffer.on_host else f"cuda:{buffer.device[1]}"


def sequences(lengths: BufferView, rows: int, name: str) -> int:
    """B, from the cache lengths; the lookup table must have one row per sequence."""
    batch = lengths.shape[0]
    if rows != batch:
        raise ValueError(f"{name} must have one row per sequence: {batch} by cache_lengths, got {rows} rows")
    return batch


def table_covers(columns: int, page_size: int, max_cache_length: int, batch: int) -> None:
    """Check that the table covers the longest sequence, and no more tokens than kernels can count."""
    if columns * page_size > layout.MAX_TOKENS:
        raise ValueError(
            f"lookup_table must have columns for at most {layout.MAX_TOKENS} tokens of a sequence: "
            f"{layout.MAX_TOKENS // page_size} columns of {page_size} tokens, got {columns}"
        )
    if batch and columns * page_size < max_cache_length:
        raise ValueError(
            f"lookup_table must have a column for every page of max_cache_length {max_cache_length}: "
            f"{-(-max_cache_length // page_size)} columns of {page_size} tokens, got {columns}"
        )


def region_holds(slots: int, max_cache_length: int, batch: int) -> None:
    """Check that a region of a continuous cache fits the longest sequence, and no more tokens than kernels count."""
    if slots > layout.MAX_TOKENS:
        raise ValueError(f"blocks must have at most {layout.MAX_TOKENS} slots of a region, got {slots}")
    if batch and max_cache_length > slots:
        raise ValueError(f"max_cache_length must fit a region's {slots} slots, got {max_cache_length}")
