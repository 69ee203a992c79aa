# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn tune``: measure schedules of attention on this machine's GPU, and save the best of each case.

For every case, of decode or of prefill over tiles, the built-in schedule is measured first, then variations of one
group of entries at a time (:mod:`spaces`), each from the best so far. A schedule whose result differs from a float32
reference is rejected. Schedules that beat the built-in one are written to the table that ``select-kv-schedule`` reads
(``KVARN_TUNE``). Every measurement, with device, versions and clocks, is kept in a log next to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn import pipelines
from kvarn.dialect import dtypes, layout
from kvarn.env import env
from kvarn.files import run_file
from kvarn.lowering.kernels.attention import case as attention_common
from kvarn.lowering.schedules import decode as decode_schedule, tuned
from kvarn.lowering.target import Target, by_name
from kvarn.ops import reads
from kvarn.tools.pass_options import add_pass_options, given_name, given_path, passes_of

from . import autotune
from .arrays import Arrays, arrays
from .attention_problem import TOLERANCE, DecodeProblem
from .spaces import DecodeSpace, Schedule, Space, TileSpace, known
from .timing import timed
from .timing_log import Log

WORTH = 0.99  # largest ratio to the built-in schedule's time for which an entry is written


@dataclass(frozen=True)
class Case:
    """A shape to tune for: one cache, and a batch of sequences of one length or, ragged, of lengths up to it.

    ``kind`` is the kernel's: ``"decode"`` or ``"tile"``.
    """

    dtype: str
    batch: int
    context: int
    query_heads: int
    heads: int
    size: int
    page: int
    new: int = 1
    ragged: bool = False
    kind: str = "decode"
    window = 0  # schedules are for whole contexts

    @property
    def shape(self) -> Case:
        """The shape of the case as a DecodeProblem reads it."""
        return self

    @property
    def spec(self) -> layout.CacheSpec:
        return layout.spec_of("paged", self.dtype, self.heads, self.size, page_size=self.page)

    @property
    def query(self) -> dtypes.DType:
        found = dtypes.by_name(self.dtype)
        return found if found.bits > 8 else dtypes.bf16

    @property
    def attention(self) -> attention_common.Case:
        """The case as the schedule chooser sees it."""
        return attention_common.Case.plain(self.spec, self.query, self.query_heads)

    def config(self) -> decode_schedule.DecodeConfig:
        """The case as the decode kernel sees it."""
        bounds = reads._bounds(self.new, self.batch)
        return decode_schedule.DecodeConfig(self.attention, bounds["max_queries"], max_batch=bounds["max_batch"])

    @property
    def space(self) -> Space:
        """The search space."""
        if self.kind == "decode":
            return DecodeSpace(self.config())
        bound = reads._bounds(self.new, self.batch)["max_queries"] if self.new <= reads.FEW else 0
        return TileSpace(self.attention, bound)

    def check(self, target: Target) -> None:
        """ValueError if the kernel does not take the case."""
        if self.query_heads % self.heads:
            raise ValueError(f"query heads must be a multiple of the {self.heads} KV heads, got {self.query_heads}")
        if self.new > self.context:
            raise ValueError(f"the context has the new tokens in it: it must be {self.new} or more, got {self.context}")
        what = "decode attention" if self.kind == "decode" else "attention over tiles"
        for problem in self.space.problems(target):
            raise ValueError(f"{self}: there is nothing to tune: {what} {problem}")

    def __str__(self) -> str:
        new = f", {self.new} new" if self.new > 1 else ""
        heads = f"{self.query_heads}/{self.heads} heads of {self.size}"
        ragged = "ragged ≤ " if self.ragged else ""
        return f"{self.dtype} {self.batch} × {ragged}{self.context}, {heads}, page {self.page}{new}"


# --- the search ----------------------------------------------------------------------------------


Measure = Callable[[Schedule], float | None]  # microseconds; None for a schedule that fails or is wrong


@dataclass(frozen=True)
class Found:
    """The outcome for a case: times in microseconds; ``measured`` is the number of schedules."""

    schedule: Schedule
    us: float
    builtin_us: float
    measured: int

    @property
    def better(self) -> bool:
        return self.us <= WORTH * self.builtin_us


def search(case: Case, target: Target, measure: Measure, deadline: float = math.inf) -> Found:
    """The best schedule of a case.

    Parameters
    ----------
    case : Case
    target : Target
    measure : callable
        Microseconds of a schedule, or None.
    deadline : float
        In ``time.monotonic()``; the built-in schedule is measured in any case.

    Raises
    ------
    RuntimeError
        If the built-in schedule itself gives a wrong result.
    """
    space = case.space
    start = space.start(target)
    times: dict[tuple[tuple[str, int], ...], float | None] = {}

    def once(schedule: Schedule) -> float | None:
        key = known(schedule)
        if key not in times:
            times[key] = measure(schedule)
        return times[key]

    builtin = once(start)
    if builtin is None:
        raise RuntimeError(f"{case}: the built-in schedule {start} gives no right result")
    best, best_us = start, builtin
    for group in range(space.groups):
        for schedule in space.variations(best, group):
            if time.monotonic() > deadline:
                break
            if space.fits(schedule, target):
                us = once(schedule)
                if us is not None and us < best_us:
                    best, best_us = schedule, us
    return Found(best, best_us, builtin, len(times))


# --- measuring -----------------------------------------------------------------------------------


class Bench:
    """A case's data, by default on the GPU; measurements go to a log, if there is one."""

    def __init__(self, case: Case, library: Arrays | None = None, log: Path | None = None) -> None:
        self.arrays, self.case = library or arrays("cuda"), case
        self.log = Log(log, self.arrays)
        self.arrays.free()  # the previous case's arrays have other sizes
        self.problem = p = DecodeProblem(self.arrays, case, split=False)
        self._pool = p.cached.collection(p.lengths - case.new, case.new, p.longest)

    def run(self, layer: int, schedule: Mapping[str, Any]) -> None:
        """Launch once."""
        import kvarn as kv

        p = self.problem
        kv.ops.attention(self._pool, layer, p.query, p.offsets, scale=p.scale, out=p.out, schedule=schedule)

    def measure(self, schedule: Schedule) -> float | None:
        """Median microseconds per call; None if the schedule cannot be compiled, or is wrong."""
        full = {**schedule, "kind": self.case.kind}
        record = {"case": dataclasses.asdict(self.case), "schedule": schedule}
        try:
            self.problem.poison()
            self.run(0, full)
            self.arrays.synchronize()
        except (ValueError, RuntimeError) as error:
            print(f"    {shown(schedule)}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            self.log.put({**record, "refused": str(error).splitlines()[0]})
            return None
        error = self.problem.error()
        if not error <= TOLERANCE[self.problem.row.dtype]:
            print(f"    {shown(schedule)}: wrong by {error:.1e}", file=sys.stderr)
            self.log.put({**record, "error": None if error != error else error})
            return None
        times = timed(lambda layer: self.run(layer, full), self.problem.layers, self.arrays)
        self.log.put({**record, "error": error, **times})
        return times["us"]


def shown(schedule: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(schedule.items()))


# --- the command ---------------------------------------------------------------------------------


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the options select: every combination of batches, contexts, page sizes and types."""
    o = options
    return [
        Case(dtype, batch, context, o.query_heads, o.kv_heads, o.head_size, page, o.new, kind=o.kind)
        for dtype, page, batch, context in itertools.product(o.dtype, o.page_size, o.batch, o.context)
    ]


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if any(n < 1 for n in found):
        raise argparse.ArgumentTypeError(f"must be positive integers, got {text!r}")
    return found


def _dtypes(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in TOLERANCE:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(TOLERANCE)}, got {name!r}")
    return found


def run(
    cases: Sequence[Case], target: Target, bench: Callable[[Case], Any], path: Path | None, seconds: float
) -> list[tuple[Case, Found]]:
    """Tune cases in order within ``seconds``; each is written to ``path`` as soon as it is known."""
    outcomes: list[tuple[Case, Found]] = []
    begin = time.monotonic()
    for i, case in enumerate(cases):
        left = begin + seconds - time.monotonic()
        if left <= 0:
            print(f"no time left for {len(cases) - i} of the cases", file=sys.stderr)
            break
        found = search(case, target, bench(case).measure, time.monotonic() + left / (len(cases) - i))
        outcomes.append((case, found))
        print(f"{case}: {found.us:.2f} µs with {shown(found.schedule)}")
        verdict = f"{found.builtin_us / found.us:.3f} times that" if found.better else "as good: nothing is saved"
        print(f"  the built-in schedule has {found.builtin_us:.2f} µs, {verdict} ({found.measured} measured)")
        if path is not None:
            tuned.save(path, [(case.space.key(target), found.schedule, found.us if found.better else None)])
    return outcomes


def tune_kernel(place: str, cases: str) -> int:
    """Tune a kernel of a file, ``FILE.py:KERNEL``."""
    file, _, name = place.rpartition(":")
    if not file:
        raise ValueError(f"a kernel is FILE.py:KERNEL, got {place!r}")
    module = run_file(file, f"kvarn_file_{Path(file).stem}", import_folder=True)
    for line in autotune.tune_file(module, name, cases):
        print(line)
    print(f"table: {autotune.table_path()}\nall measurements: {autotune.table_path().with_name(autotune.TIMINGS)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvarn tune",
        description="Measure schedules of attention, or of a file's kernel, on this machine's GPU, and save the best.",
        epilog="examples: kvarn tune --dtype bf16,f8e4m3 --batch 1,16,64 --context 8192 --query-heads 64 --kv-heads 8; "
        "kvarn tune --kind tile --batch 8 --new 4096 --context 4096",
    )
    parser.add_argument(
        "kernel", nargs="?", type=given_name, metavar="FILE.py:KERNEL",
        help="instead of attention, a kernel under @kv.autotune, for the launches that the file's cases() yields",
    )  # fmt: skip
    parser.add_argument("--cases", default="cases", metavar="NAME", help="the function of the file (default: cases)")
    parser.add_argument("--kind", choices=("decode", "tile"), default="decode", help="kind of kernel (default: decode)")
    several = {"type": _numbers, "metavar": "N,..."}
    parser.add_argument("--dtype", type=_dtypes, default=["bf16"], help="bf16, f16, f8e4m3, f8e5m2 (default: bf16)")
    parser.add_argument("--batch", **several, default=[64], help="sequences (default: 64)")
    parser.add_argument("--context", **several, default=[4096], help="tokens, new ones included (default: 4096)")
    parser.add_argument("--query-heads", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--head-size", type=int, default=128, metavar="N", help="elements per head (default: 128)")
    parser.add_argument("--page-size", **several, default=[16], help="tokens per page (default: 16)")
    parser.add_argument("--new", type=int, default=1, metavar="N", help="new tokens per sequence (default: 1)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of the whole run (default: 300)")
    parser.add_argument("--output", type=given_path, metavar="FILE", help="(default: KVARN_TUNE)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    add_pass_options(parser.add_argument)
    options = parser.parse_args(argv)
    passes = passes_of(options)
    from kvarn.compilation.driver import default_target
    from kvarn.runtime import driver

    status = driver.status()
    if not status.usable:
        raise RuntimeError(f"tuning needs a GPU: {status.reason}")
    arrays("cuda")  # RuntimeError without torch, which makes the data
    if options.kernel is not None:
        with pipelines.pipeline(passes, disable=options.disable):
            return tune_kernel(options.kernel, options.cases)
    target, cases = by_name(default_target()), cases_of(options)
    for case in cases:
        case.check(target)
    path = None if options.dry_run else options.output or env.tune
    if path is not None:
        tuned.load(path)  # an invalid file is refused before the measurements, not after
    log = None if path is None else path.with_suffix(".timings.jsonl")
    with pipelines.pipeline(passes, disable=options.disable):
        run(cases, target, lambda case: Bench(case, log=log), path, options.seconds)
    if path is not None:
        print(f"table: {path}\nall measurements: {log}")
    return 0
