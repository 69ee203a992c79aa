# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over lists of pages: what is not listed, and where pages lie; rows are in ``reference.attention_rows``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.case import LAYER, Case, OfChosenPages, assert_same_bits
from reference.random_caches import Problem, clone
from reference.shared_prefixes import permuted

import kvarn as kv

pytestmark = pytest.mark.whole


def listed(case: Case, place: Any, lists: np.ndarray, problem: Problem | None = None, **options: Any) -> Any:
    """Output and log-sum-exp of a case over lists of pages, of its problem or another."""
    problem = problem or case.problem
    source = place.collection(problem.collection), LAYER
    return case.launch(place, kv.ops.attention, source, case.query_rows, case.offsets, pages=lists, **options)


def beside_every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (k % 3 != 1)


def falling(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + kv.f32(k - q) * 0.1


def test_functions_get_the_positions_of_listed_tokens(place):
    """A mask and a score of prompts and decodes: where all pages are listed, they are those of the whole cache."""
    case = Case(cached=[70, 0], new=[2, 40], page_size=32, heads=2, group=2)
    lists = np.array([[[2, -1, 0, 1], [1, 2, 0, 9]], [[1, 0, -1, -1], [0, 1, 7, -1]]], np.int32)
    found = listed(case, place, lists, score=falling, mask=beside_every_third)
    source = place.collection(case.problem.collection), LAYER
    functions = {"score": falling, "mask": beside_every_third}
    whole = case.launch(place, kv.ops.attention, source, case.query_rows, case.offsets, **functions)
    for x, y in zip(found, whole, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_all_pages_in_order_are_attention_over_the_whole_cache_bit_for_bit(place):
    case = Case(cached=[70, 4], new=[1, 1], heads=2, group=2, schedule={"split_size": 512})
    lists = np.broadcast_to(np.arange(5, dtype=np.int32), (2, 2, 5)).copy()
    assert_same_bits(listed(case, place, lists), case.run(place))


def test_what_no_list_names_may_be_anything(place):
    case = Case(cached=[90, 50], new=[1, 1], heads=2, group=2)
    lists = np.array([[[4, 0, -1], [5, -1, 2]], [[-1, -1, -1], [3, 0, -1]]], np.int32)
    clean = listed(case, place, lists)
    problem = case.problem
    c = clone(problem.collection)
    blocks, table = np.asarray(c.blocks), np.asarray(c.lookup_table)
    for b in range(2):
        for h in range(2):
            for page in set(range(6 if b == 0 else 4)) - set(lists[b, h].tolist()):
                blocks[table[b, page], :, :, :, h] = np.nan
    poisoned = Problem(c, problem.row_offsets, problem.cached, problem.new, problem.null_page)
    assert_same_bits(listed(case, place, lists, poisoned), clean)
    assert not np.isnan(clean[0].astype(np.float32)).any()
    assert not clean[0][1, :2].any(), "a head that lists nothing gives zeros"
    assert np.isneginf(clean[1][1, :2]).all()


def test_where_pages_lie_changes_no_bit(place):
    case = Case(cached=[50, 20], new=[1, 1], dtype="f16", heads=2, group=2)
    lists, counts = OfChosenPages(0.5).lists(case)
    here, there = (listed(case, place, lists, p, page_counts=counts) for p in (case.problem, permuted(case.problem)))
    assert_same_bits(there, here)


def test_a_padded_batch_takes_lists(place):
    case = Case(cached=[30, 8, 40], new=[1, 0, 1], heads=2, group=2)
    lists, counts = OfChosenPages(0.6).lists(case)
    want = listed(case, place, lists, page_counts=counts)
    padded = np.full((3, 2, *case.query_rows.shape[1:]), np.nan, case.query_rows.dtype)
    padded[0, 0], padded[2, 0] = case.query_rows
    source, new = (place.collection(case.problem.collection), LAYER), case.problem.new.astype(np.int32)
    found = case.launch(place, kv.ops.attention_padded, source, padded, new, pages=lists, page_counts=counts)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x[[0, 2], 0].astype(np.float64), y.astype(np.float64), rtol=2e-2, atol=2e-2)
