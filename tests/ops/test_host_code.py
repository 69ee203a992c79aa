# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Host code is the same to a bit at every level of optimization: tests run it at the lowest, users at the highest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.places import Optimized, bits
from reference.random_caches import clone, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.env import env


def attention(dtype: str, **options: Any) -> list[np.ndarray]:
    rng, problem = stored_problem(3, "paged", dtype, cached=[40, 0, 17], new=[3, 7, 0], head_size=80, page_size=16)
    c, query = problem.collection, rng.standard_normal((problem.tokens, 4 * 2, 80)).astype(dtypes.bf16.numpy)
    out, lse = np.zeros_like(query), np.zeros(query.shape[:2], np.float32)
    kv.ops.attention(c, 1, query, problem.row_offsets, out=out, lse=lse, **options)
    return [out, lse]


def append(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, "paged", dtype, cached=[5, 0, 33, 16], new=[3, 7, 0, 20])
    c = clone(problem.collection)
    key, value = (
        random_values(rng, (problem.tokens, c.num_heads, c.head_size), dtypes.f32, spread=2.0) for _ in range(2)
    )
    kv.ops.append(c, 0, key.astype(dtypes.bf16.numpy), value.astype(dtypes.bf16.numpy), problem.row_offsets)
    return [c.blocks]


@pytest.mark.parametrize(
    "run",
    [
        lambda: attention("bf16", softcap=20.0, sinks=np.linspace(-1, 1, 8, dtype=np.float32)),
        lambda: attention("f8e4m3", mask="sliding_window", window=9),
        lambda: append("f8e5m2"),
    ],
    ids=["attention", "attention over 8 bits", "append to 8 bits"],
)
def test_an_operation_gives_the_same_bits_at_every_level_of_optimization(run):
    found = []
    for level in (0, 1, 3):
        with Optimized(level).active():
            found.append(run())
    for got in found[1:]:
        assert all((bits(a) == bits(b)).all() for a, b in zip(got, found[0], strict=True))


def test_a_level_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("KVARN_HOST_OPT", "4")
    with pytest.raises(ValueError, match="KVARN_HOST_OPT must be 0, 1, 2 or 3, got '4'"):
        _ = env.host_opt
