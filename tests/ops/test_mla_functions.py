# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks as functions over latent rows: on the host, and as PTX run by the interpreter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_functions import document, kerple, prefix, query_of, t5, t5_buckets
from reference.places import Interpreted, Place
from reference.random_caches import Problem, stored_problem
from reference.shared_prefixes import close, combined, permuted

import kvarn as kv

SENTINEL = 72.0
LATENT = {"num_heads": 1, "is_mla": True, "head_size": 24}
latent_problem = functools.partial(stored_problem, **LATENT, cached=[40, 0, 9], new=[3, 7, 0])


def attend(place: Any, problem: Problem, query: np.ndarray, *, size: int = 16, **options: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp of layer 1; arrays, in tuples too, are put in place."""

    def put(x: Any) -> Any:
        return tuple(map(put, x)) if isinstance(x, tuple) else place.put(x) if isinstance(x, np.ndarray) else x

    out = place.put(np.full((*query.shape[:2], size), SENTINEL, query.dtype))
    lse = place.put(np.full(query.shape[:2], SENTINEL, np.float32))
    options = {name: put(x) for name, x in options.items()}
    with place.active():
        kv.ops.mla_attention(
            place.collection(problem.collection), 1, place.put(query), place.put(problem.row_offsets), value_size=size,
            out=out, lse=lse, **options,
        )  # fmt: skip
    return place.get(out), place.get(lse)


def model(
    problem: Problem, query: np.ndarray, size: int = 16, row_offsets: Any = None, **functions: Any
) -> tuple[np.ndarray, np.ndarray]:
    rows = problem.row_offsets if row_offsets is None else row_offsets
    return reference.function_attention(problem.collection, 1, query, rows, value_size=size, **functions)


@pytest.mark.parametrize(
    ("kind", "dtype", "scales"),
    [("paged", "f16", {}), ("paged", "f8e4m3", {"scale_dtype": "f32"}), ("continuous", "bf16", {})],
    ids=["f16", "f8e4m3", "continuous"],
)
def test_a_bias_by_distance_buckets_and_a_document_mask_over_latent_rows(place, kind, dtype, scales):
    rng, problem = latent_problem(1, kind, dtype, **scales)
    query = query_of(rng, problem, 3)
    bias, buckets = rng.standard_normal((3, 16)).astype(np.float32), t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (3, 60)), axis=1).astype(np.int32)
    found = attend(place, problem, query, score=(t5, bias, buckets), mask=(kv.masks.causal & document, ids))
    want = model(
        problem, query, score=lambda x, b, h, q, k: x + bias[h, buckets[np.maximum(q - k, 0)]],
        mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    close(found, want, 2e-2 if dtype == "bf16" else 4e-3)


@pytest.mark.parametrize("seed", range(4))
def test_random_scores_and_masks_over_random_latent_rows(place, seed):
    rng, problem = stored_problem(100 + seed, "paged", "f32", **LATENT, batch=3, longest=30, page_size=4)
    query, width = query_of(rng, problem, 2), int(rng.integers(1, 20))
    r1, r2 = (rng.random(2).astype(np.float32) for _ in range(2))
    lengths = rng.integers(0, 30, 3).astype(np.int32)
    masks = [
        ((kv.masks.sliding_window(width), lambda b, h, q, k: (k <= q) & (q - k < width))),
        ((prefix, lengths), lambda b, h, q, k: (k <= q) | (k < lengths[b])),
        (kv.masks.causal & (lambda b, h, q, k: (q + k + h) % 3 == 0),
         lambda b, h, q, k: (k <= q) & ((q + k + h) % 3 == 0)),
    ]  # fmt: skip
    mask, numpy_mask = masks[seed % 3]
    scores = [
        (None, None), (lambda s, b, h, q, k: 3.0 * kv.math.tanh(s / 3.0), lambda x, b, h, q, k: 3 * np.tanh(x / 3)),
        ((kerple, r1, r2), lambda x, b, h, q, k: x - r1[h] * np.log(1 + r2[h] * np.abs(q - k))),
        (lambda s, b, h, q, k: s + kv.f32(k - q) * 0.25, lambda x, b, h, q, k: x + (k - q) / 4),
    ]  # fmt: skip
    score, numpy_score = scores[(seed + 1) % 4]
    found = attend(place, problem, query, score=score, mask=mask)
    close(found, model(problem, query, score=numpy_score, mask=numpy_mask), 1e-4)


def test_rows_that_a_function_hides_may_be_anything_and_rows_that_see_none_are_zeros(place):
    rng, problem = latent_problem(2, dtype="f16")
    query = query_of(rng, problem, 2)
    options: dict[str, Any] = {"mask": lambda b, h, q, k: (k % 3 != 1) & (k <= q) & (q % 4 != 1)}
    if isinstance(place, Interpreted):  # products have a weight of zero for a hidden value, which must be finite
        options["schedule"] = {"kind": "simt"}
    want, want_lse = attend(place, problem, query, **options)
    blind = np.concatenate([40 + np.arange(3), np.arange(7)]) % 4 == 1
    assert (want[blind] == 0).all()
    assert np.isneginf(want_lse[blind]).all()
    assert np.isfinite(want_lse[~blind]).all()
    cache = problem.collection.get_key_cache(1)
    for b, total in enumerate(problem.cached + problem.new):
        hidden = np.arange(1, total, 3)[:, None]
        cache.store(b, 0, hidden, np.arange(24), np.full((len(hidden), 24), np.nan, np.float16))
    out, lse = attend(place, problem, query, **options)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def test_where_pages_of_latent_rows_lie_does_not_matter_to_a_bit(place):
    rng, problem = latent_problem(3, dtype="f16", page_size=4)
    query, ids = query_of(rng, problem, 2), rng.integers(0, 2, (3, 60)).astype(np.int32)
    options: dict[str, Any] = {
        "score": lambda s, b, h, q, k: s * 0.5 + kv.f32(h),
        "mask": (kv.masks.causal & document, ids),
    }
    for one, other in zip(*(attend(place, p, query, **options) for p in (problem, permuted(problem))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_functions_go_with_a_sink_a_prior_result_and_other_sources(place):
    """A window with a score, and keys of another cache that each query sees as its mask says, one sink a head."""
    rng, problem = latent_problem(4, dtype="f16")
    memory = stored_problem(5, "paged", "f16", **LATENT, cached=[12, 3, 0], new=[0, 0, 0])[1]
    query, offsets = query_of(rng, problem, 2), problem.row_offsets
    sinks, none = rng.standard_normal(2).astype(np.float32), np.zeros(4, np.uint32)
    prior = rng.standard_normal((*query.shape[:2], 16)).astype(np.float32), rng.random(query.shape[:2], np.float32)
    out = place.put(np.full((*query.shape[:2], 16), SENTINEL, np.float16))
    lse = place.put(np.full(query.shape[:2], SENTINEL, np.float32))
    with place.active():
        kv.ops.mla_attention(
            [place.collection(memory.collection), place.collection(problem.collection)], [1, 1], place.put(query),
            place.put(offsets), value_size=16, score=[None, lambda s, b, h, q, k: 2.0 * s],
            mask=[lambda b, h, q, k: k % 2 == h, kv.masks.sliding_window(9)], kv_offsets=[place.put(none), None],
            sinks=place.put(sinks), prior=tuple(map(place.put, prior)), out=out, lse=lse,
        )  # fmt: skip
    of_memory = model(memory, query, mask=lambda b, h, q, k: k % 2 == h, kv_offsets=none, row_offsets=offsets)
    of_window = model(problem, query, score=lambda x, b, h, q, k: 2 * x, mask=lambda b, h, q, k: (k <= q) & (q - k < 9))
    want = combined(*combined(*of_memory, *of_window), *prior)
    want = combined(*want, np.zeros_like(want[0]), np.broadcast_to(sinks, want[1].shape))
    close((place.get(out), place.get(lse)), want, 4e-3)


def test_what_has_no_positions_takes_no_functions():
    rng, problem = latent_problem(6, dtype="f32")
    query, indices = query_of(rng, problem, 2), np.zeros((10, 4), np.int32)
    call: Any = functools.partial(
        kv.ops.mla_attention, problem.collection, 1, query, problem.row_offsets, value_size=16
    )
    for options in ({"score": kv.scores.softcap(3.0)}, {"mask": kv.masks.causal}, {"kv_offsets": problem.row_offsets}):
        with pytest.raises(ValueError, match="score, mask, window, chunk and kv_offsets must be None with indices"):
            call(indices=indices, **options)
    with pytest.raises(TypeError, match="mask takes 1 arrays, got 0"):
        call(mask=document)
    with pytest.raises(ValueError, match="window and chunk must be None for a mask that is a function"):
        call(mask=kv.masks.causal, window=3)
    with pytest.raises(TypeError, match="array 0 of the score and the mask must have dtype f32 or f16 or bf16"):
        call(mask=(document, np.zeros((3, 50), np.int64)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "target", "heads", "schedule"),
    [("f16", "sm_90a", 16, {"splits": 1}), ("f8e4m3", "sm_80", 16, {"splits": 2}),
     ("bf16", "sm_90a", 16, {"splits": 3}), ("bf16", "sm_90a", 2, {"max_queries": 9}),
     ("f8e4m3", "sm_90a", 2, {"max_queries": 9, "splits": 2}), ("f8e4m3", "sm_90a", 16, {})],
)  # fmt: skip
def test_tensor_cores_over_latent_rows_take_functions(dtype, target, heads, schedule):
    rng, problem = latent_problem(7, dtype=dtype, head_size=144, cached=[50, 0, 70], new=[2, 9, 1])
    query = query_of(rng, problem, heads)
    bias, buckets = rng.standard_normal((heads, 16)).astype(np.float32), t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (3, 80)), axis=1).astype(np.int32)
    found = attend(
        Interpreted(target), problem, query, size=128, schedule={"kind": "latent"} | schedule,
        score=(lambda s, b, h, q, k, bias, buckets: 2.0 * (s + bias[h, buckets[q - k]]), bias, buckets),
        mask=(kv.masks.sliding_window(40) & document, ids),
    )  # fmt: skip
    want = model(
        problem, query, 128, score=lambda x, b, h, q, k: 2 * (x + bias[h, buckets[np.clip(q - k, 0, 59)]]),
        mask=lambda b, h, q, k: (k <= q) & (q - k < 40) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    close(found, want, 2e-2)


@pytest.mark.parametrize(("target", "most"), [("sm_90a", 2), ("sm_80", None), ("sm_90a", None)])
def test_tensor_cores_are_asked_about_keys_of_other_offsets_and_before_a_window_anything_may_be(target, most):
    rng, problem = latent_problem(8, dtype="f16", head_size=144, cached=[70, 30], new=[2, 1])
    query, offsets = query_of(rng, problem, 8), np.zeros(3, np.uint32)
    latent, place = {"kind": "latent"} | ({"max_queries": most} if most else {}), Interpreted(target)
    found = attend(place, problem, query, size=128, schedule=latent, mask="null", kv_offsets=offsets)
    close(found, model(problem, query, 128, mask=lambda b, h, q, k: True, kv_offsets=offsets), 4e-3)
    options = {"mask": kv.masks.sliding_window(20) & (lambda b, h, q, k: k % 2 == 0), "schedule": latent}
    want, _ = attend(place, problem, query, size=128, **options)
    cache = problem.collection.get_key_cache(1)
    cache.store(0, 0, np.arange(50)[:, None], np.arange(144), np.full((50, 144), np.nan, np.float16))
    np.testing.assert_array_equal(attend(place, problem, query, size=128, **options)[0], want)


def calls_that_differ(place: Any) -> None:
    """Calls into one output, of which each is made again after others."""
    rng, problem = latent_problem(9, dtype="f32")
    query, none = query_of(rng, problem, 2), np.zeros(4, np.uint32)
    c, given, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    out, no_keys = place.put(np.empty((10, 2, 16), np.float32)), place.put(none)
    double = lambda s, b, h, q, k: 2.0 * s  # noqa: E731
    wants: list[tuple[Any, Any]] = [
        ({}, {}), ({"score": double}, {"score": lambda x, b, h, q, k: 2 * x}),
        ({"mask": kv.masks.sliding_window(3)}, {"mask": lambda b, h, q, k: (k <= q) & (q - k < 3)}),
        ({"kv_offsets": no_keys}, {"kv_offsets": none}),
    ]  # fmt: skip
    for options, functions in wants * 3:
        kv.ops.mla_attention(c, 1, given, offsets, value_size=16, out=out, **options)
        np.testing.assert_allclose(place.get(out), model(problem, query, **functions)[0], rtol=1e-3, atol=1e-3)


def test_calls_that_differ_in_a_function_or_in_offsets_of_keys_are_not_taken_for_one_another():
    calls_that_differ(Place())


@pytest.mark.parametrize(("dtype", "most"), [("f16", 2), ("f16", None), ("f8e4m3", 2)], ids=["few", "wide", "stored"])
def test_wgmma_over_latent_rows_counts_keys_of_other_offsets(dtype, most):
    rng, problem = latent_problem(8, dtype=dtype, head_size=144, cached=[70, 30], new=[2, 1], page_size=16)
    query, offsets = query_of(rng, problem, 8), np.array([0, 0, 1], np.uint32)
    schedule = {"kind": "latent", "splits": 1} | ({"max_queries": most} if most else {})
    options = {"mask": "null", "kv_offsets": offsets, "schedule": schedule}
    found = attend(Interpreted(), problem, query, size=128, **options)
    want = model(problem, query, 128, mask=lambda b, h, q, k: True, kv_offsets=offsets)
    close(found, want, 2e-2 if dtype == "f8e4m3" else 4e-3)
