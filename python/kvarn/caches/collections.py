# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collections: keys and values of all layers, from which caches are taken."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import FA3, KEY, PAGED, VALUE, CacheSpec, CollectionSpec
from kvarn.dialect.records import Record
from kvarn.runtime.buffers import BufferView, strided_array
from kvarn.runtime.copying import CopiedWhole

from . import checks
from .pools import WRITABLE, PoolMembers, pool_of, with_sequences
from .views import ContinuousBatchingKVCache, KVCache, PagedKVCache

CacheT = TypeVar("CacheT", bound=KVCache)


class KVCacheCollection(PoolMembers, CopiedWhole, Generic[CacheT]):
    """Common parts of the collections, which are views of the caller's buffers: no buffer is copied or read.

    ``copy.deepcopy`` and ``pickle`` return a collection over copies of the buffers; ``copy.copy`` is refused.

    Attributes
    ----------
    blocks, cache_lengths, lookup_table, scales
        The buffers as given (scales: None for a collection without).
    max_seq_length, max_cache_length : int
    spec : CollectionSpec
    device : tuple of (str, int)
    buffers : tuple
        The owners of the memory, kept alive.
    readonly : bool
    num_layers : int
    """

    cache_type: ClassVar[type[KVCache]]
    name_str: ClassVar[str]
    blocks: Any
    cache_lengths: Any
    lookup_table: Any
    scales: Any = None

    def _bind(self, cache_spec: CacheSpec, views: dict[str, BufferView], at: dict[str, int]) -> None:
        self.cache_spec, self.spec = cache_spec, CollectionSpec(cache_spec)
        self._keep_views(cache_spec, views, at, layout.collection_fields(cache_spec))
        self._views = views
        self.num_layers = at["num_layers"]
        self.max_seq_length, self.max_cache_length = at["max_seq_length"], at["max_cache_length"]
        self._own_bounds: Any = None  # bounds that kvarn.ops.reads derives from the two
        self._caches: tuple[dict[int, CacheT], dict[int, CacheT]] = ({}, {})

    def _made_of(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        buffers, scales = (self.blocks, self.cache_lengths, self.lookup_table), {}
        if self.cache_spec.packed:
            scales = {"scales": self.scales, "record": self.cache_spec.record}
        elif self.scales is not None:
            scales = {"scales": self.scales, "quantization_granularity": self.quantization_granularity}
        return (*buffers, self.max_seq_length, self.max_cache_length), scales, self._views.values()

    @property
    def pools(self) -> tuple[BufferView, ...]:
        """The buffers of elements and scales, as views."""
        return tuple(self._views[n] for n in WRITABLE if n in self._views)

    def get_key_cache(self, layer: int) -> CacheT:
        """The keys of one layer; the same object at every call.

        Raises
        ------
        IndexError
            If ``layer`` is not in [0, num_layers).
        """
        if layer.__class__ is int and layer in self._caches[KEY]:
            return self._caches[KEY][layer]
        return self._make_cache(layer, KEY)

    def get_value_cache(self, layer: int) -> CacheT:
        """The values of one layer; the same object at every call.

        Raises
        ------
        IndexError
            If ``layer`` is not in [0, num_layers).
        ValueError
            If the collection is an MLA one, which stores latent keys only.
        """
        if layer.__class__ is int and layer in self._caches[VALUE]:
            return self._caches[VALUE][layer]
        if self.cache_spec.is_mla:
            raise ValueError("get_value_cache needs a collection with values: an MLA one has only latent keys")
        return self._make_cache(layer, VALUE)

    def _make_cache(self, layer: int, half: int) -> CacheT:
        layer = checks.index(layer, self.num_layers, "layer")
        if layer not in self._caches[half]:
            self._caches[half][layer] = self.cache_type._make(self.cache_spec, self._views, self._cache_at(layer, half))
        return self._caches[half][layer]

    def _cache_at(self, layer: int, half: int) -> dict[str, int]:
        """The fields of a cache: the collection's, with the base addresses of the layer's keys or values."""
        at, spec = dict(self._at), self.cache_spec
        at["base"] = at["blocks"] + spec.dtype.bytes_of(half * at["kv_stride"] + layer * at["layer_stride"])
        at["lookup"] += 4 * layer * at["lookup_layer_stride"]
        if spec.scale_dtype is not None:
            at["scales"] += spec.scale_dtype.itemsize * (
                half * at["scales_kv_stride"] + layer * at["scales_layer_stride"]
            )
        at["layer_idx"], at["kv_idx"] = layer, half
        return at

    def cache_length(self, b: int) -> int:
        """Tokens of sequence ``b`` cached before this step; for collections in host memory only."""
        if self.device[0] != "cpu":
            raise TypeError(
                f"{type(self).__name__}.cache_length: needs buffers in host memory, got a collection on "
                f"{self.device[0]}:{self.device[1]}; copy the lengths to the host"
            )
        lengths = strided_array(self._at["lengths"], (self._at["batch"],), (1,), dtypes.u32, True, self._views)
        return int(lengths[checks.index(b, self._at["batch"], "b (sequence)")])

    kv_cache_dynamic_shape = KVCache.blocks_shape
    kv_cache_dynamic_strides = KVCache.blocks_strides
    kv_cache_scales_dynamic_shape = KVCache.scales_shape
    kv_cache_scales_dynamic_strides = KVCache.scales_strides

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.cache_spec!r}, pages={self.num_blocks}, layers={self.num_layers}, "
            f"batch={self.batch_size}, max_cache_length={self.max_cache_length}, device={self.device})"
        )


class PagedKVCacheCollection(KVCacheCollection[PagedKVCache]):
    """Keys and values of all layers, in pages.

    Parameters
    ----------
    blocks : array-like [N, 2, L, P, H, D]
        The pool of N pages, including the null page. Dimension 1 is K and V, or has extent 1 for MLA (latent keys only,
        H = 1). [P, H, D] is packed; the first three dimensions may have any non-overlapping strides of whole tokens.
    cache_lengths : uint32 or int32 array-like [B]
        Tokens of each sequence cached before this step.
    lookup_table : uint32 or int32 array-like [B, columns]
        Page ids: token t of sequence b is in slot t % P of page ``lookup_table[b, t // P]``, in every layer. Kernels
        that read tiles need padded columns: ``layout.lookup_columns`` of them, filled with the null page.
    max_seq_length : int
        Largest number of new tokens of a sequence.
    max_cache_length : int
        Largest number of cached and new tokens of a sequence; the table must cover it.
    scales : array-like [N, 2, L, P, H, G], optional
        Quantization scales (f32, f16, bf16, f8e8m0 or f8e4m3) of an 8-bit pool, G = cdiv(D, quantization_granularity).
        The base and the strides of the first three dimensions must be multiples of the largest power of two, at most
        16, that divides the bytes of G scales: kernels read them as vectors.
    quantization_granularity : int
        Consecutive elements of a head that share a scale; given by ``record``, if there is one.
    record : Record or name, optional
        What a token and head stores, such as ``"int4"`` or ``kv.Record("u4", "f16", 64, zero=True)``. By default it
        follows from the buffers. Of 4-bit elements blocks are bytes of two, uint8 [N, 2, L, P, H, D / 2], and scales
        are (scale, zero) of each group, [N, 2, L, P, H, 2 * groups].

    Raises
    ------
    ValueError, TypeError
        With the requirement and the actual value. Buffers are not read.
    """

    cache_type = PagedKVCache
    name_str = "paged"

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
        record: Record | str | None = None,
    ) -> None:
        self.blocks, self.cache_lengths, self.lookup_table, self.scales = blocks, cache_lengths, lookup_table, scales
        pool = pool_of(PAGED, "N2LPHD", blocks, scales, quantization_granularity, record=record)
        self._bind(*with_sequences(pool, cache_lengths, lookup_table, max_seq_length, max_cache_length))

    def with_tables(
        self,
        cache_lengths: Any,
        lookup_table: Any,
        *,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> PagedKVCacheCollection:
        """The same pool with the tables of other sequences.

        Parameters
        ----------
        cache_lengths, lookup_table, max_seq_length, max_cache_length
            As in the class; the last two default to those of this collection.
        """
        new, most = self._bounds(max_seq_length, max_cache_length)
        _, scales, _ = self._made_of()
        return PagedKVCacheCollection(self.blocks, cache_lengths, lookup_table, new, most, **scales)

    def _bounds(self, max_seq_length: int | None, max_cache_length: int | None) -> tuple[int, int]:
        """The bounds of a step; by default the collection's."""
        return (
            self.max_seq_length if max_seq_length is None else max_seq_length,
            self.max_cache_length if max_cache_length is None else max_cache_length,
        )


class _WithoutScales(KVCacheCollection[CacheT]):
    """A collection of a kind without scales; ``_dims`` are the dimensions of its pool."""

    _dims: ClassVar[str]

    def __init__(
        self, blocks: Any, cache_lengths: Any, lookup_table: Any, max_seq_length: int, max_cache_length: int
    ) -> None:
        self.blocks, self.cache_lengths, self.lookup_table = blocks, cache_lengths, lookup_table
        pool = pool_of(self.cache_type.kind, self._dims, blocks)
        self._bind(*with_sequences(pool, cache_lengths, lookup_table, max_seq_length, max_cache_length))


class ContinuousBatchingKVCacheCollection(_WithoutScales[ContinuousBatchingKVCache]):
    """Keys and values of all layers, with one contiguous region per sequence.

    Parameters
    ----------
    blocks : array-like [N, 2, L, S_max, H, D]
        N regions of S_max token slots. Dimension 1 has extent 1 for latent keys only (H = 1).
    cache_lengths : uint32 or int32 array-like [B]
    lookup_table : uint32 or int32 array-like [B]
        The region of each sequence.
    max_seq_length, max_cache_length : int
        As in :class:`PagedKVCacheCollection`; a region must fit the longest sequence.
    """

    cache_type = ContinuousBatchingKVCache
    name_str = "continuous_batching"
    _dims = "N2LPHD"


class PagedKVCacheFA3Fallback(KVCache):
    """One layer's keys or values in a pool of pages that all layers share.

    Parameters
    ----------
    blocks : array-like [2, N, P, H, D]
        The pool; dimension 0 is K and V.
    cache_lengths : int32 or uint32 array-like [B]
    lookup_table : int32 or uint32 array-like [L, B, columns]
        Page ids of each layer.
    max_seq_length, max_cache_length : int
    layer_idx : int
    kv_idx : int
        ``KeyIdx`` (0) or ``ValueIdx`` (1).
    """

    __slots__ = ()
    kind = FA3
    KeyIdx: ClassVar[int] = KEY
    ValueIdx: ClassVar[int] = VALUE

    def __init__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        max_seq_length: int,
        max_cache_length: int,
        layer_idx: int,
        kv_idx: int,
    ) -> None:
        collection = PagedKVCacheFA3FallbackCollection(
            blocks, cache_lengths, lookup_table, max_seq_length, max_cache_length
        )
        half = checks.index(kv_idx, 2, "kv_idx")
        same = collection.get_value_cache(layer_idx) if half == VALUE else collection.get_key_cache(layer_idx)
        self._bind(same.spec, same._views(), same._at)

    def _views(self) -> dict[str, BufferView]:
        return dict(zip(("blocks", "cache_lengths", "lookup_table"), self._keep, strict=True))

    @property
    def layer_idx(self) -> int:
        return self._at["layer_idx"]

    @property
    def kv_idx(self) -> int:
        return self._at["kv_idx"]


class FA3Arguments(NamedTuple):
    """The arguments of a FlashAttention-3 style paged kernel, as arrays of the library that owns the buffers."""

    k: Any  # [N, P, H, D]
    v: Any  # [N, P, H, D]
    block_table: Any  # int32 [B, columns]
    seqlens: Any  # int32 [B]


class PagedKVCacheFA3FallbackCollection(_WithoutScales[PagedKVCacheFA3Fallback]):
    """Keys and values in one pool of pages that all layers share, as FlashAttention-3 kernels read it.

    Parameters
    ----------
    blocks : array-like [2, N, P, H, D]
        The pool; dimension 0 is K and V. Pages may have any stride.
    cache_lengths : int32 or uint32 array-like [B]
    lookup_table : int32 or uint32 array-like [L, B, columns]
        Page ids of each layer.
    max_seq_length, max_cache_length : int
        As in :class:`PagedKVCacheCollection`.
    """

    cache_type = PagedKVCacheFA3Fallback
    name_str = "paged_fa3_fallback"
    _dims = "2NPHD"

    def to_fa3(self, layer: int) -> FA3Arguments:
        """The buffers of one layer as arguments of a FlashAttention-3 kernel: views made by indexing.

        Parameters
        ----------
        layer : int

        Returns
        -------
        FA3Arguments
            ``k`` and ``v`` [N, P, H, D], ``block_table`` [B, columns], ``seqlens`` [B] (tokens cached *before* this
            step).
        """
        layer = checks.index(layer, self.num_layers, "layer")
        return FA3Arguments(self.blocks[KEY], self.blocks[VALUE], self.lookup_table[layer], self.cache_lengths)
