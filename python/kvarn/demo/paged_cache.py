# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The KV cache of the demo: kvarn's pages, manager and operations.

The manager decides which pages a sequence has and which it shares; `rope_append` rotates queries and keys and stores
keys and values, `attention` reads them back through the page table. All of it is what a user of kvarn would write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import kvarn as kv

from .model import rope_frequencies
from .scheduler import Request
from .weights import ModelConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_SIZE = 16


@dataclass(frozen=True)
class PageCounts:
    """Pages of the pool, the most in use at one time, and the most that two or more sequences shared at one time."""

    total: int
    peak: int
    shared: int


class HostArrays:
    """NumPy arrays for the operations on the CPU."""

    def __init__(self, dtype: str) -> None:
        self.dtype = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}[dtype]

    def zeros(self, *shape: int) -> Any:
        """A buffer in the cache's dtype."""
        return np.zeros(shape, self.dtype)

    def upload(self, array: NDArray[Any]) -> Any:
        """An array of the host, where the cache is."""
        return array

    def to_cache(self, x: Any) -> Any:
        """A result of the dense layers, contiguous and in the cache's dtype."""
        return np.ascontiguousarray(x, self.dtype)

    def to_dense(self, x: Any) -> Any:
        """A result of the operations, as the dense layers take it."""
        return x.astype(np.float32, copy=False)

    def wait(self) -> None:
        """Wait until the device has done all it was asked to."""


class TorchArrays:
    """torch tensors for the operations on a GPU."""

    def __init__(self, dtype: str, device: str) -> None:
        import torch  # type: ignore[import-not-found]  # optional; cli.py has checked that it is there

        self._torch = torch
        self.device = device
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def zeros(self, *shape: int) -> Any:
        """See `HostArrays.zeros`."""
        return self._torch.zeros(shape, dtype=self.dtype, device=self.device)

    def upload(self, array: NDArray[Any]) -> Any:
        """See `HostArrays.upload`."""
        return self._torch.from_numpy(array).to(self.device)

    def to_cache(self, x: Any) -> Any:
        """See `HostArrays.to_cache`."""
        return x.to(self.dtype).contiguous()

    def to_dense(self, x: Any) -> Any:
        """See `HostArrays.to_dense`."""
        return x.float()

    def wait(self) -> None:
        """See `HostArrays.wait`."""
        self._torch.cuda.synchronize()


class PagedCache:
    """Pages of 16 tokens, shared between sequences that begin alike.

    Parameters
    ----------
    config : ModelConfig
    requests : sequence of Request
        What will be asked: the pool has pages for all of them, so that nobody has to wait for one.
    dtype : {"f32", "bf16"}
        What keys and values are stored in.
    device : str
        "cpu" for NumPy arrays, else torch's name of the device.

    Attributes
    ----------
    compile_seconds : dict of str to float
        How long the first call of each operation took, that is: to compile it, or to load it from the compile cache.
    """

    def __init__(self, config: ModelConfig, requests: Sequence[Request], dtype: str, device: str) -> None:
        self.config = config
        self._arrays = HostArrays(dtype) if device == "cpu" else TorchArrays(dtype, device)
        lengths = [len(request.tokens) + request.limit for request in requests]
        self._frequencies = self._arrays.upload(rope_frequencies(config, max(lengths)))
        self._compiles_before = _compile_counts()
        self.compile_seconds: dict[str, float] = {}
        self._warm_up()
        self._blocks = self._pool(sum(-(-length // PAGE_SIZE) for length in lengths))
        self._manager = kv.PagedKVCacheManager(
            self._blocks,
            prefix_caching=True,
            copy_pages=self._copy_pages,
            upload=self._arrays.upload,
            table_dtype=np.int32,
        )
        self._open: set[int] = set()
        self._batch: list[int] = []
        self._inputs: Any = None
        self._rotated: Any = None
        self._attended: Any = None
        self._peak = self._most_shared = 0

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        """See `KVCache.open`."""
        self._manager.claim(sequence, tokens)
        self._open.add(sequence)

    def fork(self, parent: int, sequence: int) -> None:
        """See `KVCache.fork`: both read the same pages, and the first to write to one gets its own copy."""
        self._manager.fork(parent, sequence)
        self._open.add(sequence)

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """See `KVCache.extend`."""
        self._manager.extend(sequence, tokens)

    def reserve(self, sequence: int, count: int) -> int:
        """See `KVCache.reserve`: pages for the tokens, or pages that hold them."""
        return self._manager.alloc(sequence, max_new=count)

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """See `KVCache.begin_step`."""
        self._batch = [sequence for sequence, _ in batch]
        self._inputs = self._manager.runtime_inputs(self._batch)
        total, heads, size = sum(count for _, count in batch), self.config.query_heads, self.config.head_size
        self._rotated = self._arrays.zeros(total, heads, size)
        self._attended = self._arrays.zeros(total, heads, size)
        used, shared = self.used_pages()
        self._peak, self._most_shared = max(self._peak, used), max(self._most_shared, shared)
        return self._inputs.row_offsets

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """See `KVCache.attend`."""
        query, key, value = (self._arrays.to_cache(x) for x in (query, key, value))
        collection, offsets = self._inputs.collection, self._inputs.uploaded_row_offsets
        self._rope_append(collection, layer, query, key, value, offsets, self._rotated)
        self._attention(collection, layer, self._rotated, offsets, self._attended)
        return self._arrays.to_dense(self._attended)

    def end_step(self) -> None:
        """See `KVCache.end_step`."""
        self._manager.step(self._batch)

    def close(self, sequence: int) -> None:
        """See `KVCache.close`; full pages stay findable by their tokens until the manager needs them."""
        self._manager.release(sequence)
        self._open.remove(sequence)

    # --- figures ---

    def used_pages(self) -> tuple[int, int]:
        """Return how many pages are in use now, and how many of them by two sequences or more."""
        holders = Counter(page for sequence in self._open for page in self._manager.pages(sequence))
        return len(holders), sum(count > 1 for count in holders.values())

    def pages(self) -> PageCounts:
        """Return the figures of the run so far."""
        return PageCounts(self._manager.total_num_pages, self._peak, self._most_shared)

    def describe(self) -> str:
        """Return the use of pages now, for the progress line."""
        used, shared = self.used_pages()
        return f"pages {used}/{self._manager.total_num_pages}, {shared} shared"

    def compile_counts(self) -> tuple[int, int]:
        """Return hits and misses in the on-disk compile cache since this cache was made."""
        hits, misses = _compile_counts()
        return hits - self._compiles_before[0], misses - self._compiles_before[1]

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
        """Copy whole pages, all layers, for the manager."""
        upload = self._arrays.upload
        kv.ops.copy_pages(self._collection(self._blocks, 1, 0), upload(source), upload(destination))

    def _pool(self, pages: int) -> Any:
        """A pool of `pages` pages and the null page."""
        config = self.config
        return self._arrays.zeros(pages + 1, 2, config.layers, PAGE_SIZE, config.kv_heads, config.head_size)

    def _collection(self, blocks: Any, new: int, cached: int) -> Any:
        """A collection of one sequence that owns page 0."""
        lengths, table = np.array([cached], np.int32), np.zeros((1, 24), np.int32)
        upload = self._arrays.upload
        return kv.PagedKVCacheCollection(blocks, upload(lengths), upload(table), new, cached + new)

    def _warm_up(self) -> None:
        """Call every operation on a pool of its own: compiling is then over, and measured, before the first prompt."""
        arrays, config = self._arrays, self.config
        blocks = self._pool(2)
        for new, cached in ((3, 0), (1, 3)):  # a prompt, then a token of an answer: attention may have two kernels
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


def _compile_counts() -> tuple[int, int]:
    from kvarn.cache import compile_cache

    found = compile_cache.info()
    return found.hits, found.misses
