# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A plugin of pytest: of the tests that ``make check`` would run, run those named, and write down what came of each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = json.loads(os.environ.get("KVARN_MUTANTS_PICKED", "[]"))
FOUND = Path(os.environ.get("KVARN_MUTANTS_FOUND", os.devnull))
BROKEN = ("SyntaxError", "ImportError", "ModuleNotFoundError", "NameError", "IndentationError")


def pytest_configure(config: pytest.Config) -> None:
    import kvarn

    assert Path(kvarn.__file__).is_relative_to(ROOT), f"{kvarn.__file__} is tested, which is not of the copy"


def named(test: str, names: list[str] = NAMES) -> list[str]:
    """The names that pick a test: of itself, of all its cases, or of its file."""
    return [name for name in names if test == name or test.startswith((name + "[", name + "::"))]


@pytest.hookimpl(trylast=True)  # after the sample that make check takes
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if named(item.nodeid)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if call.when == "call" or report.outcome != "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        broken = next((name for name in BROKEN if name + ":" in error), "")
        outcome = "broken" if report.failed and (broken or call.when != "call") else report.outcome
        with FOUND.open("a") as file:
            file.write(json.dumps([item.nodeid, outcome, broken or error[:300]]) + "\n")
    return report
