# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views of buffers: NumPy itself, and stand-ins with the attributes and protocols of the GPU libraries."""

import ctypes
import gc
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

from kvarn.dialect import dtypes
from kvarn.runtime import buffers
from kvarn.runtime.buffers import host_array, view


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda t: t.name)
def test_numpy_of_every_dtype(dtype):
    array = np.zeros((3, 4), dtype.numpy)
    v = view(array)
    assert v == v
    assert (v.data, v.shape, v.strides, v.dtype, v.device) == (array.ctypes.data, (3, 4), (4, 1), dtype, ("cpu", 0))
    assert v.owner is array
    assert (v.rank, v.size, v.contiguous, v.on_host, v.readonly) == (2, 12, True, True, False)
    again = host_array(v)
    assert again.dtype == array.dtype
    array[1, 2] = 1
    assert again[1, 2] == 1


def test_numpy_strides_are_in_elements():
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    part = array[::-1, 1:, ::2]
    v = view(part)
    assert (v.shape, v.strides, v.data) == ((2, 2, 2), (-12, 4, 2), part.ctypes.data)
    assert not v.contiguous
    assert np.array_equal(host_array(v), part)
    assert view(array[:1, :, :]).contiguous
    assert view(np.zeros((0, 3))).contiguous
    assert host_array(view(np.zeros((0, 3), ml_dtypes.bfloat16))).shape == (0, 3)
    record = np.zeros(4, [("a", "u1"), ("b", "<f4")])
    with pytest.raises(ValueError, match="multiples of the element's 4 bytes"):
        view(record["b"], name="x")


def test_readonly_is_kept():
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    v = view(array)
    assert v.readonly
    assert not host_array(v).flags.writeable
    assert "readonly" in repr(v)


def test_host_array_keeps_the_owner_alive():
    class Array(np.ndarray):
        pass

    owner = np.ones(1000, np.float32).view(Array)
    gone = weakref.ref(owner)
    array = host_array(view(owner))[3:5]
    del owner
    gc.collect()
    assert gone() is not None
    assert array.sum() == 2
    del array
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("obj", [3, [1, 2], "text", None, np.float32(2), memoryview(b"abc")])
def test_other_objects_are_refused(obj):
    with pytest.raises(
        TypeError, match="rows: must be a NumPy array, a torch or CuPy tensor, or an object with __dlpack__"
    ):
        view(obj, name="rows")


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros(2, np.complex64), "dtype must be one of"),
        (np.zeros(2, "U3"), "dtype must be one of"),
        (np.zeros(2, object), "dtype must be one of"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.ma.masked_array(np.zeros(2), [True, False]), "mask would be lost"),
    ],
)
def test_numpy_arrays_that_are_refused(array, match):
    with pytest.raises(TypeError, match=match):
        view(array)


# --- torch and CuPy, by their attributes -------------------------------------------------------------


class Device:
    def __init__(self, kind, index=None):
        self.type, self.index = kind, index

    def __hash__(self):
        return hash((self.type, self.index))

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)


class Dtype:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"torch.{self.name}"


class FakeTensor:
    """Reads like a torch tensor. Its class says that it is torch.Tensor."""

    def __init__(self, device, dtype, shape=(2, 3), stride=(3, 1), pointer=0x7F0000000100, negated=False):
        self.device, self.dtype, self.shape, self._stride = device, dtype, shape, stride
        self._pointer, self._negated = pointer, negated

    def data_ptr(self):
        if self._pointer is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self._pointer

    def stride(self):
        return self._stride

    def is_neg(self):
        return self._negated


Tensor = type("Tensor", (FakeTensor,), {"__module__": "torch"})
Parameter = type("Parameter", (Tensor,), {"__module__": "torch.nn.parameter"})
Mine = type("Mine", (Parameter,), {"__module__": "somewhere.else"})


@pytest.mark.parametrize("cls", [Tensor, Parameter, Mine])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("bfloat16", dtypes.bf16), ("float8_e4m3fn", dtypes.f8e4m3), ("float8_e5m2", dtypes.f8e5m2),
     ("float8_e8m0fnu", dtypes.f8e8m0), ("float16", dtypes.f16), ("int32", dtypes.i32), ("uint8", dtypes.u8),
     ("bool", dtypes.bool_)],
)  # fmt: skip
def test_torch_tensors_on_a_gpu(cls, name, expected):
    tensor = cls(Device("cuda", 1), Dtype(name))
    v = view(tensor)
    assert tuple(v)[:6] == (0x7F0000000100, (2, 3), (3, 1), expected, ("cuda", 1), False)
    assert v.owner is tensor
    with pytest.raises(TypeError, match="k: must be in host memory, got a buffer on cuda:1"):
        host_array(v, name="k")


def test_torch_tensors_on_the_cpu():
    memory = np.arange(6, dtype=np.float32)
    v = view(Tensor(Device("cpu"), Dtype("float32"), (2, 2), (1, 3), memory.ctypes.data))
    assert v.device == ("cpu", 0)
    assert host_array(v).tolist() == [[0, 3], [1, 4]]


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        (Tensor(Device("meta"), Dtype("float32")), TypeError, "the CPU or a CUDA device"),
        (Tensor(Device("xpu", 0), Dtype("float32")), TypeError, "the CPU or a CUDA device"),
        (Tensor(Device("cuda", 0), Dtype("complex64")), TypeError, "dtype must be one of"),
        (Tensor(Device("cuda", 0), Dtype("float32"), pointer=None), TypeError, "plain strided storage"),
        (Tensor(Device("cpu"), Dtype("float32"), negated=True), ValueError, "lazily negated"),
    ],
)
def test_torch_tensors_that_are_refused(tensor, error, match):
    with pytest.raises(error, match=f"x: .*{match}"):
        view(tensor, name="x")


def test_cupy_arrays():
    cls = type("ndarray", (), {"__module__": "cupy"})
    array = cls()
    array.data, array.shape, array.strides = types.SimpleNamespace(ptr=4096), (4, 8), (32, 2)
    array.dtype, array.device = np.dtype(ml_dtypes.bfloat16), types.SimpleNamespace(id=2)
    v = view(array)
    assert tuple(v)[:6] == (4096, (4, 8), (16, 1), dtypes.bf16, ("cuda", 2), False)


# --- __cuda_array_interface__ --------------------------------------------------------------------------


class OnGpu:
    def __init__(self, *, ordinal=3, dtype=None, **described):
        self.__cuda_array_interface__ = {
            "shape": (4, 8),
            "typestr": "<f2",
            "data": (8192, False),
            "version": 3,
        } | described
        if ordinal is not None:
            self._ordinal = ordinal
        if dtype is not None:
            self.dtype = dtype

    def __dlpack_device__(self):
        return (2, self._ordinal)


def test_cuda_array_interface():
    assert tuple(view(OnGpu()))[:6] == (8192, (4, 8), (8, 1), dtypes.f16, ("cuda", 3), False)
    v = view(OnGpu(strides=(32, 4), data=(8192, True)))
    assert (v.strides, v.readonly) == ((16, 2), True)
    assert view(OnGpu(strides=None)).contiguous
    assert view(OnGpu(typestr="<V2", dtype=np.dtype(ml_dtypes.bfloat16))).dtype == dtypes.bf16
    assert view(OnGpu(typestr="|u1")).dtype == dtypes.u8
    assert view(OnGpu(data=(None, False), shape=(0,))).data == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"typestr": "<V2"}, TypeError, "dtype must be one of"),
        ({"typestr": ">f4"}, TypeError, "byte order"),
        ({"typestr": "<c8"}, TypeError, "dtype must be one of"),
        ({"mask": 1}, TypeError, "without a mask"),
        ({"strides": (17, 2)}, ValueError, "multiples of the element's 2 bytes"),
    ],
)
def test_cuda_array_interface_that_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        view(OnGpu(**options))


def test_device_of_a_bare_pointer_is_asked_of_the_driver(monkeypatch):
    class Bare:
        __cuda_array_interface__ = OnGpu().__cuda_array_interface__

    def driver(status):
        def ask(ordinal, attribute, pointer):
            assert (attribute, pointer.value) == (9, 8192)
            ctypes.cast(ordinal, ctypes.POINTER(ctypes.c_int))[0] = 5
            return status

        return lambda name: types.SimpleNamespace(cuPointerGetAttribute=ask)

    monkeypatch.setattr(buffers.ctypes, "CDLL", driver(0))
    assert view(Bare()).device == ("cuda", 5)
    monkeypatch.setattr(buffers.ctypes, "CDLL", driver(1))
    with pytest.raises(ValueError, match="the driver does not know it"):
        view(Bare())

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(buffers.ctypes, "CDLL", missing)
    with pytest.raises(ValueError, match="its device is unknown"):
        view(Bare())


# --- DLPack --------------------------------------------------------------------------------------------


class Exporter:
    """Hands out NumPy's capsules."""

    def __init__(self, array, versioned=True, refuse=None):
        self.array, self.versioned, self.refuse, self.asked = array, versioned, refuse, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options)
        if self.refuse:
            raise self.refuse
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_on_the_host(versioned):
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2]
    exporter = Exporter(array, versioned)
    v = view(exporter)
    assert tuple(v)[:6] == (array.ctypes.data, (3, 3), (6, 2), dtypes.i32, ("cpu", 0), False)
    assert v.owner is exporter
    assert np.array_equal(host_array(v), array)
    assert "stream" not in exporter.asked[-1]
    assert ("max_version" in exporter.asked[-1]) == versioned


def test_dlpack_export_lives_as_long_as_the_view():
    array = np.ones(10, np.float32)
    released = weakref.ref(array)
    v = view(Exporter(array))
    keep = host_array(v)
    del array
    v.owner.array = None
    del v
    gc.collect()
    assert released() is not None, "the capsule holds the exported memory"
    assert keep.sum() == 10
    del keep
    gc.collect()
    assert released() is None


class Made:
    """A capsule made by hand, as a device's would be."""

    def __init__(
        self, code, bits, device=(2, 1), *, lanes=1, flags=0, strides=True, version=(1, 0), name=b"dltensor_versioned"
    ):
        self.shape = (ctypes.c_int64 * 2)(3, 4)
        self.strides = (ctypes.c_int64 * 2)(8, 1)
        tensor = buffers._DLTensor(
            0x1000, *device, 2, code, bits, lanes, self.shape, self.strides if strides else None, 64
        )
        self.managed = buffers._DLManagedTensorVersioned(*version, None, None, flags, tensor)
        self.device, self.name, self.asked = device, name, None

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.asked = options
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        where = self.managed if self.name == b"dltensor_versioned" else self.managed.tensor
        return new(ctypes.addressof(where), self.name, None)


@pytest.mark.parametrize(
    ("code", "bits", "expected"),
    [(4, 16, dtypes.bf16), (10, 8, dtypes.f8e4m3), (12, 8, dtypes.f8e5m2), (14, 8, dtypes.f8e8m0), (2, 16, dtypes.f16),
     (0, 8, dtypes.i8), (1, 32, dtypes.u32), (6, 8, dtypes.bool_)],
)  # fmt: skip
def test_dlpack_of_a_device(code, bits, expected):
    made = Made(code, bits)
    v = view(made)
    assert tuple(v)[:6] == (0x1040, (3, 4), (8, 1), expected, ("cuda", 1), False)
    assert made.asked["stream"] == -1
    assert view(Made(code, bits, strides=False)).strides == (4, 1)
    assert view(Made(code, bits, (13, 0))).device == ("cuda", 0)
    assert view(Made(code, bits, (3, 0))).device == ("cpu", 0)
    assert view(Made(code, bits, name=b"dltensor")).dtype == expected


@pytest.mark.parametrize(
    ("made", "error", "match"),
    [
        (Made(5, 64), TypeError, "got DLPack code 5 of 64 bits"),
        (Made(2, 32, lanes=4), TypeError, "4 lanes"),
        (Made(2, 32, (10, 0)), TypeError, "DLPack device type 10"),
        (Made(2, 32, flags=2), ValueError, "exports only a copy"),
        (Made(2, 32, version=(2, 0)), TypeError, r"must be 1, got 2\.0"),
        (Made(2, 32, name=b"used_dltensor"), TypeError, "unused DLPack capsule"),
    ],
)
def test_dlpack_that_is_refused(made, error, match):
    with pytest.raises(error, match=match):
        view(made)
