# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What an earlier kvarn made, or what was written for it, still serves: tests/compat has it as it was.

``triple.kvb`` and ``tune.json`` were saved, and the pass files were written, before the modules of lowering/ had the
names that they have now. test_extending.py runs a package with the names of then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from bench import identity
from bench.identity_programs import programs
from kvarn import dispatch
from kvarn.artifact.bundle import BundleError

FILES = Path(__file__).resolve().parents[1] / "compat"
KERNEL = FILES.parent / "kv-opt" / "Inputs" / "kernel.mlir"


def kv_opt(*arguments: object) -> str:
    """What kv-opt prints, in a process of its own: a pass that is loaded stays known."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kvarn.tools.kv_opt", KERNEL, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pass_file_of_before_runs():
    found = kv_opt(f"--load-pass={FILES / 'count_loads.py'}", "--count-loads")
    assert found.count("kv.loads = 1 : i32") == 1
    assert found.count("kv.loop_depth = 0 : i32") == 1


def test_a_pass_file_of_before_rewrites_in_the_pipeline():
    load = f"--load-pass={FILES / 'give_pages.py'}"
    where = ["--kv-pipeline", "--target=sm_90a", "--insert-before=hoist-kv-lookups=give-pages"]
    assert '"kv.page"' not in kv_opt(load, *where, "--stop-after=lower-kv-tiles")
    assert kv_opt(load, *where, "--stop-after=give-pages").count('"kv.page"') == 1


def test_a_bundle_of_before_runs_on_the_host_and_in_the_emulator():
    for target in ("host", "sm_90a"):
        kernel, x = kv.load(FILES / "triple.kvb", target=target), np.arange(4, dtype=np.float32)
        if target == "host":
            kernel[1, 4](x)
        else:
            kernel.emulate(1, 4, x)
        assert x.tolist() == [0, 3, 6, 9]


def test_a_bundle_of_another_version_is_refused_by_name_and_version(tmp_path, monkeypatch):
    monkeypatch.setattr("kvarn.artifact.bundle.VERSION", 2)
    with pytest.raises(BundleError, match=r"triple\.kvb has bundle version 1, this kvarn reads 2"):
        kv.load(FILES / "triple.kvb", target="host")


@pytest.mark.parametrize("program", ["small_decode", "small_prefill"])
def test_a_tune_file_of_before_counts(program, monkeypatch):
    """Its entries of decode and of tiles: schedules of two stages."""
    make = {name: make for name, _, make in programs()}[program]
    monkeypatch.setenv("KVARN_ALWAYS_COMPILE", "1")
    plain = dispatch.compile_operation(make("sm_90a")).artifact
    monkeypatch.setenv("KVARN_TUNE", str(FILES / "tune.json"))
    assert identity._digest(dispatch.compile_operation(make("sm_90a")).artifact) != identity._digest(plain)


def test_a_tune_file_of_another_version_is_refused_by_name(tmp_path, monkeypatch):
    document = json.loads((FILES / "tune.json").read_text())
    (tmp_path / "tune.json").write_text(json.dumps({**document, "version": 2}))
    monkeypatch.setenv("KVARN_TUNE", str(tmp_path / "tune.json"))
    make = {name: make for name, _, make in programs()}["small_decode"]
    with pytest.raises(ValueError, match=r'tune\.json must be an object with "version": 1'):
        dispatch.compile_operation(make("sm_90a"))
