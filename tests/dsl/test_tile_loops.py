# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops of every form load tiles: GPU code, emulated, gives what the host gives, which has no stages and barriers."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering import remarks

SPEC = CacheSpec("paged", kv.bf16, 2, 64, 16)
ROWS, SIZE, PAGE = 64, 64, 16
QUERY, OUT = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2]


def _update(keys, values, q, j, count, m, total, o):
    k, v = keys.tile(0, 0, j, count, rows=ROWS), values.tile(0, 0, j, count, rows=ROWS)
    x = kv.masked(kv.dot(q, k.T), (j + kv.tile_index(ROWS) < count)[None, :])
    top = kv.math.max(m, x.max(axis=1))
    alpha, p = kv.math.exp2(m - top), kv.math.exp2(x - top[:, None])
    return top, total * alpha + p.sum(axis=1), kv.dot(kv.bf16(p), v, o * alpha[:, None])


@kv.kernel(block=128)
def by_tokens(query: QUERY, keys: kv.KVCache, values: kv.KVCache, first: kv.i32, out: OUT):
    row, count = kv.tile_index(ROWS), keys.cache_length(0)
    q = query.load_rows(row, columns=SIZE)
    m, total, o = kv.full(ROWS, -3.0e38), kv.full(ROWS, 0.0), kv.full((ROWS, SIZE), 0.0)
    for j in range(first, count, ROWS):
        m, total, o = _update(keys, values, q, j, count, m, total, o)
    out.store_rows(row, value=o / kv.math.max(total, 1.0e-30)[:, None])


@kv.kernel(block=128)
def by_tiles(query: QUERY, keys: kv.KVCache, values: kv.KVCache, first: kv.i32, out: OUT):
    row, count = kv.tile_index(ROWS), keys.cache_length(0)
    q = query.load_rows(row, columns=SIZE)
    m, total, o = kv.full(ROWS, -3.0e38), kv.full(ROWS, 0.0), kv.full((ROWS, SIZE), 0.0)
    for i in range(first // ROWS, (count + (ROWS - 1)) // ROWS):
        m, total, o = _update(keys, values, q, i * ROWS, count, m, total, o)
    out.store_rows(row, value=o / kv.math.max(total, 1.0e-30)[:, None])


def _run(kernel: Any, place: str, count: int, first: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    blocks = rng.standard_normal((20, 2, 1, PAGE, 1, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    table = rng.permutation(19)[None, :18].astype(np.uint32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([count], np.uint32), table, 1, 18 * PAGE)
    query = rng.standard_normal((ROWS, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    out = np.full((ROWS, SIZE), np.nan, np.float32)
    with contextlib.nullcontext() if place == "host" else kv.emulated(place):
        kernel[1, 128](query, pool.get_key_cache(0), pool.get_value_cache(0), first, out)
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, ROWS])
@pytest.mark.parametrize("place", ["host", "sm_90a", "sm_80"])
def test_a_loop_over_tokens_is_a_loop_over_tiles(place, first):
    """Stages and barrier phases are counted by iterations; the last iteration need not end at the last token."""
    for count in (0, 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 1, 4 * ROWS - 1):
        found, want = (_run(kernel, place, count, first) for kernel in (by_tokens, by_tiles))
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6, err_msg=f"{count} tokens")
        assert np.isfinite(found).all()


# --- other loops -------------------------------------------------------------------------------------

SCORES = kv.Buffer[kv.f32, 1]


def _largest(keys, h, q, j, count, best):
    k = keys.tile(0, h, j, count, rows=ROWS)
    x = kv.masked(kv.dot(q, k.T), (j + kv.tile_index(ROWS) < count)[None, :])
    return kv.math.max(best, x.max(axis=1))


@kv.kernel(block=128)
def of_while(query: QUERY, keys: kv.KVCache, out: SCORES):
    row, count, j, best = kv.tile_index(ROWS), keys.cache_length(0), 0, kv.full(ROWS, -3.0e38)
    q = query.load_rows(row, columns=SIZE)
    while j < count:
        best = _largest(keys, 0, q, j, count, best)
        j += ROWS
    out.scatter(row, value=best)


@kv.kernel(block=128)
def of_condition(query: QUERY, keys: kv.KVCache, out: SCORES):
    row, count, best = kv.tile_index(ROWS), keys.cache_length(0), kv.full(ROWS, -3.0e38)
    q = query.load_rows(row, columns=SIZE)
    for j in range(0, count, ROWS):
        if j != ROWS:
            best = _largest(keys, 0, q, j, count, best)
    out.scatter(row, value=best)


@kv.kernel(block=128)
def of_nested(query: QUERY, keys: kv.KVCache, out: SCORES):
    row, count, total = kv.tile_index(ROWS), keys.cache_length(0), kv.full(ROWS, 0.0)
    for _ in range(2):
        for h in range(keys.num_heads):
            q, best = query.load_rows(row, columns=SIZE), kv.full(ROWS, -3.0e38)
            for j in range(0, count, ROWS):
                best = _largest(keys, h, q, j, count, best)
            total = total + best
    out.scatter(row, value=total)


@kv.kernel(block=128)
def of_two(query: QUERY, keys: kv.KVCache, out: SCORES):
    """Two loops in a loop, of which the second needs the result of the first."""
    row, count, total = kv.tile_index(ROWS), keys.cache_length(0), kv.full(ROWS, 0.0)
    q = query.load_rows(row, columns=SIZE)
    for h in range(keys.num_heads):
        best = kv.full(ROWS, -3.0e38)
        for j in range(0, count, ROWS):
            best = _largest(keys, h, q, j, count, best)
        for j in range((count + (ROWS - 1)) // ROWS):
            k = keys.tile(0, h, j * ROWS, count, rows=ROWS)
            seen = (j * ROWS + kv.tile_index(ROWS) < count)[None, :]
            total = total + kv.math.exp2(kv.masked(kv.dot(q, k.T), seen) - best[:, None]).sum(axis=1)
    out.scatter(row, value=total)


FORMS = {"while": of_while, "condition": of_condition, "three nested": of_nested, "two in a loop": of_two}


def _scores(kernel: Any, place: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    blocks = rng.standard_normal((20, 2, 1, PAGE, 2, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    table = rng.permutation(19)[None, :18].astype(np.uint32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([count], np.uint32), table, 1, 18 * PAGE)
    query, out = (
        (rng.standard_normal((ROWS, SIZE), np.float32) / 4).astype(ml_dtypes.bfloat16),
        np.zeros(ROWS, np.float32),
    )
    with contextlib.nullcontext() if place == "host" else kv.emulated(place):
        kernel[1, 128](query, pool.get_key_cache(0), out)
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", FORMS)
def test_a_tile_may_be_loaded_in_any_loop(place, name):
    for count in (ROWS, 2 * ROWS + 1, 4 * ROWS - 1):
        found, want = (_scores(FORMS[name], where, count) for where in (place, "host"))
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3, err_msg=f"{count} tokens")


@pytest.mark.parametrize(("kernel", "why"), [
    (of_while, "a while loop loads it"), (of_condition, "a condition in a loop decides whether it is loaded"),
    (of_nested, "3 loops are nested around it"), (of_two, None),
])  # fmt: skip
def test_loads_that_no_loop_counts_are_multiplied_by_mma_sync(kernel, why):
    with remarks.collect() as found:
        made = kv.compile(kernel, QUERY, SPEC, SCORES, target="sm_90a")
        assert made.stages, "the stages run every pass, also where the code is cached"
    assert ("wgmma.mma_async" in made.asm["ptx"]) == (why is None)
    said = {r.message for r in found.matching("assign-kv-layouts:missed")}
    assert said == (set() if why is None else {f"products are computed by mma.sync, not by wgmma: {why}"})


def test_wgmma_is_refused_for_tiles_that_no_loop_counts():
    kernel = kv.kernel(of_while.function, block=128, schedule={"instruction": "wgmma"})
    why = "is a tile of a product by wgmma, which every iteration of a for loop must load, but a while loop loads it"
    with pytest.raises(kv.KernelError, match=why):
        kv.compile(kernel, QUERY, SPEC, SCORES, target="sm_90a")
