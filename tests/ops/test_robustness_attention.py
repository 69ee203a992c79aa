# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of attention on the host, and of the kernels for GPUs in the PTX interpreter where that is fast enough.

============================================================ =====
infinities where there is no token                           16
a prefix hit is a cold start                                 17
the order of the pages                                       18
anything past the last token                                 19
garbage in other query rows, in keys that are not seen       20
prompts in parts                                             21
a large mixed batch                                          22
no rows, no sequences                                        23
layers that differ, windows, sinks                           24
============================================================ =====

The cases are in ``reference.attention_cases``; tests/gpu has all of them for every kernel.
"""

from __future__ import annotations

import pytest
from reference import attention_cases as cases
from reference.places import Interpreted, Place

run = cases.Runner(lambda kind: Place() if kind == "auto" else Interpreted())
latent = cases.LatentRunner(run.place_of)
KINDS = ["auto", "simt", "mma", "decode"]
# Head size, page size, mask.
SEEN = [
    (256, 16, {}), (256, 16, {"mask": "null"}), (256, 128, {"window": 100}), (256, 256, {"chunk": 96}), (512, 64, {}),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_nan_is_not_taken_for_one_without_keys(kind):
    cases.nan_queries(run, kind)


@pytest.mark.parametrize(("head_size", "page_size", "options"), SEEN, ids=str)
def test_infinities_without_a_token_do_not_show(head_size, page_size, options):
    seeds = range(2 if head_size < 512 else 1)
    cases.infinities(run, "auto", head_size, page_size, options, list(cases.BATCHES)[:3], seeds)


@pytest.mark.parametrize(
    ("kind", "head_size", "page_size", "options", "batch"),
    [("simt", 512, 16, {}, "short"), ("mma", 256, 64, {}, "four prefills"), ("decode", 64, 16, {}, "decode of 512")],
    ids=str,
)
def test_infinities_without_a_token_do_not_show_in_gpu_code(kind, head_size, page_size, options, batch):
    cases.infinities(run, kind, head_size, page_size, options, [batch], seeds=[3])


@pytest.mark.parametrize("length", [300, 512])
@pytest.mark.parametrize("group", [1, 8])
def test_a_prefix_hit_is_a_cold_start(length, group):
    cases.prefix_hit(run, "auto", length, group)


def test_a_prefix_hit_is_a_cold_start_in_gpu_code():
    cases.prefix_hit(run, "mma", 300, 1, head_size=32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [512, 301])
def test_the_order_of_the_pages_does_not_change_a_bit(kind, keys):
    cases.reversed_pages(run, kind, keys)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("auto", "bf16"), ("auto", "f8e4m3"), ("simt", "bf16"), ("mma", "bf16"), ("mma", "f8e4m3"),
     ("decode", "bf16"), ("decode", "f8e4m3")],
)  # fmt: skip
def test_slots_past_the_last_token_may_hold_anything(kind, dtype):
    cases.poisoned_tails(run, kind, dtype, 64, [1, 1, 1] if kind == "decode" else [1, 5, 2])


@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_garbage_in_speculative_rows_does_not_reach_the_first(dtype, group):
    cases.garbage_queries(run, "auto", dtype, group, range(2, 9), range(4))


@pytest.mark.parametrize(
    ("kind", "dtype", "group", "widths"),
    [
        ("mma", "bf16", 16, [5]), ("mma", "f8e4m3", 8, [3]),
        ("decode", "bf16", 8, [2]), ("decode", "f8e4m3", 8, [2]),
    ],
    ids=str,
)  # fmt: skip
def test_garbage_in_speculative_rows_does_not_reach_the_first_in_gpu_code(kind, dtype, group, widths):
    cases.garbage_queries(run, kind, dtype, group, widths, [1])


@pytest.mark.parametrize(("kind", "new"), [("auto", 12), ("simt", 12), ("mma", 40), ("decode", 2)])
def test_keys_and_finite_values_that_a_row_does_not_see_do_not_show(kind, new):
    cases.masked_keys(run, kind, 50, new)


@pytest.mark.parametrize(("kind", "new", "spread"), [("auto", 12, 4), ("simt", 12, 1), ("mma", 40, 16)])
def test_a_value_that_is_not_finite_reaches_rows_of_its_tile_at_most(kind, new, spread):
    cases.seen_infinities(run, kind, 50, new, spread)


def test_prompts_in_parts_are_prompts_at_once():
    cases.chunked_prefill(run, "auto")


def test_a_large_mixed_batch_ends():
    cases.large_batch(run, "auto", head_size=16)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_no_sequence_keep_what_was_there(kind):
    cases.no_rows(run, kind)


@pytest.mark.parametrize("new", [[1, 1, 1], [3, 9, 20]])
def test_layers_of_other_heads_pages_and_windows_take_turns(new):
    cases.alternating_layers(run, ["auto", "auto"], new)


# --- latent rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "latent"])
def test_latent_rows_hide_what_holds_no_token(kind):
    batch = ["decode of 512"] if kind == "auto" else ["short"]
    cases.infinities(latent, kind, 160, 16, {}, batch, [3])
    cases.poisoned_tails(latent, kind, "bf16", 160, [1, 1, 1])


@pytest.mark.parametrize("kind", ["auto", "latent"])
def test_latent_rows_do_not_depend_on_pages_and_other_queries(kind):
    cases.reversed_pages(latent, kind, 301 if kind == "auto" else 77, head_size=160)
    cases.garbage_queries(latent, kind, "bf16", *((4, [2, 3], [0]) if kind == "auto" else (8, [5], [1])), head_size=160)
