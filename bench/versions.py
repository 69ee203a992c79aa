# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Interleaved A/B timing of two versions of kvarn: python -m bench.versions --before TREE [--rows TEXTS]

Each version runs in a process with its own checkout first on the path. Both prepare a row's data and a graph of many
calls, and alternate replays, so that clocks, power and other load on the device are equal for both. Each result is
checked before it is timed. TREE is a checkout that has this module's imports; create one with ``git worktree add``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvarn
from kvarn.measure.arrays import arrays
from kvarn.measure.timing import first_line, repeated, span

from . import kvarn_rows
from .cases import RANGE, SMALL, TABLE, select
from .problems import problem
from .report import table
from .standalone import device_of, parser

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 13
HEAD = ("case", "before, µs", "least", "now, µs", "least", "now / before", "errors")


class Version:
    """A process that serves one version: ``ask`` sends a request and returns the answer.

    Raises
    ------
    SystemExit
        If the process imports another kvarn than ``tree``'s, which would measure the same version twice.
    """

    def __init__(self, tree: Path, device: str) -> None:
        self.tree = tree
        path = os.pathsep.join([str(tree / "python"), str(tree), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.versions", "--serve", "--device", device], cwd=tree, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def __enter__(self) -> Version:
        self.process.__enter__()
        found = Path(self.answer()["kvarn"]).resolve()
        if self.tree not in found.parents:
            raise SystemExit(
                f"the version in {self.tree} must import its own kvarn, got {found}: run this where none is installed"
            )
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.__exit__(*error)

    def send(self, request: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a version ended with status {self.process.wait()}; what it printed is above")
        return json.loads(line)

    def ask(self, request: str) -> dict[str, Any]:
        self.send(request)
        return self.answer()


def serve(device: str) -> None:
    """Answer requests: a row's name prepares and checks the row, an empty line replays it once."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the libraries' output apart from the answers
    library: Any = arrays(device)
    torch = library.torch if library.on_gpu else None
    rows = {row.name: row for row in (*TABLE, *RANGE, *SMALL)}
    run, count = None, 1

    def put(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    put({"kvarn": kvarn.__file__})
    for line in sys.stdin:
        name = line.strip()
        found: dict[str, Any] = {}
        try:
            if name:
                run = p = call = None  # free the tensors of the previous row first
                library.free()
                p = problem(library, rows[name], split=False)
                offer = next(iter(kvarn_rows.offers(p)))
                call = offer.make()
                found = {"error": offer.checked(call, p), "tolerance": offer.tolerance}
                run, count, mode = repeated(call, p.layers, library)
                found["mode"] = mode
            elif run is not None:
                found = {"us": span(run, torch) / count}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        put(found)


def compare(before: Version, now: Version, name: str, rounds: int) -> dict[str, Any]:
    """A row's record: median and least times of both versions, or the failures."""
    before.send(name)
    now.send(name)
    made = (before.answer(), now.answer())
    if failed := [m["failed"] for m in made if "failed" in m]:
        return {"case": name, "ok": False, "note": failed[0]}
    samples: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds):
        pairs = list(zip((before, now), samples, strict=True))
        for version, times in pairs if k % 2 else reversed(pairs):
            times.append(version.ask("")["us"])
    old, new = (statistics.median(s) for s in samples)
    return {
        "case": name, "before": old, "before_least": min(samples[0]), "now": new, "now_least": min(samples[1]),
        "ratio": new / old, "errors": [m["error"] for m in made],
        "ok": all(m["error"] <= m["tolerance"] for m in made),
    }  # fmt: skip


def shown(found: dict[str, Any]) -> tuple[str, ...]:
    if "ratio" not in found:
        return (found["case"], *[""] * (len(HEAD) - 2), found["note"])
    times = (f"{found[k]:.2f}" for k in ("before", "before_least", "now", "now_least"))
    errors = " ".join(f"{e:.1e}" for e in found["errors"]) + ("" if found["ok"] else " WRONG")
    return (found["case"], *times, f"{found['ratio']:.4f}", errors)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--before", type=Path, metavar="TREE", help="a checkout of the earlier version")
    made.add_argument("--rows", metavar="TEXTS", help="as in python -m bench (default: decode,append,gather)")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    device = device_of(options)
    if options.serve:
        serve(device)
        return 0
    if options.before is None or not (options.before / "bench" / "versions.py").is_file():
        made.error(f"--before must name a checkout that has bench/versions.py, got {options.before}")

    rows = select(options.rows or "decode,append,gather", (*TABLE, *RANGE) if device == "cuda" else SMALL)
    found = []
    with Version(options.before.resolve(), device) as before, Version(ROOT, device) as now:
        for row in rows:
            found.append(compare(before, now, row.name, options.rounds))
            print(" | ".join(shown(found[-1])), file=sys.stderr, flush=True)
    print(table([HEAD, *map(shown, found)]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one["ok"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
