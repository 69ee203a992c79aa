# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Binders: from Python arguments to field values, one binder per argument of a compiled function.

A binder checks an object against what the kernel was compiled for, and returns the values of its fields, in layout
order, and its device. It runs at every launch, so unchanging properties are looked up: shape, strides, dtype and device
of a torch tensor are one cache key, and only the address is read each time.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from kvarn.artifact import Arg
from kvarn.dialect import layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec

from . import buffers
from .buffers import BufferView

HOST = -1  # the ordinal of host memory
# A binder's result: field values, and the device's ordinal, or None for an argument without memory.
Bound = tuple[tuple[Any, ...], "int | None"]
Binder = Callable[[Any], Bound]
_REMEMBER = 1024  # shapes cached per binder
_LARGEST_EXTENT = 2**31 - 1  # kernels have 32-bit extents


def make_binder(arg: Arg, kernel: str) -> Binder:
    """The binder of one argument; ``kernel`` is the function's name in messages."""
    where = f"argument {arg.name!r} of kernel {kernel!r}"
    if arg.kind == "buffer":
        return _buffer_binder(arg, where)
    if arg.kind == "scalar":
        return _scalar_binder(arg, where)
    if arg.kind == "tensormap":
        return _tensormap_binder(arg, where)
    return _cache_binder(arg, where)


# --- devices -------------------------------------------------------------------------------------

_ordinals: dict[Any, int] = {("cpu", 0): HOST, "cpu": HOST, "host": HOST}


def ordinal_of(device: Any, where: str) -> int:
    """The ordinal of a device given as ``("cuda", 1)``, ``"cuda:1"`` or a torch device; HOST for the CPU."""
    found = _ordinals.get(device)
    if found is not None:
        return found
    kind, index = getattr(device, "type", device), getattr(device, "index", None)
    if isinstance(device, tuple) and len(device) == 2:
        kind, index = device
    elif isinstance(device, str):
        kind, _, text = device.partition(":")
        index = int(text) if text.isdigit() else None if text else 0
    if kind == "cpu":
        found = HOST
    elif kind == "cuda" and isinstance(index, int) and index >= 0:
        found = index
    else:
        raise TypeError(f"{where} must be on the CPU or a CUDA device, got one on {device!r}")
    _ordinals[device] = found
    return found


# --- buffers -------------------------------------------------------------------------------------

_torch_types: dict[type, bool] = {}


def is_torch(cls: type) -> bool:
    """Whether a type is torch's tensor or derives from it, without importing torch."""
    found = _torch_types.get(cls)
    if found is None:
        found = any(b.__name__ == "Tensor" and b.__module__.partition(".")[0] == "torch" for b in cls.__mro__)
        _torch_types[cls] = found
    return found


def same_bits(a: DType, b: DType) -> bool:
    """Whether a buffer of ``b`` is accepted for ``a``: equal types, or 32- or 64-bit integers of either sign."""
    return a == b or (a.is_integer and b.is_integer and a.bits == b.bits and a.bits >= 32)


def _check_buffer(arg: Arg, where: str, b: BufferView) -> None:
    """Check everything about a buffer except its address."""
    assert arg.dtype is not None
    if not same_bits(arg.dtype, b.dtype):
        raise TypeError(f"{where} must have dtype {arg.dtype.name}, got {b.dtype.name}")
    if b.rank != arg.rank:
        raise ValueError(f"{where} must have {arg.rank} dimensions, got {b.rank} with shape {b.shape}")
    if b.shape[-1] > 1 and b.strides[-1] != 1 and b.size > 0:
        raise ValueError(
            f"{where} must be contiguous in its last dimension, got strides {b.strides} "
            f"(elements) with shape {b.shape}; use .contiguous()"
        )
    for extent in b.shape:
        if extent > _LARGEST_EXTENT:
            raise ValueError(f"{where} must have extents below 2**31, got shape {b.shape}")
    if arg.written and b.readonly:
        raise ValueError(f"{where} is written by the kernel, but the buffer given is read-only")


def _misaligned(where: str, address: int, alignment: int) -> ValueError:
    return ValueError(
        f"{where} must start at a multiple of {alignment} bytes, got address {address:#x}: "
        "a slice may start in between; pass the whole buffer or a copy"
    )


def _misaligned_table(where: str, address: int, stride: int, alignment: int) -> ValueError:
    return ValueError(
        f"{where} must have a lookup table whose rows start at multiples of {alignment} bytes, since the kernel reads "
        f"several entries at once; got address {address:#x} and rows {stride} entries apart: pad the columns to a "
        f"multiple of {alignment // 4} (kvarn.dialect.layout.lookup_columns gives a count) and pass the whole table"
    )


def _buffer_binder(arg: Arg, where: str) -> Binder:
    assert arg.dtype is not None
    alignment = max(arg.alignment, arg.dtype.itemsize)
    mask = alignment - 1
    known: dict[Any, tuple[tuple[int, ...], int]] = {}
    rank = arg.rank

    def check(b: BufferView) -> tuple[tuple[int, ...], int]:
        _check_buffer(arg, where, b)
        return (*b.shape, *b.strides[: rank - 1]), ordinal_of(b.device, where)

    def bind(obj: Any) -> Bound:
        b = None
        if is_torch(obj.__class__):
            try:
                address = obj.data_ptr()
                key = (obj.shape, obj.stride(), obj.dtype, obj.device, obj.is_neg())
            except RuntimeError:  # a tensor without a pointer, for which the reader raises a specific error
                b = buffers.view(obj, name=where)
            else:
                if not address:  # an empty tensor, or one without memory, which the reader refuses
                    b = buffers.view(obj, name=where)
        else:
            b = buffers.view(obj, name=where)
        if b is not None:
            address, key = b.data, (b.shape, b.strides, b.dtype.name, b.device, b.readonly)
        found = known.get(key)
        if found is None:
            found = check(b if b is not None else buffers.view(obj, name=where))
            if len(known) >= _REMEMBER:
                known.clear()
            known[key] = found
        if address & mask:
            raise _misaligned(where, address, alignment)
        return (address, *found[0]), found[1]

    return bind


# --- caches, collections, operands ---------------------------------------------------------------

_SPEC_TYPES = {"cache": CacheSpec, "collection": layout.CollectionSpec, "operand": layout.OperandSpec}


def _describe(spec: CacheSpec) -> str:
    text = f"{spec.kind} {spec.dtype.name} num_heads={spec.num_heads} head_size={spec.head_size}"
    text += f" page_size={spec.page_size}" if spec.paged else ""
    text += f" strides={spec.strides}" if spec.strides is not None else ""
    text += " mla" if spec.is_mla else ""
    text += f" scales={spec.scale_dtype.name}/{spec.granularity}" if spec.scale_dtype else ""
    return text + (" with zeros" if spec.zero else "")


def _check_spec(arg: Arg, where: str, obj: Any) -> None:
    expected, found = arg.spec, getattr(obj, "spec", None)
    assert isinstance(expected, CacheSpec)
    kind = next((k for k, t in _SPEC_TYPES.items() if isinstance(found, t)), None)
    if kind != arg.kind or not hasattr(obj, "fields"):
        got = f"a {kind}" if kind else type(obj).__qualname__
        kind = f"{'an' if arg.kind == 'operand' else 'a'} {arg.kind}"
        raise TypeError(f"{where} must be {kind} ({_describe(expected)}), got {got}")
    cache = found if isinstance(found, CacheSpec) else found.cache  # type: ignore[union-attr]
    if cache != expected:
        raise TypeError(
            f"{where} is compiled for {_describe(expected)}, got {_describe(cache)}: compile the kernel for this cache"
        )


def _cache_binder(arg: Arg, where: str) -> Binder:
    assert arg.spec is not None
    alignment = max(arg.alignment, arg.spec.dtype.unit.itemsize)
    mask, written, count = alignment - 1, arg.written, len(arg.fields)
    names = [f.name for f in arg.fields]
    # For the lookup table: indices of its address, row stride and rows, and the bits that must be zero in the first
    # two.
    table = [names.index(n) for n in ("lookup", "lookup_stride", "batch")] if arg.table_alignment else [0, 0, 0]
    at_table, at_stride, at_rows, table_mask = *table, max(arg.table_alignment - 1, 0)
    known: Any = None  # the last accepted spec; specs are immutable

    def bind(obj: Any) -> Bound:
        nonlocal known
        spec = getattr(obj, "spec", None)
        if spec is not known or spec is None:
            _check_spec(arg, where, obj)
            known = spec
        fields = obj.fields()
        if len(fields) != count:
            raise TypeError(
                f"{where} must have {count} fields ({', '.join(f.name for f in arg.fields)}), "
                f"got {len(fields)} from {type(obj).__qualname__}.fields()"
            )
        if fields[0] & mask:
            raise _misaligned(where, fields[0], alignment)
        if table_mask and (fields[at_table] | 4 * fields[at_stride]) & table_mask:
            if fields[at_table] & table_mask or fields[at_rows] > 1:
                raise _misaligned_table(where, fields[at_table], fields[at_stride], table_mask + 1)
        if written and getattr(obj, "readonly", False):
            raise ValueError(f"{where} is written by the kernel, but the cache's blocks are read-only")
        return fields, ordinal_of(obj.device, where)

    return bind


# --- scalars and tensor maps ---------------------------------------------------------------------


def _not_a_number(where: str, dtype: DType, obj: Any) -> TypeError:
    return TypeError(f"{where} must be a number ({dtype.name}), got {type(obj).__qualname__}: {obj!r}")


_PLAIN = frozenset((int, float, bool))


def _scalar_binder(arg: Arg, where: str) -> Binder:
    dtype = arg.dtype
    assert dtype is not None
    if dtype.kind == "b":
        convert: Callable[[Any], Any] = _to_bool(where)
    elif dtype.is_integer:
        convert = _to_integer(where, dtype)
    else:
        convert = _to_float(where, dtype)

    def bind(obj: Any) -> Bound:
        # Reading a number from a device tensor would wait for the device, and break a stream capture.
        cls = obj.__class__
        if cls not in _PLAIN and (is_torch(cls) or hasattr(obj, "__cuda_array_interface__")):
            raise TypeError(
                f"{where} must be a Python or NumPy number ({dtype.name}), got {type(obj).__qualname__}: "
                "reading it would wait for the device; call .item() yourself, or make it a buffer"
            )
        return (convert(obj),), None

    return bind


def _to_bool(where: str) -> Callable[[Any], int]:
    def convert(obj: Any) -> int:
        if obj.__class__ is bool or type(obj).__name__ in ("bool_", "bool"):  # NumPy 1 and 2
            return int(obj)
        try:
            found = operator.index(obj)
        except TypeError:
            found = -1
        if found not in (0, 1):
            raise TypeError(f"{where} must be True or False, got {obj!r}")
        return found

    return convert


def _to_integer(where: str, dtype: DType) -> Callable[[Any], int]:
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "i" else 0
    high = (1 << (dtype.bits - (dtype.kind == "i"))) - 1

    def convert(obj: Any) -> int:
        if obj.__class__ is not int:
            try:
                obj = operator.index(obj)
            except TypeError:
                raise _not_a_number(where, dtype, obj) from None
        if not low <= obj <= high:
            raise ValueError(f"{where} must fit {dtype.name} ({low} to {high}), got {obj}")
        return obj

    return convert


def _to_float(where: str, dtype: DType) -> Callable[[Any], float]:
    largest = dtype.largest

    def convert(obj: Any) -> float:
        if obj.__class__ is not float:
            if isinstance(obj, (str, bytes)):  # float() would parse these
                raise _not_a_number(where, dtype, obj)
            try:
                obj = float(obj)
            except (TypeError, ValueError):
                raise _not_a_number(where, dtype, obj) from None
        if not -largest <= obj <= largest and math.isfinite(obj):
            raise ValueError(f"{where} must fit {dtype.name} (magnitude up to {largest:g}), got {obj:g}")
        return obj

    return convert


def bits_of(dtype: DType) -> Callable[[float], int] | None:
    """The conversion of a float to the bits of a type that `struct` does not support; None if it does."""
    if dtype.name in ("f64", "f32", "f16") or not dtype.is_float:
        return None
    if dtype.name == "bf16":
        return _bf16_bits
    import numpy as np

    return lambda x: int(np.asarray(x, np.float32).astype(dtype.numpy).view(np.uint8))


def _bf16_bits(x: float) -> int:
    """The upper half of the float, rounded to nearest, ties to even."""
    if x != x:
        return 0x7FC0
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _tensormap_binder(arg: Arg, where: str) -> Binder:
    expected, written = arg.spec, arg.written

    def bind(obj: Any) -> Bound:
        encoded = getattr(obj, "encoded", None)
        if not isinstance(encoded, bytes):
            raise TypeError(
                f"{where} must be a TMA descriptor, as create_tma_tile of a cache gives it, "
                f"got {type(obj).__qualname__}"
            )
        if expected is not None and obj.spec != expected:
            raise TypeError(
                f"{where} is compiled for {expected}, got {obj.spec}: compile the kernel for this descriptor"
            )
        if not encoded:
            raise ValueError(f"{where} must describe memory of a GPU, got a TMA descriptor of host memory")
        if written and obj.readonly:
            raise ValueError(f"{where} is stored to by the kernel, but the memory described is read-only")
        return (encoded,), obj.ordinal

    return bind
