# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of 8-bit elements, transposed for products with values: for distribute-kv-tiles.

wgmma reads 8-bit operands only along the product's k dimension, which for values is the tokens. So each copying warp
loads groups of 16 rows into staging memory, by TMA or cp.async, and transposes its own groups when they have arrived:
``ldmatrix`` transposes pairs of bytes, byte permutations separate the pairs, ``stmatrix`` writes rows of 16 tokens
(FlashAttention-3, arXiv 2407.08608, section 3.3). No warp waits for another.

The halves of a group are interleaved: byte 4 t + i of a group is token 2 t + (i & 1) + 8 * (i >> 1). A lane of an
accumulator has the weights of exactly these four tokens, so that weights need not move between lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import DType, i32
from kvarn.dialect.layout import page_and_slot
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, gpu, math as kv_math, ptx, tma
from kvarn.dsl.memory import GLOBAL, SHARED, Pointer
from kvarn.dsl.values import Value, vector, where

from .ir import BARRIER_BYTES, SWIZZLE, WARP
from .threads import scalar, warp_of

GROUP = 16  # rows that a warp transposes at a time
TOGETHER = 8  # loads of 32 columns whose latency one wait covers
SLOTS = 2  # tiles in staging memory
BOUNDS_BYTES = 8


def staged_layout(layout: SharedLayout) -> SharedLayout:
    """The staging memory of a tile whose transpose has this layout: rows as in the cache."""
    return SharedLayout(layout.columns, layout.rows, layout.itemsize, SWIZZLE, SLOTS)


class Transposition:
    """The staging memory of a buffer, and the transposition of its tiles."""

    def __init__(self, op: Any, layout: SharedLayout, threads: int) -> None:
        """``op`` is the ``kv.copy_start`` that fills the buffer, whose tiles have the layout."""
        self.layout, self.staged, self.warps = layout, staged_layout(layout), threads // WARP
        self.by_tma = op.descriptor is not None
        self.memory = Pointer(ops.alloc_shared(self.staged.bytes, self.staged.alignment), SHARED)
        self.barriers = Pointer(ops.alloc_shared(SLOTS * self.warps * BARRIER_BYTES, BARRIER_BYTES), SHARED)
        # Per warp and slot, the bounds of the sequence in the tile, for the finish of the copy.
        self.bounds = Pointer(ops.alloc_shared(SLOTS * self.warps * BOUNDS_BYTES, BOUNDS_BYTES), SHARED)

    @property
    def groups(self) -> int:
        return self.staged.rows // GROUP

    def initialize(self) -> None:
        """Initialise the mbarriers, one per warp and slot."""
        for i in range(SLOTS * self.warps if self.by_tma else 0):
            ptx.mbarrier_init(self.barriers + i * BARRIER_BYTES, 1)

    def start(self, op: Any, n: Value, thread: Value) -> None:
        """Start the copies of a warp's groups of use n."""
        warp, lane = warp_of(thread), thread & (WARP - 1)
        inside = [scalar(x) - scalar(op.first) for x in (op.begin, op.count)]
        with functional.when(lane == 0):
            self.of_warp(self.bounds, n & (SLOTS - 1), warp).store(vector(i32, inside))
        (self.start_boxes if self.by_tma else self.start_rows)(op, n, warp, lane)

    def start_boxes(self, op: Any, n: Value, warp: Value, lane: Value) -> None:
        """By TMA, one box per lane."""
        map = tma.TensorMap(op.descriptor, types.tma_spec_of(op.descriptor.type))
        spec, boxes = types.spec_of(op.cache.type), GROUP // map.rows
        slot = n & (SLOTS - 1)
        full, place = self.of_warp(self.barriers, slot, warp), self.memory + self.staged.stage_offset(slot)
        own = (self.groups - 1 - warp) // self.warps + 1
        with functional.when(lane == 0):
            ptx.mbarrier_arrive_expect_tx(full, own * (boxes * self.staged.panels * map.box_bytes))
        ptx.syncwarp()
        row = (warp + lane // boxes * self.warps) * GROUP + lane % boxes * map.rows
        token = Value((scalar(op.first) + row).ir, i32, nonneg=True)
        page = gpu.shuffle_idx(scalar(op.pages), row // map.rows & (WARP - 1))  # looked up one tile ahead
        with functional.when(lane < own * boxes):
            for panel in range(self.staged.panels):
                column = op.first_column.value + panel * self.staged.panel_columns
                coordinates = (page, page_and_slot(spec, token)[1], scalar(op.head), column)
                tma.load_box(map, coordinates, place + self.staged.box_offset(panel, row), full)

    def start_rows(self, op: Any, n: Value, warp: Value, lane: Value) -> None:
        """By cp.async, one chunk of a row per lane: neighbouring lanes have neighbouring chunks."""
        chunks = self.staged.row_bytes // CHUNK
        place = self.memory + self.staged.stage_offset(n & (SLOTS - 1))
        first, last = scalar(op.first), kv_math.max(scalar(op.count) - 1, 0)
        with functional.loop(warp, self.groups, self.warps) as group:
            ptx.stay_rolled()
            for part in range(0, GROUP * chunks, WARP):
                i = lane + part
                row, chunk = Value(group.ir, i32, nonneg=True) * GROUP + i // chunks, i % chunks
                at = Value(kv_math.min(first + row, last).ir, i32, nonneg=True)
                column = chunk * CHUNK + op.first_column.value
                page = ops.page(op.cache, op.batch, at.ir)
                source = ops.block_ptr(op.cache, op.batch, at.ir, op.head, column.ir, page=page)
                ptx.cp_async(place + self.staged.chunk_offset(row, chunk), Pointer(source, GLOBAL), CHUNK)
        ptx.cp_async_commit()

    def finish(self, n: Value, thread: Value, pending: int, tile: Pointer, dtype: DType) -> None:
        """Wait for a warp's groups of use n and store their transposes, with zeros for rows outside of the sequence."""
        warp, lane = warp_of(thread), thread & (WARP - 1)
        slot = n & (SLOTS - 1)
        if self.by_tma:
            ptx.mbarrier_wait(self.of_warp(self.barriers, slot, warp), (n >> 1) & 1, name="staged values")
        else:
            ptx.cp_async_wait(pending)
            ptx.syncwarp()
        bounds = self.of_warp(self.bounds, slot, warp).load(i32, 2)
        begin, end = bounds[0], bounds[1]
        place = self.memory + self.staged.stage_offset(slot)
        whole = (begin <= 0) & (end >= self.staged.rows)
        functional.if_(
            whole,
            lambda: self.transpose_whole(place, tile, warp, lane),
            lambda: self.transpose_parts(place, tile, warp, lane, (begin, end)),
        )
        ptx.syncwarp()  # before the warp's next copy to the slot

    def transpose_whole(self, place: Pointer, tile: Pointer, warp: Value, lane: Value) -> None:
        """Transpose a warp's groups of a tile that is entirely in the sequence: address distances are constant."""
        rounds, some = divmod(self.groups, self.warps)
        self.transpose(place, tile, warp, lane, range(rounds))
        if some:
            with functional.when(warp < some):
                self.transpose(place, tile, warp, lane, [rounds])

    def transpose_parts(self, place: Pointer, tile: Pointer, warp: Value, lane: Value, bounds: Any) -> None:
        """Transpose another tile's groups, with zeros outside of the sequence."""
        with functional.loop(warp, self.groups, self.warps) as group:
            group = Value(group.ir, i32, nonneg=True)
            begin, end = (x - group * GROUP for x in bounds)
            self.transpose(place, tile, group, lane, [0], _kept(lane, begin, end))

    def transpose(
        self, place: Pointer, tile: Pointer, first: Value, lane: Value, rounds: Sequence[int], keep: Value | None = None
    ) -> None:
        """Transpose the groups ``first + i * warps`` for i in rounds: 32 columns at a time, loads before stores.

        A lane has four tokens of a column, of which it keeps those with a bit in ``keep``.
        """
        row, chunks = first * GROUP + (lane & 15), range(0, self.staged.row_bytes // CHUNK, 2)
        # Of eight rows that are written at once, four are even columns and four odd ones: rows of even columns alone
        # would use half of the banks twice.
        first_even, odd = lane < 16, ((lane >> 2) ^ (lane >> 3)) & 1
        selectors = where(first_even, 0x6420, 0x7531), where(first_even, 0x7531, 0x6420)
        column = (lane >> 4) * CHUNK + (lane & 7) * 2 + odd
        sources = {c: place + self.staged.chunk_offset(row, (lane >> 4) | c) for c in chunks}
        targets = {i: tile + self.layout.chunk_offset(column, first + i * self.warps) for i in rounds}
        units = [(i, c) for i in rounds for c in chunks]
        for some in (units[at : at + TOGETHER] for at in range(0, len(units), TOGETHER)):
            # Rows at distances that are multiples of 8 have the same swizzle.
            loaded = [
                ptx.ldmatrix(sources[c] + self.staged.chunk_offset(i * self.warps * GROUP, 0), trans=True)
                for i, c in some
            ]
            for (i, c), pairs in zip(some, loaded, strict=True):
                words = [
                    ptx.prmt(low, high, selector) for low, high in (pairs[:2], pairs[2:]) for selector in selectors
                ]
                kept = words if keep is None else [word & keep for word in words]
                ptx.stmatrix(targets[i] + self.layout.chunk_offset(c * CHUNK, 0), kept)

    def of_warp(self, memory: Pointer, slot: Value, warp: Value) -> Pointer:
        """The 8 bytes of a warp for a slot."""
        return memory + (slot * self.warps + warp) * BARRIER_BYTES


def _kept(lane: Value, begin: Value, end: Value) -> Value:
    """The mask of a lane's four bytes whose tokens are in [begin, end)."""
    kept: Any = 0
    for i in range(4):
        token = (lane & 3) * 2 + ((i & 1) + 8 * (i >> 1))
        kept = kept | where((token >= begin) & (token < end), 0xFF << 8 * i if i < 3 else -(1 << 24), 0)
    return kept
