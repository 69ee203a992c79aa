# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random collections of every kind: scattered distinct pages, ragged lengths, poison wherever nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.caches import (
    ContinuousBatchingKVCacheCollection,
    KVCache,
    KVCacheCollection,
    PagedKVCacheCollection,
    PagedKVCacheFA3FallbackCollection,
)
from kvarn.dialect import dtypes, layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, FA3, PAGED, cdiv


@dataclass
class Problem:
    """A collection with some tokens cached and room for the step's new ones.

    Attributes
    ----------
    collection : KVCacheCollection
        Over NumPy buffers. Slots of cached tokens hold random values; everything else (the slots of the new tokens too,
        unused pages and the null page) holds poison.
    row_offsets : numpy.ndarray
        uint32 [B+1], of the new tokens.
    cached, new : numpy.ndarray
        int64 [B].
    null_page : int
        The reserved last page, which pads the tables (paged kinds).
    """

    collection: KVCacheCollection
    row_offsets: np.ndarray
    cached: np.ndarray
    new: np.ndarray
    null_page: int

    @property
    def tokens(self) -> int:
        """T, new tokens."""
        return int(self.row_offsets[-1])

    def caches(self, layer: int) -> list[KVCache]:
        """The layer's caches: keys, and values where there are."""
        c = self.collection
        return [c.get_key_cache(layer)] + ([] if c.is_mla else [c.get_value_cache(layer)])

    def only(self, b: int) -> Problem:
        """The same with one sequence: its lengths, and of its row of the table what it needs, over the same pool."""
        c, rows = self.collection, slice(b, b + 1)
        most_new, most = int(self.new[b]), int(self.cached[b] + self.new[b])
        table = c.lookup_table[..., rows, :] if c.lookup_table.ndim > 1 else c.lookup_table[rows]
        if c.lookup_table.ndim > 1:
            table = np.ascontiguousarray(table[..., : layout.lookup_columns(most, c.page_size)])
        rest = () if c.scales is None else (c.scales, c.quantization_granularity)
        one = type(c)(c.blocks, c.cache_lengths[rows], table, most_new, most, *rest)  # type: ignore[call-arg]
        offsets = np.array([0, self.new[b]], np.uint32)
        return Problem(one, offsets, self.cached[rows], self.new[rows], self.null_page)


def poison_of(dtype: DType) -> Any:
    """A value that shows: NaN, or a large integer."""
    return np.nan if dtype.is_float else int(dtype.largest) - 14


def random_values(rng: np.random.Generator, shape: Sequence[int], dtype: DType, spread: float = 1.0) -> np.ndarray:
    """Random values of a type: normal for floats, half the range for integers."""
    if dtype.is_integer:
        limit = int(min(dtype.largest, 2**20)) // 2
        return rng.integers(-limit, limit + 1, shape).astype(dtype.numpy)
    if dtype.name == "f8e8m0":
        return np.exp2(rng.integers(-8, 3, shape)).astype(np.float32).astype(dtype.numpy)
    return (rng.standard_normal(shape) * spread).astype(np.float32).astype(dtype.numpy)


def ragged_lengths(rng: np.random.Generator, batch: int, longest: int, empty: float = 0.25) -> np.ndarray:
    """int64 [batch] in [0, longest], a share of them 0."""
    return np.where(rng.random(batch) < empty, 0, rng.integers(0, longest + 1, batch))


def random_problem(
    rng: np.random.Generator,
    kind: str = PAGED,
    dtype: Any = "f32",
    *,
    num_heads: int = 2,
    head_size: int = 16,
    page_size: int = 16,
    num_layers: int = 2,
    cached: Sequence[int] | None = None,
    new: Sequence[int] | None = None,
    batch: int = 4,
    longest: int = 50,
    is_mla: bool = False,
    scale_dtype: Any = None,
    granularity: int | None = None,
    spare_pages: int = 3,
    table_dtype: Any = np.uint32,
    poison: Any = None,
) -> Problem:
    """A random collection.

    Parameters
    ----------
    rng : numpy.random.Generator
    kind : {"paged", "continuous", "fa3"}
    dtype : DType or name
        Storage type.
    cached, new : sequence of int, optional
        Lengths [B]; default random up to ``longest``, some 0.
    scale_dtype, granularity : optional
        Quantize; the granularity defaults to the head size.
    spare_pages : int
        Pages (regions) that no sequence owns, besides the null page; all poisoned.
    table_dtype : numpy dtype
        uint32 or int32, of the table and the lengths.
    poison : number, optional
        Default NaN, or a large integer.

    Returns
    -------
    Problem
    """
    assert kind in (PAGED, CONTINUOUS, FA3), f"kind must be paged, continuous or fa3, got {kind!r}"
    storage = dtypes.of(dtype)
    cached = ragged_lengths(rng, batch, longest) if cached is None else np.asarray(cached, np.int64)
    new = ragged_lengths(rng, len(cached), max(1, longest // 4)) if new is None else np.asarray(new, np.int64)
    totals = cached + new
    batch, most = len(cached), int(totals.max(initial=0))
    lengths = cached.astype(table_dtype)
    most_new = int(new.max(initial=0))
    fill = poison_of(storage) if poison is None else poison
    null = -1
    scales = None
    if kind == CONTINUOUS:
        regions = batch + spare_pages + 1
        blocks = np.full((regions, 1 if is_mla else 2, num_layers, most + 3, num_heads, head_size), fill, storage.numpy)
        table = rng.permutation(regions)[:batch].astype(table_dtype)
        collection: KVCacheCollection = ContinuousBatchingKVCacheCollection(blocks, lengths, table, most_new, most)
    elif kind == FA3:
        counts = np.broadcast_to(cdiv(totals, page_size), (num_layers, batch))
        table, null = _tables(rng, counts, layout.lookup_columns(most, page_size), spare_pages, table_dtype)
        blocks = np.full((2, null + 1, page_size, num_heads, head_size), fill, storage.numpy)
        collection = PagedKVCacheFA3FallbackCollection(blocks, lengths, table, most_new, most)
    else:
        counts = cdiv(totals, page_size)[None]
        tables, null = _tables(rng, counts, layout.lookup_columns(most, page_size), spare_pages, table_dtype)
        outer = (null + 1, 1 if is_mla else 2, num_layers, page_size, num_heads)
        blocks = np.full((*outer, head_size), fill, storage.numpy)
        granularity = granularity or head_size
        if scale_dtype is not None:
            scales = np.full((*outer, cdiv(head_size, granularity)), np.nan, dtypes.of(scale_dtype).numpy)
        collection = PagedKVCacheCollection(
            blocks, lengths, tables[0], most_new, most, scales, 1 if scales is None else granularity
        )
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
    problem = Problem(collection, offsets, cached, new, null)
    fill_cached(rng, problem)
    return problem


def _tables(
    rng: np.random.Generator, counts: np.ndarray, columns: int, spare: int, dtype: Any
) -> tuple[np.ndarray, int]:
    """Tables [L, B, columns] of distinct pages in random order, padded with the null page, and its id."""
    null = int(counts.sum()) + spare
    order = iter(rng.permutation(null).tolist())
    table = np.full((*counts.shape, columns), null, dtype)
    for place, count in np.ndenumerate(counts):
        for column in range(int(count)):
            table[(*place, column)] = next(order)
    return table, null


def fill_cached(rng: np.random.Generator, problem: Problem, upto: np.ndarray | None = None) -> None:
    """Random values in the slots of tokens [0, upto[b]) of every layer; default the cached ones."""
    upto = problem.cached if upto is None else upto
    for layer in range(problem.collection.num_layers):
        for cache in problem.caches(layer):
            for b, length in enumerate(upto):
                if not length:
                    continue
                t, h = np.arange(length)[:, None, None], np.arange(cache.num_heads)[:, None]
                shape = (length, cache.num_heads, cache.head_size)
                cache.store(b, h, t, np.arange(cache.head_size), random_values(rng, shape, cache.dtype))
                if cache.scale_dtype is not None:
                    starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
                    drawn = random_values(rng, (*shape[:2], len(starts)), dtypes.f32)
                    scale = np.abs(drawn) / 16 + 1 / 64 if cache.scale_dtype.bits > 8 else 2.0 ** np.rint(drawn)
                    cache.store_scale(b, h, t, starts, scale.astype(cache.scale_dtype.numpy))


def stored_problem(
    seed: int, kind: str = PAGED, dtype: Any = "f32", **shape: Any
) -> tuple[np.random.Generator, Problem]:
    """A random problem whose new tokens are stored too, and the generator that drew it."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, kind, dtype, **shape)
    fill_cached(rng, problem, problem.cached + problem.new)
    return rng, problem


def random_query(
    rng: np.random.Generator, problem: Problem, heads: int, dtype: Any = None, over_8_bits: Any = "bf16"
) -> np.ndarray:
    """Queries [T, heads, D] of a type; by default the cache's, or another over 8 bits."""
    spec = problem.collection.cache_spec
    wanted = dtypes.of(dtype) if dtype else spec.dtype if spec.dtype.bits > 8 else dtypes.of(over_8_bits)
    return random_values(rng, (problem.tokens, heads, spec.head_size), wanted)


def clone(collection: KVCacheCollection) -> KVCacheCollection:
    """The same collection over copies of its buffers."""
    parts = [np.array(p) for p in (collection.blocks, collection.cache_lengths, collection.lookup_table)]
    rest: tuple[Any, ...] = ()
    if collection.scales is not None:
        rest = (np.array(collection.scales), collection.quantization_granularity)
    return type(collection)(*parts, collection.max_seq_length, collection.max_cache_length, *rest)  # type: ignore[call-arg]


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bits, so that NaN equals itself: uint of the same size."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same_buffers(a: KVCacheCollection, b: KVCacheCollection) -> bool:
    """Whether two collections hold the same bits, poison and all."""
    pairs = [(a.blocks, b.blocks), (a.scales, b.scales)]
    return all(np.array_equal(bits(x), bits(y)) for x, y in pairs if x is not None)
