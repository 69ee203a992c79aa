# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.gather, kv.copy_pages and kv.transfer_pages: copy tokens out of a cache, or pages within and between pools."""

from __future__ import annotations

import math
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import FA3, CacheSpec, joined, lowbit
from kvarn.lowering.index import Ix

from .. import expands
from ..base import Expansion
from ..common import BYTES, THREADS, Rows, Work, begin, in_range, row_alignment, sequence_of, starts_early, vector_width
from .convert import stored

# Slots of a gather that a thread has in flight, and threads per block; more of either is slower, since DRAM then
# alternates between longer runs of reads and writes.
TOGETHER, GATHER_THREADS = 4, 64

# --- gather ----------------------------------------------------------------------------------------


def gather_kernel(spec: CacheSpec, work: Work, rows: Rows, together: int, early: bool) -> Any:
    """A "token" of the work is one (row, column) of token_ids; a thread looks up ``together`` of them at a time."""
    vectors, width, units = spec.head_size // rows.width, rows.width, spec.dtype.units(rows.width)

    @kv.func
    def found(cache, token_ids, row_offsets, slot):
        """(row, column, sequence, position, whether there is a token to copy) of a slot; zeros if not."""
        per_row = token_ids.shape[1]
        r, j = slot // per_row, slot % per_row
        ok = r < token_ids.shape[0]
        r = kv.where(ok, r, 0)
        b, inside, _ = sequence_of(row_offsets, r, token_ids.shape[0])
        t = token_ids[r, j]
        ok = ok & inside & in_range(cache, t)
        return r, j, kv.where(ok, b, 0), kv.where(ok, t, 0), ok

    @kv.kernel
    def gather(cache, token_ids, row_offsets, out):
        begin(early)
        slot, first = work.place()
        slot = slot + kv.block_id.x * (work.tokens * (together - 1))
        if (slot < token_ids.shape[0] * token_ids.shape[1]) & (first < work.items):
            places = [found(cache, token_ids, row_offsets, slot + n * work.tokens) for n in range(together)]
            for item in range(first, work.items, work.step):
                h, d = item // vectors, item % vectors * width
                read = [stored(cache, b, h, t, d, units) for _, _, b, t, _ in places]
                for n in kv.static(range(together)):
                    r, j, _, _, ok = places[n]
                    if ok:
                        value = kv.bitcast(read[n], out.dtype) if spec.packed else read[n]  # bytes without a sign
                        rows.store(out, r, j, h, spec.dtype.units(d), value=value)

    return gather


@expands("kv.gather")
def gather(op: Any, at: Expansion) -> None:
    spec = at.spec(op.cache)
    rows = Rows(vector_width(spec.head_size, types=(spec.dtype,)), row_alignment(at.op))
    work = Work.of(at, spec.row_size // rows.width, GATHER_THREADS)
    slots = at.dim(op.token_ids, 0) * at.dim(op.token_ids, 1)
    together, early = 1 if at.target.is_host else TOGETHER, starts_early(at)
    blocks = (slots + (work.tokens * together - 1)) // (work.tokens * together)
    args = [op.cache, op.token_ids, op.row_offsets, op.out]
    kernel = gather_kernel(spec, work, rows, together, early)
    at.launch(kernel, args, (blocks, 1, 1), (work.threads, 1, 1), programmatic=early)


# --- copy_pages, transfer_pages --------------------------------------------------------------------

UNROLL = 4  # accesses that a thread has in flight


def word(bytes_: int) -> tuple[DType, int]:
    """(element type, lanes) for copying memory whose address and size are multiples of ``bytes_``."""
    size = min(lowbit(bytes_), BYTES)
    return {16: (kv.u32, 4), 8: (kv.u32, 2), 4: (kv.u32, 1), 2: (kv.u16, 1), 1: (kv.u8, 1)}[size]


@kv.func
def copy_bytes(target: Any, source: Any, count: Any, unit: tuple[DType, int], threads: int) -> None:
    """Copy ``count`` bytes, a multiple of the unit, by the threads of a block."""
    dtype, lanes = unit
    size = dtype.itemsize * lanes
    step = threads * size
    whole = count - count % (step * UNROLL)
    first = kv.i64(kv.thread_id.x) * size
    for start in range(first, whole, step * UNROLL):
        moved = [(source + (start + n * step)).load(dtype, lanes) for n in kv.static(range(UNROLL))]
        for n in kv.static(range(UNROLL)):
            (target + (start + n * step)).store(moved[n])
    for start in range(whole + first, count, step):
        (target + start).store((source + start).load(dtype, lanes))


@kv.func
def copy_heads(target: Any, source: Any, to: CacheSpec, of: CacheSpec, threads: int) -> None:
    """Copy a page whose heads are not contiguous, by the threads of a block."""
    item = of.dtype.itemsize
    run, dims = joined(
        of.head_size,
        [(of.page_size, (of.token_stride, to.token_stride)), (of.num_heads, (of.head_stride, to.head_stride))],
    )
    dtype, lanes = word(of.head_size * item)
    size = dtype.itemsize * lanes
    words = run * item // size  # per run
    count = words * math.prod(n for n, _ in dims)

    def places(index):
        """(source, destination) of a word of the page, in bytes."""
        n, (first, second) = index // words, [kv.i64(index % words * size)] * 2
        for extent, (of_step, to_step) in dims:
            at, n = n % extent, n // extent
            first, second = first + kv.i64(at) * (of_step * item), second + kv.i64(at) * (to_step * item)
        return first, second

    whole = count - count % (threads * UNROLL)
    thread = kv.thread_id.x
    for start in range(thread, whole, threads * UNROLL):
        at = [places(start + n * threads) for n in kv.static(range(UNROLL))]
        moved = [(source + first).load(dtype, lanes) for first, _ in at]
        for n in kv.static(range(UNROLL)):
            (target + at[n][1]).store(moved[n])
    for index in range(whole + thread, count, threads):
        first, second = places(index)
        (target + second).store((source + first).load(dtype, lanes))


@kv.func
def copy_page(
    to: CacheSpec, spec: CacheSpec, source: Any, destination: Any, a: Any, b: Any, half: Any, layer: Any, threads: int
) -> None:
    """Copy one layer's keys or values, with their scales, of page ``a`` of a pool to page ``b`` of another or the same.

    Nothing is copied if one of the pages does not exist. ``to`` is the destination's spec, ``spec`` the source's.
    """
    if (a >= 0) & (a < source.field("num_blocks")) & (b >= 0) & (b < destination.field("num_blocks")):
        slots = kv.i64(source.field("capacity"))

        def begin(pool, page, base, prefix, dtype):
            """The address of the half and layer of a page."""
            stride0, halves, layers = (
                pool.field(f"{prefix}{name}") for name in ("stride0", "kv_stride", "layer_stride")
            )
            element = kv.i64(page) * stride0 + kv.i64(half) * halves + kv.i64(layer) * layers
            return pool.field(base) + dtype.bytes_of(element)

        def copy(base, prefix, per_slot, dtype):
            copy_bytes(
                begin(destination, b, base, prefix, dtype),
                begin(source, a, base, prefix, dtype),
                slots * dtype.bytes_of(per_slot),
                word(dtype.bytes_of(per_slot)),
                threads,
            )

        if spec.strides is None and to.strides is None:
            copy("blocks", "", spec.row_size, spec.dtype)
        else:
            target = begin(destination, b, "blocks", "", spec.dtype)
            copy_heads(target, begin(source, a, "blocks", "", spec.dtype), to, spec, threads)
        if spec.scale_dtype is not None:
            copy("scales", "scales_", spec.scales_token_stride, spec.scale_dtype)


@kv.func
def part_of(spec: CacheSpec, pool: Any, part: Any) -> tuple[Any, Any, Any]:
    """(pair, half, layer) of a block. Layers of an fa3 pool share its pages."""
    half, part = part % spec.kv_dim, part // spec.kv_dim
    if spec.kind == FA3:
        return part, half, kv.i32(0)
    layers = pool.field("num_layers")
    return part // layers, half, part % layers


def copy_pages_kernel(spec: CacheSpec, threads: int) -> Any:
    """A block copies one layer's keys or values of one page."""

    @kv.kernel
    def copy_pages(collection, source, destination):
        pair, half, layer = part_of(spec, collection, kv.block_id.x)
        copy_page(spec, spec, collection, collection, source[pair], destination[pair], half, layer, threads)

    return copy_pages


def transfer_kernel(spec: CacheSpec, to: CacheSpec, threads: int, one_layer: bool) -> Any:
    """As :func:`copy_pages_kernel`, between pools."""

    @kv.kernel
    def transfer_pages(source, destination, source_pages, destination_pages, layer: kv.i32):
        if one_layer:
            pair, half = kv.block_id.x // spec.kv_dim, kv.block_id.x % spec.kv_dim
        else:
            pair, half, layer = part_of(spec, source, kv.block_id.x)
        copy_page(to, spec, source, destination, source_pages[pair], destination_pages[pair], half, layer, threads)

    return transfer_pages


def parts(at: Expansion, pool: Any, pairs: Ix, one_layer: bool = False) -> Ix:
    """Blocks for copying ``pairs`` pairs of pages."""
    spec = at.spec(pool)
    count = pairs * spec.kv_dim
    return count if one_layer or spec.kind == FA3 else count * at.field(pool, "num_layers")


@expands("kv.copy_pages")
def copy_pages(op: Any, at: Expansion) -> None:
    threads = 1 if at.target.is_host else THREADS
    blocks = parts(at, op.collection, at.dim(op.source, 0))
    kernel = copy_pages_kernel(at.spec(op.collection), threads)
    at.launch(kernel, [op.collection, op.source, op.destination], (blocks, 1, 1), (threads, 1, 1))


@expands("kv.transfer_pages")
def transfer_pages(op: Any, at: Expansion) -> None:
    threads, one_layer = 1 if at.target.is_host else THREADS, op.layer is not None
    blocks = parts(at, op.source_pool, at.dim(op.source_pages, 0), one_layer)
    layer = op.layer if one_layer else at.constant(0)
    args = [op.source_pool, op.destination_pool, op.source_pages, op.destination_pages, layer]
    kernel = transfer_kernel(at.spec(op.source_pool), at.spec(op.destination_pool), threads, one_layer)
    at.launch(kernel, args, (blocks, 1, 1), (threads, 1, 1))
