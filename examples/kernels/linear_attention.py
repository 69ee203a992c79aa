# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Linear attention with a decay per head (retention, Lightning Attention), in chunks of 64 tokens, in one kernel.

Of a chunk with queries Q, keys K and values V, and the state S of the tokens before: O = (Q K^T * D) V + (Q * d) S, and
S' = g^64 S + (K * e)^T V, where D, d and e are powers of the decay g. The state stays in registers.

Grid: (sequences, heads). Tokens of sequence b are rows starts[b] to starts[b + 1].
"""

from __future__ import annotations

import kvarn as kv

CHUNK, SIZE = 64, 64
Rows = kv.Buffer[kv.bf16, 3]  # [tokens, heads, SIZE]


@kv.kernel(block=128)
def linear_attention(
    query: Rows,
    key: Rows,
    value: Rows,
    log_decay: kv.Buffer[kv.f32, 1],  # log2 of the decay of each head
    starts: kv.Buffer[kv.i32, 1],
    states: kv.Buffer[kv.f32, 4],  # [sequences, heads, SIZE, SIZE], read and written
    out: Rows,
):
    b, h = kv.block_id.x, kv.block_id.y
    g, end, i = log_decay[h], starts[b + 1], kv.tile_index(CHUNK)
    t = kv.f32(i)
    distance = t[:, None] - t[None, :]
    decay = kv.where(distance >= 0.0, kv.math.exp2(distance * g), 0.0)
    state = states.load_rows(b, h, kv.tile_index(SIZE), columns=SIZE) + 0.0
    for first in range(starts[b], end, CHUNK):
        row, exists = first + i, first + i < end
        q = query.load_rows(row, h, mask=exists, columns=SIZE)
        k = key.load_rows(row, h, mask=exists, columns=SIZE)
        v = value.load_rows(row, h, mask=exists, columns=SIZE)
        within = kv.dot(kv.bf16(kv.dot(q, k.T) * decay), v)
        decayed = kv.bf16(kv.f32(q) * kv.math.exp2((t + 1.0) * g)[:, None])
        out.store_rows(row, h, value=kv.bf16(kv.dot(decayed, kv.bf16(state), within)), mask=exists)
        count = kv.f32(kv.math.min(end - first, CHUNK))
        fading = kv.bf16(kv.f32(k) * kv.math.exp2((count - 1.0 - t) * g)[:, None])
        state = kv.dot(fading.T, v, state * kv.math.exp2(count * g))
    states.store_rows(b, h, kv.tile_index(SIZE), value=state)
