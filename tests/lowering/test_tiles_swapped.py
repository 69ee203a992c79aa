# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of few rows, whose operands are swapped, and reductions along either axis, on a GPU's code.

Elements are small integers where answers are compared exactly: sums of them are the same in any order. The emulator
reports races, so every run asks for none.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import tile_attention as tiles

import kvarn as kv
from kvarn.dialect import tile_layout as tl
from kvarn.emulator.grid import Order

TARGETS = ("sm_90a", "sm_80")
BF16, F32 = ml_dtypes.bfloat16, np.float32
ONE, TWO = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2]
FOLDS = {"max": np.max, "min": np.min, "sum": np.sum}


def emulate(target: str, kernel: Any, grid: Any, threads: int, *args: Any) -> Any:
    report = kernel.emulate(grid, threads, *args, target=target)
    assert not report.hazards, report.hazards
    return report


# --- products, vectors and reductions --------------------------------------------------------------


def rounds_kernel(m: int, n: int, k: int, d: int, threads: int) -> Any:
    """In every round a product whose scores are masked, meet vectors, are folded along both axes and multiply again."""

    @kv.kernel(block=threads)
    def rounds(
        a: ONE, b: ONE, v: ONE, count: kv.i32, times: kv.i32, gains: kv.Buffer[kv.f32, 1], shifts: kv.Buffer[kv.f32, 1],
        out: TWO, rows: kv.Buffer[kv.f32, 3], columns: kv.Buffer[kv.f32, 3],
    ):  # fmt: skip
        i, j = kv.tile_index(m), kv.tile_index(n)
        exists = i < count
        x, values = a.load_rows(i, mask=exists, columns=k), v.load_rows(j, columns=d)
        y, o = b.load_rows(j, columns=k), kv.full((m, d), 0.0)
        gain, shift = gains.gather(i, mask=exists), shifts[j]
        for t in range(0, times):
            s = kv.dot(x, y.T) * gain[:, None] + (shift + kv.f32(t))[None, :]
            s = kv.where(exists[:, None] & ((j % 3)[None, :] != (i % 3)[:, None]), s, 0.0)
            for number, fold in enumerate(("max", "min", "sum")):
                rows.scatter(t, number, i, value=getattr(s, fold)(axis=1))
                columns.scatter(t, number, j, value=getattr(s, fold)(axis=0))
            o = kv.dot(kv.bf16(s), values, o)
        out.store_rows(i, value=o, mask=exists)

    return rounds


def rounds(target: str, m: int, n: int, k: int, d: int, threads: int, count: int, times: int = 2) -> None:
    rng = np.random.default_rng([m, n, k, d, count])
    a, b, v = (rng.integers(-1, 2, shape).astype(BF16) for shape in ((m, k), (n, k), (n, d)))
    a[count:] = np.nan
    gains, shifts = rng.integers(-1, 2, m).astype(F32), rng.integers(-1, 2, n).astype(F32)
    out, given_rows, given_columns = (np.full(s, 7, F32) for s in ((m, d), (times, 3, m), (times, 3, n)))
    kernel = rounds_kernel(m, n, k, d, threads)
    emulate(target, kernel, 1, threads, a, b, v, count, times, gains, shifts, out, given_rows, given_columns)
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    product = np.where(i < count, np.nan_to_num(a.astype(F32)), 0) @ b.astype(F32).T
    want = np.zeros((m, d))
    for t in range(times):
        s = np.where((i < count) & (j % 3 != i % 3), product * gains[:, None] + shifts + t, 0)
        want += s @ v.astype(F32)
        for number, fold in enumerate(FOLDS.values()):
            np.testing.assert_array_equal(given_rows[t, number], fold(s, axis=1), err_msg=f"{number}")
            np.testing.assert_array_equal(given_columns[t, number], fold(s, axis=0), err_msg=f"{number}")
    np.testing.assert_array_equal(out[:count], want[:count])
    assert (out[count:] == 7).all()


# Tile rows, keys, inner extent, columns of values, threads, rows that exist.
SHAPES = [
    (8, 64, 64, 64, 128, 1), (8, 128, 128, 128, 128, 7), (16, 64, 64, 192, 128, 16), (24, 64, 64, 64, 128, 23),
    (32, 128, 64, 64, 128, 31), (40, 64, 192, 64, 128, 32), (64, 128, 64, 128, 256, 64), (32, 256, 64, 128, 256, 8),
    (16, 192, 64, 192, 384, 9), (64, 64, 64, 64, 128, 63), (128, 64, 64, 64, 256, 65), (192, 48, 64, 80, 384, 192),
]  # fmt: skip


@pytest.mark.sampled(16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_scores_fold_along_either_axis_and_multiply_again_whatever_their_rows(target, shape):
    rounds(target, *shape)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("target", TARGETS)
def test_products_of_random_extents_agree_with_numpy(target, seed):
    rng = np.random.default_rng(seed)
    warpgroups = int(rng.integers(1, 3))
    m, k = 8 * int(rng.integers(1, 8 * warpgroups)), 16 * int(rng.integers(1, 9))
    n, d = (64 * warpgroups * int(x) for x in rng.integers(1, 4 - warpgroups, 2))
    rounds(target, m, n, k, d, 128 * warpgroups, int(rng.integers(1, m + 1)))


@kv.kernel(block=128)
def alone(x: TWO, columns: TWO):
    """One fold in a loop, over rows of several warps: nothing else makes them wait."""
    i, j = kv.tile_index(64), kv.tile_index(64)
    for t in range(0, columns.shape[0]):
        columns.scatter(t, j, value=(x[i[:, None], j[None, :]] + kv.f32(t)).max(axis=0))


@kv.kernel(block=128)
def beside_copies(query: ONE, keys: kv.KVCache, rows: kv.Buffer[kv.f32, 1]):
    """One fold in a loop whose tiles are waited for, which on sm_90a makes no warp wait for another."""
    i, largest = kv.tile_index(8), kv.full(8, -3.0e38)
    q, count = query.load_rows(i, columns=64), keys.cache_length(0)
    for t in range(0, count // 64):
        largest = kv.math.max(largest, kv.dot(q, keys.tile(0, 0, t * 64, count, rows=64).T).max(axis=1))
    rows.scatter(i, value=largest)


@pytest.mark.parametrize("target", TARGETS)
def test_a_fold_that_is_alone_in_a_loop_waits_until_its_numbers_are_read(target):
    rng = np.random.default_rng(0)
    x, columns = rng.integers(-9, 9, (64, 64)).astype(F32), np.zeros((3, 64), F32)
    emulate(target, alone, 1, 128, x, columns)
    np.testing.assert_array_equal(columns, x.max(0) + np.arange(3)[:, None])
    blocks = rng.integers(-3, 4, (12, 2, 1, 16, 1, 64)).astype(BF16)
    pool = kv.PagedKVCacheCollection(blocks, np.array([192], np.uint32), np.arange(12, dtype=np.uint32)[None], 1, 192)
    query, rows = rng.integers(-3, 4, (8, 64)).astype(BF16), np.zeros(8, F32)
    emulate(target, beside_copies, 1, 128, query, pool.get_key_cache(0), rows)
    np.testing.assert_array_equal(rows, (query.astype(F32) @ blocks[:, 0].reshape(192, 64).astype(F32).T).max(1))


# --- attention -------------------------------------------------------------------------------------


def attention_kernel(rows: int, keys_of_tile: int, size: int, dtype: Any = kv.bf16) -> Any:
    """With a bias by the distance of query and key, of which a table is made (``tabulate-kv-scores``)."""

    @kv.kernel(block=128)
    def attention(
        query: kv.Buffer[dtype, 3], keys: kv.KVCache, values: kv.KVCache, bias: kv.Buffer[kv.f32, 1],
        out: kv.Buffer[dtype, 3], lse: TWO,
    ):  # fmt: skip
        h, row, count = kv.block_id.x, kv.tile_index(rows), keys.cache_length(0)
        exists = row < query.shape[0]
        q = query.load_rows(row, h, mask=exists, columns=size)
        at = (count - query.shape[0] + row)[:, None]
        m, s, o = kv.full(rows, -3.0e38), kv.full(rows, 0.0), kv.full((rows, size), 0.0)
        for j in range(0, (count + keys_of_tile - 1) // keys_of_tile):
            k = keys.tile(0, h, j * keys_of_tile, count, rows=keys_of_tile)
            v = values.tile(0, h, j * keys_of_tile, count, rows=keys_of_tile)
            token = (j * keys_of_tile + kv.tile_index(keys_of_tile))[None, :]
            x = kv.dot(q, k.T) * (size**-0.5 * 1.4426950408889634) + bias[kv.math.max(kv.math.min(at - token, 31), 0)]
            x = kv.masked(x, (token <= at) & (token < count))
            top = kv.math.max(m, x.max(axis=1))
            alpha, p = kv.math.exp2(m - top), kv.math.exp2(x - top[:, None])
            m, s = top, s * alpha + p.sum(axis=1)
            o = kv.dot(dtype(p), v, o * alpha[:, None])
        out.store_rows(row, h, value=dtype(o / s[:, None]), mask=exists)
        lse.scatter(row, h, value=m + kv.math.log2(s), mask=exists)

    return attention


def attend(target: str, tile: int, keys: int, size: int, page: int, rows: int, length: int, dtype: Any = BF16) -> Any:
    """Attention of the last rows of a sequence in the emulator, against float64; pages are permuted, the others NaN."""
    rng, heads, pages = np.random.default_rng([tile, rows, length]), 2, -(-length // page)
    blocks = np.full((pages + 2, 2, 1, page, heads, size), np.nan, dtype)
    table = rng.permutation(pages + 2)[:pages].astype(np.uint32)
    k, v = rng.standard_normal((2, length, heads, size), F32).astype(dtype)
    for t in range(length):
        blocks[table[t // page], :, 0, t % page] = k[t], v[t]
    pool = kv.PagedKVCacheCollection(blocks, np.array([length], np.uint32), table[None], 64, max(pages * page, 1))
    query = rng.standard_normal((rows, heads, size), F32).astype(dtype)
    out, lse = np.zeros_like(query), np.zeros((rows, heads), F32)
    kernel = attention_kernel(tile, keys, size, kv.f16 if dtype is np.float16 else kv.bf16)
    bias = rng.standard_normal(32).astype(F32)
    report = emulate(target, kernel, heads, 128, query, pool.get_key_cache(0), pool.get_value_cache(0), bias, out, lse)
    scores = np.einsum("qhd,khd->hqk", query.astype(float), k.astype(float)) * size**-0.5
    distance = length - rows + np.arange(rows)[:, None] - np.arange(length)
    e = np.exp(np.where(distance >= 0, scores + bias[np.clip(distance, 0, 31)] * np.log(2), -np.inf))
    want = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v.astype(float))
    np.testing.assert_allclose(out.astype(float), want, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, np.log2(e.sum(-1)).T, rtol=1e-3, atol=1e-3)
    return report


# Tile rows, keys of a tile, head size, page, rows, cached tokens.
CASES = [
    (8, 64, 64, 16, 1, 1), (8, 64, 128, 16, 7, 64), (8, 128, 128, 16, 8, 129), (16, 64, 128, 64, 16, 63),
    (32, 64, 64, 16, 31, 65), (32, 64, 128, 32, 32, 200), (24, 64, 192, 16, 20, 127), (56, 64, 64, 16, 50, 128),
]  # fmt: skip


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_few_rows_agrees_with_numpy_at_the_edges(target, case):
    attend(target, *case)


def test_attention_of_few_rows_takes_f16():
    attend("sm_90a", 16, 64, 64, 16, 9, 70, np.float16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", TARGETS)
def test_few_rows_take_fewer_instructions_swapped_than_as_a_whole_tile(target):
    few, whole = (attend(target, tile, 64, 64, 16, 8, 64).instructions for tile in (8, 64))
    assert few < 0.8 * whole, (few, whole)


# Of the built-in kernel: what is given of a batch, of a schedule and of the operation.
RAGGED: dict[str, Any] = {"cached": [70, 0, 5], "new": [3, 0, 9]}
BUILT_IN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "no mask": (RAGGED, {"few": 8}, {"mask": "null"}),
    "causal": (RAGGED, {"few": 32}, {}),
    "window": (RAGGED, {"few": 16}, {"mask": "sliding_window", "span": 33}),
    "chunks": (RAGGED, {"few": 32}, {"mask": "chunked_causal", "span": 100}),
    "softcap, slopes, sinks": (RAGGED, {"few": 16}, {"softcap": 20.0, "slopes": True, "sinks": True}),
    "negative scale": (RAGGED, {"few": 24}, {"scale": -0.3}),
    "growing scores": ({"cached": [260, 130], "new": [3, 5]}, {"few": 16}, {"scale": 2.0}),
    "group of 8": ({**RAGGED, "group": 8, "num_heads": 2}, {"few": 8}, {}),
    "head of 128": ({**RAGGED, "head_size": 128}, {"few": 16, "keys": 128}, {}),
    "head of 192, pages of 64": ({**RAGGED, "head_size": 192, "page_size": 64}, {"few": 8}, {}),
    "pages of 5": ({**RAGGED, "page_size": 5}, {"few": 16, "maps": False}, {}),
    "8 bits": ({**RAGGED, "dtype": "f8e5m2"}, {"few": 16}, {}),
    "8 bits, scaled": (
        {**RAGGED, "dtype": "i8", "scale_dtype": "f32", "granularity": 16}, {"few": 16, "maps": False}, {}
    ),
    "f16": ({**RAGGED, "dtype": "f16"}, {"few": 8}, {}),
    "no producer": (RAGGED, {"few": 16, "producer": False}, {}),
    "splits": ({"cached": [260, 20], "new": [4, 1]}, {"few": 16, "splits": 3, "most": 4}, {}),
    "a queue, queries ahead": (
        RAGGED, {"few": 16, "blocks": 2, "queue": True, "entries": (("query_stages", 2),)}, {}
    ),
    "one stage": (RAGGED, {"few": 32, "stages": 1}, {}),
}  # fmt: skip


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("target", TARGETS)
def test_the_built_in_kernel_gives_the_answers_of_the_model_with_few_rows(target, name):
    given, choice, operation = BUILT_IN[name]
    if target == "sm_80":
        choice = {**choice, "producer": False, "maps": False}
    tiles.check(tiles.batch(**given), tiles.Choice(target=target, **choice), **operation)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [Order("backward", "late"), Order("random", "random", 1)], ids=str)
def test_the_order_of_warps_and_copies_changes_no_result_of_few_rows(order):
    tiles.check(tiles.batch([130], [8]), tiles.Choice(few=16), orders=[order])


# --- layouts ---------------------------------------------------------------------------------------


def test_a_transposed_layout_holds_the_transpose():
    for text, shape in (("mma:4", (128, 24)), ("wgmma:12", (192, 40)), ("c1 r8 / c2 c4 r1 r2 r4 / r16 r32", (64, 40))):
        layout = tl.parse(text, shape)
        turned = layout.transposed
        assert turned.transposed == layout
        for warp in range(layout.warps):
            for lane in (0, 1, 5, 31):
                for register in range(layout.registers):
                    assert turned.position(register, lane, warp) == layout.position(register, lane, warp)[::-1]


@pytest.mark.parametrize("name", ["mma:4", "mma:12", "wgmma:8"])
def test_vectors_of_a_transposed_layout_are_read_back_from_their_names(name):
    warps = int(name.partition(":")[2])
    layout = tl.parse(f"transposed({name})", (24, 32 * warps))
    for made, what, extent in ((tl.row_vector(layout), "rows", 24), (tl.column_vector(layout), "columns", 32 * warps)):
        text = f"{what}(transposed({name}))"
        assert tl.parse(text, (extent,)) == made
        assert str(tl.parse(text, (extent,))) == text
