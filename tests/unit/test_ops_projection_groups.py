# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.project_append of weights with scales by groups of K, against the model, on the host and in GPU code.

Values are small multiples of powers of two, whose products add up exactly in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Place, assert_same
from reference.random_caches import clone, random_problem
from reference.weights import Grouped, random_groups

import kvarn as kv
from kvarn.dialect import dtypes

SIZE, HEADS, KV_HEADS = 64, 2, 2
ROWS = (HEADS + 2 * KV_HEADS) * SIZE
EXACT = dtypes.of("bf16")


def tokens(rng: np.random.Generator, rows: int, k: int, dtype: str) -> np.ndarray:
    return (rng.integers(-2, 3, (rows, k)) / 2).astype(np.float32).astype(dtypes.of(dtype).numpy)


def check(
    place: Place, weight: Grouped, element: str, *, dtype: str = "bf16", x: Grouped | None = None, schedule: Any = None,
    total: float | None = None, new: Any = (3, 2, 9), padded: bool = False,
) -> None:  # fmt: skip
    """Project random rows, or those of ``x``, which are quantized as the weight is."""
    rng = np.random.default_rng(1)
    problem = random_problem(
        rng, "paged", dtype, num_heads=KV_HEADS, head_size=SIZE, cached=[5, 0, 33], new=list(new)
    )
    count, k = int(sum(new)), weight.values.shape[1]
    rows = tokens(rng, count, k, dtype) if x is None else x.elements
    found, expected = place.collection(problem.collection), clone(problem.collection)
    given = {"weight_scale": weight.scales, "weight_min": weight.minima, "x_scale": None if x is None else x.scales}
    given["tensor_scale"] = None if total is None else np.full((1, 1), total, np.float32)
    out = kv.ops.project_append(
        found, 1, place.put(rows), place.put(weight.elements), place.put(problem.row_offsets), schedule=schedule,
        weight_format=element if element in kv.ops.projection.PACKED else "plain",
        **{name: place.put(value) for name, value in given.items() if value is not None},
    )  # fmt: skip
    numpy = dtypes.of(dtype).numpy
    of_x = rows.astype(np.float64) if x is None else x.values
    scaled = of_x if total is None else of_x * total
    wanted, _ = model.project_append(
        expected, 1, scaled, weight.values, problem.row_offsets, numpy, query_heads=HEADS
    )
    np.testing.assert_array_equal(place.get(out).astype(np.float32), wanted.astype(numpy).astype(np.float32))
    assert_same(place, found, expected)


FORMATS = [
    ("uint4b8", 128, "bf16", {}),
    ("int4", 32, "f32", {}),
    ("uint4", 64, "f16", {"minima": True}),
    ("e2m1", 16, "f8e4m3", {"interleaved": True}),
    ("e2m1", 32, "f8e8m0", {}),
    ("f8e4m3", 32, "f8e8m0", {"interleaved": True}),
    ("f8e5m2", 16, "bf16", {}),
    ("i8", 8, "bf16", {"minima": True}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("element", "size", "scale", "options"), FORMATS)
@pytest.mark.parametrize("schedule", [None, {"max_tokens": 16}], ids=["many", "few"])
def test_groups_of_a_weight_have_scales(place, element, size, scale, options, schedule):
    if place.name == "host" and schedule is not None:
        pytest.skip("the host has one kind of kernel")
    weight = random_groups(np.random.default_rng(0), ROWS, 256, size, element, scale, **options)
    check(place, weight, element, schedule=schedule)
