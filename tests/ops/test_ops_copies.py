# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.gather, copy_pages and convert against the model, on the host and in GPU code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Interpreted, Place, assert_close, assert_same, bits
from reference.random_caches import clone, random_problem

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection

KINDS: dict[str, dict[str, Any]] = {
    "paged f32": {"kind": "paged", "dtype": "f32", "page_size": 1},
    "paged bf16": {"kind": "paged", "dtype": "bf16", "page_size": 64},
    "continuous f16": {"kind": "continuous", "dtype": "f16"},
    "fa3 bf16": {"kind": "fa3", "dtype": "bf16"},
    "quantized": {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
    "mla": {"kind": "paged", "dtype": "bf16", "num_heads": 1, "head_size": 72, "is_mla": True, "page_size": 32},
    "int8": {"kind": "paged", "dtype": "i8", "scale_dtype": "f16", "head_size": 5},
}


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("half", ["key", "value"])
def test_gather_copies_bit_for_bit(place, shape, half):
    rng = np.random.default_rng(1)
    problem = random_problem(rng, **KINDS[shape], num_layers=3, cached=[10, 40, 3, 7], new=[1, 1, 1, 1])
    if half == "value" and problem.collection.is_mla:
        half = "key"
    found = place.collection(problem.collection)
    cache = getattr(found, f"get_{half}_cache")(1)
    offsets = np.array([0, 2, 5, 5, 7], np.uint32)  # the third sequence has no row
    longest = [10, 10, 40, 40, 40, 7, 7]
    ids = np.stack([rng.integers(0, n, 5) for n in longest]).astype(np.int32)
    out = kv.ops.gather(cache, place.put(ids), place.put(offsets))
    expected = model.gather_rows(getattr(problem.collection, f"get_{half}_cache")(1), ids, offsets)
    np.testing.assert_array_equal(bits(place.get(out)), bits(expected))
    assert_same(place, found, problem.collection)


def test_gather_takes_rows_of_all_heads_together():
    blocks = np.random.default_rng(0).standard_normal((6, 2, 2, 16, 2, 8)).astype(np.float32)
    table = np.array([[3, 1, 5, 0]], np.int32)
    cache = kv.PagedKVCacheCollection(blocks, np.array([40], np.int32), table, 0, 40).get_key_cache(1)
    ids, offsets = np.array([[0, 39, 17]], np.int32), np.array([0, 1], np.int32)
    rows = np.full((1, 3, 16), np.nan, np.float32)
    assert kv.ops.gather(cache, ids, offsets, out=rows) is rows
    np.testing.assert_array_equal(rows.reshape(1, 3, 2, 8), kv.ops.gather(cache, ids, offsets))


def test_gather_leaves_rows_of_no_sequence(place):
    rng = np.random.default_rng(2)
    problem = random_problem(rng, "paged", "f32", cached=[9, 9], new=[1, 1])
    found = place.collection(problem.collection)
    out = place.put(np.full((6, 2, 2, 16), 77, np.float32))
    back = kv.ops.gather(
        found.get_key_cache(0), place.put(np.ones((6, 2), np.int32)), place.put(np.array([1, 2, 4], np.int32)), out
    )
    assert back is out
    rows = (place.get(out) != 77).any((1, 2, 3))
    assert rows.tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_gather_of_nothing_gives_nothing(place, shape):
    problem = random_problem(np.random.default_rng(3), "paged", "f32", cached=[9], new=[1])
    found = place.collection(problem.collection)
    ids = place.put(np.zeros(shape, np.int32))
    out = kv.ops.gather(found.get_key_cache(0), ids, place.put(np.array([0, shape[0]], np.uint32)))
    assert tuple(out.shape) == (*shape, 2, 16)


def test_gather_of_tokens_that_are_not_there_stays_in_the_pool(place):
    """Negative and far positions read the null page; of a continuous cache, nothing."""
    for kind in ("paged", "continuous"):
        problem = random_problem(np.random.default_rng(4), kind, "f32", cached=[9], new=[1])
        found = place.collection(problem.collection)
        ids = place.put(np.array([[-1, 2**31 - 1, -(2**31), 3]], np.int32))
        out = place.get(kv.ops.gather(found.get_key_cache(0), ids, place.put(np.array([0, 1], np.uint32))))
        expected = model.read(problem.collection.get_key_cache(0), 0, 3)[0]
        np.testing.assert_array_equal(out[0, 3], expected.astype(np.float32))


@pytest.mark.parametrize("shape", KINDS)
def test_copy_pages_copies_all_of_a_page(place, shape):
    problem = random_problem(np.random.default_rng(5), **KINDS[shape], cached=[20, 10], new=[3, 1], spare_pages=5)
    pages = problem.collection.num_blocks
    found, expected = place.collection(problem.collection), clone(problem.collection)
    source = np.array([0, 1, pages - 2, 99, -1, 2, pages], np.int32)
    destination = np.array([pages - 1, 4, 3, 5, 5, pages, 5], np.int32)  # the last four pairs are skipped
    kv.ops.copy_pages(found, place.put(source), place.put(destination))
    model.copy_pages(expected, source, destination)
    assert_same(place, found, expected)


def test_copy_pages_of_a_pool_whose_layers_lie_apart():
    """Any strides of the outer dimensions: here [L, 2, N, P, H, D] seen as [N, 2, L, P, H, D]."""
    rng = np.random.default_rng(6)
    pool = rng.standard_normal((3, 2, 5, 4, 2, 8)).astype(np.float32)
    for place in (Place(), Interpreted()):
        with place.active():
            own = pool.copy()
            blocks = own.transpose(2, 1, 0, 3, 4, 5)
            table = np.zeros((1, 16), np.uint32)
            found = PagedKVCacheCollection(blocks, np.zeros(1, np.uint32), table, 1, 4)
            kv.ops.copy_pages(found, np.array([1], np.int32), np.array([4], np.int32))
            expected = pool.copy()
            expected[:, :, 4] = expected[:, :, 1]
            np.testing.assert_array_equal(own, expected)


def test_copying_no_page_copies_nothing(place):
    problem = random_problem(np.random.default_rng(7), "paged", "f32", cached=[5], new=[1])
    found = place.collection(problem.collection)
    none = place.put(np.zeros(0, np.int32))
    kv.ops.copy_pages(found, none, none)
    assert_same(place, found, problem.collection)


@pytest.mark.parametrize("source", [k for k in KINDS if k not in ("mla", "int8")])
@pytest.mark.parametrize("target", ["paged f32", "continuous f16", "fa3 bf16", "quantized"])
def test_convert_copies_every_cached_token(place, source, target):
    rng = np.random.default_rng(8)
    lengths = [70, 0, 3, 130]
    a = random_problem(rng, **KINDS[source], cached=lengths, new=[1, 1, 1, 1])
    b = random_problem(rng, **KINDS[target], cached=lengths, new=[2, 2, 2, 2])
    found, expected = place.collection(b.collection), clone(b.collection)
    kv.ops.convert(place.collection(a.collection).get_key_cache(1), found.get_value_cache(0))
    model.convert(a.collection.get_key_cache(1), expected.get_value_cache(0))
    assert_close(place, found, expected, most=0.001)


def test_convert_of_integers_is_exact(place):
    rng = np.random.default_rng(9)
    a = random_problem(rng, "paged", "i32", cached=[70, 3], new=[1, 1], page_size=8)
    b = random_problem(rng, "continuous", "i32", cached=[70, 3], new=[1, 1])
    found, expected = place.collection(b.collection), clone(b.collection)
    kv.ops.convert(place.collection(a.collection).get_key_cache(1), found.get_key_cache(0))
    model.convert(a.collection.get_key_cache(1), expected.get_key_cache(0))
    assert_same(place, found, expected)
