# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attention weight that each key received (H2O, arXiv 2306.14048), in one pass over the keys.

A block has 64 keys of a head, reads them once, and goes over the queries that see them. What attention divided each
query's weights by is its log-sum-exp, which ``kv.ops.attention(..., return_lse=True)`` gives. The caller adds the
masses of the steps up, and drops the tokens with the least. Grid: (key blocks, KV heads), of one sequence.
"""

from __future__ import annotations

import kvarn as kv

KEYS = QUERIES = 64
LOG2E = 1.4426950408889634


@kv.kernel(block=128)
def key_mass(
    keys: kv.KVCache,
    query: kv.Buffer[kv.bf16, 3],  # [tokens, heads, size], the last tokens of the sequence
    lse: kv.Buffer[kv.f32, 2],  # [tokens, heads]
    mass: kv.Buffer[kv.f32, 2],  # [KV heads, tokens]
):
    first, h, i = kv.block_id.x * KEYS, kv.block_id.y, kv.tile_index(QUERIES)
    new, group = query.shape[0], query.shape[1] // keys.num_heads
    count = keys.cache_length(0) + new
    token = first + kv.tile_index(KEYS)
    k = keys.tile(0, h, first, count, rows=KEYS, dtype=kv.bf16)
    received = kv.full(KEYS, 0.0)
    for g in range(0, group):
        for n in range(0, (new + QUERIES - 1) // QUERIES):
            row = n * QUERIES + i
            q = query.load_rows(row, h * group + g, mask=row < new, columns=keys.head_size)
            x = kv.dot(q, k.T) * (keys.head_size**-0.5 * LOG2E)
            total = lse.gather(row, h * group + g, mask=row < new) * LOG2E
            seen = (token[None, :] <= (count - new + row)[:, None]) & (row < new)[:, None]
            received = received + kv.where(seen, kv.math.exp2(x - total[:, None]), 0.0).sum(axis=0)
    mass.scatter(h, token, value=received, mask=token < count)
