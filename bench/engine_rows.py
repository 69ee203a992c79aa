# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of the suite of layers as vLLM calls them, and its page: python -m bench.engine writes its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import report

PEERS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
LARGEST, MEAN = 1.01, 0.80  # goals: the ratio to the fastest peer of a row, and the mean ratio of decodes over fp8


@dataclass(frozen=True)
class Row:
    """A step: ``lengths`` lists (new tokens, total tokens) of each sequence."""

    name: str
    title: str
    lengths: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def decodes(self) -> bool:
        return all(new == 1 for new, _ in self.lengths)


_STEPS = (
    ("b1_c1k", "1 × 1k", ((1, 1024),)),
    ("b1_c32k", "1 × 32k", ((1, 32768),)),
    ("b4_c16k", "4 × 16k", ((1, 16384),) * 4),
    ("b8_c4k", "8 × 4k", ((1, 4096),) * 8),
    ("b16_c8k", "16 × 8k", ((1, 8192),) * 16),
    ("b64_c1k", "64 × 1k", ((1, 1024),) * 64),
    ("b64_c4k", "64 × 4k", ((1, 4096),) * 64),
    ("b128_c2k", "128 × 2k", ((1, 2048),) * 128),
    ("b256_c1k", "256 × 1k", ((1, 1024),) * 256),
    ("b62_2", "62 × 4k and 2 prompts of 2k", ((1, 4096),) * 62 + ((2048, 2048),) * 2),
    ("b31_1", "31 × 8k and 512 over 8k", ((1, 8192),) * 31 + ((512, 8704),)),
    ("b4_prompts", "4 prompts of 2k", ((2048, 2048),) * 4),
)
ROWS = tuple(
    Row(f"{name}_{dtype}", f"{title}, {dtype}", lengths, dtype)
    for dtype in ("bf16", "fp8")
    for name, title, lengths in _STEPS
)
SMALL = (
    Row("small_fp8", "3 small, fp8", ((1, 40), (1, 17), (1, 1)), "fp8"),
    Row("small_mixed_bf16", "mixed and small, bf16", ((1, 40), (5, 23)), "bf16"),
)


def page(document: Mapping[str, Any], clocks: str) -> str:
    """The page of the suite, from its JSON."""
    records = document["records"]
    machine = next((r for r in records if r["kind"] == "machine"), {})
    right = {(r["case"], r["who"]): r for r in records if r["kind"] == "engine" and r["ok"] and r.get("us")}
    lines: list[Sequence[str]] = [
        ("step", "kvarn µs", *(f"{who} µs" for who in PEERS), "kvarn / fastest peer", "error", "metadata µs")
    ]
    ratios, of_fp8 = [], []
    cases = {r.get("case") for r in records}
    for row in (row for row in (*ROWS, *SMALL) if row.name in cases):
        ours, peers = right.get((row.name, "kvarn")), [right.get((row.name, who)) for who in PEERS]
        ratio = ours["us"] / min(p["us"] for p in peers if p) if ours and any(peers) else None
        ratios += [ratio] if ratio else []
        of_fp8 += [math.log(ratio)] if ratio and row.decodes and row.dtype == "fp8" else []
        shown = (f"{r['us']:.2f}" if r else "" for r in (ours, *peers))
        host = " / ".join(f"{r['metadata_us']:.0f}" if r else "-" for r in (ours, *peers))
        lines.append(
            (row.title, *shown, f"{ratio:.3f}" if ratio else "", f"{ours['error']:.1e}" if ours else "failed", host)
        )
    versions = f"torch {machine.get('torch')}, kvarn {machine.get('kvarn')}"
    parts = [
        "# Results: engine",
        f"Written by `python -m bench.engine`, commit {document.get('commit') or 'unknown'}. Measured on "
        f"{document['date']}: {machine.get('device', 'unknown')}, {versions}, vLLM {document.get('vllm', 'unknown')}"
        f"{', clocks after warming up: ' if clocks else ''}{clocks}.",
        "A layer's call as vLLM makes it: append and attention of 32 query heads and 8 KV heads of 128 elements over "
        "pages of 16 tokens, in CUDA graphs, the backends by turns. Metadata is the host's time per step, in the order "
        "of the columns.",
        report.table(lines, True),
    ]
    if ratios:
        within_goal = sum(ratio <= LARGEST for ratio in ratios)
        parts.append(f"- at most {LARGEST} of the fastest peer's time: {within_goal} of {len(ratios)} steps")
    if of_fp8:
        mean = math.exp(sum(of_fp8) / len(of_fp8))
        parts[-1] += f"\n- decodes over fp8 caches, geometric mean: {mean:.3f}, goal ≤ {MEAN}"
    failed = [f"- {r['case']}: {r['who']}: {r.get('note', 'the result is wrong')}"
              for r in records if r["kind"] == "engine" and not r["ok"]]  # fmt: skip
    parts += ["## Without a result", "\n".join(failed)] if failed else []
    return "\n\n".join(parts) + "\n"
