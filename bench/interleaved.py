# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Interleaved timing of kvarn and peers: python -m bench.interleaved [--rows TEXTS] [--peers GROUPS | --across]

Kernels bound by matrix products soon reach the GPU's power limit and lose clock rate, so timing one library after
another favours the first. Here all contestants alternate in one process, a few calls per round, and the median over
rounds counts. ``--across`` compares kvarn's rows with the first one: ``--rows =pf_b8_s4k,range_t5,=range_document``
gives the cost of scores and masks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarn.measure.timing import span

from . import kvarn_rows, peers
from .cases import RANGE, SMALL, TABLE, Row, select
from .problems import problem
from .standalone import device_of, parser, run_all, shown

ROUNDS, CALLS = 9, 4


@dataclass
class Contestant:
    """A measured call; ``samples`` has its microseconds per call in each round."""

    who: str
    call: Callable[[int], Any]
    layers: int
    error: float
    right: bool
    samples: list[float] = field(default_factory=list)

    def sample(self, library: Any) -> None:
        """Time a few calls, after one untimed call."""
        self.call(0)

        def few() -> None:
            for i in range(CALLS):
                self.call(i % self.layers)

        self.samples.append(span(few, library.torch if library.on_gpu else None) / CALLS)


def contestants(library: Any, row: Row, groups: Sequence[str]) -> Iterator[Contestant]:
    """The offers of kvarn and of groups of peers for a row, each checked."""
    for group in ("kvarn", *groups):
        p = problem(library, row, split=group != "kvarn")
        for offer in kvarn_rows.offers(p) if group == "kvarn" else peers.offers(group, p):
            call = offer.make()
            error = offer.checked(call, p)
            yield Contestant(offer.who, call, p.layers, error, error <= offer.tolerance)


def lines(library: Any, row: Row, groups: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line for each contestant, kvarn first."""
    found = [(row, one) for one in contestants(library, row, groups)]
    ours = rounds(library, found)
    for line in medians(found):
        yield {**line, "ratio": ours / line["us"]}


def lines_across(library: Any, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A line for kvarn's first offer of each row, with the ratio to the first row."""
    found = [(row, next(contestants(library, row, ()))) for row in rows]
    first = rounds(library, found)
    for line in medians(found):
        yield {**line, "ratio": line["us"] / first}


def rounds(library: Any, found: Sequence[tuple[Row, Contestant]]) -> float:
    """Time all contestants in interleaved rounds; returns the first one's microseconds."""
    for _ in range(ROUNDS):
        for _, one in found:
            one.sample(library)
    return statistics.median(found[0][1].samples)


def medians(found: Sequence[tuple[Row, Contestant]]) -> Iterator[dict[str, Any]]:
    """Median and least time of each contestant."""
    for row, one in found:
        yield {
            "case": row.title, "who": one.who, "us": statistics.median(one.samples), "least": min(one.samples),
            "error": one.error, "ok": one.right,
        }  # fmt: skip


def as_table(found: Sequence[dict[str, Any]], what: str = "kvarn / it") -> str:
    times = ("µs", "us", ".1f"), ("least", "least", ".1f"), (what, "ratio", ".3f"), ("error", "error", ".1e")
    return shown(found, "case", "who", *times)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--rows", metavar="TEXTS", help="as in python -m bench (default: prefill)")
    made.add_argument("--peers", default="", metavar="GROUPS", help=f"groups of peers: {', '.join(peers.GROUPS)}")
    made.add_argument("--across", action="store_true", help="compare kvarn's rows with the first one")
    options = made.parse_args(argv)
    on_gpu = device_of(options) == "cuda"
    groups = [g.strip() for g in options.peers.split(",") if g.strip()]
    if unknown := sorted(set(groups) - set(peers.GROUPS)):
        made.error(f"groups of peers are {', '.join(peers.GROUPS)}; got {', '.join(unknown)}")
    rows = select(options.rows or "prefill", (*TABLE, *RANGE) if on_gpu else SMALL)
    if options.across:
        if groups:
            made.error("--across compares kvarn's rows: --peers must be left out")
        return run_all(options, [rows], lines_across, lambda found: as_table(found, "of the first"))
    return run_all(options, rows, lambda library, row: lines(library, row, groups), as_table)


if __name__ == "__main__":
    sys.exit(main())
