# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reference models against worked vectors, invariants and direct formulas."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import attention as att, model
from reference.random_caches import bits, clone, fill_cached, random_problem, random_values, same_buffers

from kvarn.caches import PagedKVCacheCollection, saturating_cast
from kvarn.dialect import dtypes, layout

KINDS = ("paged", "continuous", "fa3")


def rng(seed=0):
    return np.random.default_rng(seed)


def test_vector_of_mla_prefill_plan():
    rows, cached, lengths = model.mla_prefill_plan([0, 2, 5, 6], [5, 0, 7], 8, 4)
    assert rows.tolist() == [[0, 7, 8, 8], [0, 0, 2, 8], [0, 0, 0, 2], [0, 0, 0, 0]]
    assert cached.tolist() == [[0, 0, 0], [7, 1, 0], [7, 3, 6], [7, 3, 8]]
    assert lengths.tolist() == [8, 8, 2, -1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=5), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_mla_prefill_plan_against_the_written_formulas(pairs, buffer_tokens):
    cached = np.array([p[0] for p in pairs], np.int64)
    offsets = np.concatenate([[0], np.cumsum([p[1] for p in pairs])]).astype(np.int64)
    batch, chunks = len(pairs), 4
    rows, placed, lengths = model.mla_prefill_plan(offsets, cached, buffer_tokens, chunks)
    starts = [int(cached[:b].sum() + offsets[b]) for b in range(batch + 1)]
    for c in range(chunks):
        for b, start in enumerate(starts):
            first = start // buffer_tokens
            assert rows[c, b] == (buffer_tokens if c < first else start % buffer_tokens if c == first else 0)
        last = starts[-1] // buffer_tokens
        assert lengths[c] == (buffer_tokens if c < last else starts[-1] % buffer_tokens if c == last else -1)
    for b in range(batch):
        left, done = starts[b + 1] - starts[b], 0
        for c in range(chunks):
            assert placed[c, b] == done
            take = min(left, buffer_tokens - int(rows[c, b]))
            left, done = left - take, done + take


def test_vector_of_remap_sparse_indices():
    # the two vectors differ in the last token: past the table's second page, or in it
    table = np.array([[10, 5, 99, 99], [3, 20, 99, 99]])
    logical = np.array([[0, 129, -1, 256], [0, 129, -1, 200]])
    out = model.remap_sparse_indices(logical, [0, 1, 2], table, 128, 21)
    assert out.tolist() == [[1280, 641, -1, -1], [384, 2561, -1, 2632]]
    assert model.remap_sparse_indices([[600]], [0, 1], table, 128, 100).tolist() == [[-1]]
    assert model.remap_sparse_indices([[300]], [0, 1], table, 128, 100).tolist() == [[99 * 128 + 44]]
    assert model.remap_sparse_indices(np.zeros((0, 4)), [0, 0, 0], table, 128, 21).shape == (0, 4)


def test_cache_row_offsets_and_increment():
    assert model.cache_row_offsets([0, 2, 2, 5], [7, 0, 3]).tolist() == [0, 9, 9, 15]
    assert model.increment_cache_lengths(np.array([7, 0, 3], np.int32), [0, 2, 2, 5]).tolist() == [9, 0, 6]
    assert model.token_positions([0, 2, 2, 5], [7, 0, 3])[0].tolist() == [0, 0, 2, 2, 2]
    assert model.token_positions([0, 2, 2, 5], [7, 0, 3])[1].tolist() == [7, 8, 3, 4, 5]
    assert model.token_positions([3, 5], [1])[1].tolist() == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "i8"])
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


def test_store_padded_skips_the_padding():
    p = random_problem(rng(), cached=[5, 2, 0], new=[3, 1, 4], poison=0.0)
    cache = p.collection.get_value_cache(0)
    x = rng(3).standard_normal((3, 4, 2, 16)).astype(np.float32)
    model.store_padded(cache, x, [3, 1, 4])
    for b, n in enumerate([3, 1, 4]):
        for t in range(4):
            got = cache.load(b, 0, int(p.cached[b]) + t, 0, width=16)
            assert np.array_equal(got, x[b, t, 0] if t < n else np.zeros(16))


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


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2", "i8"])
@pytest.mark.parametrize(
    ("scale_dtype", "granularity"), [("f32", 16), ("f16", 4), ("bf16", 8), ("f8e8m0", 16), ("f32", 1), ("f32", 10)]
)
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


def test_append_to_mla_has_no_value():
    p = random_problem(rng(), "paged", "bf16", num_heads=1, head_size=64, is_mla=True, cached=[4], new=[2])
    key = random_values(rng(1), (2, 1, 64), dtypes.bf16)
    model.append(p.collection, 0, key, None, p.row_offsets)
    assert np.array_equal(p.collection.get_key_cache(0).load(0, 0, 5, 0, width=64), key[1, 0])


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


def test_rope_append_equals_append_then_rope_in_place():
    p = random_problem(rng(9), "continuous", "f32", cached=[6, 0, 2], new=[2, 0, 3])
    q, k, v = (rng(i).standard_normal((5, h, 16)).astype(np.float32) for i, h in ((1, 4), (2, 2), (3, 2)))
    freqs = rng(4).standard_normal((30, 8)).astype(np.float32)
    other = clone(p.collection)
    got = model.rope_append(p.collection, 1, q, k, v, p.row_offsets, freqs)
    model.append(other, 1, k, v, p.row_offsets)
    again = model.rope_in_place(other, 1, q, p.row_offsets, freqs)
    assert np.array_equal(got, again)
    assert same_buffers(p.collection, other)
    normed = model.rope_append(
        p.collection, 1, q, k, v, p.row_offsets, freqs, q_gamma=np.ones(16), k_gamma=np.ones(16), eps=0.0
    )
    scale = np.sqrt((q.astype(np.float64) ** 2).mean(-1, keepdims=True))
    assert np.allclose(normed * scale, got)


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


def test_gather_rows():
    p = random_problem(rng(3), dtype="bf16", num_layers=3, page_size=32, cached=[40, 70, 5], new=[0, 0, 0])
    cache = p.collection.get_value_cache(1)
    ids = np.array([[0, 39, 7], [4, 4, 0]], np.int32)
    got = model.gather_rows(cache, ids, [0, 1, 1, 2])  # no row of sequence 1
    for r, b in ((0, 0), (1, 2)):
        for j, t in enumerate(ids[r]):
            assert np.array_equal(got[r, j, 1], cache.load(b, 1, int(t), 0, width=16))
    assert model.gather_rows(cache, np.zeros((0, 4)), [0, 0, 0, 0]).shape == (0, 4, 2, 16)


@pytest.mark.parametrize("kind", ["paged", "fa3"])
def test_copy_pages(kind):
    options = {"scale_dtype": "f32", "granularity": 8} if kind == "paged" else {}
    p = random_problem(rng(3), kind, "i8", cached=[40, 70], new=[0, 0], **options)
    n = p.collection.num_blocks
    axis = 1 if kind == "fa3" else 0
    before = np.moveaxis(p.collection.blocks.copy(), axis, 0)
    model.copy_pages(p.collection, np.array([0, 2, n, 1]), np.array([1, 3, 0, -1]))
    after = np.moveaxis(p.collection.blocks, axis, 0)
    assert np.array_equal(after[[1, 3]], before[[0, 2]])
    untouched = [i for i in range(n) if i not in (1, 3)]
    assert np.array_equal(after[untouched], before[untouched])
    if kind == "paged":
        assert np.array_equal(bits(p.collection.scales[[1, 3]]), bits(p.collection.scales[[0, 2]]))


def test_convert_between_kinds():
    p = random_problem(rng(3), "fa3", "f32", page_size=8, cached=[20, 0, 9], new=[0, 0, 0])
    q = random_problem(rng(4), "paged", "bf16", page_size=16, cached=[20, 0, 9], new=[0, 0, 0])
    source, target = p.collection.get_value_cache(1), q.collection.get_key_cache(0)
    model.convert(source, target)
    for b, length in ((0, 20), (2, 9)):
        expected = saturating_cast(model.read(source, b, np.arange(length)), dtypes.bf16)
        assert np.array_equal(model.read(target, b, np.arange(length)), expected.astype(np.float64))


def test_radd_of_a_slice():
    p = random_problem(rng(3), dtype="f32", cached=[4, 6, 0], new=[2, 3, 1], poison=0.0)
    before = clone(p.collection)
    a = rng(1).standard_normal((4, 64)).astype(np.float32)
    model.radd(p.collection, 1, a, p.row_offsets[1:], batch_offset=1)  # sequences 1 and 2: rows 2 to 6 of the batch
    k, v = p.collection.get_key_cache(1), p.collection.get_value_cache(1)
    old = before.get_key_cache(1)
    assert np.array_equal(k.load(1, 1, 8, 0, width=16), old.load(1, 1, 8, 0, width=16) + a[2, 16:32])
    assert np.array_equal(v.load(2, 0, 0, 0, width=16), a[3, 32:48])
    assert (np.asarray(p.collection.blocks != before.blocks).sum()) == a.size
    model.radd(before, 0, a[:0], p.row_offsets[3:], 3)


def test_iadd_2m():
    p = random_problem(rng(3), dtype="f32", cached=[4, 6], new=[2, 3], poison=0.0)
    before = clone(p.collection)
    kv = rng(1).standard_normal((6, 32)).astype(np.float32)  # m = 3: two tokens of sequence 0, one of 1
    model.iadd_2m(p.collection, 0, kv, p.row_offsets)
    assert np.array_equal(p.collection.get_key_cache(0).load(1, 1, 6, 0, width=16), kv[2, 16:])
    assert np.array_equal(p.collection.get_value_cache(0).load(0, 0, 5, 0, width=16), kv[4, :16])
    assert (np.asarray(p.collection.blocks != before.blocks).sum()) == kv.size


def test_mla_decompress_rows_follow_the_plan():
    p = random_problem(rng(3), dtype="f32", num_heads=1, is_mla=True, cached=[7, 3, 8], new=[0, 0, 0])
    cache = p.collection.get_key_cache(0)
    rows, placed, lengths = model.mla_prefill_plan(p.row_offsets, p.cached, 8, 4)
    chunks = [model.mla_decompress_rows(cache, rows[c], placed[c], int(lengths[c])) for c in range(3)]
    expected = np.concatenate([model.read(cache, b, np.arange(n))[:, 0] for b, n in enumerate(p.cached)])
    assert np.array_equal(np.concatenate(chunks), expected.astype(np.float32))


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


def test_attention_ignores_poison_and_the_order_of_pages():
    base = random_problem(rng(1), cached=[37], new=[4], poison=np.inf)
    fill_cached(rng(2), base, base.cached + base.new)
    query = rng(3).standard_normal((4, 2, 16))
    out, _ = att.attention(base.collection, 0, query, base.row_offsets)
    assert np.isfinite(out).all()
    c = base.collection
    order = rng(4).permutation(c.num_blocks)
    moved = np.empty_like(c.blocks)
    moved[order] = c.blocks
    again = PagedKVCacheCollection(moved, c.cache_lengths, order.astype(np.uint32)[c.lookup_table], 4, 41)
    assert np.array_equal(att.attention(again, 0, query, base.row_offsets)[0], out)


def test_prefix_hit_equals_cold_start():
    cold = random_problem(rng(1), cached=[0], new=[40])
    fill_cached(rng(2), cold, cold.new)
    query = rng(3).standard_normal((40, 2, 16))
    whole, _ = att.attention(cold.collection, 0, query, [0, 40])
    c = cold.collection
    hit = PagedKVCacheCollection(c.blocks, np.array([32], np.uint32), c.lookup_table, 8, 40)
    part, _ = att.attention(hit, 0, query[32:], [0, 8])
    assert np.allclose(part, whole[32:], rtol=1e-12)


def test_mla_attention_is_attention_with_a_prefix_as_value():
    p = random_problem(rng(11), "paged", "f32", num_heads=1, head_size=24, is_mla=True, cached=[20, 0], new=[3, 2])
    fill_cached(rng(12), p, p.cached + p.new)
    query = rng(13).standard_normal((p.tokens, 6, 24))
    out, lse = att.mla_attention(p.collection, 1, query, p.row_offsets, value_size=16, scale=0.3)
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
