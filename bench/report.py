# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of measurements for the terminal and bench/RESULTS.md, and plots.

python -m bench.report results.json [--write bench/RESULTS.md] [--plot results.png]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import GROUP_GOALS, RANGE, SMALL, TABLE, Goal, Row
from .kvarn_rows import OPTIONS

NOT_OFFERED = "not offered"  # note of a row that a group of peers does not support
RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Record = dict[str, Any]


def table(lines: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """A table as text, from rows of cells; the first row is the header."""
    if markdown:
        shown = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([shown[0], "|" + "---|" * len(lines[0]), *shown[1:]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates: TB/s of reads and copies, TFLOP/s of products; None if not measured."""

    read: float | None = None
    copy: float | None = None
    matmul: float | None = None

    @staticmethod
    def of(records: Iterable[Record]) -> Ceilings:
        best: dict[str, float] = {}
        for r in records:
            if r.get("kind") == "ceiling" and r.get("ok") and r.get("rate") and r["case"] in ("read", "copy", "matmul"):
                best[r["case"]] = max(best.get(r["case"], 0.0), r["rate"])
        return Ceilings(**best)


def rate(record: Record, of: str) -> float:
    """The rate of a record in TB/s; for matmul and tflops, in TFLOP/s."""
    return (record["flops"] if of in ("matmul", "tflops") else record["bytes"]) / record["us"] / 1e6


def ceiling_of(row: Row) -> str:
    """The peak rate that a row's share refers to."""
    if row.goal is not None and row.goal.of in ("read", "copy", "matmul"):
        return row.goal.of
    if row.kind in ("decode", "sources", "tree"):
        return "read"
    return "matmul" if row.kind in ("mla", "prefill", "mixed", "functions") else "copy"


def share(record: Record, row: Row, ceilings: Ceilings) -> float | None:
    """The share of the row's peak rate that a measurement reaches; None without a peak rate."""
    of = ceiling_of(row)
    most = getattr(ceilings, of)
    return rate(record, of) / most if most else None


def reached(record: Record, goal: Goal | None, ceilings: Ceilings) -> bool | None:
    """Whether a goal is reached; None if it cannot be determined."""
    if goal is None:
        return None
    if goal.of == "us":
        return record["us"] <= goal.value
    if goal.of == "tflops":
        return rate(record, "tflops") >= goal.value
    most = getattr(ceilings, goal.of)
    return rate(record, goal.of) / most >= goal.value if most else None


class Results:
    """The records of a run, by row."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.ceilings = Ceilings.of(records)
        self.machine: Record = next((r for r in records if r.get("kind") == "machine"), {})
        known = {row.name: row for row in (*TABLE, *RANGE, *SMALL)}
        cases = {r["case"] for r in records if r.get("case") in known}
        self.rows = [row for row in known.values() if row.name in cases]

    def of(self, row: Row) -> list[Record]:
        return [r for r in self.records if r.get("case") == row.name and r.get("kind") == row.kind]

    def ours(self, row: Row) -> Record | None:
        """kvarn's correct measurement of a row."""
        return self.by(row, "kvarn")

    def by(self, row: Row, who: str) -> Record | None:
        """The correct measurement of a row by ``who``."""
        return next((r for r in self.of(row) if r["who"] == who and r["ok"] and r.get("us")), None)

    def peers(self, row: Row) -> list[Record]:
        """The peers' correct measurements, fastest first."""
        right = [r for r in self.of(row) if not r["who"].startswith("kvarn") and r["ok"] and r.get("us")]
        return sorted(right, key=lambda r: r["us"])

    def mean_ratio(self, group: str) -> tuple[float, int] | None:
        """Geometric mean of kvarn's time over the best peer's in a group, and the number of its rows."""
        logs = []
        for row in self.rows:
            ours, peers = self.ours(row), self.peers(row)
            if row.group == group and ours is not None and peers:
                logs.append(math.log(ours["us"] / peers[0]["us"]))
        return (math.exp(sum(logs) / len(logs)), len(logs)) if logs else None


def main_table(results: Results, markdown: bool = False) -> str:
    """One line per row: kvarn, its share of the peak rate, the goal, the best peer, the ratio."""
    lines = [("case", "kvarn µs", "rate", "of ceiling", "goal", "", "best peer", "µs", "kvarn / peer", "error")]
    for row in results.rows:
        ours, peers = results.ours(row), results.peers(row)
        peer = (peers[0]["who"], f"{peers[0]['us']:.2f}") if peers else ("", "")
        goal = str(row.goal) if row.goal else ""
        if ours is None:
            lines.append((row.title, "failed", "", "", goal, "", *peer, "", ""))
            continue
        of = ceiling_of(row)
        part = share(ours, row, results.ceilings)
        shown = "" if part is None else f"{100 * part:.1f}% of {of}"
        mark = {True: "✓", False: "✗", None: ""}[reached(ours, row.goal, results.ceilings)]
        ratio = f"{ours['us'] / peers[0]['us']:.3f}" if peers else ""
        unit = "TFLOP/s" if of == "matmul" else "TB/s"
        number = rate(ours, of)
        lines.append(
            (
                row.title,
                f"{ours['us']:.2f}",
                f"{number:.{3 if number < 100 else 0}f} {unit}",
                shown,
                goal,
                mark,
                *peer,
                ratio,
                f"{ours['error']:.1e}",
            )
        )
    return table(lines, markdown)


def peers_table(results: Results, markdown: bool = False) -> str:
    """All correct measurements in microseconds, one column per ``who``."""
    names = list(dict.fromkeys(r["who"] for row in results.rows for r in results.of(row) if r["ok"] and r.get("us")))
    names = sorted((n for n in names if n not in OPTIONS), key=lambda n: n != "kvarn")
    lines: list[Sequence[str]] = [("case", *names)]
    for row in results.rows:
        right = {r["who"]: f"{r['us']:.2f}" for r in results.of(row) if r["ok"] and r.get("us")}
        lines.append((row.title, *(right.get(name, "") for name in names)))
    return table(lines, markdown)


def options_table(results: Results, markdown: bool = False) -> str:
    """Effect of kvarn's schedule options: microseconds, and the ratio to the time without the option."""
    lines: list[Sequence[str]] = [("case", "kvarn µs", *(name.removeprefix("kvarn, ") for name in OPTIONS))]
    for row in results.rows:
        ours, found = results.ours(row), [results.by(row, name) for name in OPTIONS]
        if ours is not None and any(found):
            shown = [f"{r['us']:.2f} ({r['us'] / ours['us']:.3f}×)" if r else "" for r in found]
            lines.append((row.title, f"{ours['us']:.2f}", *shown))
    return table(lines, markdown) if len(lines) > 1 else ""


def ceilings_table(results: Results, markdown: bool = False) -> str:
    lines = [("ceiling", "how", "µs", "rate")]
    for r in results.records:
        if r.get("kind") == "ceiling":
            unit = "TFLOP/s" if r["case"] == "matmul" else "TB/s"
            figure = f"{r['rate']:.3f} {unit}" if r.get("rate") else ""
            lines.append(
                (
                    r["case"],
                    r["who"],
                    f"{r['us']:.2f}" if r.get("us") else "",
                    figure if r["ok"] else r.get("note", "wrong"),
                )
            )
    return table(lines, markdown)


def summary(results: Results) -> str:
    """Whether the overall goals are reached."""
    lines = []
    for group, goal in GROUP_GOALS.items():
        found = results.mean_ratio(group)
        if found is not None:
            mean, count = found
            rows = f"{count} row{'s' if count > 1 else ''}"
            lines.append(
                f"{group}: geometric mean of time over the best peer's {mean:.3f} ({rows}), "
                f"goal ≤ {goal} {'✓' if mean <= goal else '✗'}"
            )
    slower = []
    for row in results.rows:
        ours, peers = results.ours(row), results.peers(row)
        if ours is not None and peers and ours["us"] > peers[0]["us"]:
            slower.append(f"{row.title} ({ours['us'] / peers[0]['us']:.2f}×, {peers[0]['who']})")
    if any(results.peers(row) for row in results.rows):
        lines.append("slower than the best peer: " + ("; ".join(slower) or "never"))
    judged = [reached(r, row.goal, results.ceilings) for row in results.rows if (r := results.ours(row)) is not None]
    judged = [j for j in judged if j is not None]
    lines.append(f"goals reached: {sum(judged)} of {len(judged)}")
    return "\n".join(lines)


def failures(results: Results) -> list[str]:
    """One line per measurement without a correct result."""
    return [
        f"{r.get('case')}: {r['who']}: {r.get('note', 'failed')}"
        for r in results.records
        if r.get("kind") != "machine" and "who" in r and not r["ok"] and r.get("note") != NOT_OFFERED
    ]


def not_offered(results: Results) -> list[str]:
    """One line per group of peers with unsupported rows: their names."""
    rows: dict[str, list[str]] = {}
    for r in results.records:
        if r.get("note") == NOT_OFFERED:
            rows.setdefault(r["who"], []).append(r["case"])
    return [f"{who}: {', '.join(names)}" for who, names in rows.items()]


def text(results: Results) -> str:
    """The whole report for a terminal."""
    parts = [f"on {results.machine.get('device', 'an unknown machine')}", ceilings_table(results), main_table(results)]
    if any(results.peers(row) for row in results.rows):
        parts.append(peers_table(results))
    if options := options_table(results):
        parts.append(options)
    parts.append(summary(results))
    failed = failures(results)
    if failed:
        parts.append("without a result:\n" + "\n".join("  " + line for line in failed))
    if nothing := not_offered(results):
        parts.append(f"{NOT_OFFERED}:\n" + "\n".join("  " + line for line in nothing))
    return "\n\n".join(parts)


def markdown(results: Results, date: str) -> str:
    """The text between the marks of RESULTS.md."""
    m = results.machine
    about = [
        f"{name} {m[key]}"
        for name, key in (("driver of CUDA", "driver"), ("torch", "torch"), ("kvarn", "kvarn"))
        if m.get(key)
    ]
    parts = [
        f"Measured on {date}: {m.get('device', 'unknown')}"
        + (f" ({m['multiprocessors']} SMs)" if m.get("multiprocessors") else "")
        + (", " + ", ".join(about) if about else "")
        + ".",
        "## Ceilings",
        ceilings_table(results, True),
        "## Rows",
        main_table(results, True),
    ]
    if any(results.peers(row) for row in results.rows):
        parts += ["## Everyone, µs", peers_table(results, True)]
    if options := options_table(results, True):
        parts += ["## What options of the schedule cost", options]
    parts += ["## Summary", "\n".join(f"- {line}" for line in summary(results).splitlines())]
    return "\n\n".join(parts)


def write(results: Results, date: str, path: Path = RESULTS) -> None:
    """Replace the text between the marks of a file by the tables.

    Raises
    ------
    ValueError
        If the file has no marks.
    """
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} must have the lines {BEGIN} and {END} where the tables go")
    path.write_text(f"{before}{BEGIN}\n\n{markdown(results, date)}\n\n{END}{after}")


def plot(results: Results, path: Path) -> bool:
    """Plot shares of the peak rates as bars, kvarn next to the best peer; returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, ours, theirs, goals = [], [], [], []
    for row in results.rows:
        record, peers = results.ours(row), results.peers(row)
        part = share(record, row, results.ceilings) if record else None
        if part is None:
            continue
        names.append(row.title)
        ours.append(100 * part)
        theirs.append(100 * (share(peers[0], row, results.ceilings) or 0) if peers else 0)
        goals.append(100 * row.goal.value if row.goal and row.goal.of in ("read", "copy", "matmul") else None)
    if not names:
        return False
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.36 * len(names)))
    places = list(range(len(names)))
    axes.barh([p - 0.2 for p in places], ours, 0.4, label="kvarn")
    axes.barh([p + 0.2 for p in places], theirs, 0.4, label="best peer", color="0.7")
    axes.plot(
        [g for g in goals if g],
        [p - 0.2 for p, g in zip(places, goals, strict=True) if g],
        "k|",
        markersize=12,
        label="goal",
    )
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the ceiling")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="output of python -m bench --json")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help="write the tables to a file (default: bench/RESULTS.md)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the shares of the peak rates")
    options = parser.parse_args(argv)
    document = json.loads(options.json.read_text())
    results = Results(document["records"])
    print(text(results))
    if options.write is not None:
        write(results, document["date"], options.write)
        print(f"wrote {options.write}")
    if options.plot is not None:
        print(f"wrote {options.plot}" if plot(results, options.plot) else "no plot: pip install matplotlib")
    return 0


if __name__ == "__main__":
    sys.exit(main())
