# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Each line of docs/reference/tiles.md is what the construct does now, on the host and in the emulator."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SPEC = importlib.util.spec_from_file_location("tile_constructs", DOCS / "tile_constructs.py")
constructs = importlib.util.module_from_spec(_SPEC)
sys.modules["tile_constructs"] = constructs
_SPEC.loader.exec_module(constructs)

PAGE = (DOCS / "reference" / "tiles.md").read_text()
REFUSALS = re.findall(r"^\d+\. (.*)$", PAGE, re.MULTILINE)
EVERY = [found for members in constructs.GROUPS.values() for found in members]


@pytest.mark.parametrize("number", range(len(EVERY)), ids=[f"construct-{n}" for n in range(len(EVERY))])
def test_a_line_of_the_table(number):
    refusals = list(REFUSALS)
    line = f"| {' | '.join(constructs.row(EVERY[number], refusals))} |"
    assert line in PAGE.splitlines(), "run make docs"
    assert refusals == REFUSALS


def test_the_table_has_every_construct_and_no_other():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| construct")]
    assert [line.split(" | ")[0][2:] for line in lines] == [found.title for found in EVERY]


def test_a_refusal_says_what_to_write():
    for text in REFUSALS:
        assert re.search(r"write|use|load|gives|divide", text), text
