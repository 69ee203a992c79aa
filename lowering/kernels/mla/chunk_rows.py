# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLA attention of a prefill's chunk, one query row at a time: keys from a buffer, completed by latent columns.

The kernels resemble those of ``attention.rows``: one pass over a row's keys with an online softmax in f32. On the host
a thread has a row. On a GPU a warp has a row: for the scores each lane has one key, for the values each lane has some
columns of all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import align_up, cdiv, lowbit
from kvarn.dsl.values import rounded_product
from kvarn.lowering.host_math import exp2
from kvarn.lowering.tiles.cache_rows import load_width, read, read_rope

from ..attention.arguments import AttentionArguments
from ..attention.case import Case, Chunk
from ..attention.partials import LOG2E, LOWEST, NO_VALUE, finished, in_powers, log_sum_exp
from ..attention.rows import LANES, WARPS, lane_sum
from ..base import Expansion


@dataclass(frozen=True)
class Part:
    """Query columns from ``start`` up whose keys are in the buffer or in latent rows, processed ``width`` at a time."""

    in_buffer: bool
    start: int
    columns: int
    width: int


def parts_of(chunk: Chunk, widest: int) -> list[Part]:
    """The query's columns, by the source of their keys, at most ``widest`` at a time."""
    width, spec = min(widest, lowbit(chunk.rope), 8), chunk.latent.spec
    if not chunk.latent.rope:  # the first column counts for the alignment, too
        width = load_width(spec, min(width, lowbit(chunk.first_column) or width))
    return [Part(True, 0, chunk.nope, min(widest, lowbit(chunk.nope))), Part(False, chunk.nope, chunk.rope, width)]


class ChunkKeys:
    """The keys of a chunk that one query row attends to: the first ``count`` of its sequence's keys."""

    def __init__(self, chunk: Chunk, a: AttentionArguments, position: Any, b: Any, head: Any) -> None:
        self.chunk, self.cache = chunk, a.collection.get_key_cache(a.layer)
        self.keys, self.values, self.b, self.head = a.chunk_keys, a.chunk_values, b, head
        self.start = a.chunk_start(b)
        self.first, rows = a.chunk_rows(b)
        self.count = kv.math.min(rows, position + 1 - self.start)

    def place(self, i: Any) -> tuple[tuple[Any, ...], Any]:
        """The address of the i-th key, and whether it exists; a missing key is not read."""
        at = kv.math.min(i, self.count - 1)
        token = self.start + at
        return (self.first + at, token, self.cache.page(self.b, token)), i < self.count

    def key(self, place: tuple[Any, ...], part: Part, d: Any) -> Any:
        """Keys in a part's columns from ``d`` up, as f32."""
        row, token, page = place
        if part.in_buffer:
            return self._load(self.keys, row, d, part.width)
        latent, column = self.chunk.latent, d + self.chunk.first_column
        if latent.rope:
            return read_rope(latent, self.cache, self.b, 0, token, column, part.width, page)
        return read(latent.spec, self.cache, self.b, 0, token, column, part.width, page)

    def value(self, place: tuple[Any, ...], d: Any, width: int) -> Any:
        return self._load(self.values, place[0], d, width)

    def _load(self, buffer: Any, row: Any, d: Any, width: int) -> Any:
        alignment = min(self.chunk.alignment, width * buffer.dtype.itemsize)
        return kv.f32(buffer.load(row, self.head, d, width=width, alignment=alignment))


@kv.func
def keys_of(chunk: Chunk, a: AttentionArguments, queries: Any, row: Any, head: Any) -> ChunkKeys:
    """The keys of a chunk that a query row attends to."""
    b = queries.sequence(row)
    position = a.collection.cache_length(b) + queries.token(b, row)
    return ChunkKeys(chunk, a, position, b, head)


def launch(case: Case, at: Expansion, op: Any) -> None:
    """Launch the host's or the simt kernel over all query rows."""
    heads, rows = case.heads, at.dim(op.query, 0)
    args = [AttentionArguments.of(op)]
    if at.target.is_host:
        at.launch(host_kernel(case), args, (at.constant(heads), rows, 1), (1, 1, 1), key=case)
        return
    blocks = (rows * heads + (WARPS - 1)) // WARPS
    at.launch(simt_kernel(case), args, (blocks, 1, 1), (32 * WARPS, 1, 1), key=case)


def host_kernel(case: Case) -> Any:
    """The host's kernel: a grid of (query heads, rows) with one thread per block."""
    chunk = case.of_chunk
    parts, width = parts_of(chunk, LANES), min(LANES, lowbit(case.value_size))
    value_columns = range(0, case.value_size, width)

    def score_of(keys: ChunkKeys, q: list[Any], place: tuple[Any, ...]) -> Any:
        score, vectors = kv.f32(0.0), iter(q)
        for part in parts:
            total = None
            for d in range(0, part.columns, part.width):
                x, key = next(vectors), keys.key(place, part, d)
                total = rounded_product(x, key) if total is None else total + x * key
            score = score + (lane_sum(total) if part.width > 1 else total)
        return score

    @kv.kernel
    def mla_chunk_host(a: AttentionArguments):
        h, row = kv.block_id.x, kv.block_id.y
        queries = a.queries(case)
        if queries.in_range(row):
            keys = keys_of(chunk, a, queries, row, h)
            factor = a.scale * LOG2E
            q = [
                kv.f32(a.query.load(row, h, part.start + d, width=part.width, alignment=case.query.itemsize)) * factor
                for part in parts
                for d in range(0, part.columns, part.width)
            ]
            m, l = kv.f32(LOWEST), kv.f32(0.0)
            sums = [kv.vector(f32, width) if width > 1 else kv.f32(0.0) for _ in value_columns]
            if chunk.accumulate:
                before = a.lse[row, h]
                if before != NO_VALUE:
                    m, l = in_powers(before), kv.f32(1.0)
                    for n, d in enumerate(value_columns):
                        sums[n] = kv.f32(a.out.load(row, h, d, width=width, alignment=case.out.itemsize))
            for i in range(0, keys.count):
                place, exists = keys.place(i)
                if exists:
                    score = score_of(keys, q, place)
                    m_new = kv.math.max(m, score)
                    alpha, weight = exp2(m - m_new), exp2(score - m_new)
                    m, l = m_new, l * alpha + weight
                    for n, d in enumerate(value_columns):
                        sums[n] = sums[n] * alpha + keys.value(place, d, width) * weight
            m, l, factor, _ = finished(m, l, None, None, exp2)
            for n, d in enumerate(value_columns):
                a.out.store(row, h, d, value=case.out(sums[n] * factor), alignment=case.out.itemsize)
            a.lse[row, h] = log_sum_exp(m, l)

    return mla_chunk_host


def lane_width(case: Case) -> int:
    """Columns of the values per access of a lane."""
    size = case.value_size
    return min(16 // case.query.itemsize, lowbit(size), max(1, 1 << cdiv(size, 32).bit_length() - 1))


def simt_kernel(case: Case) -> Any:
    """The GPU's kernel: one warp per (row, query head), ``WARPS`` per block, in a linear grid."""
    chunk = case.of_chunk
    parts = parts_of(chunk, 16 // max(chunk.latent.spec.dtype.itemsize, 2))
    width = lane_width(case)
    columns = case.value_size // width  # vectors per value
    vectors_per_lane = cdiv(columns, 32)

    @kv.func
    def score_of(keys, q, warp, place):
        """The score of this lane's key with the query row in shared memory."""
        total = kv.f32(0.0)
        for part in kv.static(parts):
            unrolled = part.columns // part.width <= 32
            for d in range(0 if unrolled else kv.i32(0), part.columns, part.width):
                x = q.load(warp, d + part.start, width=part.width, alignment=4)
                y = keys.key(place, part, d)
                for k in kv.static(range(part.width)):
                    total = total + (x[k] * y[k] if part.width > 1 else x * y)
        return total

    @kv.kernel(max_threads=32 * WARPS)
    def mla_chunk(a: AttentionArguments):
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        item = kv.block_id.x * WARPS + warp
        row, h = item // case.heads, item % case.heads
        q = kv.shared((WARPS, align_up(case.size, 16)), f32)
        queries = a.queries(case)
        exists = queries.in_range(row)
        if exists:
            factor = a.scale * LOG2E
            for d in range(lane, case.size, 32):
                q[warp, d] = kv.f32(a.query[row, h, d]) * factor
        kv.syncwarp()
        if exists:
            keys = keys_of(chunk, a, queries, row, h)
            m, l = kv.f32(LOWEST), kv.f32(0.0)
            sums = [kv.vector(f32, width) if width > 1 else kv.f32(0.0) for _ in range(vectors_per_lane)]
            if chunk.accumulate:
                before = a.lse[row, h]
                if before != NO_VALUE:
                    m = in_powers(before)
                    l = kv.where(lane == 0, 1.0, kv.f32(0.0))  # the lanes' sums are added at the end
                    for n in kv.static(range(vectors_per_lane)):
                        d = kv.math.min(lane + 32 * n, columns - 1) * width
                        sums[n] = kv.f32(a.out.load(row, h, d, width=width, alignment=case.out.itemsize))
            for base in range(0, keys.count, 32):
                place, there = keys.place(base + lane)
                score = kv.f32(NO_VALUE)
                if there:
                    score = score_of(keys, q, warp, place)
                m_new = kv.math.max(m, kv.warp_reduce(score, "max"))
                alpha = kv.ex2(m - m_new)
                weight = kv.ex2(score - m_new)
                m, l = m_new, l * alpha + weight
                for n in kv.static(range(vectors_per_lane)):
                    sums[n] = sums[n] * alpha
                for i in range(0, kv.math.min(keys.count - base, 32)):
                    share = kv.shuffle_idx(weight, i)
                    shared_place, shared_there = keys.place(base + i)
                    if shared_there:
                        for n in kv.static(range(vectors_per_lane)):
                            d = kv.math.min(lane + 32 * n, columns - 1) * width
                            sums[n] = sums[n] + keys.value(shared_place, d, width) * share
            m, l, factor, _ = finished(m, kv.warp_reduce(l, "add"))
            for n in kv.static(range(vectors_per_lane)):
                column = lane + 32 * n
                if column < columns:
                    x = case.out(sums[n] * factor)
                    a.out.store(row, h, column * width, value=x, alignment=case.out.itemsize)
            if lane == 0:
                a.lse[row, h] = log_sum_exp(m, l)

    return mla_chunk
