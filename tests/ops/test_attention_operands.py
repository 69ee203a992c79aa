# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention whose keys and values are operands: of caches, dense and ragged buffers, on the host and in PTX.

One kernel takes them all, so that equal keys give equal bits whatever holds them; and all of it is compared with a
float64 model. Rows that belong to no sequence's keys are NaN, or a large integer.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import attention as reference, emulated, model
from reference.kinds import MMA, schedule_for
from reference.operands import dense_parts, ragged_parts
from reference.random_caches import Problem, random_problem, random_query, random_values, stored_problem

import kvarn as kv
from kvarn.caches import (
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    LayoutTensorMHAOperand,
    PagedKVCacheCollection,
    RaggedMHAOperand,
)
from kvarn.dialect import dtypes
from kvarn.ops import reads

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}
SENTINEL = 72.0
MASKS = [
    {}, {"mask": "null"}, {"mask": "sliding_window", "window": 7}, {"mask": "chunked", "chunk": 24},
    {"mask": "chunked_causal", "chunk": 5},
]  # fmt: skip


def problem_of(seed: int, dtype: str = "f16", **shape: Any) -> tuple[np.random.Generator, Problem]:
    shape = {"cached": [50, 0, 30, 7, 0], "new": [20, 33, 0, 1, 3], "head_size": 32, "page_size": 8} | shape
    return stored_problem(seed, "paged", dtype, **shape)


query_of = functools.partial(random_query, over_8_bits="f16")


def of_caches(problem: Problem) -> list[KVCacheMHAOperand]:
    return [KVCacheMHAOperand(cache) for cache in problem.caches(1)]


def dense(problem: Problem) -> list[LayoutTensorMHAOperand]:
    return [make(*parts) for make, parts in dense_parts(problem, 1)]


def ragged(problem: Problem) -> list[RaggedMHAOperand]:
    return [make(*parts) for make, parts in ragged_parts(problem, 1)]


FORMS = {"caches": of_caches, "dense": dense, "ragged": ragged}


def run(
    problem: Problem, operands: Any, query: np.ndarray, schedule: dict[str, Any] | None = None, target: str = "sm_90a",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Output and log-sum-exp on the host, or with a schedule in the PTX interpreter; a collection and a layer too."""
    out, lse = np.full_like(query, SENTINEL), np.full(query.shape[:2], SENTINEL, np.float32)
    if schedule is None:
        softcap = {"softcap": options.pop("softcap")} if options.get("softcap") else {}
        kv.ops.attention(*operands, query, problem.row_offsets, out=out, lse=lse, **options, **softcap)
        return out, lse
    span = options.get("window") or options.get("chunk") or 0
    attributes = (("mask", options.get("mask", "causal")), ("span", span), ("softcap", options.get("softcap", 0.0)))
    rest = (
        query, problem.row_offsets, options.get("scale", query.shape[2] ** -0.5), out, options.get("sinks"), lse,
        options.get("kv_offsets"), options.get("alibi_slopes"),
    )  # fmt: skip
    operation = reads._ATTENTION if isinstance(operands[1], int) else reads._OPERAND_ATTENTION
    emulated.run(operation, (*operands, *rest), attributes, schedule, target)
    return out, lse


def check(problem: Problem, query: np.ndarray, schedule: dict[str, Any] | None = None, target: str = "sm_90a",
          **options: Any) -> None:  # fmt: skip
    """Every form gives the bits that the collection does, and those are right."""
    out, lse = run(problem, (problem.collection, 1), query, schedule, target, **options)
    for form, make in FORMS.items():
        found = run(problem, make(problem), query, schedule, target, **options)
        for got, wanted in zip(found, (out, lse), strict=True):
            np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), wanted.view(f"u{got.itemsize}"), err_msg=form)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    tolerance, biggest = TOLERANCE[dtypes.of(query.dtype).name], max(1.0, np.abs(want).max())
    np.testing.assert_allclose(out.astype(np.float64) / biggest, want / biggest, rtol=tolerance, atol=tolerance)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(lse[~nothing], want_lse[~nothing], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_equal_keys_give_equal_bits_whatever_holds_them(options):
    rng, problem = problem_of(1)
    check(problem, query_of(rng, problem, 4), **options)


@pytest.mark.parametrize("kind", ["simt", "mma"])
@pytest.mark.parametrize("options", [{}, {"mask": "chunked", "chunk": 24}], ids=str)
def test_the_kernels_for_gpus_take_every_form(kind, options):
    rng, problem = problem_of(2, cached=[20, 0, 9], new=[12, 17, 2], num_heads=1)
    check(problem, query_of(rng, problem, 2), schedule_for(kind), **options)


@pytest.mark.parametrize("schedule", [None, {"kind": "simt"}, MMA], ids=["host", "simt", "mma"])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "granularity"),
    [("i8", "f16", 4), ("i8", "f32", 32), ("f8e4m3", "f32", 8), ("f8e4m3", None, None)],
)
def test_8_bit_operands_are_converted(schedule, dtype, scale_dtype, granularity):
    rng, problem = problem_of(
        3, dtype, cached=[20, 9], new=[3, 2], num_heads=1, scale_dtype=scale_dtype, granularity=granularity
    )
    check(problem, query_of(rng, problem, 2), schedule, **({"scale": 0.0005} if scale_dtype else {}))


def test_sinks_softcap_and_log_sum_exp_of_operands():
    rng, problem = problem_of(4, "f32")
    one_a_head = rng.standard_normal(4).astype(np.float32)
    check(problem, query_of(rng, problem, 4), sinks=one_a_head, softcap=2.0)
    check(problem, query_of(rng, problem, 4), alibi_slopes=one_a_head / 4)


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
    if form == "ragged":
        operands = [RaggedMHAOperand(x, starts.astype(np.uint32)) for x in (k, v)]
    else:
        operands = []
        for x in (k, v):
            buffer = np.full((len(keys), max(keys) + 1, 2, 8), np.nan, np.float32)
            for b, n in enumerate(keys):
                buffer[b, :n] = x[starts[b] : starts[b] + n]
            operands.append(LayoutTensorMHAOperand(buffer, lengths=np.array(keys, np.uint32)))
    out, lse = kv.ops.attention(*operands, query, offsets, return_lse=True, **options)
    for b, (m, n) in enumerate(zip(queries, keys, strict=True)):
        rows, at = slice(offsets[b], offsets[b + 1]), slice(starts[b], starts[b] + n)
        span = options.get("window") or options.get("chunk")
        seen = reference.visible(options.get("mask", "causal"), n - m + np.arange(m), np.arange(n), span)
        want, want_lse = reference.dense_attention(query[rows], k[at], v[at], seen, 8**-0.5)
        np.testing.assert_allclose(out[rows], want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["simt", "mma"])
def test_more_queries_than_keys_on_a_gpu(kind):
    rng = np.random.default_rng(5)
    query = random_values(rng, (9, 2, 32), dtypes.f16)
    k, v = random_values(rng, (2, 5, 1, 32), dtypes.f16)
    operands = [RaggedMHAOperand(x, np.array([0, 5], np.uint32)) for x in (k, v)]
    offsets = np.array([0, 9], np.uint32)
    problem = random_problem(rng, "paged", "f16", cached=[0], new=[9])
    for mask in ("causal", "chunked"):
        options = {"mask": mask, "chunk": 4} if mask == "chunked" else {"mask": mask}
        problem.row_offsets = offsets
        out, lse = run(problem, operands, query, schedule_for(kind), **options)
        seen = reference.visible(mask, np.arange(-4, 5), np.arange(5), 4)
        want, want_lse = reference.dense_attention(*(x.astype(float) for x in (query, k, v)), seen, 32**-0.5)
        np.testing.assert_allclose(out, want, rtol=4e-3, atol=4e-3)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))


def test_dense_operands_without_lengths_have_all_their_tokens():
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 3, 7, 2, 8)).astype(np.float32)
    query = rng.standard_normal((3, 4, 8)).astype(np.float32)
    out = kv.ops.attention(
        LayoutTensorMHAOperand(k), LayoutTensorMHAOperand(v), query, np.arange(4, dtype=np.int32), mask="null"
    )
    for b in range(3):
        seen = np.ones((1, 7), bool)
        want, _ = reference.dense_attention(query[b : b + 1], k[b], v[b], seen, 8**-0.5)
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
    rng, problem = problem_of(7, "f32")
    _, other = problem_of(8, "f32")
    query = query_of(rng, problem, 4)
    keys, values = KVCacheMHAOperand(problem.caches(1)[0]), KVCacheMHAOperand(other.caches(0)[1])
    out = kv.ops.attention(keys, values, query, problem.row_offsets)
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        t, rows = np.arange(cached + new), slice(problem.row_offsets[b], problem.row_offsets[b + 1])
        seen = reference.visible("causal", cached + np.arange(new), t)
        k, v = model.read(problem.caches(1)[0], b, t), model.read(other.caches(0)[1], b, t)
        want, _ = reference.dense_attention(query[rows], k, v, seen, 32**-0.5)
        np.testing.assert_allclose(out[rows], want, rtol=2e-5, atol=2e-5)


def test_cross_attention_over_operands_of_caches():
    rng, problem = problem_of(9, "f32", cached=[12, 0, 9], new=[30, 3, 1])
    options = {"mask": "null", "kv_offsets": np.array([0, 0, 0, 1], np.uint32)}
    query = query_of(rng, problem, 4)
    got = run(problem, of_caches(problem), query, **options)
    for x, y in zip(got, run(problem, (problem.collection, 1), query, **options), strict=True):
        np.testing.assert_array_equal(x, y)


def small() -> tuple[Any, Any, np.ndarray, np.ndarray]:
    data = np.zeros((2, 6, 2, 16), np.float32)
    query = np.zeros((3, 4, 16), np.float32)
    return LayoutTensorMHAOperand(data), LayoutTensorMHAOperand(data), query, np.array([0, 1, 3], np.int32)


def scales_operand() -> KVCacheScalesMHAOperand:
    pool, scales = np.ones((5, 2, 1, 4, 2, 16), np.int8), np.ones((5, 2, 1, 4, 2, 4), np.float32)
    table = np.array([[0, 1, 4, 4], [2, 3, 4, 4]], np.uint32)
    c = PagedKVCacheCollection(pool, np.array([5, 6], np.uint32), table, 1, 8, scales, 4)
    return KVCacheScalesMHAOperand(c.get_key_cache(0))


def test_operands_that_do_not_fit_are_refused():
    keys, values, query, offsets = small()
    other = LayoutTensorMHAOperand(np.zeros((2, 6, 2, 16), np.float16))
    flat = RaggedMHAOperand(np.zeros((12, 2, 16), np.float32), np.array([0, 5, 12], np.uint32))
    longer = LayoutTensorMHAOperand(np.zeros((3, 6, 2, 16), np.float32))
    shorter = LayoutTensorMHAOperand(np.zeros((2, 5, 2, 16), np.float32))
    shown = scales_operand()
    cases = [
        (TypeError, (keys, 0, query, offsets), {}, "values must be an operand like the keys, got int"),
        (TypeError, (keys, other, query, offsets), {}, "keys and values must have the same parameters"),
        (TypeError, (keys, flat, query, offsets), {}, "keys and values must have the same parameters"),
        (ValueError, (keys, longer, query, offsets), {}, "values must have the 2 sequences of the keys, got 3"),
        (ValueError, (keys, shorter, query, offsets), {}, "values must have the 6 tokens of the keys in dimension 1"),
        (TypeError, (shown, shown, query, offsets), {}, "keys must be an operand of keys, got one that shows"),
        (ValueError, (keys, values, query, offsets[:2]), {}, r"row_offsets must have shape \[3\]"),
        (ValueError, (keys, values, query[:, :3], offsets), {}, "query must have a multiple of the 2 KV heads"),
        (TypeError, (keys, values, query.astype(np.float16), offsets), {}, "query must have dtype f32"),
        (ValueError, (keys, values, query, offsets), {"kv_offsets": offsets}, "kv_offsets must be None for dense"),
        (TypeError, (np.zeros(3), 0, query, offsets), {}, "collection must be a KV cache collection"),
    ]
    for error, operands, options, message in cases:
        with pytest.raises(error, match=f"kv.ops.attention: {message}"):
            kv.ops.attention(*operands, **options)


def test_decode_is_for_collections():
    rng, problem = problem_of(10, cached=[12], new=[1])
    query = query_of(rng, problem, 2)
    with pytest.raises(ValueError, match="kind must be simt or tile on sm_90a, got 'decode'"):
        run(problem, dense(problem), query, {"kind": "decode", "max_queries": 1})
