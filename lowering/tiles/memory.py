# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles in shared memory, for distribute-kv-tiles: circular buffers, their copies, query and output rows, staging.

The code uses the functions of the kernel language, which emit ops in a pass as they do in a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir
from mlir.dialects import vector as mlir_vector

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import DType, bool_, by_mlir, i32, u32
from kvarn.dialect.layout import cdiv
from kvarn.dialect.ops.staging import PARTS
from kvarn.dialect.ops.tile import TILE_COLUMN, number_of, stored_columns, stored_from
from kvarn.dialect.register_layout import COLUMN, RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, gpu as kv_gpu, math as kv_math, memory, ptx
from kvarn.dsl.handles import Cache, Operand
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value, cast, vector, where
from kvarn.lowering.index import const

from . import mma as tile_mma
from .barriers import sync_all, sync_consumers, sync_for_products, wait_for_groups
from .boxes import StagedBoxes, copy_boxes
from .cache_rows import place_in_pool
from .converted_copies import convert_rows
from .copies import Staging, chunks_of, fits_pages, start_chunks, why_not_by_rows
from .ir import BARRIER_BYTES, NO_PAGE, WARP, WARPGROUP, AtPoint, is_transposed, users
from .products import unpacked, words
from .threads import Threads, buffer_of, elements, from_elements, held_as_words, register_layout, scalar, warp_of
from .transposition import Transposition

SWIZZLE_ROWS = 8  # the period of a swizzle
BLOCK_COLUMNS = 8  # columns of an accumulator row that four lanes hold
STAGINGS = ("staged", "transposed")  # kinds of copies that go through staging memory
SIGNS = {1: 0x80808080, 2: 0x80008000, 4: 0x80000000}  # sign bits of a word, by element size in bytes


@dataclass
class Stages:
    """A circular buffer of tiles with the mbarriers ``full`` and ``empty`` per stage; ``copying`` threads fill it."""

    name: str
    layout: SharedLayout
    count: int
    copy: str
    copying: int
    dtype: DType
    tiles: Pointer
    full: Pointer
    empty: Pointer
    of_rows: bool = False  # holds query rows, and output rows before a release
    staging: Staging | StagedBoxes | Transposition | None = None  # for a copy in STAGINGS
    finished: bool = False  # whether kv.copy_finish waits for the copies
    async_arrive: bool = False  # whether cp.async copies arrive at ``full`` by themselves
    unfenced: bool = False  # whether the proxy fence is the consumers', after their wait
    grouped: bool = False  # wait for cp.async groups and at a block barrier, not at mbarriers
    parts: int = 1  # parts of the columns, with a barrier ``full`` each

    @staticmethod
    def allocate(op: Any, layout: SharedLayout, copying: int, grouped: bool, slots: int) -> Stages:
        """Allocate the buffer of a ``kv.make_stages``: ``copying`` threads fill it, with ``slots`` staging tiles."""
        count, copy = op.stages.value, op.copy.value
        dtype = by_mlir(str(ir.RankedTensorType(op.tile.value).element_type))
        tiles = Pointer(ops.alloc_shared(layout.bytes, layout.alignment), SHARED)
        full, empty, parts = tiles, tiles, number_of(op, PARTS, 1)
        if not grouped:
            full = Pointer(ops.alloc_shared((parts + 1) * count * BARRIER_BYTES, BARRIER_BYTES), SHARED)
            empty = full + parts * count * BARRIER_BYTES
        of_barriers = {"grouped": grouped, "parts": parts}
        made = Stages(op.buffer_name.value, layout, count, copy, copying, dtype, tiles, full, empty, **of_barriers)
        users_of = users(op.operation.results[0])
        made.finished = any(user.name == "kv.copy_finish" for user in users_of)
        starts = [user.opview for user in users_of if user.name == "kv.copy_start"]
        arrive = any(start.pages is not None for start in starts) or any(
            "async_arrive" in user.attributes for user in users_of
        )
        made.async_arrive = not grouped and copy == "cp_async" and arrive
        # A producer's proxy fence would wait for all its outstanding copies and lookups, also of later tiles.
        made.unfenced = made.async_arrive or (not grouped and copy in STAGINGS)
        if copy in STAGINGS:
            kind = Staging if starts[0].descriptor is None and starts[0].pages is None else StagedBoxes
            if copy == "transposed":
                made.staging = Transposition(starts[0], layout, copying)
            else:
                made.staging = kind(starts[0], layout, copying, slots)
        return made

    def initialize(self, consumers: int) -> None:
        """Initialize barriers: ``full`` counts copying warps, TMA or cp.async arrivals, ``empty`` consumer warps."""
        for stage in range(0 if self.grouped else self.count):
            copies = 1 if self.copy == "tma" else self.copying if self.async_arrive else self.copying // WARP
            for part in range(self.parts):
                name = f"full_{self.name}[{stage}]" if self.parts == 1 else f"full_{self.name}[{stage}][{part}]"
                ptx.mbarrier_init(self.full_of(stage, part), copies, name)
            ptx.mbarrier_init(self.empty + stage * BARRIER_BYTES, consumers, f"empty_{self.name}[{stage}]")
        if self.staging is not None:
            self.staging.initialize()

    def stage(self, n: Value) -> tuple[Value | int, Value]:
        """(stage, phase parity) of use ``n``."""
        if self.count == 1:
            return 0, n & 1
        if self.count & (self.count - 1) == 0:
            return n & (self.count - 1), (n >> (self.count.bit_length() - 1)) & 1
        n = Value(n.ir, n.dtype, nonneg=True)
        return n % self.count, (n // self.count) & 1

    def tile(self, stage: Any) -> Pointer:
        return self.tiles + self.layout.stage_offset(stage)

    def acquire(self, n: Value, sleep: int = 0) -> None:
        if self.grouped:  # after the barrier all threads have read the stage
            sync_all()
            return
        stage, parity = self.stage(n)
        ptx.mbarrier_wait(self.empty + stage * BARRIER_BYTES, parity ^ 1, sleep, f"empty_{self.name}")

    def full_of(self, stage: Any, part: int = 0) -> Pointer:
        """The barrier ``full`` of a stage, or of a part of its columns."""
        first = self.full + stage * (self.parts * BARRIER_BYTES)
        return first + part * BARRIER_BYTES if part else first

    def wait_for(self, n: Value, parts: Sequence[int]) -> None:
        """Wait for some parts of use ``n``, copied by TMA."""
        stage, parity = self.stage(n)
        for part in parts:
            ptx.mbarrier_wait(self.full_of(stage, part), parity, name=f"full_{self.name}")

    def wait(self, n: Value) -> Pointer:
        stage, parity = self.stage(n)
        if self.grouped:
            ptx.cp_async_commit()
            wait_for_groups(0)
            return self.tile(stage)
        ptx.mbarrier_wait(self.full + stage * BARRIER_BYTES, parity, name=f"full_{self.name}")
        if self.unfenced:  # the writes were by the generic proxy, the products read by the async proxy
            ptx.fence_proxy_async()
        return self.tile(stage)

    def filled(self, stage: Any, thread: Value) -> None:
        """Arrive at ``full``: this warp has written its part of a stage."""
        if not self.unfenced:
            ptx.fence_proxy_async()
        ptx.syncwarp()
        ptx.mbarrier_arrive(self.full + stage * BARRIER_BYTES, (thread & (WARP - 1)) == 0)

    def release(self, n: Value, threads: Threads) -> None:
        stage, _ = self.stage(n)
        if not self.grouped:
            ptx.mbarrier_arrive(self.empty + stage * BARRIER_BYTES, threads.lane == 0)


def handle_of(value: ir.Value) -> Any:
    """The kernel language's handle of a cache or operand."""
    spec = types.spec_of(value.type)
    return (Cache if types.type_name(value.type) == "cache" else Operand)(value, spec)


# --- copies of caches ----------------------------------------------------------------------------------


def pages_of(op: Any, lane: Value) -> Value:
    """``kv.tile_pages``: lane i has the page of the tile's i-th box."""
    cache, count = handle_of(op.cache), scalar(op.count)
    token = scalar(op.first) + lane * op.step.value
    page = cache.page(scalar(op.batch), kv_math.max(kv_math.min(token, count - 1), 0))
    exists = (token < count) & (lane < op.rows.value // op.step.value)
    return where(exists, page, NO_PAGE)


def run_of(rows: int, threads: int) -> int:
    """The rows of a tile that each copying warp copies."""
    return cdiv(rows, threads // WARP)


def convert_tile(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Load a tile to registers, convert it and store it to its stage."""
    stage, _ = stages.stage(scalar(op.n))
    cache = handle_of(op.cache)
    convert_rows(op, cache, stages.layout, stages.tile(stage), stages.dtype, thread, threads, entry_of)
    if number_of(op, TILE_COLUMN, 0):  # cp.async copies of the other columns are in flight
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
    if not stages.grouped:
        stages.filled(stage, thread)


def row_pages_of(op: Any, thread: Value, threads: int) -> Value:
    """``kv.tile_row_pages``: the page of the row that this lane looks up for its warp, or the row's list entry."""
    run = run_of(op.rows.value, threads)
    row = warp_of(thread) * run + kv_math.min(thread & (WARP - 1), run - 1)
    if op.lists is not None:
        return entry_of(op, scalar(op.first) + row)
    token = kv_math.max(kv_math.min(scalar(op.first) + row, scalar(op.count) - 1), 0)
    return handle_of(op.cache).page(scalar(op.batch), token)


def entry_of(op: Any, token: Value) -> Value:
    """The list entry of a row (a sparse index); -1 past the end of the list."""
    last = kv_math.max(scalar(op.count) - 1, 0)
    entry = functional.if_(
        (token >= 0) & (token < scalar(op.count)),
        lambda: buffer_of(op.lists)[scalar(op.batch), kv_math.min(token, last)],
        lambda: Value(const(-1), i32),
    )
    return entry


def copy_tile_boxes(op: Any, stages: Stages, lane: Value) -> None:
    """Copy a tile to its stage by TMA, issued by one warp."""
    stage, _ = stages.stage(scalar(op.n))
    copy_boxes(op, stages.layout, stages.tile(stage), stages.full_of(stage), lane, parts=stages.parts)


def start_rows(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Start the cp.async copies of a tile: to its stage, or to staging memory."""
    n, layout = scalar(op.n), stages.layout
    stage, _ = stages.stage(n)
    spec, staging = types.spec_of(op.cache.type), stages.staging
    if staging is not None:
        staging.start(op, n, thread)
        return
    if op.pages is not None:
        copy_runs(op, layout, stages.tile(stage), thread, threads, not stages.grouped)
        if not stages.grouped:
            ptx.cp_async_mbarrier_arrive(stages.full + stage * BARRIER_BYTES)
        return
    columns = layout.columns, op.first_column.value
    if why_not_by_rows(spec, *columns) is None and not (stages.grouped and fits_pages(spec, layout.rows, *columns)):
        place = stages.tile(stage)

        def target(s: Any, row: Value, chunk: Value) -> tuple[Pointer, None]:
            return place + layout.chunk_offset(row, chunk), None

        start_chunks(op, chunks_of(op, layout, threads), thread, target)
    else:
        first, count = scalar(op.first), scalar(op.count)
        valid = kv_math.max(kv_math.min(count - first, layout.rows), 0)
        ops.load_tile(
            op.cache, (op.batch, op.head, first.ir, valid.ir), stages.tile(stage).ir, thread.ir,
            tile_rows=layout.rows, num_threads=threads, pitch=layout.pitch, swizzle=layout.swizzle, mode="async",
        )  # fmt: skip
    if not stages.grouped:
        ptx.cp_async_commit()


def finish_rows(stages: Stages, n: Value, thread: Value, pending: int) -> None:
    """Wait for this thread's copies of use ``n``, convert staged ones, and arrive at ``full``."""
    stage, _ = stages.stage(n)
    if stages.staging is not None:
        stages.staging.finish(n, thread, pending, stages.tile(stage), stages.dtype)
    else:
        ptx.cp_async_wait(pending)
    if not stages.grouped:
        stages.filled(stage, thread)


def copy_runs(op: Any, layout: SharedLayout, place: Pointer, thread: Value, threads: int, producer: bool) -> None:
    """Each warp copies a run of rows by cp.async; neighbouring lanes copy neighbouring chunks of 16 bytes.

    Lane i computes the address of row i of the run from the page that it holds, and the lanes that copy the row get it
    by a shuffle. Rows past the last token repeat it; rows with a list entry of -1 are zeros.
    """
    width = CHUNK // layout.itemsize
    run, behind = run_of(layout.rows, threads), number_of(op, TILE_COLUMN, 0) // width  # chunks before
    chunks = layout.columns // width - behind
    thread = thread if producer else ptx.unknown(thread)  # else LLVM hoists the offsets of all chunks
    lane, base = Value((thread & (WARP - 1)).ir, i32, nonneg=True), warp_of(thread) * run
    last, first_column = kv_math.max(scalar(op.count) - 1, 0), op.first_column.value
    token = kv_math.min(scalar(op.first) + base + kv_math.min(lane, run - 1), last)
    cache, page, there = handle_of(op.cache), scalar(op.pages), None
    if op.lists is not None:
        token, page, named = place_in_pool(cache, page)
        there = ptx.ballot(named)
    own = cache.block_paged_ptr(scalar(op.batch), token, scalar(op.head), first_column, page=page).address()
    stored = cache.spec.head_size - first_column  # columns past the head are zeros
    whole = run % SWIZZLE_ROWS == 0 and run * (threads // WARP) == layout.rows
    with functional.loop(0, ptx.unknown(run), SWIZZLE_ROWS) as begin:
        ptx.stay_rolled()  # unrolled, the addresses of all copies would exceed a producer's registers
        for part in range(0, SWIZZLE_ROWS * chunks, WARP):
            index = lane + part
            row, chunk = Value(begin.ir, i32, nonneg=True) + index // chunks, index % chunks
            source = memory.pointer_of(kv_gpu.shuffle_idx(own, row)) + chunk * CHUNK
            inside = (row < run) & (base + row < layout.rows) & (index < SWIZZLE_ROWS * chunks)
            every = whole and part + WARP <= SWIZZLE_ROWS * chunks
            with contextlib.nullcontext() if every else functional.when(inside):
                exists = None if chunks * width <= stored else where(chunk * width < stored, CHUNK, 0)
                if there is not None:
                    exists = where(((there >> row) & 1) != 0, CHUNK if exists is None else exists, 0)
                ptx.cp_async(place + layout.chunk_offset(base + row, chunk + behind), source, zero_fill_size=exists)


def clear_rows(
    tile: Pointer, layout: SharedLayout, kept: tuple[Value, Value], threads: Threads, arrive: Callable[[], None]
) -> None:
    """Let the consumers zero the rows of a tile outside of the range ``kept``, with a barrier if there are any.

    ``arrive`` first waits for parts of the tile that have not landed.
    """
    begin, end = kept
    everyone = threads.consumers * WARPGROUP
    chunks = layout.panels * (layout.pitch // CHUNK)
    with functional.when((begin > 0) | (end < layout.rows)):
        arrive()
        spans = ((0, kv_math.min(begin, layout.rows)), (kv_math.max(end, 0), layout.rows))
        for first, last in spans:
            with functional.loop(first * chunks + threads.thread, last * chunks, everyone) as i:
                i = Value(i.ir, i32, nonneg=True)
                (tile + layout.chunk_offset(i // chunks, i % chunks)).store(vector(i32, 4))
        threads.fence()
        sync_consumers(threads)


# --- rows of buffers ---------------------------------------------------------------------------------


def load_rows(op: Any, place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Load query rows to shared memory: the threads that share rows load theirs."""
    width = CHUNK // layout.itemsize
    chunks = layout.columns // width
    buffer = buffer_of(op.buffer)
    thread, count, first, rows = threads.own_rows(layout.rows)
    with functional.loop(thread, rows * chunks, count) as i:
        i = Value(i.ir, i32, nonneg=True)
        row, chunk = first + i // chunks, i % chunks
        at = AtPoint()
        indices = [scalar(at(x, row.ir)) for x in op.indices]
        target = place + layout.chunk_offset(row, chunk)
        stored = _stored(op, layout, chunk)
        with functional.when(_condition(at, op.mask, row) & stored):
            target.store(buffer.load(*indices, _column(op, chunk * width), width=width))
        with functional.when(~(_condition(at, op.mask, row) & stored)):
            target.store(vector(buffer.dtype, width))
    sync_for_products(threads)


def copy_buffer_rows(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Copy query rows by cp.async, and arrive at ``full``.

    The arrival is a cp.async arrival (``async_arrive``) or follows a wait for the copies. If the rows are the first
    columns of a stage, the copy of the other columns arrives for both.
    """
    layout = stages.layout
    columns = number_of(op, "columns", layout.columns)
    lanes, chunks = chunks_of_lanes(columns_of(layout, columns))
    width = CHUNK // layout.itemsize
    source = buffer_of(op.source)
    stage, _ = stages.stage(scalar(op.n))
    place = stages.tile(stage)

    def copy(row: Value, lane: Value, target: Callable[[int], Pointer]) -> None:
        at = AtPoint()
        indices, exists = [scalar(at(x, row.ir)) for x in op.indices], _condition(at, op.mask, row)
        for first in chunks:
            chunk = first + lane
            there = where(exists & _stored(op, layout, chunk, first + lanes), CHUNK, 0)
            address = source.address(*indices, _column(op, chunk * width))
            ptx.cp_async(target(first), address, CHUNK, there)

    step = threads // lanes  # rows per iteration of all threads
    if stages.async_arrive and threads % lanes == 0 and step % SWIZZLE_ROWS == 0:  # constant strides
        row0, lane = (Value(x.ir, i32, nonneg=True) for x in (thread // lanes, thread % lanes))
        places = {first: place + layout.chunk_offset(row0, first + lane) for first in chunks}
        with functional.loop(0, ptx.unknown(layout.rows), step) as begin:
            ptx.stay_rolled()
            row = Value((row0 + begin).ir, i32, nonneg=True)
            with functional.when(row < layout.rows) if layout.rows % step else contextlib.nullcontext():
                copy(row, lane, lambda first: places[first] + begin * layout.pitch)
    else:
        with functional.loop(thread, layout.rows * lanes, threads) as i:
            ptx.syncwarp()  # keeps LLVM from unrolling, which would spill a producer's registers
            i = Value(i.ir, i32, nonneg=True)
            row, lane = i // lanes, i % lanes
            copy(row, lane, lambda first: place + layout.chunk_offset(row, first + lane))
    if columns < layout.columns:
        return
    if stages.async_arrive:
        ptx.cp_async_mbarrier_arrive(stages.full + stage * BARRIER_BYTES)
        return
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    stages.filled(stage, thread)


def negate_rows(place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Negate rows of a tile in shared memory, in place."""
    chunks = layout.row_bytes // CHUNK
    thread, count, first, rows = threads.own_rows(layout.rows)
    with functional.loop(thread, rows * chunks, count) as i:
        i = Value(i.ir, i32, nonneg=True)
        at = place + layout.chunk_offset(first + i // chunks, i % chunks)
        at.store(at.load(u32, CHUNK // 4) ^ SIGNS[layout.itemsize])
    sync_for_products(threads)


def store_rows(op: Any, place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Write rows of a staged tile to a buffer: each warp its own 16 rows, or all threads that share the rows."""
    width = CHUNK // layout.itemsize
    lanes, chunks = chunks_of_lanes(layout)
    buffer, start = buffer_of(op.buffer), stored_from(op)
    together = threads.across > 1
    if together:
        sync_consumers(threads)
    else:
        ptx.syncwarp()
    thread, count, _, rows = threads.own_rows(layout.rows) if together else (threads.lane, WARP, 0, 16)
    repeated = range(0, layout.rows, rows if together else 16 * threads.warps)
    for further in repeated:
        with functional.loop(thread, rows * lanes, count) as i:
            i = Value(i.ir, i32, nonneg=True)
            row, at = i // lanes if together else threads.warp * 16 + i // lanes, AtPoint()
            row = row + further if further else row
            with functional.when(_condition(at, op.mask, row)):
                indices = [scalar(at(x, row.ir)) for x in op.indices]
                for first in chunks:
                    chunk = first + i % lanes
                    there = _stored(op, layout, chunk, first + lanes)
                    with contextlib.nullcontext() if there is True else functional.when(there):
                        value = (place + layout.chunk_offset(row, chunk)).load(buffer.dtype, width)
                        buffer.store(*indices, start + chunk * width, value=value)


def chunks_of_lanes(layout: SharedLayout) -> tuple[int, range]:
    """(lanes per row, chunks of the first lane): each lane has one chunk of every swizzle atom of the row.

    So a lane computes one address per row, and the lanes of a row access a whole line of an atom at a time.
    """
    chunks = layout.row_bytes // CHUNK
    lanes = min(layout.pitch // CHUNK, chunks)
    return lanes, range(0, chunks, lanes)


def rows_held(op: Any, layout: RegisterLayout, threads: Threads) -> tuple[list[ir.Value], list[ir.Value]]:
    """(masks, indices in the buffer) of the rows of a tile that a thread holds, row by row."""
    own = layout.thread_offset(threads.lane, threads.warp)[0]
    masks, indices = [], []
    for row in layout.rows_a_thread:
        at = AtPoint()
        masks.append(at(op.mask, (own + row).ir))
        indices += [at(x, (own + row).ir) for x in op.indices]
    return masks, indices


def store_registers(op: Any, layout: RegisterLayout, threads: Threads) -> None:
    """Write a tile from registers to rows of a buffer.

    A thread writes two neighbouring elements of 32 or 8 bits, or four of 16. For a transposed tile it writes single
    elements; eight lanes then have neighbouring ones.
    """
    buffer, tile = buffer_of(op.buffer), op.operation.attributes["kv.tile"].value
    values = elements(unpacked(op.source) if held_as_words(tile) else op.source)
    column, first = layout.thread_offset(threads.lane, threads.warp)[1], stored_from(op)
    rank, stored = len(list(op.indices)) // len(list(op.masks)), stored_columns(op, layout.shape[1])
    places = {layout.register_offset(r): r for r in range(layout.registers)}
    threads = threads.split_like(layout)
    wide, step = buffer.dtype.bits != 16, 2 * BLOCK_COLUMNS * threads.across
    run = 2 if (0, 1) in layout.register_bases else 1  # neighbouring elements of a row that a thread has
    stack_columns = min((basis[1] for basis in layout.warp_bases if basis[1]), default=0)  # columns per stack
    for i, (row, mask) in enumerate(zip(layout.rows_a_thread, op.masks, strict=True)):
        indices = [scalar(x) for x in list(op.indices)[i * rank : (i + 1) * rank]]
        if wide:
            firsts = [at for at in layout.columns_a_thread[::run] if at < stored]
            written = [(column + at, [values[places[row, at + u]] for u in range(run)]) for at in firsts]
        else:
            firsts = [at for at in layout.columns_a_thread if at < stored and at % (2 * BLOCK_COLUMNS) == 0]
            written = _fours(values, places, row, firsts, threads, stack_columns)
        some = (stored % step or (stack_columns > step and stored < layout.shape[1])) and (
            threads.across > 1 or not wide
        )
        with functional.when(_bool(mask)):
            for at, held in written:
                with functional.when(at < stored) if some else contextlib.nullcontext():
                    several = [Value(x, buffer.dtype) for x in held]
                    found = vector(buffer.dtype, several) if len(several) > 1 else several[0]
                    buffer.store(*indices, at + first, value=found)


def _fours(
    values: Sequence[ir.Value], places: dict[tuple[int, int], int], row: int, firsts: Sequence[int], threads: Threads,
    stack_columns: int,
) -> list[tuple[Value, list[ir.Value]]]:  # fmt: skip
    """(column, elements) of the groups of four 16-bit neighbours that a thread writes of a row, one per 16 columns.

    ``stack_columns``: the columns from one stack of warps to the next.

    In an accumulator four lanes have two elements each of 8 columns. Neighbouring lanes exchange halves of two such
    blocks, so that four lanes write 32 bytes of a row, a full memory sector.
    """
    lane = threads.lane
    odd, found = (lane & 1) == 1, []
    column = (lane & 1) * BLOCK_COLUMNS + ((lane >> 1) & 1) * 4
    if threads.across > 1:
        column = column + threads.column_warp * stack_columns
    for first in firsts:
        pairs = [[values[places[row, at + u]] for u in range(2)] for at in (first, first + BLOCK_COLUMNS)]
        low, high = (scalar(words(from_elements(pair))[0]) for pair in pairs)
        other = kv_gpu.shuffle_xor(where(odd, low, high), 1)
        both = from_elements([where(odd, other, low).ir, where(odd, high, other).ir])
        type_ = ir.VectorType.get([4], values[0].type)
        found.append((column + first, elements(mlir_vector.bitcast(type_, both))))
    return found


def _stored(op: Any, layout: SharedLayout, chunk: Value, end: int = 0) -> Value | bool:
    """Whether the buffer has a chunk of a row; ``end`` is an upper bound of the chunk's number."""
    stored = stored_columns(op, layout.columns) * layout.itemsize // CHUNK
    return True if stored >= (end or layout.row_bytes // CHUNK) else chunk < stored


def _column(op: Any, column: Value) -> Value:
    """The column of the buffer for a column of a row tile."""
    first = stored_from(op)
    return column + first if first else column


def _condition(at: AtPoint, mask: ir.Value, row: Value) -> Value:
    return Value(at(mask, row.ir), bool_)


def stage_tile(value: ir.Value, tile: ir.Type, place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Store an accumulator, converted to 16 bits, to shared memory; each warp its part."""
    if ir.RankedTensorType(tile).element_type.width != 16:
        stage_elements(value, place, layout, register_layout(tile), threads)
    elif is_transposed(tile):
        stage_transposed(words(value), place, layout, threads)
    else:
        stage_registers(value, place, layout, threads.split_like(register_layout(tile)))


def places_held(
    place: Pointer, layout: SharedLayout, held: RegisterLayout, threads: Threads
) -> list[tuple[Pointer, range]]:
    """(address, registers) of the neighbouring elements of a row that a thread has, in the order of the registers."""
    row, column = held.thread_offset(threads.lane, threads.warp)
    run, found = 2 if held.register_bases[:1] == ((0, 1),) else 1, []
    for first in range(0, held.registers, run):
        down, right = held.register_offset(first)
        found.append((place + layout.offset(row + down, column + right), range(first, first + run)))
    return found


def stage_elements(
    value: ir.Value, place: Pointer, layout: SharedLayout, held: RegisterLayout, threads: Threads
) -> None:
    """Store elements of any size from registers to shared memory."""
    dtype, values = by_mlir(str(ir.VectorType(value.type).element_type)), elements(value)
    for at, registers in places_held(place, layout, held, threads):
        several = [Value(values[r], dtype) for r in registers]
        at.store(vector(dtype, several) if len(several) > 1 else several[0])


def read_tile(place: Pointer, layout: SharedLayout, tile: ir.Type, threads: Threads) -> ir.Value:
    """Read a tile from shared memory to registers, 16-bit elements of accumulators by ldmatrix."""
    held, element = register_layout(tile), ir.RankedTensorType(tile).element_type
    if element.width == 16 and not is_transposed(tile) and held.warps_along(COLUMN) == 1:
        return tile_mma.loaded(place, layout, threads, element)
    dtype, found = by_mlir(str(element)), list[ir.Value]()
    for at, registers in places_held(place, layout, held, threads):
        read = at.load(dtype, len(registers))
        found += [x.ir for x in read] if len(registers) > 1 else [read.ir]
    ptx.syncwarp()  # one lane releases a stage for all lanes, which have read it then
    return from_elements(found)


def stage_transposed(fragments: list[ir.Value], place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Store a transposed accumulator to shared memory: each warp all rows of 16 columns, repeated.

    A register holds two rows of one column; stmatrix.trans or movmatrix transposes blocks of 8x8.
    """
    blocks, lane, warps = layout.rows // 8, threads.lane, threads.warps
    for r in range(layout.columns // (16 * warps)):
        chunk = 2 * (threads.warp + r * warps)
        for block in range(0, blocks, 2):
            some = [scalar(w) for w in fragments[2 * (r * blocks + block) :][: 2 * min(2, blocks - block)]]
            if threads.proxy:  # a target with wgmma has stmatrix
                row = (lane & 7) + (8 * (block + (lane >> 4)) if len(some) == 4 else 8 * block)
                ptx.stmatrix(place + layout.chunk_offset(row, chunk + ((lane >> 3) & 1)), some, trans=True)
                continue
            for i, word in enumerate(some):
                at = place + layout.chunk_offset((lane >> 2) + 8 * (block + i // 2), chunk + i % 2)
                (at + (lane & 3) * 4).store(ptx.movmatrix(word))


def stage_registers(value: ir.Value, place: Pointer, layout: SharedLayout, threads: Threads, first: int = 0) -> None:
    """Store the rows of a 16-bit accumulator, 16 per warp at a time, from column ``first`` of the registers on."""
    fragments = words(value)[first // 4 :]
    if not threads.proxy:  # a target without wgmma may lack stmatrix
        tile_mma.store(fragments, place, layout, threads)
        return
    row, columns = threads.row_warp * 16 + (threads.lane & 15), layout.columns // threads.across
    high, down = threads.lane >> 4, threads.stack * 16
    if threads.across > 1:  # warpgroups divide the columns into contiguous ranges
        high = high + threads.column_warp * (columns // 8)
    for again in range(max(1, layout.rows // down)):
        for k in range(columns // 16):
            some = fragments[4 * (again * (columns // 16) + k) :][:4]
            at = layout.chunk_offset(row + again * down if again else row, high + 2 * k)
            ptx.stmatrix(place + at, [scalar(w) for w in some])


def columns_of(layout: SharedLayout, columns: int) -> SharedLayout:
    """The layout of a tile with another number of columns."""
    return replace(layout, columns=columns)


def stage_columns(op: Any, place: Pointer, layout: SharedLayout, threads: Threads) -> ir.Value:
    """``kv.tile_stage``: store some columns of each warp's rows to shared memory that only this warp reads."""
    ptx.syncwarp()  # all lanes have read the previous columns
    stage_registers(op.source, place, layout, threads, op.first_column.value)
    ptx.syncwarp()
    return place.ir


def load_registers(op: Any, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """Load a cache tile that no product reads: each thread its own elements, converted; 0 outside [begin, count)."""
    cache, dtype = handle_of(op.cache), by_mlir(str(ir.RankedTensorType(op.tile.type).element_type))
    batch, head, first, begin, count = (scalar(x) for x in (op.batch, op.head, op.first, op.begin, op.count))
    own_row, own_column = layout.thread_offset(threads.lane, threads.warp)
    zero = vector(dtype, 2)[0]
    found, pages = [], {}
    for r in range(layout.registers):
        row, column = layout.register_offset(r)
        token = first + own_row + row
        at = kv_math.max(kv_math.min(token, count - 1), 0)
        if row not in pages:
            pages[row] = cache.page(batch, at)
        place = {"b": batch, "h": head, "t": at, "d": own_column + (op.first_column.value + column)}
        seen = (token >= begin) & (token < count)
        found.append(where(seen, cache.load(**place, page=pages[row], dtype=dtype), zero).ir)
    return from_elements(found)


def store_tokens(op: Any, layout: RegisterLayout, threads: Threads) -> None:
    """``kv.tile_store``: each thread writes its own elements, converted, of tokens before ``count``."""
    cache, values = handle_of(op.cache), elements(op.value)
    source, dtype = by_mlir(str(values[0].type)), cache.spec.dtype
    batch, head, first, count = (scalar(x) for x in (op.batch, op.head, op.first, op.count))
    own_row, own_column = layout.thread_offset(threads.lane, threads.warp)
    run = 2 if layout.register_bases[:1] == ((0, 1),) else 1
    rows: dict[int, list[int]] = {}
    for register in range(0, layout.registers, run):
        rows.setdefault(layout.register_offset(register)[0], []).append(register)
    for row, registers in rows.items():
        token = first + own_row + row
        with functional.when((token >= 0) & (token < count)):
            page = cache.page(batch, token)
            for register in registers:
                several = [Value(values[register + i], source) for i in range(run)]
                held = vector(source, several) if run > 1 else several[0]
                column = own_column + (op.first_column.value + layout.register_offset(register)[1])
                cache.store(batch, head, token, column, cast(held, dtype), page=page)


# --- elements of buffers -------------------------------------------------------------------------------


def gathered(of: ir.Value, mask: ir.Value, places: Sequence[ir.Value]) -> ir.Value:
    """Gather elements of a buffer, one per register."""
    buffer = buffer_of(of)
    indices = [elements(x) for x in places]
    masks = elements(mask)
    zero = vector(buffer.dtype, 2)[0]
    found = []
    for r, mask in enumerate(masks):
        at = [scalar(x[r]) for x in indices]
        loaded = functional.if_(_bool(mask), lambda at=at: buffer[tuple(at)], lambda: zero)
        found.append(loaded.ir)
    return from_elements(found)


def scatter(op: Any, value: ir.Value, owns: Value, registers: Sequence[int]) -> None:
    """Scatter the elements of a thread to a buffer, one per register, if ``owns``."""
    buffer = buffer_of(op.buffer)
    values, masks = elements(value), elements(op.mask)
    indices = [elements(x) for x in op.indices]
    for r in registers:
        with functional.when(owns & _bool(masks[r])):
            place, element = tuple(scalar(x[r]) for x in indices), Value(values[r], buffer.dtype)
            if "add" in op.operation.attributes:
                memory.atomic_add(buffer, place, element)
            else:
                buffer[place] = element


def _bool(value: ir.Value) -> Value:
    return Value(value, bool_)
