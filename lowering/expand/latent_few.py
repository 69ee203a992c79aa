# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows with swapped operands: up to 32 query rows a block, or 64 over rows of 8 bits.

Products have at least 64 rows, so keys are the rows: S^T = K Q^T, O^T += V^T P^T, with query rows as columns. V^T is
the keys' tile read transposed, P^T lies in shared memory with a row a query row. Keys and values are operand A: rows of
8 bits are converted on the way from shared memory to its registers (:mod:`latent_stored`).

- The *producer* copies boxes of 64 keys and 64 columns into a ring of as many as fit.
- *Scores* multiplies box by box as they arrive; the softmax folds columns over lanes, and over warps through shared
  memory. Weights and factors go to one of two places.
- *Values* adds, and gives the boxes back: from 33 query rows on two warpgroups with half of the columns each.

With few query rows neither has to hurry: both wait for the memory. Two blocks, a cluster, share the keys of a tile of
query rows and combine results in distributed shared memory; where more do, pairs leave partial results. With many,
scores and values take turns on the tensor cores, and a block has a split of its own.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i8, i32
from kvarn.lowering.tile_ir import BARRIER_BYTES

from . import latent_blocks, latent_copies, latent_results, latent_ring, latent_stored
from .attention_common import interval
from .common import advance
from .latent_blocks import LISTS
from .latent_common import (
    BOX,
    CONSUMERS_BARRIER,
    KEYS,
    NEVER,
    SCORES_BARRIER,
    LatentConfig,
    clear_rows,
    extents_of,
    keys_of,
    load_query,
    of_functions,
    pack,
    place_of,
    queries_of,
    walk_of,
)
from .latent_ring import Ring
from .partial_results import LOG2E, LOWEST, normalizer
from .softmax import SLACK, arrays_read


def latent_kernel(c: LatentConfig, shared_bytes: int) -> Any:
    """The kernel of a configuration: a block a tile of query rows and half of a split of their keys."""
    case, dtype, heads, N = c.case, c.products, c.case.heads, c.rows
    COLUMNS = N // 8  # column tiles
    OWNERS = 1 << (COLUMNS - 1).bit_length()  # groups of lanes that each own the columns of one, or of none
    WIDTH = 8 * OWNERS
    r = Ring(c, latent_blocks.ring_boxes(c, shared_bytes))
    RING, rest, order = r.slots, r.rest, r.order
    query_layout, weights_layout = latent_blocks.query_layout_of(c), latent_blocks.weights_layout_of(c)
    k_steps, QUERY_BYTES = weights_layout.k_steps(), latent_blocks.query_bytes(c)
    value_steps = [] if c.stored else list(zip(BOX.row_steps(), k_steps, strict=True))
    halves_of = [k_steps[:2], k_steps[2:]]
    BOX_BYTES, NOTES = c.box.bytes, c.notes_bytes
    CONSUMERS, GROUPS, PAIR = latent_blocks.consumers_of(c), latent_blocks.value_groups(c), latent_blocks.blocks_of(c)
    BY_ROW = c.stored and not c.narrow  # a query row has a unit of its own
    ONE_SUM = c.stored and latent_stored.one_sum(c)
    # Whether all keys of a tile can be under way: not those that are converted, nor many sums of many query rows.
    AT_ONCE = not c.stored or (latent_stored.direct(c) and not (N > latent_blocks.MOST_ROWS and c.granules))
    MINE = c.value_boxes // GROUPS  # boxes of a warpgroup of values
    CLEARED = c.copy == "tma" and case.spec.dtype is not i8  # which has no NaN
    STEPS, TURNS = latent_blocks.value_steps(c), latent_blocks.takes_turns(c)
    registers, launched = latent_blocks.registers_of(c), 65536 // latent_blocks.threads_of(c) // 8 * 8

    def key_steps(box: int) -> list[tuple[int, int]]:
        """Bytes of a box's 16-column steps, in the keys and in the query."""
        return [(32 * k, 32 * k) for k in range(min(4, case.size // 16 - 4 * box))]

    @kv.func
    def take_registers(role):
        """Give or take registers for a role: 0 scores, 1 values, 2 the producer."""
        if registers is not None and registers[role] != launched:
            kv.setmaxnreg(registers[role], "increase" if registers[role] > launched else "decrease")

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
        if CLEARED:
            if (base < first) | (base + KEYS > last):
                kv.named_barrier(SCORES_BARRIER, 128)  # all of them have multiplied the keys
                for box in kv.static(range(c.value_boxes)):
                    of_box, _ = advance(r.slots, slot, kv.i32(0), rest + box)
                    clear_rows(c.box, ring + of_box * BOX_BYTES, 1, first - base, last - base, warp * 32 + lane, 128)
        if c.listed:
            low, high = seen_at.load(kv.u32), (seen_at + 4).load(kv.u32)
            some, seen = (low & high) != 0xFFFFFFFF, kv.where(warp < 2, low, high)
        else:
            some, seen = (base < whole_first) | (base + KEYS > whole_end), None
        if some:
            masked(s, seen, *extents, place[2], place[3], base, warp, lane)

    @kv.func
    def folded(values, lane):
        """The largest, over the lanes that have the same columns, of a thread's own two columns.

        At first lanes exchange halves of their columns, until two are left.
        """
        found = values + [kv.f32(LOWEST)] * (2 * OWNERS - len(values))
        for k in kv.static((16, 8, 4)):
            half = len(found) // 2
            if half > 1:
                upper = (lane & k) != 0
                keep = [kv.where(upper, found[half + i], found[i]) for i in range(half)]
                give = [kv.where(upper, found[i], found[half + i]) for i in range(half)]
                found = [kv.math.max(keep[i], kv.shuffle_xor(give[i], k)) for i in range(half)]
            else:
                found = [kv.math.max(x, kv.shuffle_xor(x, k)) for x in found]
        return found

    @kv.func
    def of_all(own, lane):
        """What the owners of a thread's columns have."""
        return [kv.shuffle_idx(own[x], (n * (32 // OWNERS)) | (lane & 3)) for n in range(COLUMNS) for x in range(2)]

    @kv.func
    def top_of(s, maxima, warp, lane, owned):
        """The largest score of each of the two columns that a thread owns, over all keys of the tile."""
        most = [kv.math.max(s[4 * (h // 2) + h % 2], s[4 * (h // 2) + 2 + h % 2]) for h in range(2 * COLUMNS)]
        most = folded(most, lane)
        (maxima + (warp * WIDTH + owned) * 4).store(kv.vector(f32, most))
        kv.named_barrier(SCORES_BARRIER, 128)
        pairs = [(maxima + (w * WIDTH + owned) * 4).load(kv.f32, 2) for w in range(4)]
        for x in kv.static(range(2)):
            low, high = kv.math.max(pairs[0][x], pairs[1][x]), kv.math.max(pairs[2][x], pairs[3][x])
            most[x] = kv.math.max(low, high)
        return most

    @kv.func
    def units_at(unit, units, n, lane):
        """What makes base-2 scores of products, of a thread's two columns of a column tile."""
        if BY_ROW and not case.functions:
            return (units + (8 * n + (lane & 3) * 2) * 4).load(kv.f32, 2)
        return [unit] * 2

    @kv.func
    def exceeded(s, tops, unit, units, flags, warp, lane):
        """Whether a maximum has to move, of any column: most tiles leave all as they are and need no more."""
        over = [kv.f32(LOWEST)] * 2
        for n in kv.static(range(COLUMNS)):
            units_of = units_at(unit, units, n, lane)
            for x in kv.static(range(2)):
                most = kv.math.max(s[4 * n + x], s[4 * n + 2 + x])
                over[x] = kv.math.max(over[x], kv.math.fma(most, units_of[x], -tops[2 * n + x]))
        mine = kv.ballot(kv.math.max(over[0], over[1]) > SLACK)
        if lane == 0:
            (flags + warp * 4).store(mine)
        kv.named_barrier(SCORES_BARRIER, 128)
        found = flags.load(kv.u32, 4)
        return (found[0] | found[1] | found[2] | found[3]) != 0

    @kv.func
    def hand_on(s, alpha, weights, factors, p_full, warp, lane, owned):
        """Weights, transposed, and factors to shared memory."""
        for n in kv.static(range(0, COLUMNS, 2)):
            pairs = range(n, min(n + 2, COLUMNS))
            words = [pack(dtype, s[4 * m + 2 * u], s[4 * m + 2 * u + 1]) for m in pairs for u in range(2)]
            row = 8 * n + (lane & 7) + ((lane >> 4) * 8 if len(words) == 4 else 0)
            kv.stmatrix(weights + weights_layout.chunk_offset(row, 2 * warp + ((lane >> 3) & 1)), words, trans=True)
        if warp == 0:
            (factors + owned * 4).store(kv.vector(f32, alpha))
        kv.fence_proxy_async()
        kv.syncwarp()
        latent_ring.release(p_full, lane)

    @kv.func
    def start_keys(q_tile, ring, full, slot, phase):
        """(S^T of a tile under way, in the parts that are to be added; slot and phase of the box behind it)."""
        flying = []
        for group in kv.static(latent_stored.groups_of(c, order) if c.stored else [order]):
            s = None
            if ONE_SUM and flying:  # of another kind of product, which must be done
                s, flying = kv.wgmma_wait(0, *flying)[0], []
            for j in kv.static(group):
                latent_copies.wait_for(c, full + slot * BARRIER_BYTES, phase)
                box = ring + slot * BOX_BYTES
                if c.stored:
                    s = latent_stored.start_direct(c, s, q_tile, box, j)
                else:
                    rows_of = kv.wgmma_descriptor(q_tile + j * query_layout.panel_bytes)
                    s = kv.wgmma_start(N if s is None else s, kv.wgmma_descriptor(box), rows_of, key_steps(j), dtype)
                slot, phase = advance(r.slots, slot, phase, 1)
            flying = [*flying, s]
        return flying, slot, phase

    @kv.func
    def finished_keys(flying, notes_at, notes_full, i, warp, lane):
        """S^T of tile i, which is under way."""
        flying = kv.wgmma_wait(0, *flying)
        if not c.stored:
            return flying[0]
        if ONE_SUM:
            return latent_stored.of_both_terms(c, flying[0])
        s, groups = None, latent_stored.groups_of(c, order)
        notes = noted(notes_at, notes_full, i)
        for n in kv.static(range(len(groups))):
            s = latent_stored.added(c, s, flying[n], groups[n][0], notes, warp, lane)
        return s

    @kv.func
    def noted(notes_at, notes_full, i):
        """The notes of tile i, once they are there."""
        if c.scaled or c.listed:
            kv.mbarrier_wait(notes_full + (i & (LISTS - 1)) * BARRIER_BYTES, (i // LISTS) & 1)
        return notes_at + (i & (LISTS - 1)) * NOTES

    @kv.func
    def multiply_groups(q_tile, ring, full, notes, slot, phase, warp, lane):
        """(S^T of a tile, slot and phase of the box behind it), a group at a time: for more there are no registers."""
        s = None
        for group in kv.static(latent_stored.groups_of(c, order)):
            sums = None
            for j in kv.static(group):
                latent_copies.wait_for(c, full + slot * BARRIER_BYTES, phase)
                sums = latent_stored.start_direct(c, sums, q_tile, ring + slot * BOX_BYTES, j)
                slot, phase = advance(r.slots, slot, phase, 1)
            before = [] if s is None else [s]  # through the wait: else LLVM adds all at the end
            sums, *before = kv.wgmma_wait(0, sums, *before)
            s = latent_stored.added(c, before[0] if before else None, sums, group[0], notes, warp, lane)
        return s, slot, phase

    @kv.func
    def multiply_converted(q_tile, ring, full, notes, slot, phase, warp, lane):
        """The same of keys that are converted; what is converted next is loaded before a wait."""
        s = N
        kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
        words = latent_stored.load_keys(ring + slot * BOX_BYTES, warp, lane)
        for n in kv.static(range(c.boxes)):
            panel, places = latent_stored.query_place(c, order[n])
            rows_of = kv.wgmma_descriptor(q_tile + panel * query_layout.panel_bytes)
            steps = latent_stored.key_steps(c, order[n], words, notes, warp, lane)
            slot, phase = advance(r.slots, slot, phase, 1)
            if n + 1 < c.boxes:
                kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
                words = latent_stored.load_keys(ring + slot * BOX_BYTES, warp, lane)
            s = kv.wgmma_start(s, steps, rows_of, places, latent_stored.product_type(c, order[n]))
            s = kv.wgmma_wait(1, s)[0]
        return kv.wgmma_wait(0, s)[0], slot, phase

    @kv.func
    def release_rest(empty, of_tile, lane):
        """Give back the boxes of a tile that are no values."""
        for j in kv.static(range(rest)):
            at, _ = advance(r.slots, of_tile, kv.i32(0), j)
            latent_ring.release(empty + at * BARRIER_BYTES, lane)

    @kv.func
    def softmax_of(
        s, i, entry, ring, of_tile, seen_at, notes_at, units, maxima, weights, factors, p_full, p_empty, notes_full,
        span, place, extents, scale, functions, flags, m, tops, sums, highest, warp, lane,
    ):  # fmt: skip
        """The softmax of tile i, whose weights it hands on."""
        which, notes = i & 1, noted(notes_at, notes_full, i)
        owned = (lane >> 2) // (8 // OWNERS) * 8 + (lane & 3) * 2  # the first of two columns
        unit = kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E
        unit_of, alpha = [unit] * 2, [kv.f32(1.0)] * 2
        if BY_ROW:
            unit_of = (units + owned * 4).load(kv.f32, 2)
        of_rows, change = [kv.f32(1.0)] * 2, kv.f32(1.0)
        if c.scaled:
            of_rows = [
                (notes + latent_stored.factor_at(warp * 16 + (lane >> 2) + 8 * u)).load(kv.f32) for u in range(2)
            ]
            s = [s[k] * of_rows[k // 2 % 2] for k in range(len(s))]
            above = kv.math.max(highest[0], notes.load(kv.i32))
            change = kv.bitcast(kv.math.max(127 + highest[0] - above, 0) << 23, f32)
            highest[0] = above
        base = span[4].base(entry)
        if case.functions:
            elements, units_of = [], []
            for k in kv.static(range(len(s))):
                column = k // 4 * 8 + (lane & 3) * 2 + k % 2
                elements.append((column, warp * 16 + (lane >> 2) + 8 * (k // 2 % 2)))
                units_of.append((units + column * 4).load(kv.f32) if BY_ROW else unit)
            b, arrays = functions
            of_functions(c, s, units_of, elements, b, place, extents[0], base, arrays, span[4].whole(entry))
            unit, unit_of = kv.f32(1.0), [kv.f32(1.0)] * 2
        visible(s, ring, of_tile, seen_at + (i & (LISTS - 1)) * 8, span, place, extents, base, warp, lane)
        if exceeded(s, tops, unit, units, flags + which * 16, warp, lane):
            most = top_of(s, maxima + which * (4 * WIDTH * 4), warp, lane, owned)
            for x in kv.static(range(2)):
                top = most[x] * unit_of[x]
                top = kv.where(top > m[x] + SLACK, top, m[x])
                alpha[x] = kv.ex2(m[x] - top)
                m[x] = top
            moved, rescale = of_all(m, lane), of_all(alpha, lane)
            for h in kv.static(range(2 * COLUMNS)):
                tops[h], sums[h] = moved[h], sums[h] * rescale[h]
        for n in kv.static(range(COLUMNS)):
            units_of = units_at(unit, units, n, lane)
            for x in kv.static(range(2)):
                h = 2 * n + x
                for u in kv.static(range(2)):
                    s[4 * n + 2 * u + x] = kv.ex2(kv.math.fma(s[4 * n + 2 * u + x], units_of[x], -tops[h]))
                sums[h] = sums[h] + (s[4 * n + x] + s[4 * n + 2 + x])
        if c.scaled:
            below = kv.bitcast((254 - highest[0]) << 23, f32)
            s = [s[k] * (of_rows[k // 2 % 2] * below) for k in range(len(s))]
            alpha = [x * change for x in alpha]
        kv.mbarrier_wait(p_empty + which * BARRIER_BYTES, ((i >> 1) & 1) ^ 1)
        p_at = weights + which * weights_layout.bytes
        hand_on(s, alpha, p_at, factors + which * (WIDTH * 4), p_full + which * BARRIER_BYTES, warp, lane, owned)

    @kv.func
    def scores(
        q_tile, ring, weights, maxima, factors, sums_at, units, final, ends, seen_at, notes_at, full, empty, p_full,
        p_empty, turns, notes_full, flags, span, place, extents, scale, functions, warp, lane,
    ):  # fmt: skip
        tiles = span[5]
        owned = (lane >> 2) // (8 // OWNERS) * 8 + (lane & 3) * 2
        m, highest = [kv.f32(LOWEST)] * 2, [kv.i32(1)]
        tops, sums = [kv.f32(LOWEST)] * (2 * COLUMNS), [kv.f32(0.0)] * (2 * COLUMNS)
        slot, phase, of_tile = kv.i32(0), kv.i32(0), kv.i32(0)
        for i in range(tiles):
            of_tile, entry = slot, span[4].entry(i)
            with kv.trace("multiply keys"):
                if AT_ONCE:
                    flying, slot, phase = start_keys(q_tile, ring, full, slot, phase)
                    give_turn(turns, i - 1, lane)
                    s = finished_keys(flying, notes_at, notes_full, i, warp, lane)
                else:
                    multiply = multiply_groups if latent_stored.direct(c) else multiply_converted
                    notes = noted(notes_at, notes_full, i)
                    s, slot, phase = multiply(q_tile, ring, full, notes, slot, phase, warp, lane)
                    give_turn(turns, i - 1, lane)
            release_rest(empty, of_tile, lane)
            with kv.trace("softmax"):
                softmax_of(
                    s, i, entry, ring, of_tile, seen_at, notes_at, units, maxima, weights, factors, p_full, p_empty,
                    notes_full, span, place, extents, scale, functions, flags, m, tops, sums, highest, warp, lane,
                )  # fmt: skip
        give_turn(turns, tiles - 1, lane)
        for k in kv.static((4, 8, 16)):
            sums = [x + kv.shuffle_xor(x, k) for x in sums]
        if lane < 4:
            for n in kv.static(range(COLUMNS)):
                pair = kv.vector(f32, [sums[2 * n], sums[2 * n + 1]])
                (sums_at + (warp * N + 8 * n + (lane & 3) * 2) * 4).store(pair)
        kv.named_barrier(SCORES_BARRIER, 128)
        factor = kv.bitcast(highest[0] << 23, f32) if c.scaled else kv.f32(1.0)
        if warp == 0:
            for x in kv.static(range(2)):
                total, h = kv.f32(0.0), kv.math.min(owned + x, N - 1)
                for w in kv.static(range(4)):
                    total = total + (sums_at + (w * N + h) * 4).load(kv.f32)
                if owned < N:
                    (final + h * 4).store(normalizer(total, factor))
                    (ends + h * 4).store(kv.where(total == 0.0, NEVER, m[x] + kv.math.log2(total)))
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)

    @kv.func
    def give_turn(turns, i, lane):
        """Let values multiply tile i: the keys of the one behind it are multiplied, a softmax is to come."""
        if TURNS:
            kv.mbarrier_arrive(turns + (i & 1) * BARRIER_BYTES, (lane == 0) & (i >= 0))

    @kv.func
    def wait_for_turn(turn, parity):
        if TURNS:
            with kv.trace("wait for its turn"):
                kv.mbarrier_wait(turn, parity)

    @kv.func
    def add_stored(o, p, ring, notes, full, empty, turn, parity, slot, phase, group, warp, lane):
        """O^T plus a tile's values, of a warpgroup's boxes; what is multiplied next is loaded before a wait.

        But not where there are several scales a row: registers do not suffice.
        """
        words = None
        if c.granules:
            wait_for_turn(turn, parity)
        for n in kv.static(range(2 * MINE)):
            j, half = n // 2, n % 2
            if half == 0 and (n == 0 or c.granules):
                kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
            if n == 0 or c.granules:
                words = latent_stored.load_values(ring + slot * BOX_BYTES, half, warp, lane)
            steps = latent_stored.value_steps(c, group * MINE + j, half, words, notes, warp, lane)
            if n == 0 and not c.granules:
                wait_for_turn(turn, parity)
            if half == 1:
                kv.syncwarp()
                latent_ring.release(empty + slot * BARRIER_BYTES, lane)
                slot, phase = advance(r.slots, slot, phase, 1)
            if not c.granules and n + 1 < 2 * MINE:
                if half == 1:
                    kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
                words = latent_stored.load_values(ring + slot * BOX_BYTES, 1 - half, warp, lane)
            for k in kv.static(range(0, 2, STEPS)):
                o[j] = kv.wgmma_start(o[j], steps[k : k + STEPS], p, halves_of[half][k : k + STEPS], dtype)
                o = kv.wgmma_wait(1, *o)
        return kv.wgmma_wait(0, *o), slot, phase

    @kv.func
    def values(ring, weights, factors, final, notes_at, full, empty, p_full, p_empty, turns, tiles, group, warp, lane):
        column = (lane & 3) * 2
        o = [[kv.f32(0.0)] * (N // 2) for _ in range(MINE)]
        slot, phase = kv.i32(0), kv.i32(0)
        for i in range(tiles):
            which = i & 1
            with kv.trace("wait for weights"):
                kv.mbarrier_wait(p_full + which * BARRIER_BYTES, (i >> 1) & 1)
            alpha = [(factors + (which * WIDTH + 8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
            moved = alpha[0][0] != 1.0
            for n in kv.static(range(COLUMNS)):
                moved = moved | (alpha[n][0] != 1.0) | (alpha[n][1] != 1.0)
            if kv.ballot(moved) != 0:
                for j in kv.static(range(MINE)):
                    for k in kv.static(range(N // 2)):
                        o[j][k] = o[j][k] * alpha[k // 4][k % 2]
            slot, phase = advance(r.slots, slot, phase, rest + group * MINE)
            first = slot
            p = kv.wgmma_descriptor(weights + which * weights_layout.bytes)
            notes = notes_at + (i & (LISTS - 1)) * NOTES
            with kv.trace("multiply values"):
                if c.stored:
                    turn = turns + which * BARRIER_BYTES
                    o, slot, phase = add_stored(
                        o, p, ring, notes, full, empty, turn, (i >> 1) & 1, slot, phase, group, warp, lane
                    )
                else:
                    for j in kv.static(range(MINE)):
                        latent_copies.wait_for(c, full + slot * BARRIER_BYTES, phase)
                        box = kv.wgmma_descriptor(ring + slot * BOX_BYTES)
                        o[j] = kv.wgmma_start(o[j], box, p, value_steps, dtype, trans_a=True)
                        slot, phase = advance(r.slots, slot, phase, 1)
                    here = first
                    for j in kv.static(range(MINE)):
                        o = kv.wgmma_wait(MINE - 1 - j, *o)
                        latent_ring.release(empty + here * BARRIER_BYTES, lane)
                        here, _ = advance(r.slots, here, phase, 1)
            slot, phase = advance(r.slots, slot, phase, (GROUPS - 1 - group) * MINE)
            latent_ring.release(p_empty + which * BARRIER_BYTES, lane)
        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
        inverse = [(final + (8 * n + column) * 4).load(kv.f32, 2) for n in range(COLUMNS)]
        for j in kv.static(range(MINE)):
            latent_results.put_columns(c, ring, o[j], inverse, group * MINE + j, warp, lane)

    @kv.kernel(block=(latent_blocks.threads_of(c), 1, 1), min_blocks=1, cluster=(1, PAIR, 1) if PAIR > 1 else None)
    def attention_latent_few(
        collection: kv.KVCacheCollection, layer: kv.i32, query: kv.Buffer[case.query, 3],
        row_offsets: kv.Buffer[i32, 1], scale: kv.f32, out: kv.Optional[kv.Buffer[case.out, 3]],
        parts: kv.Buffer[i8, 1], indices: kv.Optional[kv.Buffer[i32, 2]], topk_lengths: kv.Optional[kv.Buffer[i32, 1]],
        key_map: kv.Optional[kv.TensorMap], kv_offsets: kv.Optional[kv.Buffer[i32, 1]] = None,
        array0=None, array1=None, array2=None, array3=None, block_mask=None,
    ):  # fmt: skip
        memory = kv.shared(RING * BOX_BYTES + QUERY_BYTES + 2 * weights_layout.bytes, kv.u8, alignment=1024)
        ring = memory.ptr()
        q_tile = ring + RING * BOX_BYTES
        weights = q_tile + QUERY_BYTES
        maxima = kv.shared((2 + 1) * 4 * WIDTH, kv.f32, alignment=8).ptr()
        sums_at = maxima + 2 * 4 * WIDTH * 4
        flags = kv.shared(2 * 4, kv.u32, alignment=16).ptr()
        factors = kv.shared(5 * WIDTH, kv.f32, alignment=8).ptr()
        final = factors + 2 * WIDTH * 4
        ends, units = final + WIDTH * 4, final + 2 * WIDTH * 4
        seen_at = kv.shared(2 * LISTS, kv.u32, alignment=8).ptr()
        notes_at = kv.shared(LISTS * NOTES, kv.u8, alignment=16).ptr() if NOTES else seen_at
        full = kv.shared(2 * RING + 6 + LISTS, kv.i64).ptr()
        empty = full + RING * BARRIER_BYTES
        p_full = empty + RING * BARRIER_BYTES
        p_empty = p_full + 2 * BARRIER_BYTES
        turns = p_empty + 2 * BARRIER_BYTES
        notes_full = turns + 2 * BARRIER_BYTES
        thread, lane = kv.thread_id.x, kv.thread_id.x & 31
        role = kv.shuffle_idx(thread >> 7, 0)
        if thread == 0:
            for n in kv.static(range(RING)):
                kv.mbarrier_init(full + n * BARRIER_BYTES, c.arrivals)
                kv.mbarrier_init(empty + n * BARRIER_BYTES, 4)
            for n in kv.static(range(2)):
                kv.mbarrier_init(p_full + n * BARRIER_BYTES, 4)
                kv.mbarrier_init(p_empty + n * BARRIER_BYTES, 4 * GROUPS)
                kv.mbarrier_init(turns + n * BARRIER_BYTES, 4)
            for n in kv.static(range(LISTS)):
                kv.mbarrier_init(notes_full + n * BARRIER_BYTES, c.scaled + (4 if c.listed else 0) or 1)
            kv.fence_mbarrier_init()
            if c.copy == "tma":
                kv.tma.prefetch(key_map)
        kv.barrier()
        rank = kv.cluster_rank() if PAIR > 1 else kv.i32(0)
        splits, split, number = kv.grid_dim.y // PAIR, kv.block_id.y // PAIR, kv.grid_dim.x - 1 - kv.block_id.x
        queries, arrays = queries_of(query, row_offsets, kv_offsets), arrays_read(array0, array1, array2, array3)
        b, token0, row0, rows = place_of(c, queries, number)
        some = kv.bool(False)
        if c.tiles:  # a block's sequence is known: its length is read with its offsets
            extents = extents_of(c, collection, queries, indices, topk_lengths, b, token0)
        if row0 < rows:
            place = (number, token0, row0, rows)
            cache = collection.get_key_cache(layer)
            if not c.tiles:
                extents = extents_of(c, collection, queries, indices, topk_lengths, b, token0)
            listed = walk_of(c, block_mask, queries, b, row0)
            span = keys_of(c, *extents, row0, rows, kv.grid_dim.y, kv.block_id.y, listed)
            tiles = span[5]
            some = tiles > 0
            if tiles > 0:
                if role > GROUPS:
                    take_registers(2)
                    source = latent_copies.Rows(c, cache, indices, b, token0, span[0], span[1])
                    if c.copy == "tma":
                        if thread < CONSUMERS + 32:
                            latent_ring.produce_by_tma(r, key_map, cache, ring, full, empty, span, b, lane)
                        elif c.scaled and thread < CONSUMERS + 64:
                            latent_ring.produce_notes(r, source, notes_at, full, notes_full, span, lane)
                    else:
                        latent_ring.produce_rows(
                            r, source, ring, seen_at, notes_at, full, empty, notes_full, span, thread - CONSUMERS
                        )
                else:
                    warp = (thread & 127) >> 5
                    with kv.trace("load query"):
                        if BY_ROW:
                            latent_stored.load_query(
                                c, query, q_tile, units, token0, row0, rows, scale, thread >> 5, lane, CONSUMERS // 32
                            )
                        else:
                            load_query(c, query, q_tile, query_layout, token0, row0, rows, scale, thread, CONSUMERS)
                        kv.named_barrier(CONSUMERS_BARRIER, CONSUMERS)
                    if role == 0:
                        take_registers(0)
                        scores(
                            q_tile, ring, weights, maxima, factors, sums_at, units, final, ends, seen_at, notes_at,
                            full, empty, p_full, p_empty, turns, notes_full, flags, span, place, extents, scale,
                            (b, arrays), warp, lane,
                        )  # fmt: skip
                    else:
                        take_registers(1)
                        values(
                            ring, weights, factors, final, notes_at, full, empty, p_full, p_empty, turns, tiles,
                            role - 1, warp, lane,
                        )  # fmt: skip
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
                            c, ring, ends, rank, parts, out, (number, token0, row0, rows), splits, split, thread
                        )
                    else:
                        latent_results.write_own(
                            c, ring, ends, parts, out, (number, token0, row0, rows), splits, split, some, thread
                        )
        if PAIR > 1:
            kv.cluster_barrier()  # no block ends while the other reads its memory

    return attention_latent_few
