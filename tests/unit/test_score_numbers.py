# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of any size: every kernel of attention against float64, on the host and as a GPU's code in the interpreter.

What a row's scores are says an array, through a score function; or the query, whose products with keys are as large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_functions import problem_of, query_of, run
from reference.random_caches import Problem

import kvarn as kv

pytestmark = pytest.mark.whole

LARGEST = float(np.finfo(np.float32).max)
COUNTED = 2.2e38  # a score that is further from 0 counts as one of 2.2e38 to 2.4e38
# Far from 0, at and beyond numbers whose last place is a unit, and 128 powers of two, and at the ends of f32.
SIZES = (1e5, 1.7e7, 9.4e7, 1e9, 1.5e9, 1e12, 1e16, 1e18, 1e20, 1e25, 1e30, 1e38, 3e38, LARGEST)
TILE = {"kind": "tile", "rows": 64, "keys": 16}
DECODE = {"kind": "decode", "max_queries": 4, "max_batch": 2}
KERNELS: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "host": ("host", None, "f32", {}),
    "host, a row at a time": ("host", None, "f32", {"head_size": 1}),
    "host, 8-bit keys": ("host", None, "f8e4m3", {}),
    "tiles by wgmma": ("sm_90a", TILE, "f16", {}),
    "tiles by wgmma, 8-bit keys": ("sm_90a", TILE, "f8e4m3", {}),
    "tiles by mma.sync": ("sm_80", TILE, "f16", {}),
    "tiles of f32": ("sm_90a", TILE, "f32", {}),
    "a warp a row": ("sm_90a", {"kind": "simt"}, "f32", {}),
    "decode": ("sm_90a", DECODE, "f16", {}),
}


def problem_for(name: str, cached: int = 40) -> tuple[Problem, np.ndarray, int]:
    """A problem of one sequence with as many new tokens as a kernel takes, a query, and how many these are."""
    _, schedule, dtype, shape = KERNELS[name]
    new = 4 if schedule is DECODE else 28
    rng, problem = problem_of(11, "paged", dtype, **{"cached": [cached], "new": [new], **shape})
    return problem, query_of(rng, problem, 2), new


def from_array(score, b, h, q, k, z):
    return z[q, k]


def tables(rows: int, positions: int, first: int) -> list[np.ndarray]:
    """Scores of (query position, key position), f32, each row by a rule and a size of its own."""
    rng = np.random.default_rng(5)
    sizes = [sign * size for size in SIZES for sign in (-1.0, 1.0)]
    ordinary = rng.standard_normal((positions, positions))
    hidden = rng.random(positions) < 0.7
    hidden[positions - rows - 3] = False
    rules = [
        lambda row, v: np.full(positions, v),  # all alike
        lambda row, v: np.where(hidden, v, row),  # some far from the others
        lambda row, v: np.where(np.arange(positions) < 20, v, row),  # a tile of them first
        lambda row, v: np.where(np.arange(positions) < 20, row, v),  # and last
        lambda row, v: rng.choice([v, -v, v / 2], positions),
        lambda row, v: rng.choice([-1.0, 1.0], positions) * 10.0 ** rng.uniform(-3, 38, positions),
    ]
    found = []
    for rule in rules:
        for begin in range(0, len(sizes), rows):
            z = ordinary.copy()
            for i, v in enumerate(sizes[begin : begin + rows]):
                z[first + i] = rule(ordinary[first + i], v)
            with np.errstate(over="ignore"):
                found.append(np.clip(z, -LARGEST, LARGEST).astype(np.float32))
    return found


def assert_right(name: str, got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> None:
    (out, lse), (wanted, wanted_lse) = got, want
    tolerance = {"f32": 1e-4, "f16": 4e-3, "f8e4m3": 6e-3}[KERNELS[name][2]]
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
    held = np.clip(wanted_lse, -COUNTED, COUNTED)
    np.testing.assert_allclose(np.clip(lse.astype(np.float64), -COUNTED, COUNTED), held, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_every_finite_score_has_the_weight_that_it_has_in_float64(name):
    target, schedule, _, _ = KERNELS[name]
    problem, query, new = problem_for(name)
    found = tables(new, 68, 40)
    for z in found if target == "host" or new > 4 else found[::3]:
        got = run(problem, query, score=(from_array, z), target=target, schedule=schedule)
        want = reference.function_attention(
            problem.collection, 1, query, problem.row_offsets, score=lambda x, b, h, q, k, z=z: z[q, k].astype(float)
        )
        assert_right(name, got, want)
