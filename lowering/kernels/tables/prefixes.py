# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.split_prefixes: tables of the prefixes that sequences share, and of the suffixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv

from .. import expands
from ..attention.case import last_not_above
from ..base import Expansion
from .indices import threads_of


@dataclass(frozen=True)
class Batch:
    """B sequences, and G groups of sequences that share a prefix; all i32.

    Attributes
    ----------
    lookup_table, cache_lengths : [B, P], [B]
    row_offsets : [B + 1]
    sequences : [G + 1]
        The first sequence of each group, and the end of the last group.
    lengths : [G]
        Tokens per prefix.
    """

    lookup_table: Any
    cache_lengths: Any
    row_offsets: Any
    sequences: Any
    lengths: Any


@dataclass(frozen=True)
class Prefixes:
    """Tables of the prefixes, in which a group is a sequence; all i32.

    Attributes
    ----------
    table, lengths : [G, P], [G]
    rows, keys : [G + 1]
        Offsets of the groups' query rows, and of their new keys, which are none.
    """

    table: Any
    lengths: Any
    rows: Any
    keys: Any


@dataclass(frozen=True)
class Suffixes:
    """Tables of the suffixes: i32 [B, P] and [B]."""

    table: Any
    lengths: Any


def split_kernel(page_size: int) -> Any:
    """One block per sequence, then one per group, and one for the end of the offsets."""

    @kv.func
    def shared_pages(lengths, columns, g):
        return kv.math.clamp(lengths[g] // page_size, 0, columns)

    @kv.func
    def copy_pages(target, row, source, b, first):
        """Copy a row's pages from ``first`` up; past the table, the last page again."""
        last = source.shape[1] - 1
        for c in range(kv.thread_id.x, source.shape[1], kv.block_dim.x):
            target[row, c] = source[b, kv.math.min(c + first, last)]

    @kv.kernel
    def split_prefixes(of: Batch, prefix: Prefixes, suffix: Suffixes):
        row, batch = kv.block_id.x, of.cache_lengths.shape[0]
        groups, columns = of.lengths.shape[0], of.lookup_table.shape[1]
        if row < batch:
            pages = shared_pages(of.lengths, columns, last_not_above(of.sequences, groups, row))
            copy_pages(suffix.table, row, of.lookup_table, row, pages)
            if kv.thread_id.x == 0:
                suffix.lengths[row] = kv.math.max(of.cache_lengths[row] - pages * page_size, 0)
        else:
            # The first group starts at sequence 0 and the last group ends with the batch, whatever the offsets say.
            g, first = row - batch, kv.i32(0)
            if g > 0:
                first = kv.where(g == groups, batch, kv.math.clamp(of.sequences[g], 0, batch))
            if kv.thread_id.x == 0:
                prefix.rows[g], prefix.keys[g] = of.row_offsets[first], kv.i32(0)
            if g < groups:
                copy_pages(prefix.table, g, of.lookup_table, kv.math.min(first, batch - 1), 0)
                if kv.thread_id.x == 0:
                    prefix.lengths[g] = shared_pages(of.lengths, columns, g) * page_size

    return split_prefixes


@expands("kv.split_prefixes")
def expand_split_prefixes(op: Any, at: Expansion) -> None:
    threads = threads_of(at)
    blocks = at.dim(op.cache_lengths, 0) + at.dim(op.sequences, 0)
    args = [
        Batch(op.lookup_table, op.cache_lengths, op.row_offsets, op.sequences, op.lengths),
        Prefixes(op.prefix_table, op.prefix_lengths, op.prefix_rows, op.prefix_keys),
        Suffixes(op.suffix_table, op.suffix_lengths),
    ]
    at.launch(split_kernel(op.page_size.value), args, (blocks, 1, 1), (threads, 1, 1))
