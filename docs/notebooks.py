# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write the notebooks of docs/tutorial from its pages: make docs, or python docs/notebooks.py [--check]

A page's blocks marked ``python`` become cells of code, everything between them cells of text. ``--check`` writes
nothing and fails when a notebook is not what it would write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "tutorial"
_CODE = re.compile(r"^```python\n(.*?)^```\n", re.S | re.M)


def cells(page: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of a page's cells, in order; the kind is ``"markdown"`` or ``"code"``."""
    parts = _CODE.split(page)  # text, code, text, code, ..., text
    for number, part in enumerate(parts):
        if part.strip():
            yield "code" if number % 2 else "markdown", part.strip("\n")


def notebook(page: str) -> str:
    """The text of a page's notebook, in version 4.5 of the format."""
    found: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the notebooks of docs/tutorial from its pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a notebook is out of date")
    check = parser.parse_args().check
    made = {page.with_suffix(".ipynb"): notebook(page.read_text(encoding="utf-8")) for page in FOLDER.glob("*.md")}
    old = [p for p, text in made.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    gone = [p for p in FOLDER.glob("*.ipynb") if p not in made]
    if check:
        if old or gone:
            print(f"out of date: {', '.join(sorted(p.name for p in old + gone))}: run make docs", file=sys.stderr)
        return int(bool(old or gone))
    for path in gone:
        path.unlink()
    for path in old:
        path.write_text(made[path], encoding="utf-8")
        print(f"wrote {path.relative_to(FOLDER.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
