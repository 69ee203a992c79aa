# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stages as files, and reproducers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from kvarn.env import env
from kvarn.errors import KernelError

F32 = kv.Buffer[kv.f32, 1]


@kv.kernel
def triple(x: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    x[i] = x[i] * 3.0


def stage_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- dumps and overrides -------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "last"), [("sm_80", "emit_ptx.ptx"), ("host", "convert_to_llvm.mlir")])
def test_every_stage_is_written(tmp_path, target, last):
    with env.override(dump_to=str(tmp_path)):
        kernel = kv.compile(triple, F32, target=target)
    (folder,) = tmp_path.iterdir()
    assert re.fullmatch(rf"triple-{target}-[0-9a-f]{{8}}", folder.name)
    files = stage_files(folder)
    assert files[:2] == ["00_input.mlir", "01_verify_kv.mlir"]
    assert [int(f[:2]) for f in files] == list(range(len(files)))
    assert files[-1] == f"{len(files) - 1:02d}_{last}"
    assert (folder / files[0]).read_text() == kernel.asm["kv"]
    if target == "sm_80":
        assert (folder / files[-1]).read_text() == kernel.asm["ptx"]


def test_a_kernel_that_is_in_the_cache_is_written_too_and_to_the_same_folder(tmp_path):
    kv.compile(triple, F32, target="sm_80")
    for _ in range(2):
        with env.override(dump_to=str(tmp_path)):
            kv.compile(triple, F32, target="sm_80")
            kv.compile(triple, F32, target="sm_90a")
    assert len(list(tmp_path.iterdir())) == 2


def test_an_edited_stage_is_used(tmp_path, capsys):
    dumps, edits = tmp_path / "dumps", tmp_path / "edits"
    with env.override(dump_to=str(dumps)):
        kv.compile(triple, F32, target="host")
    (folder,) = dumps.iterdir()
    file = next(p for p in folder.iterdir() if p.name.endswith("_plan_kv_access.mlir"))
    edited = edits / folder.name / file.name
    edited.parent.mkdir(parents=True)
    edited.write_text(file.read_text().replace("3.0", "5.0"))
    with env.override(override_dir=str(edits), dump_to=str(tmp_path / "again")):
        kernel = kv.compile(triple, F32, target="host")
    assert f"kvarn: triple-host takes {edited}" in capsys.readouterr().err
    x = np.ones(4, np.float32)
    kernel[1, 4](x)
    assert x.tolist() == [5.0] * 4
    again = (tmp_path / "again" / folder.name / file.name).read_text()
    assert "5.0" in again
    # It is not kept: without the variable the kernel is the old one.
    x = np.ones(4, np.float32)
    kv.compile(triple, F32, target="host")[1, 4](x)
    assert x.tolist() == [3.0] * 4


def test_a_mistake_in_an_edited_stage_points_into_the_file(tmp_path):
    with env.override(dump_to=str(tmp_path)):
        kv.compile(triple, F32, target="sm_80")
    (folder,) = tmp_path.iterdir()
    for path in folder.iterdir():
        if path.name != "01_verify_kv.mlir":
            path.unlink()
    stage = folder / "01_verify_kv.mlir"
    stage.write_text(stage.read_text().replace("arith.mulf", "arith.mull"))
    with (
        env.override(override_dir=str(tmp_path)),
        pytest.raises(KernelError, match=r"01_verify_kv\.mlir:\d+:\d+: error"),
    ):
        kv.compile(triple, F32, target="sm_80")


# --- reproducers ---------------------------------------------------------------------------------


@kv.kernel
def barrier(x: kv.Buffer[kv.f32, 1]):
    x[0] = 1.0
    kv.barrier()


def kv_opt(*arguments):
    return subprocess.run([sys.executable, "-m", "kvarn.tools.kv_opt", *arguments], capture_output=True, text=True)


def test_a_failure_leaves_a_reproducer(tmp_path):
    path = tmp_path / "barrier.mlir"
    with pytest.raises(KernelError) as caught:
        kv.compile(barrier, F32, target="host", reproducer=path)
    command = f"kv-opt {path} --run-reproducer"
    assert f"reproduce it with: {command}" in str(caught.value)
    assert path.read_text().splitlines()[0] == f"// {command}"
    done = kv_opt(*command.split()[1:])
    assert done.returncode == 1
    line = barrier.location.line + 3
    assert f"{__file__}:{line}:5: error: 'gpu.barrier' op needs the threads of a block to run together" in done.stderr
