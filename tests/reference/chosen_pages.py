# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over lists of pages, page summaries and the choice of pages, in float64; and lists to try them with."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.caches import KVCacheCollection

from .attention import dense_attention, visible
from .model import read
from .random_caches import Problem


def attention(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, pages: np.ndarray,
    page_counts: np.ndarray | None = None, *, mask: str = "causal", window: int | None = None, chunk: int | None = None,
    sinks: Any = None, softcap: float = 0.0, alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention whose sequence b and KV head h see the tokens of the pages that ``pages[b, h]`` lists.

    Returns float64 out [T, Hq, D] and log-sum-exp [T, Hq].
    """
    keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
    query, offsets = np.asarray(query).astype(np.float64), np.asarray(row_offsets).astype(np.int64)
    heads, size, page = keys.num_heads, keys.head_size, keys.page_size
    group = query.shape[1] // heads
    out, lse = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
    for b in range(len(offsets) - 1):
        rows, start = slice(offsets[b], offsets[b + 1]), int(keys.cache_length(b))
        n = rows.stop - rows.start
        for h in range(heads if n else 0):
            listed = pages[b, h] if page_counts is None else pages[b, h, : max(0, int(page_counts[b, h]))]
            tokens = np.concatenate([[], *[p * page + np.arange(page) for p in listed.tolist() if p >= 0]]).astype(int)
            tokens = tokens[tokens < start + n]
            position, of_head = start + np.arange(n), slice(h * group, (h + 1) * group)
            seen = visible(mask, position, tokens, window if mask == "sliding_window" else chunk)
            key, value = (read(cache, b, tokens)[:, h : h + 1] for cache in (keys, values))
            key = np.where(seen.any(0)[:, None, None], key, 0.0)
            slopes = np.zeros(group) if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)[of_head]
            bias = slopes[:, None, None] * (tokens - position[:, None])
            sink = None if sinks is None else np.asarray(sinks)[of_head]
            out[rows, of_head], lse[rows, of_head] = dense_attention(
                query[rows, of_head], key, value, seen, size**-0.5, softcap, sink, bias
            )
    return out, lse


def random_lists(
    rng: np.random.Generator, problem: Problem, share: float, columns: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Lists of distinct pages in random order, another a KV head: about a share of a sequence's, some of none.

    Entries that name no page stand among those that do: negative ones, and numbers past the table. Behind the counts
    there are pages that must not be looked at.
    """
    c = problem.collection
    pages = -(-(problem.cached + problem.new) // c.page_size)
    most = int(pages.max(initial=1)) + 3 if columns is None else columns
    lists = np.full((len(pages), c.num_heads, most), -1, np.int32)
    counts = np.zeros(lists.shape[:2], np.int32)
    for b, h in np.ndindex(*counts.shape):
        chosen = rng.permutation(int(pages[b]))
        chosen = chosen[rng.random(len(chosen)) < share]
        none = rng.choice(np.array([-1, -7, 1 << 30, c.lookup_table.shape[-1]]), 2)
        entries = rng.permutation(np.concatenate([chosen, none]))[:most]
        counts[b, h] = len(entries)
        lists[b, h, : len(entries)] = entries
        lists[b, h, len(entries) :] = rng.integers(0, max(1, pages[b]), most - len(entries))
    return lists, counts


def uncounted(lists: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same lists without counts: -1 behind the entries that counted."""
    return np.where(np.arange(lists.shape[2]) < counts[..., None], lists, -1).astype(np.int32)
