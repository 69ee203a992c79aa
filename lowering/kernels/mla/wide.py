# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows with 64 query rows per block, whose output columns two warpgroups share.

512 f32 columns of 64 rows would take 256 registers per thread of one warpgroup. Splitting the keys between warpgroups
would need as many accumulators each, and splitting the rows would leave products half empty. Roles:

1. The *producer* copies tiles of 64 keys into two stages, in the order in which their boxes become free.
2. *Scores* has the left output columns. For tile i it starts O += P V of tile i - 1, whose weights are still in
   registers, and passes the weights to the other warpgroup through shared memory; after that product it starts
   Q K^T of tile i, box by box as they arrive. Then it computes the softmax of tile i, the only time when this warpgroup
   has no product in flight.
3. *Values* has the right output columns: it waits for weights and factors, then accumulates. With many tiles it waits
   until Q K^T of the next tile has started, so that its products overlap that softmax instead of those products.

A stage has ``full`` and ``empty`` mbarriers for the left boxes, for the right boxes and for those that are no values.
Weights have ``p_full`` and ``p_empty``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from ..attention.arguments import AttentionArguments
from ..attention.partials import LOG2E, LOWEST, normalizer
from . import copies as latent_copies, rows as latent_rows
from .common import (
    BOX,
    BOX_COLUMNS,
    CHUNK,
    CONSUMERS,
    CONSUMERS_BARRIER,
    KEYS,
    NEVER,
    SCORES_BARRIER,
    WIDE,
    LatentConfig,
    clear_rows,
    extents_of,
    load_query,
    lse_of,
    of_functions,
    pack,
    place_of,
    queries_of,
    tile_of,
    write_rows,
    writes_partials,
    writes_results,
)

STAGES = 2
LONG = 32  # tiles from which waiting for scores to start pays off for the values role
OF_BOX = 32  # accumulators per thread for a box of columns
# Registers per thread of producer, scores and values; their sum is what the block starts with.
REGISTERS = {"tma": (24, 240, 240), "rows": (40, 232, 232)}
WEIGHTS = SharedLayout(WIDE, KEYS, 2, 128)
WIDEST = 4  # boxes per product: 256 columns


def groups_of(c: LatentConfig) -> list[tuple[int, int]]:
    """(first, number) of boxes that share barriers: those that are no values, the left values, the right values."""
    left = c.value_boxes // 2
    rest = c.boxes - c.value_boxes
    return ([(c.value_boxes, rest)] if rest else []) + [(0, left), (left, c.value_boxes - left)]


def threads_of(c: LatentConfig) -> int:
    """Threads of the producer's warpgroups, scores and values."""
    return align_up(32 * c.producer_warps, 128) + CONSUMERS


def shared_bytes(c: LatentConfig) -> int:
    """Bytes of the query, stages, weights, one factor and one end per row, barriers, and the bits of existing keys."""
    return (1 + STAGES) * c.boxes * BOX.bytes + WEIGHTS.bytes + 2 * 4 * WIDE + 18 * BARRIER_BYTES + 8 * STAGES


@dataclass(frozen=True)
class Memory:
    """Addresses of a block's shared memory.

    Attributes
    ----------
    q_tile, stages, weights : pointers
        The query, which the output's columns replace, tiles of keys, and a tile's weights.
    factors, ends : pointers
        One number per row: the factor of the accumulators, during the loop and at the end.
    seen_at : pointer
        With lists, which keys of a stage exist.
    full, empty, p_full, p_empty, seen_full, values_start : pointers
        Barriers.
    """

    q_tile: Any
    stages: Any
    weights: Any
    factors: Any
    ends: Any
    seen_at: Any
    full: Any
    empty: Any
    p_full: Any
    p_empty: Any
    seen_full: Any
    values_start: Any


def latent_kernel(c: LatentConfig) -> Any:
    """The kernel for a configuration: one block per tile of query rows and split of their keys.

    The roles get ``at``, the block's shared memory, the arguments ``a`` and the work item ``t``.
    """
    case, dtype, V = c.case, c.case.query, c.case.value_size
    groups = groups_of(c)
    LEFT, RIGHT = len(groups) - 2, len(groups) - 1
    TILE = c.boxes * BOX.bytes
    right_bytes, right_column = groups[RIGHT][0] * BOX.bytes, groups[RIGHT][0] * BOX_COLUMNS
    query_layout = SharedLayout(WIDE, case.size, 2, 128)
    value_steps = BOX.row_steps()

    def barrier_of(barriers: Any, stage: Any, group: int) -> Any:
        return barriers + (stage * (len(groups) * BARRIER_BYTES) + group * BARRIER_BYTES)

    def key_steps(group: int) -> list[tuple[int, int]]:
        """Byte offsets of the 16-column k-steps of a group's boxes, in the query and in the keys."""
        first, count = groups[group]
        return [(x, x) for x in query_layout.k_steps()[4 * first : min(4 * (first + count), case.size // 16)]]

    @kv.func
    def release(barrier, lane):
        kv.mbarrier_arrive(barrier, lane == 0)

    @kv.func
    def start_values(o, weights, boxes, steps):
        """Start O += P V for the columns of some boxes."""
        count = len(o) // OF_BOX
        products = cdiv(count, WIDEST)
        for n in kv.static(range(products)):
            first, end = n * count // products, (n + 1) * count // products
            values = kv.wgmma_descriptor(boxes + first * BOX.bytes, BOX.bytes)
            mine = slice(first * OF_BOX, end * OF_BOX)
            o[mine] = kv.wgmma_start(o[mine], weights, values, steps, dtype, trans_b=True)

    @kv.func
    def weights_of(at, a, t, s, i, entry, scale_log2, sums, warp, lane):
        """The softmax of tile i: weights as operand A. ``sums`` is (m, total, alpha) of the rows."""
        tiles = t.keys.tiles
        base = tiles.base(entry)
        if case.functions:
            elements = latent_rows.elements_of(warp, lane)
            whole, start = tiles.whole(entry), t.extents[0]
            of_functions(c, s, [scale_log2] * len(s), elements, t.b, t.place, start, base, a.arrays, whole)
            scale_log2 = kv.f32(1.0)
        visible(at, t, s, i, base, warp, lane)
        latent_rows.softmax(s, *sums, [scale_log2] * 2)
        return latent_rows.packed(dtype, s)

    @kv.func
    def rescaled(o, alpha):
        """Accumulators times their factors, in warps where a maximum has moved."""
        if kv.ballot((alpha[0] != 1.0) | (alpha[1] != 1.0)) != 0:
            for i in kv.static(range(len(o))):
                o[i] = o[i] * alpha[i // 2 % 2]

    @kv.func
    def publish(at, p, alpha, warp, lane):
        """Store weights and factors to shared memory for the other warpgroup."""
        latent_rows.store_weights(WEIGHTS, p, at.weights, warp, lane)
        latent_rows.store_factors(alpha, at.factors, warp, lane)
        kv.fence_proxy_async()
        kv.syncwarp()
        release(at.p_full, lane)

    @kv.func
    def write_columns(a, t, o, inverse, staging, first_column, warp, lane):
        """Write a warpgroup's columns through shared memory, where every warp has its own rows."""
        for k in kv.static(range(len(o) // 8)):
            words = [
                pack(dtype, o[8 * k + i] * inverse[i // 2 % 2], o[8 * k + i + 1] * inverse[i // 2 % 2])
                for i in (0, 2, 4, 6)
            ]
            of_box = BOX.chunk_offset(warp * 16 + (lane & 15), 2 * (k % 4) + (lane >> 4))
            kv.stmatrix(staging + (k // 4 * BOX.bytes + of_box), words)
        kv.syncwarp()
        chunks = len(o) // OF_BOX * CHUNK
        for i in range(lane, 16 * chunks, 32):
            row, chunk = warp * 16 + i // chunks, i % chunks
            vector = (staging + (chunk // CHUNK * BOX.bytes + BOX.chunk_offset(row, chunk % CHUNK))).load(dtype, CHUNK)
            column, split = first_column + chunk * CHUNK, kv.block_id.y
            write_rows(c, vector, a.partials, a.out, t.place, row, column, t.splits, split)

    @kv.func
    def write_nothing(a, t, thread):
        """Write the result of a tile of rows that attends to no key."""
        splits, split = t.splits, kv.block_id.y
        if writes_results(c, splits):
            for i in range(thread, WIDE * (V // CHUNK), CONSUMERS):
                row, column = i // (V // CHUNK), i % (V // CHUNK) * CHUNK
                write_rows(c, c.part(kv.vector(f32, CHUNK)), a.partials, a.out, t.place, row, column, splits, split)
        else:
            if thread < WIDE:
                lse_of(c, a.partials, kv.grid_dim.x, t.place[0], splits, split, thread).store(kv.f32(NEVER))

    @kv.func
    def visible(at, t, s, i, base, warp, lane):
        """Mask a tile's scores, and zero its values for keys that no row attends to."""
        (first, last, whole_first, whole_end, _, _), stage = t.keys, i & 1
        if c.copy == "tma":
            if (base < first) | (base + KEYS > last):
                kv.named_barrier(SCORES_BARRIER, 128)  # all scores warps have multiplied the keys
                tile = at.stages + stage * TILE
                clear_rows(BOX, tile, c.value_boxes, first - base, last - base, warp * 32 + lane, 128)
                kv.fence_proxy_async()
                kv.named_barrier(SCORES_BARRIER, 128)
        seen = []
        if c.case.listed:
            kv.mbarrier_wait(at.seen_full + stage * BARRIER_BYTES, (i >> 1) & 1)
            seen = [(at.seen_at + stage * 8).load(kv.u32), (at.seen_at + stage * 8 + 4).load(kv.u32)]
        if c.case.listed:
            some = (seen[0] & seen[1]) != 0xFFFFFFFF
        else:
            some = (base < whole_first) | (base + KEYS > whole_end)
        if some:
            latent_rows.masked(c, s, seen, *t.extents, *t.place[2:], base, warp, lane)

    @kv.func
    def left_columns(at, a, t, warp, lane):
        tiles, num_tiles = t.keys.tiles, t.keys.num_tiles
        entry = tiles.entry(0)
        scale_log2 = kv.math.max(kv.math.abs(a.scale), 1.0e-30) * LOG2E
        q = kv.wgmma_descriptor(at.q_tile)
        m, total, alpha = [kv.f32(LOWEST)] * 2, [kv.f32(0.0)] * 2, [kv.f32(1.0)] * 2
        s = KEYS
        for g in kv.static(range(len(groups))):
            latent_copies.wait_for(c, barrier_of(at.full, 0, g), 0)
            s = kv.wgmma_start(s, q, kv.wgmma_descriptor(at.stages), key_steps(g), dtype)
        s = kv.wgmma_wait(0, s)[0]
        for g in kv.static(range(LEFT)):
            release(barrier_of(at.empty, 0, g), lane)
        p = weights_of(at, a, t, s, 0, entry, scale_log2, (m, total, alpha), warp, lane)
        o = [kv.f32(0.0)] * (groups[LEFT][1] * OF_BOX)
        for i in range(1, num_tiles):
            stage, before, entry = i & 1, (i - 1) & 1, tiles.entry(i)
            tile, tile_before = at.stages + stage * TILE, at.stages + before * TILE
            rescaled(o, alpha)
            start_values(o, p, tile_before, value_steps)
            kv.mbarrier_wait(at.p_empty, i & 1)
            publish(at, p, alpha, warp, lane)
            s = KEYS
            with kv.trace("multiply"):
                for g in kv.static(range(len(groups))):
                    latent_copies.wait_for(c, barrier_of(at.full, stage, g), (i >> 1) & 1)
                    s = kv.wgmma_start(s, q, kv.wgmma_descriptor(tile), key_steps(g), dtype)
                    if g == RIGHT:
                        release(at.values_start + before * BARRIER_BYTES, lane)
                    if g == 0:
                        o, s = kv.wgmma_wait(1, o, s)  # O + P V is complete
                        release(barrier_of(at.empty, before, LEFT), lane)
                s = kv.wgmma_wait(0, s)[0]
            for g in kv.static(range(LEFT)):
                release(barrier_of(at.empty, stage, g), lane)
            with kv.trace("softmax"):
                p = weights_of(at, a, t, s, i, entry, scale_log2, (m, total, alpha), warp, lane)
        rescaled(o, alpha)
        tile = at.stages + ((num_tiles - 1) & 1) * TILE
        start_values(o, p, tile, value_steps)
        kv.mbarrier_wait(at.p_empty, num_tiles & 1)
        publish(at, p, alpha, warp, lane)
        release(at.values_start + ((num_tiles - 1) & 1) * BARRIER_BYTES, lane)
        o = kv.wgmma_wait(0, o)[0]
        inverse, splits = [kv.f32(0.0)] * 2, t.splits
        for u in kv.static(range(2)):
            for k in kv.static((1, 2)):
                total[u] = total[u] + kv.shuffle_xor(total[u], k)
            row = warp * 16 + (lane >> 2) + 8 * u
            inverse[u] = normalizer(total[u])
            if (lane & 3) == 0:
                (at.ends + row * 4).store(inverse[u])
                if writes_partials(c, splits):
                    lse = kv.where(total[u] == 0.0, NEVER, m[u] + kv.math.log2(total[u]))
                    lse_of(c, a.partials, kv.grid_dim.x, t.place[0], splits, kv.block_id.y, row).store(lse)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)  # the query has been read: its memory is free
        with kv.trace("write"):
            write_columns(a, t, o, inverse, at.q_tile, 0, warp, lane)

    @kv.func
    def right_columns(at, a, t, warp, lane):
        p, num_tiles = kv.wgmma_descriptor(at.weights), t.keys.num_tiles
        steps = list(zip(WEIGHTS.k_steps(), value_steps, strict=True))
        o = [kv.f32(0.0)] * (groups[RIGHT][1] * OF_BOX)
        row = warp * 16 + (lane >> 2)
        for i in range(num_tiles):
            stage = i & 1
            with kv.trace("wait for weights"):
                kv.mbarrier_wait(at.p_full, i & 1)
            rescaled(o, [(at.factors + row * 4).load(kv.f32), (at.factors + (row + 8) * 4).load(kv.f32)])
            with kv.trace("wait for scores"):
                if num_tiles >= LONG:
                    kv.mbarrier_wait(at.values_start + stage * BARRIER_BYTES, (i >> 1) & 1)
            with kv.trace("multiply"):
                latent_copies.wait_for(c, barrier_of(at.full, stage, RIGHT), (i >> 1) & 1)
                start_values(o, p, at.stages + stage * TILE + right_bytes, steps)
                o = kv.wgmma_wait(0, o)[0]
            release(barrier_of(at.empty, stage, RIGHT), lane)
            release(at.p_empty, lane)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
        inverse = [(at.ends + row * 4).load(kv.f32), (at.ends + (row + 8) * 4).load(kv.f32)]
        with kv.trace("write"):
            write_columns(a, t, o, inverse, at.q_tile + right_bytes, right_column, warp, lane)

    @kv.func
    def produce_by_tma(at, key_map, cache, t, lane):
        b, last, tiles, num_tiles = t.b, t.keys.end, t.keys.tiles, t.keys.num_tiles
        following = tiles.base(tiles.entry(0))
        pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
        for i in range(num_tiles):
            here, base = pages, tiles.base(tiles.entry(i)) if tiles.lists is None else following
            following = tiles.base(tiles.entry(i + 1))
            pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
            for g in kv.static(range(len(groups))):
                kv.mbarrier_wait(barrier_of(at.empty, i & 1, g), ((i >> 1) & 1) ^ 1)
                place = at.stages + ((i & 1) * TILE + groups[g][0] * BOX.bytes)
                latent_copies.boxes_by_tma(
                    c, key_map, cache, place, barrier_of(at.full, i & 1, g), here, base, groups[g], lane
                )

    @kv.func
    def produce_rows(at, rows, t, thread):
        tiles, num_tiles = t.keys.tiles, t.keys.num_tiles
        following = latent_copies.places_of(c, rows, tiles.base(tiles.entry(0)), thread)
        for i in range(num_tiles):
            places, stage = following, i & 1
            following = latent_copies.places_of(c, rows, tiles.base(tiles.entry(i + 1)), thread)
            for g in kv.static(range(len(groups))):
                kv.mbarrier_wait(barrier_of(at.empty, stage, g), ((i >> 1) & 1) ^ 1)
                place = at.stages + (stage * TILE + groups[g][0] * BOX.bytes)
                latent_copies.copy_boxes(c, rows, places, place, barrier_of(at.full, stage, g), groups[g], thread)
                if g == LEFT and c.case.listed:
                    there, barrier = at.seen_at + stage * 8, at.seen_full + stage * BARRIER_BYTES
                    latent_copies.record_existing_rows(c, places, there, barrier, thread)

    @kv.kernel(block=(threads_of(c), 1, 1), min_blocks=1)
    def attention_latent(a: AttentionArguments):
        memory = kv.shared((1 + STAGES) * TILE + WEIGHTS.bytes, kv.u8, alignment=1024).ptr()
        small = kv.shared(2 * WIDE, kv.f32).ptr()
        full = kv.shared(2 * STAGES * len(groups) + 2 + 2 * STAGES, kv.i64).ptr()
        seen_at = kv.shared(2 * STAGES, kv.u32, alignment=8).ptr()
        empty = full + STAGES * len(groups) * BARRIER_BYTES
        p_full = empty + STAGES * len(groups) * BARRIER_BYTES
        p_empty = p_full + BARRIER_BYTES
        seen_full = p_empty + BARRIER_BYTES
        at = Memory(
            memory, memory + TILE, memory + (1 + STAGES) * TILE, small, small + 4 * WIDE, seen_at, full, empty, p_full,
            p_empty, seen_full, seen_full + STAGES * BARRIER_BYTES,
        )  # fmt: skip
        thread, lane = kv.thread_id.x, kv.thread_id.x & 31
        role = kv.shuffle_idx(thread >> 7, 0)
        if thread == 0:
            for n in kv.static(range(STAGES * len(groups))):
                kv.mbarrier_init(at.full + n * BARRIER_BYTES, c.arrivals)
                kv.mbarrier_init(at.empty + n * BARRIER_BYTES, 4)
            kv.mbarrier_init(at.p_full, 4)
            kv.mbarrier_init(at.p_empty, 4)
            for n in kv.static(range(STAGES)):
                kv.mbarrier_init(at.seen_full + n * BARRIER_BYTES, 4)
                kv.mbarrier_init(at.values_start + n * BARRIER_BYTES, 4)
            kv.fence_mbarrier_init()
            if c.copy == "tma":
                kv.tma.prefetch(a.key_map)
        kv.barrier()
        splits, number = kv.grid_dim.y, kv.grid_dim.x - 1 - kv.block_id.x
        kv.griddepcontrol_wait()  # everything before belongs to this kernel alone
        queries = queries_of(a.query, a.extents, a.kv_offsets)
        b, token0, row0, rows = place_of(c, queries, number)
        place = (number, token0, row0, rows)
        # If a block's sequence is known, its length is read together with its offsets.
        extents = extents_of(c, a, queries, b, token0) if c.tiles else None
        if row0 < rows:
            cache = a.collection.get_key_cache(a.layer)
            t = tile_of(c, a, queries, b, place, extents, splits)
            producer, left, right = REGISTERS[c.copy]
            if role == 0:
                kv.setmaxnreg(producer, "decrease")
                if t.keys.num_tiles > 0:
                    if c.copy == "tma":
                        if thread < 32:
                            produce_by_tma(at, a.key_map, cache, t, lane)
                    else:
                        source = latent_copies.Rows(c, cache, a.lists, b, token0, t.keys.first, t.keys.end)
                        produce_rows(at, source, t, thread)
            else:
                consumer = thread - 128
                warp = (thread & 127) >> 5
                if t.keys.num_tiles > 0:
                    with kv.trace("load query"):
                        load_query(c, a, at.q_tile, query_layout, place, consumer, CONSUMERS)
                        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    if role == 1:
                        kv.setmaxnreg(left, "increase")
                        left_columns(at, a, t, warp, lane)
                    else:
                        kv.setmaxnreg(right, "increase")
                        right_columns(at, a, t, warp, lane)
                else:
                    write_nothing(a, t, consumer)

    return attention_latent
