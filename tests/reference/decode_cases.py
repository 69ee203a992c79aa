# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules of decode attention alone, for the PTX interpreter and for a GPU: a case takes the place where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes

from . import attention as reference
from .attention_cases import assert_close, assert_same_bits, problem_of, sentinel
from .places import Place
from .random_caches import Problem, random_problem, random_values


def attend(
    place: Place, problem: Problem, query: np.ndarray, schedule: dict[str, Any], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the decode kernel over layer 1, of buffers that were 0xDEADBEEF."""
    out, lse = place.put(sentinel(query)), place.put(sentinel(np.zeros(query.shape[:2], np.float32)))
    operands = [place.collection(problem.collection), 1, place.put(query), place.put(problem.row_offsets)]
    schedule = {"kind": "decode", "max_queries": int(problem.new.max()), **schedule}
    with place.active():
        kv.ops.attention(*operands, out=out, lse=lse, schedule=schedule, **options)
    return place.get(out), place.get(lse)


def queries(rng: np.random.Generator, problem: Problem, heads: int, dtype: str) -> np.ndarray:
    return random_values(rng, (problem.tokens, heads, problem.collection.head_size), dtypes.of(dtype))


def check(
    place: Place, problem: Problem, query: np.ndarray, schedule: dict[str, Any], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, which are the model's."""
    got = attend(place, problem, query, schedule, **options)
    want = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1], 1e-3)
    return got


def scales(
    place: Place, dtype: str, scale_dtype: str, granularity: int, cached: Sequence[int], new: Sequence[int],
    head_size: int = 64, heads: int = 4, query: str = "f16",
) -> None:  # fmt: skip
    """Scales of token-heads and of granules count, of K and of V, those of other tokens and spare pages do not."""
    rng, problem = problem_of(
        13, dtype, scale_dtype=scale_dtype, granularity=granularity, cached=cached, new=new, head_size=head_size
    )
    check(place, problem, queries(rng, problem, heads, query), {}, scale=0.0005 if dtype == "i8" else 0.1)


def uneven_scales(place: Place, dtype: str, granularity: int, cached: Sequence[int], new: Sequence[int]) -> None:
    """Scales up to 2**40 times smaller than those of other tokens and granules count, and zeros and negative ones."""
    rng, problem = problem_of(
        23, dtype, scale_dtype="f32", granularity=granularity, cached=cached, new=new, head_size=64
    )
    scales = problem.collection.scales
    factors = np.ldexp(rng.choice([0.0, 1.0, 1.0, -1.0], scales.shape), -rng.integers(0, 41, scales.shape))
    np.multiply(scales, factors.astype(np.float32), out=scales, where=np.isfinite(scales))
    check(place, problem, queries(rng, problem, 4, "f16"), {}, scale=0.0005 if dtype == "i8" else 0.1)


def head_sizes(
    place: Place, dtype: str, head_size: int, page_size: int, heads: int, cached: Sequence[int], new: Sequence[int],
    **schedule: Any,
) -> None:  # fmt: skip
    """Heads of any multiple of 8 elements are computed; what lies beside them in memory has no influence."""
    rng, problem = problem_of(17, dtype, cached=cached, new=new, head_size=head_size, page_size=page_size)
    query = dtype if dtypes.by_name(dtype).bits > 8 else "bf16"
    check(place, problem, queries(rng, problem, heads, query), schedule)


def joined_heads(
    place: Place, dtype: str, head_size: int, num_heads: int, heads: int, cached: Sequence[int], new: Sequence[int],
    **options: Any,
) -> None:  # fmt: skip
    """Narrow KV heads that a warp takes as one are computed each by itself, with sinks and slopes of query heads."""
    rng, problem = problem_of(19, dtype, cached=cached, new=new, head_size=head_size, num_heads=num_heads)
    query = queries(rng, problem, heads, dtype if dtypes.by_name(dtype).bits > 8 else "bf16")
    schedule = options.pop("schedule", {})
    options |= {"sinks": rng.standard_normal(heads).astype(np.float32)}
    options |= {"alibi_slopes": rng.standard_normal(heads).astype(np.float32) / 8}
    given = {name: place.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, lse = attend(place, problem, query, schedule, **given)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    assert_close(out, want)
    assert_close(lse, want_lse, 1e-3)


def many_rows(place: Place, heads: int, cached: Sequence[int], new: Sequence[int], head_size: int = 32) -> None:
    """More than 16 query rows of a sequence and KV head, and sequences with fewer than others, are all computed."""
    rng, problem = problem_of(14, "f16", cached=cached, new=new, head_size=head_size, num_heads=1)
    check(place, problem, queries(rng, problem, heads, "f16"), {})


def batch_invariance(
    place: Place, dtype: str, split: int, cached: Sequence[int], new: Sequence[int], head_size: int = 32
) -> None:
    """A sequence alone has the bits that it has in its batch, whichever kernel merges its parts."""
    rng, problem = problem_of(15, dtype, cached=cached, new=new, head_size=head_size)
    query = 8 * queries(rng, problem, 4, "f16")  # maxima of splits are orders apart
    schedule = {"kind": "decode", "batch_invariant": True, "split": split}
    together = check(place, problem, query, schedule)
    for b in range(len(cached)):
        rows = slice(int(problem.row_offsets[b]), int(problem.row_offsets[b + 1]))
        for entries in ({"combine": 0}, {"combine": 4, "max_batch": 1}) if b % 2 else ({"combine": 2},):
            alone = attend(place, problem.only(b), query[rows], {**schedule, **entries})
            for found, wanted in zip(alone, together, strict=True):
                assert_same_bits(found, wanted[rows])


def early_after_append(place: Place, cached: Sequence[int], head_size: int = 64, steps: int = 1) -> None:
    """A decode that may read cached tokens early sees the token that the kernel before it appends."""
    rng = np.random.default_rng(16)
    new = [1] * len(cached)
    problem = random_problem(rng, "paged", "f16", cached=cached, new=new, head_size=head_size)
    query = queries(rng, problem, 4, "f16")
    rows = [random_values(rng, (len(cached), 2, head_size), dtypes.f16) for _ in range(2)]
    pool, offsets = place.collection(problem.collection), place.put(problem.row_offsets)
    key, value, given = place.put(rows[0]), place.put(rows[1]), place.put(query)
    outs = [place.put(sentinel(query)) for _ in range(steps)]
    schedule = {"kind": "decode", "max_queries": 1, "early": True}
    with place.active():
        for out in outs:
            kv.ops.append(pool, 1, key, value, offsets)
            kv.ops.attention(pool, 1, given, offsets, out=out, schedule=schedule)
    for b, t in enumerate(cached):
        for cache, row in zip(problem.caches(1), rows, strict=True):
            cache.store(b, np.arange(2)[:, None], t, np.arange(head_size), row[b])
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets)
    for out in outs:
        assert_close(place.get(out), want)
