# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over lists of sources is one softmax over the keys of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.operands import ragged_parts
from reference.places import Place
from reference.random_caches import random_query, random_values, stored_problem
from reference.shared_prefixes import close, combined

import kvarn as kv
from kvarn.dialect import dtypes

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}
CACHED, NEW = [30, 0, 9, 5], [2, 1, 0, 1]


def attend(place: Any, sources: Any, query: np.ndarray, offsets: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Over problems' layer 1."""
    out, lse = place.put(np.full(query.shape, 72, query.dtype)), place.put(np.full(query.shape[:2], 72, np.float32))
    collections = [place.collection(p.collection) for p in sources]
    given = {n: [place.put(x) if isinstance(x, np.ndarray) else x for x in v] if isinstance(v, list) else v
             for n, v in options.items()}  # fmt: skip
    if "sinks" in given:
        given["sinks"] = place.put(given["sinks"])
    layers = [1] * len(sources)
    kv.ops.attention(collections, layers, place.put(query), place.put(offsets), out=out, lse=lse, **given)
    return place.get(out), place.get(lse)


def test_a_window_and_a_compressed_cache_are_one_softmax(place):
    """Kinds, element types, lengths and masks of their own; sequence 1 has no compressed keys, and NaN lies behind."""
    dtype = "f16"
    rng, window = stored_problem(1, dtype=dtype, cached=CACHED, new=NEW, head_size=16)
    compressed = stored_problem(
        2, "continuous", dtype="f8e4m3", cached=[7, 0, 3, 40], new=[0, 0, 0, 0], head_size=16, num_heads=1
    )[1]
    for cache in window.caches(1):
        nothing = np.full((20, 2, 16), np.nan, np.float16)
        cache.store(0, np.arange(2)[:, None], np.arange(20)[:, None, None], np.arange(16), nothing)
    query, offsets, none = random_query(rng, window, 4, dtype), window.row_offsets, np.zeros(5, np.uint32)
    sinks = rng.standard_normal(4).astype(np.float32)
    masks: dict[str, Any] = {"mask": ["null", "causal"], "window": [None, 6], "kv_offsets": [none, None]}
    found = attend(place, [compressed, window], query, offsets, sinks=sinks, **masks)
    of_compressed = reference.attention(compressed.collection, 1, query, offsets, mask="null", kv_offsets=none)
    of_window = reference.attention(window.collection, 1, query, offsets, mask="sliding_window", window=6, sinks=sinks)
    close(found, combined(*of_compressed, *of_window), TOLERANCE[dtype])


def test_three_sources_in_any_order_give_the_same_up_to_rounding():
    problems = [stored_problem(s, dtype="f16", cached=c, new=NEW, head_size=16)[1]
                for s, c in ((3, CACHED), (4, [0, 0, 0, 0]), (5, [70, 2, 0, 1]))]  # fmt: skip
    query, offsets = random_query(np.random.default_rng(6), problems[0], 4), problems[0].row_offsets
    wants = [reference.attention(p.collection, 1, query, offsets) for p in problems]
    want = combined(*combined(*wants[0], *wants[1]), *wants[2])
    for order in ([0, 1, 2], [2, 0, 1]):
        close(attend(Place(), [problems[i] for i in order], query, offsets), want, TOLERANCE["f16"])


def test_cross_attention_with_a_memory_of_dense_keys():
    """Collections and operands in one list; a list of one is that one."""
    rng, own = stored_problem(7, dtype="f32", cached=[5, 9], new=[2, 1], head_size=16)
    memory = stored_problem(8, dtype="f32", cached=[11, 0], new=[0, 3], head_size=16)[1]
    query, offsets = random_query(rng, own, 4), own.row_offsets
    keys, values = [make(*parts) for make, parts in ragged_parts(memory, 1)]
    found = kv.ops.attention(
        [own.collection, keys], [1, values], query, offsets, mask=["causal", "null"], return_lse=True
    )
    of_memory = reference.attention(memory.collection, 1, query, offsets, mask="null", kv_offsets=memory.row_offsets)
    want = combined(*reference.attention(own.collection, 1, query, offsets), *of_memory)
    close(found, want, TOLERANCE["f32"])
    one = kv.ops.attention([own.collection], [1], query, offsets)
    np.testing.assert_array_equal(one, kv.ops.attention(own.collection, 1, query, offsets))


def test_a_static_prefix_and_a_cache_are_the_cache_with_the_prefix_before_it():
    """What one cache of all tokens gives, up to rounding: the prefix is seen whole, and slots of no token are NaN."""
    _, whole = stored_problem(9, dtype="f32", cached=[24, 19], new=[1, 2], head_size=16, page_size=4)
    c, query, offsets = whole.collection, random_query(np.random.default_rng(9), whole, 4), whole.row_offsets
    prefix, lengths = c.lookup_table[:, :4].copy(), np.full(2, 16, np.uint32)  # the first four pages of each
    static = kv.PagedKVCacheCollection(c.blocks, lengths, prefix, 2, 16)
    own = c.with_tables(
        c.cache_lengths - np.uint32(16), np.ascontiguousarray(c.lookup_table[:, 4:]), max_cache_length=16
    )
    found = kv.ops.attention(
        [static, own], [1, 1], query, offsets, mask=["null", "causal"], kv_offsets=[np.zeros(3, np.uint32), None],
        return_lse=True,
    )  # fmt: skip
    close(found, reference.attention(c, 1, query, offsets), TOLERANCE["f32"])


def test_each_source_has_its_function_of_positions_and_its_schedule():
    rng, first = stored_problem(10, dtype="f32", cached=[5, 9], new=[2, 1], head_size=16)
    second = stored_problem(11, dtype="f32", cached=[20, 3], new=[2, 1], head_size=16)[1]
    query, offsets = random_query(rng, first, 4), first.row_offsets
    seen = np.array([4, 1], np.int32)
    found = kv.ops.attention(
        [first.collection, second.collection], [1, 1], query, offsets, return_lse=True, softcap=[None, 3.0],
        mask=["causal", (lambda b, h, q, k, n: k < n[b], seen)], schedule=[{"max_queries": 2}, None],
    )  # fmt: skip
    parts = [kv.ops.attention(first.collection, 1, query, offsets, return_lse=True)]
    counts = second.collection.with_tables(seen.astype(np.uint32), second.collection.lookup_table)
    parts.append(reference.attention(counts, 1, query, offsets, mask="null", softcap=3.0, kv_offsets=np.zeros(3, int)))
    close(found, combined(*parts[0], *parts[1]), 1e-4)


def test_padded_batches_take_lists():
    rng, first = stored_problem(12, dtype="f32", cached=[5, 9], new=[2, 2], head_size=16)
    second = stored_problem(13, dtype="f32", cached=[20, 3], new=[2, 2], head_size=16)[1]
    query = random_query(rng, first, 4)
    collections, offsets = [first.collection, second.collection], first.row_offsets
    found = kv.ops.attention_padded(
        collections, [1, 1], query.reshape(2, 2, 4, 16), np.full(2, 2, np.uint32), return_lse=True
    )
    wants = [reference.attention(c, 1, query, offsets) for c in collections]
    close(tuple(x.reshape(4, *x.shape[2:]) for x in found), combined(*wants[0], *wants[1]), TOLERANCE["f32"])


def test_lists_that_do_not_fit_are_refused_by_name():
    rng, problem = stored_problem(16, dtype="f32", cached=[5], new=[1], head_size=16)
    c, query, offsets = problem.collection, random_query(rng, problem, 4), problem.row_offsets
    with pytest.raises(ValueError, match="a list of sources must have at least one, got none"):
        kv.ops.attention([], [], query, offsets)
    with pytest.raises(ValueError, match="layers, or values, must be a list of 2 entries, one per source, got a int"):
        kv.ops.attention([c, c], 0, query, offsets)
    with pytest.raises(ValueError, match="got 1 entries"):
        kv.ops.attention([c, c], [0], query, offsets)
    with pytest.raises(ValueError, match="mask must be one for all sources or a list of 2, got a list of 3"):
        kv.ops.attention([c, c], [0, 0], query, offsets, mask=["null"] * 3)
    with pytest.raises(ValueError, match="shared must be None for a list of sources"):
        kv.ops.attention([c, c], [0, 0], query, offsets, shared=object())
    out = random_values(rng, query.shape, dtypes.f32)
    before = out.copy()
    with pytest.raises(IndexError, match=r"layer must be in \[0, 2\), got 7"):
        kv.ops.attention([c, c], [0, 7], query, offsets, out=out)
    np.testing.assert_array_equal(out, before)
