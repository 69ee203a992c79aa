# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands of attention: one interface over a cache, a cache's scales, and dense or ragged buffers.

:class:`KVCacheMHAOperand` is also what a kernel takes; the others are the host model of the interface for keys and
values that are in no cache. The order of an operand's scale index is (sequence, *token*, *head*, dim), the cache's is
(sequence, head, token, dim).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect import dtypes
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import OperandSpec
from kvarn.runtime.buffers import host_array, view

from . import checks
from .model import _in_range, _integers, _squeeze
from .rows import PagedRowIndices
from .views import KVCache


class KVCacheMHAOperand:
    """A cache as a read-only operand of an attention kernel. Delegates to the cache.

    Parameters
    ----------
    cache : KVCache
        Of any kind.
    """

    __slots__ = ("_fields", "cache", "spec")

    def __init__(self, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a cache (as get_key_cache gives it), got {type(cache).__name__}")
        self.cache = cache
        self.spec = OperandSpec(cache.spec)
        self._fields = cache.fields()

    def fields(self) -> tuple[int, ...]:
        """The kernel's parameters: those of the cache."""
        return self._fields

    @property
    def device(self) -> tuple[str, int]:
        return self.cache.device

    @property
    def buffers(self) -> tuple[Any, ...]:
        return self.cache.buffers

    @property
    def readonly(self) -> bool:
        return True

    @property
    def dtype(self) -> DType:
        return self.cache.dtype

    @property
    def scale_dtype(self) -> DType | None:
        return self.cache.scale_dtype

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    @property
    def quantization_enabled(self) -> bool:
        return self.cache.quantization_enabled

    @property
    def quantization_granularity(self) -> int:
        return self.cache.quantization_granularity

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """The cache's memory from (b, t, h, d) on, [tile, D - d], read-only."""
        return _frozen(self.cache.block_paged_ptr(b, t, h, d, tile=tile))

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> np.ndarray:
        """The scales from that of (b, t, h, d) on, read-only."""
        return _frozen(self.cache.scales_block_paged_ptr(b, t, h, d))

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Read ``width`` scales; mind the order (b, token, head, d)."""
        return self.cache.load_scale(b, h, t, d, width)

    def cache_length(self, b: Any) -> Any:
        return self.cache.cache_length(b)

    def max_context_length(self) -> int:
        return self.cache.max_context_length()

    def num_kv_rows(self) -> int:
        return self.cache.num_kv_rows()

    def row_idx(self, b: Any, t: Any) -> Any:
        return self.cache.row_idx(b, t)

    def get_tma_row(self, encoded: Any) -> Any:
        return self.cache.get_tma_row(encoded)

    def populate(self, b: int, base: int, tile_rows: int, **options: Any) -> PagedRowIndices:
        """First rows of a tile's pages; options as of the cache's ``populate``."""
        return self.cache.populate(b, base, tile_rows, **options)

    def scales_raw_ptr(self) -> np.ndarray | None:
        """The scales of the cache, read-only; None when not quantized. The interface speaks of float32 only."""
        scales = self.cache.scales_raw_ptr()
        if scales is None or scales.dtype == np.float32:
            return None if scales is None else _frozen(scales)
        raise TypeError(
            f"KVCacheMHAOperand.scales_raw_ptr: needs float32 scales, got {scales.dtype}; use the cache's method"
        )

    @classmethod
    def get_type_name(cls) -> str:
        return cls.__name__

    def __repr__(self) -> str:
        return f"KVCacheMHAOperand({self.cache!r})"


class KVCacheScalesMHAOperand:
    """The scales of a quantized cache, shown as the data of an operand. Host buffers only.

    Parameters
    ----------
    cache : KVCache
        With scales.
    """

    quantization_enabled = False

    def __init__(self, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a cache (as get_key_cache gives it), got {type(cache).__name__}")
        if cache.scale_dtype is None:
            raise ValueError("cache must be quantized (have scales), got one without")
        self.cache = cache
        self.dtype = self.scale_dtype = cache.scale_dtype
        self.page_size = cache.page_size
        self.quantization_granularity = cache.quantization_granularity

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """The scales from that of (b, t, h, d) on; ``tile`` tokens lie H*G scales apart."""
        if tile < 1 or self.page_size % tile or t % tile:
            raise ValueError(f"tile must divide the page size {self.page_size} and the token {t}, got {tile}")
        first = self.cache.scales_block_paged_ptr(b, t, h, d)
        step = self.cache.spec.scales_token_stride * first.itemsize
        return np.lib.stride_tricks.as_strided(first, (tile, first.size), (step, first.itemsize), writeable=False)

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Zeros: the scales have no scales."""
        return _zeros(b, t, h, d, width, self.scale_dtype)

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> None:
        return None

    def scales_raw_ptr(self) -> None:
        return None

    def cache_length(self, b: Any) -> Any:
        return self.cache.cache_length(b)

    def max_context_length(self) -> int:
        return self.cache.max_context_length()

    def num_kv_rows(self) -> int:
        return self.cache.num_kv_rows()

    def row_idx(self, b: Any, t: Any) -> Any:
        return self.cache.row_idx(b, t)

    def get_tma_row(self, encoded: Any) -> Any:
        return self.cache.get_tma_row(encoded)

    def populate(self, b: int, base: int, tile_rows: int, **options: Any) -> PagedRowIndices:
        return self.cache.populate(b, base, tile_rows, **options)


class _DenseOperand:
    """Keys or values as rows of a buffer: what dense and ragged operands share."""

    page_size = 0

    def __init__(self, buffer: Any, scales: Any, rank: int) -> None:
        dims = ("sequences", "tokens", "heads", "head_size")[4 - rank :]
        data = view(buffer, name="buffer")
        if data.rank != rank or not data.contiguous:
            raise ValueError(
                f"buffer must be contiguous [{', '.join(dims)}], got shape {tuple(data.shape)}, strides {data.strides}"
            )
        self.buffer, self.dtype = host_array(data, name="buffer"), data.dtype
        self.num_heads, self.head_size = data.shape[-2:]
        self.scale_dtype: DType | None = None
        self.scales: np.ndarray | None = None
        if scales is not None:
            scale_view = view(scales, name="scales")
            if scale_view.shape[:-1] != data.shape[:-1] or not scale_view.contiguous:
                raise ValueError(
                    f"scales must be contiguous {tuple(data.shape[:-1])} and granules, got shape {scale_view.shape}"
                )
            self.scales, self.scale_dtype = host_array(scale_view, name="scales"), scale_view.dtype
        self.quantization_enabled = self.scales is not None

    def _start(self, b: Any) -> Any:
        """First row of a sequence."""
        raise NotImplementedError

    def cache_length(self, b: Any) -> Any:
        raise NotImplementedError

    def num_kv_rows(self) -> int:
        return int(np.prod(self.buffer.shape[:-2]))

    def row_idx(self, b: Any, t: Any) -> Any:
        """Row of token ``t`` of sequence ``b``."""
        b, t = _integers(b, "b", "row_idx"), _integers(t, "t", "row_idx")
        rows = self._start(b) + t
        _in_range(rows, self.num_kv_rows(), "row", "row_idx")
        return int(rows) if rows.ndim == 0 else rows

    def get_tma_row(self, encoded: Any) -> Any:
        """The index itself."""
        return encoded

    def populate(
        self, b: int, base: int, tile_rows: int, *, pair_cta: bool = False, is_leader: bool = True, **_: Any
    ) -> PagedRowIndices:
        """One entry: the row of the tile's first token."""
        return PagedRowIndices(tile_rows, 0, np.array([self.row_idx(b, base)], np.uint32), pair_cta, is_leader)

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """``tile`` tokens from (b, t, h, d) on, [tile, D - d], read-only."""
        first = self.row_idx(b, t)
        self.row_idx(b, t + tile - 1)
        rows = self.buffer.reshape(-1, self.num_heads, self.head_size)
        _in_range(np.asarray(h), self.num_heads, "h (head)", "block_paged_ptr")
        return _frozen(rows[first : first + tile, h, d:])


class LayoutTensorMHAOperand(_DenseOperand):
    """Dense keys or values, [B, S, H, D]: every sequence has S tokens. Host buffers only.

    Parameters
    ----------
    buffer : array-like [B, S, H, D]
    scales : array-like [B, S, H, G], optional
    """

    def __init__(self, buffer: Any, scales: Any = None) -> None:
        super().__init__(buffer, scales, 4)
        self.batch_size, self.seq_length = self.buffer.shape[:2]
        granules = 1 if self.scales is None else self.scales.shape[-1]
        self.quantization_granularity = -(-self.head_size // granules)

    def _start(self, b: Any) -> Any:
        _in_range(np.asarray(b), self.batch_size, "b (sequence)", "row_idx")
        return b * self.seq_length

    def cache_length(self, b: int) -> int:
        checks.index(b, self.batch_size, "b (sequence)")
        return self.seq_length

    def max_context_length(self) -> int:
        return self.seq_length

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Scales from granule ``d // granularity`` on; mind the order (b, token, head, d). Zeros without scales."""
        if self.scales is None:
            return _zeros(b, t, h, d, width, self.dtype)
        b, t, h, d = np.broadcast_arrays(b, t, h, d)
        granules = (d // self.quantization_granularity)[..., None] + np.arange(width)
        return _squeeze(self.scales[b[..., None], t[..., None], h[..., None], granules], width)

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> np.ndarray:
        if self.scales is None:
            raise TypeError("LayoutTensorMHAOperand.scales_block_paged_ptr: needs scales, got an operand without")
        return _frozen(self.scales[b, t, h, d // self.quantization_granularity :])

    def scales_raw_ptr(self) -> None:
        return None


class RaggedMHAOperand(_DenseOperand):
    """Ragged keys or values, [tokens, H, D], sequence after sequence. Host buffers only.

    Parameters
    ----------
    buffer : array-like [tokens, H, D]
    cache_row_offsets : uint32 or int32 array-like [B+1]
        Sequence b has the rows from ``cache_row_offsets[b]`` to ``cache_row_offsets[b+1]``.
    scales : array-like [tokens, H, G], optional
    """

    quantization_granularity = 0

    def __init__(self, buffer: Any, cache_row_offsets: Any, scales: Any = None) -> None:
        super().__init__(buffer, scales, 3)
        offsets, _ = checks.table(cache_row_offsets, "cache_row_offsets", ("sequences + 1",))
        if offsets.shape[0] < 1:
            raise ValueError("cache_row_offsets must have B + 1 entries, got none")
        self.cache_row_offsets = host_array(offsets, name="cache_row_offsets").astype(np.int64)
        self.batch_size = offsets.shape[0] - 1
        if (np.diff(self.cache_row_offsets) < 0).any() or not 0 <= self.cache_row_offsets[-1] <= self.buffer.shape[0]:
            raise ValueError(
                f"cache_row_offsets must not decrease nor pass the {self.buffer.shape[0]} tokens, "
                f"got {self.cache_row_offsets.tolist()}"
            )

    def _start(self, b: Any) -> Any:
        _in_range(np.asarray(b), self.batch_size, "b (sequence)", "row_idx")
        return self.cache_row_offsets[b]

    def cache_length(self, b: int) -> int:
        b = checks.index(b, self.batch_size, "b (sequence)")
        return int(self.cache_row_offsets[b + 1] - self.cache_row_offsets[b])

    def max_context_length(self) -> int:
        raise TypeError("RaggedMHAOperand.max_context_length: a ragged operand does not have one")

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Zeros: kernels read a ragged operand's scales through TMA."""
        return _zeros(b, t, h, d, width, self.scale_dtype or self.dtype)

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> None:
        return None

    def scales_raw_ptr(self) -> None:
        return None


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _zeros(b: Any, t: Any, h: Any, d: Any, width: int, dtype: DType | None) -> Any:
    shape = np.broadcast_shapes(*(np.shape(i) for i in (b, t, h, d)))
    return _squeeze(np.zeros((*shape, width), (dtype or dtypes.f32).numpy), width)
