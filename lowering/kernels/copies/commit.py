# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.commit: compact the accepted tokens of a step.

A thread has a few columns of one head, for all tokens of a sequence in order. The list is ascending, so a token is
never written after the position that is read next, and threads need no synchronisation.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec, cdiv

from .. import expands
from ..append.append import halves_of
from ..attention.queries import RaggedQueries
from ..base import Expansion
from ..common import THREADS, in_range, single, vector_width
from .convert import stored

TOGETHER = 4  # tokens that a thread has in flight


@kv.func
def listed(accepted: Any, queries: Any, b: Any, i: Any, count: Any) -> Any:
    """Entry i of a sequence's list; -1 past its end."""
    found = kv.i32(-1)
    if accepted.rank == 2:
        if i < accepted.shape[1]:
            found = accepted[b, i]
    else:
        row = queries.base(b) + i
        if (i < count) & (row < accepted.shape[0]):
            found = accepted[row]
    return found


def commit_kernel(spec: CacheSpec, threads: int, blocks: int, width: int, one_layer: bool) -> Any:
    """``blocks`` of ``threads`` threads share the columns of a sequence's token in one layer."""
    per_head = spec.head_size // width
    vectors, scales = spec.num_heads * per_head, spec.num_heads * spec.num_scales if spec.quantized else 0

    @kv.func
    def move(caches, accepted, queries, b, start, count, h, d, scaled):
        """Move a thread's columns of each accepted token."""
        i, more = kv.i32(0), count > 0
        while more:
            numbers = [listed(accepted, queries, b, i + n, count) for n in range(TOGETHER)]
            moved = []
            for n in kv.static(range(TOGETHER)):
                more = more & (numbers[n] >= 0) & (numbers[n] < count) & (i + n < count)
                moved.append(more & (numbers[n] != i + n))
            for cache in kv.static(caches):
                held = []
                for n in kv.static(range(TOGETHER)):
                    at = start + kv.where(moved[n], numbers[n], 0)
                    held.append(cache.load_scale(b, h, at, d) if scaled else stored(cache, b, h, at, d, width))
                for n in kv.static(range(TOGETHER)):
                    if moved[n] & in_range(cache, start + i + n):
                        if scaled:
                            cache.store_scale(b, h, start + i + n, d, held[n])
                        else:
                            cache.store(b, h, start + i + n, d, single(held[n]))
            i = i + TOGETHER

    @kv.kernel
    def commit(collection, accepted, row_offsets, layer: kv.i32):
        b, part = kv.block_id.x // blocks, kv.block_id.x % blocks
        if not one_layer:
            layer = kv.block_id.y
        caches = halves_of(collection, layer, 1 if spec.is_mla else 2)
        queries = RaggedQueries(row_offsets, kv.i32(2**31 - 1))
        start, count = collection.cache_length(b), queries.length(b)
        first = part * threads + kv.thread_id.x
        for vector in range(first, vectors, blocks * threads):
            move(caches, accepted, queries, b, start, count, vector // per_head, vector % per_head * width, False)
        if scales:
            for vector in range(first, scales, blocks * threads):
                h, granule = vector // spec.num_scales, vector % spec.num_scales
                move(caches, accepted, queries, b, start, count, h, granule * spec.granularity, True)

    return commit


@expands("kv.commit")
def commit(op: Any, at: Expansion) -> None:
    spec, one_layer = at.spec(op.collection), op.layer is not None
    width = vector_width(spec.head_size, types=(spec.dtype,))
    threads = 1 if at.target.is_host else min(THREADS, max(32, spec.row_size // width))
    blocks = 1 if at.target.is_host else cdiv(spec.row_size // width, threads)
    batch = at.dim(op.row_offsets, 0) - 1
    layers: Any = 1 if one_layer else at.field(op.collection, "num_layers")
    kernel = commit_kernel(spec, threads, blocks, width, one_layer)
    args = [op.collection, op.accepted, op.row_offsets, op.layer if one_layer else at.constant(0)]
    rank = ir.MemRefType(op.accepted.type).rank
    at.launch(kernel, args, (batch * blocks, layers, 1), (threads, 1, 1), key=rank)
