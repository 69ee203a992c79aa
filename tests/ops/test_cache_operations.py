# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operations that write, rotate, copy and project into caches, against the model: ``reference.cache_rows``.

Beside them, what is no row: views, regions that are too short, tensors of other formats, and what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.cache_case import CacheCase, CacheRow, Call
from reference.cache_operations import append, exact
from reference.cache_rows import TABLES, WRITERS
from reference.case import rows
from reference.places import Interpreted, Place, assert_close, assert_same, near
from reference.random_caches import clone, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

pytestmark = pytest.mark.whole


@rows(TABLES["appends"])
def test_new_tokens_are_written_and_nothing_else(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["rotations"])
def test_keys_and_queries_are_rotated_and_normalised(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["sums"])
def test_rows_are_added_to_cached_tokens(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["copies"])
def test_tokens_and_pages_are_copied(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["no pages"])
def test_what_has_no_page_is_dropped(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["foreign"])
def test_pools_of_other_libraries_are_written_in_place(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["projections"])
def test_columns_of_products_go_to_queries_and_cache(row: CacheRow, kernel: str):
    row.check(kernel)


@rows(TABLES["groups"])
def test_weights_have_scales_by_groups(row: CacheRow, kernel: str):
    row.check(kernel)


# --- what is no row ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [append, *WRITERS], ids=lambda write: write.__name__)
def test_a_token_past_its_region_is_dropped(place, write):
    """As of regions that have room, less what the region has none for."""
    rng = np.random.default_rng(2)
    blocks = rng.standard_normal((3, 2, 2, 14, 2, 16)).astype(np.float32)
    table, lengths = np.array([2, 0], np.uint32), np.array([5, 9], np.uint32)
    problem = random_problem(rng, cached=[5, 9], new=[7, 4])
    case, kept = CacheCase(operation=write), blocks
    for room in (14, 10):
        c = kv.ContinuousBatchingKVCacheCollection(blocks[:, :, :, :room].copy(), lengths, table, 7, min(room, 13))
        problem.collection = c
        found, expected = place.collection(c), clone(c)
        with place.unchecked():
            done = write(Call(case, place, problem, np.random.default_rng(3), found))
        if room == 14:
            done(expected)
            kept = expected.blocks[:, :, :, :10].copy()
    assert_close(place, found, kv.ContinuousBatchingKVCacheCollection(kept, lengths, table, 7, 10))


@pytest.mark.parametrize("shift", [0, 2])
def test_slices_of_a_fused_projection_are_taken_as_they_are(shift):
    """Tokens and heads of key and value may lie apart, at any alignment; not on a GPU here: put() makes copies."""
    rng = np.random.default_rng(13)
    for place in (Place(), Interpreted()):
        with place.active():
            problem = random_problem(rng, "paged", "bf16", cached=[5, 0, 33, 16], new=[3, 7, 0, 20])
            c = problem.collection
            fused = random_values(rng, (problem.tokens, 100 + shift), c.dtype)
            key, value = (fused[:, shift + n * 32 : shift + n * 32 + 32].reshape(-1, 2, 16) for n in (1, 2))
            assert np.shares_memory(key, fused)
            found, expected = place.collection(c), clone(c)
            kv.ops.append(found, 1, key, value, problem.row_offsets)
            model.append(expected, 1, key, value, problem.row_offsets)
            assert_same(place, found, expected)


def test_gather_takes_rows_of_all_heads_together():
    blocks = np.random.default_rng(0).standard_normal((6, 2, 2, 16, 2, 8)).astype(np.float32)
    table = np.array([[3, 1, 5, 0]], np.int32)
    cache = kv.PagedKVCacheCollection(blocks, np.array([40], np.int32), table, 0, 40).get_key_cache(1)
    ids, offsets = np.array([[0, 39, 17]], np.int32), np.array([0, 1], np.int32)
    rows = np.full((1, 3, 16), np.nan, np.float32)
    assert kv.ops.gather(cache, ids, offsets, out=rows) is rows
    np.testing.assert_array_equal(rows.reshape(1, 3, 2, 8), kv.ops.gather(cache, ids, offsets))


def test_gather_of_tokens_that_are_not_there_stays_in_the_pool(place):
    """Negative and far positions read the null page; of a continuous cache, nothing."""
    for kind in ("paged", "continuous"):
        problem = random_problem(np.random.default_rng(4), kind, "f32", cached=[9], new=[1])
        found = place.collection(problem.collection)
        ids = place.put(np.array([[-1, 2**31 - 1, -(2**31), 3]], np.int32))
        out = place.get(kv.ops.gather(found.get_key_cache(0), ids, place.put(np.array([0, 1], np.uint32))))
        expected = model.read(problem.collection.get_key_cache(0), 0, 3)[0]
        np.testing.assert_array_equal(out[0, 3], expected.astype(np.float32))


def test_copy_pages_of_a_pool_whose_layers_lie_apart():
    """Any strides of the outer dimensions: here [L, 2, N, P, H, D] seen as [N, 2, L, P, H, D]."""
    rng = np.random.default_rng(6)
    pool = rng.standard_normal((3, 2, 5, 4, 2, 8)).astype(np.float32)
    for place in (Place(), Interpreted()):
        with place.active():
            own = pool.copy()
            blocks = own.transpose(2, 1, 0, 3, 4, 5)
            table = np.zeros((1, 16), np.uint32)
            found = kv.PagedKVCacheCollection(blocks, np.zeros(1, np.uint32), table, 1, 4)
            kv.ops.copy_pages(found, np.array([1], np.int32), np.array([4], np.int32))
            expected = pool.copy()
            expected[:, :, 4] = expected[:, :, 1]
            np.testing.assert_array_equal(own, expected)


def test_positions_out_of_the_table_are_brought_into_it(place):
    rng, problem = stored_problem(8, cached=[1], new=[3])
    query, freqs = random_values(rng, (3, 2, 16), dtypes.f32), rng.uniform(-1, 1, (5, 16)).astype(np.float32)
    found = place.collection(problem.collection)
    ids = place.put(np.array([[-3, 4, 2**31 - 1]], np.int32))
    out = kv.ops.rope(found, 0, place.put(query), place.put(problem.row_offsets), place.put(freqs), position_ids=ids)
    near(place.get(out), model.rope(query, [0, 4, 4], freqs).astype(np.float32))


SCHEDULES = [{"kind": "tile", "max_tokens": 32, "columns": 48}, {"kind": "stream_k", "max_tokens": 8},
             {"kind": "full_k", "max_tokens": 16}]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_sums_of_8_bits_keep_what_is_small(place, schedule):
    """After a first product of 448 * 448 the ones: tensor cores, which keep some 13 bits, would drop each of them."""
    bf16, f8 = dtypes.of("bf16").numpy, dtypes.of("f8e4m3").numpy
    problem = random_problem(np.random.default_rng(8), "paged", "bf16", head_size=64, cached=[5, 0], new=[3, 2])
    x, weight = np.ones((5, 1024), f8), np.ones((6 * 64, 1024), f8)
    x[:, 0] = weight[:, 0] = 448
    one = place.put(np.ones((1, 1), np.float32))
    out = kv.ops.project_append(
        place.collection(problem.collection), 1, place.put(x), place.put(weight), place.put(problem.row_offsets),
        x_scale=one, weight_scale=one, schedule=schedule,
    )  # fmt: skip
    wanted = np.full((5, 2, 64), 448 * 448 + 1023, np.float32).astype(bf16)
    np.testing.assert_array_equal(place.get(out).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize(
    "schedule", [{"kind": "tile"}, {"kind": "stream_k", "max_tokens": 16}], ids=["tile", "stream_k"]
)
@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_tables_that_are_wrong_lead_out_of_no_buffer(place, schedule):
    """What tables hold is not looked at on a GPU: kernels stay inside their memory all the same."""
    rng = np.random.default_rng(19)
    problem = random_problem(rng, "paged", "bf16", head_size=64, cached=[5, 0, 33], new=[3, 2, 9])
    x, weight = exact(rng, (14, 64), "bf16"), exact(rng, (6 * 64, 64), "bf16")
    c: Any = problem.collection
    for wrong in ([0, 9, 2, 14], [2**32 - 5, 3, 90, 2**31]):
        found: Any = place.collection(c)
        offsets, freqs = place.put(np.array(wrong, np.uint32)), place.put(np.ones((60, 64), np.float32))
        kv.ops.project_append(found, 1, place.put(x), place.put(weight), offsets, freqs_cis=freqs, schedule=schedule)
        pages = np.unique(np.asarray(c.lookup_table))
        others = np.setdiff1d(np.arange(len(c.blocks)), pages)
        before, after = np.asarray(c.blocks), place.get(found.blocks)
        np.testing.assert_array_equal(after[others].view(np.uint16), before[others].view(np.uint16))
        np.testing.assert_array_equal(after[:, :, 0].view(np.uint16), before[:, :, 0].view(np.uint16))
