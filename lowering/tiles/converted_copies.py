# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of caches that are copied to shared memory through registers, with conversion: for distribute-kv-tiles.

A thread has 16-byte chunks of the products' operands, several in flight at a time: elements with their scales, and the
bf16 keys of rows that contain them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn.dialect.dtypes import DType, f32, i32
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import cdiv, lowbit
from kvarn.dialect.ops.tile import TILE_COLUMN, number_of, row_format
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, math as kv_math
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, cast, vector, where

from .cache_rows import load_width, place_in_pool, read_rope, read_row
from .threads import scalar

TOGETHER = 3  # chunks of a thread that are in flight at a time
TOGETHER_CONCATENATED = 4  # the same for columns next to another copy's, which have few chunks

Load = Callable[[Any, Any, Value], Any]  # (token, its page or None, column) to a chunk


def convert_rows(
    op: Any, cache: Any, layout: SharedLayout, tile: Pointer, dtype: DType, thread: Value, threads: int,
    entry_of: Callable[[Any, Value], Value],
) -> None:  # fmt: skip
    """Load the tile of a ``kv.copy_start``, convert it and store it; rows past the end are zeros.

    ``entry_of`` (op, token) reads the copy's lists.
    """
    row, width, begin = row_format(op, cache.spec), CHUNK // layout.itemsize, op.first_column.value
    before = number_of(op, TILE_COLUMN, 0)  # columns of the tile that another copy fills
    first, count, batch, head = (scalar(x) for x in (op.first, op.count, op.batch, op.head))
    end = begin + layout.columns - before

    whole = row.size % width == 0  # chunks of a head

    def elements(token: Any, page: Any, column: Value) -> Any:
        if not whole:
            return cast(in_parts(row, cache, batch, head, token, column, width, page), dtype)
        if row.plain:
            return dequantized(cache, batch, head, token, column, width, dtype, page)
        return cast(read_columns(row, cache, batch, head, token, column, width, page), dtype)

    def behind(token: Any, page: Any, column: Value) -> Any:
        return cast(read_rope(row, cache, batch, head, token, column, width, page), dtype)

    def some(i: list[Value], columns: tuple[int, int], load: Load) -> None:
        chunks, found = (columns[1] - columns[0]) // width, []
        for n in i:
            at, chunk = n // chunks, n % chunks + (columns[0] - begin) // width
            token = first + at
            there, page, exists = kv_math.max(kv_math.min(token, count - 1), 0), None, token < count
            if op.lists is not None:
                there, page, exists = place_in_pool(cache, entry_of(op, token))
            elif not row.plain:
                page = cache.page(batch, there)
            column = begin + chunk * width
            if whole and columns[1] > row.size:  # columns past the head are zeros
                exists, column = exists & (column < row.size), kv_math.min(column, row.size - width)
            found.append((layout.chunk_offset(at, chunk + before // width), exists, load(there, page, column)))
        for place, exists, loaded in found:
            (tile + place).store(where(exists, loaded, vector(dtype, width)))

    middle = min(max(row.content, begin), end) if row.rope else end
    for columns, load in (((begin, middle), elements), ((middle, end), behind)):
        if columns[0] == columns[1]:
            continue
        total = layout.rows * (columns[1] - columns[0]) // width
        of_thread = cdiv(total, threads)
        many = max(m for m in range(1, (TOGETHER_CONCATENATED if before else TOGETHER) + 1) if of_thread % m == 0)
        with functional.loop(0, of_thread, many) as s:
            numbers = [thread + (s + u) * threads for u in range(many)]
            if total % threads:  # past the last chunk, the last one is copied again, which is harmless
                numbers = [kv_math.min(n, total - 1) for n in numbers]
            some([Value(n.ir, i32, nonneg=True) for n in numbers], columns, load)


def in_parts(
    row: RowFormat, cache: Any, b: Value, head: Value, token: Any, column: Value, width: int, page: Any
) -> Any:
    """As :func:`read_columns`, of a head that ends within a chunk: columns past it are zeros."""
    own, found = load_width(row.spec, min(width, lowbit(row.size))), []
    for at in range(0, width, own):
        here = kv_math.min(column + at, row.size - own)
        part = read_row(row, cache, b, head, token, here, own, page)
        found += [where(column + at < row.size, x, 0.0) for x in (list(part) if own > 1 else [part])]
    return vector(f32, found)


def read_columns(
    row: RowFormat, cache: Any, b: Value, head: Value, token: Any, column: Value, width: int, page: Any
) -> Any:
    """Elements of a token with all their scales, as f32, as many as one load takes."""
    own = load_width(row.spec, width)
    parts = [read_row(row, cache, b, head, token, column + at, own, page) for at in range(0, width, own)]
    return parts[0] if own == width else vector(f32, [x for part in parts for x in (list(part) if own > 1 else [part])])


def dequantized(
    cache: Any, b: Value, head: Value, token: Value, column: Value, width: int, dtype: DType, page: Any = None
) -> Any:
    """Elements of a token with their scales: one for all of them, or a vector of scales broadcast to their lanes."""
    spec = cache.spec
    place = {"b": b, "h": head, "t": token, "d": column}  # caches and operands order them differently
    if page is not None:
        place["page"] = page
    granule = spec.granularity
    if not spec.quantized or granule >= spec.head_size or granule % width == 0:
        return cast(cache.load(**place, width=width), dtype)
    return cast(read_columns(RowFormat(spec), cache, b, head, token, column, width, page), dtype)
