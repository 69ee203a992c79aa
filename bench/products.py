# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""QKV projections into a cache beside a product and an append of its own: python -m bench.products [--tokens 1,8192]

µs of ``kv.ops.project_append`` with RoPE, of torch's product, and of torch's product and ``kv.ops.rope_append`` after
it, in CUDA graphs over weights that are not in the L2 cache. Before a line is timed its queries, keys and values are
checked against a product in float32 over the same operands, in a pool of random pages that is NaN but for them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.tools.timing import span

from .report import table

QUERY_HEADS, HEADS, SIZE, PAGE, CACHED = 32, 8, 128, 16, 37
COLUMNS = (QUERY_HEADS + 2 * HEADS) * SIZE
TOKENS = (1, 8, 64, 256, 512, 1024, 8192)
REPEATS = 7
TOLERANCE = 0.05  # of the largest element
HEAD = ["tokens", "K", "kvarn, µs", "product", "product, then append", "TFLOP/s", "TB/s of the weight"]
COLD = 200 << 20  # bytes of weights that a graph reads, several times the L2 cache


class Step:
    """Operands of one projection, and what it must give."""

    def __init__(self, torch: Any, tokens: int, k: int, eight_bits: bool) -> None:
        import kvarn as kv

        self.torch, self.eight_bits = torch, eight_bits
        draw = np.random.default_rng(7)
        new = np.full(min(tokens, 8), tokens // min(tokens, 8))
        pages = -(-(CACHED + new) // PAGE)
        order = draw.permutation(pages.sum() + 2) + 1
        entries = np.zeros((len(new), pages.max()), np.int32)
        for b, end in enumerate(np.cumsum(pages)):
            entries[b, : pages[b]] = order[end - pages[b] : end]
        self.table = torch.from_numpy(entries).cuda()
        self.blocks = torch.empty((len(order) + 1, 2, 1, PAGE, HEADS, SIZE), dtype=torch.bfloat16, device="cuda")
        lengths = torch.full((len(new),), CACHED, dtype=torch.int32, device="cuda")
        longest = CACHED + int(new.max())
        self.collection = kv.PagedKVCacheCollection(self.blocks, lengths, self.table, int(new.max()), longest)
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(new)]).astype(np.int32)).cuda()
        self.sequence = torch.from_numpy(np.repeat(np.arange(len(new)), new)).cuda()
        self.position = torch.from_numpy(CACHED + np.concatenate([np.arange(n) for n in new])).cuda()
        turns = torch.rand((longest, SIZE // 2), device="cuda") * 6.28
        self.freqs = torch.stack([turns.cos(), turns.sin()], -1).reshape(longest, SIZE)
        self.out = torch.empty((tokens, QUERY_HEADS, SIZE), dtype=torch.bfloat16, device="cuda")
        x = torch.randn((tokens, k), device="cuda")
        copies = max(2, COLD // (COLUMNS * k * (1 if eight_bits else 2)))
        self.x, self.x_scale = self.operand(x)
        self.weights = [self.operand(torch.randn((COLUMNS, k), device="cuda") / k**0.5) for _ in range(copies)]

    def operand(self, values: Any) -> tuple[Any, Any]:
        """Values in bf16, or in 8 bits with a scale a row."""
        if not self.eight_bits:
            return values.bfloat16(), None
        scale = values.abs().amax(1, keepdim=True) / 448
        return (values / scale).to(self.torch.float8_e4m3fn), scale

    def product(self, weight: tuple[Any, Any]) -> Any:
        """torch's, in bf16."""
        if not self.eight_bits:
            return self.torch.mm(self.x, weight[0].t())
        scales = {"scale_a": self.x_scale, "scale_b": weight[1].t()}
        return self.torch._scaled_mm(self.x, weight[0].t(), out_dtype=self.torch.bfloat16, **scales)

    def project(self, weight: tuple[Any, Any]) -> None:
        import kvarn as kv

        kv.ops.project_append(
            self.collection, 0, self.x, weight[0], self.offsets, x_scale=self.x_scale, weight_scale=weight[1],
            freqs_cis=self.freqs, interleaved=False, query_out=self.out,
        )  # fmt: skip

    def two_steps(self, weight: tuple[Any, Any]) -> None:
        import kvarn as kv

        q, k, v = self.heads_of(self.product(weight))
        kv.ops.rope_append(self.collection, 0, q, k, v, self.offsets, self.freqs, interleaved=False, query_out=self.out)

    def heads_of(self, products: Any) -> list[Any]:
        """Queries, keys and values."""
        parts = products.split([QUERY_HEADS * SIZE, HEADS * SIZE, HEADS * SIZE], 1)
        return [part.unflatten(1, (-1, SIZE)) for part in parts]

    def error(self) -> float:
        """The largest error of what a projection writes, over the largest element; infinite if anything else is."""
        self.blocks.fill_(float("nan"))
        self.out.fill_(float("nan"))
        self.project(self.weights[0])
        (w, w_scale), x = self.weights[0], self.x.float()
        w = w.float() if w_scale is None else w.float() * w_scale
        x = x if self.x_scale is None else x * self.x_scale
        q, k, v = (part.float() for part in self.heads_of((x @ w.t()).bfloat16()))
        cos, sin = (self.freqs[self.position][:, None, i::2] for i in (0, 1))
        for part in (q, k):
            re, im = part[..., : SIZE // 2].clone(), part[..., SIZE // 2 :].clone()
            part[..., : SIZE // 2], part[..., SIZE // 2 :] = re * cos - im * sin, re * sin + im * cos
        pages, slots = self.table[self.sequence, self.position // PAGE].long(), self.position % PAGE
        found = (self.out, self.blocks[pages, 0, 0, slots], self.blocks[pages, 1, 0, slots])
        worst = max(((f.float() - w).abs().max() / w.abs().max()).item() for f, w in zip(found, (q, k, v), strict=True))
        elsewhere = (~self.blocks.isnan()).sum().item() != k.numel() + v.numel()
        return float("inf") if elsewhere else worst

    def time(self, call: Callable[[tuple[Any, Any]], Any]) -> float:
        """µs of a call, the median of some replays of a graph that has it for every weight."""
        cuda = self.torch.cuda
        call(self.weights[0])
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for weight in self.weights:
                call(weight)
        found = [span(graph.replay, self.torch) / len(self.weights) for _ in range(REPEATS + 1)]
        return float(np.median(found[1:]))


def line(torch: Any, tokens: int, k: int, eight_bits: bool) -> list[str]:
    """One line of the table."""
    step = Step(torch, tokens, k, eight_bits)
    error = step.error()
    if not error < TOLERANCE:
        return [f"{tokens}", f"{k}", "wrong", f"{error:.3g}", "", "", ""]
    own, product, both = (step.time(call) for call in (step.project, step.product, step.two_steps))
    flops, read = 2 * tokens * COLUMNS * k, COLUMNS * k * (1 if eight_bits else 2)
    times = [f"{t:.1f}" for t in (own, product, both)]
    return [f"{tokens}", f"{k}", *times, f"{flops / own / 1e6:.0f}", f"{read / own / 1e6:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a step, with commas between")
    parser.add_argument("--hidden", default="4096,8192", help="K, with commas between")
    parser.add_argument("--types", default="bf16,f8e4m3", help="of the operands, with commas between")
    given = parser.parse_args(arguments)
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        print("bench.products needs torch and a GPU", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("bench.products needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    for name in given.types.split(","):
        lines = [
            line(torch, int(tokens), int(k), name == "f8e4m3")
            for k in given.hidden.split(",") for tokens in given.tokens.split(",")
        ]  # fmt: skip
        print(f"\n{name}, {torch.cuda.get_device_name()}\n")
        print(table([HEAD, *lines], markdown=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
