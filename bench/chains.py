# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention within a step: python -m bench.chains [--rows TEXTS] [--device DEVICE]

Repeated alone, a kernel only ever follows itself. In a step it follows other kernels, and the multiprocessors that
they leave free decide where its blocks run. Each chain is checked and timed with and without the decode; the
difference is the decode's own time.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import timing
from .cases import SMALL, TABLE, Row, select
from .kvarn_rows import TOLERANCE, Offer, call_of
from .problems import problem
from .standalone import device_of, parser, run_all, shown
from .worker import measure

DEFAULT_ROWS = "=b64_c4k,=b64_c4k_fp8,=b16_c8k,=b256_c1k_mha,=b1_c32k"
SQUARE = 4096  # rows and columns of the matrices of other kernels

Calls = list[Callable[[int], Any]]


def chains(p: Any, found: Any) -> dict[str, tuple[Calls, Calls]]:
    """By name: the calls before a problem's decode, and the calls including it."""
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


def lines(found: Any, row: Row) -> Iterator[dict[str, Any]]:
    """A line for each chain of a row."""
    p = problem(found, row, split=False)
    for name, (before, chain) in chains(p, found).items():
        most = TOLERANCE[row.dtype]
        record = measure(Offer(name, functools.partial(in_turn, chain), most), p, found)
        if not record["ok"]:
            error = math.nan if record["error"] is None else record["error"]
            raise RuntimeError(f"{row.title}, {name}: the error must be at most {most}, got {error}")
        rest = timing.timed(in_turn(before), p.layers, found)["us"] if before else 0.0
        yield {"case": row.title, "chain": name, "own": record["us"] - rest, **record}


COLUMNS = (("µs", "us", ".2f"), ("decode µs", "own", ".2f"), ("error", "error", ".1e"))


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--rows", default="", metavar="TEXTS", help="decode rows: parts of their names")
    options = made.parse_args(argv)
    on_gpu = device_of(options) == "cuda"
    rows = select(options.rows or (DEFAULT_ROWS if on_gpu else ""), TABLE if on_gpu else SMALL)
    return run_all(
        options, [r for r in rows if r.kind == "decode"], lines, lambda found: shown(found, "case", "chain", *COLUMNS)
    )


if __name__ == "__main__":
    sys.exit(main())
