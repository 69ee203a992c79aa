# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which sequences of a batch begin with the same pages, and what attention needs to read these once.

:func:`groups` finds them from the page ids of a table. :class:`SharedPrefixes` holds the groups of a batch where the
caches are, and makes two collections of one: of the prefixes, a sequence a group, and of what follows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvarn
from kvarn.caches import PagedKVCacheCollection
from kvarn.caches.checks import positive
from kvarn.runtime.copying import NoShallowCopies

# Bytes of keys and values that reading a prefix once must save to be worth its launches: an H200 reads a prefix again
# from the L2, twice as fast as memory (64 sequences of 250 tokens over one prefix of 512, 128 MiB saved: 35 us with and
# without; of 2048: 45 and 82 us; 16 over 2048, 120 MiB: 31 and 25 us).
WORTH = 256 << 20


def groups(lookup_table: Any, cache_lengths: Any, page_size: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of a batch that share their first pages, so that the most tokens need not be read again.

    Parameters
    ----------
    lookup_table : uint32 or int32 numpy.ndarray [B, columns]
    cache_lengths : uint32 or int32 numpy.ndarray [B]
        Tokens cached before the step: only full pages of them are shared.
    page_size : int
    least : int
        Tokens that a group must save, its prefix times one less than its sequences. Others are not shared.

    Returns
    -------
    tuple of numpy.ndarray
        int32 [G + 1]: the sequences of group g are ``[g]`` to ``[g + 1]``, and all of the batch are in one; int32 [G]:
        tokens of its prefix, whole pages. 0 where nothing is shared, of one sequence or several.
    """
    table, pages = np.asarray(lookup_table), np.asarray(cache_lengths).astype(np.int64) // page_size
    batch = len(table)
    if batch == 0:
        return np.zeros(1, np.int32), np.zeros(0, np.int32)
    # Pages that each sequence and the next have in common, of those that are full in both.
    common = np.logical_and.accumulate(table[1:] == table[:-1], axis=1).sum(1)
    common = np.minimum(common, np.minimum(pages[1:], pages[:-1]))
    # best[e]: the most pages saved in [0, e), start[e]: where the last group of that begins.
    best, start = np.zeros(batch + 1, np.int64), np.arange(-1, batch)
    for end in range(2, batch + 1):
        run = np.minimum.accumulate(common[end - 2 :: -1])  # of [end - 2, end), [end - 3, end), ...
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
    """The groups of a batch's sequences that share their first pages, for ``kv.ops.attention(shared=...)``.

    A step calls :meth:`plan` once, and attention for every layer; both are launches, so that a CUDA graph may hold
    them. It then reads ``sequences`` and ``lengths`` as they are at each replay.

    Parameters
    ----------
    sequences : int32 array-like [G + 1]
        The sequences of group g are ``sequences[g]`` to ``sequences[g + 1]``, and all of the batch are in a group;
        groups may be empty.
    lengths : int32 array-like [G]
        Tokens of each group's prefix: cached in all of its sequences, in the same pages. A part of a page is not
        shared. 0: nothing is.
    """

    def __init__(self, sequences: Any, lengths: Any) -> None:
        try:
            ends, groups = (list(x.shape) for x in (sequences, lengths))
        except Exception:  # no arrays, or those of a library that have no shape of numbers
            of = " and ".join(type(x).__name__ for x in (sequences, lengths))
            raise TypeError(f"sequences and lengths must be arrays of shapes [G + 1] and [G], got {of}") from None
        if len(groups) != 1 or ends != [groups[0] + 1]:
            raise ValueError(f"sequences and lengths must be [G + 1] and [G], got shapes {ends} and {groups}")
        self.sequences, self.lengths = sequences, lengths
        self.collection: Any = None  # that of the plan
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
        """The groups of a batch, by the page ids of its tables on the host; None where none is worth it.

        Neighbours are compared: a batch in the order of its pages (``sorted(requests, key=manager.pages)``) shares
        most.

        Parameters
        ----------
        lookup_table : uint32 or int32 numpy.ndarray [B, columns]
        cache_lengths : uint32 or int32 numpy.ndarray [B]
        page_size : int
        token_bytes : int, optional
            Bytes of a token's keys and values in a layer: a group must save 256 MiB of reads. Without, every group
            counts.
        least : int, optional
            Tokens that a group must save, in place of that.
        upload : callable, optional
            Gives the contents of a NumPy array where the pool is; default: the array itself.
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
        """Make the tables of a step, of which every attention with ``shared=`` takes the same collection.

        Launches a kernel; allocates (by the library of the lengths) when shapes change.

        Parameters
        ----------
        collection : PagedKVCacheCollection or ForeignPages
            Of the batch whose groups these are.
        row_offsets : uint32 or int32 array-like [B + 1]
        stream : optional
            As of ``kv.ops.attention``.

        Raises
        ------
        TypeError, ValueError
            If the arguments do not fit together; on the host also if sequences of a group do not share its pages.
        """
        self._parts, self._tables = kvarn.plan_prefixes(self, collection, row_offsets, self._tables, stream)
        self.collection = collection

    @property
    def parts(self) -> tuple[PagedKVCacheCollection, PagedKVCacheCollection]:
        """The collections of the prefixes, a sequence a group, and of what follows them, over the pool of the plan."""
        if self._parts is None:
            raise ValueError("SharedPrefixes must be planned for the step: call plan(collection, row_offsets) first")
        return self._parts

    @property
    def row_offsets(self) -> Any:
        """Rows of each group, [G + 1]."""
        return self._tables[2]

    @property
    def no_keys(self) -> Any:
        """Offsets of no new keys, [G + 1]: those of the step follow the prefixes."""
        return self._tables[3]

    def __repr__(self) -> str:
        return f"SharedPrefixes(groups={self.lengths.shape[0]})"
