# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention alone: the same bits in any batch and on any device, and tokens that the kernel ahead appends.

Its rows are in ``reference.attention_rows``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference import emulated
from reference.case import Case, assert_same_bits, on
from reference.decode_cases import batch_invariance, early_after_append
from reference.places import Interpreted

from kvarn.emulator.stream import Stream
from kvarn.ops import reads, writes

pytestmark = pytest.mark.whole


@pytest.mark.parametrize(
    ("dtype", "split", "cached", "head_size"), [("f16", 16, [77, 3, 300, 90], 40), ("f8e4m3", 64, [300, 3], 32)]
)
def test_a_batch_invariant_sequence_is_the_same_bits_in_any_batch(dtype, split, cached, head_size):
    """Two lanes share the columns of a row, of which a head of 40 has three steps."""
    case = Case(
        cached=cached, new=[1, 2, 1, 1][: len(cached)], dtype=dtype, query="f16", head_size=head_size, heads=2, group=2
    )
    batch_invariance(Interpreted(), case, split)


@pytest.mark.parametrize("new", [[1, 2, 0], [1, 1, 0]], ids=["eight rows", "four rows"])
def test_how_many_units_have_a_batch_invariant_sequence_and_which_ends_last_changes_no_bit(new):
    """Also of more than 32 units, and where half of the lanes have no rows."""
    _, case = on(
        "decode", [1000, 130, 560], new, dtype="f16", head_size=32,
        schedule={"batch_invariant": True, "split_size": 16, "min_tiles": 1},
    )  # fmt: skip
    first = None
    for multiprocessors, order, warps in ((1, "forward", 0), (9, "backward", 0), (60, "random", 0), (13, "random", 4)):
        place = Interpreted(order=emulated.order_of(order), multiprocessors=multiprocessors)
        of_warps = replace(case, schedule={**case.schedule, "combine": warps})
        found = of_warps.run(place)
        if first is None:
            of_warps.check(place)
        assert_same_bits(found, first or found)
        first = first or found


def test_an_early_decode_sees_the_token_that_was_just_appended():
    early_after_append(Interpreted(), [90, 0, 31])


@pytest.mark.parametrize(
    ("cached", "combine"), [([5, 300], 0), ([63, 64], 3), ([0, 1], 0), ([130], 3), ([5, 300], 3)], ids=str
)
def test_an_early_decode_waits_for_the_tokens_that_the_kernel_ahead_appends(cached, combine):
    _, case = on("decode", cached, [2, 1][: len(cached)], dtype="f16", head_size=16)
    problem, query, stream = case.problem, case.query_rows, Stream()
    rows = [np.concatenate([
        cache.load(b, np.arange(1)[:, None], int(t) + i, np.arange(cache.spec.head_size))[None]
        for b, (t, n) in enumerate(zip(problem.cached, problem.new, strict=True)) for i in range(n)
    ]) for cache in problem.caches(1)]  # fmt: skip
    emulated.run(writes._APPEND, (problem.collection, 1, rows[0], problem.row_offsets, rows[1]), stream=stream)
    out, schedule = np.zeros_like(query), {"kind": "decode", "max_queries": 2, "early": True, "combine": combine}
    operands = (problem.collection, 1, query, problem.row_offsets, query.shape[2] ** -0.5, out)
    attributes = (("mask", "causal"), ("span", 0), ("softcap", 0.0))
    emulated.run(reads._ATTENTION, operands, attributes, schedule, stream=stream)
    np.testing.assert_allclose(out, case.want()[0], rtol=4e-3, atol=4e-3)
