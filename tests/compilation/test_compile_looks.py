# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What one looks at while working: notebooks, stages by name, source lines in PTX, buffers declared read-only."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from kvarn.errors import KernelError

F32 = kv.Buffer[kv.f32, 1]


def helper(v):
    return v * 2.0


@kv.kernel
def lines(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    v = helper(x[i])
    out[i] = v + 1.0  # LAST


# --- notebooks -----------------------------------------------------------------------------------


@kv.kernel
def wrong(x: kv.Buffer[kv.f32, 1]):
    x.laod(0)


def test_a_notebook_shows_the_message_and_not_the_front_end(monkeypatch):
    with pytest.raises(KernelError) as caught:
        kv.compile(wrong, F32, target="host")
    shown = caught.value._render_traceback_()
    assert shown == [f"KernelError: {caught.value}"]
    assert re.search(
        r"test_compile_looks.py:\d+:5: error: .*has no attribute 'laod'; did you mean 'load'\?\n    x.laod", shown[0]
    )
    monkeypatch.setenv("KVARN_DEBUG", "1")
    with pytest.raises(NotImplementedError):  # IPython takes this for: write it yourself
        caught.value._render_traceback_()


def test_code_and_stages_show_an_overview_and_complete_their_names():
    kernel = kv.compile(lines, F32, F32, target="sm_90a")
    assert repr(kernel.asm) == "<stages of a kernel for sm_90a: kv, gpu, nvvm, llvm, ptx, cubin, sass>"
    assert kernel.asm._ipython_key_completions_() == ["kv", "gpu", "nvvm", "llvm", "ptx", "cubin", "sass"]
    assert kernel.stages._ipython_key_completions_() == list(kernel.stages)
    rows = repr(kernel.stages).splitlines()
    assert rows[0] == "<stages of lines for sm_90a, with the lines of each:"
    assert re.fullmatch(r"  input +\d+", rows[1])
    assert re.fullmatch(r"  verify-kv +\d+  \(unchanged\)", rows[2])
    assert len(rows) == 1 + len(kernel.stages)
    with pytest.raises(
        KeyError, match=r"stages of lines for sm_90a are input, .*; got 'hoist-kv-lookup'; did you mean"
    ):
        kernel.stages["hoist-kv-lookup"]
    with pytest.raises(KeyError, match="got 'sas'; did you mean 'sass'"):
        kernel.asm["sas"]


# --- source lines ----------------------------------------------------------------------------------


def locs(ptx: str) -> list[int]:
    return [int(line) for line in re.findall(r"^\s*\.loc\s+\d+ (\d+) ", ptx, re.M)]


def test_lineinfo_writes_the_kernels_lines_into_the_ptx():
    kernel = kv.compile(lines, F32, F32, target="sm_90a", lineinfo=True)
    ptx = kernel.asm["ptx"]
    source = Path(__file__).read_text().splitlines()
    assert source.index("    out[i] = v + 1.0  # LAST") + 1 in locs(ptx)
    assert f'.file\t1 "{__file__}"' in ptx
    plain = kv.compile(lines, F32, F32, target="sm_90a").asm["ptx"]
    assert locs(plain) == []

    def code(text: str) -> list[str]:
        return [line for line in text.splitlines() if re.match(r"\s+[a-z@]", line) and ";" in line]

    assert code(ptx) == code(plain)


# --- read-only buffers -----------------------------------------------------------------------------


def test_a_buffer_declared_read_only_keeps_the_read_only_path_beside_one_that_is_written():
    def copied(x, out):
        out[kv.thread_id.x] = x[kv.thread_id.x]

    @kv.kernel
    def declared(x: kv.ReadOnlyBuffer[kv.f32, 1], out: F32):
        copied(x, out)

    @kv.kernel
    def undeclared(x: F32, out: F32):
        copied(x, out)

    def invariant(kernel, **options):
        return "invariant" in kv.compile(kernel, F32, F32, target="sm_90a", **options).asm["llvm"]

    assert invariant(declared)
    assert not invariant(undeclared)
    assert not invariant(declared, options={"plan-kv-access": "read-only=false"})
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    x.setflags(write=False)
    declared[1, 4](x, out)
    np.testing.assert_array_equal(out, x)


def test_an_array_that_an_address_only_reads_is_not_written():
    """A read-only array may be given for it. What a loop carries might be any address."""

    @kv.kernel
    def copy(x: F32, y: F32, z: F32, w: F32):
        i, s = kv.thread_id.x, kv.shared(128, kv.f32)
        kv.cp_async(s.ptr(4 * i), x.address(4 * i) + 16)
        kv.cp_async_commit()
        kv.cp_async_wait(0)
        y.address(i).store(s[i] + z.address(i).load(kv.f32))
        at = w.address(i)
        for _ in range(2):
            at = at + 4
        s[i] = at.load(kv.f32)

    made = kv.compile(copy, F32, F32, F32, F32, target="sm_90a")
    assert [a.written for a in made.artifact.entries[0].args] == [False, True, False, True]
