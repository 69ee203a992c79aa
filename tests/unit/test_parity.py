# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""docs/parity.md: what its rows name is in the code, and it is what its rows say."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def parity():
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("parity")
    finally:
        sys.path.remove(str(DOCS))


def test_everything_that_a_row_names_is_in_the_code(parity):
    wrong = [problem for row in parity.ROWS for problem in parity.problems(row)]
    assert not wrong, "\n".join(wrong)


def test_the_page_is_what_the_rows_say(parity):
    assert parity.PAGE.read_text(encoding="utf-8") == parity.page(), "docs/parity.md is out of date: run make docs"


def test_a_member_has_one_row(parity):
    keys = [(row.section, row.member) for row in parity.ROWS]
    assert len(set(keys)) == len(keys)
    assert {row.section for row in parity.ROWS} <= set(parity.SECTIONS)


def test_the_counts_are_those_of_the_rows(parity):
    total, host, gpu, another = parity.counts(parity.ROWS)
    left = total - gpu - another
    said = f"**{total} rows; {host} complete on the host, {gpu} on a GPU; {another} more need sm_100a; "
    assert f"{said}{left or 'none'} {'is' if left < 2 else 'are'} open.**" in parity.page()
    assert another == sum(row.gpu is not None and "needs sm_100a" in str(row.gpu) for row in parity.ROWS)
    assert parity.page().count("**missing**") == sum(
        getattr(row, cell) is None for row in parity.ROWS for cell in (*parity.CELLS, "gpu")
    )
    assert gpu <= host <= total == len(parity.ROWS)


@pytest.mark.parametrize(
    ("cell", "value", "message"),
    [
        ("op", "kv.lode", "the dialect has no kv.lode"),
        ("dsl", "kvarn.dsl.handles:Cache.lode", "there is no kvarn.dsl.handles:Cache.lode"),
        ("host", "kvarn.caches:PagedKVCache.lode", "there is no kvarn.caches:PagedKVCache.lode"),
        ("host", "kvarn.cashes:PagedKVCache.load", "there is no kvarn.cashes:PagedKVCache.load"),
        ("lit", "tests/dialect/types.mlir", 'tests/dialect/types.mlir does not have "kv.load"'),
        ("lit", "tests/dialect/none.mlir", 'tests/dialect/none.mlir does not have "kv.load"'),
        ("test", "tests/unit/test_members.py::test_lode", "there is no test tests/unit/test_members.py::test_lode"),
        ("gpu", "tests/gpu/none.py::test_load_reads_elements", "there is no test tests/gpu/none.py::test_load_reads"),
        ("gpu", "tests/gpu/test_members.py::test_tiles_that_an_operand_does_not_have_raise", "there is no test"),
    ],
)
def test_a_loss_is_seen(parity, cell, value, message):
    row = next(r for r in parity.ROWS if r.member == "load" and r.section == "paged")
    assert parity.problems(row) == []
    found = parity.problems(replace(row, **{cell: value}))
    assert len(found) >= 1
    assert message in found[0]


def test_a_refusal_needs_its_expected_error(parity):
    row = next(r for r in parity.ROWS if r.member == "get_value_cache of an MLA collection")
    assert parity.problems(row) == []
    other = parity.Refused("'kv.value_cache' op is not there")
    assert "expects no error" in parity.problems(replace(row, op=other))[0]


def test_what_is_missing_does_not_count(parity):
    row = next(r for r in parity.ROWS if r.member == "load" and r.section == "paged")
    assert parity.complete_on_host(row)
    assert parity.complete_on_gpu(row)
    assert not parity.complete_on_host(replace(row, test=None))
    assert not parity.complete_on_gpu(replace(row, gpu=None))
    assert parity.complete_on_host(replace(row, gpu=None))
    assert "**missing**" in parity.cell(None)


def test_tests_of_suites_are_those_of_the_file_that_takes_them(parity):
    names = parity.tests_of("tests/gpu/test_ops.py")
    assert {"test_append_quantizes_by_granules", "test_large_batches"} <= names
    assert "test_pages_go_to_the_host_and_back" not in names
