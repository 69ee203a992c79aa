# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums in bins: the same bits in any order and grouping, close to the exact sum."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn.lowering.kernels.attention.decode import binned_sums as sums

LANES, COUNT = 32, sums.MOST_VALUES


@kv.func
def add(bins: Any, at: Any, m: Any, x: Any) -> Any:
    """(bins, exponent) of a sum and a value in units of 2^m."""
    own = sums.exponent(m, kv.math.abs(x))
    found = kv.math.max(at, own)
    return sums.add_value(
        sums.lowered(bins, found - at), x * sums.scale(m, own), sums.factors(len(bins), found - own)
    ), found


@kv.kernel(block=LANES)
def totals(
    m: kv.Buffer[kv.f32, 2], x: kv.Buffer[kv.f32, 2], cuts: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.f32, 2], K: int
):
    """Each lane adds its row's values before its cut, and those after it, and both sums."""
    lane = kv.thread_id.x
    parts = []
    for half in kv.static(range(2)):
        bins, at = [kv.f32(sums.empty(k)) for k in range(K)], kv.f32(sums.NO_EXPONENT)
        first = cuts[lane] if half else 0
        end = m.shape[1] if half else cuts[lane]
        for i in range(first, end):
            bins, at = add(bins, at, m[lane, i], x[lane, i])
        parts.append((bins, at))
    (bins, at), (others, other) = parts
    top = kv.math.max(at, other)
    bins = sums.add_bins(sums.lowered(bins, top - at), sums.lowered(others, top - other))
    out[lane, 0] = sums.sum_of(bins)
    out[lane, 1] = top


def summed(m: np.ndarray, x: np.ndarray, count: int) -> np.ndarray:
    """Sums of the same values in 32 orders and groupings: (sum, exponent) of each."""
    rng = np.random.default_rng(1)
    orders = np.array([rng.permutation(len(m)) for _ in range(LANES)])
    cuts, out = rng.integers(0, len(m) + 1, LANES).astype(np.int32), np.zeros((LANES, 2), np.float32)
    spec = [kv.Buffer[kv.f32, 2], kv.Buffer[kv.f32, 2], kv.Buffer[kv.i32, 1], kv.Buffer[kv.f32, 2]]
    kernel = kv.compile(totals, *spec, count, target="sm_90a")
    kernel.emulate(1, LANES, m[orders].astype(np.float32), x[orders].astype(np.float32), cuts, out)
    return out


VALUES = {
    "alike": lambda rng: (np.zeros(COUNT), rng.standard_normal(COUNT)),
    "of many magnitudes": lambda rng: (rng.uniform(-60, 60, COUNT), rng.standard_normal(COUNT)),
    "that cross a bin's edge": lambda rng: (rng.uniform(-3, 3, COUNT), rng.standard_normal(COUNT)),
    "at the edges": lambda rng: (16.0 * rng.integers(-2, 3, COUNT), 2.0 ** rng.integers(-2, 3, COUNT)),
    "the largest that there are": lambda rng: (np.zeros(COUNT), np.full(COUNT, 65535.99)),
    "just above an edge": lambda rng: (np.full(COUNT, -0.6), np.full(COUNT, 1.9)),
    "that cancel": lambda rng: (np.repeat(rng.uniform(-30, 30, COUNT // 2), 2), np.tile([1.1, -1.1], COUNT // 2)),
    "without any": lambda rng: (np.full(COUNT, -1.0e30), np.zeros(COUNT)),
}


@pytest.mark.whole
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("values", VALUES)
def test_sums_are_the_same_bits_in_any_order_and_grouping(values, count):
    m, x = (np.asarray(v, np.float32) for v in VALUES[values](np.random.default_rng(len(values))))
    out = summed(m, x, count)
    assert len({row.tobytes() for row in out}) == 1
    if values == "without any":
        assert out[0, 0] == 0.0
        return
    terms = [Fraction(float(b)) * Fraction(2.0 ** float(a)) for a, b in zip(m, x, strict=True)]
    got = Fraction(float(out[0, 0])) * Fraction(2) ** int(sums.BITS * out[0, 1])
    error = abs(got - sum(terms)) / max(map(abs, terms))
    assert error < COUNT * (2.0 ** (sums.BITS * (1 - count)) + 2.0**-20)  # 2^x, whose x is rounded
