# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Data of attention over pages, to measure with: random tensors in random pages, enough layers to defeat the L2, and a
check against a float32 reference. What ``kvarn tune`` and the benchmarks run on.

``split`` chooses the layout: kvarn's pool ``[page, K | V, layer, token, head, dim]``, or K and V apart as ``[layer,
page, token, head, dim]``, which other libraries take.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvarn.dialect import dtypes

from .arrays import Arrays

ROTATED = 320e6  # bytes that a pass over the layers reads at least: several times an L2
MOST_LAYERS = 64
TOLERANCE = {"bf16": 0.02, "f16": 0.02, "f8e4m3": 0.05, "f8e5m2": 0.05}  # relative error, by the cache's dtype
COLUMNS = 16  # table columns that kvarn may read past the last one


def layers_for(bytes_: float, arrays: Arrays) -> int:
    """Layers to rotate over for a call that moves so many bytes."""
    if not arrays.on_gpu:
        return 2
    return max(1, min(MOST_LAYERS, math.ceil(ROTATED / bytes_)))


class Pages:
    """A random assignment of pages to sequences: page ids are a permutation, ``total`` is the null page.

    The first ``prefix`` tokens of all sequences, whole pages, are in the same pages.
    """

    def __init__(self, lengths: np.ndarray, page: int, arrays: Arrays, seed: int = 5, prefix: int = 0) -> None:
        counts, shared = -(-lengths // page), prefix // page
        own = counts - shared
        self.total, self.page = int(own.sum()) + shared, page
        ids = np.random.default_rng(seed).permutation(self.total).astype(np.int32)
        width = int(counts.max())
        self.table = np.full((len(lengths), width), self.total, np.int32)
        starts = np.concatenate([[0], counts.cumsum()])
        first = shared + np.concatenate([[0], own.cumsum()])
        for b, count in enumerate(counts):
            self.table[b, :shared] = ids[:shared]
            self.table[b, shared:count] = ids[first[b] : first[b + 1]]
        order = np.concatenate([row[:count] for row, count in zip(self.table, counts, strict=True)])
        wide = np.full((len(lengths), -(-width // 8) * 8 + COLUMNS), self.total, np.int32)
        wide[:, :width] = self.table
        self.lookup = arrays.integers(wide)
        # As the peers take it: the pages of all sequences end to end, and how many tokens the last one has.
        self.device_table = arrays.integers(np.where(self.table == self.total, 0, self.table))
        self.order, self.starts = arrays.integers(order), arrays.integers(starts)
        self.last = arrays.integers((lengths - 1) % page + 1)

    def slots(self, b: int, positions: np.ndarray) -> np.ndarray:
        """Where tokens of a sequence lie, in tokens from the first page on."""
        return self.table[b, positions // self.page].astype(np.int64) * self.page + positions % self.page


class Cached:
    """K and V (or latent rows, ``halves`` 1) of a batch, in pages."""

    def __init__(self, arrays: Arrays, row: Any, pages: Pages, layers: int, split: bool, halves: int = 2) -> None:
        shape = row.shape
        self.arrays, self.pages, self.layers, self.split, self.halves = arrays, pages, layers, split, halves
        self.heads, self.size, self.dtype = (
            getattr(shape, "heads", 1),
            getattr(shape, "stored_size", shape.size),
            row.dtype,
        )
        rows = (pages.page, self.heads, self.size)
        self.granule, self.scales = getattr(shape, "granule", 0), None
        if split:
            self.parts = [arrays.normal((layers, pages.total, *rows), row.dtype) for _ in range(halves)]
        else:
            # One page more, which is the null page. Drawn by layers: a conversion must not need twice the memory.
            self.blocks = arrays.empty((pages.total + 1, halves, layers, *rows), row.dtype)
            for layer in range(layers):
                self.blocks[:, :, layer] = arrays.normal((pages.total + 1, halves, *rows), row.dtype)
            if self.granule:
                of_head = (*self.blocks.shape[:-1], -(-self.size // self.granule))
                self.scales = (abs(arrays.normal(of_head, "f32")) + 0.5) * (1 / 64 if row.dtype == "i8" else 1)

    def collection(self, before: Any, newest: int, longest: int) -> Any:
        """kvarn's view of the pool."""
        import kvarn as kv

        scales = () if self.scales is None else (self.scales, self.granule)
        before = self.arrays.integers(before)
        return kv.PagedKVCacheCollection(self.blocks, before, self.pages.lookup, newest, longest, *scales)

    def rows(self, b: int, length: int, half: int) -> Any:
        """[length, heads, size] in float32, of layer 0."""
        ids = self.arrays.index(self.pages.table[b, : -(-length // self.pages.page)])
        found = self.parts[half][0][ids] if self.split else self.blocks[ids, half, 0]
        found = self.arrays.f32(found)
        if self.scales is not None:
            granules = self.arrays.index(np.arange(self.size) // self.granule)
            found = found * self.scales[ids, half, 0][..., granules]
        return found.reshape(-1, self.heads, self.size)[:length]


class Problem:
    """A row's data. ``bytes`` and ``flops`` are those of one call; ``layers`` those that a measurement rotates over."""

    arrays: Arrays
    row: Any
    bytes: int = 0
    flops: int = 0
    layers: int = 1

    def poison(self) -> None:
        """Make whatever a call writes NaN."""
        raise NotImplementedError

    def error(self) -> float:
        """Relative error of what the call for layer 0 wrote; NaN when something is missing."""
        raise NotImplementedError


class AttentionProblem(Problem):
    """Attention of new tokens over cached ones: what decode, prefill and latent rows share."""

    out: Any
    query: Any
    queries: np.ndarray  # new tokens of each sequence
    lengths: np.ndarray  # cached tokens with them
    window = 0
    scale = 1.0
    last: int | None = None  # new tokens of a sequence that are checked, from its end; None: all

    def poison(self) -> None:
        self.arrays.poison(self.out)

    def sequences(self) -> list[int]:
        """Those that are checked."""
        batch = len(self.lengths)
        return sorted({0, batch // 2, batch - 1})

    def keys_of(self, b: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def error(self, query: Any = None) -> float:
        """``query``: what a peer was given that does not take the query as it is."""
        query = self.query if query is None else query
        starts = np.concatenate([[0], self.queries.cumsum()])
        worst = []
        for b in self.sequences():
            keys, values = self.keys_of(b)
            for picked, head in self.heads_of(keys.shape[1]):
                begin, end = int(starts[b]), int(starts[b + 1])
                rows = slice(begin if self.last is None else max(begin, end - self.last), end)
                q = self.arrays.f32(query[rows, picked])
                wanted = self.wanted(q, keys[:, head], values[:, head], b, picked)
                worst.append(self.arrays.relative_error(self.out[rows, picked], wanted))
        return float("nan") if any(e != e for e in worst) else max(worst)

    def heads_of(self, heads: int) -> list[tuple[slice, int]]:
        """(query heads, the KV head they share), of those that are checked: the first, the last."""
        group = self.query.shape[1] // heads
        return [(slice(h * group, (h + 1) * group), h) for h in sorted({0, heads - 1})]

    def wanted(self, q: Any, keys: Any, values: Any, b: int, picked: slice) -> Any:
        """What queries [n, heads, size] of sequence b are to give over keys and values [tokens, size] of their head."""
        return self._attend(q, keys, values, int(self.lengths[b]))

    def _attend(self, q: Any, keys: Any, values: Any, length: int) -> Any:
        scores = self.arrays.einsum("thd,nd->htn", q, keys) * self.scale
        at = np.arange(length - q.shape[0], length)[:, None]
        key = np.arange(length)[None]
        seen = (key <= at) & ((key > at - self.window) if self.window else True)
        return self.attended(scores, seen, values)

    def attended(self, scores: Any, seen: np.ndarray, values: Any) -> Any:
        """The values weighted by scores [heads, n, tokens], of tokens that are seen, [n, tokens]."""
        if not seen.all():
            mask = self.arrays.index(seen) != 0
            scores = self.arrays.where(mask[None], scores, float("-inf"))
        return self.arrays.einsum("htn,nd->thd", self.arrays.softmax(scores), values)


class DecodeProblem(AttentionProblem):
    """Decode attention: some new tokens of each sequence, the last of its context, which are in the cache already.

    Parameters
    ----------
    arrays : Arrays
    row
        What is measured: ``dtype`` and a ``shape`` with batch, context, ragged, window, query_heads, heads, size, page
        and new; perhaps prefix, tokens that all sequences begin with, in the same pages.
    split : bool
    """

    def __init__(self, arrays: Arrays, row: Any, split: bool) -> None:
        shape = row.shape
        self.arrays, self.row, self.window = arrays, row, shape.window
        draw = np.random.default_rng(shape.batch * 131 + shape.page)
        lengths = np.full(shape.batch, shape.context)
        if shape.ragged:
            lengths = draw.integers(max(shape.new, shape.context // 16), shape.context + 1, shape.batch)
            lengths[0] = shape.context
        self.lengths, self.queries = lengths, np.full(shape.batch, shape.new)
        prefix = getattr(shape, "prefix", 0)
        pages = Pages(lengths, shape.page, arrays, prefix=prefix)
        seen = np.minimum(lengths, shape.window) if shape.window else lengths
        row_bytes = shape.heads * shape.size * dtypes.by_name(row.dtype).itemsize
        cached = (int(seen.sum()) - (shape.batch - 1) * prefix) * row_bytes * 2
        self.layers = layers_for(cached, arrays)
        self.cached = Cached(arrays, row, pages, self.layers, split)
        query = row.dtype if dtypes.by_name(row.dtype).bits > 8 else "bf16"
        tokens = shape.batch * shape.new
        self.query = arrays.normal((tokens, shape.query_heads, shape.size), query)
        self.out = arrays.empty(self.query.shape, query)
        self.scale = shape.size**-0.5
        self.bytes = cached + 4 * tokens * shape.query_heads * shape.size + 4 * pages.total
        self.flops = 4 * int(seen.sum()) * shape.new * shape.query_heads * shape.size
        self.offsets = arrays.integers(np.arange(shape.batch + 1) * shape.new)
        self.device_lengths = arrays.integers(lengths)
        self.longest = int(lengths.max())

    def keys_of(self, b: int) -> tuple[Any, Any]:
        length = int(self.lengths[b])
        return self.cached.rows(b, length, 0), self.cached.rows(b, length, 1)
