# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CONTRIBUTING's list of files to touch is whole: one of each kind that there is is spoken of in those files alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# By what is added: one that there is, as sources speak of it, and files that say more of this one than is needed.
EXAMPLES = {
    "an operation of tier 2": (r"\bis_empty\b", {"dialect/layout.py", "dialect/page_orders.py"}),  # kinds without it
    "an operation of tier 1": (r"\bstore_padded\b", {"dialect/schedules.py"}),  # what its schedule may say
    "a pass": (r"\breverse[-_]kv[-_]loops\b", set()),
    "a kind of cache": (  # and its collections, random ones, and its place among PyTorch's operands
        r"\bContinuousBatchingKVCache\b|\bPAGED, CONTINUOUS\b",
        {f"python/kvarn/{name}.py" for name in ("caches/collections", "tools/random_inputs", "torch/handles")},
    ),
}


def listed(what: str) -> dict[str, re.Pattern[str]]:
    """The files that CONTRIBUTING lists for something; a <name> in one is any."""
    rows = dict(re.findall(r"^\| (an? [^|]*?) \| ([^|]*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    names = re.findall(r"`((?:dialect|lowering|python)/[^`]*\.py)`", rows[what])
    return {name: re.compile(re.sub(r"<\w+>", r"\\w+", name.replace(".", r"\."))) for name in names}


@pytest.mark.parametrize("what", EXAMPLES)
def test_the_files_that_contributing_lists_are_those_that_are_touched(what):
    word, more = EXAMPLES[what]
    files = (path for folder in ("dialect", "lowering", "python/kvarn") for path in (ROOT / folder).rglob("*.py"))
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    touched = {
        name
        for name, path in names.items()
        if not name.startswith(("python/kvarn/dialect/", "python/kvarn/lowering/"))  # links to the folders
        and re.search(word, name + "\n" + path.read_text())
    }
    patterns = listed(what)
    assert not [name for name in touched - more if not any(p.fullmatch(name) for p in patterns.values())]
    assert not [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, touched))]
