# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.rms_norm, radd, iadd_2m, and the index tables of a step, on the host and in GPU code."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from reference import model
from reference.places import assert_close, assert_same
from reference.random_caches import clone, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

RAGGED = {"cached": [5, 0, 33, 16], "new": [3, 7, 0, 20]}
KINDS = [("paged", "f32"), ("paged", "bf16"), ("continuous", "f16"), ("fa3", "bf16")]


filled = functools.partial(stored_problem, **RAGGED)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("size", [16, 8, 32, 3])
def test_rms_norm_changes_new_tokens_only(place, kind, dtype, size):
    rng, problem = filled(1, kind, dtype)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    gamma = random_values(rng, (size,), dtypes.of("f32" if size == 3 else dtype))
    kv.ops.rms_norm(found.get_value_cache(1), place.put(gamma), 1e-5, place.put(problem.row_offsets), 0.5)
    model.rms_norm(expected.get_value_cache(1), gamma, 1e-5, problem.row_offsets, 0.5)
    assert_close(place, found, expected)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_rms_norm_rounds_before_the_weight_when_asked(place, heads):
    rng, problem = filled(2, "paged", "bf16", num_heads=heads, head_size=40)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    gamma = random_values(rng, (40,), dtypes.f32)
    options = {"multiply_before_cast": False}
    kv.ops.rms_norm(found.get_key_cache(0), place.put(gamma), 1e-6, place.put(problem.row_offsets), **options)
    model.rms_norm(expected.get_key_cache(0), gamma, 1e-6, problem.row_offsets, **options)
    assert_close(place, found, expected)


@pytest.mark.parametrize("total", [0, 1, 1000])
def test_rms_norm_does_all_tokens_whatever_the_hint(place, total):
    """Except for a hint of none, which launches nothing."""
    rng, problem = filled(3, "paged", "f32")
    found, expected = place.collection(problem.collection), clone(problem.collection)
    gamma = random_values(rng, (16,), dtypes.f32)
    kv.ops.rms_norm(found.get_key_cache(0), place.put(gamma), 1e-6, place.put(problem.row_offsets), total_tokens=total)
    if total:
        model.rms_norm(expected.get_key_cache(0), gamma, 1e-6, problem.row_offsets)
    assert_close(place, found, expected)


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, ("paged", "i32"), ("paged", "f8e4m3")])
@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 3), (2, 2), (2, 4)])
def test_radd_adds_to_a_slice_of_the_batch(place, kind, dtype, first, last):
    rng, problem = filled(4, kind, dtype)
    c = problem.collection
    found, expected = place.collection(c), clone(c)
    offsets = problem.row_offsets[first : last + 1]
    a = random_values(rng, (int(offsets[-1] - offsets[0]), 2 * c.num_heads * c.head_size), c.dtype)
    kv.ops.radd(found, 1, place.put(a), place.put(np.ascontiguousarray(offsets)), first)
    model.radd(expected, 1, a, offsets, first)
    assert_same(place, found, expected)


@pytest.mark.parametrize("m", [0, 1, 8, 30])
def test_iadd_2m_adds_to_the_first_tokens(place, m):
    rng, problem = filled(5, "paged", "f16")
    c = problem.collection
    found, expected = place.collection(c), clone(c)
    rows = random_values(rng, (2 * m, c.num_heads * c.head_size), c.dtype)
    kv.ops.iadd_2m(found, 0, place.put(rows), place.put(problem.row_offsets))
    model.iadd_2m(expected, 0, rows, problem.row_offsets)
    assert_same(place, found, expected)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("batch", [1, 5, 300])
def test_increment_cache_lengths_adds_the_new_tokens(place, dtype, batch):
    rng = np.random.default_rng(6)
    lengths = rng.integers(0, 1000, batch).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, batch))]).astype(dtype)
    found = place.put(lengths.copy())
    kv.ops.increment_cache_lengths(found, place.put(offsets))
    np.testing.assert_array_equal(
        place.get(found), model.increment_cache_lengths(lengths, offsets).view(place.get(found).dtype)
    )


@pytest.mark.parametrize("batch", [0, 1, 5, 300])
def test_cache_row_offsets_are_running_sums(place, batch):
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 1000, batch).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, batch))]).astype(np.uint32)
    found = place.get(kv.ops.cache_row_offsets(place.put(offsets), place.put(lengths)))
    np.testing.assert_array_equal(found, model.cache_row_offsets(offsets, lengths).view(found.dtype))


def test_remap_sparse_indices_by_the_book(place):
    logical = np.array([[0, 129, -1, 256], [200, 512, 2, -5]], np.int32)
    table = np.array([[10, 5, 99, 99], [3, 20, 99, 99]], np.int32)
    offsets = np.array([0, 1, 2], np.int32)
    found = kv.ops.remap_sparse_indices(place.put(logical), place.put(offsets), place.put(table), 128, 99)
    assert place.get(found).tolist() == [[1280, 641, -1, -1], [2632, -1, 386, -5]]


def test_remap_sparse_indices_of_random_rows(place):
    rng = np.random.default_rng(8)
    wide = rng.integers(-3, 200, (12, 700)).astype(np.int32)
    logical = wide[:, 2:602]  # rows that lie apart, and not at multiples of 16 bytes
    table = rng.integers(0, 40, (4, 24)).astype(np.uint32)
    table[2, 3] = 0xFFFFFFFF
    offsets = np.array([0, 3, 3, 8, 10], np.uint32)  # two rows belong to no sequence
    given = place.put(logical) if place.name == "host" else place.put(np.ascontiguousarray(logical))
    found = kv.ops.remap_sparse_indices(given, place.put(offsets), place.put(table), 16, 35)
    np.testing.assert_array_equal(place.get(found), model.remap_sparse_indices(logical, offsets, table, 16, 35))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_remap_of_nothing_gives_nothing(place, shape):
    given = place.put(np.zeros(shape, np.int32))
    offsets, table = place.put(np.array([0, shape[0]], np.int32)), place.put(np.zeros((1, 24), np.int32))
    assert tuple(kv.ops.remap_sparse_indices(given, offsets, table, 16, 5).shape) == shape


def test_mla_prefill_plan_by_the_book(place):
    lengths, offsets = np.array([5, 0, 7], np.uint32), np.array([0, 2, 5, 6], np.uint32)
    plan = kv.ops.mla_prefill_plan(place.put(offsets), place.put(lengths), 8, 4)
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
