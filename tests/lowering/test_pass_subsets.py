# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whatever optional passes are left out of tile attention, its answer is the model's.

Passes are left out one at a time elsewhere (test_attention_tiles.py, test_attention_functions.py). Here go all of them,
every pair, and random subsets, over lengths that end within a warp's rows and within 8 tokens. What holds no token is
NaN; races, hangs and barriers of parted warps are errors (the emulator), and an access outside of a buffer ends the
process (the host).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, whole_warps
from reference.attention_functions import check, document, problem_of, query_of, run, t5, t5_buckets

import kvarn as kv
from kvarn.lowering import pipeline

TARGETS = ("sm_90a", "sm_80", "host")
OPTIONAL = tuple(s.name for s in pipeline.default_steps("sm_90a") if s.optional)
PAIRS = tuple(itertools.combinations(OPTIONAL, 2))
ODD = (1, 2, 3, 5, 6, 7)  # lengths modulo 8 that are no multiples of 4


def _causal(rng: Any, cached: list[int], new: list[int], options: dict[str, Any]) -> None:
    rng, problem = problem_of(int(rng.integers(1000)), "paged", "bf16", cached=cached, new=new, head_size=64)
    query = query_of(rng, problem, 4)
    out, lse = run(problem, query, **options)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=2e-3)


def _functions(rng: Any, cached: list[int], new: list[int], options: dict[str, Any]) -> None:
    rng, problem = problem_of(int(rng.integers(1000)), cached=cached, new=new)
    query, longest = query_of(rng, problem, 2), max(np.add(cached, new))
    bias, buckets = rng.standard_normal((4, 16)).astype(np.float32), t5_buckets(longest)
    ids = np.sort(rng.integers(0, 3, (len(new), longest)), axis=1).astype(np.int32)
    check(
        problem, query, lambda s, b, h, q, k: s + bias[h, buckets[np.abs(q - k)]],
        lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
        score=(t5, bias, buckets), mask=(kv.masks.causal & document, ids), **options,
    )  # fmt: skip


def _narrow(rng: Any, cached: list[int], new: list[int], options: dict[str, Any]) -> None:
    rng, problem = problem_of(int(rng.integers(1000)), "paged", "f8e4m3", cached=cached, new=new, head_size=64)
    query = query_of(rng, problem, 4)
    out, _ = run(problem, query, **options)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets)
    biggest = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(out.astype(np.float64) / biggest, want / biggest, rtol=2e-2, atol=2e-2)


PROGRAMS = (_causal, _functions, _narrow)


def _length(rng: Any, most: int) -> int:
    return int(rng.integers(most // 8)) * 8 + int(rng.choice(ODD))


def _run(without: tuple[str, ...], target: str, program: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cached, new = [_length(rng, 256), _length(rng, 64), 0], [1, _length(rng, 48), _length(rng, 24)]
    theirs = {s.name for s in pipeline.default_steps(target)}
    options = {"target": target, "schedule": None if target == "host" else {"kind": "tile"}}
    with kv.pipeline(disable=[name for name in without if name in theirs]), whole_warps.demanded():
        program(rng, cached, new, options)


# Each program on one target in make check.
ALL_OF_THEM = [
    pytest.param(program, target, marks=() if (n + m) % 3 == 1 else pytest.mark.thorough)
    for n, program in enumerate(PROGRAMS)
    for m, target in enumerate(TARGETS)
]


@pytest.mark.whole
@pytest.mark.parametrize(("program", "target"), ALL_OF_THEM)
def test_all_optional_passes_may_be_left_out_together(program, target):
    _run(OPTIONAL, target, program, 1)


@pytest.mark.sampled(64)
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[" ".join(pair) for pair in PAIRS])
def test_every_pair_of_optional_passes_may_be_left_out(number):
    _run(PAIRS[number], TARGETS[number % 2], PROGRAMS[number // 2 % 3], number)


@pytest.mark.sampled(64)
@pytest.mark.parametrize("seed", range(200))
def test_a_random_subset_of_the_optional_passes_may_be_left_out(seed):
    rng = np.random.default_rng(seed)
    share = rng.choice((0.25, 0.5, 0.75))
    without = tuple(name for name in OPTIONAL if rng.random() < share)
    target = str(rng.choice(TARGETS, p=(0.45, 0.45, 0.1)))
    _run(without, target, PROGRAMS[int(rng.integers(3))], seed)
