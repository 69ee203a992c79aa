# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What every target can do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kvarn import dispatch
from kvarn.lowering import kernels

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
programs = importlib.import_module("bench.identity_programs").programs


@pytest.mark.thorough
def test_every_operation_compiles_for_the_gpu_with_the_fewest_features():
    """A kernel uses what a target has: griddepcontrol, mbarriers and clusters are of later GPUs."""
    seen: set[str] = set()
    for name, _, make in programs():
        _, colon, op = name.rpartition(":")
        if colon and op not in seen:
            dispatch.compile_operation(make("sm_80"))
            seen.add(op)
    assert seen == set(kernels.operations())
