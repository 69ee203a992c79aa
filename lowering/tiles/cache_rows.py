# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How kernels read a cache: scaled elements, rows that contain scales and bf16 keys, rows of the pool."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f32
from kvarn.dialect.latent_layout import SCALE_BYTES, RowFormat
from kvarn.dialect.layout import RAGGED, CacheSpec, lowbit


def load_width(spec: CacheSpec, widest: int) -> int:
    """The widest load of :func:`read`: whole granules, or a part of one granule."""
    g = spec.granularity
    if spec.packed:  # only loads of one granule unpack elements
        return min(widest, lowbit(g))
    if not spec.quantized or g >= spec.head_size or (g == lowbit(g) and spec.kind != RAGGED):
        return widest  # scales of a ragged operand are read together with its elements
    return min(widest, lowbit(g))


def read(spec: CacheSpec, cache: Any, b: Any, head: Any, token: Any, dim: Any, width: int, page: Any = None) -> Any:
    """``width`` elements of a token as f32, dequantized: a vector, or a scalar for width 1.

    If granules are narrower than the load, the scales are loaded as a vector, too, and broadcast to their lanes.
    """
    g = spec.granularity
    at = {"b": b, "h": head, "t": token, "d": dim, "page": page}  # caches and operands order them differently
    if not spec.quantized or g >= spec.head_size or g % width == 0:
        return kv.f32(cache.load(**at, width=width))
    stored = kv.f32(cache.load_quantized(**at, width=width))
    scales = kv.f32(cache.load_scale(**at, width=width // g))
    if g == 1:
        return stored * scales
    return stored * kv.vector(f32, [scales[i // g] for i in range(width)])


def read_row(row: RowFormat, cache: Any, b: Any, head: Any, token: Any, dim: Any, width: int, page: Any = None) -> Any:
    """As :func:`read`, with the scale that is stored in the row, if there is one."""
    found = read(row.spec, cache, b, head, token, dim, width, page)
    if not row.inline:
        return found
    return found * inline_scale(row, cache, b, head, token, dim, page)


def inline_scale(row: RowFormat, cache: Any, b: Any, head: Any, token: Any, dim: Any, page: Any) -> Any:
    """The f32 scale of a latent row for its element ``dim``."""
    at = row.content + dim // row.inline * SCALE_BYTES
    pointer = cache.block_paged_ptr(b, token, head, at, page=page)
    return pointer.load(f32, alignment=min(SCALE_BYTES, lowbit(row.content), lowbit(row.spec.head_size)))


def read_rope(row: RowFormat, cache: Any, b: Any, head: Any, token: Any, column: int, width: int, page: Any) -> Any:
    """Keys of the query's columns from ``column`` up, stored as bf16 after the content, as f32."""
    byte = row.rope_start + 2 * (column - row.content)
    at = cache.block_paged_ptr(b, token, head, byte, page=page)
    found = kv.f32(
        at.load(bf16, width, alignment=min(lowbit(2 * width), lowbit(row.rope_start), lowbit(row.spec.head_size), 16))
    )
    return found * kv.f32(cache.load_scale(b, head, token, 0, page=page)) if row.spec.quantized else found


def is_in_pool(cache: Any, encoded: Any) -> Any:
    """Whether the pool has this row; element by element for a tile."""
    page = encoded // cache.spec.page_size
    return (encoded >= 0) & (page < cache.field("num_blocks"))


def place_in_pool(cache: Any, encoded: Any) -> tuple[Any, Any, Any]:
    """(slot, page, whether it exists) of a row of the pool, page * page_size + slot; row 0 replaces a missing one."""
    size, there = cache.spec.page_size, is_in_pool(cache, encoded)
    return kv.where(there, encoded % size, 0), kv.where(there, encoded // size, 0), there
