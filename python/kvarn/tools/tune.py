# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn tune``: measure schedules of decode attention on this machine's GPU, and keep the best of each case.

For every case the built-in schedule is measured first, then variations of one group of entries at a time, each from the
best so far. A result that differs from a float32 reference does not count. What beats the built-in schedule is
written to the table that ``select-kv-schedule`` reads (``KVARN_TUNE``).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn import settings
from kvarn.dialect import dtypes, layout, schedules
from kvarn.env import env
from kvarn.lowering.expand import decode_schedule, decode_table, tuned
from kvarn.lowering.target import Target, by_name
from kvarn.ops import reads
from kvarn.tools.pass_options import add_pass_options, passes_of

from .arrays import Arrays, arrays
from .attention_problem import TOLERANCE, DecodeProblem
from .timing import timed

Schedule = dict[str, int]
WORTH = 0.99  # of the built-in schedule's time, from which on an entry is written


@dataclass(frozen=True)
class Case:
    """A shape to tune for: one cache, a batch of sequences of one length, or, ragged, of lengths up to it."""

    dtype: str
    batch: int
    context: int
    query_heads: int
    heads: int
    size: int
    page: int
    new: int = 1
    ragged: bool = False
    window = 0  # schedules are for whole contexts

    @property
    def shape(self) -> Case:
        """What a DecodeProblem reads of a row."""
        return self

    @property
    def spec(self) -> layout.CacheSpec:
        return layout.spec_of("paged", self.dtype, self.heads, self.size, page_size=self.page)

    @property
    def query(self) -> dtypes.DType:
        found = dtypes.by_name(self.dtype)
        return found if found.bits > 8 else dtypes.bf16

    def config(self) -> decode_schedule.Config:
        """The case as the decode kernel sees it."""
        bounds = reads._bounds(self.new, self.batch)
        group = self.query_heads // self.heads
        return decode_schedule.Config(
            self.spec, self.query, group, bounds["max_queries"], max_batch=bounds["max_batch"]
        )

    def check(self, target: Target) -> None:
        """ValueError when the decode kernel does not take the case."""
        if self.query_heads % self.heads:
            raise ValueError(f"query heads must be a multiple of the {self.heads} KV heads, got {self.query_heads}")
        c = self.config()
        for problem in decode_schedule.problems(self.spec, self.query, c.group, c.max_queries, target, c.max_batch):
            raise ValueError(f"{self}: there is nothing to tune: decode attention {problem}")

    def __str__(self) -> str:
        new = f", {self.new} new" if self.new > 1 else ""
        heads = f"{self.query_heads}/{self.heads} heads of {self.size}"
        ragged = "ragged ≤ " if self.ragged else ""
        return f"{self.dtype} {self.batch} × {ragged}{self.context}, {heads}, page {self.page}{new}"


# --- the search ----------------------------------------------------------------------------------


def fits(config: decode_schedule.Config, schedule: Mapping[str, int], target: Target) -> bool:
    """Whether a schedule is legal, and worth a try: so many blocks fit a multiprocessor's memory and registers."""
    full = {**schedule, "kind": "decode", "max_queries": config.max_queries, "max_batch": config.max_batch}
    if schedules.why_unsupported("kv.attention", full, target, "decode", config) is not None:
        return False
    warps, blocks = schedule["warps"], schedule["blocks"]
    block = decode_schedule.block_bytes(dataclasses.replace(config, **schedule))
    return block * blocks <= target.shared_bytes and 65536 // (blocks * warps * 32) >= 96


def variations(config: decode_schedule.Config, best: Mapping[str, int], group: int) -> Iterator[Schedule]:
    """The schedules that a step of the search tries: 0 the pipeline, 1 the tile and the warps, 2 the merge."""
    few = config.max_batch <= 16
    axes: dict[str, Sequence[int]]
    if group == 0:
        axes = {"stages": (2, 3, 4), "blocks": (1, 2, 3, 4)}
    elif group == 1:
        axes = {"tile": (16, 32, 64), "warps": (2, 4, 8), "blocks": sorted({1, 2, best["blocks"]})}
    elif few:
        axes = {"combine": (0, 8, 16), "min_tiles": (2, 4, 8)}
    else:
        axes = {"combine": (0, 8)}
    for values in itertools.product(*axes.values()):
        yield {**best, **dict(zip(axes, values, strict=True))}


GROUPS = 3
Measure = Callable[[Schedule], float | None]  # microseconds; None for a schedule that fails or is wrong


@dataclass(frozen=True)
class Found:
    """The outcome for a case: times in microseconds; ``measured`` counts schedules."""

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
        Of ``time.monotonic()``; the built-in schedule is measured in any case.

    Raises
    ------
    RuntimeError
        If the built-in schedule itself gives no right result.
    """
    config = case.config()
    start = {"min_tiles": config.min_tiles, **decode_table.entries(config)}
    times: dict[tuple[tuple[str, int], ...], float | None] = {}

    def once(schedule: Schedule) -> float | None:
        key = tuple(sorted(schedule.items()))
        if key not in times:
            times[key] = measure(schedule)
        return times[key]

    builtin = once(start)
    if builtin is None:
        raise RuntimeError(f"{case}: the built-in schedule {start} gives no right result")
    best, best_us = start, builtin
    for group in range(GROUPS):
        for schedule in variations(config, best, group):
            if time.monotonic() > deadline:
                break
            if fits(config, schedule, target):
                us = once(schedule)
                if us is not None and us < best_us:
                    best, best_us = schedule, us
    return Found(best, best_us, builtin, len(times))


# --- measuring -----------------------------------------------------------------------------------


class Bench:
    """A case's data, on the GPU unless other arrays are given."""

    def __init__(self, case: Case, library: Arrays | None = None) -> None:
        self.arrays = library or arrays("cuda")
        self.arrays.free()  # what the case before had is of other sizes
        self.problem = p = DecodeProblem(self.arrays, case, split=False)
        self._pool = p.cached.collection(p.lengths - case.new, case.new, p.longest)

    def run(self, layer: int, schedule: Mapping[str, Any]) -> None:
        """Launch once."""
        import kvarn as kv

        p = self.problem
        kv.ops.attention(self._pool, layer, p.query, p.offsets, scale=p.scale, out=p.out, schedule=schedule)

    def measure(self, schedule: Schedule) -> float | None:
        """Median microseconds of one call; None when the schedule cannot be compiled, or is wrong."""
        full = {**schedule, "kind": "decode"}
        try:
            self.problem.poison()
            self.run(0, full)
            self.arrays.synchronize()
        except (ValueError, RuntimeError) as error:
            print(f"    {shown(schedule)}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            return None
        error = self.problem.error()
        if not error <= TOLERANCE[self.problem.row.dtype]:
            print(f"    {shown(schedule)}: wrong by {error:.1e}", file=sys.stderr)
            return None
        return timed(lambda layer: self.run(layer, full), self.problem.layers, self.arrays)["us"]


def shown(schedule: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(schedule.items()))


# --- the command ---------------------------------------------------------------------------------


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the options name: every combination of batches, contexts, page sizes and types."""
    o = options
    return [
        Case(dtype, batch, context, o.query_heads, o.kv_heads, o.head_size, page, o.new)
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
    """Tune cases in order, within so many seconds; each is written to ``path`` as soon as it is known."""
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
        verdict = f"{found.builtin_us / found.us:.3f} times that" if found.better else "as good: nothing is kept"
        print(f"  the built-in schedule has {found.builtin_us:.2f} µs, {verdict} ({found.measured} measured)")
        if path is not None:
            key = tuned.Key.of(target.name, case.config())
            tuned.save(path, [(key, found.schedule, found.us if found.better else None)])
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvarn tune",
        description="Measure schedules of decode attention on this machine's GPU, and keep the best.",
        epilog="example: kvarn tune --dtype bf16,f8e4m3 --batch 1,16,64 --context 8192 --query-heads 64 --kv-heads 8",
    )
    several = {"type": _numbers, "metavar": "N,..."}
    parser.add_argument("--dtype", type=_dtypes, default=["bf16"], help="of the cache: bf16, f16, f8e4m3, f8e5m2")
    parser.add_argument("--batch", **several, default=[64], help="sequences (64)")
    parser.add_argument("--context", **several, default=[4096], help="cached tokens of each (4096)")
    parser.add_argument("--query-heads", type=int, default=32, metavar="N")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N")
    parser.add_argument("--head-size", type=int, default=128, metavar="N")
    parser.add_argument("--page-size", **several, default=[16], help="tokens of a page (16)")
    parser.add_argument("--new", type=int, default=1, metavar="N", help="new tokens of a sequence (1)")
    parser.add_argument("--seconds", type=float, default=300, help="of the whole run (300)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: KVARN_TUNE")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    add_pass_options(parser.add_argument)
    options = parser.parse_args(argv)
    passes = passes_of(options)
    from kvarn.compiler import default_target
    from kvarn.runtime import driver

    status = driver.status()
    if not status.usable:
        raise RuntimeError(f"tuning needs a GPU: {status.reason}")
    arrays("cuda")  # RuntimeError without torch, which makes the data
    target, cases = by_name(default_target()), cases_of(options)
    for case in cases:
        case.check(target)
    path = None if options.dry_run else options.output or env.tune
    if path is not None:
        tuned.load(path)  # a file that is no table is refused before the measurements, not after
    with settings.pipeline(passes, disable=options.disable):
        run(cases, target, Bench, path, options.seconds)
    if path is not None:
        print(f"table: {path}")
    return 0
