# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The layout of every cache kind: static parameters, runtime fields, index formulas.

Pure Python, and the only place where strides are computed. The verifiers, the passes, the NumPy model and the loader
read it. The formulas use ``+ * // %`` only, so that they work on ints, on NumPy arrays and on values of a kernel.
Strides and offsets count elements.

``stride0`` (elements from one page to the next) is always a run-time value, since it depends on the layer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from . import dtypes, records
from .dtypes import DType
from .page_orders import added, reserved

PAGED, CONTINUOUS, FA3 = "paged", "continuous", "fa3"
KINDS = (PAGED, CONTINUOUS, FA3)
# What an attention operand may be besides a cache: a cache's scales, dense [B, S, H, D], ragged [tokens, H, D].
SCALES, DENSE, RAGGED = "scales", "dense", "ragged"
OPERAND_KINDS = (*KINDS, SCALES, DENSE, RAGGED)
reserved.update(OPERAND_KINDS)
KEY, VALUE = 0, 1
_MAX_I32 = 2**31 - 1


def cdiv(a: Any, b: Any) -> Any:
    """Quotient rounded up, for non-negative operands."""
    return (a + (b - 1)) // b


def align_up(x: int, multiple: int) -> int:
    """``x`` rounded up to a multiple of ``multiple``."""
    return cdiv(x, multiple) * multiple


def lowbit(x: int) -> int:
    """The lowest set bit: the largest power of two that divides ``x``."""
    return x & -x


@dataclass(frozen=True)
class CacheSpec:
    """The static parameters of a cache or collection: what a kernel is specialised for.

    Parameters
    ----------
    kind : {"paged", "continuous", "fa3"}, or one that another package has added (``page_orders``)
    dtype : DType
        Storage type.
    num_heads, head_size : int
        KV heads H and head size D.
    Tokens per page P; 0 for a continuous cache.
        Tokens per page, P; 0 for a continuous cache.
    is_mla : bool
        One latent head and no value half.
    scale_dtype : DType or None
        Type of the quantization scales; None when the cache is not quantized.
    granularity : int
        Consecutive elements of the head dimension that share one scale.
    strides : tuple of (int, int), optional
        Elements from one token slot of a page to the next, and from one head to the next. None: packed, tokens before
        heads (H*D and D); explicit strides of a packed cache are normalized to None. Other layouts, such as heads
        before tokens or keys and values in one row, need a paged cache. Scales are always packed.
    zero : bool
        Whether each scale is followed by a zero (``records.Record``).
    rotation : int
        Elements per rotated block (``records.Record``); 0 for none.
    """

    kind: str
    dtype: DType
    num_heads: int
    head_size: int
    page_size: int = 0
    is_mla: bool = False
    scale_dtype: DType | None = None
    granularity: int = 1
    strides: tuple[int, int] | None = None
    zero: bool = False
    rotation: int = 0

    kinds: ClassVar[tuple[str, ...]] = KINDS

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("scale_dtype", self.scale_dtype)):
            if not isinstance(dtype, DType) and (name == "dtype" or dtype is not None):
                raise TypeError(f"{name} must be a dtype such as kv.bf16, got {dtype!r}")
        if self.strides is not None:
            given = tuple(self.strides)
            object.__setattr__(self, "strides", None if given == (self.row_size, self.head_size) else given)
        for problem in spec_problems(self):
            raise ValueError(problem)

    @property
    def quantized(self) -> bool:
        return self.scale_dtype is not None

    @property
    def takes_tensor_scales(self) -> bool:
        """Whether append may divide by a scale that the caller keeps: elements of at most 8 bits without zeros."""
        return self.converted and not self.zero

    @property
    def record(self) -> records.Record:
        """What a token and head stores."""
        return records.Record(
            self.dtype, self.scale_dtype, self.granularity if self.quantized else 1, self.zero, self.rotation
        )

    @property
    def packed(self) -> bool:
        """Whether elements share bytes; element strides and offsets then point to whole bytes."""
        return self.dtype.packed

    @property
    def stored_size(self) -> int:
        """Units of memory per token and head: D elements, or the bytes that they share."""
        return self.dtype.units(self.head_size)

    @property
    def converted(self) -> bool:
        """Whether elements have at most 8 bits, which kernels convert to the query's type."""
        return self.dtype.bits <= 8

    @property
    def granules(self) -> int:
        """Groups of elements per token and head that share a scale: cdiv(D, granularity)."""
        return cdiv(self.head_size, self.granularity)

    @property
    def granule_scales(self) -> int:
        """Scales per granule: one, and its zero if there is one."""
        return 1 + self.zero

    @property
    def num_scales(self) -> int:
        """G, the scales per token and head, with their zeros."""
        return self.granules * self.granule_scales

    @property
    def row_size(self) -> int:
        """Elements per token: H*D."""
        return self.num_heads * self.head_size

    @property
    def token_stride(self) -> int:
        """Elements from one token slot to the next: H*D when packed."""
        return self.row_size if self.strides is None else self.strides[0]

    @property
    def head_stride(self) -> int:
        """Elements from one head of a token to the next: D when packed."""
        return self.head_size if self.strides is None else self.strides[1]

    @property
    def page_span(self) -> int:
        """Elements from a page's first to its last, including elements of other views in between."""
        return (self.page_size - 1) * self.token_stride + (self.num_heads - 1) * self.head_stride + self.head_size

    @property
    def scales_token_stride(self) -> int:
        return self.num_heads * self.num_scales

    @property
    def kv_dim(self) -> int:
        """Extent of the K|V dimension of the blocks."""
        return 1 if self.is_mla else 2

    @property
    def paged(self) -> bool:
        """Whether tokens are found through the lookup table's entry of their sequence and page."""
        return self.kind not in (CONTINUOUS, DENSE, RAGGED)

    @property
    def max_tile_size(self) -> int:
        return self.page_size if self.paged else -1

    @property
    def data_dtype(self) -> DType:
        """Type of what a load reads and a block pointer points to."""
        return self.dtype

    @property
    def data_size(self) -> int:
        """Data elements per token and head."""
        return self.head_size

    @property
    def of_cache(self) -> bool:
        """Whether the operand is a cache, with a lookup table."""
        return self.kind not in (DENSE, RAGGED)


@dataclass(frozen=True)
class OperandData(CacheSpec):
    """The static parameters of an attention operand that is not a cache.

    Kind ``"scales"`` has the parameters of a quantized cache, whose scales are the data. ``"dense"`` and ``"ragged"``
    have those of the buffer, with page size 0, and use the same index formulas: a sequence of a dense operand is a page
    of S slots; a row of a ragged operand is a page of one slot, and a sequence's first row serves as the page number of
    all its tokens.
    """

    kinds: ClassVar[tuple[str, ...]] = (SCALES, DENSE, RAGGED)

    @property
    def quantized(self) -> bool:
        """Whether loads dequantize. Loads of a scales operand do not, since the scales are the data."""
        return self.scale_dtype is not None and self.kind != SCALES

    @property
    def data_dtype(self) -> DType:
        return self.scale_dtype if self.kind == SCALES and self.scale_dtype is not None else self.dtype

    @property
    def data_size(self) -> int:
        return self.num_scales if self.kind == SCALES else self.head_size


def run_of(spec: CacheSpec) -> int:
    """Contiguous elements of a head."""
    return added[spec.kind].run(spec) if spec.kind in added else spec.head_size


def packed(spec: CacheSpec) -> CacheSpec:
    """The spec with packed tokens and heads; caches with equal packed specs can copy pages to each other."""
    return spec if spec.strides is None else replace(spec, strides=None)


def spec_class(kind: str) -> type[CacheSpec]:
    """The class of the specs of a kind."""
    return OperandData if kind in OperandData.kinds else CacheSpec


def scales_data(spec: CacheSpec) -> OperandData:
    """The parameters of an operand that shows a cache's scales; ValueError when it has none."""
    return OperandData(**{**vars(spec), "kind": SCALES})


# Methods (and their ops) that a kind of operand does not have, and the reason for the message.
_LACKS = {
    SCALES: {
        "load_raw": "the scales are the data: use kv.load",
        "load_tile": "a row of scales is no whole number of 16-byte chunks: use kv.load",
    },
    DENSE: {
        "load_pages": "it has no lookup table",
        "cache_lengths": "its lengths need not be in memory: use kv.cache_length",
        "max_prompt_length": "it knows nothing of the step's new tokens",
        "is_empty": "it knows nothing of the step's new tokens",
    },
    RAGGED: {
        "load_pages": "it has no lookup table",
        "cache_lengths": "its lengths are not in memory: use kv.cache_length",
        "max_prompt_length": "it knows nothing of the step's new tokens",
        "max_context_length": "its longest sequence is not known without reading all offsets",
        "is_empty": "it knows nothing of the step's new tokens",
    },
}


def operand_lacks(kind: str, method: str) -> str | None:
    """Why a kind of operand does not have a method (an op's name without ``kv.``); None when it has it."""
    return _LACKS.get(kind, {}).get(method)


def scale_type(spec: CacheSpec) -> DType:
    """Type of what ``load_scale`` gives: the data's type where an operand has no scales, and zeros are loaded."""
    return spec.scale_dtype or spec.dtype


def loads_no_scales(spec: CacheSpec) -> bool:
    """Whether ``load_scale`` gives zeros: for every operand except caches and dense buffers with scales."""
    return spec.kind in (SCALES, RAGGED) or (spec.kind == DENSE and not spec.quantized)


def spec_problems(spec: CacheSpec) -> list[str]:
    """What is wrong with a spec, one sentence per problem; empty when it is legal."""
    found = []
    order = None if isinstance(spec, OperandData) else added.get(spec.kind)
    if spec.kind not in spec.kinds and order is None:
        return [f"kind must be one of {', '.join((*spec.kinds, *added))}, got {spec.kind!r}"]
    if spec.num_heads < 1 or spec.head_size < 1:
        found.append(f"num_heads and head_size must be positive, got {spec.num_heads} and {spec.head_size}")
    # Indices within a token and a page are 32-bit in kernels.
    if spec.row_size > _MAX_I32 or max(spec.page_size, spec.granularity) > _MAX_I32:
        found.append(
            "num_heads * head_size, page_size and granularity must be below 2^31, got "
            f"{spec.num_heads} * {spec.head_size}, {spec.page_size} and {spec.granularity}"
        )
    if spec.paged and spec.page_size < 1:
        found.append(f"page_size of a {spec.kind} cache must be positive, got {spec.page_size}")
    if not spec.paged and spec.page_size != 0:
        what = "continuous cache" if spec.of_cache else f"{spec.kind} operand"
        found.append(f"page_size of a {what} must be 0, got {spec.page_size}")
    if spec.strides is not None:
        found += _stride_problems(spec)
    if spec.is_mla and spec.num_heads != 1:
        found.append(f"num_heads of an MLA cache must be 1, got {spec.num_heads}")
    if spec.is_mla and spec.kind == FA3:
        found.append("is_mla must be false for an fa3 cache, whose blocks always contain K and V")
    if spec.kind == SCALES and spec.scale_dtype is None:
        found.append("a scales operand must have a scale type, got none")
    if spec.scale_dtype is not None and (spec.kind in (CONTINUOUS, FA3) or order is not None):
        found.append(f"scales need a paged cache, got a {spec.kind} one")
    found += records.problems(
        spec.dtype, spec.scale_dtype, spec.granularity, spec.zero, spec.rotation, spec.head_size, of_cache=spec.of_cache
    )
    if spec.packed and (spec.kind != PAGED or spec.is_mla or spec.strides is not None):
        got = f"a {spec.kind} one" if spec.kind != PAGED else "latent rows" if spec.is_mla else "other strides"
        found.append(
            f"elements of {spec.dtype.name} need a paged cache of keys and values with packed heads, got {got}"
        )
    problem = order.problem(spec) if order is not None and not found else None
    return found if problem is None else [problem]


def element_alignment(dtype: DType, head_size: int) -> int:
    """Elements that all strides and first elements must be a multiple of, so that heads are read as vectors.

    The largest power of two that divides the head size in bytes, at most 16, divided by the bytes of an element.
    """
    return max(min(16, lowbit(head_size * dtype.itemsize)) // dtype.itemsize, 1)


def _stride_problems(spec: CacheSpec) -> list[str]:
    """What is wrong with a spec's token and head strides."""
    if spec.kind not in (PAGED, SCALES):
        return [f"strides need a paged cache, got a {spec.kind} one, whose tokens are packed"]
    if len(spec.strides or ()) != 2 or not all(isinstance(s, int) and 0 < s <= _MAX_I32 for s in spec.strides or ()):
        return [f"strides must be two, of tokens and heads, from 1 to 2^31 - 1, got {spec.strides}"]
    multiple = element_alignment(spec.dtype, spec.head_size)
    if any(s % multiple for s in spec.strides or ()):
        return [
            f"strides must be multiples of {multiple} elements (heads of {spec.head_size} are read as vectors), "
            f"got {spec.strides}"
        ]
    span = spec.head_size
    for stride, extent in sorted(((spec.token_stride, spec.page_size), (spec.head_stride, spec.num_heads))):
        if extent > 1 and stride < span:
            return [f"heads of a page must not overlap: a stride must be at least {span}, got {spec.strides}"]
        span += (extent - 1) * stride
    return []


# --- run-time fields -----------------------------------------------------------------------------


class Field(NamedTuple):
    """One run-time part of a cache or collection: a kernel parameter after ``flatten-kv-types``."""

    name: str
    type: str  # "ptr", "i32" or "i64"
    doc: str


_SHARED = (
    Field("stride0", "i64", "elements from one page (or sequence region) to the next"),
    Field("num_blocks", "i32", "N, physical pages with the null page counted"),
    Field("capacity", "i32", "token slots of one page or region: P, or S_max when continuous"),
    Field("lookup", "ptr", "lookup table: [B, columns] (paged, fa3) or [B] (continuous), 32-bit"),
    Field("lookup_stride", "i64", "entries from one sequence's row of the table to the next"),
    Field("lookup_columns", "i32", "entries of one row"),
    Field("lengths", "ptr", "cache lengths, [B], 32-bit: tokens cached before this step"),
    Field("batch", "i32", "B, sequences"),
    Field("max_seq_length", "i32", "longest count of new tokens in the batch"),
    Field("max_cache_length", "i32", "longest cached + new tokens in the batch"),
)
_CACHE = (Field("base", "ptr", "first element of this layer's K or V"), *_SHARED)
_CACHE_SCALES = (
    Field("scales", "ptr", "first scale of this layer's K or V"),
    Field("scales_stride0", "i64", "scales from one page to the next"),
)
_COLLECTION = (
    Field("blocks", "ptr", "first element of the pool"),
    *_SHARED,
    Field("num_layers", "i32", "L"),
    Field("kv_stride", "i64", "elements from K to V"),
    Field("layer_stride", "i64", "elements from one layer to the next (0 for fa3)"),
    Field("lookup_layer_stride", "i64", "table entries from one layer to the next (fa3; else 0)"),
)
_COLLECTION_SCALES = (
    Field("scales", "ptr", "first scale of the pool"),
    Field("scales_stride0", "i64", "scales from one page to the next"),
    Field("scales_kv_stride", "i64", "scales from K to V"),
    Field("scales_layer_stride", "i64", "scales from one layer to the next"),
)
_BUFFER = (
    Field("base", "ptr", "first element of the buffer"),
    Field("stride0", "i64", "elements from one sequence (dense) or row (ragged) to the next"),
    Field("num_blocks", "i32", "B (dense), or rows (ragged)"),
    Field("capacity", "i32", "S (dense), or 1 (ragged)"),
    Field("batch", "i32", "B, sequences"),
)
_DENSE = (*_BUFFER, Field("lengths", "ptr", "tokens of each sequence, [B], 32-bit; null: S of all"))
_RAGGED = (*_BUFFER, Field("offsets", "ptr", "first row of each sequence, [B + 1], 32-bit"))


def cache_fields(spec: CacheSpec) -> tuple[Field, ...]:
    """Run-time fields of a cache, in parameter order."""
    return _CACHE + (_CACHE_SCALES if spec.quantized else ())


def operand_fields(spec: CacheSpec) -> tuple[Field, ...]:
    """Run-time fields of an attention operand, in parameter order: those of its cache, or of its buffer."""
    first = {DENSE: _DENSE, RAGGED: _RAGGED}.get(spec.kind, _CACHE)
    return first + (() if spec.scale_dtype is None else _CACHE_SCALES)


def collection_fields(spec: CacheSpec) -> tuple[Field, ...]:
    """Run-time fields of a collection, in parameter order."""
    return _COLLECTION + (_COLLECTION_SCALES if spec.quantized else ())


HANDLE_FIELDS = {"cache": cache_fields, "collection": collection_fields, "operand": operand_fields}


def buffer_fields(rank: int) -> tuple[Field, ...]:
    """Run-time fields of a buffer argument. The last dimension is contiguous: it has no stride."""
    return (
        Field("data", "ptr", "first element"),
        *(Field(f"shape{i}", "i64", f"extent of dimension {i}") for i in range(rank)),
        *(Field(f"stride{i}", "i64", f"elements from index to index of dimension {i}") for i in range(rank - 1)),
    )


# --- index formulas ------------------------------------------------------------------------------


def page_and_slot(spec: CacheSpec, token: Any) -> tuple[Any, Any]:
    """Column of the lookup table and slot in the page of a token: (t // P, t % P); (0, t) when continuous."""
    return (token // spec.page_size, token % spec.page_size) if spec.paged else (0, token)


# Kernels count tokens in 32 bits. Half of that range leaves room to add a step's tokens to a position, and for a loop
# variable to step past its end.
MAX_TOKENS = 2**30


def token_capacity(spec: CacheSpec, lookup_columns: Any, slots: Any) -> Any:
    """The most tokens of a sequence: what its row of the table can name, or what its region has room for.

    At most :data:`MAX_TOKENS`, which is checked when a cache is made.
    """
    return lookup_columns * spec.page_size if spec.paged else slots


def element_offset(spec: CacheSpec, block: Any, slot: Any, head: Any, dim: Any, stride0: Any) -> Any:
    """Element of (page, slot, head, dim) from the view's base: E = blk*stride0 + s*ts + h*hs + d.

    ts and hs are the spec's token and head strides: H*D and D when packed. Added kinds have their own formulas.
    """
    if spec.kind in added:
        return block * stride0 + added[spec.kind].element(spec, slot, head, dim)
    return block * stride0 + slot * spec.token_stride + head * spec.head_stride + dim


def joined(run: int, dims: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """Merge into a contiguous run every dimension that continues it in all layouts.

    Parameters
    ----------
    run : int
    dims : sequence of (extent, strides)
        One stride per layout.

    Returns
    -------
    tuple
        The contiguous elements in all layouts; the remaining dimensions, the fastest of the first layout first.
    """
    left = sorted(((n, s) for n, s in dims if n != 1), key=lambda dim: dim[1][0])
    while True:
        found = next((dim for dim in left if all(s == run for s in dim[1])), None)
        if found is None:
            return run, left
        left.remove(found)
        run *= found[0]


def scale_offset(spec: CacheSpec, block: Any, slot: Any, head: Any, dim: Any, stride0: Any) -> Any:
    """Scale of (page, slot, head, dim) from the scales' base: of granule dim // granularity, before its zero."""
    row = block * stride0 + slot * spec.scales_token_stride + head * spec.num_scales
    return row + dim // spec.granularity * spec.granule_scales


def row_stride(spec: CacheSpec, stride0: Any) -> Any:
    """Rows from one page to the next. A row is one token stride: H*D elements in a packed cache."""
    return stride0 // spec.token_stride


def num_rows(spec: CacheSpec, num_blocks: Any, capacity: Any, stride0: Any) -> Any:
    """Rows that the view spans: (N-1)*S + P. Needs N >= 1."""
    return (num_blocks - 1) * row_stride(spec, stride0) + capacity


def tma_row(spec: CacheSpec, encoded: Any, stride0: Any) -> Any:
    """Row of an encoded index page*P + slot: (enc // P)*S + enc % P; the identity when continuous.

    Callers handle a negative index themselves: it stays negative and must not be loaded.
    """
    if not spec.paged:
        return encoded
    return (encoded // spec.page_size) * row_stride(spec, stride0) + encoded % spec.page_size


# --- populate ------------------------------------------------------------------------------------


def effective_page(tile_rows: int, page_size: int) -> int:
    """Rows of one sub-tile: the tile if a page contains all of it, otherwise the page."""
    return tile_rows if page_size <= 0 or page_size >= tile_rows else page_size


def populate_pages(tile_rows: int, page_size: int) -> int:
    """Sub-tiles per tile, which is the number of entries of the rows value."""
    return tile_rows // effective_page(tile_rows, page_size)


def populate_problems(tile_rows: int, page_size: int, base_alignment: int | None, pair_cta: bool = False) -> list[str]:
    """What is wrong with the static parameters of a populate; empty when they are legal."""
    found = []
    if tile_rows < 1:
        return [f"tile rows must be positive, got {tile_rows}"]
    if page_size > 0 and page_size % tile_rows and tile_rows % page_size:
        return [f"tile rows and page size must divide one another, got {tile_rows} and {page_size}"]
    pages = populate_pages(tile_rows, page_size)
    if base_alignment is not None and base_alignment < 1:
        return [f"base alignment must be positive, got {base_alignment}"]
    if pages > 16:
        found.append(f"a tile must span at most 16 pages (the lookup table's padding), got {pages}")
    if pages > 1 and (tile_rows if base_alignment is None else base_alignment) % page_size:
        found.append(
            f"base alignment must be a multiple of the page size {page_size} when a tile spans "
            f"several pages, got {base_alignment}"
        )
    if pair_cta and pages > 1 and pages % 2:
        found.append(f"pair_cta needs one page per tile or an even number, got {pages}")
    if pair_cta and tile_rows % 2:
        found.append(f"pair_cta needs an even number of tile rows, got {tile_rows}")
    return found


def populate_chunk(tile_rows: int, page_size: int, base_alignment: int | None) -> int:
    """Table entries that one vector load of a populate reads; 1 for a scalar one.

    min(lowbit(pages), lowbit(base_alignment // P), 8), so that each chunk is aligned to its own size.
    """
    pages = populate_pages(tile_rows, page_size)
    if pages == 1:
        return 1
    alignment = tile_rows if base_alignment is None else base_alignment
    return min(lowbit(pages), lowbit(alignment // page_size), 8)


class TileCopy(NamedTuple):
    """Consecutive rows of a tile that one copy moves."""

    entry: int  # the page, as an index of the populated rows
    skipped: int  # rows of the page before the first copied row
    at: int  # destination row, in the copied (sub-)tile, of the first copied row
    rows: int


def key_copies(tile_rows: int, page_size: int, pair_cta: bool = False, is_leader: bool = True) -> tuple[TileCopy, ...]:
    """What a CTA copies of a key tile: all of it; in a CTA pair, the leader copies the first half of it."""
    pages, half = populate_pages(tile_rows, page_size), tile_rows // 2
    peer = pair_cta and not is_leader
    return _copies_of(
        half if pair_cta else tile_rows,
        page_size,
        pages // 2 if peer and pages > 1 else 0,
        half if peer and pages == 1 else 0,
    )


def value_copies(tile_rows: int, page_size: int, part: int = 0, parts: int = 1) -> tuple[TileCopy, ...]:
    """What a CTA copies of one of ``parts`` equal parts of a value tile along its rows."""
    if parts < 1 or tile_rows % parts or not 0 <= part < parts:
        raise ValueError(
            f"a value tile of {tile_rows} rows must have a divisor of parts and a part of them, got {part} of {parts}"
        )
    pages, rows = populate_pages(tile_rows, page_size), tile_rows // parts
    if page_size > 0 and rows % effective_page(rows, page_size):
        raise ValueError(f"parts of a value tile must be whole pages or be in one, got {rows} rows of {page_size}")
    if pages >= parts:
        return _copies_of(rows, page_size, part * (pages // parts), 0)
    # Several parts are in one page.
    per_page = parts // pages
    return _copies_of(rows, page_size, part // per_page, part % per_page * rows)


def _copies_of(rows: int, page_size: int, entry: int, skipped: int) -> tuple[TileCopy, ...]:
    issue = effective_page(rows, page_size)
    return tuple(TileCopy(entry + p, skipped, p * issue, issue) for p in range(rows // issue))


def lookup_columns(tokens: int, page_size: int) -> int:
    """Padded columns of a lookup table for sequences of up to ``tokens``: align_up(pages, 8) + 16.

    Rows of a multiple of 8 entries keep every 8-entry vector load 32-byte aligned; the 16 extra entries let a load of a
    whole tile's entries run past the last page without leaving the row.
    """
    return align_up(cdiv(tokens, page_size), 8) + 16


def spec_of(kind: str, dtype: Any, num_heads: int, head_size: int, **rest: Any) -> CacheSpec:
    """A spec from any form of dtype (kvarn, NumPy, torch, name)."""
    scale = rest.pop("scale_dtype", None)
    return spec_class(kind)(
        kind,
        dtypes.stored(dtype),
        num_heads,
        head_size,
        scale_dtype=None if scale is None else dtypes.of(scale),
        **rest,
    )


# --- specs of collections and operands, in place of the values when a kernel is specialised -----------


@dataclass(frozen=True)
class CollectionSpec:
    """The static parameters of a collection, which are those of its caches."""

    cache: CacheSpec


@dataclass(frozen=True)
class OperandSpec:
    """The static parameters of an attention operand: those of the cache that it wraps, or an ``OperandData``."""

    cache: CacheSpec
