# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values that are columns of the keys have one copy with them, on a GPU's code by the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from reference.random_caches import random_problem, random_values

import kvarn as kv
from kvarn.emulator import Order, Report, run as emulated


@dataclass(frozen=True)
class Case:
    """``rows`` query rows over ``length`` tokens, ``keys`` a tile; values are the columns of keys from ``first`` on."""

    target: str = "sm_90a"
    rows: int = 64
    keys: int = 64
    size: int = 192
    values: int = 128
    first: int = 0
    length: int = 200
    begin: int = 0
    page_size: int = 16
    options: tuple[tuple[str, str], ...] = ()

    @property
    def threads(self) -> int:
        return 2 * self.rows


def kernel(c: Case) -> Any:
    N = c.keys

    @kv.kernel(block=c.threads)
    def attention(query: kv.Buffer[kv.bf16, 2], keys: kv.KVCache, begin: kv.i32, out: kv.Buffer[kv.f32, 2]):
        row, count = kv.tile_index(c.rows), keys.cache_length(1)
        q = query.load_rows(row, columns=c.size)
        m, s, o = kv.full(c.rows, -3.0e38), kv.full(c.rows, 0.0), kv.full((c.rows, c.values), 0.0)
        for j in range(0, (count + (N - 1)) // N):
            k = keys.tile(1, 0, j * N, count, rows=N, tail="any")
            v = keys.tile(1, 0, j * N, count, rows=N, columns=c.values, first_column=c.first, begin=begin)
            at = j * N + kv.tile_index(N)
            x = kv.masked(kv.dot(q, k.T) * 0.05, ((at >= begin) & (at < count))[None, :])
            top = kv.math.max(m, x.max(axis=1))
            alpha, p = kv.math.exp2(m - top), kv.math.exp2(x - top[:, None])
            m, s = top, s * alpha + p.sum(axis=1)
            o = kv.dot(kv.bf16(p), v, o * alpha[:, None])
        out.store_rows(row, value=o / s[:, None])

    return attention


def check(c: Case, order: Order | None = None) -> str:
    """Run a case against the model in float64; its PTX."""
    rng, report = np.random.default_rng(c.length), Report(c.target)
    sizes = {"head_size": c.size, "page_size": c.page_size, "num_heads": 1, "cached": [5, c.length], "new": [0, 0]}
    cache = random_problem(rng, "paged", "bf16", **sizes).caches(1)[0]
    query, out = random_values(rng, (c.rows, c.size), kv.bf16), np.full((c.rows, c.values), np.nan, np.float32)
    specs = kv.Buffer[kv.bf16, 2], cache, kv.i32, kv.Buffer[kv.f32, 2]
    made = kv.compile(kernel(c), *specs, target=c.target, options=dict(c.options))
    emulated.launch(made, 1, c.threads, (query, cache, c.begin, out), report=report, order=order)
    report.check()
    t, d = np.ogrid[c.begin : c.length, : c.size]
    keys = cache.load(1, 0, t, d, dtype=kv.f32).astype(np.float64)
    x = query.astype(np.float64) @ keys.T * 0.05
    p = np.exp2(x - x.max(axis=1, keepdims=True))
    want = p / p.sum(axis=1, keepdims=True) @ keys[:, c.first : c.first + c.values]
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=2e-2)
    return made.asm["ptx"]


CASES = {
    "rotated": Case(),
    "the last columns": Case(first=64),
    "tokens before the first": Case(begin=70),
    "one tile": Case(length=7),
    "two warpgroups": Case(rows=128, keys=32, size=144),
    "one stage": Case(options=(("select-kv-copies", "stages=1"),)),
    "three stages": Case(options=(("select-kv-copies", "stages=3"),)),
    "no overlap": Case(options=(("pipeline-kv-loops", "products=false"),)),
    "pages of 5": Case(page_size=5),
    "by mma.sync": Case(target="sm_80"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_columns_of_one_copy_are_values(case):
    check(case)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", [Order("backward", "late"), Order("random", "random", 1)], ids=str)
def test_the_order_of_warps_and_copies_changes_no_result(order):
    check(replace(Case(), rows=128, keys=32, size=144), order)
