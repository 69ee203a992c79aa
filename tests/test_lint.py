# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""ruff, pyright and clang-format as tests: one closing line speaks for everything that ``make check`` checks."""

import hashlib
import importlib.metadata
import importlib.util
import os
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
TYPED = ("python", "dialect", "lowering", "examples/chat", "pyproject.toml")  # what pyright reads of the tree
CLEAN = "kvarn/types"  # in pytest's cache: what pyright had read when it found nothing


def _read_by_pyright() -> str:
    """A digest of the tree's sources and of the versions that are installed, which decide what pyright finds."""
    found = hashlib.sha256(sys.version.encode())
    for path in sorted(p for name in TYPED for p in [ROOT / name, *(ROOT / name).rglob("*.py*")]):
        if path.is_file() and path.suffix != ".pyc":
            found.update(b"%s\0%s\0" % (os.fsencode(path.relative_to(ROOT)), path.read_bytes()))
    found.update(repr(sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions())).encode())
    return found.hexdigest()


@pytest.mark.parametrize("what", COMMANDS)
def test_the_tree_is_clean(what, pytestconfig):
    """Of types, make check asks only where something changed since they were clean: it is half a minute of CPU."""
    tool, arguments = COMMANDS[what]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install -e '.[test]'")
    if tool == "pyright" and not (ROOT / "python" / "kvarn" / "dialect").exists():
        pytest.skip("python/kvarn/dialect, through which pyright finds kvarn.dialect, is made by make setup")
    read, cache = _read_by_pyright() if tool == "pyright" else "", getattr(pytestconfig, "cache", None)
    if read and cache is not None and cache.get(CLEAN, "") == read and not os.environ.get("KVARN_TEST_ALL"):
        return
    # What python -m does not run is run by its entry point.
    run = ["-c", f"from {tool} import {tool} as run; run()"] if tool == "clang_format" else ["-m", tool]
    done = subprocess.run([sys.executable, *run, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{tool} {what}:\n{done.stdout}{done.stderr}", pytrace=False)
    if read and cache is not None:
        cache.set(CLEAN, read)
