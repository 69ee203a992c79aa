# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of the benchmark table: name, shape, element type and goal.

Unless a row says otherwise, there are 32 query heads, 8 KV heads of 128 elements, and 16 tokens per page.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Goal:
    """The goal of a row.

    ``of`` is ``"read"``, ``"copy"`` or ``"matmul"`` (``value``: the least share of that peak rate), ``"us"`` (the most
    microseconds) or ``"tflops"`` (the fewest TFLOP/s).
    """

    of: str
    value: float

    def __str__(self) -> str:
        if self.of == "us":
            return f"≤ {self.value:g} µs"
        if self.of == "tflops":
            return f"≥ {self.value:g} TFLOP/s"
        return f"≥ {100 * self.value:.0f}% of {self.of}"


@dataclass(frozen=True)
class Decode:
    """Decode: a few new tokens per sequence. A ragged batch has lengths from a sixteenth of the context to all of it.

    All sequences share the pages of their first ``prefix`` tokens, whose bytes are counted once.
    """

    batch: int
    context: int
    query_heads: int = 32
    heads: int = 8
    size: int = 128
    page: int = 16
    ragged: bool = False
    window: int = 0
    new: int = 1
    prefix: int = 0


@dataclass(frozen=True)
class Sources(Decode):
    """Decode with one softmax over two caches: its own, and ``memory`` tokens of another one, without a mask."""

    memory: int = 2048


@dataclass(frozen=True)
class Append:
    """Append: one token per sequence at a random position (``each`` is 1), or a prompt from position 0."""

    sequences: int
    each: int
    room: int
    rope: bool = False
    query_heads: int = 32
    heads: int = 8
    size: int = 128
    page: int = 16


@dataclass(frozen=True)
class Gather:
    """Gather all tokens of all sequences from the pages."""

    sequences: int
    context: int
    heads: int = 8
    size: int = 128
    page: int = 16


@dataclass(frozen=True)
class Mla:
    """MLA decode: one new token per sequence over latent rows; values are the first ``value_size`` columns.

    A query has ``size`` columns. In the cache, the last ``rope`` of them are bf16, after the 8-bit columns and one f32
    scale per ``inline`` 8-bit columns. With 0, there are none. ``query`` is the element type of queries.
    """

    batch: int
    context: int
    query_heads: int
    size: int = 576
    value_size: int = 512
    page: int = 64
    rope: int = 0
    inline: int = 0
    query: str = "bf16"

    @property
    def scales(self) -> int:
        return (self.size - self.rope) // self.inline if self.inline else 0

    @property
    def stored_size(self) -> int:
        """Elements of a cached row."""
        return self.size + self.rope + 4 * self.scales


@dataclass(frozen=True)
class Prefill:
    """Causal prefill: ``lengths`` lists (new tokens, total tokens) of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    query_heads: int = 32
    heads: int = 8
    size: int = 128
    page: int = 16


@dataclass(frozen=True)
class Mixed(Prefill):
    """Sequences of one new token, and prompts after them, in one batch."""


@dataclass(frozen=True)
class Functions(Prefill):
    """Prefill with a document mask (documents of ``documents`` tokens; 0: causal) and optionally T5's bias."""

    documents: int = 0
    t5: bool = False


@dataclass(frozen=True)
class Tree(Decode):
    """Decode of a tree of draft tokens over the rest of the context."""

    new: int = 64


Shape = Decode | Append | Gather | Mla | Prefill


@dataclass(frozen=True)
class Row:
    """A row of the table. ``group``: a group of rows that has an overall goal (:data:`GROUP_GOALS`), or none."""

    name: str
    title: str
    shape: Shape
    dtype: str = "bf16"
    goal: Goal | None = None
    group: str = ""

    @property
    def kind(self) -> str:
        return type(self.shape).__name__.lower()


# Largest geometric mean of kvarn's time over the best peer's.
GROUP_GOALS = {"decode bf16": 0.92, "decode fp8": 0.72, "append": 0.75, "mixed bf16": 0.94, "mixed fp8": 0.67}


def _decode(name: str, title: str, shape: Decode, goal: Goal, dtype: str = "bf16") -> Row:
    fp8 = dtype != "bf16"
    return Row(name + "_fp8" * fp8, f"decode {'fp8' if fp8 else 'bf16'} {title}", shape, dtype, goal,
               "decode fp8" if fp8 else "decode bf16")  # fmt: skip


def _append(name: str, title: str, shape: Append, dtype: str, goal: Goal) -> Row:
    name += "_fp8" * (dtype != "bf16") + "_rope" * shape.rope
    return Row(name, f"{title} {'bf16' if dtype == 'bf16' else 'fp8'}", shape, dtype, goal, "append")


def _mixed(name: str, title: str, lengths: tuple[tuple[int, int], ...], most: float, dtype: str = "bf16") -> Row:
    """A mixed batch, whose goal is 1.03 times its decodes and its prompts alone."""
    of = "bf16" if dtype == "bf16" else "fp8"
    suffix = "_fp8" * (dtype != "bf16")
    return Row(f"mixed_{name}{suffix}", f"mixed {of} {title}", Mixed(lengths), dtype, Goal("us", most), f"mixed {of}")


def _chunks() -> tuple[tuple[int, int], ...]:
    """Sixteen chunked prefills of random lengths."""
    draw = random.Random(7)
    new = [draw.randrange(64, 2049) for _ in range(16)]
    return tuple((n, n + draw.randrange(0, 6144)) for n in new)


_FP8 = "f8e4m3"
_LARGE, _STEP = Append(8, 1024, 1024), Append(256, 1, 64)
_SCALED_ROWS = Mla(64, 4096, 128, rope=64, inline=128)
_NARROW = Mla(64, 4096, 128, query=_FP8)
_LONG, _SHORT = Decode(64, 4096), Decode(128, 2048)
_PROMPTS, _WIDE_HEADS = Prefill(((4096, 4096),) * 8), Goal("tflops", 600)

TABLE = (
    _decode("b64_c4k", "64 × 4k", _LONG, Goal("read", 0.97)),
    _decode("b64_c4k", "64 × 4k", _LONG, Goal("read", 0.92), _FP8),
    _decode("b16_c8k", "16 × 8k", Decode(16, 8192), Goal("read", 0.96)),
    _decode("b16_c8k", "16 × 8k", Decode(16, 8192), Goal("read", 0.90), _FP8),
    _decode("b128_c2k", "128 × 2k", _SHORT, Goal("read", 0.96)),
    _decode("b128_c2k", "128 × 2k", _SHORT, Goal("read", 0.94), _FP8),
    _decode("b64_ragged8k", "64 ragged ≤ 8k", Decode(64, 8192, ragged=True), Goal("read", 0.96)),
    _decode("b64_ragged8k", "64 ragged ≤ 8k", Decode(64, 8192, ragged=True), Goal("read", 0.90), _FP8),
    _decode("b1_c32k", "1 × 32k", Decode(1, 32768), Goal("read", 0.88)),
    _decode("b1_c32k", "1 × 32k", Decode(1, 32768), Goal("read", 0.80), _FP8),
    _decode("b1_c1k", "1 × 1k", Decode(1, 1024), Goal("us", 6.5)),
    _decode("b1_c1k", "1 × 1k", Decode(1, 1024), Goal("us", 6.0), _FP8),
    _decode("b64_c4k_p64", "64 × 4k, page 64", replace(_LONG, page=64), Goal("read", 0.97)),
    _decode("b64_c4k_p1", "64 × 4k, page 1", replace(_LONG, page=1), Goal("read", 0.97)),
    _decode("b64_c4k_p1", "64 × 4k, page 1", replace(_LONG, page=1), Goal("read", 0.88), _FP8),
    _decode("b64_c8k_g8_p64", "64 × 8k, 64 q heads, page 64", Decode(64, 8192, 64, page=64), Goal("read", 0.98)),
    _decode("b256_c1k_mha", "256 × 1k, 32 KV heads", Decode(256, 1024, 32, 32), Goal("read", 0.98)),
    _append("app_n256_decode", "append 256", _STEP, "bf16", Goal("us", 2.5)),
    _append("app_n256_decode", "append 256", _STEP, _FP8, Goal("us", 2.5)),
    _append("app_n8192_prefill", "append 8192", _LARGE, "bf16", Goal("copy", 0.92)),
    _append("app_n8192_prefill", "append 8192", _LARGE, _FP8, Goal("copy", 0.90)),
    _append("app_n8192_prefill", "RoPE + append 8192", replace(_LARGE, rope=True), "bf16", Goal("copy", 0.88)),
    _append("app_n8192_prefill", "RoPE + append 8192", replace(_LARGE, rope=True), _FP8, Goal("copy", 0.88)),
    _append("app_n256_decode", "RoPE + append 256", replace(_STEP, rope=True), "bf16", Goal("us", 3.5)),
    _append("app_n256_decode", "RoPE + append 256", replace(_STEP, rope=True), _FP8, Goal("us", 3.5)),
    Row("gather_b64_c2k", "gather 64 × 2k", Gather(64, 2048), goal=Goal("copy", 0.96)),
    Row("mla_b64_c4k_h128", "MLA decode 64 × 4k, 128 heads", Mla(64, 4096, 128), goal=Goal("matmul", 0.92)),
    Row("mla_b64_c8k_h16", "MLA decode 64 × 8k, 16 heads", Mla(64, 8192, 16), goal=Goal("read", 0.95)),
    Row("mla_b1_c32k_h128", "MLA decode 1 × 32k, 128 heads", Mla(1, 32768, 128), goal=Goal("us", 25)),
    Row("mla_b64_c4k_h128_q8", "MLA decode fp8, query of 8 bits, 64 × 4k, 128 heads", _NARROW, _FP8, Goal("us", 100)),
    Row(
        "mla_b64_c8k_h16_q8",
        "MLA decode fp8, query of 8 bits, 64 × 8k, 16 heads",
        replace(_NARROW, context=8192, query_heads=16),
        _FP8,
        Goal("us", 85),
    ),
    Row(
        "mla_b1_c32k_h128_q8",
        "MLA decode fp8, query of 8 bits, 1 × 32k, 128 heads",
        replace(_NARROW, batch=1, context=32768),
        _FP8,
        Goal("us", 20),
    ),
    Row("pf_b8_s4k", "prefill 8 × 4096 causal", _PROMPTS, goal=Goal("tflops", 640)),
    Row("pf_ragged_chunked", "prefill 16 ragged chunks", Prefill(_chunks()), goal=Goal("tflops", 640)),
    Row("pf_b8_s4k_p64", "prefill 8 × 4096 causal, page 64", replace(_PROMPTS, page=64), goal=Goal("tflops", 640)),
    Row("pf_b8_s4k_d64", "prefill 8 × 4096 causal, head size 64", replace(_PROMPTS, size=64), goal=Goal("tflops", 480)),
    Row(
        "pf_b8_s4k_d192",
        "prefill 8 × 4096 causal, head size 192",
        replace(_PROMPTS, size=192),
        goal=Goal("tflops", 600),
    ),
    Row(
        "pf_b8_s4k_d256",
        "prefill 8 × 4096 causal, head size 256",
        replace(_PROMPTS, size=256),
        goal=Goal("tflops", 600),
    ),
    Row("pf_512_over_32k", "prefill 512 over 32k", Prefill(((512, 32768 + 512),)), goal=Goal("tflops", 620)),
    Row("pf_64_over_100k", "prefill 64 over 100k", Prefill(((64, 100_000 + 64),)), goal=Goal("tflops", 480)),
    _mixed("62_2", "62 decodes at 4k, 2 prompts of 4k", ((1, 4096),) * 62 + ((4065, 4065),) * 2, 664),
    _mixed("60_1", "60 decodes at 4k, a prompt of 2k", ((1, 4096),) * 60 + ((2048, 2048),), 300),
    _mixed("120_4", "120 decodes at 2k, 4 prompts of 500", ((1, 2048),) * 120 + ((500, 500),) * 4, 264),
    _mixed("62_2", "62 decodes at 4k, 2 prompts of 4k", ((1, 4096),) * 62 + ((4065, 4065),) * 2, 590, _FP8),
    _mixed("60_1", "60 decodes at 4k, a prompt of 2k", ((1, 4096),) * 60 + ((2048, 2048),), 196, _FP8),
    _mixed("120_4", "120 decodes at 2k, 4 prompts of 500", ((1, 2048),) * 120 + ((500, 500),) * 4, 162, _FP8),
    _mixed("32_1", "32 decodes at 4k, 512 over 8k", ((1, 4096),) * 32 + ((512, 8192 + 512),), 184, _FP8),
    _mixed("30_1", "30 decodes at 8k, a prompt of 64", ((1, 8192),) * 30 + ((64, 64),), 136, _FP8),
)

# Rows beyond the table: the same kernels over their whole supported range, without goals.
RANGE = (
    Row("range_d64", "decode bf16 64 × 4k, head size 64", replace(_LONG, size=64)),
    Row("range_d80", "decode bf16 64 × 4k, head size 80", replace(_LONG, size=80)),
    Row("range_d96", "decode bf16 64 × 4k, head size 96", replace(_LONG, size=96)),
    Row("range_d192", "decode bf16 64 × 4k, head size 192", replace(_LONG, size=192)),
    Row("range_d256", "decode bf16 64 × 4k, head size 256", replace(_LONG, size=256)),
    Row("range_g3", "decode bf16 64 × 4k, group 3", replace(_LONG, query_heads=24)),
    Row("range_g7", "decode bf16 64 × 4k, group 7", replace(_LONG, query_heads=28, heads=4)),
    Row("range_g16", "decode bf16 64 × 4k, group 16", replace(_LONG, query_heads=128)),
    Row("range_p8", "decode bf16 64 × 4k, page 8", replace(_LONG, page=8)),
    Row("range_p24", "decode bf16 64 × 4k, page 24", replace(_LONG, page=24)),
    Row("range_p256", "decode bf16 64 × 4k, page 256", replace(_LONG, page=256)),
    Row("range_pf_p1", "prefill 8 × 4096 causal, page 1", replace(_PROMPTS, page=1)),
    Row("range_pf_p4", "prefill 8 × 4096 causal, page 4", replace(_PROMPTS, page=4)),
    Row("range_pf_16_over_100k", "prefill 16 over 100k", Prefill(((16, 100_000 + 16),))),
    Row("range_pf_8x64_over_8k", "prefill 8 × 64 over 8k", Prefill(((64, 8192 + 64),) * 8)),
    Row("range_window", "decode bf16 64 × 4k, window 1024", replace(_LONG, window=1024)),
    Row("range_prefix", "decode bf16 64 × 8k of one prefix", Decode(64, 8192 + 256, prefix=8192)),
    Row("range_prefix_b16", "decode bf16 16 × 2k of one prefix", Decode(16, 2048 + 256, prefix=2048)),
    Row("range_sources", "decode bf16 64 × 4k and a memory of 2k", Sources(64, 4096)),
    Row("range_document", "prefill 8 × 4096, one document", Functions(_PROMPTS.lengths, documents=4096)),
    Row("range_documents", "prefill 8 × 4096, documents of 512", Functions(_PROMPTS.lengths, documents=512)),
    Row("range_t5", "prefill 8 × 4096, T5's bias by distance", Functions(_PROMPTS.lengths, t5=True)),
    Row(
        "range_t5_document",
        "prefill 8 × 4096, T5's bias and one document",
        Functions(_PROMPTS.lengths, documents=4096, t5=True),
    ),
    Row("range_tree", "tree of 64 drafts, 8 × 4k", Tree(8, 4096)),
    Row("range_mla_h8", "MLA decode 64 × 8k, 8 heads", Mla(64, 8192, 8)),
    Row("range_mla_h32", "MLA decode 64 × 8k, 32 heads", Mla(64, 8192, 32)),
    Row("range_mla_h64", "MLA decode 64 × 4k, 64 heads", Mla(64, 4096, 64)),
    Row("range_mla_b100", "MLA decode 100 × 4k, 128 heads", Mla(100, 4096, 128)),
    Row("range_mla_b128_c1k", "MLA decode 128 × 1k, 16 heads", Mla(128, 1024, 16)),
    Row("range_mla_p1", "MLA decode 64 × 4k, 128 heads, page 1", Mla(64, 4096, 128, page=1)),
    Row("range_mla_h128_640", "MLA decode 64 × 4k, 128 heads, rows of 640 bytes", Mla(64, 4096, 128, rope=64), _FP8),
    Row("range_mla_h16_640", "MLA decode 64 × 8k, 16 heads, rows of 640 bytes", Mla(64, 8192, 16, rope=64), _FP8),
    Row("range_mla_h128_656", "MLA decode 64 × 4k, 128 heads, rows of 656 bytes", _SCALED_ROWS, _FP8),
    Row(
        "range_mla_h16_656",
        "MLA decode 64 × 8k, 16 heads, rows of 656 bytes",
        replace(_SCALED_ROWS, context=8192, query_heads=16),
        _FP8,
    ),
    Row("range_mla_h64_fp8", "MLA decode fp8 64 × 4k, 64 heads", Mla(64, 4096, 64), _FP8),
    Row("range_mla_b128_c1k_fp8", "MLA decode fp8 128 × 1k, 16 heads", Mla(128, 1024, 16), _FP8),
    Row("mla_b64_c4k_h128_fp8", "MLA decode fp8 64 × 4k, 128 heads", Mla(64, 4096, 128), _FP8),
    Row("mla_b64_c8k_h16_fp8", "MLA decode fp8 64 × 8k, 16 heads", Mla(64, 8192, 16), _FP8),
    Row("mla_b1_c32k_h128_fp8", "MLA decode fp8 1 × 32k, 128 heads", Mla(1, 32768, 128), _FP8),
    Row("range_mla_h64_q8", "MLA decode fp8 64 × 4k, 64 heads, query of 8 bits", Mla(64, 4096, 64, query=_FP8), _FP8),
    Row("range_d64_fp8", "decode fp8 64 × 4k, head size 64", replace(_LONG, size=64), _FP8),
    Row("range_d256_fp8", "decode fp8 64 × 4k, head size 256", replace(_LONG, size=256), _FP8),
    Row("range_p64_fp8", "decode fp8 64 × 4k, page 64", replace(_LONG, page=64), _FP8),
)

QUICK = ("b64_c4k", "b64_c4k_fp8", "b1_c1k", "app_n8192_prefill", "app_n8192_prefill_fp8_rope", "gather_b64_c2k")

# The same code on shapes small enough for a CPU.
_SMALL = Decode(3, 96, 8, 2, 64, ragged=True)
_FEW = Append(3, 5, 48, query_heads=4, heads=2, size=64)
SMALL = (
    Row("small_decode", "decode bf16, small", _SMALL, group="decode bf16", goal=Goal("us", 1e6)),
    Row("small_decode_fp8", "decode fp8, small", _SMALL, _FP8, group="decode fp8", goal=Goal("read", 0.0)),
    Row("small_decode_p1", "decode bf16, page 1, small", replace(_SMALL, page=1)),
    Row("small_decode_window", "decode bf16, window 20, small", replace(_SMALL, window=20)),
    Row("small_decode_prefix", "decode bf16 of one prefix, small", Decode(3, 96, 8, 2, 64, prefix=64)),
    Row("small_sources", "decode bf16 over two sources, small", Sources(3, 40, 8, 2, 64, memory=20)),
    Row("small_append", "append, small", _FEW, group="append", goal=Goal("copy", 0.0)),
    Row("small_append_step", "append of a step, small", replace(_FEW, each=1)),
    Row("small_append_fp8", "append fp8, small", _FEW, _FP8),
    Row("small_append_rope", "RoPE + append, small", replace(_FEW, rope=True)),
    Row("small_append_fp8_rope", "RoPE + append fp8, small", replace(_FEW, rope=True), _FP8),
    Row("small_gather", "gather, small", Gather(3, 32, 2, 64), goal=Goal("copy", 0.0)),
    Row(
        "small_mla_scaled",
        "MLA decode, small scaled rows",
        Mla(2, 40, 4, 96, 64, 16, 32, 32),
        _FP8,
        Goal("matmul", 0.0),
    ),
    Row("small_mla_q8", "MLA decode fp8, query of 8 bits, small", Mla(2, 40, 4, 96, 64, 16, query="f8e4m3"), _FP8),
    Row("small_mla", "MLA decode, small", Mla(2, 40, 4, 96, 64, 16), goal=Goal("matmul", 0.0)),
    Row("small_documents", "prefill of documents, small", Functions(((40, 40),) * 2, 4, 2, 64, documents=16)),
    Row("small_t5", "prefill with T5's bias, small", Functions(((40, 40),) * 2, 4, 2, 64, documents=40, t5=True)),
    Row("small_tree", "tree of drafts, small", Tree(2, 60, 4, 2, 64, new=7)),
    Row("small_mixed", "mixed, small", Mixed(((1, 21), (1, 40), (9, 21)), 4, 2, 64)),
    Row("small_prefill", "prefill, small", Prefill(((7, 7), (5, 21)), 4, 2, 64), goal=Goal("tflops", 0.0)),
)


def select(patterns: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows selected by comma-separated texts: a part of a name, a kind, ``=name`` for one row, or a whole title.

    Raises
    ------
    ValueError
        If a text matches no row.
    """
    for row in sorted(rows, key=lambda row: -len(row.title)):  # Titles may contain commas; match the longest first.
        patterns = re.sub(rf"(^|,)\s*{re.escape(row.title)}\s*(?=,|$)", rf"\1={row.name}", patterns)
    texts = [t for t in patterns.split(",") if t]
    for text in texts:
        if not any(_fits(text, row) for row in rows):
            raise ValueError(
                f"rows must be kinds of rows or parts of their names ({', '.join(r.name for r in rows)}); got {text!r}"
            )
    return tuple(row for row in rows if any(_fits(text, row) for text in texts)) if texts else rows


def _fits(text: str, row: Row) -> bool:
    return row.name == text[1:] if text.startswith("=") else text in row.name or text == row.kind
