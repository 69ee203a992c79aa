# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of cache tiles by TMA boxes, to a stage or to staging memory, for distribute-kv-tiles.

8-bit elements that products need in 16 bits are copied unconverted to *staging* memory. All copying threads read it,
convert, and write to the stage of the tile. A slot of staging memory has two mbarriers of its own, ``landed`` and
``read``. Scales are copied by cp.async, each by one thread, and ``landed`` counts these copies too.

A box must start at a multiple of 16 bytes within a token. If a head does not (heads of 72 8-bit columns: every second
one), the box starts 8 bytes before it; 16 converted bytes then straddle two chunks of the stage.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import DType, f32, i32
from kvarn.dialect.layout import CacheSpec, align_up, cdiv, page_and_slot
from kvarn.dialect.shared_layout import CHUNK, SWIZZLES, SharedLayout
from kvarn.dsl import functional, gpu, math as kv_math, ptx, tma
from kvarn.dsl.memory import GLOBAL, SHARED, Pointer
from kvarn.dsl.values import Value, as_value, vector, where

from .copies import elements_of, scales_of
from .dequantize import converted
from .ir import BARRIER_BYTES, SWIZZLE, WARP
from .threads import scalar, warp_of

GROUP = 8  # neighbouring lanes, one row each: the rows of a swizzle period


def boxes_of(op: Any, layout: SharedLayout) -> int:
    """The number of boxes along the rows of a tile."""
    return layout.rows // types.tma_spec_of(op.descriptor.type).rows


def copy_boxes(
    op: Any, layout: SharedLayout, place: Pointer, full: Pointer, lane: Value, warp: Value | None = None,
    warps: int = 1, parts: int = 1,
) -> None:  # fmt: skip
    """Copy a tile by TMA: lane i issues the box of tokens from first + i * box rows on, for every swizzle atom.

    With the ``existing`` promise, boxes without tokens are not copied: rows out of bounds are slower than others. With
    several ``warps``, warp w issues boxes w, w + warps, ...: each warp's issue is serial. Each of the ``parts`` of the
    columns has its own barrier, from ``full`` on.
    """
    map = tma.TensorMap(op.descriptor, types.tma_spec_of(op.descriptor.type))
    rows, boxes = map.rows, boxes_of(op, layout)
    if "existing" in op.operation.attributes:
        boxes = kv_math.max(kv_math.min((scalar(op.count) - scalar(op.first) + (rows - 1)) // rows, boxes), 0)
    own = boxes if warp is None else (boxes - 1 - warp) // warps + 1
    bounds = panel_bounds(layout, parts)
    barriers = [full + part * BARRIER_BYTES if part else full for part in range(parts)]
    with functional.when(lane == 0):
        for part, panels in enumerate(bounds):
            ptx.mbarrier_arrive_expect_tx(barriers[part], own * (len(panels) * map.box_bytes))
    ptx.syncwarp()
    # A single box is issued by an elected thread: for a condition on the lane ptxas emits a loop over lanes.
    single = boxes_of(op, layout) == 1
    at = as_value(0, i32) if single else lane
    page = gpu.shuffle_idx(scalar(op.pages), 0) if single else scalar(op.pages)
    token = scalar(op.first) + at * rows
    slot = page_and_slot(types.spec_of(op.cache.type), Value(token.ir, i32, nonneg=True))[1]
    there = at < boxes if warp is None else (at < boxes) & (at % warps == warp)
    with functional.when(there), functional.when(ptx.elect()) if single else contextlib.nullcontext():
        head, first_column = scalar(op.head), op.first_column.value
        if map.spec.form == "token":
            head, first_column = 0, column_of_token(op) // CHUNK * CHUNK
        for part, panels in enumerate(bounds):
            for panel in panels:
                coordinates = (page, slot, head, first_column + panel * layout.panel_columns)
                to = place + layout.box_offset(panel, at * rows)
                tma.load_box(map, coordinates, to, barriers[part])


def panel_bounds(layout: SharedLayout, parts: int) -> list[range]:
    """The panels (swizzle atoms along a row) of each part of a tile's columns."""
    firsts = [layout.panels * part // parts for part in range(parts + 1)]
    return [range(*both) for both in itertools.pairwise(firsts)]


def column_of_token(op: Any) -> Value:
    """The first column of a tile, counted over all heads of a token; in 8-bit elements."""
    at = scalar(op.head) * types.spec_of(op.cache.type).head_size + op.first_column.value
    return Value(at.ir, i32, nonneg=True)


def swizzle_of_boxes(spec: CacheSpec) -> int:
    """The swizzle, in bytes, of boxes in staging memory: the smallest that holds a row, at most ``SWIZZLE``."""
    return next((s for s in SWIZZLES[1:] if align_up(spec.head_size, CHUNK) * spec.dtype.itemsize <= s), SWIZZLE)


def staged_boxes(spec: CacheSpec, rows: int, columns: int, slots: int) -> SharedLayout:
    """The layout of staging memory that boxes fill."""
    return SharedLayout(rows, columns, spec.dtype.itemsize, swizzle_of_boxes(spec), slots)


def staged_boxes_bytes(spec: CacheSpec, rows: int, columns: int, slots: int) -> int:
    """Bytes of staging memory of a buffer, including scales."""
    return staged_boxes(spec, rows, columns, slots).bytes + slots * rows * 4 * scales_of_row(spec)


def scales_of_row(spec: CacheSpec) -> int:
    """Scales per token and head; 0 without scales."""
    return spec.num_scales if spec.quantized else 0


def chunks_at_once(chunks: int, groups: int) -> int:
    """Chunks of a row that groups of 8 threads convert at a time: all, or a divisor that keeps more groups busy."""
    busy = {n: groups // n * n for n in range(1, min(chunks, groups) + 1) if chunks % n == 0}
    most = max(busy)
    return most if 4 * busy[most] >= 3 * groups else max(busy, key=lambda n: (busy[n], n))


class StagedBoxes:
    """The staging memory of a buffer that TMA boxes fill, and the conversion of its tiles."""

    def __init__(self, op: Any, layout: SharedLayout, threads: int, slots: int) -> None:
        """``op``: the ``kv.copy_start`` of the buffer; ``layout``: of its tiles; ``threads``: that convert them."""
        self.slots = slots
        self.spec, self.layout, self.threads = types.spec_of(op.cache.type), layout, threads
        self.staged = staged_boxes(self.spec, layout.rows, layout.columns, slots)
        self.scales = scales_of_row(self.spec)
        self.copying_boxes = min(threads // WARP, boxes_of(op, self.staged))  # warps
        self.memory = Pointer(ops.alloc_shared(self.staged.bytes, self.staged.alignment), SHARED)
        self.barriers = Pointer(ops.alloc_shared(2 * slots * BARRIER_BYTES, BARRIER_BYTES), SHARED)
        self.of_token = types.tma_spec_of(op.descriptor.type).form == "token"
        self.shifts = Pointer(ops.alloc_shared(slots * 4, CHUNK), SHARED) if self.of_token else self.memory
        self.slot_scales = layout.rows * 4 * self.scales
        self.scale_memory = Pointer(ops.alloc_shared(max(slots * self.slot_scales, CHUNK), CHUNK), SHARED)

    @property
    def scales_of_copy(self) -> int:
        """Scales per cp.async."""
        return next(w for w in (4, 2, 1) if self.scales % w == 0)

    @property
    def copying_scales(self) -> int:
        """Threads (whole warps) that copy scales."""
        if not self.scales:
            return 0
        return min(self.threads, align_up(self.layout.rows * self.scales // self.scales_of_copy, WARP))

    def slot(self, n: Value) -> tuple[Value, Value]:
        """(slot, phase parity) of use ``n``; the number of slots is a power of two."""
        return n & (self.slots - 1), (n >> (self.slots.bit_length() - 1)) & 1

    def landed(self, slot: Value) -> Pointer:
        return self.barriers + slot * BARRIER_BYTES

    def read(self, slot: Value) -> Pointer:
        return self.barriers + (slot + self.slots) * BARRIER_BYTES

    def initialize(self) -> None:
        """Initialize barriers: ``landed`` counts box-issuing warps and scale-copying threads, ``read`` all warps."""
        for slot in range(self.slots):
            copies = self.copying_boxes + self.copying_scales
            ptx.mbarrier_init(self.barriers + slot * BARRIER_BYTES, copies, f"landed[{slot}]")
            read = self.barriers + (slot + self.slots) * BARRIER_BYTES
            ptx.mbarrier_init(read, self.threads // WARP, f"read[{slot}]")

    def start(self, op: Any, n: Value, thread: Value) -> None:
        """Start the copies of use ``n``: the boxes of this warp, if it has any, and the scales of this thread."""
        warp, (slot, parity) = warp_of(thread), self.slot(n)
        place, lane = self.memory + self.staged.stage_offset(slot), thread & (WARP - 1)
        with self.of_warps(warp, max(self.copying_boxes, self.copying_scales // WARP)):
            ptx.mbarrier_wait(self.read(slot), parity ^ 1, name="read")
            with self.of_warps(warp, self.copying_boxes):
                if self.of_token:  # published by the same barrier as the boxes
                    with functional.when(thread == 0):
                        (self.shifts + slot * 4).store(column_of_token(op) & (CHUNK - 1))
                copy_boxes(op, self.staged, place, self.landed(slot), lane, warp, self.copying_boxes)
            if self.scales:
                with self.of_warps(warp, self.copying_scales // WARP):
                    self.start_scales(op, slot, thread)

    def of_warps(self, warp: Value, count: int) -> contextlib.AbstractContextManager[Any]:
        """The scope of the first ``count`` warps; no branch if that is all warps."""
        return contextlib.nullcontext() if count == self.threads // WARP else functional.when(warp < count)

    def start_scales(self, op: Any, slot: Value, thread: Value) -> None:
        """Start this thread's copies of scales, with zeros for tokens past the end."""
        widest, each = self.scales_of_copy, self.scales // self.scales_of_copy
        first, count = scalar(op.first), scalar(op.count)
        last = kv_math.max(count - 1, 0)
        total, box = self.layout.rows * each, types.tma_spec_of(op.descriptor.type).rows
        for s in range(cdiv(total, self.copying_scales)):
            i = Value((thread + s * self.copying_scales).ir, i32, nonneg=True)
            row, part = i // each, i % each
            token = first + row
            at = Value(kv_math.max(kv_math.min(token, last), 0).ir, i32, nonneg=True)
            page = gpu.shuffle_idx(scalar(op.pages), kv_math.min(row, self.layout.rows - 1) // box)
            page = where(token < count, page, 0).ir  # not read: the copy writes zeros
            column = part * (widest * self.spec.granularity)
            source = ops.scale_block_ptr(op.cache, op.batch, at.ir, op.head, column.ir, page)
            to = self.scale_memory + slot * self.slot_scales + i * (4 * widest)
            with functional.when(i < total):
                exists = where(token < count, 4 * widest, 0)
                ptx.cp_async(to, Pointer(source, GLOBAL), 4 * widest, zero_fill_size=exists)
        ptx.cp_async_mbarrier_arrive(self.landed(slot))

    def finish(self, n: Value, thread: Value, pending: int, tile: Pointer, dtype: DType) -> None:
        """Wait until copy ``n`` has landed, convert this thread's part of the copy, and release the slot."""
        slot, parity = self.slot(n)
        ptx.mbarrier_wait(self.landed(slot), parity, name="landed")
        self.convert(slot, thread, tile, dtype)
        ptx.syncwarp()
        ptx.mbarrier_arrive(self.read(slot), (thread & (WARP - 1)) == 0)

    def convert(self, slot: Value, thread: Value, tile: Pointer, dtype: DType) -> None:
        """Convert this thread's chunks and write them to a tile.

        A thread has the same chunk of every eighth row, so that its addresses have a constant stride. Eight
        neighbouring lanes have the same chunk of eight rows, which the swizzle puts into different banks.
        """
        columns = CHUNK // self.spec.dtype.itemsize
        chunks, groups = self.layout.columns // columns, self.threads // GROUP
        chunks_per_iteration = chunks_at_once(chunks, groups)
        blocks = groups // chunks_per_iteration  # blocks of eight rows that all threads convert per iteration
        iterations = cdiv(self.layout.rows, blocks * GROUP)
        whole = iterations * blocks * GROUP == self.layout.rows
        together = next(
            m for m in (4, 3, 2, 1) if iterations % m == 0
        )  # chunks that a thread loads before it converts them
        place = self.memory + self.staged.stage_offset(slot)
        shift = (self.shifts + slot * 4).load(i32) if self.of_token else None

        def of_group(first: Any) -> None:
            group = Value((thread // GROUP).ir, i32, nonneg=True)
            row0, chunk = (
                (thread & (GROUP - 1)) + (group // chunks_per_iteration) * GROUP,
                group % chunks_per_iteration + first,
            )

            def some(iteration: Any) -> None:
                held = []
                for u in range(together):
                    row = row0 + (iteration + u) * (blocks * GROUP)
                    at = row if whole else kv_math.min(row, self.layout.rows - 1)
                    words = (place + self.staged.chunk_offset(at, chunk)).load(i32, CHUNK // 4)
                    held.append((row, [words[k] for k in range(CHUNK // 4)], self.factors(slot, at, chunk * columns)))
                for row, words, factors in held:
                    with contextlib.nullcontext() if whole else functional.when(row < self.layout.rows):
                        self.write(row, chunk, words, factors, tile, dtype, shift)

            if iterations == together:
                some(0)
                return
            with functional.loop(0, ptx.unknown(iterations), together) as iteration:
                ptx.stay_rolled()
                some(iteration)

        with (
            contextlib.nullcontext()
            if blocks * chunks_per_iteration == groups
            else functional.when(thread // GROUP < blocks * chunks_per_iteration)
        ):
            if chunks_per_iteration == chunks:
                of_group(0)
                return
            with functional.loop(0, ptx.unknown(chunks), chunks_per_iteration) as first:
                ptx.stay_rolled()
                of_group(first)

    def factors(self, slot: Value, row: Value, column: Value) -> list[Value]:
        """The scales of a chunk, one per equal part of its elements."""
        if not self.scales:
            return []
        of_row = self.scale_memory + slot * self.slot_scales + row * (4 * self.scales)
        each = scales_of(self.spec, CHUNK)
        at = column // min(self.spec.granularity, self.spec.head_size)
        return elements_of((of_row + at * 4).load(f32, each))

    def write(
        self, row: Value, chunk: Value, words: list[Value], factors: list[Value], tile: Pointer, dtype: DType,
        shift: Value | None,
    ) -> None:  # fmt: skip
        """Convert a chunk of 8-bit elements and write it as two chunks of 16-bit elements.

        If the head starts ``shift`` columns into the first chunk, the elements of the neighbouring heads are written as
        zeros to the last chunk of the row.
        """
        pairs, each = converted(words, factors, self.spec.dtype, dtype), CHUNK // 4
        for p in range(0, len(pairs), each):
            part, half = chunk * (len(pairs) // each) + p // each, vector(i32, pairs[p : p + each])
            if shift is not None:
                part = part - (shift >> 3)
                last = self.layout.columns * self.layout.itemsize // CHUNK - 1
                part = where(part < 0, last, part)
                half = where(part == last, vector(i32, each), half)
            (tile + self.layout.chunk_offset(row, part)).store(half)
