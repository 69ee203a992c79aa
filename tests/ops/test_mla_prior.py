# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows with sinks, log-sum-exps and results over other keys; lists of sources."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated
from reference.random_caches import Problem, random_query, random_values, stored_problem
from reference.shared_prefixes import close, combined

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.ops import mla

SENTINEL = 72.0
latent_problem = functools.partial(stored_problem, num_heads=1, is_mla=True, page_size=16)


def with_sinks(out: np.ndarray, lse: np.ndarray, sinks: Any) -> tuple[np.ndarray, np.ndarray]:
    """A sink has no value: it is a result of zeros whose log-sum-exp it is."""
    return combined(out, lse, np.zeros_like(out), np.broadcast_to(sinks, lse.shape))


def prior_of(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that saw keys, but for the first: that one's output is NaN."""
    prior, lse = rng.standard_normal(shape, np.float32), rng.uniform(-2, 6, shape[:2]).astype(np.float32)
    prior[0], lse[0] = np.nan, -np.inf
    return prior, lse


def emulate(
    problem: Problem, query: np.ndarray, out: str, schedule: dict[str, Any], target: str, sinks: Any, prior: Any,
    indices: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    found = np.full((*query.shape[:2], 128), SENTINEL, out)
    lse = np.full(query.shape[:2], SENTINEL, np.float32)
    attributes = (("value_size", 128), ("mask", "causal" if indices is None else "null"), ("span", 0))
    operands = (
        problem.collection, 1, query, problem.row_offsets, query.shape[2] ** -0.5, found, indices, None, sinks, lse,
        *prior,
    )  # fmt: skip
    emulated.run(mla._MLA_ATTENTION, operands, attributes, schedule, target)
    return found, lse


KERNELS = {
    "wide": ({"kind": "latent", "splits": 1}, "sm_90a"),
    "wide, split": ({"kind": "latent", "splits": 2}, "sm_90a"),
    "few": ({"kind": "latent", "max_queries": 2, "splits": 1}, "sm_90a"),
    "few, many splits": ({"kind": "latent", "max_queries": 2, "splits": 9}, "sm_90a"),
    "sm_80": ({"kind": "latent", "splits": 2}, "sm_80"),
    "simt": ({"kind": "simt"}, "sm_80"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("out", ["float16", "float32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_of_latent_rows_ends_with_sinks_and_a_prior_result(kernel, out):
    rng, problem = latent_problem(1, dtype="f16", cached=[130, 0, 9], new=[2, 1, 0], head_size=144)
    query = random_query(rng, problem, 8)
    sinks = rng.standard_normal(8).astype(np.float32)
    prior = prior_of(rng, (*query.shape[:2], 128))
    want = reference.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=128)
    found = emulate(problem, query, out, *KERNELS[kernel], sinks, prior)
    close(found, combined(*with_sinks(*want, sinks), *prior), 4e-3)


def listed_model(c: Any, query: np.ndarray, tokens: list[list[int]], sequences: list[int]) -> tuple[Any, Any]:
    """Each query row attends to tokens of a sequence: output of 128 columns and log-sum-exp, float64."""
    wants = []
    for q, seen, b in zip(query.astype(np.float64), map(np.array, tokens), sequences, strict=True):
        keys = c.blocks[c.lookup_table[b, seen // 16].astype(int), 0, 1, seen % 16, 0].astype(np.float64)
        scores = q @ keys.T * q.shape[1] ** -0.5
        lse = np.log(np.exp(scores).sum(1))
        wants.append((np.exp(scores - lse[:, None]) @ keys[:, :128], lse))
    out, lse = (np.stack(x) for x in zip(*wants, strict=True))
    return out, lse


@pytest.mark.parametrize("kernel", ["simt", "few"])
def test_listed_rows_end_alike(kernel):
    rng, problem = latent_problem(2, dtype="f16", cached=[40, 12], new=[1, 1], head_size=144)
    query, c = random_query(rng, problem, 8), problem.collection
    tokens = [[3, 40, 7], [0, 12]]
    indices = np.full((2, 4), -1, np.int32)
    for b, seen in enumerate(map(np.array, tokens)):
        indices[b, : len(seen)] = c.lookup_table[b, seen // 16].astype(int) * 16 + seen % 16
    sinks, prior = rng.standard_normal(8).astype(np.float32), prior_of(rng, (2, 8, 128))
    found = emulate(problem, query, "float32", *KERNELS[kernel], sinks, prior, indices)
    close(found, combined(*with_sinks(*listed_model(c, query, tokens, [0, 1]), sinks), *prior), 4e-3)


def test_a_window_and_a_compressed_latent_cache_are_one_softmax(place):
    """As models with compressed keys attend: recent rows through a window, older ones by a list, one sink a head."""
    rng, recent = latent_problem(3, dtype="f16", cached=[30, 5], new=[2, 1], head_size=144)
    compressed = latent_problem(4, dtype="f16", cached=[9, 2], new=[0, 0], head_size=144)[1]
    query, offsets = random_query(rng, recent, 4), recent.row_offsets
    sinks = rng.standard_normal(4).astype(np.float32)
    chosen = np.array([[8, 0, 3], [8, 1, -1], [0, 1, -1]], np.int32)  # tokens of the compressed cache, by an indexer
    c = compressed.collection
    indices = kv.ops.remap_sparse_indices(
        place.put(chosen), place.put(offsets), place.put(c.lookup_table), 16, invalid_id=compressed.null_page
    )
    out = place.put(np.full((*query.shape[:2], 128), SENTINEL, np.float16))
    lse = place.put(np.full(query.shape[:2], SENTINEL, np.float32))
    kv.ops.mla_attention(
        [place.collection(c), place.collection(recent.collection)], [1, 1], place.put(query), place.put(offsets),
        value_size=128, sinks=place.put(sinks), indices=[indices, None], window=[None, 6], out=out, lse=lse,
    )  # fmt: skip
    of_recent = reference.mla_attention(
        recent.collection, 1, query, offsets, value_size=128, mask="sliding_window", window=6
    )
    of_chosen = listed_model(c, query, [[8, 0, 3], [8, 1], [0, 1]], [0, 0, 1])
    want = combined(*with_sinks(*of_recent, sinks), *of_chosen)
    close((place.get(out), place.get(lse)), want, 4e-3)


def test_a_result_that_does_not_fit_latent_rows_is_refused():
    rng, problem = latent_problem(5, dtype="f32", cached=[5], new=[1], head_size=24)
    query, c = random_query(rng, problem, 4), problem.collection
    attend = functools.partial(kv.ops.mla_attention, c, 1, query, problem.row_offsets, value_size=16)
    wide = random_values(rng, (1, 4, 24), dtypes.f32), np.zeros((1, 4), np.float32)
    with pytest.raises(ValueError, match=r"mla_attention: prior must have shape \[1, 4, 16\], got \[1, 4, 24\]"):
        attend(prior=wide)
    with pytest.raises(ValueError, match=r"mla_attention: sinks must have shape \[4\], got \[3\]"):
        attend(sinks=np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"mla_attention: out must have dtype f32, got f16"):
        attend(out=np.zeros((1, 4, 16), np.float16))
