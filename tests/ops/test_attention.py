# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over caches on the host, against a float64 model: every mask, kind, element type and shape class.

Whatever holds no cached token is poison (NaN, or a large integer): unreferenced pages, the null page, the slots after
a sequence's last token. No case may show it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.random_caches import Problem, clone, random_query, stored_problem

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import dtypes

# Half a unit in the last place of what is written, and some for the sums.
TOLERANCE = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2}
SENTINEL = 77.0


problem_of = stored_problem
query_of = functools.partial(random_query, over_8_bits="f32")


def run(problem: Problem, query: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, of a buffer that had a sentinel in it."""
    out = np.full_like(query, SENTINEL)
    lse = np.full(query.shape[:2], SENTINEL, np.float32)
    found = kv.ops.attention(
        problem.collection, 1, query, problem.row_offsets, out=out, lse=lse, return_lse=True, **options
    )
    assert found[0] is out
    assert found[1] is lse
    return out, lse


def check(problem: Problem, query: np.ndarray, **options: Any) -> None:
    out, lse = run(problem, query, **options)
    wanted_options = {k: v for k, v in options.items() if k != "softcap"} | {"softcap": options.get("softcap") or 0.0}
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **wanted_options)
    assert_close(out, want, dtypes.of(query.dtype).name)
    assert_close(lse, want_lse, "f32", 1e-4)


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[dtype]
    got = np.asarray(got, np.float64)
    assert not np.isnan(got).any(), f"NaN at {np.argwhere(np.isnan(got))[0]}"
    nothing = np.isneginf(want)
    np.testing.assert_array_equal(np.isneginf(got), nothing)
    got, want = np.where(nothing, 0, got), np.where(nothing, 0, want)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


MASKS = [
    {"mask": "causal"},
    {"mask": "null"},
    {"mask": "sliding_window", "window": 7},
    {"mask": "chunked", "chunk": 8},
    {"mask": "chunked_causal", "chunk": 12},
]


@pytest.mark.parametrize("options", MASKS, ids=lambda o: o["mask"])
def test_each_mask_hides_what_it_says(options):
    rng, problem = problem_of(1, page_size=16, batch=5, longest=60)
    check(problem, query_of(rng, problem, 4), **options)


def test_a_window_or_a_chunk_narrows_the_causal_mask():
    rng, problem = problem_of(2)
    query = query_of(rng, problem, 2)
    for given, named in (({"window": 5}, "sliding_window"), ({"chunk": 8}, "chunked_causal")):
        got, _ = run(problem, query, **given)
        np.testing.assert_array_equal(got, run(problem, query, mask=named, **given)[0])


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_query_heads_share_the_kv_heads_of_their_group(group):
    rng, problem = problem_of(group, num_heads=3, head_size=16)
    check(problem, query_of(rng, problem, 3 * group))


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_any_page_size(page_size):
    rng, problem = problem_of(page_size, page_size=page_size, longest=150)
    check(problem, query_of(rng, problem, 4))


@pytest.mark.parametrize("head_size", [1, 7, 64, 80, 112, 128, 256])
def test_any_head_size(head_size):
    rng, problem = problem_of(head_size, head_size=head_size, num_heads=1)
    check(problem, query_of(rng, problem, 2))


@pytest.mark.parametrize("kind", ["continuous", "fa3"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_other_kinds_of_cache(kind, dtype):
    rng, problem = problem_of(5, kind, dtype, num_heads=2, head_size=64)
    check(problem, query_of(rng, problem, 4))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_is_computed_in_f32(dtype):
    rng, problem = problem_of(6, dtype=dtype, num_heads=2, head_size=64, longest=300)
    check(problem, query_of(rng, problem, 4))


QUANTIZED = [
    ("i8", "f32", 32), ("i8", "f16", 4), ("i8", "f32", 1), ("i8", "f32", 12), ("f8e4m3", "f32", 8),
    ("f8e4m3", "f8e8m0", 16), ("f8e5m2", "bf16", 48),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "scale_dtype", "granularity"), QUANTIZED)
def test_quantized_caches_are_read_with_their_scales(dtype, scale_dtype, granularity):
    head_size = 48 if granularity in (12, 48) else 32
    rng, problem = problem_of(
        granularity, dtype=dtype, scale_dtype=scale_dtype, granularity=granularity, head_size=head_size, longest=30
    )
    query = query_of(rng, problem, 4, "f32")
    # The values reach some hundreds: compare with what they are made of.
    out, lse = run(problem, query, scale=0.01)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, scale=0.01)
    biggest = max(1.0, np.abs(want).max())
    assert_close(out / biggest, want / biggest, "f32", 1e-4)
    assert_close(lse, want_lse, "f32", 1e-3)


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("query", ["f32", "bf16"])
def test_an_8_bit_cache_without_scales_has_unit_scale(dtype, query):
    rng, problem = problem_of(8, dtype=dtype, head_size=32)
    check(problem, query_of(rng, problem, 4, query))


def test_sinks_and_softcap():
    rng, problem = problem_of(9, cached=[20, 0, 9, 0], new=[3, 0, 1, 4])
    query = query_of(rng, problem, 4) * 4
    sinks = rng.standard_normal(4).astype(np.float32)
    check(problem, query, sinks=sinks)
    check(problem, query, softcap=2.0)
    check(problem, query, softcap=30.0, sinks=sinks, mask="sliding_window", window=4, scale=1.0)


def test_alibi_slopes_bend_scores_by_distance():
    rng, problem = problem_of(24, cached=[20, 0, 9, 0], new=[3, 0, 1, 4])
    query = query_of(rng, problem, 4)
    slopes = np.array([0.5, 0.25, 0.01, -0.125], np.float32)
    for mask, window in (("causal", None), ("null", None), ("sliding_window", 5)):
        check(problem, query, alibi_slopes=slopes, mask=mask, window=window)
    check(problem, query, alibi_slopes=slopes, softcap=2.0, sinks=slopes)


def test_a_row_that_sees_no_key_gives_zeros():
    rng, problem = problem_of(10, cached=[0, 4], new=[2, 1])
    query = query_of(rng, problem, 2)
    # Cross attention over the cached tokens only: sequence 0 has none.
    no_keys = np.zeros(3, np.uint32)
    out, lse = run(problem, query, mask="null", kv_offsets=no_keys)
    assert (out[:2] == 0).all()
    assert np.isneginf(lse[:2]).all()
    check(problem, query, mask="null", kv_offsets=no_keys)
    sinks = np.array([0.5, -1.0], np.float32)
    out, lse = run(problem, query, mask="null", kv_offsets=no_keys, sinks=sinks)
    assert (out[:2] == 0).all()
    np.testing.assert_allclose(lse[:2], np.broadcast_to(sinks, (2, 2)), rtol=1e-6)


def test_cross_attention_has_keys_of_its_own_count():
    rng, problem = problem_of(11, cached=[5, 0, 12], new=[9, 7, 3])
    query = query_of(rng, problem, 2)
    kv_offsets = np.array([0, 9, 12, 15], np.uint32)
    for mask in ("null", "causal"):
        check(problem, query, mask=mask, kv_offsets=kv_offsets)


def test_empty_sequences_and_batches():
    rng, problem = problem_of(12, cached=[3, 0, 40, 7, 0], new=[0, 0, 2, 0, 0])
    check(problem, query_of(rng, problem, 2))
    for cached in ([4, 0], []):
        _, problem = problem_of(13, cached=cached, new=[0] * len(cached))
        query = np.zeros((0, 2, 16), np.float32)
        assert run(problem, query)[0].shape == (0, 2, 16)


def test_rows_of_no_sequence_are_not_written():
    rng, problem = problem_of(14, cached=[3, 8], new=[2, 3])
    query = np.concatenate([query_of(rng, problem, 2)] * 2)
    want, _ = reference.attention(problem.collection, 1, query[:5], problem.row_offsets)
    shifted = problem.row_offsets + 2  # a slice: the first offset is not 0
    padded = np.concatenate([query[3:5], query[:5], query[:2]])
    out = np.full_like(padded, SENTINEL)
    kv.ops.attention(problem.collection, 1, padded, shifted, out=out)
    assert (out[:2] == SENTINEL).all()
    assert (out[7:] == SENTINEL).all()
    assert_close(out[2:7], want, "f32")


def test_decodes_and_prefills_mix():
    rng, problem = problem_of(15, cached=[50, 100, 0, 300], new=[50, 1, 77, 100], dtype="bf16", head_size=64)
    check(problem, query_of(rng, problem, 2))


def test_a_prefix_hit_equals_a_cold_start():
    rng, problem = problem_of(16, cached=[0], new=[300], page_size=64, num_heads=1, head_size=32)
    query = query_of(rng, problem, 8)
    cold, _ = run(problem, query)
    c = problem.collection
    hit = PagedKVCacheCollection(c.blocks, np.array([256], np.uint32), c.lookup_table, 44, 300)
    out = kv.ops.attention(hit, 1, query[256:], np.array([0, 44], np.uint32))
    assert_close(out, np.asarray(cold[256:], np.float64), "f32")


def test_the_order_of_the_pages_does_not_change_a_bit():
    rng, problem = problem_of(17, cached=[301], new=[1], page_size=16)
    query = query_of(rng, problem, 4)
    first, _ = run(problem, query)
    moved = clone(problem.collection)
    blocks, table = np.asarray(moved.blocks), np.asarray(moved.lookup_table)
    order = np.random.default_rng(0).permutation(len(blocks))
    moved = PagedKVCacheCollection(
        blocks[order],
        moved.cache_lengths,
        np.argsort(order).astype(np.uint32)[table],
        moved.max_seq_length,
        moved.max_cache_length,
    )
    out = kv.ops.attention(moved, 1, query, problem.row_offsets)
    np.testing.assert_array_equal(out, first)


def test_garbage_in_other_query_rows_does_not_show():
    rng, problem = problem_of(18, cached=[33, 20], new=[4, 5])
    query = query_of(rng, problem, 4)
    clean, _ = run(problem, query)
    garbage = query.copy()
    garbage[[1, 2, 3, 6]] = np.nan
    out, _ = run(problem, garbage)
    np.testing.assert_array_equal(out[[0, 4, 5, 7, 8]], clean[[0, 4, 5, 7, 8]])
    assert np.isnan(out[1]).all()  # what was asked of NaN is NaN, not a number that looks right


def test_keys_that_no_query_sees_may_be_anything():
    rng, problem = problem_of(19, cached=[100], new=[2], page_size=16)
    query = query_of(rng, problem, 2)
    want, _ = run(problem, query, mask="sliding_window", window=20)
    for cache in problem.caches(1):  # tokens that slid out of every window
        t, h = np.arange(80)[:, None, None], np.arange(2)[:, None]
        cache.store(0, h, t, np.arange(16), np.full((80, 2, 16), np.nan, np.float32))
    np.testing.assert_array_equal(run(problem, query, mask="sliding_window", window=20)[0], want)


def test_infinities_in_unreferenced_slots_do_not_show():
    for mask in MASKS:
        rng, problem = problem_of(24, cached=[40, 0, 5], new=[3, 2, 1], poison=np.inf)
        check(problem, query_of(rng, problem, 2), **mask)


def test_views_with_strides_and_signed_tables():
    rng, problem = problem_of(20, table_dtype=np.int32, new=[3, 1, 4, 2], batch=4)
    wide = rng.standard_normal((problem.tokens, 6, 40)).astype(np.float32)
    query = wide[:, 1:5, 3:19]
    want, _ = reference.attention(problem.collection, 0, query, problem.row_offsets)
    out = np.zeros((problem.tokens, 5, 17), np.float32)[:, :4, 1:]
    kv.ops.attention(problem.collection, 0, query, problem.row_offsets.astype(np.int32), out=out)
    assert_close(out, want, "f32")


def test_large_scores_do_not_overflow():
    rng, problem = problem_of(21, cached=[40], new=[2])
    query = query_of(rng, problem, 2) * np.float32(1e4)
    out, _ = run(problem, query, scale=10.0)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, scale=10.0)
    assert np.isfinite(out).all()
    assert_close(out, want, "f32", 1e-3)


# --- what is refused -------------------------------------------------------------------------------


def refused(message: str, **changes: Any) -> None:
    """A call with some argument wrong must say so."""
    rng, problem = problem_of(22, cached=[3, 4], new=[1, 2])
    arguments: dict[str, Any] = {
        "collection": problem.collection, "layer": 0, "query": query_of(rng, problem, 2),
        "row_offsets": problem.row_offsets,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        kv.ops.attention(**{**arguments, **changes})


def test_what_does_not_fit_is_refused_by_name():
    f32 = np.float32
    refused(r"layer must be in \[0, 2\), got 2", layer=2)
    refused(r"query must have shape \[T, Hq, 16\], got \[3, 2, 8\]", query=np.zeros((3, 2, 8), f32))
    refused(r"query must have dtype f32, got f16", query=np.zeros((3, 2, 16), np.float16))
    refused(r"multiple of the 2 KV heads", query=np.zeros((3, 3, 16), f32))
    refused(r"row_offsets must have shape \[3\], got \[2\]", row_offsets=np.zeros(2, np.uint32))
    refused(r"out must have shape \[3, 2, 16\]", out=np.zeros((2, 2, 16), f32))
    refused(r"out must have dtype f32", out=np.zeros((3, 2, 16), np.float16))
    refused(r"sinks must have shape \[2\]", sinks=np.zeros(3, f32))
    refused(r"sinks must have dtype f32", sinks=np.zeros(2, np.float16))
    refused(r"alibi_slopes must have shape \[2\]", alibi_slopes=np.zeros((2, 1), f32))
    refused(r"alibi_slopes must have dtype f32", alibi_slopes=np.zeros(2, np.int32))
    refused(r"mask must be one of causal, null", mask="prefix")
    refused(r"window must be given for mask sliding_window", mask="sliding_window")
    refused(r"window must be None for mask null", mask="null", window=3)
    refused(r"window must be in \[1, ", window=0)
    refused(r"softcap must be positive", softcap=0.0)
    refused(r"scale must be finite", scale=float("nan"))
    refused(r"kind must be one of host, simt, tile, decode", schedule={"kind": "magic"})
    refused(r"kind must be host on host", schedule={"kind": "tile", "keys": -3})


def test_an_integer_cache_needs_scales():
    rng, problem = problem_of(23, dtype="i8")
    with pytest.raises(TypeError, match="float elements, or scales"):
        kv.ops.attention(problem.collection, 0, query_of(rng, problem, 2), problem.row_offsets)
