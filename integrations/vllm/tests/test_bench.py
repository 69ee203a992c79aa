# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suite of layers as vLLM calls them measures right layers, and says which are wrong."""

from __future__ import annotations

import time

import pytest
from kvarn_vllm import backend

from kvarn.measure.arrays import arrays

pytest.importorskip("bench", reason="bench is of the repository, not of the package")
from bench import engine


@pytest.mark.parametrize("row", engine.SMALL, ids=[row.name for row in engine.SMALL])
def test_the_layers_of_the_suite_are_checked(row, monkeypatch):
    library = arrays("host")
    (found,) = engine.measure(library, row, ["kvarn"])
    assert found["ok"], found
    assert found["error"] <= engine.TOLERANCES[row.dtype, False]

    monkeypatch.setattr(backend, "tokens_before", lambda lens, starts, ends, out: out.copy_(lens + starts - ends - 1))
    (found,) = engine.measure(library, row, ["kvarn"])
    assert not found["ok"]


def test_a_backend_that_is_not_here_is_named():
    (found,) = engine.measure(arrays("host"), engine.SMALL[0], ["FLASHINFER"])
    assert not found["ok"]
    assert "Error" in found["note"]


def test_a_backend_that_is_late_is_given_up(monkeypatch):
    monkeypatch.setattr(engine, "SECONDS", 1)
    monkeypatch.setattr(engine, "_late", set())
    monkeypatch.setattr(engine.Contestant, "prepare", lambda self: time.sleep(60))
    began = time.monotonic()
    for _ in range(2):  # the second time at once
        (found,) = engine.measure(arrays("host"), engine.SMALL[0], ["kvarn"])
        assert found["note"] == "TimeoutError: not ready after 1 s"
    assert time.monotonic() - began < 30
