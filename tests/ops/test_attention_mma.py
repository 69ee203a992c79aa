# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles with products by mma.sync, run by the PTX interpreter.

tests/ops/test_attention_ptx.py has its cases; here are its schedules: copies in groups that the whole block waits for.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from reference.tile_attention import Choice, batch, case_of, check, compiled

from kvarn.emulator import grid as ptx

pytestmark = pytest.mark.sampled(20)


def mma(**given: Any) -> Choice:
    return Choice(**{"target": "sm_80", "producer": False, "maps": False, **given})


SCHEDULES = {
    "two stages": mma(),
    "one stage": mma(stages=1),
    "three stages": mma(stages=3),
    "two warpgroups": mma(consumers=2),
    "three warpgroups": mma(consumers=3, keys=32),
    "tiles of 16 keys": mma(keys=16),
    "tiles of 96 keys": mma(keys=96),
    "persistent blocks": mma(blocks=2),
    "split keys": mma(splits=3),
    "copies when they are needed": mma(options=(("pipeline-kv-loops", "copies=false"),)),
    "no pass that may be left out": mma(disable=("split-kv-loops", "pipeline-kv-loops", "skip-kv-rescales")),
    "a target with more": mma(target="sm_90a", maps=True, entries=(("instruction", "mma.sync"),)),
}


# Tiles of 64 keys: one, two, an odd number, and of a sequence without rows none; and uneven ends behind many.
@pytest.mark.parametrize("lengths", [([20, 100, 150, 90], [5, 7, 9, 0]), ([260, 3], [17, 2])], ids=["few", "uneven"])
@pytest.mark.parametrize("dtype", ["bf16", "i8"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_changes_no_result(name, dtype, lengths):
    scales = {"scale_dtype": "f32", "granularity": 16} if dtype == "i8" else {}
    cached, new = lengths
    choice = SCHEDULES[name]
    if dtype == "i8" and choice.maps:
        choice = mma(target="sm_90a", entries=choice.entries)
    check(batch(cached, new, dtype=dtype, page_size=8, **scales), choice)


@pytest.mark.parametrize("choice", [mma(), mma(stages=3, blocks=1), mma(consumers=2, stages=1)], ids=str)
@pytest.mark.parametrize(
    "order", [ptx.Order("forward", "early"), ptx.Order("backward", "late"), ptx.Order("random", "random", 1)], ids=str
)
@pytest.mark.parametrize(("dtype", "page_size"), [("f8e5m2", 16), ("bf16", 5)])
def test_the_order_of_warps_and_copies_changes_no_result(dtype, page_size, choice, order):
    check(batch([130, 3], [5, 2], dtype=dtype, page_size=page_size), choice, orders=[order])


def test_query_rows_that_warps_cannot_hold_are_read_from_shared_memory():
    check(batch([70], [19], head_size=144, group=2), mma(keys=32), scale=-0.2)


def test_copies_go_on_while_a_tile_is_multiplied():
    b = batch([260], [17])
    text = compiled(case_of(b), b.problem.collection.spec, mma(stages=3)).asm["ptx"]
    assert re.search(r"cp\.async\.wait_group\s+1;", text)
    for missing in ("mbarrier", "wgmma", "fence.proxy", "stmatrix", "setmaxnreg"):
        assert missing not in text, missing
