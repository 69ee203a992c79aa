# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""User-level kernels without explicit lookups, which the passes on lookups and accesses optimise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect.layout import CacheSpec, CollectionSpec

from .cases import Decode, Row
from .problems import problem

TILE = 128  # tokens per tile of page lookups
_POOL, _CACHE, _TABLE = CollectionSpec, CacheSpec, kv.Buffer[kv.i32, 2]


@kv.kernel
def negate(pool: kv.KVCacheCollection, layer: kv.i32):
    """Negate all cached keys and values of a layer in place: one block per token, eight elements per thread."""
    b, t = kv.block_id.x, kv.block_id.y
    keys, values = pool.get_key_cache(layer), pool.get_value_cache(layer)
    if t < keys.cache_length(b):
        d = kv.thread_id.x * 8
        for h in range(keys.num_heads):
            keys.store(b, h, t, d, keys.dtype(keys.load(b, h, t, d, width=8, dtype=kv.f32) * -1.0))
            values.store(b, h, t, d, values.dtype(values.load(b, h, t, d, width=8, dtype=kv.f32) * -1.0))


@kv.kernel
def first_rows(keys: kv.KVCache, out: _TABLE):
    """Read the first row of each page of every tile: one thread per tile."""
    b, tile = kv.block_id.x, kv.thread_id.x
    each = TILE // keys.page_size
    rows = keys.populate(b, tile * TILE, TILE)
    for i in range(each):
        out[b, tile * each + i] = kv.i32(rows.get_row(i * keys.page_size))


@dataclass(frozen=True)
class KernelRow:
    """A user-level kernel on the data of a decode row."""

    name: str
    title: str
    kernel: Any
    data: Row


def rows(small: bool) -> tuple[KernelRow, ...]:
    """The kernels whose compilation is ablated."""
    shape = Decode(3, TILE, 4, 2, 64) if small else Decode(64, 2048)
    data = Row("data", "", shape)
    return (
        KernelRow("negate", "kernel: negate keys and values", negate, data),
        KernelRow("first_rows", "kernel: rows of tiles", first_rows, data),
    )


def specs(row: KernelRow) -> tuple[Any, ...]:
    """The argument specs that a row's kernel is compiled for."""
    from .static import spec_of

    spec = spec_of(row.data)
    return (CollectionSpec(spec), kv.i32) if row.kernel is negate else (spec, _TABLE)


class KernelProblem:
    """A kernel's data and expected output."""

    def __init__(self, library: Any, row: KernelRow) -> None:
        self.arrays, self.row = library, row
        self._data = problem(library, row.data, split=False)
        self.layers = self._data.layers
        self._shape = row.data.shape
        self._pool = self._data.cached.collection(self._data.lengths, 1, self._data.longest + 1)
        pages = self._shape.context // self._shape.page
        self.out = library.empty((self._shape.batch, pages), "i32")
        self._before: Any = None

    def call_of(self, target: str, disable: Sequence[str] = ()) -> Callable[[int], Any]:
        made = kv.compile(self.row.kernel, *specs(self.row), target=target, disable=tuple(disable))
        batch, context = self._shape.batch, self._shape.context
        if self.row.kernel is negate:
            grid, block = (batch, context), self._shape.size // 8
            bound = [made.prepare(grid, block, self._pool, layer) for layer in range(self.layers)]
        else:
            keys = [self._pool.get_key_cache(layer) for layer in range(self.layers)]
            bound = [made.prepare(batch, context // TILE, k, self.out) for k in keys]
        return lambda layer: bound[layer]()

    def poison(self) -> None:
        if self.row.kernel is negate:
            self._before = self.arrays.f32(self._data.cached.blocks[:, :, 0])
        else:
            self.out[...] = -1

    def error(self) -> float:
        if self.row.kernel is negate:
            # The null page is the last one; it has no tokens.
            got, wanted = self.arrays.f32(self._data.cached.blocks[:-1, :, 0]), -self._before[:-1]
            return self.arrays.relative_error(got, wanted)
        keys = self._pool.get_key_cache(0)
        wanted = self._data.cached.pages.table.astype(np.int64) * keys.spec.page_size
        stride = self._rows_of_a_page() // keys.spec.page_size
        return 0.0 if self.arrays.equal(self.out, self.arrays.integers(wanted * stride)) else 1.0

    def _rows_of_a_page(self) -> int:
        """Rows between consecutive pages of one layer, counting the halves and layers in between."""
        blocks = self._data.cached.blocks
        return blocks.shape[1] * blocks.shape[2] * blocks.shape[3]
