# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The schedules of decode attention, chosen without compiling anything."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvarn.dialect.dtypes import bf16, f16
from kvarn.dialect.layout import spec_of
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.schedules import decode as decode_schedule, decode_table, tuned
from kvarn.lowering.target import Target, by_name

TYPES = [("f16", None, 1), ("bf16", None, 1), ("f8e4m3", None, 1), ("i8", "f32", 32), ("f8e4m3", "f32", 64)]
# KV heads, groups, head sizes, page sizes, new tokens, sequences.
SHAPES = list(
    itertools.product(
        (1, 2, 3, 4, 6, 8, 16, 64), (1, 3, 4, 16), range(16, 257, 16), (1, 16, 128), (1, 2, 8), (1, 4, 128, 1024, 16384)
    )
)


@pytest.fixture(autouse=True)
def no_table_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("KVARN_TUNE", str(tmp_path / "none.json"))
    assert tuned.digest() == ""


def cases(target: Target, count: int, invariant: bool = False) -> Iterator[decode_schedule.DecodeConfig]:
    """Random cases that the kernel takes."""
    count = count if os.environ.get("KVARN_TEST_ALL") else count // 3
    for i in np.random.default_rng(3).permutation(len(SHAPES))[:count]:
        heads, group, size, page, queries, batch = SHAPES[i]
        for dtype, scale, granularity in TYPES:
            spec = spec_of("paged", dtype, heads, size, page_size=page, scale_dtype=scale, granularity=granularity)
            query = bf16 if dtype == "bf16" else f16
            case = Case.plain(spec, query, group * heads)
            if decode_schedule.supports(case, queries, target, batch, invariant):
                yield decode_schedule.DecodeConfig(case, queries, max_batch=batch)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_what_the_kernel_takes_fits_the_target(target):
    chip, seen = by_name(target), 0
    for invariant in (False, True):
        for config in cases(chip, 750, invariant):
            schedule = {"max_batch": config.max_batch, "batch_invariant": invariant}
            entries = {**decode_table.choose(chip, config, schedule), **schedule}
            made = decode_schedule.configured(chip, config, entries)
            assert decode_schedule.block_bytes(made) + made.padding <= chip.shared_bytes
            assert made.row_groups % made.warps == 0
            assert made.tile % 16 == 0
            seen += 1
    assert seen > 600


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_a_multiprocessor_has_room_for_the_blocks_of_the_schedule_and_no_more(target):
    chip = by_name(target)
    room = chip.shared_bytes + 1024
    for config in cases(chip, 500):
        schedule = {"max_batch": config.max_batch}
        made = decode_schedule.configured(chip, config, {**decode_table.choose(chip, config, schedule), **schedule})
        assert made.blocks * (decode_schedule.block_bytes(made) + made.padding) <= room
        assert (made.blocks + 1) * (decode_schedule._used_bytes(made) + made.padding + 1024) > room


def test_the_tile_of_an_invariant_schedule_is_the_same_for_every_batch():
    chip = by_name("sm_80")
    for config in cases(chip, 300, True):
        tiles = set()
        for batch in (1, 4, 128, 1024, 16384):
            if decode_schedule.supports(config.case, config.max_queries, chip, batch, True):
                schedule = {"max_batch": batch, "batch_invariant": True}
                one = decode_schedule.DecodeConfig(config.case, config.max_queries, max_batch=batch)
                tiles.add(decode_table.choose(chip, one, schedule)["tile"])
        assert len(tiles) == 1


def test_what_is_given_stays_and_what_does_not_fit_is_refused():
    chip = by_name("sm_80")
    spec = spec_of("paged", "bf16", 16, 256, page_size=16)
    config = decode_schedule.DecodeConfig(Case.plain(spec, bf16, 16), 1)
    found = decode_table.choose(chip, config, {"stages": 3})
    assert found["stages"] == 3
    assert found["warps"] < 4
    with pytest.raises(ValueError, match=r"must fit 166912 bytes of shared memory, got \d+: choose fewer stages"):
        decode_table.choose(chip, config, {"stages": 6, "warps": 4, "tile": 32})
    with pytest.raises(ValueError, match="schedule's warps must be 1, 2, 4, 8 or 16, a divisor of the 16 warps"):
        decode_table.choose(chip, config, {"warps": 3})


def test_a_batch_whose_lengths_fill_shared_memory_is_no_decode():
    spec = spec_of("paged", "bf16", 8, 128, page_size=16)
    case = Case.plain(spec, bf16, 32)
    assert decode_schedule.supports(case, 1, by_name("sm_90a"), 16384)
    assert not decode_schedule.supports(case, 1, by_name("sm_90a"), 65536)
