# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles in shared memory: circular buffers and their copies, rows of buffers, staging. For distribute-kv-tiles.

Written with the functions of the kernel language, which make ops in a pass as in a kernel.
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
from kvarn.dialect.register_layout import RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, gpu as kv_gpu, math as kv_math, memory, ptx
from kvarn.dsl.handles import Cache, Operand
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value, vector, where
from kvarn.lowering.index import const

from . import mma as tile_mma
from .barriers import sync_all, sync_consumers, sync_for_products, wait_for_groups
from .boxes import StagedBoxes, copy_boxes
from .cache_rows import place_in_pool
from .converted_copies import convert_rows
from .copies import Staging, chunks_of, fits_pages, start_chunks, why_not_by_rows
from .ir import BARRIER_BYTES, NO_PAGE, WARP, WARPGROUP, AtPoint, is_transposed, users
from .products import words
from .threads import Threads, buffer_of, elements, from_elements, register_layout, scalar, warp_of
from .transposition import Transposition

SWIZZLE_ROWS = 8  # the period of a swizzle
BLOCK_COLUMNS = 8  # of an accumulator, which four lanes hold of a row
STAGINGS = ("staged", "transposed")  # how buffers are filled that have staging memory
SIGNS = {1: 0x80808080, 2: 0x80008000, 4: 0x80000000}  # the bits of a word that are signs, by the size of an element


@dataclass
class Stages:
    """A circular buffer: tiles, and the barriers ``full`` and ``empty`` of each; ``copying`` threads fill it."""

    name: str
    layout: SharedLayout
    count: int
    copy: str
    copying: int
    dtype: DType
    tiles: Pointer
    full: Pointer
    empty: Pointer
    of_rows: bool = False  # of a buffer, which are released after rows have been stored through them
    staging: Staging | StagedBoxes | Transposition | None = None  # of a buffer that is filled by one of STAGINGS
    finished: bool = False  # whether kv.copy_finish says when copies end
    told: bool = False  # whether copies by cp.async tell of their end themselves
    unfenced: bool = False  # whether products' view of what was written is left to those who wait for it
    grouped: bool = False  # whether threads wait for groups of copies and for one another, instead of for barriers
    parts: int = 1  # of a tile's columns that have a barrier ``full`` each

    @staticmethod
    def allocate(op: Any, layout: SharedLayout, copying: int, grouped: bool, slots: int) -> Stages:
        """The buffer of a ``kv.make_stages``, which ``copying`` threads fill, through ``slots`` if it is staged."""
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
        tells = any(start.pages is not None for start in starts) or any("tells" in user.attributes for user in users_of)
        made.told = not grouped and copy == "cp_async" and tells
        # A proxy fence waits for all copies and look-ups that a thread has under way, of later tiles too.
        made.unfenced = made.told or (not grouped and copy in STAGINGS)
        if copy in STAGINGS:
            kind = Staging if starts[0].descriptor is None and starts[0].pages is None else StagedBoxes
            if copy == "transposed":
                made.staging = Transposition(starts[0], layout, copying)
            else:
                made.staging = kind(starts[0], layout, copying, slots)
        return made

    def initialize(self, consumers: int) -> None:
        """Set the barriers up: warps that copy fill a stage, or what tells of itself, and ``consumers`` release it."""
        for stage in range(0 if self.grouped else self.count):
            copies = 1 if self.copy == "tma" else self.copying if self.told else self.copying // WARP
            for part in range(self.parts):
                name = f"full_{self.name}[{stage}]" if self.parts == 1 else f"full_{self.name}[{stage}][{part}]"
                ptx.mbarrier_init(self.full_of(stage, part), copies, name)
            ptx.mbarrier_init(self.empty + stage * BARRIER_BYTES, consumers, f"empty_{self.name}[{stage}]")
        if self.staging is not None:
            self.staging.initialize()

    def stage(self, n: Value) -> tuple[Value | int, Value]:
        """(stage, parity of its phase) of use ``n``."""
        if self.count == 1:
            return 0, n & 1
        if self.count & (self.count - 1) == 0:
            return n & (self.count - 1), (n >> (self.count.bit_length() - 1)) & 1
        n = Value(n.ir, n.dtype, nonneg=True)
        return n % self.count, (n // self.count) & 1

    def tile(self, stage: Any) -> Pointer:
        return self.tiles + self.layout.stage_offset(stage)

    def acquire(self, n: Value, sleep: int = 0) -> None:
        if self.grouped:  # everybody has read what the stage had
            sync_all()
            return
        stage, parity = self.stage(n)
        ptx.mbarrier_wait(self.empty + stage * BARRIER_BYTES, parity ^ 1, sleep, f"empty_{self.name}")

    def full_of(self, stage: Any, part: int = 0) -> Pointer:
        """The barrier that tells of a stage, or of a part of its columns."""
        first = self.full + stage * (self.parts * BARRIER_BYTES)
        return first + part * BARRIER_BYTES if part else first

    def wait_for(self, n: Value, parts: Sequence[int]) -> None:
        """Wait for some parts of use n, whose copies are TMA's."""
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
        if self.unfenced:  # the writes are of the generic proxy
            ptx.fence_proxy_async()
        return self.tile(stage)

    def filled(self, stage: Any, thread: Value) -> None:
        """A warp arrives: its threads have written to a stage, and products see it."""
        if not self.unfenced:
            ptx.fence_proxy_async()
        ptx.syncwarp()
        ptx.mbarrier_arrive(self.full + stage * BARRIER_BYTES, (thread & (WARP - 1)) == 0)

    def release(self, n: Value, threads: Threads) -> None:
        stage, _ = self.stage(n)
        if not self.grouped:
            ptx.mbarrier_arrive(self.empty + stage * BARRIER_BYTES, threads.lane == 0)


def handle_of(value: ir.Value) -> Any:
    """A cache or operand as the kernel language has it."""
    spec = types.spec_of(value.type)
    return (Cache if types.type_name(value.type) == "cache" else Operand)(value, spec)


# --- copies of caches ----------------------------------------------------------------------------------


def pages_of(op: Any, lane: Value) -> Value:
    """``kv.tile_pages``: lane i's page."""
    cache, count = handle_of(op.cache), scalar(op.count)
    token = scalar(op.first) + lane * op.step.value
    page = cache.page(scalar(op.batch), kv_math.max(kv_math.min(token, count - 1), 0))
    exists = (token < count) & (lane < op.rows.value // op.step.value)
    return where(exists, page, NO_PAGE)


def run_of(rows: int, threads: int) -> int:
    """Rows of a tile that each of the warps copies, at most."""
    return cdiv(rows, threads // WARP)


def convert_tile(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Threads load a tile, convert it and store it to its stage."""
    stage, _ = stages.stage(scalar(op.n))
    cache = handle_of(op.cache)
    convert_rows(op, cache, stages.layout, stages.tile(stage), stages.dtype, thread, threads, entry_of)
    if number_of(op, TILE_COLUMN, 0):  # of the other columns copies are under way
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
    if not stages.grouped:
        stages.filled(stage, thread)


def row_pages_of(op: Any, thread: Value, threads: int) -> Value:
    """``kv.tile_row_pages``: the page of this lane's row of its warp's run, or its entry in a list."""
    run = run_of(op.rows.value, threads)
    row = warp_of(thread) * run + kv_math.min(thread & (WARP - 1), run - 1)
    if op.lists is not None:
        return entry_of(op, scalar(op.first) + row)
    token = kv_math.max(kv_math.min(scalar(op.first) + row, scalar(op.count) - 1), 0)
    return handle_of(op.cache).page(scalar(op.batch), token)


def entry_of(op: Any, token: Value) -> Value:
    """The entry of a token in the lists of a copy; -1 where there is none."""
    last = kv_math.max(scalar(op.count) - 1, 0)
    entry = functional.if_(
        (token >= 0) & (token < scalar(op.count)),
        lambda: buffer_of(op.lists)[scalar(op.batch), kv_math.min(token, last)],
        lambda: Value(const(-1), i32),
    )
    return entry


def copy_tile_boxes(op: Any, stages: Stages, lane: Value) -> None:
    """One warp copies a tile by TMA to its stage."""
    stage, _ = stages.stage(scalar(op.n))
    copy_boxes(op, stages.layout, stages.tile(stage), stages.full_of(stage), lane, parts=stages.parts)


def start_rows(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Threads start copying a tile's rows by cp.async: to its stage, or to the memory from which they convert it."""
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
    """Threads wait for their copies of use n, convert them where they are staged, and arrive at its barrier."""
    stage, _ = stages.stage(n)
    if stages.staging is not None:
        stages.staging.finish(n, thread, pending, stages.tile(stage), stages.dtype)
    else:
        ptx.cp_async_wait(pending)
    if not stages.grouped:
        stages.filled(stage, thread)


def copy_runs(op: Any, layout: SharedLayout, place: Pointer, thread: Value, threads: int, producer: bool) -> None:
    """Each warp copies a run of rows whose pages its lanes hold: neighbouring lanes have neighbouring 16 bytes.

    A lane makes the address of its own row, and those who copy the row ask for it. Rows past the last token are copies
    of it; of lists, what they name no row for is zeros.
    """
    width = CHUNK // layout.itemsize
    run, behind = run_of(layout.rows, threads), number_of(op, TILE_COLUMN, 0) // width  # chunks of other copies
    chunks = layout.columns // width - behind
    thread = thread if producer else ptx.unknown(thread)  # offsets of all chunks would be held through the loop
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
        ptx.stay_rolled()  # the addresses of all copies, made first, would not fit the registers of a producer
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
    """The consumers write zeros to a tile's rows outside of ``kept``, and see them all written; ``arrive`` waits for
    what of the tile has yet to come.
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
    """Those that share rows load theirs of a tile to shared memory."""
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
            target.store(buffer.load(*indices, chunk * width, width=width))
        with functional.when(~(_condition(at, op.mask, row) & stored)):
            target.store(vector(buffer.dtype, width))
    sync_for_products(threads)


def copy_buffer_rows(op: Any, stages: Stages, thread: Value, threads: int) -> None:
    """Threads copy rows of a buffer by cp.async, see them there, and arrive at their barrier.

    Or it is told when the copies have come; of the first columns of a tile, by the copy of the others.
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
            address = source.address(*indices, chunk * width)
            ptx.cp_async(target(first), address, CHUNK, there)

    step = threads // lanes  # rows of all threads
    if stages.told and threads % lanes == 0 and step % SWIZZLE_ROWS == 0:  # addresses grow evenly
        row0, lane = (Value(x.ir, i32, nonneg=True) for x in (thread // lanes, thread % lanes))
        places = {first: place + layout.chunk_offset(row0, first + lane) for first in chunks}
        with functional.loop(0, ptx.unknown(layout.rows), step) as begin:
            ptx.stay_rolled()
            row = Value((row0 + begin).ir, i32, nonneg=True)
            with functional.when(row < layout.rows) if layout.rows % step else contextlib.nullcontext():
                copy(row, lane, lambda first: places[first] + begin * layout.pitch)
    else:
        with functional.loop(thread, layout.rows * lanes, threads) as i:
            ptx.syncwarp()  # which keeps LLVM from unrolling: a producer of few registers would spill
            i = Value(i.ir, i32, nonneg=True)
            row, lane = i // lanes, i % lanes
            copy(row, lane, lambda first: place + layout.chunk_offset(row, first + lane))
    if columns < layout.columns:
        return
    if stages.told:
        ptx.cp_async_mbarrier_arrive(stages.full + stage * BARRIER_BYTES)
        return
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    stages.filled(stage, thread)


def negate_rows(place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Those that share rows change the sign of theirs of a tile in place."""
    chunks = layout.row_bytes // CHUNK
    thread, count, first, rows = threads.own_rows(layout.rows)
    with functional.loop(thread, rows * chunks, count) as i:
        i = Value(i.ir, i32, nonneg=True)
        at = place + layout.chunk_offset(first + i // chunks, i % chunks)
        at.store(at.load(u32, CHUNK // 4) ^ SIGNS[layout.itemsize])
    sync_for_products(threads)


def store_rows(op: Any, place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """Each warp writes its own 16 rows of a staged tile to a buffer, or all those who share its rows write them."""
    width = CHUNK // layout.itemsize
    lanes, chunks = chunks_of_lanes(layout)
    buffer, start = buffer_of(op.buffer), stored_from(op)
    together = threads.across > 1
    if together:
        sync_consumers(threads)
    else:
        ptx.syncwarp()
    thread, count, _, rows = threads.own_rows(layout.rows) if together else (threads.lane, WARP, 0, 16)
    with functional.loop(thread, rows * lanes, count) as i:
        i = Value(i.ir, i32, nonneg=True)
        row, at = i // lanes if together else threads.warp * 16 + i // lanes, AtPoint()
        with functional.when(_condition(at, op.mask, row)):
            indices = [scalar(at(x, row.ir)) for x in op.indices]
            for first in chunks:
                chunk = first + i % lanes
                there = _stored(op, layout, chunk, first + lanes)
                with contextlib.nullcontext() if there is True else functional.when(there):
                    value = (place + layout.chunk_offset(row, chunk)).load(buffer.dtype, width)
                    buffer.store(*indices, start + chunk * width, value=value)


def chunks_of_lanes(layout: SharedLayout) -> tuple[int, range]:
    """(neighbouring lanes that share a row, the first of them's chunks): each has one of every panel.

    So an address is computed once a row, and what lanes access at a time is a panel's whole line.
    """
    chunks = layout.row_bytes // CHUNK
    lanes = min(layout.pitch // CHUNK, chunks)
    return lanes, range(0, chunks, lanes)


def rows_held(op: Any, layout: RegisterLayout, threads: Threads) -> tuple[list[ir.Value], list[ir.Value]]:
    """Of the rows that a thread holds of a tile: the masks and, one row after the other, the indices in a buffer."""
    own = layout.thread_offset(threads.lane, threads.warp)[0]
    masks, indices = [], []
    for row in layout.rows_a_thread:
        at = AtPoint()
        masks.append(at(op.mask, (own + row).ir))
        indices += [at(x, (own + row).ir) for x in op.indices]
    return masks, indices


def store_registers(op: Any, layout: RegisterLayout, threads: Threads) -> None:
    """Every thread writes what it holds of a tile to rows of a buffer: two neighbours of f32, or four of 16 bits; of a
    transposed tile single f32, of which eight lanes have neighbours.
    """
    buffer, values = buffer_of(op.buffer), elements(op.source)
    column, first = layout.thread_offset(threads.lane, threads.warp)[1], stored_from(op)
    rank, stored = len(list(op.indices)) // len(list(op.masks)), stored_columns(op, layout.shape[1])
    places = {layout.register_offset(r): r for r in range(layout.registers)}
    threads = threads.beside(layout)
    wide, step = buffer.dtype.bits == 32, 2 * BLOCK_COLUMNS * threads.across
    run = 2 if (0, 1) in layout.register_bases else 1  # neighbours of a row
    beside = min((basis[1] for basis in layout.warp_bases if basis[1]), default=0)  # columns of stacks beside others
    for i, (row, mask) in enumerate(zip(layout.rows_a_thread, op.masks, strict=True)):
        indices = [scalar(x) for x in list(op.indices)[i * rank : (i + 1) * rank]]
        if wide:
            firsts = [at for at in layout.columns_a_thread[::run] if at < stored]
            written = [(column + at, [values[places[row, at + u]] for u in range(run)]) for at in firsts]
        else:
            firsts = [at for at in layout.columns_a_thread if at < stored and at % (2 * BLOCK_COLUMNS) == 0]
            written = _fours(values, places, row, firsts, threads, beside)
        some = (stored % step or (beside > step and stored < layout.shape[1])) and (threads.across > 1 or not wide)
        with functional.when(_bool(mask)):
            for at, held in written:
                with functional.when(at < stored) if some else contextlib.nullcontext():
                    several = [Value(x, buffer.dtype) for x in held]
                    found = vector(buffer.dtype, several) if len(several) > 1 else several[0]
                    buffer.store(*indices, at + first, value=found)


def _fours(
    values: Sequence[ir.Value], places: dict[tuple[int, int], int], row: int, firsts: Sequence[int], threads: Threads,
    beside: int,
) -> list[tuple[Value, list[ir.Value]]]:  # fmt: skip
    """(column, elements) of four neighbours of 16 bits of a row, of every 16 columns.

    ``beside``: how many columns a stack of warps has before the next one's.

    Four lanes have two elements each of 8 columns. Neighbouring lanes exchange those of one 8 for those of the next, so
    that four lanes write 32 bytes of a row, what memory takes at a time.
    """
    lane = threads.lane
    odd, found = (lane & 1) == 1, []
    column = (lane & 1) * BLOCK_COLUMNS + ((lane >> 1) & 1) * 4
    if threads.across > 1:
        column = column + threads.column_warp * beside
    for first in firsts:
        pairs = [[values[places[row, at + u]] for u in range(2)] for at in (first, first + BLOCK_COLUMNS)]
        low, high = (scalar(words(from_elements(pair))[0]) for pair in pairs)
        other = kv_gpu.shuffle_xor(where(odd, low, high), 1)
        both = from_elements([where(odd, other, low).ir, where(odd, high, other).ir])
        type_ = ir.VectorType.get([4], values[0].type)
        found.append((column + first, elements(mlir_vector.bitcast(type_, both))))
    return found


def _stored(op: Any, layout: SharedLayout, chunk: Value, end: int = 0) -> Value | bool:
    """Whether a chunk of a row, one before ``end``, is one that the buffer has."""
    stored = stored_columns(op, layout.columns) * layout.itemsize // CHUNK
    return True if stored >= (end or layout.row_bytes // CHUNK) else chunk < stored


def _condition(at: AtPoint, mask: ir.Value, row: Value) -> Value:
    return Value(at(mask, row.ir), bool_)


def stage_tile(value: ir.Value, tile: ir.Type, place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """A warp's part of an accumulator, as 16-bit elements, to shared memory."""
    if is_transposed(tile):
        stage_transposed(words(value), place, layout, threads)
    else:
        stage_registers(value, place, layout, threads.beside(register_layout(tile)))


def stage_transposed(fragments: list[ir.Value], place: Pointer, layout: SharedLayout, threads: Threads) -> None:
    """A warp's 16 columns of a transposed accumulator, time after time, to shared memory: all rows, 8 at a time.

    A word has a column of two rows; an 8x8 block of words is transposed on its way.
    """
    blocks, lane, warps = layout.rows // 8, threads.lane, threads.warps
    for r in range(layout.columns // (16 * warps)):
        chunk = 2 * (threads.warp + r * warps)
        for block in range(0, blocks, 2):
            some = [scalar(w) for w in fragments[2 * (r * blocks + block) :][: 2 * min(2, blocks - block)]]
            if threads.proxy:  # where there is wgmma there is stmatrix
                row = (lane & 7) + (8 * (block + (lane >> 4)) if len(some) == 4 else 8 * block)
                ptx.stmatrix(place + layout.chunk_offset(row, chunk + ((lane >> 3) & 1)), some, trans=True)
                continue
            for i, word in enumerate(some):
                at = place + layout.chunk_offset((lane >> 2) + 8 * (block + i // 2), chunk + i % 2)
                (at + (lane & 3) * 4).store(ptx.movmatrix(word))


def stage_registers(value: ir.Value, place: Pointer, layout: SharedLayout, threads: Threads, first: int = 0) -> None:
    """A warp's 16 rows of an accumulator, as 16-bit elements, to shared memory: columns from a first on."""
    fragments = words(value)[first // 4 :]
    if not threads.proxy:  # where there is no wgmma there may be no stmatrix
        tile_mma.store(fragments, place, layout, threads)
        return
    row, columns = threads.row_warp * 16 + (threads.lane & 15), layout.columns // threads.across
    high = threads.lane >> 4
    if threads.across > 1:  # of warpgroups, each with neighbouring columns
        high = high + threads.column_warp * (columns // 8)
    for k in range(columns // 16):
        chunk = high + 2 * k
        ptx.stmatrix(place + layout.chunk_offset(row, chunk), [scalar(w) for w in fragments[4 * k : 4 * k + 4]])


def columns_of(layout: SharedLayout, columns: int) -> SharedLayout:
    """The layout of some columns of a tile as a tile of their own."""
    return replace(layout, columns=columns)


def stage_columns(op: Any, place: Pointer, layout: SharedLayout, threads: Threads) -> ir.Value:
    """``kv.tile_stage``: a warp's rows go where it alone reads them."""
    ptx.syncwarp()  # it has read what was there
    stage_registers(op.source, place, layout, threads, op.first_column.value)
    ptx.syncwarp()
    return place.ir


def load_registers(op: Any, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """A tile of a cache that no product reads: every thread loads its own elements, converted; other tokens are 0."""
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


# --- elements of buffers -------------------------------------------------------------------------------


def gathered(of: ir.Value, mask: ir.Value, places: Sequence[ir.Value]) -> ir.Value:
    """Elements of a buffer, one a register."""
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
    """Write elements of a buffer, one a register, by the threads that own them: ``value`` are those of a thread."""
    buffer = buffer_of(op.buffer)
    values, masks = elements(value), elements(op.mask)
    indices = [elements(x) for x in op.indices]
    for r in registers:
        with functional.when(owns & _bool(masks[r])):
            buffer[tuple(scalar(x[r]) for x in indices)] = Value(values[r], buffer.dtype)


def _bool(value: ir.Value) -> Value:
    return Value(value, bool_)
