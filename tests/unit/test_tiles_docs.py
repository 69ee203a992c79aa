# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The code of docs/tiles.md runs, as one file; the names that it lists exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import kvarn as kv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiles.md"


def test_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks))
    found = runpy.run_path(str(file))
    assert ".entry attention(" in found["ptx"]["attention"]


def test_names_of_the_page_exist():
    for name in re.findall(r"`kv\.(\w+)\(", PAGE.read_text()):
        assert hasattr(kv, name), name
