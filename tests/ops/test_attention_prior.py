# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention combined with a result over other keys: on the host, and the GPUs' kernels run by the interpreter."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated, tile_attention
from reference.random_caches import Problem, random_query, stored_problem
from reference.shared_prefixes import close, combined

import kvarn as kv
from kvarn.ops import reads

SENTINEL = 72.0
TOLERANCE = {"float32": 5e-4, "float16": 2e-3, "bfloat16": 1e-2}
problem_of = functools.partial(stored_problem, dtype="f16")


def prior_of(rng: np.random.Generator, query: np.ndarray, nothing: Any = ()) -> tuple[np.ndarray, np.ndarray]:
    """A result over other keys: some rows saw none, and hold NaN."""
    prior, lse = rng.standard_normal(query.shape, np.float32), rng.uniform(-2, 6, query.shape[:2]).astype(np.float32)
    prior[list(nothing)], lse[list(nothing)] = np.nan, -np.inf
    return prior, lse


def emulate(
    problem: Problem, query: np.ndarray, prior: Any, schedule: dict[str, Any], target: str, out: Any, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.full(query.shape, SENTINEL, out), np.full(query.shape[:2], SENTINEL, np.float32)
    operands = (
        problem.collection, 1, query, problem.row_offsets, query.shape[2] ** -0.5, out, options.get("sinks"), lse,
        options.get("kv_offsets"), None, *prior,
    )  # fmt: skip
    attributes = (("mask", options.get("mask", "causal")), ("span", 0), ("softcap", 0.0))
    emulated.run(reads._ATTENTION, operands, attributes, schedule, target)
    return out, lse


KERNELS = {
    "simt": ({"kind": "simt"}, "sm_80"),
    "mma": ({"kind": "tile"}, "sm_80"),
    "tile": ({"kind": "tile"}, "sm_90a"),
    "tile, split": ({"kind": "tile", "splits": 3}, "sm_90a"),
    "decode": ({"kind": "decode", "max_queries": 2, "min_tiles": 2}, "sm_90a"),
    "decode, combine kernel": ({"kind": "decode", "max_queries": 2, "combine": 4, "min_tiles": 2}, "sm_90a"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("out", ["float16", "float32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_combines_a_prior_result_and_writes_f32(kernel, out):
    """Sequence 1 has queries and no keys, sequence 2 no queries; sinks count once."""
    rng, problem = problem_of(1, cached=[150, 0, 9, 30], new=[2, 1, 0, 1], head_size=32, num_heads=1)
    query, kv_offsets = random_query(rng, problem, 4), np.array([0, 2, 2, 2, 3], np.uint32)
    prior = prior_of(rng, query, nothing=[1, 2])
    sinks = rng.standard_normal(4).astype(np.float32) if out == "float16" else None
    options: dict[str, Any] = {"sinks": sinks, "kv_offsets": kv_offsets, "mask": "null"}
    found = emulate(problem, query, prior, *KERNELS[kernel], out, **options)
    want = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    close(found, combined(*want, *prior), TOLERANCE[out])
    assert out == "float16" or (found[0] != found[0].astype(np.float16)).any()  # not rounded on the way


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", ["decode", "decode, combine kernel"])
def test_warps_that_share_the_columns_of_a_head_combine_their_own_of_a_prior_result(kernel):
    rng, problem = problem_of(4, cached=[90], new=[1], head_size=384, num_heads=1)
    query = random_query(rng, problem, 2)
    prior = prior_of(rng, query)
    found = emulate(problem, query, prior, *KERNELS[kernel], "float32")
    want = reference.attention(problem.collection, 1, query, problem.row_offsets)
    close(found, combined(*want, *prior), TOLERANCE["float32"])


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kernel", "head_size"), [("tile", 72), ("mma", 72), ("tile", 264)])
def test_f32_rows_of_heads_of_no_whole_steps_end_where_the_head_does(kernel, head_size):
    rng, problem = problem_of(3, cached=[20], new=[5], head_size=head_size, num_heads=1)
    query = random_query(rng, problem, 4)
    prior = prior_of(rng, query, nothing=[2])
    found = emulate(problem, query, prior, *KERNELS[kernel], "float32")
    want = reference.attention(problem.collection, 1, query, problem.row_offsets)
    close(found, combined(*want, *prior), TOLERANCE["float32"])


@pytest.mark.parametrize(("kernel", "dtype"), [("decode", "f8e4m3"), ("decode, combine kernel", "f16")])
def test_narrow_heads_that_a_warp_takes_as_one_have_a_prior_result_each(kernel, dtype):
    rng, problem = stored_problem(7, dtype=dtype, cached=[150, 9], new=[2, 1], head_size=8, num_heads=2)
    query = rng.standard_normal((3, 8, 8)).astype(np.float16)
    prior = prior_of(rng, query, nothing=[1])
    found = emulate(problem, query, prior, *KERNELS[kernel], "float16")
    want = reference.attention(problem.collection, 1, query, problem.row_offsets)
    close(found, combined(*want, *prior), TOLERANCE["float16"])


def test_splits_of_keys_and_a_prior_result_are_combined_at_once():
    b = tile_attention.batch(cached=[360, 5], new=[7, 3])
    prior = prior_of(np.random.default_rng(2), b.query, nothing=[2])
    found = tile_attention.run(b, tile_attention.case_of(b), tile_attention.Choice(keys=32, splits=3), prior=prior)
    want = reference.attention(b.problem.collection, tile_attention.LAYER, b.query, b.problem.row_offsets)
    close(found, combined(*want, *prior), TOLERANCE["bfloat16"])


@pytest.mark.parametrize(("dtype", "head_size"), [("bf16", 16), ("f32", 1)])
def test_on_the_host_the_order_of_two_sets_of_keys_changes_roundings_only(dtype, head_size):
    rng, first = stored_problem(3, dtype=dtype, cached=[40, 0, 7], new=[3, 1, 0], head_size=head_size)
    second = stored_problem(4, "continuous", dtype=dtype, cached=[9, 0, 80], new=[3, 1, 0], head_size=head_size)[1]
    query, offsets = random_query(rng, first, 4), first.row_offsets
    sources = [(p.collection, 1) for p in (first, second)]
    wants = [reference.attention(*source, query, offsets) for source in sources]
    for one, other in (sources, sources[::-1]):
        partial = np.empty(query.shape, np.float32)
        prior = kv.ops.attention(*one, query, offsets, out=partial, return_lse=True)
        found = kv.ops.attention(*other, query, offsets, prior=prior, return_lse=True)
        close(found, combined(*wants[0], *wants[1]), TOLERANCE[str(query.dtype)])


def test_padded_batches_and_operands_take_a_prior_result():
    rng, problem = stored_problem(5, cached=[40, 0, 7], new=[2, 2, 2], head_size=16)
    query, offsets = random_query(rng, problem, 4), problem.row_offsets
    prior = prior_of(rng, query, nothing=[3])
    c = problem.collection
    want = kv.ops.attention(c, 1, query, offsets, prior=prior, return_lse=True)
    operands = [kv.KVCacheMHAOperand(x) for x in problem.caches(1)]
    of_operands = kv.ops.attention(*operands, query, offsets, prior=prior, return_lse=True)
    padded = [x.reshape(3, 2, *x.shape[1:]) for x in (query, *prior)]
    of_padded = kv.ops.attention_padded(c, 1, padded[0], np.full(3, 2, np.uint32), prior=padded[1:], return_lse=True)
    for found in (of_operands, of_padded):
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(np.reshape(x, y.shape), y)


def test_a_prior_result_that_does_not_fit_is_refused():
    rng, problem = stored_problem(6, cached=[5], new=[2], head_size=16)
    query, c = random_query(rng, problem, 4), problem.collection
    out, lse = prior_of(rng, query)
    attend = functools.partial(kv.ops.attention, c, 1, query, problem.row_offsets)
    with pytest.raises(TypeError, match="prior must be a tuple of an output and its log-sum-exp, got ndarray"):
        attend(prior=out)
    with pytest.raises(ValueError, match=r"prior must have shape \[2, 4, 16\], got \[2, 4, 8\]"):
        attend(prior=(out[..., :8], lse))
    with pytest.raises(TypeError, match="prior must have dtype f32, got f16"):
        attend(prior=(out.astype(np.float16), lse))
    with pytest.raises(ValueError, match="prior_lse must have shape"):
        attend(prior=(out, lse[:1]))
    with pytest.raises(TypeError, match="must be an output and its log-sum-exp, got None for one of them"):
        attend(prior=(out, None))
    with pytest.raises(ValueError, match="out"):
        attend(prior=(out, lse), out=out)
