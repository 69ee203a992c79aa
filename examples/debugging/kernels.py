# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of docs/debugging.md, whose commands run in this folder."""

import kvarn as kv


@kv.kernel
def norms(cache: kv.KVCache, out: kv.Buffer[kv.f32, 2]):
    """Sum the squares of a head's elements over all tokens, by one warp."""
    b, h, total = kv.block_id.x, kv.block_id.y, kv.f32(0)
    for t in range(cache.cache_length(b)):
        x = cache.load(b, h, t, kv.lane_id, dtype=kv.f32)
        total += x * x
    total = kv.warp_reduce(total, "add")
    if kv.lane_id == 0:
        out[b, h] = total


@kv.kernel
def sums(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    """Sum a head's elements over all tokens, eight elements per thread."""
    x = kv.vector(kv.f32, 8)
    for t in range(cache.cache_length(0)):
        x += cache.load(0, 0, t, kv.thread_id.x * 8, width=8, dtype=kv.f32)
    out[kv.thread_id.x] = x.reduce("add")
