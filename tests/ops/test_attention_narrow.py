# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention of 8-bit queries over 8-bit caches: products of elements as they are stored, against the float64 model.

Weights are rounded to e4m3 on GPUs and not on the host. Whatever holds no cached token is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.random_caches import Problem, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes, tile_layout

ROUNDED, EXACT = 0.08, 1.6e-2  # of values of standard deviation 1, weights of 8 bits, and of the output's bf16 alone
SENTINEL = 72.0


def problem_of(seed: int, **options: Any) -> tuple[np.ndarray, Problem]:
    """A query of four heads a KV head, and the cache that it meets."""
    size = options.setdefault("head_size", 32)
    rng, problem = stored_problem(seed, "paged", "f8e4m3", num_heads=2, **options)
    rows = int(problem.row_offsets[-1])
    return rng.standard_normal((rows, 8, size)).astype(dtypes.f8e4m3.numpy), problem


def check(
    place: Any, query: np.ndarray, problem: Problem, out: Any = dtypes.bf16, logarithms: bool = True, **options: Any
) -> None:
    given = place.put(np.full(query.shape, SENTINEL, out.numpy))
    lse = place.put(np.full(query.shape[:2], SENTINEL, np.float32)) if logarithms else None
    offsets = place.put(problem.row_offsets.astype(np.uint32))
    placed = {name: place.put(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    kv.ops.attention(place.collection(problem.collection), 1, place.put(query), offsets, out=given, lse=lse, **placed)
    options.pop("schedule", None)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    tolerance = EXACT if place.name == "host" else ROUNDED
    np.testing.assert_allclose(place.get(given).astype(np.float64), want, rtol=tolerance, atol=tolerance)
    if logarithms:
        np.testing.assert_allclose(place.get(lse), want_lse, rtol=1e-4, atol=1e-4)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts and decodes, and sequences without tokens": ({"cached": [150, 0, 7], "new": [1, 0, 33]}, {}),
    "a window that begins in a tile": (
        {"cached": [140, 30], "new": [3, 20]}, {"mask": "sliding_window", "window": 21}),
    "pages that are no boxes": ({"cached": [70, 3], "new": [5, 9], "page_size": 5}, {}),
    "pages of half a group": ({"cached": [140], "new": [5], "page_size": 8}, {}),
    "two panels of columns": ({"cached": [70], "new": [9], "head_size": 160}, {}),
    "turns that end when products are done": ({"cached": [300, 40, 0], "new": [5, 33, 0], "head_size": 128}, {}),
    "a negative scale": ({"cached": [70], "new": [9]}, {"scale": -0.1}),
    "a softcap": ({"cached": [70], "new": [9]}, {"softcap": 2.0}),
    "maxima that move from tile to tile": ({"cached": [300], "new": [5]}, {"scale": 1.5}),
    "maxima that are found of folded scores": (
        {"cached": [300], "new": [5]}, {"alibi_slopes": np.linspace(-0.2, 0.9, 8, dtype=np.float32)}),
    "equal scores": ({"cached": [300], "new": [5]}, {"scale": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=list(CASES))
def test_8_bit_queries_are_multiplied_as_they_are(place, sizes, options):
    query, problem = problem_of(1, **sizes)
    check(place, query, problem, **options)


# Without logarithms of sums, these are of rounded weights, by products, and rounding shows which maxima move.
@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=list(CASES))
@pytest.mark.sampled(3)
def test_weights_are_divided_by_the_sum_of_what_values_are_multiplied_by(place, sizes, options):
    query, problem = problem_of(8, **sizes)
    check(place, query, problem, logarithms=False, **options)


@pytest.mark.parametrize("out", [dtypes.f16, dtypes.f32])
def test_the_output_of_8_bit_queries_is_of_any_wide_float(place, out):
    query, problem = problem_of(2, cached=[40], new=[9])
    check(place, query, problem, out)


def test_the_output_of_8_bit_queries_is_bf16_by_default():
    query, problem = problem_of(3, cached=[40], new=[9])
    found = kv.ops.attention(problem.collection, 1, query, problem.row_offsets)
    assert dtypes.of(found.dtype) is dtypes.bf16


@pytest.mark.parametrize("cache", [("i8", 32), ("f8e4m3", 8), ("f8e5m2", None), ("bf16", None)], ids=str)
def test_8_bit_queries_need_a_cache_of_their_type_without_scales(cache):
    dtype, granularity = cache
    scales = {"scale_dtype": "f32", "granularity": granularity} if granularity else {}
    _, problem = stored_problem(4, "paged", dtype, num_heads=2, head_size=32, cached=[9], new=[1], **scales)
    query = np.zeros((1, 8, 32), dtypes.f8e4m3.numpy)
    with pytest.raises(TypeError, match="query must have dtype"):
        kv.ops.attention(problem.collection, 1, query, problem.row_offsets)


def test_a_lane_has_the_weights_of_the_tokens_that_it_multiplies():
    """Of 32 tokens: a byte of a lane's words of A, and the accumulator's element that becomes it."""
    weights, operand = tile_layout.named("wgmma", (64, 32), 4), tile_layout.named("a8", (64, 32), 4)
    for lane in range(32):
        own = [weights.position(r, lane, 0) for r in range(weights.registers)]
        # As tile_products.words has them: pairs of a row with those of eight columns on, then of the row eight on.
        order = [2 * p + i for at in range(0, 8, 4) for p in (at, at + 2, at + 1, at + 3) for i in (0, 1)]
        for byte, register in enumerate(order):
            row, column = operand.position(byte, lane, 0)
            group, at = divmod(column, 16)
            t, i = divmod(at, 4)
            assert own[register] == (row, 16 * group + 2 * t + (i & 1) + 8 * (i >> 1))


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("disable", "least", "most"),
    [([], 0.999, 1.001), (["sum-kv-weights"], 0.995, 1.005), (["promote-kv-sums"], 0, 0.985)],
)
def test_sums_over_many_keys_lose_nothing_of_values_that_are_alike(place, disable, least, most):
    """Tensor cores, and the emulator, cut off what is small beside a sum of 8-bit products: 2% of 2000 keys."""
    query, problem = problem_of(7, cached=[2000], new=[1], head_size=128, page_size=64)
    problem.collection.blocks[:, 1] = 1
    query, offsets = place.put(query), place.put(problem.row_offsets.astype(np.uint32))
    with kv.pipeline(disable=disable):
        out = kv.ops.attention(place.collection(problem.collection), 1, query, offsets, schedule={"splits": 1})
    made = place.get(out).astype(np.float64)
    assert least <= made.min()
    assert made.max() <= most
