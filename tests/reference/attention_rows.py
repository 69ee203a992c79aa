# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of calls of attention: each row is a rule, or a bug that was, and the kernels that it is tried on.

Lengths at the edges of tiles under every mask, and forms of a call at these, are in tests/ops/test_edges_attention.py;
here are elements, sizes, what is asked of scores, and schedules. Behind a bar are kernels of make check-all and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .case import (
    LAYER,
    NULL,
    Case,
    InLayout,
    Mask,
    OfChosenPages,
    OfOperands,
    Padded,
    Row,
    WithPrior,
    named,
    row,
    window,
)
from .foreign import LAYOUTS
from .operands import dense_parts, ragged_parts

MIXED = [50, 0, 30, 7], [9, 0, 1, 40]  # prompts, a sequence without tokens, one token behind others
FEW = [70, 0, 7], [1, 2, 1]  # a step of a decode
INFINITE: dict[str, Any] = {"shape": {"poison": np.inf}}
LARGE = [(37 * i) % 90 for i in range(270)], [1] * 230 + [2 + (11 * i) % 58 for i in range(40)]
LONG = [150, 0, 7], [1, 2, 1]  # of which a decode splits the first


def poisoned(first: int, end: int) -> Callable[[Case], None]:
    """What makes tokens of the first sequence NaN."""

    def change(case: Case) -> None:
        for cache in case.problem.caches(LAYER):
            nothing = np.full((end - first, cache.num_heads, cache.head_size), np.nan, cache.dtype.numpy)
            heads, tokens = np.arange(cache.num_heads)[:, None], np.arange(first, end)[:, None, None]
            cache.store(0, heads, tokens, np.arange(cache.head_size), nothing)

    return change


def uneven_scales(case: Case) -> None:
    """Scales of 0, of either sign, and far below those of other tokens and granules."""
    rng, scales = np.random.default_rng(18), case.problem.collection.scales
    factors = np.ldexp(rng.choice([0.0, 1.0, 1.0, -1.0], scales.shape), -rng.integers(0, 41, scales.shape))
    np.multiply(scales, factors.astype(np.float32), out=scales, where=np.isfinite(scales))


def rows_of_all_sizes(case: Case) -> None:
    """A query's elements that are 2^15 times others, rows that are 2^-60 of others, and one of zeros."""
    query = case.query_rows
    query[...] = (query.astype(np.float32) * 2.0**-9).astype(query.dtype)
    query[:, :, 3] = 2.0**6
    query[4] = (query[4].astype(np.float32) * 2.0**-60).astype(query.dtype)
    query[5] = 0.0


# --- what a call is ----------------------------------------------------------------------------------

CALLS = [
    row("a window narrows the causal mask", "host", *MIXED, dtype="f32",
        mask=Mask("window", {"window": 5}, window(5).seen)),
    row("a chunk narrows the causal mask", "host", *MIXED, dtype="f32",
        mask=Mask("chunk", {"chunk": 8}, named("chunked_causal", 8).seen)),
    row("heads of keys have groups of three query heads", "host mma | simt tile", *MIXED, heads=3, group=3,
        page_size=8),
    row("sinks and softcap under a window", "host tile | simt mma", [20, 0, 9], [3, 1, 4],
        sinks=True, softcap=3.0, mask=window(4), scale=1.0),
    row("sinks and softcap of a padded batch", "| mma host", *MIXED, form=Padded(), sinks=True, softcap=2.0, scale=0.3),
    row("slopes bend scores by distance, either way", "host | mma simt tile", [90, 8], [9, 0], slopes=[0.5, 0.25,
        0.01, -0.125]),
    row("slopes, softcap and sinks", "tile | host mma simt", *MIXED, slopes=True, softcap=2.0, sinks=True),
    row("slopes without a causal mask", "host", *MIXED, dtype="f32", slopes=[0.5, 0.25, 0.01, -0.125], mask=NULL),
    row("a scale may be negative", "tile | host mma simt", [40], [9], scale=-0.3),
    row("a scale may be zero", "tile | mma", [40], [9], scale=0.0),
    row("large scores do not overflow", "host", [40], [2], dtype="f32", spread=1e4, scale=10.0),
    row("maxima move where later scores are larger", "tile | mma", [260, 130], [33, 5], scale=2.0),
    row("weights of f16 stay finite where maxima move", "tile | mma", [260, 130], [33, 5], dtype="f16", scale=2.0),
    row("a sink counts in a row without keys", "host decode | mma simt tile", [0, 4], [2, 1],
        mask=NULL, keys=[0, 0], sinks=True),
    row("cross attention of a causal mask", "host mma | simt tile", [5, 0, 12], [9, 7, 3], keys=[9, 3, 3]),
    row("cross attention of a padded batch", "host | mma", [5, 0, 12], [9, 7, 3], keys=[9, 0, 3], mask=NULL,
        form=Padded()),
    row("no sequence has new tokens", "host tile | simt mma", [4, 30], [0, 0]),
    row("there are no sequences", "host simt | tile", [], []),
    row("no row of a padded batch is valid", "mma | host", [4, 30], [0, 0], form=Padded(3)),
    row("rows of no sequence are not written", "host mma decode | simt tile", [30, 8], [2, 3], around=3),
    row("keys that slid out of every window may be anything", "host tile decode | mma simt", [100], [2],
        mask=window(20), change=poisoned(0, 80)),
    row("tables may be signed", "host", *MIXED, dtype="f32", shape={"table_dtype": np.int32}),
    row("infinities that hold no token", "host mma | simt tile", [0, 3, 40, 2], [30, 1, 7, 20], head_size=256,
        **INFINITE),
    row("infinities past pages of many tokens", "host", [512, 77], [1, 1], page_size=128, mask=window(100), **INFINITE),
    row("infinities past chunks", "| mma host", [40, 0, 5], [3, 2, 1], mask=named("chunked_causal", 16), **INFINITE),
    row("infinities without a mask", "decode | host", [512, 77], [1, 1], mask=NULL, **INFINITE),
    row("infinities beside wide heads", "simt | host", [0, 21, 2], [9, 1, 4], head_size=512, **INFINITE),
    row("empty sequences first, last and between", "host decode | mma simt tile", [3, 0, 40, 7, 0], [0, 0, 2, 0, 0],
        around=4),
    row("a large batch of decodes and prefills", "host", LARGE[0], LARGE[1], head_size=16, page_size=256),
]  # fmt: skip

# --- caches ------------------------------------------------------------------------------------------

CACHES = [
    row("pages of one token", "host | mma simt tile", *MIXED, page_size=1),
    row("pages of three tokens", "mma | host", *MIXED, page_size=3),
    row("pages of 128 tokens", "tile | host", [150, 0], [9, 3], page_size=128),
    row("continuous", "host | mma simt tile", [21, 9], [23, 11], kind="continuous", heads=2),
    row("tables of every layer, as of FlashAttention 3", "mma | simt host tile", [21, 9], [23, 11], kind="fa3",
        heads=2),
    row("continuous, padded", "host | mma", [21, 9], [5, 11], kind="continuous", head_size=48, heads=3, form=Padded()),
    row("FlashAttention 3, padded", "| simt host", [21, 9], [5, 11], kind="fa3", head_size=48, heads=3, form=Padded()),
    row("heads of one element", "host | simt", *MIXED, dtype="f32", head_size=1),
    row("heads of 7", "simt | host", *FEW, dtype="f32", head_size=7),
    row("heads of one element that end within the products' step", "mma | tile", *MIXED, head_size=1),
    row("heads of 20 that are read by elements", "tile | mma", *MIXED, head_size=20, sinks=True),
    row("heads of 33 of 8 bits", "mma | tile", [40, 0], [9, 3], dtype="f8e4m3", head_size=33, scales=("f32", 33)),
    row("heads of 6 of f32", "mma", *MIXED, dtype="f32", head_size=6, mask=window(20)),
    row("heads of 36, keys in splits", "mma | tile", [150], [1], dtype="f16", head_size=36, page_size=5,
        schedule={"splits": 2}, form=WithPrior()),
    row("two kernels of columns of heads of 300", "| tile", [40], [9], head_size=300),
    row("heads of 8 have columns of zeros beside them", "tile | mma", [70, 0], [19, 3], head_size=8),
    row("heads of 72", "| tile mma", [70, 0], [19, 3], head_size=72),
    row("heads of 80", "| mma host", [21], [40], head_size=80, page_size=8),
    row("heads of 192", "| mma tile", [21], [40], head_size=192, page_size=64),
    row("heads of 256", "tile | host", [21], [9], head_size=256),
    row("wide heads, a warp a row", "simt", [40, 0], [3, 2], head_size=320),
    row("columns of wide heads are of two kernels", "| tile", [21], [9], head_size=512, sinks=True),
    row("two kernels of columns under a mask that both have", "| tile", [21], [9], head_size=512, page_size=64,
        schedule={"rows": 64}, mask=named("chunked", 24)),
    row("two kernels of columns, keys in splits", "tile", [150], [1], dtype="f16", head_size=264, page_size=5,
        schedule={"rows": 64, "keys": 32, "splits": 2}, mask=window(140), sinks=True),
    row("two kernels of 8-bit columns", "| tile", [21], [9], dtype="f8e4m3", query="f16", head_size=512),
    row("two kernels of columns of f32", "| tile", [21], [9], dtype="f32", head_size=384),
    row("two kernels of columns by mma.sync", "| mma", [21], [9], head_size=320),
    # Nothing says so but the error: tf32 alone is off by 1e-3.
    row("tiles of f32 multiply both parts of an element", "mma | tile", [70, 0], [9, 3], dtype="f32", mask=window(50)),
    row("f32 of heads of no whole steps and pages of 5", "| mma", [70, 0], [9, 3], dtype="f32", head_size=72,
        page_size=5),
    row("f32, a warp a row of pages of 5", "| simt", [40, 0], [3, 2], dtype="f32", head_size=48, page_size=5),
]  # fmt: skip

# --- elements of 8 bits, and scales ------------------------------------------------------------------

NARROW = [
    row("i8 of a scale a head", "host tile decode | simt mma", *FEW, dtype="i8", scales=("f32", 64), scale=0.0005),
    row("i8 of a scale for each four", "host mma | simt tile", [21], [9], dtype="i8", query="f16", scales=("f16", 4),
        scale=0.0005),
    row("i8 of a scale for each element", "host", *FEW, dtype="i8", query="f32", scales=("f32", 1), scale=0.001),
    row("i8 of granules of 12", "| host", *FEW, dtype="i8", query="f32", head_size=48, scales=("f32", 12), scale=0.01),
    row("i8 of queries of f32", "mma", [70, 0], [9, 3], dtype="i8", query="f32", scales=("f32", 16), scale=0.001),
    row("f8e4m3 of granules of 8", "simt | tile host mma", [40, 0], [9, 3], dtype="f8e4m3", scales=("f32", 8)),
    row("f8e4m3 of scales of powers of two", "host", *FEW, dtype="f8e4m3", query="f32", scales=("f8e8m0", 16)),
    row("f8e5m2 of scales of bf16", "host", *FEW, dtype="f8e5m2", query="f32", head_size=48, scales=("bf16", 48)),
    row("f8e4m3 without scales", "tile | simt mma host", [40, 0], [9, 3], dtype="f8e4m3"),
    row("f8e5m2 without scales", "mma | host tile", [40, 0], [9, 3], dtype="f8e5m2", query="f16"),
    row("f8e4m3 over queries of f32", "simt | host", *FEW, dtype="f8e4m3", query="f32"),
    row("i8 of a padded batch", "decode | host mma", *FEW, dtype="i8", scales=("f32", 32), scale=0.0005,
        form=Padded(2)),
    row("f8e4m3 of pages of 5", "| tile", [70, 0], [19, 3], dtype="f8e4m3", head_size=128, page_size=5),
    row("f8e4m3 of granules of 40 under a window", "| mma", [150, 0], [9, 3], dtype="f8e4m3", head_size=80,
        scales=("f32", 40), mask=window(37)),
]  # fmt: skip

# Keys that products take as they are stored, beside queries that are the sum of two terms of e4m3.
AS_STORED = [
    row("prompts, decodes and no tokens", "tile", [150, 0, 7], [1, 0, 33], dtype="f8e4m3", heads=2),
    row("heads of no whole step", "| tile", [70, 3], [5, 9], dtype="f8e4m3", head_size=80, heads=2),
    row("heads that start within 16 bytes", "tile", [70, 3], [5, 9], dtype="f8e4m3", head_size=72, heads=2),
    row("two panels of columns", "| tile", [70], [9], dtype="f8e4m3", head_size=160),
    row("one stage of wide heads", "| tile", [150], [9], dtype="f8e4m3", head_size=512),
    row("three blocks a multiprocessor", "tile", [150], [9], dtype="f8e4m3", schedule={"rows": 64, "occupancy": 3}),
    row("three warpgroups by turns", "| tile", [250], [50], dtype="f8e4m3", head_size=40,
        schedule={"rows": 192, "ping_pong": True, "keys": 64}),
    row("four warpgroups", "| tile", [250], [70], dtype="f8e4m3", head_size=48,
        schedule={"rows": 256, "keys": 64, "producers": 1}),
    row("a negative scale of stored keys", "| tile", [70], [9], dtype="f8e4m3", scale=-0.1),
    row("slopes of stored keys", "| tile", [300], [5], dtype="f8e4m3", slopes=[-0.2, 0.2, 0.5, 0.9]),
    row("softcap of stored keys", "| tile", [70], [9], dtype="f8e4m3", softcap=2.0),
    row("maxima of stored keys that move", "tile", [300], [5], dtype="f8e5m2", scale=1.5),
    row("stored keys in splits", "| tile", [300], [5], dtype="f8e4m3", schedule={"splits": 2}),
    row("three warpgroups of scaled rows", "tile", [250], [50], dtype="f8e4m3", scales=("f32", 16),
        schedule={"rows": 192, "producers": 1, "keys": 64}),
    row("three warpgroups of rows that threads address", "tile", [250], [50], dtype="f8e4m3", page_size=1,
        schedule={"rows": 192, "producers": 1, "keys": 64}),
    row("a query row of elements of all sizes", "host tile", [70], [9], dtype="f8e4m3", heads=2,
        change=rows_of_all_sizes),
]  # fmt: skip

# Queries of 8 bits, multiplied as they are; weights are rounded to e4m3 on GPUs. Without logarithms of sums these are
# of rounded weights, and rounding shows which maxima move.
SMALL_QUERY: dict[str, Any] = {"dtype": "f8e4m3", "query": "f8e4m3", "heads": 2, "head_size": 32}
ALONE: dict[str, Any] = {**SMALL_QUERY, "logarithms": False, "seed": 8}
OF_8_BITS = [
    row("8-bit queries: prompts, decodes and no tokens", "host auto", [150, 0, 7], [1, 0, 33], **SMALL_QUERY),
    row("8-bit queries: a window that begins in a tile", "auto", [140, 30], [3, 20], mask=window(21), **SMALL_QUERY),
    row("8-bit queries: pages that are no boxes", "auto", [70, 3], [5, 9], page_size=5, **SMALL_QUERY),
    row("8-bit queries: pages of half a group", "| auto", [140], [5], page_size=8, **SMALL_QUERY),
    row("8-bit queries: two panels of columns", "| auto", [70], [9], **{**SMALL_QUERY, "head_size": 160}),
    row("8-bit queries: turns that end when products are done", "auto", [300, 40, 0], [5, 33, 0],
        **{**SMALL_QUERY, "heads": 1, "head_size": 128}),
    row("8-bit queries: a negative scale", "| host auto", [70], [9], scale=-0.1, **SMALL_QUERY),
    row("8-bit queries: softcap", "host | auto", [70], [9], softcap=2.0, **SMALL_QUERY),
    row("8-bit queries: an output of f16", "| host auto", [40], [9], out="f16", **SMALL_QUERY),
    row("8-bit queries: an output of f32", "| auto", [40], [9], out="f32", **SMALL_QUERY),
    row("weights over their own sum: maxima that move", "auto", [300], [5], scale=1.5, **ALONE),
    row("weights over their own sum: maxima of folded scores", "auto", [300], [5],
        slopes=np.linspace(-0.2, 0.9, 8).tolist(), **ALONE),
    row("weights over their own sum: equal scores", "| auto", [300], [5], scale=0.0, **ALONE),
    row("weights over their own sum: a window", "| auto", [140, 30], [3, 20], mask=window(21), **ALONE),
]  # fmt: skip

# --- splits of keys ----------------------------------------------------------------------------------

# Tiles of 32 keys: 12 of them, none, one that is not split, and four whose last has one key, of which rows see few.
SPLIT = [360, 0, 5, 0], [7, 0, 3, 97]
THREE = {"keys": 32, "splits": 3, "rows": 64}
SPLITS = [
    row("splits: every key", "| tile", *SPLIT, mask=NULL, schedule=THREE),
    row("splits: a last tile of one key", "| tile", *SPLIT, schedule=THREE),
    row("splits: windows that begin in a split", "| tile", *SPLIT, mask=window(150), schedule=THREE),
    row("splits: windows of one key", "| tile", *SPLIT, mask=window(1), schedule=THREE),
    row("splits: chunks", "| tile", *SPLIT, mask=named("chunked", 96), schedule=THREE),
    row("splits: chunks to the query", "| tile", *SPLIT, mask=named("chunked_causal", 64), schedule=THREE),
    row("splits end with sinks, slopes and softcap", "tile", *SPLIT, sinks=True, slopes=True, softcap=5.0,
        schedule=THREE),
    row("splits of a padded batch, groups of three", "tile", [200, 0, 30], [9, 0, 40], group=3, heads=2, form=Padded(),
        schedule=THREE),
    row("splits of groups of eight", "| tile", [200, 0, 30], [9, 0, 40], group=8, schedule=THREE),
    row("splits of values of 80", "| tile", [130], [9], head_size=80, page_size=5, schedule=THREE),
    row("splits of values of 256", "| tile", [130], [9], head_size=256, schedule=THREE),
    row("splits of queries of f16", "| tile", [130], [9], dtype="f16", head_size=128, schedule=THREE),
    row("more splits than tiles", "| tile", *SPLIT, schedule={**THREE, "splits": 32}),
    row("splits by mma.sync", "mma", *SPLIT, schedule=THREE),
    row("splits for no new tokens", "| tile", [99, 300], [0, 0], schedule=THREE),
    row("splits and a prior result at once", "tile", *SPLIT, form=WithPrior(), schedule=THREE),
]  # fmt: skip

# --- beside other results, and lists -----------------------------------------------------------------

NO_KEYS: dict[str, Any] = {
    "mask": NULL,
    "keys": [2, 0, 0, 1],
    "form": WithPrior(),
}  # sequence 1 has queries and no keys
PRIOR = [
    row("a prior result, sinks and an output of f16", "decode | simt mma tile", [150, 0, 9, 30], [2, 1, 0, 1],
        dtype="f16", sinks=True, **NO_KEYS),
    row("a prior result and an output of f32", "tile | mma simt decode", [150, 0, 9, 30], [2, 1, 0, 1],
        dtype="f16", out="f32", **NO_KEYS),
    row("a prior result that a kernel combines", "decode", [150, 0, 9, 30], [2, 1, 0, 1], dtype="f16", out="f32",
        schedule={"combine": 4, "min_tiles": 2}, **NO_KEYS),
    row("a prior result of columns that warps share", "| decode", [90], [1], dtype="f16", out="f32", head_size=384,
        form=WithPrior()),
    row("a prior result of shared columns, combined", "decode", [90], [1], dtype="f16", out="f32", head_size=384,
        schedule={"combine": 4, "min_tiles": 2}, form=WithPrior()),
    row("rows of f32 end where the head does", "tile | mma", [20], [5], dtype="f16", out="f32", head_size=72,
        form=WithPrior()),
    row("rows of f32 of two kernels of columns", "| tile", [20], [5], dtype="f16", out="f32", head_size=264,
        form=WithPrior()),
    row("a prior result of each narrow head", "decode", [150, 9], [2, 1], dtype="f16", head_size=8, heads=2,
        form=WithPrior()),
    row("a prior result on the host", "host", [40, 0, 7], [3, 1, 0], heads=2, form=WithPrior()),
    row("a prior result of heads of one element", "host", [40, 0, 7], [3, 1, 0], dtype="f32", head_size=1,
        form=WithPrior()),
]  # fmt: skip

OPERANDS = [
    row("ragged operands of i8", "host mma | simt tile", [20, 9], [3, 2], dtype="i8", query="f16", scales=("f16", 4),
        scale=0.0005,
        form=OfOperands(ragged_parts)),
    row("dense operands of f8e4m3 with scales", "mma | host", [20, 9], [3, 2], dtype="f8e4m3", scales=("f32", 8),
        form=OfOperands(dense_parts)),
    row("dense operands of f8e4m3", "simt | host", [20, 9], [3, 2], dtype="f8e4m3", form=OfOperands(dense_parts)),
    row("ragged operands with sinks and softcap", "host", *MIXED, dtype="f32", sinks=True, softcap=2.0,
        form=OfOperands(ragged_parts)),
    row("dense operands with slopes", "host", *MIXED, dtype="f32", slopes=True, form=OfOperands(dense_parts)),
]  # fmt: skip

PICKED: dict[str, Any] = {"form": OfChosenPages(0.6), "heads": 2, "group": 2}
PAGES = [
    row("listed pages: one tile a page", "host decode | simt", [40, 0, 5], [1, 1, 0], **PICKED),
    row("listed pages: several tiles a page", "auto | tile", [140, 0, 5], [1, 1, 0], page_size=64, **PICKED),
    row("listed pages: several pages a tile", "auto | simt", [40, 0, 5], [1, 1, 0], dtype="f16", page_size=4, **PICKED),
    row("listed pages: pages that straddle tiles", "| auto", [40, 0, 5], [1, 1, 0], head_size=128, page_size=12,
        **PICKED),
    row("listed pages: f8e4m3 with scales", "auto | host", [40, 0, 5], [1, 1, 0], dtype="f8e4m3", scales=("f32", 64),
        **PICKED),
    row("listed pages: i8 with granules", "| auto", [40, 0, 5], [1, 1, 0], dtype="i8", page_size=8, scales=("f16", 32),
        scale=None, spread=1e-3, **PICKED),
    row("listed pages: f32", "host | auto", [40, 0, 5], [1, 1, 0], dtype="f32", head_size=32, **PICKED),
    row("listed pages: FlashAttention 3", "| auto", [40, 0, 5], [1, 1, 0], kind="fa3", **PICKED),
    row("listed pages without counts", "auto | host", [40, 0, 5], [1, 1, 0], heads=2,
        form=OfChosenPages(0.6, counted=False)),
    row("listed pages: a window of positions, not of places", "host auto", [3, 60], [0, 3], page_size=4,
        mask=window(40), **PICKED),
    row("listed pages: chunks of positions", "| auto", [3, 60], [0, 3], mask=named("chunked_causal", 32), **PICKED),
    row("listed pages: softcap and sinks", "| host auto", [3, 60], [0, 3], softcap=3.0, sinks=True, **PICKED),
    row("listed pages: slopes by positions", "auto | host", [3, 60], [0, 3], slopes=[0.5, 0.25, 0.125, 0.0625],
        **PICKED),
    row("listed pages: a schedule of three stages", "| auto", [90, 20], [1, 1], schedule={"stages": 3}, **PICKED),
    row("listed pages: the same whatever the batch", "auto", [90, 20], [1, 1], schedule={"batch_invariant": True},
        **PICKED),
    row("empty lists", "host | auto", [90, 20], [1, 1], heads=2, form=OfChosenPages(0.0)),
]  # fmt: skip

# --- decode ------------------------------------------------------------------------------------------

COMBINED = {"combine": 4, "min_tiles": 2}
FIXED = {"batch_invariant": True, "split_size": 64}
OTHERS = [150, 0, 7, 0], [1, 2, 1, 2]  # keys of their own count: sequence 1 has queries and no key
DECODES = [
    row("a long sequence is split and merged", "decode", *LONG, heads=2, group=2),
    row("8-bit splits", "decode", *LONG, dtype="f8e4m3", heads=2, group=2),
    row("splits of every key", "| decode", *LONG, dtype="f16", heads=2, group=2, mask=NULL),
    row("splits of chunks", "| decode", *LONG, dtype="f16", heads=2, group=2, mask=named("chunked", 24)),
    row("slopes and softcap", "decode", [90, 8, 33], [2, 0, 1], slopes=[0.5, 0.25, 0.01, -0.125], softcap=2.0),
    row("sinks of a window", "| decode", [90, 8, 33], [2, 0, 1], sinks=True, mask=window(9)),
    *(row(f"slopes of an 8-bit cache in parts, combined by {n or 'none'}", kernels, [700, 40], [2, 1], group=2,
          dtype="f8e4m3", slopes=[0.03, 0.002], scale=0.1, schedule={"combine": n, "min_tiles": 2})
      for n, kernels in ((0, "| decode"), (4, "decode"))),
    row("rows without keys of their own", "decode", *OTHERS, mask=NULL, keys=[1, 0, 0, 2], sinks=True),
    row("rows without keys, combined", "| decode", *OTHERS, mask=NULL, keys=[1, 0, 0, 2], sinks=True,
        schedule=COMBINED),
    row("rows without keys, fixed splits", "| decode", *OTHERS, mask=NULL, keys=[1, 0, 0, 2], schedule=FIXED),
    row("a batch of one without keys", "decode", [0], [1], mask=NULL, keys=[0], schedule={"max_batch": 1,
        "combine": 4}),
    # Also where the keys end one before a tile does, which is where a query's own token would be its last.
    row("no key past its own count", "decode", [31, 40], [1, 1], dtype="f16", keys=[0, 1]),
    row("scales of i8 of half a head", "| decode", *FEW, dtype="i8", heads=2, scales=("f16", 32), scale=0.0005),
    row("scales of bf16", "decode", *FEW, dtype="f8e4m3", scales=("bf16", 64)),
    row("scales that are powers of two", "| decode", *FEW, dtype="f8e5m2", scales=("f8e8m0", 32)),
    row("granules of 16", "| decode", *FEW, dtype="i8", scales=("f32", 16), scale=0.0005),
    row("granules of 4, narrower than a step", "decode", *FEW, dtype="i8", scales=("f32", 4), scale=0.0005),
    row("granules of 8 of scales of bf16", "| decode", *FEW, dtype="f8e4m3", head_size=32, scales=("bf16", 8)),
    row("granules of 48", "| decode", *FEW, dtype="f8e5m2", head_size=96, scales=("f32", 48)),
    row("granules of 40 of a head of 120", "| decode", *FEW, dtype="f8e4m3", head_size=120, scales=("f32", 40)),
    row("granules of 24 of a head of 56", "| decode", *FEW, dtype="i8", head_size=56, scales=("f32", 24), scale=0.0005),
    row("granules of 4 of a head of 24", "| decode", *FEW, dtype="i8", head_size=24, scales=("f32", 4), scale=0.0005),
    row("scales far below others, i8", "decode", *FEW, dtype="i8", query="f16", scales=("f32", 4), scale=0.0005,
        change=uneven_scales),
    row("scales far below others, f8e4m3", "| decode", *FEW, dtype="f8e4m3", query="f16", scales=("f32", 8), scale=0.1,
        change=uneven_scales),
    row("heads of 8", "| decode", *FEW, head_size=8, heads=2, group=2),
    row("heads of 24 and pages of 5", "decode", *FEW, dtype="f16", head_size=24, page_size=5),
    row("heads of 72", "| decode", *FEW, head_size=72),
    row("heads of 120 and groups of 10", "| decode", *FEW, dtype="f16", head_size=120, page_size=7, group=10, heads=2),
    row("8-bit heads of 16 and pages of 5", "| decode", *FEW, dtype="f8e4m3", head_size=16, page_size=5),
    row("8-bit heads of 72", "| decode", *FEW, dtype="f8e5m2", head_size=72),
    row("8-bit heads of 80, pages of 1, groups of 10", "decode", *FEW, dtype="f8e4m3", head_size=80, page_size=1,
        group=10, heads=2),
    row("8-bit heads of 120 and pages of 48", "| decode", *FEW, dtype="f8e4m3", head_size=120, page_size=48),
    row("f32 of heads of 8", "| decode", *FEW, dtype="f32", head_size=8),
    row("f32 of heads of 72, pages of 5, groups of 10", "| decode", *FEW, dtype="f32", head_size=72, page_size=5,
        group=10, heads=2),
    row("f32 of heads of 256 and groups of 6", "| decode", *FEW, dtype="f32", head_size=256, group=6, heads=2),
    row("warps share columns of f32 and see the same scores", "| decode", *LONG, dtype="f32", head_size=512),
    row("warps share columns, combined", "decode", *LONG, head_size=384, group=2, schedule={"combine": 4}),
    row("warps share columns of many rows", "| decode", *FEW, dtype="f16", head_size=512, group=16, heads=2),
    row("warps share 8-bit columns, fixed splits, combined", "| decode", *LONG, dtype="f8e4m3", head_size=192,
        group=16, heads=2,
        schedule={"combine": 4, "batch_invariant": True, "split_size": 32}),
    row("narrow heads that a warp takes as one", "decode", [300, 0, 7], [1, 2, 1], head_size=8, heads=4, group=3,
        sinks=True, slopes=True, mask=window(21)),
    row("narrow heads of 16, six of them", "| decode", [300, 0, 7], [1, 2, 1], dtype="f16", head_size=16, heads=6,
        group=2,
        sinks=True, slopes=True, softcap=5.0),
    row("8-bit narrow heads, combined", "decode", [300, 0, 7], [1, 2, 1], dtype="f8e4m3", head_size=8, heads=8, group=2,
        sinks=True, slopes=True, schedule={"combine": 4, "blocks": 8}),
    row("narrow heads of f32", "| decode", [300, 0, 7], [1, 2, 1], dtype="f32", head_size=8, heads=4, sinks=True,
        slopes=True, schedule={"combine": 0}),
    row("narrow heads, an odd number", "| decode", [300, 0, 7], [1, 2, 1], head_size=8, heads=3, sinks=True,
        slopes=True),
    row("many rows of a head are shared among warps", "decode", [70, 40, 9, 0], [8, 1, 0, 3], dtype="f16", group=16,
        head_size=32),
    row("nine rows of a token", "| decode", [70, 40], [3, 5], dtype="f16", group=9, head_size=32),
    row("sequences that units do not divide", "decode", [69] * 3, [1] * 3, dtype="f16", head_size=32,
        schedule={"combine": 0, "min_tiles": 1}),
    row("the same, combined", "| decode", [69] * 3, [1] * 3, dtype="f16", head_size=32,
        schedule={"combine": 4, "min_tiles": 1}),
    row("a padded batch, combined, fixed splits", "decode", [300, 3, 150], [1, 2, 1], heads=2, group=2,
        form=Padded(), schedule={"combine": 4, "split_size": 64}),
    row("a padded batch with sinks and softcap", "| decode", [12, 0, 40], [3, 2, 1], form=Padded(), sinks=True,
        softcap=2.0, scale=0.3),
    row("generations before and after Hopper", "decode-sm_80 | mma-sm_100a decode-sm_100a simt-sm_80", [70, 20], [2, 1],
        group=8, form=Padded(2)),
]  # fmt: skip

# --- pools of other libraries ------------------------------------------------------------------------

STEPS = {"decode": [1, 1, 0, 1], "tile": [40, 3, 0, 20], "mma": [40, 3, 0, 20], "simt": [2, 1, 0, 5],
         "host": [40, 3, 0, 20]}  # fmt: skip
OTHERS = ("decode", "mma", "host", "tile", "simt")
FOREIGN = [
    *(row(f"in place on {name}, {kernel}", kernel if kernel == OTHERS[i % 3] and i % 2 else f"| {kernel}",
          [37, 0, 5, 70], STEPS[kernel], dtype="f16", heads=2, form=InLayout(name))
      for i, name in enumerate(LAYOUTS) for kernel in OTHERS),
    *(row(f"in place on {name}, {dtype} of {size}, pages of {page}", kernels, [90, 3], [1, 1], dtype=dtype, heads=2,
          page_size=page, head_size=size, mask=window(50), form=InLayout(name))
      for name, dtype, page, size, kernels in (
          ("vllm packed", "bf16", 64, 128, "decode | mma"), ("flashinfer HND", "f8e4m3", 16, 64, "mma | decode"),
          ("flashinfer pair NHD", "bf16", 1, 64, "| decode mma"), ("sglang, page 1", "bf16", 1, 64, "mma | decode"),
          ("tensorrt_llm", "f8e4m3", 16, 64, "| decode mma"), ("lmcache, by tokens", "bf16", 64, 128, "| mma decode"))),
    *(row(f"in place on {name}, with scales", kernels, [33, 0, 5], [1, 1, 1], dtype=dtype, heads=2, scales=("f32", 16),
          scale=0.01, form=InLayout(name))
      for name, dtype, kernels in (
          ("vllm NHD", "i8", "decode | host"), ("vllm HND", "f8e4m3", "host | decode"), ("lmcache", "i8", "| decode"),
          ("tensorrt_llm", "f8e4m3", "| decode"), ("flashinfer pair HND", "f8e4m3", "| decode"))),
]  # fmt: skip

TABLES: dict[str, list[Row]] = {
    "calls": CALLS, "caches": CACHES, "narrow": NARROW, "as stored": AS_STORED, "8-bit queries": OF_8_BITS,
    "splits": SPLITS, "prior": PRIOR, "operands": OPERANDS, "pages": PAGES, "decode": DECODES,
    "foreign": FOREIGN,
}  # fmt: skip
