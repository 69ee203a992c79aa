# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.rope_append and kv.ops.rope against the model, on the host and in GPU code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Place, assert_close, near
from reference.random_caches import clone, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

SHAPE = {"cached": [5, 0, 33, 16], "new": [3, 2, 0, 9]}


def data_of(rng: Any, problem: Any, dtype: str | None = None, heads: int = 6) -> list[np.ndarray]:
    """Query, key and value."""
    c = problem.collection
    chosen = dtypes.of(dtype or (c.dtype if c.dtype.bits > 8 else "bf16"))
    return [random_values(rng, (problem.tokens, h, c.head_size), chosen) for h in (heads, c.num_heads, c.num_heads)]


def angles(rng: Any, positions: int, turned: int) -> np.ndarray:
    """(cos, sin) pairs of random angles."""
    angle = rng.uniform(0, 2 * np.pi, (positions, turned // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(positions, turned).astype(np.float32)


def check(place: Place, problem: Any, data: list[np.ndarray], freqs: np.ndarray, **options: Any) -> None:
    found, expected = place.collection(problem.collection), clone(problem.collection)
    arrays = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    query, key, value = (place.put(x) for x in data)
    out = place.put(np.full_like(data[0], 77))
    back = kv.ops.rope_append(
        found, 1, query, key, value, place.put(problem.row_offsets), place.put(freqs), query_out=out, **arrays
    )
    rotated = model.rope_append(expected, 1, *data, problem.row_offsets, freqs, **options)
    assert back is out
    near(place.get(out), rotated.astype(data[0].dtype))
    assert_close(place, found, expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turned", [16, 12, 8, 2])
@pytest.mark.parametrize("normal", [False, True])
def test_rope_append_rotates_and_writes(place, interleaved, turned, normal):
    rng = np.random.default_rng(1)
    problem = random_problem(rng, "paged", "bf16", **SHAPE)
    gammas = {
        "q_gamma": rng.standard_normal(16).astype(np.float32),
        "k_gamma": rng.standard_normal(16).astype(np.float32),
    }
    options = {"eps": 1e-3, **gammas} if normal else {}
    check(place, problem, data_of(rng, problem), angles(rng, 60, turned), interleaved=interleaved, **options)


@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "f8e4m3"])
def test_rope_append_serves_every_kind(place, kind, dtype):
    rng = np.random.default_rng(2)
    problem = random_problem(rng, kind, dtype, page_size=4, **SHAPE)
    check(place, problem, data_of(rng, problem), angles(rng, 60, 16))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "size", "turned"), [(1, 64, 64), (3, 80, 40), (2, 96, 96), (1, 7, 6), (2, 10, 6), (8, 128, 64)]
)
def test_rope_append_serves_any_head_shape(place, interleaved, heads, size, turned):
    rng = np.random.default_rng(3)
    problem = random_problem(rng, "paged", "f16", num_heads=heads, head_size=size, cached=[1, 2], new=[2, 3])
    gamma = rng.standard_normal(size).astype(np.float16)
    options = {"q_gamma": gamma, "k_gamma": gamma + 1} if heads > 1 else {}
    check(place, problem, data_of(rng, problem, heads=5), angles(rng, 60, turned), interleaved=interleaved, **options)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("size", "turned", "granularity"), [(64, 64, 64), (64, 32, 16), (48, 48, 48), (64, 64, 8), (20, 8, 6)]
)
@pytest.mark.parametrize("normal", [False, True])
def test_rope_append_quantizes(place, interleaved, size, turned, granularity, normal):
    rng = np.random.default_rng(4)
    problem = random_problem(
        rng, "paged", "f8e4m3", head_size=size, scale_dtype="f32", granularity=granularity, cached=[3, 0], new=[2, 4]
    )
    gamma = rng.standard_normal(size).astype(np.float32)
    options = {"q_gamma": gamma, "k_gamma": gamma} if normal else {}
    data, freqs = data_of(rng, problem, "f32"), angles(rng, 60, turned)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    arrays = {n: place.put(v) for n, v in options.items()}
    operands = [place.put(x) for x in (*data, problem.row_offsets, freqs)]
    out = kv.ops.rope_append(found, 0, *operands, interleaved=interleaved, **arrays)
    rotated = model.rope_append(expected, 0, *data, problem.row_offsets, freqs, interleaved=interleaved, **options)
    near(place.get(out), rotated.astype(np.float32))
    blocks, scales = place.buffers(found)
    assert_scales_close(scales, np.asarray(expected.scales))
    near(blocks, np.asarray(expected.blocks), most=0.01)


def assert_scales_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normal", [False, True])
def test_the_query_may_be_rotated_in_place(place, interleaved, normal):
    rng = np.random.default_rng(5)
    problem = random_problem(rng, "paged", "f32", head_size=32, **SHAPE)
    query, key, value = data_of(rng, problem)
    freqs = angles(rng, 60, 32)
    gamma = np.ones(32, np.float32)
    options = {"q_gamma": gamma, "k_gamma": gamma} if normal else {}
    expected = model.rope_append(
        clone(problem.collection), 0, query, key, value, problem.row_offsets, freqs, interleaved=interleaved, **options
    )
    inplace = place.put(query.copy())
    found, offsets = place.collection(problem.collection), place.put(problem.row_offsets)
    kv.ops.rope_append(
        found, 0, inplace, place.put(key), place.put(value), offsets, place.put(freqs), interleaved=interleaved,
        query_out=inplace, **{n: place.put(g) for n, g in options.items()},
    )  # fmt: skip
    near(place.get(inplace), expected.astype(np.float32))


def test_queries_outside_of_the_offsets_keep_their_sentinel(place):
    rng = np.random.default_rng(6)
    problem = random_problem(rng, "paged", "f32", cached=[3, 1], new=[2, 1])
    c = problem.collection
    query = random_values(rng, (9, 4, 16), c.dtype)
    key = random_values(rng, (9, 2, 16), c.dtype)
    out = place.put(np.full_like(query, 77))
    offsets = problem.row_offsets + np.uint32(2)
    found = place.collection(c)
    freqs = place.put(angles(rng, 30, 16))
    kv.ops.rope_append(
        found, 0, place.put(query), place.put(key), place.put(key), place.put(offsets), freqs, query_out=out
    )
    result = place.get(out)
    assert (result[:2] == 77).all()
    assert (result[5:] == 77).all()
    assert not (result[2:5] == 77).any()


# --- rope ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("positions", ["cache", "given", "sections"])
@pytest.mark.parametrize("mla", [False, True])
def test_rope_turns_cached_keys_and_queries(place, interleaved, positions, mla):
    options: dict[str, Any] = {"num_heads": 1, "head_size": 24, "is_mla": True} if mla else {}
    rng, problem = stored_problem(7, page_size=8, **SHAPE, **options)
    c = problem.collection
    found, expected = place.collection(c), clone(c)
    query, freqs = random_values(rng, (problem.tokens, 3, 16), c.dtype), angles(rng, 60, 12)
    given: dict[str, Any] = {"interleaved": interleaved}
    if positions != "cache":
        sections = 3 if positions == "sections" else 1
        given["position_ids"] = rng.integers(0, 60, (sections, problem.tokens)).astype(np.int32)
    if positions == "sections":
        given["mrope_section"] = [3, 1, 2]
    arrays = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    out = place.put(np.full_like(query, 77))
    kv.ops.rope(found, 1, place.put(query), place.put(problem.row_offsets), place.put(freqs), query_out=out, **arrays)
    rotated = model.rope_in_place(expected, 1, query, problem.row_offsets, freqs, **given)
    near(place.get(out), rotated.astype(np.float32))
    assert_close(place, found, expected)


def test_positions_out_of_the_table_are_brought_into_it(place):
    rng, problem = stored_problem(8, cached=[1], new=[3])
    query, freqs = random_values(rng, (3, 2, 16), dtypes.f32), angles(rng, 5, 16)
    found = place.collection(problem.collection)
    ids = place.put(np.array([[-3, 4, 2**31 - 1]], np.int32))
    out = kv.ops.rope(found, 0, place.put(query), place.put(problem.row_offsets), place.put(freqs), position_ids=ids)
    near(place.get(out), model.rope(query, [0, 4, 4], freqs).astype(np.float32))
