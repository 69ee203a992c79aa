# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention operands on a GPU, over torch tensors: one kernel over every kind, and attention over each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.kinds import schedule_for
from reference.operands import KINDS, check_survey, dense_parts, grid, outputs, ragged_parts, random_operand, survey
from reference.places import Torch
from reference.random_caches import Problem, random_query, stored_problem

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, LayoutTensorMHAOperand, RaggedMHAOperand
from kvarn.dialect import dtypes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PLACE = Torch()
TOLERANCE = {"f32": 5e-5, "f16": 4e-3, "bf16": 2e-2}
SENTINEL = 72.0


def moved(part: Any) -> Any:
    """A part of an operand on the GPU; sequences that lie apart do so there too."""
    if not isinstance(part, np.ndarray):
        return part
    if not part.flags.c_contiguous:
        assert part.base is not None
        return PLACE.put(part.base)[:, : part.shape[1]]
    return PLACE.put(part)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_reads_every_kind(kind, threads):
    for dtype in ("f16", "bf16", "f32"):
        shown = random_operand(np.random.default_rng(1), kind, dtype, lengths=(70, 0, 12, 4), head_size=64)
        operand = shown.make(*(moved(part) for part in shown.parts))
        found = [PLACE.put(x) for x in outputs(shown)]
        survey[grid(shown), threads](operand, *found)
        check_survey(shown, [PLACE.get(x) for x in found])


def problem_of(seed: int, dtype: str = "bf16", **shape: Any) -> tuple[np.random.Generator, Problem]:
    return stored_problem(seed, "paged", dtype, **shape)


query_of = random_query


def operands_of(problem: Problem, form: str) -> list[Any]:
    """Keys and values of layer 1 on the GPU."""
    if form == "caches":
        c = PLACE.collection(problem.collection)
        return [KVCacheMHAOperand(c.get_key_cache(1)), KVCacheMHAOperand(c.get_value_cache(1))]
    parts = {"dense": dense_parts, "ragged": ragged_parts}[form](problem, 1)
    return [make(*(moved(p) for p in given)) for make, given in parts]


def check(problem: Problem, query: np.ndarray, form: str, kind: str | None, **options: Any) -> None:
    q, offsets = PLACE.put(query), PLACE.put(problem.row_offsets)
    out, lse = torch.full_like(q, SENTINEL), torch.full(q.shape[:2], SENTINEL, device=q.device)
    arrays = {n: PLACE.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    schedule = schedule_for(kind) if kind else None
    kv.ops.attention(*operands_of(problem, form), q, offsets, out=out, lse=lse, schedule=schedule, **arrays)
    named = dict(options)
    if "window" in options:
        named["mask"] = "sliding_window"
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **named)
    got, got_lse = (x.float().cpu().numpy().astype(np.float64) for x in (out, lse))
    tolerance, biggest = TOLERANCE[dtypes.of(query.dtype).name], max(1.0, np.abs(want).max())
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got / biggest, want / biggest, rtol=tolerance, atol=tolerance)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(got_lse), nothing)
    # Keys of 8 bits times a scale are rounded to the query's type before the tensor cores take them.
    near = 5e-2 if problem.collection.scales is not None and kind != "simt" else 1e-3
    np.testing.assert_allclose(got_lse[~nothing], want_lse[~nothing], rtol=near, atol=near)


FORMS = ["caches", "dense", "ragged"]
MASKS = [{}, {"mask": "null"}, {"window": 7}, {"mask": "chunked", "chunk": 24}, {"mask": "chunked_causal", "chunk": 80}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, "simt", "mma"])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_each_mask_in_a_ragged_batch(form, kind, options):
    rng, problem = problem_of(1, cached=[50, 0, 130, 7, 0, 300], new=[70, 200, 0, 1, 0, 33], head_size=64)
    check(problem, query_of(rng, problem, 4), form, kind, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, "simt", "mma"])
@pytest.mark.parametrize("head_size", [16, 80, 128, 256])
def test_each_head_size_and_few_or_many_queries(form, kind, head_size):
    for new in ([1, 1], [70, 129]):
        rng, problem = problem_of(2, "f16", cached=[100, 40], new=new, head_size=head_size)
        check(problem, query_of(rng, problem, 4), form, kind)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, "simt", "mma"])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "granularity"), [("i8", "f32", 64), ("i8", "f16", 4), ("f8e4m3", "f32", 8)]
)
def test_operands_with_scales(form, kind, dtype, scale_dtype, granularity):
    rng, problem = problem_of(
        3, dtype, scale_dtype=scale_dtype, granularity=granularity, cached=[100, 40, 0], new=[70, 5, 129], head_size=64
    )
    check(problem, query_of(rng, problem, 4), form, kind, scale=0.001)


@pytest.mark.parametrize("form", FORMS)
def test_single_precision_sinks_and_softcap(form):
    rng, problem = problem_of(4, "f32", cached=[100, 40, 0], new=[1, 5, 30], head_size=64)
    sinks = rng.standard_normal(6).astype(np.float32)
    check(problem, query_of(rng, problem, 6), form, None, sinks=sinks, softcap=2.0)


def test_attention_over_operands_is_captured_in_a_graph():
    rng, problem = problem_of(5, cached=[100, 40], new=[1, 5], head_size=64)
    query = PLACE.put(query_of(rng, problem, 4))
    operands, offsets, out = operands_of(problem, "ragged"), PLACE.put(problem.row_offsets), torch.empty_like(query)
    kv.ops.attention(*operands, query, offsets, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.ops.attention(*operands, query, offsets, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_operands_on_another_device_are_refused():
    rng, problem = problem_of(6, cached=[10], new=[2], head_size=64)
    query, offsets = PLACE.put(query_of(rng, problem, 4)), PLACE.put(problem.row_offsets)
    keys, values = (make(*parts) for make, parts in dense_parts(problem, 1))
    with pytest.raises(ValueError, match="operands must be on one device: values is on the CPU, query on cuda:0"):
        kv.ops.attention(keys, values, query, offsets)
    with pytest.raises(ValueError, match="all buffers must be on one device"):
        RaggedMHAOperand(query, problem.row_offsets)


def test_a_slice_that_is_not_packed_is_refused_before_a_launch():
    fused = torch.zeros(2, 6, 3 * 2, 16, device="cuda")
    with pytest.raises(ValueError, match="must be packed"):
        LayoutTensorMHAOperand(fused[:, :, :2])
