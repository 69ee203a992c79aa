# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.radd, kv.iadd_2m: adding to cached tokens; kv.increment_cache_lengths, between steps."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv

from . import expands
from .base import Expansion


@kv.kernel
def increment_cache_lengths(lengths, row_offsets):
    b = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
    if b < lengths.shape[0]:
        lengths[b] = lengths[b] + (row_offsets[b + 1] - row_offsets[b])


@expands("kv.increment_cache_lengths")
def expand_increment_cache_lengths(op: Any, at: Expansion) -> None:
    threads = 64 if at.target.is_host else 256
    blocks = (at.dim(op.cache_lengths, 0) + (threads - 1)) // threads
    at.launch(increment_cache_lengths, [op.cache_lengths, op.row_offsets], (blocks, 1, 1), (threads, 1, 1))
