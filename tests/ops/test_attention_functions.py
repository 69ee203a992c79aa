# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What scores and masks as functions compute: on the host, and as PTX run by the interpreter of ``kvarn.emulator``."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated
from reference.attention_cases import assert_same_bits
from reference.attention_functions import (
    LENGTHS,
    check,
    dilated,
    document,
    gemma,
    kerple,
    prefix,
    problem_of,
    query_of,
    run,
    t5,
    t5_buckets,
)  # fmt: skip
from reference.random_caches import Problem

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, PagedKVCacheCollection
from kvarn.ops import reads

# --- what they compute ---------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_score_that_is_multiplied_twice(factor):
    """One product is the other's operand: what folds both erases each once."""
    rng, problem = problem_of(3)

    def score(s, b, h, q, k):
        return s * factor * factor

    query = query_of(rng, problem, 2)
    check(problem, query, score=score, numpy_score=score, schedule={"kind": "tile"})


@pytest.mark.parametrize("target", ["sm_90a", "host"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("kind", "dtype"), [("paged", "f16"), ("paged", "bf16"), ("paged", "f8e4m3"),
                                             ("continuous", "f16"), ("fa3", "f16")])  # fmt: skip
def test_a_bias_by_distance_buckets_and_a_document_mask_over_every_cache(target, group, kind, dtype):
    rng, problem = problem_of(1, kind, dtype)
    query = query_of(rng, problem, group)
    if dtype == "bf16":
        query = query.astype(np.float32).astype(query.dtype)
    bias, buckets = rng.standard_normal((2 * group, 16)).astype(np.float32), t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (2, 60)), axis=1).astype(np.int32)

    def numpy_score(x, b, h, q, k):
        return x + bias[h, buckets[np.maximum(q - k, 0)]]

    def numpy_mask(b, h, q, k):
        return (k <= q) & (ids[b, q] == ids[b, k])

    out, _ = run(problem, query, score=(t5, bias, buckets), mask=(kv.masks.causal & document, ids), target=target)
    want, _ = reference.function_attention(
        problem.collection, 1, query, problem.row_offsets, score=numpy_score, mask=numpy_mask
    )
    tolerance = 2e-2 if dtype == "bf16" else 4e-3
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)


DECODE = {"kind": "decode", "max_queries": 4, "max_batch": 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "schedule", "dtype"),
    [("sm_90a", DECODE, "f8e4m3"), ("sm_80", {"max_queries": 4, "max_batch": 4}, "f16"), ("sm_80", None, "f8e4m3")],
    ids=["decode", "decode without wgmma", "simt"],
)
def test_kernels_that_are_not_over_tiles_take_functions(target, schedule, dtype):
    rng, problem = problem_of(19, "paged", dtype, cached=[150, 0, 40], new=[2, 4, 1])
    query = query_of(rng, problem, 4)
    bias, buckets = rng.standard_normal((8, 16)).astype(np.float32), t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (3, 160)), axis=1).astype(np.int32)
    check(
        problem, query, lambda x, b, h, q, k: 2 * (x + bias[h, buckets[np.clip(q - k, 0, 59)]]),
        lambda b, h, q, k: (q - k >= 0) & (q - k < 70) & (ids[b, q] == ids[b, k]), target=target, schedule=schedule,
        score=(lambda s, b, h, q, k, bias, buckets: 2.0 * (s + bias[h, buckets[q - k]]), bias, buckets),
        mask=(kv.masks.sliding_window(70) & document, ids),
    )  # fmt: skip


def test_what_lies_before_windows_in_a_decode_and_what_is_hidden_from_rows_may_be_anything():
    rng, problem = problem_of(23, cached=[150], new=[2], num_heads=1)
    query, ids = query_of(rng, problem, 2), np.zeros((1, 160), np.int32)
    options = {"mask": (kv.masks.sliding_window(20) & document, ids), "schedule": DECODE}
    want, _ = run(problem, query, **options)
    poisoned(problem, slice(0, 130))
    np.testing.assert_array_equal(run(problem, query, **options)[0], want)
    out, _ = run(problem, query, mask=lambda b, h, q, k: k >= 130, schedule={"kind": "simt"})
    assert np.isfinite(out).all()


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_scores_fall_with_the_logarithm_of_the_distance(target):
    rng, problem = problem_of(2, **LENGTHS)
    query = query_of(rng, problem, 2)
    r1, r2 = (rng.random(4).astype(np.float32) for _ in range(2))

    def numpy_score(x, b, h, q, k):
        return x - r1[h] * np.log(1 + r2[h] * np.abs(q - k))

    check(problem, query, numpy_score, score=(kerple, r1, r2), target=target)


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_a_prefix_is_seen_by_all_and_the_rest_causally(target):
    rng, problem = problem_of(3, cached=[0, 0, 100], new=[150, 20, 40], num_heads=1)
    query, lengths = query_of(rng, problem, 2), np.array([140, 0, 120], np.uint32)
    check(problem, query, None, lambda b, h, q, k: (k <= q) | (k < lengths[b]), mask=(prefix, lengths), target=target)


@pytest.mark.parametrize(("size", "step"), [(5, 3), (10, 16)])
def test_a_dilated_window(size, step):
    rng, problem = problem_of(4, **LENGTHS)

    def numpy_mask(b, h, q, k):
        return (k <= q) & (q - k < size * step) & ((q - k) % step == 0)

    check(problem, query_of(rng, problem, 2), None, numpy_mask, mask=dilated(size, step))


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_a_rank_that_has_every_other_key_sees_those_that_are_not_later(target):
    """What kv.parallel's prefill asks for: keys of their own count, of which early rows see none."""
    world, rank, rng = 2, 1, np.random.default_rng(30)
    cached, new = np.array([3, 0, 40]), np.array([5, 1, 70])
    mine, after = (cached + world - 1 - rank) // world, (cached + new + world - 1 - rank) // world
    tokens = rng.standard_normal((3, 110, 2, 1, 32)).astype(np.float16)
    table = rng.permutation(12).astype(np.int32).reshape(3, 4)
    blocks = np.full((13, 2, 1, 16, 1, 32), np.nan, np.float16)
    for b in range(3):
        for j in range(after[b]):
            blocks[table[b, j // 16], :, 0, j % 16] = tokens[b, j * world + rank]
    pool = PagedKVCacheCollection(blocks, mine.astype(np.int32), table, 70, 64)
    offsets, kv_offsets = (np.cumsum([0, *n]).astype(np.int32) for n in (new, after - mine))
    query, turn = rng.standard_normal((76, 2, 32)).astype(np.float16), np.array([rank, world], np.int32)
    out, lse = np.full_like(query, 72.0), np.full((76, 2), 72.0, np.float32)

    def seen(b, h, q, k, later, turn):
        return k * turn[1] + turn[0] <= q + later[b]

    options = {"mask": (seen, (cached - mine).astype(np.int32), turn), "kv_offsets": kv_offsets, "out": out, "lse": lse}
    with contextlib.nullcontext() if target == "host" else kv.emulated(target):
        kv.ops.attention(pool, 0, query, offsets, **options)
    for row in range(76):
        b = int(np.searchsorted(offsets, row, "right")) - 1
        k, v = tokens[b, rank : cached[b] + row - offsets[b] + 1 : world].astype(np.float64).swapaxes(0, 1)[:, :, 0]
        weights = np.exp(query[row].astype(np.float64) @ k.T * 32**-0.5)
        np.testing.assert_allclose(out[row], weights @ v / np.maximum(weights.sum(-1), 1e-9)[:, None], atol=4e-3)
        np.testing.assert_allclose(np.exp(lse[row]), weights.sum(-1), rtol=4e-3)


def test_a_softcap_as_a_function_is_the_built_in_one():
    rng, problem = problem_of(5)
    query = query_of(rng, problem, 4)
    as_function, _ = run(problem, query, score=gemma(2.0))
    built_in, _ = run(problem, query, softcap=2.0, schedule={"kind": "tile"})
    np.testing.assert_allclose(as_function.astype(np.float32), built_in.astype(np.float32), rtol=2e-3, atol=1e-3)


def test_built_in_scores_are_functions_of_kv_scores_to_a_bit():
    rng, problem = problem_of(24)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, 0.25, 0.125, -0.1], np.float32)
    for built_in, function in (
        ({"softcap": 2.0}, kv.scores.softcap(2.0)), ({"alibi_slopes": slopes}, (kv.scores.alibi, slopes)),
    ):  # fmt: skip
        want, _ = run(problem, query, **built_in, schedule={"kind": "tile"})
        np.testing.assert_array_equal(run(problem, query, score=function)[0], want)
    with pytest.raises(ValueError, match="takes a positive number, got 0"):
        kv.scores.softcap(0)


def test_a_temperature_by_position_and_heads_that_see_different_keys():
    rng, problem = problem_of(6)
    query, temperatures = query_of(rng, problem, 4), (0.5 + rng.random(60)).astype(np.float16)

    def cooled_half(score, b, h, q, k, temperatures):
        return score * kv.f32(temperatures[q])

    def numpy_mask(b, h, q, k):
        return (k <= q) & ((h % 2 == 0) | (q - k < 9))

    check(
        problem, query, lambda x, b, h, q, k: x * temperatures.astype(np.float64)[q], numpy_mask,
        score=(cooled_half, temperatures), mask=kv.masks.causal & (lambda b, h, q, k: (h % 2 == 0) | (q - k < 9)),
    )  # fmt: skip


def test_functions_come_after_the_softcap_and_the_slopes():
    rng, problem = problem_of(7)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, 0.25, 0.125, -0.1], np.float32)

    def numpy_score(x, b, h, q, k):
        return 2 * (3 * np.tanh(x / 3) + slopes[h] * (k - q))

    check(problem, query, numpy_score, score=lambda s, b, h, q, k: 2.0 * s, softcap=3.0, alibi_slopes=slopes)


def test_a_score_may_be_a_number_or_depend_on_one_position_alone():
    rng, problem = problem_of(8)
    query = query_of(rng, problem, 1)
    check(problem, query, lambda x, b, h, q, k: 0.0 * x, score=lambda s, b, h, q, k: 0.0)
    check(problem, query, lambda x, b, h, q, k: 0.0 * x + k / 9, score=lambda s, b, h, q, k: kv.f32(k) / 9.0)


def halved(score, b, h, q, k, times):
    for _ in range(times[b]):
        score = score * 0.5
    return score


def halved_while(score, b, h, q, k, times):
    i = kv.i32(0)
    while i < times[b]:
        score, i = score * 0.5, i + 1
    return score


def without_some(b, h, q, k, counts):
    seen = k <= q
    for i in range(counts[b]):
        seen = seen & (k != i)
    return seen


@pytest.mark.parametrize("schedule", [None, {"kind": "tile", "producer": False, "overlap": False}, "host"])
@pytest.mark.parametrize("function", [halved, halved_while, without_some])
def test_functions_loop_a_number_of_times_that_an_array_holds(function, schedule):
    rng, problem = problem_of(9)
    query, times = query_of(rng, problem, 2), np.arange(len(problem.row_offsets) - 1, dtype=np.int32) % 4
    if function is without_some:
        given = {"mask": (function, times), "numpy_mask": lambda b, h, q, k: (k <= q) & (k >= times[b])}
    else:
        given = {"score": (function, times), "numpy_score": lambda x, b, h, q, k: x * 0.5 ** times[b]}
    how = {"target": "host"} if schedule == "host" else {"schedule": schedule}
    check(problem, query, **given, **how)


@pytest.mark.parametrize(
    ("named", "made"),
    [
        ({}, kv.masks.causal),
        ({"mask": "sliding_window", "window": 9}, kv.masks.sliding_window(9)),
        ({"mask": "chunked", "chunk": 24}, kv.masks.chunked(24)),
        ({"mask": "chunked_causal", "chunk": 24}, kv.masks.chunked(24) & kv.masks.causal),
    ],
    ids=["causal", "sliding_window", "chunked", "chunked_causal"],
)
def test_a_named_mask_is_a_function_of_kv_masks(named, made):
    rng, problem = problem_of(9)
    query = query_of(rng, problem, 2)
    out, _ = run(problem, query, mask=made)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, **named)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def test_masks_combine_by_and_or_and_not_with_their_own_arrays():
    rng, problem = problem_of(10, num_heads=1)
    query = query_of(rng, problem, 2)
    ids, hidden = rng.integers(0, 2, (2, 60)).astype(np.int32), rng.integers(0, 2, (2, 60)).astype(np.int8)

    def concealed(b, h, q, k, hidden):
        return hidden[b, k] != 0

    mask = (kv.masks.causal & ~kv.masks.Mask(concealed)) | (document & kv.masks.sliding_window(5))

    def numpy_mask(b, h, q, k):
        near = (k <= q) & (q - k < 5) & (ids[b, q] == ids[b, k])
        return ((k <= q) & (hidden[b, k] == 0)) | near

    check(problem, query, None, numpy_mask, mask=(mask, hidden, ids))


def test_rows_that_see_nothing_are_zeros():
    rng, problem = problem_of(11)
    out, lse = run(problem, query_of(rng, problem, 2), mask=lambda b, h, q, k: (k <= q) & (q % 3 == 0))
    start = np.concatenate([40 + np.arange(20), np.arange(7)])
    assert (out[start % 3 != 0] == 0).all()
    assert np.isneginf(lse[start % 3 != 0]).all()
    assert np.isfinite(lse[start % 3 == 0]).all()


def test_where_pages_lie_does_not_matter_to_a_bit():
    rng, problem = problem_of(12, **LENGTHS)
    query, ids = query_of(rng, problem, 2), np.sort(rng.integers(0, 3, (3, 200)), axis=1).astype(np.int32)
    mask = (kv.masks.causal & document, ids)
    out, lse = run(problem, query, score=gemma(3.0), mask=mask)
    c = problem.collection
    order = rng.permutation(len(c.blocks))
    table = np.argsort(order)[c.lookup_table].astype(np.uint32)
    moved = PagedKVCacheCollection(c.blocks[order], c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    problem.collection = moved
    again, lse_again = run(problem, query, score=gemma(3.0), mask=mask)
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)


def test_positions_outside_of_an_array_read_its_edge():
    """The last tile has positions past every key, and the arrays end where a caller thinks that they may."""
    rng, problem = problem_of(13, cached=[3], new=[2], num_heads=1)
    query, bias = query_of(rng, problem, 1), np.array([0.5, -0.5, 2.0], np.float32)
    check(
        problem, query, lambda x, b, h, q, k: x + bias[np.clip(q - k, 0, 2)],
        score=(lambda s, b, h, q, k, bias: s + bias[q - k], bias),
    )  # fmt: skip


def test_keys_before_a_named_window_may_be_anything_also_in_a_conjunction():
    rng, problem = problem_of(14, cached=[100], new=[2], num_heads=1)
    query, ids = query_of(rng, problem, 2), np.zeros((1, 102), np.int32)
    for cache in problem.caches(1):
        t = np.arange(80)[:, None, None]
        cache.store(0, np.zeros((1, 1), int), t, np.arange(32), np.full((80, 1, 32), np.nan, np.float16))
    out, _ = run(problem, query, mask=(kv.masks.sliding_window(20) & document, ids))
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, mask="sliding_window", window=20)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("schedule", [{"kind": "simt"}, "host"])
def test_keys_behind_the_end_of_a_mask_may_be_anything_also_in_a_conjunction(schedule):
    """Keys of a cross attention that no query stands behind."""
    rng, problem = problem_of(26, cached=[3], new=[120], num_heads=1)
    query, ids, keys = query_of(rng, problem, 2)[:2], np.zeros((1, 130), np.int32), np.array([0, 120], np.uint32)
    poisoned(problem, slice(5, 123))
    options: dict[str, Any] = {"target": "host"} if schedule == "host" else {"schedule": schedule}
    few = dataclasses.replace(problem, row_offsets=np.array([0, 2], np.uint32))
    out, _ = run(few, query, mask=(kv.masks.causal & document, ids), kv_offsets=keys, **options)
    want, _ = reference.attention(problem.collection, 1, query, few.row_offsets, kv_offsets=keys)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def poisoned(problem: Problem, tokens: slice) -> None:
    """NaN in some values of sequence 0: whoever visits their tile shows it."""
    cache = problem.caches(1)[1]
    t = np.arange(1000)[tokens][:, None, None]
    cache.store(0, np.zeros((1, 1), int), t, np.arange(32), np.full((len(t), 1, 32), np.nan, np.float16))


def test_tiles_before_a_bound_that_a_function_compares_with_are_not_visited():
    rng, problem = problem_of(20, cached=[300], new=[9], num_heads=1)
    poisoned(problem, slice(0, 128))
    out, _ = run(problem, query_of(rng, problem, 2), mask=dilated(15, 3))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("written", ["and", "or"])
def test_tiles_after_a_bound_are_not_visited_beside_what_is_read(written):
    rng, problem = problem_of(21, cached=[0], new=[210], num_heads=1)
    poisoned(problem, slice(128, 210))
    query, ids = query_of(rng, problem, 2), np.zeros((1, 210), np.int32)
    prefixes = np.array([10], np.int32)
    mask = (kv.masks.causal & document, ids) if written == "and" else (prefix, prefixes)
    out, _ = run(problem, query, mask=mask)
    assert np.isfinite(out[:96]).all()  # a block of queries, which ends before the poison
    assert np.isnan(out[128:]).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["sm_90a", "host"])
@pytest.mark.parametrize("written", ["end", "where"])
def test_a_bias_by_distance_is_the_same_for_tiles_that_are_far_and_near(written, target):
    """Past the end of the array, or of the comparison, a whole tile has one bias a head."""
    rng, problem = problem_of(22, cached=[290, 0], new=[3, 7], num_heads=1)
    bias = rng.standard_normal((2, 8)).astype(np.float32)
    buckets, far = t5_buckets(20, 8, 20), rng.standard_normal(2).astype(np.float32)

    def where(score, b, h, q, k, bias, buckets, far):
        return score + kv.where(q - k < 20, bias[h, buckets[q - k]], far[h])

    def numpy_score(x, b, h, q, k):
        near = bias[h, buckets[np.clip(q - k, 0, 19)]]
        return x + (near if written == "end" else np.where(q - k < 20, near, far[h]))

    score = (t5, bias, buckets) if written == "end" else (where, bias, buckets, far)
    check(problem, query_of(rng, problem, 2), numpy_score, score=score, target=target)


def test_gathers_are_narrowed_by_a_pass_of_their_own():
    rng, problem = problem_of(22, num_heads=1)
    query = query_of(rng, problem, 2)
    score = (t5, np.zeros((2, 8), np.float32), np.zeros(20, np.int32))
    attributes, arrays = reads._modified(score, "causal", None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *[None] * 6, *arrays)
    made = reads._ATTENTION.compile(operands, attributes, None, "sm_90a")
    with kv.pipeline(disable=["narrow-kv-tiles"]):
        plain = reads._ATTENTION.compile(operands, attributes, None, "sm_90a")
    of_tiles = re.compile(r'"kv.tile_gather".*-> tensor<\d+x\d+x')
    near = [line for line in made.stages["narrow-kv-tiles"].splitlines() if of_tiles.search(line)]
    assert near
    assert all(line.startswith(" " * 12) for line in near), "outside of the branch for near tiles"
    assert plain.asm["ptx"] != made.asm["ptx"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "group"), [("sm_90a", 4), ("sm_90a", 3), ("sm_80", 2)])
def test_what_tiles_repeat_is_computed_once_for_each_distance_and_head(target, group):
    """Rows of several tokens and heads, the last ones of a sequence, tiles before and behind the diagonal."""
    rng, problem = problem_of(24, cached=[120, 0], new=[30, 7], num_heads=1)
    query = query_of(rng, problem, group)
    r1, bias = rng.random(group).astype(np.float32), rng.standard_normal((group, 8)).astype(np.float32)
    buckets = t5_buckets(150, 8, 60)

    def score(score, b, h, q, k, r1, bias, buckets):
        return score + (bias[h, buckets[q - k]] - r1[h] * kv.math.log(1.0 + kv.f32(kv.math.abs(q - k))))

    def numpy_score(x, b, h, q, k):
        return x + bias[h, buckets[np.maximum(q - k, 0)]] - r1[h] * np.log(1 + np.abs(q - k))

    given = {"score": (score, r1, bias, buckets), "target": target, "schedule": {"kind": "tile"}}
    check(problem, query, numpy_score, **given)
    attributes, arrays = reads._modified(given["score"], "causal", None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *[None] * 6, *arrays)
    made = reads._ATTENTION.compile(operands, attributes, given["schedule"], target)
    assert '"kv.tile_windows"' in made.stages["tabulate-kv-scores"]
    with kv.pipeline(disable=["tabulate-kv-scores"]):
        plain = reads._ATTENTION.compile(operands, attributes, given["schedule"], target)
    assert plain.asm["ptx"] != made.asm["ptx"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mask", ["documents", "window", "causal"])
@pytest.mark.parametrize("low", [-1000.0, 0.0])
def test_weights_are_computed_of_products_for_rows_that_see_much_little_or_nothing(mask, low):
    """What is a number a row and what is linear in the distance, of scores as low as those of no key."""
    rng, problem = problem_of(31, cached=[150, 0], new=[30, 7], num_heads=1)
    query, slopes = query_of(rng, problem, 2), np.array([2.0, 0.01], np.float32)
    factors, ids = rng.standard_normal(200).astype(np.float32), rng.integers(0, 9, (2, 200)).astype(np.int32)
    masks = {
        "causal": (kv.masks.causal, lambda b, h, q, k: k <= q),
        "window": (kv.masks.sliding_window(20), lambda b, h, q, k: (k <= q) & (q - k < 20)),
        "documents": (
            (lambda b, h, q, k, ids: (k < q) & (ids[b, q] == ids[b, k]), ids),
            lambda b, h, q, k: (k < q) & (ids[b, q] == ids[b, k]),
        ),
    }

    def score(score, b, h, q, k, factors, slopes):
        return score * factors[q] + (slopes[h] * kv.f32(k - q) + low)

    def numpy_score(x, b, h, q, k):
        return x * factors[q] + slopes[h] * (k - q) + low

    schedule, given = {"kind": "tile", "keys": 32}, masks[mask]
    check(problem, query, numpy_score, given[1], score=(score, factors, slopes), mask=given[0], schedule=schedule)
    attributes, arrays = reads._modified((score, factors, slopes), given[0], None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *[None] * 6, *arrays)
    made = reads._ATTENTION.compile(operands, attributes, schedule, "sm_90a")
    assert '"kv.tile_ramp"' in made.stages["fold-kv-scores"]


def test_the_order_of_warps_changes_no_bit_of_what_tables_hold():
    rng, problem = problem_of(27, cached=[200], new=[30], num_heads=1)
    query, schedule = query_of(rng, problem, 4), {"kind": "tile", "keys": 32}
    score, found = (t5, rng.standard_normal((4, 8)).astype(np.float32), t5_buckets(300, 8, 60)), []
    for order in ("program", "random"):
        with kv.emulated("sm_90a", order=order):
            out = kv.ops.attention(problem.collection, 1, query, problem.row_offsets, score=score, schedule=schedule)
        found.append(out)
    assert_same_bits(*found)


def test_what_rounds_read_before_they_wait_or_compute_again_changes_no_bit():
    """The bias of far keys, and which tiles a list has."""
    rng, problem = problem_of(29, cached=[100, 0], new=[9, 20], num_heads=1)
    query, ids, found = query_of(rng, problem, 2), np.sort(rng.integers(0, 3, (2, 110)), axis=1).astype(np.int32), []
    score, mask = (
        (t5, rng.standard_normal((2, 8)).astype(np.float32), t5_buckets(40, 8, 30)),
        kv.masks.causal & document,
    )
    with kv.emulated("sm_90a"):
        given = problem.collection, query, problem.row_offsets
        tiles = kv.ops.block_mask(*given, (mask, ids), score=score)
        for settings in ({"options": {"start-kv-rounds": "reads=true"}}, {"disable": ["start-kv-rounds"]}):
            with kv.pipeline(**settings):
                found.append(kv.ops.attention(given[0], 1, *given[1:], score=score, block_mask=tiles))
    assert_same_bits(*found)


def test_tiles_over_8_bit_pages_leave_room_for_tables():
    """Where a score reads an array by query and key; what it reads by the head or by one position needs none."""
    rng, problem = problem_of(28, dtype="f8e4m3", num_heads=1, head_size=128)
    query = query_of(rng, problem, 4)
    by_pairs = (t5, np.zeros((4, 8), np.float32), np.zeros(60, np.int32))
    by_row = (lambda s, b, h, q, k, of_head, of_row: s * of_row[q] + of_head[h], *np.zeros((2, 60), np.float32))
    cases = ((by_pairs, None, 112, True), (by_pairs, {"keys": 128}, 128, False), (by_row, None, 128, False))
    for score, schedule, keys, table in cases:
        attributes, arrays = reads._modified(score, "causal", None, None, None, "")
        operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *[None] * 6, *arrays)
        text = reads._ATTENTION.compile(operands, attributes, schedule, "sm_90a").stages["tabulate-kv-scores"]
        assert ("kv.make_table" in text, f"keys = {keys} : i64" in text) == (table, True)


def test_scores_that_depend_on_more_than_a_distance_and_a_head_are_computed_for_every_pair():
    rng, problem = problem_of(25, cached=[40, 0], new=[20, 7], num_heads=1)
    query, by_query = query_of(rng, problem, 2), rng.standard_normal((2, 60)).astype(np.float32)
    buckets, by_pair = t5_buckets(60, 8, 20), rng.standard_normal((60, 8)).astype(np.float32)
    check(
        problem, query,
        lambda x, b, h, q, k: (
            x + by_query[b, q] * (1 + np.abs(q - k)) ** 0.5 + by_pair[k, buckets[np.maximum(q - k, 0)]]
        ),
        score=(
            lambda s, b, h, q, k, by_query, by_pair, buckets: (
                s + by_query[b, q] * kv.math.sqrt(1.0 + kv.f32(kv.math.abs(q - k))) + by_pair[k, buckets[q - k]]
            ),
            by_query, by_pair, buckets,
        ),
    )  # fmt: skip


def test_the_padded_form_and_operands_take_functions():
    rng, problem = problem_of(15, num_heads=1)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, 0.25], np.float32)
    score = (lambda s, b, h, q, k, slopes: s + slopes[h] * kv.f32(k - q), slopes)
    attributes, arrays = reads._modified(score, kv.masks.causal, None, None, None, "kv.ops.attention")
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, alibi_slopes=slopes)
    rest = (query.shape[-1] ** -0.5,)
    c = problem.collection
    padded = reference.padded(query, problem.row_offsets, 20, 0.0)
    out = np.zeros_like(padded)
    lengths = problem.new.astype(np.uint32)
    operands = (c, 1, padded, lengths, *rest, out, *[None] * 6, *arrays)
    emulated.run(reads._ATTENTION_PADDED, operands, attributes, None, "sm_90a")
    rows = np.concatenate([out[0, :20], out[1, :7]])
    np.testing.assert_allclose(rows.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    keys, values = (KVCacheMHAOperand(cache) for cache in (c.get_key_cache(1), c.get_value_cache(1)))
    out = np.zeros_like(query)
    operands = (keys, values, query, problem.row_offsets, *rest, out, *[None] * 6, *arrays)
    emulated.run(reads._OPERAND_ATTENTION, operands, attributes, None, "sm_90a")
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def test_what_a_decode_reads_of_a_query_alone_is_read_before_its_keys():
    """An array of heads and one of positions: no read of them is left in the loop over tiles of keys."""
    rng, problem = problem_of(31, cached=[40, 3], new=[1, 1], num_heads=1)
    query = query_of(rng, problem, 2)

    def scored(score, b, h, q, k, slopes, temperatures):
        return score * temperatures[q] + slopes[h] * kv.f32(k - q)

    arrays = rng.standard_normal(2).astype(np.float32), rng.standard_normal(50).astype(np.float32)
    found = []
    for score in (None, (scored, *arrays)):
        attributes, given = reads._modified(score, "causal", None, None, None, "")
        operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *(None,) * 6, *given)
        made = reads._ATTENTION.compile(operands, attributes, {"kind": "decode", "max_queries": 1}, "sm_80")
        lines = made.asm["ptx"].splitlines()
        products = [i for i, line in enumerate(lines) if "mma.sync" in line]
        loads = [i for i, line in enumerate(lines) if "ld.global.b32" in line]
        found.append((len(loads), sum(products[0] < i < products[-1] for i in loads)))
    (plain, of_loop), (scored_too, also_of_loop) = found
    assert scored_too > plain
    assert also_of_loop == of_loop


def test_a_decode_computes_functions_by_fast_instructions():
    rng, problem = problem_of(32, cached=[40, 3], new=[1, 1], num_heads=1)
    query = query_of(rng, problem, 2)

    def scored(score, b, h, q, k):
        return 3.0 * kv.math.tanh(score / 3.0) - kv.math.log(1.0 + 0.5 * kv.f32(q - k))

    options = {"score": scored, "schedule": {"kind": "decode", "max_queries": 1}, "target": "sm_80"}
    check(problem, query, lambda x, b, h, q, k: 3 * np.tanh(x / 3) - np.log(1 + np.maximum(q - k, 0) / 2),
          lambda b, h, q, k: k <= q, **options)  # fmt: skip
    attributes, _ = reads._modified(scored, "causal", None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    lines = reads._ATTENTION.compile(operands, attributes, options["schedule"], "sm_80").asm["ptx"].splitlines()
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    loop = "\n".join(lines[products[0] : products[-1]])
    assert "lg2.approx" in loop
    assert "div." not in loop
