# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of calls of attention over latent rows: each row is a rule, or a bug that was, and its kernels.

``latent`` is the kernel of Hopper's tensor cores, of 64 query rows a block or of few; ``latent-mma`` is the one over
tiles with products by mma.sync, in which more than 256 values are shared by warps that stand beside one another.
"""

from __future__ import annotations

from typing import Any

from .attention_functions import (
    BIAS_BY_DISTANCE,
    CAPPED,
    DOCUMENTS,
    DOCUMENTS_IN_A_WINDOW,
    FALLING,
    LOGARITHMIC,
    PREFIXES_SEEN,
    THIRDS,
    TWICE_BIASED,
)
from .case import NULL, Listed, Row, WithPrior, named, row, window

MIXED = [50, 0, 9, 3], [2, 1, 3, 0]
BATCH = [130, 0, 61, 7, 0], [2, 1, 3, 0, 0]
ONES = [130, 0, 61, 7, 0], [1, 1, 1, 0, 1]
TWOS = [130, 0, 61, 7, 0], [2, 1, 2, 0, 0]
F8: dict[str, Any] = {"dtype": "f8e4m3"}
F16: dict[str, Any] = {"dtype": "f16"}


def sizes(size: int, value_size: int, group: int = 16) -> dict[str, Any]:
    """Of rows, of values, and of query heads."""
    return {"head_size": size, "value_size": value_size, "group": group}


def wide(**more: Any) -> dict[str, Any]:
    """Blocks of 64 query rows, of sequences of up to four new tokens."""
    return {**sizes(144, 128), "page_size": 64, "schedule": {"max_queries": 4}, **more}


def few(**more: Any) -> dict[str, Any]:
    """Blocks of few query rows, of sequences of one new token."""
    return {**sizes(144, 128), "page_size": 64, "schedule": {"max_queries": 1}, **more}


def in_row(rope: int, inline: int = 0, values: int = 128) -> dict[str, Any]:
    """Rows of 8-bit elements, scales of so many of them and bf16 keys, if any."""
    size = values + (4 * values // inline if inline else 0) + 2 * rope
    return {**F8, "head_size": size, "value_size": values, "rope": rope, "inline_scales": inline}


# --- by rows, on the host and on GPUs ----------------------------------------------------------------

BY_ROWS = [
    row("values are the first columns of the keys", "host simt", *MIXED, dtype="f32", **sizes(24, 16, 3)),
    row("rows of 576 with values of 512", "| host", *MIXED, **sizes(576, 512, 2)),
    row("all columns are values of continuous rows", "host", *MIXED, **F16, kind="continuous", **sizes(48, 48, 5)),
    row("8-bit rows of queries of f32", "simt | host", *MIXED, **F8, query="f32", **sizes(96, 64, 4)),
    row("chunks and a scale", "host", *MIXED, dtype="f32", mask=named("chunked", 8), scale=0.5, **sizes(24, 16, 2)),
    row("one scale a token", "host | simt", *MIXED, **F8, query="f32", scales=("f32", 32), **sizes(32, 24, 2)),
    row("rows that end in eight bf16 keys", "| host simt", *MIXED, query="f32", group=3, **in_row(8, values=32)),
    row("scaled rows that end in five bf16 keys", "host simt", *MIXED, query="f32", group=3, scales=("f32", 36),
        **in_row(5, values=26)),
    row("a query of 8 bits over rows of them", "simt | host", *MIXED, **F8, query="f8e4m3", **sizes(96, 64, 3)),
    row("an output of f32 of a query of 8 bits", "host", *MIXED, **F8, query="f8e4m3", out="f32", **sizes(96, 64, 3)),
    row("rows with their scales in them", "host | simt", *MIXED, query="f32", group=3, **in_row(8, 16, 64)),
    row("rows with one scale in them", "| host", *MIXED, query="f32", group=3, **in_row(16, 128)),
    row("rows with a scale in them and no keys behind", "simt | host", *MIXED, query="f32", group=3, **in_row(0, 32,
        32)),
    row("a kernel of rows chosen by the operation", "auto", [40, 3], [2, 1], **F8, query="f16", scales=("f32", 96),
        **sizes(96, 64, 4)),
]  # fmt: skip

# --- by Hopper's tensor cores ------------------------------------------------------------------------

BY_WGMMA = [
    row("64 rows, no bound of new tokens", "latent", *BATCH, **wide(schedule={})),
    row("heads of one token over two blocks", "latent", *ONES, **few(group=72)),
    row("partial results, pages of 16", "latent", *BATCH, **wide(page_size=16, schedule={"max_queries": 4,
        "splits": 3})),
    row("more splits than tiles", "| latent", [130, 0], [2, 1], **wide(schedule={"max_queries": 4, "splits": 33})),
    row("no column that is no value", "| latent", *BATCH, **F16, **wide(head_size=128)),
    row("four boxes of values, pages of 128", "| latent", *BATCH, **wide(**sizes(288, 256), page_size=128)),
    row("a window over pages of 48", "| latent", *BATCH, **wide(page_size=48, mask=window(70))),
    row("a window over pages of 4", "latent", *BATCH, **wide(page_size=4, mask=window(70))),
    row("chunks over pages of 5", "| latent", *BATCH, **wide(page_size=5, mask=named("chunked_causal", 48))),
    row("pages of 1, partial results", "latent", *BATCH, **wide(page_size=1, schedule={"splits": 2})),
    row("continuous rows without a mask", "latent", *BATCH, **wide(kind="continuous", mask=NULL)),
    row("few rows", "| latent", *ONES, **few()),
    row("8 rows", "| latent", *ONES, **few(group=5)),
    row("24 rows, no column that is no value", "| latent", *ONES, **F16, **few(group=20, head_size=128)),
    row("32 rows of two tokens under chunks", "latent", *TWOS,
        **few(mask=named("chunked_causal", 48), schedule={"max_queries": 2})),
    row("few rows under a window, partial results", "| latent", *ONES,
        **few(mask=window(70), schedule={"max_queries": 1, "splits": 2})),
    row("few rows under a window over pages of 4", "| latent", *ONES, **few(mask=window(70), page_size=4)),
    row("few rows, four boxes of values, pages of 16", "| latent", *ONES, **few(**sizes(288, 256), page_size=16)),
    row("few rows over pages of 5", "| latent", *ONES, **few(page_size=5)),
    row("few rows, continuous", "| latent", *ONES, **few(kind="continuous")),
    row("8-bit rows", "| latent", *BATCH, **F8, **wide()),
    row("8-bit rows with a scale, f16, partial results", "latent", *BATCH, **F8, query="f16", scales=("f32", 144),
        **wide(schedule={"splits": 2})),
    row("8-bit rows with three scales", "| latent", *BATCH, **F8, scales=("f32", 48), **wide()),
    row("other 8-bit rows over pages of 5", "| latent", *BATCH, dtype="f8e5m2", **wide(page_size=5)),
    row("8-bit integers under a window", "latent", *BATCH, dtype="i8", scales=("f32", 144), spread=1 / 64,
        **wide(mask=window(70))),
    row("64 rows that end in bf16", "| latent", *BATCH, **wide(**in_row(16))),
    row("scaled rows that end in bf16, pages of 16", "latent", *BATCH, scales=("f32", 160),
        **wide(**in_row(16), page_size=16)),
    row("64 rows with their scales in them", "| latent", *BATCH, **wide(**in_row(16, 32))),
    row("64 rows with scales of whole boxes in them", "latent", *BATCH, **wide(**in_row(16, 64, 256))),
    row("few rows with their scales in them", "| latent", *ONES, **few(**in_row(16, 32))),
    row("8-bit rows and query", "| latent", *BATCH, **F8, query="f8e4m3", **wide()),
    row("8-bit rows and query, partial results, pages of 5", "latent", *BATCH, **F8, query="f8e4m3",
        **wide(page_size=5, schedule={"splits": 2})),
    row("24 8-bit rows and query", "| latent", *ONES, **F8, query="f8e4m3", **few(group=20)),
    row("40 8-bit rows and query", "| latent", *ONES, **F8, query="f8e4m3", **few(group=36)),
    row("8-bit rows and query, two boxes a copy", "| latent", *BATCH, **F8, query="f8e4m3",
        **wide(**sizes(272, 256), page_size=16)),
    row("few 8-bit rows, two boxes a copy", "| latent", *ONES, **F8, **few(**sizes(464, 256), page_size=16)),
    row("few 8-bit rows, f16, two boxes a copy", "| latent", *ONES, **F8, query="f16", **few(**sizes(272, 256))),
    row("few rows that end in bf16, two boxes a copy", "latent", *ONES, **few(**in_row(48, 0, 256))),
    row("few 8-bit rows", "| latent", *ONES, **F8, **few()),
    row("few 8-bit rows with a scale, partial results", "| latent", *ONES, **F8, scales=("f32", 144),
        **few(schedule={"max_queries": 1, "splits": 2})),
    row("few 8-bit rows with three scales, pages of 5", "| latent", *ONES, **F8, scales=("f32", 48),
        **few(page_size=5)),
    row("few 8-bit rows, 32 of two tokens", "| latent", *TWOS, **F8, scales=("f32", 144),
        **few(schedule={"max_queries": 2})),
    row("few scaled rows that end in bf16", "| latent", *ONES, scales=("f32", 160), **few(**in_row(16))),
    *(row(f"keys of other offsets, {name}", "latent", [70, 30], [2, 1], **given, keys=[0, 1], mask=NULL, page_size=16,
          schedule={"splits": 1, **bound}, **sizes(144, 128, 8))
      for name, given, bound in (("few", F16, {"max_queries": 2}), ("wide", F16, {}), ("stored", F8,
        {"max_queries": 2}))),
]  # fmt: skip

BY_TILES = [
    row("by tiles, 128 values", "tile", *BATCH, **wide()),
    row("by tiles, 512 values", "| tile", [130, 0], [2, 1], **wide(**sizes(576, 512))),
    row("by tiles, 512 values, heads over two blocks", "| tile", [30], [1], **few(**sizes(576, 512, 72))),
    row("by tiles, pages of 5", "| tile", *BATCH, **wide(page_size=5)),
    row("by tiles of 16 rows, 512 values", "| tile", [130, 0], [2, 1],
        **wide(**sizes(576, 512), schedule={"max_queries": 4, "rows": 16})),
    row("by tiles of 8 rows, pages of 5", "tile", *BATCH,
        **wide(group=8, page_size=5, schedule={"max_queries": 4, "rows": 8})),
    row("by tiles of 32 rows, partial results", "| tile", *BATCH,
        **wide(schedule={"max_queries": 4, "splits": 3, "rows": 32})),
    row("by tiles, partial results", "| tile", *BATCH, **wide(schedule={"max_queries": 4, "splits": 3})),
    row("by tiles, window, f16", "| tile", *BATCH, **F16, **wide(mask=window(70), page_size=16)),
    row("by tiles, continuous, four boxes of values", "| tile", *BATCH, **wide(**sizes(288, 256), kind="continuous")),
    row("by tiles, 384 values in two kernels", "| tile", [70], [2], **wide(**sizes(448, 384))),
]  # fmt: skip

# --- by mma.sync -------------------------------------------------------------------------------------

WIDE, SMALL = sizes(576, 512), sizes(144, 128)
BY_MMA = [
    row("512 columns", "latent-mma", [40, 0], [2, 1], page_size=64, **WIDE),
    row("512 columns, tiles of 64 keys", "latent", [40, 0], [2, 1], page_size=5, **sizes(568, 512)),
    row("512 columns in partial results, pages of 5", "| latent-mma", [300], [2], page_size=5, schedule={"splits": 2},
        **WIDE),
    row("512 columns of continuous rows under a window", "| latent-mma", [40, 0], [2, 1], kind="continuous",
        mask=window(30), **WIDE),
    row("288 values", "latent-mma", [40], [1], **F16, **sizes(304, 288)),
    row("272 values, in two kernels", "latent-mma", [40, 0], [2, 1], **sizes(288, 272)),
    row("more splits than are combined", "latent-mma", [4300], [1], page_size=256, schedule={"splits": 64},
        **sizes(24, 16, 4)),
    row("heads of one token over two tiles", "| latent-mma", [40, 0], [2, 1], **sizes(144, 128, 72)),
    row("512 columns of 8 bits", "| latent-mma", [40, 0], [2, 1], **F8, **WIDE),
    row("8-bit rows with a scale", "| latent-mma", [40, 0], [2, 1], **F8, scales=("f32", 144), **SMALL),
    row("three scales, pages of 5", "| latent-mma", [40, 0], [2, 1], **F8, scales=("f32", 48), page_size=5, **SMALL),
    row("8-bit integers", "| latent-mma", [40, 0], [2, 1], dtype="i8", query="f16", scales=("f32", 144), spread=1 / 64,
        **SMALL),
    row("rows that end in bf16, pages of 5", "latent-mma", [40, 0], [2, 1], group=16, page_size=5, **in_row(16)),
    row("continuous rows that end in bf16", "| latent-mma", [40, 0], [2, 1], group=16, kind="continuous", **in_row(16)),
    row("rows with their scales in them", "| latent-mma", [40, 0], [2, 1], group=16, **in_row(16, 32)),
    row("rows of 656 bytes", "latent-mma", [40, 0], [2, 1], group=16, **in_row(64, 128, 512)),
]  # fmt: skip

# --- lists, sinks and prior results ------------------------------------------------------------------

LISTS = [
    row("listed rows of f32", "host simt", [50, 0, 70, 9], [2, 1, 3, 0], dtype="f32", form=Listed(), **sizes(24, 16,
        3)),
    row("listed rows of pages of 4", "host | simt", [50, 0, 70], [2, 1, 3], page_size=4, form=Listed(), **sizes(96, 64,
        2)),
    row("listed rows of f16, all columns values", "| simt", [50, 0, 70], [2, 1, 3], **F16, form=Listed(counted=False),
        **sizes(50, 50, 5)),
    row("listed 8-bit rows with a scale", "simt | host", [50, 0, 70], [2, 1, 3], **F8, query="f32", scales=("f32", 32),
        form=Listed(), **sizes(32, 24, 2)),
    row("listed 8-bit integers", "| simt", [50, 0, 70], [2, 1, 3], dtype="i8", query="f32", scales=("f16", 16),
        spread=1 / 64, form=Listed(), **sizes(48, 32, 2)),
    row("listed rows that end in bf16", "host latent | simt", [60, 0], [2, 1], group=16, form=Listed(), **in_row(16)),
    row("lists of no entries", "host simt", [20, 0], [2, 1], dtype="f32", form=Listed(0), **sizes(24, 16, 2)),
    row("tensor cores give zeros for lists of no entries", "latent latent-mma", [20, 0], [2, 1], form=Listed(0),
        **SMALL),
    row("zeros of two splits over two blocks", "| latent", [20, 0], [2, 1], form=Listed(0), schedule={"splits": 2},
        **sizes(144, 128, 72)),
    row("tensor cores gather listed rows", "latent latent-mma", [90, 0, 60], [1, 1, 2], page_size=12, form=Listed(75),
        schedule={"splits": 1}, **sizes(160, 128)),
    row("listed rows of f16 in three splits", "latent | latent-mma", [90, 0, 60], [1, 1, 2], page_size=12, **F16,
        form=Listed(75), schedule={"splits": 3}, **sizes(144, 128, 72)),
    row("listed rows of 576", "| latent latent-mma", [90, 0, 60], [1, 1, 2], page_size=12, form=Listed(75), **WIDE),
    row("listed 8-bit rows in two splits", "latent-mma | latent", [280, 0, 60], [1, 1, 2], page_size=12, **F8,
        scales=("f32", 160), form=Listed(300), schedule={"splits": 2}, **sizes(160, 128)),
    row("three heads of listed rows", "| latent-mma", [280, 0], [1, 1], page_size=12, **F16, form=Listed(300),
        **sizes(136, 128, 3)),
]  # fmt: skip

BESIDE: dict[str, Any] = {**F16, "sinks": True, "form": WithPrior(), **sizes(144, 128, 8)}
THREE = [130, 0, 9], [2, 1, 0]
PRIOR = [
    row("sinks and a prior result: wide", "| latent", *THREE, schedule={"splits": 1}, **BESIDE),
    row("sinks and a prior result: wide, split, an output of f32", "latent", *THREE, out="f32", schedule={"splits": 2},
        **BESIDE),
    row("sinks and a prior result: few", "| latent", *THREE, out="f32", schedule={"max_queries": 2, "splits": 1},
        **BESIDE),
    row("sinks and a prior result: few, many splits", "latent", *THREE, schedule={"max_queries": 2, "splits": 9},
        **BESIDE),
    row("sinks and a prior result: mma.sync, split", "latent-mma", *THREE, out="f32", schedule={"splits": 2}, **BESIDE),
    row("sinks and a prior result by rows", "host simt", *THREE, **BESIDE),
    row("listed rows end alike", "simt latent", [40, 12], [1, 1], out="f32",
        **{**BESIDE, "form": WithPrior(Listed(20))}),
]  # fmt: skip

# --- scores and masks as functions -------------------------------------------------------------------

REST = [50, 0, 70], [2, 9, 1]
FUNCTIONS = [
    row("a bias by distance, and documents", "host auto", [40, 0, 9], [3, 7, 0], **F16, score=BIAS_BY_DISTANCE,
        mask=DOCUMENTS, **sizes(24, 16, 3)),
    row("functions of scaled rows", "auto | host", [40, 0, 9], [3, 7, 0], **F8, query="f16", scales=("f32", 24),
        score=BIAS_BY_DISTANCE, mask=DOCUMENTS, **sizes(24, 16, 3)),
    row("functions of continuous rows", "| host", [40, 0, 9], [3, 7, 0], kind="continuous", score=BIAS_BY_DISTANCE,
        mask=DOCUMENTS, **sizes(24, 16, 3)),
    row("a prefix that is seen whole, and a capped score", "host simt", *MIXED, dtype="f32", page_size=4, score=CAPPED,
        mask=PREFIXES_SEEN, **sizes(24, 16, 2)),
    row("a mask by head, and logarithms of distances", "simt | host", *MIXED, dtype="f32", page_size=4,
        score=LOGARITHMIC,
        mask=THIRDS, **sizes(24, 16, 2)),
    row("a score that falls with distance", "| host simt", *MIXED, dtype="f32", page_size=4, score=FALLING,
        **sizes(24, 16, 2)),
    *(row(f"tensor cores take functions: {name}", kernel, *REST, **given, score=TWICE_BIASED,
          mask=DOCUMENTS_IN_A_WINDOW, schedule=schedule, **sizes(144, 128, heads))
      for name, kernel, given, heads, schedule in (
          ("wide", "| latent", F16, 16, {"splits": 1}), ("mma.sync", "latent-mma", F8, 16, {"splits": 2}),
          ("partial results", "| latent", {}, 16, {"splits": 3}), ("few", "| latent", {}, 2, {"max_queries": 9}),
          ("few 8-bit rows", "latent", F8, 2, {"max_queries": 9, "splits": 2}), ("8-bit rows", "latent", F8, 16, {}))),
    row("tables of scores at the rows that a warp has of these", "latent-mma", [50, 0], [2, 9], **F16,
        score=BIAS_BY_DISTANCE, mask=window(40), **sizes(576, 512, 8)),
    *(row(f"no keys but cached ones: {kernel} {bound}", kernel, [70, 30], [2, 1], **F16, keys=[0, 0], mask=NULL,
          schedule=bound, **sizes(144, 128, 8))
      for kernel, bound in (("latent", {"max_queries": 2}), ("latent-mma", {}), ("latent", {}))),
]  # fmt: skip

TABLES: dict[str, list[Row]] = {
    "by rows": BY_ROWS, "by wgmma": [*BY_WGMMA, *BY_TILES], "by mma.sync": BY_MMA, "lists": LISTS, "prior": PRIOR,
    "functions": FUNCTIONS,
}  # fmt: skip
