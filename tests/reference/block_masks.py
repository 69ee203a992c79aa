# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a block mask lists, by the mask over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvarn as kv

from .attention_functions import document
from .random_caches import Problem

BY_POSITIONS = 2**30


def lists(
    problem: Problem,
    heads: int,
    mask: Callable[..., Any],
    rows: int,
    keys: int,
    by_head: bool,
    outer: Callable[..., Any] | None = None,
) -> list[list[list[int]]]:
    """For each tile of query rows, in attention's order, and KV head: entries, 2 * tile + whether it is seen whole, and
    :data:`BY_POSITIONS` where it is not, but as ``outer`` shows it.

    ``mask(b, h, q, k)`` and ``outer`` take arrays that broadcast.
    """
    kv_heads = problem.collection.num_heads
    group, found = heads // kv_heads, []
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        own = int(problem.row_offsets[b]) * group // rows + b  # the first tile of the sequence
        found += [[[] for _ in range(kv_heads)] for _ in range(own - len(found))]
        total, k = int(cached + new), np.arange(int(cached + new))
        for row0 in range(0, int(new) * group, rows):
            row = np.arange(row0, min(row0 + rows, int(new) * group))[:, None]
            of_tile = []
            for head in range(kv_heads):
                at = b, head * group + row % group, int(cached) + row // group, k[None]
                seen = np.broadcast_to(mask(*at), (len(row), total))
                told = np.zeros_like(seen) if outer is None else seen == outer(*at)
                tiles = [slice(i, i + keys) for i in range(0, total, keys)]
                whole = [bool(seen[:, t].all()) and t.stop <= total for t in tiles]
                part = [BY_POSITIONS * (not w and bool(told[:, t].all())) for t, w in zip(tiles, whole, strict=True)]
                of_tile.append([2 * i + whole[i] + part[i] for i, t in enumerate(tiles) if seen[:, t].any()])
            found.append(of_tile)
    end = int(problem.row_offsets[-1]) * group // rows + len(problem.new)
    found += [[[] for _ in range(kv_heads)] for _ in range(end - len(found))]
    return found if by_head else [of_tile[:1] for of_tile in found]


def entries(blocks: np.ndarray) -> list[list[list[int]]]:
    """The lists of a block mask."""
    return [[of_head[1 : 1 + of_head[0]].tolist() for of_head in of_tile] for of_tile in blocks]


def number(entry: int) -> int:
    """The tile of keys of an entry."""
    return (entry & ~BY_POSITIONS) // 2


def by_head(b, h, q, k, ids):
    return ((h == 0) | (q - k < 20)) & (ids[b, q] == ids[b, k])


# Masks, and what they are over NumPy arrays of documents.
CASES: dict[str, Any] = {
    "causal documents": (
        kv.masks.causal & document, lambda ids: lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k])
    ),
    "window and documents": (
        kv.masks.sliding_window(40) & document,
        lambda ids: lambda b, h, q, k: (k <= q) & (q - k < 40) & (ids[b, q] == ids[b, k]),
    ),
    "by head": (
        kv.masks.causal & by_head,
        lambda ids: lambda b, h, q, k: (k <= q) & ((h == 0) | (q - k < 20)) & (ids[b, q] == ids[b, k]),
    ),
    "not causal": (document, lambda ids: lambda b, h, q, k: ids[b, q] == ids[b, k]),
}  # fmt: skip

# What the parts of these without arrays show.
OUTER: dict[str, Any] = {
    "causal documents": lambda b, h, q, k: k <= q,
    "window and documents": lambda b, h, q, k: (k <= q) & (q - k < 40),
    "by head": lambda b, h, q, k: k <= q,
}


def poison_unlisted(problem: Problem, blocks: list[list[list[int]]], tiles: list[int], keys: int) -> None:
    """NaN in each sequence's rows that no tile of its queries lists; ``tiles``: of every sequence's first one."""
    cache = problem.collection.get_key_cache(1)
    for b, (first, end) in enumerate(zip(tiles, [*tiles[1:], len(blocks)], strict=True)):
        total = int(problem.cached[b] + problem.new[b])
        seen = {number(entry) for of_tile in blocks[first:end] for entry in of_tile[0]}
        hidden = [t for t in range(total) if t // keys not in seen]
        if hidden and problem.new[b]:
            size = cache.spec.head_size
            nan = np.full((len(hidden), size), np.nan, cache.blocks.dtype)
            cache.store(b, 0, np.array(hidden)[:, None], np.arange(size), nan)
