# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.sliced_add, merge_ragged, shift_tokens and merge_attention against NumPy, on the host and in GPU code."""

from __future__ import annotations

import re

import numpy as np
import pytest
from reference.places import bits
from reference.random_caches import random_values

import kvarn as kv
from kvarn.dialect import dtypes


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i32", "i16", "i8"])
@pytest.mark.parametrize("columns", [1, 24, 300])
@pytest.mark.parametrize("end", [0, 3, 7, 1000])
def test_sliced_add_adds_in_the_rows_below_the_end(place, dtype, columns, end):
    rng, chosen = np.random.default_rng(1), dtypes.of(dtype)
    a, b = (random_values(rng, (7, columns), chosen) for _ in range(2))
    found = kv.ops.sliced_add(place.put(a), place.put(b), end)
    wide = a.astype(np.float32) + b.astype(np.float32) if chosen.is_float else a + b
    expected = np.where(np.arange(7)[:, None] < end, wide.astype(a.dtype), a)
    same(place.get(found), expected)


def test_sliced_add_may_write_where_it_reads(place):
    a, b = np.ones((4, 8), np.float32), np.full((4, 8), 2, np.float32)
    inplace = place.put(a)
    assert kv.ops.sliced_add(inplace, place.put(b), 2, out=inplace) is inplace
    same(place.get(inplace), np.array([[3.0], [3], [1], [1]], np.float32).repeat(8, 1))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "f8e4m3"])
@pytest.mark.parametrize("columns", [None, 1, 5, 64])
def test_merge_ragged_joins_each_sequence(place, dtype, columns):
    rng, chosen = np.random.default_rng(2), dtypes.of(dtype)
    first, second = [3, 0, 2, 0, 4], [1, 2, 0, 0, 5]
    offsets = [np.concatenate([[0], np.cumsum(n)]).astype(np.uint32) for n in (first, second)]
    data = [random_values(rng, (sum(n), *([] if columns is None else [columns])), chosen) for n in (first, second)]
    out, out_offsets = kv.ops.merge_ragged(
        place.put(data[0]), place.put(offsets[0]), place.put(data[1]), place.put(offsets[1])
    )
    parts = [x[o[b] : o[b + 1]] for b in range(5) for x, o in zip(data, offsets, strict=True)]
    same(place.get(out), np.concatenate(parts))
    assert place.get(out_offsets).tolist() == (offsets[0] + offsets[1]).tolist()


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


@pytest.mark.parametrize("new", [[3, 0, 1, 5], [1], [0, 0], [200, 300]])
def test_shift_tokens_appends_the_bonus_token(place, new):
    rng = np.random.default_rng(3)
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
    tokens = rng.integers(0, 50000, sum(new)).astype(np.int32)
    bonus = rng.integers(0, 50000, len(new)).astype(np.int32)
    found = kv.ops.shift_tokens(place.put(tokens), place.put(offsets), place.put(bonus))
    parts = [np.append(tokens[offsets[b] + 1 : offsets[b + 1]], bonus[b]) for b, n in enumerate(new) if n]
    np.testing.assert_array_equal(place.get(found), np.concatenate([np.zeros(0, np.int32), *parts]))


# --- merge_attention -------------------------------------------------------------------------------


def attended(rng: np.random.Generator, keys: int, query: np.ndarray) -> tuple[np.ndarray, ...]:
    """Random scores and values of some keys, and attention over them: [T, Hq, D] and [T, Hq], float64."""
    scores = rng.standard_normal((*query.shape[:2], keys)) * 3
    values = rng.standard_normal((keys, query.shape[2]))
    return scores, values, *over(scores, values)


def over(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(scores)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        return weights @ values / np.where(total == 0, 1, total)[..., None], np.log(total)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 2e-6), ("f16", 2e-3), ("bf16", 1.6e-2)])
@pytest.mark.parametrize("shape", [(3, 4, 128), (5, 3, 20), (1, 1, 1)])
def test_merged_attention_is_that_over_all_keys(place, dtype, tolerance, shape):
    rng, chosen = np.random.default_rng(4), dtypes.of(dtype)
    query = np.zeros(shape)
    (s1, v1, a, a_lse), (s2, v2, b, b_lse) = attended(rng, 7, query), attended(rng, 3, query)
    given = [place.put(x) for x in (a.astype(chosen.numpy), a_lse.astype(np.float32))]
    given += [place.put(x) for x in (b.astype(chosen.numpy), b_lse.astype(np.float32))]
    out, lse = kv.ops.merge_attention(*given)
    want, want_lse = over(np.concatenate([s1, s2], -1), np.concatenate([v1, v2]))
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
