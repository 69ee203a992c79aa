# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention of bf16 queries over pages of 8 bits, whose keys products take as they are stored, against the model.

On GPUs with wgmma a query is the sum of two terms of e4m3 then. Whatever holds no cached token is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.random_caches import Problem, random_query, stored_problem

import kvarn as kv
from kvarn.dialect.dtypes import bf16, f8e4m3, f8e5m2, f16, f32, i8
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.schedules import attention as tile_schedule
from kvarn.lowering.target import by_name

EXACT = 1.6e-2  # of values of standard deviation 1: outputs and weights of bf16
SENTINEL = 72.0
TILE = {"kind": "tile"}


def problem_of(seed: int, dtype: str = "f8e4m3", **options: Any) -> tuple[np.ndarray, Problem]:
    """A query of four heads a KV head, and the cache that it meets."""
    heads = options.setdefault("num_heads", 2)
    rng, problem = stored_problem(seed, "paged", dtype, **{"head_size": 64, **options})
    return random_query(rng, problem, 4 * heads), problem


def attended(place: Any, query: np.ndarray, problem: Problem, **options: Any) -> np.ndarray:
    out = place.put(np.full(query.shape, SENTINEL, query.dtype))
    offsets = place.put(problem.row_offsets.astype(np.uint32))
    placed = {name: place.put(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    kv.ops.attention(place.collection(problem.collection), 1, place.put(query), offsets, out=out, **placed)
    return place.get(out).astype(np.float64)


def check(place: Any, query: np.ndarray, problem: Problem, **options: Any) -> None:
    schedule = {} if place.name == "host" else {"schedule": TILE | options.pop("schedule", {})}
    options.pop("schedule", None)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    found = attended(place, query, problem, **schedule, **options)
    np.testing.assert_allclose(found, want, rtol=EXACT, atol=EXACT)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts and decodes, and sequences without tokens": ({"cached": [150, 0, 7], "new": [1, 0, 33]}, {}),
    "heads of no whole step": ({"cached": [70, 3], "new": [5, 9], "head_size": 80}, {}),
    "heads that start within 16 bytes": ({"cached": [70, 3], "new": [5, 9], "head_size": 72, "num_heads": 4}, {}),
    "two panels of columns": ({"cached": [70], "new": [9], "head_size": 160}, {}),
    "one stage of wide heads": ({"cached": [150], "new": [9], "head_size": 512, "num_heads": 1}, {}),
    "three blocks a multiprocessor": ({"cached": [150], "new": [9]}, {"schedule": {"rows": 64, "occupancy": 3}}),
    "three warpgroups by turns": (
        {"cached": [250], "new": [50], "head_size": 40},
        {"schedule": {"rows": 192, "ping_pong": True, "keys": 64}},
    ),
    "four warpgroups": (
        {"cached": [250], "new": [70], "head_size": 48},
        {"schedule": {"rows": 256, "keys": 64, "producers": 1}},
    ),
    "f8e5m2": ({"cached": [70], "new": [9], "dtype": "f8e5m2"}, {}),
    "a negative scale": ({"cached": [70], "new": [9]}, {"scale": -0.1}),
    "a softcap": ({"cached": [70], "new": [9]}, {"softcap": 2.0}),
    "slopes": ({"cached": [300], "new": [5]}, {"alibi_slopes": np.linspace(-0.2, 0.9, 8, dtype=np.float32)}),
    "maxima that move from tile to tile": ({"cached": [300], "new": [5]}, {"scale": 1.5}),
    "keys in splits": ({"cached": [2100], "new": [5]}, {"schedule": {"splits": 2}}),
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=list(CASES))
def test_8_bit_keys_are_multiplied_as_they_are_stored(place, sizes, options):
    query, problem = problem_of(1, **sizes)
    check(place, query, problem, **options)


@pytest.mark.parametrize("granule", [16, 0])
def test_three_warpgroups_multiply_rows_that_threads_address(place, granule):
    query, problem = problem_of(3, cached=[250], new=[50], granularity=granule, page_size=16 if granule else 1)
    check(place, query, problem, schedule={"rows": 192, "producers": 1, "keys": 64})


def test_a_query_row_may_have_elements_of_all_sizes(place):
    """One that is 2^15 times the others leaves these an error of 2^-17 of it; rows are scaled each by its own."""
    query, problem = problem_of(2, cached=[70], new=[9])
    query[...] = (query.astype(np.float32) * 2.0**-9).astype(query.dtype)
    query[:, :, 3] = 2.0**6
    query[4] = (query[4].astype(np.float32) * 2.0**-60).astype(query.dtype)
    query[5] = 0.0
    check(place, query, problem)


def test_a_query_row_may_be_of_any_magnitude_and_what_is_not_finite_stays_in_its_row(place):
    """Terms are of rows times powers of two: those of subnormal rows too, while scores stay below 2^30."""
    query, problem = problem_of(3, cached=[70], new=[12])
    factors = np.array([1e4, 1e6, 2.0**24, 1e-6, 1e-20, 1e-30, 1e-38, 1e-40], np.float32)
    query[:8] = (query[:8].astype(np.float32) * factors[:, None, None]).astype(query.dtype)
    query[8, :, 3], query[9, :, 0], query[10, :, 63] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        check(place, query, problem)


def config_of(
    dtype: Any, query: Any = bf16, size: int = 64, page: int = 16, granule: int = 0, **schedule: Any
) -> tile_schedule.TileConfig:
    spec = CacheSpec("paged", dtype, 2, size, page, False, f32 if granule else None, granule or 1)
    return tile_schedule.chosen(Case.plain(spec, query, 8), by_name("sm_90a"), schedule)


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
