# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An indexer's scores and the tokens that they choose: on the host and as GPU code in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.case import by_name
from reference.model import read
from reference.random_caches import Problem, clone, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

pytestmark = pytest.mark.whole

LENGTHS = {"cached": [70, 0, 33], "new": [2, 1, 0], "num_heads": 1, "is_mla": True}
SHAPES: dict[str, Any] = {
    "fp8 with scales": ("f8e4m3", "f8e4m3", 20, {"head_size": 128, "scale_dtype": "f32"}),
    "fp8, bf16 queries": ("f8e4m3", "bf16", 8, {"head_size": 64, "page_size": 4}),
    "bf16": ("bf16", "bf16", 3, {"head_size": 64}),
    "int8": ("i8", "f16", 9, {"head_size": 64, "scale_dtype": "f16"}),
    "bf16, heads of 96": ("bf16", "bf16", 11, {"head_size": 96}),
    "int8, bf16 queries, heads of 96": ("i8", "bf16", 9, {"head_size": 96, "scale_dtype": "f32", "page_size": 5}),
    "f32, of any size": ("f32", "f32", 5, {"head_size": 20, "page_size": 5}),
    "fp8, f32 queries, granules": ("f8e4m3", "f32", 4, {"head_size": 64, "scale_dtype": "f32", "granularity": 32}),
}


def scores_of(problem: Problem, query: np.ndarray, weights: np.ndarray, columns: int) -> np.ndarray:
    """The definition, f64 [T, columns]."""
    keys, found = problem.collection.get_key_cache(1), np.full((len(query), columns), -np.inf)
    for b, (begin, end) in enumerate(zip(problem.row_offsets[:-1], problem.row_offsets[1:], strict=True)):
        for t in range(begin, end):
            seen = int(problem.cached[b]) + int(t - begin) + 1
            products = np.einsum("hd,sd->hs", query[t].astype(np.float64), read(keys, b, np.arange(seen))[:, 0])
            found[t, :seen] = weights[t].astype(np.float64) @ np.where(products < 0, 0, products)
    return found


def problem_of(seed: int, dtype: str, query: str, heads: int, shape: Any) -> tuple[Any, ...]:
    rng, problem = stored_problem(seed, "paged", dtype, **{**LENGTHS, **shape})
    q = random_values(rng, (problem.tokens, heads, shape["head_size"]), dtypes.of(query))
    return problem, q, rng.standard_normal((problem.tokens, heads)).astype(np.float32)


@by_name(SHAPES, ["fp8, bf16 queries", "int8", "bf16, heads of 96"])
def test_scores_are_weighted_sums_of_what_is_positive(place, name):
    problem, query, weights = problem_of(1, *SHAPES[name])
    out = place.put(np.full((len(query), 80), 7, np.float32))
    c = place.collection(problem.collection)
    kv.ops.index_scores(c, 1, place.put(query), place.put(weights), place.put(problem.row_offsets), out)
    want, found = scores_of(problem, query, weights, 80), place.get(out)
    seen = np.isfinite(want)
    assert (np.isfinite(found) == seen).all()
    biggest = np.abs(want[seen]).max()
    np.testing.assert_allclose(found[seen] / biggest, want[seen] / biggest, rtol=0, atol=2e-5)


def test_scores_show_no_token_that_is_not_seen_and_every_nan_that_is(place):
    problem, query, weights = problem_of(2, *SHAPES["bf16"])
    c = clone(problem.collection)
    keys = c.get_key_cache(1)
    keys.store(0, 0, 40, 3, np.array(np.nan, keys.dtype.numpy))
    out = place.put(np.zeros((len(query), 75), np.float32))
    kv.ops.index_scores(
        place.collection(c), 1, place.put(query), place.put(weights), place.put(problem.row_offsets), out
    )
    assert np.argwhere(np.isnan(place.get(out))).tolist() == [[0, 40], [1, 40]]


@pytest.mark.parametrize("count", [7, 60, 300])
def test_the_tokens_with_the_largest_scores_are_chosen(place, count):
    rng = np.random.default_rng(3)
    scores = rng.integers(-20, 20, (5, 300)).astype(np.float32)  # many are equal
    scores[1] = -np.inf
    scores[2, 10:] = -np.inf
    scores[3, [5, 200]] = np.nan
    scores[4] = rng.standard_normal(300) * 1e-3
    tokens, counts = (place.put(np.full(s, -9, np.int32)) for s in ((5, count), (5,)))
    kv.ops.select_tokens(place.put(scores), tokens=tokens, counts=counts)
    for row, found, n in zip(scores, place.get(tokens), place.get(counts), strict=True):
        key = np.where(np.isnan(row), np.inf, row)
        order = np.lexsort((np.arange(300), -key))
        want = np.sort(order[: min(count, int((row != -np.inf).sum()))])
        assert n == len(want)
        assert found.tolist() == [*want, *[-1] * (count - len(want))]


@pytest.mark.parametrize("order", ["backward", "random"])
def test_no_order_of_warps_shows_in_what_is_chosen(order):
    scores = np.random.default_rng(9).integers(0, 50, (2, 1300)).astype(np.float32)
    scores[1, 90:] = -np.inf
    want = kv.ops.select_tokens(scores, 100)
    with kv.emulated("sm_90a", order=order, seed=2) as report:
        found = kv.ops.select_tokens(scores, 100)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not report.hazards


def test_sparse_attention_goes_by_the_indexer(place):
    """The whole way: scores, tokens, rows of the pool, attention over latent rows."""
    problem, query, weights = problem_of(4, *SHAPES["bf16"])
    rng, latent = np.random.default_rng(5), stored_problem(6, "paged", "bf16", head_size=96, **LENGTHS)[1]
    c, rows = place.collection(latent.collection), place.put(problem.row_offsets)
    scores = place.put(np.zeros((len(query), 75), np.float32))
    kv.ops.index_scores(place.collection(problem.collection), 1, place.put(query), place.put(weights), rows, scores)
    tokens, counts = (place.put(np.zeros(s, np.int32)) for s in ((len(query), 20), (len(query),)))
    kv.ops.select_tokens(scores, tokens=tokens, counts=counts)
    listed = np.array(place.get(tokens))
    indices = kv.ops.remap_sparse_indices(tokens, rows, c.lookup_table, 16, latent.null_page, tokens)
    q = random_values(rng, (len(query), 4, 96), dtypes.bf16)
    out = place.put(np.zeros((len(query), 4, 64), q.dtype))
    kv.ops.mla_attention(c, 1, place.put(q), rows, value_size=64, indices=indices, topk_lengths=counts, out=out)
    sequence = np.repeat(np.arange(3), latent.new)
    for t, b in enumerate(sequence):
        keys = read(latent.collection.get_key_cache(1), int(b), listed[t][listed[t] >= 0])
        seen = np.ones((1, len(keys)), bool)
        want, _ = reference.dense_attention(q[t : t + 1].astype(np.float64), keys, keys[..., :64], seen, 96**-0.5)
        np.testing.assert_allclose(place.get(out)[t].astype(np.float64), want[0], rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused_by_name():
    problem, query, weights = problem_of(7, *SHAPES["bf16"])
    c, rows = problem.collection, problem.row_offsets
    two = stored_problem(8, "paged", "bf16", head_size=64, cached=[3], new=[1])[1].collection
    score, select = kv.ops.index_scores, kv.ops.select_tokens
    cases: list[tuple[Any, str]] = [
        (lambda: score(two, 0, query, weights, rows), "collection must have one KV head, got 2"),
        (lambda: score(c, 0, query.astype(np.float32), weights, rows), "query must have dtype bf16, got f32"),
        (lambda: score(c, 0, query, weights[:, :2], rows), r"weights must have shape \[3, 3\], got \[3, 2\]"),
        (lambda: score(c, 0, query, weights, rows, np.zeros((2, 9), np.float32)), r"out must have shape \[3, L\]"),
        (lambda: select(weights), "count must be given where tokens is not"),
        (lambda: select(weights.astype(np.float64), 2), "scores must have dtype f32, got f64"),
        (lambda: select(weights, 0), "count must be in"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert score(c, 0, query, weights, rows).shape == (3, c.max_cache_length)
