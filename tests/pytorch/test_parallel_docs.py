# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The scripts of docs/parallel.md run under torchrun on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallel.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SAYS = (
    ("rank 0: 502 of 1003 tokens in a pool for 640", "rank 1: 501 of 1003 tokens in a pool for 640"),
    (),
    ("HeadParallel.gather: rank 1 of [0, 1] did not come within 2 s: dead, or late",) * 2,
)


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_page_runs_and_prints_what_it_says(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    for line in set(SAYS[number]):
        assert found.stdout.count(line) == SAYS[number].count(line), found.stdout
