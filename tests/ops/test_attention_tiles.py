# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles, run by the PTX interpreter: every case it takes, every schedule, every pass left out.

What holds no token is NaN: slots past a sequence's end, pages of no sequence, shared memory at the start. Pages are in
random order. Each case is a rule: what is named is what may not change the result.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.case import by_name
from reference.tile_attention import TARGET, Choice, batch, case_of, check, compiled, run, trace

import kvarn as kv
from kvarn.emulator import EmulationError, EmulationHazard, grid as ptx
from kvarn.lowering import pipeline
from kvarn.lowering.kernels.attention import partials as partial_results
from kvarn.lowering.kernels.attention.case import Masking

pytestmark = pytest.mark.whole

RAGGED: dict[str, Any] = {"cached": [100, 0, 5, 70], "new": [7, 0, 20, 1]}  # one empty, one longer than a tile of keys
LONG: dict[str, Any] = {"cached": [260], "new": [33]}
CP_ASYNC = Choice(maps=False)
ALONE, THREE_COPY = Choice(maps=False, producer=False), Choice(maps=False, producers=3)  # who copies row by row
QUEUE_OF_TWO = Choice(consumers=2, producers=2, blocks=2, queue=True)
NO_PRODUCER = Choice(producer=False)


def mma(**given: Any) -> Choice:
    """Products by mma.sync: copies in groups that the whole block waits for."""
    return Choice(**{"target": "sm_80", "producer": False, "maps": False, **given})


def scaled(dtype: str, granularity: int, scale: str = "f32") -> dict[str, Any]:
    return {"dtype": dtype, "scale_dtype": scale, "granularity": granularity}


# --- cases -------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Choice, dict[str, Any]]] = {
    "96 columns by TMA": (Choice(), {**RAGGED, "head_size": 96}),
    "pages of a tile by TMA": (Choice(), {**RAGGED, "head_size": 128, "page_size": 64}),
    "pages of two tiles by TMA": (Choice(), {**RAGGED, "page_size": 128}),
    "continuous by TMA": (Choice(), {**RAGGED, "head_size": 128, "kind": "continuous"}),
    "FlashAttention 3 by TMA": (Choice(), {**RAGGED, "kind": "fa3"}),
    "pages of a tile by cp.async": (CP_ASYNC, {**RAGGED, "head_size": 96, "page_size": 64}),
    "continuous by cp.async": (CP_ASYNC, {**RAGGED, "kind": "continuous"}),
    "FlashAttention 3 by cp.async": (CP_ASYNC, {**RAGGED, "kind": "fa3"}),
    "groups of three in a padded batch": (Choice(), {**RAGGED, "group": 3, "num_heads": 2}),
    "groups of eight": (Choice(), {**RAGGED, "group": 8}),
    # Rows that come one by one from pages of any size.
    "pages of 5": (CP_ASYNC, {"page_size": 5}),
    "pages of 7, f16, three producers": (THREE_COPY, {"dtype": "f16", "page_size": 7, "head_size": 80}),
    "pages of 1, no producer": (ALONE, {"page_size": 1}),
    "pages of 48": (CP_ASYNC, {"page_size": 48, "head_size": 96}),
    "8-bit pages of 5, three producers": (THREE_COPY, {"dtype": "f8e4m3", "page_size": 5, "head_size": 128}),
    "8-bit pages of 1, no producer": (ALONE, {"dtype": "f8e5m2", "page_size": 1, "head_size": 80}),
    "granules of 4 in pages of 7": (CP_ASYNC, {**scaled("i8", 4), "page_size": 7}),
    "granules of 8 in pages of 48, three producers": (THREE_COPY, {**scaled("f8e4m3", 8), "page_size": 48}),
    "granules of 48, no producer": (ALONE, {**scaled("i8", 48), "head_size": 96}),
    "scales of f16": (CP_ASYNC, {**scaled("f8e4m3", 16, "f16")}),
    # Boxes of 8-bit elements, converted by all who copy.
    "boxes of 128": (Choice(), {"dtype": "f8e4m3", "head_size": 128}),
    "boxes of f8e5m2, three producers": (Choice(producers=3), {"dtype": "f8e5m2", "page_size": 64}),
    "boxes of 80, two of each, a queue": (QUEUE_OF_TWO, {"dtype": "f8e4m3", "head_size": 80, "page_size": 8}),
    "boxes of 192, no producer": (NO_PRODUCER, {"dtype": "f8e4m3", "head_size": 192}),
    "boxes of a scale a head": (Choice(), {**scaled("i8", 64), "page_size": 32}),
    "boxes of granules of 32, three producers": (Choice(producers=3), {**scaled("f8e4m3", 32), "head_size": 128}),
    "boxes of granules of 4, two of each, a queue": (QUEUE_OF_TWO, {**scaled("i8", 4), "head_size": 48}),
    "boxes of granules of 8, no producer": (NO_PRODUCER, {**scaled("f8e4m3", 8), "head_size": 96}),
    # Heads within 16 bytes of their neighbours come by boxes of tokens.
    "heads of 72 bytes": (QUEUE_OF_TWO, {"dtype": "f8e4m3", "head_size": 72, "num_heads": 2, "group": 2}),
    "heads of 120 bytes": (NO_PRODUCER, {"dtype": "f8e5m2", "head_size": 120, "num_heads": 2, "group": 2}),
    "heads of 8 bytes": (QUEUE_OF_TWO, {**scaled("i8", 8), "head_size": 8, "num_heads": 4, "group": 2}),
    "heads of 136 bytes": (NO_PRODUCER, {**scaled("f8e4m3", 136), "head_size": 136, "num_heads": 2, "group": 2}),
    "three warpgroups multiply what one converts": (
        Choice(consumers=3, blocks=2, queue=True), {"dtype": "f8e4m3", "cached": [170, 0]}),
    "three warpgroups, scaled": (
        Choice(consumers=3, blocks=2, queue=True), {**scaled("f8e4m3", 16), "cached": [170, 0]}),
    # Heads of no whole steps have columns of zeros.
    "heads of 24": (Choice(), {"dtype": "f16", "head_size": 24}),
    "heads of 120 by cp.async": (CP_ASYNC, {"head_size": 120}),
    "heads of 136": (Choice(), {"head_size": 136}),
    "8-bit heads of 8 by cp.async": (CP_ASYNC, {"dtype": "f8e4m3", "head_size": 8}),
    "query rows that warps cannot hold": (mma(keys=32), {"head_size": 144, "group": 2, "cached": [70], "new": [19]}),
}  # fmt: skip


# Each differs from one of make check in an element, a size or who copies, which another of make check has.
LIKE_OTHERS = (
    "pages of a tile by TMA", "pages of two tiles by TMA", "FlashAttention 3 by TMA", "pages of a tile by cp.async",
    "continuous by cp.async", "groups of eight", "pages of 48", "8-bit pages of 1, no producer",
    "granules of 8 in pages of 48, three producers", "boxes of f8e5m2, three producers", "boxes of 192, no producer",
    "boxes of granules of 32, three producers", "heads of 8 bytes", "heads of 136 bytes", "heads of 136",
    "three warpgroups multiply what one converts", "8-bit heads of 8 by cp.async", "96 columns by TMA",
    "granules of 4 in pages of 7", "boxes of a scale a head", "scales of f16", "heads of 120 bytes",
)  # fmt: skip


@by_name(WAYS, LIKE_OTHERS)
def test_tiles_come_in_every_way(name):
    choice, given = WAYS[name]
    check(batch(**{"cached": [170, 0], "new": [19, 3], **given}), choice, padded="padded" in name)


@pytest.mark.parametrize(
    ("dtype", "granularity"), [("f8e5m2", None), ("f8e4m3", 64), ("f8e4m3", 16), ("i8", 32)], ids=str
)
def test_elements_of_8_bits_are_converted_and_scaled(dtype, granularity):
    check(batch([40, 0], [9, 3], **({"dtype": dtype} if granularity is None else scaled(dtype, granularity))), CP_ASYNC)


@pytest.mark.parametrize(
    ("maps", "elements"), [(True, {"dtype": "f8e4m3"}), (False, scaled("f8e4m3", 32))], ids=["tma", "cp.async, scaled"]
)
def test_more_tiles_are_on_their_way_than_are_converted(elements, maps):
    b = batch([300, 20, 0, 150], [3, 5, 0, 9], page_size=32, **elements)
    check(b, Choice(maps=maps, keys=32, producers=2, blocks=2, queue=True, entries=(("staging_stages", 4),)))


@pytest.mark.parametrize(
    ("dtype", "entries"), [("f16", (("overlap", False),)), ("bf16", (("one_wait", False),))], ids=str
)
def test_a_maximum_moves_where_later_scores_are_larger(dtype, entries):
    """Scores of 20 powers of two and more above one another, as in the rows of ``reference.attention_rows``."""
    check(batch([260, 130], [33, 5], dtype=dtype), Choice(consumers=2, entries=entries), scale=2.0)


def test_nothing_is_written_for_sequences_without_rows():
    out, lse = run(b := batch([9, 30], [0, 0]), case_of(b), Choice())
    assert out.size == lse.size == 0


# --- columns over warpgroups -------------------------------------------------------------------------

ACROSS = Choice(consumers=2, entries=(("across", 2),))
CP_ASYNC_ACROSS = dataclasses.replace(ACROSS, maps=False)
ACROSS_ROWS: dict[str, tuple[dict[str, Any], Choice, dict[str, Any]]] = {
    "512 columns": ({"cached": [40], "new": [5], "head_size": 512}, dataclasses.replace(ACROSS, keys=32, stages=1), {}),
    "sequences of every length": ({**RAGGED, "head_size": 128}, ACROSS, {}),
    "a window with slopes, sinks and a softcap": (
        {**RAGGED, "head_size": 128},
        dataclasses.replace(ACROSS, keys=32),
        {"mask": "sliding_window", "span": 33, "slopes": True, "sinks": True, "softcap": 20.0},
    ),
    "128 rows": ({"cached": [70], "new": [40], "head_size": 128}, dataclasses.replace(ACROSS, consumers=4), {}),
    "no producer": ({**RAGGED, "head_size": 128}, dataclasses.replace(ACROSS, producer=False, maps=False), {}),
    "split keys": ({"cached": [260], "new": [3], "head_size": 128}, dataclasses.replace(ACROSS, splits=3), {}),
    "a queue": (
        {**RAGGED, "head_size": 128},
        dataclasses.replace(ACROSS, blocks=2, queue=True, entries=(("across", 2), ("query_stages", 2))),
        {},
    ),
    "8-bit elements": ({"cached": [40, 0], "new": [9, 3], "head_size": 128, "dtype": "f8e4m3"}, CP_ASYNC_ACROSS, {}),
    "a negative scale": ({"cached": [40], "new": [9], "head_size": 256, "dtype": "f16"}, ACROSS, {"scale": -0.2}),
    "tiles of 32 keys": ({"cached": [40], "new": [9], "head_size": 128}, dataclasses.replace(ACROSS, keys=32), {}),
}


@by_name(ACROSS_ROWS, ("512 columns", "no producer", "split keys", "a negative scale", "tiles of 32 keys"))
def test_warpgroups_beside_one_another_share_the_columns_of_scores_and_sums(name):
    sizes, choice, what = ACROSS_ROWS[name]
    check(batch(**sizes), choice, orders=[None, ptx.Order("random", "random", 1)], **what)


@pytest.mark.parametrize(
    ("head_size", "choice", "why"),
    [(96, ACROSS, "a power of two of columns from 64 on, got bf16 and N = 96"),
     (128, dataclasses.replace(ACROSS, keys=48), "a power of two of columns from 16 on, got bf16 and N = 48"),
     (128, dataclasses.replace(ACROSS, consumers=3), "across must divide the 3 warpgroups")],
)  # fmt: skip
def test_columns_that_warpgroups_cannot_share_are_refused(head_size, choice, why):
    with pytest.raises(kv.KernelError, match=why):
        check(batch([40], [9], head_size=head_size), choice)


# --- schedules ---------------------------------------------------------------------------------------

SCHEDULES = {
    "two consumers by turns": Choice(consumers=2, entries=(("ping_pong", True),)),
    "three consumers": Choice(consumers=3),
    "three consumers without a producer": Choice(consumers=3, producer=False),
    "one stage": Choice(stages=1),
    "three stages": Choice(stages=3),
    "keys in two parts": Choice(entries=(("parts", 2),)),
    "keys in two parts, by turns": Choice(
        consumers=2, blocks=1, queue=True, entries=(("parts", 2), ("query_stages", 2), ("ping_pong", True))
    ),
    "keys in two parts, no producer": Choice(producer=False, entries=(("parts", 2),)),
    "no producer": Choice(producer=False),
    "no producer, cp.async": Choice(producer=False, maps=False),
    "no overlap": Choice(entries=(("overlap", False),)),
    "values beside the softmax": Choice(consumers=2, entries=(("one_wait", False),)),
    "two tiles of every sequence, a queue": Choice(most=17, blocks=2, queue=True),
    "split keys of few rows": Choice(most=17, splits=3),
    "tiles of 16 keys": Choice(keys=16),
    "tiles of 96 keys": Choice(keys=96),
    "one persistent block": Choice(blocks=1),
    "persistent blocks without a producer": Choice(blocks=2, producer=False),
    "query rows one tile ahead": Choice(blocks=1, entries=(("query_stages", 2),)),
    "a queue": Choice(consumers=2, blocks=1, queue=True, entries=(("query_stages", 2), ("ping_pong", True))),
    "a queue of three blocks": Choice(blocks=3, queue=True, entries=(("query_stages", 2),)),
    "a queue, cp.async": Choice(maps=False, blocks=2, queue=True),
    "a queue that nobody reads": Choice(blocks=2, queue=True, producer=False),
    "mma.sync": mma(),
    "mma.sync, one stage": mma(stages=1),
    "mma.sync, three stages": mma(stages=3),
    "mma.sync, two warpgroups": mma(consumers=2),
    "mma.sync, three warpgroups": mma(consumers=3, keys=32),
    "mma.sync, tiles of 16 keys": mma(keys=16),
    "mma.sync, tiles of 96 keys": mma(keys=96),
    "mma.sync, persistent blocks": mma(blocks=2),
    "mma.sync, split keys": mma(splits=3),
    "mma.sync, copies when they are needed": mma(options=(("pipeline-kv-loops", "copies=false"),)),
    "mma.sync, no pass that may be left out": mma(disable=("split-kv-loops", "pipeline-kv-loops", "skip-kv-rescales")),
    "mma.sync of a target with more": mma(target="sm_90a", maps=True, entries=(("instruction", "mma.sync"),)),
}


@pytest.mark.parametrize(("page_size", "producer"), [(5, True), (64, False)])
def test_rows_of_a_tile_need_be_no_multiple_of_a_page(page_size, producer):
    check(batch([260, 3], [17, 2], page_size=page_size), Choice(keys=96, maps=False, producer=producer))


@pytest.mark.parametrize("splits", [1, 3])
def test_few_rows_are_one_tile_of_every_sequence(splits):
    check(batch([100, 20, 90, 260], [16, 1, 0, 9]), Choice(most=16, splits=splits))


# Tiles of 64 keys: one, two, an odd number, and of a sequence without rows none; and uneven ends behind many.
LENGTHS = ([20, 100, 150, 90], [5, 7, 9, 0]), ([260, 3], [17, 2])


SCHEDULES_LIKE_OTHERS = (
    "three consumers without a producer", "three stages", "keys in two parts, no producer", "no producer, cp.async",
    "tiles of 96 keys", "persistent blocks without a producer", "a queue of three blocks", "a queue, cp.async",
    "split keys of few rows", "query rows one tile ahead", "mma.sync, three stages", "mma.sync, two warpgroups",
    "mma.sync, tiles of 96 keys", "mma.sync, persistent blocks", "mma.sync, copies when they are needed", "no overlap",
    "one persistent block", "three consumers", "mma.sync, tiles of 16 keys", "a queue",
)  # fmt: skip


@by_name(SCHEDULES, SCHEDULES_LIKE_OTHERS)
def test_a_schedule_changes_no_result(name):
    of = [*SCHEDULES].index(name) % 2
    wide = {"head_size": 128} if "parts" in name else {}  # of more than one swizzle atom
    check(batch(*LENGTHS[of], **wide), SCHEDULES[name])


def test_products_of_parts_begin_when_the_first_is_there():
    b = batch(*LENGTHS[1], head_size=192)
    made = compiled(case_of(b), b.problem.collection.spec, Choice(entries=(("parts", 3),)))
    found = " ".join(re.findall(r"wgmma\.mma_async|mbarrier\.try_wait|wgmma\.commit_group", made.asm["ptx"]))
    part = " ".join(["wgmma.mma_async"] * 4)  # of 12 steps of K, four of each swizzle atom
    assert " mbarrier.try_wait ".join([part] * 3) + " wgmma.commit_group" in found


@by_name(["mma.sync", "mma.sync, one stage", "mma.sync, tiles of 16 keys"], ["mma.sync", "mma.sync, tiles of 16 keys"])
def test_a_schedule_of_mma_changes_no_result_of_scaled_elements(name):
    check(batch(*LENGTHS[1], page_size=8, **scaled("i8", 16)), SCHEDULES[name])


ORDERS = {"forward": ptx.Order("forward", "early"), "backward": ptx.Order("backward", "late"),
          "random": ptx.Order("random", "random", 1)}  # fmt: skip
ORDERED = [
    ("backward", Choice(consumers=2), {}),
    ("random", Choice(consumers=2), {}),
    ("forward", Choice(maps=False, blocks=1), {}),
    ("random", Choice(maps=False, blocks=1), {}),
    ("backward", Choice(blocks=2, queue=True, entries=(("query_stages", 2),)), {}),
    ("random", CP_ASYNC, {"dtype": "f8e4m3"}),
    ("backward", CP_ASYNC, {"page_size": 5}),
    ("backward", Choice(maps=False, consumers=2, blocks=1, stages=1), {"dtype": "f8e4m3"}),
    ("random", Choice(maps=False, producers=2, blocks=2, queue=True), {"page_size": 5}),
    ("backward", Choice(maps=False, producers=2, blocks=2, queue=True), {"dtype": "f8e4m3"}),
    ("backward", mma(), {"dtype": "f8e5m2"}),
    ("random", mma(stages=3, blocks=1), {"page_size": 5}),
    ("forward", mma(consumers=2, stages=1), {"page_size": 5}),
]


@pytest.mark.parametrize(
    ("order", "choice", "given"),
    [pytest.param(*x, marks=[pytest.mark.thorough] if i % 2 else [], id=f"{x[0]}, {i}") for i, x in enumerate(ORDERED)],
)
def test_the_order_of_warps_and_copies_changes_no_result(order, choice, given):
    check(batch([260, 0, 3], [18, 2, 5], **given), choice, orders=[ORDERS[order]])


@pytest.mark.parametrize(("head_size", "entries"), [(64, ()), (128, (("parts", 2),))], ids=["whole", "parts"])
def test_no_barrier_of_a_circular_buffer_can_be_left_out(head_size, entries):
    """The emulator says so in program order, whether the result is right or not."""
    b = batch(cached=[260, 3], new=[17, 2], head_size=head_size)
    choice = Choice(consumers=2, blocks=1, entries=(("ping_pong", True), *entries))
    text = compiled(case_of(b), b.problem.collection.spec, choice).asm["ptx"]
    waits = re.findall(r"mbarrier\.try_wait\.parity\.shared\.b64 p, \[%r\d+\], %r\d+;", text)
    assert len(waits) > 4
    for wait in waits:

        def skipped(ptx: str, wait: str = wait) -> str:
            assert wait in ptx
            return ptx.replace(wait, "setp.eq.u32 p, 0, 0;", 1)

        with pytest.raises((EmulationError, EmulationHazard)):
            run(b, case_of(b), choice, change=skipped)


@pytest.mark.parametrize("blocks", [1, None])
def test_consumers_by_turns_clear_the_first_tile_of_a_window_together(blocks):
    """Who clears waits for the other, who does not wait for its turn then."""
    choice = Choice(consumers=2, blocks=blocks, queue=blocks is not None, entries=(("ping_pong", True),))
    check(batch(cached=[260, 130], new=[17, 2]), choice, mask="sliding_window", span=100)


def test_a_hang_names_the_barrier_of_the_circular_buffer():
    b, choice = batch(cached=[260], new=[17]), Choice()

    def never_released(ptx: str) -> str:
        return re.sub(r"@p mbarrier\.arrive\.shared\.b64 state, \[(%r\d+)\];", "", ptx)

    with pytest.raises(EmulationError, match=r"no warp can continue:") as error:
        run(b, case_of(b), choice, change=never_released)
    assert re.search(r"waits at empty_[\w.]+\[\d\] \(at kv_shared", str(error.value))


# --- passes ------------------------------------------------------------------------------------------

TILE_PASSES = (
    "split-kv-loops", "specialize-kv-warps", "defer-kv-reductions", "pipeline-kv-loops", "queue-kv-work",
    "skip-kv-maxima", "skip-kv-rescales", "simplify-kv-tiles",
)  # fmt: skip


def test_these_are_the_optional_passes_over_tiles():
    between = [s for s in pipeline.default_steps(TARGET)]
    names = [s.name for s in between]
    first, last = names.index("split-kv-loops"), names.index("distribute-kv-tiles")
    found = [s.name for s in between[first : last + 1] if s.optional]
    of_functions = ("narrow-kv-tiles", "tabulate-kv-scores", "reverse-kv-loops", "fold-kv-scores", "start-kv-work")
    for name in of_functions:  # test_attention_functions.py
        found.remove(name)
    for name in ("promote-kv-sums", "sum-kv-weights"):  # test_attention_8_bits.py
        found.remove(name)
    assert tuple(found) == TILE_PASSES


WHOLE = Choice(blocks=2, queue=True)  # for which every pass has something to do


# Of the others tests/lowering/answers.test and the files of passes beside it say the same.
@by_name(TILE_PASSES, ("defer-kv-reductions", "queue-kv-work", "skip-kv-maxima", "skip-kv-rescales"))
def test_every_optional_pass_changes_the_code_and_no_result(name):
    b = batch(**LONG)
    case, spec = case_of(b), b.problem.collection.spec
    without = dataclasses.replace(WHOLE, disable=(name,))
    assert _code(case, spec, without) != _code(case, spec, WHOLE), f"{name} does nothing for attention"
    check(b, without)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "dtype"), [(x, ("bf16", "f8e4m3")[i % 2]) for i, x in enumerate(TILE_PASSES)])
def test_every_optional_pass_may_be_left_out_without_tma(name, dtype):
    check(batch([70], [18], dtype=dtype), dataclasses.replace(WHOLE, maps=False, disable=(name,)))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("split-kv-loops", "skip=false"), ("split-kv-loops", "unmask=false"), ("pipeline-kv-loops", "lookups=false"),
        ("pipeline-kv-loops", "products=false"), ("select-kv-copies", "stages=3"),
    ],
)  # fmt: skip
def test_every_option_of_a_pass_changes_the_code_and_no_result(name, option):
    b = batch([130], [18])
    case, spec = case_of(b), b.problem.collection.spec
    with_option = Choice(options=((name, option),))
    assert _code(case, spec, with_option) != _code(case, spec, Choice())
    check(b, with_option)


def test_a_copy_ahead_is_an_option_of_kernels_without_a_producer():
    b = batch([130], [18])
    case, spec = case_of(b), b.problem.collection.spec
    plain = Choice(producer=False)
    without = Choice(producer=False, options=(("pipeline-kv-loops", "copies=false"),))
    assert _code(case, spec, without) != _code(case, spec, plain)
    check(b, without)


def _code(case: Any, spec: Any, choice: Choice) -> str:
    """The instructions of a kernel: lines that are no comments."""
    text = compiled(case, spec, choice).asm["ptx"]
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))


def test_the_trace_is_short():
    """What is written once is about a hundred ops over tiles: what makes it fast comes from passes."""
    b = batch(**LONG)
    text = str(trace(case_of(b), b.problem.collection.spec, Choice()))
    assert "kv.tile_load" in text
    assert len(text.splitlines()) < 300


# --- functions ---------------------------------------------------------------------------------------


def named(mask: str, span: int) -> Any:
    """The mask of a case that has this one."""
    return Masking(mask, span).function


@pytest.mark.parametrize(
    ("mask", "span"), [("causal", 0), ("sliding_window", 5), ("chunked", 4), ("chunked_causal", 6)]
)
def test_masks_are_those_of_the_model(mask, span):
    """The functions take arrays as they take tiles."""
    q, k = np.arange(30)[:, None], np.arange(30)[None, :]
    got = named(mask, span).function(0, 0, q, k)
    np.testing.assert_array_equal(got, reference.visible(mask, q[:, 0], k[0], span))


@pytest.mark.parametrize(("mask", "span"), [("sliding_window", 5), ("chunked", 4), ("chunked_causal", 6)])
def test_no_key_before_the_first_is_seen(mask, span):
    q = np.arange(30)
    first = named(mask, span).first(q)
    seen = reference.visible(mask, q, np.arange(30), span)
    assert not seen[np.arange(30)[None, :] < first[:, None]].any()


def test_every_key_is_seen_without_a_mask():
    assert named("null", 0) is None


def test_a_sum_of_nothing_has_no_log_sum_exp():
    """Minus infinity, on tiles as in the kernel that merges partial results."""
    rows = 64

    @kv.kernel(block=(128, 1, 1))
    def merge(out: kv.Buffer[kv.f32, 1]):
        i = kv.tile_index(rows)
        total = kv.where(i < 3, 0.0, 2.0)
        out.scatter(i, value=partial_results.log_sum_exp(kv.full(rows, 1.0), total))

    from kvarn.emulator import run as emulated

    out = np.full(rows, 77, np.float32)
    made = kv.compile(merge, kv.Buffer[kv.f32, 1], target=TARGET)
    emulated.launch(made, 1, 128, (out,))
    assert np.isneginf(out[:3]).all()
    np.testing.assert_allclose(out[3:], np.log(2.0 * 2.0), rtol=1e-5)
