# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Summaries of pages, and the choice of pages by them: on the host and as GPU code in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import chosen_pages as reference
from reference.case import by_name
from reference.places import Place
from reference.random_caches import Problem, random_query, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

pytestmark = pytest.mark.whole

LENGTHS = {"cached": [47, 0, 33, 0], "new": [1, 1, 0, 20]}
SHAPES: dict[str, Any] = {
    "bf16": ("bf16", {"head_size": 64}, "min_max", None),
    "bf16, means": ("bf16", {"head_size": 64, "page_size": 8}, "mean", None),
    "f32 in bf16": ("f32", {"head_size": 20, "page_size": 5}, "min_max", "bf16"),
    "f32 in f16": ("f32", {"head_size": 32}, "min_max", "f16"),
    "fp8 with scales": ("f8e4m3", {"head_size": 64, "scale_dtype": "f32"}, "min_max", None),
    "int8 with granules": ("i8", {"head_size": 48, "scale_dtype": "f16", "granularity": 16}, "min_max", "f32"),
    "fa3": ("f16", {"head_size": 64}, "min_max", None),
}


def summaries_of(place: Place, collection: Any, kind: str, dtype: str | None) -> kv.PageSummaries:
    """Summaries full of a number that nothing gives."""
    c, storage = collection, collection.spec.cache.dtype
    chosen = dtypes.of(dtype or ("bf16" if storage.bits == 8 else storage.name))
    rows = 2 if kind == "min_max" else 1
    data = np.full((c.num_blocks, c.num_layers, c.num_heads, rows, c.head_size), 77, chosen.numpy)
    return kv.PageSummaries(c, kind, place.put(data))


@by_name(SHAPES, ["bf16, means", "f32 in f16", "fa3"])
def test_summaries_are_of_the_pages_that_the_step_touched(place, name):
    dtype, shape, kind, made = SHAPES[name]
    _, problem = stored_problem(1, "fa3" if name == "fa3" else "paged", dtype, **shape, **LENGTHS)
    c = place.collection(problem.collection)
    summaries = summaries_of(place, c, kind, made)
    before = np.array(place.get(summaries.data))
    kv.ops.summarize_pages(c, 1, summaries, place.put(problem.row_offsets))
    found = place.get(summaries.data)
    want = reference.summaries(problem.collection, 1, problem.row_offsets, before)
    np.testing.assert_array_equal(found[:, 0], before[:, 0])  # the other layer's
    step = 2.0**-7 if found.dtype == dtypes.bf16.numpy else 2.0**-10
    np.testing.assert_allclose(found[:, 1].astype(np.float64), want, rtol=step, atol=1e-6)
    if kind == "min_max":  # rounded outwards, so that what follows from them is a bound
        assert (found[:, 1, :, 0].astype(np.float64) <= want[:, :, 0]).all()
        assert (found[:, 1, :, 1].astype(np.float64) >= want[:, :, 1]).all()


def test_a_nan_in_a_key_shows_in_its_page_and_nowhere_else(place):
    _, problem = stored_problem(2, "paged", "bf16", head_size=64, cached=[40], new=[1])
    keys = problem.collection.get_key_cache(1)
    keys.store(0, 1, 33, 5, np.array(np.nan, keys.dtype.numpy))
    c = place.collection(problem.collection)
    summaries = summaries_of(place, c, "min_max", None)
    kv.ops.summarize_pages(c, 1, summaries, place.put(problem.row_offsets))
    found = place.get(summaries.data)[problem.collection.lookup_table[0, 2], 1].astype(np.float32)
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 0, 5], [1, 1, 5]]


def chosen(
    place: Place, problem: Problem, query: np.ndarray, data: np.ndarray, kind: str, count: int, **options: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists, of buffers that were full of -9, and their counts."""
    c, (batch, heads) = place.collection(problem.collection), (len(problem.cached), problem.collection.num_heads)
    pages, counts = (place.put(np.full((batch, heads, *rest), -9, np.int32)) for rest in ((count,), ()))
    kv.ops.select_pages(
        c, 1, place.put(query), place.put(problem.row_offsets), kv.PageSummaries(c, kind, place.put(data)),
        pages=pages, page_counts=counts, **options,
    )  # fmt: skip
    return place.get(pages), place.get(counts)


@pytest.mark.parametrize(
    ("head_size", "dtype", "kind", "count", "first", "last"),
    [
        (40, "f32", "min_max", 1, 0, 1), (64, "bf16", "mean", 3, 0, 0), (64, "bf16", "min_max", 3, 1, 2),
        (40, "f32", "mean", 4, 2, 1), (64, "bf16", "min_max", 6, 0, 1), (40, "f32", "min_max", 40, 1, 1),
    ],
)  # fmt: skip
def test_the_pages_with_the_largest_bounds_are_chosen(place, head_size, dtype, kind, count, first, last):
    rng, problem = stored_problem(3, "paged", "bf16", head_size=head_size, page_size=8, **LENGTHS)
    query = random_query(rng, problem, 6)
    c = problem.collection
    shape = (c.num_blocks, 2, 2, 2 if kind == "min_max" else 1, head_size)
    data = np.sort(rng.integers(-9, 10, shape), 3).astype(
        dtypes.of(dtype).numpy
    )  # sums of few bits, which no order changes
    query = rng.integers(-4, 5, query.shape).astype(query.dtype)
    lists, counts = chosen(place, problem, query, data, kind, count, first=first, last=last)
    for b, scores in enumerate(reference.page_scores(c, 1, query, problem.row_offsets, data)):
        np.testing.assert_array_equal(lists[b], reference.selected(scores, count, first, last))
        assert counts[b].tolist() == [min(count, scores.shape[1])] * 2


def test_ties_go_to_the_lower_page_and_nan_is_the_largest(place):
    _, problem = stored_problem(4, "paged", "f32", head_size=16, page_size=2, cached=[700], new=[1], num_heads=1)
    c = problem.collection
    scores = np.zeros(351, np.float32)
    scores[[3, 300, 41]] = 5.0, 5.0, np.nan
    scores[100:290] = 1.0
    scores[20:30] = -0.0
    data = np.zeros((c.num_blocks, 2, 1, 1, 16), np.float32)
    data[c.lookup_table[0, :351], 1, 0, 0, 7] = scores
    query = np.zeros((1, 2, 16), np.float32)
    query[..., 7] = 1.0
    for count in (2, 50, 200):
        lists, counts = chosen(place, problem, query, data, "mean", count, last=0)
        want = reference.selected(scores[None].astype(np.float64), count, 0, 0)
        np.testing.assert_array_equal(lists[0], want)
        assert counts[0, 0] == count


def test_many_scores_of_any_bits_are_ordered_as_numbers(place):
    rng, problem = stored_problem(5, "paged", "f32", head_size=8, page_size=1, cached=[999], new=[1], num_heads=1)
    c = problem.collection
    scores = rng.integers(0, 1 << 32, 1000, np.uint64).astype(np.uint32).view(np.float32)
    scores[~np.isfinite(scores)] = 0.0
    scores[rng.random(1000) < 0.3] = scores[0]
    data = np.zeros((c.num_blocks, 2, 1, 1, 8), np.float32)
    data[c.lookup_table[0, :1000], 1, 0, 0, 0] = scores
    query = np.zeros((1, 1, 8), np.float32)
    query[..., 0] = 1.0
    lists, _ = chosen(place, problem, query, data, "mean", 137, last=0)
    np.testing.assert_array_equal(lists[0], reference.selected(scores[None].astype(np.float64), 137, 0, 0))


def test_no_key_exceeds_the_bound_of_its_page(place):
    """Also of keys that are quantized, and of bounds that are rounded."""
    rng, problem = stored_problem(6, "paged", "f8e4m3", head_size=64, scale_dtype="f32", cached=[150, 90], new=[1, 1])
    c = place.collection(problem.collection)
    query = random_query(rng, problem, 4)
    summaries = summaries_of(place, c, "min_max", None)
    every = np.array([0, 151, 242], np.uint32)
    empty = type(problem.collection)(
        problem.collection.blocks, np.zeros(2, np.uint32), problem.collection.lookup_table, 151, 151,
        problem.collection.scales, problem.collection.quantization_granularity,
    )  # fmt: skip
    kv.ops.summarize_pages(place.collection(empty), 1, summaries, place.put(every))
    bounds = reference.page_scores(problem.collection, 1, query, problem.row_offsets, place.get(summaries.data))
    from reference.model import read

    keys = problem.collection.get_key_cache(1)
    for b, scores in enumerate(bounds):
        k = read(keys, b, np.arange(int(problem.cached[b]) + 1))
        exact = np.einsum("hgd,nhd->hgn", query[b].reshape(2, 2, 64).astype(np.float64), k).max(1)
        for page in range(scores.shape[1]):
            assert (exact[:, page * 16 : page * 16 + 16].max(1) <= scores[:, page] + 1e-9).all()


def test_the_whole_step_runs_on_lists_that_it_chose(place):
    rng, problem = stored_problem(7, "paged", "bf16", head_size=64, cached=[70, 3, 50], new=[1, 0, 1])
    c, query = place.collection(problem.collection), random_query(rng, problem, 4)
    q, offsets = place.put(query), place.put(problem.row_offsets)
    data = random_values(rng, (c.num_blocks, 2, 2, 1, 64), dtypes.bf16)
    summaries = kv.PageSummaries(c, "mean", place.put(data))
    pages, counts = (place.put(np.zeros(s, np.int32)) for s in ((3, 2, 3), (3, 2)))
    kv.ops.select_pages(c, 1, q, offsets, summaries, pages=pages, page_counts=counts)
    out = place.put(np.zeros_like(query))
    kv.ops.attention(c, 1, q, offsets, out=out, pages=pages, page_counts=counts)
    want, _ = reference.attention(
        problem.collection, 1, query, problem.row_offsets, place.get(pages), place.get(counts)
    )
    np.testing.assert_allclose(place.get(out).astype(np.float64), want, rtol=2e-2, atol=2e-2)
    assert place.get(counts).tolist() == [[3, 3], [0, 0], [3, 3]]


def test_what_does_not_fit_is_refused_by_name():
    rng, problem = stored_problem(8, "paged", "bf16", head_size=64, **LENGTHS)
    c, query, offsets = problem.collection, random_query(rng, problem, 4), problem.row_offsets
    summaries = kv.PageSummaries(c)
    select = kv.ops.select_pages
    cases: list[tuple[Any, str]] = [
        (lambda: kv.PageSummaries(c, "max"), "kind must be one of min_max, mean, got 'max'"),
        (lambda: kv.PageSummaries(c, "mean", summaries.data), r"data must have shape \[\d+, 2, 2, 1, 64\]"),
        (lambda: kv.ops.summarize_pages(c, 0, summaries.data, offsets), "summaries must be kv.PageSummaries"),
        (lambda: select(c, 0, query, offsets, summaries), "count must be given where pages is not"),
        (lambda: select(c, 0, query, offsets, summaries, 2, first=2), "first and last must be at most the 2 pages"),
        (lambda: select(c, 0, query[:, :3], offsets, summaries, 2), "query must have a multiple of the 2 KV heads"),
        (lambda: select(c, 0, query, offsets[:3], summaries, 2), r"row_offsets must have shape \[5\], got \[3\]"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    other = stored_problem(9, "continuous", "bf16", head_size=64, **LENGTHS)[1].collection
    with pytest.raises(ValueError, match="must have pages and values, got a continuous one"):
        kv.PageSummaries(other)
    assert summaries.data.shape == (c.num_blocks, 2, 2, 2, 64)
    assert summaries.data.dtype == dtypes.bf16.numpy
