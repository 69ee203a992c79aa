# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules of decode attention alone, for the PTX interpreter and for a GPU: each takes the place where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes

from . import attention as reference
from .case import Case, assert_same_bits, sentinel
from .places import Place
from .random_caches import random_problem, random_query, random_values


def batch_invariance(place: Place, case: Case, split: int) -> None:
    """A sequence alone has the bits that it has in its batch, whichever kernel merges its parts."""
    case = replace(case, spread=8.0)  # maxima of splits are orders apart
    schedule = {"kind": "decode", "batch_invariant": True, "split_size": split, "max_queries": max(case.new)}
    case = replace(case, schedule=schedule)
    case.check(place)
    together = case.run(place)
    for b in range(len(case.cached)):
        rows, one = slice(int(case.offsets[b]), int(case.offsets[b + 1])), case.problem.only(b)
        for entries in ({"combine": 0}, {"combine": 4, "max_batch": 1}) if b % 2 else ({"combine": 2},):
            alone = case.launch(
                place, kv.ops.attention, (place.collection(one.collection), 1), case.query_rows[rows], one.row_offsets,
                schedule={**schedule, **entries},
            )  # fmt: skip
            assert_same_bits(alone, (together[0][rows], together[1][rows]))


def early_after_append(place: Place, cached: Sequence[int], head_size: int = 64, steps: int = 1) -> None:
    """A decode that may read cached tokens early sees the token that the kernel before it appends."""
    rng = np.random.default_rng(16)
    problem = random_problem(rng, "paged", "f16", cached=cached, new=[1] * len(cached), head_size=head_size)
    query = random_query(rng, problem, 4)
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
        np.testing.assert_allclose(place.get(out).astype(np.float64), want, rtol=4e-3, atol=4e-3)
