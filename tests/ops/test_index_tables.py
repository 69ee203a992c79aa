# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations on index tables and on rows of ragged batches, against NumPy: on the host and in GPU code.

Counts at the edges of warps and blocks are in test_edges_operations.py.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import bits
from reference.random_caches import fill_cached, random_problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes

pytestmark = pytest.mark.whole


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(a), bits(b))


# --- index tables ------------------------------------------------------------------------------------

NONE = 99  # fills a table: no page of a pool
TABLES = np.array([[10, 5, NONE, NONE], [3, 20, NONE, NONE]], np.uint32)
REMAP, OFFSETS, PLAN = kv.ops.remap_sparse_indices, kv.ops.cache_row_offsets, kv.ops.mla_prefill_plan


def numbers(*x: Any, dtype: Any = np.uint32) -> np.ndarray:
    return np.array(x, dtype)


def tokens(*x: Any) -> np.ndarray:
    return np.array(x, np.int32)


# What is called, with what, and what it gives.
BOOK: dict[str, tuple[Any, tuple[Any, ...], list[Any]]] = {
    "tokens of two sequences": (
        REMAP, (tokens([0, 129, -1, 256], [200, 512, 2, -5]), tokens(0, 1, 2), TABLES, 128, NONE),
        [[1280, 641, -1, -1], [2632, -1, 386, -5]]),
    "tokens past the pages of a sequence": (
        REMAP, (tokens([0, 129, -1, 256], [200, 0, -1, 600]), numbers(0, 1, 2), TABLES, 128, 21),
        [[1280, 641, -1, -1], [2632, 384, -1, -1]]),
    "rows of a sequence past the table, and of none": (
        REMAP, (tokens([0, 17, 31, -1], [5, 6, -9, 7], [1, 2, 3, 4]), numbers(0, 1, 2), numbers([4, 7, 9]), 16, 9),
        [[64, 113, 127, -1], [-1, -1, -9, -1], [-1, -1, -1, -1]]),
    "tokens of the null page, of none, and past the table": (
        REMAP, (tokens([15, 16, 32, 48, 2**31 - 1]), tokens(0, 1), numbers([4, 9, 0xFFFFFFFF]), 16, 9),
        [[79, -1, -1, -1, -1]]),
    "no rows": (REMAP, (np.zeros((0, 4), np.int32), tokens(0, 0), np.zeros((1, 24), np.int32), 16, 5), []),
    "rows without tokens": (
        REMAP, (np.zeros((3, 0), np.int32), tokens(0, 3), np.zeros((1, 24), np.int32), 16, 5), [[], [], []]),
    "running sums of a slice begin at 0": (OFFSETS, (numbers(4, 6, 6, 9), numbers(7, 0, 3)), [0, 9, 9, 15]),
    "running sums of no sequence": (OFFSETS, (numbers(0), numbers()), [0]),
    "tokens behind the bonus of a sequence without any": (
        kv.ops.shift_tokens, (tokens(7, 8, 9, 5), numbers(0, 3, 3, 4), tokens(1, 2, 3)), [8, 9, 1, 3]),
    "no tokens": (kv.ops.shift_tokens, (tokens(), numbers(0, 0, 0), tokens(1, 2)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", BOOK)
def test_index_tables_by_the_book(place, name):
    operation, operands, want = BOOK[name]
    found = operation(*(place.put(x) if isinstance(x, np.ndarray) else x for x in operands))
    assert place.get(found).tolist() == want


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_lengths_grow_by_the_new_tokens(place, dtype):
    for offsets, lengths, want in (([4, 6, 6, 9], [7, 0, 3], [9, 0, 6]), ([0], [], [])):
        found = place.put(np.array(lengths, dtype))
        kv.ops.increment_cache_lengths(found, place.put(np.array(offsets, dtype)))
        assert place.get(found).tolist() == want


def test_a_plan_of_chunks_by_the_book(place):
    plan = PLAN(place.put(numbers(0, 2, 5, 6)), place.put(numbers(5, 0, 7)), 8, 4)
    assert place.get(plan.buffer_row_offsets).tolist() == [[0, 7, 8, 8], [0, 0, 2, 8], [0, 0, 0, 2], [0, 0, 0, 0]]
    assert place.get(plan.cache_offsets).tolist() == [[0, 0, 0], [7, 1, 0], [7, 3, 6], [7, 3, 8]]
    assert place.get(plan.buffer_lengths).tolist() == [8, 8, 2, -1]


@pytest.mark.parametrize("batch", [1, 2, 70])
def test_mla_prefill_plan_of_random_batches(place, batch):
    rng = np.random.default_rng(9)
    lengths = rng.integers(0, 100, batch).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 30, batch))]).astype(np.uint32)
    total = int(lengths.sum()) + int(offsets[-1])
    chunks = total // 64 + 3
    plan = kv.ops.mla_prefill_plan(place.put(offsets), place.put(lengths), 64, chunks)
    for found, expected in zip(plan, model.mla_prefill_plan(offsets, lengths, 64, chunks), strict=True):
        np.testing.assert_array_equal(place.get(found), expected)


def test_remapping_reads_rows_that_lie_apart(place):
    rng = np.random.default_rng(15)
    wide = rng.integers(-2, 600, (6, 50)).astype(np.int32)
    offsets = np.array([0, 2, 6], np.uint32)
    logical, out = place.put(wide)[:, 3:24], place.put(np.full((6, 40), -77, np.int32))
    into = out[:, 5:26]
    kv.ops.remap_sparse_indices(logical, place.put(offsets), place.put(TABLES), 128, 21, out=into)
    expected = np.full((6, 40), -77)
    expected[:, 5:26] = model.remap_sparse_indices(wide[:, 3:24], offsets, TABLES, 128, 21)
    np.testing.assert_array_equal(place.get(out), expected)


# --- rows of ragged batches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "columns", "end"),
    [("f32", 1, 3), ("f16", 24, 7), ("bf16", 300, 3), ("i32", 24, 1000), ("i16", 300, 0), ("i8", 1, 7)],
)
def test_sliced_add_adds_in_the_rows_below_the_end(place, dtype, columns, end):
    rng, chosen = np.random.default_rng(1), dtypes.of(dtype)
    a, b = (random_values(rng, (7, columns), chosen) for _ in range(2))
    found = kv.ops.sliced_add(place.put(a), place.put(b), end)
    wide = a.astype(np.float32) + b.astype(np.float32) if chosen.is_float else a + b
    same(place.get(found), np.where(np.arange(7)[:, None] < end, wide.astype(a.dtype), a))


def test_sliced_add_may_write_where_it_reads(place):
    a, b = np.ones((4, 8), np.float32), np.full((4, 8), 2, np.float32)
    inplace = place.put(a)
    assert kv.ops.sliced_add(inplace, place.put(b), 2, out=inplace) is inplace
    same(place.get(inplace), np.array([[3.0], [3], [1], [1]], np.float32).repeat(8, 1))


@pytest.mark.parametrize(("dtype", "columns"), [("f32", None), ("bf16", 1), ("i32", 5), ("f8e4m3", 64)])
def test_merge_ragged_joins_each_sequence(place, dtype, columns):
    rng, counts = np.random.default_rng(2), ([3, 0, 2, 0, 4], [1, 2, 0, 0, 5])
    offsets = [np.concatenate([[0], np.cumsum(n)]).astype(np.uint32) for n in counts]
    shape = [] if columns is None else [columns]
    data = [random_values(rng, (sum(n), *shape), dtypes.of(dtype)) for n in counts]
    out, sums = kv.ops.merge_ragged(*(place.put(x) for pair in zip(data, offsets, strict=True) for x in pair))
    parts = [x[o[b] : o[b + 1]] for b in range(5) for x, o in zip(data, offsets, strict=True)]
    same(place.get(out), np.concatenate(parts))
    assert place.get(sums).tolist() == (offsets[0] + offsets[1]).tolist()


def test_merge_ragged_leaves_out_rows_of_no_sequence(place):
    a, b = np.arange(8, dtype=np.int32), np.arange(100, 104, dtype=np.int32)
    out = place.put(np.full(12, -7, np.int32))
    rows = [place.put(np.array(x, np.int32)) for x in ([2, 3, 5], [1, 1, 3])]
    got, offsets = kv.ops.merge_ragged(place.put(a), rows[0], place.put(b), rows[1], out)
    assert got is out
    assert place.get(out).tolist() == [2, 3, 4, 101, 102, *[-7] * 7]
    assert place.get(offsets).tolist() == [0, 1, 5]


def test_merge_ragged_of_nothing_gives_offsets(place):
    none, offsets = place.put(np.zeros((0, 4), np.float32)), place.put(np.zeros(6, np.int32))
    out, out_offsets = kv.ops.merge_ragged(none, offsets, none, offsets, out_offsets=place.put(np.ones(6, np.int32)))
    assert tuple(out.shape) == (0, 4)
    assert place.get(out_offsets).tolist() == [0] * 6


def over(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(scores)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        return weights @ values / np.where(total == 0, 1, total)[..., None], np.log(total)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shape"),
    [("f32", 2e-6, (5, 3, 20)), ("f16", 2e-3, (3, 4, 128)), ("bf16", 1.6e-2, (3, 4, 128)), ("f32", 2e-6, (1, 1, 1))],
)
def test_merged_attention_is_that_over_all_keys(place, dtype, tolerance, shape):
    rng, numpy = np.random.default_rng(4), dtypes.of(dtype).numpy
    scores = [rng.standard_normal((*shape[:2], n)) * 3 for n in (7, 3)]
    values = [rng.standard_normal((n, shape[2])) for n in (7, 3)]
    given = [place.put(x) for s, v in zip(scores, values, strict=True)
             for x in (over(s, v)[0].astype(numpy), over(s, v)[1].astype(np.float32))]  # fmt: skip
    out, lse = kv.ops.merge_attention(*given)
    want, want_lse = over(np.concatenate(scores, -1), np.concatenate(values))
    np.testing.assert_allclose(place.get(out).astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(place.get(lse), want_lse, rtol=2e-6, atol=2e-6)
    back, _ = kv.ops.merge_attention(*given, out=given[0])  # where it reads
    assert back is given[0]
    same(place.get(back), place.get(out))


def test_rows_without_keys_do_not_count(place):
    """One side without keys gives the other, whatever its output holds; both without give zeros and minus infinity."""
    a = np.full((4, 1, 8), np.nan, np.float32)
    b = np.arange(32, dtype=np.float32).reshape(4, 1, 8)
    low = -np.inf
    a_lse, b_lse = np.array([[low], [low], [1e30], [5]], np.float32), np.array([[2], [low], [low], [low]], np.float32)
    a[2:] = 3
    out, lse = kv.ops.merge_attention(*(place.put(x) for x in (a, a_lse, b, b_lse)))
    same(place.get(out)[:, 0], np.stack([b[0, 0], np.zeros(8, np.float32), a[2, 0], a[3, 0]]))
    same(place.get(lse)[:, 0], np.array([2, low, 1e30, 5], np.float32))


def test_what_does_not_fit_is_refused_by_name():
    x, off = np.ones((4, 8), np.float32), np.array([0, 4], np.int32)
    tokens, bonus = np.ones(4, np.int32), np.ones(1, np.int32)
    long, half, add, merge, shift = (
        x.astype(np.int64), x.astype(np.float16), kv.ops.sliced_add, kv.ops.merge_ragged, kv.ops.shift_tokens,
    )  # fmt: skip
    cases = [
        (ValueError, lambda: add(x, x[:3], 2), "sliced_add: b must have shape [4, 8], got [3, 8]"),
        (TypeError, lambda: add(x, half, 2), "sliced_add: b must have dtype f32, got f16"),
        (TypeError, lambda: add(long, long, 2), "sliced_add: a must have dtype"),
        (ValueError, lambda: add(x, x, -1), "sliced_add: end must be in [0, 2147483647], got -1"),
        (ValueError, lambda: merge(x, off, x[:, :4], off), "merge_ragged: b must have shape [rows, 8]"),
        (ValueError, lambda: merge(x, off, tokens, off), "merge_ragged: a and b must have 1 or 2 dimensions"),
        (ValueError, lambda: merge(x, off, x, off[:1]), "merge_ragged: b_offsets must have shape [2], got"),
        (ValueError, lambda: merge(x, off, x, off, x), "merge_ragged: out must have shape [8, 8], got [4, 8]"),
        (ValueError, lambda: shift(tokens, off, bonus, tokens), "shift_tokens: out must not share memory with tokens"),
        (ValueError, lambda: shift(tokens, off[:1], bonus), "shift_tokens: row_offsets must have shape [2]"),
    ]
    o, half_o, lse = x.reshape(4, 2, 4), half.reshape(4, 2, 4), np.zeros((4, 2), np.float32)
    merge_attention = kv.ops.merge_attention
    cases += [
        (TypeError, lambda: merge_attention(o, lse, half_o, lse), "merge_attention: b must have dtype f32, got f16"),
        (ValueError, lambda: merge_attention(o, lse[:3], o, lse), "merge_attention: a_lse must have shape [4, 2], got"),
        (
            ValueError,
            lambda: merge_attention(o, lse, o, lse, lse=lse),
            "merge_attention: lse must not share memory with a_lse",
        ),
    ]
    for kind, call, message in cases:
        with pytest.raises(kind, match=re.escape("kv.ops." + message)):
            call()


# --- print_cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
def test_print_cache_shows_cached_and_new_tokens(place, kind):
    problem = random_problem(np.random.default_rng(7), kind, "bf16", page_size=4, cached=[5, 0, 2], new=[1, 0, 2])
    fill_cached(np.random.default_rng(8), problem, problem.cached + problem.new)
    found, out = place.collection(problem.collection), io.StringIO()
    kv.ops.print_cache(found, 1, place.put(problem.new.astype(np.uint32)), file=out)
    lines = out.getvalue().splitlines()
    titles = [f"layer 1 {half} sequence {b}: {n} tokens" for half in ("key", "value") for b, n in enumerate([6, 0, 4])]
    assert [line for line in lines if line.startswith("layer")] == titles
    assert len(lines) == 6 + 2 * 10 * 2
    cache = problem.collection.get_value_cache(1)
    at = lines.index(titles[5]) + 1 + 3 * 2 + 1  # token 3, head 1 of the last sequence
    shown = " ".join(f"{float(x):g}" for x in cache.load(2, 1, 3, 0, width=7))
    assert lines[at] == f"  token 3 head 1: {shown} ..."
    whole = io.StringIO()
    kv.ops.print_cache(found, 1, compact=False, file=whole)
    lines = whole.getvalue().splitlines()
    assert len(lines) == 6 + 2 * 7 * 2
    shown = " ".join(f"{float(x):g}" for x in problem.collection.get_key_cache(1).load(0, 0, 4, 0, width=16))
    assert f"  token 4 head 0: {shown}" in lines


def test_print_cache_of_nothing_says_so(place):
    problem = random_problem(np.random.default_rng(9), cached=[0], new=[3])
    out = io.StringIO()
    kv.ops.print_cache(place.collection(problem.collection), 0, file=out)
    assert out.getvalue().splitlines() == [f"layer 0 {half} sequence 0: 0 tokens" for half in ("key", "value")]
    with pytest.raises(ValueError, match=r"valid_lengths must be integers of shape \[1\], got int32 of shape \[2\]"):
        kv.ops.print_cache(problem.collection, 0, np.zeros(2, np.int32))
