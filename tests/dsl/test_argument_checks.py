# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments that are none are refused by name, and masks may be joined as often as a program likes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from reference.attention_functions import problem_of, query_of

import kvarn as kv
from kvarn.errors import KernelError

NONE_OF_INTEGERS = (-1, "x", None, 1.5, 2**40, True)


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Any]:
    rng, problem = problem_of(7, num_heads=1)
    return problem, query_of(rng, problem, 1)


@pytest.mark.parametrize("name", ["rows", "keys"])
@pytest.mark.parametrize("number", [0, 1, *NONE_OF_INTEGERS])
def test_a_block_mask_has_tiles(name, number):
    extents = {"rows": 16, "keys": 16, name: number}
    with pytest.raises((TypeError, ValueError), match=f"kv.BlockMask: {name} must be"):
        kv.BlockMask(np.zeros((1, 1, 2), np.int32), **extents, mask=(kv.masks.causal,))


@pytest.mark.parametrize(("blocks", "mask", "message"), [
    (None, (kv.masks.causal,), "blocks must be an int32 array"), ([1], (kv.masks.causal,), "blocks must be an"),
    (np.zeros((1, 1, 2), np.int32), (), "mask must be a tuple of a function"),
    (np.zeros((1, 1, 2), np.int32), None, "mask must be a tuple of a function"),
])  # fmt: skip
def test_a_block_mask_has_lists_and_a_function(blocks, mask, message):
    with pytest.raises(TypeError, match=message):
        kv.BlockMask(blocks, 16, 16, mask)


@pytest.mark.parametrize("options", [
    *({"multiprocessors": n} for n in (0, *NONE_OF_INTEGERS) if n not in (None, 2**40)),
    *({"seed": n, "order": order} for n in (-1, "x", None, 1.5, True) for order in ("random", "program")),
])  # fmt: skip
def test_the_emulator_takes_numbers_of_its_own(options):
    name = "seed" if "seed" in options else "multiprocessors"
    with pytest.raises(ValueError, match=f"{name} must be a"), kv.emulated("sm_90a", **options):
        pass


@kv.kernel
def ones(x: kv.Buffer[kv.i32, 1]):
    x[0] = 1


@pytest.mark.parametrize("extents", [(1, 1, 1, 7), (), "x", (1.5,), -1, None])
def test_a_grid_has_one_to_three_extents(extents):
    x = np.zeros(1, np.int32)
    with pytest.raises((TypeError, ValueError), match="grid"):
        ones.emulate(extents, 1, x)
    with pytest.raises((TypeError, ValueError), match="grid"):
        ones[extents, 1](x)


def test_the_host_refuses_grids_and_blocks_that_would_not_end():
    x = np.zeros(1, np.int32)
    for grid in (2**24 + 1, (2**13, 2**13), (2, 2**23, 2), 2**31, (2**31, 2**31, 2**31)):
        with pytest.raises(ValueError, match="grid of kernel 'ones' must have at most 16777216 blocks on the host"):
            ones[grid, 1](x)
    with pytest.raises(ValueError, match="block of kernel 'ones' must have at most 16777216 threads"):
        ones[1, 2**24 + 1](x)
    ones[(2**30, 0), 1](x)
    assert not x.any()


@pytest.mark.parametrize("returned", [1.0, 0.5, 1, 0, None, "x"])
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_a_mask_returns_a_bool(problem, returned, target):
    p, query = problem
    place = contextlib.nullcontext() if target == "host" else kv.emulated(target)
    with place, pytest.raises(KernelError, match="a mask function must return a bool, got"):
        kv.ops.attention(p.collection, 0, query, p.row_offsets, mask=lambda b, h, q, k: returned)


def test_a_mask_may_return_true_of_any_kind(problem):
    p, query = problem
    masks = (lambda b, h, q, k: True, lambda b, h, q, k: np.True_, lambda b, h, q, k: k >= 0)
    every = [kv.ops.attention(p.collection, 0, query, p.row_offsets, mask=mask) for mask in masks]
    for other in every[1:]:
        np.testing.assert_array_equal(every[0], other)


@pytest.mark.parametrize("place", [0, 1, None])
def test_a_prior_has_an_output_and_a_logarithm(problem, place):
    p, query = problem
    prior: list[Any] = [np.zeros(query.shape, np.float32), np.zeros(query.shape[:2], np.float32)]
    for i in range(2):
        if place in (i, None):
            prior[i] = None
    with pytest.raises(TypeError, match="prior must be an output and its log-sum-exp, got None"):
        kv.ops.attention(p.collection, 0, query, p.row_offsets, prior=tuple(prior))


@pytest.mark.parametrize("name", ["page_size", "token_bytes", "least"])
@pytest.mark.parametrize("number", [0, *(n for n in NONE_OF_INTEGERS if n is not None)])
def test_prefixes_are_found_of_pages_of_tokens(name, number):
    given = {"page_size": 4, name: number}
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        kv.SharedPrefixes.find(np.zeros((2, 4), np.uint32), np.array([9, 9], np.uint32), **given)


# --- masks -------------------------------------------------------------------------------------------------


def but(key: int) -> Any:
    return lambda b, h, q, k: k != key


def joined(count: int, op: str) -> kv.masks.Mask:
    mask = kv.masks.causal
    for i in range(count):
        mask = mask & but(i) if op == "&" else mask | (lambda b, h, q, k: k == q) if op == "|" else ~mask
    return mask


@pytest.mark.parametrize(("count", "op"), [(300, "&"), (3001, "~"), pytest.param(300, "|", marks=pytest.mark.thorough)])
def test_masks_are_joined_and_negated_as_often_as_a_program_likes(problem, count, op):
    p, query = problem
    simple = {"&": lambda b, h, q, k: (k <= q) & (k >= 300), "|": kv.masks.causal}.get(op, kv.masks.causal)
    simple = ~kv.masks.causal if count % 2 else simple
    found, want = (kv.ops.attention(p.collection, 0, query, p.row_offsets, mask=m) for m in (joined(count, op), simple))
    np.testing.assert_array_equal(found, want)


def alternating(count: int, negated: bool) -> kv.masks.Mask:
    mask = kv.masks.causal
    for i in range(count):
        mask = ~(mask & but(i)) if negated else (mask & but(i)) | but(i + 1)
    return mask


@pytest.mark.parametrize("negated", [False, True])
def test_masks_that_nest_too_deep_are_refused_where_they_are_made(problem, negated):
    p, query = problem
    kv.ops.attention(p.collection, 0, query, p.row_offsets, mask=alternating(20, negated))
    with pytest.raises(ValueError, match="masks must not nest more than 40 deep"):
        alternating(21, negated)


def test_a_joined_mask_keeps_bounds_arrays_and_what_positions_tell():
    document = kv.masks.Mask(lambda b, h, q, k, d: d[b, q] == d[b, k])
    window = kv.masks.sliding_window(8)
    mask = window & document & kv.masks.causal & document
    assert (mask.arrays, mask.interval, mask.by_head) == (2, False, False)
    assert mask.first(20) == window.first(20) == 13
    assert mask.end(20) == 21
    assert mask.outer(0, 0, 20, 20) == (True & True)
    assert not mask.outer(0, 0, 20, 12)
    table = np.array([[0] * 30 + [1] * 30])
    assert mask(0, 0, 35, 34, table, table)
    assert not mask(0, 0, 31, 29, table, table)
    either = window | document
    assert (either.first, either.end, either.outer, either.arrays) == (None, None, None, 1)
    assert ~~mask is mask
