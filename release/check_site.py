# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check a site: every link leads to a page and an anchor that are there, and no page fetches from elsewhere.

python release/check_site.py FOLDER (make site)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHES = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
_NOT_FETCHED = {"canonical", "search", "index", "next", "prev", "genindex"}  # kinds of <link>


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        target = given.get(_FETCHES.get(tag, ""))
        if target and given.get("rel") not in _NOT_FETCHED:
            self.fetched.append(target)


def problems(site: Path) -> Iterator[str]:
    """What is wrong with the pages of a folder, a line each."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = found = _Page()
        found.feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in [*page.links, *page.fetched]:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in page.fetched and url.scheme != "data":
                    yield f"{name} fetches {target}"
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not file.is_file():
                yield f"{name} links to {target}, which is not there"
            elif url.fragment and file in pages and unquote(url.fragment) not in pages[file].ids:
                yield f"{name} links to {target}, which has no such anchor"


def main(folder: str) -> int:
    site = Path(folder)
    count = sum(1 for _ in site.rglob("*.html"))
    if not count:
        print(f"{folder} has no pages", file=sys.stderr)
        return 1
    found = list(problems(site))
    print("\n".join(found) or f"{count} pages, whose links lead somewhere: {site / 'index.html'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
