# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks over latent rows: on the host, and as a GPU's code in the interpreter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, block_masks
from reference.attention_functions import document, query_of, t5, t5_buckets
from reference.places import Place
from reference.random_caches import Problem, stored_problem
from reference.shared_prefixes import close

import kvarn as kv

problem_of = functools.partial(stored_problem, num_heads=1, is_mla=True)
SMALL = {"head_size": 24, "cached": [90, 0, 9], "new": [3, 7, 0]}
WIDE = {"head_size": 144, "cached": [200, 0, 70], "new": [2, 3, 1], "page_size": 16}


class Emulated(Place):
    """Where schedules are those of a GPU, and its code runs in the interpreter."""

    def __init__(self, target: str = "sm_90a") -> None:
        self.target = target

    def active(self) -> Any:
        return kv.emulated(self.target, multiprocessors=2)


def made(place: Any, problem: Problem, query: np.ndarray, mask: Any, **options: Any) -> kv.BlockMask:
    function, *arrays = mask if isinstance(mask, tuple) else (mask,)
    with place.active():
        return kv.ops.block_mask(
            place.collection(problem.collection), place.put(query), place.put(problem.row_offsets),
            (function, *map(place.put, arrays)), **options,
        )  # fmt: skip


def attended(place: Any, problem: Problem, query: np.ndarray, size: int, **options: Any) -> tuple[Any, Any]:
    out = place.put(np.full((*query.shape[:2], size), 72.0, query.dtype))
    with place.active():
        _, lse = kv.ops.mla_attention(
            place.collection(problem.collection), 1, place.put(query), place.put(problem.row_offsets), value_size=size,
            out=out, return_lse=True, **options,
        )  # fmt: skip
    return place.get(out), place.get(lse)


def model(problem: Problem, query: np.ndarray, size: int, ids: np.ndarray, score: Any = None) -> tuple[Any, Any]:
    return reference.attention(
        problem.collection, 1, query, problem.row_offsets, value_size=size, score=score,
        mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip


def poison_unlisted(problem: Problem, blocks: list[list[list[int]]], tiles: list[int], keys: int) -> None:
    """NaN in each sequence's rows that no tile of its queries lists; ``tiles``: of every sequence's first one."""
    cache = problem.collection.get_key_cache(1)
    for b, (first, end) in enumerate(zip(tiles, [*tiles[1:], len(blocks)], strict=True)):
        total = int(problem.cached[b] + problem.new[b])
        seen = {block_masks.number(entry) for of_tile in blocks[first:end] for entry in of_tile[0]}
        hidden = [t for t in range(total) if t // keys not in seen]
        if hidden and problem.new[b]:
            size = cache.spec.head_size
            nan = np.full((len(hidden), size), np.nan, cache.blocks.dtype)
            cache.store(b, 0, np.array(hidden)[:, None], np.arange(size), nan)


def test_rows_of_latents_are_visited_as_the_lists_say(place):
    rng, problem = problem_of(1, "paged", "f8e4m3", **SMALL)
    query, ids = query_of(rng, problem, 3), np.sort(rng.integers(0, 5, (3, 100)), axis=1).astype(np.int32)
    bias, buckets = rng.standard_normal((3, 8)).astype(np.float32), t5_buckets(20, 8, 20)
    want = model(problem, query, 16, ids, lambda x, b, h, q, k: x + bias[h, buckets[np.clip(q - k, 0, 19)]])
    block_mask = made(place, problem, query, (kv.masks.causal & document, ids))
    rows, keys = block_mask.rows, block_mask.keys
    lists = block_masks.entries(place.get(block_mask.blocks))
    assert lists == block_masks.lists(
        problem,
        3,
        lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
        rows,
        keys,
        False,
        block_masks.OUTER["causal documents"],
    )
    poison_unlisted(problem, lists, [int(problem.row_offsets[b]) * 3 // rows + b for b in range(3)], keys)
    score = (t5, place.put(bias), place.put(buckets))
    close(attended(place, problem, query, 16, block_mask=block_mask, score=score), want, 4e-3)


@pytest.mark.sampled(48)
@pytest.mark.parametrize(("dtype", "target"), [("f16", "sm_90a"), ("f8e4m3", "sm_90a"), ("f16", "sm_80")])
@pytest.mark.parametrize("schedule", [{"max_queries": 4}, {}, {"max_queries": 4, "splits": 2}, {"splits": 3}])
@pytest.mark.parametrize("shape", [{}, {"page_size": 5}, {"kind": "continuous"}])
def test_tensor_cores_over_latent_rows_walk_over_listed_tiles(dtype, target, schedule, shape):
    shape = {"kind": "paged", **WIDE, **shape}
    rng, problem = problem_of(2, shape.pop("kind"), dtype, **shape)
    query, place, schedule = query_of(rng, problem, 8), Emulated(target), {"kind": "latent", **schedule}
    ids = np.array([[0] * 140 + [1] * 50 + [0] * 20, [2] * 210, [3] * 64 + [4] * 146], np.int32)
    ids[0, 70] = 5  # so that a tile in which most is seen is asked about
    want = model(problem, query, 128, ids)
    block_mask = made(place, problem, query, (kv.masks.causal & document, ids), schedule=schedule)
    lists = block_masks.entries(place.get(block_mask.blocks))
    rows, keys = block_mask.rows, block_mask.keys
    assert keys in (32, 64)
    assert lists[0][0][0] == 1  # the first tile whole
    assert 2 * (70 // keys) in lists[0][0]
    poison_unlisted(problem, lists, [int(problem.row_offsets[b]) * 8 // rows + b for b in range(3)], keys)
    ids[:] = np.where(np.arange(210) < 64, 9, ids)  # of what the lists call whole nobody asks
    found = attended(place, problem, query, 128, block_mask=block_mask, schedule=schedule)
    close((found[0][:2], found[1][:2]), (want[0][:2], want[1][:2]), 2e-2)


def test_trees_of_drafts_and_masks_without_arrays_have_block_masks_over_latent_rows():
    place = Place()
    rng, problem = problem_of(3, "paged", "f16", **SMALL)
    query = query_of(rng, problem, 2)
    bits = np.array([0b1, 0b11, 0b101, *[(1 << i) | 1 for i in range(7)]], np.int32)[:, None]
    with place.active():
        c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
        of_tree = kv.ops.block_mask(c, q, offsets, tree=place.put(bits))
    window = made(place, problem, query, kv.masks.sliding_window(20))
    starts, first = problem.cached, problem.row_offsets

    def numpy_tree(b: int, h: Any, q: Any, k: Any) -> Any:
        own = k - starts[b]
        return (own < 0) | ((bits[first[b] + q - starts[b], 0] >> np.clip(own, 0, 31)) & 1 != 0)

    want = reference.attention(problem.collection, 1, query, first, value_size=16, mask=numpy_tree)
    close(attended(place, problem, query, 16, block_mask=of_tree), want, 4e-3)
    close(attended(place, problem, query, 16, block_mask=window), attended(place, problem, query, 16, window=20), 4e-3)


def test_what_does_not_fit_latent_rows_is_refused_by_name():
    rng, problem = problem_of(4, "paged", "f16", **SMALL)
    query, place = query_of(rng, problem, 2), Place()
    block_mask = made(place, problem, query, kv.masks.causal)
    for options, message in (
        ({"window": 4}, "mask, window, chunk, tree and pages must be left out with block_mask"),
        ({"indices": np.zeros((10, 4), np.int32)}, "block_mask must be None with indices"),
        ({"block_mask": 3}, "block_mask must be a kv.BlockMask, got a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attended(place, problem, query, 16, **{"block_mask": block_mask, **options})


def test_tiles_of_32_rows_fit_latent_rows():
    rng, wide = problem_of(5, "paged", "f16", **WIDE)
    query = query_of(rng, wide, 8)
    other = made(Emulated(), wide, query, kv.masks.causal, rows=32, keys=64)
    found, want = (
        attended(Emulated(), wide, query, 128, schedule={"kind": "latent"}, **given)
        for given in ({"block_mask": other}, {})
    )
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=2e-3)
