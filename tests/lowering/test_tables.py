# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of measured numbers: each says what it is and where it came from, is read, and counts in the cache's key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvarn.compilation import driver
from kvarn.dialect.schedules import NARROW_HEAD
from kvarn.lowering import schedules
from kvarn.lowering.schedules import tables
from kvarn.lowering.schedules.tables import by_most, entries, measured
from kvarn.lowering.target import TARGETS, by_name

LOWERING = Path(schedules.__file__).parents[1]
FILES = sorted(Path(tables.__file__).parent.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_entry_says_what_it_is_and_the_row_that_it_came_from(path):
    assert path.stem in TARGETS
    for entry in entries(path.stem).values():
        assert set(entry) == {"value", "what", "from"}
        assert entry["what"].endswith(".")
        assert entry["from"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_every_number(target):
    assert entries(target).keys() == entries(tables.MEASURED).keys()


def test_every_number_is_read_and_no_other_is():
    code = "\n".join(path.read_text() for path in LOWERING.rglob("*.py"))
    quoted = set(re.findall(r'"([a-z0-9_]+)"', code))
    assert entries(tables.MEASURED).keys() <= quoted
    assert set(re.findall(r'measured\("([a-z0-9_]+)"', code)) <= entries(tables.MEASURED).keys()


def test_no_name_of_a_gpu_and_no_time_stands_in_the_code_of_lowering():
    for path in LOWERING.rglob("*.py"):
        found = re.findall(r"\b[HA][12]00\b|\b\d+ us\b|µs", path.read_text())
        assert not found, f"{path}: {found}: tables have what was measured"


def test_a_pair_without_a_most_is_of_any_count():
    target = by_name("sm_90a")
    assert [by_most("decode_rows", target, n) for n in (1, 16, 17, 1 << 31)] == [128, 128, 32, 32]


def test_classes_of_rows_end_where_three_warpgroups_do():
    assert measured("three_warpgroups_columns") == NARROW_HEAD


def test_a_table_is_part_of_the_key_of_compiled_code():
    assert [path.resolve() for path in FILES] == [p.resolve() for p in driver.sources() if p.suffix == ".json"]
