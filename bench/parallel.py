# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode with the keys distributed over ranks: torchrun --nproc-per-node 2 bench/parallel.py

A step is the append and attention of every layer. It is timed on one device with the whole cache, and on all ranks
with their parts, as one CUDA graph (on the CPU: as calls). The distributed result is checked against the single
device's, and that one against float32. The step without collectives and the collectives alone are also timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import kvarn as kv
from kvarn.measure.timing import span
from kvarn.parallel import ContextParallel
from kvarn.parallel.combine import combined
from kvarn.parallel.context import Message

QUERY_HEADS, HEADS, SIZE, PAGE, POOL_LAYERS = 32, 8, 128, 16, 2


def pool_of(lengths: torch.Tensor, longest: int, seed: int) -> SimpleNamespace:
    """A pool with one free slot per sequence and randomly ordered pages; unused slots are NaN."""
    batch, columns = len(lengths), longest // PAGE + 2
    make = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch * columns + 8, generator=make)[: batch * columns].to(torch.int32)
    table = order.view(batch, columns).to(lengths.device)
    shape = (batch * columns + 8, 2, POOL_LAYERS, PAGE, HEADS, SIZE)
    blocks = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=lengths.device)
    cache = kv.PagedKVCacheCollection(blocks, lengths, table, 1, columns * PAGE)
    return SimpleNamespace(blocks=blocks, table=table, lengths=lengths, cache=cache)


def fill(one: SimpleNamespace, mine: SimpleNamespace, length: int, rank: int, world: int) -> None:
    """Write random tokens to the whole cache, and this rank's part to its own, in chunks of some thousand tokens."""
    make = torch.Generator(device=one.blocks.device).manual_seed(1)
    for b in range(len(one.lengths)):
        for first in range(0, length, 16384 * world):
            p = torch.arange(first, min(first + 16384 * world, length), device=one.blocks.device)
            data = torch.randn(len(p), 2, POOL_LAYERS, HEADS, SIZE, generator=make, device=p.device).bfloat16()
            one.blocks[one.table[b][p // PAGE].long(), :, :, p % PAGE] = data
            own = p % world == rank
            j = p[own] // world
            mine.blocks[mine.table[b][j // PAGE].long(), :, :, j % PAGE] = data[own]


def exact(one: SimpleNamespace, layer: int, query: torch.Tensor, keys: int) -> torch.Tensor:
    """Attention in float32 over the tokens of the pages."""
    rows = []
    for b in range(len(one.lengths)):
        p = torch.arange(keys, device=query.device)
        k, v = (one.blocks[one.table[b][p // PAGE].long(), h, layer, p % PAGE].float() for h in range(2))
        q = query[b].float().unflatten(0, (HEADS, -1)) * SIZE**-0.5
        scores = torch.einsum("hgd,thd->hgt", q, k).softmax(-1)
        rows.append(torch.einsum("hgt,thd->hgd", scores, v).flatten(0, 1))
    return torch.stack(rows)


class Timer:
    """Times steps, as CUDA graphs or calls: median microseconds per step."""

    def __init__(self, device: str, repeats: int) -> None:
        self._cuda, self._repeats = device == "cuda", repeats

    def __call__(self, step: Callable[[], Any], expected: torch.Tensor | None = None) -> float:
        """``expected``: the last layer's output after a replay."""
        run, out = step, None
        if self._cuda:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                step()
                step()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    out = step()
                if out is not None:
                    out.zero_()
            run = graph.replay
        times = []
        for _ in range(self._repeats + 2):
            dist.barrier()
            if self._cuda:
                torch.cuda.synchronize()
            times.append(span(run, torch if self._cuda else None))
        if expected is not None and out is not None:
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        return statistics.median(times[2:])


def measure(batch: int, length: int, layers: int, device: str, repeats: int) -> dict[str, Any]:
    """Microseconds per layer of one case, by name."""
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    ranks = ContextParallel(timeout=60)
    rank, world = ranks.rank, ranks.world
    lengths = torch.full((batch,), length, dtype=torch.int32, device=where)
    one, mine = pool_of(lengths, length, 2), pool_of(ranks.local(lengths), length // world, 3 + rank)
    fill(one, mine, length, rank, world)
    make = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, batch, HEADS, SIZE, generator=make).bfloat16().to(where)
    query = torch.randn(batch, QUERY_HEADS, SIZE, generator=make).bfloat16().to(where)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=where)

    def alone() -> torch.Tensor:
        out = query
        for n in range(layers):
            kv.ops.append(one.cache, n % POOL_LAYERS, key, value, offsets)
            out = kv.ops.attention(one.cache, n % POOL_LAYERS, query, offsets)
        return out

    def shared(parallel: ContextParallel = ranks) -> torch.Tensor:
        step, out = parallel.step(lengths), query
        for n in range(layers):
            step.append(mine.cache, n % POOL_LAYERS, key, value)
            out = step.attention(mine.cache, n % POOL_LAYERS, query)
        return out

    def local() -> None:
        """The step without its collectives."""
        step = ranks.step(lengths)
        for n in range(layers):
            step.append(mine.cache, n % POOL_LAYERS, key, value)
            kv.ops.attention(
                mine.cache, n % POOL_LAYERS, query, step.row_offsets, mask="null", kv_offsets=step.kv_offsets,
                return_lse=True,
            )  # fmt: skip

    message = Message(world, batch, QUERY_HEADS, SIZE, query)
    message.bytes.zero_()

    def gathers() -> None:
        for _ in range(layers):
            ranks.ranks.all_gather(message.bytes, message.bytes[rank], "bench")()

    def combines() -> None:
        for _ in range(layers):
            combined(message.outputs, message.sums)

    halves = []
    if batch > 1:
        cut = batch // 2
        for part in (slice(0, cut), slice(cut, batch)):
            lens, table = mine.lengths[part], mine.table[part]
            collection = kv.PagedKVCacheCollection(mine.blocks, lens, table, 1, mine.cache.max_cache_length)
            halves.append((collection, part))

    def overlapped() -> None:
        """The batch in two halves: one half's partial results are sent during the other half's attention."""
        steps, pending = [ranks.step(lengths[part]) for _, part in halves], [None, None]
        for n in range(layers):
            for i, (collection, part) in enumerate(halves):
                if pending[i] is not None:
                    pending[i].result()
                steps[i].append(collection, n % POOL_LAYERS, key[part], value[part])
                pending[i] = steps[i].attention_start(collection, n % POOL_LAYERS, query[part])
        for each in pending:
            each.result()

    expected, found = alone(), shared()
    ranks.synchronize()
    want = exact(one, (layers - 1) % POOL_LAYERS, query, length + 1)
    error, other = ((x.float() - want).abs().max().item() for x in (found, expected))
    everywhere = torch.empty(world, *found.shape, dtype=found.dtype, device=where)
    ranks.ranks.all_gather(everywhere, found.contiguous(), "bench")()
    assert all(x.equal(found) for x in everywhere), "ranks have other results"
    assert error < 1e-2, f"{error} from float32"
    timer = Timer(device, repeats)
    heads = ContextParallel(timeout=60, result="heads")
    cases = {
        "one device": alone, "shared": shared, "shared, by heads": lambda: shared(heads), "without collectives": local,
        "all-gathers alone": gathers, "combines alone": combines,
    }  # fmt: skip
    if halves:
        cases["shared, in two halves"] = overlapped
    checked = {"one device": expected, "shared": found}
    figures = {name: timer(step, checked.get(name)) / layers for name, step in cases.items()}
    ranks.synchronize()
    return {"batch": batch, "context": length, "ranks": world, "message bytes": message.bytes.shape[1],
            "error": error, "error of one device": other, "us per layer": figures}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="1x262144,8x131072", help="BATCHxCONTEXT, comma-separated")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else None
    if where is not None:
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", device_id=where)
    records = []
    for case in options.cases.split(","):
        batch, length = map(int, case.split("x"))
        record = measure(batch, length, options.layers, options.device, options.repeats)
        records.append(record)
        if dist.get_rank() == 0:
            print(f"{case} on {record['ranks']} ranks: {record['message bytes']} bytes of a rank, error "
                  f"{record['error']:.2e} (one device {record['error of one device']:.2e})")  # fmt: skip
            base = record["us per layer"]["one device"]
            for name, us in record["us per layer"].items():
                print(f"  {name:24s} {us:9.1f} us per layer {base / us:6.2f}x", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json and dist.get_rank() == 0:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
