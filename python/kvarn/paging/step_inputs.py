# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Inputs of a step: tables, lengths and offsets."""

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
    """The inputs of the kernels of one step. Row b of every array is the b-th request of the call.

    Attributes
    ----------
    lookup_table : numpy.ndarray
        [B, columns], contiguous; columns are ``layout.lookup_columns`` of the longest sequence. Entries past a
        sequence's pages are the null page.
    cache_lengths : numpy.ndarray
        [B]: tokens cached before the step.
    row_offsets : numpy.ndarray
        [B+1]: the rows of each request's new tokens in the ragged batch.
    max_prompt_length, max_cache_length : int
        Largest number of new, and of cached and new, tokens of a request (or the caller's bounds).
    null_page : int
        The reserved page: the table's entry without a page, and the ``invalid_id`` of sparse indices.
    collection : PagedKVCacheCollection or None
        Over the pool and the uploaded tables; None for a pool on a device without ``upload``.
    uploaded_row_offsets : array-like or None
        ``row_offsets`` on the pool's device; None like ``collection``.
    cache_spec : CacheSpec or None
        The pool's spec; None with a window or chunks, since requests then free their first pages.
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
        """The adjacent requests of the batch that share their first pages, planned for ``collection``.

        None if there are none, or if sharing is not worth its launches. ``sorted(requests, key=manager.pages)`` makes
        requests with common pages adjacent.

        Parameters
        ----------
        least : int, optional
            Tokens whose keys and values a group must save from repeated reads; by default 256 MiB of a layer.
        """
        spec = self.cache_spec
        if spec is None:
            return None
        size = (1 if spec.is_mla else 2) * spec.dtype.bytes_of(spec.row_size)
        found = SharedPrefixes.find(
            self.lookup_table, self.cache_lengths, spec.page_size, token_bytes=size, least=least, upload=self.upload
        )
        if found is not None and self.collection is not None:
            found.plan(self.collection, self.uploaded_row_offsets)
        return found


def upper_bound(real: int, bound: int | None, name: str) -> int:
    """The caller's upper bound of a step, or the step's own maximum."""
    if bound is None:
        return real
    if count(bound, name) < real:
        raise ValueError(f"{name} must be at least the step's {real}, got {bound}")
    return bound
