# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a step of a model takes of its caches: tables, lengths, offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.caches import PagedKVCacheCollection
from kvarn.caches.checks import count
from kvarn.dialect.layout import CacheSpec
from kvarn.paging.prefixes import SharedPrefixes


@dataclass(frozen=True)
class RuntimeInputs:
    """What the kernels of one step take. Row b of everything is the b-th request of the call.

    Attributes
    ----------
    lookup_table : numpy.ndarray
        [B, columns], contiguous; columns are ``layout.lookup_columns`` of the longest sequence. Entries past a
        sequence's pages hold the null page.
    cache_lengths : numpy.ndarray
        [B]: tokens cached before the step.
    row_offsets : numpy.ndarray
        [B+1]: the rows of each request's new tokens in the ragged batch.
    max_prompt_length, max_cache_length : int
        Longest new, and longest cached + new, tokens (or the bounds that the caller gave).
    null_page : int
        The reserved page: what a table's entry without a page holds, and the ``invalid_id`` of sparse indices.
    collection : PagedKVCacheCollection or None
        Over the pool and the uploaded tables; None when the pool is on a device and no ``upload`` was given.
    uploaded_row_offsets : array-like or None
        ``row_offsets`` where the pool is; None like ``collection``.
    cache_spec : CacheSpec or None
        Of the pool; None with a window or chunks, whose requests give their first pages back.
    upload : callable or None
        The manager's.
    """

    lookup_table: np.ndarray
    cache_lengths: np.ndarray
    row_offsets: np.ndarray
    max_prompt_length: int
    max_cache_length: int
    null_page: int
    collection: PagedKVCacheCollection | None = None
    uploaded_row_offsets: Any = None
    cache_spec: CacheSpec | None = None
    upload: Callable[[np.ndarray], Any] | None = None

    def shared_prefixes(self, *, least: int | None = None) -> SharedPrefixes | None:
        """The neighbours of the batch that share their first pages, planned for ``collection``.

        None where none do, or where that is not worth it.

        ``sorted(requests, key=manager.pages)`` makes neighbours of those that share most.

        Parameters
        ----------
        least : int, optional
            Tokens whose keys and values a group must save from being read again; by default as many as are 256 MiB
            of a layer, which is worth the launches.
        """
        spec = self.cache_spec
        if spec is None:
            return None
        size = (1 if spec.is_mla else 2) * spec.num_heads * spec.head_size * spec.dtype.itemsize
        found = SharedPrefixes.find(
            self.lookup_table, self.cache_lengths, spec.page_size, token_bytes=size, least=least, upload=self.upload
        )
        if found is not None and self.collection is not None:
            found.plan(self.collection, self.uploaded_row_offsets)
        return found


def upper_bound(real: int, bound: int | None, name: str) -> int:
    """The bound that a caller gave for a step, or the step's own maximum."""
    if bound is None:
        return real
    if count(bound, name) < real:
        raise ValueError(f"{name} must be at least the step's {real}, got {bound}")
    return bound
