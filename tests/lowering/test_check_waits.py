# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Waits for barriers under checks: a kernel that would hang says for what."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvarn as kv

NUMBERS = kv.Buffer[kv.i32, 1]


@kv.kernel(block=32)
def stuck(out: kv.Buffer[kv.i32, 1]):
    barrier = kv.shared(1, kv.i64, alignment=8)
    if kv.thread_id.x == 0:
        kv.mbarrier_init(barrier.ptr(0), 1)
        kv.fence_mbarrier_init()
    kv.barrier()
    kv.mbarrier_wait(barrier.ptr(0), 0, name="a copy that nobody starts")
    out[0] = 1


def test_a_checked_wait_names_what_it_waits_for_and_the_line():
    ptx = kv.compile(stuck, NUMBERS, target="sm_90a", check=True).asm["ptx"]
    data = re.findall(r"__assert\w*|\.b8 assert_message\w*\[\d+\] = \{([^}]*)\}", ptx)
    text = "".join("".join(chr(int(x)) for x in found.split(",") if int(x)) for found in data if found)
    assert re.search(r"test_check_waits\.py:\d+:\d+: waited 10 s for a copy that nobody starts", text), text


@pytest.mark.gpu
def test_a_checked_wait_ends_a_kernel_that_would_hang():
    script = """
        import kvarn as kv, torch
        from test_check_waits import NUMBERS, stuck
        out = torch.zeros(1, dtype=torch.int32, device="cuda")
        kv.compile(stuck, NUMBERS, check=True, options={"check-kv-waits": "seconds=1"})[1, 32](out)
        torch.cuda.synchronize()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    assert done.returncode
    assert "waited 1 s for a copy that nobody starts" in done.stdout + done.stderr
