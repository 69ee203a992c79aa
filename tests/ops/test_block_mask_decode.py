# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decodes by block masks: kind decode over lists of tiles of keys, a GPU's code in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_cases import assert_same_bits
from reference.attention_functions import document, problem_of, query_of, t5, t5_buckets
from reference.block_masks import CASES
from reference.random_caches import Problem

import kvarn as kv

BATCH = {"cached": [150, 0, 70], "new": [2, 0, 1]}
FEW = {"max_queries": 2}  # what a call on a GPU says by itself
DECODE = {"kind": "decode", **FEW}


def documents(rng: Any, batch: int, length: int = 800, most: int = 6) -> np.ndarray:
    return np.sort(rng.integers(0, most, (batch, length)), axis=1).astype(np.int32)


def made(problem: Problem, query: np.ndarray, mask: Any, **options: Any) -> tuple[kv.BlockMask, tuple[Any, ...]]:
    block_mask = kv.ops.block_mask(problem.collection, query, problem.row_offsets, mask, **options)
    return block_mask, (problem.collection, 1, query, problem.row_offsets)


def expected(problem: Problem, query: np.ndarray, mask: Any, score: Any = None) -> tuple[np.ndarray, np.ndarray]:
    return reference.function_attention(problem.collection, 1, query, problem.row_offsets, mask=mask, score=score)


def assert_near(found: Any, want: Any, tolerance: float = 4e-3) -> None:
    out, lse = found
    model, model_lse = want
    np.testing.assert_allclose(out.astype(np.float64), model, rtol=tolerance, atol=tolerance)
    some = ~np.isneginf(model_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~some)
    np.testing.assert_allclose(lse[some], model_lse[some], rtol=2e-3, atol=tolerance)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("kind", "dtype", "group", "shape"),
    [
        ("paged", "f8e4m3", 4, {}), ("paged", "f8e4m3", 1, {"page_size": 5}), ("continuous", "f8e4m3", 2, {}),
        ("paged", "i8", 4, {"scale_dtype": "f32", "granularity": 8, "page_size": 64}),
        ("paged", "i8", 1, {"scale_dtype": "bf16", "granularity": 32, "page_size": 24}),
        ("fa3", "f16", 4, {}), ("paged", "f32", 2, {"head_size": 72}), ("paged", "bf16", 8, {"page_size": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_a_decode_by_a_block_mask_is_that_by_its_mask(kind, dtype, group, shape, case):
    with kv.emulated("sm_90a", multiprocessors=2):
        rng, problem = problem_of(2, kind, dtype, **BATCH, **shape)
        query, ids = query_of(rng, problem, group), documents(rng, 3)
        bias, buckets = rng.standard_normal((2 * group, 8)).astype(np.float32), t5_buckets(20, 8, 20)
        mask, model = CASES[case]
        block_mask, given = made(problem, query, (mask, ids), schedule=DECODE)
        assert (block_mask.rows, block_mask.keys) == (max(2, 2 * group), 64)
        found = kv.ops.attention(
            *given, block_mask=block_mask, score=(t5, bias, buckets), schedule=DECODE, return_lse=True
        )
    want = expected(problem, query, model(ids), lambda x, b, h, q, k: x + bias[h, buckets[np.clip(q - k, 0, 19)]])
    # Of i8 keys with their scales are rounded to f16, and scores are large.
    assert_near(found, want, {"bf16": 2e-2, "i8": 1.5e-2}.get(dtype, 4e-3))


@pytest.fixture(scope="module")
def eight_bits() -> Any:
    """A batch over pages of 8 bits, whose block mask the schedule of a call leaves to kind decode."""
    rng, problem = problem_of(3, "paged", "f8e4m3", cached=[150, 40], new=[2, 1], num_heads=1)
    query, ids = query_of(rng, problem, 2), documents(rng, 2)
    return problem, query, ids


def test_a_decode_does_not_visit_what_is_not_listed_nor_ask_about_what_is_seen_whole(eight_bits):
    problem, query, _ = eight_bits
    ids = (np.arange(200, dtype=np.int32)[None].repeat(2, 0) >= 64).astype(np.int32)
    mask = lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k])  # noqa: E731
    with kv.emulated("sm_90a", multiprocessors=2):
        block_mask, given = made(problem, query, (kv.masks.causal & document, ids), schedule=FEW)
        assert block_mask.rows == 4, "of 8 bits a block mask is for a decode by itself"
        want = expected(problem, query, mask)
        _, values = problem.caches(1)
        kept = values.load(0, 0, np.arange(64)[:, None], np.arange(32))
        values.store(0, 0, np.arange(64)[:, None], np.arange(32), np.full((64, 32), np.nan, kept.dtype))
        before, ids[0, 64:128] = ids[0, 64:128].copy(), 7  # of a tile that the lists call whole
        found = kv.ops.attention(*given, block_mask=block_mask, schedule=FEW, return_lse=True)
        ids[0, 64:128] = before
        values.store(0, 0, np.arange(64)[:, None], np.arange(32), kept)
    # Sequence 1 has 41 tokens, of which it sees all.
    assert_near(found, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", [{"max_batch": 1}, {"max_batch": 1, "batch_invariant": True}, {"min_tiles": 1}])
def test_splits_of_listed_tiles_are_combined(schedule):
    rng, problem = problem_of(4, "paged", "f8e4m3", cached=[760], new=[1], num_heads=1)
    query, ids = query_of(rng, problem, 2), (np.arange(800, dtype=np.int32)[None] // 90 % 2).astype(np.int32)
    with kv.emulated("sm_90a", multiprocessors=2):
        schedule = {**DECODE, **schedule}
        block_mask, given = made(problem, query, (document, ids), schedule=schedule)
        found = kv.ops.attention(*given, block_mask=block_mask, schedule=schedule, return_lse=True)
    assert_near(found, expected(problem, query, lambda b, h, q, k: ids[b, q] == ids[b, k]))


def test_a_padded_batch_lists_of_pages_and_rows_that_see_nothing(eight_bits):
    problem, query, ids = eight_bits
    mask = (kv.masks.causal & document & (lambda b, h, q, k: q % 3 != 1), ids)  # query 151 sees nothing
    lists = np.array([[[9, 0, 3, -1, 1]], [[2, 0, 1, 2, 5]]], np.int32)
    with kv.emulated("sm_90a", multiprocessors=2):
        block_mask, given = made(problem, query, mask, pages=lists, schedule=FEW)
        assert (block_mask.rows, block_mask.keys) == (4, 16)
        out, lse = kv.ops.attention(*given, block_mask=block_mask, schedule=FEW, return_lse=True)
        want, want_lse = kv.ops.attention(*given, mask=mask, pages=lists, schedule=DECODE, return_lse=True)
        padded = reference.padded(query, problem.row_offsets, 3, 0.0)
        lengths = problem.new.astype(np.int32)
        of = {"valid_lengths": lengths, "mask": mask, "pages": lists, "schedule": FEW}
        block_mask = kv.ops.block_mask(problem.collection, padded, **of)
        of_padded = kv.ops.attention_padded(problem.collection, 1, padded, lengths, block_mask=block_mask, schedule=FEW)
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=2e-3)
    assert np.isneginf(lse[1]).all()
    assert not out[1].any()
    assert_same_bits(np.concatenate([of_padded[0, :2], of_padded[1, :1]]), out)


def test_the_lists_of_another_step_lead_nowhere(eight_bits):
    problem, query, _ = eight_bits
    rng = np.random.default_rng(1)
    with kv.emulated("sm_90a", multiprocessors=2):
        block_mask, given = made(problem, query, kv.masks.causal, schedule=FEW)
        strange = np.array([0, 1, 7, 2**30, -1, -(2**31), 2**31 - 1])
        block_mask.blocks[:] = rng.choice(strange, block_mask.blocks.shape)
        out = kv.ops.attention(*given, block_mask=block_mask, schedule=FEW)
    assert np.isfinite(out.astype(np.float32)).all()


def test_tiles_that_a_decode_does_not_have_are_refused(eight_bits):
    problem, query, _ = eight_bits
    with kv.emulated("sm_90a", multiprocessors=2):
        for extents, schedule, message in (
            ({"rows": 2}, {}, "needs a block mask of tiles of 4 query rows or more, got 2"),
            ({"keys": 40}, {}, "needs a block mask of tiles of a multiple of 16 keys, got 40"),
            ({"keys": 16}, {"tile": 32}, "tile must divide the block mask's 16 keys, got 32"),
        ):
            block_mask, given = made(problem, query, kv.masks.causal, schedule=DECODE, **extents)
            with pytest.raises(ValueError, match=message):
                kv.ops.attention(*given, block_mask=block_mask, schedule={**DECODE, **schedule})
