# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations of other packages: those of examples/page_tools, installed by entry points, as docs/extending.md has it.

What they declare stays declared, so that all of it happens in other processes (`extending_worker`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "page_tools"
WORKER = Path(__file__).with_name("extending_worker.py")
_FUNCTIONS = re.findall(r"^@rule\ndef (\w+)\(", WORKER.read_text(), re.M)


def install(folder: Path, entry_points: str, package: Path = PACKAGE) -> dict[str, str]:
    """What installing a package leaves in ``folder``; the environment of a process that finds it."""
    info = folder / "page_tools-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: page-tools\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entry_points)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder), str(package)])
    return {**os.environ, "PYTHONPATH": path.lstrip(os.pathsep), "KVARN_CACHE_DIR": str(folder / "cache")}


def entry_points(package: Path = PACKAGE) -> str:
    """The entry points of the package's pyproject.toml, in the form that an installer writes."""
    text = (package / "pyproject.toml").read_text()
    found = re.findall(r'^\[project\.entry-points\."(.+?)"\]\n((?:.+\n)+)', text, re.M)
    assert {group for group, _ in found} == {"kvarn.extensions", "kvarn.passes"}
    return "\n".join(f"[{group}]\n{lines}" for group, lines in found).replace('"', "")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extending")
    environment = install(folder, entry_points())
    done = subprocess.run([sys.executable, WORKER], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_page_shows_the_package_as_it_is():
    """Every block of Python on the page is in a file of the package, to the letter."""
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```(?:python sketch|toml)\n(.*?)^```$", page, re.S | re.M)
    files = "\n\n".join(p.read_text() for p in [*sorted(PACKAGE.rglob("*.py")), PACKAGE / "pyproject.toml"])
    assert len(blocks) > 6
    for block in blocks:
        assert block in files, block


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_extending(function, outcomes):
    assert not outcomes[function], outcomes[function]


MOVED = {  # modules that the package imports, and what they were called
    "kvarn.lowering.kernels": "kvarn.lowering.expand",
    "kvarn.lowering.kernels.base": "kvarn.lowering.expand.base",
    "kvarn.lowering.rewrite_counts": "kvarn.lowering.rewrites",
    "kvarn.lowering.passes.kv": "kvarn.lowering",
}
OLD = (
    "kv_opt_knows_an_installed_operation",
    "a_rule_may_make_kv_operations_and_knows_the_target",
    "an_operation_of_a_package_runs_on_the_host_and_in_the_emulator",
    "its_pass_counts_in_launches_and_operations",
    "caches_of_a_kind_of_a_package_are_read_and_written",
)


def test_the_package_runs_as_it_was_before_modules_moved(tmp_path):
    """It imports modules of lowering/ by names that they had, each with a warning, and is otherwise the same."""
    package = tmp_path / "old"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    for file in package.rglob("*.py"):
        text = file.read_text()
        for name, was in MOVED.items():
            text = text.replace(f"from {name} import", f"from {was} import")
        file.write_text(text)
    assert [file.name for file in package.rglob("*.py") if "lowering.expand" in file.read_text()] == ["bounds.py"]
    environment = install(tmp_path, entry_points(package), package)
    for warned in ("error", "always"):
        environment["PYTHONWARNINGS"] = f"{warned}::DeprecationWarning"
        command = [sys.executable, WORKER, *(OLD if warned == "always" else OLD[:1])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outcomes = json.loads(done.stdout.splitlines()[-1])
        if warned == "error":
            assert "DeprecationWarning: kvarn.lowering." in outcomes[OLD[0]]
        else:
            assert not any(outcomes.values()), "\n".join(outcomes.values())


def test_the_package_tests_its_pass_in_two_run_lines(tmp_path):
    """`lit tests`, as an author runs it: one line for the IR, one for the kernel's answers."""
    command = [sys.executable, "-c", "from lit.main import main; main()", "-v", PACKAGE / "tests"]
    environment = install(tmp_path, entry_points())
    done = subprocess.run(
        [*command, f"-Dexec_root={tmp_path}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: page-tools :: drop_prefetches.mlir" in done.stdout
    lines = [line for line in (PACKAGE / "tests" / "drop_prefetches.mlir").read_text().splitlines() if "RUN:" in line]
    assert ["--check-semantics-of=drop-prefetches" in line for line in lines] == [False, True]
    assert "\n".join(lines) in (ROOT / "docs" / "testing-passes.md").read_text()


@pytest.mark.parametrize("setting", ["", "0"])
def test_a_package_whose_extension_fails_is_named_or_left_out(tmp_path, setting):
    environment = install(tmp_path, "[kvarn.extensions]\nbroken = no_such_module\n")
    (tmp_path / "f.mlir").write_text("func.func @f() { return }")
    command = [sys.executable, "-m", "kvarn.tools.kv_opt", "f.mlir"]
    environment["KVARN_EXTENSIONS"] = setting
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if setting == "0":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    assert "extension 'broken' of page-tools 0.1 (no_such_module) cannot be loaded: ModuleNotFoundError" in done.stderr
    assert "KVARN_EXTENSIONS=0 leaves extensions out" in done.stderr
