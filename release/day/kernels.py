# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of a first day: what each token gets of the attention, a histogram of norms, a layer without its scales."""

import kvarn as kv


@kv.kernel
def attention_mass(keys: kv.KVCache, query: kv.Buffer[kv.f32, 3], mass: kv.Buffer[kv.f32, 3]):
    b, h = kv.block_id.x, kv.block_id.y
    m, total = kv.f32(-3.0e38), kv.f32(0)
    for t in range(keys.cache_length(b)):
        s = score(keys, query, b, h, t)
        m_new = kv.math.max(m, s)
        total = total * kv.math.exp(m - m_new) + kv.math.exp(s - m_new)
        m = m_new
    for t in range(keys.cache_length(b)):
        mass[b, h, t] += kv.math.exp(score(keys, query, b, h, t) - m) / total


def score(keys, query, b, h, t):
    total = kv.f32(0)
    for d in range(0, keys.head_size, 8):
        x = keys.load(b, h // (query.shape[1] // keys.num_heads), t, d, width=8, dtype=kv.f32)
        total += (x * query.load(b, h, d, width=8)).reduce("add")
    return total


@kv.kernel
def norm_histogram(keys: kv.KVCache, out: kv.Buffer[kv.i32, 2], top: kv.f32, bins: int):
    b, h, t = kv.block_id.x, kv.block_id.y, kv.block_id.z * kv.block_dim.x + kv.thread_id.x
    if t < keys.cache_length(b):
        total = kv.f32(0)
        for d in range(0, keys.head_size, 8):
            x = keys.load(b, h, t, d, width=8, dtype=kv.f32)
            total += (x * x).reduce("add")
        kv.atomic_add(out, (h, kv.math.min(kv.i32(kv.math.sqrt(total) / top * bins), bins - 1)), 1)


@kv.kernel
def dequantise(keys: kv.KVCache, out: kv.Buffer[kv.f32, 4]):
    b, t, d = kv.block_id.x, kv.block_id.y, kv.thread_id.x * 8
    if t < keys.cache_length(b):
        for h in range(keys.num_heads):
            out.store(b, t, h, d, value=keys.load(b, h, t, d, width=8, dtype=kv.f32))


@kv.kernel
def narrow(keys: kv.KVCache, out: kv.Buffer[kv.f32, 2]):
    b, h = kv.block_id.x, kv.thread_id.x
    total = kv.f32(0)
    for t in range(keys.cache_length(b)):
        for d in range(keys.head_size):
            x = keys.load(b, h, t, d, dtype=kv.f32)
            total += x * x
    out[b, h] = total
