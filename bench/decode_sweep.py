# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Time of every schedule that ``kvarn tune`` tries: python -m bench.decode_sweep [--cases 64x4k,1x32k] [--seconds 200]

The tuning table is not changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

from kvarn.compilation.driver import default_target
from kvarn.lowering.target import by_name
from kvarn.measure import tune

CASES = {  # batch, context (negative: ragged up to it), query heads, KV heads, page size
    "64x4k": (64, 4096, 32, 8, 16), "64x4k_p64": (64, 4096, 32, 8, 64), "64x4k_p1": (64, 4096, 32, 8, 1),
    "64x8k_g8_p64": (64, 8192, 64, 8, 64), "16x8k": (16, 8192, 32, 8, 16), "128x2k": (128, 2048, 32, 8, 16),
    "256x1k_h32": (256, 1024, 32, 32, 16), "64r8k": (64, -8192, 32, 8, 16), "1x32k": (1, 32768, 32, 8, 16),
    "1x1k": (1, 1024, 32, 8, 16),
}  # fmt: skip


def case_of(name: str, dtype: str) -> tune.Case:
    """A case by its name."""
    batch, context, query_heads, heads, page = CASES[name]
    return tune.Case(dtype, batch, abs(context), query_heads, heads, 128, page, ragged=context < 0)


def shown(bench: tune.Bench) -> tune.Measure:
    """A measurement function that prints each result."""

    def measure(schedule: tune.Schedule) -> float | None:
        us = bench.measure(schedule)
        if us is not None:
            print(f"  {us:8.2f} µs {bench.problem.bytes / us / 1e6:6.3f} TB/s  {tune.shown(schedule)}", flush=True)
        return us

    return measure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dtype", default="bf16,f8e4m3")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args(argv)
    target, deadline = by_name(default_target()), time.monotonic() + options.seconds
    for name, dtype in itertools.product(options.cases.split(","), options.dtype.split(",")):
        if time.monotonic() < deadline:
            case = case_of(name, dtype)
            print(case)
            found = tune.search(case, target, shown(tune.Bench(case)), deadline)
            print(f"  best: {found.us:.2f} µs with {tune.shown(found.schedule)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
