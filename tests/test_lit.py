# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lit tests, each as a pytest test. lit runs once, on all that were selected, in parallel.

In a distributed run this file must stay with one worker (``--dist loadfile``), or each would run lit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIT_FOLDERS = ("dialect", "kv-opt", "lowering", "pipeline", "python")
SUFFIXES = (".mlir", ".test", ".py")
FILES = sorted(
    path.relative_to(HERE).as_posix()
    for folder in LIT_FOLDERS
    for path in (HERE / folder).rglob("*")
    if path.suffix in SUFFIXES
    and not path.name.startswith((".", "test_"))
    and not {"Inputs", "__pycache__"} & set(path.relative_to(HERE).parts)
)
PASSED = ("PASS", "XFAIL", "FLAKYPASS")
SECONDS_PER_TEST = 120
ANSWERS = "lowering/answers.test"  # which runs many of the passes' kernels together


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Results by file, of one run of lit on the selected files."""
    items = (item for item in request.session.items if getattr(item, "originalname", None) == "test_lit")
    files = [item.callspec.params["file"] for item in items]
    folder = tmp_path_factory.mktemp("lit")
    report = folder / "report.json"
    lit = "from lit.main import main; main()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", lit, "--verbose", f"-j{len(os.sched_getaffinity(0))}"),
            *(f"--timeout={SECONDS_PER_TEST}", f"--param=exec_root={folder / 'exec'}", f"--output={report}"),
            *(["--param=answers=together"] if ANSWERS in files else []),
            *(str(HERE / file) for file in files),
        ],
        capture_output=True,
        text=True,
    )
    if not report.is_file():
        pytest.fail(f"lit did not run:\n{done.stdout}\n{done.stderr}", pytrace=False)
    tests = json.loads(report.read_text())["tests"]
    return {test["name"].partition(" :: ")[2]: test for test in tests}


@pytest.mark.parametrize("file", FILES)
def test_lit(results, file):
    assert file in results, "lit does not take this file for a test"
    found = results[file]
    if found["code"] == "UNSUPPORTED":
        pytest.skip(found["output"].strip().splitlines()[-1] if found["output"].strip() else "unsupported here")
    if found["code"] not in PASSED:
        pytest.fail(f"{found['code']}\n{found['output']}", pytrace=False)
