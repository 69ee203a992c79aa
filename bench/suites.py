# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suites of the comparison with other libraries: python -m bench --suite NAME

A suite is one command of at most eight minutes on one GPU. It writes ``results/NAME.json``, with the machine, its
clocks and the commit, and the page ``results/NAME.md`` from it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import report
from .cases import RANGE, TABLE, Row

FOLDER = Path(__file__).with_name("results")
# The kinds of rows of each suite; the suite ``range`` has the rows of more shapes.
KINDS = {"decode": ("decode",), "append": ("append", "gather"), "mla": ("mla",), "prefill": ("prefill",)}
NAMES = (*KINDS, "range")


def rows_of(name: str) -> tuple[Row, ...]:
    """The rows of a suite."""
    return RANGE if name == "range" else tuple(row for row in TABLE if row.kind in KINDS[name])


def suite_of(row: Row) -> str:
    """The suite of a row."""
    return next(name for name in NAMES if row in rows_of(name))


def commit() -> str:
    """The commit of this checkout, with ``+`` after it if files differ; empty outside of a checkout."""
    try:
        done = [
            subprocess.run(["git", *command], cwd=FOLDER.parent, capture_output=True, text=True, check=True).stdout
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done[0].strip() + "+" * bool(done[1].strip())


def page(name: str, document: Mapping[str, Any]) -> str:
    """The page of a suite, from its JSON."""
    results = report.Results(document["records"])
    clocks = [f"{part} {results.machine[key]} MHz" for part, key in CLOCKS if results.machine.get(key)]
    made = f"`python -m bench --suite {name}`, commit {document.get('commit') or 'unknown'}"
    about = f"Written by {made}{', clocks after warming up: ' if clocks else ''}{', '.join(clocks)}."
    failed = [f"- {line}" for line in report.failures(results)]
    parts = [f"# Results: {name}", about, report.markdown(results, document["date"])]
    parts += ["## Without a result", "\n".join(failed)] if failed else []
    return "\n\n".join(parts) + "\n"


CLOCKS = (("multiprocessors", "sm_mhz"), ("memory", "memory_mhz"))


def write(name: str, document: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Write the JSON and the page of a suite; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text(page(name, document))
    return path
