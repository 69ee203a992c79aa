# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cost of disabling each optional pass: python -m bench.ablation [--rows TEXTS] [--device DEVICE] [--json FILE]

Every row is compiled with all passes, then without each pass in turn. On a GPU, results are checked and timed; with
``--device none``, or without a GPU, static figures of the code are compared instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvarn.lowering import pipeline
from kvarn.measure.arrays import arrays
from kvarn.runtime.program import Program

from . import ablation_kernels, kvarn_rows, static, timing
from .cases import SMALL, TABLE, Row, select
from .kvarn_rows import TOLERANCE
from .problems import problem
from .report import table

ALL = "nothing"  # label of the run without disabled passes
DEFAULT_ROWS = (
    "=b64_c4k,=b64_c4k_fp8,=b1_c32k,=pf_b8_s4k,=pf_64_over_100k,=app_n8192_prefill,=app_n256_decode,"
    "=app_n8192_prefill_rope,gather"
)


def call_of(p: Any, target: str, disable: Sequence[str] = ()) -> Callable[[int], Any]:
    """A problem's operation, compiled without the passes in ``disable`` and bound to its data."""
    what = static.specialisation(p.row, target)
    program = Program(static.compiled(what, disable).artifact)
    bound = []
    call = kvarn_rows.call_of(p)
    for layer in range(p.layers):
        ((operation, given, *_),) = kvarn_rows.operations_of(partial(call, layer))
        operands = dict(zip(operation.operands, given, strict=False))
        bound.append(program.prepare(*(operands[name] for name, _ in what.operands)))
    return lambda layer: bound[layer]()


AnyRow = Row | ablation_kernels.KernelRow


def measured(row: AnyRow, library: Any, target: str, passes: Sequence[str]) -> list[dict[str, Any]]:
    """Times of a row with all passes, and without each of the given ones."""
    p: Any
    if isinstance(row, ablation_kernels.KernelRow):
        p, make, tolerance = ablation_kernels.KernelProblem(library, row), None, 0.0
    else:
        p, make = problem(library, row, split=False), call_of
        tolerance = TOLERANCE[row.dtype] if row.kind != "gather" else 0.0
    found = []
    for left_out in (ALL, *passes):
        record: dict[str, Any] = {"row": row.name, "title": row.title, "without": left_out, "ok": False}
        try:
            disable = () if left_out == ALL else (left_out,)
            call = p.call_of(target, disable) if make is None else make(p, target, disable)
            p.poison()
            call(0)
            library.synchronize()
            record["error"] = p.error()
            record["ok"] = record["error"] <= tolerance
            record |= timing.timed(call, p.layers, library)
        except (ValueError, RuntimeError) as error:
            record["note"] = " ".join(str(error).split())[:200]
        found.append(record)
    return found


def _figures(row: AnyRow, target: str, disable: Sequence[str]) -> dict[str, dict[str, Any]]:
    if isinstance(row, Row):
        return static.figures(row, target, disable)["kernels"]
    made = static.compiled_kernel(row.kernel, ablation_kernels.specs(row), target, disable)
    return static.kernel_figures(made, target)[0]


def counted(row: AnyRow, target: str, passes: Sequence[str]) -> list[dict[str, Any]]:
    """Static figures of a row's code with all passes, and without each of the given ones."""
    found = []
    for left_out in (ALL, *passes):
        record: dict[str, Any] = {"row": row.name, "title": row.title, "without": left_out, "ok": False}
        try:
            kernels = _figures(row, target, () if left_out == ALL else (left_out,)).values()
            record |= {name: max(k[name] for k in kernels) for name in ("registers", "spills")}
            record |= {"instructions": sum(k["ptx"]["all"] for k in kernels), "ok": True}
            for way, prefix in (("loads", "load global"), ("stores", "store global")):
                for width, fits in (("wide", True), ("narrow", False)):
                    record[f"{width} {way}"] = sum(
                        count
                        for k in kernels
                        for name, count in k["ptx"].items()
                        if name.startswith(prefix) and (" 16 B" in name) == fits
                    )
        except (ValueError, RuntimeError) as error:
            record["note"] = " ".join(str(error).split())[:200]
        found.append(record)
    return found


COUNTS = ("instructions", "registers", "spills", "wide loads", "narrow loads", "wide stores", "narrow stores")


def ablation_table(records: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """A table of times with their ratios to the run with all passes, or of counts."""
    timed = any("us" in r for r in records)
    lines: list[Sequence[str]] = [("row", "left out", *(("µs", "times all") if timed else COUNTS))]
    whole: dict[str, float] = {r["row"]: r["us"] for r in records if r["without"] == ALL and "us" in r}
    for r in records:
        cells: Sequence[str]
        if timed:
            us, base = r.get("us"), whole.get(r["row"])
            ratio = f"{us / base:.3f}" if us and base else ""
            cells = (f"{us:.2f}" if us else r.get("note", "failed"), ratio + ("" if r["ok"] else " WRONG"))
        else:
            none = (r.get("note", ""), *[""] * (len(COUNTS) - 1))
            cells = tuple(str(r.get(name, "")) for name in COUNTS) if r["ok"] else none
        lines.append((r["title"], r["without"], *cells))
    return table(lines, markdown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="kinds of rows, or parts of their names; =NAME: only that row")
    parser.add_argument("--passes", default="", help="passes to disable (default: all optional ones)")
    parser.add_argument("--device", choices=("auto", "cuda", "host", "numpy", "none"), default="auto")
    parser.add_argument("--target", default="sm_90a", help="target with --device none (default: sm_90a)")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    from kvarn.compilation.driver import default_target
    from kvarn.runtime import driver

    device = options.device
    if device == "auto":
        device = "cuda" if driver.status().usable else "none"
    small = device in ("host", "numpy")
    kernels = ablation_kernels.rows(small)
    named = {k.name: k for k in kernels}
    texts = [t for t in options.rows.split(",") if t]
    others = ",".join(t for t in texts if t not in named)
    rows: list[AnyRow] = [named[t] for t in texts if t in named] if texts else list(kernels)
    if others or not texts:
        try:
            rows += select(others or ("" if small else DEFAULT_ROWS), SMALL if small else TABLE)
        except ValueError as error:
            parser.error(f"--{error}")
    target = options.target if device == "none" else "host" if small else default_target()
    optional = [step.name for step in pipeline.default_steps(target) if step.optional]
    passes = [p for p in options.passes.split(",") if p] or optional
    library = arrays(device) if device != "none" else None
    if library is not None:
        timing.warm_up(library)
    records: list[dict[str, Any]] = []
    begin = time.time()
    for row in rows:
        if time.time() - begin > options.budget:
            print(f"{row.name}: no time left", file=sys.stderr)
        elif library is None:
            records += counted(row, target, passes)
        else:
            records += measured(row, library, target, passes)
            library.free()
    print(ablation_table(records))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(records, indent=1))
    return 0 if records and all(r["ok"] for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
