# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every case starts with no launches recorded, no current context and no torch."""

import sys

import pytest

from kvarn.runtime import streams


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    from fakes import LIBRARY  # found where the cases run, not where this folder is only looked through

    LIBRARY.fake_reset()
    monkeypatch.setattr(streams, "_torch_stream", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
