# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The caches: one layer's keys or values, as kernels take them by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvarn.dialect import dtypes, layout, page_orders
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, PAGED, CacheSpec
from kvarn.runtime.buffers import BufferView, strided_array

from . import checks
from .model import HostModel
from .tma import TmaTiles

POOLS = ("blocks", "values", "scales", "value_scales")  # the views of what a kernel may write


@dataclass(frozen=True)
class KVCacheStaticParams:
    """What a cache stores of each token.

    Parameters
    ----------
    num_heads : int
        KV heads H.
    head_size : int
        Elements of a head D.
    is_mla : bool
        One latent head and no values.
    """

    num_heads: int
    head_size: int
    is_mla: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_size"):
            if checks.count(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.is_mla and self.num_heads != 1:
            raise ValueError(f"num_heads of an MLA cache must be 1, got {self.num_heads}")


class KVCache(HostModel, TmaTiles):
    """A cache of any kind: a read-only record of pointers, strides and lengths. Kernels take it by value.

    It is made by a collection's ``get_key_cache`` and ``get_value_cache``, or from one layer's buffers by a subclass.
    As an annotation of a kernel's argument it stands for every kind.

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

    __slots__ = ("_at", "_fields", "_host", "_keep", "_words", "buffers", "device", "readonly", "spec")
    kind: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{type(self).__name__} stands for any kind of cache; make one of a kind, or use a collection")

    def _bind(self, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int]) -> None:
        """Set everything; ``views`` are the buffers by name."""
        self.spec, self._at = spec, at
        self._fields = tuple(at[f.name] for f in layout.cache_fields(spec))
        self.device = views["blocks"].device
        self.readonly = any(views[n].readonly for n in POOLS if n in views)
        self.buffers = tuple(v.owner for v in views.values())
        self._keep = tuple(views.values())
        self._host: dict[str, np.ndarray] = {}
        self._words: bytes | None = None  # what the native part makes of all of it

    @classmethod
    def _make(cls, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int]) -> Any:
        cache = cls.__new__(cls)
        cache._bind(spec, views, at)
        return cache

    def fields(self) -> tuple[int, ...]:
        """The kernel's parameters, in the order of ``layout.cache_fields``; pointers as integers."""
        return self._fields

    # --- static queries ---

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def kv_params(self) -> KVCacheStaticParams:
        return KVCacheStaticParams(self.spec.num_heads, self.spec.head_size, self.spec.is_mla)

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @property
    def head_size(self) -> int:
        return self.spec.head_size

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 when continuous."""
        return self.spec.page_size

    page_size_ = page_size

    @property
    def is_mla(self) -> bool:
        return self.spec.is_mla

    @property
    def quantization_enabled(self) -> bool:
        return self.spec.quantized

    @property
    def quantization_granularity(self) -> int:
        return self.spec.granularity

    @property
    def scale_dtype(self) -> DType | None:
        return self.spec.scale_dtype

    @property
    def head_dim_granularity(self) -> int:
        """G: scales of one token and head."""
        return self.spec.num_scales

    # --- run-time parts ---

    @property
    def batch_size(self) -> int:
        return self._at["batch"]

    @property
    def num_blocks(self) -> int:
        return self._at["num_blocks"]

    @property
    def max_seq_length(self) -> int:
        return self._at["max_seq_length"]

    @property
    def max_cache_length(self) -> int:
        return self._at["max_cache_length"]

    @property
    def blocks(self) -> Any:
        """This layer's pool [N, P, H, D] (P: S_max when continuous): a NumPy view on the host, else a BufferView.

        Of a kind that another package adds [N, P * H * D], in that kind's order.
        """
        if self.spec.kind in page_orders.added:
            shape, strides = (self._at["num_blocks"], self.spec.page_span), (self._at["stride0"], 1)
            return self._part("base", shape, strides, self.spec.dtype, self.readonly)
        return self._part("base", self.blocks_shape, self.blocks_strides, self.spec.dtype, self.readonly)

    @property
    def scales(self) -> Any:
        """This layer's scales [N, P, H, G], as :attr:`blocks`; None without."""
        if self.spec.scale_dtype is None:
            return None
        return self._part("scales", self.scales_shape, self.scales_strides, self.spec.scale_dtype, self.readonly)

    @property
    def cache_lengths(self) -> Any:
        """Tokens of each sequence cached before this step, u32 [B]; read-only, as :attr:`blocks`."""
        return self._part("lengths", (self._at["batch"],), (1,), dtypes.u32, True)

    @property
    def lookup_table(self) -> Any:
        """This layer's table, u32 [B, columns], or [B] when continuous; read-only, as :attr:`blocks`."""
        at = self._at
        if not self.spec.paged:
            return self._part("lookup", (at["batch"],), (at["lookup_stride"],), dtypes.u32, True)
        shape, strides = (at["batch"], at["lookup_columns"]), (at["lookup_stride"], 1)
        return self._part("lookup", shape, strides, dtypes.u32, True)

    @property
    def blocks_shape(self) -> tuple[int, int, int, int]:
        """(N, P, H, D)."""
        return (self._at["num_blocks"], self._at["capacity"], self.spec.num_heads, self.spec.head_size)

    @property
    def blocks_strides(self) -> tuple[int, int, int, int]:
        """In elements; that of pages is a run-time value."""
        return (self._at["stride0"], self.spec.token_stride, self.spec.head_stride, 1)

    @property
    def scales_shape(self) -> tuple[int, int, int, int]:
        """(N, P, H, G); zeros without scales."""
        if not self.spec.quantized:
            return (0, 0, 0, 0)
        return (*self.blocks_shape[:3], self.spec.num_scales)

    @property
    def scales_strides(self) -> tuple[int, int, int, int]:
        """In elements; zeros without scales."""
        if not self.spec.quantized:
            return (0, 0, 0, 0)
        return (self._at["scales_stride0"], self.spec.scales_token_stride, self.spec.num_scales, 1)

    def _part(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, readonly: bool) -> Any:
        """One of the buffers: a NumPy view on the host, else a BufferView."""
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


def _shared(
    views: Mapping[str, BufferView], stride0: int, num_blocks: int, capacity: int, lookup: BufferView, row_stride: int,
    columns: int, batch: int, max_seq_length: int, max_cache_length: int
) -> dict[str, int]:  # fmt: skip
    """The run-time fields that caches and collections share."""
    return {
        "stride0": stride0,
        "num_blocks": num_blocks,
        "capacity": capacity,
        "lookup": lookup.data,
        "lookup_stride": row_stride,
        "lookup_columns": columns,
        "lengths": views["cache_lengths"].data,
        "batch": batch,
        "max_seq_length": max_seq_length,
        "max_cache_length": max_cache_length,
    }


class PagedKVCache(KVCache):
    """One layer's K or V in pages.

    Parameters
    ----------
    blocks : array-like [N, P, H, D]
        N pages of P token slots. The pages may lie apart (any stride of dimension 0); the rest is packed.
    cache_lengths : uint32 or int32 array-like [B]
        Tokens of each sequence cached before this step.
    lookup_table : uint32 or int32 array-like [B, columns]
        Page ids; token t of sequence b is in slot t % P of page ``lookup_table[b, t // P]``.
    max_seq_length, max_cache_length : int
        Longest new, and longest cached + new, tokens of a sequence.
    scales : array-like [N, P, H, G], optional
        Quantization scales, G = cdiv(D, quantization_granularity).
    quantization_granularity : int
        Consecutive elements that share a scale.
    is_mla : bool
        Whether this is a latent cache (H = 1, no values).
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
    ) -> None:
        data, strides = checks.pool(blocks, "blocks", ("pages", "page_size", "heads", "head_size"), outer=1)
        pages, page_size, heads, size = data.shape
        checks.aligned(data, 16, "blocks")
        lengths, _ = checks.table(cache_lengths, "cache_lengths", ("sequences",))
        table, table_strides = checks.table(lookup_table, "lookup_table", ("sequences", "columns"))
        views = {"blocks": data, "cache_lengths": lengths, "lookup_table": table}
        spec_scales, scale_strides = checked_scales(
            scales,
            quantization_granularity,
            (pages, page_size, heads),
            size,
            ("pages", "page_size", "heads", "granules"),
            1,
        )
        spec = layout.spec_of(
            self.kind, data.dtype, heads, size, page_size=page_size, is_mla=is_mla,
            scale_dtype=None if spec_scales is None else spec_scales.dtype,
            granularity=quantization_granularity if spec_scales is not None else 1,
        )  # fmt: skip
        if spec_scales is not None:
            views["scales"] = spec_scales
        checks.same_device(views.items())
        batch = checks.sequences(lengths, table.shape[0], "lookup_table")
        longest = checks.count(max_cache_length, "max_cache_length")
        checks.table_covers(table.shape[1], page_size, longest, batch)
        at = _shared(
            views, strides[0], pages, page_size, table, table_strides[0], table.shape[1], batch,
            checks.count(max_seq_length, "max_seq_length"), longest,
        )  # fmt: skip
        at["base"] = data.data
        if spec_scales is not None:
            at["scales"], at["scales_stride0"] = spec_scales.data, scale_strides[0]
        self._bind(spec, views, at)


class ContinuousBatchingKVCache(KVCache):
    """One layer's K or V with one contiguous region a sequence.

    Parameters
    ----------
    blocks : array-like [N, S_max, H, D]
        N regions of S_max token slots; they may lie apart.
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
        data, strides = checks.pool(blocks, "blocks", ("regions", "slots", "heads", "head_size"), outer=1)
        checks.aligned(data, 16, "blocks")
        lengths, _ = checks.table(cache_lengths, "cache_lengths", ("sequences",))
        table, _ = checks.table(lookup_table, "lookup_table", ("sequences",))
        views = {"blocks": data, "cache_lengths": lengths, "lookup_table": table}
        checks.same_device(views.items())
        spec = layout.spec_of(CONTINUOUS, data.dtype, data.shape[2], data.shape[3])
        batch = checks.sequences(lengths, table.shape[0], "lookup_table")
        longest = region_holds(max_cache_length, data.shape[1], batch)
        at = _shared(
            views, strides[0], data.shape[0], data.shape[1], table, 1, 1, batch,
            checks.count(max_seq_length, "max_seq_length"), longest,
        )  # fmt: skip
        at["base"] = data.data
        self._bind(spec, views, at)


def region_holds(max_cache_length: Any, slots: int, batch: int) -> int:
    """The longest sequence of a continuous cache, which must fit a region."""
    longest = checks.count(max_cache_length, "max_cache_length")
    if slots > layout.MAX_TOKENS:
        raise ValueError(f"blocks must have at most {layout.MAX_TOKENS} slots of a region, got {slots}")
    if batch and longest > slots:
        raise ValueError(f"max_cache_length must fit a region's {slots} slots, got {longest}")
    return longest


def checked_scales(
    scales: Any, granularity: int, leading: tuple[int, ...], head_size: int, dims: tuple[str, ...], outer: int
) -> tuple[BufferView | None, tuple[int, ...]]:
    """View scales, whose shape must be ``leading`` and G; None and no strides when there are none."""
    if checks.count(granularity, "quantization_granularity") < 1:
        raise ValueError(f"quantization_granularity must be positive, got {granularity}")
    if scales is None:
        if granularity != 1:
            raise ValueError(f"quantization_granularity needs scales, got {granularity} without any")
        return None, ()
    buffer, strides = checks.pool(scales, "scales", dims, outer, row_major=False)
    expected = (*leading, layout.cdiv(head_size, granularity))
    if tuple(buffer.shape) != expected:
        raise ValueError(
            f"scales must have shape {expected}: that of blocks with cdiv(head_size {head_size}, "
            f"quantization_granularity {granularity}) granules last, got {tuple(buffer.shape)}"
        )
    checks.aligned_granules(buffer, strides, dims, outer)
    return buffer, strides
