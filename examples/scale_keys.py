# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scale the cached keys of one layer in place: python examples/scale_keys.py

One block per token; each thread scales eight elements of every head. The kernel is the same for every cache kind and
element type: arithmetic is in f32, and ``cache.dtype(x)`` converts back.
"""

from __future__ import annotations

import numpy as np

import kvarn as kv

LAYER, LAYERS, PAGE, HEADS, HEAD_SIZE = 1, 2, 16, 2, 64


@kv.kernel
def scale_keys(cache: kv.KVCache, alpha: kv.f32):
    b, t = kv.block_id.x, kv.block_id.y
    if t < cache.cache_length(b):
        for h in range(cache.num_heads):
            d = kv.thread_id.x * 8
            x = cache.load(b, h, t, d, width=8, dtype=kv.f32)
            cache.store(b, h, t, d, cache.dtype(x * alpha))


def collection(seed: int) -> kv.PagedKVCacheCollection:
    """Two sequences of 40 and 17 tokens in a pool of nine pages; the last page is the null page."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((9, 2, LAYERS, PAGE, HEADS, HEAD_SIZE), np.float32)
    lengths = np.array([40, 17], np.uint32)
    table = np.array([[5, 0, 3], [7, 1, 8]], np.uint32)
    return kv.PagedKVCacheCollection(blocks, lengths, table, max_seq_length=1, max_cache_length=41)


def main() -> str:
    """Run on NumPy buffers and compare with NumPy; returns the PTX for sm_90a."""
    pool, alpha = collection(0), 0.5
    expected = pool.blocks.copy()
    for b, length in enumerate(pool.cache_lengths):
        for t in range(length):
            expected[pool.lookup_table[b, t // PAGE], 0, LAYER, t % PAGE] *= alpha

    keys = pool.get_key_cache(LAYER)
    grid, block = (len(pool.cache_lengths), pool.max_cache_length), HEAD_SIZE // 8
    scale_keys[grid, block](keys, alpha)
    np.testing.assert_array_equal(pool.blocks, expected)

    return kv.compile(scale_keys, keys, kv.f32, target="sm_90a").asm["ptx"]


if __name__ == "__main__":
    ptx = main()
    print("scale_keys: equal to NumPy. Its PTX begins")
    print("\n".join(ptx.splitlines()[:24]))
