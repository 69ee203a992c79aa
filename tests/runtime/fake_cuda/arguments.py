# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a launch packs, and what it refuses before anything runs.

Not collected by itself: tests/runtime/test_launch.py runs it on the fake driver.
"""

import struct

import numpy as np
import pytest
from fakes import SPEC, Cache, CudaArray, N, X, aligned, count, good, kernel, last, launches, params, strided

from kvarn import artifact as A
from kvarn.dialect import dtypes, layout
from kvarn.runtime.launch import Launcher


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
    Launcher(artifact)(
        (5, 6, 7),
        (32, 2),
        cache,
        pool,
        operand,
        True,
        CudaArray(x),
        -3,
        2**32 - 1,
        -(2**40),
        1.5,
        np.float32(-2.71),
        3.0,
        1e300,
        np.float64(0.1),
        stream=0,
    )
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


# --- checks ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("table", "stride", "rows", "message"), [
    (4100, 24, 2, r"rows start at multiples of 16 bytes.* got address 0x1004 and rows 24 entries apart"),
    (4100, 24, 1, "got address 0x1004"), (4096, 25, 2, "pad the columns to a multiple of 4"),
    (4096, 26, 2, "rows 26 entries apart"), (4096, 25, 1, None), (4096, 24, 2, None), (4112, 4, 9, None),
])  # fmt: skip
def test_a_table_that_vector_loads_would_misread_is_refused(table, stride, rows, message):
    launcher = Launcher(kernel([A.Arg("c", "cache", spec=SPEC, alignment=16, table_alignment=16)]))
    names = [f.name for f in layout.cache_fields(SPEC)]
    cache = Cache()
    given = {"lookup": table, "lookup_stride": stride, "batch": rows}
    cache._fields = tuple(given.get(n, f) for n, f in zip(names, cache._fields, strict=True))
    if message is None:
        launcher(1, 32, cache, stream=0)
        return
    with pytest.raises(ValueError, match=message):
        launcher(1, 32, cache, stream=0)
    with pytest.raises(ValueError, match=message):
        launcher.prepare(1, 32, cache)
    assert not launches()


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
