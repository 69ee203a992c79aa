# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention whose keys and values are operands, or come from several sources; ``reference.attention_rows`` has rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import attention as reference, model
from reference.case import KERNELS, LAYER, NULL, Case, window
from reference.operands import ragged_parts
from reference.random_caches import random_values, stored_problem
from reference.shared_prefixes import close, combined

import kvarn as kv
from kvarn.caches import (
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    LayoutTensorMHAOperand,
    PagedKVCacheCollection,
    RaggedMHAOperand,
)
from kvarn.dialect import dtypes

pytestmark = pytest.mark.whole

MASKS = [
    {}, {"mask": "null"}, {"mask": "sliding_window", "window": 7}, {"mask": "chunked", "chunk": 24},
    {"mask": "chunked_causal", "chunk": 5},
]  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), queries=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    keys=st.lists(st.integers(0, 20), min_size=4, max_size=4), form=st.sampled_from(["dense", "ragged"]),
    options=st.sampled_from(MASKS),
)  # fmt: skip
def test_the_queries_are_the_last_keys_own(seed, queries, keys, form, options):
    """Also where there are more queries than keys: those before the first key see what a mask lets them, or nothing."""
    rng = np.random.default_rng(seed)
    keys = keys[: len(queries)]
    offsets, starts = np.cumsum([0, *queries]).astype(np.uint32), np.cumsum([0, *keys])
    query = rng.standard_normal((int(offsets[-1]), 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, int(starts[-1]), 2, 8)).astype(np.float32)
    operands: list[Any] = [RaggedMHAOperand(x, starts.astype(np.uint32)) for x in (k, v)]
    if form == "dense":
        buffers = [reference.padded(x, starts, max(keys) + 1, np.nan) for x in (k, v)]
        operands = [LayoutTensorMHAOperand(x, lengths=np.array(keys, np.uint32)) for x in buffers]
    out, lse = kv.ops.attention(*operands, query, offsets, return_lse=True, **options)
    for b, (m, n) in enumerate(zip(queries, keys, strict=True)):
        rows, at = slice(offsets[b], offsets[b + 1]), slice(starts[b], starts[b] + n)
        span = options.get("window") or options.get("chunk")
        seen = reference.visible(options.get("mask", "causal"), n - m + np.arange(m), np.arange(n), span)
        want, want_lse = reference.dense_attention(query[rows], k[at], v[at], seen, 8**-0.5)
        np.testing.assert_allclose(out[rows], want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["simt", "mma"])
@pytest.mark.parametrize("options", [{}, {"mask": "chunked", "chunk": 4}], ids=str)
def test_more_queries_than_keys_on_a_gpu(kernel, options):
    place, schedule = KERNELS[kernel]
    rng = np.random.default_rng(5)
    query, (k, v) = random_values(rng, (9, 2, 32), dtypes.f16), random_values(rng, (2, 5, 1, 32), dtypes.f16)
    out, lse = np.zeros_like(query), np.zeros(query.shape[:2], np.float32)
    operands = [RaggedMHAOperand(x, np.array([0, 5], np.uint32)) for x in (k, v)]
    with place.active():
        kv.ops.attention(*operands, query, np.array([0, 9], np.uint32), out=out, lse=lse, schedule=schedule, **options)
    seen = reference.visible(options.get("mask", "causal"), np.arange(-4, 5), np.arange(5), 4)
    want, want_lse = reference.dense_attention(*(x.astype(float) for x in (query, k, v)), seen, 32**-0.5)
    np.testing.assert_allclose(out, want, rtol=4e-3, atol=4e-3)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))


def test_dense_operands_without_lengths_have_all_their_tokens():
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 3, 7, 2, 8)).astype(np.float32)
    query = rng.standard_normal((3, 4, 8)).astype(np.float32)
    operands = LayoutTensorMHAOperand(k), LayoutTensorMHAOperand(v)
    out = kv.ops.attention(*operands, query, np.arange(4, dtype=np.int32), mask="null")
    for b in range(3):
        want, _ = reference.dense_attention(query[b : b + 1], k[b], v[b], np.ones((1, 7), bool), 8**-0.5)
        np.testing.assert_allclose(out[b : b + 1], want, rtol=2e-5, atol=2e-5)


def test_fewer_values_than_keys_end_the_keys():
    """Offsets are read on the device: what the values' say must keep a kernel inside them."""
    rng = np.random.default_rng(11)
    k, v = rng.standard_normal((2, 6, 2, 8)).astype(np.float32)
    query, offsets = rng.standard_normal((1, 4, 8)).astype(np.float32), np.array([0, 1], np.uint32)
    keys = RaggedMHAOperand(k, np.array([0, 6], np.uint32))
    out = kv.ops.attention(keys, RaggedMHAOperand(v[:4], np.array([1, 4], np.uint32)), query, offsets)
    want, _ = reference.dense_attention(query, k[:3], v[1:4], np.ones((1, 3), bool), 8**-0.5)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


def test_operands_of_different_caches_find_their_own_pages():
    case, other = (Case(cached=[50, 0, 7], new=[20, 3, 1], dtype="f32", seed=seed) for seed in (7, 8))
    keys, values = case.problem.caches(LAYER)[0], other.problem.caches(0)[1]
    out = kv.ops.attention(KVCacheMHAOperand(keys), KVCacheMHAOperand(values), case.query_rows, case.offsets)
    for b, (cached, new) in enumerate(zip(case.cached, case.new, strict=True)):
        t, rows = np.arange(cached + new), slice(case.offsets[b], case.offsets[b + 1])
        seen = reference.visible("causal", cached + np.arange(new), t)
        k, v = model.read(keys, b, t), model.read(values, b, t)
        want, _ = reference.dense_attention(case.query_rows[rows], k, v, seen, 64**-0.5)
        np.testing.assert_allclose(out[rows], want, rtol=2e-5, atol=2e-5)


def scales_operand() -> KVCacheScalesMHAOperand:
    pool, scales = np.ones((5, 2, 1, 4, 2, 16), np.int8), np.ones((5, 2, 1, 4, 2, 4), np.float32)
    table = np.array([[0, 1, 4, 4], [2, 3, 4, 4]], np.uint32)
    c = PagedKVCacheCollection(pool, np.array([5, 6], np.uint32), table, 1, 8, scales, 4)
    return KVCacheScalesMHAOperand(c.get_key_cache(0))


def test_operands_that_do_not_fit_are_refused():
    def dense(*shape: int, dtype: Any = np.float32) -> LayoutTensorMHAOperand:
        return LayoutTensorMHAOperand(np.zeros(shape, dtype))

    keys = values = dense(2, 6, 2, 16)
    query, offsets = np.zeros((3, 4, 16), np.float32), np.array([0, 1, 3], np.int32)
    flat = RaggedMHAOperand(np.zeros((12, 2, 16), np.float32), np.array([0, 5, 12], np.uint32))
    shown = scales_operand()
    cases: list[Any] = [
        ((keys, 0, query, offsets), {}, "values must be an operand like the keys, got int"),
        ((keys, dense(2, 6, 2, 16, dtype=np.float16), query, offsets), {}, "keys and values must have the same par"),
        ((keys, flat, query, offsets), {}, "keys and values must have the same parameters"),
        ((keys, dense(3, 6, 2, 16), query, offsets), {}, "values must have the 2 sequences of the keys, got 3"),
        ((keys, dense(2, 5, 2, 16), query, offsets), {}, "values must have the 6 tokens of the keys in dimension 1"),
        ((shown, shown, query, offsets), {}, "keys must be an operand of keys, got one that shows"),
        ((keys, values, query, offsets[:2]), {}, r"row_offsets must have shape \[3\]"),
        ((keys, values, query[:, :3], offsets), {}, "query must have a multiple of the 2 KV heads"),
        ((keys, values, query.astype(np.float16), offsets), {}, "query must have dtype f32"),
        ((keys, values, query, offsets), {"kv_offsets": offsets}, "kv_offsets must be None for dense"),
        ((np.zeros(3), 0, query, offsets), {}, "collection must be a KV cache collection"),
    ]
    for operands, options, message in cases:
        with pytest.raises((TypeError, ValueError), match=f"kv.ops.attention: {message}"):
            kv.ops.attention(*operands, **options)


# --- several sources ---------------------------------------------------------------------------------

OF_F32: dict[str, Any] = {"dtype": "f32", "heads": 2, "group": 2, "head_size": 16}
NONE = np.zeros(3, np.uint32)


def test_a_window_and_a_compressed_cache_are_one_softmax(place):
    """Kinds, element types, lengths and masks of their own; sequence 1 has no compressed keys, and NaN lies behind."""
    recent = Case(cached=[30, 0, 9, 5], new=[2, 1, 0, 1], dtype="f16", group=2, heads=2, head_size=16, mask=window(6),
                  sinks=True)  # fmt: skip
    compressed = stored_problem(
        2, "continuous", "f8e4m3", cached=[7, 0, 3, 40], new=[0] * 4, head_size=16, num_heads=1
    )[1]
    for cache in recent.problem.caches(LAYER):
        nothing = np.full((20, 2, 16), np.nan, np.float16)
        cache.store(0, np.arange(2)[:, None], np.arange(20)[:, None, None], np.arange(16), nothing)
    none = np.zeros(5, np.uint32)
    sources = [place.collection(p.collection) for p in (compressed, recent.problem)], [LAYER, LAYER]
    masks: dict[str, Any] = {"mask": ["null", "causal"], "window": [None, 6], "kv_offsets": [none, None]}
    found = recent.launch(place, kv.ops.attention, sources, recent.query_rows, recent.offsets, **masks)
    of_compressed = reference.attention(
        compressed.collection, LAYER, recent.query_rows, recent.offsets, mask="null", kv_offsets=none
    )
    close(found, combined(*of_compressed, *recent.want()), 4e-3)


def test_three_sources_in_any_order_give_the_same_up_to_rounding():
    cases = [Case(cached=cached, new=[2, 1, 0, 1], **OF_F32, seed=seed)
             for seed, cached in ((3, [30, 0, 9, 5]), (4, [0, 0, 0, 0]), (5, [70, 2, 0, 1]))]  # fmt: skip
    query, offsets = cases[0].query_rows, cases[0].offsets
    collections = [x.problem.collection for x in cases]
    wants = [reference.attention(c, LAYER, query, offsets) for c in collections]
    want = combined(*combined(*wants[0], *wants[1]), *wants[2])
    for order in ([0, 1, 2], [2, 0, 1]):
        given = [collections[i] for i in order]
        close(kv.ops.attention(given, [LAYER] * 3, query, offsets, return_lse=True), want, 2e-5)


def test_cross_attention_with_a_memory_of_dense_keys():
    """Collections and operands in one list; a list of one is that one."""
    own, memory = Case(cached=[5, 9], new=[2, 1], **OF_F32), Case(cached=[11, 0], new=[0, 3], **OF_F32, seed=8)
    c, query, offsets = own.problem.collection, own.query_rows, own.offsets
    keys, values = [make(*parts) for make, parts in ragged_parts(memory.problem, LAYER)]
    found = kv.ops.attention([c, keys], [LAYER, values], query, offsets, mask=["causal", "null"], return_lse=True)
    of_memory = reference.attention(
        memory.problem.collection, LAYER, query, offsets, mask="null", kv_offsets=memory.offsets
    )
    close(found, combined(*own.want(), *of_memory), 2e-5)
    one = kv.ops.attention([c], [LAYER], query, offsets)
    np.testing.assert_array_equal(one, kv.ops.attention(c, LAYER, query, offsets))


def test_a_static_prefix_and_a_cache_are_the_cache_with_the_prefix_before_it():
    """What one cache of all tokens gives, up to rounding: the prefix is seen whole, and slots of no token are NaN."""
    case = Case(cached=[24, 19], new=[1, 2], **OF_F32, page_size=4)
    c: Any = case.problem.collection
    prefix, lengths = c.lookup_table[:, :4].copy(), np.full(2, 16, np.uint32)  # the first four pages of each
    static = kv.PagedKVCacheCollection(c.blocks, lengths, prefix, 2, 16)
    rest = np.ascontiguousarray(c.lookup_table[:, 4:])
    own = c.with_tables(c.cache_lengths - np.uint32(16), rest, max_cache_length=16)
    found = kv.ops.attention(
        [static, own], [LAYER] * 2, case.query_rows, case.offsets, mask=["null", "causal"], kv_offsets=[NONE, None],
        return_lse=True,
    )  # fmt: skip
    close(found, case.want(), 2e-5)


def test_each_source_has_its_function_of_positions_and_its_schedule():
    first, second = (Case(cached=cached, new=[2, 1], **OF_F32) for cached in ([5, 9], [20, 3]))
    query, offsets, seen = first.query_rows, first.offsets, np.array([4, 1], np.int32)
    found = kv.ops.attention(
        [x.problem.collection for x in (first, second)], [LAYER] * 2, query, offsets, return_lse=True,
        softcap=[None, 3.0], mask=["causal", (lambda b, h, q, k, n: k < n[b], seen)],
        schedule=[{"max_queries": 2}, None],
    )  # fmt: skip
    of_second = reference.attention(
        second.problem.collection, LAYER, query, offsets, mask=lambda b, h, q, k: k < seen[b], softcap=3.0
    )
    close(found, combined(*first.want(), *of_second), 1e-4)


def test_padded_batches_take_lists():
    first, second = (Case(cached=cached, new=[2, 2], **OF_F32) for cached in ([5, 9], [20, 3]))
    collections = [x.problem.collection for x in (first, second)]
    query = first.query_rows.reshape(2, 2, 4, 16)
    found = kv.ops.attention_padded(collections, [LAYER] * 2, query, np.full(2, 2, np.uint32), return_lse=True)
    want = combined(*first.want(), *reference.attention(collections[1], LAYER, first.query_rows, first.offsets))
    close(tuple(x.reshape(4, *x.shape[2:]) for x in found), want, 2e-5)


def test_lists_that_do_not_fit_are_refused_by_name():
    case = Case(cached=[5], new=[1], **OF_F32, mask=NULL)
    c, query, offsets = case.problem.collection, case.query_rows, case.offsets
    refused: list[Any] = [
        ([], [], {}, "a list of sources must have at least one, got none"),
        ([c, c], 0, {}, "layers, or values, must be a list of 2 entries, one per source, got a int"),
        ([c, c], [0], {}, "got 1 entries"),
        ([c, c], [0, 0], {"mask": ["null"] * 3}, "mask must be one for all sources or a list of 2, got a list of 3"),
        ([c, c], [0, 0], {"shared": object()}, "shared must be None for a list of sources"),
    ]
    for sources, layers, options, message in refused:
        with pytest.raises(ValueError, match=message):
            kv.ops.attention(sources, layers, query, offsets, **options)
    out = np.ones_like(query)
    with pytest.raises(IndexError, match=r"layer must be in \[0, 2\), got 7"):
        kv.ops.attention([c, c], [0, 7], query, offsets, out=out)
    assert (out == 1).all(), "nothing is written before all is looked at"
