# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What kernels over tiles can say, found by running a small kernel per construct on the host and in the emulator.

``page()`` is docs/reference/tiles.md: a row per construct, with the instruction of its products, or the refusal, on the
host, on sm_90a and on sm_80. Each result is compared with NumPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes

TARGETS = ("host", "sm_90a", "sm_80")
HEADS = ("construct", "host", "sm_90a", "sm_80")
PAGE_SIZE, TABLE = 16, (5, 2, 7, 1, 0, 3)
B16, F32, I8 = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2], kv.Buffer[kv.i8, 2]
F8, I32, F1 = kv.Buffer[kv.f8e4m3, 2], kv.Buffer[kv.i32, 2], kv.Buffer[kv.f32, 1]
NUMPY = {
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f32": np.float32,
    "i32": np.int32,
    "i8": np.int8,
}


@dataclass(frozen=True)
class Construct:
    """A construct, a kernel that uses it, and what the kernel writes, by NumPy.

    Attributes
    ----------
    arguments : callable
        Without arguments, new arrays and caches for the kernel; the kernel writes the last one.
    want : callable
        Of the arguments, what the last one is to contain.
    written : callable
        Of the last argument, the array that is compared.
    """

    title: str
    kernel: Any
    arguments: Callable[[], list[Any]]
    want: Callable[..., np.ndarray]
    written: Callable[[Any], np.ndarray]


GROUPS: dict[str, list[Construct]] = {}


def construct(
    group: str,
    title: str,
    want: Callable[..., Any],
    arguments: Callable[[], list[Any]] | None = None,
    written: Callable[[Any], np.ndarray] = np.asarray,
) -> Callable[[Any], Any]:
    """Register a function as the kernel of a construct; its arrays follow from its annotations."""

    def registered(function: Any) -> Any:
        annotations = function.__annotations__
        given = arguments or functools.partial(
            arrays, [globals()[a] if isinstance(a, str) else a for a in annotations.values()]
        )
        made = Construct(title, kv.kernel(block=128)(function), given, want, written)
        GROUPS.setdefault(group, []).append(made)
        return function

    return registered


def arrays(specs: list[Any]) -> list[np.ndarray]:
    """Arrays of 64 x 64 or 64 elements, random; the last one zeros."""
    rng = np.random.default_rng(0)
    found = []
    for spec in specs:
        shape, dtype = (64,) * spec.rank, np.dtype(NUMPY[spec.dtype.name])
        x = rng.standard_normal(shape)
        found.append(np.round(30 * x).astype(dtype) if dtype.kind == "i" else x.astype(dtype))
    found[-1] = np.zeros_like(found[-1])
    return found


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rounded(x: Any) -> np.ndarray:
    return wide(np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16))


# --- products --------------------------------------------------------------------------------------

PRODUCTS = "Products"


@construct(PRODUCTS, "`kv.dot(a, b, c)` of 16-bit floats", lambda x, y, _: 2 * wide(x) @ wide(y))
def product(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    a, b = x.load_rows(i, columns=64), y.load_rows(i, columns=64)
    out.store_rows(i, value=kv.dot(a, b, kv.dot(a, b)))


@construct(PRODUCTS, "`kv.dot(a, b.T)`", lambda x, y, _: wide(x) @ wide(y).T)
def product_of_columns(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(i, columns=64).T))


@construct(PRODUCTS, "`kv.dot(a.T, b)`", lambda x, y, _: wide(x).T @ wide(y))
def transposed(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64).T, y.load_rows(i, columns=64)))


@construct(PRODUCTS, "`kv.dot(a.T, b)`, `a` computed", lambda x, y, _: rounded(2 * wide(x)).T @ wide(y))
def computed_transposed(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    a = kv.bf16(kv.f32(x.load_rows(i, columns=64)) * 2.0)
    out.store_rows(i, value=kv.dot(a.T, y.load_rows(i, columns=64)))


@construct(PRODUCTS, "`kv.dot(a, b)`, `b` computed", lambda x, y, _: wide(x) @ rounded(np.abs(wide(y))))
def computed_second(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    b = kv.bf16(kv.math.abs(kv.f32(y.load_rows(i, columns=64))))
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), b))


@construct(
    PRODUCTS, "`kv.dot(a, b.T)`, both computed", lambda x, y, _: rounded(2 * wide(x)) @ rounded(np.abs(wide(y))).T
)
def both_computed(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    a = kv.bf16(kv.f32(x.load_rows(i, columns=64)) * 2.0)
    b = kv.bf16(kv.math.abs(kv.f32(y.load_rows(i, columns=64))))
    out.store_rows(i, value=kv.dot(a, b.T))


@construct(PRODUCTS, "`kv.dot(a, b)` of f32", lambda x, y, _: wide(x) @ wide(y))
def product_of_f32(x: F32, y: F32, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(i, columns=64)))


@construct(PRODUCTS, "`kv.dot(a.T, b)` of f32", lambda x, y, _: wide(x).T @ wide(y))
def transposed_f32(x: F32, y: F32, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64).T, y.load_rows(i, columns=64)))


@construct(PRODUCTS, "`kv.dot(a, b.T)` of i8, in i32", lambda x, y, _: wide(x) @ wide(y).T)
def product_of_i8(x: I8, y: I8, out: I32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(i, columns=64).T))


@construct(PRODUCTS, "`kv.dot(a, b)` of i8", lambda x, y, _: wide(x) @ wide(y))
def product_of_i8_rows(x: I8, y: I8, out: I32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(i, columns=64)))


@construct(PRODUCTS, "`kv.dot(a, b.T)` of f8e4m3", lambda x, y, _: wide(x) @ wide(y).T)
def product_of_f8(x: F8, y: F8, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(i, columns=64).T))


@construct(
    PRODUCTS,
    "128 rows of a warpgroup",
    lambda x, y, _: wide(x) @ wide(y).T,
    lambda: [np.concatenate([arrays([B16, B16])[0]] * 2), *arrays([B16, B16])[:1], np.zeros((128, 64), np.float32)],
)
def many_rows(x: B16, y: B16, out: F32):
    i = kv.tile_index(128)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(kv.tile_index(64), columns=64).T))


@construct(
    PRODUCTS, "8 rows: a smaller multiple of 8", lambda x, y, _: np.pad(wide(x)[:8] @ wide(y).T, ((0, 56), (0, 0)))
)
def few_rows(x: B16, y: B16, out: F32):
    i = kv.tile_index(8)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), y.load_rows(kv.tile_index(64), columns=64).T))


def running_state(x: Any, y: Any, _: Any) -> np.ndarray:
    state, found = np.zeros((64, 64)), []
    for _ in range(3):
        found.append(wide(x) @ rounded(state))
        state = state * 0.5 + wide(x).T @ wide(y)
    return sum(found)


@construct(PRODUCTS, "a tile that a loop carries and a product reads, `kv.dot(q, kv.bf16(state))`", running_state)
def carried_state(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    state, total = kv.full((64, 64), 0.0), kv.full((64, 64), 0.0)
    for _ in range(0, kv.i32(3) + x.shape[0] - 64):
        q = x.load_rows(i, columns=64)
        total = kv.dot(q, kv.bf16(state), total)
        state = kv.dot(q.T, y.load_rows(i, columns=64), state * 0.5)
    out.store_rows(i, value=total)


# --- loads -----------------------------------------------------------------------------------------

LOADS = "Loads"


@construct(
    LOADS,
    "`load_rows`, masked, and scaled before its product",
    lambda x, y, _: np.where(np.arange(64)[:, None] < 50, rounded(3 * wide(x)), 0) @ wide(y),
)
def scaled(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    a = kv.bf16(kv.f32(x.load_rows(i, mask=i < 50, columns=64)) * 3.0)
    out.store_rows(i, value=kv.dot(a, y.load_rows(i, columns=64)))


@construct(LOADS, "`load_rows`, some elements replaced before its product", lambda x, y, _: wide(x) @ np.tril(wide(y)))
def replaced(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    b = kv.f32(y.load_rows(i, columns=64))
    b = kv.bf16(kv.where(i[:, None] >= i[None, :], b, 0.0))
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), b))


@construct(LOADS, "`load_rows` of f32, converted before its product", lambda x, y, _: rounded(x) @ rounded(y))
def converted(x: F32, y: F32, out: F32):
    i = kv.tile_index(64)
    a, b = x.load_rows(i, columns=64), y.load_rows(i, columns=64)
    out.store_rows(i, value=kv.dot(kv.bf16(a), kv.bf16(b)))


@construct(LOADS, "`load_rows(first_column=16)`", lambda x, y, _: wide(x)[:, 16:48] @ wide(y)[:, 32:].T)
def other_columns(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    a, b = x.load_rows(i, columns=32, first_column=16), y.load_rows(i, columns=32, first_column=32)
    out.store_rows(i, value=kv.dot(a, b.T))


@construct(LOADS, "`load_rows` that no product reads", lambda x, _: wide(x) + 1)
def only_loaded(x: B16, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.f32(x.load_rows(i, columns=64)) + 1.0)


@construct(LOADS, "`gather` by rows and by columns", lambda x, _: wide(x) + wide(x).T)
def gathered(x: F32, out: F32):
    i, j = kv.tile_index(64)[:, None], kv.tile_index(64)[None, :]
    out.scatter(i, j, value=x.gather(i, j) + x.gather(j, i))


def pool(dtype: Any, fill: bool = True, scaled: bool = False) -> Any:
    rng = np.random.default_rng(1)
    blocks = rng.standard_normal((8, 2, 1, PAGE_SIZE, 2, 64)).astype(dtype)
    blocks = blocks if fill else np.zeros_like(blocks)
    halves = np.full((8, 2, 1, PAGE_SIZE, 2, 1), 0.5, np.float32)
    scales = {"scales": halves, "quantization_granularity": 64} if scaled else {}
    table = np.array([TABLE], np.uint32)
    return kv.PagedKVCacheCollection(blocks, np.array([90], np.uint32), table, 1, 96, **scales).get_key_cache(0)


def tokens(cache: Any) -> np.ndarray:
    """The tokens of head 1 of a cache."""
    return wide(cache.blocks)[list(TABLE), :, 1].reshape(-1, 64)


def of_cache(dtype: Any) -> Callable[[], list[Any]]:
    return lambda: [pool(dtype), *arrays([B16, F32])]


for name, dtype in (("", ml_dtypes.bfloat16), (" of f8e4m3", ml_dtypes.float8_e4m3fn)):

    @construct(
        LOADS, f"`cache.tile`{name}, as the second operand", lambda c, x, _: wide(x) @ tokens(c)[:64].T, of_cache(dtype)
    )
    def cached(cache: kv.KVCache, x: B16, out: F32):
        i = kv.tile_index(64)
        k = cache.tile(0, 1, 0, cache.cache_length(0), rows=64, dtype=kv.bf16)
        out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), k.T))

    @construct(
        LOADS,
        f"`cache.tile`{name}, scaled before its product",
        lambda c, x, _: wide(x) @ rounded(2 * tokens(c)[:64]),
        of_cache(dtype),
    )
    def cached_scaled(cache: kv.KVCache, x: B16, out: F32):
        i = kv.tile_index(64)
        k = cache.tile(0, 1, 0, cache.cache_length(0), rows=64, dtype=kv.bf16)
        out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), kv.bf16(kv.f32(k) * 2.0)))


@construct(
    LOADS,
    "`cache.tile` of f8e4m3 with scales",
    lambda c, x, _: wide(x) @ rounded(tokens(c)[:64] / 2).T,
    lambda: [pool(ml_dtypes.float8_e4m3fn, scaled=True), *arrays([B16, F32])],
)
def cached_with_scales(cache: kv.KVCache, x: B16, out: F32):
    i = kv.tile_index(64)
    k = cache.tile(0, 1, 0, cache.cache_length(0), rows=64, dtype=kv.bf16)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), k.T))


def packed() -> Any:
    """Keys of unsigned 4-bit integers, each head with a scale of 1/2 and a zero of 0."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (8, 2, 1, PAGE_SIZE, 2, 32)).astype(np.uint8)
    scales, table = np.zeros((8, 2, 1, PAGE_SIZE, 2, 2), np.float16), np.array([TABLE], np.uint32)
    scales[..., 0] = 0.5
    record = kv.Record("u4", "f16", 64, zero=True)
    made = kv.PagedKVCacheCollection(blocks, np.array([90], np.uint32), table, 1, 96, scales=scales, record=record)
    return made.get_key_cache(0)


def nibbles(cache: Any) -> np.ndarray:
    """The tokens of head 1 of a 4-bit cache, low nibbles first."""
    held = np.asarray(cache.blocks)[list(TABLE), :, 1].reshape(-1, 32)
    return np.stack([held & 15, held >> 4], axis=-1).reshape(-1, 64) / 2


@construct(
    LOADS,
    "`cache.tile` of 4-bit integers",
    lambda c, x, _: wide(x) @ nibbles(c)[:64].T,
    lambda: [packed(), *arrays([B16, F32])],
)
def cached_nibbles(cache: kv.KVCache, x: B16, out: F32):
    i = kv.tile_index(64)
    k = cache.tile(0, 1, 0, cache.cache_length(0), rows=64, dtype=kv.bf16)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64), k.T))


# --- elementwise -----------------------------------------------------------------------------------

VALUES = "Vectors, conditions, reductions"
POSITIONS = np.arange(64.0)


@construct(VALUES, "a vector as rows and as columns", lambda x, _: np.exp2(x[:, None] - x[None, :]))
def rows_and_columns(x: F1, out: F32):
    v = x[kv.tile_index(64)]
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.math.exp2(v[:, None] - v[None, :]))


@construct(
    VALUES,
    "`kv.where` with conditions of rows and of columns",
    lambda x, _: np.where((POSITIONS[:, None] > 9) & (POSITIONS < 50), wide(x), -1),
)
def conditions(x: B16, out: F32):
    i = kv.tile_index(64)
    seen = (i > 9)[:, None] & (i < 50)[None, :]
    out.store_rows(i, value=kv.where(seen, kv.f32(x.load_rows(i, columns=64)), -1.0))


@construct(
    VALUES,
    "a reduction's vector as rows and as columns",
    lambda x, _: wide(x).max(1)[:, None] - wide(x).max(1)[None, :],
)
def reduced_both_ways(x: F32, out: F32):
    i = kv.tile_index(64)
    m = x.load_rows(i, columns=64).max(axis=1)
    out.store_rows(i, value=m[:, None] - m[None, :])


def reduction(name: str, of: Callable[[Any, int], Any], want: Callable[[Any, int], Any], axis: int, spec: Any) -> None:
    @construct(VALUES, f"{name}, axis {axis}", lambda x, _: want(wide(x), axis), lambda: arrays([spec, F1]))
    def reduced(x, out):
        i = kv.tile_index(64)
        out.scatter(i, value=kv.f32(of(x.load_rows(i, columns=64), axis)))


for axis in (0, 1):
    reduction("`x.sum`", lambda x, a: x.sum(axis=a), lambda x, a: x.sum(a), axis, F32)
    reduction(
        "`x.max`, `x.min`", lambda x, a: x.max(axis=a) - x.min(axis=a), lambda x, a: x.max(a) - x.min(a), axis, F32
    )
    reduction("`(x > 2).any`", lambda x, a: kv.f32((x > 2.0).any(axis=a)), lambda x, a: (x > 2).any(a), axis, F32)
    reduction("`x.sum` of i32", lambda x, a: kv.i32(x).sum(axis=a), lambda x, a: x.sum(a), axis, I8)


# --- along lines -----------------------------------------------------------------------------------

LINES = "Running sums, triangles, parts of tiles"


@construct(LINES, "`v.cumsum()` of a vector", lambda x, _: np.cumsum(wide(x)))
def running_sum(x: F1, out: F1):
    i = kv.tile_index(64)
    out.scatter(i, value=x[i].cumsum())


@construct(
    LINES, "`v.sum()`, `max`, `min` of a vector: a scalar", lambda x, _: np.full(64, wide(x).sum() + np.ptp(wide(x)))
)
def totals(x: F1, out: F1):
    i = kv.tile_index(64)
    v = x[i]
    out.scatter(i, value=kv.full(64, v.sum() + v.max() - v.min()))


@construct(LINES, "`x.cumsum(axis=0)`", lambda x, _: np.cumsum(wide(x), 0))
def running_columns(x: F32, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=x.load_rows(i, columns=64).cumsum(axis=0))


@construct(LINES, "`x.cumprod(axis=1)`", lambda x, _: np.cumprod(1 + 0.1 * wide(x), 1))
def running_rows(x: F32, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=(x.load_rows(i, columns=64) * 0.1 + 1.0).cumprod(axis=1))


@construct(
    LINES,
    "`kv.solve_unit_lower(l, b)`",
    lambda x, y, _: np.linalg.solve(np.eye(64) + np.tril(0.1 * wide(x), -1), wide(y)),
)
def solved(x: F32, y: F32, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.solve_unit_lower(x.load_rows(i, columns=64) * 0.1, y.load_rows(i, columns=64)))


@construct(
    LINES,
    "`kv.solve_unit_lower(l, identity)`, the inverse",
    lambda x, _: np.linalg.inv(np.eye(64) + np.tril(0.1 * wide(x), -1)),
)
def inverted(x: F32, out: F32):
    i = kv.tile_index(64)
    identity = kv.where(i[:, None] == i[None, :], 1.0, 0.0)
    out.store_rows(i, value=kv.solve_unit_lower(x.load_rows(i, columns=64) * 0.1, identity))


@construct(LINES, "`x[:, 16:48]`, columns in multiples of 8", lambda x, y, _: wide(x)[:, 16:48] @ wide(y)[:, :32].T)
def columns_of(x: B16, y: B16, out: F32):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.dot(x.load_rows(i, columns=64)[:, 16:48], y.load_rows(i, columns=32).T))


@construct(LINES, "`x[16:32, :]`", lambda x, _: wide(x)[16:32].repeat(4, 0))
def rows_of(x: F32, out: F32):
    part = x.load_rows(kv.tile_index(64), columns=64)[16:32, :]
    for n in kv.static(range(4)):
        out.store_rows(kv.tile_index(16) * 4 + n, value=part)


@construct(LINES, "`kv.concatenate(a, b)`", lambda x, y, _: np.hstack([wide(x)[:, 32:], wide(y)[:, :32]]))
def joined(x: F32, y: F32, out: F32):
    i = kv.tile_index(64)
    a, b = x.load_rows(i, columns=64), y.load_rows(i, columns=64)
    out.store_rows(i, value=kv.concatenate(a[:, 32:64], b[:, 0:32]))


# --- stores ----------------------------------------------------------------------------------------

STORES = "Stores"


@construct(STORES, "`store_rows` of 16-bit floats, f32, i32", lambda x, _: wide(x))
def stored(x: B16, out: B16):
    i = kv.tile_index(64)
    out.store_rows(i, value=x.load_rows(i, columns=64))


@construct(STORES, "`store_rows` of f8e4m3", lambda x, _: wide(x.astype(ml_dtypes.float8_e4m3fn)))
def stored_bytes(x: F32, out: F8):
    i = kv.tile_index(64)
    out.store_rows(i, value=kv.f8e4m3(x.load_rows(i, columns=64)))


@construct(STORES, "`scatter` of 8-bit elements", lambda x, _: wide(x.astype(ml_dtypes.float8_e4m3fn)))
def scattered(x: F32, out: F8):
    i = kv.tile_index(64)
    out.scatter(i[:, None], i[None, :], value=kv.f8e4m3(x.load_rows(i, columns=64)))


@construct(
    STORES, "`kv.atomic_add` of a tile", lambda x, _: np.pad(wide(x).reshape(32, 2, 64).sum(1), ((0, 32), (0, 0)))
)
def added(x: F32, out: F32):
    i = kv.tile_index(64)
    kv.atomic_add(out, ((i // 2)[:, None], i[None, :]), x.load_rows(i, columns=64))


def appended(*given: Any) -> np.ndarray:
    found = np.zeros((96, 64))
    found[16:70] = wide(given[0].astype(given[1].blocks.dtype))[:54]
    return found


for name, dtype in (("", ml_dtypes.bfloat16), (" of f8e4m3", ml_dtypes.float8_e4m3fn)):

    @construct(
        STORES,
        f"`cache.store_tile_rows`{name}, without scales",
        appended,
        lambda dtype=dtype: [arrays([B16, B16])[0], pool(dtype, fill=False)],
        tokens,
    )
    def stored_tokens(x: B16, cache: kv.KVCache):
        cache.store_tile_rows(0, 1, 16, x.load_rows(kv.tile_index(64), columns=64), count=70)


def quantized(x: Any, cache: Any) -> np.ndarray:
    """Rows divided by a scale each, which makes their largest element 448, and multiplied again."""
    found, rows = np.zeros((96, 64)), wide(x)[:54]
    scales = np.abs(rows).max(axis=1, keepdims=True) / 448
    found[16:70] = wide((rows / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)) * scales
    return found


def scaled_tokens(cache: Any) -> np.ndarray:
    """The dequantized tokens of head 1 that were written."""
    return tokens(cache) * wide(cache.scales)[list(TABLE), :, 1].reshape(-1, 1)


@construct(
    STORES,
    "`cache.store_tile_rows` of f8e4m3 with scales",
    quantized,
    lambda: [arrays([B16, B16])[0], pool(ml_dtypes.float8_e4m3fn, False, True)],
    scaled_tokens,
)
def quantized_tokens(x: B16, cache: kv.KVCache):
    cache.store_tile_rows(0, 1, 16, x.load_rows(kv.tile_index(64), columns=64), count=70)


# --- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The outcome of a construct on a target: an instruction or ``yes``, or a refusal's text."""

    works: str
    refusal: str = ""


def outcome(found: Construct, target: str) -> Cell:
    """Compile and run the kernel of a construct.

    Raises
    ------
    AssertionError
        If what the kernel writes is not what NumPy computes, or the emulator finds a hazard.
    """
    given = found.arguments()
    specs = [kv.Buffer[dtypes.of(a.dtype), a.ndim] if isinstance(a, np.ndarray) else a for a in given]
    try:
        made = kv.compile(found.kernel, *specs, target=target)
    except (kv.KernelError, TypeError, ValueError) as error:
        return Cell("no", refusal_of(error))
    want = np.asarray(found.want(*given), np.float64)
    if target == "host":
        found.kernel[1, 128](*given)
    else:
        report = made.emulate(1, 128, *given)
        assert not report.hazards, f"{found.title} on {target}: {report.hazards}"
    got = wide(found.written(given[-1]))
    error = np.abs(got - want).max()
    assert error <= 2e-2 * max(1.0, np.abs(want).max()), f"{found.title} on {target}: off by {error}"
    return Cell("yes" if target == "host" else instruction_of(made.asm["ptx"]))


def instruction_of(ptx: str) -> str:
    return next((name for name, text in (("wgmma", "wgmma.mma_async"), ("mma.sync", "mma.sync")) if text in ptx), "yes")


def refusal_of(error: BaseException) -> str:
    """The first line of an error, without the place."""
    return str(error).split("\n")[0].partition("error: ")[2] or str(error).split("\n")[0]


def row(found: Construct, refusals: list[str]) -> tuple[str, ...]:
    """A line of the table; new refusals are appended, and cells have their numbers."""
    cells = []
    for target in TARGETS:
        cell = outcome(found, target)
        if cell.refusal and cell.refusal not in refusals:
            refusals.append(cell.refusal)
        cells.append(f"no ({refusals.index(cell.refusal) + 1})" if cell.refusal else cell.works)
    return (found.title, *cells)


def page() -> str:
    """The page's text."""
    out = [
        "# What tiles can say, by target\n",
        "A kernel per construct, run on the host and in the emulator and compared with NumPy. A cell has the\n"
        "instruction of the products, `yes` if there are none, or the number of the refusal.\n"
        "[Kernels over tiles](../tiles.md) explains the language.\n",
    ]
    refusals: list[str] = []
    for group, members in GROUPS.items():
        out += [f"## {group}\n", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        out += [f"| {' | '.join(row(found, refusals))} |" for found in members]
        out.append("")
    out += ["## Refusals\n", *(f"{number}. {text}" for number, text in enumerate(refusals, 1))]
    return "\n".join(out)
