# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.rope_padded and kv.ops.qk_norm against the model, and rope of 8-bit keys, on the host and in GPU code."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import assert_close, assert_same, near
from reference.random_caches import clone, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

SHAPE = {"cached": [5, 0, 33, 16], "new": [3, 2, 0, 9]}
problem_of = functools.partial(stored_problem, **SHAPE)


def angles(rng: Any, positions: int, turned: int) -> np.ndarray:
    angle = rng.uniform(0, 2 * np.pi, (positions, turned // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(positions, turned).astype(np.float32)


# --- rope of 8-bit keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_computes_in_f32_and_casts_once(place, dtype, interleaved):
    rng, problem = problem_of(1, dtype=dtype)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query, freqs = random_values(rng, (problem.tokens, 4, 16), dtypes.bf16), angles(rng, 60, 8)
    offsets = problem.row_offsets
    out = kv.ops.rope(found, 1, place.put(query), place.put(offsets), place.put(freqs), interleaved=interleaved)
    rotated = model.rope_in_place(expected, 1, query, offsets, freqs, interleaved=interleaved)
    near(place.get(out), rotated.astype(query.dtype))
    assert_close(place, found, expected)


def test_rope_of_8_bits_saturates(place):
    """A rotation can make an element larger than the largest of an 8-bit type: it becomes that, not infinity."""
    rng, problem = problem_of(2, dtype="f8e4m3", cached=[0], new=[2])
    problem.collection.blocks[...] = 448.0
    found = place.collection(problem.collection)
    freqs = np.tile(np.array([1, 1], np.float32), (2, 8))  # (1 + i) turns (448, 448) to (0, 896)
    query = random_values(rng, (2, 2, 16), dtypes.f32)
    kv.ops.rope(found, 0, place.put(query), place.put(problem.row_offsets), place.put(freqs))
    keys = place.buffers(found)[0].astype(np.float32)
    page = int(problem.collection.lookup_table[0, 0])
    assert (keys[page, 0, 0, :2, :, 0::2] == 0).all()
    assert (keys[page, 0, 0, :2, :, 1::2] == 448).all()


# --- padded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [("paged", "f32"), ("continuous", "f16"), ("fa3", "bf16")])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turned", [16, 6])
def test_rope_padded_skips_the_padding(place, kind, dtype, interleaved, turned):
    rng, problem = problem_of(3, kind, dtype, new=[3, 1, 0, 4])
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query = random_values(rng, (4, 5, 3, 16), problem.collection.dtype)
    valid, freqs = np.array([3, 1, 0, 4], np.uint32), angles(rng, 60, turned)
    sentinel = np.full_like(query, 77)
    out = place.put(sentinel.copy())
    back = kv.ops.rope_padded(
        found, 1, place.put(query), place.put(valid), place.put(freqs), interleaved=interleaved, query_out=out
    )
    assert back is out
    rotated = model.rope_padded(expected, 1, query, valid, freqs, interleaved=interleaved, out=sentinel)
    near(place.get(out), rotated.astype(query.dtype))
    assert_close(place, found, expected)


@pytest.mark.parametrize("sections", [None, [2, 3, 1]])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_padded_takes_position_ids(place, sections, interleaved):
    rng, problem = problem_of(4, new=[2, 4, 1, 0])
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query, freqs = random_values(rng, (4, 4, 2, 20), dtypes.f32), angles(rng, 60, 12)  # another head size than the keys
    valid = np.array([2, 4, 1, 0], np.int32)
    ids = rng.integers(0, 60, (3 if sections else 1, 4, 4)).astype(np.int32)
    given: dict[str, Any] = {"interleaved": interleaved, "mrope_section": sections}
    out = kv.ops.rope_padded(
        found, 0, place.put(query), place.put(valid), place.put(freqs), position_ids=place.put(ids),
        query_out=place.put(query.copy()), **given,
    )  # fmt: skip
    rotated = model.rope_padded(expected, 0, query, valid, freqs, position_ids=ids, **given)
    near(place.get(out), rotated.astype(query.dtype))
    assert_close(place, found, expected)


def test_rope_padded_stops_at_the_end_of_the_padded_batch(place):
    """A valid length past S does no harm; a batch or a padding of nothing gives nothing."""
    rng, problem = problem_of(5, cached=[3, 1], new=[2, 2])
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query, freqs = random_values(rng, (2, 2, 2, 16), dtypes.f32), angles(rng, 60, 16)
    valid = np.array([900, 1], np.uint32)
    with place.unchecked():
        kv.ops.rope_padded(found, 0, place.put(query), place.put(valid), place.put(freqs))
        model.rope_padded(expected, 0, query, valid, freqs)
        assert_close(place, found, expected)
        kv.ops.rope_padded(found, 0, place.put(query[:, :0]), place.put(valid), place.put(freqs))
        assert_close(place, found, expected)


# --- qk_norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"), [("paged", "f32"), ("paged", "bf16"), ("continuous", "f16"), ("fa3", "bf16")]
)
@pytest.mark.parametrize("size", [16, 20, 128])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_qk_norm_normalises_queries_and_new_keys(place, kind, dtype, size, offset):
    rng, problem = problem_of(6, kind, dtype, head_size=size, num_heads=3)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query = random_values(rng, (problem.tokens, 6, size), problem.collection.dtype)
    gammas = [random_values(rng, (size,), dtypes.of(d)) for d in ("f32", dtype)]
    options = {"eps": 1e-3, "weight_offset": offset}
    out = kv.ops.qk_norm(found, 1, place.put(query), place.put(problem.row_offsets), *map(place.put, gammas), **options)
    normal = model.qk_norm(expected, 1, query, problem.row_offsets, *gammas, **options)
    near(place.get(out), normal.astype(query.dtype))
    assert_close(place, found, expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("size", "turned"), [(16, 16), (16, 4), (80, 40), (7, 6), (192, 64)])
@pytest.mark.parametrize("dtype", ["f32", "f8e4m3"])
def test_qk_norm_rotates_after_it(place, interleaved, size, turned, dtype):
    rng, problem = problem_of(7, dtype=dtype, head_size=size)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    query = random_values(rng, (problem.tokens, 4, size), dtypes.f32)
    gammas = [random_values(rng, (size,), dtypes.f32) for _ in range(2)]
    freqs, offsets = angles(rng, 60, turned), problem.row_offsets
    inplace = place.put(query.copy())
    back = kv.ops.qk_norm(
        found, 0, inplace, place.put(offsets), *map(place.put, gammas), freqs_cis=place.put(freqs),
        interleaved=interleaved, query_out=inplace,
    )  # fmt: skip
    assert back is inplace
    rotated = model.qk_norm(expected, 0, query, offsets, *gammas, freqs=freqs, interleaved=interleaved)
    near(place.get(inplace), rotated.astype(np.float32))
    assert_close(place, found, expected)


@pytest.mark.parametrize("with_freqs", [True, False])
@pytest.mark.parametrize("heads", [(6, 3, 2), (2, 1, 64)])
def test_qk_norm_does_index_heads_in_the_same_launch(place, with_freqs, heads):
    """Main and index caches have pages, dtypes and heads of their own."""
    queries, main_heads, index_queries = heads
    rng, problem = problem_of(8, dtype="bf16", num_heads=main_heads, page_size=8)
    _, other = problem_of(9, "paged", "f32", num_heads=1, is_mla=True, page_size=32)
    found = [place.collection(p.collection) for p in (problem, other)]
    expected = [clone(p.collection) for p in (problem, other)]
    tokens, offsets = problem.tokens, problem.row_offsets
    query = random_values(rng, (tokens, queries, 16), dtypes.bf16)
    index_query = random_values(rng, (tokens, index_queries, 16), dtypes.f32)
    gammas = [random_values(rng, (16,), dtypes.f32) for _ in range(4)]
    freqs = angles(rng, 60, 8) if with_freqs else None
    given = [place.put(g) for g in gammas]
    index = kv.ops.IndexHeads(found[1], place.put(index_query), given[2], given[3])
    out, index_out = kv.ops.qk_norm(
        found[0], 1, place.put(query), place.put(offsets), given[0], given[1], index=index,
        freqs_cis=None if freqs is None else place.put(freqs),
    )  # fmt: skip
    main = model.qk_norm(expected[0], 1, query, offsets, gammas[0], gammas[1], freqs=freqs)
    of_index = model.qk_norm(expected[1], 1, index_query, offsets, gammas[2], gammas[3], freqs=freqs)
    near(place.get(out), main.astype(query.dtype))
    near(place.get(index_out), of_index.astype(np.float32))
    for a, b in zip(found, expected, strict=True):
        assert_close(place, a, b)


def test_qk_norm_of_no_tokens_changes_nothing(place):
    _, problem = problem_of(10, cached=[5, 3], new=[0, 0])
    found = place.collection(problem.collection)
    gamma = place.put(np.ones(16, np.float32))
    query = place.put(np.ones((0, 4, 16), np.float32))
    out = kv.ops.qk_norm(found, 0, query, place.put(problem.row_offsets), gamma, gamma)
    assert tuple(out.shape) == (0, 4, 16)
    assert_same(place, found, problem.collection)


# --- what is refused -------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name():
    rng, problem = problem_of(11)
    c, off, gamma = problem.collection, problem.row_offsets, np.ones(16, np.float32)
    query, freqs = np.ones((problem.tokens, 4, 16), np.float32), angles(rng, 60, 16)
    padded, valid = np.ones((4, 3, 2, 16), np.float32), np.ones(4, np.uint32)
    small = random_problem(rng, head_size=8, num_heads=1, is_mla=True, **SHAPE).collection
    fewer = random_problem(rng, num_heads=1, is_mla=True, cached=[1], new=[1]).collection
    scaled = random_problem(rng, "paged", "f8e4m3", scale_dtype="f32", **SHAPE).collection
    index = kv.ops.IndexHeads(small, query, gamma[:8], gamma[:8])
    norm, rotate = kv.ops.qk_norm, kv.ops.rope_padded
    cases = [
        (lambda: norm(c, 0, query, off, gamma[:8], gamma), "q_gamma must have shape [16], got [8]"),
        (lambda: norm(c, 0, query[:, :, :8].copy(), off, gamma, gamma), "query must have shape [T, Hq, 16]"),
        (lambda: norm(scaled, 0, query, off, gamma, gamma), "kv.ops.qk_norm: needs a cache without scales"),
        (lambda: norm(c, 0, query, off, gamma, gamma, index=index), "index.collection must have the head size of the"),
        (
            lambda: norm(c, 0, query, off, gamma, gamma, index=index._replace(collection=fewer)),
            "index.collection must have the collection's 4 sequences, got 1",
        ),
        (lambda: norm(c, 0, query, off, gamma, gamma, freqs_cis=freqs[:20]), "freqs_cis must have a row for each"),
        (lambda: rotate(c, 0, padded[:3], valid, freqs), "query must have shape [4, S, Hq, Dq], got [3, 3, 2, 16]"),
        (lambda: rotate(c, 0, padded, valid[:3], freqs), "valid_lengths must have shape [4], got [3]"),
        (
            lambda: rotate(c, 0, padded, valid, freqs, position_ids=np.ones((2, 4, 2), np.int32)),
            "position_ids must have shape [sections, 4, 3], got [2, 4, 2]",
        ),
        (lambda: rotate(c, 0, padded, valid, freqs, mrope_section=[8]), "mrope_section needs position_ids, got none"),
        (lambda: rotate(scaled, 0, padded, valid, freqs), "needs a cache without scales, got one with; rotate before"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match=r"index must be a kv\.ops\.IndexHeads, got tuple"):
        norm(c, 0, query, off, gamma, gamma, index=tuple(index))
    with pytest.raises(IndexError, match="layer must be in"):
        norm(c, 1, query, off, gamma, gamma, index=index._replace(collection=_one_layer(rng)))


def _one_layer(rng: Any) -> Any:
    return random_problem(rng, num_heads=1, is_mla=True, num_layers=1, **SHAPE).collection
