# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reference models against their definitions, where these are more than a line; suites of operations use them.

Operations on index tables have vectors in tests/ops/test_index_tables.py.
"""

import numpy as np
import pytest
from reference import attention as att, model
from reference.random_caches import bits, clone, fill_cached, random_problem, random_values, same_buffers

from kvarn.caches import saturating_cast
from kvarn.dialect import dtypes, layout

KINDS = ("paged", "continuous", "fa3")


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("kind", "dtype"), [("paged", "f8e4m3"), ("continuous", "bf16"), ("fa3", "i8")])
def test_store_ragged_writes_the_new_slots_only(kind, dtype):
    p = random_problem(rng(1), kind, dtype, cached=[10, 0, 20, 3], new=[3, 2, 0, 17])
    before = clone(p.collection)
    cache = p.collection.get_key_cache(1)
    x = random_values(rng(2), (p.tokens, 2, 16), cache.dtype)
    model.store_ragged(cache, x, p.row_offsets)
    g = 0
    for b, (old, n) in enumerate(zip(p.cached, p.new, strict=True)):
        for i in range(n):
            assert np.array_equal(bits(cache.load(b, 1, int(old) + i, 0, width=16)), bits(x[g, 1]))
            g += 1
    changed = int((bits(p.collection.blocks) != bits(before.blocks)).sum())
    assert changed <= x.size
    assert changed > 0.9 * x.size
    # back to what it was when the new slots are set to the poison again
    model.store_ragged(
        cache, np.full(x.shape, before.blocks.flat[0] if dtype == "i8" else np.nan, x.dtype), p.row_offsets
    )
    if dtype != "i8":
        assert same_buffers(p.collection, before)


def test_append_without_scales_saturates_to_fp8():
    p = random_problem(rng(), dtype="f8e4m3", cached=[3], new=[2])
    key = np.full((2, 2, 16), 1e6, np.float32)
    key[1] = [-np.inf, np.nan, 0.3, 448, 464, 465, -1, 2**-10] * 2
    model.append(p.collection, 0, key, key, p.row_offsets)
    got = p.collection.get_value_cache(0).load(0, 1, np.array([3, 4])[:, None], np.arange(8), dtype="f32")
    assert (got[0] == 448).all()
    assert got[1].tolist()[:1] == [-448]
    assert np.isnan(got[1][1])
    assert got[1][2:].tolist() == [0.3125, 448, 448, 448, -1, 0.0]


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "granularity"),
    [("f8e4m3", "f32", 16), ("i8", "f16", 4), ("f8e5m2", "bf16", 8), ("i8", "f8e8m0", 16), ("f8e4m3", "f32", 1),
     ("f8e5m2", "f32", 10)],
)  # fmt: skip
def test_append_with_scales(dtype, scale_dtype, granularity):
    p = random_problem(
        rng(4), dtype=dtype, scale_dtype=scale_dtype, granularity=granularity, cached=[10, 0], new=[5, 3]
    )
    key = rng(5).standard_normal((8, 2, 16)).astype(np.float32)
    key[2] = 0
    model.append(p.collection, 1, key, key * 3, p.row_offsets)
    cache = p.collection.get_key_cache(1)
    largest = dtypes.of(dtype).largest
    for g in range(8):
        b, t = (0, 10 + g) if g < 5 else (1, g - 5)
        for granule in range(cache.head_dim_granularity):
            part = key[g, 0, granule * granularity : (granule + 1) * granularity]
            scale = float(cache.load_scale(b, 0, t, granule * granularity))
            ideal = np.abs(part).max() / largest
            if ideal == 0:
                assert scale == 1
            elif scale_dtype == "f8e8m0":
                assert ideal <= scale < 2 * ideal
            else:
                assert abs(scale - ideal) <= ideal * {"f32": 1e-7, "f16": 1e-3, "bf16": 4e-3}[scale_dtype] + 6e-8
            got = cache.load(b, 0, t, granule * granularity + np.arange(len(part)))
            step = {"i8": 0.5 * scale, "f8e4m3": np.abs(part) / 16 + scale, "f8e5m2": np.abs(part) / 8 + scale}[dtype]
            assert (np.abs(got - part) <= step * 1.02).all()
    # given scales are kept
    given_scale = np.full((8, 2, cache.head_dim_granularity), 0.5, np.float32)
    model.append(p.collection, 0, key, key, p.row_offsets, given_scale, given_scale)
    assert p.collection.get_key_cache(0).load_scale(1, 1, 2, 15) == 0.5


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turned", [16, 8, 2])
def test_rope_turns_pairs_by_their_angle(interleaved, turned):
    x = rng(7).standard_normal((3, 2, 16))
    angle = rng(8).standard_normal((20, turned // 2))
    freqs = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(20, turned)
    positions = np.array([4, 0, 19])
    got = model.rope(x, positions, freqs, interleaved=interleaved)
    expected = x.copy()
    for g, position in enumerate(positions):
        for k in range(turned // 2):
            i, j = (16 - turned + 2 * k, 16 - turned + 2 * k + 1) if interleaved else (k, k + turned // 2)
            c, s = freqs[position, 2 * k], freqs[position, 2 * k + 1]
            expected[g, :, i] = x[g, :, i] * c - x[g, :, j] * s
            expected[g, :, j] = x[g, :, i] * s + x[g, :, j] * c
    assert np.allclose(got, expected, rtol=0, atol=1e-15)
    assert np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1))


def test_mrope_sections_take_their_own_positions():
    x = rng(7).standard_normal((2, 1, 8))
    angle = rng(8).standard_normal((9, 4))
    freqs = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(9, 8)
    ids = np.array([[1, 2], [3, 4], [5, 6]])
    got = model.rope(x, ids, freqs, mrope_section=[1, 2, 1])
    parts = [model.rope(x, row, freqs) for row in ids]
    assert np.array_equal(got, np.concatenate([parts[0][..., :2], parts[1][..., 2:6], parts[2][..., 6:]], -1))


def test_rms_norm_touches_the_new_tokens_only():
    p = random_problem(rng(9), dtype="bf16", cached=[6, 0], new=[2, 3])
    cache = p.collection.get_key_cache(0)
    x = random_values(rng(1), (5, 2, 16), dtypes.bf16)
    model.store_ragged(cache, x, p.row_offsets)
    old = clone(p.collection)
    gamma = rng(2).standard_normal(16)
    model.rms_norm(cache, gamma[:8], 1e-5, p.row_offsets, weight_offset=1.0)
    wide = x[:, :, :8].astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (gamma[:8] + 1)
    got = cache.load(1, 1, 2, 0, width=16)
    assert np.array_equal(got[:8], saturating_cast(expected[4, 1], dtypes.bf16))
    assert np.array_equal(got[8:], x[4, 1, 8:])
    assert np.array_equal(cache.load(0, 1, 5, 0, width=16), old.get_key_cache(0).load(0, 1, 5, 0, width=16))
    whole = clone(old)
    model.rms_norm(whole.get_key_cache(0), np.ones(32), 0.0, p.row_offsets)
    row = np.asarray(whole.get_key_cache(0).load(1, np.arange(2)[:, None], 2, np.arange(16))).astype(np.float64)
    assert abs((row**2).mean() - 1) < 0.01


# --- attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mask", "span"), [("causal", None), ("null", None), ("sliding_window", 5), ("chunked", 7), ("chunked_causal", 7)]
)
def test_attention_row_by_row(kind, mask, span):
    p = random_problem(rng(11), kind, "f32", cached=[20, 0, 33], new=[3, 9, 0])
    fill_cached(rng(12), p, p.cached + p.new)
    query = rng(13).standard_normal((p.tokens, 4, 16))
    sinks = rng(14).standard_normal(4)
    out, lse = att.attention(
        p.collection, 1, query, p.row_offsets, mask=mask, window=span, chunk=span, sinks=sinks, softcap=3.0
    )
    k, v = p.caches(1)
    sequence, position = model.token_positions(p.row_offsets, p.cached)
    for g, (b, q) in enumerate(zip(sequence, position, strict=True)):
        keys = [
            t for t in range(p.cached[b] + p.new[b])
            if {"causal": t <= q, "null": True, "sliding_window": t <= q < t + 5, "chunked": t // 7 == q // 7,
                "chunked_causal": t // 7 == q // 7 and t <= q}[mask]
        ]  # fmt: skip
        for h in range(4):
            score = np.array([query[g, h] @ k.load(b, h // 2, t, 0, width=16).astype(np.float64) for t in keys]) / 4
            weight = np.exp(3 * np.tanh(score / 3))
            total = weight.sum() + np.exp(sinks[h])
            value = np.array([v.load(b, h // 2, t, 0, width=16) for t in keys], np.float64)
            assert np.allclose(out[g, h], weight @ value / total, rtol=1e-10)
            assert np.isclose(lse[g, h], np.log(total))


def test_rows_that_see_nothing_give_zeros():
    p = random_problem(rng(11), cached=[0, 4], new=[0, 2])
    fill_cached(rng(12), p, p.cached + p.new)
    query = rng(13).standard_normal((2, 2, 16))
    out, lse = att.attention(p.collection, 0, query, p.row_offsets, mask="null", kv_offsets=[0, 0, -4])
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    weights, lse = att.softmax_rows(np.zeros((2, 3)), np.zeros((2, 3), bool), np.array([0.5, -1.0]))
    assert (weights == 0).all()
    assert lse.tolist() == [0.5, -1.0]


def test_mla_attention_is_attention_with_a_prefix_as_value():
    p = random_problem(rng(11), "paged", "f32", num_heads=1, head_size=24, is_mla=True, cached=[20, 0], new=[3, 2])
    fill_cached(rng(12), p, p.cached + p.new)
    query = rng(13).standard_normal((p.tokens, 6, 24))
    out, lse = att.attention(p.collection, 1, query, p.row_offsets, value_size=16, scale=0.3)
    two = random_problem(rng(5), "paged", "f32", num_heads=1, head_size=24, cached=[20, 0], new=[3, 2])
    for b, n in ((0, 23), (1, 2)):
        rows = model.read(p.collection.get_key_cache(1), b, np.arange(n)).astype(np.float32)
        for cache in two.caches(0):
            model.write(cache, np.full(n, b), np.arange(n), rows)
    full, same = att.attention(two.collection, 0, query, p.row_offsets, scale=0.3)
    assert np.allclose(out, full[..., :16])
    assert np.allclose(lse, same)


# --- the builders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_problems_have_distinct_pages_and_poison(kind, seed):
    p = random_problem(rng(seed), kind, "bf16", batch=5)
    c = p.collection
    table = np.asarray(c.lookup_table)
    if kind == "continuous":
        assert len(set(table.tolist())) == 5
    else:
        used = table[table != p.null_page]
        layers = c.num_layers if kind == "fa3" else 1
        assert len(set(used.tolist())) == used.size == layers * int(layout.cdiv(p.cached + p.new, 16).sum())
        assert p.null_page == c.num_blocks - 1
    cached = int(p.cached.sum()) * 2 * 16 * 2 * c.num_layers
    assert (~np.isnan(c.blocks.astype(np.float32))).sum() == cached
