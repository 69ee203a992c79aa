# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over lists of pages: on the host, and every kind of kernel of a GPU in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import chosen_pages as reference
from reference.attention_cases import assert_close, assert_same_bits, sentinel
from reference.kinds import MMA
from reference.places import Place
from reference.random_caches import Problem, clone, random_query, stored_problem

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection

BATCH = {"cached": [40, 0, 5], "new": [1, 1, 0]}
SHAPES = {
    "bf16, one tile a page": ("bf16", {"head_size": 64, "page_size": 16}, 4),
    "bf16, several tiles a page": ("bf16", {"head_size": 64, "page_size": 64}, 8),
    "f16, several pages a tile": ("f16", {"head_size": 64, "page_size": 4}, 2),
    "bf16, pages that straddle tiles": ("bf16", {"head_size": 128, "page_size": 12}, 6),
    "f8e4m3 with scales": ("f8e4m3", {"head_size": 128, "page_size": 16, "scale_dtype": "f32"}, 4),
    "i8 with granules, small pages": (
        "i8", {"head_size": 64, "page_size": 8, "scale_dtype": "f16", "granularity": 32}, 2
    ),
    "f32": ("f32", {"head_size": 32, "page_size": 16}, 6),
    "fa3": ("bf16", {"head_size": 64, "page_size": 16}, 4),
}  # fmt: skip


def run(
    place: Place, problem: Problem, query: np.ndarray, lists: np.ndarray, counts: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp."""
    out, lse = place.put(sentinel(query)), place.put(np.zeros(query.shape[:2], np.float32))
    given = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    kv.ops.attention(
        place.collection(problem.collection), 1, place.put(query), place.put(problem.row_offsets), out=out, lse=lse,
        pages=place.put(lists), page_counts=None if counts is None else place.put(counts), **given,
    )  # fmt: skip
    return place.get(out), place.get(lse)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SHAPES)
def test_a_head_sees_the_pages_that_it_lists(place, name):
    dtype, shape, heads = SHAPES[name]
    rng, problem = stored_problem(1, "fa3" if name == "fa3" else "paged", dtype, **shape, **BATCH)
    query = random_query(rng, problem, heads)
    lists, counts = reference.random_lists(rng, problem, 0.5)
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, lists, counts)
    out, lse = run(place, problem, query, lists, counts)
    assert_close(out, want)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-2, atol=1e-2)
    again, _ = run(place, problem, query, reference.uncounted(lists, counts))
    assert_close(again, want)


OPTIONS: dict[str, Any] = {
    "null": {"mask": "null"}, "window": {"window": 40}, "chunk": {"chunk": 32}, "softcap": {"softcap": 3.0},
    "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
    "slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
}  # fmt: skip
MASKS = {"window": "sliding_window", "chunk": "chunked_causal", "mask": "null"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("page_size", [16, 4])
def test_masks_and_scores_go_by_positions_not_by_places_in_a_list(place, name, page_size):
    lengths = {"cached": [3, 60], "new": [0, 3]}
    rng, problem = stored_problem(2, "paged", "bf16", head_size=64, page_size=page_size, **lengths)
    query = random_query(rng, problem, 4)
    lists, counts = reference.random_lists(rng, problem, 0.7)
    options = OPTIONS[name]
    mask = next((MASKS[n] for n in options if n in MASKS), "causal")
    want, _ = reference.attention(
        problem.collection, 1, query, problem.row_offsets, lists, counts, **{**options, "mask": mask}
    )
    assert_close(run(place, problem, query, lists, counts, **options)[0], want)


@pytest.mark.parametrize(
    "schedule", [{"kind": "simt"}, {"kind": "tile"}, MMA, {"batch_invariant": True}, {"stages": 3}], ids=str
)
def test_every_kind_and_schedule_gives_the_same(schedule):
    from reference.places import Interpreted

    place = Interpreted("sm_90a")
    rng, problem = stored_problem(3, "paged", "bf16", head_size=64, cached=[90, 20], new=[1, 1])
    query = random_query(rng, problem, 8)
    lists, counts = reference.random_lists(rng, problem, 0.6)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, lists, counts)
    with place.active():
        assert_close(run(place, problem, query, lists, counts, schedule=schedule)[0], want)


def beside_every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (k % 3 != 1)


def falling(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + kv.f32(k - q) * 0.1


def test_functions_get_the_positions_of_listed_tokens(place):
    """A mask and a score of prompts and decodes: where all pages are listed, they are those of the whole cache."""
    rng, problem = stored_problem(10, "paged", "bf16", head_size=64, page_size=32, cached=[70, 0], new=[2, 40])
    query = random_query(rng, problem, 4)
    lists = np.array([[[2, -1, 0, 1], [1, 2, 0, 9]], [[1, 0, -1, -1], [0, 1, 7, -1]]], np.int32)
    functions = {"score": falling, "mask": beside_every_third}
    c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    want = place.get(kv.ops.attention(c, 1, q, offsets, out=place.put(sentinel(query)), **functions))
    assert_close(run(place, problem, query, lists, **functions)[0], want.astype(np.float64))


def test_all_pages_in_order_are_attention_over_the_whole_cache_bit_for_bit(place):
    rng, problem = stored_problem(4, "paged", "bf16", head_size=64, cached=[70, 4], new=[1, 1])
    query = random_query(rng, problem, 4)
    lists = np.broadcast_to(np.arange(5, dtype=np.int32), (2, 2, 5)).copy()
    schedule = {"kind": "simt"} if place.name == "host" else {"split": 512}
    if place.name == "host":  # the host's kernel of whole caches is another one
        want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, lists)
        assert_close(run(place, problem, query, lists)[0], want)
        return
    c = place.collection(problem.collection)
    whole = kv.ops.attention(c, 1, place.put(query), place.put(problem.row_offsets), schedule=schedule)
    assert_same_bits(run(place, problem, query, lists, schedule=schedule)[0], place.get(whole))


def test_what_no_list_names_may_be_anything(place):
    rng, problem = stored_problem(5, "paged", "bf16", head_size=64, cached=[90, 50], new=[1, 1])
    query = random_query(rng, problem, 4)
    lists = np.array([[[4, 0, -1], [5, -1, 2]], [[-1, -1, -1], [3, 0, -1]]], np.int32)
    clean = run(place, problem, query, lists)
    c = clone(problem.collection)
    blocks, table = np.asarray(c.blocks), np.asarray(c.lookup_table)
    for b in range(2):
        for h in range(2):
            for page in set(range(6 if b == 0 else 4)) - set(lists[b, h].tolist()):
                blocks[table[b, page], :, :, :, h] = np.nan
    poisoned = Problem(c, problem.row_offsets, problem.cached, problem.new, problem.null_page)
    for got, want in zip(run(place, poisoned, query, lists), clean, strict=True):
        assert_same_bits(got, want)
    assert not np.isnan(clean[0].astype(np.float32)).any()
    assert not clean[0][1, :2].any(), "a head that lists nothing gives zeros"
    assert np.isneginf(clean[1][1, :2]).all()


def test_where_pages_lie_changes_no_bit(place):
    rng, problem = stored_problem(6, "paged", "f16", head_size=64, cached=[50, 20], new=[1, 1])
    query, c = random_query(rng, problem, 4), problem.collection
    lists, counts = reference.random_lists(rng, problem, 0.5)
    order = rng.permutation(c.num_blocks)
    moved = np.empty_like(c.blocks)
    moved[order] = c.blocks
    table = order[np.asarray(c.lookup_table)].astype(np.uint32)
    other = PagedKVCacheCollection(moved, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    there = Problem(other, problem.row_offsets, problem.cached, problem.new, problem.null_page)
    for a, b in zip(run(place, problem, query, lists, counts), run(place, there, query, lists, counts), strict=True):
        assert_same_bits(a, b)


def test_a_padded_batch_and_empty_lists(place):
    rng, problem = stored_problem(7, "paged", "bf16", head_size=64, cached=[30, 8, 40], new=[1, 0, 1])
    query = random_query(rng, problem, 4)
    lists, counts = reference.random_lists(rng, problem, 0.6)
    want, _ = run(place, problem, query, lists, counts)
    padded = np.full((3, 2, 4, 64), np.nan, query.dtype)
    padded[0, 0], padded[2, 0] = query
    out = place.put(sentinel(padded))
    kv.ops.attention_padded(
        place.collection(problem.collection), 1, place.put(padded), place.put(problem.new.astype(np.int32)), out=out,
        pages=place.put(lists), page_counts=place.put(counts),
    )  # fmt: skip
    assert_close(place.get(out)[[0, 2], 0], want.astype(np.float64))
    nothing, lse = run(place, problem, query, lists, np.zeros_like(counts))
    assert not nothing.astype(np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": np.zeros((2, 2, 3), np.int32)}, r"pages must have shape \[3, 2, K\], got \[2, 2, 3\]"),
        ({"pages": np.zeros((3, 2, 3), np.float32)}, "pages must be int32 or uint32, got f32"),
        ({"pages": np.zeros((3, 2, 0), np.int32)}, "pages must have at least one entry a list"),
        ({"page_counts": np.zeros((3, 2), np.int32)}, "page_counts must be None without pages"),
        ({"pages": np.zeros((3, 2, 3), np.int32), "page_counts": np.zeros(3, np.int32)}, "counts must have shape"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(change, message):
    rng, problem = stored_problem(8, "paged", "bf16", head_size=64, **BATCH)
    with pytest.raises((ValueError, TypeError), match=message):
        kv.ops.attention(problem.collection, 1, random_query(rng, problem, 4), problem.row_offsets, **change)


def test_a_collection_without_pages_takes_no_lists():
    rng, problem = stored_problem(9, "continuous", "bf16", head_size=64, **BATCH)
    with pytest.raises(ValueError, match="pages needs a collection with pages, got a continuous one"):
        kv.ops.attention(
            problem.collection, 1, random_query(rng, problem, 4), problem.row_offsets,
            pages=np.zeros((3, 2, 3), np.int32),
        )  # fmt: skip
