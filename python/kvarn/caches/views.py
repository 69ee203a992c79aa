# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Caches: one layer's keys or values, which kernels take by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kvarn.dialect import dtypes, layout, page_orders
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, PAGED, CacheSpec
from kvarn.dialect.records import Record
from kvarn.runtime.buffers import BufferView, strided_array
from kvarn.runtime.copying import NoCopies

from .model import HostModel
from .pools import PoolMembers, pool_of, with_sequences
from .tma import TmaTiles


class KVCache(PoolMembers, HostModel, TmaTiles, NoCopies):
    """A cache of any kind: a read-only record of pointers, strides and lengths. Kernels take it by value.

    A collection's ``get_key_cache`` and ``get_value_cache`` return it; the subclasses make one from a layer's buffers.
    As the annotation of a kernel's argument it accepts every kind.

    Attributes
    ----------
    spec : CacheSpec
        What a kernel is specialised for.
    device : tuple of (str, int)
        ``("cpu", 0)`` or ``("cuda", ordinal)``.
    buffers : tuple
        The owners of the memory, kept alive.
    readonly : bool
        Whether the owner of the blocks (or of the scales) forbids writing.
    """

    __slots__ = (
        "_at",
        "_fields",
        "_host",
        "_keep",
        "_memory",
        "_spec",
        "_words",
        "buffers",
        "device",
        "readonly",
        "spec",
    )
    kind: ClassVar[str] = ""
    copied_by = "copy the collection and take the cache of the copy, or make one of copies of the buffers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{type(self).__name__} is abstract: make a cache of a kind, or a collection")

    def _bind(self, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int]) -> None:
        """Set all members; ``views`` are the buffers by name."""
        self._keep_views(spec, views, at, layout.cache_fields(spec))
        self.spec = spec
        self._keep = tuple(views.values())
        self._host: dict[str, np.ndarray] = {}

    @classmethod
    def _make(cls, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int]) -> Any:
        cache = cls.__new__(cls)
        cache._bind(spec, views, at)
        return cache

    page_size_ = PoolMembers.page_size

    @property
    def quantization_enabled(self) -> bool:
        return self.spec.quantized

    @property
    def max_seq_length(self) -> int:
        return self._at["max_seq_length"]

    @property
    def max_cache_length(self) -> int:
        return self._at["max_cache_length"]

    @property
    def blocks(self) -> Any:
        """This layer's pool [N, P, H, D] (P: S_max if continuous), a NumPy view on the host, else a BufferView.

        Of 4-bit elements it has their bytes, [N, P, H, D / 2].
        """
        if self.spec.kind in page_orders.added:
            shape, strides = (self._at["num_blocks"], self.spec.page_span), (self._at["stride0"], 1)
            return self._part("base", shape, strides, self.spec.dtype, self.readonly)
        shape, strides, units = self.blocks_shape, self.blocks_strides, self.spec.dtype.units
        if self.spec.packed:  # bytes that elements share
            shape, strides = (*shape[:3], units(shape[3])), (*(units(s) for s in strides[:3]), 1)
        return self._part("base", shape, strides, self.spec.dtype.unit, self.readonly)

    @property
    def scales(self) -> Any:
        """This layer's scales [N, P, H, G], like :attr:`blocks`; None without."""
        if self.spec.scale_dtype is None:
            return None
        return self._part("scales", self.scales_shape, self.scales_strides, self.spec.scale_dtype, self.readonly)

    @property
    def cache_lengths(self) -> Any:
        """Tokens of each sequence cached before this step, u32 [B]; read-only, like :attr:`blocks`."""
        return self._part("lengths", (self._at["batch"],), (1,), dtypes.u32, True)

    @property
    def lookup_table(self) -> Any:
        """This layer's table, u32 [B, columns], or [B] for a continuous cache; read-only, like :attr:`blocks`."""
        at = self._at
        if not self.spec.paged:
            return self._part("lookup", (at["batch"],), (at["lookup_stride"],), dtypes.u32, True)
        shape, strides = (at["batch"], at["lookup_columns"]), (at["lookup_stride"], 1)
        return self._part("lookup", shape, strides, dtypes.u32, True)

    @property
    def blocks_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's view, (N, P, H, D)."""
        return (self._at["num_blocks"], self._at["capacity"], self._spec.num_heads, self._spec.head_size)

    @property
    def blocks_strides(self) -> tuple[int, int, int, int]:
        """Strides of a layer's view, in elements; that of pages is a run-time value."""
        return (self._at["stride0"], self._spec.token_stride, self._spec.head_stride, 1)

    @property
    def scales_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's view of the scales, (N, P, H, G); zeros without scales."""
        if not self._spec.quantized:
            return (0, 0, 0, 0)
        return (self._at["num_blocks"], self._at["capacity"], self._spec.num_heads, self._spec.num_scales)

    @property
    def scales_strides(self) -> tuple[int, int, int, int]:
        """Strides of a layer's view of the scales, in elements; zeros without scales."""
        if not self._spec.quantized:
            return (0, 0, 0, 0)
        return (self._at["scales_stride0"], self._spec.scales_token_stride, self._spec.num_scales, 1)

    def _part(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, readonly: bool) -> Any:
        """A buffer: a NumPy view on the host, else a BufferView."""
        address = self._at[name]
        if self.device[0] == "cpu":
            return strided_array(address, shape, strides, dtype, readonly, self._keep)
        return BufferView(address, shape, strides, dtype, self.device, readonly, self.buffers, self._keep)

    @classmethod
    def get_type_name(cls) -> str:
        return cls.__name__

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.spec!r}, pages={self.num_blocks}, batch={self.batch_size}, "
            f"max_cache_length={self.max_cache_length}, device={self.device})"
        )


class PagedKVCache(KVCache):
    """One layer's keys or values in pages.

    Parameters
    ----------
    blocks : array-like [N, P, H, D]
        N pages of P token slots. Dimension 0 may have any stride; the others are packed.
    cache_lengths : uint32 or int32 array-like [B]
        Tokens of each sequence cached before this step.
    lookup_table : uint32 or int32 array-like [B, columns]
        Page ids; token t of sequence b is in slot t % P of page ``lookup_table[b, t // P]``.
    max_seq_length, max_cache_length : int
        Largest number of new, and of cached and new, tokens of a sequence.
    scales : array-like [N, P, H, G], optional
        Quantization scales, G = cdiv(D, quantization_granularity).
    quantization_granularity : int
        Consecutive elements that share a scale.
    is_mla : bool
        Whether this is a latent cache (H = 1, no values).
    record : Record or name, optional
        As in :class:`PagedKVCacheCollection`.
    """

    __slots__ = ()
    kind = PAGED

    def __init__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        max_seq_length: int,
        max_cache_length: int,
        scales: Any = None,
        quantization_granularity: int = 1,
        *,
        is_mla: bool = False,
        record: Record | str | None = None,
    ) -> None:
        pool = pool_of(self.kind, "NPHD", blocks, scales, quantization_granularity, is_mla=is_mla, record=record)
        self._bind(*with_sequences(pool, cache_lengths, lookup_table, max_seq_length, max_cache_length))


class ContinuousBatchingKVCache(KVCache):
    """One layer's keys or values with one contiguous region per sequence.

    Parameters
    ----------
    blocks : array-like [N, S_max, H, D]
        N regions of S_max token slots; dimension 0 may have any stride.
    cache_lengths : uint32 or int32 array-like [B]
    lookup_table : uint32 or int32 array-like [B]
        The region of each sequence.
    max_seq_length, max_cache_length : int
    """

    __slots__ = ()
    kind = CONTINUOUS

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int
    ) -> None:
        pool = pool_of(CONTINUOUS, "NPHD", blocks)
        self._bind(*with_sequences(pool, cache_lengths, lookup_table, max_seq_length, max_cache_length))
