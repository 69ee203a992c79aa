# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views of other libraries' buffers: pointer, shape, strides, dtype, device. Nothing is copied.

:func:`view` reads NumPy arrays, torch and CuPy tensors through their own attributes (which is fast and covers every
dtype), and other objects through ``__dlpack__`` or ``__cuda_array_interface__``. It runs at every launch, so the reader
of a type is cached.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvarn.dialect import dtypes
from kvarn.dialect.dtypes import DType

CPU = ("cpu", 0)
ACCEPTED = (
    "a NumPy array, a torch or CuPy tensor, or an object with __dlpack__ and __dlpack_device__ or with "
    "__cuda_array_interface__"
)


class BufferView(NamedTuple):
    """A buffer owned by another object.

    Attributes
    ----------
    data : int
        Address of the first element.
    shape : tuple of int
    strides : tuple of int
        In elements, one per dimension.
    dtype : DType
    device : tuple of (str, int)
        ``("cpu", 0)``, or ``("cuda", ordinal)``.
    readonly : bool
        Whether the owner forbids writing.
    owner : object
        The object that was viewed. The view keeps it alive.
    keepalive : object
        Another object that must live as long as the view (a DLPack capsule), or None.
    """

    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: tuple[str, int]
    readonly: bool
    owner: Any
    keepalive: Any = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def span(self) -> int:
        """Elements from the first to the last, including gaps; for non-negative strides."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1

    @property
    def on_host(self) -> bool:
        return self.device[0] == "cpu"

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in C order without gaps; strides of extents of 1 are ignored."""
        expected = 1
        if 0 in self.shape:
            return True
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing owners by value would be slow and ambiguous

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "BufferView has no copies and cannot be pickled, since it refers to its owner's memory: copy what "
            "owns the memory"
        )

    def __repr__(self) -> str:
        return (
            f"BufferView({self.dtype!r}{list(self.shape)}, strides={self.strides}, device={self.device}, "
            f"data={self.data:#x}{', readonly' if self.readonly else ''})"
        )


def view(obj: Any, *, name: str = "buffer") -> BufferView:
    """View an array-like without copying it and without waiting for its device.

    Parameters
    ----------
    obj : array-like
        A NumPy array (ml_dtypes too), a torch or CuPy tensor, an object with ``__dlpack__`` and ``__dlpack_device__``
        or with ``__cuda_array_interface__``, or a :class:`BufferView`, which is returned unchanged.
    name : str
        The buffer's name in messages.

    Returns
    -------
    BufferView

    Raises
    ------
    TypeError
        If the object is none of these, or its dtype or device is not supported.
    ValueError
        If it cannot be viewed without a copy, or its strides are not whole elements.

    Notes
    -----
    DLPack exports use stream -1: the producer does not synchronise. Work that fills the buffer must already be ordered
    before the stream of the launch.
    """
    cls = obj.__class__
    reader = _readers.get(cls)
    if reader is None:
        reader = _readers[cls] = _find_reader(cls)
    return reader(obj, name)


def copies_memory(owner: Any) -> bool:
    """Whether a deep copy or unpickled copy of a viewed object has memory of its own."""
    return _find_reader(owner.__class__) in (_read_numpy, _read_torch, _read_cupy)


_Reader = Callable[[Any, str], BufferView]
_readers: dict[type, _Reader] = {}
_dtypes: dict[Any, DType] = {}  # dtype objects of other libraries, added on first use
_devices: dict[Any, tuple[str, int]] = {}  # torch devices, added on first use


def _find_reader(cls: type) -> _Reader:
    """The reader of a type. A library is recognised by the module that defines the type or one of its bases."""
    if issubclass(cls, BufferView):
        return lambda obj, name: obj
    if issubclass(cls, np.ndarray):
        return _read_numpy
    for base in cls.__mro__:
        library = base.__module__.partition(".")[0]
        if library == "torch" and base.__name__ == "Tensor":
            return _read_torch
        if library == "cupy" and base.__name__ == "ndarray":
            return _read_cupy
    return _read_protocol


def _dtype(foreign: Any, name: str) -> DType:
    try:
        return _dtypes[foreign]
    except KeyError:
        pass
    try:
        found = dtypes.of(foreign)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None
    _dtypes[foreign] = found
    return found


def _in_elements(strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    if any(s % itemsize for s in strides):
        raise ValueError(f"{name}: strides must be multiples of the element's {itemsize} bytes, got {strides} bytes")
    return tuple(s // itemsize for s in strides)


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _read_numpy(array: np.ndarray, name: str) -> BufferView:
    dtype = array.dtype
    if not dtype.isnative:
        raise TypeError(
            f"{name}: dtype must have the machine's byte order, got {dtype.str}; use .astype(dtype.newbyteorder('='))"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: must be {ACCEPTED}, got a masked array, whose mask would be lost; use .data or .filled()"
        )
    return BufferView(
        array.__array_interface__["data"][0],
        array.shape,
        _in_elements(array.strides, dtype.itemsize, name),
        _dtype(dtype, name),
        CPU,
        not array.flags.writeable,
        array,
    )


def _torch_device(device: Any, name: str) -> tuple[str, int]:
    if device.type == "cpu":
        found = CPU
    elif device.type == "cuda" and device.index is not None:
        found = ("cuda", device.index)
    else:
        raise TypeError(f"{name}: must be on the CPU or a CUDA device, got a tensor on {device}")
    _devices[device] = found
    return found


def _read_torch(tensor: Any, name: str) -> BufferView:
    try:
        # A tuple built directly, since NamedTuple's __new__ would add a Python call to every launch.
        found = _new(
            BufferView,
            (
                tensor.data_ptr(),
                (*tensor.shape,),
                tensor.stride(),
                _dtypes.get(tensor.dtype) or _dtype(tensor.dtype, name),
                _devices.get(tensor.device) or _torch_device(tensor.device, name),
                False,
                tensor,
                None,
            ),
        )
    except RuntimeError as e:  # sparse, fake and functional tensors have no pointer
        raise TypeError(
            f"{name}: must be a tensor with plain strided storage, got {type(tensor).__name__} ({e})"
        ) from None
    # A lazily negated tensor has the opposite sign in memory.
    if tensor.is_neg():
        raise ValueError(f"{name}: must not be a lazily negated tensor; use .resolve_neg()")
    return found if found[0] else _placed(found, name)


def _placed(found: BufferView, name: str) -> BufferView:
    """The view; TypeError if it has elements but no address."""
    if not found.data and 0 not in found.shape:
        raise without_memory(found.owner, name)
    return found


def without_memory(owner: Any, name: str) -> TypeError:
    """The error for a tensor that wraps another one, or whose memory was released."""
    return TypeError(
        f"{name}: must have memory of its own, got {type(owner).__name__} of shape {list(owner.shape)} without any: "
        "materialise it (FSDP: unshard; torch.func.functionalize, FakeTensor and other tracing: call outside), or pass "
        "the tensor that it wraps (DTensor: .to_local())"
    )


_new = tuple.__new__


def _read_cupy(array: Any, name: str) -> BufferView:
    found = BufferView(
        array.data.ptr,
        tuple(array.shape),
        _in_elements(array.strides, array.dtype.itemsize, name),
        _dtype(array.dtype, name),
        ("cuda", array.device.id),
        False,
        array,
    )
    return _placed(found, name)


def _read_protocol(obj: Any, name: str) -> BufferView:
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        try:
            return _read_dlpack(obj, name)
        except BufferError as e:
            if not hasattr(obj, "__cuda_array_interface__"):
                raise ValueError(f"{name}: its owner cannot export it through DLPack without a copy: {e}") from e
    if hasattr(obj, "__cuda_array_interface__"):
        return _read_cuda_array_interface(obj, name)
    raise TypeError(f"{name}: must be {ACCEPTED}, got {type(obj).__module__}.{type(obj).__qualname__}")


# --- __cuda_array_interface__ --------------------------------------------------------------------


def _read_cuda_array_interface(obj: Any, name: str) -> BufferView:
    described = obj.__cuda_array_interface__
    if described.get("mask") is not None:
        raise TypeError(f"{name}: must be a buffer without a mask, got a masked __cuda_array_interface__")
    typestr = described["typestr"]
    # There libraries name their own small floats as opaque bytes ("<V2"); the object's dtype is specific.
    raw = getattr(obj, "dtype", typestr) if typestr[1:2] == "V" else np.dtype(typestr)
    if isinstance(raw, np.dtype) and not raw.isnative:
        raise TypeError(f"{name}: dtype must have the machine's byte order, got {typestr}")
    dtype = _dtype(raw, name)
    shape = tuple(described["shape"])
    strides = described.get("strides")
    data, readonly = described["data"]
    in_elements = packed_strides(shape) if strides is None else _in_elements(tuple(strides), dtype.itemsize, name)
    where = ("cuda", _cuda_ordinal(obj, data, name))
    return _placed(BufferView(data or 0, shape, in_elements, dtype, where, bool(readonly), obj), name)


def _cuda_ordinal(obj: Any, pointer: int, name: str) -> int:
    """The device of a pointer. The interface does not contain it: ask the object, else the driver."""
    if hasattr(obj, "__dlpack_device__"):
        return int(obj.__dlpack_device__()[1])
    if not pointer:
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ValueError(
            f"{name}: its device is unknown: it has no __dlpack_device__, and no CUDA driver is here to ask"
        ) from None
    ordinal = ctypes.c_int()
    device_ordinal = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status = driver.cuPointerGetAttribute(ctypes.byref(ordinal), device_ordinal, ctypes.c_uint64(pointer))
    if status != 0:
        raise ValueError(
            f"{name}: address {pointer:#x} must be CUDA memory, but the driver does not know it (error {status})"
        )
    return ordinal.value


# --- DLPack --------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY, _COPIED = 1, 2
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_DTYPES = {
    **{(0, b): f"i{b}" for b in (8, 16, 32, 64)},
    **{(1, b): f"u{b}" for b in (8, 16, 32, 64)},
    **{(2, b): f"f{b}" for b in (16, 32, 64)},
    (4, 16): "bf16",
    (6, 8): "bool",
    (10, 8): "f8e4m3",
    (12, 8): "f8e5m2",
    (14, 8): "f8e8m0",
}
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _read_dlpack(obj: Any, name: str) -> BufferView:
    on_gpu = obj.__dlpack_device__()[0] in (_DL_CUDA, _DL_CUDA_MANAGED)
    ask: dict[str, Any] = {"stream": -1} if on_gpu else {}
    try:
        capsule = obj.__dlpack__(**ask, max_version=(1, 0), copy=False)
    except TypeError:  # a producer older than DLPack 1.0
        capsule = obj.__dlpack__(**ask)
    # The capsule is kept rather than consumed: its destructor frees the export when the view is released.
    kind = _capsule_name(capsule)
    if kind not in (b"dltensor", b"dltensor_versioned"):
        raise TypeError(f"{name}: __dlpack__ must return an unused DLPack capsule, got {kind!r}")
    pointer = _capsule_pointer(capsule, kind)
    flags = 0
    if kind == b"dltensor":
        tensor = _DLTensor.from_address(pointer)
    else:
        managed = _DLManagedTensorVersioned.from_address(pointer)
        if managed.major > 1:
            raise TypeError(f"{name}: DLPack version must be 1, got {managed.major}.{managed.minor}")
        tensor, flags = managed.tensor, managed.flags
    if flags & _COPIED:
        raise ValueError(f"{name}: its owner exports only a copy through DLPack, so what a kernel writes would be lost")
    code = (tensor.code, tensor.bits)
    if code not in _DL_DTYPES or tensor.lanes != 1:
        raise TypeError(
            f"{name}: dtype must be one of {', '.join(dict.fromkeys(_DL_DTYPES.values()))}, "
            f"got DLPack code {tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes"
        )
    if tensor.device_type in (_DL_CPU, _DL_CUDA_HOST):
        device = CPU
    elif tensor.device_type in (_DL_CUDA, _DL_CUDA_MANAGED):
        device = ("cuda", tensor.device_id)
    else:
        raise TypeError(f"{name}: must be on the CPU or a CUDA device, got DLPack device type {tensor.device_type}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else packed_strides(shape)
    address, dtype = (tensor.data or 0) + tensor.byte_offset, dtypes.by_name(_DL_DTYPES[code])
    return _placed(BufferView(address, shape, strides, dtype, device, bool(flags & _READ_ONLY), obj, capsule), name)


# --- host access ---------------------------------------------------------------------------------


class _Interface:
    """Passes an array interface to NumPy, which keeps it, and with it the viewed buffer, alive."""

    def __init__(self, interface: dict[str, Any], keep: Any) -> None:
        self.__array_interface__, self._keep = interface, keep


def host_array(buffer: BufferView, *, name: str = "buffer") -> np.ndarray:
    """The buffer as a NumPy array on the same memory, with small floats as ml_dtypes.

    Raises
    ------
    TypeError
        If the buffer is not in host memory.
    """
    if not buffer.on_host:
        raise TypeError(
            f"{name}: must be in host memory, got a buffer on {buffer.device[0]}:{buffer.device[1]}; "
            f"copy it to the host first"
        )
    return strided_array(buffer.data, buffer.shape, buffer.strides, buffer.dtype, buffer.readonly, buffer)


def strided_array(
    data: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, readonly: bool, keep: Any
) -> np.ndarray:
    """A NumPy array over ``data``. The caller guarantees the extents; ``keep`` lives as long as the array."""
    target = dtype.numpy
    if 0 in shape:
        return np.empty(shape, target)
    size = dtype.itemsize
    # An array interface cannot name small floats: read their bits, then view these as the dtype.
    bits = np.asarray(
        _Interface(
            {
                "version": 3,
                "shape": tuple(shape),
                "typestr": f"<u{size}",
                "data": (data, readonly),
                "strides": tuple(s * size for s in strides),
            },
            keep,
        )
    )
    return bits.view(target)
