# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compile times by stage, cold (a new process, including imports) and warm: python bench/compile.py

``scale_keys`` is the kernel of the README. ``decode attention`` is ``kv.ops.attention``, from the operation to machine
code, for one new token of each of 64 sequences, and of a single sequence, which adds a merge kernel. ``prefill
attention`` is the tiled kernel for any number of new tokens. A warm process has compiled the same program before; the
disk cache is disabled. Figures are from the fastest of several runs, since other load only adds time. No GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BATCH, ONE, PREFILL = "decode attention, 64 sequences", "decode attention, one sequence", "prefill attention"
# Goals of warm compilation, milliseconds.
GOALS = {
    ("scale_keys", "to PTX"): 150.0,
    (BATCH, "to cubin"): 400.0,
    (ONE, "to cubin"): 400.0,
    (PREFILL, "to cubin"): 300.0,
}
TARGET = "sm_90a"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "scale_keys.py"


class Clock:
    """Milliseconds per stage, in order."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] = self.stages.get(stage, 0.0) + (time.perf_counter() - start) * 1e3


def scale_keys(clock: Clock) -> None:
    """Compile the README's kernel (``examples/scale_keys.py``) for a paged bf16 cache."""
    with clock.measure("import"):
        import kvarn as kv
        from kvarn.compilation import driver as compiler

        context = compiler.context()
    with clock.measure("define"):
        scale = runpy.run_path(str(EXAMPLE))["scale_keys"]

    with clock.measure("trace"):
        module = scale.trace([kv.CacheSpec("paged", kv.bf16, 8, 128, 16), kv.f32], context=context)
    _lower(module, clock)


def attention(clock: Clock, sequences: int | None) -> None:
    """Compile attention for one new token per sequence, or (None) any number: 32 query heads, 8 KV heads of 128 bf16
    elements, pages of 16 tokens.
    """
    with clock.measure("import"):
        import kvarn as kv
        from kvarn import dispatch
        from kvarn.compilation import driver as compiler
        from kvarn.ops import reads

        context = compiler.context()
    with clock.measure("trace"):
        spec = kv.CacheSpec("paged", kv.bf16, 8, 128, 16)
        query = dispatch.BufferType(kv.bf16, (None, 32, 128))
        operands = {
            "collection": dispatch.HandleType("collection", spec), "layer": dispatch.ScalarType(kv.i32), "query": query,
            "row_offsets": dispatch.BufferType(kv.i32, (None,)), "scale": dispatch.ScalarType(kv.f32), "out": query,
        }  # fmt: skip
        attributes = (("mask", "causal"), ("span", 0), ("softcap", 0.0))
        schedule = () if sequences is None else tuple(sorted(reads._bounds(1, sequences).items()))
        what = dispatch.Specialisation("kv.attention", tuple(operands.items()), attributes, schedule, TARGET)
        module = dispatch.build(what, context)
    _lower(module, clock)


def _lower(module: object, clock: Clock) -> None:
    """Run the pipeline by groups of passes, then generate PTX and machine code."""
    from kvarn.compilation import driver as compiler
    from kvarn.lowering import pipeline
    from kvarn.lowering.target import by_name
    from kvarn.runtime import assemble

    target, steps = by_name(TARGET), pipeline.steps(TARGET)
    names = [s.name for s in steps]
    last = time.perf_counter()

    def observe(name: str, _: object) -> None:
        nonlocal last
        now = time.perf_counter()
        at = names.index(name)
        group = "upstream passes" if steps[at].upstream else "kv passes"
        group = "expand" if name == "expand-kv-operations" else group
        clock.stages[group] = clock.stages.get(group, 0.0) + (now - last) * 1e3
        last = time.perf_counter()

    with compiler.diagnosed(module.context):  # type: ignore[attr-defined]
        start = time.perf_counter()
        artifact = compiler.lower(module, target, steps, observer=observe)
        total = (time.perf_counter() - start) * 1e3
    # The remainder: recording the ABI, and LLVM's back end.
    passes = sum(clock.stages.get(g, 0.0) for g in ("expand", "upstream passes", "kv passes"))
    clock.stages["PTX"] = total - passes
    with clock.measure("assemble"), contextlib.suppress(assemble.MissingToolError):
        assemble.assemble(artifact.code["ptx"], TARGET)  # type: ignore[arg-type]


KERNELS: dict[str, Callable[[Clock], None]] = {
    "scale_keys": scale_keys,
    BATCH: functools.partial(attention, sequences=64),
    ONE: functools.partial(attention, sequences=1),
    PREFILL: functools.partial(attention, sequences=None),
}


def totals(stages: dict[str, float]) -> dict[str, float]:
    """The stages with the two sums that have goals; imports are in neither."""
    to_ptx = sum(ms for stage, ms in stages.items() if stage not in ("import", "assemble"))
    return {**stages, "to PTX": to_ptx, "to cubin": to_ptx + stages["assemble"]}


def once(name: str) -> dict[str, float]:
    clock = Clock()
    KERNELS[name](clock)
    return totals(clock.stages)


def fastest(runs: list[dict[str, float]]) -> dict[str, float]:
    """The run with the least time from tracing to machine code."""
    return min(runs, key=lambda run: run["to cubin"])


def cold(name: str, repeats: int) -> dict[str, float]:
    """Stages of compilations in new processes."""
    runs = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, __file__, "--once", name], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    return fastest(runs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("--repeats", type=int, default=15, help="warm compilations (default: 15)")
    parser.add_argument("--once", choices=tuple(KERNELS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.once:
        print(json.dumps(once(options.once)))
        return 0
    found = {}
    for name in KERNELS:
        once(name)
        found[name] = {"cold": cold(name, 3), "warm": fastest([once(name) for _ in range(options.repeats)])}
    for name, runs in found.items():
        print(f"{name}, {TARGET}, milliseconds")
        print(f"  {'':16} {'cold':>8} {'warm':>8}")
        for stage in runs["cold"]:
            goal = GOALS.get((name, stage))
            note = "" if goal is None else f"   goal {goal:.0f}{'' if runs['warm'][stage] <= goal else '  MISSED'}"
            print(f"  {stage:16} {runs['cold'][stage]:8.1f} {runs['warm'].get(stage, 0.0):8.1f}{note}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"target": TARGET, "milliseconds": found}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
