# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values, vectors, casts and memory of the DSL, computed by the host target and by NumPy."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv
from kvarn.errors import KernelError

RNG = np.random.default_rng(7)


def launch(kernel, *arrays, grid=1, block=1):
    kernel[grid, block](*arrays)
    return arrays[-1]


# --- arithmetic ----------------------------------------------------------------------------------------

INTEGERS = {
    "add": (lambda a, b: a + b, np.add),
    "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply),
    "floordiv": (lambda a, b: a // b, np.floor_divide),
    "mod": (lambda a, b: a % b, np.remainder),
    "and": (lambda a, b: a & b, np.bitwise_and),
    "or": (lambda a, b: a | b, np.bitwise_or),
    "xor": (lambda a, b: a ^ b, np.bitwise_xor),
    "max": (lambda a, b: max(a, b), np.maximum),
    "min": (lambda a, b: min(a, b), np.minimum),
    "less": (lambda a, b: kv.where(a < b, a, b + b), lambda a, b: np.where(a < b, a, b + b)),
    "shift": (lambda a, b: (a >> (b & 7)) ^ (a << 1), lambda a, b: (a >> (b & 7)) ^ (a << 1)),
}


@pytest.mark.parametrize("dtype", [kv.i32, kv.u32, kv.i64, kv.u64], ids=repr)
def test_integer_operators_are_those_of_numpy(dtype):
    functions = tuple(ours for ours, _ in INTEGERS.values())

    @kv.kernel
    def k(x: kv.Buffer[dtype, 1], y: kv.Buffer[dtype, 1], out: kv.Buffer[dtype, 2]):
        i = kv.block_id.x
        for j, f in enumerate(functions):
            out[j, i] = f(x[i], y[i])

    info = np.iinfo(dtype.numpy)
    x = RNG.integers(info.min, info.max, 64, dtype=dtype.numpy, endpoint=True)
    y = RNG.integers(max(info.min, -50), 50, 64, dtype=dtype.numpy)
    y[y == 0] = 3
    x[:8], y[:4] = np.arange(8), np.arange(1, 5)
    out = launch(k, x, y, np.zeros((len(functions), 64), dtype.numpy), grid=64)
    with np.errstate(over="ignore"):
        for row, (name, (_, theirs)) in zip(out, INTEGERS.items(), strict=True):
            np.testing.assert_array_equal(row, theirs(x, y), err_msg=name)


@pytest.mark.parametrize("dtype", [kv.f32, kv.f64, kv.f16, kv.bf16], ids=repr)
def test_float_operators_compute_in_their_own_type(dtype):
    @kv.kernel
    def k(x: kv.Buffer[dtype, 1], y: kv.Buffer[dtype, 1], out: kv.Buffer[dtype, 2]):
        i = kv.block_id.x
        a, b = x[i], y[i]
        out[i, 0] = a + b
        out[i, 1] = a / b
        out[i, 2] = abs(-a) * 2
        out[i, 3] = max(a, b, 0.5)
        out[i, 4] = 1 if a > b else a**2
        out[i, 5] = kv.where(a != b, dtype(3.5), 0)

    x, y = (RNG.uniform(-4, 4, 16).astype(dtype.numpy) for _ in range(2))
    out = launch(k, x, y, np.zeros((16, 6), dtype.numpy), grid=16)
    with np.errstate(all="ignore"):
        two = np.asarray(2, dtype.numpy)
        expected = [x + y, x / y, abs(x) * two, np.maximum(np.maximum(x, y), np.asarray(0.5, dtype.numpy))]
        expected += [np.where(x > y, np.ones_like(x), x * x), np.full_like(x, 3.5)]
    tolerance = {kv.f32: 1e-6, kv.f64: 1e-14, kv.f16: 2e-3, kv.bf16: 2e-2}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), np.stack(expected, 1).astype(np.float64), rtol=tolerance)


def test_integer_types_promote_when_that_is_exact():
    @kv.kernel
    def widened(
        a: kv.Buffer[kv.i8, 1], b: kv.Buffer[kv.u16, 1], c: kv.Buffer[kv.u32, 1], d: kv.i64, out: kv.Buffer[kv.i64, 1]
    ):
        out[0] = kv.i64(a[0] + kv.i32(1))
        out[1] = kv.i64(b[0] + kv.i32(1))
        out[2] = c[0] + d
        out[3] = kv.i64((c[0] > 5) + kv.i32(3))
        out[4] = kv.i64(kv.u64(c[0]) + b[0])

    out = launch(widened, np.int8([-5]), np.uint16([65535]), np.uint32([4294967295]), -1, np.zeros(5, np.int64))
    assert out.tolist() == [-4, 65536, 4294967294, 4, 4294967295 + 65535]


def test_fma_rounds_once():
    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[kv.f32, 1]):
        out[0] = kv.math.fma(x[0], x[0], -1.0)
        out[1] = kv.math.fma(2.0, x[0], x[1])
        out[2] = kv.math.fma(x[0], 3, 1)

    x = np.float32([1 + 2**-12, 5])
    out = launch(k, x, np.zeros(3, np.float32))
    np.testing.assert_array_equal(out, np.float32([2**-11 + 2**-24, 2 * x[0] + 5, 3 * x[0] + 1]))


# --- conversions -----------------------------------------------------------------------------------------

TYPES = [kv.f64, kv.f32, kv.f16, kv.bf16, kv.f8e4m3, kv.f8e5m2]
TYPES += [kv.i8, kv.i16, kv.i32, kv.i64, kv.u8, kv.u16, kv.u32, kv.u64]


def _expected_cast(x, source, target):
    if target.is_float or not source.is_float:
        wide = x.astype(np.float32) if source.is_float and target.bits <= 16 else x
        if target.name in ("f8e4m3", "f8e5m2"):
            wide = np.clip(wide.astype(np.float32), -target.largest, target.largest)
        return wide.astype(target.numpy)
    return np.clip(np.trunc(x.astype(np.float64)), *_range(target)).astype(target.numpy)


def _range(dtype):
    info = np.iinfo(dtype.numpy)
    return info.min, info.max


@pytest.mark.parametrize("target", TYPES, ids=repr)
def test_cast_is_that_of_numpy(target):
    """From every type, scalars and vectors, of values that are whole and fit."""

    for source in TYPES:
        if source is kv.f64 and target in (kv.f16, kv.bf16):
            continue  # LLVM calls a library function that the host's JIT does not have

        @kv.kernel
        def k(x: kv.Buffer[source, 1], out: kv.Buffer[target, 1]):
            out.store(0, value=target(x.load(0, width=8)))
            for i in range(8, 12):
                out[i] = target(x[i])

        values = [0, 1, 2, 3, 5, 7, 8, 12, 100, 96, 14, 64]
        if source.kind in "if" and target.kind in "if":
            values = [v * (-1) ** i for i, v in enumerate(values)]
        x = np.array(values, np.float32).astype(source.numpy)
        out = launch(k, x, np.zeros(12, target.numpy))
        np.testing.assert_array_equal(out, _expected_cast(x, source, target), err_msg=f"{source} to {target}")


@pytest.mark.parametrize("target", [kv.f8e4m3, kv.f8e5m2, kv.i8, kv.u8], ids=repr)
def test_cast_to_8_bits_saturates(target):
    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[target, 1]):
        out.store(0, value=target(x.load(0, width=8)))

    x = np.float32([1e6, -1e6, 448, 449, 57344, -300, 255, 127.6])
    out = launch(k, x, np.zeros(8, target.numpy)).astype(np.float64)
    low, high = (-target.largest, target.largest) if target.is_float else _range(target)
    inside = (x > low) & (x < high)
    np.testing.assert_array_equal(out[~inside], np.clip(x[~inside], low, high))


@pytest.mark.parametrize("target", [kv.f8e4m3, kv.f8e5m2], ids=repr)
def test_cast_to_8_bits_rounds_to_the_nearest_and_from_halfway_to_even(target):
    """Of every number that is one, of all halfway between two, and of those next to them."""

    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[target, 1]):
        for i in range(x.shape[0]):
            out[i] = target(x[i])

    exact = np.arange(256, dtype=np.uint8).view(target.numpy).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    halfway = (exact[1:] + exact[:-1]) / 2
    x = np.concatenate([exact, halfway, *(np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf))])
    out = launch(k, x, np.zeros(len(x), target.numpy))
    np.testing.assert_array_equal(out.astype(np.float32), x.astype(target.numpy).astype(np.float32))


def test_cast_to_bool_and_back():
    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], flags: kv.Buffer[kv.bool, 1], out: kv.Buffer[kv.i32, 1]):
        i = kv.block_id.x
        flags[i] = kv.bool(x[i])
        out[i] = kv.i32(flags[i]) * 10 + kv.i32(not flags[i])

    x = np.float32([0, 1, -2, 0.25])
    flags, out = np.zeros(4, np.bool_), np.zeros(4, np.int32)
    k[4, 1](x, flags, out)
    assert flags.tolist() == [False, True, True, True]
    assert out.tolist() == [1, 10, 10, 10]


def test_bitcast_keeps_bits():
    @kv.kernel
    def k(x: kv.Buffer[kv.u32, 1], f: kv.Buffer[kv.f32, 1], h: kv.Buffer[kv.bf16, 1], out: kv.Buffer[kv.u32, 1]):
        f[0] = kv.bitcast(x[0], kv.f32)
        h.store(0, value=kv.bitcast(x[0], kv.bf16), alignment=2)
        h.store(2, value=kv.bitcast(x.load(0, width=4), kv.bf16)[2:4], alignment=2)
        out[0] = kv.bitcast(h.load(0, width=2), kv.u32)
        out[1] = kv.bitcast(kv.bitcast(f[0], kv.i32), kv.u32) + 1

    x = np.uint32([0x3F804000, 0x12345678, 3, 4])
    f, h, out = np.zeros(1, np.float32), np.zeros(4, ml_dtypes.bfloat16), np.zeros(2, np.uint32)
    k[1, 1](x, f, h, out)
    assert f.view(np.uint32)[0] == x[0]
    np.testing.assert_array_equal(h.view(np.uint32), x[:2])
    assert out.tolist() == [0x3F804000, 0x3F804001]


# --- vectors -----------------------------------------------------------------------------------------------


def test_vectors_mix_with_scalars_and_numbers():
    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], s: kv.f32, out: kv.Buffer[kv.f32, 2]):
        v = x.load(0, width=4)
        out.store(0, 0, value=v * s + 1)
        out.store(1, 0, value=2.0 - v)
        out.store(2, 0, value=kv.where(v > s, v, 0.0))
        out.store(3, 0, value=kv.math.max(v, s))
        w = kv.vector(kv.f32, 4)
        u = w
        w[1] = s
        w[2] += v[3]
        out.store(4, 0, value=w)
        out.store(5, 0, value=u)
        out.store(6, 0, value=kv.vector(kv.f32, [v[3], v[0], s, 7.0]))
        out[7, 0] = v.reduce("add")
        out[7, 1] = v[1:4].reduce("max")
        out[7, 2] = v[kv.thread_id.x + 2]
        a, b, c, d = v
        out[7, 3] = a * b - c * d

    x, s = np.float32([1, -2, 3.5, 4]), np.float32(1.5)
    out = launch(k, x, 1.5, np.zeros((8, 4), np.float32))
    expected = [x * s + 1, 2 - x, np.where(x > s, x, 0), np.maximum(x, s), [0, s, x[3], 0], [0] * 4, [x[3], x[0], s, 7]]
    expected += [[x.sum(), x[1:].max(), x[2], x[0] * x[1] - x[2] * x[3]]]
    np.testing.assert_array_equal(out, np.float32(expected))


# --- memory ------------------------------------------------------------------------------------------------


def test_buffers_have_shapes_and_strides():
    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 3], out: kv.Buffer[kv.i32, 1]):
        a, b, c = x.shape
        total = 0
        for i in range(a):
            for j in range(b):
                for m in range(c):
                    total += x[i, j, m] * (i + 1)
        out[0] = total
        out[1] = len(x) * 100 + x.shape[-1] * 10 + x.ndim

    x = RNG.integers(0, 9, (4, 6, 8)).astype(np.int32)[1:, ::2, :5]
    out = launch(k, x, np.zeros(2, np.int32))
    assert out.tolist() == [int((x * np.arange(1, 4)[:, None, None]).sum()), 353]


def test_pointers_move_by_bytes():
    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        p = x.address(2)
        out[0] = (p + 4).load(kv.i32)
        out[1] = (p - 8).load(kv.i32, 2)[1]
        q = p + kv.i64(4) * 2 + kv.u32(4) + kv.i32(-4)
        out[2] = q.load(kv.i32)
        (out.address(0) + 12).store(kv.vector(kv.i32, [7, 8]), alignment=4)
        for _ in range(3):
            p = p + 4
        out[5] = p.load(kv.i32)
        r = x.address(0)
        if out[0] > 0:
            r = x.address(1)
        out[6] = r.load(kv.i32)
        out[7] = kv.pointer_of(x.address(3).address()).load(kv.i32)

    x = np.arange(10, 20, dtype=np.int32)
    out = launch(k, x, np.zeros(8, np.int32))
    assert out.tolist() == [13, 11, 14, 7, 8, 15, 11, 13]


def test_atomics_give_the_old_value():
    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 1], f: kv.Buffer[kv.f32, 1], out: kv.Buffer[kv.i32, 1]):
        out[0] = kv.atomic_add(x, 0, 5)
        kv.atomic_add(f, 0, 2.5)
        out[1] = x.address(1).atomic("max", kv.i32(50), order="acq_rel")
        out[2] = x.address(2).atomic("xchg", kv.i32(9))
        out[3] = x.address(3).load(kv.i32, order="acquire")
        x.address(3).store(kv.i32(77), order="release")

    x, f, out = np.int32([1, 2, 3, 4]), np.float32([1]), np.zeros(4, np.int32)
    k[1, 1](x, f, out)
    assert out.tolist() == [1, 2, 3, 4]
    assert x.tolist() == [6, 50, 9, 77]
    assert f[0] == 3.5


def test_grid_and_block_indices():
    @kv.kernel
    def k(out: kv.Buffer[kv.i32, 2]):
        block = kv.block_id.x + kv.grid_dim.x * (kv.block_id.y + kv.grid_dim.y * kv.block_id.z)
        thread = kv.linear_thread_id()
        out[block * 24 + thread, 0] = block * 1000 + thread
        out[block * 24 + thread, 1] = kv.thread_id.x + 10 * kv.thread_id.y + 100 * kv.thread_id.z
        out[block * 24 + thread, 2] = kv.block_dim.x * 100 + kv.block_dim.y * 10 + kv.block_dim.z

    out = launch(k, np.zeros((12 * 24, 3), np.int32), grid=(2, 3, 2), block=(4, 3, 2))
    b, t = np.divmod(np.arange(12 * 24), 24)
    np.testing.assert_array_equal(out[:, 0], b * 1000 + t)
    np.testing.assert_array_equal(out[:, 1], t % 4 + 10 * (t // 4 % 3) + 100 * (t // 12))
    assert (out[:, 2] == 432).all()


# --- control flow as functions ---------------------------------------------------------------------------


def test_functions_stand_in_for_statements_where_there_is_no_source():
    scope = {"kv": kv, "B": kv.Buffer[kv.i32, 1]}
    exec(
        "@kv.kernel\n"
        "def k(x: B, out: B):\n"
        "    i = kv.block_id.x\n"
        "    v = kv.if_(x[i] > 3, lambda: x[i] * 2, lambda: kv.i32(0))\n"
        "    total = kv.for_(i, body=lambda j, s: s + x[j], init=0)\n"
        "    a, b = kv.for_(2, i, 2, body=lambda j, a, b: (b, a + j), init=(kv.i32(0), kv.i32(1)))\n"
        "    n = kv.while_(lambda n: n < v, lambda n: n * 2, init=kv.i32(1))\n"
        "    with kv.when(x[i] < 0):\n"
        "        out[0] = 5\n"
        "    out[i] = v + total * 100 + a - b + n\n",
        scope,
    )
    x = np.array([1, 5, 2, 9, 4, 0], np.int32)
    out = launch(scope["k"], x, np.zeros_like(x), grid=6)

    def expected(i):
        v, a, b, n = (x[i] * 2 if x[i] > 3 else 0), 0, 1, 1
        for j in range(2, i, 2):
            a, b = b, a + j
        while n < v:
            n *= 2
        return v + x[:i].sum() * 100 + a - b + n

    assert out.tolist() == [expected(i) for i in range(6)]


def test_statement_without_source_names_the_function_to_use():
    scope = {"kv": kv, "B": kv.Buffer[kv.i32, 1]}
    exec("@kv.kernel\ndef k(x: B):\n    if x[0] > 3:\n        x[0] = 1\n", scope)
    with pytest.raises(KernelError, match=re.escape("use kv.if_, kv.while_ and kv.where")) as caught:
        scope["k"].trace([kv.Buffer[kv.i32, 1]])
    assert caught.value.location.line == 3


@pytest.mark.parametrize("dtype", [kv.u32, kv.f32, kv.f64, kv.bf16, kv.i64], ids=repr)
def test_loop_variable_that_begins_as_a_number_takes_the_dtype_it_meets(dtype):
    @kv.kernel
    def k(x: kv.Buffer[dtype, 2], out: kv.Buffer[dtype, 1]):
        total = 0
        top, parts = 0, [0, 1]
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                if x[i, j] > 2:
                    total += x[i, j]
                parts[1] = parts[1] + x[i, j]
            top = max(top + 1, x[i, 0])
        out[0], out[1], out[2] = total, top, parts[1]

    x = np.array([[1, 2, 3], [4, 5, 1]]).astype(dtype.numpy)
    out = launch(k, x, np.zeros(3, dtype.numpy))
    assert out.astype(np.int64).tolist() == [12, 4, 17]
