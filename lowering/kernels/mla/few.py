# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows with swapped operands: up to 32 query rows per block, or 64 over 8-bit rows.

A wgmma product has at least 64 rows, which few query rows would leave mostly empty. So keys are the rows: S^T = K Q^T,
O^T += V^T P^T, with query rows as columns. V^T is the key tile read transposed; P^T is in shared memory with one row
per query row. Keys and values are operand A, and 8-bit rows are converted on the way from shared memory to its
registers (:mod:`mla.stored`). If keys need no conversion and query rows fill a product, scores are S = Q K^T, whose
softmax along rows (:mod:`mla.unswapped`) is cheaper than one along columns over all warps (:mod:`mla.columns`). Roles:

1. The *producer* copies boxes of 64 keys and 64 columns, one or two per copy, into a ring with as many as fit.
2. *Scores* (one warpgroup) multiplies box by box as they arrive. Its softmax along columns reduces over lanes, and over
   warps through shared memory. It stores weights and factors in one of two buffers.
3. *Values* multiplies weights and values, and releases the boxes; from 33 query rows up it has two warpgroups with half
   of the columns each.

With few query rows both roles wait for memory. Two blocks of a cluster share the keys of a tile of query rows and
combine their results through distributed shared memory; with more splits, the pairs store partial results. With many
query rows each block has its own split, and where scores are S^T, scores and values alternate on the tensor cores.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.chips import REGISTERS
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from ..attention.arguments import AttentionArguments
from . import (
    block_sizes as latent_blocks,
    columns as latent_columns,
    copies as latent_copies,
    results as latent_results,
    ring as latent_ring,
    stored as latent_stored,
    unswapped as latent_unswapped,
)
from .block import Block
from .block_sizes import LISTS
from .common import BOX, CONSUMERS_BARRIER, NEVER, LatentConfig, extents_of, load_query, place_of, queries_of, tile_of
from .ring import Ring, next_tile


def latent_kernel(c: LatentConfig, shared_bytes: int) -> Any:
    """The kernel for a configuration: one block per tile of query rows and half of a split of their keys."""
    dtype, N, UNSWAPPED = c.products, c.rows, c.stored and latent_stored.unswapped(c)
    COLUMNS, WIDTH = latent_blocks.column_tiles(c), latent_blocks.width_of(c)
    r = Ring(c, latent_blocks.ring_boxes(c, shared_bytes))
    RING, SCALE_BYTES = r.slots, c.tile_scales_bytes
    query_layout, weights_layout = latent_blocks.query_layout_of(c), latent_blocks.weights_layout_of(c)
    k_steps, QUERY_BYTES = weights_layout.k_steps(), latent_blocks.query_bytes(c)
    value_steps = [] if c.stored else list(zip(BOX.row_steps(), k_steps, strict=True))
    halves_of = [k_steps[:2], k_steps[2:]]
    CONSUMERS, GROUPS, PAIR = latent_blocks.consumers_of(c), latent_blocks.value_groups(c), latent_blocks.blocks_of(c)
    MINE = c.value_boxes // GROUPS  # boxes per values warpgroup
    STEPS, ALTERNATES = latent_blocks.value_steps(c), latent_blocks.alternates(c)
    LATE = latent_blocks.query_in_registers(c)  # values are loaded after the products before them have started
    registers, launched = latent_blocks.registers_of(c), REGISTERS // latent_blocks.threads_of(c) // 8 * 8

    @kv.func
    def take_registers(role):
        """Reallocate registers for a role: 0 scores, 1 values, 2 the producer."""
        if registers is not None and registers[role] != launched:
            kv.setmaxnreg(registers[role], "increase" if registers[role] > launched else "decrease")

    @kv.func
    def wait_for_scores(a, i):
        if ALTERNATES:
            with kv.trace("wait for scores"):
                kv.mbarrier_wait(a.values_start + (i & 1) * BARRIER_BYTES, (i >> 1) & 1)

    @kv.func
    def value_box(a, j, half, slot, phase):
        """(address, barrier) of box j of a warpgroup's values; its first half waits for the box."""
        place, barrier, parity = latent_ring.at(r, a.ring, a.full, slot, phase, j // c.together)
        if half == 0 and c.part_of(j) == 0:
            kv.mbarrier_wait(barrier, parity)
        return place, barrier

    @kv.func
    def load_half(a, n, slot, phase):
        """(a thread's words, barrier) of the n-th half of the boxes of a warpgroup's values."""
        box, barrier = value_box(a, n // 2, n % 2, slot, phase)
        return latent_stored.load_values(c, box, n // 2, n % 2, a.warp, a.lane), barrier

    @kv.func
    def add_stored(a, o, p, i, slot, phase, group):
        """O^T plus the products of a tile's 8-bit values in a warpgroup's boxes; the next half is loaded before a wait.

        With several scales per row it is loaded later, for lack of registers.
        """
        words, tile_scales = None, a.tile_scales_at + (i & (LISTS - 1)) * SCALE_BYTES
        if c.granules:
            wait_for_scores(a, i)
        for n in kv.static(range(2 * MINE)):
            j, half = n // 2, n % 2
            if n == 0 or c.granules:
                words, barrier = load_half(a, n, slot, phase)
            steps = latent_stored.value_steps(c, group * MINE + j, half, words, tile_scales, a.warp, a.lane)
            if n == 0 and not c.granules:
                wait_for_scores(a, i)
            if half == 1 and c.part_of(j) == c.together - 1:
                kv.syncwarp()
                latent_ring.release(r.empty_of(barrier), a.lane)
            ahead = not c.granules and n + 1 < 2 * MINE
            if ahead and not LATE:
                words, barrier = load_half(a, n + 1, slot, phase)
            for k in kv.static(range(0, 2, STEPS)):
                o[j] = kv.wgmma_start(o[j], steps[k : k + STEPS], p, halves_of[half][k : k + STEPS], dtype)
                if ahead and LATE and k + STEPS == 2:
                    words, barrier = load_half(a, n + 1, slot, phase)
                o = kv.wgmma_wait(1, *o)
        return kv.wgmma_wait(0, *o)

    @kv.func
    def add(a, o, p, slot, phase):
        """The same for 16-bit values."""
        for j in kv.static(range(MINE)):
            box, _ = value_box(a, j, 0, slot, phase)
            if c.copy == "rows":
                kv.fence_proxy_async()
            o[j] = kv.wgmma_start(o[j], kv.wgmma_descriptor(box), p, value_steps, dtype, trans_a=True)
        for j in kv.static(range(MINE)):
            o = kv.wgmma_wait(MINE - 1 - j, *o)
            _, barrier = value_box(a, j, 1, slot, phase)
            latent_ring.release(r.empty_of(barrier), a.lane)
        return o

    @kv.func
    def values(a, group):
        column = (a.lane & 3) * 2
        o = [[kv.f32(0.0)] * (N // 2) for _ in range(MINE)]
        slot, phase = kv.i32(0), kv.i32(0)
        for i in range(a.keys.num_tiles):
            which = i & 1
            with kv.trace("wait for weights"):
                kv.mbarrier_wait(a.p_full + which * BARRIER_BYTES, (i >> 1) & 1)
            alpha = [(a.factors + (which * WIDTH + 8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
            moved = alpha[0][0] != 1.0
            for n in kv.static(range(COLUMNS)):
                moved = moved | (alpha[n][0] != 1.0) | (alpha[n][1] != 1.0)
            if kv.ballot(moved) != 0:
                for j in kv.static(range(MINE)):
                    for k in kv.static(range(N // 2)):
                        o[j][k] = o[j][k] * alpha[k // 4][k % 2]
            first, parity = latent_ring.behind(r, slot, phase, r.rest + group * (MINE // c.together))
            p = kv.wgmma_descriptor(a.weights + which * weights_layout.bytes)
            with kv.trace("multiply values"):
                o = add_stored(a, o, p, i, first, parity, group) if c.stored else add(a, o, p, first, parity)
            slot, phase = next_tile(r, slot, phase)
            latent_ring.release(a.p_empty + which * BARRIER_BYTES, a.lane)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
        inverse = [(a.final + (8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
        for j in kv.static(range(MINE)):
            latent_results.put_columns(c, a.ring, o[j], inverse, group * MINE + j, a.warp, a.lane)

    @kv.kernel(block=(latent_blocks.threads_of(c), 1, 1), min_blocks=1, cluster=(1, PAIR, 1) if PAIR > 1 else None)
    def attention_latent_few(args: AttentionArguments):
        memory = kv.shared(RING * c.box.bytes + QUERY_BYTES + 2 * weights_layout.bytes, kv.u8, alignment=1024)
        ring = memory.ptr()
        q_tile = ring + RING * c.box.bytes
        weights = q_tile + QUERY_BYTES
        maxima = kv.shared((2 + 1) * 4 * WIDTH, kv.f32, alignment=8).ptr()
        sums_at = maxima + 2 * 4 * WIDTH * 4
        flags = kv.shared(2 * 4, kv.u32, alignment=16).ptr()
        factors = kv.shared(5 * WIDTH, kv.f32, alignment=8).ptr()
        final = factors + 2 * WIDTH * 4
        ends, scales_log2 = final + WIDTH * 4, final + 2 * WIDTH * 4
        seen_at = kv.shared(2 * LISTS, kv.u32, alignment=8).ptr()
        tile_scales_at = kv.shared(LISTS * SCALE_BYTES, kv.u8, alignment=16).ptr() if SCALE_BYTES else seen_at
        full = kv.shared(2 * RING + 6 + LISTS, kv.i64).ptr()
        empty = full + RING * BARRIER_BYTES
        p_full = empty + RING * BARRIER_BYTES
        p_empty = p_full + 2 * BARRIER_BYTES
        values_start = p_empty + 2 * BARRIER_BYTES
        tile_scales_full = values_start + 2 * BARRIER_BYTES
        thread, lane = kv.thread_id.x, kv.thread_id.x & 31
        role = kv.shuffle_idx(thread >> 7, 0)
        # One thread initialises all: with a barrier per lane, ptxas loops over lanes, with a fence per iteration.
        if thread == 0:
            for n in kv.static(range(RING)):
                kv.mbarrier_init(full + n * BARRIER_BYTES, c.arrivals)
                kv.mbarrier_init(empty + n * BARRIER_BYTES, 4)
            for n in kv.static(range(2)):
                kv.mbarrier_init(p_full + n * BARRIER_BYTES, 4)
                kv.mbarrier_init(p_empty + n * BARRIER_BYTES, 4 * GROUPS)
                kv.mbarrier_init(values_start + n * BARRIER_BYTES, 4)
            for n in kv.static(range(LISTS)):
                kv.mbarrier_init(tile_scales_full + n * BARRIER_BYTES, c.scaled + (4 if c.case.listed else 0) or 1)
            kv.fence_mbarrier_init()
            if c.copy == "tma":
                kv.tma.prefetch(args.key_map)
        kv.barrier()
        rank = kv.cluster_rank() if PAIR > 1 else kv.i32(0)
        splits, split, number = kv.grid_dim.y // PAIR, kv.block_id.y // PAIR, kv.grid_dim.x - 1 - kv.block_id.x
        kv.griddepcontrol_wait()  # everything before belongs to this kernel alone
        queries, arrays = queries_of(args.query, args.extents, args.kv_offsets), args.arrays
        b, token0, row0, rows = place_of(c, queries, number)
        place, some = (number, token0, row0, rows), kv.bool(False)
        # If a block's sequence is known, its length is read together with its offsets.
        extents = extents_of(c, args, queries, b, token0) if c.tiles else None
        if row0 < rows:
            cache = args.collection.get_key_cache(args.layer)
            tile = tile_of(c, args, queries, b, place, extents, kv.grid_dim.y)
            keys = tile.keys
            some = keys.num_tiles > 0
            if keys.num_tiles > 0:
                if role > GROUPS:
                    take_registers(2)
                    source = latent_copies.Rows(c, cache, args.lists, b, token0, keys.first, keys.end)
                    if c.copy == "tma":
                        if thread < CONSUMERS + 32:
                            latent_ring.produce_by_tma(r, args.key_map, cache, ring, full, keys, b, lane)
                        elif c.scaled and thread < CONSUMERS + 64:
                            latent_ring.produce_scales(r, source, tile_scales_at, full, tile_scales_full, keys, lane)
                    else:
                        latent_ring.produce_rows(
                            r, source, ring, seen_at, tile_scales_at, full, tile_scales_full, keys, thread - CONSUMERS
                        )
                else:
                    a = Block(
                        c, r, ring, q_tile, scales_log2, weights, factors, final, ends, maxima, sums_at, flags, seen_at,
                        tile_scales_at, full, p_full, p_empty, values_start, tile_scales_full, keys, place,
                        tile.extents, args.scale, (b, arrays), (thread & 127) >> 5, lane,
                    )  # fmt: skip
                    with kv.trace("load query"):
                        if a.by_row:
                            latent_stored.load_query(
                                c, args, q_tile, scales_log2, place, thread >> 5, lane, CONSUMERS // 32
                            )
                        else:
                            load_query(c, args, q_tile, query_layout, place, thread, CONSUMERS)
                        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    if role == 0:
                        take_registers(0)
                        if UNSWAPPED:
                            latent_unswapped.scores(a)
                        else:
                            latent_columns.scores(a)
                        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    else:
                        take_registers(1)
                        values(a, role - 1)
            else:
                if thread < N:
                    (ends + thread * 4).store(kv.f32(NEVER))
        if PAIR > 1:
            kv.cluster_barrier()
        else:
            kv.barrier()
        if row0 < rows:
            if thread < CONSUMERS:
                with kv.trace("combine and write"):
                    if PAIR > 1:
                        latent_results.combine_in_cluster(
                            c, ring, ends, rank, args.partials, args.out, place, splits, split, thread
                        )
                    else:
                        latent_results.write_own(
                            c, ring, ends, args.partials, args.out, place, splits, split, some, thread
                        )
        if PAIR > 1:
            kv.cluster_barrier()  # no block exits while the other reads its memory

    return attention_latent_few
