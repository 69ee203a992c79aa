# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.project_append of weights with scales by groups of K, against the model, on the host and in GPU code.

Values are small multiples of powers of two, whose products add up exactly in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Place, assert_same
from reference.random_caches import clone, random_problem
from reference.weights import Grouped, random_groups

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dialect.ops.weight_groups import PACKED

SIZE, HEADS, KV_HEADS = 64, 2, 2
ROWS = (HEADS + 2 * KV_HEADS) * SIZE


def tokens(rng: np.random.Generator, rows: int, k: int, dtype: str) -> np.ndarray:
    return (rng.integers(-2, 3, (rows, k)) / 2).astype(np.float32).astype(dtypes.of(dtype).numpy)


def check(
    place: Place, weight: Grouped, element: str, *, dtype: str = "bf16", x: Grouped | None = None, schedule: Any = None,
    total: float | None = None, new: Any = (3, 2, 9), padded: bool = False,
) -> None:  # fmt: skip
    """Project random rows, or those of ``x``, which are quantized as the weight is."""
    rng = np.random.default_rng(1)
    problem = random_problem(rng, "paged", dtype, num_heads=KV_HEADS, head_size=SIZE, cached=[5, 0, 33], new=list(new))
    width = max(new)
    count, k = len(new) * width if padded else sum(new), weight.values.shape[1]
    rows = tokens(rng, count, k, dtype) if x is None else x.elements
    values = (rows.astype(np.float64) if x is None else x.values) * (1 if total is None else total)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    given = {"weight_scale": weight.scales, "weight_min": weight.minima, "x_scale": None if x is None else x.scales}
    given["tensor_scale"] = None if total is None else np.full((1, 1), total, np.float32)
    call: Any = kv.ops.project_append_padded if padded else kv.ops.project_append
    table = problem.new.astype(np.uint32) if padded else problem.row_offsets
    out = call(
        found, 1, place.put(rows.reshape(len(new), width, -1) if padded else rows), place.put(weight.elements),
        place.put(table), schedule=schedule, weight_format=element if element in PACKED else "plain",
        **{name: place.put(value) for name, value in given.items() if value is not None},
    )  # fmt: skip
    numpy = dtypes.of(dtype).numpy
    kept = np.concatenate([np.arange(n) + b * width for b, n in enumerate(new)]) if padded else np.arange(count)
    wanted, _ = model.project_append(
        expected, 1, values[kept], weight.values, problem.row_offsets, numpy, query_heads=HEADS
    )
    got = place.get(out).reshape(count, HEADS, SIZE)[kept].astype(np.float32)
    np.testing.assert_array_equal(got, wanted.astype(numpy).astype(np.float32))
    assert_same(place, found, expected)


FORMATS = [
    ("uint4b8", 128, "bf16", {}),
    ("int4", 32, "f32", {}),
    ("uint4", 64, "f16", {"minima": True}),
    ("e2m1", 16, "f8e4m3", {"interleaved": True}),
    ("e2m1", 32, "f8e8m0", {}),
    ("f8e4m3", 32, "f8e8m0", {"interleaved": True}),
    ("f8e5m2", 16, "bf16", {}),
    ("i8", 8, "bf16", {"minima": True}),
]


@pytest.mark.sampled(64)
@pytest.mark.parametrize(("element", "size", "scale", "options"), FORMATS)
def test_groups_of_a_weight_have_scales(place, element, size, scale, options):
    check(place, random_groups(np.random.default_rng(0), ROWS, 256, size, element, scale, **options), element)


@pytest.mark.sampled(64)
@pytest.mark.parametrize(("element", "size", "scale", "options"), FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("place", ["sm_80", "sm_90a", "sm_100a"], indirect=True)
def test_few_tokens_read_a_weight_as_it_is_stored(place, dtype, element, size, scale, options):
    if dtype == "f16" and place.target == "sm_80" and element.startswith("f8"):
        pytest.skip("sm_80 has no instructions that convert 8-bit floats to f16")
    weight = random_groups(np.random.default_rng(0), ROWS, 256, size, element, scale, **options)
    check(place, weight, element, dtype=dtype, schedule={"kind": "stream_k", "max_tokens": 16})


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("element", "size", "scale", "options"), FORMATS)
@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_a_weight_is_converted_on_its_way_to_wgmma(place, tokens, element, size, scale, options):
    weight = random_groups(np.random.default_rng(5), ROWS, 512, size, element, scale, **options)
    new = (3, 0, 50) if tokens == 64 else (90, 3, 70)
    check(place, weight, element, new=new, schedule={"kind": "stream_k", "max_tokens": tokens})


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_more_tokens_than_a_block_has_take_more_blocks(place):
    weight = random_groups(np.random.default_rng(0), ROWS, 384, 32, "uint4b8", "bf16")
    check(place, weight, "uint4b8", new=(3, 0, 70), schedule={"max_tokens": 128})


@pytest.mark.sampled(64)
@pytest.mark.parametrize(("element", "size", "scale"), [("e2m1", 16, "f8e4m3"), ("f8e4m3", 32, "f8e8m0")])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("max_tokens", [16, None])
def test_tokens_may_have_groups_of_their_own(place, element, size, scale, interleaved, max_tokens):
    rng = np.random.default_rng(2)
    weight, x = (random_groups(rng, n, 192, size, element, scale, interleaved=interleaved) for n in (ROWS, 14))
    schedule = None if max_tokens is None or place.name == "host" else {"max_tokens": max_tokens}
    check(place, weight, element, x=x, total=0.25, schedule=schedule)


@pytest.mark.sampled(64)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_values_are_rounded_to_the_type_of_tokens(place, dtype):
    weight = random_groups(np.random.default_rng(3), ROWS, 24, 24, "int4", "f16", minima=True)
    check(place, weight, "int4", dtype=dtype, new=(1, 0, 2))


def test_a_padded_batch_takes_weights_with_groups(place):
    weight = random_groups(np.random.default_rng(4), ROWS, 128, 64, "uint4b8", "bf16")
    schedule = None if place.name == "host" else {"max_tokens": 16}
    check(place, weight, "uint4b8", padded=True, new=(3, 0, 4), schedule=schedule)


def test_a_batch_without_tokens_takes_weights_with_groups(place):
    weight = random_groups(np.random.default_rng(5), ROWS, 128, 64, "uint4b8", "bf16")
    check(place, weight, "uint4b8", new=(0, 0, 0), schedule=None if place.name == "host" else {"max_tokens": 16})


def test_what_does_not_fit_is_refused_by_name():
    rng = np.random.default_rng(6)
    c = random_problem(rng, "paged", "bf16", num_heads=KV_HEADS, head_size=SIZE, cached=[1], new=[2]).collection
    x, off, w = tokens(rng, 2, 64, "bf16"), np.array([0, 2], np.uint32), random_groups(rng, ROWS, 64, 32, "int4", "f32")
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


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_a_kind_that_does_not_take_the_groups_says_why(place):
    weight = random_groups(np.random.default_rng(7), ROWS, 144, 24, "uint4b8", "bf16")
    with pytest.raises(Exception, match="kind stream_k needs a K of a multiple of 128, got 144"):
        check(place, weight, "uint4b8", schedule={"kind": "stream_k", "max_tokens": 16})
