# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks: what they list, and attention by them; on the host, and as a GPU's code in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference, block_masks
from reference.attention_functions import document, problem_of, query_of, t5, t5_buckets
from reference.block_masks import CASES
from reference.case import assert_same_bits, sentinel
from reference.operands import dense_parts, ragged_parts
from reference.places import Place
from reference.random_caches import Problem

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, PagedKVCacheCollection

BATCH = {"cached": [90, 0, 30, 0], "new": [6, 40, 1, 0]}


def documents(rng: Any, batch: int = 4, length: int = 200, most: int = 3) -> np.ndarray:
    return np.sort(rng.integers(0, most, (batch, length)), axis=1).astype(np.int32)


TILE = {"rows": 64, "keys": 32}


def made(place: Place, problem: Problem, query: np.ndarray, mask: Any, **options: Any) -> Any:
    """The block mask, by default of tiles that every place has; what attention is given beside it; the mask."""
    options = {**TILE, **options}
    mask = tuple(
        place.put(x) if isinstance(x, np.ndarray) else x for x in (mask if isinstance(mask, tuple) else (mask,))
    )
    c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    return kv.ops.block_mask(c, q, offsets, mask, **options), (c, 1, q, offsets), mask


def attended(place: Place, given: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    query = given[2]
    out = place.put(sentinel(place.get(query)))
    _, lse = kv.ops.attention(*given, out=out, return_lse=True, **options)
    return place.get(out), place.get(lse)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("rows", "keys"), [(None, None), (64, 16)])
def test_a_tile_of_keys_is_listed_where_a_row_sees_any_of_it(place, case, group, rows, keys):
    rng, problem = problem_of(1, **BATCH)
    query, ids = query_of(rng, problem, group), documents(rng)
    mask, model = CASES[case]
    found, *_ = made(place, problem, query, (mask, ids), rows=rows, keys=keys)
    heads, outer = query.shape[1], block_masks.OUTER.get(case)
    want = block_masks.lists(problem, heads, model(ids), found.rows, found.keys, case == "by head", outer)
    blocks = place.get(found.blocks)
    assert blocks.shape[:2] == (len(want), len(want[0]))
    assert block_masks.entries(blocks) == want
    whole = any(e & 1 for of_tile in want for of_head in of_tile for e in of_head)
    told = [e >= block_masks.BY_POSITIONS for of_tile in want for of_head in of_tile for e in of_head]
    assert outer is None or (any(told) and not all(told)), "positions tell of all tiles, or of none"
    assert whole or keys is None or "documents" not in case or "window" in case, "no tile is seen whole"


@pytest.mark.parametrize(
    ("kind", "dtype", "case"),
    [
        ("paged", "f16", "by head"), ("paged", "f8e4m3", "causal documents"), ("fa3", "bf16", "not causal"),
        ("continuous", "f16", "window and documents"),
    ],
)  # fmt: skip
def test_attention_by_a_block_mask_is_that_by_its_mask_bit_for_bit(place, kind, dtype, case):
    rng, problem = problem_of(2, kind, dtype, **BATCH)
    query, ids = query_of(rng, problem, 2), documents(rng)
    bias, buckets = rng.standard_normal((4, 8)).astype(np.float32), t5_buckets(20, 8, 20)
    function, model = CASES[case]
    block_mask, given, mask = made(place, problem, query, (function, ids))
    score = (t5, place.put(bias), place.put(buckets))
    out, lse = attended(place, given, score=score, block_mask=block_mask)
    schedule = {} if place.name == "host" else {"kind": "tile", **TILE}
    want, want_lse = attended(place, given, score=score, mask=mask, schedule=schedule)
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)
    model_out, _ = reference.attention(
        problem.collection, 1, query, problem.row_offsets, mask=model(ids),
        score=lambda x, b, h, q, k: x + bias[h, buckets[np.clip(q - k, 0, 19)]],
    )  # fmt: skip
    tolerance = 2e-2 if dtype == "bf16" else 4e-3
    np.testing.assert_allclose(out.astype(np.float64), model_out, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_gpus_without_wgmma_take_block_masks(dtype):
    scales = {"scale_dtype": "f32", "granularity": 16} if dtype == "i8" else {}
    with kv.emulated("sm_80"):
        rng, problem = problem_of(2, dtype=dtype, **BATCH, **scales)
        query, ids = query_of(rng, problem, 2), documents(rng)
        block_mask, given, mask = made(Place(), problem, query, (kv.masks.causal & document, ids))
        out, _ = attended(Place(), given, block_mask=block_mask, scale=0.01)
        want, _ = attended(Place(), given, mask=mask, scale=0.01, schedule={"kind": "tile", **TILE})
    assert_same_bits(out, want)


def test_tiles_that_no_row_sees_are_not_visited(place):
    """Values that are NaN reach every row of a tile that visits them, on a GPU."""
    rng, problem = problem_of(3, cached=[0], new=[100], num_heads=1)
    query, ids = query_of(rng, problem, 2), (np.arange(100, dtype=np.int32)[None] >= 32).astype(np.int32)
    block_mask, given, _ = made(place, problem, query, (document, ids))
    _, values = problem.caches(1)
    poison = np.full((32, 1, 32), np.nan, np.float16)
    values.store(0, np.zeros((1, 1), int), np.arange(32)[:, None, None], np.arange(32), poison)
    c = place.collection(problem.collection)
    out, _ = attended(place, (c, *given[1:]), block_mask=block_mask)
    assert np.isnan(out[:32].astype(np.float32)).all()
    assert np.isfinite(out[32:].astype(np.float32)).all(), (
        "a tile of 64 rows is 32 tokens: they see the second document"
    )


def test_the_mask_is_not_asked_about_tiles_that_are_seen_whole():
    with kv.emulated("sm_90a"):
        rng, problem = problem_of(4, cached=[96], new=[2], num_heads=1)
        query, ids = query_of(rng, problem, 2), np.zeros((1, 100), np.int32)
        block_mask, given, mask = made(Place(), problem, query, (document, ids))
        want, _ = attended(Place(), given, mask="null", schedule={"kind": "tile", **TILE})
        ids[:, :96] = 1  # what the lists do not know
        np.testing.assert_array_equal(attended(Place(), given, block_mask=block_mask)[0], want)
        assert np.abs(attended(Place(), given, mask=mask, schedule={"kind": "simt"})[0] - want).max() > 0.1


def test_a_block_mask_does_not_depend_on_where_pages_lie(place):
    rng, problem = problem_of(5, **BATCH, num_heads=1)
    query, ids, c = query_of(rng, problem, 2), documents(rng), problem.collection
    mask = (kv.masks.causal & document, ids)
    order = rng.permutation(len(c.blocks))
    table = np.argsort(order)[c.lookup_table].astype(np.uint32)
    other = PagedKVCacheCollection(c.blocks[order], c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    moved = Problem(other, problem.row_offsets, problem.cached, problem.new, problem.null_page)
    found = []
    for p in (problem, moved):
        block_mask, given, _ = made(place, p, query, mask)
        found.append((block_masks.entries(place.get(block_mask.blocks)), attended(place, given, block_mask=block_mask)))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_same_bits(a, b)


def test_keys_are_split_by_the_tiles_that_are_listed(place):
    """Each of several splits has 1024 listed keys or more, wherever they lie."""
    rng, problem = problem_of(6, cached=[4200], new=[1], num_heads=1)
    query, ids = query_of(rng, problem, 1), (np.arange(4300, dtype=np.int32)[None] // 256 % 2).astype(np.int32)
    schedule = {} if place.name == "host" else {"splits": 2, "max_queries": 1}
    block_mask, given, _ = made(place, problem, query, (document, ids), schedule=schedule)
    out, _ = attended(place, given, block_mask=block_mask, schedule=schedule)
    want, _ = reference.attention(
        problem.collection, 1, query, problem.row_offsets, mask=lambda b, h, q, k: ids[b, q] == ids[b, k]
    )
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def test_a_padded_batch_and_rows_that_see_nothing(place):
    rng, problem = problem_of(7, cached=[30, 0, 9], new=[5, 0, 20], num_heads=1)
    query, ids = query_of(rng, problem, 2), documents(rng, 3, 60, 2)
    mask = (kv.masks.causal & document & (lambda b, h, q, k: q % 3 != 1), ids)
    block_mask, given, mask = made(place, problem, query, mask)
    want, lse = attended(place, given, block_mask=block_mask)
    blind = np.concatenate([30 + np.arange(5), 9 + np.arange(20)]) % 3 == 1
    assert not want[blind].astype(np.float32).any()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(blind[:, None], lse.shape))
    c = given[0]
    padded, lengths = reference.padded(query, problem.row_offsets, 21, 0.0), place.put(problem.new.astype(np.int32))
    block_mask = kv.ops.block_mask(c, place.put(padded), valid_lengths=lengths, mask=mask, **TILE)
    out = kv.ops.attention_padded(c, 1, place.put(padded), lengths, block_mask=block_mask)
    out = place.get(out)
    assert_same_bits(np.concatenate([out[0, :5], out[2, :20]]), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["caches", "dense", "ragged"])
def test_operands_of_keys_have_block_masks(place, form):
    rng, problem = problem_of(12, cached=[90, 0, 30], new=[6, 40, 1], num_heads=1)
    query, ids = place.put(query_of(rng, problem, 2)), place.put(documents(rng, 3))
    mask, offsets = (kv.masks.causal & document, ids), place.put(problem.row_offsets)
    if form == "caches":
        caches = place.collection(problem.collection)
        keys, values = (KVCacheMHAOperand(x) for x in (caches.get_key_cache(1), caches.get_value_cache(1)))
    else:
        parts = (dense_parts if form == "dense" else ragged_parts)(problem, 1)
        keys, values = (make(*(x if x is None else place.put(x) for x in given)) for make, given in parts)
    block_mask = kv.ops.block_mask(keys, query, offsets, mask, **TILE)
    want_lists, _, _ = made(place, problem, place.get(query), (kv.masks.causal & document, place.get(ids)))
    assert block_masks.entries(place.get(block_mask.blocks)) == block_masks.entries(place.get(want_lists.blocks))
    schedule = {} if place.name == "host" else {"kind": "tile", **TILE}
    out, lse = attended(place, (keys, values, query, offsets), block_mask=block_mask)
    want, want_lse = attended(place, (keys, values, query, offsets), mask=mask, schedule=schedule)
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)


def test_sources_of_a_list_have_block_masks_of_their_own(place):
    """One source by a block mask, one by another, one by a mask."""
    rng, problem = problem_of(13, cached=[30, 0], new=[6, 40], num_heads=1)
    other = problem_of(14, cached=[70, 9], new=[6, 40], num_heads=1)[1]
    query, ids = query_of(rng, problem, 2), documents(rng, 2)
    first, given, mask = made(place, problem, query, (kv.masks.causal & document, ids))
    second, (memory, *_), _ = made(place, other, query, (kv.masks.sliding_window(40),))
    sources = ([given[0], memory, given[0]], [1, 1, 0], *given[2:])
    out, lse = attended(place, sources, block_mask=[first, second, None], mask=["causal", "causal", "null"])
    want, want_lse = attended(place, sources, mask=[mask, kv.masks.sliding_window(40), "null"])
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=2e-3)


def test_trees_of_drafts_have_block_masks(place):
    """Cached keys, of which a document hides some, and a step's own tokens, of which each sees its ancestors."""
    rng, problem = problem_of(15, cached=[100, 0], new=[40, 6], num_heads=1)
    query, ids = query_of(rng, problem, 2), (np.arange(200, dtype=np.int32)[None].repeat(2, 0) >= 64).astype(np.int32)
    parents = [rng.integers(0, i) if i else -1 for i in range(46)]
    seen = np.eye(64, dtype=bool)[:46]
    for of_sequence in (range(1, 40), range(41, 46)):
        for i in of_sequence:
            seen[i, : i % 40] = seen[i // 40 * 40 + parents[i % 40] % (i % 40), : i % 40]
            seen[i, i // 40 * 0 + i % 40] = True
    seen[40:, 40:] = False
    bits = place.put(np.packbits(seen, axis=1, bitorder="little").view(np.int32))
    c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    mask = (document, place.put(ids))
    block_mask = kv.ops.block_mask(c, q, offsets, mask, tree=bits, **TILE)
    out, _ = attended(place, (c, 1, q, offsets), block_mask=block_mask)
    schedule = {} if place.name == "host" else {"kind": "tile", **TILE}
    want, _ = attended(place, (c, 1, q, offsets), mask=mask, tree=bits, schedule=schedule)
    assert_same_bits(out, want)
    lists = block_masks.entries(place.get(block_mask.blocks))
    assert lists[0][0][0] == 2 * 2 + 1, "the first document's tiles are not listed, the second's cached ones whole"
    alone = kv.ops.block_mask(c, q, offsets, tree=bits, **TILE)
    out, _ = attended(place, (c, 1, q, offsets), block_mask=alone)
    assert_same_bits(out, attended(place, (c, 1, q, offsets), tree=bits, schedule=schedule)[0])


@pytest.mark.parametrize("counted", [True, False])
def test_of_lists_of_pages_tiles_are_listed_as_pages_are(place, counted):
    """In their order, one that is listed twice twice, and none of what names no page."""
    rng, problem = problem_of(16, cached=[90, 0], new=[6, 40], page_size=32)
    query, ids = query_of(rng, problem, 2), documents(rng, 2, 140, 2)
    lists = np.array(
        [[[2, 0, -1, 1, 1, 7], [1, 2, 0, 0, 2, 2]], [[0, 1, -5, 1, 0, 0], [1, 0, 2, 2**30, 0, 1]]], np.int32
    )
    counts = place.put(np.array([[5, 3], [2, 9]], np.int32)) if counted else None
    pages, tile = place.put(lists), {"rows": 64, "keys": 16}
    block_mask, given, mask = made(
        place, problem, query, (kv.masks.causal & document, ids), pages=pages, page_counts=counts, **tile
    )  # fmt: skip
    out, lse = attended(place, given, block_mask=block_mask)
    schedule = {} if place.name == "host" else {"kind": "tile", **tile}
    want, want_lse = attended(place, given, mask=mask, pages=pages, page_counts=counts, schedule=schedule)
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=2e-3)
    found = block_masks.entries(place.get(block_mask.blocks))[0][0]
    pages = [block_masks.number(entry) // 2 for entry in found]
    assert pages == sorted(pages, key=[2, 0, 1].index)


def test_tiles_of_listed_pages_divide_them():
    with kv.emulated("sm_90a"):
        rng, problem = problem_of(17, cached=[90], new=[1], page_size=48, num_heads=1)
        query, pages = query_of(rng, problem, 2), np.array([[[1, 0]]], np.int32)
        given = (problem.collection, 1, query, problem.row_offsets)
        block_mask = kv.ops.block_mask(problem.collection, *given[2:], pages=pages)
        out, _ = attended(Place(), given, block_mask=block_mask)
        want, _ = attended(Place(), given, pages=pages, schedule={"kind": "tile"})
    assert block_mask.keys == 48
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=4e-3, atol=4e-3)


def test_a_block_mask_is_made_anew_in_the_same_memory(place):
    rng, problem = problem_of(8, **BATCH, num_heads=1)
    query = query_of(rng, problem, 1)
    first, given, mask = made(place, problem, query, (kv.masks.causal & document, documents(rng)))
    given[0].cache_lengths[0] = 40
    again = kv.ops.block_mask(*given[:1], *given[2:], mask, blocks=first.blocks, **TILE)
    fresh = kv.ops.block_mask(*given[:1], *given[2:], mask, **TILE)
    assert again.blocks is first.blocks
    assert block_masks.entries(place.get(again.blocks)) == block_masks.entries(place.get(fresh.blocks))


def test_the_lists_of_another_step_touch_nothing_that_there_is_not(place):
    rng, problem = problem_of(9, cached=[20, 3], new=[4, 1])
    query = query_of(rng, problem, 1)
    block_mask, given, _ = made(place, problem, query, kv.masks.causal)
    blocks = place.get(block_mask.blocks).copy()
    blocks[:] = rng.choice(np.array([0, 1, 7, 2**30, -1, -(2**31), 2**31 - 1]), blocks.shape)
    block_mask.blocks = place.put(blocks)
    out, _ = attended(place, given, block_mask=block_mask)
    assert np.isfinite(out.astype(np.float32)).all()


# --- what is refused -------------------------------------------------------------------------------


def refusal(call: Any, **options: Any) -> str:
    # The table's 24 columns of 16 tokens have room for 12 tiles of 32 keys; their count stands before them.
    rng, problem = problem_of(10, cached=[20, 3], new=[4, 1], num_heads=1)
    query = query_of(rng, problem, 2)
    block_mask, given, _ = made(Place(), problem, query, kv.masks.causal)
    with pytest.raises((TypeError, ValueError)) as caught:
        call(block_mask, given, **options)
    return str(caught.value)


def of_mask(block_mask: Any, given: Any, mask: Any = kv.masks.causal, **options: Any) -> None:
    kv.ops.block_mask(given[0], given[2], given[3], mask, **options)


def of_attention(found: Any, given: Any, **options: Any) -> None:
    kv.ops.attention(*given, **{"block_mask": found, **options})


def of_shorter(block_mask: Any, given: Any) -> None:
    block_mask.blocks = block_mask.blocks[:-1]
    kv.ops.attention(*given, block_mask=block_mask)


def of_dense(block_mask: Any, given: Any) -> None:
    keys = kv.LayoutTensorMHAOperand(np.zeros((2, 24, 1, 32), np.float16))
    kv.ops.block_mask(keys, *given[2:], kv.masks.causal, kv_offsets=np.zeros(3, np.uint32))


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (of_mask, {"mask": "causal"}, "mask must be a function, such as kv.masks.causal, got 'causal'"),
        (of_mask, {"mask": None}, "mask must be a function, such as kv.masks.causal, got None"),
        (of_mask, {"mask": document}, "mask takes 1 arrays, got 0"),
        (of_mask, {"rows": 1}, r"rows must be in [2, 2147483647], got 1"),
        (of_mask, {"valid_lengths": np.zeros(2, np.int32)}, "row_offsets or valid_lengths must be given, and not both"),
        (of_mask, {"blocks": np.zeros((2, 1, 9), np.int32)}, "blocks must have shape [2, 1, 13], got [2, 1, 9]"),
        (of_attention, {"block_mask": 3}, "block_mask must be a kv.BlockMask, got a int"),
        (of_attention, {"mask": kv.masks.causal}, "mask, window, chunk, tree and pages must be left out"),
        (of_attention, {"window": 3}, "mask, window, chunk, tree and pages must be left out"),
        (of_shorter, {}, "block_mask must have shape [2, 1, 13], got [1, 1, 13]"),
        (of_dense, {}, "kv_offsets must be None for dense operands"),
        (of_mask, {"pages": np.zeros((2, 1, 1), np.int32), "keys": 12}, "keys must divide the 16 tokens of"),
        (of_mask, {"page_counts": np.zeros((2, 1), np.int32)}, "page_counts must be None without pages"),
        (of_mask, {"tree": np.zeros((5, 1), np.int32), "kv_offsets": np.zeros(3, np.uint32)}, "tree must be None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, options, message):
    assert message in refusal(call, **options)


def test_tiles_that_attention_does_not_have_are_refused():
    with kv.emulated("sm_90a"):
        rng, problem = problem_of(11, cached=[20], new=[4], num_heads=1)
        query = query_of(rng, problem, 2)
        for extents, message in (
            ({"rows": 32, "keys": 64}, "rows of fewer than 64 need values of a multiple of 64 columns, got 32"),
            ({"rows": 64, "keys": 24}, "the block mask's keys must be a multiple of 16 from 16 to"),
        ):
            block_mask, given, _ = made(Place(), problem, query, kv.masks.causal, **extents)
            with pytest.raises(ValueError, match=message):
                kv.ops.attention(*given, block_mask=block_mask)
        block_mask, given, _ = made(Place(), problem, query, kv.masks.causal, rows=64, keys=32)
        with pytest.raises(ValueError, match="rows must be the block mask's 64, got 128"):
            kv.ops.attention(*given, block_mask=block_mask, schedule={"rows": 128})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "schedule"), [(12, None), (32, {"kind": "simt"}), (32, {"kind": "simt", "max_queries": 8})]
)
def test_what_neither_tiles_nor_decodes_take_is_visited_a_row_at_a_time(size, schedule):
    with kv.emulated("sm_90a", multiprocessors=2):
        rng, problem = problem_of(21, cached=[60, 3], new=[4, 9], head_size=size, num_heads=2)
        query, ids = query_of(rng, problem, 2), documents(rng, 2, 80)
        given = (problem.collection, 1, query, problem.row_offsets)
        mask = (kv.masks.causal & document, ids)
        block_mask = kv.ops.block_mask(given[0], *given[2:], mask, schedule=schedule)
        assert (block_mask.rows, block_mask.keys) == (16, 32)
        out, _ = attended(Place(), given, block_mask=block_mask, schedule=schedule)
    want, _ = reference.attention(
        problem.collection, 1, query, problem.row_offsets,
        mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)
