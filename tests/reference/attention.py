# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reference attention over caches, float64, one sequence and head group at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvarn.caches import KVCacheCollection

from .model import read

MASKS = ("causal", "null", "sliding_window", "chunked", "chunked_causal")


def visible(mask: str, query: np.ndarray, keys: np.ndarray, span: int | None = None) -> np.ndarray:
    """Which keys [n] a query row [m] sees, by absolute positions: bool [m, n].

    ``sliding_window``: k <= q and q - k < span. ``chunked``: q and k in one chunk of span; ``chunked_causal``: and
    k <= q.
    """
    q, k = np.asarray(query)[:, None], np.asarray(keys)[None, :]
    if mask == "null":
        return np.ones((q.shape[0], k.shape[1]), bool)
    if mask == "causal":
        return k <= q
    if mask not in MASKS or not span or span < 1:
        raise ValueError(
            f"mask must be one of {', '.join(MASKS)}, with a positive span for the last three, got {mask!r}, {span}"
        )
    if mask == "sliding_window":
        return (k <= q) & (q - k < span)
    same = q // span == k // span
    return same if mask == "chunked" else same & (k <= q)


def softmax_rows(scores: np.ndarray, seen: np.ndarray, sink: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Weights and log-sum-exp over the last dimension.

    Parameters
    ----------
    scores : numpy.ndarray [..., n]
    seen : numpy.ndarray
        Broadcastable to scores; what is not seen has a score of minus infinity.
    sink : array-like [...], optional
        One more logit in each row's denominator.

    Returns
    -------
    tuple of numpy.ndarray
        Weights [..., n], zeros in a row that sees nothing; log of the denominator (the sink counted), [...].
    """
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - safe[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + np.exp(np.asarray(sink) - safe)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    return weights / np.where(total == 0, 1.0, total)[..., None], lse


def dense_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray, scale: float, softcap: float = 0.0,
    sinks: Any = None, bias: Any = 0.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention of one sequence: query [m, Hq, D], key [n, H, D], value [n, H, Dv], seen [m, n].

    ``bias`` [Hq, m, n] is added to the scores after the softcap.

    Returns
    -------
    tuple of numpy.ndarray
        float64 out [m, Hq, Dv] and log-sum-exp [m, Hq].
    """
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = np.einsum("mhd,nhd->hmn", query, key) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + bias
    sink = None if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64)[:, None], scores.shape[:2])
    weights, lse = softmax_rows(scores, seen[None], sink)
    # A key that no row sees may be anything, even NaN: leave it out of the sum.
    value = np.where(seen.any(0)[:, None, None], value, 0.0)
    return np.einsum("hmn,nhd->mhd", weights, value), lse.T


def attention(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, *, scale: float | None = None,
    mask: str = "causal", window: int | None = None, chunk: int | None = None, sinks: Any = None, softcap: float = 0.0,
    kv_offsets: Any = None, alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """softmax(scale * Q K^T + mask) V of the new tokens over one layer, whose K and V are already in the cache.

    Parameters
    ----------
    query : array-like [T, Hq, D]
    row_offsets : array-like [B+1]
    scale : float, optional
        Default D ** -0.5.
    mask : str
        One of ``MASKS``; ``window`` and ``chunk`` are its span.
    sinks : array-like [Hq], optional
        One more logit in each row's denominator.
    softcap : float
        Scores become softcap * tanh(score / softcap); 0: none.
    kv_offsets : array-like [B+1], optional
        Cross attention: a sequence has cache_length + kv_offsets[b+1] - kv_offsets[b] keys; default, of row_offsets.
    alibi_slopes : array-like [Hq], optional
        slope * (key's position - query's) is added to the scores.

    Returns
    -------
    tuple of numpy.ndarray
        float64 out [T, Hq, D], zeros in a row that sees no key; float64 log-sum-exp [T, Hq] (natural, the sink
        counted), minus infinity there.
    """
    key_cache, value_cache = collection.get_key_cache(layer), collection.get_value_cache(layer)
    return _over_sequences(
        key_cache, lambda b, t: read(value_cache, b, t), key_cache.head_size, query, row_offsets, kv_offsets,
        key_cache.head_size**-0.5 if scale is None else scale, mask, window if mask == "sliding_window" else chunk,
        softcap, sinks, alibi_slopes,
    )  # fmt: skip


def padded(rows: np.ndarray, row_offsets: Any, width: int, fill: Any) -> np.ndarray:
    """Ragged rows [T, ...] as a padded batch [B, width, ...] with ``fill`` where a sequence has none."""
    offsets = np.asarray(row_offsets).astype(np.int64)
    found = np.full((len(offsets) - 1, width, *rows.shape[1:]), fill, rows.dtype)
    for b, (begin, end) in enumerate(pairwise(offsets)):
        found[b, : end - begin] = rows[begin:end]
    return found


def mla_attention(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, *, value_size: int = 512,
    scale: float | None = None, mask: str = "causal", window: int | None = None, chunk: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention over latent rows: scores with the whole row [D], values its first ``value_size`` columns.

    query: [T, Hq, D]. Returns float64 out [T, Hq, value_size] and log-sum-exp [T, Hq]. ``scale`` defaults to D ** -0.5.
    """
    cache = collection.get_key_cache(layer)
    return _over_sequences(
        cache, lambda b, t: read(cache, b, t)[..., :value_size], value_size, query, row_offsets, None,
        cache.head_size**-0.5 if scale is None else scale, mask, window if mask == "sliding_window" else chunk,
        0.0, None,
    )  # fmt: skip


def _over_sequences(
    key_cache: Any, values: Any, value_size: int, query: Any, row_offsets: Any, kv_offsets: Any, scale: float,
    mask: str, span: int | None, softcap: float, sinks: Any, alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    query = np.asarray(query).astype(np.float64)
    offsets = np.asarray(row_offsets).astype(np.int64)
    keys_of = offsets if kv_offsets is None else np.asarray(kv_offsets).astype(np.int64)
    out = np.zeros((*query.shape[:2], value_size))
    lse = np.full(query.shape[:2], -np.inf)
    for b in range(len(offsets) - 1):
        rows = slice(offsets[b], offsets[b + 1])
        start = int(key_cache.cache_length(b))
        num_keys = start + int(keys_of[b + 1] - keys_of[b])
        if rows.start == rows.stop:
            continue
        position, t = start + np.arange(rows.stop - rows.start), np.arange(num_keys)
        seen = visible(mask, position, t, span)
        key = read(key_cache, b, t)
        # What no row sees must not matter, and 0 * NaN would.
        key = np.where(seen.any(0)[:, None, None], key, 0.0)
        slopes = np.zeros(query.shape[1]) if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)
        bias = slopes[:, None, None] * (t - position[:, None])
        out[rows], lse[rows] = dense_attention(query[rows], key, values(b, t), seen, scale, softcap, sinks, bias)
    return out, lse


def function_attention(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, *, score: Any = None, mask: Any = None,
    scale: float | None = None, value_size: int | None = None, kv_offsets: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention with a score and a mask that are functions over NumPy arrays.

    ``score(x, b, h, q, k)`` with x [Hq, m, n] and ``mask(b, h, q, k)`` take h [Hq, 1, 1], q [m, 1] and k [n]; without a
    mask, it is causal. ``value_size``: of latent rows, whose first columns are the values. Returns float64 out
    [T, Hq, D] and log-sum-exp [T, Hq].
    """
    keys = collection.get_key_cache(layer)
    values = keys if value_size else collection.get_value_cache(layer)
    query, offsets = np.asarray(query).astype(np.float64), np.asarray(row_offsets).astype(np.int64)
    heads, size = query.shape[1:]
    keys_of = offsets if kv_offsets is None else np.asarray(kv_offsets).astype(np.int64)
    out, lse, h = (
        np.zeros((*query.shape[:2], value_size or size)),
        np.full(query.shape[:2], -np.inf),
        np.arange(heads)[:, None, None],
    )
    for b, (begin, end) in enumerate(pairwise(offsets)):
        if begin == end:
            continue
        start = int(keys.cache_length(b))
        q, k = start + np.arange(end - begin)[:, None], np.arange(start + keys_of[b + 1] - keys_of[b])
        key, value = (np.repeat(read(cache, b, k), heads // keys.num_heads, axis=1) for cache in (keys, values))
        x = np.einsum("mhd,nhd->hmn", query[begin:end], key) * (size**-0.5 if scale is None else scale)
        x = x if score is None else np.broadcast_to(score(x, b, h, q, k), x.shape)
        seen = np.broadcast_to(k <= q if mask is None else mask(b, h, q, k), x.shape)
        weights, found = softmax_rows(x, seen)
        # A key that no row sees may be anything, even NaN: leave it out of the sum.
        value = np.where(seen.any((0, 1))[:, None, None], value[..., : value_size or size], 0.0)
        out[begin:end], lse[begin:end] = np.einsum("hmn,nhd->mhd", weights, value), found.T
    return out, lse
