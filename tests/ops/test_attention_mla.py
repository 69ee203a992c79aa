# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows, and latent rows copied out of the pages, on the host."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated
from reference.random_caches import random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.emulator import grid as ptx
from kvarn.ops import mla

SENTINEL = 72.0  # exact in every type


latent_problem = functools.partial(stored_problem, num_heads=1, is_mla=True, head_size=24, longest=40)


@pytest.mark.parametrize(
    ("dtype", "kind", "head_size", "value_size", "heads"),
    [
        ("f32", "paged", 24, 16, 3), ("bf16", "paged", 576, 512, 2), ("f16", "continuous", 48, 48, 5),
        ("f8e4m3", "paged", 96, 64, 4),
    ],
)  # fmt: skip
def test_values_are_the_first_columns_of_the_keys(dtype, kind, head_size, value_size, heads):
    rng, problem = latent_problem(1, kind, dtype, head_size=head_size)
    wide = dtypes.of(dtype) if dtypes.of(dtype).bits > 8 else dtypes.f32
    query = random_values(rng, (problem.tokens, heads, head_size), wide)
    out = kv.ops.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=value_size)
    want, _ = reference.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=value_size)
    tolerance = {"bf16": 1.6e-2, "f16": 2e-3}.get(dtype, 3e-5)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)


def test_the_masks_and_the_scale_are_those_of_attention():
    rng, problem = latent_problem(2, page_size=4)
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    for options in ({"mask": "null"}, {"window": 5}, {"mask": "chunked", "chunk": 8}, {"scale": 0.5}):
        out = kv.ops.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=16, **options)
        named = {"mask": "sliding_window", **options} if "window" in options else options
        want, _ = reference.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=16, **named)
        np.testing.assert_allclose(out, want, rtol=3e-5, atol=3e-5)


def test_latent_rows_with_one_scale_a_token():
    rng, problem = latent_problem(3, dtype="f8e4m3", scale_dtype="f32", head_size=32)
    query = random_values(rng, (problem.tokens, 2, 32), dtypes.f32)
    out = kv.ops.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=24)
    want, _ = reference.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=24)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def store_rope_keys(rng: np.random.Generator, problem: Any, content: int, rope: int) -> list[np.ndarray]:
    """Put bf16 keys behind the content of every cached row; returns them, [tokens, rope] a sequence."""
    cache, stored = problem.collection.get_key_cache(1), []
    for b, n in enumerate(problem.cached + problem.new):
        keys = random_values(rng, (n, rope), dtypes.bf16)
        for t in range(n):
            row = keys[t].view(np.uint8).view(cache.dtype.numpy)
            cache.store(b, 0, t, content + np.arange(2 * rope), row)
        stored.append(keys.astype(np.float64))
    return stored


def rope_reference(problem: Any, query: np.ndarray, stored: list[np.ndarray], content: int) -> np.ndarray:
    """The formula: scores (content . content + rope . rope) * sigma * scale; values are the content times sigma."""
    cache = problem.collection.get_key_cache(1)
    out = np.zeros((*query.shape[:2], content))
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        rows = slice(int(problem.row_offsets[b]), int(problem.row_offsets[b]) + new)
        if not new:
            continue
        t = np.arange(cached + new)[:, None]
        values = np.asarray(cache.load(b, 0, t, np.arange(content))).astype(np.float64)
        sigma = cache.load_scale(b, 0, t, 0).astype(np.float64) if cache.scale_dtype is not None else 1.0
        keys = np.concatenate([values, stored[b] * sigma], 1)[:, None]
        seen = reference.visible("causal", cached + np.arange(new), np.arange(cached + new))
        scale = query.shape[2] ** -0.5
        out[rows] = reference.dense_attention(query[rows].astype(np.float64), keys, values[:, None], seen, scale)[0]
    return out


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("content", "rope"), [(32, 8), (26, 5)])
def test_rows_that_end_in_bf16_keys(quantized, content, rope):
    scales = {"scale_dtype": "f32"} if quantized else {}
    rng, problem = latent_problem(6, dtype="f8e4m3", head_size=content + 2 * rope, **scales)
    stored = store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 3, content + rope), dtypes.f32)
    want = rope_reference(problem, query, stored, content)
    out = kv.ops.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=content)
    np.testing.assert_allclose(out, want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(on_gpu(problem, query, content), want, rtol=5e-5, atol=5e-5)


def test_a_query_of_8_bits_over_rows_of_them():
    rng, problem = latent_problem(13, dtype="f8e4m3", head_size=96)
    query = random_values(rng, (problem.tokens, 3, 96), dtypes.f8e4m3)
    call = (problem.collection, 1, query, problem.row_offsets)
    out = kv.ops.mla_attention(*call, value_size=64)
    want, _ = reference.mla_attention(*call, value_size=64)
    assert out.dtype == dtypes.bf16.numpy
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1.6e-2, atol=1.6e-2)
    unrounded = kv.ops.mla_attention(*call, value_size=64, out=np.empty(out.shape, np.float32))
    np.testing.assert_allclose(unrounded, want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(on_gpu(problem, query, 64, {"kind": "simt"}).astype(np.float64), want, atol=1.6e-2)


def test_a_query_of_8_bits_needs_rows_of_nothing_else():
    rng, problem = latent_problem(13, dtype="f8e4m3", head_size=80)
    query = random_values(rng, (problem.tokens, 2, 72), dtypes.f8e4m3)  # the rows would end in 8 bf16
    with pytest.raises(TypeError, match="query must have dtype f32 or f16 or bf16, got f8e4m3"):
        kv.ops.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=64)
    rng, problem = latent_problem(13, dtype="f8e4m3", scale_dtype="f32", head_size=80)
    query = random_values(rng, (problem.tokens, 2, 80), dtypes.f8e4m3)
    with pytest.raises(TypeError, match="query must have dtype f32 or f16 or bf16, got f8e4m3"):
        kv.ops.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=64)


def store_scaled_rows(
    rng: np.random.Generator, problem: Any, content: int, rope: int, elements: int
) -> tuple[list[np.ndarray], int]:
    """Fill the rows of layer 1 with 8-bit elements, their scales and bf16 keys; what they mean, a sequence each."""
    cache, stored = problem.collection.get_key_cache(1), []
    eight = cache.dtype.numpy
    for b, n in enumerate(problem.cached + problem.new):
        values = random_values(rng, (n, content), cache.dtype)
        scales = rng.uniform(0.5, 2.0, (n, content // elements)).astype(np.float32)
        keys = random_values(rng, (n, rope), dtypes.bf16)
        for t in range(n):
            row = np.concatenate([x[t].view(np.uint8).reshape(-1) for x in (values, scales, keys)])
            cache.store(b, 0, t, np.arange(len(row)), row.view(eight))
        scaled = values.astype(np.float64) * np.repeat(scales.astype(np.float64), elements, 1)
        stored.append(np.concatenate([scaled, keys.astype(np.float64)], 1))
    return stored, content


def scaled_reference(problem: Any, query: np.ndarray, stored: list[np.ndarray], content: int) -> np.ndarray:
    """Attention over rows that are given, causal; values are their first ``content`` columns."""
    out = np.zeros((*query.shape[:2], content))
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        rows = slice(int(problem.row_offsets[b]), int(problem.row_offsets[b]) + new)
        if new:
            keys = stored[b][:, None]
            seen = reference.visible("causal", cached + np.arange(new), np.arange(cached + new))
            q, scale = query[rows].astype(np.float64), query.shape[2] ** -0.5
            out[rows] = reference.dense_attention(q, keys, keys[..., :content], seen, scale)[0]
    return out


@pytest.mark.parametrize(("content", "rope", "elements"), [(64, 8, 16), (128, 16, 128), (32, 0, 32)])
def test_rows_with_their_scales_in_them(content, rope, elements):
    size = content + 4 * content // elements + 2 * rope
    rng, problem = latent_problem(11, dtype="f8e4m3", head_size=size)
    stored = store_scaled_rows(rng, problem, content, rope, elements)
    query = random_values(rng, (problem.tokens, 3, content + rope), dtypes.f32)
    want = scaled_reference(problem, query, *stored)
    out = kv.ops.mla_attention(
        problem.collection, 1, query, problem.row_offsets, value_size=content, inline_scales=elements
    )
    np.testing.assert_allclose(out, want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(on_gpu(problem, query, content, inline=elements), want, rtol=5e-5, atol=5e-5)


def test_rows_that_do_not_fit_their_scales_are_refused():
    rng, problem = latent_problem(12, dtype="f8e4m3", head_size=64 + 16 + 16)
    call = (problem.collection, 0, random_values(rng, (problem.tokens, 2, 72), dtypes.f32), problem.row_offsets)
    kv.ops.mla_attention(*call, value_size=64, inline_scales=16)
    with pytest.raises(ValueError, match="inline_scales needs rows of C 8-bit floats, a scale for every 32 of them"):
        kv.ops.mla_attention(*call, value_size=64, inline_scales=32)
    with pytest.raises(ValueError, match=r"value_size must be in \[1, 64\]"):
        kv.ops.mla_attention(*call, value_size=65, inline_scales=16)
    for wrong, said in ((24, "must be a power of two, got 24"), (8, "inline_scales must be in")):
        with pytest.raises(ValueError, match=said):
            kv.ops.mla_attention(*call, value_size=64, inline_scales=wrong)


def on_gpu(
    problem: Any,
    query: np.ndarray,
    value_size: int,
    schedule: dict[str, Any] | None = None,
    order: ptx.Order | None = None,
    mask: str = "causal",
    span: int = 0,
    inline: int = 0,
    target: str = "sm_90a",
) -> np.ndarray:
    """The same, by the interpreter."""
    written = query.dtype if query.dtype.itemsize > 1 else dtypes.bf16.numpy
    out = np.full((*query.shape[:2], value_size), SENTINEL, written)
    operands = (problem.collection, 1, query, problem.row_offsets, query.shape[2] ** -0.5, out)
    attributes = (("value_size", value_size), ("mask", mask), ("span", span))
    attributes += (("inline_scales", inline),) if inline else ()
    emulated.run(mla._MLA_ATTENTION, operands, attributes, schedule, target, order=order)
    return out


@pytest.mark.parametrize(
    ("dtype", "head_size", "value_size", "splits", "mask"),
    [
        ("bf16", 160, 128, 1, ("causal", 0)), ("f16", 272, 256, 3, ("causal", 0)), ("f16", 160, 128, 2, ("null", 0)),
        ("bf16", 576, 512, None, ("sliding_window", 30)), ("f8e4m3", 192, 128, 2, ("chunked", 24)),
    ],
)  # fmt: skip
def test_the_latent_kernel_shares_rows_among_heads(dtype, head_size, value_size, splits, mask):
    scales = {"scale_dtype": "f32"} if dtype == "f8e4m3" else {}
    rng, problem = latent_problem(
        7, dtype=dtype, head_size=head_size, cached=[50, 0, 70, 7], new=[1, 2, 5, 0], **scales
    )
    query = random_values(rng, (problem.tokens, 16, head_size), dtypes.of("bf16" if dtype == "f8e4m3" else dtype))
    schedule = {"kind": "latent"} | ({"splits": splits} if splits else {})
    out = on_gpu(problem, query, value_size, schedule, mask=mask[0], span=mask[1])
    want, _ = reference.mla_attention(
        problem.collection, 1, query, problem.row_offsets, value_size=value_size, mask=mask[0], window=mask[1],
        chunk=mask[1],
    )  # fmt: skip
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)


def test_the_latent_kernel_takes_rows_that_end_in_bf16_keys():
    content, rope = 128, 16
    rng, problem = latent_problem(
        8, dtype="f8e4m3", head_size=content + 2 * rope, scale_dtype="f32", cached=[40], new=[2]
    )
    stored = store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 16, content + rope), dtypes.bf16)
    want = rope_reference(problem, query, stored, content)
    out = on_gpu(problem, query, content, {"kind": "latent"})
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)


def test_the_latent_kernel_does_not_depend_on_the_order_of_warps_and_copies():
    rng, problem = latent_problem(9, dtype="f16", head_size=144, cached=[90], new=[2])
    query = random_values(rng, (problem.tokens, 16, 144), dtypes.f16)
    schedule = {"kind": "latent", "splits": 2}
    first, *rest = (on_gpu(problem, query, 128, schedule, order) for order in ptx.ORDERS[::2] + ptx.ORDERS[3:4])
    for other in rest:
        np.testing.assert_array_equal(other, first)


def test_what_does_not_fit_is_refused():
    rng, problem = latent_problem(4)
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    call = (problem.collection, 0, query, problem.row_offsets)
    with pytest.raises(ValueError, match=r"value_size must be in \[1, 24\] \(the row\), got 25"):
        kv.ops.mla_attention(*call, value_size=25)
    with pytest.raises(ValueError, match="value_size must be in"):
        kv.ops.mla_attention(*call, value_size=0)
    with pytest.raises(ValueError, match="needs a collection with values, got an MLA one"):
        kv.ops.attention(*call)
    with_values = random_problem(rng, cached=[3], new=[1]).collection
    with pytest.raises(ValueError, match="needs an MLA collection"):
        kv.ops.mla_attention(
            with_values, 0, np.zeros((1, 2, 16), np.float32), np.array([0, 1], np.uint32), value_size=8
        )


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3", "f32"])
def test_decompressing_a_plan_gives_every_row_once(dtype):
    quantized = {"scale_dtype": "f32"} if dtype == "f8e4m3" else {}
    _, problem = latent_problem(5, dtype=dtype, cached=[5, 0, 7, 0], new=[2, 3, 1, 0], page_size=4, **quantized)
    cache, tokens = problem.collection.get_key_cache(1), 8
    plan = kv.ops.mla_prefill_plan(problem.row_offsets, problem.cached.astype(np.uint32), tokens, 4)
    found = []
    for chunk in range(4):
        out = np.full((tokens, cache.head_size), SENTINEL, cache.dtype.numpy)
        rows = np.asarray(plan.buffer_row_offsets)[chunk].astype(np.int32)
        offsets = np.asarray(plan.cache_offsets)[chunk].astype(np.int32)
        kv.ops.mla_decompress(cache, rows, offsets, out)
        count = max(0, int(rows[-1]))
        assert (out[count:].astype(np.float32) == SENTINEL).all()
        found.append(out[:count])
    read = cache.load_quantized if quantized else cache.load
    dims = np.arange(cache.head_size)
    want = [read(b, 0, np.arange(n)[:, None], dims) for b, n in enumerate(problem.cached + problem.new) if n]
    np.testing.assert_array_equal(np.concatenate(found).view(np.uint8), np.concatenate(want).view(np.uint8))
    assert len(np.concatenate(found)) == 18
