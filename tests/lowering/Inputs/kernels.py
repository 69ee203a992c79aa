# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that passes are tried on. Run with a folder it writes their first stages there: ``%{kernels}`` of lit."""

import sys
from pathlib import Path

import kvarn as kv
from kvarn.dialect import tma_layout


@kv.kernel(block=8)
def rescale(pool: kv.KVCacheCollection, layer: kv.i32, factors: kv.Buffer[kv.f32, 1], sums: kv.Buffer[kv.f32, 2]):
    cache = pool.get_value_cache(layer)
    b, h, d = kv.block_id.x, kv.block_id.y, kv.thread_id.x * 8
    total = kv.f32(0.0)
    for t in range(cache.cache_length(b)):
        x = cache.load(b, h, t, d, width=8, dtype=kv.f32) * factors[h]
        cache.store(b, h, t, d, kv.f8e4m3(x))
        total += x.reduce("add")
    sums[b, h * 8 + kv.thread_id.x] = total


@kv.kernel(block=64)
def rows(cache: kv.KVCache, found: kv.Buffer[kv.i32, 2]):
    b, t = kv.block_id.x, kv.thread_id.x
    if t < cache.cache_length(b):
        found[b, t] = kv.i32(cache.populate(b, 0, 64).get_row(t))


@kv.kernel(block=64)
def largest_keys(cache: kv.KVCache, keys: kv.TensorMap, out: kv.Buffer[kv.f32, 2]):
    b = kv.block_id.x
    tile, barrier = kv.tma.shared_tile(keys, 32), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
    kv.barrier()
    most, count = kv.f32(-3.0e38), cache.cache_length(b)
    for i in range((count + 31) // 32):
        base = i * 32
        if kv.thread_id.x == 0:
            kv.tma.expect(keys, barrier, kv.tma.tile_loads(keys, 32))
            kv.tma.load_tile(keys, cache, b, 0, base, tile, barrier, tile_rows=32, valid=count - base)
        kv.tma.wait(barrier, i & 1)
        for row in range(32):
            if base + row < count:
                most = kv.math.max(most, kv.f32((tile.ptr() + keys.offset(row, kv.thread_id.x, 32)).load(keys.dtype)))
        kv.barrier()
    out[b, kv.thread_id.x] = most


@kv.kernel(block=128)
def biased(
    query: kv.Buffer[kv.bf16, 3],
    keys: kv.KVCache,
    values: kv.KVCache,
    bias: kv.Buffer[kv.f32, 1],
    out: kv.Buffer[kv.bf16, 3],
):
    b, row = kv.block_id.x, kv.tile_index(64)
    count = keys.cache_length(b)
    q = query.load_rows(b, row, columns=64)
    m, s, o = kv.full(64, -3.0e38), kv.full(64, 0.0), kv.full((64, 64), 0.0)
    for j in range(0, (count + 63) // 64):
        k = keys.tile(b, 0, j * 64, count, rows=64)
        v = values.tile(b, 0, j * 64, count, rows=64)
        token = j * 64 + kv.tile_index(64)
        distance = (count - 64 + row)[:, None] - token[None, :]
        added = bias[kv.math.max(kv.math.min(distance, 31), 0)]
        x = kv.masked(kv.dot(q, k.T) * 0.125 + added, (token < count)[None, :])
        top = kv.math.max(m, x.max(axis=1))
        alpha, p = kv.math.exp(m - top), kv.math.exp(x - top[:, None])
        m, s = top, s * alpha + p.sum(axis=1)
        o = kv.dot(kv.bf16(p), v, o * alpha[:, None])
    out.store_rows(b, row, value=kv.bf16(o / kv.math.max(s, kv.full(64, 1.0e-30))[:, None]))


@kv.kernel(block=128)
def observed(query: kv.Buffer[kv.bf16, 3], keys: kv.KVCache, seen: kv.Buffer[kv.f32, 2]):
    b, row, token = kv.block_id.x, kv.tile_index(16), kv.tile_index(64)
    count = keys.cache_length(b)
    q = query.load_rows(b, row, columns=64)
    largest, total = kv.full(16, -3.0e38), kv.full(16, 0.0)
    for j in range(0, (count + 63) // 64):
        k = keys.tile(b, 0, j * 64, count, rows=64)
        x = kv.masked(kv.dot(q, k.T) * 0.125, (j * 64 + token < count)[None, :])
        top = kv.math.max(largest, x.max(axis=1))
        total = total * kv.math.exp(largest - top) + kv.math.exp(x - top[:, None]).sum(axis=1)
        largest = top
    for j in range(0, (count + 63) // 64):
        x = kv.dot(q, keys.tile(b, 0, j * 64, count, rows=64).T) * 0.125
        weights = kv.math.exp(x - largest[:, None]) / total[:, None]
        seen.scatter(b, j * 64 + token, value=weights.sum(axis=0), mask=j * 64 + token < count)


_TWO = kv.CacheSpec("paged", kv.bf16, num_heads=2, head_size=64, page_size=16)
_ONE = kv.CacheSpec("paged", kv.bf16, num_heads=1, head_size=64, page_size=16)
_RECORDS = kv.CacheSpec("paged", kv.f8e4m3, num_heads=2, head_size=64, page_size=16)
_ROWS = kv.Buffer[kv.bf16, 3]

SPECS = {
    rescale: (kv.CollectionSpec(_RECORDS), kv.i32, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 2]),
    rows: (_TWO, kv.Buffer[kv.i32, 2]),
    largest_keys: (_TWO, tma_layout.tiled(_TWO, 16), kv.Buffer[kv.f32, 2]),
    observed: (_ROWS, _ONE, kv.Buffer[kv.f32, 2]),
    biased: (_ROWS, _ONE, _ONE, kv.Buffer[kv.f32, 1], _ROWS),
}

if __name__ == "__main__":
    for kernel, specs in SPECS.items():
        Path(sys.argv[1], f"{kernel.__name__}.mlir").write_text(f"{kernel.trace(specs)}\n")
