# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.commit against the model, every byte of the pool, on the host and in GPU code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import assert_same
from reference.random_caches import clone, stored_problem

import kvarn as kv

KINDS: dict[str, dict[str, Any]] = {
    "paged f32": {"kind": "paged", "dtype": "f32", "page_size": 1},
    "paged bf16": {"kind": "paged", "dtype": "bf16", "page_size": 16},
    "continuous f16": {"kind": "continuous", "dtype": "f16"},
    "fa3 bf16": {"kind": "fa3", "dtype": "bf16"},
    "quantized": {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
    "mla": {"kind": "paged", "dtype": "bf16", "num_heads": 1, "head_size": 72, "is_mla": True, "page_size": 32},
    "int8": {"kind": "paged", "dtype": "i8", "scale_dtype": "f16", "head_size": 5, "granularity": 2},
}
NEW = [9, 0, 1, 6, 70]
PATHS: list[list[int]] = [[0, 2, 5, 8], [], [0], [], [0, 1, 2, 3, 4, 6, 9, 33, 64, 69]]


def problem_of(seed: int = 1, **shape: Any) -> Any:
    options = {"kind": "paged", "dtype": "f32", "num_layers": 3, "cached": [5, 9, 0, 30, 3], "new": NEW, **shape}
    return stored_problem(seed, **options)[1]


def lists(most: int = 12, end: int = -1) -> np.ndarray:
    found = np.full((len(PATHS), most), end, np.int32)
    for row, path in zip(found, PATHS, strict=True):
        row[: len(path)] = path
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("shape", KINDS)
def test_commit_moves_accepted_tokens_together_and_nothing_else(place, shape, layer):
    problem = problem_of(**KINDS[shape])
    found, expected = place.collection(problem.collection), clone(problem.collection)
    kv.ops.commit(found, layer, place.put(lists()), place.put(problem.row_offsets))
    model.commit(expected, layer, PATHS)
    assert_same(place, found, expected)


def test_lists_may_stand_at_the_rows_of_the_step(place):
    problem = problem_of(2)
    rows = np.full(sum(NEW), -1, np.int32)
    for first, path in zip(problem.row_offsets, PATHS, strict=False):
        rows[first : first + len(path)] = path
    found, expected = place.collection(problem.collection), clone(problem.collection)
    kv.ops.commit(found, None, place.put(rows), place.put(problem.row_offsets))
    model.commit(expected, None, PATHS)
    assert_same(place, found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", [-1, 70, 2**31 - 1, -(2**31)])
def test_a_list_ends_before_what_is_no_token_of_the_step(place, end):
    problem = problem_of(3)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    given = lists(12, end)
    given[:, -1] = 0  # what lies behind the end does not count
    kv.ops.commit(found, None, place.put(given), place.put(problem.row_offsets))
    model.commit(expected, None, PATHS)
    assert_same(place, found, expected)


@pytest.mark.parametrize("shape", [(5, 0), (5, 3)])
def test_lists_without_entries_move_nothing(place, shape):
    problem = problem_of(4)
    found = place.collection(problem.collection)
    kv.ops.commit(found, 0, place.put(np.full(shape, -1, np.int32)), place.put(problem.row_offsets))
    assert_same(place, found, problem.collection)


def test_tokens_without_a_page_are_dropped(place):
    problem = problem_of(5, page_size=4)
    c = problem.collection
    c.lookup_table[0, 1] = problem.null_page + 7  # of positions 4 to 7 of the first sequence
    found, expected = place.collection(c), clone(c)
    with place.unchecked():
        kv.ops.commit(found, None, place.put(lists()), place.put(problem.row_offsets))
    model.commit(expected, None, PATHS)
    assert_same(place, found, expected)


def test_commit_says_what_is_wrong_before_it_runs():
    problem = problem_of(6)
    c, offsets = problem.collection, problem.row_offsets
    for call, error, message in (
        (lambda: kv.ops.commit(c, 3, lists(), offsets), IndexError, r"layer must be in \[0, 3\), got 3"),
        (
            lambda: kv.ops.commit(c, None, lists()[:2], offsets),
            ValueError,
            r"accepted must have shape \[5, M\], got \[2,",
        ),
        (lambda: kv.ops.commit(c, None, lists()[None], offsets), ValueError, r"accepted must have shape \[5, M\]"),
        (lambda: kv.ops.commit(c, None, lists().astype(np.int64), offsets), TypeError, "accepted"),
        (lambda: kv.ops.commit(c, None, lists(), offsets[:3]), ValueError, r"row_offsets must have shape \[6\]"),
    ):
        with pytest.raises(error, match=message):
            call()
