# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands of products in shared memory: nothing overwrites one that is still read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv

B2, F2 = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2]
PLACES = ("host", "sm_90a", "sm_80")


def run(kernel, specs, arrays, place, block=128):
    if place == "host":
        kernel[1, block](*arrays)
    else:
        report = kv.compile(kernel, *specs, target=place).emulate(1, block, *arrays)
        assert not report.hazards


def tiles(count, rows=64):
    return np.random.default_rng(0).standard_normal((count, rows, 64)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_are_read_after_a_store_stay(place):
    """The rows of a result are written through the memory of loaded rows, if nothing reads them any more."""

    @kv.kernel(block=128)
    def products(x: B2, y: B2, out: B2, total: F2):
        i = kv.tile_index(64)
        state = kv.full((64, 64), 0.0)
        for n in range(0, x.shape[0] // 64):
            a, b = x.load_rows(n * 64 + i, columns=64), y.load_rows(n * 64 + i, columns=64)
            out.store_rows(n * 64 + i, value=kv.bf16(kv.dot(a, b.T)))
            state = kv.dot(a.T, b, state)
        total.store_rows(i, value=state)

    x, y = tiles(2, 192)
    out, total = np.zeros_like(x), np.zeros((64, 64), np.float32)
    run(products, (B2, B2, B2, F2), (x, y, out, total), place)
    a, b = x.astype(float), y.astype(float)
    np.testing.assert_allclose(total, a.T @ b, rtol=1e-3, atol=1e-2)
    of_tiles = np.concatenate([a[n : n + 64] @ b[n : n + 64].T for n in (0, 64, 128)])
    np.testing.assert_allclose(out.astype(float), of_tiles, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("place", PLACES)
def test_a_negated_tile_does_not_change_the_tile(place):
    @kv.kernel(block=128)
    def difference(x: B2, y: B2, out: F2):
        i = kv.tile_index(64)
        a, b = x.load_rows(i, columns=64), y.load_rows(i, columns=64)
        negated = kv.dot(-a, b)
        out.store_rows(i, value=kv.dot(a, b.T, negated))

    x, y = tiles(2)
    out = np.zeros((64, 64), np.float32)
    run(difference, (B2, B2, F2), (x, y, out), place)
    a, b = x.astype(float), y.astype(float)
    np.testing.assert_allclose(out, a @ b.T - a @ b, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("block", [128, 256])
def test_computed_operands_of_several_products_of_an_iteration(place, block):
    """Both are written before either is read: what makes room for the next ones is a barrier after the last product."""
    rows = block // 2

    @kv.kernel(block=block)
    def powers(x: B2, out: F2):
        i = kv.tile_index(rows)
        a = kv.f32(x.load_rows(i, columns=64))
        total = kv.full((rows, rows), 0.0)
        for n in range(0, x.shape[0] // rows + 2):
            left, right = kv.bf16(a * (1.0 + kv.f32(n))), kv.bf16(a * (2.0 - kv.f32(n)))
            total = kv.dot(kv.bf16(a), left.T, total)
            total = kv.dot(kv.bf16(a), right.T, total)
            total = kv.dot(kv.bf16(a * 0.5), left.T, total)
        out.store_rows(i, value=total)

    x = tiles(1, rows)[0]
    out = np.zeros((rows, rows), np.float32)
    run(powers, (B2, F2), (x, out), place, block)
    a = x.astype(float)
    factors = ((1 + n, 1.5, 2 - n, 1.0) for n in range(3))
    want = sum(
        (p * a @ (a * m).astype(ml_dtypes.bfloat16).astype(float).T)
        for m, p, k, q in factors
        for m, p in ((m, p), (k, q))
    )
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=0.1)
