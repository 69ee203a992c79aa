# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.cache_row_offsets, kv.remap_sparse_indices and kv.mla_prefill_plan: index tables of a step."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv

from .. import expands
from ..base import Expansion
from ..common import sequence_of


def threads_of(at: Expansion, threads: int = 256) -> int:
    """Threads per block of an element-wise kernel; fewer on the host, whose worker threads share blocks."""
    return 64 if at.target.is_host else threads


@kv.func
def cached_before(row_offsets: Any, cache_lengths: Any, n: Any) -> Any:
    """Cached and new tokens of the sequences before sequence n."""
    total = row_offsets[n] - row_offsets[0]
    for j in range(n):
        total += cache_lengths[j]
    return total


@kv.kernel
def cache_row_offsets(row_offsets, cache_lengths, out):
    n = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
    if n < out.shape[0]:
        out[n] = cached_before(row_offsets, cache_lengths, n)


@expands("kv.cache_row_offsets")
def expand_cache_row_offsets(op: Any, at: Expansion) -> None:
    threads = threads_of(at, 64)
    blocks = (at.dim(op.out, 0) + (threads - 1)) // threads
    at.launch(cache_row_offsets, [op.row_offsets, op.cache_lengths, op.out], (blocks, 1, 1), (threads, 1, 1))


def remap_kernel(page_size: int) -> Any:
    @kv.kernel
    def remap_sparse_indices(logical, row_offsets, lookup_table, invalid_id: kv.i32, out):
        # The grid has whole blocks per row, since the product of rows and columns may overflow.
        per_row = (logical.shape[1] + kv.block_dim.x - 1) // kv.block_dim.x
        row = kv.block_id.x // per_row
        k = kv.block_id.x % per_row * kv.block_dim.x + kv.thread_id.x
        if k < logical.shape[1]:
            t = logical[row, k]
            found = t
            if t >= 0:
                found = kv.i32(-1)
                b, inside, _ = sequence_of(row_offsets, row)
                column = t // page_size
                if inside & (b < lookup_table.shape[0]) & (column < lookup_table.shape[1]):
                    page = lookup_table[b, column]
                    if (page >= 0) & (page < invalid_id):
                        found = page * page_size + t % page_size
            out[row, k] = found

    return remap_sparse_indices


@expands("kv.remap_sparse_indices")
def expand_remap_sparse_indices(op: Any, at: Expansion) -> None:
    threads = threads_of(at)
    blocks = (at.dim(op.logical, 1) + (threads - 1)) // threads * at.dim(op.logical, 0)
    args = [op.logical, op.row_offsets, op.lookup_table, op.invalid_id, op.out]
    at.launch(remap_kernel(op.page_size.value), args, (blocks, 1, 1), (threads, 1, 1))


def plan_kernel(buffer_tokens: int) -> Any:
    """A thread has one sequence, or the end of all, in every chunk."""

    @kv.kernel
    def mla_prefill_plan(row_offsets, cache_lengths, buffer_row_offsets, cache_offsets, buffer_lengths):
        n = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
        batch = cache_lengths.shape[0]
        if n <= batch:
            start = cached_before(row_offsets, cache_lengths, n)
            for c in range(buffer_lengths.shape[0]):
                # Chunk c has tokens [at, at + buffer_tokens) of the batch, in 64 bits: it may start far past the end.
                at = kv.i64(c) * buffer_tokens
                before = kv.i32(kv.math.clamp(start - at, 0, buffer_tokens))
                buffer_row_offsets[c, n] = before
                if n < batch:
                    tokens = cache_lengths[n] + (row_offsets[n + 1] - row_offsets[n])
                    cache_offsets[c, n] = kv.i32(kv.math.clamp(at - start, 0, tokens))
                else:
                    buffer_lengths[c] = kv.where(at // buffer_tokens > start // buffer_tokens, -1, before)

    return mla_prefill_plan


@expands("kv.mla_prefill_plan")
def expand_mla_prefill_plan(op: Any, at: Expansion) -> None:
    threads = threads_of(at, 64)
    blocks = (at.dim(op.buffer_row_offsets, 1) + (threads - 1)) // threads
    args = [op.row_offsets, op.cache_lengths, op.buffer_row_offsets, op.cache_offsets, op.buffer_lengths]
    at.launch(plan_kernel(op.buffer_tokens.value), args, (blocks, 1, 1), (threads, 1, 1))
