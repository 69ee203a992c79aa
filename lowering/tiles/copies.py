# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of paged cache tiles row by row with cp.async, for distribute-kv-tiles.

The page is looked up per chunk of a row, so pages may have any size. Elements that need no conversion are copied to the
stage. 8-bit elements that products need in 16 bits are *staged*: a thread copies chunks and their scales to its own
part of staging memory, and converts the same chunks once they have arrived, so that no thread waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import DType, f8e4m3, f8e5m2, f32, i8, i32, u4
from kvarn.dialect.layout import CacheSpec, align_up, cdiv
from kvarn.dialect.ops.tile import SHARED_TRANSPOSED, row_format
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, math as kv_math, ptx
from kvarn.dsl.memory import GLOBAL, SHARED, Pointer
from kvarn.dsl.values import Value, vector, where
from kvarn.lowering.target import Target

from .dequantize import converted
from .ir import SWIZZLE, WARPGROUP, element, layout_of, shape
from .threads import scalar

SLOTS = 2  # staging tiles per buffer, unless the schedule has staging_stages
LEAST_PAGE = 8  # the fewest tokens of a page that is copied with one lookup and a constant stride


def row_unit(spec: CacheSpec, columns: int, first_column: int = 0) -> int:
    """The widest cp.async, 16 or 8 bytes, that divides rows of these columns and their addresses; 0 if none does."""
    for unit in (16, 8):
        places = (columns, first_column, spec.head_size, spec.head_stride, spec.token_stride)
        if not any(x * spec.dtype.bits % (8 * unit) for x in places):
            return unit
    return 0


def why_not_by_rows(spec: CacheSpec, columns: int, first_column: int = 0) -> str | None:
    """Why tiles cannot be copied row by row without conversion; None if they can."""
    if not spec.paged or not spec.of_cache:
        return "only caches in pages are looked up row by row"
    if row_unit(spec, columns, first_column) != CHUNK:
        return f"{columns} columns of {spec.dtype.name} are no whole copies of {CHUNK} bytes"
    return None


def fits_pages(spec: CacheSpec, rows: int, columns: int, first_column: int = 0) -> bool:
    """Whether threads can copy a tile unconverted with one lookup per page and a constant stride within the page.

    For pages below ``LEAST_PAGE`` tokens, one address per row is cheaper.
    """
    whole = first_column == 0 and columns == spec.head_size and row_unit(spec, columns) == CHUNK
    page = spec.page_size
    return whole and (not page or (page >= LEAST_PAGE and (page % rows == 0 or rows % page == 0)))


def why_not_staged(spec: CacheSpec, columns: int, first_column: int = 0) -> str | None:
    """Why tiles cannot be converted from staging memory; None if they can."""
    if not spec.paged or not spec.of_cache:
        return "only caches in pages are looked up row by row"
    if spec.dtype not in (f8e4m3, f8e5m2, i8, u4):
        return f"only elements of 8 bits and u4 are staged, got {spec.dtype.name}"
    unit = row_unit(spec, columns, first_column)
    if not unit or (spec.zero and unit != CHUNK):
        return f"{columns} columns of {spec.dtype.name} are no whole copies of {CHUNK if spec.zero else 8} bytes"
    if spec.zero:  # a group is whole chunks
        return None
    if spec.quantized and (spec.scale_dtype is not f32 or not scales_of(spec, unit)):
        assert spec.scale_dtype is not None
        return f"{unit} elements have no whole scales of f32: {spec.scale_dtype.name} in granules of {spec.granularity}"
    return None


def scales_of(spec: CacheSpec, unit: int) -> int:
    """Words of scales per chunk of ``unit`` bytes: 1, 2 or 4; 0 without scales or for another number.

    A word is an f32, or the f16 scale and zero of a group, of which a chunk is a part.
    """
    granule = spec.granularity
    if not spec.quantized:
        return 0
    if spec.zero:
        return 1
    if granule >= spec.head_size or granule % unit == 0:
        return 1
    return unit // granule if unit % granule == 0 and unit // granule in (2, 4) else 0


def staging_bytes(spec: CacheSpec, rows: int, columns: int, threads: int, slots: int) -> int:
    """Bytes of staging memory of a buffer whose tiles ``threads`` threads convert."""
    unit = row_unit(spec, columns)
    chunks = align_up(rows * cdiv(columns * spec.dtype.bits, 8 * unit), threads)
    return slots * chunks * (unit + 4 * scales_of(spec, unit))


# --- how a load's tile is copied --------------------------------------------------------------------


def copy_of(op: Any, target: Target, by_tma: bool, elements: str | None = None) -> str:
    """How the tile of a load is copied: ``tma``, ``cp_async``, ``staged``, ``transposed`` or ``convert``.

    ``by_tma``: whether a descriptor, if there is one, is used; ``elements``: the element type in shared memory, if it
    differs from the tile's.
    """
    spec, elements = types.spec_of(op.cache.type), elements or str(element(op.tile))
    if layout_of(op.tile.type) == SHARED_TRANSPOSED:
        return "transposed"
    stored = spec.data_dtype.mlir == elements  # scales are kept apart from the data
    if op.descriptor is not None and by_tma:
        return "tma" if stored else "staged"
    if of_pool(op):
        whole = why_not_by_rows(spec, shape(op.tile)[1], op.first_column.value) is None
        return "cp_async" if stored and whole and shape(op.tile)[0] <= WARPGROUP else "convert"
    (rows, columns), page, first = shape(op.tile), spec.page_size, op.first_column.value
    if stored and (why_not_by_rows(spec, columns, first) is None or by_pages(op, by_tma)):
        return "cp_async"
    converts = elements in ("bf16", "f16") and (spec.dtype is not f8e4m3 or target.has("f8_convert"))
    if not stored and converts and why_not_staged(spec, columns, first) is None:
        return "staged"
    whole = columns == spec.data_size and spec.data_dtype.bytes_of(columns) % SWIZZLE == 0
    paged = not page or page % rows == 0 or rows % page == 0
    return "cp_async" if stored and whole and paged and first == 0 else "convert"


def by_pages(op: Any, by_tma: bool) -> bool:
    """Whether a tile that needs no conversion is copied page by page instead of row by row."""
    spec, (rows, columns) = types.spec_of(op.cache.type), shape(op.tile)
    return op.lists is None and not by_tma and fits_pages(spec, rows, columns, op.first_column.value)


def of_pool(op: Any) -> bool:
    """Whether rows are addressed by lists (sparse indices), or have a record format."""
    return op.lists is not None or not row_format(op, types.spec_of(op.cache.type)).plain


# --- chunks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunks:
    """The chunks of a tile, ``unit`` bytes each in the cache, and the assignment of chunks to threads."""

    layout: SharedLayout
    unit: int
    columns: int  # per chunk
    threads: int

    @property
    def of_row(self) -> int:
        return self.layout.columns // self.columns

    @property
    def total(self) -> int:
        return self.layout.rows * self.of_row

    @property
    def of_thread(self) -> int:
        return cdiv(self.total, self.threads)

    @property
    def together(self) -> int:
        """Chunks per thread with addresses in registers at a time: fewer with several warpgroups."""
        return 4 if self.threads <= WARPGROUP else 3 if self.of_thread % 3 == 0 else 2

    def number(self, thread: Value, s: Any) -> Value:
        """The index of a thread's s-th chunk; past the last chunk, the last one again."""
        i = thread + s * self.threads
        i = kv_math.min(i, self.total - 1) if self.total % self.threads else i
        return Value(i.ir, i32, nonneg=True)

    def place(self, i: Value) -> tuple[Value, Value]:
        """(row, chunk within the row) of an index. Eight lanes write their chunks without bank conflicts."""
        n = self.of_row
        if self.columns * self.layout.itemsize == 4 * CHUNK and self.layout.rows % 8 == 0:
            # Eight lanes write the same chunk of eight rows.
            rest = i >> 3
            return (i & 7) | (rest // n << 3), rest % n
        if (
            self.columns * self.layout.itemsize == 2 * CHUNK
            and n >= 2
            and n & (n - 1) == 0
            and self.layout.rows % 8 == 0
        ):
            # The bits of the chunk: bit 0 of the index, and the bits of the index above two bits of the row.
            bits = n.bit_length() - 1
            rest = i >> 3
            chunk = (i & 1) | ((rest & (n // 2 - 1)) << 1)
            rest = rest >> (bits - 1)
            row = ((i >> 1) & 1) | ((rest & 1) << 1) | (i & 4) | ((rest >> 1) << 3)
            return row, chunk
        return i // n, i % n


def chunks_of(op: Any, layout: SharedLayout, threads: int) -> Chunks:
    """The chunks of the tile that a ``kv.copy_start`` copies."""
    spec = types.spec_of(op.cache.type)
    unit = row_unit(spec, layout.columns, op.first_column.value)
    return Chunks(layout, unit, 8 * unit // spec.dtype.bits, threads)


def start_chunks(op: Any, chunks: Chunks, thread: Value, target: Any) -> None:
    """Start the copies of this thread's chunks, with zeros for tokens past the end.

    ``target(s, row, chunk)``: (the pointer to copy the chunk to, the pointer to copy its scales to or None).
    """
    spec = types.spec_of(op.cache.type)
    first, count = scalar(op.first), scalar(op.count)
    last = kv_math.max(count - 1, 0)
    scales = scales_of(spec, chunks.unit)
    # Columns past the head size are zeros; the memory there is not read.
    past = op.first_column.value + chunks.layout.columns > spec.head_size

    def some(begin: Any, many: int) -> None:
        places, sources = [], []
        for u in range(many):
            row, chunk = chunks.place(chunks.number(thread, begin + u))
            token = first + row
            at = Value(kv_math.max(kv_math.min(token, last), 0).ir, i32, nonneg=True)
            places.append((row, chunk, token, at, ops.page(op.cache, op.batch, at.ir)))
        for _, chunk, _, at, page in places:
            column = chunk * chunks.columns + op.first_column.value
            sources.append(ops.block_ptr(op.cache, op.batch, at.ir, op.head, column.ir, page=page))
        for u, (row, chunk, token, at, page) in enumerate(places):
            exists = token < count
            if past:
                exists = exists & (chunk * chunks.columns + op.first_column.value < spec.head_size)
            to, to_scales = target(begin + u, row, chunk)
            ptx.cp_async(to, Pointer(sources[u], GLOBAL), chunks.unit, zero_fill_size=where(exists, chunks.unit, 0))
            if scales:
                column = chunk * chunks.columns + op.first_column.value
                source = ops.scale_block_ptr(op.cache, op.batch, at.ir, op.head, column.ir, page)
                ptx.cp_async(
                    to_scales, Pointer(source, GLOBAL), 4 * scales, zero_fill_size=where(exists, 4 * scales, 0)
                )

    many = chunks.together
    whole = chunks.of_thread // many
    if whole > 1:
        with functional.loop(0, whole * many, many) as s:
            some(s, many)
    for s in range((whole if whole > 1 else 0) * many, chunks.of_thread, many):
        some(s, min(many, chunks.of_thread - s))


class Staging:
    """The staging memory of a buffer: ``slots`` unconverted tiles, each thread's chunks at its own addresses."""

    def __init__(self, op: Any, layout: SharedLayout, threads: int, slots: int) -> None:
        """Allocate the staging memory of the buffer that a ``kv.copy_start`` fills."""
        self.spec, self.chunks = types.spec_of(op.cache.type), chunks_of(op, layout, threads)
        self.scales = scales_of(self.spec, self.chunks.unit)
        self.slots, self.memory = slots, Pointer(ops.alloc_shared(slots * self.slot_bytes, CHUNK), SHARED)

    @property
    def all_chunks(self) -> int:
        return self.chunks.threads * self.chunks.of_thread

    @property
    def slot_bytes(self) -> int:
        return self.all_chunks * (self.chunks.unit + 4 * self.scales)

    def place(self, n: Value, thread: Value, s: Any) -> tuple[Pointer, Pointer | None]:
        """Pointers to a thread's s-th chunk of use ``n`` and to its scales."""
        slot = self.memory + (n & (self.slots - 1)) * self.slot_bytes
        i = thread + s * self.chunks.threads
        data = slot + i * self.chunks.unit
        return data, (slot + (i * (4 * self.scales) + self.all_chunks * self.chunks.unit) if self.scales else None)

    def start(self, op: Any, n: Value, thread: Value) -> None:
        """Start the copies of this thread's chunks of use ``n``."""
        start_chunks(op, self.chunks, thread, lambda s, row, chunk: self.place(n, thread, s))
        ptx.cp_async_commit()

    def initialize(self) -> None:
        """Initialize barriers: there are none."""

    def finish(self, n: Value, thread: Value, pending: int, tile: Pointer, dtype: DType) -> None:
        """Wait for the copies of use ``n``, leaving ``pending`` later groups in flight, and convert them."""
        ptx.cp_async_wait(pending)
        self.convert(n, thread, tile, dtype)

    def convert(self, n: Value, thread: Value, tile: Pointer, dtype: DType) -> None:
        """Convert this thread's chunks of use ``n``, several per iteration, and write them to a tile."""
        chunks = self.chunks
        many = next(m for m in range(chunks.together, 0, -1) if chunks.of_thread % m == 0)
        with functional.loop(0, chunks.of_thread, many) as s:
            held = []
            for u in range(many):
                data, scales = self.place(n, thread, s + u)
                words = data.load(i32, chunks.unit // 4)
                factors = []
                if scales is not None:
                    factors = elements_of(scales.load(i32 if self.spec.zero else f32, self.scales))
                held.append(([words[i] for i in range(chunks.unit // 4)], factors))
            for u, (words, factors) in enumerate(held):
                row, chunk = chunks.place(chunks.number(thread, s + u))
                found = converted(words, factors, self.spec.dtype, dtype)
                per_chunk = CHUNK // 4
                for p in range(0, len(found), per_chunk):
                    at = chunks.layout.chunk_offset(row, chunk * (len(found) // per_chunk) + p // per_chunk)
                    (tile + at).store(vector(i32, found[p : p + per_chunk]))


def elements_of(value: Any) -> list[Value]:
    """The elements of a vector; of a scalar, itself."""
    return [value[i] for i in range(value.lanes)] if value.lanes else [value]
