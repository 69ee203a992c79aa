# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops over tokens in steps of a tile give what loops over tiles give: on the host and, emulated, on GPUs."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv

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
