# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What pages name is there: functions, modules, passes, variables, and the flags of the commands that they show."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarn import dsl
from kvarn.env import Environment
from kvarn.lowering import pipeline, registry
from kvarn.tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "RESULTS.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"]
CODE = re.compile(r"`([^`\n]+)`")
COMMANDS = ("compile", "explain", "ablate", "bisect", "trace", "tune", "demo", "cache", "doctor")
NO_TORCH = ("kv.parallel", "kvarn.parallel", "kvarn.torch")
# Operations and attributes of IR that are declared by nobody here: those of the examples, and what kernels carry.
IR_ONLY = {"same_page", "page_bounds", "prefetch_page", "collection", "irdl", "args", "schedule", "tiled", "inputs"}
IR_ONLY |= {"block", "cluster", "max_threads", "min_blocks", "max_registers"}


def texts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_of_the_library_is_there():
    operations = set(re.findall(r"`kv\.(\w+)`", (ROOT / "docs" / "reference" / "dialect.md").read_text()))
    missing = set()
    for page, text in texts():
        code = " ".join(CODE.findall(text))
        for name in re.findall(r"(?<![\w.\"-])kv\.([A-Za-z_][\w.]*\w)", code):
            first = name.partition(".")[0]
            if f"kv.{name}".startswith(NO_TORCH) or first in operations | IR_ONLY:
                continue
            if not resolves(f"kvarn.{name}"):
                missing.add((page, f"kv.{name}"))
        for name in re.findall(r"(?<![\w.])(kvarn\.[A-Za-z_][\w.]*\w)", code):
            if not name.startswith((*NO_TORCH, "kvarn.passes", "kvarn.extensions")) and not resolves(name):
                missing.add((page, name))
    assert not missing


def test_the_reference_has_every_function_of_the_kernel_language():
    reference = (ROOT / "docs" / "reference" / "language.md").read_text()
    found = {name: getattr(dsl, name) for name in dsl.__all__ if name != "DType"}
    functions = {name for name, value in found.items() if inspect.isfunction(value) and f"`kv.{name}(" not in reference}
    classes = {name for name, value in found.items() if inspect.isclass(value) and f"### `{name}`" not in reference}
    assert (functions, classes) == (set(), set())


def test_a_pass_is_one_of_the_pipeline():
    names = {*registry.NAMES, *(s.name for t in ("sm_90a", "host") for s in pipeline.default_steps(t, "ownership", 1))}
    missing = {(page, n) for page, t in texts() for n in re.findall(r"`((?:[a-z]+-)+kv(?:-[a-z0-9]+)+)[`{]", t)}
    assert sorted((page, n) for page, n in missing if n not in names) == []


def test_a_variable_is_one_of_the_environment():
    names = {v.name for v in Environment.variables()} | {"KVARN_NATIVE"}  # the last is of the build
    assert sorted({(p, n) for p, t in texts() for n in re.findall(r"KVARN_[A-Z_]*[A-Z]", t) if n not in names}) == []


def test_a_flag_is_one_of_the_command(capsys):
    known = {}
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        known[f"kvarn {command}"] = capsys.readouterr().out
    for file in (ROOT / "bench").glob("*.py"):
        known[f"python -m bench.{file.stem}"] = file.read_text() + (ROOT / "bench" / "standalone.py").read_text()
    known["python -m bench"] = (ROOT / "bench" / "__main__.py").read_text()
    wrong = set()
    for page, text in texts():
        for command, said in known.items():
            for line in re.findall(rf"{re.escape(command)}(?![\w.])([^\n`|]*)", text.replace("\\\n", " ")):
                wrong |= {(page, command, f) for f in re.findall(r"(?<![\w-])--[a-z][\w-]*", line) if f not in said}
    assert not wrong
