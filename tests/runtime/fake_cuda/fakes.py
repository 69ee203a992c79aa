# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stand-ins for the cases: the fake driver's records, a torch of a few attributes, PTX with only a signature."""

import ctypes
import sys
import types

import numpy as np

from kvarn import artifact as A
from kvarn.dialect import dtypes, layout

PARAM_PTX = {"ptr": "u64", "i64": "u64", "i32": "u32", "i16": "u16", "i8": "u8", "i1": "u8", "f64": "f64", "f32": "f32",
             "f16": "b16", "bf16": "b16", "f8e4m3": "b8", "f8e5m2": "b8", "f8e8m0": "b8"}  # fmt: skip
LIBRARY = ctypes.CDLL("libcuda.so.1")
for _name in ("fake_launch", "fake_stream", "fake_context"):
    getattr(LIBRARY, _name).restype = ctypes.c_void_p


class Launch(ctypes.Structure):
    _fields_ = [
        ("shape", ctypes.c_uint32 * 7), ("stream", ctypes.c_uint64), ("device", ctypes.c_int32),
        ("attributes", ctypes.c_uint32), ("attribute", (ctypes.c_uint8 * 72) * 4), ("kernel", ctypes.c_char * 64),
        ("bytes", ctypes.c_int32), ("params", ctypes.c_uint8 * 1024),
    ]  # fmt: skip


assert ctypes.sizeof(Launch) == LIBRARY.fake_launch_bytes()


def launches():
    return [Launch.from_address(LIBRARY.fake_launch(i)) for i in range(LIBRARY.fake_launches())]


def last():
    return launches()[-1]


def count(what):
    return LIBRARY.fake_count(what.encode())


def params(launch, entry):
    """The recorded parameters as numbers, by (argument, field); small floats as bits."""
    kinds = {"ptr": "<u8", "i64": "<i8", "i32": "<i4", "i16": "<i2", "i8": "<i1", "i1": "<u1", "f64": "<f8",
             "f32": "<f4", "f16": "<f2", "bf16": "<u2", "f8e4m3": "<u1", "f8e5m2": "<u1", "f8e8m0": "<u1"}  # fmt: skip
    raw, offset, found = bytes(launch.params), 0, {}
    for p in entry.params:
        size = A.PARAM_BYTES[p.type]
        offset += -offset % min(size, 64)
        part = raw[offset : offset + size]
        value = part if p.type == "tensormap" else np.frombuffer(part, kinds[p.type])[0]
        found[entry.args[p.arg].name, p.field] = value
        offset += size
    assert offset == launch.bytes
    return found


def ptx(entries, target="sm_80", isa="8.0"):
    def declare(p):
        return ".param .align 64 .b8 _[128]" if p.type == "tensormap" else f".param .{PARAM_PTX[p.type]} _"

    text = f".version {isa}\n.target {target}\n.address_size 64\n"
    for e in entries:
        text += f".visible .entry {e.name}({', '.join(map(declare, e.params))})\n{{ ret; }}\n"
    return text


def kernel(args, name="k", target="sm_80", isa="8.0", **entry):
    entry.setdefault("params", A.flatten(args))
    e = A.Entry(name, args, **entry)
    return A.Artifact(name, target, isa, {"ptx": ptx([e], target, isa)}, [e])


class CudaArray:
    """Device memory as __cuda_array_interface__ shows it; the memory is the host's."""

    def __init__(self, array, device=0, readonly=False, offset=0):
        self.array, self.device = array, device
        self.__cuda_array_interface__ = {
            "version": 3, "shape": array.shape, "typestr": array.dtype.str, "strides": array.strides,
            "data": (array.ctypes.data + offset, readonly),
        }  # fmt: skip

    def __dlpack_device__(self):
        return 2, self.device


def aligned(shape, dtype):
    """A zeroed array that starts at a multiple of 256 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype).reshape(shape)


# --- torch ---------------------------------------------------------------------------------------


class TorchDtype:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


class TorchDevice:
    def __init__(self, kind, index):
        self.type, self.index = kind, index

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))


class Tensor:
    """What the loader asks of a torch tensor."""

    def __init__(self, array, dtype, device=0):
        self.array, self.dtype, self.device = array, dtype, TorchDevice("cuda", device)
        self.shape = array.shape
        self._stride = tuple(s // array.itemsize for s in array.strides)
        self._data, self.negated = array.ctypes.data, False

    def data_ptr(self):
        return self._data

    def stride(self):
        return self._stride

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def get_device(self):
        return self.device.index

    def is_neg(self):
        return self.negated

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.array.nbytes)


Tensor.__module__ = "torch"


# --- DLPack's exchange table, as torch's Tensor has one --------------------------------------------

_CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32)}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
def _read(tensor, out):
    if isinstance(tensor, Pointerless):
        return -1
    shape, strides = (np.array(x, np.int64) for x in (tensor.shape, tensor.stride()))
    tensor.keep = shape, strides
    code, bits = _CODES[tensor.dtype.name]
    out[0] = _DLTensor(tensor.data_ptr(), 2 if tensor.device.type == "cuda" else 1, tensor.device.index, len(shape),
                       code, bits, 1, shape.ctypes.data, strides.ctypes.data, 0)  # fmt: skip
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _current_stream(kind, ordinal, out):
    torch = sys.modules.get("torch")
    out[0] = 0 if torch is None else torch._C._cuda_getCurrentRawStream(ordinal)
    return 0


class Pointerless(Tensor):
    """A tensor that the table cannot read."""


Pointerless.__module__, Pointerless.__qualname__ = "torch", "Tensor"
_TABLE = (ctypes.c_void_p * 7)(1, None, None, None, None, ctypes.cast(_read, ctypes.c_void_p),
                               ctypes.cast(_current_stream, ctypes.c_void_p))  # fmt: skip
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"
Tensor.__dlpack_c_exchange_api__ = _capsule(ctypes.addressof(_TABLE), _NAME, None)
DTYPES = {name: TorchDtype(name) for name in ("float32", "bfloat16", "int32", "float16")}


def install_torch(current):
    """Put a torch into sys.modules whose current stream of a device is ``current[device]``."""
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: current[ordinal])
    sys.modules["torch"] = torch


def tensor(shape, dtype="float32", device=0):
    width = {"float32": np.float32, "int32": np.int32}.get(dtype, np.uint16)
    return Tensor(aligned(shape, width), DTYPES[dtype], device)


# --- arguments -----------------------------------------------------------------------------------

SPEC = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
X = A.Arg("x", "buffer", dtypes.f32, 2, written=True)
N = A.Arg("n", "scalar", dtypes.i32)


class Cache:
    """A cache as the loader sees one."""

    def __init__(self, spec=SPEC, device=("cuda", 0), base=4096, readonly=False):
        self.spec, self.device, self.readonly = spec, device, readonly
        inner = getattr(spec, "cache", spec)
        of = layout.collection_fields if isinstance(spec, layout.CollectionSpec) else layout.cache_fields
        self._fields = (base, *range(100, 99 + len(of(inner))))

    def fields(self):
        return self._fields


def good():
    return CudaArray(aligned((4, 8), np.float32))


def strided():
    return CudaArray(aligned((4, 16), np.float32)[:, ::2])
