# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows for up to 32 query rows a block: operands swapped, at the rate of the memory.

Products have at least 64 rows, so keys are the rows: S^T = K Q^T, O^T += V^T P^T, with query rows as columns. V^T is
the keys' tile read transposed, P^T lies in shared memory with a row a query row.

- The *producer* copies boxes of 64 keys and 64 columns into a ring of as many as fit.
- *Scores* multiplies box by box as they arrive; the softmax folds columns over lanes, and over warps through shared
  memory. Weights and factors go to one of two places.
- *Values* adds, and gives the boxes back.

Neither has to hurry: both wait for the memory. Two blocks, a cluster, share the keys of a tile of query rows and meet
through distributed shared memory; where more do, pairs leave partial results.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i8, i32
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.tile_ir import BARRIER_BYTES

from . import latent_converts, latent_copies
from .attention_common import interval
from .latent_common import (
    BOX,
    CHUNK,
    CONSUMERS,
    CONSUMERS_BARRIER,
    KEYS,
    NEVER,
    SCORES_BARRIER,
    LatentConfig,
    clear_rows,
    extents_of,
    in_parts,
    keys_of,
    load_query,
    lse_of,
    pack,
    place_of,
    queries_of,
    write_rows,
)
from .partial_results import LOG2E, LOWEST, normalizer, weight
from .softmax import SLACK

MOST_ROWS = 32
PAIR = 2  # blocks of a cluster
SMALL_BYTES = 8192  # more than maxima, factors, sums and barriers take
REGISTERS = (104, 184, 112)  # of a thread of scores, values and a producer that converts: together 4 times 128
LISTS = 4  # tiles whose listed keys are known: more than the ring holds


def threads_of(c: LatentConfig) -> int:
    """Scores, values, and the producer's warps."""
    return CONSUMERS + 32 * c.producer_warps


def ring_boxes(c: LatentConfig, shared_bytes: int) -> int:
    """Boxes of the ring: at most three tiles."""
    used = c.rows * 128 * (c.boxes + 2) + SMALL_BYTES
    return min(3 * c.boxes, (shared_bytes - used) // BOX.bytes)


def latent_kernel(c: LatentConfig, shared_bytes: int) -> Any:
    """The kernel of a configuration: a block a tile of query rows and half of a split of their keys."""
    case, dtype, heads, V, N = c.case, c.case.query, c.case.heads, c.case.value_size, c.rows
    COLUMNS = N // 8  # column tiles
    RING = ring_boxes(c, shared_bytes)
    rest = c.boxes - c.value_boxes
    order = [*range(c.value_boxes, c.boxes), *range(c.value_boxes)]  # what is no value is free first
    query_layout, weights_layout = SharedLayout(N, case.size, 2, 128), SharedLayout(N, KEYS, 2, 128)
    value_steps = list(zip(BOX.row_steps(), weights_layout.k_steps(), strict=True))
    TEAMS = c.producer_warps // latent_converts.WARPS  # that convert, by turns
    DEPTH = min(c.boxes, 8)  # boxes whose copies are under way behind the producer

    def key_steps(box: int) -> list[tuple[int, int]]:
        """Bytes of a box's 16-column steps, in the keys and in the query."""
        return [(32 * k, 32 * k) for k in range(min(4, case.size // 16 - 4 * box))]

    @kv.func
    def advance(slot, phase, count):
        """(slot, phase of its barriers) of the box that comes ``count`` later."""
        slot = slot + count
        over = slot >= RING
        return kv.where(over, slot - RING, slot), kv.where(over, phase ^ 1, phase)

    @kv.func
    def release(barrier, lane):
        kv.mbarrier_arrive(barrier, lane == 0)

    @kv.func
    def masked(s, seen, start, num_keys, row0, rows, base, warp, lane):
        """Minus infinity for what a row does not see."""
        for u in kv.static(range(2)):
            at = warp * 16 + (lane >> 2) + 8 * u
            if c.listed:
                there = ((seen >> (((warp & 1) << 4) + (lane >> 2) + 8 * u)) & 1) != 0
            for n in kv.static(range(COLUMNS)):
                for i in kv.static(range(2)):
                    if c.listed:
                        shown = there
                    else:
                        row = kv.math.min(row0 + 8 * n + (lane & 3) * 2 + i, rows - 1)
                        low, high = interval(case, start + row // heads, num_keys)
                        shown = (base + at >= low) & (base + at < high)
                    s[4 * n + 2 * u + i] = kv.where(shown, s[4 * n + 2 * u + i], float("-inf"))

    @kv.func
    def visible(s, ring, slot, seen_at, span, place, extents, base, warp, lane):
        """Take what rows do not see out of a tile's scores, and what no row sees out of its values."""
        first, last, whole_first, whole_end, _, _ = span
        if c.copy == "tma":
            if (base < first) | (base + KEYS > last):
                kv.named_barrier(SCORES_BARRIER, 128)  # all of them have multiplied the keys
                for box in kv.static(range(c.value_boxes)):
                    of_box, _ = advance(slot, kv.i32(0), rest + box)
                    clear_rows(ring + of_box * BOX.bytes, 1, first - base, last - base, warp * 32 + lane, 128)
        if c.listed:
            low, high = seen_at.load(kv.u32), (seen_at + 4).load(kv.u32)
            some, seen = (low & high) != 0xFFFFFFFF, kv.where(warp < 2, low, high)
        else:
            some, seen = (base < whole_first) | (base + KEYS > whole_end), None
        if some:
            masked(s, seen, *extents, place[2], place[3], base, warp, lane)

    @kv.func
    def top_of(s, maxima, warp, lane):
        """The largest score of each of a thread's columns, over all keys of the tile."""
        column = (lane & 3) * 2
        most = [kv.math.max(s[4 * (h // 2) + h % 2], s[4 * (h // 2) + 2 + h % 2]) for h in range(2 * COLUMNS)]
        for k in kv.static((4, 8, 16)):
            most = [kv.math.max(x, kv.shuffle_xor(x, k)) for x in most]
        if lane < 4:
            for n in kv.static(range(COLUMNS)):
                (maxima + (warp * N + 8 * n + column) * 4).store(kv.vector(f32, [most[2 * n], most[2 * n + 1]]))
        kv.named_barrier(SCORES_BARRIER, 128)
        for n in kv.static(range(COLUMNS)):
            pairs = [(maxima + (w * N + 8 * n + column) * 4).load(kv.f32, 2) for w in range(4)]
            for i in kv.static(range(2)):
                low, high = kv.math.max(pairs[0][i], pairs[1][i]), kv.math.max(pairs[2][i], pairs[3][i])
                most[2 * n + i] = kv.math.max(low, high)
        return most

    @kv.func
    def hand_on(s, alpha, weights, factors, p_full, warp, lane):
        """Weights, transposed, and factors to shared memory."""
        for n in kv.static(range(0, COLUMNS, 2)):
            pairs = range(n, min(n + 2, COLUMNS))
            words = [pack(dtype, s[4 * m + 2 * u], s[4 * m + 2 * u + 1]) for m in pairs for u in range(2)]
            row = 8 * n + (lane & 7) + ((lane >> 4) * 8 if len(words) == 4 else 0)
            kv.stmatrix(weights + weights_layout.chunk_offset(row, 2 * warp + ((lane >> 3) & 1)), words, trans=True)
        if (warp == 0) & (lane < 4):
            for n in kv.static(range(COLUMNS)):
                pair = kv.vector(f32, [alpha[2 * n], alpha[2 * n + 1]])
                (factors + (8 * n + (lane & 3) * 2) * 4).store(pair)
        kv.fence_proxy_async()
        kv.syncwarp()
        release(p_full, lane)

    @kv.func
    def scores(
        q_tile, ring, weights, maxima, factors, sums_at, final, ends, seen_at, full, empty, p_full, p_empty, span,
        place, extents, scale, warp, lane,
    ):  # fmt: skip
        begin, tiles = span[4], span[5]
        unit = kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E
        m, alpha = [kv.f32(LOWEST)] * (2 * COLUMNS), [kv.f32(1.0)] * (2 * COLUMNS)
        sums = [kv.f32(0.0)] * (2 * COLUMNS)
        slot, phase = kv.i32(0), kv.i32(0)
        for i in range(tiles):
            of_tile, which = slot, i & 1
            s = N
            for j in kv.static(order):
                kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
                keys, rows_of = kv.wgmma_descriptor(ring + slot * BOX.bytes), q_tile + j * query_layout.panel_bytes
                s = kv.wgmma_start(s, keys, kv.wgmma_descriptor(rows_of), key_steps(j), dtype)
                slot, phase = advance(slot, phase, 1)
            s = kv.wgmma_wait(0, s)[0]
            for j in kv.static(range(rest)):
                at, _ = advance(of_tile, phase, j)
                release(empty + at * BARRIER_BYTES, lane)
            base = (begin + i) * KEYS
            visible(s, ring, of_tile, seen_at + (i & (LISTS - 1)) * 8, span, place, extents, base, warp, lane)
            most = top_of(s, maxima + which * (4 * N * 4), warp, lane)
            for n in kv.static(range(COLUMNS)):
                for x in kv.static(range(2)):
                    h = 2 * n + x
                    top = most[h] * unit
                    top = kv.where(top > m[h] + SLACK, top, m[h])
                    alpha[h] = kv.ex2(m[h] - top)
                    m[h] = top
                    for u in kv.static(range(2)):
                        s[4 * n + 2 * u + x] = kv.ex2(kv.math.fma(s[4 * n + 2 * u + x], unit, -top))
                    sums[h] = sums[h] * alpha[h] + (s[4 * n + x] + s[4 * n + 2 + x])
            kv.mbarrier_wait(p_empty + which * BARRIER_BYTES, ((i >> 1) & 1) ^ 1)
            p_at = weights + which * weights_layout.bytes
            hand_on(s, alpha, p_at, factors + which * (N * 4), p_full + which * BARRIER_BYTES, warp, lane)
        for k in kv.static((4, 8, 16)):
            sums = [x + kv.shuffle_xor(x, k) for x in sums]
        if lane < 4:
            for n in kv.static(range(COLUMNS)):
                pair = kv.vector(f32, [sums[2 * n], sums[2 * n + 1]])
                (sums_at + (warp * N + 8 * n + (lane & 3) * 2) * 4).store(pair)
        kv.named_barrier(SCORES_BARRIER, 128)
        if (warp == 0) & (lane < 4):
            for n in kv.static(range(COLUMNS)):
                for x in kv.static(range(2)):
                    h = 8 * n + (lane & 3) * 2 + x
                    total = kv.f32(0.0)
                    for w in kv.static(range(4)):
                        total = total + (sums_at + (w * N + h) * 4).load(kv.f32)
                    (final + h * 4).store(normalizer(total))
                    (ends + h * 4).store(kv.where(total == 0.0, NEVER, m[2 * n + x] + kv.math.log2(total)))
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)

    @kv.func
    def values(ring, weights, factors, final, full, empty, p_full, p_empty, tiles, warp, lane):
        column = (lane & 3) * 2
        o = [[kv.f32(0.0)] * (N // 2) for _ in range(c.value_boxes)]
        slot, phase = kv.i32(0), kv.i32(0)
        for i in range(tiles):
            which = i & 1
            kv.mbarrier_wait(p_full + which * BARRIER_BYTES, (i >> 1) & 1)
            alpha = [(factors + (which * N + 8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
            moved = alpha[0][0] != 1.0
            for n in kv.static(range(COLUMNS)):
                moved = moved | (alpha[n][0] != 1.0) | (alpha[n][1] != 1.0)
            if kv.ballot(moved) != 0:
                for j in kv.static(range(c.value_boxes)):
                    for k in kv.static(range(N // 2)):
                        o[j][k] = o[j][k] * alpha[k // 4][k % 2]
            slot, phase = advance(slot, phase, rest)
            first = slot
            p = kv.wgmma_descriptor(weights + which * weights_layout.bytes)
            for j in kv.static(range(c.value_boxes)):
                kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
                box = kv.wgmma_descriptor(ring + slot * BOX.bytes)
                o[j] = kv.wgmma_start(o[j], box, p, value_steps, dtype, trans_a=True)
                slot, phase = advance(slot, phase, 1)
            here = first
            for j in kv.static(range(c.value_boxes)):
                o = kv.wgmma_wait(c.value_boxes - 1 - j, *o)
                release(empty + here * BARRIER_BYTES, lane)
                here, _ = advance(here, phase, 1)
            release(p_empty + which * BARRIER_BYTES, lane)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
        inverse = [(final + (8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
        for j in kv.static(range(c.value_boxes)):
            for k in kv.static(range(N // 2)):
                dim, row = j * 64 + warp * 16 + (lane >> 2) + 8 * (k // 2 % 2), k // 4 * 8 + column + k % 2
                (ring + (row * V + dim) * 4).store(o[j][k] * inverse[k // 4][k % 2])

    @kv.func
    def combine_in_cluster(ring, ends, rank, parts, out, place, splits, split, thread):
        """Half of the columns of both blocks' results, combined and written."""
        chunks = V // PAIR // CHUNK
        for i in range(thread, N * chunks, CONSUMERS):
            row, column = i // chunks, rank * (V // PAIR) + i % chunks * CHUNK
            mine, theirs = (ends + row * 4).load(kv.f32), kv.load_cluster(ends + row * 4, rank ^ 1, f32)
            top = kv.math.max(mine, theirs)
            a, b = weight(mine, top, mine != NEVER), weight(theirs, top, theirs != NEVER)
            total = a + b
            inverse = normalizer(total)
            x, y = [], []
            for q in kv.static(range(2)):
                at = ring + (row * V + column + 4 * q) * 4
                x, y = x + list(at.load(kv.f32, 4)), y + list(kv.load_cluster(at, rank ^ 1, f32, 4))
            both = [kv.where(a == 0.0, 0.0, x[k]) * a + kv.where(b == 0.0, 0.0, y[k]) * b for k in range(CHUNK)]
            vector = c.part(kv.vector(f32, [v * inverse for v in both]))
            write_rows(c, vector, parts, out, place, row, column, splits, split)
            if in_parts(c, splits):
                if column == 0:
                    lse = kv.where(total == 0.0, NEVER, top + kv.math.log2(total))
                    lse_of(c, parts, kv.grid_dim.x, place[0], splits, split, row).store(lse)

    @kv.func
    def produce_by_tma(key_map, cache, ring, full, empty, span, b, lane):
        _, last, _, _, begin, tiles = span
        pages = latent_copies.pages_of(key_map, cache, b, begin * KEYS, last, lane)
        slot, phase = kv.i32(0), kv.i32(1)
        for i in range(tiles):
            here, base = pages, (begin + i) * KEYS
            pages = latent_copies.pages_of(key_map, cache, b, base + KEYS, last, lane)
            for j in kv.static(order):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase)
                place = ring + slot * BOX.bytes
                latent_copies.boxes_by_tma(key_map, cache, place, full + slot * BARRIER_BYTES, here, base, (j, 1), lane)
                slot, phase = advance(slot, phase, 1)

    @kv.func
    def produce_rows(rows, ring, seen_at, full, empty, span, thread):
        begin, tiles = span[4], span[5]
        following = latent_copies.places_of(rows, begin * KEYS, thread)
        slot, phase, done = kv.i32(0), kv.i32(1), kv.i32(0)
        for i in range(tiles):
            places = following
            following = latent_copies.places_of(rows, (begin + i + 1) * KEYS, thread)
            if c.listed:
                latent_copies.note_rows(places, seen_at + (i & (LISTS - 1)) * 8, thread)
            for n in kv.static(range(c.boxes)):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase)
                latent_copies.copy_boxes(c, rows, places, ring + slot * BOX.bytes, (order[n], 1), thread)
                slot, phase = advance(slot, phase, 1)
                if (i > 0) | (n >= DEPTH):
                    latent_copies.copied(full + done * BARRIER_BYTES, DEPTH)
                    done, _ = advance(done, phase, 1)
        for n in kv.static(range(DEPTH)):
            latent_copies.copied(full + done * BARRIER_BYTES, DEPTH - 1 - n)
            done, _ = advance(done, phase, 1)

    @kv.func
    def produce_converted(rows, ring, seen_at, full, empty, span, thread):
        base, tiles = span[4] * KEYS, span[5]
        team, thread = thread >> 7, thread & 127
        places = latent_converts.places_of(rows, base + team * KEYS, thread)
        words, scales, of_rows = latent_converts.load_tile(c, rows, places, thread)
        slot, phase = team * c.boxes, kv.i32(1)
        for i in range(team, tiles, TEAMS):
            following = latent_converts.places_of(rows, base + (i + TEAMS) * KEYS, thread)
            here = slot
            for n in kv.static(range(c.boxes)):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase)
                if n == 0 and c.listed:
                    latent_converts.note_rows(places, seen_at + (i & (LISTS - 1)) * 8, thread)
                at = ring + slot * BOX.bytes
                latent_converts.put_box(c, rows, order[n], words, scales, of_rows, places, at, thread)
                slot, phase = advance(slot, phase, 1)
            latent_converts.show()
            for _ in kv.static(range(c.boxes)):
                release(full + here * BARRIER_BYTES, thread & 31)
                here, _ = advance(here, phase, 1)
            slot, phase = advance(slot, phase, (TEAMS - 1) * c.boxes)
            places = following
            words, scales, of_rows = latent_converts.load_tile(c, rows, places, thread)

    @kv.kernel(block=(threads_of(c), 1, 1), min_blocks=1, cluster=(1, PAIR, 1))
    def attention_latent_few(
        collection: kv.KVCacheCollection, layer: kv.i32, query: kv.Buffer[case.query, 3],
        row_offsets: kv.Buffer[i32, 1], scale: kv.f32, out: kv.Optional[kv.Buffer[case.out, 3]],
        parts: kv.Buffer[i8, 1], indices: kv.Optional[kv.Buffer[i32, 2]], topk_lengths: kv.Optional[kv.Buffer[i32, 1]],
        key_map: kv.Optional[kv.TensorMap],
    ):  # fmt: skip
        memory = kv.shared(RING * BOX.bytes + query_layout.bytes + 2 * weights_layout.bytes, kv.u8, alignment=1024)
        ring = memory.ptr()
        q_tile = ring + RING * BOX.bytes
        weights = q_tile + query_layout.bytes
        maxima = kv.shared((2 + 1) * 4 * N, kv.f32, alignment=8).ptr()
        sums_at = maxima + 2 * 4 * N * 4
        factors = kv.shared(4 * N, kv.f32, alignment=8).ptr()
        final = factors + 2 * N * 4
        ends = final + N * 4
        seen_at = kv.shared(2 * LISTS, kv.u32, alignment=8).ptr()
        full = kv.shared(2 * RING + 4, kv.i64).ptr()
        empty = full + RING * BARRIER_BYTES
        p_full = empty + RING * BARRIER_BYTES
        p_empty = p_full + 2 * BARRIER_BYTES
        thread, lane = kv.thread_id.x, kv.thread_id.x & 31
        role = kv.shuffle_idx(thread >> 7, 0)
        if thread == 0:
            for n in kv.static(range(RING)):
                kv.mbarrier_init(full + n * BARRIER_BYTES, c.arrivals)
                kv.mbarrier_init(empty + n * BARRIER_BYTES, 4)
            for n in kv.static(range(2)):
                kv.mbarrier_init(p_full + n * BARRIER_BYTES, 4)
                kv.mbarrier_init(p_empty + n * BARRIER_BYTES, 4)
            kv.fence_mbarrier_init()
        kv.barrier()
        rank = kv.cluster_rank()
        splits, split, number = kv.grid_dim.y // PAIR, kv.block_id.y // PAIR, kv.grid_dim.x - 1 - kv.block_id.x
        queries = queries_of(query, row_offsets)
        b, token0, row0, rows = place_of(c, queries, number)
        if row0 < rows:
            place = (number, token0, row0, rows)
            cache = collection.get_key_cache(layer)
            extents = extents_of(c, collection, queries, indices, topk_lengths, b, token0)
            span = keys_of(c, *extents, row0, rows, kv.grid_dim.y, kv.block_id.y)
            tiles = span[5]
            if tiles > 0:
                if role >= 2:
                    if c.copy == "convert":
                        kv.setmaxnreg(REGISTERS[2], "decrease")
                    if c.copy == "tma":
                        produce_by_tma(key_map, cache, ring, full, empty, span, b, lane)
                    else:
                        source = latent_copies.Rows(c, cache, indices, b, token0, span[0], span[1])
                        produce = produce_rows if c.copy == "rows" else produce_converted
                        produce(source, ring, seen_at, full, empty, span, thread - CONSUMERS)
                else:
                    warp = (thread & 127) >> 5
                    load_query(c, query, q_tile, query_layout, token0, row0, rows, scale, thread, CONSUMERS)
                    kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    if role == 0:
                        if c.copy == "convert":
                            kv.setmaxnreg(REGISTERS[0], "decrease")
                        scores(
                            q_tile, ring, weights, maxima, factors, sums_at, final, ends, seen_at, full, empty, p_full,
                            p_empty, span, place, extents, scale, warp, lane,
                        )  # fmt: skip
                    else:
                        if c.copy == "convert":
                            kv.setmaxnreg(REGISTERS[1], "increase")
                        values(ring, weights, factors, final, full, empty, p_full, p_empty, tiles, warp, lane)
            else:
                if thread < N:
                    (ends + thread * 4).store(kv.f32(NEVER))
        kv.cluster_barrier()
        if row0 < rows:
            if thread < CONSUMERS:
                combine_in_cluster(ring, ends, rank, parts, out, (number, token0, row0, rows), splits, split, thread)
        kv.cluster_barrier()  # no block ends while the other reads its memory

    return attention_latent_few
