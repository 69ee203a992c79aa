# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of latent rows with query rows as columns: S^T = K Q^T, and a softmax over lanes and warps.

Of a tile's 64 keys a warp has 16 and a thread two; of every eight query rows a thread has two: its element 4 n + 2 u +
i is at key ``16 warp + lane / 4 + 8 u`` and row ``8 n + 2 (lane % 4) + i``. Of the reduced columns a thread *owns* two.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.ops.weights import LARGEST
from kvarn.dsl.softmax import SLACK
from kvarn.dsl.values import rounded_product
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from ..attention.partials import LOG2E, LOWEST, are_large, is_large, normalizer
from . import block_sizes as latent_blocks, stored as latent_stored
from .block import Block
from .block_sizes import column_tiles, owners_of, width_of
from .common import NEVER, SCORES_BARRIER, LatentConfig, of_functions, pack
from .ring import next_tile


def owned_by(c: LatentConfig, lane: Any) -> Any:
    """The first of the two columns that a lane owns."""
    return (lane >> 2) // (8 // owners_of(c)) * 8 + (lane & 3) * 2


@kv.func
def masked(c, s, seen, start, num_keys, row0, rows, base, warp, lane):
    """Minus infinity for masked keys; ``seen`` are the bits of the listed keys of a tile that exist."""
    for u in kv.static(range(2)):
        at = warp * 16 + (lane >> 2) + 8 * u
        if c.case.listed:
            there = ((kv.where(warp < 2, seen[0], seen[1]) >> (((warp & 1) << 4) + (lane >> 2) + 8 * u)) & 1) != 0
        for n in kv.static(range(column_tiles(c))):
            for i in kv.static(range(2)):
                if c.case.listed:
                    shown = there
                else:
                    row = kv.math.min(row0 + 8 * n + (lane & 3) * 2 + i, rows - 1)
                    low, high = c.case.mask.interval(start + row // c.case.heads, num_keys)
                    shown = (base + at >= low) & (base + at < high)
                s[4 * n + 2 * u + i] = kv.where(shown, s[4 * n + 2 * u + i], float("-inf"))


@kv.func
def folded(c, values, lane):
    """The maxima of a thread's own two columns over the lanes with the same columns.

    The lanes first exchange halves of their columns, until two are left per lane.
    """
    found = values + [kv.f32(LOWEST)] * (2 * owners_of(c) - len(values))
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
def of_all(c, own, lane):
    """For a thread's columns, the values of their owners."""
    lanes = 32 // owners_of(c)
    return [kv.shuffle_idx(own[x], (n * lanes) | (lane & 3)) for n in range(column_tiles(c)) for x in range(2)]


@kv.func
def top_of(c, s, maxima, warp, lane, owned):
    """The maximum score of each of a thread's own two columns, over all keys of the tile."""
    most = [kv.math.max(s[4 * (h // 2) + h % 2], s[4 * (h // 2) + 2 + h % 2]) for h in range(2 * column_tiles(c))]
    most = folded(c, most, lane)
    (maxima + (warp * width_of(c) + owned) * 4).store(kv.vector(f32, most))
    kv.named_barrier(SCORES_BARRIER, 128)
    pairs = [(maxima + (w * width_of(c) + owned) * 4).load(kv.f32, 2) for w in range(4)]
    for x in kv.static(range(2)):
        low, high = kv.math.max(pairs[0][x], pairs[1][x]), kv.math.max(pairs[2][x], pairs[3][x])
        most[x] = kv.math.max(low, high)
    return most


# --- products --------------------------------------------------------------------------------------


def key_steps(c: LatentConfig, box: int) -> list[tuple[int, int]]:
    """Byte offsets of the 16-column k-steps of a box of 16-bit elements, in the keys and in the query."""
    return [(32 * k, 32 * k) for k in range(min(4, c.case.size // 16 - 4 * box))]


def at_once(c: LatentConfig) -> bool:
    """Whether all keys of a tile are multiplied at once: not converted keys, nor many sums of many query rows."""
    return not c.stored or (latent_stored.direct(c) and not (c.rows > latent_blocks.MOST_ROWS and c.granules))


@kv.func
def start_keys(a, slot, phase):
    """Start the products S^T of a tile; returns the partial sums that are to be added."""
    c, under_way = a.c, []
    for group in kv.static(latent_stored.groups_of(c, a.r.order) if c.stored else [a.r.order]):
        s = None
        if c.stored and latent_stored.one_sum(c) and under_way:  # a product of another kind must be complete
            s, under_way = kv.wgmma_wait(0, *under_way)[0], []
        for j in kv.static(group):
            box = a.box(j, slot, phase)
            if c.stored:
                s = latent_stored.start_direct(c, s, a.q_tile, box, j)
            else:
                rows_of = kv.wgmma_descriptor(a.q_tile + j * latent_blocks.query_layout_of(c).panel_bytes)
                keys = kv.wgmma_descriptor(box)
                s = kv.wgmma_start(c.rows if s is None else s, keys, rows_of, key_steps(c, j), c.products)
        under_way = [*under_way, s]
    return under_way


@kv.func
def finished_keys(a, under_way, i):
    """S^T of tile i, whose products are in flight."""
    c, under_way = a.c, kv.wgmma_wait(0, *under_way)
    if len(under_way) == 1:
        return under_way[0]
    s, groups, tile_scales = None, latent_stored.groups_of(c, a.r.order), a.tile_scales(i)
    for n in kv.static(range(len(groups))):
        s = latent_stored.added(c, s, under_way[n], groups[n][0], tile_scales, a.warp, a.lane)
    return s


@kv.func
def multiply_groups(a, i, slot, phase):
    """S^T of tile i, one group at a time, for lack of registers."""
    s, tile_scales = None, a.tile_scales(i)
    for group in kv.static(latent_stored.groups_of(a.c, a.r.order)):
        sums = None
        for j in kv.static(group):
            sums = latent_stored.start_direct(a.c, sums, a.q_tile, a.box(j, slot, phase), j)
        before = [] if s is None else [s]  # passed through the wait: otherwise LLVM would add all groups at the end
        sums, *before = kv.wgmma_wait(0, sums, *before)
        s = latent_stored.added(a.c, before[0] if before else None, sums, group[0], tile_scales, a.warp, a.lane)
    return s


@kv.func
def multiply_converted(a, i, slot, phase):
    """The same for converted keys; the next ones are loaded before a wait."""
    c, order, s, tile_scales = a.c, a.r.order, a.c.rows, a.tile_scales(i)
    words = latent_stored.load_keys(c, a.box(order[0], slot, phase), order[0], a.warp, a.lane)
    for n in kv.static(range(c.boxes)):
        panel, places = latent_stored.query_place(c, order[n])
        rows_of = kv.wgmma_descriptor(a.q_tile + panel * latent_blocks.query_layout_of(c).panel_bytes)
        steps = latent_stored.key_steps(c, order[n], words, tile_scales, a.warp, a.lane)
        if n + 1 < c.boxes:
            words = latent_stored.load_keys(c, a.box(order[n + 1], slot, phase), order[n + 1], a.warp, a.lane)
        s = kv.wgmma_start(s, steps, rows_of, places, latent_stored.product_type(c, order[n]))
        s = kv.wgmma_wait(1, s)[0]
    return kv.wgmma_wait(0, s)[0]


# --- the softmax -----------------------------------------------------------------------------------


@kv.func
def scales_at(a, scale_log2, n):
    """The factors that make products powers of two, for a thread's two columns of a column tile."""
    if a.by_row and not a.c.case.functions:
        return (a.scales_log2 + (8 * n + (a.lane & 3) * 2) * 4).load(kv.f32, 2)
    return [scale_log2] * 2


@kv.func
def exceeded(a, s, m, tops, scale_log2, flags):
    """Whether the maximum of any column may have to move: after most tiles none does, and no more is computed.

    Under a large maximum, products exceed it only up to its last place.
    """
    over = [kv.f32(LOWEST)] * 2
    for n in kv.static(range(column_tiles(a.c))):
        scales_of = scales_at(a, scale_log2, n)
        for x in kv.static(range(2)):
            most = kv.math.max(s[4 * n + x], s[4 * n + 2 + x])
            over[x] = kv.math.max(over[x], kv.math.fma(most, scales_of[x], -tops[2 * n + x]))
    mine = kv.ballot(kv.math.max(over[0], over[1]) > SLACK)
    if are_large(m):
        mine = mine | kv.u32(1)
    if a.lane == 0:
        (flags + a.warp * 4).store(mine)
    kv.named_barrier(SCORES_BARRIER, 128)
    found = flags.load(kv.u32, 4)
    return (found[0] | found[1] | found[2] | found[3]) != 0


@kv.func
def weigh(a, s, scale_log2, m, tops):
    """Turn scores into weights; under a large maximum the products are rounded, as the maximum is."""
    if are_large(m):
        for n in kv.static(range(column_tiles(a.c))):
            scales_of = scales_at(a, scale_log2, n)
            for k in kv.static(range(4)):
                top = tops[2 * n + k % 2]
                exact = rounded_product(s[4 * n + k], scales_of[k % 2]) - top
                fused = kv.math.fma(s[4 * n + k], scales_of[k % 2], -top)
                s[4 * n + k] = kv.ex2(kv.where(is_large(top), exact, fused))
    else:
        for n in kv.static(range(column_tiles(a.c))):
            scales_of = scales_at(a, scale_log2, n)
            for k in kv.static(range(4)):
                s[4 * n + k] = kv.ex2(kv.math.fma(s[4 * n + k], scales_of[k % 2], -tops[2 * n + k % 2]))


@kv.func
def store_weights(a, s, weights):
    """Store the transposed weights to shared memory."""
    c, lane, layout = a.c, a.lane, latent_blocks.weights_layout_of(a.c)
    for n in kv.static(range(0, column_tiles(c), 2)):
        pairs = range(n, min(n + 2, column_tiles(c)))
        words = [pack(c.products, s[4 * m + 2 * u], s[4 * m + 2 * u + 1]) for m in pairs for u in range(2)]
        row = 8 * n + (lane & 7) + ((lane >> 4) * 8 if len(words) == 4 else 0)
        kv.stmatrix(weights + layout.chunk_offset(row, 2 * a.warp + ((lane >> 3) & 1)), words, trans=True)


@kv.func
def softmax_of(a, s, i, slot, m, tops, sums, highest):
    """The softmax of tile i; it passes the weights on."""
    c, case, warp, lane, entry = a.c, a.c.case, a.warp, a.lane, a.keys.tiles.entry(i)
    which, tile_scales, COLUMNS = i & 1, a.tile_scales(i), column_tiles(c)
    owned = owned_by(c, lane)  # the first of two columns
    scale_log2 = kv.math.max(kv.math.abs(a.scale), 1.0e-30) * LOG2E
    scale_of, alpha = [scale_log2] * 2, [kv.f32(1.0)] * 2
    if a.by_row:
        scale_of = (a.scales_log2 + owned * 4).load(kv.f32, 2)
    of_rows, change = [kv.f32(1.0)] * 2, kv.f32(1.0)
    if c.scaled:
        of_rows = [
            (tile_scales + latent_stored.factor_at(warp * 16 + (lane >> 2) + 8 * u)).load(kv.f32) for u in range(2)
        ]
        s = [s[k] * of_rows[k // 2 % 2] for k in range(len(s))]
        change = a.change_of(tile_scales, highest)
    base = a.keys.tiles.base(entry)
    if case.functions:
        elements, scales_of = [], []
        for k in kv.static(range(len(s))):
            column = k // 4 * 8 + (lane & 3) * 2 + k % 2
            elements.append((column, warp * 16 + (lane >> 2) + 8 * (k // 2 % 2)))
            scales_of.append((a.scales_log2 + column * 4).load(kv.f32) if a.by_row else scale_log2)
        b, arrays = a.functions
        of_functions(c, s, scales_of, elements, b, a.place, a.extents[0], base, arrays, a.keys.tiles.whole(entry))
        scale_log2, scale_of = kv.f32(1.0), [kv.f32(1.0)] * 2
    a.hide(s, i, slot, base, masked)
    if exceeded(a, s, m, tops, scale_log2, a.flags + which * 16):
        most = top_of(c, s, a.maxima + which * (4 * width_of(c) * 4), warp, lane, owned)
        for x in kv.static(range(2)):
            top = kv.math.min(rounded_product(most[x], scale_of[x]), LARGEST)
            moves = kv.where(is_large(m[x]), top > m[x] + SLACK, kv.math.fma(most[x], scale_of[x], -m[x]) > SLACK)
            top = kv.where(moves, top, m[x])
            alpha[x] = kv.ex2(m[x] - top)
            m[x] = top
        moved, rescale = of_all(c, m, lane), of_all(c, alpha, lane)
        for h in kv.static(range(2 * COLUMNS)):
            tops[h], sums[h] = moved[h], sums[h] * rescale[h]
    weigh(a, s, scale_log2, m, tops)
    for h in kv.static(range(2 * COLUMNS)):
        k = 4 * (h // 2) + h % 2
        sums[h] = sums[h] + (s[k] + s[k + 2])
    if c.scaled:
        below = kv.bitcast((254 - highest[0]) << 23, f32)
        s = [s[k] * (of_rows[k // 2 % 2] * below) for k in range(len(s))]
        alpha = [x * change for x in alpha]
    weights, factors, p_full = a.weights_of(i)
    store_weights(a, s, weights)
    if warp == 0:
        (factors + owned * 4).store(kv.vector(f32, alpha))
    a.publish(p_full)


@kv.func
def let_values_start(a, i):
    """Let values multiply tile i: the next tile's keys are multiplied, and its softmax follows."""
    if latent_blocks.alternates(a.c):
        kv.mbarrier_arrive(a.values_start + (i & 1) * BARRIER_BYTES, (a.lane == 0) & (i >= 0))


@kv.func
def scores(a: Block):
    """The scores role: the weights of all tiles, then the factors of the final accumulators."""
    tiles, columns = a.keys.num_tiles, 2 * column_tiles(a.c)
    m, highest = [kv.f32(LOWEST)] * 2, [kv.i32(1)]
    tops, sums = [kv.f32(LOWEST)] * columns, [kv.f32(0.0)] * columns
    slot, phase = kv.i32(0), kv.i32(0)
    for i in range(tiles):
        with kv.trace("multiply keys"):
            if at_once(a.c):
                under_way = start_keys(a, slot, phase)
                let_values_start(a, i - 1)
                s = finished_keys(a, under_way, i)
            else:
                multiply = multiply_groups if latent_stored.direct(a.c) else multiply_converted
                s = multiply(a, i, slot, phase)
                let_values_start(a, i - 1)
        a.release_rest(slot)
        with kv.trace("softmax"):
            softmax_of(a, s, i, slot, m, tops, sums, highest)
        slot, phase = next_tile(a.r, slot, phase)
    let_values_start(a, tiles - 1)
    factor = kv.bitcast(highest[0] << 23, f32) if a.c.scaled else kv.f32(1.0)
    store_ends(a.c, m, sums, factor, a.sums_at, a.final, a.ends, a.warp, a.lane)


@kv.func
def store_ends(c, m, sums, factor, sums_at, final, ends, warp, lane):
    """Store the factors of the final accumulators and base-2 log-sum-exps; ``factor`` applies to all weights."""
    owned = owned_by(c, lane)
    for k in kv.static((4, 8, 16)):
        sums = [x + kv.shuffle_xor(x, k) for x in sums]
    if lane < 4:
        for n in kv.static(range(column_tiles(c))):
            pair = kv.vector(f32, [sums[2 * n], sums[2 * n + 1]])
            (sums_at + (warp * c.rows + 8 * n + (lane & 3) * 2) * 4).store(pair)
    kv.named_barrier(SCORES_BARRIER, 128)
    if warp == 0:
        for x in kv.static(range(2)):
            total, h = kv.f32(0.0), kv.math.min(owned + x, c.rows - 1)
            for w in kv.static(range(4)):
                total = total + (sums_at + (w * c.rows + h) * 4).load(kv.f32)
            if owned < c.rows:
                (final + h * 4).store(normalizer(total, factor))
                (ends + h * 4).store(kv.where(total == 0.0, NEVER, m[x] + kv.math.log2(total)))
