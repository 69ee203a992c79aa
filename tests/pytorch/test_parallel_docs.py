# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The programs of examples/parallel, which docs/parallel.md shows, run under torchrun on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "parallel"
SAYS = {
    "decode": ("rank 0: 502 of 1003 tokens in a pool for 640", "rank 1: 501 of 1003 tokens in a pool for 640"),
    "migrate": (),
    "late": ("HeadParallel.gather: rank 1 of [0, 1] did not come within 2 s: dead, or late",) * 2,
}


def test_every_program_is_tested():
    assert sorted(SAYS) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", SAYS)
def test_a_program_runs_and_prints_what_the_page_says(name):
    script = str(EXAMPLES / f"{name}.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    for line in set(SAYS[name]):
        assert found.stdout.count(line) == SAYS[name].count(line), found.stdout
