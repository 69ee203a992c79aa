# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's KV cache: kvarn's pages, page manager and operations, as an application uses them.

The manager assigns pages to sequences and shares them; `rope_append` rotates queries and keys and stores keys and
values; `attention` reads them through the page table. The methods are those of `KVCache`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import kvarn as kv
from kvarn.compilation.disk_cache import compile_cache

from .arrays import NumpyArrays, TorchArrays
from .model import rope_frequencies
from .weights import ModelConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_SIZE = 16


class PagedCache:
    """Pages of 16 tokens, shared between sequences with a common prefix.

    Parameters
    ----------
    config : ModelConfig
    arrays : NumpyArrays or TorchArrays
        Backend and dtype of the pages.
    lengths : sequence of int
        The most tokens of each sequence: the pool has pages for all of them, so no sequence waits for pages.

    Attributes
    ----------
    compile_seconds : dict of str to float
        Time of each operation's first call, which compiles it or loads it from the compile cache.
    total_pages, peak_pages, peak_shared : int
        Pages of the pool, the peak number in use, and the peak number shared by two or more sequences.
    """

    def __init__(self, config: ModelConfig, arrays: NumpyArrays | TorchArrays, lengths: Sequence[int]) -> None:
        self._config = config
        self._arrays = arrays
        self._frequencies = arrays.upload(rope_frequencies(config, max(lengths)))
        self._compiled_before = compile_cache.info()
        self.compile_seconds: dict[str, float] = {}
        self._warm_up()
        self._blocks = self._pool(sum(-(-length // PAGE_SIZE) for length in lengths))
        self._manager = kv.PagedKVCacheManager(
            self._blocks, prefix_caching=True, copy_pages=self._copy_pages, upload=arrays.upload, table_dtype=np.int32
        )
        self.total_pages = self._manager.total_num_pages
        self.peak_pages = self.peak_shared = 0
        self._open: set[int] = set()
        self._batch: list[int] = []
        self._inputs: Any = None
        self._rotated: Any = None
        self._attended: Any = None

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        self._manager.claim(sequence, tokens)
        self._open.add(sequence)

    def fork(self, parent: int, sequence: int) -> None:
        self._manager.fork(parent, sequence)  # both share the pages; the first writer to a page gets a copy
        self._open.add(sequence)

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        self._manager.extend(sequence, tokens)

    def reserve(self, sequence: int, count: int) -> int:
        return self._manager.alloc(sequence, max_new=count)  # allocates pages, or finds cached ones

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        self._batch = [sequence for sequence, _ in batch]
        self._inputs = self._manager.runtime_inputs(self._batch)
        shape = (sum(count for _, count in batch), self._config.query_heads, self._config.head_size)
        self._rotated, self._attended = self._arrays.zeros(*shape), self._arrays.zeros(*shape)
        holders = Counter(page for sequence in self._open for page in self._manager.pages(sequence))
        self.peak_pages = max(self.peak_pages, len(holders))
        self.peak_shared = max(self.peak_shared, sum(count > 1 for count in holders.values()))
        return self._inputs.row_offsets

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (self._arrays.to_cache(x) for x in (query, key, value))
        collection, offsets = self._inputs.collection, self._inputs.uploaded_row_offsets
        self._rope_append(collection, layer, query, key, value, offsets, self._rotated)
        self._attention(collection, layer, self._rotated, offsets, self._attended)
        return self._arrays.to_dense(self._attended)

    def end_step(self) -> None:
        self._manager.step(self._batch)

    def close(self, sequence: int) -> None:
        self._manager.release(sequence)  # full pages can be found by prefix until they are reused
        self._open.remove(sequence)

    def compile_counts(self) -> tuple[int, int]:
        """Return hits and misses in the on-disk compile cache since this cache was created."""
        before, now = self._compiled_before, compile_cache.info()
        return now.hits - before.hits, now.misses - before.misses

    # --- the operations ---

    def _rope_append(
        self, collection: Any, layer: int, query: Any, key: Any, value: Any, row_offsets: Any, rotated: Any
    ) -> None:
        kv.ops.rope_append(
            collection, layer, query, key, value, row_offsets, self._frequencies, interleaved=True, query_out=rotated
        )

    def _attention(self, collection: Any, layer: int, query: Any, row_offsets: Any, out: Any) -> None:
        kv.ops.attention(collection, layer, query, row_offsets, mask="causal", out=out)

    def _copy_pages(self, source: NDArray[np.int32], destination: NDArray[np.int32]) -> None:
        """Copy whole pages of all layers, for the manager."""
        upload = self._arrays.upload
        kv.ops.copy_pages(self._collection(self._blocks, 1, 0), upload(source), upload(destination))

    def _pool(self, pages: int) -> Any:
        """A pool of `pages` pages and the null page."""
        config = self._config
        return self._arrays.zeros(pages + 1, 2, config.layers, PAGE_SIZE, config.kv_heads, config.head_size)

    def _collection(self, blocks: Any, new: int, cached: int) -> Any:
        """A collection of one sequence, which has page 0."""
        upload = self._arrays.upload
        lengths, table = upload(np.array([cached], np.int32)), upload(np.zeros((1, 24), np.int32))
        return kv.PagedKVCacheCollection(blocks, lengths, table, new, cached + new)

    def _warm_up(self) -> None:
        """Call every operation on a separate pool, so that compilation is done and timed before the first prompt."""
        arrays, config = self._arrays, self._config
        blocks = self._pool(2)
        for new, cached in ((3, 0), (1, 3)):  # a prompt, then a decode step: attention may use two kernels
            collection = self._collection(blocks, new, cached)
            offsets = arrays.upload(np.array([0, new], np.int32))
            query, out = (arrays.zeros(new, config.query_heads, config.head_size) for _ in range(2))
            key, value = (arrays.zeros(new, config.kv_heads, config.head_size) for _ in range(2))
            if not cached:
                self._timed("rope_append", self._rope_append, collection, 0, query, key, value, offsets, out)
            self._timed("attention", self._attention, collection, 0, query, offsets, out)
        ids = [arrays.upload(np.array([i], np.int32)) for i in range(2)]
        self._timed("copy_pages", kv.ops.copy_pages, self._collection(blocks, 1, 0), *ids)

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        started = time.perf_counter()
        call(*arguments)
        self._arrays.wait()
        self.compile_seconds[name] = self.compile_seconds.get(name, 0.0) + time.perf_counter() - started
