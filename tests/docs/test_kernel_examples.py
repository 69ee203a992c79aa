# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of examples/kernels are right on the host and in the emulator, and fit a screen."""

from __future__ import annotations

import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv
from kvarn.dialect import dtypes

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kernels"
EXAMPLES = {path.stem: runpy.run_path(str(path)) for path in sorted(FOLDER.glob("*.py"))}
PRODUCER = "sm_90a, a producer"
TARGETS = ("host", "sm_90a", PRODUCER, "sm_80")
HEADS, SIZE, PAGE, MOST_LINES = 2, 64, 16, 60


def run(kernel, grid, target, *arguments):
    """Launch a kernel on the host or in the emulator; it writes into its arguments."""
    if target == "host":
        kernel[grid, 128](*arguments)
        return
    block = 128
    if target == PRODUCER:
        block, target = 256, "sm_90a"
        kernel = kernel.with_options(block=block, schedule={"producer": True, "stages": 3})
    specs = [kv.Buffer[dtypes.of(a.dtype), a.ndim] if isinstance(a, np.ndarray) else a for a in arguments]
    report = kv.compile(kernel, *specs, target=target).emulate(grid, block, *arguments)
    assert not report.hazards


def rows(rng, *shape, norm=False):
    x = rng.standard_normal(shape)
    x = x / np.linalg.norm(x, axis=-1, keepdims=True) if norm else x / 2
    return x.astype(ml_dtypes.bfloat16)


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_a_screen(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("target", TARGETS)
def test_linear_attention(target):
    rng, starts = np.random.default_rng(0), np.array([0, 150, 213, 214], np.int32)
    q, k, v = (rows(rng, starts[-1], HEADS, SIZE) for _ in range(3))
    g = np.array([-0.02, -0.1], np.float32)
    states = rng.standard_normal((3, HEADS, SIZE, SIZE)).astype(np.float32)
    want, final = np.zeros(q.shape), states.astype(np.float64)
    wq, wk, wv = wide(q, k, v)
    for b in range(3):
        for t in range(starts[b], starts[b + 1]):
            final[b] = final[b] * np.exp2(g)[:, None, None] + np.einsum("hk,hv->hkv", wk[t], wv[t])
            want[t] = np.einsum("hk,hkv->hv", wq[t], final[b])
    out = np.zeros_like(q)
    run(EXAMPLES["linear_attention"]["linear_attention"], (3, HEADS), target, q, k, v, g, starts, states, out)
    np.testing.assert_allclose(out.astype(float), want, atol=2e-2 * np.abs(want).max())
    np.testing.assert_allclose(states, final, atol=1e-2 * np.abs(final).max())


def delta_rule(q, k, v, a, b, state, tokens, out):
    """The recurrence, token by token, in f64; ``state`` [heads, keys, values] is updated."""
    for t in tokens:
        state *= a[t][:, None, None]
        u = b[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += np.einsum("hk,hv->hkv", k[t], u)
        out[t] = np.einsum("hkv,hk->hv", state, q[t])


@pytest.mark.parametrize("target", TARGETS)
def test_gated_delta_rule(target):
    """Prefill of ragged prompts, then two steps of decode on the states that it left."""
    rng, starts = np.random.default_rng(1), np.array([0, 150, 190], np.int32)
    tokens = starts[-1]
    q, k, v = rows(rng, tokens, HEADS, SIZE), rows(rng, tokens, HEADS, SIZE, norm=True), rows(rng, tokens, HEADS, SIZE)
    log_a = -0.1 * rng.random((tokens, HEADS)).astype(np.float32)
    b = rng.random((tokens, HEADS)).astype(np.float32)
    states = rng.standard_normal((2, HEADS, SIZE, SIZE)).astype(np.float32)
    want, final, out = np.zeros(q.shape), states.astype(np.float64), np.zeros_like(q)
    for s in range(2):
        delta_rule(*wide(q, k, v), np.exp2(log_a), b, final[s], range(starts[s], starts[s + 1]), want)
    example = EXAMPLES["gated_delta_rule"]
    run(example["prefill"], (2, HEADS), target, q, k, v, log_a, b, starts, states, out)
    np.testing.assert_allclose(out.astype(float), want, atol=2e-2 * np.abs(want).max())
    np.testing.assert_allclose(states, final, atol=2e-2 * np.abs(final).max())
    for step in range(2):
        q1, k1, v1, a1, b1 = (x[2 * step : 2 * step + 2] for x in (q, k, v, log_a, b))
        final, want, out = states.astype(np.float64), np.zeros(q1.shape), np.zeros_like(q1)
        for s in range(2):
            delta_rule(*wide(q1, k1, v1), np.exp2(a1), b1, final[s], [s], want)
        run(example["decode"], (2, HEADS), target, q1, k1, v1, a1, b1, states, out)
        np.testing.assert_allclose(out.astype(float), want, atol=1e-2 * np.abs(want).max())
        np.testing.assert_allclose(states, final, atol=1e-5 * np.abs(final).max())


def pool_of(rng, cached, new):
    pages = -(-(cached + new) // PAGE)
    blocks = rows(rng, pages + 1, 2, 1, PAGE, HEADS, SIZE)
    table = rng.permutation(pages)[None].astype(np.uint32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([cached], np.uint32), table, new, pages * PAGE)
    held = [wide(blocks)[0][table[0], half, 0].reshape(-1, HEADS, SIZE)[: cached + new] for half in (0, 1)]
    return pool, *held


@pytest.mark.parametrize("target", TARGETS)
def test_key_mass(target):
    rng, cached, new, group = np.random.default_rng(2), 100, 80, 2
    pool, k, _ = pool_of(rng, cached, new)
    q = rows(rng, new, HEADS * group, SIZE)
    x = np.einsum("thgd,khd->hgtk", wide(q)[0].reshape(new, HEADS, group, SIZE), k) * SIZE**-0.5
    x[..., np.arange(cached + new) > cached + np.arange(new)[:, None]] = -np.inf
    lse = np.log(np.exp(x).sum(-1))
    want = np.exp(x - lse[..., None]).sum((1, 2))
    given = np.ascontiguousarray(lse.transpose(2, 0, 1).reshape(new, -1)).astype(np.float32)
    mass = np.zeros(want.shape, np.float32)
    run(
        EXAMPLES["key_mass"]["key_mass"],
        (-(-(cached + new) // 64), HEADS),
        target,
        pool.get_key_cache(0),
        q,
        given,
        mass,
    )
    np.testing.assert_allclose(mass, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_block_sparse_attention(target):
    rng, cached, new, group = np.random.default_rng(3), 250, 100, 2
    pool, k, v = pool_of(rng, cached, new)
    q, heads, blocks = rows(rng, new, HEADS * group, SIZE), HEADS * group, -(-new // 64)
    lists, counts = np.zeros((heads, blocks, 6), np.int32), np.zeros((heads, blocks), np.int32)
    want = np.zeros(q.shape)
    for h in range(heads):
        for n in range(blocks):
            rows_of = np.arange(64 * n, min(64 * n + 64, new))
            own = range((cached + 64 * n) // 64, (cached + rows_of[-1]) // 64 + 1)
            chosen = sorted({*rng.permutation(own[0])[:2], *own})
            counts[h, n], lists[h, n, : len(chosen)] = len(chosen), chosen
            at = np.concatenate([np.arange(64 * c, min(64 * c + 64, cached + new)) for c in chosen])
            x = wide(q)[0][rows_of, h] @ k[at, h // group].T * SIZE**-0.5
            p = np.exp(np.where(at <= cached + rows_of[:, None], x, -np.inf))
            want[rows_of, h] = p @ v[at, h // group] / p.sum(-1, keepdims=True)
    out = np.zeros_like(q)
    kernel = EXAMPLES["block_sparse_attention"]["block_sparse_attention"]
    run(kernel, (blocks, heads), target, q, pool.get_key_cache(0), pool.get_value_cache(0), counts, lists, out)
    np.testing.assert_allclose(out.astype(float), want, atol=1e-2)
