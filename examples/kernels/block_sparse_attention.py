# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block-sparse causal attention: every block of 64 queries has a list of the blocks of 64 keys that it sees.

Lists are per head, as estimators of sparse prefill make them (MInference, arXiv 2407.02490; XAttention,
arXiv 2503.16428). Within the last block the mask is causal. Grid: (query blocks, heads), of one sequence.
"""

from __future__ import annotations

import kvarn as kv

BLOCK, SIZE = 64, 64
SCALE = SIZE**-0.5 * 1.4426950408889634  # log2(e) for exp2


@kv.kernel(block=128)
def block_sparse_attention(
    query: kv.Buffer[kv.bf16, 3],  # [tokens, heads, SIZE], the last tokens of the sequence
    keys: kv.KVCache,
    values: kv.KVCache,
    counts: kv.Buffer[kv.i32, 2],  # [heads, query blocks], how many blocks each list has
    lists: kv.Buffer[kv.i32, 3],  # [heads, query blocks, most], numbers of key blocks
    out: kv.Buffer[kv.bf16, 3],
):
    n, h, i = kv.block_id.x, kv.block_id.y, kv.tile_index(BLOCK)
    new, kv_head = query.shape[0], h // (query.shape[1] // keys.num_heads)
    count, row = keys.cache_length(0) + new, n * BLOCK + i
    q = query.load_rows(row, h, mask=row < new, columns=SIZE)
    at = (count - new + row)[:, None]
    m, total, o = kv.full(BLOCK, -3.0e38), kv.full(BLOCK, 0.0), kv.full((BLOCK, SIZE), 0.0)
    for j in range(0, counts[h, n]):
        first = lists[h, n, j] * BLOCK
        k = keys.tile(0, kv_head, first, count, rows=BLOCK)
        v = values.tile(0, kv_head, first, count, rows=BLOCK)
        x = kv.masked(kv.dot(q, k.T) * SCALE, (first + i)[None, :] <= at)
        top = kv.math.max(m, x.max(axis=1))
        alpha, p = kv.math.exp2(m - top), kv.math.exp2(x - top[:, None])
        m, total = top, total * alpha + p.sum(axis=1)
        o = kv.dot(kv.bf16(p), v, o * alpha[:, None])
    out.store_rows(row, h, value=kv.bf16(o / total[:, None]), mask=row < new)
