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
from reference.tile_attention import TARGET, Choice, batch, case_of, check, compiled, run, trace

import kvarn as kv
from kvarn.emulator import EmulationError, EmulationHazard, grid as ptx
from kvarn.lowering import pipeline
from kvarn.lowering.kernels.attention import partials as partial_results
from kvarn.lowering.kernels.attention.case import Masking

pytestmark = pytest.mark.sampled(3)

RAGGED: dict[str, Any] = {"cached": [100, 0, 5, 70], "new": [7, 0, 40, 1]}  # one empty, one longer than a tile of keys
LONG: dict[str, Any] = {"cached": [260], "new": [33]}
CP_ASYNC = Choice(maps=False)


# --- cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "span"),
    [
        ("null", 0),
        ("causal", 0),
        ("sliding_window", 33),
        ("sliding_window", 1),
        ("chunked", 24),
        ("chunked_causal", 100),
    ],
)
def test_every_mask_leaves_the_keys_of_the_model(mask, span):
    check(batch(**RAGGED), Choice(), mask=mask, span=span)


@pytest.mark.parametrize(
    ("head_size", "kind", "page_size", "maps"),
    [
        (64, "paged", 8, True), (96, "paged", 16, True), (128, "paged", 64, True), (64, "paged", 128, True),
        (128, "continuous", 16, True), (64, "fa3", 16, True), (64, "paged", 8, False), (96, "paged", 64, False),
        (64, "continuous", 16, False), (64, "fa3", 16, False),
    ],
)  # fmt: skip
def test_every_cache_is_read_by_tma_and_without(head_size, kind, page_size, maps):
    check(batch(**RAGGED, head_size=head_size, kind=kind, page_size=page_size), Choice(maps=maps))


@pytest.mark.parametrize(
    ("dtype", "granularity"), [("f8e5m2", None), ("f8e4m3", 64), ("f8e4m3", 16), ("i8", 32)], ids=str
)
def test_elements_of_8_bits_are_converted_and_scaled(dtype, granularity):
    quantized = {} if granularity is None else {"scale_dtype": "f32", "granularity": granularity}
    check(batch([40, 0], [9, 3], dtype=dtype, **quantized), CP_ASYNC)


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_size", "quantized"),
    [("bf16", 5, 64, {}), ("f16", 7, 80, {}), ("bf16", 1, 64, {}), ("bf16", 48, 96, {}), ("f8e4m3", 5, 128, {}),
     ("f8e5m2", 1, 80, {}), ("i8", 7, 64, {"scale_dtype": "f32", "granularity": 4}),
     ("f8e4m3", 48, 64, {"scale_dtype": "f32", "granularity": 8}),
     ("i8", 16, 96, {"scale_dtype": "f32", "granularity": 48}),
     ("f8e4m3", 16, 64, {"scale_dtype": "f16", "granularity": 16})],
)  # fmt: skip
@pytest.mark.parametrize("producers", [1, 3, 0], ids=["producer", "three producers", "no producer"])
def test_rows_come_one_by_one_from_pages_of_any_size(dtype, page_size, head_size, quantized, producers):
    b = batch([70, 0], [19, 3], dtype=dtype, page_size=page_size, head_size=head_size, **quantized)
    check(b, Choice(maps=False, producer=producers > 0, producers=max(1, producers)))


@pytest.mark.parametrize(
    ("dtype", "head_size", "page_size", "quantized"),
    [("f8e4m3", 128, 16, {}), ("f8e5m2", 64, 64, {}), ("f8e4m3", 80, 8, {}), ("f8e4m3", 192, 16, {}),
     ("i8", 64, 32, {"scale_dtype": "f32", "granularity": 64}),
     ("f8e4m3", 128, 16, {"scale_dtype": "f32", "granularity": 32}),
     ("i8", 48, 16, {"scale_dtype": "f32", "granularity": 4}),
     ("f8e4m3", 96, 16, {"scale_dtype": "f32", "granularity": 8})],
)  # fmt: skip
@pytest.mark.parametrize(
    "choice",
    [Choice(), Choice(producers=3), Choice(consumers=2, producers=2, blocks=2, queue=True),
     Choice(producer=False)],
    ids=["producer", "three producers", "two of each, a queue", "no producer"],
)  # fmt: skip
def test_boxes_of_8_bit_elements_are_converted_by_all_who_copy(dtype, head_size, page_size, quantized, choice):
    check(batch([170, 0], [19, 3], dtype=dtype, head_size=head_size, page_size=page_size, **quantized), choice)


@pytest.mark.parametrize(
    ("dtype", "head_size", "num_heads", "quantized"),
    [("f8e4m3", 72, 2, {}), ("f8e5m2", 120, 2, {}), ("i8", 8, 4, {"scale_dtype": "f32", "granularity": 8}),
     ("f8e4m3", 136, 2, {"scale_dtype": "f32", "granularity": 136})],
)  # fmt: skip
@pytest.mark.parametrize(
    "choice",
    [Choice(consumers=2, producers=2, blocks=2, queue=True), Choice(producer=False)],
    ids=["producers", "no producer"],
)
def test_heads_within_16_bytes_of_their_neighbours_come_by_boxes_of_tokens(
    dtype, head_size, num_heads, quantized, choice
):
    sizes = {"head_size": head_size, "num_heads": num_heads, "group": 2}
    check(batch([170, 0], [19, 3], dtype=dtype, **sizes, **quantized), choice)


@pytest.mark.parametrize("maps", [True, False], ids=["tma", "cp.async"])
@pytest.mark.parametrize("quantized", [{}, {"scale_dtype": "f32", "granularity": 32}], ids=["plain", "scaled"])
def test_more_tiles_are_on_their_way_than_are_converted(quantized, maps):
    b = batch([300, 20, 0, 150], [3, 5, 0, 9], dtype="f8e4m3", head_size=64, page_size=32, **quantized)
    check(b, Choice(maps=maps, keys=32, producers=2, blocks=2, queue=True, entries=(("slots", 4),)))


@pytest.mark.parametrize("quantized", [{}, {"scale_dtype": "f32", "granularity": 16}], ids=["plain", "scaled"])
def test_three_warpgroups_multiply_what_one_converts(quantized):
    check(
        batch([170, 0], [19, 3], dtype="f8e4m3", head_size=64, **quantized), Choice(consumers=3, blocks=2, queue=True)
    )


@pytest.mark.parametrize(
    ("dtype", "head_size", "maps"),
    [("bf16", 8, True), ("f16", 24, True), ("bf16", 72, True), ("bf16", 120, False), ("bf16", 136, True),
     ("f8e4m3", 8, False), ("f8e4m3", 72, False), ("f8e5m2", 120, False)],
)  # fmt: skip
def test_heads_of_no_whole_steps_have_columns_of_zeros(dtype, head_size, maps):
    check(batch([70, 0], [19, 3], dtype=dtype, head_size=head_size), Choice(maps=maps))


@pytest.mark.parametrize(("group", "padded"), [(1, False), (3, True), (8, False)])
def test_rows_are_tokens_times_the_group(group, padded):
    check(batch(**RAGGED, group=group, num_heads=2), Choice(), padded=padded)


def test_scores_are_modified_in_the_order_of_the_model():
    check(batch(**RAGGED), Choice(), softcap=20.0, slopes=True, sinks=True)


@pytest.mark.parametrize("what", ["softcap", "slopes", "sinks"])
def test_each_modification_stands_alone(what):
    check(batch([40], [9]), Choice(), **{what: 5.0 if what == "softcap" else True})


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_a_scale_may_have_any_sign(scale):
    check(batch([40], [9]), Choice(), scale=scale)


# Scores of 20 powers of two and more above one another: weights of f16 would be infinite with the first maximum.
@pytest.mark.parametrize("entries", [(), (("overlap", False),), (("one_wait", False),)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8e5m2"])
def test_a_maximum_moves_where_later_scores_are_larger(dtype, entries):
    check(batch([260, 130], [33, 5], dtype=dtype), Choice(consumers=2, entries=entries), scale=2.0)


def test_a_query_may_be_of_f16():
    check(batch([40], [9], dtype="f16"), Choice())


def test_nothing_is_written_for_sequences_without_rows():
    out, lse = run(b := batch([9, 30], [0, 0]), case_of(b), Choice())
    assert out.size == lse.size == 0


# --- columns over warpgroups -------------------------------------------------------------------------

ACROSS = Choice(consumers=2, entries=(("across", 2),))
CP_ASYNC_ACROSS = dataclasses.replace(ACROSS, maps=False)
WIDE: dict[str, tuple[dict[str, Any], Choice, dict[str, Any]]] = {
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


@pytest.mark.parametrize("name", WIDE)
def test_warpgroups_beside_one_another_share_the_columns_of_scores_and_sums(name):
    sizes, choice, what = WIDE[name]
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
}


@pytest.mark.parametrize("producer", [True, False], ids=["producer", "no producer"])
@pytest.mark.parametrize("page_size", [5, 64])
def test_rows_of_a_tile_need_be_no_multiple_of_a_page(page_size, producer):
    check(batch([260, 3], [17, 2], page_size=page_size), Choice(keys=96, maps=False, producer=producer))


@pytest.mark.parametrize("splits", [1, 3])
def test_few_rows_are_one_tile_of_every_sequence(splits):
    check(batch([100, 20, 90, 260], [16, 1, 0, 9]), Choice(most=16, splits=splits))


# Tiles of 64 keys: one, two, an odd number, and of a sequence without rows none; and uneven ends behind many.
LENGTHS: dict[str, Any] = {
    "one, two, three, none": {"cached": [20, 100, 150, 90], "new": [5, 7, 9, 0]},
    "uneven": {"cached": [260, 3], "new": [17, 2]},
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_changes_no_result(name, lengths):
    wide = {"head_size": 128} if "parts" in name else {}  # of more than one swizzle atom
    check(batch(**LENGTHS[lengths], **wide), SCHEDULES[name])


def test_products_of_parts_begin_when_the_first_is_there():
    b = batch(**LENGTHS["uneven"], head_size=192)
    made = compiled(case_of(b), b.problem.collection.spec, Choice(entries=(("parts", 3),)))
    found = " ".join(re.findall(r"wgmma\.mma_async|mbarrier\.try_wait|wgmma\.commit_group", made.asm["ptx"]))
    part = " ".join(["wgmma.mma_async"] * 4)  # of 12 steps of K, four of each swizzle atom
    assert " mbarrier.try_wait ".join([part] * 3) + " wgmma.commit_group" in found


@pytest.mark.parametrize(
    "choice",
    [Choice(consumers=2), Choice(maps=False, blocks=1), Choice(blocks=2, queue=True, entries=(("query_stages", 2),))],
    ids=["tma", "persistent cp.async", "queue"],
)
@pytest.mark.parametrize(
    "order", [ptx.Order("forward", "early"), ptx.Order("backward", "late"), ptx.Order("random", "random", 1)], ids=str
)
def test_the_order_of_warps_and_copies_changes_no_result(choice, order):
    check(batch([130], [18]), choice, orders=[order])


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


@pytest.mark.parametrize(
    "choice",
    [Choice(maps=False), Choice(maps=False, consumers=2, blocks=1, stages=1),
     Choice(maps=False, producers=2, blocks=2, queue=True)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "order", [ptx.Order("forward", "early"), ptx.Order("backward", "late"), ptx.Order("random", "random", 1)], ids=str
)
@pytest.mark.parametrize(("dtype", "page_size"), [("f8e4m3", 16), ("bf16", 5)])
def test_the_order_of_copies_by_rows_changes_no_result(dtype, page_size, choice, order):
    check(batch([260, 0, 3], [18, 2, 5], dtype=dtype, page_size=page_size), choice, orders=[order])


# --- passes ------------------------------------------------------------------------------------------

TILE_PASSES = (
    "split-kv-loops", "specialize-kv-warps", "defer-kv-reductions", "pipeline-kv-loops", "queue-kv-rounds",
    "skip-kv-maxima", "skip-kv-rescales", "simplify-kv-tiles",
)  # fmt: skip


def test_these_are_the_optional_passes_over_tiles():
    between = [s for s in pipeline.default_steps(TARGET)]
    names = [s.name for s in between]
    first, last = names.index("split-kv-loops"), names.index("distribute-kv-tiles")
    found = [s.name for s in between[first : last + 1] if s.optional]
    of_functions = ("narrow-kv-tiles", "tabulate-kv-scores", "reverse-kv-loops", "fold-kv-scores", "start-kv-rounds")
    for name in of_functions:  # test_attention_functions.py
        found.remove(name)
    for name in ("promote-kv-sums", "sum-kv-weights"):  # test_attention_narrow.py
        found.remove(name)
    assert tuple(found) == TILE_PASSES


WHOLE = Choice(blocks=2, queue=True)  # for which every pass has something to do


@pytest.mark.parametrize("name", TILE_PASSES)
def test_every_optional_pass_changes_the_code_and_no_result(name):
    b = batch(**LONG)
    case, spec = case_of(b), b.problem.collection.spec
    without = dataclasses.replace(WHOLE, disable=(name,))
    assert _code(case, spec, without) != _code(case, spec, WHOLE), f"{name} does nothing for attention"
    check(b, without)


@pytest.mark.parametrize("name", TILE_PASSES)
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
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
