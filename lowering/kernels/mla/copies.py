# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Producers of the latent kernels: they copy tiles of keys into boxes of shared memory.

With TMA one warp copies, and each lane has the rows of a tile in one page. Without TMA every thread of a warpgroup
copies 16-byte chunks of some rows by ``cp.async``, for listed rows and pages of any size; missing rows become zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import cdiv, page_and_slot
from kvarn.dsl.values import Value
from kvarn.lowering.tiles.cache_rows import place_in_pool
from kvarn.lowering.tiles.ir import NO_PAGE

from .common import BOX_COLUMNS, KEYS, LatentConfig

THREADS = 128  # that copy rows


def lanes_of(c: LatentConfig) -> int:
    """Adjacent threads that copy one row of a box."""
    return c.box.pitch // 16


def rows_per_thread(c: LatentConfig) -> int:
    """Rows of a tile per thread."""
    return KEYS * lanes_of(c) // THREADS


# --- the producer ----------------------------------------------------------------------------------


@kv.func
def boxes_by_tma(c, key_map, cache, place, barrier, pages, base, boxes, lane):
    """Copy some boxes of a tile to ``place`` by one warp; each lane copies its segments, the rows in one page.

    ``boxes`` are (first, number); lane i has the page of the tile's i-th segment in ``pages``.
    """
    first, count = boxes
    rows = key_map.rows
    segments = KEYS // rows
    if lane == 0:
        kv.mbarrier_arrive_expect_tx(barrier, count * segments * key_map.box_bytes)
    kv.syncwarp()
    for step in kv.static(range(cdiv(count * segments, 32))):
        n = step * 32 + lane
        segment, box = n % segments, n // segments
        page = kv.shuffle_idx(pages, segment)
        slot = page_and_slot(cache.spec, Value((base + segment * rows).ir, kv.i32, nonneg=True))[1]
        if n < count * segments:
            coordinates = (page, slot, 0, c.column(first) + box * BOX_COLUMNS)
            kv.tma.load_box(key_map, coordinates, place + (box * c.box.bytes + segment * rows * c.box.pitch), barrier)


@kv.func
def pages_of(key_map, cache, b, base, last, lane):
    """The page of each lane's segment of a tile; past the last key, a page outside of every pool."""
    token = base + lane * key_map.rows
    page = cache.page(b, kv.math.max(kv.math.min(token, last - 1), 0))
    return kv.where((token < last) & (lane < KEYS // key_map.rows), page, NO_PAGE)


# --- row by row ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """The source of rows that threads copy: a sequence's tokens, or the entries of a token's list."""

    c: LatentConfig
    cache: Any
    indices: Any
    b: Any
    token0: Any
    first: Any
    last: Any

    @kv.func
    def place(self, at: Any) -> tuple[Any, Any, Any]:
        """(token or slot, page, whether it exists) of a key; for a missing key, the address of another one."""
        if self.c.case.listed:
            slot, page, there = place_in_pool(self.cache, self.indices[self.token0, kv.math.min(at, self.last - 1)])
            return slot, page, there & (at < self.last)
        token = kv.math.max(kv.math.min(at, self.last - 1), 0)
        return token, self.cache.page(self.b, token), (at >= self.first) & (at < self.last)


def row_of(c: LatentConfig, thread: Any, step: int) -> Any:
    """The row of a tile that a thread copies in a round of copies; a warp copies 16 rows."""
    rows = 32 // lanes_of(c)  # rows per warp and round
    return (thread >> 5) * 16 + step * rows + (thread & 31) // lanes_of(c)


@kv.func
def places_of(c, rows, base, thread):
    """The addresses of the rows of a tile that a thread copies."""
    return [rows.place(base + row_of(c, thread, step)) for step in range(rows_per_thread(c))]


@kv.func
def copy_boxes(c, rows, places, place, barrier, boxes, thread):
    """Start copying this thread's chunks of some boxes of a tile to ``place``; ``barrier`` signals completion.

    The warps whose products read them wait for the barrier, with a fence (:func:`wait_for`).
    """
    first, count = boxes
    lane, chunk = thread & (lanes_of(c) - 1), 16 // c.case.spec.dtype.itemsize
    source = kv.operand(rows.cache)  # its pointers are read-only
    for step in kv.static(range(rows_per_thread(c))):
        token, page, there = places[step]
        row = row_of(c, thread, step)
        for box in kv.static(range(count)):
            column = c.column(first + box) + lane * chunk
            exists, end = there, c.end(first + box)
            if c.column(first + box) + BOX_COLUMNS > end:
                exists = there & (column < end)
                column = kv.math.min(column, end - chunk)
            from_ = source.block_paged_ptr(rows.b, token, 0, column, page=page)
            size = kv.where(exists, 16, kv.i32(0))
            kv.cp_async(place + (box * c.box.bytes + c.box.chunk_offset(row, lane)), from_, zero_fill_size=size)
    kv.cp_async_mbarrier_arrive(barrier)


@kv.func
def wait_for(c, barrier, phase):
    """Wait for boxes that products will read."""
    kv.mbarrier_wait(barrier, phase)
    if c.copy == "rows":
        kv.fence_proxy_async()


@kv.func
def record_existing_rows(c, places, seen_at, barrier, thread):
    """Store which rows of a tile exist, one bit each; each warp arrives on ``barrier``."""
    word, lanes = kv.u32(0), lanes_of(c)
    for step in kv.static(range(rows_per_thread(c))):
        bits = kv.ballot(places[step][2])  # adjacent lanes share a row
        for row in kv.static(range(32 // lanes)):
            bit = (bits >> (row * (lanes - 1))) & (1 << row)
            word = word | (bit << (step * (32 // lanes)))
    if (thread & 31) == 0:
        (seen_at + (thread >> 5) * 2).store(kv.u16(word))
        kv.mbarrier_arrive(barrier)
