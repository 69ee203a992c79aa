# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a warp of decode attention streams tiles of K and V, and scales, through a circular buffer in shared memory.

A stage of the buffer is a tile of K, one of V and, of a quantized cache, their scales as f32. K and V are copied by
cp.async. Scales are of any type and may be narrower than cp.async copies: they go through a register, which is stored
one step after it is loaded, so that nothing waits for it.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.dialect.layout import cdiv

from .decode_schedule import Config


def streaming(c: Config) -> SimpleNamespace:
    """The functions that fill a circular buffer, for a configuration."""
    spec, TT, GC = c.spec, c.tile, c.scales
    item = spec.dtype.itemsize
    shared_offset = c.tile_layout.chunk_offset
    chunks = c.row_bytes // 16  # 16-byte chunks of a row
    copies = TT * chunks // 32  # of one lane, for K and again for V
    P = spec.page_size
    one_page = not spec.paged or P % TT == 0  # a tile lies in one page
    turn = 32 // chunks if 32 % chunks == 0 else 0  # rows that a warp copies at a time, when it copies whole ones
    segment_rows = TT if one_page else P  # of a tile, in one page
    # One address a page, and distances from it that no tile changes: where all lanes' j-th rows share a page.
    by_page = one_page or (turn > 0 and TT % segment_rows == 0 and segment_rows % turn == 0)
    token_bytes = spec.token_stride * item
    scale_lanes = min(TT, 32)  # lanes that have tokens of their own when scales are copied
    scale_turns = cdiv(TT, 32)
    widest = next(w for w in (4, 2, 1) if GC % w == 0)  # scales of one load

    @kv.func
    def pages_of(k_cache, b, tile, lane):
        """The page ids that this lane looks up for a tile: its own, or one a token for the shuffles."""
        if one_page:
            return k_cache.page(b, tile * TT)
        return k_cache.page(b, ((tile * TT) // P + lane) * P)

    @kv.func
    def copy_tile(caches, b, head, tile, pages, stage, lane, keys, first, whole):
        """Start the copies of a tile's K and V; tokens that do not count become zeros unless ``whole``."""
        k_cache, to_values = caches.keys, caches.to_values
        token0 = tile * TT
        k_from = []
        if by_page:
            for s in kv.static(range(TT // segment_rows)):
                page = pages if one_page else kv.shuffle_idx(pages, s)
                start = k_cache.block_paged_ptr(b, token0 + s * segment_rows, head, 0, page=page)
                k_from.append(start + (lane // chunks * token_bytes + lane % chunks * 16) if turn else start)
        for j in kv.static(range(copies)):
            if turn:
                row, chunk = lane // chunks + j * turn, lane % chunks
            else:
                row, chunk = (lane + 32 * j) // chunks, (lane + 32 * j) % chunks
            if by_page and turn:
                s = j * turn // segment_rows
                source = k_from[s] + (j * turn - s * segment_rows) * token_bytes
            elif by_page:
                source = k_from[0] + (row * token_bytes + chunk * 16)
            else:
                page = pages if one_page else kv.shuffle_idx(pages, (token0 + row) // P - token0 // P)
                source = k_cache.block_paged_ptr(b, token0 + row, head, chunk * (16 // item), page=page)
            to = stage + shared_offset(row, chunk)
            size = None
            if not whole:
                token = token0 + row
                size = kv.where((token < keys) & (token >= first), 16, 0)
            for half, at in ((0, source), (c.half_stage, source + to_values)):
                kv.cp_async(
                    to + half, at, zero_fill_size=size, l2_prefetch=c.l2_prefetch, l2_policy=caches.policy
                )  # fmt: skip

    @kv.func
    def load_scales(caches, b, head, tile, end, pages, lane, keys, first):
        """A lane's scales of a tile, K's and then V's; 0 for tokens that do not count."""
        found = []
        for s in kv.static(range(scale_turns)):
            token = tile * TT + s * 32 + lane % scale_lanes
            counts = (tile < end) & (token < keys) & (token >= first)
            page = pages if one_page else kv.shuffle_idx(pages, token // P - (tile * TT) // P)
            for cache in kv.static((caches.keys, caches.values)):
                for g in kv.static(range(0, GC, widest)):
                    scales = [kv.f32(0.0)] * widest
                    if counts:
                        loaded = kv.f32(cache.load_scale(b, head, token, g * spec.granularity, width=widest, page=page))
                        for w in kv.static(range(widest)):
                            scales[w] = loaded[w] if widest > 1 else loaded
                    for w in kv.static(range(widest)):
                        found.append(scales[w])
        return found

    @kv.func
    def store_scales(stage, scales, lane):
        """Put a lane's scales where :func:`scale_at` finds them."""
        for s in kv.static(range(scale_turns)):
            for i in kv.static(range(2 * GC)):
                scale_at(stage, i, s * 32 + lane % scale_lanes).store(scales[s * 2 * GC + i])

    @kv.func
    def scale_at(stage, which, token):
        """Pointer to the f32 scale of a tile's token: granule ``which`` of K, or ``c.scales + which`` of V."""
        return stage + (2 * c.half_stage + which * (4 * TT)) + token * 4

    @kv.func
    def issue(caches, b, head, tile, end, pages, stage, lane, keys, first, often):
        """Start copying a tile, when the unit has it: where ``often`` is set, without checks that are not needed."""
        if tile < end:
            if often:
                if (tile * TT >= first) & (tile * TT + TT <= keys):
                    copy_tile(caches, b, head, tile, pages, stage, lane, keys, first, True)
                else:
                    copy_tile(caches, b, head, tile, pages, stage, lane, keys, first, False)
            else:
                copy_tile(caches, b, head, tile, pages, stage, lane, keys, first, False)
        kv.cp_async_commit()

    return SimpleNamespace(
        shared_offset=shared_offset, pages_of=pages_of, load_scales=load_scales, store_scales=store_scales,
        scale_at=scale_at, held_scales=2 * GC * scale_turns, issue=issue,
    )  # fmt: skip
