# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What only a GPU can run: threads of a block that work together."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(7)


def on_gpu(kernel, grid, block, *arrays):
    """Launch with copies of NumPy arrays in device memory; the arrays afterwards."""
    torch = pytest.importorskip("torch")
    held = [torch.from_numpy(a.view(np.uint8).copy()).cuda() for a in arrays]
    views = [h.view(_torch(torch, a.dtype)).reshape(a.shape) for h, a in zip(held, arrays, strict=True)]
    kernel[grid, block](*views)
    torch.cuda.synchronize()
    return [h.cpu().numpy().view(a.dtype).reshape(a.shape) for h, a in zip(held, arrays, strict=True)]


def _torch(torch, dtype):
    return {"float32": torch.float32, "int32": torch.int32, "bfloat16": torch.bfloat16, "uint32": torch.uint32}[
        dtype.name
    ]


def test_block_shares_memory_across_barriers():
    @kv.kernel(block=64)
    def reverse(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[kv.f32, 1]):
        s = kv.shared((2, 64), kv.f32)
        t = kv.thread_id.x
        s[0, t] = x[kv.block_id.x * 64 + t]
        kv.barrier()
        s[1, 63 - t] = s[0, t] * 2.0
        kv.barrier()
        out[kv.block_id.x * 64 + t] = s.load(1, t)

    x = RNG.normal(size=128).astype(np.float32)
    out = on_gpu(reverse, 2, 64, x, np.zeros_like(x))[-1]
    np.testing.assert_array_equal(out, x.reshape(2, 64)[:, ::-1].ravel() * 2)


def test_warp_functions_cross_lanes():
    @kv.kernel(block=64)
    def k(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 2], f: kv.Buffer[kv.bf16, 2]):
        t = kv.thread_id.x
        v = x[t]
        out[t, 0] = kv.warp_reduce(v, "add")
        out[t, 1] = kv.warp_reduce(v, "max", width=8)
        out[t, 2] = kv.shuffle_xor(v, 3)
        out[t, 3] = kv.shuffle_idx(v, 5)
        out[t, 4] = kv.shuffle_up(v, 2)
        out[t, 5] = kv.shuffle_down(v, 2)
        out[t, 6] = kv.lane_id * 100 + kv.warp_id
        out[t, 7] = kv.lane_id() * 100 + kv.warp_id()
        f.store(t, 0, value=kv.shuffle_xor(f.load(t, 0, width=4), 1))
        f[t, 4] = kv.shuffle_xor(f[t, 4], 1)

    x = RNG.integers(-100, 100, 64).astype(np.int32)
    out = np.zeros((64, 8), np.int32)
    f = RNG.normal(size=(64, 8)).astype(ml_dtypes.bfloat16)
    before = f.copy()
    _, out, f = on_gpu(k, 1, 64, x, out, f)
    t, w = np.arange(64), x.reshape(2, 32)
    lane = t % 32
    expected = [
        np.repeat(w.sum(1), 32), np.repeat(x.reshape(8, 8).max(1), 8), x[t ^ 3], np.repeat(w[:, 5], 32),
        x[np.where(lane < 2, t, t - 2)], x[np.where(lane > 29, t, t + 2)], lane * 100 + t // 32, lane * 100 + t // 32,
    ]  # fmt: skip
    np.testing.assert_array_equal(out, np.stack(expected, 1))
    np.testing.assert_array_equal(f[:, :5].astype(np.float32), before[t ^ 1, :5].astype(np.float32))
