# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A vector may be rows and columns of tiles, and say which rows are loaded: as on the host, so on GPUs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from reference.places import Interpreted

import kvarn as kv

B2, F1 = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 1]
PLACES = ("host", "sm_90a", "sm_80")


def decay_of(t, gates, g):
    """What is written in each of the kernels: causal decay of distances of positions, in f32."""
    distance = t[:, None] - t[None, :]
    return kv.where(distance >= 0.0, kv.math.exp2(distance * g), 0.0)


def decay_of_gates(t, gates, g):
    """Of elements of memory, summed up with positions."""
    x = gates + t * g
    return kv.where(t[:, None] >= t[None, :], kv.math.exp2(x[:, None] - x[None, :]), 0.0)


def decay_of_chains(t, gates, g):
    """Of a chain of expressions, parts of which are used along one dimension alone."""
    half = t * 0.5
    square = half * half
    return kv.where(square[None, :] <= square[:, None], half[:, None] * g + gates[None, :] + half[None, :], 0.0)


def _kernel(decay):
    @kv.kernel(block=128)
    def retained(q: B2, k: B2, v: B2, gates: F1, g: kv.f32, out: kv.Buffer[kv.f32, 2]):
        for c in range(0, (q.shape[0] + 63) // 64):
            row = c * 64 + kv.tile_index(64)
            exists = row < q.shape[0]
            a = q.load_rows(row, mask=exists, columns=64)
            b = k.load_rows(row, mask=exists, columns=64)
            w = v.load_rows(row, mask=exists, columns=64)
            scores = kv.where(exists[None, :], kv.dot(a, b.T), 0.0)
            weights = scores * decay(kv.f32(row - c * 64), gates.gather(row, mask=exists), g)
            out.store_rows(row, value=kv.dot(kv.bf16(weights), w), mask=exists)

    return retained


def _decay(t, gates, g):
    distance = t[:, None] - t[None, :]
    return np.where(distance >= 0, np.exp2(distance * g), 0.0)


def _decay_of_gates(t, gates, g):
    x = gates + t * g
    return np.where(t[:, None] >= t[None, :], np.exp2(x[:, None] - x[None, :]), 0.0)


def _decay_of_chains(t, gates, g):
    half = t / 2
    return np.where(half[None, :] ** 2 <= half[:, None] ** 2, half[:, None] * g + gates[None, :] + half[None, :], 0.0)


CASES = {
    "positions": (_kernel(decay_of), _decay),
    "gates": (_kernel(decay_of_gates), _decay_of_gates),
    "chains": (_kernel(decay_of_chains), _decay_of_chains),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", PLACES)
def test_a_vector_is_rows_and_columns_of_tiles(place, name):
    kernel, decay = CASES[name]
    n, g = 150, np.float32(-0.1)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, n, 64)) / 4).astype(ml_dtypes.bfloat16)
    gates, out = (rng.standard_normal(n) / 8).astype(np.float32), np.full((n, 64), 7, np.float32)
    given = (q, k, v, gates, g, out)
    if place == "host":
        kernel[1, 128](*given)
    else:
        Interpreted(place).launch(kernel, (1, 1, 1), (128, 1, 1), *given)
    for first in range(0, n, 64):
        part = slice(first, min(first + 64, n))
        a, b, w = (x[part].astype(np.float64) for x in (q, k, v))
        t = np.arange(len(a), dtype=np.float64)
        want = ((a @ b.T) * decay(t, gates[part].astype(np.float64), float(g))) @ w
        np.testing.assert_allclose(out[part], want, rtol=2e-2, atol=2e-2 * max(1.0, np.abs(want).max()))


@kv.kernel(block=128)
def of_carried(q: B2, out: F1):
    """A vector of rows that a loop carries, beside positions that are rows and columns: sums of keys before a row."""
    row = kv.tile_index(64)
    a = q.load_rows(row, columns=64)
    sums = kv.full(64, 0.0)
    for j in range(0, 3):
        t = kv.f32(row + j)
        x = kv.where(t[:, None] >= kv.f32(row)[None, :], kv.dot(a, a.T), 0.0)
        sums = sums + x.sum(axis=1) + t
    out.scatter(row, value=sums)


@pytest.mark.parametrize("target", PLACES[1:])
def test_a_vector_that_a_loop_carries_keeps_to_rows(target):
    q = (np.random.default_rng(0).standard_normal((64, 64)) / 4).astype(ml_dtypes.bfloat16)
    out, expected = np.zeros((2, 64), np.float32)
    of_carried[1, 128](q, expected)
    Interpreted(target).launch(of_carried, (1, 1, 1), (128, 1, 1), q, out)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
