# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows, 64 query rows a block: the columns of the output over two warpgroups.

512 columns of f32 for 64 rows are 256 registers of every thread of a warpgroup: two warpgroups share them.

- The *producer* copies tiles of 64 keys into two stages, in the order in which they become free.
- *Scores* has the left columns. For tile i it starts O += P V of tile i - 1, its weights still in registers, and hands
  them to the other warpgroup through shared memory; right behind it in the queue Q K^T of tile i starts, box by box as
  they arrive. Then the softmax of tile i: the only time when this warpgroup has no product under way.
- *Values* has the right columns: it waits for weights and factors, and adds. Where there are many tiles it waits until
  Q K^T of the next tile has been started, and so adds during that softmax and not against those products.

Barriers of a stage: ``full`` and ``empty`` for the left boxes, the right ones and those that are no values. Weights
have ``p_full`` and ``p_empty``.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i8, i32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from ..attention.partials import LOG2E, LOWEST, normalizer
from ..attention.softmax import arrays_read
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
    alone,
    clear_rows,
    extents_of,
    in_parts,
    keys_of,
    load_query,
    lse_of,
    of_functions,
    pack,
    place_of,
    queries_of,
    walk_of,
    write_rows,
)

STAGES = 2
LONG = 32  # tiles from which it pays that values waits for its turn
OF_BOX = 32  # sums of a thread for a box of columns
# Registers of a thread of the producer, of scores, of values: together those that the block starts with.
REGISTERS = {"tma": (24, 240, 240), "rows": (40, 232, 232)}
WEIGHTS = SharedLayout(WIDE, KEYS, 2, 128)
WIDEST = 4  # boxes of a product: 256 columns


def groups_of(c: LatentConfig) -> list[tuple[int, int]]:
    """(first, how many) boxes that share barriers: those that are no values, the left ones of the values, the right."""
    left = c.value_boxes // 2
    rest = c.boxes - c.value_boxes
    return ([(c.value_boxes, rest)] if rest else []) + [(0, left), (left, c.value_boxes - left)]


def threads_of(c: LatentConfig) -> int:
    """The producer's warpgroups, scores, values."""
    return align_up(32 * c.producer_warps, 128) + CONSUMERS


def shared_bytes(c: LatentConfig) -> int:
    """Query, stages, weights, a factor and an end a row, barriers, and which keys of a stage there are."""
    return (1 + STAGES) * c.boxes * BOX.bytes + WEIGHTS.bytes + 2 * 4 * WIDE + 18 * BARRIER_BYTES + 8 * STAGES


def latent_kernel(c: LatentConfig) -> Any:
    """The kernel of a configuration: a block a tile of query rows and split of their keys."""
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
        """Bytes of the 16-column steps of a group's boxes, in the query and in the keys."""
        first, count = groups[group]
        return [(x, x) for x in query_layout.k_steps()[4 * first : min(4 * (first + count), case.size // 16)]]

    @kv.func
    def release(barrier, lane):
        kv.mbarrier_arrive(barrier, lane == 0)

    @kv.func
    def start_values(o, weights, boxes, steps):
        """O + P V under way, for the columns of some boxes."""
        count = len(o) // OF_BOX
        products = cdiv(count, WIDEST)
        for n in kv.static(range(products)):
            first, end = n * count // products, (n + 1) * count // products
            values = kv.wgmma_descriptor(boxes + first * BOX.bytes, BOX.bytes)
            mine = slice(first * OF_BOX, end * OF_BOX)
            o[mine] = kv.wgmma_start(o[mine], weights, values, steps, dtype, trans_b=True)

    @kv.func
    def weights_of(
        s, m, total, alpha, unit, tile, seen_at, seen_full, span, place, extents, entry, functions, warp, lane
    ):
        """The softmax of a tile: weights as operand A."""
        base = span[4].base(entry)
        if case.functions:
            b, arrays = functions
            elements = latent_rows.elements_of(warp, lane)
            of_functions(c, s, [unit] * len(s), elements, b, place, extents[0], base, arrays, span[4].whole(entry))
            unit = kv.f32(1.0)
        visible(s, tile, seen_at, seen_full, span, place, extents, base, warp, lane)
        latent_rows.softmax(s, m, total, alpha, [unit] * 2)
        return latent_rows.packed(dtype, s)

    @kv.func
    def rescaled(o, alpha):
        """Sums times their factors, in warps where a maximum moved."""
        if kv.ballot((alpha[0] != 1.0) | (alpha[1] != 1.0)) != 0:
            for i in kv.static(range(len(o))):
                o[i] = o[i] * alpha[i // 2 % 2]

    @kv.func
    def hand_on(p, alpha, weights, factors, p_full, warp, lane):
        """Weights and factors to shared memory, for the other warpgroup."""
        latent_rows.store_weights(WEIGHTS, p, weights, warp, lane)
        latent_rows.store_factors(alpha, factors, warp, lane)
        kv.fence_proxy_async()
        kv.syncwarp()
        release(p_full, lane)

    @kv.func
    def write_columns(o, inverse, staging, first_column, parts, out, place, splits, warp, lane):
        """A warpgroup's columns through shared memory, where every warp has its own rows."""
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
            write_rows(c, vector, parts, out, place, row, first_column + chunk * CHUNK, splits, kv.block_id.y)

    @kv.func
    def write_nothing(parts, out, place, splits, thread):
        """The result of a tile of rows that sees no key."""
        if alone(c, splits):
            for i in range(thread, WIDE * (V // CHUNK), CONSUMERS):
                row, column = i // (V // CHUNK), i % (V // CHUNK) * CHUNK
                write_rows(c, c.part(kv.vector(f32, CHUNK)), parts, out, place, row, column, splits, kv.block_id.y)
        else:
            if thread < WIDE:
                lse_of(c, parts, kv.grid_dim.x, place[0], splits, kv.block_id.y, thread).store(kv.f32(NEVER))

    @kv.func
    def visible(s, tile, seen_at, seen_full, span, place, extents, base, warp, lane):
        """Take what rows do not see out of a tile's scores, and what no row sees out of its values."""
        first, last, whole_first, whole_end, _, _ = span
        if c.copy == "tma":
            if (base < first) | (base + KEYS > last):
                kv.named_barrier(SCORES_BARRIER, 128)  # all of them have multiplied the keys
                clear_rows(BOX, tile, c.value_boxes, first - base, last - base, warp * 32 + lane, 128)
                kv.fence_proxy_async()
                kv.named_barrier(SCORES_BARRIER, 128)
        seen = []
        if c.case.listed:
            stage_full, parity = seen_full
            kv.mbarrier_wait(stage_full, parity)
            seen = [seen_at.load(kv.u32), (seen_at + 4).load(kv.u32)]
        if c.case.listed:
            some = (seen[0] & seen[1]) != 0xFFFFFFFF
        else:
            some = (base < whole_first) | (base + KEYS > whole_end)
        if some:
            latent_rows.masked(c, s, seen, *extents, place[2], place[3], base, warp, lane)

    @kv.func
    def left_columns(
        q_tile, stages, weights, factors, ends, seen_at, seen_full, full, empty, p_full, p_empty, turns, span, place,
        extents, scale, parts, out, splits, functions, warp, lane,
    ):  # fmt: skip
        walk, tiles = span[4], span[5]
        entry = walk.entry(0)
        unit = kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E
        q = kv.wgmma_descriptor(q_tile)
        m, total, alpha = [kv.f32(LOWEST)] * 2, [kv.f32(0.0)] * 2, [kv.f32(1.0)] * 2
        s = KEYS
        for g in kv.static(range(len(groups))):
            latent_copies.wait_for(c, barrier_of(full, 0, g), 0)
            s = kv.wgmma_start(s, q, kv.wgmma_descriptor(stages), key_steps(g), dtype)
        s = kv.wgmma_wait(0, s)[0]
        for g in kv.static(range(LEFT)):
            release(barrier_of(empty, 0, g), lane)
        p = weights_of(
            s,
            m,
            total,
            alpha,
            unit,
            stages,
            seen_at,
            (seen_full, 0),
            span,
            place,
            extents,
            entry,
            functions,
            warp,
            lane,
        )
        o = [kv.f32(0.0)] * (groups[LEFT][1] * OF_BOX)
        for i in range(1, tiles):
            stage, before, entry = i & 1, (i - 1) & 1, walk.entry(i)
            tile, tile_before = stages + stage * TILE, stages + before * TILE
            rescaled(o, alpha)
            start_values(o, p, tile_before, value_steps)
            kv.mbarrier_wait(p_empty, i & 1)
            hand_on(p, alpha, weights, factors, p_full, warp, lane)
            s = KEYS
            with kv.trace("multiply"):
                for g in kv.static(range(len(groups))):
                    latent_copies.wait_for(c, barrier_of(full, stage, g), (i >> 1) & 1)
                    s = kv.wgmma_start(s, q, kv.wgmma_descriptor(tile), key_steps(g), dtype)
                    if g == RIGHT:
                        release(turns + before * BARRIER_BYTES, lane)
                    if g == 0:
                        o, s = kv.wgmma_wait(1, o, s)  # O + P V is done
                        release(barrier_of(empty, before, LEFT), lane)
                s = kv.wgmma_wait(0, s)[0]
            for g in kv.static(range(LEFT)):
                release(barrier_of(empty, stage, g), lane)
            with kv.trace("softmax"):
                p = weights_of(
                    s, m, total, alpha, unit, tile, seen_at + stage * 8,
                    (seen_full + stage * BARRIER_BYTES, (i >> 1) & 1), span, place, extents, entry,
                    functions, warp, lane,
                )  # fmt: skip
        rescaled(o, alpha)
        tile = stages + ((tiles - 1) & 1) * TILE
        start_values(o, p, tile, value_steps)
        kv.mbarrier_wait(p_empty, tiles & 1)
        hand_on(p, alpha, weights, factors, p_full, warp, lane)
        release(turns + ((tiles - 1) & 1) * BARRIER_BYTES, lane)
        o = kv.wgmma_wait(0, o)[0]
        inverse = [kv.f32(0.0)] * 2
        for u in kv.static(range(2)):
            for k in kv.static((1, 2)):
                total[u] = total[u] + kv.shuffle_xor(total[u], k)
            row = warp * 16 + (lane >> 2) + 8 * u
            inverse[u] = normalizer(total[u])
            if (lane & 3) == 0:
                (ends + row * 4).store(inverse[u])
                if in_parts(c, splits):
                    lse = kv.where(total[u] == 0.0, NEVER, m[u] + kv.math.log2(total[u]))
                    lse_of(c, parts, kv.grid_dim.x, place[0], splits, kv.block_id.y, row).store(lse)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)  # the query is read: its place is free
        with kv.trace("write"):
            write_columns(o, inverse, q_tile, 0, parts, out, place, splits, warp, lane)

    @kv.func
    def right_columns(
        q_tile, stages, weights, factors, ends, full, empty, p_full, p_empty, turns, span, place, parts, out, splits,
        warp, lane,
    ):  # fmt: skip
        p = kv.wgmma_descriptor(weights)
        steps = list(zip(WEIGHTS.k_steps(), value_steps, strict=True))
        o = [kv.f32(0.0)] * (groups[RIGHT][1] * OF_BOX)
        row = warp * 16 + (lane >> 2)
        for i in range(span[5]):
            stage = i & 1
            with kv.trace("wait for weights"):
                kv.mbarrier_wait(p_full, i & 1)
            rescaled(o, [(factors + row * 4).load(kv.f32), (factors + (row + 8) * 4).load(kv.f32)])
            with kv.trace("wait for its turn"):
                if span[5] >= LONG:
                    kv.mbarrier_wait(turns + stage * BARRIER_BYTES, (i >> 1) & 1)
            with kv.trace("multiply"):
                latent_copies.wait_for(c, barrier_of(full, stage, RIGHT), (i >> 1) & 1)
                start_values(o, p, stages + stage * TILE + right_bytes, steps)
                o = kv.wgmma_wait(0, o)[0]
            release(barrier_of(empty, stage, RIGHT), lane)
            release(p_empty, lane)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
        inverse = [(ends + row * 4).load(kv.f32), (ends + (row + 8) * 4).load(kv.f32)]
        with kv.trace("write"):
            write_columns(o, inverse, q_tile + right_bytes, right_column, parts, out, place, splits, warp, lane)

    @kv.func
    def produce_by_tma(key_map, cache, stages, full, empty, span, b, lane):
        _, last, _, _, walk, tiles = span
        following = walk.base(walk.entry(0))
        pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
        for i in range(tiles):
            here, base = pages, walk.base(walk.entry(i)) if walk.lists is None else following
            following = walk.base(walk.entry(i + 1))
            pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
            for g in kv.static(range(len(groups))):
                kv.mbarrier_wait(barrier_of(empty, i & 1, g), ((i >> 1) & 1) ^ 1)
                place = stages + ((i & 1) * TILE + groups[g][0] * BOX.bytes)
                latent_copies.boxes_by_tma(
                    c, key_map, cache, place, barrier_of(full, i & 1, g), here, base, groups[g], lane
                )

    @kv.func
    def produce_rows(rows, stages, seen_at, seen_full, full, empty, span, thread):
        walk, tiles = span[4], span[5]
        following = latent_copies.places_of(c, rows, walk.base(walk.entry(0)), thread)
        for i in range(tiles):
            places, stage = following, i & 1
            following = latent_copies.places_of(c, rows, walk.base(walk.entry(i + 1)), thread)
            for g in kv.static(range(len(groups))):
                kv.mbarrier_wait(barrier_of(empty, stage, g), ((i >> 1) & 1) ^ 1)
                place = stages + (stage * TILE + groups[g][0] * BOX.bytes)
                latent_copies.copy_boxes(c, rows, places, place, barrier_of(full, stage, g), groups[g], thread)
                if g == LEFT and c.case.listed:
                    latent_copies.note_rows(c, places, seen_at + stage * 8, seen_full + stage * BARRIER_BYTES, thread)

    @kv.kernel(block=(threads_of(c), 1, 1), min_blocks=1)
    def attention_latent(
        collection: kv.KVCacheCollection, layer: kv.i32, query: kv.Buffer[case.query, 3],
        row_offsets: kv.Buffer[i32, 1], scale: kv.f32, out: kv.Optional[kv.Buffer[case.out, 3]],
        parts: kv.Buffer[i8, 1], indices: kv.Optional[kv.Buffer[i32, 2]], topk_lengths: kv.Optional[kv.Buffer[i32, 1]],
        key_map: kv.Optional[kv.TensorMap], kv_offsets: kv.Optional[kv.Buffer[i32, 1]] = None,
        array0=None, array1=None, array2=None, array3=None, block_mask=None,
    ):  # fmt: skip
        memory = kv.shared((1 + STAGES) * TILE + WEIGHTS.bytes, kv.u8, alignment=1024).ptr()
        small = kv.shared(2 * WIDE, kv.f32).ptr()
        barriers = kv.shared(2 * STAGES * len(groups) + 2 + 2 * STAGES, kv.i64).ptr()
        seen_at = kv.shared(2 * STAGES, kv.u32, alignment=8).ptr()
        q_tile, stages, weights = memory, memory + TILE, memory + (1 + STAGES) * TILE
        factors, ends = small, small + 4 * WIDE
        full, empty = barriers, barriers + STAGES * len(groups) * BARRIER_BYTES
        p_full = empty + STAGES * len(groups) * BARRIER_BYTES
        p_empty = p_full + BARRIER_BYTES
        seen_full = p_empty + BARRIER_BYTES
        turns = seen_full + STAGES * BARRIER_BYTES
        thread, lane = kv.thread_id.x, kv.thread_id.x & 31
        role = kv.shuffle_idx(thread >> 7, 0)
        if thread == 0:
            for n in kv.static(range(STAGES * len(groups))):
                kv.mbarrier_init(full + n * BARRIER_BYTES, c.arrivals)
                kv.mbarrier_init(empty + n * BARRIER_BYTES, 4)
            kv.mbarrier_init(p_full, 4)
            kv.mbarrier_init(p_empty, 4)
            for n in kv.static(range(STAGES)):
                kv.mbarrier_init(seen_full + n * BARRIER_BYTES, 4)
                kv.mbarrier_init(turns + n * BARRIER_BYTES, 4)
            kv.fence_mbarrier_init()
            if c.copy == "tma":
                kv.tma.prefetch(key_map)
        kv.barrier()
        splits, number = kv.grid_dim.y, kv.grid_dim.x - 1 - kv.block_id.x
        kv.griddepcontrol_wait()  # what lies before is of this kernel alone
        queries, arrays = queries_of(query, row_offsets, kv_offsets), arrays_read(array0, array1, array2, array3)
        b, token0, row0, rows = place_of(c, queries, number)
        if c.tiles:  # a block's sequence is known: its length is read with its offsets
            extents = extents_of(c, collection, queries, indices, topk_lengths, b, token0)
        if row0 < rows:
            place = (number, token0, row0, rows)
            cache = collection.get_key_cache(layer)
            if not c.tiles:
                extents = extents_of(c, collection, queries, indices, topk_lengths, b, token0)
            listed = walk_of(c, block_mask, queries, b, row0)
            span = keys_of(c, *extents, row0, rows, splits, kv.block_id.y, listed)
            tiles = span[5]
            producer, left, right = REGISTERS[c.copy]
            if role == 0:
                kv.setmaxnreg(producer, "decrease")
                if tiles > 0:
                    if c.copy == "tma":
                        if thread < 32:
                            produce_by_tma(key_map, cache, stages, full, empty, span, b, lane)
                    else:
                        source = latent_copies.Rows(c, cache, indices, b, token0, span[0], span[1])
                        produce_rows(source, stages, seen_at, seen_full, full, empty, span, thread)
            else:
                consumer = thread - 128
                warp = (thread & 127) >> 5
                if tiles > 0:
                    with kv.trace("load query"):
                        load_query(c, query, q_tile, query_layout, token0, row0, rows, scale, consumer, CONSUMERS)
                        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    if role == 1:
                        kv.setmaxnreg(left, "increase")
                        left_columns(
                            q_tile, stages, weights, factors, ends, seen_at, seen_full, full, empty, p_full, p_empty,
                            turns, span, place, extents, scale, parts, out, splits, (b, arrays), warp, lane,
                        )  # fmt: skip
                    else:
                        kv.setmaxnreg(right, "increase")
                        right_columns(
                            q_tile, stages, weights, factors, ends, full, empty, p_full, p_empty, turns, span, place,
                            parts, out, splits, warp, lane,
                        )  # fmt: skip
                else:
                    write_nothing(parts, out, place, splits, consumer)

    return attention_latent
