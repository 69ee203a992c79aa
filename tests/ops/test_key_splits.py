# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles whose keys are split among blocks: roundings, and the splits that a schedule chooses.

Rows are in ``reference.attention_rows``. What holds no token is NaN, and every partial result that is not written too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.attention_rows import SPLIT
from reference.tile_attention import Choice, batch, case_of, check, run

from bench import static
from bench.cases import Prefill, Row
from kvarn.dialect import schedules
from kvarn.emulator import grid as ptx
from kvarn.lowering.kernels.attention import key_splits
from kvarn.lowering.target import by_name
from kvarn.runtime.expressions import compile_expressions

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_change_roundings_only(splits):
    b = batch(*SPLIT)
    case = case_of(b)
    whole, parts = (run(b, case, Choice(keys=32, splits=n)) for n in (1, splits))
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(parts[0].astype(np.float32), whole[0].astype(np.float32), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("order", [ptx.Order("backward", "late"), ptx.Order("random", "random", 1)], ids=str)
def test_the_order_of_warps_and_copies_changes_no_result(order):
    check(batch([130], [18]), Choice(consumers=2, splits=2), orders=[order])


def test_fewer_blocks_than_splits_take_them_in_turn():
    check(batch(*SPLIT), Choice(keys=32, splits=3, blocks=2))


def test_a_sequence_is_the_same_bits_whatever_else_is_in_the_batch():
    """Alone, and with others before and after it: its own splits are all that its sums depend on."""
    alone, others = batch([360], [7], seed=3), batch([360, 31, 90], [7, 2, 70], seed=3)
    spec = others.problem.collection
    for half in (0, 1):
        pages = [np.asarray(x.problem.collection.lookup_table)[0, :23] for x in (alone, others)]
        spec.blocks[pages[1], half] = alone.problem.collection.blocks[pages[0], half]
    others.query[:7] = alone.query
    one, several = (run(b, case_of(b), Choice(keys=32, splits=4)) for b in (alone, others))
    np.testing.assert_array_equal(one[0].view(np.uint16), several[0][:7].view(np.uint16))
    np.testing.assert_array_equal(one[1], several[1][:7])


def test_rows_of_a_block_change_no_bit():
    b = batch([360], [7], group=8)
    one, two = (run(b, case_of(b), Choice(keys=32, splits=4, consumers=n)) for n in (1, 2))
    np.testing.assert_array_equal(one[0].view(np.uint16), two[0].view(np.uint16))


# --- what a schedule chooses -------------------------------------------------------------------------


def launched(
    tokens: int, batch_size: int, multiprocessors: int = 132, longest: int = 100_000, **schedule: Any
) -> dict[str, Any]:
    """What a launch of 32 query heads over 8 KV heads of 128 elements asks for; no sequence has more keys."""
    row = Row("x", "x", Prefill(((tokens, tokens),)))
    what = static.specialisation(row, "sm_90a", {"kind": "tile", **schedule})
    artifact = static.compiled(what).artifact
    names = [name for name, _ in what.operands]
    values: list[Any] = [[0] * len(a.fields) for a in artifact.args]
    for name, field, value in (
        ("query", "shape0", tokens),
        ("out", "shape0", tokens),
        ("row_offsets", "shape0", batch_size + 1),
        ("collection", "max_cache_length", longest),
    ):
        fields = [f.name for f in artifact.args[names.index(name)].fields]
        values[names.index(name)][fields.index(field)] = value
    given = dict(
        zip((a.name for a in artifact.entry(artifact.steps[0].entry).args), artifact.steps[0].args, strict=True)
    )
    entries = [x for step in artifact.steps for x in step.grid[:1]] + [w.bytes for w in artifact.workspaces]
    device = type("Device", (), {"multiprocessors": multiprocessors})
    splits, *found = compile_expressions([given.get("t.splits", 1), *entries], artifact.args)(values, device)
    steps = len(artifact.steps)
    return {"splits": splits, "blocks": found[0], "combined": found[1] if steps > 1 else 0, "bytes": sum(found[steps:])}


def test_tiles_that_fill_the_device_are_not_split():
    for tokens, batch_size in ((4096, 1), (512, 1), (32768, 8)):
        found = launched(tokens, batch_size)
        assert found["combined"] == 0, "a grid of zero is not launched"
        assert found["blocks"] == 132
        assert found["bytes"] < 1024


@pytest.mark.parametrize(
    ("tokens", "batch_size", "longest", "splits"),
    [
        (64, 1, 100_000, 8),  # a round that is nearly full
        (128, 1, 100_000, 4),
        (96, 1, 100_000, 5),
        (160, 1, 100_000, 3),
        (200, 1, 100_000, 4),  # two rounds: one alone would be 3/4 full
        (384, 1, 100_000, 1),  # of 96 tiles two splits would take the time of one
        (64, 1, 2048, 2),  # as many as have 1024 keys
        (64, 1, 2047, 1),
        (1088, 3, 100_000, 5),  # a prompt beside a long sequence
        (1088, 3, 16_384, 2),
        (1088, 3, 8_191, 1),
        (1088, 1, 100_000, 1),  # one sequence: nothing to wait for
    ],
)
def test_splits_follow_the_shapes_and_the_longest_sequence(tokens, batch_size, longest, splits):
    found = launched(tokens, batch_size, longest=longest)
    tiles = (tokens * 4 // 128 + batch_size) * 8
    assert found["splits"] == splits
    assert found["blocks"] == min(132, tiles * splits)
    assert found["combined"] == (tiles * 128 // key_splits.WARPS if splits > 1 else 0)


@pytest.mark.parametrize(("batch_size", "splits"), [(48, 2), (33, 1), (63, 1)])
def test_blocks_that_share_a_multiprocessor_take_halves_where_rounds_are_fewer(batch_size, splits):
    found = launched(16 * batch_size, batch_size, longest=4096, max_queries=16, occupancy=2)
    assert (found["splits"], found["blocks"]) == (splits, 2 * 132)


def test_a_given_number_of_splits_stays():
    assert launched(4096, 1, splits=2)["splits"] == 2
    assert launched(64, 1, splits=5, longest=10)["splits"] == 5, "of a tile with few keys there are fewer all the same"
    assert launched(64, 1, splits=1)["combined"] == 0


def test_splits_that_follow_the_shapes_of_a_batch_are_not_batch_invariant():
    """Unless their number is given, keys are not split."""
    assert launched(64, 1, batch_invariant=True)["combined"] == 0
    assert launched(64, 1, batch_invariant=True, splits=8)["combined"] > 0
    why = schedules.why_unsupported(
        "kv.attention", {"kind": "tile", "batch_invariant": True, "splits": 0}, by_name("sm_90a")
    )
    assert why is not None
    assert "splits that do not depend on the batch" in why


def test_rows_of_few_new_tokens_are_a_warpgroups():
    """64 rows are multiplied where no sequence has more, once for every sequence."""
    assert launched(16, 1, max_queries=16)["combined"] == 8 * 64 // key_splits.WARPS
