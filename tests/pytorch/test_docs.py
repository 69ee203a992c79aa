# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The code of docs/pytorch.md runs, as one file."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def test_code_of_the_page_runs_and_prints_what_it_says(tmp_path, capsys):
    torch._dynamo.reset()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks))
    runpy.run_path(str(file))
    assert capsys.readouterr().out.splitlines() == [line[2:] for line in blocks[2].splitlines() if line[:3] == "# ["]
