# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention of padded batches against the float64 model: on the host, and the kernels for GPUs in the PTX interpreter.

The padding of a query is NaN, what holds no cached token is too, and an access outside the buffers is an error in the
interpreter. Rows past the valid lengths must keep what the output had.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.kinds import MMA
from reference.places import Interpreted, Place, Unchecked
from reference.random_caches import Problem, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}
SENTINEL = 72.0
# Kinds of kernels; None: the host's.
KINDS = {"host": None, "simt": {"kind": "simt"}, "mma": MMA, "decode": {"kind": "decode"}}
MASKS = [
    {"mask": "causal"},
    {"mask": "null"},
    {"mask": "sliding_window", "window": 7},
    {"mask": "chunked", "chunk": 24},
    {"mask": "chunked_causal", "chunk": 20},
]


problem_of = functools.partial(stored_problem, dtype="f16")


def query_of(rng: np.random.Generator, problem: Problem, heads: int, dtype: str | None = None) -> np.ndarray:
    spec = problem.collection.cache_spec
    wanted = dtypes.of(dtype) if dtype else spec.dtype if spec.dtype.bits > 8 else dtypes.f16
    return random_values(rng, (problem.tokens, heads, spec.head_size), wanted)


def run(kind: str, problem: Problem, query: np.ndarray, valid: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of a padded query, of buffers that had a sentinel in them."""
    place = Place() if kind == "host" else Interpreted(options.pop("target", "sm_90a"))
    schedule = dict(KINDS[kind] or {}, **options.pop("schedule", {})) or None
    if kind == "decode":
        schedule.setdefault("max_queries", int(problem.new.max(initial=1)))
    given = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    collection = place.collection(problem.collection)
    out = place.put(np.full_like(query, SENTINEL))
    lse = place.put(np.full(query.shape[:-1], SENTINEL, np.float32))
    with place.active():
        found = kv.ops.attention_padded(
            collection, 1, place.put(query), place.put(valid), out=out, lse=lse, return_lse=True, schedule=schedule,
            **given,
        )  # fmt: skip
    assert found[0] is out
    assert found[1] is lse
    return place.get(out), place.get(lse)


def check(kind: str, problem: Problem, query: np.ndarray, width: int, **options: Any) -> None:
    """The rows that are valid are the model's, to which they are ragged; the others were not touched."""
    offsets, valid = problem.row_offsets, problem.new.astype(np.uint32)
    out, lse = run(kind, problem, reference.padded(query, offsets, width, np.nan), valid, **options)
    numeric = {n: v for n, v in options.items() if n not in ("schedule", "target")}
    want, want_lse = reference.attention(problem.collection, 1, query, offsets, **numeric)
    exists = reference.padded(np.ones(len(query), bool), offsets, width, False)
    assert (out[~exists] == SENTINEL).all()
    assert (lse[~exists] == SENTINEL).all()
    got, biggest = out[exists].astype(np.float64), max(1.0, np.abs(want).max(initial=0))
    assert not np.isnan(got).any()
    tolerance = TOLERANCE[dtypes.of(query.dtype).name]
    np.testing.assert_allclose(got / biggest, want / biggest, rtol=tolerance, atol=tolerance)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse[exists]), nothing)
    np.testing.assert_allclose(lse[exists][~nothing], want_lse[~nothing], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", MASKS, ids=lambda o: o["mask"])
def test_each_mask_in_a_padded_batch(kind, options):
    new = [2, 0, 1, 3] if kind == "decode" else [9, 0, 1, 40]
    rng, problem = problem_of(1, cached=[50, 7, 0, 30], new=new, head_size=32, num_heads=2)
    check(kind, problem, query_of(rng, problem, 4), max(new) + 2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_softcap_and_scale_of_a_padded_batch(kind):
    rng, problem = problem_of(2, cached=[12, 0, 40], new=[3, 2, 1], head_size=32)
    query = query_of(rng, problem, 4)
    sinks = rng.standard_normal(4).astype(np.float32)
    check(kind, problem, query, 3, sinks=sinks, softcap=2.0, scale=0.3)
    check(kind, problem, query, 3, alibi_slopes=sinks / 8)


@pytest.mark.parametrize("kind", ["host", "simt", "mma"])
def test_cross_attention_of_a_padded_batch(kind):
    rng, problem = problem_of(3, cached=[5, 0, 12], new=[9, 7, 3], head_size=32)
    check(kind, problem, query_of(rng, problem, 2), 10, mask="null", kv_offsets=np.array([0, 9, 9, 12], np.uint32))


@pytest.mark.parametrize("kind", ["host", "simt", "mma"])
@pytest.mark.parametrize("pool", ["continuous", "fa3"])
def test_the_other_kinds_of_cache_in_a_padded_batch(kind, pool):
    rng, problem = problem_of(4, pool, dtype="bf16", cached=[21, 9], new=[5, 11], head_size=48, num_heads=3)
    check(kind, problem, query_of(rng, problem, 9), 12)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_caches_in_a_padded_batch(kind):
    rng, problem = problem_of(
        5, dtype="i8", scale_dtype="f32", granularity=32, cached=[90, 0, 7], new=[1, 2, 1], head_size=64, num_heads=2
    )
    check(kind, problem, query_of(rng, problem, 4), 4, scale=0.0005)


@pytest.mark.parametrize(
    ("kind", "target"),
    [("simt", "sm_80"), ("mma", "sm_80"), ("mma", "sm_100a"), ("decode", "sm_80"), ("decode", "sm_100a")],
)
def test_padded_batches_on_each_generation(kind, target):
    rng, problem = problem_of(6, dtype="bf16", cached=[70, 20], new=[2, 1], head_size=64, num_heads=1)
    check(kind, problem, query_of(rng, problem, 8), 5, target=target)


@pytest.mark.parametrize("combine", [0, 4])
@pytest.mark.parametrize("split", [0, 64])
def test_decode_of_a_padded_batch_merges_long_sequences(combine, split):
    rng, problem = problem_of(7, cached=[300, 3, 150], new=[1, 2, 1], head_size=64, num_heads=2)
    check("decode", problem, query_of(rng, problem, 4), 3, schedule={"combine": combine, "split": split})


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_sequence_has_the_bits_of_a_ragged_one(kind):
    rng, problem = problem_of(8, cached=[33, 60, 5], new=[2, 3, 1], head_size=32)
    query, offsets = query_of(rng, problem, 4), problem.row_offsets
    out, _ = run(kind, problem, reference.padded(query, offsets, 4, np.nan), problem.new.astype(np.int32))
    place = Place() if kind == "host" else Interpreted()
    schedule = {**KINDS[kind], "max_queries": 3} if kind == "decode" else KINDS[kind]
    with place.active():
        ragged = kv.ops.attention(place.collection(problem.collection), 1, query, offsets, schedule=schedule)
    exists = reference.padded(np.ones(len(query), bool), offsets, 4, False)
    np.testing.assert_array_equal(out[exists].view(np.uint16), ragged.view(np.uint16))


@pytest.mark.parametrize("kind", KINDS)
def test_valid_lengths_past_the_padding_are_those_of_the_padding(kind):
    rng, problem = problem_of(9, cached=[12, 30], new=[3, 3], head_size=32)
    padded = query_of(rng, problem, 4).reshape(2, 3, 4, 32)
    whole, _ = run(kind, problem, padded, np.array([3, 3], np.uint32))
    with Unchecked().active():
        out, _ = run(kind, problem, padded, np.array([3, 1000], np.uint32))
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_no_valid_rows_no_padding_and_no_sequences(kind):
    _, problem = problem_of(10, cached=[4, 30], new=[0, 0], head_size=32)
    none = np.zeros(2, np.uint32)
    out, lse = run(kind, problem, np.full((2, 3, 4, 32), np.nan, np.float16), none)
    assert (out == SENTINEL).all()
    assert (lse == SENTINEL).all()
    empty = np.zeros((2, 0, 4, 32), np.float16)
    with Unchecked().active():
        assert run(kind, problem, empty, np.array([1, 0], np.uint32))[0].shape == empty.shape
    _, problem = problem_of(10, cached=[], new=[], head_size=32)
    assert run(kind, problem, empty[:0], none[:0])[0].shape == (0, 0, 4, 32)


@pytest.mark.parametrize("kind", ["host", "simt", "mma"])
def test_padded_views_with_strides(kind):
    rng, problem = problem_of(11, cached=[20, 3], new=[4, 2], head_size=32)
    query, offsets = query_of(rng, problem, 4), problem.row_offsets
    wide = np.full((2, 7, 6, 48), np.nan, np.float16)
    wide[:, 1:6, 1:5, 8:40] = reference.padded(query, offsets, 5, np.nan)
    place = Place() if kind == "host" else Interpreted()
    out = np.full((2, 6, 5, 40), SENTINEL, np.float16)[:, :5, :4, :32]
    with place.active():
        kv.ops.attention_padded(
            place.collection(problem.collection), 1, wide[:, 1:6, 1:5, 8:40], problem.new.astype(np.uint32), out=out,
            schedule=KINDS[kind],
        )  # fmt: skip
    want, _ = reference.attention(problem.collection, 1, query, offsets)
    exists = reference.padded(np.ones(len(query), bool), offsets, 5, False)
    np.testing.assert_allclose(out[exists].astype(np.float64), want, rtol=4e-3, atol=4e-3)
    assert (out[~exists] == SENTINEL).all()
    assert (out.base[:, 5:] == SENTINEL).all()


def test_the_output_of_a_padded_batch_is_allocated_like_the_query():
    rng, problem = problem_of(12, dtype="f32", cached=[3, 4], new=[2, 2])
    query = query_of(rng, problem, 2).reshape(2, 2, 2, 16)
    out, lse = kv.ops.attention_padded(problem.collection, 1, query, problem.new.astype(np.uint32), return_lse=True)
    want, want_lse = reference.attention(problem.collection, 1, query.reshape(4, 2, 16), problem.row_offsets)
    np.testing.assert_allclose(out.reshape(4, 2, 16), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse.reshape(4, 2), want_lse, rtol=1e-4, atol=1e-4)


def refused(message: str, **changes: Any) -> None:
    """A call with some argument wrong must say so."""
    _, problem = problem_of(13, dtype="f32", cached=[3, 4], new=[1, 2])
    arguments: dict[str, Any] = {
        "collection": problem.collection, "layer": 0, "query": np.zeros((2, 5, 2, 16), np.float32),
        "valid_lengths": np.zeros(2, np.uint32),
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError, IndexError), match="kv.ops.attention_padded: " + message):
        kv.ops.attention_padded(**{**arguments, **changes})


def test_what_does_not_fit_a_padded_batch_is_refused_by_name():
    f32 = np.float32
    refused(r"layer must be in \[0, 2\), got 2", layer=2)
    refused(r"query must have shape \[2, S, Hq, 16\], got \[10, 2, 16\]", query=np.zeros((10, 2, 16), f32))
    refused(r"query must have shape \[2, S, Hq, 16\], got \[3, 5, 2, 16\]", query=np.zeros((3, 5, 2, 16), f32))
    refused(r"query must have dtype f32, got f16", query=np.zeros((2, 5, 2, 16), np.float16))
    refused(r"query must have a multiple of the 2 KV heads in dimension 2, got 3", query=np.zeros((2, 5, 3, 16), f32))
    refused(r"valid_lengths must have shape \[2\], got \[3\]", valid_lengths=np.zeros(3, np.uint32))
    refused(r"out must have shape \[2, 5, 2, 16\], got \[2, 4, 2, 16\]", out=np.zeros((2, 4, 2, 16), f32))
    refused(r"out must have dtype f32, got f16", out=np.zeros((2, 5, 2, 16), np.float16))
    refused(r"sinks must have shape \[2\], got \[3\]", sinks=np.zeros(3, f32))
    refused(r"lse must have shape \[2, 5, 2\], got \[10, 2\]", lse=np.zeros((10, 2), f32))
    refused(r"kv_offsets must have shape \[3\], got \[2\]", kv_offsets=np.zeros(2, np.uint32))
    refused(r"window must be given for mask sliding_window", mask="sliding_window")
    refused(r"softcap must be positive", softcap=-1.0)


def test_a_padded_batch_needs_values():
    rng = np.random.default_rng(14)
    problem = random_problem(rng, "paged", "f16", cached=[3], new=[1], head_size=32, num_heads=1, is_mla=True)
    with pytest.raises(ValueError, match=r"kv\.ops\.attention_padded: needs a collection with values, got an MLA one"):
        kv.ops.attention_padded(problem.collection, 0, np.zeros((1, 1, 2, 32), np.float16), np.ones(1, np.uint32))
