# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the kernels of this folder compute, in NumPy: ``--model=models.py:NAME``."""

from __future__ import annotations

from typing import Any

import numpy as np


def rescale(arguments: dict[str, Any]) -> None:
    """Every cached value of a head times the head's factor, and the sums of what eight elements were then."""
    cache = arguments["pool"].get_value_cache(arguments["layer"])
    factors, sums = arguments["factors"], arguments["sums"]
    sums[:] = 0
    for b, length in enumerate(np.asarray(cache.cache_lengths).tolist()):
        for h, t in np.ndindex(cache.num_heads, length):
            x = cache.load(b, h, t, np.arange(cache.head_size), dtype=np.float32) * factors[h]
            cache.store(b, h, t, np.arange(cache.head_size), x.astype(cache.dtype.numpy))
            sums[b, 8 * h : 8 * h + 8] += x.reshape(8, -1).sum(1)


def rows(arguments: dict[str, Any]) -> None:
    """The row of each of the first 64 tokens of every sequence, in all pages of the pool."""
    cache, found = arguments["cache"], arguments["found"]
    for b, length in enumerate(np.asarray(cache.cache_lengths).tolist()):
        for t in range(min(length, 64)):
            found[b, t] = cache.row_idx(b, t)


def biased(arguments: dict[str, Any]) -> None:
    """Attention of the last 64 tokens' queries, those before the first token too, with a bias by distance."""
    query, keys, values, bias, out = (arguments[name] for name in ("query", "keys", "values", "bias", "out"))
    out[:] = 0
    for b, length in enumerate(np.asarray(keys.cache_lengths).tolist()):
        if length:
            at = b, 0, np.arange(length)[:, None], np.arange(64)
            k, v = (cache.load(*at, dtype=np.float32) for cache in (keys, values))
            distance = (length - 64 + np.arange(64))[:, None] - np.arange(length)
            scores = query[b].astype(np.float32) @ k.T / 8 + bias[np.clip(distance, 0, 31)]
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[b] = (weights @ v / weights.sum(1, keepdims=True)).astype(out.dtype)


def observed(arguments: dict[str, Any]) -> None:
    """What 16 rows' attention weights add up to for every token of a sequence."""
    query, keys, seen = (arguments[name] for name in ("query", "keys", "seen"))
    for b, length in enumerate(np.asarray(keys.cache_lengths).tolist()):
        if length:
            k = keys.load(b, 0, np.arange(length)[:, None], np.arange(64), dtype=np.float32)
            scores = query[b].astype(np.float32) @ k.T / 8
            weights = np.exp(scores - scores.max(1, keepdims=True))
            seen[b, :length] = (weights / weights.sum(1, keepdims=True)).sum(0)


def largest_keys(arguments: dict[str, Any]) -> None:
    """The largest key of the first head of every sequence, column by column."""
    cache, out = arguments["cache"], arguments["out"]
    out[:] = -3.0e38
    for b, length in enumerate(np.asarray(cache.cache_lengths).tolist()):
        for t in range(length):
            out[b] = np.maximum(out[b], cache.load(b, 0, t, np.arange(64), dtype=np.float32))


def attention(arguments: dict[str, Any]) -> None:
    """Causal attention of a step's tokens, two query heads for the only key head."""
    pool, layer, query, offsets, scale, out = arguments.values()
    keys, values = pool.get_key_cache(layer), pool.get_value_cache(layer)
    for b, length in enumerate(np.asarray(pool.cache_lengths).tolist()):
        rows = slice(offsets[b], offsets[b + 1])
        total = length + int(offsets[b + 1] - offsets[b])
        at = b, 0, np.arange(total)[:, None], np.arange(64)
        k, v = (cache.load(*at, dtype=np.float32) for cache in (keys, values))
        seen = np.arange(total) <= np.arange(length, total)[:, None]
        scores = np.where(seen[:, None], query[rows].astype(np.float32) @ k.T * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = (weights @ v / weights.sum(-1, keepdims=True)).astype(out.dtype)
