# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every case starts with no launches recorded, no current context and no torch."""

import os
import sys

import pytest

import kvarn.runtime

_folder = os.environ.get("FAKE_NATIVE")  # of a native part, "" for none, or nothing for whatever there is
if _folder:
    kvarn.runtime.__path__.insert(0, _folder)
elif _folder == "":
    sys.modules["kvarn.runtime._launches"] = None  # type: ignore[assignment]

from kvarn.runtime import streams  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    from fakes import LIBRARY  # found where the cases run, not where this folder is only looked through

    LIBRARY.fake_reset()
    monkeypatch.setattr(streams, "_torch_stream", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
