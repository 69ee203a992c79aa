# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Guarantees of paged decode attention, each demonstrated by one command: python examples/promises.py NAME

harmless   NaN in unused slots and invalid page numbers in unused table entries change nothing
pages      any page size: 1, 24 and 100 tokens
scales     int8 keys and values with scales of any granularity: the error of each
invariant  a sequence's result has the same bits alone, at another batch index, and with other sequences
graph      one captured graph (without a GPU: one launch) serves every batch of a shape

With a GPU and torch it runs there; otherwise the same PTX, for sm_90a, runs in kvarn's emulator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import Any

import numpy as np

import kvarn as kv

HEADS, QUERY_HEADS, SIZE = 2, 8, 64
LENGTHS = (37, 0, 70)  # cached tokens; each sequence has one new token
DECODE = {"max_queries": 1}


def gpu() -> Any:
    """torch, if it finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def place() -> Any:
    """A context manager for the place where operations run."""
    return contextlib.nullcontext() if gpu() is not None else kv.emulated("sm_90a")


def put(a: np.ndarray) -> Any:
    """An array on the device where operations run."""
    torch = gpu()
    return a if torch is None else torch.from_numpy(a).cuda()


def fetched(a: Any) -> np.ndarray:
    return np.asarray(a if isinstance(a, np.ndarray) else a.cpu().numpy(), np.float64)


class Batch:
    """Random sequences in permuted pages; unused slots are NaN, unused table entries are invalid."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, page: int = 16, granularity: int = 0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.cached = np.array(lengths, np.uint32)
        columns = -(-(max(lengths) + 1) // page) + 2
        pages = len(lengths) * columns + 3
        self.rows = [rng.standard_normal((2, n + 1, HEADS, SIZE)).astype(np.float16) for n in lengths]
        self.query = rng.standard_normal((len(lengths), QUERY_HEADS, SIZE)).astype(np.float16)
        shape = (pages, 2, 1, page, HEADS, SIZE)
        self.blocks = np.full(shape, 127, np.int8) if granularity else np.full(shape, np.nan, np.float16)
        self.table = rng.choice([pages, 2**31, 2**32 - 1], (len(lengths), columns)).astype(np.uint32)
        groups = -(-SIZE // granularity) if granularity else 0
        self.scales = np.full((pages, 2, 1, page, HEADS, groups), np.nan, np.float32) if granularity else None
        free = iter(rng.permutation(pages))
        for b, rows in enumerate(self.rows):
            for t in range(rows.shape[1]):
                if t % page == 0:
                    self.table[b, t // page] = next(free)
                at = (self.table[b, t // page], slice(None), 0, t % page)
                if self.scales is None:
                    self.blocks[at] = rows[:, t]
                    continue
                rows[:, t, :, 0] *= 50  # one dimension much larger than the others, as in keys of real models
                parts = np.array_split(rows[:, t].astype(np.float32), range(granularity, SIZE, granularity), axis=-1)
                for g, part in enumerate(parts):
                    scale = np.abs(part).max(-1, keepdims=True) / 127
                    self.scales[(*at, slice(None), g)] = scale[..., 0]
                    self.blocks[(*at, slice(None), slice(g * granularity, (g + 1) * granularity))] = np.rint(
                        part / scale
                    )
        self.granularity = granularity

    def collection(self) -> Any:
        quantized = {}
        if self.scales is not None:
            quantized = {"scales": put(self.scales), "quantization_granularity": self.granularity}
        arrays = [put(a) for a in (self.blocks, self.cached, self.table)]
        return kv.PagedKVCacheCollection(*arrays, 1, int(self.cached.max()), **quantized)

    def attention(self, **schedule: Any) -> np.ndarray:
        """kvarn's result: [sequences, QUERY_HEADS, SIZE]."""
        offsets = put(np.arange(len(self.rows) + 1, dtype=np.uint32))
        with place():
            out = kv.ops.attention(self.collection(), 0, put(self.query), offsets, schedule={**DECODE, **schedule})
        return fetched(out)

    def expected(self) -> np.ndarray:
        """The result in float64, from the rows before they were stored."""
        out = np.empty(self.query.shape)
        for b, (keys, values) in enumerate(self.rows):
            for h in range(QUERY_HEADS):
                of = h // (QUERY_HEADS // HEADS)
                scores = keys[:, of].astype(float) @ self.query[b, h] / np.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                out[b, h] = weights @ values[:, of] / weights.sum()
        return out

    def error(self) -> float:
        """The largest error, relative to the largest value of the result."""
        expected = self.expected()
        return float(np.abs(self.attention() - expected).max() / np.abs(expected).max())


def harmless() -> str:
    batch = Batch()
    nans = int(np.isnan(batch.blocks.astype(np.float32)).sum())
    bad = int((batch.table >= len(batch.blocks)).sum())
    error = batch.error()
    assert error < 2e-3, error
    return f"{nans:,} NaNs in the pool and {bad} invalid page numbers in the table: relative error {error:.1e}"


def pages() -> str:
    errors = {page: Batch(page=page).error() for page in (1, 24, 100)}
    assert max(errors.values()) < 2e-3, errors
    return "; ".join(f"pages of {page} tokens: relative error {error:.1e}" for page, error in errors.items())


def scales() -> str:
    errors = {g: Batch(granularity=g).error() for g in (64, 8, 1)}
    assert errors[1] < errors[8] < errors[64], errors
    return "; ".join(f"a scale for {g} elements: relative error {error:.1e}" for g, error in errors.items())


def invariant() -> str:
    whole = Batch()
    alone = Batch()
    alone.rows, alone.query = whole.rows[2:], whole.query[2:]
    alone.cached, alone.table = whole.cached[2:], whole.table[2:]
    first, second = whole.attention(batch_invariant=True)[2], alone.attention(batch_invariant=True)[0]
    assert (first == second).all()
    assert np.abs(first - whole.expected()[2]).max() < 1e-2
    return f"{first.size} elements of a sequence have the same bits alone and with {len(LENGTHS) - 1} others"


def graph() -> str:
    """Run batches of other lengths, pages and data in the same arrays; nothing is planned on the host."""
    batch, other = Batch(), Batch((3, 80, 12), seed=1)
    torch = gpu()
    columns = max(b.table.shape[1] for b in (batch, other))
    for b in (batch, other):
        b.table = np.pad(b.table, ((0, 0), (0, columns - b.table.shape[1])), constant_values=2**31)
        b.blocks = np.concatenate([b.blocks, np.full((40 - len(b.blocks), *b.blocks.shape[1:]), np.nan, np.float16)])
    offsets, most = np.arange(4, dtype=np.uint32), 80
    arrays = [put(a.copy()) for a in (batch.blocks, batch.cached, batch.table, batch.query)]
    collection = kv.PagedKVCacheCollection(*arrays[:3], 1, most)
    given, out = put(offsets), put(np.zeros_like(batch.query))

    def launch() -> None:
        kv.ops.attention(collection, 0, arrays[3], given, out=out, schedule=DECODE)

    shapes = []
    if torch is not None:
        launch()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            launch()
    for b in (batch, other, batch):
        for a, new in zip(arrays, (b.blocks, b.cached, b.table, b.query), strict=True):
            a[...] = put(new)
        if torch is not None:
            captured.replay()
            torch.cuda.synchronize()
        else:
            with kv.emulated("sm_90a") as report:
                launch()
            shapes.append([(name, c.blocks) for name, c in report.kernels.items()])
        assert np.abs(fetched(out) - b.expected()).max() < 1e-2
    if torch is not None:
        return "one graph, captured once and replayed for three batches, gave the result of each"
    assert shapes[0] == shapes[1] == shapes[2]
    ((name, blocks),) = shapes[0]
    return f"three batches, each one launch of {name} over {blocks} blocks, whatever their lengths"


PROMISES = {f.__name__: f for f in (harmless, pages, scales, invariant, graph)}


def main(name: str) -> str:
    if name not in PROMISES:
        raise SystemExit(f"usage: python examples/promises.py {{{','.join(PROMISES)}}}")
    return PROMISES[name]()


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) == 2 else ""))
