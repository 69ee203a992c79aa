# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kind ``full_k`` of kv.ops.project_append: blocks that write the heads of columns of which they have all of K.

As in test_ops_projection.py elements are small multiples of 1/4, whose products add up exactly in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.places import Place
from reference.random_caches import random_problem

import kvarn as kv

from .test_ops_projection import angles, check, check_scales, check_small, exact, on_gpus

FEW: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 2, 0, 9]}
MANY: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 61, 0, 39]}
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mma": (FEW, {"max_tokens": 16}),
    "wgmma": (FEW, {"max_tokens": 64, "tile_columns": 48}),
    "tiles": (MANY, {"max_tokens": 128, "tile_columns": 80, "rows": 64}),
    "wide": (MANY, {"max_tokens": 256, "tile_columns": 96, "rows": 256}),
}
EVERY = pytest.mark.parametrize("path", list(PATHS))


def check_whole(
    place: Place, path: str, kind: str, dtype: str, heads: int = 2, early: bool = False, **given: Any
) -> None:
    """Project into a cache of heads of 64, with a bias, and rows behind the batch."""
    shape, entries = PATHS[path]
    problem = random_problem(np.random.default_rng(14), kind, dtype, head_size=64, **shape)
    bias = exact(np.random.default_rng(15), ((heads + 4) * 64,), "f32")
    schedule = {"kind": "full_k", **entries, **({"early": True} if early else {})}
    check(
        place, problem, dtype, k=256, heads=heads, spare=2, schedule=schedule, rounding="freqs" in given, bias=bias,
        **given,
    )  # fmt: skip


@EVERY
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "dtype"), [("paged", "bf16"), ("continuous", "f16"), ("fa3", "bf16")])
@on_gpus
def test_columns_go_to_queries_and_cache_as_they_are_multiplied(place, path, kind, dtype):
    check_whole(place, path, kind, dtype, heads=3)


@EVERY
@pytest.mark.sampled(6)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turned", [32, 64])
@on_gpus
def test_both_parts_of_a_pair_are_in_one_unit(place, path, interleaved, turned):
    freqs = angles(np.random.default_rng(16), 80, turned)
    check_whole(place, path, "paged", "bf16", freqs=freqs, interleaved=interleaved)


@EVERY
@pytest.mark.sampled(4)
@on_gpus
def test_a_weight_that_is_promised_to_be_there_gives_the_same(place, path):
    check_whole(place, path, "paged", "bf16", early=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@on_gpus
def test_whole_columns_of_8_bits_have_scales(place, scaling):
    check_scales(place, scaling, 64, {"kind": "full_k", "max_tokens": 16})


@on_gpus
def test_sums_of_8_bits_keep_what_is_small_in_one_kernel(place):
    check_small(place, {"kind": "full_k", "max_tokens": 16})


@on_gpus
def test_what_is_not_written_by_units_is_refused_by_name(place):
    def refused(message: str, dtype: str = "bf16", size: int = 64, **options: Any) -> None:
        cache = {"scale_dtype": "f32", "granularity": 32} if dtype == "f8e4m3" else {}
        problem = random_problem(np.random.default_rng(1), "paged", dtype, head_size=size, **FEW, **cache)
        with pytest.raises(kv.KernelError, match=message):
            check(place, problem, "bf16", schedule={"kind": "full_k", "max_tokens": 16}, **options)

    gammas: dict[str, Any] = {n: np.ones(64, np.float32) for n in ("q_gamma", "k_gamma")}
    refused("kind full_k needs heads without norms", **gammas)
    refused("kind full_k needs a cache without scales", dtype="f8e4m3")
    refused("kind full_k needs heads, and dims that are rotated, of a multiple of 16 elements", size=24)
    refused("kind full_k needs a K of a multiple of 64, got 48", k=48)
