# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Caches, collections and operands as kernel arguments: static parameters, and methods that emit kv ops.

Methods have the names and argument orders of the host-side cache classes. Indices are ints or 32-bit values.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.dialect import layout, ops
from kvarn.dialect.dtypes import DType, bool_, f32, i32, u32
from kvarn.dialect.layout import CONTINUOUS, DENSE, FA3, KINDS, PAGED, RAGGED, SCALES, CacheSpec
from kvarn.dialect.members import CacheMembers, TileRows

from . import intervals
from .builder import OfTrace
from .memory import GLOBAL, SHARED, Buffer, Pointer, _check_width
from .tiles import Tile
from .values import Numeric, Value, as_value, describe, i32_value, plain, wrap

# Python classes that annotate an argument: (kind of argument, kinds of cache or operand).
ANNOTATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "KVCache": ("cache", KINDS),
    "PagedKVCache": ("cache", (PAGED,)),
    "ContinuousBatchingKVCache": ("cache", (CONTINUOUS,)),
    "PagedKVCacheFA3Fallback": ("cache", (FA3,)),
    "KVCacheCollection": ("collection", KINDS),
    "PagedKVCacheCollection": ("collection", (PAGED,)),
    "ContinuousBatchingKVCacheCollection": ("collection", (CONTINUOUS,)),
    "PagedKVCacheFA3FallbackCollection": ("collection", (FA3,)),
    "MHAOperand": ("operand", layout.OPERAND_KINDS),
    "KVCacheMHAOperand": ("operand", KINDS),
    "KVCacheScalesMHAOperand": ("operand", (SCALES,)),
    "LayoutTensorMHAOperand": ("operand", (DENSE,)),
    "RaggedMHAOperand": ("operand", (RAGGED,)),
}


class KVCache:
    """Annotation of a kernel argument: a cache of any kind."""


class KVCacheCollection:
    """Annotation of a kernel argument: a collection of any kind."""


class MHAOperand:
    """Annotation of a kernel argument: an attention operand of any kind."""


def annotation_of(annotation: Any) -> tuple[str, tuple[str, ...]] | None:
    """The kinds that an annotation class accepts; None for another annotation."""
    if isinstance(annotation, type) and (annotation.__module__ or "").partition(".")[0] == "kvarn":
        return ANNOTATIONS.get(annotation.__name__)
    return None


class Handle(OfTrace, CacheMembers):
    """A cache, collection or operand inside a kernel. Its static parameters are Python values.

    Attributes
    ----------
    spec : CacheSpec
        All static parameters.
    dtype, num_heads, head_size, page_size, is_mla, scale_dtype, quantization_enabled, max_tile_size, ...
        Single static parameters, named as in the host-side classes.
    """

    __slots__ = ("_spec", "spec")
    what = "handle"

    def __init__(self, value: ir.Value, spec: CacheSpec) -> None:
        self.ir, self.spec, self._spec = value, spec, spec

    page_size_ = CacheMembers.page_size

    @property
    def token_stride(self) -> int:
        """Elements from one token slot of a page to the next: H*D in a packed layout."""
        return self.spec.token_stride

    @property
    def head_stride(self) -> int:
        """Elements from one head of a token to the next: D in a packed layout."""
        return self.spec.head_stride

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def quantization_enabled(self) -> bool:
        return self.spec.quantized

    @property
    def granularity(self) -> int:
        return self.quantization_granularity

    @property
    def max_tile_size(self) -> int:
        return self.spec.max_tile_size

    def cache_length(self, b: Any) -> Value:
        """Tokens of sequence ``b`` cached before this step, i32; all tokens of a dense or ragged operand.

        The value is clamped to :meth:`token_capacity`.
        """
        return Value(ops.cache_length(self.ir, i32_value(b)), i32, bounds=intervals.POSITIONS)

    def token_capacity(self) -> Value:
        """Capacity of a sequence in tokens, i32: of its row of the lookup table, or of its region."""
        columns, slots = (Value(ops.field(self.ir, f), i32, nonneg=True) for f in ("lookup_columns", "capacity"))
        return Value(layout.token_capacity(self.spec, columns, slots).ir, i32, bounds=intervals.POSITIONS)

    def cache_lengths_nd(self) -> Pointer:
        """The lengths of all sequences: a pointer to u32."""
        self._has("cache_lengths")
        return Pointer(ops.cache_lengths(self.ir), GLOBAL)

    def max_prompt_length(self) -> Value:
        """The largest number of new tokens of a sequence in the batch, i32."""
        self._has("max_prompt_length")
        return Value(ops.max_prompt_length(self.ir), i32, bounds=intervals.POSITIONS)

    def max_context_length(self) -> Value:
        """The largest number of cached and new tokens of a sequence in the batch, i32; S for a dense operand."""
        self._has("max_context_length")
        return Value(ops.max_context_length(self.ir), i32, bounds=intervals.POSITIONS)

    def empty_cache(self) -> Value:
        """Whether max_context_length is 0, bool."""
        self._has("is_empty")
        return Value(ops.is_empty(self.ir), bool_)

    def batch_size(self) -> Value:
        """Number of sequences in the batch, i32."""
        return Value(ops.field(self.ir, "batch"), i32, nonneg=True)

    def field(self, name: str) -> Any:
        """A run-time field, named as in ``kvarn.dialect.layout``: a pointer, an i32 or an i64."""
        value = ops.field(self.ir, name)
        if not isinstance(value.type, ir.IntegerType):
            return Pointer(value, GLOBAL)
        from kvarn.dialect.dtypes import i64

        return Value(value, i32 if ir.IntegerType(value.type).width == 32 else i64)

    def _has(self, method: str) -> None:
        """Raise TypeError if operands of this kind do not support a method."""
        lacks = layout.operand_lacks(self.spec.kind, method)
        if lacks is not None:
            raise TypeError(f"a {self.spec.kind} operand has no {method}: {lacks}")

    def __iter__(self) -> Any:
        raise TypeError(f"a {self.what} cannot be iterated")

    def __repr__(self) -> str:
        s = self.spec
        return f"<{s.kind} {self.what} {s.dtype.name} {s.num_heads}x{s.head_size}>"


class CacheReads(Handle):
    """Methods shared by caches and operands."""

    __slots__ = ()

    def row_idx(self, b: Any, t: Any) -> Value:
        """Row of token ``t``: page * S + t % P, u32."""
        return Value(ops.row_index(self.ir, i32_value(b), i32_value(t)), u32)

    def num_kv_rows(self) -> Value:
        """Number of rows of the view, u32."""
        return Value(ops.num_rows(self.ir), u32)

    def get_tma_row(self, encoded: Any) -> Value:
        """Row of an encoded index page*P + slot; -1 for a negative one. i32."""
        return Value(ops.tma_row(self.ir, i32_value(encoded)), i32)

    def populate(
        self,
        b: Any,
        base: Any,
        tile_rows: int,
        base_alignment: int | None = None,
        pair_cta: bool = False,
        is_leader: bool = True,
    ) -> Rows:
        """The first row of each page in a tile of ``tile_rows`` tokens that starts at token ``base``."""
        for name, x in (("tile_rows", tile_rows), ("base_alignment", base_alignment or 1)):
            if not isinstance(x, int):
                raise TypeError(f"{name} must be an int known at compile time, got {describe(x)}")
        value = ops.populate(self.ir, i32_value(b), i32_value(base), tile_rows, base_alignment, pair_cta, is_leader)
        return Rows(value, tile_rows, self.spec.page_size, pair_cta, is_leader)

    def page(self, b: Any, t: Any) -> Value:
        """Physical page of a token, clamped to the pool. Accesses take it as ``page=``."""
        return Value(ops.page(self.ir, i32_value(b), i32_value(t)), i32, nonneg=True)

    def raw_page(self, b: Any, t: Any) -> Value:
        """The token's lookup-table entry without clamping, i32."""
        return Value(ops.raw_page(self.ir, i32_value(b), i32_value(t)), i32)

    def load_pages(self, b: Any, column: Any, count: int) -> Any:
        """``count`` consecutive entries of the sequence's table row, an i32 vector."""
        self._has("load_pages")
        return wrap(ops.load_pages(self.ir, i32_value(b), i32_value(column), count), i32, count)

    def block_paged_ptr(self, b: Any, t: Any, h: Any, d: Any = 0, *, tile: int = 1, page: Any = None) -> Pointer:
        """Address of (b, t, h, d). ``tile`` consecutive tokens from t on are ``token_stride`` elements apart."""
        value = ops.block_ptr(self.ir, *_indices(b, t, h, d), tile=tile, page=_page(page))
        return Pointer(value, GLOBAL)

    def scales_block_paged_ptr(self, b: Any, t: Any, h: Any, d: Any = 0, *, page: Any = None) -> Pointer:
        """Address of the scale of (b, t, h, d); null for a ragged operand and for an operand of scales."""
        if self.spec.kind not in (SCALES, RAGGED):
            self._needs_scales("scales_block_paged_ptr")
        return Pointer(ops.scale_block_ptr(self.ir, *_indices(b, t, h, d), page=_page(page)), GLOBAL)

    def scales_raw_ptr(self) -> Pointer:
        """Pointer to the view's first scale; null for a view without scales or not of a cache's elements."""
        return Pointer(ops.scales_base(self.ir), GLOBAL)

    def load_tile(
        self, b: Any, h: Any, base: Any, valid: Any, destination: Pointer, thread: Any, *,
        tile_rows: int, num_threads: int, swizzle: int = 0, mode: str = "async",
    ) -> None:  # fmt: skip
        """Copy this thread's share of the tokens [base, base + tile_rows) of a head to shared memory (kv.load_tile)."""
        self._has("load_tile")
        _shared_pointer(destination)
        ops.load_tile(
            self.ir, (i32_value(b), i32_value(h), i32_value(base), i32_value(valid)), destination.ir, i32_value(thread),
            tile_rows=tile_rows, num_threads=num_threads, swizzle=swizzle, mode=mode,
        )  # fmt: skip

    def tile(
        self, b: Any, h: Any, first: Any, count: Any, *, rows: int, columns: int | None = None, first_column: int = 0,
        begin: Any = 0, tail: str = "zero", descriptor: Any = None, dtype: DType | None = None, lists: Any = None,
        rope: int = 0, inline_scales: int = 0, constant: bool = False, existing: bool = False,
        aligned: bool = False,
    ) -> Tile:  # fmt: skip
        """The tokens [first, first + rows) of head ``h`` as a dequantized tile (kv.tile_load).

        Parameters
        ----------
        count, begin : i32
            End (exclusive) and start of the sequence's tokens that are needed. Rows of other tokens are zeros, or
            unspecified with ``tail="any"``.
        columns, first_column : int
            Number of columns of the head, and the first of them; the whole head by default.
        descriptor : kv.TensorMap, optional
            TMA descriptor of the same rows, for schedules that copy by TMA.
        dtype : DType, optional
            A float type; by default the storage type, or f32 for a quantized cache.
        lists : Buffer, optional
            [B, K] i32, rows of the pool as page * page_size + slot: token t of sequence b is row ``lists[b, t]``. Rows
            of negative entries are zeros. Paged caches only.
        rope, inline_scales : int, optional
            Row format as in ``kv.ops.mla_attention``: number of trailing bf16 columns, and number of elements that
            share one of the scales stored in the row.
        constant : bool
            Earlier kernels that are still running write none of these tokens, so the producer's copies do not wait for
            them (``kv.griddepcontrol_wait``).
        existing : bool
            TMA boxes without any token are not copied: their rows of the tile keep their previous contents.
        aligned : bool
            With a descriptor of tokens: the copied columns start at the 16-byte boundary at or before the head's first
            column and end at one, so columns of neighbouring heads may be copied too.
        """
        dtype = dtype or (f32 if self.spec.quantized else self.spec.data_dtype)
        made = ops.tile_load(
            self.ir, i32_value(b), i32_value(h), i32_value(first), i32_value(begin), i32_value(count),
            ops.TileRows(
                rows, columns, first_column, dtype, tail, None if descriptor is None else descriptor.ir,
                None if lists is None else lists.ir, rope, inline_scales, constant, existing, aligned,
            ),
        )  # fmt: skip
        return Tile(made, dtype, tuple(ir.RankedTensorType(made.type).shape))

    def _needs_scales(self, method: str) -> None:
        if self.spec.scale_dtype is None:
            raise TypeError(f"{method} needs a quantized {self.what} (one with scales), got {self!r}")

    def _elements(self, value: ir.Value, dtype: DType, width: int) -> Any:
        return wrap(value, dtype, width if width > 1 else 0)

    def _load(self, indices: list[ir.Value], width: int, dtype: DType | None, page: Any) -> Any:
        _check_width(width)
        dtype = dtype or (f32 if self.spec.quantized else self.spec.data_dtype)
        return self._elements(ops.load(self.ir, *indices, width=width, dtype=dtype, page=_page(page)), dtype, width)

    def _load_quantized(self, indices: list[ir.Value], width: int, page: Any) -> Any:
        self._has("load_raw")
        self._needs_scales("load_quantized")
        _check_width(width)
        value = ops.load_raw(self.ir, *indices, width=width, page=_page(page))
        return self._elements(value, self.spec.dtype.unit, width)

    def _load_scale(self, indices: list[ir.Value], width: int, page: Any) -> Any:
        if not layout.loads_no_scales(self.spec):
            self._needs_scales("load_scale")
        _check_width(width)
        value = ops.load_scale(self.ir, *indices, width=width, page=_page(page))
        return self._elements(value, layout.scale_type(self.spec), width)


class Cache(CacheReads):
    """The keys or the values of one layer."""

    __slots__ = ()
    what = "cache"

    def load(
        self, b: Any, h: Any, t: Any, d: Any, width: int = 1, dtype: DType | None = None, *, page: Any = None
    ) -> Any:
        """``width`` dequantized elements of the head from column ``d`` on: a vector, or a scalar for width 1.

        ``dtype`` is the storage type by default, f32 for a quantized cache.
        """
        return self._load(_indices(b, h, t, d), width, dtype, page)

    def load_quantized(self, b: Any, h: Any, t: Any, d: Any, width: int = 1, *, page: Any = None) -> Any:
        """``width`` stored values of a quantized cache, without dequantization; bytes of packed elements, u8."""
        return self._load_quantized(_indices(b, h, t, d), width, page)

    def load_scale(self, b: Any, h: Any, t: Any, d: Any, width: int = 1, *, page: Any = None) -> Any:
        """``width`` consecutive scales from granule d // granularity on, in the scale type."""
        return self._load_scale(_indices(b, h, t, d), width, page)

    def store(self, b: Any, h: Any, t: Any, d: Any, value: Any, oob: str = "drop", *, page: Any = None) -> None:
        """Write a scalar or vector of the storage type, or bytes (u8) of packed elements.

        ``oob`` says how a page outside the pool is handled: "drop" writes nothing, "trap" stops the kernel, "unchecked"
        omits the check.
        """
        value = as_value(value, self.spec.dtype.unit, "what is stored in a cache")
        ops.store(self.ir, *_indices(b, h, t, d), value=value.ir, oob=_oob(oob), page=_page(page))

    def store_scale(self, b: Any, h: Any, t: Any, d: Any, value: Any, oob: str = "drop", *, page: Any = None) -> None:
        """Write scales of the scale type from granule d // granularity on."""
        self._needs_scales("store_scale")
        value = as_value(value, self.spec.scale_dtype, "what is stored as a scale")
        ops.store_scale(self.ir, *_indices(b, h, t, d), value=value.ir, oob=_oob(oob), page=_page(page))

    def store_tile_rows(
        self, b: Any, h: Any, first: Any, value: Tile, count: Any = None, first_column: int = 0
    ) -> None:
        """Write a float tile to the tokens [first, first + rows) of head ``h``, converted to the storage type.

        Tokens from ``count`` on are not written, nor are tokens without a page. To a cache with scales whole heads are
        written, quantized as by ``kv.ops.append``.
        """
        if not isinstance(value, Tile) or len(value.shape) != 2 or 1 in value.shape or not value.dtype.is_float:
            raise TypeError(f"store_tile_rows writes a float matrix tile, got {describe(value)}")
        if not (self.spec.quantized or self.spec.dtype.is_float):
            raise TypeError(f"store_tile_rows writes caches of floats or with scales, got {self!r}: use store")
        end = i32_value(first + value.shape[0] if count is None else count, "count")
        ops.tile_store(self.ir, i32_value(b), i32_value(h), i32_value(first), end, value.ir, first_column)

    def store_tile(
        self,
        b: Any,
        h: Any,
        base: Any,
        valid: Any,
        source: Pointer,
        thread: Any,
        *,
        tile_rows: int,
        num_threads: int,
        swizzle: int = 0,
    ) -> None:
        """Copy this thread's share of a tile in shared memory to the tokens [base, base + valid) of a head."""
        _shared_pointer(source)
        ops.store_tile(
            self.ir, (i32_value(b), i32_value(h), i32_value(base), i32_value(valid)), source.ir, i32_value(thread),
            tile_rows=tile_rows, num_threads=num_threads, swizzle=swizzle,
        )  # fmt: skip


class Operand(CacheReads):
    """Keys or values as attention kernels read them: a cache, a cache's scales, a dense or a ragged buffer.

    Read-only. Indices are (b, t, h, d), with the token before the head.
    """

    __slots__ = ()
    what = "operand"

    @property
    def dtype(self) -> DType:
        """Type of the elements that loads return."""
        return self.spec.data_dtype

    @property
    def quantization_granularity(self) -> int:
        """Elements per scale, as in the host's operands; 0 for a ragged operand."""
        return 0 if self.spec.kind == RAGGED else self.spec.granularity

    def load(
        self, b: Any, t: Any, h: Any, d: Any, width: int = 1, dtype: DType | None = None, *, page: Any = None
    ) -> Any:
        """``width`` dequantized elements from column ``d`` on; for an operand of scales, scales from d's granule on."""
        return self._load(_indices(b, h, t, d), width, dtype, page)

    def load_quantized(self, b: Any, t: Any, h: Any, d: Any, width: int = 1, *, page: Any = None) -> Any:
        """``width`` stored values of an operand with scales, without dequantization."""
        return self._load_quantized(_indices(b, h, t, d), width, page)

    def load_scale(self, b: Any, t: Any, h: Any, d: Any, width: int = 1, *, page: Any = None) -> Any:
        """``width`` consecutive scales from granule d // granularity on; zeros for an operand without scales."""
        return self._load_scale(_indices(b, h, t, d), width, page)


def buffer_operand(buffer: Buffer, heads: int, size: int) -> Operand:
    """The rows of a buffer [T, heads * size] as an operand: one sequence of T tokens whose heads are column blocks.

    ``kv.buffer_operand(x, k // 64, 64).tile(0, j, first, x.shape[0], rows=128)`` is a tile of 128 rows and 64 columns
    from column 64 j on. The rows must be contiguous.
    """
    if not isinstance(buffer, Buffer) or buffer.rank != 2:
        raise TypeError(f"kv.buffer_operand takes a buffer of rank 2, got {describe(buffer)}")
    for name, n in (("heads", heads), ("size", size)):
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{name} must be a positive int known at compile time, got {describe(n)}")
    return Operand(ops.buffer_operand(buffer.ir, heads, size), layout.OperandData(DENSE, buffer.dtype, heads, size))


class Collection(Handle):
    """The keys and values of all layers of a pool."""

    __slots__ = ()
    what = "collection"

    def get_key_cache(self, layer: Any) -> Cache:
        """The keys of a layer."""
        return Cache(ops.key_cache(self.ir, _layer(layer)), self.spec)

    def get_value_cache(self, layer: Any) -> Cache:
        """The values of a layer; TypeError for an MLA collection."""
        if self.spec.is_mla:
            raise TypeError("get_value_cache needs a collection with values, got an MLA one: use a prefix of the keys")
        return Cache(ops.value_cache(self.ir, _layer(layer)), self.spec)


class Rows(OfTrace, TileRows[Value]):
    """Row indices of the pages in a tile, from ``populate``."""

    __slots__ = ("is_leader", "page_size", "pair_cta", "tile_rows")

    def __init__(
        self, value: ir.Value, tile_rows: int, page_size: int, pair_cta: bool = False, is_leader: bool = True
    ) -> None:
        self.ir, self.tile_rows, self.page_size = value, tile_rows, page_size
        self.pair_cta, self.is_leader = pair_cta, is_leader

    def get_row(self, offset: Any) -> Value:
        """Row of the tile's token ``offset``, u32."""
        if isinstance(plain(offset), int) and not 0 <= offset < self.tile_rows:
            raise IndexError(f"offset must be in [0, {self.tile_rows}), got {offset}")
        return Value(ops.get_row(self.ir, i32_value(offset)), u32)


def operand(cache: Any, scales: bool = False) -> Operand:
    """A cache as an attention operand: ``kv.KVCacheMHAOperand(cache)`` in a kernel.

    With ``scales``, an operand of its scales: ``kv.KVCacheScalesMHAOperand(cache)``.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{'KVCacheScalesMHAOperand' if scales else 'KVCacheMHAOperand'} needs a cache, got {describe(cache)}"
        )
    if scales:
        cache._needs_scales("KVCacheScalesMHAOperand")
    return Operand(ops.operand(cache.ir, scales), layout.scales_data(cache.spec) if scales else cache.spec)


def _indices(*values: Any) -> list[ir.Value]:
    return [i32_value(v) for v in values]


def _layer(layer: Any) -> ir.Value:
    if isinstance(layer, int) and layer < 0:
        raise IndexError(f"layer must not be negative, got {layer}")
    return i32_value(layer, "the layer")


def _page(page: Any) -> ir.Value | None:
    return None if page is None else i32_value(page, "the page")


def _oob(oob: str) -> str:
    if oob not in ("drop", "trap", "unchecked"):
        raise ValueError(f"oob must be drop, trap or unchecked, got {oob!r}")
    return oob


def _shared_pointer(pointer: Any) -> None:
    if not isinstance(pointer, Pointer) or pointer.space != SHARED:
        raise TypeError(f"a tile lies in shared memory: pass s.ptr() of a kv.shared array, got {describe(pointer)}")


def matches(value: Any, cls: Any) -> bool:
    """``isinstance`` for kernel values: handles match the names of their host-side classes."""
    if isinstance(cls, tuple):
        return any(matches(value, c) for c in cls)
    wanted = annotation_of(cls)
    if wanted is not None and isinstance(value, Handle):
        return value.what == wanted[0] and value.spec.kind in wanted[1]
    if isinstance(cls, DType):
        return isinstance(value, Numeric) and value.dtype is cls
    return isinstance(value, cls)
