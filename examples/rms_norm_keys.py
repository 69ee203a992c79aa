# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""RMSNorm of the cached keys in place, per token and head: python examples/rms_norm_keys.py

One block per token, one thread per head. Threads do not communicate, so the kernel also runs on the CPU; the built-in
``kv.ops.rms_norm`` divides each head among threads.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kvarn as kv

PAGE, HEADS, HEAD_SIZE = 16, 4, 64


@kv.kernel
def rms_norm_keys(keys: kv.KVCache, gamma: kv.Buffer[kv.f32, 1], epsilon: kv.f32):
    b, t, h = kv.block_id.x, kv.block_id.y, kv.thread_id.x
    if t < keys.cache_length(b):
        total = kv.f32(0)
        for d in range(0, keys.head_size, 8):
            x = keys.load(b, h, t, d, width=8, dtype=kv.f32)
            total += (x * x).reduce("add")
        scale = kv.math.rsqrt(total / keys.head_size + epsilon)
        for d in range(0, keys.head_size, 8):
            x = keys.load(b, h, t, d, width=8, dtype=kv.f32)
            keys.store(b, h, t, d, keys.dtype(x * scale * gamma.load(d, width=8)))


def main() -> str:
    """Run on NumPy buffers and compare with NumPy; returns the PTX for sm_90a."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((9, 2, 1, PAGE, HEADS, HEAD_SIZE), np.float32).astype(ml_dtypes.bfloat16)
    lengths, table = np.array([40, 17], np.uint32), np.array([[5, 0, 3], [7, 1, 8]], np.uint32)
    pool = kv.PagedKVCacheCollection(blocks, lengths, table, max_seq_length=1, max_cache_length=41)
    gamma, epsilon = rng.standard_normal(HEAD_SIZE, np.float32), 1e-5

    expected = blocks.astype(np.float32)
    for b, length in enumerate(lengths):
        for t in range(length):
            x = expected[table[b, t // PAGE], 0, 0, t % PAGE]
            x *= gamma / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)

    keys = pool.get_key_cache(0)
    rms_norm_keys[(2, 40), HEADS](keys, gamma, epsilon)
    # One rounding to bf16 is at most 2**-8 of the value.
    np.testing.assert_allclose(blocks.astype(np.float32), expected, rtol=2**-8, atol=1e-30)

    return kv.compile(rms_norm_keys, keys, kv.Buffer[kv.f32, 1], kv.f32, target="sm_90a").asm["ptx"]


if __name__ == "__main__":
    ptx = main()
    print("rms_norm_keys: equal to NumPy. Its PTX begins")
    print("\n".join(ptx.splitlines()[:24]))
