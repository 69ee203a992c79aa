# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of attention on a GPU: every case of ``reference.attention_cases`` for every kernel that takes it.

``"auto"`` is the choice of the operation: decode for few queries, else tiles, else simt.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from reference import attention_cases as cases
from reference.places import Place, Torch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SECONDS = 60  # that a launch may take before it counts as hanging
KINDS = ["auto", "simt", "mma", "decode"]
TILED = ["auto", "simt", "mma"]
MASKS = [{}, {"mask": "null"}, {"window": 100}, {"chunk": 96}]


class Watched(cases.Runner):
    """Gives up, and all of the run, when a launch does not end: nothing could follow on that GPU."""

    def finish(self, place: Place) -> None:
        done = torch.cuda.Event()
        done.record()
        limit = time.monotonic() + SECONDS
        while not done.query():
            if time.monotonic() > limit:
                pytest.exit(f"attention did not end within {SECONDS} seconds", returncode=1)
            time.sleep(0.001)


class WatchedLatent(Watched, cases.LatentRunner):
    """The same, over latent rows."""


run = Watched(lambda kind: Torch())
latent = WatchedLatent(run.place_of)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_nan_is_not_taken_for_one_without_keys(kind):
    cases.nan_queries(run, kind)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    ("kind", "page_size"), [("auto", 16), ("auto", 256), ("simt", 32), ("mma", 64), ("decode", 128)]
)
def test_infinities_without_a_token_do_not_show(kind, page_size, options):
    batches = [name for name in cases.BATCHES if kind != "decode" or "decode" in name]
    cases.infinities(run, kind, 256, page_size, options, batches, range(4))


@pytest.mark.parametrize("options", MASKS[::2], ids=str)
def test_infinities_without_a_token_do_not_show_in_wide_heads(options):
    cases.infinities(run, "auto", 512, 64, options, list(cases.BATCHES), range(4))


@pytest.mark.parametrize("kind", TILED)
@pytest.mark.parametrize("length", [300, 512])
@pytest.mark.parametrize("group", [1, 8])
def test_a_prefix_hit_is_a_cold_start(kind, length, group):
    cases.prefix_hit(run, kind, length, group, head_size=128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [512, 301])
def test_the_order_of_the_pages_does_not_change_a_bit(kind, keys):
    cases.reversed_pages(run, kind, keys)
    cases.reversed_pages(run, kind, keys, "f8e4m3", 128)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_past_the_last_token_may_hold_anything(kind, dtype):
    for new in ([1, 1, 1], [2, 1, 2], [1, 5, 2], [70, 3, 129]):
        if kind != "decode" or max(new) <= 4:
            cases.poisoned_tails(run, kind, dtype, 64, new)


@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("kind", TILED)
def test_garbage_in_speculative_rows_does_not_reach_the_first(kind, dtype, group):
    cases.garbage_queries(run, kind, dtype, group, range(2, 9), range(8))


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_garbage_in_speculative_rows_does_not_reach_the_first_of_a_decode(dtype):
    """What the decode kernel takes: 16 rows of a sequence and KV head."""
    cases.garbage_queries(run, "decode", dtype, 8, [2], range(30))
    cases.garbage_queries(run, "decode", dtype, 4, [2, 3, 4], range(10))
    cases.garbage_queries(run, "decode", dtype, 2, range(2, 9), range(8))


@pytest.mark.parametrize(("kind", "new"), [("auto", 12), ("simt", 12), ("mma", 70), ("decode", 2), ("decode", 4)])
def test_keys_and_finite_values_that_a_row_does_not_see_do_not_show(kind, new):
    for cached in (50, 500):
        cases.masked_keys(run, kind, cached, new)


@pytest.mark.parametrize(("kind", "new", "spread"), [("simt", 12, 1), ("mma", 70, 16), ("mma", 12, 16)])
def test_a_value_that_is_not_finite_reaches_rows_of_its_tile_at_most(kind, new, spread):
    cases.seen_infinities(run, kind, 50, new, spread)


@pytest.mark.parametrize("kind", TILED)
def test_prompts_in_parts_are_prompts_at_once(kind):
    cases.chunked_prefill(run, kind)


@pytest.mark.parametrize("kind", TILED)
def test_a_large_mixed_batch_ends(kind):
    cases.large_batch(run, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_no_sequence_keep_what_was_there(kind):
    cases.no_rows(run, kind)


@pytest.mark.parametrize(
    ("kinds", "new"),
    [(["auto", "auto"], [1, 1, 1]), (["auto", "auto"], [3, 9, 20]), (["mma", "simt"], [1, 1, 1]),
     (["simt", "simt"], [3, 9, 20]), (["decode", "auto"], [2, 1, 2])],
    ids=str,
)  # fmt: skip
def test_layers_of_other_heads_pages_and_windows_take_turns(kinds: list[str], new: Any):
    cases.alternating_layers(run, kinds, new)
    cases.alternating_layers(run, kinds, new, sinks=False)


@pytest.mark.parametrize("kind", ["latent", "simt"])
def test_latent_rows_hide_what_holds_no_token(kind):
    cases.infinities(latent, kind, 576, 64, {}, list(cases.BATCHES), range(4))
    for dtype in ("bf16", "f8e4m3"):
        cases.poisoned_tails(latent, kind, dtype, 576, [1, 1, 1])
        cases.poisoned_tails(latent, kind, dtype, 576, [1, 5, 2])


@pytest.mark.parametrize("kind", ["latent", "simt"])
def test_latent_rows_do_not_depend_on_pages_and_other_queries(kind):
    for keys in (512, 301):
        cases.reversed_pages(latent, kind, keys, head_size=576)
    for group in (8, 16):
        cases.garbage_queries(latent, kind, "bf16", group, range(2, 9), range(5), head_size=576)
        cases.garbage_queries(latent, kind, "f8e4m3", group, range(2, 9), range(5), head_size=576)
