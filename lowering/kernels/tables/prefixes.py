# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.split_prefixes: tables of the prefixes that sequences share, and of what follows them."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv

from .. import expands
from ..attention.case import last_not_above
from ..base import Expansion
from .indices import threads_of


def split_kernel(page_size: int) -> Any:
    """A block a sequence, then a block a group and one for the end of the offsets."""

    @kv.func
    def shared_pages(lengths, columns, g):
        return kv.math.clamp(lengths[g] // page_size, 0, columns)

    @kv.func
    def copy_pages(target, row, source, b, first):
        """The row's pages from ``first`` on; past the table, the last one again."""
        last = source.shape[1] - 1
        for c in range(kv.thread_id.x, source.shape[1], kv.block_dim.x):
            target[row, c] = source[b, kv.math.min(c + first, last)]

    @kv.kernel
    def split_prefixes(
        lookup_table, cache_lengths, row_offsets, sequences, lengths, prefix_table, prefix_lengths, prefix_rows,
        prefix_keys, suffix_table, suffix_lengths,
    ):  # fmt: skip
        row, batch = kv.block_id.x, cache_lengths.shape[0]
        groups, columns = lengths.shape[0], lookup_table.shape[1]
        if row < batch:
            pages = shared_pages(lengths, columns, last_not_above(sequences, groups, row))
            copy_pages(suffix_table, row, lookup_table, row, pages)
            if kv.thread_id.x == 0:
                suffix_lengths[row] = kv.math.max(cache_lengths[row] - pages * page_size, 0)
        else:
            # The first group begins with the batch and the last one ends with it, whatever the offsets say.
            g, first = row - batch, kv.i32(0)
            if g > 0:
                first = kv.where(g == groups, batch, kv.math.clamp(sequences[g], 0, batch))
            if kv.thread_id.x == 0:
                prefix_rows[g], prefix_keys[g] = row_offsets[first], kv.i32(0)
            if g < groups:
                copy_pages(prefix_table, g, lookup_table, kv.math.min(first, batch - 1), 0)
                if kv.thread_id.x == 0:
                    prefix_lengths[g] = shared_pages(lengths, columns, g) * page_size

    return split_prefixes


@expands("kv.split_prefixes")
def expand_split_prefixes(op: Any, at: Expansion) -> None:
    threads = threads_of(at)
    blocks = at.dim(op.cache_lengths, 0) + at.dim(op.sequences, 0)
    args = [
        op.lookup_table, op.cache_lengths, op.row_offsets, op.sequences, op.lengths, op.prefix_table, op.prefix_lengths,
        op.prefix_rows, op.prefix_keys, op.suffix_table, op.suffix_lengths,
    ]  # fmt: skip
    at.launch(split_kernel(op.page_size.value), args, (blocks, 1, 1), (threads, 1, 1))
