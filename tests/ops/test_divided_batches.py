# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Batches of decodes and prompts: when a call divides them, and calls in which one of the two kernels has nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.case import Case, assert_same_bits
from reference.places import Interpreted

import kvarn as kv

pytestmark = pytest.mark.whole

HOPPER = Interpreted("sm_90a")
EXPLICIT = {"kind": "tile", "rows": 64, "keys": 16, "decode_threshold": 2}
OF_BOTH = {"rows": 64, "keys": 64, "max_batch": 8}  # of which select-kv-schedule divides uneven batches

# Cached and new tokens, the cache's elements, and the schedule.
BATCHES: dict[str, tuple[list[int], list[int], str, dict[str, Any]]] = {
    "decodes alone": ([30, 0, 41, 9], [1, 0, 2, 1], "bf16", EXPLICIT),
    "prompts alone": ([0, 33], [19, 40], "f8e4m3", EXPLICIT),
    "no tokens": ([30, 12], [0, 0], "bf16", EXPLICIT),
    "empty sequences between": ([30, 7, 0, 12, 50], [1, 0, 21, 0, 3], "f8e4m3", EXPLICIT),
    "even prompts": ([0, 33], [19, 24], "bf16", OF_BOTH),
    "even prompts, fp8": ([0, 33], [19, 24], "f8e4m3", OF_BOTH),
    "a prompt among decodes": ([70, 50, 20, 33, 12, 8], [1, 1, 40, 1, 1, 1], "bf16", OF_BOTH),
    "a prompt among decodes, fp8": ([70, 50, 20, 33, 12, 8], [1, 1, 40, 1, 1, 1], "f8e4m3", OF_BOTH),
    "a share of one block": ([70, 50, 20], [1, 1, 40], "bf16", {**EXPLICIT, "decode_share": 1}),
    "splits of a long one": ([2200, 30, 40, 9, 8], [9, 1, 1, 1, 1], "bf16", {**EXPLICIT, "keys": 64}),
    "more tiles than there is room for splits of": ([2100] * 5, [3] * 5, "bf16", {**EXPLICIT, "keys": 64}),
    "more sequences than threads": ([9, *[0] * 396, 5, 30], [1, *[0] * 299, 21, *[0] * 95, 3, 2, 1], "bf16", EXPLICIT),
    "batch invariant": ([70, 5, 20], [1, 2, 40], "f8e4m3", {**EXPLICIT, "batch_invariant": True}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_any_class(name):
    cached, new, dtype, schedule = BATCHES[name]
    Case(cached=cached, new=new, page_size=8, schedule=schedule, dtype=dtype, query="bf16").check(HOPPER)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_batches_of_one_shape_change_class(dtype):
    """One after the other, as a captured graph is replayed: no kernel takes what one before it may not have left."""
    schedule = {**EXPLICIT, "keys": 64, "max_batch": 8, "decode_share": 1}
    case = Case(cached=[2100, 1800, 20, 33, 12], new=[9, 1, 40, 0, 1], page_size=8, schedule=schedule, dtype=dtype)
    query, source = case.query_rows, case.problem.collection

    def rows_of(new: list[int], **options: Any) -> np.ndarray:
        out, offsets = np.zeros(query.shape, np.float32), np.cumsum([0, *new]).astype(np.int32)
        kv.ops.attention(source, 0, query, offsets, out=out, **options)
        return out

    classes = [[9, 1, 40, 0, 1], [1, 1, 1, 0, 1], [9, 0, 40, 0, 0], [0] * 5, [2, 0, 3, 0, 0]]
    with HOPPER.active():
        found = [rows_of(new, schedule=schedule) for new in classes]
    for rows, new in zip(found, classes, strict=True):
        np.testing.assert_allclose(rows, rows_of(new), atol=2e-2, err_msg=str(new))


@pytest.mark.parametrize("chosen", [EXPLICIT, {}], ids=["given", "by default"])
def test_a_sequence_has_the_same_bits_in_any_batch(chosen):
    """Where batch_invariant is asked for: its own new tokens decide its kernel, and its own length what is split."""
    schedule = {**chosen, "batch_invariant": True}
    whole = Case(cached=[70, 5, 20, 90], new=[1, 2, 40, 3], page_size=8, schedule=schedule)

    def rows_of(kept: list[int], schedule: dict[str, Any] = schedule) -> np.ndarray:
        new = np.array([n if b in kept else 0 for b, n in enumerate(whole.new)])
        query = np.concatenate(
            [x for b, x in enumerate(np.split(whole.query_rows, np.cumsum(whole.new)[:-1])) if b in kept]
        )
        offsets, out = np.concatenate([[0], new.cumsum()]).astype(np.int32), np.zeros_like(query)
        with HOPPER.active():
            kv.ops.attention(whole.problem.collection, 0, query, offsets, out=out, schedule=schedule)
        return out

    of_all = np.split(rows_of([0, 1, 2, 3]), np.cumsum(whole.new)[:-1])
    for kept in ([0, 3], [2], [1, 2]):
        assert_same_bits(rows_of(kept), np.concatenate([of_all[b] for b in kept]))
    decodes = {"batch_invariant": True, "max_queries": 2}
    assert_same_bits(rows_of([0, 1], decodes), np.concatenate(of_all[:2]))
