# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks as functions, and trees of drafts: the rows of ``reference.function_rows``.

Beside them, what is no row: the same bits, tiles that are not visited, and what is refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from reference import attention as reference, attention_rules as rules
from reference.attention_functions import document, prefix, problem_of, query_of, t5, t5_buckets
from reference.attention_rows import poisoned
from reference.case import LAYER, Case, OfTree, Row, assert_same_bits, on, rows
from reference.function_rows import ALIKE, BIAS_BY_DISTANCE, DOCUMENTS, DRAFTS, OF_F16, ONE, PARENTS, TABLES
from reference.places import Interpreted

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand
from kvarn.ops import reads

pytestmark = pytest.mark.whole


@rows(TABLES["functions"])
def test_scores_and_masks_are_what_their_functions_say(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["trees"])
def test_a_draft_of_a_tree_sees_its_path(row: Row, kernel: str):
    row.check(kernel)


# --- the same bits -----------------------------------------------------------------------------------


def test_built_in_scores_are_functions_of_kv_scores_to_a_bit():
    slopes = np.array([0.5, -0.1], np.float32)
    for built_in, function in (
        ({"softcap": 2.0}, kv.scores.softcap(2.0)), ({"slopes": slopes.tolist()}, (kv.scores.alibi, slopes)),
    ):  # fmt: skip
        place, case = on("tile", [40], [7], **{**OF_F16, **ONE}, **built_in)
        _, own = on("tile", [40], [7], **{**OF_F16, **ONE}, score=(function, None))
        assert_same_bits(own.run(place), case.run(place))
    with pytest.raises(ValueError, match="takes a positive number, got 0"):
        kv.scores.softcap(0)


@pytest.mark.parametrize(
    ("kernel", "given"),
    [("auto", {"score": BIAS_BY_DISTANCE, "mask": DOCUMENTS}), ("host", {"form": OfTree(((-1, 0, 0, 2),), words=1)})],
    ids=["functions", "tree"],
)  # fmt: skip
def test_where_pages_lie_does_not_matter_to_a_bit(kernel, given):
    place, case = on(kernel, [1], [1], **OF_F16, **given)
    if "form" not in given:
        rules.pages_elsewhere(place, case, 190)
        return
    case = dataclasses.replace(case, cached=[150], new=[4])
    moved = dataclasses.replace(case, change=rules.move_pages)
    assert_same_bits(moved.run(place), case.run(place))


def test_the_order_of_warps_changes_no_bit_of_what_tables_hold():
    _, case = on("tile", [200], [30], **{**OF_F16, **ONE, "group": 4}, score=BIAS_BY_DISTANCE, schedule={"keys": 32})
    first, other = (case.run(Interpreted(order=order)) for order in (None, rules.RANDOM))
    assert_same_bits(other, first)


def test_what_rounds_read_before_they_wait_or_compute_again_changes_no_bit():
    """The bias of far keys, and which tiles a list has."""
    rng, problem = problem_of(29, cached=[100, 0], new=[9, 20], num_heads=1)
    query, ids, found = query_of(rng, problem, 2), np.sort(rng.integers(0, 3, (2, 110)), axis=1).astype(np.int32), []
    score, mask = (
        (t5, rng.standard_normal((2, 8)).astype(np.float32), t5_buckets(40, 8, 30)),
        kv.masks.causal & document,
    )
    with kv.emulated("sm_90a"):
        given = problem.collection, query, problem.row_offsets
        tiles = kv.ops.block_mask(*given, (mask, ids), score=score)
        for settings in ({"options": {"start-kv-work": "reads=true"}}, {"disable": ["start-kv-work"]}):
            with kv.pipeline(**settings):
                found.append(kv.ops.attention(given[0], 1, *given[1:], score=score, block_mask=tiles))
    assert_same_bits(*found)


# --- what is not visited ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["simt", "host"])
def test_keys_behind_the_end_of_a_mask_may_be_anything_also_in_a_conjunction(kernel):
    """Keys of a cross attention that no query stands behind."""
    place, case = on(kernel, [3], [120], **{**OF_F16, **ONE}, change=poisoned(5, 123))
    query, offsets, keys = case.query_rows[:2], np.array([0, 2], np.uint32), np.array([0, 120], np.uint32)
    mask = (kv.masks.causal & document, ALIKE)
    out, _ = case.launch(place, kv.ops.attention, case.source(place), query, offsets, mask=mask, kv_offsets=keys)
    want, _ = reference.attention(case.problem.collection, LAYER, query, offsets, kv_offsets=keys)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("written", ["and", "or"])
def test_tiles_after_a_bound_are_not_visited_beside_what_is_read(written):
    prefixes = np.array([10], np.int32)
    mask = (kv.masks.causal & document, ALIKE) if written == "and" else (prefix, prefixes)
    place, case = on("auto", [0], [210], **{**OF_F16, **ONE}, change=poisoned(128, 210))
    out, _ = case.launch(place, kv.ops.attention, case.source(place), case.query_rows, case.offsets, mask=mask)
    assert np.isfinite(out[:96]).all()  # a block of queries, which ends before the poison
    assert np.isnan(out[128:]).all()


@pytest.mark.thorough
def test_tiles_over_8_bit_pages_leave_room_for_tables():
    """Where a score reads an array by query and key; what it reads by the head or by one position needs none."""
    rng, problem = problem_of(28, dtype="f8e4m3", num_heads=1, head_size=128)
    query = query_of(rng, problem, 4)
    by_pairs = (t5, np.zeros((4, 8), np.float32), np.zeros(60, np.int32))
    by_row = (lambda s, b, h, q, k, of_head, of_row: s * of_row[q] + of_head[h], *np.zeros((2, 60), np.float32))
    cases = ((by_pairs, None, 112, True), (by_pairs, {"keys": 128}, 128, False), (by_row, None, 128, False))
    for score, schedule, keys, table in cases:
        attributes, arrays = reads._modified(score, "causal", None, None, None, "")
        operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy(), *[None] * 6, *arrays)
        text = reads._ATTENTION.compile(operands, attributes, schedule, "sm_90a").stages["tabulate-kv-scores"]
        assert ("kv.make_table" in text, f"keys = {keys} : i64" in text) == (table, True)


# --- trees of several sources, and what is no tree ---------------------------------------------------


def test_of_several_sources_the_one_with_the_drafts_has_the_tree():
    first, other = (Case(cached=DRAFTS[0], new=DRAFTS[1], **{**OF_F16, **ONE}, seed=seed) for seed in (8, 9))
    query, c, offsets, bits = first.query_rows, first.problem.collection, first.offsets, OfTree(PARENTS).bits()
    memory = other.problem.collection
    out = kv.ops.attention([memory, c], [1, 1], query, offsets, mask=["null", "causal"], tree=[None, bits])
    of_memory = kv.ops.attention(
        memory, 1, query, offsets, mask="null", out=np.empty(query.shape, np.float32), return_lse=True
    )
    np.testing.assert_array_equal(out, kv.ops.attention(c, 1, query, offsets, tree=bits, prior=of_memory))


def test_what_is_no_tree_is_refused():
    case, bits = Case(cached=DRAFTS[0], new=DRAFTS[1], **{**OF_F16, **ONE}), OfTree(PARENTS).bits()
    query, c, offsets = case.query_rows, case.problem.collection, case.offsets
    operand = KVCacheMHAOperand(c.get_key_cache(1))
    for call, error, message in (
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits[:-1]), ValueError, r"tree must be int32 \[53, W\]"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits[:, 0]), ValueError, "or uint64"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits.astype(np.float64)), TypeError, "dtype"),
        (lambda: kv.ops.attention(operand, operand, query, offsets, tree=bits), ValueError, "None for operands"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits, kv_offsets=offsets), ValueError, "kv_offsets"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits, mask="wide"), ValueError, "mask must be one of"),
    ):
        with pytest.raises(error, match=message):
            call()
