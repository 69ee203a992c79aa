# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copy a cache to another kind and element type: python examples/copy_convert.py

The source is paged and f32; the destination is continuous (one block of memory per sequence) and bf16. The caches
compute addresses; the kernel indexes by (sequence, head, token, dim) only.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kvarn as kv

PAGE, HEADS, HEAD_SIZE, CAPACITY = 16, 2, 64, 48


@kv.kernel
def copy_convert(source: kv.PagedKVCache, destination: kv.ContinuousBatchingKVCache):
    b, t, h = kv.block_id.x, kv.block_id.y, kv.block_id.z
    if t < source.cache_length(b):
        d = kv.thread_id.x * 8
        destination.store(b, h, t, d, destination.dtype(source.load(b, h, t, d, width=8)))


def main() -> str:
    """Run on NumPy buffers and compare with NumPy; returns the PTX for sm_90a."""
    rng = np.random.default_rng(0)
    lengths = np.array([40, 17], np.uint32)
    pages = rng.standard_normal((9, 2, 1, PAGE, HEADS, HEAD_SIZE), np.float32)  # [pages, K and V, layers, ...]
    table = np.array([[5, 0, 3], [7, 1, 8]], np.uint32)
    source = kv.PagedKVCacheCollection(pages, lengths, table, max_seq_length=1, max_cache_length=41)

    # One block per sequence: [blocks, K and V, layers, tokens, heads, head size].
    blocks = np.zeros((2, 2, 1, CAPACITY, HEADS, HEAD_SIZE), ml_dtypes.bfloat16)
    block_of = np.array([1, 0], np.uint32)  # the block of each sequence
    destination = kv.ContinuousBatchingKVCacheCollection(
        blocks, lengths, block_of, max_seq_length=1, max_cache_length=41
    )

    expected = blocks.copy()
    for b, length in enumerate(lengths):
        for t in range(length):
            expected[block_of[b], 0, 0, t] = pages[table[b, t // PAGE], 0, 0, t % PAGE].astype(ml_dtypes.bfloat16)

    keys = source.get_key_cache(0), destination.get_key_cache(0)
    copy_convert[(2, 40, HEADS), HEAD_SIZE // 8](*keys)
    np.testing.assert_array_equal(blocks.view(np.uint16), expected.view(np.uint16))

    return kv.compile(copy_convert, *keys, target="sm_90a").asm["ptx"]


if __name__ == "__main__":
    ptx = main()
    print("copy_convert: equal to NumPy, bit for bit. Its PTX begins")
    print("\n".join(ptx.splitlines()[:24]))
