# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of latent rows with query rows as rows: S = Q K^T, with a softmax within warps.

Products of 64 rows and 64 columns read shared memory at the full rate, which the values role needs, too. So for some
boxes the query, or its first term, stays in registers.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32

from ..attention.partials import LOG2E, LOWEST
from . import block_sizes as latent_blocks, rows as latent_rows, stored as latent_stored
from .block import Block
from .common import KEYS, LatentConfig, of_functions
from .ring import next_tile


def register_boxes(c: LatentConfig) -> int:
    """Boxes whose query columns are in registers: as many as there are registers for."""
    if latent_blocks.query_in_registers(c):
        return 8
    return 6 if c.copy == "tma" and not c.scaled else 4


@kv.func
def query_operands(a):
    """The query, or its first term, as operand A: the words of the k-steps of some boxes."""
    c, row, found = a.c, a.warp * 16 + (a.lane & 15), {}
    layout = latent_stored.query_layout(c)
    of_panel = layout.panel_bytes // layout.rows // 16  # chunks per panel row
    for box in kv.static(range(min(register_boxes(c), latent_stored.content_boxes(c)))):
        chunks = [box * of_panel + 2 * k + (a.lane >> 4) for k in range(2)]
        found[box] = [kv.ldmatrix(a.q_tile + layout.chunk_offset(row, chunk)) for chunk in chunks]
    return found


@kv.func
def multiply(a, held, slot, phase):
    """The scores of a tile, given its first slot."""
    s, groups = None, latent_stored.groups_of(a.c, a.r.order)
    for group in kv.static(groups):
        if s is not None:
            s = kv.wgmma_wait(0, s)[0]  # a product of another kind must be complete
        for j in kv.static(group):
            s = latent_stored.start_direct(a.c, s, a.q_tile, a.box(j, slot, phase), j, held.get(j, []))
    return kv.wgmma_wait(0, s)[0]


@kv.func
def softmax_of(a, s, i, slot, scales_log2, m, total, highest):
    """The softmax of tile i; it passes the weights on."""
    c, entry, tile_scales, alpha = a.c, a.keys.tiles.entry(i), a.tile_scales(i), [kv.f32(1.0)] * 2
    base, of_keys, change = a.keys.tiles.base(entry), [], kv.f32(1.0)
    if c.scaled:
        keys = [8 * n + (a.lane & 3) * 2 for n in range(KEYS // 8)]
        pairs = [(tile_scales + latent_stored.factor_at(key)).load(kv.f32, 2) for key in keys]
        of_keys = [pairs[k // 4][k % 2] for k in range(len(s))]
        s = [s[k] * of_keys[k] for k in range(len(s))]
        change = a.change_of(tile_scales, highest)
    if c.case.functions:
        b, arrays = a.functions
        elements, of_rows = latent_rows.elements_of(a.warp, a.lane), [scales_log2[k // 2 % 2] for k in range(len(s))]
        of_functions(c, s, of_rows, elements, b, a.place, a.extents[0], base, arrays, a.keys.tiles.whole(entry))
        scales_log2 = [kv.f32(1.0)] * 2
    a.hide(s, i, slot, base, latent_rows.masked)
    latent_rows.softmax(s, m, total, alpha, scales_log2)
    if c.scaled:
        below = kv.bitcast((254 - highest[0]) << 23, f32)
        s = [s[k] * (of_keys[k] * below) for k in range(len(s))]
        alpha = [x * change for x in alpha]
    words = latent_rows.packed(c.products, s)
    weights, factors, p_full = a.weights_of(i)
    latent_rows.store_weights(latent_blocks.weights_layout_of(c), words, weights, a.warp, a.lane)
    latent_rows.store_factors(alpha, factors, a.warp, a.lane)
    a.publish(p_full)


def scales_of(a: Block) -> list[Any]:
    """The factors that make products powers of two, for a thread's two rows."""
    if a.by_row:
        return [(a.scales_log2 + latent_rows.row_of(a.warp, a.lane, u) * 4).load(kv.f32) for u in range(2)]
    return [kv.math.max(kv.math.abs(a.scale), 1.0e-30) * LOG2E] * 2


@kv.func
def scores(a: Block):
    """The scores role: the weights of all tiles, then the factors of the final accumulators."""
    scales_log2, held = scales_of(a), query_operands(a)
    m, total, highest = [kv.f32(LOWEST)] * 2, [kv.f32(0.0)] * 2, [kv.i32(1)]
    slot, phase = kv.i32(0), kv.i32(0)
    for i in range(a.keys.num_tiles):
        with kv.trace("multiply keys"):
            s = multiply(a, held, slot, phase)
        a.release_rest(slot)
        with kv.trace("softmax"):
            softmax_of(a, s, i, slot, scales_log2, m, total, highest)
        slot, phase = next_tile(a.r, slot, phase)
    factor = kv.bitcast(highest[0] << 23, f32) if a.c.scaled else kv.f32(1.0)
    latent_rows.store_ends(m, total, factor, a.final, a.ends, a.warp, a.lane)
