# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loader on the fake driver. Not collected by itself: tests/unit/test_launch.py runs it in a process of its own."""

import ctypes
import dataclasses
import gc
import struct
import sys
import threading
import types

import numpy as np
import pytest
from fakes import LIBRARY, CudaArray, aligned, count, install_torch, kernel, last, launches, params, ptx, tensor

from kvarn import artifact as A
from kvarn.dialect import dtypes, layout
from kvarn.runtime import device, driver, streams, tensormap
from kvarn.runtime.launch import Launcher, load
from kvarn.runtime.program import Program

SPEC = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
X = A.Arg("x", "buffer", dtypes.f32, 2, written=True)
N = A.Arg("n", "scalar", dtypes.i32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    LIBRARY.fake_reset()
    monkeypatch.setattr(streams, "_torch_stream", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


class Cache:
    """A cache as the loader sees one."""

    def __init__(self, spec=SPEC, device=("cuda", 0), base=4096, readonly=False):
        self.spec, self.device, self.readonly = spec, device, readonly
        inner = getattr(spec, "cache", spec)
        of = layout.collection_fields if isinstance(spec, layout.CollectionSpec) else layout.cache_fields
        names = of(inner)
        self._fields = (base, *range(100, 99 + len(names)))

    def fields(self):
        return self._fields


# --- packing -------------------------------------------------------------------------------------


def test_every_kind_of_argument_is_packed_by_the_abi():
    args = [
        A.Arg("cache", "cache", spec=SPEC), A.Arg("pool", "collection", spec=SPEC), A.Arg("q", "operand", spec=SPEC),
        A.Arg("b", "scalar", dtypes.bool_), A.Arg("x", "buffer", dtypes.f32, 3), A.Arg("i", "scalar", dtypes.i8),
        A.Arg("u", "scalar", dtypes.u32), A.Arg("l", "scalar", dtypes.i64), A.Arg("h", "scalar", dtypes.f16),
        A.Arg("g", "scalar", dtypes.bf16), A.Arg("e", "scalar", dtypes.f8e4m3), A.Arg("d", "scalar", dtypes.f64),
        A.Arg("f", "scalar", dtypes.f32),
    ]  # fmt: skip
    artifact = kernel(args)
    x = aligned((4, 6, 8), np.float32)[:, 1:3]
    cache, pool = Cache(), Cache(layout.CollectionSpec(SPEC))
    operand = Cache(layout.OperandSpec(SPEC))
    Launcher(artifact)((5, 6, 7), (32, 2), cache, pool, operand, True, CudaArray(x), -3, 2**32 - 1, -(2**40), 1.5,
                       np.float32(-2.71), 3.0, 1e300, np.float64(0.1), stream=0)
    found = params(last(), artifact.entry())
    assert list(last().shape) == [5, 6, 7, 32, 2, 1, 0]
    assert last().kernel == b"k"
    assert last().stream == 0
    assert last().device == 0
    assert tuple(found["cache", f.name] for f in layout.cache_fields(SPEC)) == cache.fields()
    assert tuple(found["pool", f.name] for f in layout.collection_fields(SPEC)) == pool.fields()
    assert tuple(found["q", f.name] for f in layout.cache_fields(SPEC)) == operand.fields()
    assert [found["x", f.name] for f in layout.buffer_fields(3)] == [x.ctypes.data, 4, 2, 8, 48, 8]
    assert found["b", "value"] == 1
    assert found["i", "value"] == -3
    assert found["l", "value"] == -(2**40)
    assert np.uint32(found["u", "value"]) == 2**32 - 1 or int(found["u", "value"]) == -1
    assert found["h", "value"] == 1.5
    assert found["d", "value"] == 1e300
    assert found["f", "value"] == np.float32(0.1)
    assert found["g", "value"] == np.float32(-2.71).astype(dtypes.bf16.numpy).view(np.uint16)
    assert found["e", "value"] == np.float32(3.0).astype(dtypes.f8e4m3.numpy).view(np.uint8)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.38e38, -1e-40, float("inf"), float("nan")])
def test_bf16_scalars_round_to_nearest_even(value):
    artifact = kernel([A.Arg("a", "scalar", dtypes.bf16)])
    Launcher(artifact)(1, 32, value, stream=0)
    expected = np.float32(value).astype(dtypes.bf16.numpy).view(np.uint16)
    assert params(last(), artifact.entry())["a", "value"] == expected


def test_some_fields_in_another_order():
    args = [X, N]
    p = [A.Param(1, "value", "i32"), A.Param(0, "shape1", "i64"), A.Param(0, "data", "ptr")]
    artifact = kernel(args, params=p)
    x = aligned((3, 4), np.float32)
    Launcher(artifact)(1, 32, CudaArray(x), 9, stream=0)
    assert params(last(), artifact.entry()) == {("n", "value"): 9, ("x", "shape1"): 4, ("x", "data"): x.ctypes.data}


def test_launch_attributes_and_shared_memory():
    args = [N]
    a = kernel(args, "plain")
    Launcher(a)(2, 64, 1, stream=0)
    assert last().attributes == 0
    b = kernel(args, "clustered", "sm_90a", cluster=(4, 1, 1), shared_bytes=200000, attributes={"programmatic": True})
    Launcher(b)(8, 64, 1, stream=0)
    assert last().attributes == 2
    assert last().shape[6] == 200000
    assert count("shared0") == 200000
    ids = [struct.unpack("<i4x3I", bytes(x)[:20]) for x in last().attribute[:2]]
    assert ids[0] == (4, 4, 1, 1)
    assert ids[1][:2] == (6, 1)
    c = kernel(args, "cooperative", "sm_90a", cluster=(16, 1, 1), attributes={"cooperative": True})
    Launcher(c)(16, 64, 1, stream=0)
    assert count("non_portable0") == 1
    assert [struct.unpack("<i", bytes(x)[:4])[0] for x in last().attribute[:2]] == [4, 2]


def test_shared_memory_limit_only_rises():
    launcher = Launcher(kernel([N], "shared", shared_bytes=50000))
    call = launcher.load(0)
    call.shape(1, 32, 70000)
    assert count("shared0") == 70000
    launcher(1, 32, 1, stream=0)
    assert count("shared0") == 70000
    assert last().shape[6] == 50000


def test_grid_with_a_zero_launches_nothing():
    launcher = Launcher(kernel([N]))
    launcher((4, 0, 2), 32, 1)
    launcher.prepare(0, 32, 1)()
    assert not launches()


# --- checks --------------------------------------------------------------------------------------


def good():
    return CudaArray(aligned((4, 8), np.float32))


def strided():
    return CudaArray(aligned((4, 16), np.float32)[:, ::2])


@pytest.mark.parametrize(("args", "error", "message"), [
    (lambda: (good(),), TypeError, r"kernel 'k' takes 2 arguments \(x, n\), got 1"),
    (lambda: (good(), 1, 2), TypeError, "takes 2 arguments .*, got 3"),
    (lambda: (CudaArray(aligned((4, 8), np.float16)), 1), TypeError, "'x' of kernel 'k' must have dtype f32, got f16"),
    (lambda: (CudaArray(aligned((4, 8), np.int32)), 1), TypeError, "must have dtype f32, got i32"),
    (lambda: (CudaArray(aligned((4,), np.float32)), 1), ValueError, r"must have 2 dimensions, got 1 with shape \(4,\)"),
    (lambda: (strided(), 1), ValueError, r"contiguous in its last dimension, got strides \(16, 2\)"),
    (lambda: (CudaArray(aligned((4, 8), np.float32), readonly=True), 1), ValueError, "is written .* read-only"),
    (lambda: (CudaArray(aligned((4, 8), np.float32), offset=2), 1), ValueError, "multiple of 16 bytes, got address 0x"),
    (lambda: (CudaArray(aligned((4, 8), np.float32), offset=8), 1), ValueError, "multiple of 16 bytes"),
    (lambda: ([1, 2], 1), TypeError, "argument 'x' of kernel 'k': must be a NumPy array"),
    (lambda: (good(), 2**31), ValueError, r"'n' of kernel 'k' must fit i32 \(-2147483648 to 2147483647\), got 21"),
    (lambda: (good(), -(2**31) - 1), ValueError, "must fit i32"),
    (lambda: (good(), 1.5), TypeError, r"argument 'n' of kernel 'k' must be a number \(i32\), got float: 1.5"),
    (lambda: (good(), "1"), TypeError, "must be a number"),
    (lambda: (good(), None), TypeError, "must be a number"),
    (lambda: (good(), CudaArray(np.array(1))), TypeError, "reading it would wait for the device"),
    (lambda: (aligned((4, 8), np.float32), 1), ValueError, "compiled for sm_80, but its buffers are in host memory"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_a_launch(args, error, message):
    x = A.Arg("x", "buffer", dtypes.f32, 2, alignment=16, written=True)
    launcher = Launcher(kernel([x, N]))
    launcher(1, 32, good(), 1, stream=0)
    for _ in range(2):
        with pytest.raises(error, match=message):
            launcher(1, 32, *args(), stream=0)
        with pytest.raises(error, match=message):
            launcher.prepare(1, 32, *args())
    assert len(launches()) == 1


@pytest.mark.parametrize(("dtype", "value", "error"), [
    (dtypes.u8, -1, ValueError), (dtypes.u8, 256, ValueError), (dtypes.f16, 65520.0, ValueError),
    (dtypes.f32, 1e39, ValueError), (dtypes.f8e4m3, 449.0, ValueError), (dtypes.bool_, 2, TypeError),
    (dtypes.bool_, 1.0, TypeError),
    (dtypes.bool_, np.zeros(2), TypeError), (dtypes.f32, "1.0", TypeError), (dtypes.f32, [1], TypeError),
    (dtypes.f32, 1j, TypeError),
])  # fmt: skip
def test_scalars_out_of_range_are_refused(dtype, value, error):
    with pytest.raises(error, match=r"argument 'a' of kernel 'k' must"):
        Launcher(kernel([A.Arg("a", "scalar", dtype)]))(1, 32, value)


@pytest.mark.parametrize(("dtype", "value", "expected"), [
    (dtypes.bool_, np.True_, 1), (dtypes.bool_, False, 0), (dtypes.i32, np.int64(5), 5), (dtypes.i32, True, 1),
    (dtypes.f32, 3, 3.0), (dtypes.f32, float("inf"), np.inf), (dtypes.f16, np.float16(0.5), 0.5),
    (dtypes.u8, 255, None),
])  # fmt: skip
def test_scalars_of_other_types_are_taken(dtype, value, expected):
    artifact = kernel([A.Arg("a", "scalar", dtype)])
    Launcher(artifact)(1, 32, value)
    found = params(last(), artifact.entry())["a", "value"]
    assert found == expected if expected is not None else np.uint8(found) == 255 or found == -1


def test_integers_of_the_same_width_interchange():
    artifact = kernel([A.Arg("t", "buffer", dtypes.u32, 1)])
    Launcher(artifact)(1, 32, CudaArray(aligned((4,), np.int32)), stream=0)
    with pytest.raises(TypeError, match="must have dtype u32, got i64"):
        Launcher(artifact)(1, 32, CudaArray(aligned((4,), np.int64)), stream=0)
    with pytest.raises(TypeError, match="must have dtype u8, got i8"):
        Launcher(kernel([A.Arg("t", "buffer", dtypes.u8, 1)]))(1, 32, CudaArray(aligned((4,), np.int8)), stream=0)


@pytest.mark.parametrize(("given", "error", "message"), [
    (lambda: Cache(layout.spec_of("paged", "bf16", 8, 64, page_size=16)), TypeError,
     "is compiled for paged bf16 num_heads=8 head_size=128 page_size=16, got paged bf16 num_heads=8 head_size=64"),
    (lambda: Cache(layout.CollectionSpec(SPEC)), TypeError, r"'c' of kernel 'k' must be a cache .* got a collection"),
    (good, TypeError, "must be a cache .* got CudaArray"),
    (lambda: Cache(readonly=True), ValueError, "written by the kernel, but the cache's blocks are read-only"),
    (lambda: Cache(base=4098), ValueError, "multiple of 16 bytes, got address 0x1002"),
    (lambda: Cache(device=("cpu", 0)), ValueError, "in host memory"),
    (lambda: Cache(device="tpu:0"), TypeError, "must be on the CPU or a CUDA device"),
])  # fmt: skip
def test_wrong_caches_are_refused(given, error, message):
    launcher = Launcher(kernel([A.Arg("c", "cache", spec=SPEC, alignment=16, written=True)]))
    launcher(1, 32, Cache(), stream=0)
    launcher(1, 32, Cache(layout.spec_of("paged", "bf16", 8, 128, page_size=16)), stream=0)  # equal, another object
    with pytest.raises(error, match=message):
        launcher(1, 32, given(), stream=0)


def test_a_field_that_does_not_fit_is_named():
    cache = Cache()
    cache._fields = (4096, 100, 2**31, *cache._fields[3:])
    with pytest.raises(ValueError, match="num_blocks of argument 'c' of kernel 'k' must fit its parameter type i32"):
        Launcher(kernel([A.Arg("c", "cache", spec=SPEC)]))(1, 32, cache, stream=0)


def test_arguments_on_two_devices_are_refused():
    launcher = Launcher(kernel([X, A.Arg("c", "cache", spec=SPEC)]))
    with pytest.raises(ValueError, match="must be on one device, got x on cuda:1, c on cuda:0"):
        launcher(1, 32, CudaArray(aligned((4, 8), np.float32), device=1), Cache())


@pytest.mark.parametrize(("grid", "block", "message"), [
    (-1, 32, "grid of kernel 'k' must not be negative"), ((1, 65536), 32, "at most 65535 in y on Device"),
    (2**31, 32, "at most 2147483647 in x"), (1, 2048, "at most 512 threads, got 2048x1x1 = 2048"),
    (1, (0, 1), "must be positive"), ((1, 2, 3, 4), 32, "1 to 3 extents"), (1, None, "runs with any block"),
    (3, 32, r"multiple of its cluster \(2, 1, 1\), got \(3, 1, 1\)"),
])  # fmt: skip
def test_wrong_grids_and_blocks_are_refused(grid, block, message):
    launcher = Launcher(kernel([N], target="sm_90", cluster=(2, 1, 1), max_threads=512))
    with pytest.raises(ValueError, match=message):
        launcher(grid, block, 1)
    with pytest.raises(TypeError, match="must be an int or a tuple"):
        launcher(1.5, 32, 1)


def test_compiled_block_is_the_default_and_the_only_one():
    launcher = Launcher(kernel([N], block=(64, 2, 1)))
    launcher(1, None, 1)
    launcher([1], [64, 2], 1)
    assert list(last().shape)[3:6] == [64, 2, 1]
    with pytest.raises(ValueError, match=r"compiled for a block of \(64, 2, 1\), got \(128, 1, 1\)"):
        launcher(1, 128, 1)


def test_too_much_shared_memory_names_the_numbers():
    with pytest.raises(ValueError, match=r"needs 230000 bytes of dynamic and 4096 of static .* has 232448"):
        Launcher(kernel([N], shared_bytes=230000))(1, 32, 1)


# --- code and device -----------------------------------------------------------------------------


def test_code_for_another_chip_names_both():
    with pytest.raises(ValueError, match=r"for sm_100a and cannot run on device 0, Fake A \(sm_90\): .*'sm_90a'"):
        Launcher(kernel([N], target="sm_100a"))(1, 32, 1)
    x = CudaArray(aligned((4, 8), np.float32), device=1)
    with pytest.raises(ValueError, match=r"for sm_90a and cannot run on device 1, Fake B \(sm_80\): .*'sm_80'"):
        Launcher(kernel([X], target="sm_90a"))(1, 32, x)


def test_newer_ptx_than_the_driver_names_both():
    with pytest.raises(ValueError, match=r"9.9, but the driver of device 0, Fake A \(CUDA 13.0\) reads PTX up to 9.0"):
        Launcher(kernel([N], isa="9.9"))(1, 32, 1)


def test_host_code_on_a_device_is_refused():
    artifact = A.Artifact("k", "host", "", {"llvm": ""}, [A.Entry("k", [X], A.flatten([X]))])
    with pytest.raises(ValueError, match="compiled for host and cannot run on device 0, Fake A"):
        Launcher(artifact)(1, 32, good())


def test_driver_log_is_in_the_error_for_bad_ptx():
    a = kernel([N])
    a = a.replace(code={"ptx": a.code["ptx"] + "syntax error"})
    with pytest.raises(driver.DriverError, match=r"(?s)INVALID_PTX \(218\).*compile again.*line 7: a syntax error"):
        Launcher(a)(1, 32, 1)


def test_cubin_of_the_closest_chip_is_taken():
    a = kernel([N], "twice", "sm_90a")
    cubin = b"\x7fELF" + ptx([A.Entry("twice", [N], A.flatten([N]))]).encode() + b"\0"
    wrong = b"\x7fELF.entry other() \0"
    a = a.replace(code={"ptx": "not used", "cubin": cubin, "cubin.sm_80": wrong, "cubin.sm_100a": wrong})
    Launcher(a)(1, 32, 1)
    assert last().kernel == b"twice"


def test_code_that_does_not_belong_to_the_abi_is_refused():
    a = kernel([N])
    other = kernel([X, N])
    with pytest.raises(ValueError, match=r"of \[4\] bytes, but the ABI of its artifact has \[8, 8, 8, 8, 4\]"):
        Launcher(other.replace(code=a.code))(1, 32, good(), 1)
    renamed = kernel([N], "other")
    with pytest.raises(ValueError, match="has no kernel 'other'"):
        Launcher(renamed.replace(code=a.code))(1, 32, 1)


def test_code_is_loaded_once_a_process():
    before = count("libraries")
    for _ in range(3):
        launcher = Launcher(kernel([N], "loaded_once"))
        launcher(1, 32, 1)
        launcher.prepare(1, 32, 1)()
    assert count("libraries") == before + 1
    a = kernel([X], "loaded_once_for_both")
    Launcher(a)(1, 32, good())
    Launcher(a)(1, 32, CudaArray(aligned((4, 8), np.float32), device=1))
    assert count("libraries") == before + 2
    assert [x.device for x in launches()[-2:]] == [0, 1]


def test_bundle_runs_the_variant_of_the_device(tmp_path):
    path = A.save_bundle(tmp_path / "b", [kernel([N], target=t) for t in ("sm_80", "sm_90a", "sm_100a")])
    launcher = load(path)
    assert launcher.artifact.target == "sm_90a"
    launcher(1, 32, 1)
    assert load(path, "sm_80").artifact.target == "sm_80"
    with pytest.raises(ValueError, match="no variant for target 'sm_70'"):
        load(path, "sm_70")
    path = A.save_bundle(tmp_path / "c", [kernel([N], target=t) for t in ("sm_100a", "sm_120a")])
    with pytest.raises(ValueError, match="no variant of 'k' runs on sm_90: the bundle has sm_100a, sm_120a"):
        load(path)


def test_failed_launch_says_what_was_launched():
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare((2, 3), 64, 1)
    for launch in (prepared, lambda: launcher((2, 3), 64, 1)):
        LIBRARY.fake_fail(700)
        with pytest.raises(driver.DriverError, match=r"(?s)'k' on Device.*ILLEGAL_ADDRESS \(700\).*KVARN_CHECK=1"
                                                     r".*grid \(2, 3, 1\), block \(64, 1, 1\), 0 \+ 4096 bytes"):
            launch()


# --- streams, contexts, threads ------------------------------------------------------------------


def test_streams_of_every_kind():
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare(1, 32, 1)
    handle = LIBRARY.fake_stream(0)
    protocol = types.SimpleNamespace(__cuda_stream__=lambda: (0, handle))
    old_protocol = types.SimpleNamespace(__cuda_stream__=(0, handle))
    torch, cupy = types.SimpleNamespace(cuda_stream=handle), types.SimpleNamespace(ptr=handle)
    for stream in (handle, protocol, old_protocol, torch, cupy):
        for launch in (lambda s=stream: launcher(1, 32, 1, stream=s), lambda s=stream: prepared(s)):
            launch()
            assert last().stream == handle
    for stream in ("0", 1.0, True, object()):
        with pytest.raises(TypeError, match="stream must be None, an int"):
            prepared(stream)
    with pytest.raises(TypeError, match="must have version 0, got 1"):
        prepared(types.SimpleNamespace(__cuda_stream__=lambda: (1, handle)))


def test_default_stream_is_the_frameworks_current_one(monkeypatch):
    launcher = Launcher(kernel([X]))
    first, second = LIBRARY.fake_stream(0), LIBRARY.fake_stream(0)
    x = tensor((4, 8))
    prepared = launcher.prepare(1, 32, x)
    prepared()
    assert last().stream == 0
    current = {0: first}
    install_torch(current)
    prepared()
    launcher(1, 32, x)
    assert [x.stream for x in launches()[-2:]] == [first, first]
    current[0] = second
    launcher(1, 32, x)
    assert last().stream == second

    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (CudaArray,), {})
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=first))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher(1, 32, x)
    assert last().stream == second, "torch's for torch's tensors"
    launcher(1, 32, cupy.ndarray(aligned((4, 8), np.float32)))
    assert last().stream == first, "CuPy's for CuPy's arrays"


def test_torch_before_it_starts_cuda_has_stream_zero():
    install_torch({})
    sys.modules["torch"].cuda.is_initialized = lambda: False
    Launcher(kernel([X]))(1, 32, tensor((4, 8)))
    assert last().stream == 0


def test_stream_of_another_device_is_refused():
    launcher = Launcher(kernel([N]))
    stream = LIBRARY.fake_stream(1)
    for launch in (lambda: launcher(1, 32, 1, stream=stream), lambda: launcher.prepare(1, 32, 1)(stream)):
        with pytest.raises(ValueError, match=r"must be of Device\(0, 'Fake A', sm_90\), where .*, got one of device 1"):
            launch()
    assert not launches()


def test_default_stream_runs_on_the_arguments_device_and_puts_the_context_back():
    launcher = Launcher(kernel([X]))
    on_one = CudaArray(aligned((4, 8), np.float32), device=1)
    other = device.device(0).primary
    driver.call("cuCtxSetCurrent", driver.require().CUcontext(other))
    launcher(1, 32, on_one)
    launcher.prepare(1, 32, on_one)()
    assert [x.device for x in launches()] == [1, 1]
    assert driver.current_context() == other


def test_a_context_of_the_same_device_that_is_not_primary_is_used():
    mine = LIBRARY.fake_context(0)
    driver.call("cuCtxSetCurrent", driver.require().CUcontext(mine))
    Launcher(kernel([N]))(1, 32, 1)
    assert driver.current_context() == mine
    assert last().device == 0


def test_a_thread_without_a_context_gets_the_primary_one():
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare(1, 32, 1)
    LIBRARY.fake_needs_context(1)
    stream = LIBRARY.fake_stream(0)
    failed = []

    def work():
        try:
            for handle in (stream, 0):
                prepared(handle)
                launcher(1, 32, 1, stream=handle)
        except Exception as e:
            failed.append(e)

    t = threading.Thread(target=work)
    t.start()
    t.join()
    assert not failed
    assert len(launches()) == 4


def test_threads_do_not_mix_their_parameters():
    a = kernel([A.Arg("i", "scalar", dtypes.i32), A.Arg("twice", "scalar", dtypes.i64)])
    launcher = Launcher(a)
    handles = [LIBRARY.fake_stream(0) for _ in range(4)]
    prepared = launcher.prepare(1, 32, 1000, 2000)

    def work(t):
        for i in range(t * 100, t * 100 + 25):
            launcher(1, 32, i, 2 * i, stream=handles[t])
            prepared(handles[t])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(launches()) == 200
    seen = []
    for launch in launches():
        found = params(launch, a.entry())
        i = int(found["i", "value"])
        assert found["twice", "value"] == 2 * i
        if i != 1000:
            assert launch.stream == handles[i // 100]
            seen.append(i)
    assert len(set(seen)) == 100


# --- torch tensors -------------------------------------------------------------------------------


def test_torch_tensors_are_read_and_checked():
    launcher = Launcher(kernel([X]))
    x = tensor((4, 8))
    for shape in ((4, 8), (2, 16), (4, 8)):
        t = tensor(shape)
        launcher(1, 32, t)
        assert [int(v) for v in params(last(), launcher.entry).values()] == [t.data_ptr(), *shape, shape[1]]
    for bad, error, message in [
        (tensor((4, 8), "bfloat16"), TypeError, "must have dtype f32, got bf16"),
        (tensor((4,)), ValueError, "must have 2 dimensions"),
    ]:
        with pytest.raises(error, match=message):
            launcher(1, 32, bad)
    x.negated = True
    with pytest.raises(ValueError, match="negated"):
        launcher(1, 32, x)


def test_torch_tensor_moved_to_another_device_is_seen():
    launcher = Launcher(kernel([X]))
    for where in (0, 1, 0):
        launcher(1, 32, tensor((4, 8), device=where))
        assert last().device == where


# --- programs ------------------------------------------------------------------------------------


def two_steps(zeroed=False, alignment=0):
    fill_args = [A.Arg("out", "buffer", dtypes.i32, 1, written=True), A.Arg("v", "scalar", dtypes.i32)]
    fill = A.Entry("fill", fill_args, A.flatten(fill_args), (64, 1, 1))
    add_args = [A.Arg("x", "buffer", dtypes.f32, 2, alignment=alignment, written=True),
                A.Arg("s", "buffer", dtypes.i32, 1), A.Arg("a", "scalar", dtypes.bf16)]
    add = A.Entry("add", add_args, A.flatten(add_args), attributes={"programmatic": False})
    args = [A.Arg("x", "buffer", dtypes.f32, 2), A.Arg("n", "scalar", dtypes.i32), A.Arg("a", "scalar", dtypes.bf16)]
    rows, n = ("arg", 0, "shape0"), ("arg", 1, "value")
    steps = [
        A.Step("fill", [("ceildiv", ("mul", rows, n), 64), 1, 1], [64, 1, 1], 0,
               [("workspace", "counts"), ("sub", n, 1)]),
        A.Step("add", [rows, ("min", n, ("device", "multiprocessors")), 1], [32, 1, 1], ("mul", n, 1024),
               [("arg", 0), ("workspace", "counts"), ("arg", 2)], {"programmatic": True}),
    ]  # fmt: skip
    return A.Artifact("two", "sm_80", "8.0", {"ptx": ptx([fill, add])}, [fill, add], args, steps,
                      [A.Workspace("counts", ("mul", ("mul", rows, n), 4), zeroed)])


def test_program_runs_its_steps_in_order():
    artifact = two_steps()
    program = Program(artifact)
    x = tensor((10, 8))
    program(x, 50, 0.5)
    first, second = launches()
    assert first.kernel == b"fill"
    assert list(first.shape) == [8, 1, 1, 64, 1, 1, 0]
    assert first.attributes == 0
    assert second.kernel == b"add"
    assert list(second.shape) == [10, 50, 1, 32, 1, 1, 51200]
    assert second.attributes == 1
    fill, add = (params(x, e) for x, e in zip((first, second), artifact.entries, strict=True))
    assert fill["v", "value"] == 49
    assert fill["out", "shape0"] == 500
    assert add["s", "data"] == fill["out", "data"]
    assert add["s", "shape0"] == 500
    assert add["x", "data"] == x.data_ptr()
    assert add["a", "value"] == 0x3F00
    program.prepare(x, 50, 0.5)()
    again = launches()[2:]
    assert [bytes(a.params) for a in again] == [bytes(first.params), bytes(second.params)]


def test_scratch_memory_grows_and_is_kept_a_stream():
    gc.collect()
    program = Program(two_steps())
    before, freed = count("allocated"), count("freed")
    x = tensor((10, 8))
    stream = LIBRARY.fake_stream(0)

    def scratch():
        return int(params(last(), program.artifact.entries[1])["s", "data"])

    program(x, 50, 0.5)
    at = scratch()
    for n in (50, 20, 50, 1):
        program(x, n, 0.5)
        assert scratch() == at
    assert count("allocated") == before + 1
    prepared = program.prepare(x, 40, 0.5)
    prepared()
    program(x, 60, 0.5)
    assert scratch() != at
    assert count("allocated") == before + 2
    assert count("freed") == freed
    program(x, 70, 0.5)
    assert count("allocated") == before + 2, "growing leaves room"
    prepared()
    assert scratch() == at, "what was prepared keeps its memory"
    program(x, 50, 0.5, stream=stream)
    assert scratch() != at, "another stream has its own"
    assert count("allocated") == before + 3


def test_scratch_memory_is_freed_with_the_program():
    gc.collect()
    before = count("freed")
    program = Program(two_steps())
    program(tensor((10, 8)), 50, 0.5)
    del program
    gc.collect()
    assert count("freed") == before + 1


def test_scratch_memory_grows_inside_a_capture_and_is_zeroed():
    program = Program(two_steps(zeroed=True))
    LIBRARY.fake_capturing(1)
    program(tensor((10, 8)), 50, 0.5)
    at = int(params(last(), program.artifact.entries[1])["s", "data"])
    assert ctypes.string_at(at, 2000) == bytes(2000)


def test_program_checks_as_strictly_as_its_kernels():
    program = Program(two_steps(alignment=128))
    x = tensor((10, 8))
    x._data += 16
    with pytest.raises(ValueError, match="argument 'x' of kernel 'two' must start at a multiple of 128 bytes"):
        program(x, 50, 0.5)
    with pytest.raises(ValueError, match="is written"):
        program(CudaArray(aligned((4, 8), np.float32), readonly=True), 50, 0.5)


def test_program_with_nothing_to_do_launches_nothing_and_bad_grids_launch_nothing_at_all():
    program = Program(two_steps())
    program(tensor((0, 8)), 50, 0.5)
    assert not launches()
    with pytest.raises(ValueError, match="needs 1024000 bytes"):
        program(tensor((10, 8)), 1000, 0.5)
    assert not launches(), "the first step did not run either"


def test_program_refuses_steps_that_do_not_fit():
    a = two_steps()
    for changes, message in [
        ({"args": (("arg", 0), ("sub", 1, 1))}, "argument 'out' of kernel 'fill' is not of the kind"),
        ({"args": (("workspace", "none"), 1)}, "has no workspace 'none': it has counts"),
        ({"args": (1, 1)}, "is a buffer and must be given whole, got the expression 1"),
        ({"args": (("workspace", "counts"), ("workspace", "counts"))}, "takes a workspace and must be a buffer"),
        ({"args": (("arg", 7), 1)}, "argument index must be from 0 to 2, got 7"),
        ({"grid": (1, 1)}, "must have three expressions"),
    ]:
        steps = (dataclasses.replace(a.steps[0], **changes), a.steps[1])
        with pytest.raises(ValueError, match=message):
            Program(a.replace(steps=steps))


def test_division_by_zero_names_the_arguments():
    a = two_steps()
    steps = (dataclasses.replace(a.steps[0], grid=(("floordiv", 1, ("arg", 1, "value")), 1, 1)), a.steps[1])
    with pytest.raises(ValueError, match=r"'two' divides by zero for these arguments: x.shape0=10, .*n.value=0"):
        Program(a.replace(steps=steps))(tensor((10, 8)), 0, 0.5)


def test_threads_do_not_mix_the_steps_of_a_program():
    program = Program(two_steps())
    x = tensor((1, 8))

    def work(t):
        for i in range(20):
            program(x, 1 + t * 20 + i, 0.5, stream=0)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = launches()
    assert len(found) == 120
    for fill, add in zip(found[::2], found[1::2], strict=True):
        assert (fill.kernel, add.kernel) == (b"fill", b"add")
        v = params(fill, program.artifact.entries[0])["v", "value"]
        assert params(add, program.artifact.entries[1])["s", "shape0"] == v + 1


def test_kernel_and_program_are_not_confused():
    with pytest.raises(ValueError, match="use Program"):
        Launcher(two_steps())
    with pytest.raises(ValueError, match="use Launcher"):
        Program(kernel([N]))


# --- tensor maps ---------------------------------------------------------------------------------


def test_tensor_map_is_encoded_fast_to_slow_and_passed_by_value():
    pool = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    values = {"base": 1 << 20, "stride0": 16 * 8 * 128 * 6, "num_blocks": 10, "capacity": 16}
    m = tensormap.describe_page_tile(pool, tuple(values.get(f.name, 0) for f in layout.cache_fields(pool)), 16)
    encoded = tensormap.encode(m, 0)
    numbers = np.frombuffer(encoded.encoded, np.uint64)
    assert numbers[0] == 1 << 20
    assert list(numbers[2:6]) == [128, 8, 16, 10]
    assert list(numbers[7:10]) == [256, 2048, 16 * 2048 * 6]
    assert list(np.frombuffer(encoded.encoded, np.uint32)[22:26]) == [64, 1, 16, 1]
    kind = driver.require().CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert int(numbers[1]) == int(kind) | 4 << 8 | 3 << 24, "type, rank, swizzle 128B"

    artifact = kernel([N, A.Arg("map", "tensormap"), A.Arg("f", "scalar", dtypes.f32)], target="sm_90a")
    for launch in (Launcher(artifact), lambda *args: Launcher(artifact).prepare(*args)()):
        launch(1, 32, 7, encoded, 2.0)
        found = params(last(), artifact.entry())
        assert found == {("n", "value"): 7, ("map", "value"): encoded.encoded, ("f", "value"): 2.0}
    with pytest.raises(TypeError, match="must be an encoded TMA descriptor"):
        Launcher(artifact)(1, 32, 7, m, 2.0)
    with pytest.raises(ValueError, match=r"needs sm_90 or later, got Device\(1, 'Fake B', sm_80\)"):
        tensormap.encode(m, 1)
