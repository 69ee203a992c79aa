# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention among the kernels of a step: python -m bench.chains [--rows TEXTS] [--device DEVICE]

A kernel alone, again and again, finds the GPU as it left it; in a step others run in between, and what they leave free
decides where its blocks go. Every chain is checked and timed as a row is: the decode's own part is what it adds.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvarn.measure.arrays import arrays

from . import timing
from .cases import SMALL, TABLE, select
from .kvarn_rows import TOLERANCE, Offer, call_of
from .problems import problem
from .report import table
from .worker import measure

DEFAULT_ROWS = "=b64_c4k,=b64_c4k_fp8,=b16_c8k,=b256_c1k_mha,=b1_c32k"
SQUARE = 4096  # of a matrix that other kernels work on

Calls = list[Callable[[int], Any]]


def chains(p: Any, found: Any) -> dict[str, tuple[Calls, Calls]]:
    """By name: the calls before the decode of a problem, and those with it."""
    import kvarn as kv

    decode = call_of(p)
    collection = p.cached.collection(p.lengths - 1, 1, p.longest)
    new = [found.normal((len(p.lengths), p.cached.heads, p.cached.size), "bf16") for _ in range(2)]

    def append(layer: int) -> None:
        kv.ops.append(collection, layer, *new, p.offsets)

    made: dict[str, tuple[Calls, Calls]] = {"decode": ([], [decode]), "append, decode": ([append], [append, decode])}
    if found.on_gpu:
        x, rows = found.normal((SQUARE, SQUARE), "bf16"), found.normal((len(p.lengths), SQUARE), "bf16")

        def product(_: int) -> None:
            found.torch.mm(rows, x)

        made["product, append, decode"] = ([product, append], [product, append, decode])
    return made


def in_turn(calls: Calls) -> Callable[[int], None]:
    """One call that makes several."""

    def one(layer: int) -> None:
        for call in calls:
            call(layer)

    return one


def measured(p: Any, found: Any) -> list[list[str]]:
    """A line of the table for every chain."""
    lines = []
    for name, (before, chain) in chains(p, found).items():
        most = TOLERANCE[p.row.dtype]
        record = measure(Offer(name, functools.partial(in_turn, chain), most), p, found)
        if not record["ok"]:
            error = math.nan if record["error"] is None else record["error"]
            raise RuntimeError(f"{p.row.title}, {name}: the error must be at most {most}, got {error}")
        whole, rest = record["us"], timing.timed(in_turn(before), p.layers, found)["us"] if before else 0.0
        lines.append([p.row.title, name, f"{whole:.2f}", f"{whole - rest:.2f}", f"{record['error']:.1e}"])
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chains", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="TEXTS", help="decode rows: names, or parts of them")
    parser.add_argument("--device", choices=("cuda", "host", "numpy"), default="cuda")
    options = parser.parse_args(argv)
    try:
        found = arrays(options.device)
        chosen = select(options.rows or DEFAULT_ROWS, TABLE) if found.on_gpu else select(options.rows, SMALL)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    timing.warm_up(found)
    lines = []
    for row in chosen:
        if row.kind == "decode":
            lines += measured(problem(found, row, split=False), found)
    print(table([["case", "chain", "µs", "of the decode", "error"], *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
