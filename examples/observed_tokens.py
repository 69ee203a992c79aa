# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much the last queries look at each cached token: python examples/observed_tokens.py

Methods that drop tokens from a cache keep those that queries attend to: H2O adds the attention weights of every query
up (arXiv 2306.14048), SnapKV those of the last few (arXiv 2404.14469). Here the last queries of a sequence, times the
query heads of a KV head, are the rows of one tile. Its weights are a softmax along the rows, and what is kept is their
sum along the columns. The first pass over the keys finds what each row's weights are divided by, the second one
computes them. With so few rows a GPU multiplies with swapped operands: the keys are the many rows of its instruction.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kvarn as kv

PAGE, HEADS, GROUP, SIZE = 16, 2, 4, 64
LAST, ROWS, KEYS = 6, 24, 64  # queries that count; rows of a tile, 6 queries of 4 heads; keys of a tile
SCALE = SIZE**-0.5 * 1.4426950408889634  # log2(e) for exp2


@kv.kernel(block=128)
def observed_tokens(query: kv.Buffer[kv.bf16, 4], keys: kv.KVCache, seen: kv.Buffer[kv.f32, 3]):
    b, h, row = kv.block_id.x, kv.block_id.y, kv.tile_index(ROWS)
    count, token = keys.cache_length(b), kv.tile_index(KEYS)
    q = query.load_rows(b, row // GROUP, h * GROUP + row % GROUP, columns=SIZE)
    last = (count - LAST + row // GROUP)[:, None]  # the last token that a row sees
    largest, total = kv.full(ROWS, -3.0e38), kv.full(ROWS, 0.0)
    for j in range(0, (count + KEYS - 1) // KEYS):
        k, t = keys.tile(b, h, j * KEYS, count, rows=KEYS), (j * KEYS + token)[None, :]
        x = kv.where(t <= last, kv.dot(q, k.T) * SCALE, -1.0e30)
        top = kv.math.max(largest, x.max(axis=1))
        total = total * kv.math.exp2(largest - top) + kv.math.exp2(x - top[:, None]).sum(axis=1)
        largest = top
    for j in range(0, (count + KEYS - 1) // KEYS):
        k, t = keys.tile(b, h, j * KEYS, count, rows=KEYS), (j * KEYS + token)[None, :]
        x = kv.where(t <= last, kv.dot(q, k.T) * SCALE, -1.0e30)
        weights = kv.math.exp2(x - largest[:, None]) / total[:, None]
        seen.scatter(b, h, j * KEYS + token, value=weights.sum(axis=0), mask=j * KEYS + token < count)


def problem(lengths: tuple[int, ...]) -> tuple[np.ndarray, kv.PagedKVCacheCollection, np.ndarray]:
    """(queries, a pool of one layer, what is expected) of sequences of so many tokens, each at least :data:`LAST`."""
    rng = np.random.default_rng(0)
    pages = [-(-length // PAGE) for length in lengths]
    table = np.zeros((len(lengths), max(pages)), np.uint32)
    for b, some in enumerate(np.split(rng.permutation(sum(pages)), np.cumsum(pages)[:-1])):
        table[b, : len(some)] = some
    blocks = rng.standard_normal((sum(pages), 2, 1, PAGE, HEADS, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    pool = kv.PagedKVCacheCollection(blocks, np.array(lengths, np.uint32), table, 1, max(pages) * PAGE)
    query = rng.standard_normal((len(lengths), LAST, HEADS * GROUP, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    expected = np.zeros((len(lengths), HEADS, max(lengths)))
    for b, length in enumerate(lengths):
        k = blocks[table[b, : pages[b]], 0, 0].reshape(-1, HEADS, SIZE)[:length].astype(float)
        x = np.einsum("qhgd,khd->hgqk", query[b].astype(float).reshape(LAST, HEADS, GROUP, SIZE), k) * SIZE**-0.5
        x[..., np.arange(length) > length - LAST + np.arange(LAST)[:, None]] = -np.inf
        weights = np.exp(x - x.max(-1, keepdims=True))
        expected[b, :, :length] = (weights / weights.sum(-1, keepdims=True)).sum((1, 2))
    return query, pool, expected


def main() -> str:
    """Run on NumPy buffers, compare with NumPy; returns the PTX for sm_90a."""
    query, pool, expected = problem((150, 64, 7))
    keys, seen = pool.get_key_cache(0), np.zeros(expected.shape, np.float32)
    observed_tokens[(len(query), HEADS), 128](query, keys, seen)
    np.testing.assert_allclose(seen, expected, rtol=1e-3, atol=1e-5)
    return kv.compile(observed_tokens, kv.Buffer[kv.bf16, 4], keys, kv.Buffer[kv.f32, 3], target="sm_90a").asm["ptx"]


if __name__ == "__main__":
    ptx = main()
    products = {word for word in ptx.split() if word.startswith("wgmma.mma_async")}
    print(f"observed_tokens: as NumPy has it. Its products on a GPU: {', '.join(products)}")
