# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suites of the comparison with other libraries: python -m bench --suite NAME

A suite is one command of at most eight minutes on one GPU. It writes ``results/NAME.json``, with the machine, its
clocks and the commit, and the page ``results/NAME.md`` from it. ``python -m bench.suites`` writes the pages, the
measured part of RESULTS.md and the figures of README from the files of ``results``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import engine_rows, report
from .cases import RANGE, TABLE, Row

FOLDER = Path(__file__).with_name("results")
# The kinds of rows of each suite; the suite ``range`` has the rows of more shapes.
KINDS = {
    "decode": ("decode",), "append": ("append", "gather"), "mla": ("mla",), "prefill": ("prefill",),
    "mixed": ("mixed",),
}  # fmt: skip
NAMES = (*KINDS, "range")
# The rows of README.
SHOWN = (
    "b64_c4k_fp8",
    "b16_c8k_fp8",
    "b64_c4k",
    "app_n8192_prefill_fp8_rope",
    "mla_b64_c4k_h128_q8",
    "pf_b8_s4k",
    "pf_b8_s4k_d192",
)
README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
WORDS = {
    "decode fp8": "decode over fp8 caches", "decode bf16": "decode over bf16 caches", "append": "append",
    "mixed bf16": "mixed batches", "mixed fp8": "mixed batches over fp8 caches",
}  # fmt: skip


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


def clocks_of(machine: Mapping[str, Any]) -> str:
    """The clocks of a run, after warming up; empty if they were not read."""
    return ", ".join(f"{part} {machine[key]} MHz" for part, key in CLOCKS if machine.get(key))


def page(name: str, document: Mapping[str, Any]) -> str:
    """The page of a suite, from its JSON."""
    results = report.Results(document["records"])
    clocks = clocks_of(results.machine)
    made = f"`python -m bench --suite {name}`, commit {document.get('commit') or 'unknown'}"
    about = f"Written by {made}{', clocks after warming up: ' if clocks else ''}{clocks}."
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


# --- RESULTS.md and README ---------------------------------------------------------------------------


def documents(folder: Path = FOLDER) -> dict[str, Any]:
    """What the suites of RESULTS.md wrote, by name, as far as their files exist."""
    files = {name: folder / f"{name}.json" for name in KINDS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def merged(found: Mapping[str, Mapping[str, Any]]) -> report.Results:
    """The records of several suites; of each ceiling the best right measurement."""
    records, ceilings = [], {}
    for document in found.values():
        for record in document["records"]:
            if record.get("kind") != "ceiling":
                records.append(record)
                continue
            key = record["case"], record["who"]
            if key not in ceilings or _quality(record) > _quality(ceilings[key]):
                ceilings[key] = record
    return report.Results([*ceilings.values(), *records])


def _quality(ceiling: Mapping[str, Any]) -> tuple[bool, float, float]:
    return bool(ceiling["ok"]), ceiling.get("rate") or 0.0, -(ceiling.get("us") or 0.0)


def fastest(results: report.Results) -> str:
    """The number of rows in which kvarn is the fastest, and the names of the rows in which it is not."""
    rows = [row for row in results.rows if results.ours(row) is not None and results.peers(row)]
    slower = [row for row in rows if results.ours(row)["us"] > results.peers(row)[0]["us"]]
    text = f"kvarn is the fastest in {len(rows) - len(slower)} of {len(rows)} rows of [the results](bench/RESULTS.md)."
    return text + (f" The others are: {'; '.join(row.title for row in slower)}." if slower else "")


def figures(results: report.Results) -> str:
    """The figures of README: one table, fp8 first, and the number of rows in which kvarn is the fastest."""
    lines = [("row", "kvarn", "fastest other", "library", "suite")]
    for row in sorted((row for row in results.rows if row.name in SHOWN), key=lambda row: SHOWN.index(row.name)):
        ours, peers = results.ours(row), results.peers(row)
        if ours is not None and peers:
            best = peers[0]
            lines.append((row.title, f"{ours['us']:.2f}", f"{best['us']:.2f}", best["who"], suite_of(row)))
    return f"{report.table(lines, True)}\n\n{fastest(results)}"


def measured(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The measured part of RESULTS.md: which run each suite is of, and the tables."""
    results, runs = merged(found), []
    for name, document in found.items():
        clocks = clocks_of(report.Results(document["records"]).machine)
        commit, after = document.get("commit") or "unknown", f", clocks after warming up: {clocks}" if clocks else ""
        runs.append(f"- `python -m bench --suite {name}`: {document['date']}, commit {commit}{after}")
    means = [f"{WORDS[group]} {mean[0]:.3f}" for group in WORDS if (mean := results.mean_ratio(group)) is not None]
    short = f"Geometric means of kvarn's time over that of the fastest other library: {', '.join(means)}."
    dates = sorted({document["date"] for document in found.values()})
    tables = report.markdown(results, " and ".join(dates))
    return "\n\n".join(["\n".join(runs), *([short] if means else []), tables])


def replaced(text: str, marks: tuple[str, str], new: str) -> str:
    """A text with what is between two marks replaced; ValueError if it does not have both."""
    pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.S)
    if not pattern.search(text):
        raise ValueError(f"the text must have the lines {marks[0]} and {marks[1]}")
    return pattern.sub(lambda _: f"{marks[0]}\n\n{new}\n\n{marks[1]}", text)


def regenerated(folder: Path = FOLDER, results: Path = report.RESULTS, readme: Path = README) -> dict[Path, str]:
    """The text of every page, and with a suite of RESULTS.md, of that file and of README."""
    files = (folder / f"{name}.json" for name in NAMES)
    pages = {file.with_suffix(".md"): page(file.stem, json.loads(file.read_text())) for file in files if file.is_file()}
    engine = folder / "engine.json"
    if engine.is_file():
        document = json.loads(engine.read_text())
        pages[engine.with_suffix(".md")] = engine_rows.page(
            document, clocks_of(report.Results(document["records"]).machine)
        )
    found = documents(folder)
    if not found:
        return pages
    return {
        **pages,
        results: replaced(results.read_text(), (report.BEGIN, report.END), measured(found)),
        readme: replaced(readme.read_text(), (BEGIN, END), figures(merged(found))),
    }


def main() -> int:
    texts = regenerated()
    if not texts:
        print(f"{FOLDER} has no suite's JSON: run python -m bench --suite NAME on a GPU", file=sys.stderr)
        return 1
    for path, text in texts.items():
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
