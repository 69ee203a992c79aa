# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles on the host against NumPy: every operation on random shapes, element types and cache kinds.

Extents are drawn to lie beside the vectors' lanes: less than one, whole ones, and rests of every width. Whatever holds
no cached token is poison.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from reference.random_caches import stored_problem

import kvarn as kv
from kvarn.dialect.dtypes import bf16, f16, f32, i32
from kvarn.errors import KernelError

EXTENTS = (2, 3, 5, 7, 12, 16, 17, 31, 32, 40, 64, 80)
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}


def drawn(rng: np.random.Generator, count: int) -> list[int]:
    return [int(n) for n in rng.choice(EXTENTS, count)]


def values(rng: np.random.Generator, shape: Any, dtype: Any = f32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype.numpy)


def close(got: np.ndarray, want: Any, dtype: Any = f32, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype.name] * scale
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


# --- arithmetic and shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_arithmetic_broadcasts_as_numpy_does(seed):
    rng = np.random.default_rng(seed)
    m, n = drawn(rng, 2)

    @kv.kernel
    def kernel(
        a: kv.Buffer[f32, 2], row: kv.Buffer[f32, 1], column: kv.Buffer[f32, 1], s: kv.f32, out: kv.Buffer[f32, 2]
    ):
        i, j = kv.tile_index(m), kv.tile_index(n)
        x = a.load_rows(i, columns=n)
        r, c = row.gather(i), column.gather(j)
        x = kv.where(i[:, None] < j[None, :], x * r[:, None] + s, kv.math.max(x, c[None, :]))
        out.store_rows(i, value=x - kv.f32(i)[:, None] + kv.math.exp2(x))

    a, r, c = values(rng, (m, n)), values(rng, m), values(rng, n)
    out = np.full((m, n), np.nan, np.float32)
    kernel[1, 1](a, r, c, 0.5, out)
    i, j = np.arange(m)[:, None], np.arange(n)[None]
    x = np.where(i < j, a * r[:, None] + np.float32(0.5), np.maximum(a, c[None]))
    close(out, x - i + np.exp2(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=lambda t: t.name)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_reductions_fold_rows_and_columns(kind, axis, dtype):
    rng = np.random.default_rng(axis)
    m, n = drawn(rng, 2)

    @kv.kernel
    def kernel(a: kv.Buffer[dtype, 2], out: kv.Buffer[f32, 1]):
        x = kv.f32(a.load_rows(kv.tile_index(m), columns=n))
        folded = x.max(axis=axis) if kind == "max" else x.min(axis=axis) if kind == "min" else x.sum(axis=axis)
        out.scatter(kv.tile_index(folded.shape[0]), value=folded)

    a = values(rng, (m, n), dtype)
    out = np.full((m, n)[1 - axis], np.nan, np.float32)
    kernel[1, 1](a, out)
    close(out, getattr(np, kind)(a.astype(np.float64), axis=axis))


@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_reductions_take_integers(kind):
    rng = np.random.default_rng(3)
    m, n = 5, 21

    @kv.kernel
    def kernel(a: kv.Buffer[i32, 2], out: kv.Buffer[i32, 1]):
        x = a.load_rows(kv.tile_index(m), columns=n)
        folded = x.max(axis=1) if kind == "max" else x.min(axis=1) if kind == "min" else x.sum(axis=1)
        out.scatter(kv.tile_index(m), value=folded)

    a = rng.integers(-1000, 1000, (m, n)).astype(np.int32)
    out = np.zeros(m, np.int32)
    kernel[1, 1](a, out)
    np.testing.assert_array_equal(out, getattr(np, kind)(a, axis=1))


def test_a_nan_gives_way_in_a_maximum():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], out: kv.Buffer[f32, 1]):
        out.scatter(kv.tile_index(2), value=a.load_rows(kv.tile_index(2), columns=20).max(axis=1))

    a = np.random.default_rng(0).standard_normal((2, 20)).astype(np.float32)
    a[0, 3] = a[1, 17] = np.nan
    out = np.zeros(2, np.float32)
    kernel[1, 1](a, out)
    np.testing.assert_array_equal(out, np.nanmax(a, axis=1))


def test_exp2_is_exact_to_a_few_units_over_its_range():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], out: kv.Buffer[f32, 2]):
        out.store_rows(kv.tile_index(2), value=kv.math.exp2(a.load_rows(kv.tile_index(2), columns=64)))

    for x in np.linspace(-124.5, 127.99, 4096, dtype=np.float32).reshape(-1, 2, 64):
        out = np.zeros_like(x)
        kernel[1, 1](x, out)
        np.testing.assert_allclose(out, np.exp2(x.astype(np.float64)), rtol=5e-7)
    x[0, :6] = [np.nan, np.inf, -np.inf, -200.0, 128.0, 1000.0]
    kernel[1, 1](x, out)
    np.testing.assert_array_equal(out[0, :6], np.array([np.nan, np.inf, 0, 0, np.inf, np.inf], np.float32))


def test_integers_divide_and_shift_as_numpys_do():
    m, n = 7, 19

    @kv.kernel
    def kernel(a: kv.Buffer[i32, 2], b: kv.i32, out: kv.Buffer[i32, 3]):
        i = kv.tile_index(m)
        x = a.load_rows(i, columns=n)
        out.store_rows(0, i, value=x // 5 + x % 5)
        out.store_rows(1, i, value=x // (i + 2)[:, None] + x % b)
        out.store_rows(2, i, value=(x >> 3) ^ (x << 2) & 255)
        out.store_rows(3, i, value=kv.i32(kv.u32(x) >> 3))

    a = np.random.default_rng(6).integers(-5000, 5000, (m, n)).astype(np.int32)
    out = np.zeros((4, m, n), np.int32)
    kernel[1, 1](a, 7, out)
    np.testing.assert_array_equal(out[0], a // 5 + a % 5)
    np.testing.assert_array_equal(out[1], a // (np.arange(m)[:, None] + 2) + a % 7)
    np.testing.assert_array_equal(out[2], (a >> 3) ^ (a << 2) & 255)
    np.testing.assert_array_equal(out[3], (a.view(np.uint32) >> 3).view(np.int32))


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=lambda t: t.name)
def test_functions_and_scalar_conditions_take_every_float(dtype):
    m, n = 3, 22

    @kv.kernel
    def kernel(a: kv.Buffer[dtype, 2], s: kv.f32, out: kv.Buffer[dtype, 2]):
        i = kv.tile_index(m)
        x = a.load_rows(i, columns=n)
        y = kv.math.fma(kv.math.tanh(x), x, kv.math.exp2(x))
        out.store_rows(i, value=kv.where(s > 0.0, y, -x))

    a = values(np.random.default_rng(7), (m, n), dtype)
    wide = a.astype(np.float64)
    for s, want in ((1.0, np.tanh(wide) * wide + np.exp2(wide)), (-1.0, -wide)):
        out = np.zeros_like(a)
        kernel[1, 1](a, s, out)
        close(out, want, dtype, 2)


# --- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True], ids=["b", "b.T"])
@pytest.mark.parametrize("seed", range(6))
def test_products_accumulate_in_f32(seed, transposed):
    rng = np.random.default_rng(seed)
    m, k, n = drawn(rng, 3) if seed else (7, 64, 48)  # whole vectors and blocks of three rows in the first
    dtype = (f32, bf16, f16)[seed % 3]
    with_c = seed % 2 == 0

    @kv.kernel
    def kernel(a: kv.Buffer[dtype, 2], b: kv.Buffer[dtype, 2], c: kv.Buffer[f32, 2], out: kv.Buffer[f32, 2]):
        x = a.load_rows(kv.tile_index(m), columns=k)
        y = b.load_rows(kv.tile_index(n if transposed else k), columns=k if transposed else n)
        z = c.load_rows(kv.tile_index(m), columns=n)
        x = kv.dot(x, y.T if transposed else y, z if with_c else None)
        out.store_rows(kv.tile_index(m), value=x)

    a, b = values(rng, (m, k), dtype), values(rng, (n, k) if transposed else (k, n), dtype)
    c, out = values(rng, (m, n)), np.full((m, n), np.nan, np.float32)
    kernel[1, 1](a, b, c, out)
    wide = b.astype(np.float64)
    want = a.astype(np.float64) @ (wide.T if transposed else wide) + (c if with_c else 0)
    close(out, want, scale=math.sqrt(k))


# --- rows and elements of buffers --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, bf16], ids=lambda t: t.name)
def test_rows_are_read_and_written_under_their_mask(dtype):
    rng = np.random.default_rng(1)
    m, n = 9, 21

    @kv.kernel
    def kernel(a: kv.Buffer[dtype, 3], which: kv.Buffer[i32, 1], out: kv.Buffer[dtype, 2]):
        i = kv.tile_index(m)
        rows = which.gather(i)
        exists = rows >= 0
        x = a.load_rows(1, rows, mask=exists, columns=n)
        out.store_rows(i, value=x + x, mask=i != 4)

    a = values(rng, (2, 5, n), dtype)
    which = np.array([3, -7, 0, 4, 1, 1 << 30, 2, -1, 3], np.int32)
    which[5] = -(1 << 31)
    out = np.full((m, n), 77, dtype.numpy)
    kernel[1, 1](a, which, out)
    want = np.where(which[:, None] >= 0, 2 * a[1, np.maximum(which, 0)].astype(np.float32), 0)
    want[4] = 77
    close(out, want, dtype)


def test_elements_are_read_and_written_under_their_mask():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], out: kv.Buffer[f32, 2]):
        i, j = kv.tile_index(6)[:, None], kv.tile_index(10)[None, :]
        x = a.gather(j, i, mask=(i + j) % 3 == 0)
        out.scatter(i, j, value=x + 1.0, mask=i < 5)

    a = np.random.default_rng(2).standard_normal((10, 6)).astype(np.float32)
    out = np.zeros((6, 10), np.float32)
    kernel[1, 1](a, out)
    i, j = np.mgrid[:6, :10]
    close(out, np.where(i < 5, np.where((i + j) % 3 == 0, a.T, 0) + 1, 0))


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
def test_tiles_of_8_bit_floats_convert_and_multiply(dtype):
    _, problem = stored_problem(8, "paged", dtype, num_heads=1, head_size=32, cached=[16], new=[0], page_size=16)
    cache = problem.collection.get_key_cache(0)

    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[f32, 3]):
        x, i = cache.tile(0, 0, 0, cache.cache_length(0), rows=16), kv.tile_index(16)
        half = cache.tile(0, 0, 0, cache.cache_length(0), rows=16, columns=16)
        out.store_rows(0, i, value=kv.dot(x, x.T))
        out.store_rows(1, i, value=kv.f32(cache.dtype(kv.f32(half) * 1.1)))

    out = np.zeros((2, 16, 16), np.float32)
    kernel[1, 1](cache, out)
    x = np.asarray(cache.load(0, 0, np.arange(16)[:, None], np.arange(32)), np.float64)
    close(out[0], x @ x.T, scale=10)
    rounded = (x[:, :16].astype(np.float32) * np.float32(1.1)).astype(cache.dtype.numpy)
    np.testing.assert_array_equal(out[1], rounded.astype(np.float32))


# --- loops -----------------------------------------------------------------------------------------


def test_what_a_loop_carries_may_change_places():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], n: kv.i32, out: kv.Buffer[f32, 2]):
        i = kv.tile_index(3)
        x, y = a.load_rows(i, columns=18), kv.full((3, 18), 1.0)
        for _ in range(n):
            x, y = y, x + y
        out.store_rows(i, value=x)
        out.store_rows(i + 3, value=y)

    a = np.random.default_rng(4).standard_normal((3, 18)).astype(np.float32)
    for n in (0, 1, 2, 5):
        x, y = a, np.ones_like(a)
        for _ in range(n):
            x, y = y, x + y
        out = np.zeros((6, 18), np.float32)
        kernel[1, 1](a, n, out)
        close(out, np.concatenate([x, y]))


def test_a_tile_of_bools_may_be_carried_and_chosen_by_a_branch():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], n: kv.i32, out: kv.Buffer[f32, 2]):
        i = kv.tile_index(3)
        x = a.load_rows(i, columns=35)
        seen = x > 0.0
        for t in range(n):
            if t % 2 == 0:
                seen = seen & (x < 1.0)
            else:
                seen = seen | (x < -1.0)
        out.store_rows(i, value=kv.where(seen, x, 9.0))

    a = np.random.default_rng(5).standard_normal((3, 35)).astype(np.float32)
    for n in range(4):
        seen = a > 0
        for t in range(n):
            seen = seen & (a < 1) if t % 2 == 0 else seen | (a < -1)
        out = np.zeros_like(a)
        kernel[1, 1](a, n, out)
        close(out, np.where(seen, a, 9))


def test_loops_in_loops_and_branches_carry_tiles():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], n: kv.i32, out: kv.Buffer[f32, 2]):
        i = kv.tile_index(3)
        x, total = a.load_rows(i, columns=18), kv.full(3, 0.0)
        first = x
        for s in range(n):
            y = x
            for _ in range(s):
                y, x = x * 0.5, y + first
                total = total + y.sum(axis=1)
            if s % 2 == 1:
                x = y
                total = kv.math.max(total, x.max(axis=1))
            w, k = x, kv.i32(0)
            while k < s:
                w, x, k = x, w, k + 1
            x = x + w * 0.25
        out.store_rows(i, value=x + total[:, None])

    a = np.random.default_rng(10).standard_normal((3, 18)).astype(np.float32)
    for n in (0, 1, 2, 5):
        x, total = a, np.zeros(3, np.float32)
        for s in range(n):
            y = x
            for _ in range(s):
                y, x = x * np.float32(0.5), y + a
                total = total + y.sum(axis=1)
            if s % 2 == 1:
                x = y
                total = np.maximum(total, x.max(axis=1))
            w = x
            for _ in range(s):
                w, x = x, w
            x = x + w * np.float32(0.25)
        out = np.zeros_like(a)
        kernel[1, 1](a, n, out)
        close(out, x + total[:, None])


def test_a_carried_tile_of_16_bits_may_be_multiplied():
    @kv.kernel
    def kernel(a: kv.Buffer[bf16, 2], n: kv.i32, out: kv.Buffer[bf16, 2]):
        i = kv.tile_index(16)
        a0 = a.load_rows(i, columns=16)
        x = a0
        for _ in range(n):
            x = kv.bf16(kv.dot(x, a0) * 0.25)
        out.store_rows(i, value=x)

    a = values(np.random.default_rng(9), (16, 16), bf16)
    want = a
    for _ in range(3):
        want = (want.astype(np.float32) @ a.astype(np.float32) * np.float32(0.25)).astype(bf16.numpy)
    out = np.zeros_like(a)
    kernel[1, 1](a, 3, out)
    close(out, want.astype(np.float64), bf16, 4)


# --- caches ----------------------------------------------------------------------------------------

CACHES: list[dict[str, Any]] = [
    {"kind": "paged", "dtype": "f32", "page_size": 16},
    {"kind": "paged", "dtype": "bf16", "page_size": 3},
    {"kind": "paged", "dtype": "f16", "page_size": 128},
    {"kind": "continuous", "dtype": "bf16"},
    {"kind": "fa3", "dtype": "f16", "page_size": 24},
    {"kind": "paged", "dtype": "f8e4m3", "page_size": 16, "scale_dtype": "f32"},
    {"kind": "paged", "dtype": "i8", "page_size": 16, "scale_dtype": "f32", "granularity": 8},
    {"kind": "paged", "dtype": "f8e5m2", "page_size": 5, "scale_dtype": "f32", "granularity": 1},
]


@pytest.mark.parametrize("rows", [16, 24])
@pytest.mark.parametrize("case", CACHES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_rows_of_a_cache_are_dequantized_and_end_in_zeros(case, rows):
    lengths = [0, 1, 16, 37, 48]
    shape = {k: v for k, v in case.items() if k not in ("kind", "dtype")}
    _, problem = stored_problem(
        rows, case["kind"], case["dtype"], num_heads=2, head_size=40, cached=lengths, new=[0] * 5, **shape
    )
    cache = problem.collection.get_value_cache(1)
    columns, first_column = (40, 0) if rows == 16 else (24, 8)

    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[f32, 4]):
        b, h = kv.block_id.x, kv.block_id.y
        count = cache.cache_length(b)
        for j in range(0, (count + (rows - 1)) // rows + 1):
            x = cache.tile(b, h, j * rows, count, rows=rows, columns=columns, first_column=first_column)
            out.store_rows(b, h, j * rows + kv.tile_index(rows), value=kv.f32(x))

    out = np.full((5, 2, 6 * rows, columns), 77, np.float32)
    kernel[(5, 2), 1](cache, out)
    for b, length in enumerate(lengths):
        t, h = np.arange(length)[None, :, None], np.arange(2)[:, None, None]
        d = first_column + np.arange(columns)
        stored = cache.load_quantized(b, h, t, d) if cache.scale_dtype is not None else cache.load(b, h, t, d)
        want = np.asarray(stored, np.float64)
        if cache.scale_dtype is not None:
            starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
            scales = np.asarray(cache.load_scale(b, h, t, starts), np.float64)
            want = want * np.repeat(scales, cache.quantization_granularity, axis=-1)[..., d]
        close(out[b, :, :length], want, bf16 if cache.scale_dtype is not None else f32)
        end = (length + rows - 1) // rows + 1
        assert not out[b, :, length : end * rows].any()


# --- what is refused ---------------------------------------------------------------------------------


def test_tiles_that_the_host_has_no_room_for_are_refused_by_size():
    @kv.kernel
    def kernel(a: kv.Buffer[f32, 2], out: kv.Buffer[f32, 2]):
        i = kv.tile_index(1024)
        x = a.load_rows(i, columns=1024)
        out.store_rows(i, value=kv.dot(x, x))

    with pytest.raises(KernelError, match="bytes: the host's stack has 1048576"):
        kernel[1, 1](np.zeros((1024, 1024), np.float32), np.zeros((1024, 1024), np.float32))
