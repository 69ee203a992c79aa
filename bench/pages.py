# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode time by the share of pages that it reads: python -m bench.pages

Each KV head of each sequence has a list of random pages, ascending, as from ``kv.ops.select_pages``. Before a line is
timed, its result is checked against a float32 reference over the listed pages; all other pages are NaN. ``of all`` is
the time relative to a decode over the whole cache in the same run. Selecting an eighth of the pages by their summaries,
alone and followed by the attention, is checked against its definition. With --peers, other libraries read the same
lists in the same process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvarn.measure.attention_problem import Cached, layers_for

from . import page_peers
from .cases import Decode, Row
from .kvarn_rows import call_of
from .problems import problem
from .standalone import Number, device_of, measured, over, parser, run_all, shown

SHARES = (1.0, 0.5, 0.25, 0.125)
ROWS = tuple(
    Row(f"{batch}x{k}k_p{page}", f"{batch} × {k}k, page {page}", Decode(batch, 1024 * k, page=page))
    for batch, k in ((64, 4), (8, 32)) for page in (16, 64)
)  # fmt: skip
SMALL = (Row("small", "3 × 200, page 16", Decode(3, 200, 8, 2, 64)),)
TOLERANCE = 0.02


class Lists:
    """Random page lists; the list of a smaller share is a subset of a larger one's."""

    def __init__(self, p: Any, seed: int = 3) -> None:
        self.p, self.arrays, self.heads = p, p.arrays, p.row.shape.heads
        self.counts = -(-p.lengths // p.row.shape.page)
        draw = np.random.default_rng(seed)
        # The last page, which has the step's token, is always listed.
        self.order = [
            [np.concatenate([[n - 1], draw.permutation(n - 1)]) for _ in range(self.heads)] for n in self.counts
        ]

    def of(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Ascending lists [B, H, K], padded with -1, and their counts."""
        most = [max(1, round(share * n)) for n in self.counts]
        found = np.full((len(self.order), self.heads, max(most)), -1, np.int32)
        for b, count in enumerate(most):
            for h in range(self.heads):
                found[b, h, :count] = np.sort(self.order[b][h][:count])
        return found, np.repeat(np.array(most, np.int32)[:, None], self.heads, 1)

    def poison_others(self, lists: np.ndarray) -> None:
        """Set all unlisted pages of the checked layer to NaN."""
        blocks, table = self.p.cached.blocks, self.p.cached.pages.table
        keep = np.zeros((blocks.shape[0], self.heads), bool)
        for b, h, k in np.argwhere(lists >= 0):
            keep[table[b, lists[b, h, k]], h] = True
        for h in range(self.heads):
            blocks[self.arrays.index(np.flatnonzero(~keep[:, h])), :, 0, :, h] = float("nan")

    def error(self, lists: np.ndarray) -> float:
        """Relative error of a call's output for layer 0, over the lists."""
        p, worst = self.p, []
        for b in p.sequences():
            keys, values = p.keys_of(b)
            for picked, head in p.heads_of(self.heads):
                pages = lists[b, head][lists[b, head] >= 0]
                tokens = (pages[:, None] * p.row.shape.page + np.arange(p.row.shape.page)).ravel()
                seen = self.arrays.index(tokens[tokens < p.lengths[b]])
                q = self.arrays.f32(p.query[b : b + 1, picked])
                wanted = p._attend(q, keys[seen][:, head], values[seen][:, head], len(seen))
                worst.append(self.arrays.relative_error(p.out[b : b + 1, picked], wanted))
        return float("nan") if any(e != e for e in worst) else max(worst)


def numbers(array: Any) -> np.ndarray:
    """An array as NumPy float64 or integers."""
    array = array.cpu() if hasattr(array, "cpu") else array
    if hasattr(array, "is_floating_point") and array.is_floating_point():
        array = array.double()
    return np.asarray(array).astype(np.float64 if np.asarray(array).dtype.kind != "i" else np.int64)


class Choice:
    """Selection of a share of the pages by the minimum and maximum of their keys, and a step that uses it."""

    def __init__(self, p: Any, collection: Any, share: float) -> None:
        import kvarn as kv

        self.p, self.collection, self.heads = p, collection, p.row.shape.heads
        self.counts = -(-p.lengths // p.row.shape.page)
        self.most = max(1, round(share * int(self.counts.max())))
        self.summaries = kv.PageSummaries(collection)
        shape = (len(p.lengths), self.heads)
        self.pages = p.arrays.integers(np.zeros((*shape, self.most), np.int32))
        self.page_counts = p.arrays.integers(np.zeros(shape, np.int32))
        ends = p.arrays.integers(np.concatenate([[0], p.lengths.cumsum()]))
        everything = p.cached.collection(np.zeros_like(p.lengths), p.longest, p.longest)
        for layer in range(p.layers):
            kv.ops.summarize_pages(everything, layer, self.summaries, ends)

    def calls(self) -> dict[str, tuple[Callable[[int], Any], Callable[[], float]]]:
        """The timed calls, each with its error function."""
        import kvarn as kv

        p, c = self.p, self.collection
        lists = {"pages": self.pages, "page_counts": self.page_counts}

        def select(layer: int) -> None:
            kv.ops.select_pages(c, layer, p.query, p.offsets, self.summaries, **lists)

        def both(layer: int) -> None:
            select(layer)
            kv.ops.attention(c, layer, p.query, p.offsets, scale=p.scale, out=p.out, **lists)

        def attended() -> float:
            return Lists(p).error(numbers(self.pages)) if self.error() < TOLERANCE else 1.0

        return {
            "summarize the step's pages": (
                lambda layer: kv.ops.summarize_pages(c, layer, self.summaries, p.offsets), self.summary_error
            ),
            "choose": (select, self.error), "choose and attend": (both, attended),
        }  # fmt: skip

    def summary_error(self) -> float:
        """0 if the summary of the last page equals that of its keys, in the checked sequences, else 1."""
        page, worst = self.p.row.shape.page, 0.0
        for b in self.p.sequences():
            last = int(self.counts[b]) - 1
            keys = numbers(self.p.keys_of(b)[0])[last * page :]
            found = numbers(self.summaries.data[int(self.p.cached.pages.table[b, last]), 0])
            worst = max(worst, float(np.abs(found - np.stack([keys.min(0), keys.max(0)], 1)).max()))
        return worst

    def error(self) -> float:
        """How far the bounds of selected pages are below the largest bounds, relatively."""
        worst, lists = 0.0, numbers(self.pages)
        for b in self.p.sequences():
            count = int(self.counts[b])
            of = numbers(self.summaries.data[self.p.arrays.index(self.p.cached.pages.table[b, :count]), 0])
            for picked, h in self.p.heads_of(self.heads):
                q = numbers(self.p.query[b, picked])
                bounds = np.maximum(q * of[:, None, h, 0], q * of[:, None, h, 1]).sum(-1).max(1)
                bounds[-1] = np.inf
                chosen = lists[b, h][lists[b, h] >= 0]
                if len(chosen) != min(self.most, count) or (np.diff(chosen) <= 0).any():
                    return 1.0
                best = np.sort(bounds)[::-1][1 : len(chosen)].sum()
                worst = max(worst, float(1 - np.sort(bounds[chosen])[::-1][1:].sum() / best) if best else 0.0)
        return worst


def lines(
    arrays: Any, row: Row, shares: Sequence[float] = SHARES, groups: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Lines of a decode over all pages, then over shares of them, with peers if asked."""
    import kvarn as kv

    p = problem(arrays, row, False)
    # A pass over the layers must exceed the L2 cache for the smallest share too.
    p.layers = layers_for(p.bytes * min(shares), arrays)
    p.cached = Cached(arrays, row, p.cached.pages, p.layers, False)
    found = {"row": row.title, "what": "the whole cache", "share": 1.0, "bytes": p.bytes}
    yield found | measured(p, call_of(p), p.error, TOLERANCE)
    collection, lists = p.cached.collection(p.lengths - 1, 1, p.longest), Lists(p)
    choice = Choice(p, collection, shares[-1])
    listed = page_peers.ListedHeads(p) if groups else None
    for what, (call, error) in choice.calls().items():
        yield {"row": row.title, "what": what, "share": shares[-1], "bytes": 0.0} | measured(p, call, error, TOLERANCE)
    for share in shares:
        chosen, counts = lists.of(share)
        lists.poison_others(chosen)
        pages, page_counts = arrays.integers(chosen), arrays.integers(counts)

        def call(layer: int, pages: Any = pages, page_counts: Any = page_counts) -> None:
            kv.ops.attention(
                collection, layer, p.query, p.offsets, scale=p.scale, out=p.out, pages=pages, page_counts=page_counts
            )

        found = {"row": row.title, "what": "listed pages", "share": share, "bytes": p.bytes * share}
        yield found | measured(p, call, lambda chosen=chosen: lists.error(chosen), TOLERANCE)
        if listed is None:
            continue
        listed.take(chosen, counts)
        for who, make in (page_peers.PEERS[name] for name in groups):
            ready = when_called(functools.partial(make, listed))
            yield found | {"what": who} | measured(p, ready, lambda chosen=chosen: lists.error(chosen), TOLERANCE)


def when_called(make: Callable[[], Callable[[int], Any]]) -> Callable[[int], Any]:
    """A call that is prepared when first called, so that a failure to prepare affects one line only."""
    found: list[Callable[[int], Any]] = []

    def call(layer: int) -> None:
        if not found:
            found.append(make())
        found[0](layer)

    return call


def as_table(found: Sequence[dict[str, Any]]) -> str:
    """The lines of a row, with times relative to the first, which reads the whole cache."""
    whole = found[0].get("us", float("nan"))
    numbers: tuple[Number, ...] = (
        ("share", "share", "g"), ("µs", "us", ".1f"), ("of all", lambda line: over(line, whole), ".3f"),
        ("TB/s", lambda line: line["bytes"] / line["us"] / 1e6 if "us" in line and line["bytes"] else None, ".2f"),
    )  # fmt: skip
    return shown(found, "row", "what", *numbers)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--rows", default="", metavar="TEXT", help="rows with this text in their names (default: all)")
    made.add_argument("--peers", default="", metavar="NAMES", help=f"{', '.join(page_peers.PEERS)}; needs a GPU")
    options = made.parse_args(argv)
    rows = ROWS if device_of(options) == "cuda" else SMALL
    groups = [name.strip() for name in options.peers.split(",") if name.strip()]
    if unknown := sorted(set(groups) - set(page_peers.PEERS)):
        made.error(f"peers are {', '.join(page_peers.PEERS)}; got {', '.join(unknown)}")

    def of_row(arrays: Any, row: Row) -> Iterator[dict[str, Any]]:
        return lines(arrays, row, groups=groups)

    return run_all(options, [row for row in rows if options.rows in row.name], of_row, as_table)


if __name__ == "__main__":
    sys.exit(main())
