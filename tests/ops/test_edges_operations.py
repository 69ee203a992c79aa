# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every other operation over every count at an edge: of tokens of a page, of a warp's lanes, of what a block takes.

A row of the table is an operation. Its batch has sequences that start and end at all edges of a page; batches of one,
two and three tokens more end their rows in another place of a block. Every byte of a pool is compared, and every slot
of no token is poison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.test_indexer import scores_of
from reference import block_masks, chosen_pages, edges, model
from reference.cache_case import CacheCase
from reference.cache_operations import append, commit, gather, project, project_padded, rope_append
from reference.cache_rows import WRITERS
from reference.case import assert_same_bits, sentinel
from reference.edges import ALL
from reference.places import Interpreted, Place, assert_same
from reference.random_caches import Problem, clone, random_problem, random_query, random_values, stored_problem
from reference.shared_prefixes import combined

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.lowering.kernels.attention.block_mask import CHUNK as MASK_CHUNK
from kvarn.lowering.kernels.common import THREADS, WARP
from kvarn.lowering.kernels.copies import commit as drafts, convert, pages as copies
from kvarn.lowering.kernels.projection import expansion as projection
from kvarn.lowering.kernels.select import indexer, pages

pytestmark = pytest.mark.whole

PAGE, HEADS, SIZE = 8, 2, 16
FREQS = np.tile(np.array([0.6, 0.8], np.float32), (64, SIZE // 2))
GAMMA = np.linspace(0.5, 1.5, SIZE, dtype=np.float32)
KINDS: dict[str, dict[str, Any]] = {
    "paged": {"kind": "paged", "dtype": "f32", "page_size": PAGE},
    "scaled": {"kind": "paged", "dtype": "f8e4m3", "page_size": PAGE, "scale_dtype": "f32", "granularity": 8},
    "continuous": {"kind": "continuous", "dtype": "bf16"},
    "fa3": {"kind": "fa3", "dtype": "f16", "page_size": PAGE},
}  # fmt: skip


def shape_of(more: int = 0, kind: str = "paged") -> dict[str, Any]:
    """A batch whose sequences start and end at the edges of a page, and have so many tokens more in its last one."""
    at = edges.edges(PAGE, 2)
    pairs = list(dict.fromkeys(zip([*at, *at], [*at, *at[::-1]], strict=True)))
    cached, new = [c for c, _ in pairs], [n for _, n in pairs]
    new[-1] += more
    return {"cached": cached, "new": new, "num_heads": HEADS, "head_size": SIZE, **KINDS[kind]}


def steps(more: int = 0, seed: int = 0, kind: str = "paged") -> tuple[Any, Problem]:
    return stored_problem(seed, **shape_of(more, kind))


# --- what writes a pool --------------------------------------------------------------------------------------

THREADED = {"threads": WARP}


def given_to(operation: Any, shape: Any) -> dict[str, Any]:
    """Of a gather the first and last tokens of every page, more a row than a thread has under way; of a commit paths of
    every length up to some that are longer than what is under way together.
    """
    cached, new = np.array(shape["cached"]), np.array(shape["new"])
    if operation is gather:
        offsets = np.concatenate([[0], np.cumsum(new)])
        last = (cached + new)[model.token_sequences(offsets)][:, None] - 1
        ids = np.minimum(np.array([0, 1, PAGE - 1, PAGE, PAGE + 1])[: copies.TOGETHER + 1], last)
        return {"ids": np.concatenate([ids, last], 1), "offsets": offsets}
    if operation is commit:
        rng, lengths = np.random.default_rng(1), edges.edges(drafts.TOGETHER, 2)
        return {"paths": [sorted(rng.permutation(n)[: lengths[b % len(lengths)]].tolist()) for b, n in enumerate(new)]}
    return {}


def check_writer(place: Place, operation: Any, more: int, kind: str = "paged") -> None:
    shape = shape_of(more, kind)
    CacheCase(
        operation=operation, given=given_to(operation, shape), pool=shape,
        schedule=THREADED if operation is not commit else {}, stored=operation is gather or None,
    ).check(place)  # fmt: skip


@pytest.mark.parametrize("write", [append, rope_append, *WRITERS, gather, commit], ids=lambda write: write.__name__)
def test_tokens_are_written_up_to_every_edge_of_a_page_and_a_block(place, write):
    for more in (0, 1, 2) if place.name == "host" or ALL else (0, 1) if write in (append, gather) else (1,):
        check_writer(place, write, more)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "paged"])
def test_tokens_are_appended_to_every_kind_of_cache_at_every_edge(place, kind):
    for write in (append, gather, commit):
        check_writer(place, write, 1, kind)


def test_batches_of_every_number_of_sequences_are_counted(place):
    """Offsets, lengths and shifted tokens, of as many sequences as a block has threads, one less and one more."""
    rng = np.random.default_rng(2)
    for batch in [n for n in edges.edges(THREADS) if n]:
        new, cached = rng.integers(0, 3, batch), rng.integers(0, 9, batch).astype(np.uint32)
        offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
        out = place.put(sentinel(offsets))
        kv.ops.cache_row_offsets(place.put(offsets), place.put(cached), out)
        np.testing.assert_array_equal(place.get(out), model.cache_row_offsets(offsets, cached))
        lengths = place.put(cached.copy())
        kv.ops.increment_cache_lengths(lengths, place.put(offsets))
        np.testing.assert_array_equal(place.get(lengths), model.increment_cache_lengths(cached, offsets))


def test_ragged_rows_of_every_count_are_merged_and_shifted(place):
    rng, at = np.random.default_rng(3), edges.edges(WARP, 2)
    counts = np.array([at, at[::-1]])
    offsets = [np.concatenate([[0], np.cumsum(n)]).astype(np.uint32) for n in counts]
    data = [random_values(rng, (int(o[-1]), 5), dtypes.f32) for o in offsets]
    out = place.put(sentinel(np.concatenate(data)))
    given = [place.put(x) for pair in zip(data, offsets, strict=True) for x in pair]
    _, sums = kv.ops.merge_ragged(
        given[0], given[1], given[2], given[3], out, schedule=THREADED if place.name != "host" else None
    )
    parts = [x[o[b] : o[b + 1]] for b in range(len(at)) for x, o in zip(data, offsets, strict=True)]
    assert_same_bits(place.get(out), np.concatenate(parts))
    np.testing.assert_array_equal(place.get(sums), offsets[0] + offsets[1])
    tokens, bonus = rng.integers(0, 99, int(offsets[0][-1])).astype(np.int32), np.arange(len(at), dtype=np.int32) + 100
    shifted = kv.ops.shift_tokens(place.put(tokens), place.put(offsets[0]), place.put(bonus))
    want = [
        np.append(tokens[begin + 1 : end], bonus[b])
        for b, (begin, end) in enumerate(zip(offsets[0][:-1], offsets[0][1:], strict=True))
        if begin < end
    ]
    np.testing.assert_array_equal(place.get(shifted), np.concatenate(want))


def test_rows_below_every_end_are_added_and_merged(place):
    rng = np.random.default_rng(4)
    schedule = THREADED if place.name != "host" else None
    a, b = (random_values(rng, (2 * WARP + 1, 3), dtypes.f32) for _ in range(2))
    for end in edges.edges(WARP):
        found = place.put(sentinel(a))
        kv.ops.sliced_add(place.put(a), place.put(b), end, found, schedule=schedule)
        assert_same_bits(place.get(found), np.where(np.arange(len(a))[:, None] < end, a + b, a))
    for count in edges.edges(WARP)[1:]:
        x, y = (random_values(rng, (count, 1, 4), dtypes.f32) for _ in range(2))
        p, q = (random_values(rng, (count, 1), dtypes.f32) for _ in range(2))
        p[::2], x[::2] = -np.inf, np.nan
        out, lse = place.put(sentinel(x)), place.put(sentinel(p))
        kv.ops.merge_attention(place.put(x), place.put(p), place.put(y), place.put(q), out, lse, schedule=schedule)
        want = combined(x, p, y, q)
        np.testing.assert_allclose(place.get(out), want[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(place.get(lse), want[1], rtol=1e-5, atol=1e-5)


# --- pages ---------------------------------------------------------------------------------------------------


def test_every_number_of_pages_is_copied(place):
    for count in edges.edges(copies.UNROLL):
        rng, problem = steps(seed=count)
        c, n = problem.collection, problem.collection.num_blocks
        order = rng.permutation(n).astype(np.int32)
        source, target = order[:count].copy(), order[count : 2 * count].copy()
        source[2:3], target[3:4] = n, -1  # pairs with an id of no page are skipped
        found, expected = place.collection(c), clone(c)
        kv.ops.copy_pages(found, place.put(source), place.put(target))
        model.copy_pages(expected, source, target)
        assert_same(place, found, expected)
        _, other = steps(seed=count + 50)
        found, expected = place.collection(other.collection), clone(other.collection)
        kv.ops.transfer_pages(place.collection(c), found, place.put(source), place.put(target))
        model.transfer_pages(c, expected, source, target)
        assert_same(place, found, expected)


def test_every_length_is_converted_to_other_pages(place):
    """From pages of 8 tokens to pages of 5, lengths at the edges of both and of what a block takes."""
    rng, lengths = np.random.default_rng(5), sorted({*edges.edges(convert.TOKENS), *edges.edges(5), *edges.edges(8)})
    shape: dict[str, Any] = {"cached": lengths, "new": [0] * len(lengths), "num_heads": 1, "head_size": 8}
    source = random_problem(rng, "paged", "f32", page_size=8, **shape).collection
    target = random_problem(rng, "paged", "f16", page_size=5, **shape).collection
    found, expected = place.collection(target), clone(target)
    kv.ops.convert(place.collection(source).get_key_cache(1), found.get_value_cache(1))
    model.convert(source.get_key_cache(1), expected.get_value_cache(1))
    assert_same(place, found, expected)


def test_tokens_of_every_page_boundary_are_remapped(place):
    rng, problem = steps()
    c: Any = problem.collection
    at = np.array([-1, *edges.edges(PAGE, 2, 3), c.lookup_table.shape[1] * PAGE - 1, c.lookup_table.shape[1] * PAGE])
    logical = np.stack([rng.permutation(at) for _ in range(problem.tokens)]).astype(np.int32)
    out = place.put(sentinel(logical))
    kv.ops.remap_sparse_indices(
        place.put(logical), place.put(problem.row_offsets), place.put(c.lookup_table), PAGE, problem.null_page, out
    )
    want = model.remap_sparse_indices(logical, problem.row_offsets, c.lookup_table, PAGE, problem.null_page)
    np.testing.assert_array_equal(place.get(out), want)


def test_chunks_of_a_plan_end_at_every_edge(place):
    """Buffers of as many tokens as some sequences have together, one less and one more."""
    cached, new = edges.lengths(edges.edges(PAGE, 2), edges.edges(PAGE))
    offsets, lengths = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32), np.array(cached, np.uint32)
    total = sum(cached) + sum(new)
    for tokens in [*edges.edges(PAGE)[1:], total - 1, total, total + 1]:
        chunks = total // tokens + 2
        plan = kv.ops.mla_prefill_plan(place.put(offsets), place.put(lengths), tokens, chunks)
        want = model.mla_prefill_plan(offsets, lengths, tokens, chunks)
        found = plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(place.get(x), y)


def of_pages(page: int, size: int, *extents: int) -> tuple[Any, Problem]:
    """Sequences of pages at the edges of extents, each with a token less than whole pages, or as many, or one more."""
    counts = sorted({n for extent in extents for n in edges.edges(extent)})
    totals = [max(0, n * page + (-1, 0, 1)[i % 3]) for i, n in enumerate(counts)]
    new = [min(n, (1, 3, 4, 5)[i % 4]) for i, n in enumerate(totals)]
    cached = [n - m for n, m in zip(totals, new, strict=True)]
    return stored_problem(6, "paged", "bf16", page_size=page, cached=cached, new=new, num_heads=1, head_size=size)


@pytest.mark.parametrize("size", [16, 64], ids=["lanes", "tensor cores"])
def test_pages_of_every_number_are_summarized_and_chosen(place, size):
    rng, problem = of_pages(2, size, pages.LANES, pages.CHUNK)
    c = place.collection(problem.collection)
    data = np.full((c.num_blocks, 2, 1, 2, size), 77, dtypes.bf16.numpy)
    summaries = kv.PageSummaries(c, "min_max", place.put(data.copy()))
    kv.ops.summarize_pages(c, 1, summaries, place.put(problem.row_offsets))
    want = chosen_pages.summaries(problem.collection, 1, problem.row_offsets, data)
    np.testing.assert_array_equal(place.get(summaries.data)[:, 1].astype(np.float64), want)  # keys are of its type
    data = np.sort(rng.integers(-9, 10, data.shape), 3).astype(data.dtype)
    query = rng.integers(-4, 5, (problem.tokens, pages.ROWS, size)).astype(data.dtype)
    summaries = kv.PageSummaries(c, "min_max", place.put(data))
    scores = chosen_pages.page_scores(problem.collection, 1, query, problem.row_offsets, data)
    for count in (1, pages.CHUNK + 1):
        listed, counts = (place.put(np.full((len(scores), 1, *rest), -9, np.int32)) for rest in ((count,), ()))
        kv.ops.select_pages(
            c, 1, place.put(query), place.put(problem.row_offsets), summaries, pages=listed, page_counts=counts
        )
        for b, of in enumerate(scores):
            np.testing.assert_array_equal(place.get(listed)[b], chosen_pages.selected(of, count, 0, 1), err_msg=str(b))
            assert place.get(counts)[b].tolist() == [min(count, of.shape[1])]


# --- tokens that are chosen ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size", "heads"),
    [("bf16", 64, 4), ("bf16", 96, 5), ("f32", 20, 3)],
    ids=["tensor cores", "tiles", "threads"],
)
def test_tokens_of_every_number_are_scored(place, dtype, size, heads):
    """Keys at the edges of a warp's tokens, of a block's warps and of a block's tokens."""
    extents = (indexer.TOKENS, indexer.TOKENS * indexer.WARPS, indexer.CHUNK)
    totals = sorted({n for extent in extents for n in edges.edges(extent)[:5]})
    new = [min(n, 1 + i % 2) for i, n in enumerate(totals)]
    cached = [n - m for n, m in zip(totals, new, strict=True)]
    rng, problem = stored_problem(
        7, "paged", dtype, page_size=16, cached=cached, new=new, num_heads=1, head_size=size, is_mla=True
    )
    query = random_query(rng, problem, heads)
    weights, columns = rng.standard_normal((problem.tokens, heads)).astype(np.float32), max(totals) + 1
    out = place.put(sentinel(np.zeros((problem.tokens, columns), np.float32)))
    c = place.collection(problem.collection)
    kv.ops.index_scores(c, 1, place.put(query), place.put(weights), place.put(problem.row_offsets), out)
    want, found = scores_of(problem, query, weights, columns), place.get(out)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(want))
    seen = np.isfinite(want)
    biggest = np.abs(want[seen]).max()
    np.testing.assert_allclose(found[seen] / biggest, want[seen] / biggest, rtol=0, atol=2e-5)


def test_tokens_of_every_number_are_chosen(place):
    rng, count = np.random.default_rng(8), WARP
    for columns in (WARP - 1, WARP, WARP + 1, indexer.CHOOSING - 1, indexer.CHOOSING, indexer.CHOOSING + 1):
        seen = [n for n in edges.edges(WARP) if n <= columns] + [columns]
        scores = rng.integers(-20, 20, (len(seen), columns)).astype(np.float32)  # many are equal
        for row, n in zip(scores, seen, strict=True):
            row[n:] = -np.inf
        tokens, counts = (place.put(np.full(s, -9, np.int32)) for s in ((len(seen), count), (len(seen),)))
        kv.ops.select_tokens(place.put(scores), tokens=tokens, counts=counts)
        for row, n, found, of in zip(scores, seen, place.get(tokens), place.get(counts), strict=True):
            want = np.sort(np.lexsort((np.arange(columns), -row))[: min(count, n)])
            assert of == len(want), f"{n} of {columns}"
            assert found.tolist() == [*want, *[-1] * (count - len(want))], f"{n} of {columns}"


# --- block masks -------------------------------------------------------------------------------------------------


def test_tiles_of_every_number_are_listed(place):
    """Keys at the edges of a tile and of the tiles that a block asks, query rows at those of a tile."""
    keys, size, group = 16, 64, 4
    totals = {*edges.edges(keys), *(keys * MASK_CHUNK + d for d in (-1, 0, 1))}
    cached, new = edges.lengths(totals, edges.edges(size // group)[:5])
    rng, problem = stored_problem(9, "paged", "f16", cached=cached, new=new, num_heads=1, head_size=32, page_size=PAGE)
    query = random_query(rng, problem, group)
    for mask in edges.masks(keys):
        if not mask.spans:
            continue
        options, seen = mask.given(len(new))
        function, of = options["mask"]
        found = kv.ops.block_mask(
            place.collection(problem.collection), place.put(query), place.put(problem.row_offsets),
            (function, place.put(of)), rows=size, keys=keys,
        )  # fmt: skip
        want = block_masks.lists(problem, group, seen, size, keys, by_head=False)
        got = block_masks.entries(place.get(found.blocks))
        assert [[[e & ~block_masks.BY_POSITIONS for e in h] for h in t] for t in got] == want, mask.name


# --- projections -------------------------------------------------------------------------------------------------

# On a GPU or the host: a schedule, and its tokens of a tile.
PROJECTIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "host": ("host", {"kind": "host"}, projection.HOST_ROWS),
    "a warp of tokens": ("sm_90a", {"kind": "simt"}, projection.SIMT_ROWS),
    "tiles": ("sm_90a", {"kind": "tile", "rows": 64, "columns": 128, "max_tokens": 256}, 64),
    "tiles by mma.sync": ("sm_80", {"kind": "tile", "rows": 64, "max_tokens": 256}, 64),
    "stream-K": ("sm_90a", {"kind": "stream_k", "max_tokens": 32}, 32),
    "stream-K by mma.sync": ("sm_80", {"kind": "stream_k", "max_tokens": 32}, 8),
    "full K, mma.sync": ("sm_90a", {"kind": "full_k", "max_tokens": 16}, 16),
    "full K, wgmma": ("sm_90a", {"kind": "full_k", "max_tokens": 256, "rows": 64, "tile_columns": 48}, 64),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_rows_of_every_number_are_projected(name):
    """Of several sequences that start a token before a page ends; up to two rows behind the batch are of nobody."""
    target, schedule, tile = PROJECTIONS[name]
    most = schedule.get("max_tokens")
    counts = [n for n in edges.edges(tile) if most is None or n <= most]
    size = 16 if schedule["kind"] == "simt" else 64
    place: Place = Place() if target == "host" else Interpreted(target)
    for n in counts if ALL or tile < 64 else counts[2:]:
        pool = {"dtype": "bf16", "num_heads": 1, "head_size": size, "page_size": PAGE,
                "cached": [PAGE - 1, 0, 2 * PAGE - 1], "new": [n // 2, 0, n - n // 2]}  # fmt: skip
        given = {"heads": 1, "spare": min(2, (most or n + 2) - n)}
        CacheCase(operation=project, given=given, pool=pool, schedule=schedule, seed=n).check(place)


@pytest.mark.parametrize("name", ["host", "tiles"])
def test_rows_of_a_padded_batch_end_at_every_edge(name):
    """Sequences of no token to all of a tile's and one more; queries are of every row."""
    target, schedule, tile = PROJECTIONS[name]
    place: Place = Place() if target == "host" else Interpreted(target)
    valid = edges.edges(PAGE) if tile == 64 and not ALL else edges.edges(tile)[:5]
    pool = {"dtype": "bf16", "num_heads": 1, "head_size": 64, "page_size": PAGE, "new": valid,
            "cached": [*edges.edges(PAGE, 2, 3)][: len(valid)]}  # fmt: skip
    entries = {n: v for n, v in schedule.items() if n != "max_tokens"}
    CacheCase(operation=project_padded, given={"heads": 1}, pool=pool, schedule=entries).check(place)
