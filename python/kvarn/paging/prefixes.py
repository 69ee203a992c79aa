# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sequences of a batch that share their first pages, and the collections with which attention reads these once.

:func:`groups` finds them from the page ids of a table. :class:`SharedPrefixes` has the groups of a batch on the caches'
device, and splits a collection in two: the prefixes, one sequence per group, and the tokens that follow them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvarn
from kvarn.caches import PagedKVCacheCollection
from kvarn.caches.checks import positive
from kvarn.runtime.copying import NoShallowCopies

# Bytes of keys and values that a shared prefix must save to be worth its launches: an H200 reads repeated prefixes
# from L2, at twice the bandwidth of its memory.
WORTH = 256 << 20


def groups(lookup_table: Any, cache_lengths: Any, page_size: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Groups of adjacent sequences that share their first pages, chosen to save the most tokens from repeated reads.

    Parameters
    ----------
    lookup_table : uint32 or int32 numpy.ndarray [B, columns]
    cache_lengths : uint32 or int32 numpy.ndarray [B]
        Tokens cached before the step; only their full pages are shared.
    page_size : int
    least : int
        Tokens that a group must save: its prefix times its number of sequences less one. Smaller groups are not shared.

    Returns
    -------
    tuple of numpy.ndarray
        int32 [G + 1]: group g has the sequences ``[g]`` to ``[g + 1]``, and every sequence is in a group; int32 [G]:
        tokens of its prefix, in whole pages; 0 for a group without sharing.
    """
    table, pages = np.asarray(lookup_table), np.asarray(cache_lengths).astype(np.int64) // page_size
    batch = len(table)
    if batch == 0:
        return np.zeros(1, np.int32), np.zeros(0, np.int32)
    # Number of full pages that each sequence has in common with the next.
    common = np.logical_and.accumulate(table[1:] == table[:-1], axis=1).sum(1)
    common = np.minimum(common, np.minimum(pages[1:], pages[:-1]))
    # best[e]: the most pages saved in [0, e), start[e]: the start of its last group.
    best, start = np.zeros(batch + 1, np.int64), np.arange(-1, batch)
    for end in range(2, batch + 1):
        run = np.minimum.accumulate(common[end - 2 :: -1])  # common pages of [end - 2, end), [end - 3, end), ...
        run = run[: np.argmax(run == 0)] if (run == 0).any() else run
        saved = run * np.arange(1, len(run) + 1)
        saved = np.where(saved * page_size >= max(least, 1), saved, 0) + best[end - 2 - np.arange(len(run))]
        best[end] = best[end - 1]
        if len(run) and saved.max() > best[end]:
            at = int(saved.argmax())
            best[end], start[end] = saved[at], end - 2 - at
    found: list[tuple[int, int]] = []  # (first sequence, pages), the last group first
    end = batch
    while end:
        first = int(start[end])
        shared = int(common[first : end - 1].min()) if end - first > 1 else 0
        if found and not shared and not found[-1][1]:
            found[-1] = (first, 0)
        else:
            found.append((first, shared))
        end = first
    found.reverse()
    sequences = np.array([first for first, _ in found] + [batch], np.int32)
    return sequences, np.array([n * page_size for _, n in found], np.int32)


class SharedPrefixes(NoShallowCopies):
    """Groups of a batch's sequences that share their first pages, for ``kv.ops.attention(shared=...)``.

    Call :meth:`plan` once per step, and attention for every layer. Both are launches that a CUDA graph can capture; a
    replay reads the current ``sequences`` and ``lengths``.

    Parameters
    ----------
    sequences : int32 array-like [G + 1]
        Group g has the sequences ``sequences[g]`` to ``sequences[g + 1]``. Every sequence of the batch is in a group;
        groups may be empty.
    lengths : int32 array-like [G]
        Tokens of each group's prefix, cached in all of its sequences, in the same pages. A partial page is not shared.
        0: no sharing.
    """

    def __init__(self, sequences: Any, lengths: Any) -> None:
        try:
            ends, groups = (list(x.shape) for x in (sequences, lengths))
        except Exception:  # no arrays, or arrays without a numeric shape
            of = " and ".join(type(x).__name__ for x in (sequences, lengths))
            raise TypeError(f"sequences and lengths must be arrays of shapes [G + 1] and [G], got {of}") from None
        if len(groups) != 1 or ends != [groups[0] + 1]:
            raise ValueError(f"sequences and lengths must be [G + 1] and [G], got shapes {ends} and {groups}")
        self.sequences, self.lengths = sequences, lengths
        self.collection: Any = None  # the collection of the plan
        self._tables: tuple[Any, ...] = ()
        self._parts: tuple[PagedKVCacheCollection, PagedKVCacheCollection] | None = None

    @classmethod
    def find(
        cls,
        lookup_table: Any,
        cache_lengths: Any,
        page_size: int,
        *,
        token_bytes: int | None = None,
        least: int | None = None,
        upload: Callable[[np.ndarray], Any] | None = None,
    ) -> SharedPrefixes | None:
        """The groups of a batch from its tables on the host; None if no group is worth it.

        Adjacent sequences are compared: a batch sorted by pages (``sorted(requests, key=manager.pages)``) shares most.

        Parameters
        ----------
        lookup_table : uint32 or int32 numpy.ndarray [B, columns]
        cache_lengths : uint32 or int32 numpy.ndarray [B]
        page_size : int
        token_bytes : int, optional
            Bytes of a token's keys and values in a layer: a group must then save 256 MiB of reads. By default every
            group counts.
        least : int, optional
            Tokens that a group must save, in place of that rule.
        upload : callable, optional
            Copies a NumPy array to the pool's device; by default returns the array itself.
        """
        positive(page_size, "page_size")
        for name, tokens in (("token_bytes", token_bytes), ("least", least)):
            if tokens is not None:
                positive(tokens, name)
        if least is None:
            least = 1 if token_bytes is None else -(-WORTH // token_bytes)
        sequences, lengths = groups(lookup_table, cache_lengths, page_size, least)
        if not lengths.any():
            return None
        return cls(*((sequences, lengths) if upload is None else (upload(sequences), upload(lengths))))

    def plan(self, collection: Any, row_offsets: Any, *, stream: Any = None) -> None:
        """Compute the tables of a step, for every attention with ``shared=`` on this collection.

        Launches a kernel; allocates (by the library of the lengths) when shapes change.

        Parameters
        ----------
        collection : PagedKVCacheCollection or ForeignPages
            The collection of the batch.
        row_offsets : uint32 or int32 array-like [B + 1]
        stream : optional
            As in ``kv.ops.attention``.

        Raises
        ------
        TypeError, ValueError
            If the arguments do not match; on the host also if sequences of a group do not share its pages.
        """
        self._parts, self._tables = kvarn.plan_prefixes(self, collection, row_offsets, self._tables, stream)
        self.collection = collection

    @property
    def parts(self) -> tuple[PagedKVCacheCollection, PagedKVCacheCollection]:
        """The collections of prefixes (one sequence per group) and of the tokens after them, over the plan's pool."""
        if self._parts is None:
            raise ValueError("SharedPrefixes must be planned for the step: call plan(collection, row_offsets) first")
        return self._parts

    @property
    def row_offsets(self) -> Any:
        """Rows of each group, [G + 1]."""
        return self._tables[2]

    @property
    def no_keys(self) -> Any:
        """Offsets of zero new keys, [G + 1]: the step's keys follow the prefixes."""
        return self._tables[3]

    def __repr__(self) -> str:
        return f"SharedPrefixes(groups={self.lengths.shape[0]})"
