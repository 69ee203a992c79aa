# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What may not change a bit of attention on a GPU: every rule of ``reference.attention_rules`` for every kernel.

``auto`` is the choice of the operation: decode for few queries, else tiles, else simt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention_rules as rules
from reference.case import NULL, Case, named, window
from reference.kinds import MMA
from reference.places import Torch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

GPU = Torch()
SCHEDULES: dict[str, Any] = {
    "auto": {}, "simt": {"kind": "simt"}, "mma": MMA, "decode": {"kind": "decode"}, "latent": {"kind": "latent"},
}  # fmt: skip
KINDS, TILED = ["auto", "simt", "mma", "decode"], ["auto", "simt", "mma"]
PREFILLS, DECODE = ([0, 3, 40, 2], [30, 1, 7, 20]), ([512, 77], [1, 1])
MASKS = [named("causal"), NULL, window(100), named("chunked_causal", 96)]


def case_of(kind: str, **case: Any) -> Case:
    return Case(cached=[1], new=[1], schedule=SCHEDULES[kind], **case)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_nan_is_not_taken_for_one_without_keys(kind):
    rules.nan_queries(GPU, case_of(kind))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(
    ("kind", "page_size", "head_size"),
    [
        ("auto", 16, 256),
        ("auto", 256, 256),
        ("auto", 64, 512),
        ("simt", 32, 256),
        ("mma", 64, 256),
        ("decode", 128, 256),
    ],
)
def test_infinities_without_a_token_do_not_show(kind, page_size, head_size, mask):
    for cached, new in [DECODE] if kind == "decode" else [PREFILLS, DECODE, ([0], [40])]:
        for seed in range(4):
            Case(cached=cached, new=new, mask=mask, head_size=head_size, page_size=page_size, seed=seed,
                 shape={"poison": np.inf}, schedule=SCHEDULES[kind]).check(GPU)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [512, 301])
@pytest.mark.parametrize(("dtype", "head_size"), [("bf16", 64), ("f8e4m3", 128)])
def test_where_pages_lie_does_not_change_a_bit(kind, keys, dtype, head_size):
    rules.pages_elsewhere(GPU, case_of(kind, dtype=dtype, head_size=head_size), keys)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_past_the_last_token_may_hold_anything(kind, dtype):
    for new in ([1, 1, 1], [2, 1, 2], [1, 5, 2], [70, 3, 129]):
        if kind != "decode" or max(new) <= 4:
            rules.poisoned_tails(GPU, case_of(kind, dtype=dtype), new)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize(
    ("kind", "group", "widths"),
    [*((kind, group, range(2, 9)) for kind in TILED for group in (8, 16)),
     ("decode", 8, [2]), ("decode", 4, [2, 3, 4]), ("decode", 2, range(2, 9))],
)  # fmt: skip
def test_garbage_in_speculative_rows_does_not_reach_the_first(kind, dtype, group, widths):
    for width in widths:
        for seed in range(8):
            rules.garbage_queries(GPU, case_of(kind, dtype=dtype, group=group), width, seed)


@pytest.mark.parametrize(("kind", "new"), [("auto", 12), ("simt", 12), ("mma", 70), ("decode", 2), ("decode", 4)])
def test_keys_and_finite_values_that_a_row_does_not_see_do_not_show(kind, new):
    for cached in (50, 500):
        rules.masked_keys(GPU, case_of(kind), cached, new)


@pytest.mark.parametrize(("kind", "new", "spread"), [("simt", 12, 1), ("mma", 70, 16), ("mma", 12, 16)])
def test_a_value_that_is_not_finite_reaches_rows_of_its_tile_at_most(kind, new, spread):
    rules.seen_infinities(GPU, case_of(kind), 50, new, spread)


@pytest.mark.parametrize(
    ("kinds", "new"),
    [(["auto", "auto"], [1, 1, 1]), (["auto", "auto"], [3, 9, 20]), (["mma", "simt"], [1, 1, 1]),
     (["simt", "simt"], [3, 9, 20]), (["decode", "auto"], [2, 1, 2])],
    ids=str,
)  # fmt: skip
def test_layers_of_other_heads_pages_and_windows_take_turns(kinds: list[str], new: Any):
    rules.layers_by_turns(GPU, *(case_of(kind) for kind in kinds), new)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("kind", ["latent", "simt"])
def test_latent_rows_hold_to_the_rules(kind, dtype):
    case = case_of(kind, dtype=dtype, head_size=576, value_size=512)
    for new in ([1, 1, 1], [1, 5, 2]):
        rules.poisoned_tails(GPU, case, new)
    for keys in (512, 301):
        rules.pages_elsewhere(GPU, case, keys)
    for width in range(2, 9):
        rules.garbage_queries(GPU, case, width)
