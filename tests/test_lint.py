# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""ruff, pyright and clang-format as tests: one closing line speaks for everything that ``make check`` checks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "dialect/native/effects.cpp", "dialect/native/walk.cpp", "python/kvarn/runtime/launches.cpp",
    "python/kvarn/runtime/operands.h", "python/kvarn/runtime/checks.h",
)  # fmt: skip
COMMANDS = {
    "lint": ("ruff", ["check", "--quiet", "."]),
    "format": ("ruff", ["format", "--check", "--quiet", "."]),
    "types": ("pyright", ["--pythonpath", sys.executable]),
    "C++ format": ("clang_format", ["--dry-run", "--Werror", *SOURCES]),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_the_tree_is_clean(what):
    tool, arguments = COMMANDS[what]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install -e '.[test]'")
    if tool == "pyright" and not (ROOT / "python" / "kvarn" / "dialect").exists():
        pytest.skip("python/kvarn/dialect, through which pyright finds kvarn.dialect, is made by make setup")
    # What python -m does not run is run by its entry point.
    run = ["-c", f"from {tool} import {tool} as run; run()"] if tool == "clang_format" else ["-m", tool]
    done = subprocess.run([sys.executable, *run, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{tool} {what}:\n{done.stdout}{done.stderr}", pytrace=False)
