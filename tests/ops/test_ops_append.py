# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.append, store_ragged and store_padded against the model: every byte of the pool, on the host and in GPU code.

Pages are scattered, everything that nothing was written to is poison, and some sequences are empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Interpreted, Place, assert_close, assert_same
from reference.random_caches import clone, random_problem, random_values

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import dtypes

RAGGED = {"cached": [5, 0, 33, 16], "new": [3, 7, 0, 20]}


def rows(rng, problem, dtype=None) -> np.ndarray:
    c = problem.collection
    return random_values(rng, (problem.tokens, c.num_heads, c.head_size), dtypes.of(dtype or c.dtype), spread=2.0)


def appended(place: Place, problem: Any, layer: int, key: Any, value: Any, **scales: Any) -> tuple[Any, Any]:
    """The collection after the operation, and after the model's."""
    found, expected = place.collection(problem.collection), clone(problem.collection)
    given = {n: place.put(s) for n, s in scales.items()}
    kv.ops.append(
        found,
        layer,
        place.put(key),
        None if value is None else place.put(value),
        place.put(problem.row_offsets),
        **given,
    )
    model.append(expected, layer, key, value, problem.row_offsets, **scales)
    return found, expected


@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f8e4m3", "i8"])
def test_append_writes_the_new_tokens_only(place, kind, dtype):
    rng = np.random.default_rng(1)
    problem = random_problem(rng, kind, dtype, **RAGGED)
    key, value = rows(rng, problem), rows(rng, problem)
    assert_same(place, *appended(place, problem, 1, key, value))


@pytest.mark.parametrize("page_size", [1, 64, 128, 20])
def test_append_serves_any_page_size(place, page_size):
    rng = np.random.default_rng(2)
    problem = random_problem(rng, "paged", "bf16", page_size=page_size, table_dtype=np.int32, **RAGGED)
    key, value = rows(rng, problem), rows(rng, problem)
    assert_same(place, *appended(place, problem, 0, key, value))


@pytest.mark.parametrize(("heads", "size"), [(1, 64), (3, 80), (8, 128), (1, 7), (5, 33), (16, 192)])
def test_append_serves_any_head_shape(place, heads, size):
    rng = np.random.default_rng(3)
    problem = random_problem(rng, "paged", "f16", num_heads=heads, head_size=size, cached=[2, 15, 1], new=[1, 4, 1])
    key, value = rows(rng, problem), rows(rng, problem)
    assert_same(place, *appended(place, problem, 1, key, value))


def test_append_to_an_mla_collection_takes_the_key_alone(place):
    rng = np.random.default_rng(4)
    problem = random_problem(rng, "paged", "bf16", num_heads=1, head_size=72, is_mla=True, **RAGGED)
    assert_same(place, *appended(place, problem, 1, rows(rng, problem), None))


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2", "i8"])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_append_to_8_bits_saturates(place, dtype, source):
    rng = np.random.default_rng(5)
    problem = random_problem(rng, "paged", dtype, **RAGGED)
    key, value = rows(rng, problem, source), rows(rng, problem, source)
    key[::2] *= 400
    key[1, 0, :4] = np.array([1e5 if source != "f16" else 6e4, -6e4, np.inf, 0], key.dtype)
    assert_same(place, *appended(place, problem, 0, key, value))


@pytest.mark.parametrize("dtype", ["f8e4m3", "i8"])
@pytest.mark.parametrize("scale", ["f32", "f16", "bf16", "f8e8m0"])
@pytest.mark.parametrize("granularity", [64, 16])
def test_append_quantizes_by_granules(place, dtype, scale, granularity):
    rng = np.random.default_rng(6)
    problem = random_problem(
        rng, "paged", dtype, head_size=64, scale_dtype=scale, granularity=granularity, cached=[3, 0, 17], new=[2, 0, 5]
    )
    key, value = rows(rng, problem, "bf16"), rows(rng, problem, "bf16")
    key[0, 0] = 0  # a granule of zeros has the scale 1
    value[1] *= 300
    assert_close(place, *appended(place, problem, 1, key, value), most=0.001)


@pytest.mark.parametrize(("size", "granularity"), [(48, 48), (40, 16), (576, 576), (24, 1), (30, 4), (640, 640)])
def test_append_quantizes_odd_granules(place, size, granularity):
    rng = np.random.default_rng(7)
    problem = random_problem(
        rng, "paged", "f8e4m3", num_heads=3, head_size=size, scale_dtype="f32", granularity=granularity,
        cached=[3, 1], new=[2, 5],
    )  # fmt: skip
    key, value = rows(rng, problem, "f32"), rows(rng, problem, "f32")
    assert_close(place, *appended(place, problem, 0, key, value), most=0.001)


@pytest.mark.parametrize("granularity", [32, 5])
def test_append_quantizes_with_given_scales(place, granularity):
    rng = np.random.default_rng(8)
    problem = random_problem(
        rng,
        "paged",
        "f8e4m3",
        head_size=32,
        scale_dtype="f16",
        granularity=granularity,
        cached=[3, 0, 1],
        new=[2, 5, 1],
    )
    key, value = rows(rng, problem, "bf16"), rows(rng, problem, "bf16")
    shape = (problem.tokens, 2, problem.collection.head_dim_granularity)
    scales = [np.abs(random_values(rng, shape, dtypes.f32)) / 300 for _ in range(2)]
    scales[0][0] = 0  # becomes 1
    scales[1][1] = 1e-7  # far too small: the values saturate
    found, expected = appended(place, problem, 1, key, value, key_scale=scales[0], value_scale=scales[1])
    assert_close(place, found, expected, most=0.001)


def test_rows_outside_of_the_offsets_are_left_alone(place):
    rng = np.random.default_rng(9)
    problem = random_problem(rng, "paged", "f32", cached=[4, 2, 0], new=[3, 0, 5])
    c, found, expected = problem.collection, place.collection(problem.collection), clone(problem.collection)
    x = random_values(rng, (20, c.num_heads, c.head_size), c.dtype)
    offsets = problem.row_offsets + np.uint32(6)  # six rows before the first sequence, six after the last
    kv.ops.append(found, 0, place.put(x), place.put(-x), place.put(offsets))
    model.append(expected, 0, x[6:], -x[6:], problem.row_offsets)
    assert_same(place, found, expected)


def test_a_table_entry_without_a_page_drops_the_token():
    """Neither the null page nor what lies around the pool is touched."""
    for place in (Place(), Interpreted()):
        rng = np.random.default_rng(10)
        problem = random_problem(rng, "paged", "f16", cached=[0, 10], new=[16, 20])
        c = problem.collection
        around = np.full((c.num_blocks + 8, *c.blocks.shape[1:]), 77, np.float16)
        pool = around[4:-4]
        pool[:] = c.blocks
        before = around.copy()
        table = np.array(c.lookup_table)
        table[0, 0], table[1, 1] = c.num_blocks, 0xFFFFFFFF
        found = PagedKVCacheCollection(pool, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
        expected = clone(found)
        key, value = rows(rng, problem), rows(rng, problem)
        with place.active():
            kv.ops.append(found, 0, key, value, problem.row_offsets)
        model.append(expected, 0, key, value, problem.row_offsets)
        assert_same(Place(), found, expected)
        assert np.isnan(pool[problem.null_page].astype(np.float32)).all()
        np.testing.assert_array_equal(around[:4], before[:4])
        np.testing.assert_array_equal(around[-4:], before[-4:])


def test_a_continuous_region_drops_what_does_not_fit(place):
    blocks = np.full((2, 2, 1, 8, 1, 8), 7.0, np.float32)
    c = kv.ContinuousBatchingKVCacheCollection(blocks, np.array([6], np.uint32), np.array([0], np.uint32), 4, 8)
    found = place.collection(c)
    x = np.ones((4, 1, 8), np.float32)
    with place.unchecked():
        kv.ops.append(found, 0, place.put(x), place.put(x), place.put(np.array([0, 4], np.uint32)))
    after = place.buffers(found)[0]
    assert (after[0, :, 0, 6:] == 1).all()
    assert (after[0, :, 0, :6] == 7).all()
    assert (after[1] == 7).all()


@pytest.mark.parametrize("new", [[0, 0], []])
def test_nothing_to_write_writes_nothing(place, new):
    rng = np.random.default_rng(11)
    problem = random_problem(rng, "paged", "f32", cached=[4] * len(new), new=new)
    x = rows(rng, problem)
    assert_same(place, *appended(place, problem, 0, x, x))


def test_no_sequence_takes_padded_rows(place):
    rng = np.random.default_rng(12)
    problem = random_problem(rng, "paged", "f32", cached=[], new=[])
    c, found = problem.collection, place.collection(problem.collection)
    x = np.ones((5, c.num_heads, c.head_size), np.float32)
    kv.ops.append(found, 0, place.put(x), place.put(x), place.put(problem.row_offsets))
    assert_same(place, found, c)


@pytest.mark.parametrize("shift", [0, 2])
def test_slices_of_a_fused_projection_are_taken_as_they_are(shift):
    """Tokens and heads of key and value may lie apart, at any alignment; not on a GPU here: put() makes copies."""
    rng = np.random.default_rng(13)
    for place in (Place(), Interpreted()):
        with place.active():
            problem = random_problem(rng, "paged", "bf16", **RAGGED)
            c = problem.collection
            fused = random_values(rng, (problem.tokens, 100 + shift), c.dtype)
            key, value = (fused[:, shift + n * 32 : shift + n * 32 + 32].reshape(-1, 2, 16) for n in (1, 2))
            assert np.shares_memory(key, fused)
            found, expected = appended(place, problem, 1, key, value)
            assert_same(place, found, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "i8"])
@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
def test_store_ragged_writes_one_cache(place, kind, dtype):
    rng = np.random.default_rng(14)
    problem = random_problem(rng, kind, dtype, cached=[100, 200, 0], new=[5, 0, 18])
    found, expected = place.collection(problem.collection), clone(problem.collection)
    x = rows(rng, problem)
    value = found.get_value_cache(1)
    kv.ops.store_ragged(value, place.put(x), place.put(problem.row_offsets))
    model.store_ragged(expected.get_value_cache(1), x, problem.row_offsets)
    assert_same(place, found, expected)


def test_store_padded_skips_what_is_not_valid(place):
    rng = np.random.default_rng(15)
    problem = random_problem(rng, "paged", "f16", cached=[5, 2, 0, 3], new=[3, 1, 4, 0])
    c, found, expected = problem.collection, place.collection(problem.collection), clone(problem.collection)
    x = random_values(rng, (4, 6, c.num_heads, c.head_size), c.dtype)
    valid = np.array([3, 1, 4, 0], np.uint32)
    kv.ops.store_padded(found.get_key_cache(1), place.put(x), place.put(valid))
    model.store_padded(expected.get_key_cache(1), x, valid)
    assert_same(place, found, expected)
