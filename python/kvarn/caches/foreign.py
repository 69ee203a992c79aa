# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages as other libraries lay them out: what ``kv.ops.convert`` takes besides caches.

Both FlashInfer and vLLM keep one buffer a layer, with keys and values together and the heads of a page before or
behind its tokens. A half of it is always pages [N, P, H, D], at other strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.dialect.dtypes import DType
from kvarn.runtime.buffers import BufferView, view

from . import checks

ORDERS = ("NHD", "HND")


class PageView:
    """One layer's keys or values in another library's pages; made by :class:`ForeignPages`.

    Attributes
    ----------
    data : BufferView
        [N, P, H, D], the last dimension contiguous.
    cache_lengths, lookup_table : BufferView
        uint32 or int32 [B] and [B, columns].
    """

    __slots__ = ("cache_lengths", "data", "lookup_table")

    def __init__(self, data: BufferView, cache_lengths: BufferView, lookup_table: BufferView) -> None:
        self.data, self.cache_lengths, self.lookup_table = data, cache_lengths, lookup_table

    @property
    def dtype(self) -> DType:
        return self.data.dtype

    @property
    def batch_size(self) -> int:
        return self.cache_lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.data.shape[1]

    def __repr__(self) -> str:
        return f"PageView({self.data!r}, batch={self.batch_size})"


class ForeignPages:
    """One layer's pages in the layout of another library. The buffers are neither copied nor read.

    Attributes
    ----------
    key, value : PageView
    """

    __slots__ = ("key", "value")

    def __init__(self, key: PageView, value: PageView) -> None:
        self.key, self.value = key, value

    @classmethod
    def flashinfer(cls, data: Any, cache_lengths: Any, lookup_table: Any, layout: str = "NHD") -> ForeignPages:
        """FlashInfer's paged KV cache.

        Parameters
        ----------
        data : array-like, or a pair of them
            [N, 2, P, H, D] of layout NHD or [N, 2, H, P, D] of HND; or a pair (keys, values) of [N, P, H, D] or
            [N, H, P, D].
        cache_lengths : uint32 or int32 array-like [B]
            Tokens of each sequence that are cached.
        lookup_table : uint32 or int32 array-like [B, columns]
            Pages of each sequence, row by row: what the library's ``indices`` say between its ``indptr``.
        layout : {"NHD", "HND"}
        """
        return cls._of(data, cache_lengths, lookup_table, layout, 1)

    @classmethod
    def vllm(cls, data: Any, cache_lengths: Any, lookup_table: Any, layout: str = "NHD") -> ForeignPages:
        """vLLM's paged KV cache.

        Parameters
        ----------
        data : array-like, or a pair of them
            [2, N, P, H, D] of layout NHD or [2, N, H, P, D] of HND; or a pair (keys, values) as of :meth:`flashinfer`.
        cache_lengths, lookup_table, layout
            As of :meth:`flashinfer`; the library calls them sequence lengths and block table.
        """
        return cls._of(data, cache_lengths, lookup_table, layout, 0)

    @classmethod
    def _of(cls, data: Any, cache_lengths: Any, lookup_table: Any, order: str, axis: int) -> ForeignPages:
        if order not in ORDERS:
            raise ValueError(f"layout must be NHD or HND, got {order!r}")
        inner = ("page_size", "heads") if order == "NHD" else ("heads", "page_size")
        if isinstance(data, Sequence) and not isinstance(data, BufferView):
            if len(data) != 2:
                raise ValueError(f"data must be one buffer or a pair of keys and values, got {len(data)}")
            halves = [view(x, name=n) for x, n in zip(data, ("keys", "values"), strict=True)]
        else:
            dims = ["pages", *inner, "head_size"]
            dims.insert(axis, "2")
            halves = _halves(view(data, name="data"), axis, dims)
        wanted = f"[pages, {inner[0]}, {inner[1]}, head_size]"
        lengths, _ = checks.table(cache_lengths, "cache_lengths", ("sequences",))
        table, _ = checks.table(lookup_table, "lookup_table", ("sequences", "columns"))
        checks.sequences(lengths, table.shape[0], "lookup_table")
        made = []
        for half, name in zip(halves, ("keys", "values"), strict=True):
            if half.rank != 4 or min(half.shape) < 1:
                raise ValueError(f"{name} must be {wanted}, every extent positive, got shape {list(half.shape)}")
            if half.shape[3] > 1 and half.strides[3] != 1:
                raise ValueError(
                    f"{name} must be contiguous in their last dimension, got strides {list(half.strides)} (elements)"
                )
            if order == "HND":
                half = _reordered(half, (0, 2, 1, 3))
            checks.table_covers(table.shape[1], half.shape[1], 0, 0)
            checks.same_device([(name, half), ("cache_lengths", lengths), ("lookup_table", table)])
            made.append(PageView(half, lengths, table))
        if made[0].data.shape != made[1].data.shape or made[0].dtype != made[1].dtype:
            raise ValueError(
                f"keys and values must have one shape and dtype, got {made[0].dtype.name} {list(made[0].data.shape)} "
                f"and {made[1].dtype.name} {list(made[1].data.shape)}"
            )
        return cls(*made)

    def __repr__(self) -> str:
        return f"ForeignPages({self.key!r}, {self.value!r})"


def _halves(data: BufferView, axis: int, dims: Sequence[str]) -> list[BufferView]:
    """Keys and values of a buffer that holds both in one dimension."""
    if data.rank != 5 or data.shape[axis] != 2:
        raise ValueError(f"data must be [{', '.join(dims)}], got shape {list(data.shape)}")
    rest = [i for i in range(5) if i != axis]
    step = data.strides[axis] * data.dtype.itemsize
    return [_reordered(data._replace(data=data.data + half * step), rest) for half in range(2)]


def _reordered(data: BufferView, axes: Sequence[int]) -> BufferView:
    """Some dimensions of a buffer, in another order. The owner is kept."""
    shape, strides = (tuple(x[i] for i in axes) for x in (data.shape, data.strides))
    return data._replace(shape=shape, strides=strides)
