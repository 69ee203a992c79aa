# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reference attention over caches, float64, one sequence and head group at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvarn.caches import KVCacheCollection
from kvarn.dialect import dtypes

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
    mask: Any = None, window: int | None = None, chunk: int | None = None, sinks: Any = None, softcap: float = 0.0,
    kv_offsets: Any = None, alibi_slopes: Any = None, score: Any = None, value_size: int | None = None,
    inline_scales: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """softmax(scale * Q K^T + mask) V of the new tokens over one layer, whose K and V are already in the cache.

    Parameters
    ----------
    query : array-like [T, Hq, D]
    row_offsets : array-like [B+1]
    scale : float, optional
        Default D ** -0.5.
    mask : str or callable, optional
        One of ``MASKS``, by default causal, of which ``window`` and ``chunk`` are the span; or ``mask(b, h, q, k)``
        over h [Hq, 1, 1], q [m, 1] and k [n].
    sinks : array-like [Hq], optional
        One more logit in each row's denominator.
    softcap : float
        Scores become softcap * tanh(score / softcap); 0: none.
    kv_offsets : array-like [B+1], optional
        Cross attention: a sequence has cache_length + kv_offsets[b+1] - kv_offsets[b] keys; default, of row_offsets.
    alibi_slopes : array-like [Hq], optional
        slope * (key's position - query's) is added to the scores.
    score : callable, optional
        ``score(x, b, h, q, k)`` of scores x [Hq, m, n], which it replaces.
    value_size : int, optional
        Of latent rows: values are their first columns.
    inline_scales : int
        Of latent rows: elements of each scale that the row has in it; :func:`latent_rows`.

    Returns
    -------
    tuple of numpy.ndarray
        float64 out [T, Hq, D], zeros in a row that sees no key; float64 log-sum-exp [T, Hq] (natural, the sink
        counted), minus infinity there.
    """
    keys = collection.get_key_cache(layer)
    values = None if value_size else collection.get_value_cache(layer)
    query, offsets = np.asarray(query).astype(np.float64), np.asarray(row_offsets).astype(np.int64)
    keys_of = offsets if kv_offsets is None else np.asarray(kv_offsets).astype(np.int64)
    heads, columns = query.shape[1:]
    out, lse = np.zeros((*query.shape[:2], value_size or columns)), np.full(query.shape[:2], -np.inf)
    h = np.arange(heads)[:, None, None]
    slopes = None if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)[:, None, None]
    span = window if mask == "sliding_window" else chunk
    for b, (begin, end) in enumerate(pairwise(offsets)):
        if begin == end:
            continue
        start = int(keys.cache_length(b))
        q, k = start + np.arange(end - begin)[:, None], np.arange(start + keys_of[b + 1] - keys_of[b])
        seen = mask(b, h, q, k) if callable(mask) else visible(mask or "causal", q[:, 0], k, span)
        seen = np.broadcast_to(seen, (heads, len(q), len(k)))
        if values is not None:
            key, value = read(keys, b, k), read(values, b, k)
        else:
            key = latent_rows(keys, b, k, columns, inline_scales)
            value = key[..., :value_size]
        # A key that no row sees may be anything, even NaN: 0 * NaN would show in the sums.
        key, value = (np.where(seen.any((0, 1))[:, None, None], x, 0.0) for x in (key, value))
        key, value = (np.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
        x = np.einsum("mhd,nhd->hmn", query[begin:end], key) * (columns**-0.5 if scale is None else scale)
        x = softcap * np.tanh(x / softcap) if softcap else x
        x = x if slopes is None else x + slopes * (k - q)
        x = x if score is None else np.broadcast_to(score(x, b, h, q, k), x.shape)
        sink = None if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64)[:, None], x.shape[:2])
        weights, found = softmax_rows(x, seen, sink)
        out[begin:end], lse[begin:end] = np.einsum("hmn,nhd->mhd", weights, value), found.T
    return out, lse


def latent_rows(cache: Any, b: int, t: Any, columns: int, inline_scales: int = 0) -> np.ndarray:
    """Latent rows of tokens, float64 [n, 1, columns].

    Rows with more bytes than columns end in bf16 keys, which a scale of the row multiplies as well; with
    ``inline_scales`` float32 scales are before these, each of so many 8-bit elements.
    """
    if inline_scales == 0 and columns == cache.head_size:
        return read(cache, b, t)
    # size = content + 4 * content / inline_scales + 2 * rope, columns = content + rope
    share = 4 / inline_scales if inline_scales else 0.0
    content = round((2 * columns - cache.head_size) / (1 - share))
    load = cache.load_raw if cache.quantization_enabled else cache.load
    raw = np.asarray(load(b, 0, t[:, None], np.arange(cache.head_size))).view(np.uint8)
    values = raw[:, :content].copy().view(cache.dtype.numpy).astype(np.float64)
    rest = raw[:, content:].copy()
    if inline_scales:
        scales, rest = np.split(rest, [4 * content // inline_scales], 1)
        values = values * np.repeat(scales.copy().view(np.float32).astype(np.float64), inline_scales, 1)
    keys = rest.copy().view(dtypes.bf16.numpy).astype(np.float64).reshape(len(rest), columns - content)
    row = np.concatenate([values, keys], 1)
    if cache.scale_dtype is not None:
        row = row * np.asarray(cache.load_scale(b, 0, t[:, None], 0)).astype(np.float64)
    return row[:, None]


def padded(rows: np.ndarray, row_offsets: Any, width: int, fill: Any) -> np.ndarray:
    """Ragged rows [T, ...] as a padded batch [B, width, ...] with ``fill`` where a sequence has none."""
    offsets = np.asarray(row_offsets).astype(np.int64)
    found = np.full((len(offsets) - 1, width, *rows.shape[1:]), fill, rows.dtype)
    for b, (begin, end) in enumerate(pairwise(offsets)):
        found[b, : end - begin] = rows[begin:end]
    return found
