# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compare kvarn with other libraries: python -m bench

With a GPU, this measures the machine's peak rates, then every row with kvarn and with the installed peers. Each
result is checked; the output is a table and a JSON file. Without a GPU, it prints compile times and static figures
of the compiled code.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import peers, report, suites
from .cases import QUICK, RANGE, SMALL, TABLE, Row, select
from .worker import read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# The largest share of the remaining budget that each group may use.
SHARES = {"ceilings": 0.15, "kvarn": 0.5, "flashinfer": 0.5, "fa3": 0.4, "triton": 0.5, "flex": 1.0}
SHARES |= dict.fromkeys(("vllm", "flashmla", "fa4", "torch"), 0.3)
STARTS = 6  # process starts per group, at most


def run_group(
    group: str, rows: Sequence[Row], device: str, seconds: float, folder: Path, quiet: bool = False
) -> list[dict[str, Any]]:
    """Measure a group in subprocesses, restarted after a crash as long as they make progress; returns its records."""
    path = folder / f"{group}.jsonl"
    begin, began, status, tail = time.time(), -1, 0, ""
    deadline = begin + seconds
    command = [sys.executable, "-m", "bench.worker", group, "--out", str(path), "--device", device]
    command += ["--deadline", str(deadline - 2), "--rows", ",".join(row.name for row in rows)]
    for start in range(STARTS):
        with (folder / f"{group}.{start}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = process.wait(timeout=max(2.0, deadline + 15 - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        tail = Path(log.name).read_text(errors="replace").strip()[-1500:]
        before, began = began, sum("mark" in r for r in read_records(path))
        if status == 0:
            break
        with path.open("a") as file:
            file.write("\n" + json.dumps({"died": status}) + "\n")
        if began <= before or time.time() > deadline - 8:
            break
    found = outcome(read_records(path), {row.name: row.kind for row in rows})
    timed = sum(1 for r in found if r.get("us") and r["ok"])
    if not found and status:
        last = tail.splitlines()[-1] if tail else f"status {status}"
        found = [{"kind": "group", "case": "", "who": group, "ok": False, "note": last[:300]}]
    if not quiet:
        ended = f", status {status}" if status else ""
        print(f"{group}: {timed} measured in {time.time() - begin:.0f} s{ended}", file=sys.stderr, flush=True)
        if status and not timed:
            print("  | " + "\n  | ".join(tail.splitlines()[-12:]), file=sys.stderr, flush=True)
    return found


def outcome(lines: Sequence[dict[str, Any]], kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """The records of a group, plus one for each measurement that crashed its process; ``kinds`` maps rows to kinds."""
    made: list[dict[str, Any]] = []
    pending: list[list[str]] = []  # started, not finished: [group, row] or [group, row, who]
    for line in lines:
        if "mark" in line:
            pending.append(line["mark"])
        elif "done" in line:
            pending = [mark for mark in pending if mark[:2] != line["done"]]
        elif "died" in line:
            # The last entry was running at the crash: the offer, if a row and its offer had both started.
            for mark in pending[-1:]:
                kind, who = kinds.get(mark[1], ""), mark[-1] if len(mark) == 3 else mark[0]
                note = f"ended the process (status {line['died']})"
                made.append({"kind": kind, "case": mark[1], "who": who, "ok": False, "note": note})
            pending = []
        else:
            pending = [mark for mark in pending if mark[1:] != [line.get("case"), line.get("who")]]
            made.append(line)
    return made


def outside_script(path: Path, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Records of peers that an external script measures and writes to ``$OUT/peers.json``."""
    command = [sys.executable, str(path), "--budget", str(int(seconds)), "--groups", "fa3,fi,cacheops,flashmla,triton"]
    with (folder / "script.log").open("w") as log:
        options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OUT": str(folder)}, "timeout": seconds + 60}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, **options)
    written = folder / "peers.json"
    if not written.exists():
        raise RuntimeError(f"{path} wrote no peers.json; its log ends: {Path(log.name).read_text()[-300:]}")
    known = {row.name for row in TABLE}
    made = []
    for r in json.loads(written.read_text()):
        if r.get("case") in known and "no paging" not in r["peer"]:
            more = {"bytes": r.get("nbytes", 0), "flops": r.get("flops", 0), "note": r.get("note", "")}
            found = {"who": r["peer"], "ok": bool(r["ok"]), "us": r.get("us"), "error": r.get("err"), **more}
            made.append({"kind": r["kind"], "case": r["case"], **found})
    return made


def chosen_rows(options: argparse.Namespace, device: str) -> list[Row]:
    """The rows selected by the options."""
    if device != "cuda":
        return list(select(options.rows, SMALL))
    if options.suite:
        return list(select(options.rows, suites.rows_of(options.suite)))
    rows = select(options.rows, (*TABLE, *RANGE)) if options.rows else TABLE
    return [r for r in rows if r.name in QUICK] if options.quick else list(rows)


def measure(options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Measure all groups within the budget, kvarn first."""
    end = time.time() + options.budget
    rows = chosen_rows(options, device)
    wanted = (
        peers.available() if options.peers == "auto" else [p for p in options.peers.split(",") if p and p != "none"]
    )
    groups = ["ceilings", "kvarn", *(wanted if device == "cuda" or options.peers != "auto" else [])]
    if options.only:
        groups = [g for g in groups if g in options.only.split(",")]
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvarn-bench-") as name:
        folder = Path(name)
        for group in groups:
            seconds = min(end - time.time(), SHARES[group] * options.budget)
            if seconds < 10:
                print(f"{group}: no time left", file=sys.stderr)
                continue
            records += run_group(group, rows, device, seconds, folder)
            if options.json:
                save(options.json, records, options.commit)  # partial results, in case the machine is lost
        if options.peers_script is not None and end - time.time() > 30:
            try:
                records += outside_script(options.peers_script, end - time.time(), folder)
            except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                print(f"{options.peers_script}: {error}", file=sys.stderr)
    return records


def save(path: Path, records: Sequence[dict[str, Any]], commit: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(records, commit), indent=1))


def document(records: Sequence[dict[str, Any]], commit: str = "") -> dict[str, Any]:
    """What a run writes: its date, the commit (by default the checkout's), and the records."""
    return {"date": datetime.date.today().isoformat(), "commit": commit or suites.commit(), "records": records}


def without_gpu(options: argparse.Namespace) -> None:
    """Print figures of the compiled code, which need no GPU."""
    from . import static

    static.main(["--json", str(options.json.with_suffix(".static.json"))] if options.json else [])
    if importlib.util.find_spec("bench.compile") is not None:
        print()
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "bench.compile"], cwd=ROOT, check=False)


def gpu_reason() -> str:
    """Why no GPU can be used by torch; an empty string if one can."""
    from kvarn.runtime import driver

    status = driver.status()
    if not status.usable:
        return f"no GPU can be used: {status.reason}"
    if importlib.util.find_spec("torch") is None:
        return "a GPU was found, but torch, which creates the data, is not installed: pip install torch"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="", metavar="TEXTS", help="only rows of these kinds, or with these texts in their names"
    )
    parser.add_argument(
        "--suite",
        choices=suites.NAMES,
        help="only the rows of a suite; writes bench/results/SUITE.json and the page SUITE.md from it",
    )
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="time limit (default: 480)")
    parser.add_argument("--quick", action="store_true", help="measure only a few rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file (default: bench/results/DATE.json)")
    parser.add_argument("--commit", default="", help="the commit that the files name, in a copy without .git")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot shares of peak rates (needs matplotlib)")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "host", "numpy"),
        default="auto",
        help="host, numpy: small shapes on the CPU, to test the code",
    )
    parser.add_argument(
        "--peers", default="auto", metavar="GROUPS", help=f"{', '.join(peers.GROUPS)}; or auto (those installed), none"
    )
    parser.add_argument(
        "--peers-script", type=Path, metavar="FILE", help="a script that measures peers and writes $OUT/peers.json"
    )
    parser.add_argument("--only", default="", metavar="GROUPS", help="ceilings, kvarn or groups of peers")
    options = parser.parse_args(argv)
    known = {"auto", "none", "", "kvarn", "ceilings", *peers.GROUPS}
    unknown = {*options.peers.split(","), *options.only.split(",")} - known
    if unknown:
        parser.error(f"groups are ceilings, kvarn, {', '.join(peers.GROUPS)}; got {', '.join(sorted(unknown))}")
    device = options.device
    reason = gpu_reason() if device in ("auto", "cuda") else ""
    if device == "cuda" and reason:
        print(reason, file=sys.stderr)
        return 1
    if device == "auto":
        if reason:
            print(f"{reason}; figures of the compiled code:\n", file=sys.stderr)
            without_gpu(options)
            return 0
        device = "cuda"
    if options.suite and device != "cuda":
        parser.error("--suite needs a GPU: its page is for rows of their full size")
    try:
        chosen_rows(options, device)
    except ValueError as error:
        parser.error(str(error))
    if options.json is None and options.suite:
        options.json = RESULTS / f"{options.suite}.json"
    elif options.json is None:
        options.json = RESULTS / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
    records = measure(options, device)
    save(options.json, records, options.commit)
    results = report.Results(records)
    print(report.text(results))
    print(f"\nwrote {options.json}")
    if options.suite:
        print(f"wrote {suites.write(options.suite, document(records, options.commit), options.json.parent)}")
    if options.plot is not None:
        print(f"wrote {options.plot}" if report.plot(results, options.plot) else "no plot: pip install matplotlib")
    ours = [r for r in records if r.get("who") == "kvarn"]
    return 0 if (ours and all(r["ok"] for r in ours)) or "kvarn" not in (options.only or "kvarn") else 1


if __name__ == "__main__":
    sys.exit(main())
