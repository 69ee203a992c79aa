# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The code of docs/dsl.md runs, as one file; the names that it lists exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import kvarn as kv
from kvarn.dsl import ptx

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dsl.md"


def test_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks))
    found = runpy.run_path(str(file))
    assert ".entry row_sums(" in found["text"]
    x, out = found["np"].array([30, 15], "int32"), found["np"].zeros(1, "int32")
    found["functional"][1, 1](x, out)
    assert out.tolist() == [5]


def test_names_of_the_page_exist():
    for name in re.findall(r"`kv\.(\w+)", PAGE.read_text()):
        assert hasattr(kv, name), name
    listed = PAGE.read_text().partition("PTX intrinsics")[2].partition("##")[0]
    for name in re.findall(r"`(\w+)`", listed):
        assert name in ptx.__all__, name
