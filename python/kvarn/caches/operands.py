# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands of attention: one interface to a cache, a cache's scales, and dense or ragged buffers.

Kernels take them as arguments (annotated ``kv.MHAOperand`` for any, or with the class of one kind); for host buffers
the methods model what a kernel does. Indices of an operand are (sequence, *token*, *head*, dim), those of a cache
(sequence, head, token, dim).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvarn.dialect import dtypes, layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import DENSE, RAGGED, CacheSpec, OperandSpec
from kvarn.dialect.members import SpecMembers
from kvarn.runtime.buffers import BufferView, host_array, strided_array
from kvarn.runtime.copying import CopiedWhole, NoCopies

from . import checks
from .model import HostModel, in_range, integers, squeeze
from .numerics import saturating_cast
from .pools import memory_of, moved
from .rows import PagedRowIndices
from .tma import OperandTmaTiles
from .views import KVCache


class MHAOperand(SpecMembers, OperandTmaTiles):
    """Keys or values as an attention kernel reads them. Use one of the subclasses.

    As the annotation of a kernel's argument it accepts every kind.

    Attributes
    ----------
    spec : OperandSpec
        What a kernel is specialised for.
    device : tuple of (str, int)
    buffers : tuple
        The owners of the memory, kept alive.
    """

    __slots__ = ("_fields", "_keep", "_memory", "_model", "_spec", "buffers", "device", "spec")
    readonly = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("MHAOperand is abstract: make an operand of a kind, such as KVCacheMHAOperand(cache)")

    def _bind(self, model: HostModel, spec: CacheSpec) -> None:
        self._model, self._spec, self.spec = model, spec, OperandSpec(spec)
        self.device, self.buffers, self._keep = model.device, model.buffers, model._keep
        self._fields = tuple(model._at[f.name] for f in layout.operand_fields(spec))
        self._memory = memory_of(self._keep[0])

    def fields(self) -> tuple[int, ...]:
        """The kernel's parameters, in the order of ``layout.operand_fields``; pointers as integers."""
        memory = self._memory
        if memory is not None and memory[0].data_ptr() != memory[1]:
            raise moved(self, memory[0])
        return self._fields

    @property
    def dtype(self) -> DType:
        """Type of the elements that loads return."""
        return self._spec.data_dtype

    @property
    def quantization_enabled(self) -> bool:
        return self._spec.quantized

    @property
    def batch_size(self) -> int:
        return self._model._at["batch"]

    @property
    def capacity(self) -> int:
        """Token slots of a page (or region); S for a dense operand, 1 for a ragged one."""
        return self._model._at["capacity"]

    def load(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1, dtype: Any = None) -> Any:
        """Read ``width`` elements, dequantized, like the cache's ``load``; indices are (b, token, head, d)."""
        return self._model.load(b, h, t, d, width, dtype)

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """A read-only view [tile, D - d] of the memory from (b, t, h, d) on."""
        return _frozen(self._model.block_paged_ptr(b, t, h, d, tile=tile))

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> np.ndarray | None:
        """A read-only view of the scales from that of (b, t, h, d) on; None (a null pointer) without scales."""
        return _frozen(self._model.scales_block_paged_ptr(b, t, h, d))

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Read ``width`` scales; indices are (b, token, head, d)."""
        return self._model.load_scale(b, h, t, d, width)

    def cache_length(self, b: Any) -> Any:
        """Tokens of a sequence: those cached before this step, or all tokens of a buffer."""
        return self._model.cache_length(b)

    def max_context_length(self) -> int:
        return self._model.max_context_length()

    def num_kv_rows(self) -> int:
        return self._model.num_kv_rows()

    def row_idx(self, b: Any, t: Any) -> Any:
        """Row of token ``t`` of sequence ``b``."""
        return self._model.row_idx(b, t)

    def get_tma_row(self, encoded: Any) -> Any:
        """Row of an encoded index, as in the cache; for a buffer, the index itself."""
        return self._model.get_tma_row(encoded)

    def populate(self, b: int, base: int, tile_rows: int, **options: Any) -> PagedRowIndices:
        """First rows of a tile's pages; options as in the cache's ``populate``."""
        return self._model.populate(b, base, tile_rows, **options)

    def scales_raw_ptr(self) -> np.ndarray | None:
        """All scales; None (a null pointer) without scales."""
        return None

    @classmethod
    def get_type_name(cls) -> str:
        return cls.__name__


class _CacheOperand(MHAOperand, NoCopies):
    """Common parts of operands over a cache."""

    __slots__ = ()
    copied_by = "copy the collection, and make the operand of a cache of the copy"
    _model: KVCache

    def _wrap(self, cache: Any) -> CacheSpec:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a cache (as get_key_cache gives it), got {type(cache).__name__}")
        return cache.spec

    @property
    def cache(self) -> KVCache:
        return self._model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cache!r})"


class KVCacheMHAOperand(_CacheOperand):
    """A cache as a read-only operand of an attention kernel.

    Parameters
    ----------
    cache : KVCache
        Of any kind.
    """

    __slots__ = ()

    def __init__(self, cache: KVCache) -> None:
        self._bind(cache, self._wrap(cache))

    def scales_raw_ptr(self) -> np.ndarray | None:
        """The scales of the cache, read-only; None without. The interface defines it for float32 only."""
        scales = self.cache.scales_raw_ptr()
        if scales is None or scales.dtype == np.float32:
            return None if scales is None else _frozen(scales)
        raise TypeError(
            f"KVCacheMHAOperand.scales_raw_ptr: needs float32 scales, got {scales.dtype}; use the cache's method"
        )


class KVCacheScalesMHAOperand(_CacheOperand):
    """The scales of a quantized cache as the data of an operand.

    Parameters
    ----------
    cache : KVCache
        With scales.
    """

    __slots__ = ()

    def __init__(self, cache: KVCache) -> None:
        spec = self._wrap(cache)
        if spec.scale_dtype is None:
            raise ValueError("cache must be quantized (have scales), got one without")
        self._bind(cache, layout.scales_data(spec))

    def load(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1, dtype: Any = None) -> Any:
        """Read ``width`` scales from granule ``d // granularity`` on."""
        found = self.cache.load_scale(b, h, t, d, width)
        return found if dtype is None else saturating_cast(found, dtypes.of(dtype))[()]

    def block_paged_ptr(self, b: int, t: int, h: int, d: int = 0, *, tile: int = 1) -> np.ndarray:
        """The scales from that of (b, t, h, d) on; the stride of ``tile`` tokens is H*G scales."""
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


class BufferRows(HostModel, NoCopies):
    """A cache's methods over the rows of a host buffer."""

    __slots__ = ("_at", "_host", "_keep", "buffers", "device", "readonly", "spec")

    def __init__(self, spec: CacheSpec, views: dict[str, BufferView], at: dict[str, int]) -> None:
        self.spec, self._at = spec, at
        self.device, self.readonly = views["buffer"].device, True
        self.buffers = tuple(v.owner for v in views.values())
        self._keep, self._host = tuple(views.values()), {}

    def _make_array(self, which: str) -> np.ndarray:
        if which == "offsets":
            return strided_array(self._at["offsets"], (self._at["batch"] + 1,), (1,), dtypes.u32, True, self._keep)
        return super()._make_array(which)

    def _page(self, b: Any, t: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        self._need_host(what)
        b, t = np.broadcast_arrays(integers(b, "b", what), integers(t, "t", what))
        in_range(b, self._at["batch"], "b (sequence)", what)
        in_range(t, self._slots(b), "t (token)", what)
        return (b if self.spec.kind == DENSE else self._array("offsets", what)[b].astype(np.int64)), t

    def _slots(self, b: Any) -> Any:
        if self.spec.kind == DENSE:
            return super()._slots(b)
        return self._at["num_blocks"] - self._array("offsets", "row_idx")[b].astype(np.int64)

    def cache_length(self, b: Any) -> Any:
        if self.spec.kind == DENSE and self._at["lengths"]:
            return np.minimum(super().cache_length(b), self._at["capacity"])[()]
        self._need_host("cache_length")
        at = integers(b, "b", "cache_length")
        in_range(at, self._at["batch"], "b (sequence)", "cache_length")
        if self.spec.kind == DENSE:
            found = np.full(at.shape, self._at["capacity"])
        else:
            offsets = np.minimum(self._array("offsets", "cache_length").astype(np.int64), self._at["num_blocks"])
            found = np.maximum(offsets[at + 1] - offsets[at], 0)
        return int(found) if found.ndim == 0 else found

    def max_context_length(self) -> int:
        return self._at["capacity"]

    def get_tma_row(self, encoded: Any) -> Any:
        return encoded


class _BufferOperand(MHAOperand, CopiedWhole):
    """Common parts of dense and ragged operands, whose keys or values are rows of a buffer."""

    __slots__ = ("buffer", "scales")

    def _made_of(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        data, *rest = self._keep
        options = {}
        if self.scale_dtype is not None:
            options["scales"] = rest.pop(0).owner
        if rest:
            options["lengths" if self._spec.kind == DENSE else "cache_row_offsets"] = rest.pop().owner
        return (data.owner,), options, self._keep

    def _view(self, kind: str, buffer: Any, scales: Any) -> tuple[CacheSpec, dict[str, BufferView], dict[str, int]]:
        """Check the buffers; the spec, the views by name, and the fields that do not depend on the sequences."""
        dims = ("sequences", "tokens", "heads", "head_size")[0 if kind == DENSE else 1 :]
        outer = 1 if kind == DENSE else 0
        data, strides = checks.pool(buffer, "buffer", dims, outer, empty=True)
        heads, size = data.shape[-2:]
        checks.aligned(data, min(16, layout.lowbit(size * data.dtype.itemsize)), "buffer")
        packed = math.prod(data.shape[1:])  # strides of an empty buffer are arbitrary
        views, at = {"buffer": data}, {"base": data.data, "stride0": strides[0] if data.size else packed}
        at["num_blocks"], at["capacity"] = data.shape[0], data.shape[1] if kind == DENSE else 1
        if (data.shape[0] - 1) * (at["stride0"] // (heads * size)) + at["capacity"] >= 2**31:
            raise ValueError(f"buffer must span fewer than 2**31 rows, got shape {tuple(data.shape)}: split it")
        granules = 1
        if scales is not None:
            scale_dims = (*dims[:-1], "granules")
            views["scales"], scale_strides = checks.pool(
                scales, "scales", scale_dims, outer, row_major=False, empty=True
            )
            granules = views["scales"].shape[-1]
            granularity = layout.cdiv(size, max(granules, 1))
            if views["scales"].shape[:-1] != data.shape[:-1] or layout.cdiv(size, granularity) != granules:
                raise ValueError(
                    f"scales must have the shape of buffer {tuple(data.shape)} but for G granules of cdiv({size}, G) "
                    f"elements, got {tuple(views['scales'].shape)}"
                )
            checks.aligned_granules(views["scales"], scale_strides, scale_dims, outer)
            at["scales"], at["scales_stride0"] = views["scales"].data, scale_strides[0]
        spec = layout.spec_of(
            kind, data.dtype, heads, size, granularity=layout.cdiv(size, granules),
            scale_dtype=views["scales"].dtype if scales is not None else None,
        )  # fmt: skip
        self.buffer = host_array(data) if data.on_host else data
        self.scales = None
        if scales is not None:
            self.scales = host_array(views["scales"]) if data.on_host else views["scales"]
        return spec, views, at

    def populate(
        self, b: int, base: int, tile_rows: int, *, pair_cta: bool = False, is_leader: bool = True, **_: Any
    ) -> PagedRowIndices:
        """One entry: the row of the tile's first token."""
        return self._model.populate(b, base, tile_rows, pair_cta=pair_cta, is_leader=is_leader)

    def __repr__(self) -> str:
        data = self._keep[0]
        return f"{type(self).__name__}({tuple(data.shape)} {data.dtype.name}, batch={self.batch_size}, {self.device})"


class LayoutTensorMHAOperand(_BufferOperand):
    """Dense keys or values, [B, S, H, D].

    Parameters
    ----------
    buffer : array-like [B, S, H, D]
        Dimension 0 may have any stride of whole tokens; the others are packed.
    scales : array-like [B, S, H, G], optional
        One per cdiv(D, G) consecutive elements.
    lengths : uint32 or int32 array-like [B], optional
        Tokens of each sequence, at most S; by default S.
    """

    __slots__ = ()

    def __init__(self, buffer: Any, scales: Any = None, lengths: Any = None) -> None:
        spec, views, at = self._view(DENSE, buffer, scales)
        at["batch"], at["lengths"] = at["num_blocks"], 0
        if lengths is not None:
            views["lengths"], _ = checks.table(lengths, "lengths", ("sequences",))
            if views["lengths"].shape[0] != at["batch"]:
                raise ValueError(
                    f"lengths must have one entry for each of buffer's {at['batch']} sequences, "
                    f"got {views['lengths'].shape[0]}"
                )
            at["lengths"] = views["lengths"].data
        checks.same_device(views.items())
        self._bind(BufferRows(spec, views, at), spec)

    @property
    def seq_length(self) -> int:
        """S, the extent of dimension 1."""
        return self._model._at["capacity"]

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Scales from granule ``d // granularity`` on; zeros without scales. Indices are (b, token, head, d)."""
        if self.scale_dtype is None:
            return _zeros(b, t, h, d, width, self.dtype)
        return super().load_scale(b, t, h, d, width)


class RaggedMHAOperand(_BufferOperand):
    """Ragged keys or values, [tokens, H, D], sequence after sequence.

    Parameters
    ----------
    buffer : array-like [tokens, H, D]
        Packed.
    cache_row_offsets : uint32 or int32 array-like [B+1]
        Sequence b has rows ``cache_row_offsets[b]`` to ``cache_row_offsets[b+1]``. Checked here if they are in host
        memory; kernels clamp them to the buffer.
    scales : array-like [tokens, H, G], optional
        Applied by ``load``; the interface has no other access to them.
    """

    __slots__ = ()

    def __init__(self, buffer: Any, cache_row_offsets: Any, scales: Any = None) -> None:
        spec, views, at = self._view(RAGGED, buffer, scales)
        views["offsets"], _ = checks.table(cache_row_offsets, "cache_row_offsets", ("sequences + 1",))
        offsets = views["offsets"]
        if offsets.shape[0] < 1:
            raise ValueError("cache_row_offsets must have B + 1 entries, got none")
        checks.same_device(views.items())
        at["batch"], at["offsets"] = offsets.shape[0] - 1, offsets.data
        self._bind(BufferRows(spec, views, at), spec)
        if offsets.on_host:
            rows = self.cache_row_offsets
            if (np.diff(rows) < 0).any() or not 0 <= rows[0] <= rows[-1] <= at["num_blocks"]:
                raise ValueError(
                    f"cache_row_offsets must not decrease nor pass the {at['num_blocks']} tokens, got {rows.tolist()}"
                )

    @property
    def cache_row_offsets(self) -> np.ndarray:
        """The offsets, int64 [B + 1]; for host memory only."""
        return self._model._array("offsets", "cache_row_offsets").view(np.int32).astype(np.int64)

    @property
    def quantization_granularity(self) -> int:
        """0, as defined by the interface."""
        return 0

    def max_context_length(self) -> int:
        raise TypeError("RaggedMHAOperand.max_context_length: a ragged operand does not have one")

    def load_scale(self, b: Any, t: Any, h: Any, d: Any = 0, width: int = 1) -> Any:
        """Zeros: kernels read a ragged operand's scales through ``load`` or TMA."""
        return _zeros(b, t, h, d, width, self.scale_dtype or self.dtype)

    def scales_block_paged_ptr(self, b: int, t: int, h: int, d: int = 0) -> None:
        return None


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _zeros(b: Any, t: Any, h: Any, d: Any, width: int, dtype: DType | None) -> Any:
    shape = np.broadcast_shapes(*(np.shape(i) for i in (b, t, h, d)))
    return squeeze(np.zeros((*shape, width), (dtype or dtypes.f32).numpy), width)
