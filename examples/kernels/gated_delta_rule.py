# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gated delta rule (arXiv 2412.06464): prefill in chunks of 64 tokens, decode token by token, states in a buffer.

A token decays the state S [keys, values] by a, and replaces what S says of its key k by its value v, with strength b:
S' = a S + k u^T with u = b (v - a S^T k). In a chunk with running products A of the a, all u solve a unit triangle:
(I + L) U = b (V - A K S), L[i, j] = b[i] A[i] / A[j] k[i] k[j] for j < i. Grid: (sequences, heads).
"""

from __future__ import annotations

import kvarn as kv

CHUNK, SIZE = 64, 64
Rows, Gates = kv.Buffer[kv.bf16, 3], kv.Buffer[kv.f32, 2]  # [tokens, heads, SIZE]; log2(a) and b, [tokens, heads]
States = kv.Buffer[kv.f32, 4]  # [sequences, heads, keys, values], read and written


@kv.kernel(block=128)
def prefill(
    query: Rows, key: Rows, value: Rows, log_a: Gates, b: Gates, starts: kv.Buffer[kv.i32, 1], states: States, out: Rows
):
    s, h, i, j = kv.block_id.x, kv.block_id.y, kv.tile_index(CHUNK), kv.tile_index(SIZE)
    end, state = starts[s + 1], states.load_rows(s, h, j, columns=SIZE) + 0.0
    for first in range(starts[s], end, CHUNK):
        row, exists = first + i, first + i < end
        q = query.load_rows(row, h, mask=exists, columns=SIZE)
        k = key.load_rows(row, h, mask=exists, columns=SIZE)
        v = value.load_rows(row, h, mask=exists, columns=SIZE)
        gates, strength = log_a.gather(row, h, mask=exists), b.gather(row, h, mask=exists)
        log, total = gates.cumsum(), gates.sum()
        decay = kv.where(i[:, None] >= i[None, :], kv.math.exp2(log[:, None] - log[None, :]), 0.0)
        before = kv.bf16(state)
        new = kv.f32(v) - kv.dot(k, before) * kv.math.exp2(log)[:, None]
        u = kv.solve_unit_lower(kv.dot(k, k.T) * decay * strength[:, None], new * strength[:, None])
        within = kv.dot(kv.bf16(kv.dot(q, k.T) * decay), kv.bf16(u))
        o = kv.dot(q, before) * kv.math.exp2(log)[:, None] + within
        out.store_rows(row, h, value=kv.bf16(o), mask=exists)
        fading = kv.bf16(kv.f32(k) * kv.math.exp2(total - log)[:, None])
        state = kv.dot(fading.T, kv.bf16(u), state * kv.math.exp2(total))
    states.store_rows(s, h, j, value=state)


@kv.kernel(block=128)
def decode(query: Rows, key: Rows, value: Rows, log_a: Gates, b: Gates, states: States, out: Rows):
    s, h, j = kv.block_id.x, kv.block_id.y, kv.tile_index(SIZE)
    state = states.load_rows(s, h, j, columns=SIZE) * kv.math.exp2(log_a[s, h])
    q, k, v = (kv.f32(x.gather(s, h, j)) for x in (query, key, value))
    u = (v - (state * k[:, None]).sum(axis=0)) * b[s, h]
    state = state + k[:, None] * u[None, :]
    states.store_rows(s, h, j, value=state)
    out.scatter(s, h, j, value=kv.bf16((state * q[:, None]).sum(axis=0)))
