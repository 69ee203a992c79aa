# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over elements of 8 bits that products take as they are stored: numbers of any size, and what is chosen.

Rows are in ``reference.attention_rows``. On GPUs with wgmma a query of bf16 is the sum of two terms of e4m3 then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.case import LAYER, Case

import kvarn as kv
from kvarn.dialect import dtypes, tile_layout
from kvarn.dialect.dtypes import bf16, f8e4m3, f8e5m2, f16, f32, i8
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering.kernels.attention.case import Case as OfKernel
from kvarn.lowering.schedules import attention as tile_schedule
from kvarn.lowering.target import by_name

pytestmark = pytest.mark.whole


def rows_of_any_magnitude(case: Case) -> None:
    query = case.query_rows
    factors = np.array([1e4, 1e6, 2.0**24, 1e-6, 1e-20, 1e-30, 1e-38, 1e-40], np.float32)
    query[:8] = (query[:8].astype(np.float32) * factors[:, None, None]).astype(query.dtype)
    query[8, :, 3], query[9, :, 0], query[10, :, 63] = np.inf, -np.inf, np.nan


def test_a_query_row_may_be_of_any_magnitude_and_what_is_not_finite_stays_in_its_row(place):
    """Terms are of rows times powers of two: those of subnormal rows too, while scores stay below 2^30."""
    schedule = {} if place.name == "host" else {"kind": "tile"}
    case = Case(cached=[70], new=[12], dtype="f8e4m3", heads=2, schedule=schedule, change=rows_of_any_magnitude)
    with np.errstate(invalid="ignore"):
        found, want = case.run(place)[0], case.want()[0]
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("disable", "least", "most"),
    [
        ([], 0.999, 1.001),
        (["pipeline-kv-loops"], 0.999, 1.001),
        (["sum-kv-weights"], 0.995, 1.005),
        (["promote-kv-sums"], 0, 0.985),
    ],
)
def test_sums_over_many_keys_lose_nothing_of_values_that_are_alike(place, disable, least, most):
    """Tensor cores, and the emulator, cut off what is small beside a sum of 8-bit products: 2% of 2000 keys."""

    def ones(case: Case) -> None:
        case.problem.collection.blocks[:, 1] = 1

    case = Case(cached=[2000], new=[1], dtype="f8e4m3", query="f8e4m3", heads=2, head_size=128, page_size=64,
                change=ones, schedule={"splits": 1}, logarithms=False, spread=1.0)  # fmt: skip
    with kv.pipeline(disable=disable):
        made = case.run(place)[0].astype(np.float64)
    assert least <= made.min()
    assert made.max() <= most


def test_the_output_of_8_bit_queries_is_bf16_by_default():
    case = Case(cached=[40], new=[9], dtype="f8e4m3", query="f8e4m3")
    found = kv.ops.attention(case.problem.collection, LAYER, case.query_rows, case.offsets)
    assert dtypes.of(found.dtype) is dtypes.bf16


def test_a_lane_has_the_weights_of_the_tokens_that_it_multiplies():
    """Of 32 tokens: a byte of a lane's words of A, and the accumulator's element that becomes it."""
    weights, operand = tile_layout.named("wgmma", (64, 32), 4), tile_layout.named("a8", (64, 32), 4)
    for lane in range(32):
        own = [weights.position(r, lane, 0) for r in range(weights.registers)]
        # As tile_products.words has them: pairs of a row with those of eight columns on, then of the row eight on.
        order = [2 * p + i for at in range(0, 8, 4) for p in (at, at + 2, at + 1, at + 3) for i in (0, 1)]
        for byte, register in enumerate(order):
            row, column = operand.position(byte, lane, 0)
            group, at = divmod(column, 16)
            t, i = divmod(at, 4)
            assert own[register] == (row, 16 * group + 2 * t + (i & 1) + 8 * (i >> 1))


def config_of(
    dtype: Any, query: Any = bf16, size: int = 64, page: int = 16, granule: int = 0, **schedule: Any
) -> tile_schedule.TileConfig:
    spec = CacheSpec("paged", dtype, 2, size, page, False, f32 if granule else None, granule or 1)
    return tile_schedule.chosen(OfKernel.plain(spec, query, 8), by_name("sm_90a"), schedule)


def chosen(*of: Any, **options: Any) -> bool:
    return config_of(*of, **options).stored_keys


def test_keys_are_multiplied_as_stored_where_boxes_of_8_bit_floats_meet_bf16():
    assert all(chosen(dtype, size=size) for dtype in (f8e4m3, f8e5m2) for size in (40, 64, 72, 80, 128, 192, 256, 512))
    assert not any((chosen(i8), chosen(f8e4m3, f16), chosen(f8e4m3, page=1), chosen(f8e4m3, granule=16)))
    assert not chosen(f8e4m3, stored_keys=False)
    assert not chosen(f8e4m3, instruction="mma.sync")


def test_tiles_of_stored_keys_are_what_registers_and_memory_hold():
    """One stage of 64 keys where two are not 64 each; of several warpgroups no more keys than they hold unspilled."""
    found = {size: config_of(f8e4m3, size=size) for size in (32, 40, 48, 64, 256, 384, 448, 512)}
    tiles = {size: (config.rows, config.keys) for size, config in found.items() if size <= 64}
    assert tiles == {32: (256, 80), 40: (256, 64), 48: (256, 64), 64: (192, 96)}
    assert [config_of(f8e4m3, size=size, rows=192).keys for size in (32, 40)] == [128, 96]
    assert {size: config.stages for size, config in found.items() if size > 64} == {256: 2, 384: 2, 448: 1, 512: 1}
    assert found[512].keys == 64
    assert config_of(f8e4m3, size=512, expected_rows=64).stages == 2, "of 64 rows two stages fit"


def test_warpgroups_take_turns_where_products_take_no_longer_than_the_exponentials():
    turns = {size: config_of(f8e4m3, size=size).ping_pong for size in (32, 64, 72)}
    assert turns == {32: True, 64: True, 72: False}
    assert config_of(f8e4m3, expected_rows=512).ping_pong, "two warpgroups"
    assert not config_of(f8e4m3, expected_rows=64).ping_pong, "one"
    scaled = config_of(f8e4m3, granule=16)
    assert (scaled.rows, scaled.producers, scaled.ping_pong) == (192, 2, True)
    addressed = config_of(f8e4m3, page=1)
    assert (addressed.rows, addressed.producers, addressed.ping_pong) == (192, 1, True)
    assert [config_of(bf16, size=size).one_wait for size in (64, 72)] == [True, False]


def test_rows_of_a_tile_are_as_many_as_registers_beside_the_copies_hold():
    with pytest.raises(ValueError, match="rows must be up to 192 for queries of 8 bits, got rows = 256"):
        config_of(f8e4m3, f8e4m3, rows=256, keys=32)
    with pytest.raises(ValueError, match="rows must be up to 128 for a cache that TMA does not copy"):
        config_of(bf16, page=1, rows=192, keys=32)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 3), ({"max_batch": 191}, 2), ({"max_batch": 127}, 1), ({"size": 72}, 1), ({"stored_keys": False}, 2),
     ({"splits": 1}, 1), ({"rows": 128}, 1)],
    ids=str,
)  # fmt: skip
def test_blocks_share_a_multiprocessor_where_there_are_as_many_tiles_for_each(options, blocks):
    given = {"expected_rows": 64, "max_batch": 192, **options}
    assert config_of(f8e4m3, **given).occupancy == blocks


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"dtype": i8}, "stored_keys must be false: unconverted keys need a bf16 query over f8e4m3 or f8e5m2"),
        ({"dtype": f8e4m3, "query": f16}, "keys by wgmma, got f16 over f8e4m3 by wgmma"),
        ({"dtype": f8e4m3, "granule": 16}, "keys are scaled before their products, by granules of 16"),
        ({"dtype": f8e4m3, "page": 1}, "unconverted keys need TMA boxes, which do not copy this cache"),
    ],
    ids=str,
)
def test_stored_keys_are_refused_where_products_cannot_take_them(case, message):
    with pytest.raises(ValueError, match=message):
        chosen(**case, stored_keys=True)
