# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collections of records for tests: pages in random order, what they hold, and attention over it in float64."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.caches.numerics import decode, encode
from kvarn.dialect import layout

HEADS, SIZE, PAGE, LAYERS = 2, 128, 16, 2
PLACES = ("host", "sm_90a")


def record_of(group: int, rotation: int = 0) -> kv.Record:
    return kv.Record("u4", "f16", group, zero=True, rotation=rotation)


def collection_of(
    record: kv.Record, cached: Any, new: Any, rng: Any, size: int = SIZE, page: int = PAGE, heads: int = HEADS
) -> Any:
    """A collection of 4-bit elements with distinct pages in random order, and scales of NaN where nothing is cached."""
    totals = np.add(cached, new)
    counts = -(-totals // page)
    null = int(counts.sum()) + 1
    order = iter(rng.permutation(null).tolist())
    table = np.full((len(totals), layout.lookup_columns(int(totals.max()), page)), null, np.uint32)
    for b, count in enumerate(counts):
        table[b, :count] = [next(order) for _ in range(count)]
    outer = (null + 1, 2, LAYERS, page, heads)
    blocks = np.full((*outer, record.row_shape(size)[1]), 0xEE, np.uint8)
    of_scales = record.scales_shape(size)
    assert of_scales is not None
    scales = np.full((*outer, of_scales[1]), np.nan, of_scales[0].numpy)
    lengths, most = np.array(cached, np.uint32), int(totals.max())
    found = kv.PagedKVCacheCollection(blocks, lengths, table, int(max(new)), most, scales, record=record)
    for layer in range(LAYERS):
        for cache in (found.get_key_cache(layer), found.get_value_cache(layer)):
            for b, length in enumerate(cached):
                heads_of = rng.standard_normal((length, heads, size)) * rng.uniform(0.1, 3) + rng.uniform(-1, 1)
                put(cache, record, b, 0, heads_of)
    return found


def put(cache: Any, record: kv.Record, b: int, first: int, values: np.ndarray) -> None:
    """Quantize the heads of tokens from ``first`` up, [T, H, D], into a cache."""
    stored, scales = encode(record, values)
    t, h = first + np.arange(len(values))[:, None], np.arange(values.shape[1])
    cache.store(b, h, t, 0, stored)
    cache.store_scale(b, h, t, 0, scales)


def held(cache: Any, b: int, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and scales of tokens of a sequence, [T, H, ...]."""
    t, h = np.asarray(tokens)[:, None], np.arange(cache.num_heads)
    scales = cache.load_scale(b, h, t, 0, cache.spec.num_scales)
    return cache.load_raw(b, h, t, 0, cache.spec.stored_size), scales.reshape(*t.shape[:1], len(h), -1)


def at(place: str) -> Any:
    return contextlib.nullcontext() if place == "host" else kv.emulated(place)


def offsets_of(new: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)


def attended(found: Any, layer: int, query: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Causal attention over what the cache holds, in float64."""
    out, record, group = np.zeros(query.shape), found.cache_spec.record, query.shape[1] // found.num_heads
    for b in range(len(offsets) - 1):
        first, new = int(found.cache_lengths[b]), int(offsets[b + 1] - offsets[b])
        keys, values = (
            decode(record, *held(cache, b, range(first + new))).astype(np.float64)
            for cache in (found.get_key_cache(layer), found.get_value_cache(layer))
        )
        for i in range(new):
            for h in range(query.shape[1]):
                row, seen = int(offsets[b]) + i, first + i + 1
                scores = keys[:seen, h // group] @ query[row, h].astype(np.float64) / np.sqrt(query.shape[2])
                weights = np.exp(scores - scores.max())
                out[row, h] = weights @ values[:seen, h // group] / weights.sum()
    return out


def check_rope_append(record: kv.Record, rng: np.random.Generator, place: str) -> None:
    """RoPE and append store the bytes of rotated heads, as the model quantizes those of a cache of f32."""
    cached, new = (4, 30), (2, 1)
    found, offsets = collection_of(record, cached, new, rng), offsets_of(new)
    zeros = np.zeros((*found.blocks.shape[:-1], SIZE), np.float32)
    plain = kv.PagedKVCacheCollection(zeros, found.cache_lengths, found.lookup_table, 2, 31)
    query, key, value = (rng.standard_normal((3, n, SIZE)).astype(np.float32) for n in (8, HEADS, HEADS))
    angles = rng.standard_normal((64, SIZE)).astype(np.float32)
    with at(place):
        for c in (plain, found):
            kv.ops.rope_append(c, 0, query, key, value, offsets, angles)
    for half in ("get_key_cache", "get_value_cache"):
        for b, length in enumerate(cached):
            t, h = length + np.arange(new[b])[:, None], np.arange(HEADS)
            rotated = getattr(plain, half)(0).load(b, h, t, 0, SIZE)
            np.testing.assert_array_equal(held(getattr(found, half)(0), b, t[:, 0])[0], encode(record, rotated)[0])
