# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prefills over decompressed chunks, whose keys end in columns of the latent rows: on the host, by the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference.mla_prefill import Prefill, buffer_of, chunks_of, dense, prefill
from reference.places import Interpreted, Place

import kvarn as kv
from kvarn.dialect import dtypes

TOLERANCE = {"f32": 1e-4, "f16": 6e-3, "bf16": 4e-2}
SENTINEL = 72.0
TILE = {"kind": "tile"}


def outputs(p: Prefill, more: int = 0, fill: float = SENTINEL) -> dict[str, np.ndarray]:
    """An output and a log-sum-exp of a number, with so many rows more than there are queries."""
    shape = len(p.query) + more, p.query.shape[1]
    out = np.full((*shape, p.value_weights.shape[1]), fill, p.query.dtype)
    return {"out": out, "lse": np.full(shape, fill, np.float32)}


def everywhere(p: Prefill, tokens: int) -> Any:
    """The results on the host, and of GPU code."""
    for place in (Place(), Interpreted("sm_90a")):
        with place.active():
            yield kv.ops.mla_prefill(
                p.problem.collection, 1, p.query, p.problem.row_offsets, p.expand, buffer_of(p, tokens),
                plan=chunks_of(p, tokens)[0], bf16_rope=p.bytes_ != p.rope, return_lse=True, **outputs(p),
            )  # fmt: skip


def decompressed(p: Prefill, plan: Any, c: int, tokens: int) -> tuple[Any, ...]:
    """Keys and values of a chunk, its buffer's row offsets and the tokens of each sequence before it."""
    rows, taken, buffer = plan.buffer_row_offsets[c], plan.cache_offsets[c], buffer_of(p, tokens)
    kv.ops.mla_decompress(p.problem.collection.get_key_cache(1), rows, taken, buffer)
    return *p.expand(buffer), rows, taken


def attend(p: Prefill, chunk: tuple[Any, ...], query: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention over a chunk."""
    of = p.problem.collection, 1, p.query if query is None else query, p.problem.row_offsets
    return kv.ops.mla_prefill_chunk(*of, *chunk, bf16_rope=p.bytes_ != p.rope, **options)


CASES = [
    ("f32", {}), ("bf16", {"nope": 40, "values": 40, "rope": 16}), ("f16", {"kind": "continuous", "heads": 5}),
    ("f32", {"nope": 15, "rope": 5, "values": 7}), ("f8e4m3", {}), ("f8e4m3", {"scale_dtype": "f32"}),
    ("i8", {"scale_dtype": "f16", "granularity": 4, "heads": 1}), ("f8e4m3", {"bf16_rope": True}),
    ("f8e4m3", {"bf16_rope": True, "scale_dtype": "f32"}),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_chunks_together_are_dense_attention(dtype, options):
    p = prefill(1, dtype, **options)
    if dtype == "i8":
        p.key_weights, p.value_weights = p.key_weights / 64, p.value_weights / 64
        p.query = p.query / 4
    want, want_lse = dense(p)
    tolerance = TOLERANCE[dtypes.of(p.query.dtype).name]
    for out, lse in everywhere(p, 16):
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=2e-3)


TILES = {"nope": 64, "rope": 16, "values": 40, "heads": 2, "cached": [3, 0, 60], "new": [70, 0, 9]}
TILED = [
    ("bf16", "bf16", {}), ("f16", "f16", {"page_size": 1}), ("bf16", "bf16", {"kind": "continuous"}),
    ("f8e4m3", "bf16", {}), ("f8e4m3", "f16", {"bf16_rope": True, "scale_dtype": "f32"}),
    ("i8", "bf16", {"scale_dtype": "f16", "granularity": 4}),
]  # fmt: skip


BY_MMA = [TILED[0], ("f16", "f16", {"page_size": 1, "nope": 48, "values": 24, "rope": 32}), TILED[5]]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("target", "dtype", "of", "options"),
    [pytest.param("sm_90a", *x, marks=[] if i in (1, 4) else [pytest.mark.thorough]) for i, x in enumerate(TILED)]
    + [pytest.param("sm_80", *x, marks=[] if i == 1 else [pytest.mark.thorough]) for i, x in enumerate(BY_MMA)],
    ids=str,
)
def test_chunks_over_tiles_are_dense_attention(target, dtype, of, options):
    """Keys and values are slices of one buffer, and what no sequence has is NaN; no race, no write beside the rows."""
    p = prefill(12, dtype, query=of, **{**TILES, **options})
    nope, values = p.key_weights.shape[1], p.value_weights.shape[1]
    if dtype == "i8":
        p.query = (p.query / 16).astype(p.query.dtype)
    plan, needed = chunks_of(p, 80)
    assert needed == 2
    found, query = outputs(p, 2), np.concatenate([p.query, p.query[:2]])
    for c in range(needed + 1):
        *parts, rows, taken = decompressed(p, plan, c, 80)
        both = np.concatenate([*parts, np.zeros((80, 2, 24), p.query.dtype)], 2)
        both[rows[-1] :] = np.nan
        chunk = both[..., :nope], both[..., nope : nope + values], rows, taken
        with kv.emulated(target) as report:
            attend(p, chunk, query, accumulate=c > 0, schedule=TILE, **found)
        assert report.hazards == []
    out, lse = found["out"], found["lse"]
    want, want_lse = dense(p)
    largest, tolerance = np.abs(want).max(), TOLERANCE[dtypes.of(p.query.dtype).name]
    np.testing.assert_allclose(out[:-2] / largest, want / largest, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse[:-2], want_lse, rtol=2e-3, atol=2e-3)
    assert (out[-2:] == SENTINEL).all()


def test_no_offset_leads_a_chunk_over_tiles_out_of_what_there_is():
    """The interpreter knows where buffers and pools end."""
    p = prefill(7, "bf16", **{**TILES, "heads": 1, "cached": [6, 0], "new": [3, 6], "page_size": 3})
    parts, most = p.expand(buffer_of(p, 20)), 2**31 - 1
    for rows, taken in (
        ([5, most, most], [0, 0]), ([-7, 3, -most], [0, 0]), ([0, 9, 20], [-5, -most]), ([0, 9, 20], [most, 70]),
    ):  # fmt: skip
        chunk = *parts, np.array(rows, np.int32), np.array(taken, np.int32)
        with Interpreted("sm_90a").active():
            out, _ = attend(p, chunk, schedule=TILE, **outputs(p, fill=np.nan))
        assert np.isfinite(out.astype(np.float32)).all()


def test_chunks_over_tiles_are_chosen_where_they_fit():
    p = prefill(13, "bf16", **TILES)
    with kv.emulated("sm_90a"):
        for given, message in (
            (prefill(13, **TILES), "kind tile needs a query of bf16 or f16, got f32"),
            (prefill(13, "bf16", **{**TILES, "nope": 40}), "needs keys of a multiple of 64 columns and of 16 from the"),
            (prefill(13, "bf16", **{**TILES, "values": 264}), "kind tile needs values of up to 256 columns, got 264"),
        ):
            plan, _ = chunks_of(given, 16)
            with pytest.raises(ValueError, match=message):
                one_chunk(given, plan, 0, 16, schedule=TILE)
        plan, _ = chunks_of(p, 16)
        with pytest.raises(ValueError, match="the schedule's splits must be 1 for a prefill's chunk, got 2"):
            one_chunk(p, plan, 0, 16, schedule={"kind": "tile", "splits": 2})
    with kv.emulated("sm_80"):
        rows = prefill(13, "f8e4m3", query="bf16", bf16_rope=True, **TILES)
        plan, _ = chunks_of(rows, 16)
        with pytest.raises(ValueError, match="needs latent rows of one type for products by mma.sync"):
            one_chunk(rows, plan, 0, 16, schedule=TILE)
        plan, _ = chunks_of(p, 16)
        with pytest.raises(ValueError, match="the schedule's keys must be a multiple of 64, got 32"):
            one_chunk(p, plan, 0, 16, schedule={"kind": "tile", "keys": 32})


@pytest.mark.parametrize("tokens", [1, 5, 72, 100])
def test_the_size_of_the_buffer_does_not_change_the_result(tokens):
    p = prefill(2)
    assert int((p.problem.cached + p.problem.new).sum()) == 72  # so that one buffer holds all of it, exactly
    want, want_lse = dense(p)
    plan, _ = chunks_of(p, tokens)
    for given in (plan, None):
        out, lse = kv.ops.mla_prefill(
            p.problem.collection, 1, p.query, p.problem.row_offsets, p.expand, buffer_of(p, tokens), plan=given,
            return_lse=True,
        )  # fmt: skip
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cached", "new"), [([], []), ([4, 0], [0, 0])])
def test_batches_without_queries_give_no_rows(cached, new):
    p = prefill(9, cached=cached, new=new)
    call = (p.problem.collection, 1, p.query, p.problem.row_offsets, p.expand, buffer_of(p, 16))
    assert kv.ops.mla_prefill(*call).shape == (0, 3, 24)


def test_rows_of_no_sequence_are_not_written():
    p = prefill(10, cached=[7, 3], new=[2, 4])
    wide = np.concatenate([p.query, p.query[:3]])
    out, lse = np.full((9, 3, 24), SENTINEL, np.float32), np.full((9, 3), SENTINEL, np.float32)
    call = (p.problem.collection, 1, wide, p.problem.row_offsets, p.expand, buffer_of(p, 4))
    kv.ops.mla_prefill(*call, out=out, lse=lse)
    np.testing.assert_allclose(out[:6], dense(p)[0], rtol=1e-4, atol=1e-4)
    assert (out[6:] == SENTINEL).all()
    assert (lse[6:] == SENTINEL).all()


def test_queries_may_be_slices_that_are_aligned_to_their_elements_only():
    p = prefill(11, nope=16, rope=8)
    wide = np.zeros((p.problem.tokens, 3, 31), np.float32)
    wide[..., 3:27] = p.query
    p.query = wide[..., 3:27]
    for out, _ in everywhere(p, 16):
        np.testing.assert_allclose(out, dense(p)[0], rtol=1e-4, atol=1e-4)


def one_chunk(p: Prefill, plan: Any, c: int, tokens: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return attend(p, decompressed(p, plan, c, tokens), **options)


def test_accumulating_is_merging():
    p = prefill(3)
    plan, needed = chunks_of(p, 16)
    merged, merged_lse = one_chunk(p, plan, 0, 16)
    out, lse = merged.copy(), merged_lse.copy()
    for c in range(1, needed):
        merged, merged_lse = kv.ops.merge_attention(merged, merged_lse, *one_chunk(p, plan, c, 16))
        one_chunk(p, plan, c, 16, accumulate=True, out=out, lse=lse)
    np.testing.assert_allclose(out, merged, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, merged_lse, rtol=2e-5, atol=2e-5)


def test_a_chunk_past_the_last_changes_nothing():
    p = prefill(4)
    plan, needed = chunks_of(p, 16)
    assert plan.buffer_lengths[-1] == -1
    out, lse = one_chunk(p, plan, len(plan.buffer_lengths) - 1, 16)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    out, lse = one_chunk(p, plan, needed - 1, 16)
    before = out.copy(), lse.copy()
    one_chunk(p, plan, len(plan.buffer_lengths) - 1, 16, accumulate=True, out=out, lse=lse)
    np.testing.assert_allclose(out, before[0], rtol=1e-6)
    np.testing.assert_allclose(lse, before[1], rtol=1e-6)


@pytest.mark.parametrize("place", [Place(), Interpreted("sm_90a")], ids=lambda place: place.name)
def test_rows_without_earlier_keys_do_not_look_at_the_output(place):
    p = prefill(5, cached=[3], new=[4])
    chunk = decompressed(p, chunks_of(p, 16)[0], 0, 16)
    want, want_lse = attend(p, chunk)
    out, lse = np.full(want.shape, np.nan, np.float32), np.full(want_lse.shape, -np.inf, np.float32)
    with place.active():
        attend(p, chunk, accumulate=True, out=out, lse=lse)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)


def test_rows_that_no_query_may_see_are_not_read():
    """The last token of a sequence lies in the buffer, and earlier queries stand before it."""
    p = prefill(6, cached=[6], new=[3])
    key, value, rows, taken = decompressed(p, chunks_of(p, 16)[0], 0, 16)
    key[8:], value[8:] = np.nan, np.nan  # position 8, and what no sequence has
    out, lse = attend(p, (key, value, rows, taken))
    want, want_lse = dense(p)
    for _ in range(2):
        np.testing.assert_allclose(out[:2], want[:2], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(lse[:2], want_lse[:2], rtol=1e-4, atol=1e-4)
        assert np.isnan(out[2]).all()
        assert np.isnan(lse[2]).all()
        none = np.zeros(2, np.int32)  # and an empty chunk after it hides nothing
        out, lse = attend(p, (key, value, none, taken), accumulate=True, out=out, lse=lse)


def test_offsets_past_the_buffers_are_held_to_them():
    p = prefill(7, cached=[6], new=[3])
    key, value, _, taken = decompressed(p, chunks_of(p, 16)[0], 0, 16)
    five, outs = (key[:5].copy(), value[:5].copy()), []  # five rows are all that the buffers have
    for last in (5, 2**31 - 1):
        with Interpreted("sm_90a").active():
            chunk = *five, np.array([0, last], np.int32), taken
            outs.append(attend(p, chunk, **outputs(p, fill=0))[0])
    assert np.isfinite(outs[0]).all()
    assert outs[0].any()
    np.testing.assert_array_equal(outs[1], outs[0])


def refusals(p: Prefill) -> dict[str, Callable[[], Any]]:
    plan, _ = chunks_of(p, 16)
    c, q, off, rows, taken = (
        p.problem.collection, p.query, p.problem.row_offsets, plan.buffer_row_offsets[0], plan.cache_offsets[0]
    )  # fmt: skip
    buffer = buffer_of(p, 16)
    key, value = p.expand(buffer)

    def call(*, query: Any = q, k: Any = key, v: Any = value, boff: Any = rows, **options: Any) -> Any:
        return lambda: kv.ops.mla_prefill_chunk(c, 1, query, off, k, v, boff, taken, **options)

    def whole(expand: Any, buffer: Any, **options: Any) -> Any:
        return lambda: kv.ops.mla_prefill(c, 1, q, off, expand, buffer, **options)

    return {
        r"key must have shape \[Tb, 3, Dn\], got \[16, 2, 16\]": call(k=key[:, :2]),
        r"value must have shape \[16, 3, Dv\], got \[15, 3, 24\]": call(v=value[:15]),
        "query must have more columns than key, which has some, at most the row's 32 more: got 24 and 24": call(
            k=np.zeros((16, 3, 24), np.float32)
        ),
        "bf16_rope needs 8-bit rows of at most one scale": call(bf16_rope=True),
        "key must have dtype f32, got f16": call(k=key.astype(np.float16)),
        "out and lse must be given with accumulate": call(accumulate=True),
        r"lse must have shape \[21, 3\], got \[20, 3\]": call(lse=np.zeros((20, 3), np.float32)),
        r"buffer_row_offsets must have shape \[6\], got \[5\]": call(boff=rows[:5].copy()),
        "schedule's kind must be host on host, got 'latent'": call(schedule={"kind": "latent"}),
        r"expand must return keys of the buffer's 16 rows, got \[4\]": whole(lambda x: (key[:4], value), buffer),
        r"buffer must have shape \[Tb, 32\], Tb at least 1, got \[0, 32\]": whole(p.expand, buffer_of(p, 0)),
        r"buffer must have shape \[Tb, 32\], Tb at least 1, got \[16, 30\]": whole(p.expand, buffer[:, :30]),
        "expand must be callable, got int": whole(3, buffer),
        "expand must return keys and values, got ndarray": whole(lambda x: key, buffer),
        "plan must be a MlaPrefillPlan .of mla_prefill_plan., got tuple": whole(p.expand, buffer, plan=tuple(plan)),
        "plan must have at least one chunk, got none": whole(
            p.expand, buffer, plan=kv.ops.MlaPrefillPlan(*(x[:0] for x in plan))
        ),
    }


def test_what_does_not_fit_is_refused():
    for message, call in refusals(prefill(8)).items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()
