# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over the latent rows that a list names, on the host and by the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.test_attention_mla import SENTINEL, latent_problem, store_rope_keys
from reference import attention as reference, emulated
from reference.random_caches import Problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.emulator import grid as ptx
from kvarn.ops import mla


def sparse_problem(seed: int, dtype: str = "f32", picks: int = 40, **shape: Any) -> tuple[Any, Problem, np.ndarray]:
    """A problem, and for each query row encoded tokens of its sequence in any order, some of them none."""
    rng, problem = latent_problem(seed, dtype=dtype, **{"cached": [50, 0, 70, 9], "new": [2, 1, 3, 0], **shape})
    collection, rows = problem.collection, []
    for cached, new in zip(problem.cached, problem.new, strict=True):
        for _ in range(new):
            tokens = rng.permutation(cached + new)[:picks]
            rows.append(np.concatenate([tokens, np.full(picks - len(tokens), -1)]))
    logical = np.array(rows, np.int32).reshape(problem.tokens, picks)
    logical[rng.random(logical.shape) < 0.2] = -1
    encoded = kv.ops.remap_sparse_indices(
        logical, problem.row_offsets, collection.lookup_table, collection.page_size, problem.null_page
    )
    assert (encoded >= 0).sum() == (logical >= 0).sum()
    return rng, problem, np.asarray(encoded)


def listed_rows(problem: Problem, layer: int, encoded: np.ndarray) -> np.ndarray:
    """The pool's rows, float64 [n, D], dequantized."""
    collection, size = problem.collection, problem.collection.page_size
    rows = collection.blocks[encoded // size, 0, layer, encoded % size, 0].astype(np.float64)
    if collection.scales is None:
        return rows
    scales = collection.scales[encoded // size, 0, layer, encoded % size, 0].astype(np.float64)
    return rows * np.repeat(scales, collection.quantization_granularity, -1)[..., : rows.shape[-1]]


def sparse_reference(
    query: np.ndarray, indices: np.ndarray, rows_of: Any, value_size: int, lengths: Any = None, blocks: int = 1 << 30
) -> np.ndarray:
    """The definition, a query row at a time: ``rows_of`` gives keys of encoded rows; values are their first columns."""
    out = np.zeros((*query.shape[:2], value_size))
    for t, listed in enumerate(indices.astype(np.int64)):
        listed = listed if lengths is None else listed[: max(0, int(lengths[t]))]
        listed = listed[(listed >= 0) & (listed < blocks)]
        keys = rows_of(listed)[:, None]
        seen = np.ones((1, len(listed)), bool)
        one = query[t : t + 1].astype(np.float64)
        out[t] = reference.dense_attention(one, keys, keys[..., :value_size], seen, query.shape[2] ** -0.5)[0][0]
    return out


def on_gpu(
    problem: Problem, layer: int, query: np.ndarray, indices: np.ndarray, lengths: Any, value_size: int,
    schedule: Any = None, order: ptx.Order | None = None, target: str = "sm_90a", inline: int = 0,
) -> np.ndarray:  # fmt: skip
    """The same, by the interpreter."""
    out = np.full((*query.shape[:2], value_size), SENTINEL, query.dtype)
    scale = query.shape[2] ** -0.5
    operands = (problem.collection, layer, query, problem.row_offsets, scale, out, indices, lengths)
    attributes = (("value_size", value_size), ("mask", "null"), ("span", 0))
    attributes += (("inline_scales", inline),) if inline else ()
    emulated.run(mla._MLA_ATTENTION, operands, attributes, schedule, target, order=order)
    return out


def everywhere(problem: Problem, layer: int, query: np.ndarray, indices: Any, lengths: Any, size: int) -> Any:
    """The host's result, and that of the GPU's row kernel."""
    yield kv.ops.mla_attention(
        problem.collection, layer, query, problem.row_offsets, value_size=size, indices=indices, topk_lengths=lengths
    )
    yield on_gpu(problem, layer, query, indices, lengths, size, {"kind": "simt"})


CASES = [
    ("f32", {"head_size": 24}, 16, 3), ("bf16", {"head_size": 96, "page_size": 4}, 64, 2),
    ("f16", {"head_size": 50}, 50, 5), ("f8e4m3", {"head_size": 96}, 64, 4),
    ("f8e4m3", {"head_size": 32, "scale_dtype": "f32"}, 24, 2),
    ("i8", {"head_size": 48, "scale_dtype": "f16", "granularity": 16}, 32, 2),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape", "value_size", "heads"), CASES)
def test_a_query_sees_the_rows_that_it_lists(dtype, shape, value_size, heads):
    rng, problem, indices = sparse_problem(1, dtype, **shape)
    wide = dtypes.of(dtype) if dtypes.of(dtype).bits > 8 else dtypes.f32
    query = random_values(rng, (problem.tokens, heads, shape["head_size"]), wide)
    if dtype == "i8":
        query = (query / 64).astype(query.dtype)
    lengths = rng.integers(0, indices.shape[1] + 1, problem.tokens).astype(np.int32)
    tolerance = {"bf16": 1.6e-2, "f16": 3e-3}.get(dtype, 2e-4)
    for counts in (None, lengths):
        want = sparse_reference(query, indices, lambda e: listed_rows(problem, 1, e), value_size, counts)
        for out in everywhere(problem, 1, query, indices, counts, value_size):
            np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("quantized", [False, True])
def test_listed_rows_may_end_in_bf16_keys(quantized):
    content, rope = 32, 8
    scales = {"scale_dtype": "f32"} if quantized else {}
    rng, problem, indices = sparse_problem(2, "f8e4m3", head_size=content + 2 * rope, **scales)
    store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 3, content + rope), dtypes.f32)
    collection, size = problem.collection, problem.collection.page_size

    def rows_of(encoded: np.ndarray) -> np.ndarray:
        place = encoded // size, 0, 1, encoded % size, 0
        rows = collection.blocks[place]
        keys = np.ascontiguousarray(rows[:, content:]).view(np.uint8).view(dtypes.bf16.numpy).astype(np.float64)
        sigma = collection.scales[place].astype(np.float64) if quantized else 1.0
        return np.concatenate([rows[:, :content].astype(np.float64), keys], 1) * sigma

    want = sparse_reference(query, indices, rows_of, content)
    for out in everywhere(problem, 1, query, indices, None, content):
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def test_what_names_no_row_of_the_pool_is_not_read():
    rng, problem, indices = sparse_problem(3, head_size=24)
    rows = problem.collection.blocks.shape[0] * problem.collection.page_size
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    indices[:, ::3] = rng.choice([rows, rows + 5, 2**31 - 1, -2, -(2**31)], indices[:, ::3].shape)
    indices[1] = [rows, -1] * (indices.shape[1] // 2)
    lengths = np.array([indices.shape[1] + 100, 3, 0, -4, 2**31 - 1, 7], np.int64).astype(np.int32)[: problem.tokens]
    want = sparse_reference(query, indices, lambda e: listed_rows(problem, 0, e), 16, lengths, rows)
    assert (want[1:4] == 0).all()
    for out in everywhere(problem, 0, query, indices, lengths, 16):
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def test_lists_without_indices_give_zeros():
    rng, problem, indices = sparse_problem(10, head_size=24)
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    for lists, lengths in ((indices[:, :0], None), (indices, np.zeros(problem.tokens, np.int32))):
        for out in everywhere(problem, 0, query, np.ascontiguousarray(lists), lengths, 16):
            assert (out == 0).all()


def test_every_token_listed_is_dense_attention_without_a_mask():
    rng, problem = latent_problem(4, cached=[20, 0, 33], new=[2, 1, 3], page_size=4)
    most = int((problem.cached + problem.new).max())
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    logical = np.tile(np.arange(most, dtype=np.int32), (problem.tokens, 1))
    table = problem.collection.lookup_table
    indices = kv.ops.remap_sparse_indices(logical, problem.row_offsets, table, 4, problem.null_page)
    counts = np.repeat(problem.cached + problem.new, problem.new).astype(np.uint32)
    call = (problem.collection, 1, query, problem.row_offsets)
    sparse = kv.ops.mla_attention(*call, value_size=16, indices=indices, topk_lengths=counts)
    dense = kv.ops.mla_attention(*call, value_size=16, mask="null")
    np.testing.assert_allclose(sparse, dense, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [16, 72])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_latent_kernels_give_zeros_for_lists_of_nothing(heads, splits):
    rng, problem, indices = sparse_problem(10, "bf16", head_size=144, cached=[20, 0], new=[2, 1])
    query = random_values(rng, (problem.tokens, heads, 144), dtypes.bf16)
    schedule = {"kind": "latent", "splits": splits}
    none = np.zeros(problem.tokens, np.int32)
    for lists, lengths in ((indices[:, :0], None), (indices, none), (np.full_like(indices, -1), None)):
        out = on_gpu(problem, 1, query, np.ascontiguousarray(lists), lengths, 128, schedule)
        assert (out == 0).all()


@pytest.mark.parametrize(
    ("dtype", "head_size", "value_size", "heads", "splits"),
    [
        ("bf16", 160, 128, 16, 1), ("f16", 144, 128, 72, 3), ("bf16", 576, 512, 16, None), ("f8e4m3", 160, 128, 16, 2),
    ],
)  # fmt: skip
def test_the_latent_kernel_gathers_listed_rows(dtype, head_size, value_size, heads, splits):
    scales = {"scale_dtype": "f32"} if dtype == "f8e4m3" else {}
    rng, problem, indices = sparse_problem(
        5, dtype, 75, head_size=head_size, page_size=12, cached=[90, 0, 60], new=[1, 1, 2], **scales
    )
    indices[0, 3] = problem.collection.blocks.shape[0] * 12 + 1
    query = random_values(rng, (problem.tokens, heads, head_size), dtypes.of("bf16" if dtype == "f8e4m3" else dtype))
    lengths = np.array([75, 70, 33, 0], np.int32)
    schedule = {"kind": "latent"} | ({"splits": splits} if splits else {})
    out = on_gpu(problem, 1, query, indices, lengths, value_size, schedule)
    rows = problem.collection.blocks.shape[0] * 12
    want = sparse_reference(query, indices, lambda e: listed_rows(problem, 1, e), value_size, lengths, rows)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)


def test_the_latent_kernel_gathers_rows_that_end_in_bf16_keys():
    content, rope = 128, 16
    rng, problem, indices = sparse_problem(
        6, "f8e4m3", head_size=content + 2 * rope, scale_dtype="f32", cached=[60], new=[2]
    )
    store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 16, content + rope), dtypes.bf16)
    simt = on_gpu(problem, 1, query, indices, None, content, {"kind": "simt"})
    latent = on_gpu(problem, 1, query, indices, None, content, {"kind": "latent"})
    np.testing.assert_allclose(latent.astype(np.float64), simt.astype(np.float64), rtol=2e-2, atol=2e-2)


def test_the_gathering_kernel_does_not_depend_on_the_order_of_warps_and_copies():
    rng, problem, indices = sparse_problem(7, "f16", 70, head_size=144, cached=[90], new=[2])
    query = random_values(rng, (problem.tokens, 16, 144), dtypes.f16)
    schedule = {"kind": "latent", "splits": 2}
    orders = ptx.ORDERS[::2] + ptx.ORDERS[3:4]
    first, *rest = (on_gpu(problem, 1, query, indices, None, 128, schedule, order) for order in orders)
    for other in rest:
        np.testing.assert_array_equal(other, first)


def test_what_does_not_fit_is_refused():
    rng, problem, indices = sparse_problem(8, head_size=24)
    query = random_values(rng, (problem.tokens, 2, 24), dtypes.f32)
    call = (problem.collection, 0, query, problem.row_offsets)
    with pytest.raises(ValueError, match=r"indices must have shape \[6, K\], got \[5, 40\]"):
        kv.ops.mla_attention(*call, value_size=16, indices=indices[:5])
    with pytest.raises(TypeError, match="indices must be int32 or uint32, got i64"):
        kv.ops.mla_attention(*call, value_size=16, indices=indices.astype(np.int64))
    with pytest.raises(ValueError, match=r"topk_lengths must have shape \[6\], got \[2\]"):
        kv.ops.mla_attention(*call, value_size=16, indices=indices, topk_lengths=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="topk_lengths needs indices, got none"):
        kv.ops.mla_attention(*call, value_size=16, topk_lengths=np.zeros(6, np.int32))
    for options in ({"mask": "causal"}, {"window": 3}, {"chunk": 3}):
        with pytest.raises(ValueError, match="mask, window, chunk and kv_offsets must be None with indices"):
            kv.ops.mla_attention(*call, value_size=16, indices=indices, **options)
    rng, continuous = latent_problem(9, kind="continuous")
    query = random_values(rng, (continuous.tokens, 2, 24), dtypes.f32)
    with pytest.raises(ValueError, match="indices needs a collection of pages, got a continuous one"):
        kv.ops.mla_attention(
            continuous.collection, 0, query, continuous.row_offsets, value_size=16,
            indices=np.zeros((continuous.tokens, 3), np.int32),
        )  # fmt: skip
