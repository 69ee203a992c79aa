# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of calls of attention with scores and masks as functions, with trees of drafts, and by block masks.

Each row is a rule, or a bug that was, and its kernels; ``auto`` is the choice of the operation, tiles of sm_90a.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kvarn as kv

from .attention_functions import (
    BIAS_BY_DISTANCE,
    CAPPED,
    DOCUMENTS,
    DOCUMENTS_IN_A_WINDOW,
    IDS,
    LOGARITHMIC,
    TWICE_BIASED,
    dilated,
    document,
    prefix,
    t5,
    t5_buckets,
)
from .attention_rows import poisoned
from .block_masks import by_head
from .case import CAUSAL, ByBlocks, Mask, OfOperands, OfTree, Padded, Row, named, row, window
from .operands import cache_parts

SMALL = [40, 0], [20, 7]
SEVERAL = [150, 0, 30], [20, 40, 1]
ONE: dict[str, Any] = {"heads": 1, "group": 2}
OF_F16: dict[str, Any] = {"dtype": "f16", "head_size": 32, "heads": 2, "group": 2}
STEP = {"max_queries": 4, "max_batch": 4}


def function_row(rule: str, kernels: str, cached: Any, new: Any, **case: Any) -> Row:
    """A row of small heads of f16, or of what is given."""
    eight = {"query": "f16"} if case.get("dtype") == "f8e4m3" else {}
    return row(rule, kernels, cached, new, **{**OF_F16, **eight, **case})


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- scores ------------------------------------------------------------------------------------------


def kept(mask: Any, seen: Any, *arrays: Any, name: str = "a function") -> Mask:
    """A mask that is a function, and the model's."""
    return Mask(name, {"mask": (mask, *arrays) if arrays else mask}, seen)


def both(function: Any) -> tuple[Any, Any]:
    """A score of arithmetic alone, which arrays take as tiles do."""
    return function, function


def twice(factor: float) -> Any:
    return lambda s, b, h, q, k: s * factor * factor


TEMPERATURES = (0.5 + np.random.default_rng(6).random(80)).astype(np.float16)
COOLED = (
    (lambda s, b, h, q, k, t: s * kv.f32(t[q]), TEMPERATURES),
    lambda x, b, h, q, k: x * TEMPERATURES.astype(np.float64)[q],
)  # fmt: skip
SHORT, NEAR = np.array([0.5, -0.5, 2.0], np.float32), t5_buckets(20, 8, 20)
FEW_BIASES, FAR = random(2, 8, seed=22), random(2, seed=23)
EDGE = (
    (lambda s, b, h, q, k, bias: s + bias[q - k], SHORT), lambda x, b, h, q, k: x + SHORT[np.clip(q - k, 0, 2)],
)  # fmt: skip
CLIPPED = (
    (t5, FEW_BIASES, NEAR), lambda x, b, h, q, k: x + FEW_BIASES[h, NEAR[np.clip(q - k, 0, 19)]],
)  # fmt: skip


def near_or_far(score, b, h, q, k, bias, buckets, far):
    return score + kv.where(q - k < 20, bias[h, buckets[q - k]], far[h])


COMPARED = (
    (near_or_far, FEW_BIASES, NEAR, FAR),
    lambda x, b, h, q, k: x + np.where(q - k < 20, FEW_BIASES[h, NEAR[np.clip(q - k, 0, 19)]], FAR[h]),
)  # fmt: skip
TIMES = np.arange(8, dtype=np.int32) % 4


def halved(score, b, h, q, k, times):
    for _ in range(times[b]):
        score = score * 0.5
    return score


def halved_while(score, b, h, q, k, times):
    i = kv.i32(0)
    while i < times[b]:
        score, i = score * 0.5, i + 1
    return score


def without_some(b, h, q, k, counts):
    seen = k <= q
    for i in range(counts[b]):
        seen = seen & (k != i)
    return seen


def by_half(x, b, h, q, k):
    return x * 0.5 ** TIMES[b]


LOOPS: dict[str, dict[str, Any]] = {
    "a score that loops": {"score": ((halved, TIMES), by_half)},
    "a score that loops while": {"score": ((halved_while, TIMES), by_half)},
    "a mask that loops": {"mask": kept(without_some, lambda b, h, q, k: (k <= q) & (k >= TIMES[b]), TIMES)},
}
BY_QUERY, BY_PAIR, BUCKETS = random(2, 60, seed=25), random(60, 8, seed=26), t5_buckets(60, 8, 20)
OF_PAIRS = (
    (lambda s, b, h, q, k, rows, pairs, buckets: (
        s + rows[b, q] * kv.math.sqrt(1.0 + kv.f32(kv.math.abs(q - k))) + pairs[k, buckets[q - k]]),
     BY_QUERY, BY_PAIR, BUCKETS),
    lambda x, b, h, q, k: (
        x + BY_QUERY[b, q] * (1 + np.abs(q - k)) ** 0.5 + BY_PAIR[k, BUCKETS[np.maximum(q - k, 0)]]),
)  # fmt: skip
BIASES, WIDE_BUCKETS, FALLS = random(4, 8, seed=24), t5_buckets(150, 8, 60), np.abs(random(4, seed=28))
REPEATED = (
    (lambda s, b, h, q, k, r, bias, buckets: (
        s + (bias[h, buckets[q - k]] - r[h] * kv.math.log(1.0 + kv.f32(kv.math.abs(q - k))))),
     FALLS, BIASES, WIDE_BUCKETS),
    lambda x, b, h, q, k: (
        x + BIASES[h, WIDE_BUCKETS[np.maximum(q - k, 0)]] - FALLS[h] * np.log(1 + np.abs(q - k))),
)  # fmt: skip
FACTORS, SLOPES = random(200, seed=31), np.array([2.0, 0.01], np.float32)


def ramp(low: float) -> tuple[Any, Any]:
    """A number a row and what is linear in the distance, of scores as low as those of no key."""
    return (
        (lambda s, b, h, q, k, factors, slopes: s * factors[q] + (slopes[h] * kv.f32(k - q) + low), FACTORS, SLOPES),
        lambda x, b, h, q, k: x * FACTORS[q] + SLOPES[h] * (k - q) + low,
    )


RARE = np.random.default_rng(32).integers(0, 9, (2, 200)).astype(np.int32)
RAMPS: dict[str, Mask] = {
    "causal": kept(kv.masks.causal, CAUSAL.seen),
    "window": kept(kv.masks.sliding_window(20), window(20).seen),
    "documents": kept(lambda b, h, q, k, ids: (k < q) & (ids[b, q] == ids[b, k]),
                      lambda b, h, q, k: (k < q) & (RARE[b, q] == RARE[b, k]), RARE),
}  # fmt: skip
PREFIX = np.array([140, 0, 120], np.uint32)
PARTS, HIDDEN = (np.random.default_rng(10).integers(0, 2, (2, 60)).astype(t) for t in (np.int32, np.int8))
COMBINED = kept(
    (kv.masks.causal & ~kv.masks.Mask(lambda b, h, q, k, hidden: hidden[b, k] != 0))
    | (document & kv.masks.sliding_window(5)),
    lambda b, h, q, k: ((k <= q) & (HIDDEN[b, k] == 0)) | ((k <= q) & (q - k < 5) & (PARTS[b, q] == PARTS[b, k])),
    HIDDEN, PARTS,
)  # fmt: skip
ALIKE = np.zeros((1, 310), np.int32)  # of one document


def of_one(mask: Any, seen: Any) -> Mask:
    """A mask of a name, and one document."""
    return kept(mask & document, seen, ALIKE)


LATER, TURN = np.array([2, 0, 20], np.int32), np.array([1, 2], np.int32)
EVERY_OTHER = kept(
    lambda b, h, q, k, later, turn: k * turn[1] + turn[0] <= q + later[b],
    lambda b, h, q, k: k * 2 + 1 <= q + LATER[b], LATER, TURN,
)  # fmt: skip
STRIPES = (np.arange(800, dtype=np.int32)[None] // 90 % 2).astype(np.int32)
WINDOW_OF_20 = of_one(kv.masks.sliding_window(20), window(20).seen)
NAMED = {
    "causal": (kv.masks.causal, CAUSAL), "sliding_window": (kv.masks.sliding_window(9), window(9)),
    "chunked": (kv.masks.chunked(24), named("chunked", 24)),
    "chunked_causal": (kv.masks.chunked(24) & kv.masks.causal, named("chunked_causal", 24)),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "f16": {"group": 1}, "bf16": {"dtype": "bf16", "group": 4}, "f8e4m3": {"dtype": "f8e4m3", "group": 1},
    "continuous": {"kind": "continuous", "group": 4}, "fa3": {"kind": "fa3", "group": 1},
}  # fmt: skip
PLAIN_TILES = {"kind": "tile", "producer": False, "overlap": False}

FUNCTIONS = [
    *(function_row(f"a score that is multiplied twice by {factor}, each product erased once", kernels, *SMALL,
                   score=both(twice(factor))) for factor, kernels in ((0.5, "tile"), (0.0, "| tile"))),
    *(function_row(f"a bias by distance and documents over {name}", kernels, *SMALL,
                   score=BIAS_BY_DISTANCE, mask=DOCUMENTS, **kind)
      for (name, kind), kernels in zip(KINDS.items(), ("auto | host", "host | auto", "| host auto") * 2, strict=False)),
    function_row("a decode takes functions", "decode", [150, 0, 40], [2, 4, 1], dtype="f8e4m3", group=4,
                 score=TWICE_BIASED, mask=DOCUMENTS_IN_A_WINDOW, schedule=STEP),
    function_row("a decode without wgmma takes functions", "| decode-sm_80", [150, 0, 40], [2, 4, 1], group=4,
                 score=TWICE_BIASED, mask=DOCUMENTS_IN_A_WINDOW, schedule=STEP),
    function_row("a warp a row takes functions", "simt", [50, 0, 40], [2, 4, 1], dtype="f8e4m3",
                 score=TWICE_BIASED, mask=DOCUMENTS_IN_A_WINDOW),
    function_row("mma.sync takes functions", "| sm_80", [150, 0, 40], [2, 4, 1], dtype="f8e4m3", score=TWICE_BIASED,
                 mask=DOCUMENTS_IN_A_WINDOW),
    function_row("a decode computes functions by fast instructions", "decode-sm_80", [40, 3], [1, 1], **ONE,
                 score=(lambda s, b, h, q, k: 3.0 * kv.math.tanh(s / 3.0) - kv.math.log(1.0 + 0.5 * kv.f32(q - k)),
                        lambda x, b, h, q, k: 3 * np.tanh(x / 3) - np.log(1 + np.maximum(q - k, 0) / 2))),
    function_row("scores fall with the logarithm of the distance", "auto | host", *SEVERAL, score=LOGARITHMIC),
    function_row("a prefix is seen by all and the rest causally", "auto | host", [0, 0, 100], [150, 20, 40], **ONE,
                 mask=kept(prefix, lambda b, h, q, k: (k <= q) | (k < PREFIX[b]), PREFIX)),
    *(function_row(f"a window of every {step}", "auto" if step == 16 else "| auto", *SEVERAL, mask=kept(
        dilated(size, step), lambda b, h, q, k, n=size * step, step=step: (k <= q) & (q - k < n) & ((q - k) % step == 0)
      )) for size, step in ((5, 3), (10, 16))),
    function_row("a rank has every other key, and early rows see none", "host | auto", [1, 0, 20], [5, 1, 70],
                 keys=[3, 0, 35], mask=EVERY_OTHER, **{**ONE, "group": 2}),
    function_row("a softcap as a function", "| auto", *SMALL, group=4, score=CAPPED),
    function_row("a temperature by position, and heads that see different keys", "auto", *SMALL, group=4, score=COOLED,
                 mask=kept(kv.masks.causal & (lambda b, h, q, k: (h % 2 == 0) | (q - k < 9)),
                           lambda b, h, q, k: (k <= q) & ((h % 2 == 0) | (q - k < 9)))),
    function_row("functions come after the softcap and the slopes", "auto", *SMALL, softcap=3.0,
                 slopes=[0.5, 0.25, 0.125, -0.1], score=both(lambda s, b, h, q, k: 2.0 * s)),
    function_row("a score may be a number", "| auto", *SMALL, group=1,
                 score=(lambda s, b, h, q, k: 0.0, lambda x, b, h, q, k: 0.0 * x)),
    function_row("a score may depend on one position alone", "auto", *SMALL, group=1,
                 score=(lambda s, b, h, q, k: kv.f32(k) / 9.0, lambda x, b, h, q, k: 0.0 * x + k / 9)),
    *(function_row(f"{name} as often as an array says{', no producer' * bool(schedule)}", kernels, *SMALL,
                   schedule=schedule, **given)
      for i, (name, given) in enumerate(LOOPS.items())
      for kernels, schedule in (("host | auto" if i else "auto | host", {}), ("| auto" if i else "auto", PLAIN_TILES))),
    *(function_row(f"{name} as a function of kv.masks", "auto" if i == 3 else "| auto", *SMALL,
                   mask=kept(mask, of.seen)) for i, (name, (mask, of)) in enumerate(NAMED.items())),
    function_row("masks combine by and, or and not, with their own arrays", "auto", *SMALL, **ONE, mask=COMBINED),
    function_row("rows that see nothing are zeros", "auto", *SMALL, mask=kept(
        lambda b, h, q, k: (k <= q) & (q % 3 == 0), lambda b, h, q, k: (k <= q) & (q % 3 == 0))),
    function_row("positions outside of an array read its edge", "auto", [3], [2], heads=1, group=1, score=EDGE),
    function_row("keys before a window may be anything, in a conjunction too", "auto", [100], [2], **ONE,
                 mask=WINDOW_OF_20, change=poisoned(0, 80)),
    function_row("keys before the window of a decode may be anything", "decode", [150], [2], **ONE, schedule=STEP,
                 mask=WINDOW_OF_20, change=poisoned(0, 130)),
    function_row("what is hidden from all rows may be anything", "simt", [150], [2], **ONE, change=poisoned(0, 130),
                 mask=kept(lambda b, h, q, k: k >= 130, lambda b, h, q, k: k >= 130)),
    *(function_row(f"values that are hidden from all rows, groups of {group}", "host", [40], [1], heads=1, group=group,
                   change=poisoned(0, 37), mask=kept(lambda b, h, q, k: k >= 37, lambda b, h, q, k: k >= 37))
      for group in (1, 4)),
    function_row("tiles before a bound that a function compares with are not visited", "auto", [300], [9], **ONE,
                 change=poisoned(0, 128), mask=kept(
                     dilated(15, 3), lambda b, h, q, k: (k <= q) & (q - k < 45) & ((q - k) % 3 == 0))),
    *(function_row(f"far tiles have one bias a head, past the {end}", kernels, [290, 0], [3, 7], **ONE, score=score)
      for end, score, kernels in (
          ("end of an array", CLIPPED, "auto | host"), ("comparison", COMPARED, "host | auto"))),
    *(function_row(f"what tiles repeat is computed once a distance and head, groups of {group}", kernels, [120, 0],
                   [30, 7], heads=1, group=group, score=REPEATED, schedule={"kind": "tile"})
      for group, kernels in ((4, "auto"), (3, "| auto"), (2, "| sm_80"))),
    *(function_row(f"rows that see much, little or nothing of {low}: {name}", kernels, [150, 0], [30, 7], **ONE,
                   score=ramp(low), mask=RAMPS[name], schedule={"keys": 32})
      for name, low, kernels in (
          ("documents", -1000.0, "tile"), ("window", 0.0, "| tile"), ("causal", -1000.0, "| tile"),
          ("documents", 0.0, "| tile"), ("window", -1000.0, "| tile"), ("causal", 0.0, "| tile"))),
    function_row("scores of more than a distance and a head are computed for every pair", "auto", [40, 0], [20, 7],
                 **ONE, score=OF_PAIRS),
    function_row("the padded form takes functions", "auto", *SMALL, **ONE, form=Padded(), score=CAPPED, mask=DOCUMENTS),
    function_row("operands take functions", "| auto", *SMALL, **ONE, form=OfOperands(cache_parts), score=CAPPED,
                 mask=DOCUMENTS),
    function_row("heads of one element, which have no tiles on the host", "host", *SMALL, heads=1, head_size=1,
                 score=both(lambda s, b, h, q, k: 2.0 * s), mask=kept(
                     lambda b, h, q, k: k < q, lambda b, h, q, k: k < q)),
]  # fmt: skip

# --- trees of drafts ---------------------------------------------------------------------------------

# The parent of every draft of a sequence; -1: of none, so that it sees the cached tokens alone.
PARENTS = ((-1, 0, 0, 1, 1, 2, 5), (), (-1,), (-1, -1, 0, 1, 3), tuple(range(-1, 39)))
DRAFTS = [150, 9, 0, 126, 30], [len(p) for p in PARENTS]
BENT = (
    (lambda s, b, h, q, k, slopes: s + slopes[h] * kv.f32(k - q), np.array([0.5, -0.25], np.float32)),
    lambda x, b, h, q, k: x + np.array([0.5, -0.25])[h] * (k - q),
)  # fmt: skip
TREES = [
    *(function_row(f"a draft sees its path, groups of {group}", kernels, *DRAFTS, heads=1, group=group,
                   form=OfTree(PARENTS)) for group, kernels in ((1, "host | tile"), (4, "tile | host"))),
    function_row("bits of 64", "host | tile", *DRAFTS, **ONE, form=OfTree(PARENTS, wide=True)),
    function_row("bits of more words than drafts have", "| tile host", *DRAFTS, **ONE, form=OfTree(PARENTS, words=6)),
    function_row("drafts that the bits leave out are not seen", "host | tile", *DRAFTS, **ONE,
                 form=OfTree(PARENTS, words=1)),
    function_row("a tree in a window, and a score", "host tile", *DRAFTS, **ONE, mask=window(12), score=BENT,
                 form=OfTree(PARENTS)),
    function_row("a tree in a window that is a function", "| host tile", *DRAFTS, **ONE, score=BENT,
                 mask=kept(kv.masks.sliding_window(12), window(12).seen), form=OfTree(PARENTS)),
    function_row("bits of a padded batch stand by sequence and token", "host | tile", *DRAFTS, **ONE,
                 form=OfTree(PARENTS, padded=True)),
    function_row("a small tree is a decode", "decode", [70, 5], [4, 0], **ONE, dtype="f8e4m3",
                 form=OfTree(((-1, 0, 0, 2), ()), words=1), schedule={"max_queries": 4, "max_batch": 2}),
]  # fmt: skip

# --- block masks -------------------------------------------------------------------------------------

BY_HEAD = kept(kv.masks.causal & by_head, lambda b, h, q, k: (
    (k <= q) & ((h == 0) | (q - k < 20)) & (IDS[b, q] == IDS[b, k])), IDS, name="by head")  # fmt: skip
NOT_CAUSAL = kept(document, lambda b, h, q, k: IDS[b, q] == IDS[b, k], IDS, name="not causal")
BLIND = kept(kv.masks.causal & document & (lambda b, h, q, k: q % 3 != 1), lambda b, h, q, k: (
    (k <= q) & (IDS[b, q] == IDS[b, k]) & (q % 3 != 1)), IDS)  # fmt: skip
TILES = ByBlocks(64, 32)
BATCH = [90, 0, 30, 0], [6, 40, 1, 0]
STEPS = [150, 0, 70], [2, 0, 1]
LATENT: dict[str, Any] = {"heads": 1, "group": 8, "head_size": 144, "value_size": 128, "form": ByBlocks(32, 64)}
BLOCKS = [
    *(function_row(f"by blocks: {kind} {dtype}, {mask.name}", kernels, *BATCH, kind=kind, dtype=dtype, mask=mask,
                   score=BIAS_BY_DISTANCE, form=TILES)
      for kind, dtype, mask, kernels in (
          ("paged", "f16", BY_HEAD, "tile | host"), ("paged", "f8e4m3", DOCUMENTS, "tile | host"),
          ("fa3", "bf16", NOT_CAUSAL, "host | tile"), ("continuous", "f16", DOCUMENTS_IN_A_WINDOW, "host | tile"))),
    function_row("by blocks with products of scaled i8", "mma", *BATCH, dtype="i8", query="f16", scales=("f32", 16),
                 scale=0.0005, mask=DOCUMENTS, form=TILES),
    function_row("by blocks with products by mma.sync", "| mma", *BATCH, mask=DOCUMENTS, form=TILES),
    function_row("by blocks, rows that see nothing", "host | tile", [30, 0, 9], [5, 0, 20], **ONE, mask=BLIND,
                 form=TILES),
    *(function_row(f"a decode by blocks: {dtype}, {mask.name}", kernels, *STEPS, dtype=dtype, mask=mask,
                   score=BIAS_BY_DISTANCE, schedule={"max_queries": 2}, form=ByBlocks(), **given)
      for dtype, mask, kernels, given in (
          ("f8e4m3", DOCUMENTS, "decode", {"group": 4}),
          ("f8e4m3", BY_HEAD, "| decode", {"group": 1, "page_size": 5}),
          ("f8e4m3", DOCUMENTS_IN_A_WINDOW, "| decode", {"kind": "continuous"}),
          ("i8", NOT_CAUSAL, "decode",
           {"group": 4, "query": "f16", "scales": ("f32", 8), "page_size": 64, "scale": 0.0005}),
          ("i8", BY_HEAD, "| decode",
           {"group": 1, "query": "f16", "scales": ("bf16", 32), "page_size": 24, "scale": 0.0005}),
          ("f16", BY_HEAD, "| decode", {"kind": "fa3", "group": 4}),
          ("f32", DOCUMENTS_IN_A_WINDOW, "decode", {"head_size": 72}),
          ("bf16", NOT_CAUSAL, "| decode", {"group": 8, "page_size": 1}))),
    *(function_row(f"splits of listed tiles, {schedule}", kernels, [760], [1], **ONE, dtype="f8e4m3",
                   mask=kept(document, lambda b, h, q, k: STRIPES[b, q] == STRIPES[b, k], STRIPES), form=ByBlocks(),
                   schedule={"max_queries": 2, **schedule})
      for schedule, kernels in (({"max_batch": 1}, "decode"), ({"max_batch": 1, "batch_invariant": True}, "| decode"),
                                ({"min_tiles": 1}, "| decode"))),
    *(function_row(f"neither tiles nor decodes: heads of {size}, {schedule}", kernels, [60, 3], [4, 9],
                   head_size=size, mask=DOCUMENTS, form=ByBlocks(), schedule=schedule)
      for size, schedule, kernels in ((520, {}, "auto"), (32, {}, "| simt"), (32, {"max_queries": 8}, "| simt"))),
    *(function_row(f"latent rows by blocks: {dtype}, {schedule}", kernels, [200, 0, 70], [2, 3, 1], dtype=dtype,
                   mask=DOCUMENTS, schedule=schedule, **LATENT, **given)
      for dtype, schedule, kernels, given in (
          ("f16", {"max_queries": 4}, "latent | latent-mma", {}),
          ("f8e4m3", {}, "latent | latent-mma", {}),
          ("f16", {"max_queries": 4, "splits": 2}, "| latent-mma latent", {"page_size": 5}),
          ("f8e4m3", {"splits": 3}, "| latent", {"kind": "continuous"}))),
    function_row("latent rows by blocks, with a score", "host auto", [90, 0, 9], [3, 7, 0], dtype="f8e4m3",
                 mask=DOCUMENTS, score=BIAS_BY_DISTANCE, **{**LATENT, "group": 3, "head_size": 24, "value_size": 16}),
]  # fmt: skip

TABLES: dict[str, list[Row]] = {"block masks": BLOCKS, "functions": FUNCTIONS, "trees": TREES}
