# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sweep the decode kernel's schedules on a GPU: checked, timed by graph replay, one line a configuration.

    python bench/decode_sweep.py [--cases 64x4k,1x32k] [--dtype bf16,f8e4m3] [--seconds 200]

Layers are rotated so that the L2 holds none of them; the page table is a random permutation; the output is poisoned
with NaN before the checked run, and compared with float32 attention over the dequantized cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time

import torch

import kvarn as kv

CASES = {  # batch, context (ragged up to it when negative), query heads, KV heads, page size
    "64x4k": (64, 4096, 32, 8, 16), "64x4k_p64": (64, 4096, 32, 8, 64), "64x4k_p1": (64, 4096, 32, 8, 1),
    "64x8k_g8_p64": (64, 8192, 64, 8, 64), "16x8k": (16, 8192, 32, 8, 16), "128x2k": (128, 2048, 32, 8, 16),
    "256x1k_h32": (256, 1024, 32, 32, 16), "64r8k": (64, -8192, 32, 8, 16), "1x32k": (1, 32768, 32, 8, 16),
    "1x1k": (1, 1024, 32, 8, 16),
}  # fmt: skip
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f8e4m3": torch.float8_e4m3fn}


class Problem:
    """One case on the GPU: a collection with enough layers to defeat the L2, and a reference for layer 0."""

    def __init__(self, name: str, dtype: str, size: int = 128) -> None:
        self.batch, context, self.query_heads, self.heads, self.page = CASES[name]
        self.size, self.dtype = size, dtype
        torch.manual_seed(1)
        if context < 0:
            lengths = torch.randint(-context // 16, -context + 1, (self.batch,))
            lengths[0] = -context
        else:
            lengths = torch.full((self.batch,), context)
        pages = (lengths + self.page - 1) // self.page
        columns = (int(pages.max()) + 7) // 8 * 8 + 16
        total = int(pages.sum())
        item = 2 if dtype != "f8e4m3" else 1
        self.bytes = int(lengths.sum()) * self.heads * size * item * 2
        self.layers = max(1, math.ceil(320e6 / self.bytes))
        shape = (total + 1, 2, self.layers, self.page, self.heads, size)
        blocks = torch.empty(shape, dtype=TORCH[dtype], device="cuda")
        for layer in range(self.layers):
            blocks[:, :, layer] = torch.randn(
                (total + 1, 2, self.page, self.heads, size), device="cuda", dtype=torch.bfloat16
            ).to(TORCH[dtype])
        table = torch.full((self.batch, columns), total, dtype=torch.int32)
        order, at = torch.randperm(total).int(), 0
        for b, n in enumerate(pages.tolist()):
            table[b, :n] = order[at : at + n]
            at += n
        self.lengths, self.blocks, self.table = lengths, blocks, table.cuda()
        query = torch.bfloat16 if dtype == "f8e4m3" else TORCH[dtype]
        self.query = torch.randn((self.batch, self.query_heads, size), device="cuda", dtype=query)
        self.out = torch.empty_like(self.query)
        self.offsets = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda")
        # The step's own token is the last of the context: it is in the cache already, as after an append.
        self.collection = kv.PagedKVCacheCollection(
            blocks, (lengths - 1).int().cuda(), self.table, 1, int(lengths.max())
        )
        self.scale = size**-0.5

    def error(self) -> float:
        """Relative error of a few sequences of layer 0."""
        worst = 0.0
        for b in {0, self.batch // 2, self.batch - 1}:
            n = int(self.lengths[b])
            pages = self.table[b, : (n + self.page - 1) // self.page].long()
            k, v = (self.blocks[pages, i, 0].float().reshape(-1, self.heads, self.size)[:n] for i in (0, 1))
            q = self.query[b].float().view(self.heads, -1, self.size)
            weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.scale).softmax(-1)
            expected = torch.einsum("hgn,nhd->hgd", weights, v).reshape(self.query_heads, self.size)
            worst = max(worst, float((self.out[b].float() - expected).norm() / expected.norm()))
        return worst


def timed(launch, layers: int) -> float:
    """Median microseconds of one launch, by graph replay."""
    count = max(layers, 4) * 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(i % layers)
    samples = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / count)
    return sorted(samples)[len(samples) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dtype", default="bf16,f8e4m3")
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--blocks", default="2,3,4")
    parser.add_argument("--tile", default="0")
    parser.add_argument("--min-tiles", default="4")
    parser.add_argument("--warps", default="0")
    parser.add_argument("--combine", default="0")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    begin = time.time()
    lists = [
        [int(x) for x in getattr(options, n).split(",")]
        for n in ("stages", "blocks", "tile", "min_tiles", "warps", "combine")
    ]
    for name, dtype in itertools.product(options.cases.split(","), options.dtype.split(",")):
        problem = Problem(name, dtype)
        for stages, blocks, tile, min_tiles, warps, combine in itertools.product(*lists):
            if time.time() - begin > options.seconds:
                return
            schedule = {"stages": stages, "blocks": blocks, "min_tiles": min_tiles, "combine": combine}
            schedule |= {"tile": tile} if tile else {}
            schedule |= {"warps": warps} if warps else {}
            try:

                def launch(layer: int, problem: Problem = problem, schedule: dict = schedule) -> None:
                    kv.ops.attention(
                        problem.collection, layer, problem.query, problem.offsets, out=problem.out, schedule=schedule
                    )

                problem.out.fill_(float("nan"))
                started = time.time()
                launch(0)
                torch.cuda.synchronize()
                compiled = time.time() - started
                error = problem.error()
                us = timed(launch, problem.layers)
            except (ValueError, RuntimeError) as e:
                print(f"{name:14s} {dtype:7s} {schedule} failed: {str(e)[:300]}", flush=True)
                continue
            shown = " ".join(f"{k}={v}" for k, v in schedule.items())
            print(f"{name:14s} {dtype:7s} {shown:50s} {us:8.2f} us {problem.bytes / us / 1e6:6.3f} TB/s "
                  f"err {error:.1e} first call {compiled:.2f} s", flush=True)  # fmt: skip
        del problem
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
