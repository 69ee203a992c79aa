# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The indexer of sparse attention, scoring cached tokens and selecting the best: python -m bench.indexer

Shapes are DeepSeek-V3.2's: 64 heads of 128 columns, f8e4m3 keys with one scale per key, 2048 tokens selected per query
row. Before a line is timed, its scores are checked against float32, and its selected tokens against a sort; entries
without a token are NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.measure.attention_problem import Pages, layers_for

from .pages import numbers
from .standalone import device_of, measured, parser, run_all, shown


@dataclass(frozen=True)
class Shape:
    """A batch of sequences with ``new`` query tokens each."""

    batch: int
    context: int
    new: int = 1
    heads: int = 64
    size: int = 128
    page: int = 64
    chosen: int = 2048

    @property
    def title(self) -> str:
        return f"{self.batch} × {self.context}" + (f", {self.new} new" if self.new > 1 else "")


SHAPES = (Shape(64, 8192), Shape(64, 32768), Shape(8, 32768), Shape(1, 131072), Shape(4, 8192, new=1024))
SMALL = (Shape(3, 300, heads=8, size=64, page=16, chosen=40),)


class Problem:
    """An index cache, queries and weights, and their outputs."""

    def __init__(self, arrays: Any, shape: Shape) -> None:
        import kvarn as kv

        self.arrays, self.shape = arrays, shape
        lengths = np.full(shape.batch, shape.context)
        self.pages = Pages(lengths, shape.page, arrays)
        row = shape.size + 4
        rows = shape.batch * shape.new
        self.bytes = shape.batch * shape.context * row + 4 * rows * shape.context
        self.layers = layers_for(self.bytes, arrays)
        outer = (self.pages.total + 1, 1, self.layers, shape.page, 1)
        self.blocks, self.scales = arrays.normal((*outer, shape.size), "f8e4m3"), arrays.normal((*outer, 1), "f32")
        self.scales *= self.scales  # scales are not negative
        arrays.poison(self.blocks[self.pages.total])
        self.scales[self.pages.total] = float("nan")
        before = arrays.integers(lengths - shape.new)
        self.collection = kv.PagedKVCacheCollection(
            self.blocks, before, self.pages.lookup, shape.new, shape.context, self.scales, shape.size
        )
        self.query = arrays.normal((rows, shape.heads, shape.size), "f8e4m3")
        self.weights = arrays.normal((rows, shape.heads), "f32")
        self.offsets = arrays.integers(np.arange(shape.batch + 1) * shape.new)
        self.scores = arrays.empty((rows, shape.context), "f32")
        self.tokens = arrays.integers(np.zeros((rows, shape.chosen), np.int32))
        self.counts = arrays.integers(np.zeros(rows, np.int32))

    def calls(self) -> dict[str, tuple[Callable[[int], Any], Callable[[], float]]]:
        """The timed calls, each with its error function."""
        import kvarn as kv

        def score(layer: int) -> None:
            kv.ops.index_scores(self.collection, layer, self.query, self.weights, self.offsets, self.scores)

        def choose(layer: int) -> None:
            kv.ops.select_tokens(self.scores, tokens=self.tokens, counts=self.counts)

        def both(layer: int) -> None:
            score(layer)
            choose(layer)

        return {"scores": (score, self.error), "tokens": (choose, self.wrong), "both": (both, self.wrong)}

    def poison(self) -> None:
        """Do nothing: selection reads the scores of the line before."""

    def rows(self) -> list[int]:
        """The query rows to check."""
        last = len(self.query) - 1
        return sorted({0, last // 2, last})

    def error(self) -> float:
        """The largest error of a score of layer 0, relative to the largest score."""
        shape, worst = self.shape, 0.0
        for t in self.rows():
            b, i = divmod(t, shape.new)
            ids = self.arrays.index(self.pages.table[b])
            keys = self.arrays.f32(self.blocks[ids, 0, 0]).reshape(-1, shape.size)
            keys = keys * self.arrays.f32(self.scales[ids, 0, 0]).reshape(-1, 1)
            products = self.arrays.einsum("hd,sd->hs", self.arrays.f32(self.query[t]), keys)
            products = products * (products > 0)
            want = numbers(self.arrays.einsum("h,hs->s", self.weights[t], products))[: shape.context]
            found, seen = numbers(self.scores[t]), np.arange(shape.context) < shape.context - shape.new + i + 1
            if (np.isfinite(found) != seen).any():
                return float("nan")
            worst = max(worst, float(np.abs(found - want)[seen].max() / np.abs(want).max()))
        return worst

    def wrong(self) -> float:
        """The number of checked rows whose lists differ from a sort's."""
        bad = 0
        for t in self.rows():
            scores = numbers(self.scores[t])
            order = np.lexsort((np.arange(len(scores)), -scores))[
                : min(self.shape.chosen, int(np.isfinite(scores).sum()))
            ]
            found = numbers(self.tokens[t])
            bad += int(not np.array_equal(found[: len(order)], np.sort(order)) or (found[len(order) :] != -1).any())
        return float(bad)


def lines(arrays: Any, shape: Shape) -> Iterator[dict[str, Any]]:
    """Lines for scoring, selection, and both."""
    p = Problem(arrays, shape)
    for what, (call, error) in p.calls().items():
        record = measured(p, call, error, 1e-3, p.bytes if what == "scores" else 0)
        if "rate" in record:
            seen = shape.batch * shape.new * (shape.context - (shape.new - 1) / 2)
            record["tflops"] = 2 * seen * shape.heads * shape.size / record["us"] / 1e6
        if record["ok"]:
            call(0)  # writes the scores that the next line selects from
        yield {"row": shape.title, "what": what, **record}


COLUMNS = (("µs", "us", ".1f"), ("TB/s", "rate", ".2f"), ("TFLOP/s", "tflops", ".0f"))


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__).parse_args(argv)
    shapes = SHAPES if device_of(options) == "cuda" else SMALL
    return run_all(options, shapes, lines, lambda found: shown(found, "row", "what", *COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
