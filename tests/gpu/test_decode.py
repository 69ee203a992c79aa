# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules of decode attention alone, on a GPU: the cases of ``reference.decode_cases``."""

from __future__ import annotations

import pytest
from reference import decode_cases as cases
from reference.places import Torch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LONG = [3000, 17, 700, 0, 4095, 255, 1024, 80]


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "granularity"),
    [("i8", "f32", 256), ("i8", "f16", 32), ("f8e4m3", "bf16", 64), ("f8e4m3", "f32", 256), ("f8e5m2", "f8e8m0", 32)],
)
def test_scales_of_token_heads_and_granules_count(dtype, scale_dtype, granularity, head_size):
    granularity = min(granularity, head_size)
    cases.scales(Torch(), dtype, scale_dtype, granularity, LONG, [1, 2, 1, 1, 0, 1, 2, 1], head_size, 8, "bf16")


@pytest.mark.parametrize("granularity", [4, 8, 16, 48])
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("i8", "f32"), ("f8e4m3", "f32"), ("f8e4m3", "bf16")])
def test_scales_of_granules_narrower_than_a_step_count(dtype, scale_dtype, granularity):
    head_size = 96 if granularity == 48 else 128
    cases.scales(Torch(), dtype, scale_dtype, granularity, LONG, [1, 2, 1, 1, 0, 1, 2, 1], head_size, 8, "bf16")


@pytest.mark.parametrize("head_size", [8, 16, 24, 72, 112, 120, 136, 200, 256, 512])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize(("page_size", "heads"), [(16, 8), (5, 24), (1, 2)])
def test_head_sizes_that_are_no_whole_steps_are_computed(dtype, head_size, page_size, heads):
    cases.head_sizes(Torch(), dtype, head_size, page_size, heads, LONG, [1, 2, 1, 1, 0, 1, 2, 1])


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    ("heads", "new"), [(16, [8, 1, 0, 3]), (9, [3, 5, 1, 2]), (5, [7, 8, 6, 1]), (4, [8, 8, 8, 8])]
)
def test_many_rows_of_a_head_are_shared_among_warps(heads, new, head_size):
    cases.many_rows(Torch(), heads, [2000, 40, 9, 513], new, head_size)


@pytest.mark.parametrize("dtype", ["f16", "f8e4m3"])
@pytest.mark.parametrize("split", [128, 512])
def test_a_batch_invariant_sequence_is_the_same_bits_in_any_batch(dtype, split):
    cases.batch_invariance(Torch(), dtype, split, LONG, [1, 2, 1, 1, 1, 1, 2, 1], 128)


def test_an_early_decode_sees_the_token_that_was_just_appended():
    cases.early_after_append(Torch(), LONG, 128, steps=50)
