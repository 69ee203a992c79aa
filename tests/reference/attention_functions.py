# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks of attention as functions: how tests run and check them, and those that several tests use.

What holds no cached token is NaN, and an access outside the buffers is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kvarn as kv
from kvarn.ops import reads
from reference import emulated

from . import attention as reference
from .case import Case, Mask
from .random_caches import Problem, random_query, stored_problem

SMALL = {"cached": [40, 0], "new": [20, 7]}


def problem_of(seed: int, kind: str = "paged", dtype: str = "f16", **shape: Any) -> tuple[Any, Problem]:
    return stored_problem(seed, kind, dtype, **{"head_size": 32, "num_heads": 2, **SMALL, **shape})


def query_of(rng: Any, problem: Problem, group: int) -> np.ndarray:
    return random_query(rng, problem, group * problem.collection.cache_spec.num_heads, over_8_bits="f16")


def run(problem: Problem, query: np.ndarray, *, score: Any = None, mask: Any = "causal", softcap: Any = None,
        schedule: Any = None, target: str = "sm_90a", **operands: Any) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The output and the log-sum-exp, as ``kv.ops.attention`` makes its call."""
    attributes, arrays = reads._modified(score, mask, None, None, softcap, "kv.ops.attention")
    out, lse = np.full_like(query, 72.0), np.full(query.shape[:2], 72.0, np.float32)
    names = ("sinks", "lse", "kv_offsets", "alibi_slopes", "prior", "prior_lse")
    rest = [{"lse": lse, **operands}.get(name) for name in names]
    given = (problem.collection, 1, query, problem.row_offsets, query.shape[-1] ** -0.5, out, *rest, *arrays)
    if target == "host":
        reads._ATTENTION(given, attributes, schedule, None)
    else:
        emulated.run(reads._ATTENTION, given, attributes, schedule, target)
    return out, lse


def check(problem: Problem, query: np.ndarray, numpy_score: Any = None, numpy_mask: Any = None, **options: Any) -> None:
    out, lse = run(problem, query, **options)
    want, want_lse = reference.attention(
        problem.collection, 1, query, problem.row_offsets, score=numpy_score, mask=numpy_mask
    )
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(lse[~nothing], want_lse[~nothing], rtol=2e-3, atol=2e-3)


# --- the functions, as users write them ----------------------------------------------------------------


def t5(score, b, h, q, k, bias, buckets):
    return score + bias[h, buckets[q - k]]


def kerple(score, b, h, q, k, r1, r2):
    return score - r1[h] * kv.math.log(1.0 + r2[h] * kv.f32(kv.math.abs(q - k)))


def document(b, h, q, k, ids):
    return ids[b, q] == ids[b, k]


def prefix(b, h, q, k, lengths):
    return (k <= q) | (k < lengths[b])


def dilated(size, step):
    def mask(b, h, q, k):
        return (k <= q) & (q - k < size * step) & ((q - k) % step == 0)

    return mask


def gemma(cap):
    return lambda score, b, h, q, k: cap * kv.math.tanh(score / cap)


def t5_buckets(longest: int, count: int = 16, farthest: int = 64) -> np.ndarray:
    distance = np.arange(longest)
    exact = count // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(farthest / exact) * (count - exact)
    return np.where(distance < exact, distance, np.minimum(far, count - 1)).astype(np.int32)


# --- and as rows of tables give them: with arrays that every sequence finds its part of ----------------------------

IDS = np.sort(np.random.default_rng(7).integers(0, 3, (8, 400)) + np.arange(400) // 40, axis=1).astype(np.int32)
_BIAS = np.random.default_rng(8).standard_normal((128, 16)).astype(np.float32)
_BUCKETS = t5_buckets(400)
PREFIXES = np.array([7, 0, 30, 12, 3], np.int32)

DOCUMENTS = Mask(
    "documents", {"mask": (kv.masks.causal & document, IDS)},
    lambda b, h, q, k: (k <= q) & (IDS[b, q] == IDS[b, k]),
)  # fmt: skip
DOCUMENTS_IN_A_WINDOW = Mask(
    "documents in a window of 40", {"mask": (kv.masks.sliding_window(40) & document, IDS)},
    lambda b, h, q, k: (k <= q) & (q - k < 40) & (IDS[b, q] == IDS[b, k]),
)  # fmt: skip
PREFIXES_SEEN = Mask("prefixes", {"mask": (prefix, PREFIXES)}, lambda b, h, q, k: (k <= q) | (k < PREFIXES[b]))
THIRDS = Mask(
    "every third by head", {"mask": kv.masks.causal & (lambda b, h, q, k: (q + k + h) % 3 == 0)},
    lambda b, h, q, k: (k <= q) & ((q + k + h) % 3 == 0),
)  # fmt: skip
BIAS_BY_DISTANCE = (
    (t5, _BIAS, _BUCKETS), lambda x, b, h, q, k: x + _BIAS[h, _BUCKETS[np.maximum(q - k, 0)]],
)  # fmt: skip
TWICE_BIASED = (
    (lambda s, b, h, q, k, bias, buckets: 2.0 * (s + bias[h, buckets[q - k]]), _BIAS, _BUCKETS),
    lambda x, b, h, q, k: 2 * (x + _BIAS[h, _BUCKETS[np.maximum(q - k, 0)]]),
)
CAPPED = lambda s, b, h, q, k: 3.0 * kv.math.tanh(s / 3.0), lambda x, b, h, q, k: 3 * np.tanh(x / 3)
FALLING = lambda s, b, h, q, k: s + kv.f32(k - q) * 0.25, lambda x, b, h, q, k: x + (k - q) / 4
LOGARITHMIC = (
    (kerple, _BIAS[:, 0] ** 2, _BIAS[:, 1] ** 2),
    lambda x, b, h, q, k: x - _BIAS[h, 0] ** 2 * np.log(1 + _BIAS[h, 1] ** 2 * np.abs(q - k)),
)


def calls_that_differ(place: Any) -> None:
    """Calls into one output, of which each is made again after others."""
    case = Case(cached=[40, 0, 9], new=[3, 7, 0], dtype="f32", head_size=24, value_size=16, group=2)
    problem, query, none = case.problem, case.query_rows, np.zeros(4, np.uint32)
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
        want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, value_size=16, **functions)
        np.testing.assert_allclose(place.get(out), want, rtol=1e-3, atol=1e-3)
