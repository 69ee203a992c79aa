# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The documentation as a site: make site. Sphinx reads the pages as they are on disk, README and CHANGELOG with them.

The navigation is what docs/index.md says: its headings are sections, its links the pages, in order.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
INDEX = "docs/index"

project = "kvarn"
version = release = re.findall(
    r'^__version__ = "(.*)"', (DOCS.parent / "python" / "kvarn" / "_version.py").read_text(), re.M
)[0]
copyright = "the kvarn authors; Apache-2.0 with LLVM exceptions"

extensions = ["myst_parser"]
root_doc = INDEX
include_patterns = ["docs/**.md", "*.md", "bench/RESULTS.md"]
myst_heading_anchors = 4  # as GitHub makes them
highlight_language = "none"  # of indented blocks, which are shells

html_theme = "furo"
html_title = f"kvarn {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def sections(index: str) -> dict[str, list[str]]:
    """The documents of each section of the index by its heading, each document once, in order."""
    found: dict[str, list[str]] = {}
    seen, heading = {INDEX}, ""
    for line in index.splitlines():
        if title := re.match(r"## (.*)", line):
            heading = title[1]
        for target in re.findall(r"\]\(([^)#\s]+)\.md(?:#[^)]*)?\)", line):
            document = posixpath.normpath(posixpath.join("docs", target))
            if document not in seen:
                seen.add(document)
                found.setdefault(heading, []).append(document)
    return found


def toctrees(index: str) -> str:
    """The hidden tables of contents that make the navigation."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(f"/{d}" for d in documents) + "\n```\n"
        for title, documents in sections(index).items()
    )


def _navigation(app: Any, document: str, content: list[str]) -> None:
    if document == INDEX:
        content[0] += toctrees(content[0])


def _front(app: Any, error: Exception | None) -> None:
    """The site's own address leads to the index."""
    if error is None:
        Path(app.outdir, "index.html").write_text(
            f'<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={INDEX}.html">'
            f'<title>kvarn</title><a href="{INDEX}.html">kvarn</a>\n'
        )


def setup(app: Any) -> None:
    from pygments.lexers.special import TextLexer

    app.add_lexer("mlir", TextLexer)  # Pygments has none for it
    app.connect("source-read", _navigation)
    app.connect("build-finished", _front)
