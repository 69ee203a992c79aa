# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Batches whose sequences begin with the same pages, and the model of several sets of keys in one softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import cdiv

from .random_caches import Problem, random_values

LAYER = 1


def combined(a: Any, a_lse: Any, b: Any, b_lse: Any) -> tuple[np.ndarray, np.ndarray]:
    """A mean of two outputs by their sums of weights, in float64; what has no weight may be anything."""
    a, a_lse, b, b_lse = (np.asarray(x, np.float64) for x in (a, a_lse, b, b_lse))
    lse = np.logaddexp(a_lse, b_lse)
    with np.errstate(invalid="ignore"):
        shares = [np.where(np.isneginf(x), 0.0, np.exp(x - lse))[..., None] for x in (a_lse, b_lse)]
        parts = [np.where(share == 0, 0.0, x) * share for x, share in zip((a, b), shares, strict=True)]
    return parts[0] + parts[1], lse


def close(found: tuple[Any, Any], want: tuple[Any, Any], tolerance: float) -> None:
    """An output and its log-sum-exp are the model's."""
    out, lse = found
    np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    nothing = np.isneginf(want[1])
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(lse[~nothing], want[1][~nothing], rtol=1e-3, atol=1e-3)


def shared_problem(
    groups: Sequence[tuple[int, int]], behind: Sequence[int], new: Sequence[int], *, dtype: str = "f16", page: int = 4,
    heads: int = 2, size: int = 16, seed: int = 0, is_mla: bool = False,
) -> tuple[np.random.Generator, Problem]:  # fmt: skip
    """A batch of groups of (sequences, pages of their prefix) that have ``behind`` more cached tokens each.

    Pages are in random order; every slot and page that holds no token is NaN.
    """
    rng, storage = np.random.default_rng(seed), dtypes.of(dtype)
    prefixes = np.repeat([n for _, n in groups], [n for n, _ in groups])
    owners = np.repeat(np.arange(len(groups)), [n for n, _ in groups])
    cached, fresh = prefixes * page + np.asarray(behind), np.asarray(new)
    totals = cached + fresh
    own = cdiv_each(totals, page) - prefixes
    null = int(own.sum()) + sum(n for _, n in groups) + 3
    order = iter(rng.permutation(null).tolist())
    of_group = [[next(order) for _ in range(n)] for _, n in groups]
    table = np.full((len(totals), layout.lookup_columns(int(totals.max()), page)), null, np.uint32)
    halves = 1 if is_mla else 2
    blocks = np.full((null + 1, halves, LAYER + 1, page, heads, size), np.nan, storage.numpy)
    for b, total in enumerate(totals):
        ids = of_group[owners[b]] + [next(order) for _ in range(own[b])]
        table[b, : len(ids)] = ids
        for t in range(total):
            if b == 0 or owners[b] != owners[b - 1] or t >= prefixes[b] * page:
                blocks[ids[t // page], :, :, t % page] = random_values(rng, (halves, LAYER + 1, heads, size), storage)
    lengths, offsets = cached.astype(np.uint32), np.concatenate([[0], fresh.cumsum()]).astype(np.uint32)
    c = PagedKVCacheCollection(blocks, lengths, table, int(fresh.max(initial=0)), int(totals.max()))
    return rng, Problem(c, offsets, cached, fresh, null)


def cdiv_each(a: np.ndarray, b: int) -> np.ndarray:
    return np.array([cdiv(int(x), b) for x in a])


def groups_of(groups: Sequence[tuple[int, int]], page: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """``sequences`` and ``lengths`` of :class:`kv.SharedPrefixes`."""
    ends = np.concatenate([[0], np.cumsum([n for n, _ in groups])])
    return ends.astype(np.int32), np.array([n * page for _, n in groups], np.int32)


def permuted(problem: Problem, seed: int = 9) -> Problem:
    """The same batch with its pages elsewhere in the pool."""
    c, rng = problem.collection, np.random.default_rng(seed)
    to = np.append(rng.permutation(problem.null_page), problem.null_page)
    blocks = np.empty_like(c.blocks)
    blocks[to] = c.blocks
    table = to[c.lookup_table].astype(c.lookup_table.dtype)
    made = PagedKVCacheCollection(blocks, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    return Problem(made, problem.row_offsets, problem.cached, problem.new, problem.null_page)
