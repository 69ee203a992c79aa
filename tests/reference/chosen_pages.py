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


def summaries(collection: KVCacheCollection, layer: int, row_offsets: Any, data: np.ndarray) -> np.ndarray:
    """What ``kv.ops.summarize_pages`` leaves, f64, of summaries that were ``data``: the layer's."""
    keys, offsets = collection.get_key_cache(layer), np.asarray(row_offsets).astype(np.int64)
    page, found = keys.page_size, data[:, layer].astype(np.float64)
    table = np.asarray(collection.lookup_table)
    table = table[layer] if table.ndim > 2 else table
    for b in range(len(offsets) - 1):
        start, new = int(keys.cache_length(b)), int(offsets[b + 1] - offsets[b])
        for p in range(start // page, -(-(start + new) // page) if new else 0):
            k = read(keys, b, np.arange(p * page, min(start + new, p * page + page)))
            rows = [k.min(0), k.max(0)] if data.shape[3] == 2 else [k.mean(0)]
            found[table[b, p]] = np.stack(rows, 1)
    return found


def page_scores(
    collection: KVCacheCollection, layer: int, query: np.ndarray, row_offsets: Any, data: np.ndarray
) -> list[np.ndarray]:
    """The scores of each sequence's pages, f64 [H, pages]."""
    keys, offsets = collection.get_key_cache(layer), np.asarray(row_offsets).astype(np.int64)
    table, heads, size = np.asarray(collection.lookup_table), keys.num_heads, keys.head_size
    group = query.shape[1] // heads
    table, found = table[layer] if table.ndim > 2 else table, []
    for b in range(len(offsets) - 1):
        new = int(offsets[b + 1] - offsets[b])
        pages = -(-(int(keys.cache_length(b)) + new) // keys.page_size) if new else 0
        of = data[table[b, :pages], layer].astype(np.float64)  # [pages, H, R, D]
        q = query[offsets[b] : offsets[b + 1]].astype(np.float64).reshape(new, heads, group, size)
        q = q.transpose(1, 0, 2, 3).reshape(heads, new * group, size)
        bounds = (q[None, :, :, None] * of[:, :, None]).max(3).sum(-1)  # [pages, H, rows]
        found.append(bounds.max(2, initial=-np.inf).T)
    return found


def selected(scores: np.ndarray, count: int, first: int, last: int) -> np.ndarray:
    """The pages that are chosen by scores [H, pages]: [H, count], ascending, -1 behind them."""
    heads, pages = scores.shape
    found = np.full((heads, count), -1, np.int32)
    for h in range(heads):
        key = np.where(np.isnan(scores[h]), np.inf, scores[h])
        always = (np.arange(pages) < first) | (np.arange(pages) >= pages - last)
        order = np.lexsort((np.arange(pages), -key, ~np.isnan(scores[h]), ~always))
        chosen = np.sort(order[: min(count, pages)])
        found[h, : len(chosen)] = chosen
    return found
