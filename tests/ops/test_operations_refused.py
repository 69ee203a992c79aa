# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What rotations, commits and projections refuse by name, and weights of other formats."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from reference.cache_operations import DRAFTS, PATHS, angles
from reference.cache_rows import CACHED, STEP, WHOLE
from reference.random_caches import random_problem, stored_problem
from reference.weights import random_groups

import kvarn as kv
from kvarn.dialect import dtypes

ROWS = (2 + 2 * 2) * 64  # of a weight of two query heads and two KV heads of 64


def test_rotations_that_do_not_fit():
    rng, problem = stored_problem(11, **STEP)
    c, off, gamma = problem.collection, problem.row_offsets, np.ones(16, np.float32)
    query, freqs = np.ones((problem.tokens, 4, 16), np.float32), angles(rng, 16, 60)
    padded, valid = np.ones((4, 3, 2, 16), np.float32), np.ones(4, np.uint32)
    small = random_problem(rng, head_size=8, num_heads=1, is_mla=True, **STEP).collection
    fewer = random_problem(rng, num_heads=1, is_mla=True, cached=[1], new=[1]).collection
    scaled = random_problem(rng, "paged", "f8e4m3", scale_dtype="f32", **STEP).collection
    index = kv.ops.IndexHeads(small, query, gamma[:8], gamma[:8])
    norm, rotate = kv.ops.qk_norm, kv.ops.rope_padded
    cases = [
        (lambda: norm(c, 0, query, off, gamma[:8], gamma), "q_gamma must have shape [16], got [8]"),
        (lambda: norm(c, 0, query[:, :, :8].copy(), off, gamma, gamma), "query must have shape [T, Hq, 16]"),
        (lambda: norm(scaled, 0, query, off, gamma, gamma), "kv.ops.qk_norm: needs a cache without scales"),
        (lambda: norm(c, 0, query, off, gamma, gamma, index=index), "index.collection must have the head size of the"),
        (
            lambda: norm(c, 0, query, off, gamma, gamma, index=index._replace(collection=fewer)),
            "index.collection must have the collection's 4 sequences, got 1",
        ),
        (lambda: norm(c, 0, query, off, gamma, gamma, freqs_cis=freqs[:20]), "freqs_cis must have a row for each"),
        (lambda: rotate(c, 0, padded[:3], valid, freqs), "query must have shape [4, S, Hq, Dq], got [3, 3, 2, 16]"),
        (lambda: rotate(c, 0, padded, valid[:3], freqs), "valid_lengths must have shape [4], got [3]"),
        (
            lambda: rotate(c, 0, padded, valid, freqs, position_ids=np.ones((2, 4, 2), np.int32)),
            "position_ids must have shape [sections, 4, 3], got [2, 4, 2]",
        ),
        (lambda: rotate(c, 0, padded, valid, freqs, mrope_section=[8]), "mrope_section needs position_ids, got none"),
        (lambda: rotate(scaled, 0, padded, valid, freqs), "needs a cache without scales, got one with; rotate before"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match=r"index must be a kv\.ops\.IndexHeads, got tuple"):
        norm(c, 0, query, off, gamma, gamma, index=tuple(index))
    one_layer = random_problem(rng, num_heads=1, is_mla=True, num_layers=1, **STEP).collection
    with pytest.raises(IndexError, match="layer must be in"):
        norm(c, 1, query, off, gamma, gamma, index=index._replace(collection=one_layer))


def test_pages_of_other_libraries_that_do_not_fit():
    rng, lengths, count = np.random.default_rng(7), np.array(CACHED["cached"], np.int32), 12
    table, data = rng.integers(0, count, (4, 6)).astype(np.int32), np.zeros((count, 2, 8, 2, 16), np.float32)
    cache = random_problem(rng, "paged", "f32", **CACHED).collection.get_key_cache(0)
    fewer = random_problem(rng, "paged", "f32", cached=[3], new=[0]).collection.get_key_cache(0)
    make, good = kv.ForeignPages.flashinfer, kv.ForeignPages.flashinfer(data, lengths, table)
    assert isinstance(good.key, kv.PagedKVCache)
    fixed = data.copy()
    fixed.flags.writeable = False
    wide = make(np.zeros((count, 2, 8, 2, 32), np.float32), lengths, table)
    ints = make(data.astype(np.int32), lengths, table)
    cases = [
        (ValueError, lambda: make(data, lengths, table, "DNH"), "layout must be NHD or HND, got 'DNH'"),
        (ValueError, lambda: kv.ForeignPages.vllm(data, lengths, table), "data must be [2, pages, page_size, heads"),
        (ValueError, lambda: make(data[:, 0], lengths, table), "data must be [pages, 2, page_size, heads, head_size]"),
        (ValueError, lambda: make((data[:, 0],), lengths, table), "data must be one buffer or a pair of keys"),
        (
            ValueError,
            lambda: make((data[:, 0], data[:3, 1]), lengths, table),
            "keys and values must have one shape and dtype",
        ),
        (ValueError, lambda: make(data[..., ::2], lengths, table), "keys must be contiguous in their last dimension"),
        (ValueError, lambda: make(data, lengths, table[:3]), "lookup_table must have one row per sequence: 4 by"),
        (TypeError, lambda: make(data, lengths, table.astype(np.int64)), "lookup_table must be uint32 or int32"),
        (ValueError, lambda: kv.ops.convert(good.key, fewer), "must have the same sequences, got 4 and 1"),
        (ValueError, lambda: kv.ops.convert(wide.key, cache), "same heads and head size, got 2 x 32 and 2 x 16"),
        (ValueError, lambda: kv.ops.convert(ints.key, cache), "source stores i32 without scales, which converts only"),
        (ValueError, lambda: make(data.astype(np.int64), lengths, table), "cache dtype must be f32, f16"),
        (TypeError, lambda: kv.ops.convert(good, cache), "source must be a KV cache, got ForeignPages"),
        (
            ValueError,
            lambda: kv.ops.convert(cache, make(fixed, lengths, table).key),
            "destination is written, but its blocks are read-only",
        ),
    ]
    for kind, call, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            call()


def test_lists_of_accepted_tokens_that_do_not_fit():
    problem = stored_problem(6, **DRAFTS)[1]
    c, offsets, lists = problem.collection, problem.row_offsets, np.full((len(PATHS), 12), -1, np.int32)
    for call, error, message in (
        (lambda: kv.ops.commit(c, 3, lists, offsets), IndexError, r"layer must be in \[0, 3\), got 3"),
        (
            lambda: kv.ops.commit(c, None, lists[:2], offsets),
            ValueError,
            r"accepted must have shape \[5, M\], got \[2,",
        ),
        (lambda: kv.ops.commit(c, None, lists[None], offsets), ValueError, r"accepted must have shape \[5, M\]"),
        (lambda: kv.ops.commit(c, None, lists.astype(np.int64), offsets), TypeError, "accepted"),
        (lambda: kv.ops.commit(c, None, lists, offsets[:3]), ValueError, r"row_offsets must have shape \[6\]"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_projections_that_do_not_fit():
    c = random_problem(np.random.default_rng(12), "paged", "f32", cached=[1], new=[2]).collection
    x, weight, off = np.ones((2, 8), np.float32), np.ones((4 * 16 + 64, 8), np.float32), np.array([0, 2], np.uint32)
    latent = random_problem(np.random.default_rng(13), "paged", "f32", cached=[1], new=[2], num_heads=1, is_mla=True)
    wide, out = np.ones((2, 16), np.float32)[:, ::2], np.ones((2, 4, 8), np.float32)
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "weight must have the K = 8 of x", (c, 0, x, weight[:, :4].copy(), off), {}),
        (ValueError, "weight must have 64 rows besides those of query heads of 16, got 127",
         (c, 0, x, weight[1:], off), {}),
        (ValueError, r"weight must have 96 rows \(32 of query", (c, 0, x, weight, off), {"query_out": out}),
        (ValueError, "x must be contiguous in its last dimension", (c, 0, wide, weight, off), {}),
        (ValueError, "x must have contiguous rows",
         (c, 0, np.ones((2, 16), np.float32)[:, :8], weight, off), {}),
        (TypeError, "x must have dtype f32, which products are rounded to, got f16",
         (c, 0, x.astype(np.float16), weight.astype(np.float16), off), {"query_out": np.ones((2, 4, 16), np.float32)}),
        (TypeError, "collection of f32 cannot take the f16 that products are rounded to",
         (c, 0, x.astype(np.float16), weight.astype(np.float16), off), {}),
        (TypeError, "x_scale and weight_scale go with x of dtype f8e4m3, got f32", (c, 0, x, weight, off),
         {"x_scale": np.ones((1, 1), np.float32), "weight_scale": np.ones((1, 1), np.float32)}),
        (ValueError, "q_gamma and k_gamma must be given together", (c, 0, x, weight, off), {"q_gamma": x[0]}),
        (ValueError, "freqs_cis and gammas need queries", (c, 0, x, weight[:64], off),
         {"freqs_cis": np.ones((4, 16), np.float32)}),
        (ValueError, "index_collection and index_query_out must be given together", (c, 0, x, weight, off),
         {"index_query_out": out}),
        (ValueError, r"bias must have shape \[128\], got \[64\]", (c, 0, x, weight, off),
         {"bias": np.ones(64, np.float32)}),
        (ValueError, "needs a collection with values", (latent.collection, 0, x, weight[:32], off),
         {"freqs_cis": np.ones((4, 16), np.float32)}),
    ]  # fmt: skip
    for error, message, args, options in cases:
        with pytest.raises(error, match=message):
            kv.ops.project_append(*args, **options)
    padded = np.ones((1, 2, 16), np.float32)[:, :, :8]
    with pytest.raises(ValueError, match="project_append_padded: x must be contiguous"):
        kv.ops.project_append_padded(c, 0, padded, weight, np.array([2], np.uint32))


def test_more_tokens_than_were_promised_are_refused():
    c = random_problem(np.random.default_rng(17), "paged", "f32", cached=[1], new=[9]).collection
    x, weight = np.ones((9, 8), np.float32), np.ones((64, 8), np.float32)
    with pytest.raises(ValueError, match="no more than the schedule's max_tokens = 8 rows, got 9"):
        kv.ops.project_append(c, 0, x, weight, np.array([0, 9], np.uint32), schedule={"max_tokens": 8})


def test_groups_that_do_not_fit():
    rng = np.random.default_rng(6)
    c = random_problem(rng, "paged", "bf16", num_heads=2, head_size=64, cached=[1], new=[2]).collection
    x, off, w = (
        np.ones((2, 64), dtypes.bf16.numpy),
        np.array([0, 2], np.uint32),
        random_groups(rng, ROWS, 64, 32, "int4", "f32"),
    )
    scale, e8m0 = w.scales, dtypes.of("f8e8m0").numpy
    cases: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
        (ValueError, "weight_format must be one of plain, uint4b8, int4, uint4, e2m1, got 'int3'", x, w.elements,
         {"weight_format": "int3", "weight_scale": scale}),
        (ValueError, "weight_scale must be given with weight_format 'int4'", x, w.elements, {"weight_format": "int4"}),
        (TypeError, "weight must have dtype u8 or i8, got f32", x, w.elements.astype(np.float32),
         {"weight_format": "int4", "weight_scale": scale}),
        (ValueError, "weight must have the K = 64 of x, got rows of 32 elements", x, w.elements[:, :16].copy(),
         {"weight_format": "int4", "weight_scale": scale}),
        (ValueError, "weight_scale must have groups of a multiple of 8 elements that divide K = 64, got 3", x,
         w.elements, {"weight_format": "int4", "weight_scale": np.ones((ROWS, 3), np.float32)}),
        (ValueError, r"weight_scale must have shape \[3, 1, 32, 4, 4\], got \[2, 1, 32, 4, 4\]", x, w.elements,
         {"weight_format": "e2m1", "weight_scale": np.ones((2, 1, 32, 4, 4), e8m0)}),
        (ValueError, "x_scale if x has no floats, and only then", x, w.elements,
         {"weight_format": "int4", "weight_scale": scale, "x_scale": scale[:2]}),
        (TypeError, "x must be of floats, or f8e4m3 as its weight, or bytes as a weight of e2m1, got u8",
         w.elements[:2], w.elements, {"weight_format": "int4", "weight_scale": scale, "x_scale": scale[:2]}),
        (ValueError, r"weight_min must have shape \[384, 2\], got \[384, 1\]", x, w.elements,
         {"weight_format": "int4", "weight_scale": scale, "weight_min": scale[:, :1].copy()}),
        (ValueError, "weight_min and tensor_scale go with scales by groups, got scales of none", x,
         np.ones((ROWS, 64), x.dtype), {"tensor_scale": np.ones((1, 1), np.float32)}),
    ]  # fmt: skip
    for error, message, rows, weight, options in cases:
        with pytest.raises(error, match=message):
            kv.ops.project_append(c, 0, rows, weight, off, **options)


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_kinds_say_what_they_do_not_take(place):
    """Units that write whole heads, and a weight whose groups are no steps of K."""

    def refused(message: str, dtype: str = "bf16", size: int = 64, k: int = 64, **options: Any) -> None:
        cache = {"scale_dtype": "f32", "granularity": 32} if dtype == "f8e4m3" else {}
        problem = random_problem(np.random.default_rng(1), "paged", dtype, head_size=size, **STEP, **cache)
        x, weight = np.ones((problem.tokens, k), dtypes.bf16.numpy), np.ones((8 * size, k), dtypes.bf16.numpy)
        given = {"weight": weight, "schedule": WHOLE, **options}
        with pytest.raises(Exception, match=message):
            kv.ops.project_append(problem.collection, 1, x, row_offsets=problem.row_offsets, **given)

    gammas: dict[str, Any] = {n: np.ones(64, np.float32) for n in ("q_gamma", "k_gamma")}
    refused("kind full_k needs heads without norms", **gammas)
    refused("kind full_k needs a cache without scales", dtype="f8e4m3")
    refused("kind full_k needs heads, and dims that are rotated, of a multiple of 16 elements", size=24)
    refused("kind full_k needs a K of a multiple of 64, got 48", k=48)
    grouped = random_groups(np.random.default_rng(7), 8 * 64, 144, 24, "uint4b8", "bf16")
    few = {"weight": grouped.elements, "weight_scale": grouped.scales, "weight_format": "uint4b8"}
    refused(
        "kind stream_k needs a K of a multiple of 128, got 144",
        k=144,
        schedule={"kind": "stream_k", "max_tokens": 16},
        **few,
    )


def test_a_weight_of_gptq_is_taken_as_its_words_say():
    rng = np.random.default_rng(8)
    codes, scales = rng.integers(0, 16, (64, 24)), rng.random((2, 24)).astype(np.float16)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[None, :, None]
    words = np.bitwise_or.reduce(codes.astype(np.uint32).reshape(8, 8, 24) << shifts, axis=1)
    found = kv.weights.from_gptq(words.view(np.int32), scales)
    values = (codes - 8) * np.repeat(scales.astype(np.float64), 32, 0)
    np.testing.assert_array_equal(values_of(found), values.T)
    with pytest.raises(ValueError, match=r"scales must be \[K / g, 24\] with groups that divide K = 64, got \[3, 24\]"):
        kv.weights.from_gptq(words, np.ones((3, 24), np.float16))


@pytest.mark.parametrize("type_", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_a_tensor_of_gguf_has_the_values_that_gguf_says(type_):
    gguf = pytest.importorskip("gguf")
    size, read = getattr(gguf.GGMLQuantizationType, type_), np.random.default_rng(9)
    _, length = gguf.GGML_QUANT_SIZES[size]
    blocks = read.integers(0, 256, (5, 3, length), np.uint8)
    # Random bytes are no numbers everywhere: what is f16 gets some.
    places = {"Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}.get(type_, [0])
    for place in places:
        blocks[..., place : place + 2] = read.uniform(-2, 2, (5, 3, 1)).astype(np.float16).view(np.uint8)
    blocks = blocks.reshape(5, -1)
    found = kv.weights.from_gguf(blocks, type_)
    np.testing.assert_allclose(values_of(found), gguf.dequantize(blocks, size), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=f"whole blocks of {length} bytes"):
        kv.weights.from_gguf(blocks[:, 1:], type_)


def values_of(found: dict[str, Any]) -> np.ndarray:
    """The values of a weight as the operation takes it."""
    elements, offset = found["weight"], {"uint4b8": 8}.get(found["weight_format"], 0)
    if found["weight_format"] != "plain":
        elements = np.stack([elements & 15, elements >> 4], -1).reshape(len(elements), -1)
    size = elements.shape[1] // found["weight_scale"].shape[1]
    spread = [np.repeat(found[n].astype(np.float64), size, 1) for n in ("weight_scale", "weight_min") if n in found]
    return (elements.astype(np.float64) - offset) * spread[0] - (spread[1] if len(spread) > 1 else 0)
