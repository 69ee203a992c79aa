# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pages of the documentation, their fenced blocks and their programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[tuple[int, str, str]]:
    """(first line, info string, code) of a page's fenced blocks."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 2, match[1].strip(), match[2]


def program(path: Path) -> str:
    """A page's runnable blocks as one program whose lines have the page's numbers."""
    lines: list[str] = []
    for first, info, code in blocks(path):
        if info == "python":
            lines += [""] * (first - 1 - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n" if lines else ""
