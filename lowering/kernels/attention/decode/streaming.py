# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The circular buffer of a decode warp in shared memory, through which it streams tiles of K and V, and scales.

A stage is a tile of K, a tile of V and, for a quantized cache, their scales as f32. cp.async copies K and V, f32 scales
if each token has whole 16-byte chunks of them, and scales with zeros, which stay f16. Other scales may be narrower than
any cp.async copy: they are loaded to a register and stored one step later, so that no warp waits for the load.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.dialect.layout import cdiv
from kvarn.lowering.schedules.decode import DecodeConfig

from ..chosen_pages import NOWHERE
from ..key_tiles import WHOLE


def streaming(c: DecodeConfig) -> SimpleNamespace:
    """The functions that fill the circular buffer, for a configuration."""
    spec, TT, GC = c.spec, c.tile, c.scales
    shared_offset = c.tile_layout.chunk_offset
    unit = 8 if c.stored_bytes % 16 else 16  # bytes per copy
    chunks = c.stored_bytes // unit  # copies per row
    copies = cdiv(TT * chunks, 32)  # per lane, for K and again for V
    P = spec.page_size
    one_page = not spec.paged or P % TT == 0  # whether a tile is within one page
    # Rows that a warp copies at a time, if it copies whole rows.
    turn = 32 // chunks if 32 % chunks == 0 and TT % (32 // chunks) == 0 else 0
    segment_rows = TT if one_page else P  # rows of a tile within one page
    # Whether the j-th rows of all lanes share a page, so that one address per page with constant distances suffices.
    by_page = one_page or (turn > 0 and TT % segment_rows == 0 and segment_rows % turn == 0)
    token_bytes = spec.dtype.bytes_of(spec.token_stride)
    scale_lanes = min(TT, 32)  # lanes with different tokens when scales are copied
    scale_turns = cdiv(TT, 32)
    widest = next(w for w in (4, 2, 1) if GC % w == 0)  # scales per load

    @kv.func
    def page_of(k_cache, b, token0, lane):
        """The page id of a tile, or of this lane's page of the tile."""
        return k_cache.page(b, token0 if one_page else (token0 // P + lane) * P)

    @kv.func
    def first_of(tile, tokens):
        """The token that a tile's addresses start from; with lists, a token within the page."""
        if not c.case.blocks:
            return tile * TT
        return kv.where(tokens < NOWHERE, tokens & ~WHOLE, 0)

    @kv.func
    def seen_whole(tokens, keys):
        """Whether nothing is masked in a tile of a block mask."""
        return ((tokens & WHOLE) != 0) & (tokens + (TT - WHOLE) <= keys)

    @kv.func
    def pages_of(k_cache, chosen, b, head, tile, lane):
        """(page ids that this lane looks up for a tile, their first tokens): the tile's, or one page's each.

        Without lists the tokens follow from the tile; for an invalid list entry the page id is arbitrary. A tile of a
        block mask has its own first token, plus :data:`WHOLE` if nothing in it is masked.
        """
        if chosen is None:
            return page_of(k_cache, b, tile * TT, lane), kv.i32(0)
        lists, entry, inside = chosen.of(b), (tile * TT) // chosen.unit, (tile * TT) % chosen.unit
        if c.case.blocks:
            token = chosen.first_token(lists, head, entry, chosen.count(lists, head))
            tokens = kv.where(token < NOWHERE, token + inside, token)
            return page_of(k_cache, b, first_of(tile, tokens), lane), tokens
        token = chosen.first_token(lists, head, entry if one_page else entry + lane, chosen.count(lists, head))
        there = token < NOWHERE
        return k_cache.page(b, kv.where(there, token, 0)), kv.where(there, token + inside, token) if one_page else token

    @kv.func
    def token_of(tile, row, tokens):
        """The token of a tile's row; ``tokens`` are from :func:`pages_of`."""
        if not c.case.by_lists:
            return tile * TT + row
        if c.case.blocks:
            return (tokens & ~WHOLE) + row
        if one_page:
            return tokens + row
        slot = (tile * TT) % P + row
        return kv.shuffle_idx(tokens, slot // P) + slot % P

    @kv.func
    def within(tile, tokens, lane, low, high):
        """Whether all tokens of a tile are in [low, high); with lists of small pages, whether all of its pages are."""
        if not c.case.by_lists:
            return (tile * TT >= low) & (tile * TT + TT <= high)
        if c.case.blocks:
            return ((tokens & ~WHOLE) >= low) & ((tokens & ~WHOLE) + TT <= high)
        if one_page:
            return (tokens >= low) & (tokens + TT <= high)
        outside = (tokens < low) | (tokens + P > high)
        return kv.ballot((lane < cdiv((tile * TT) % P + TT, P)) & outside) == 0

    @kv.func
    def copy_tile(caches, of, stage, lane, whole):
        """Start the copies of a tile's K and V; tokens out of range become zeros unless ``whole``."""
        k_cache, to_values, head = caches.keys, caches.to_values, caches.head
        b, tile, pages, tokens, keys, first = of.b, of.tile, of.pages, of.tokens, of.keys, of.first
        token0 = first_of(tile, tokens)
        k_from = []
        if by_page:
            for s in kv.static(range(TT // segment_rows)):
                page = pages if one_page else kv.shuffle_idx(pages, s)
                start = k_cache.block_paged_ptr(
                    b, token0 + s * segment_rows, head * c.joined, caches.column0, page=page
                )
                k_from.append(start + (lane // chunks * token_bytes + lane % chunks * unit) if turn else start)
        for j in kv.static(range(copies)):
            if turn:
                row, chunk = lane // chunks + j * turn, lane % chunks
            else:
                number = lane + 32 * j
                if 32 * (j + 1) > TT * chunks:
                    number = kv.math.min(number, TT * chunks - 1)  # past the end, the last chunk is copied again
                row, chunk = number // chunks, number % chunks
            if by_page and turn:
                s = j * turn // segment_rows
                source = k_from[s] + (j * turn - s * segment_rows) * token_bytes
            elif by_page:
                source = k_from[0] + (row * token_bytes + chunk * unit)
            else:
                page = pages if one_page else kv.shuffle_idx(pages, (token0 + row) // P - token0 // P)
                source = k_cache.block_paged_ptr(b, token0 + row, head * c.joined, caches.column0, page=page)
                source = source + chunk * unit
            to = stage + (shared_offset(row, chunk) if unit == 16 else shared_offset(row, chunk >> 1) + (chunk & 1) * 8)
            size = None
            if not whole:
                token = token_of(tile, row, tokens)
                size = kv.where((token < keys) & (token >= first), unit, 0)
            for half, at in ((0, source), (c.half_stage, source + to_values)):
                kv.cp_async(
                    to + half, at, unit, zero_fill_size=size, l2_prefetch=c.l2_prefetch, l2_policy=caches.policy
                )
        if spec.zero:
            copy_pairs(caches, of, stage, lane, whole)
        elif c.scales_copied:
            copy_scales(caches, of, stage, lane, whole)

    @kv.func
    def scales_of_lane(of, token0, lane, j, chunks, whole):
        """(row, chunk of the row's scales, page, bytes to copy) of a lane's j-th copy of a tile's scales.

        ``chunks`` is (chunks per token, bytes per chunk); the bytes are None where all exist. Lanes past the end copy
        the last chunk again.
        """
        of_token, size = chunks
        number = lane + 32 * j
        if 32 * (j + 1) > TT * of_token:
            number = kv.math.min(number, TT * of_token - 1)
        row, chunk = number // of_token, number % of_token
        page = of.pages if one_page else kv.shuffle_idx(of.pages, (token0 + row) // P - token0 // P)
        if whole:
            return row, chunk, page, None
        token = token_of(of.tile, row, of.tokens)
        return row, chunk, page, kv.where((token < of.keys) & (token >= of.first), size, 0)

    @kv.func
    def copy_scales(caches, of, stage, lane, whole):
        """Start the copies of a tile's scales."""
        token0, of_token = first_of(of.tile, of.tokens), GC // 4
        for j in kv.static(range(cdiv(TT * of_token, 32))):
            row, chunk, page, size = scales_of_lane(of, token0, lane, j, (of_token, 16), whole)
            for half, cache in ((0, caches.keys), (1, caches.values)):
                source = cache.scales_block_paged_ptr(
                    of.b, token0 + row, caches.head, chunk * (4 * spec.granularity), page=page
                )
                kv.cp_async(scale_at(stage, half, 0, row) + chunk * 16, source, zero_fill_size=size)

    @kv.func
    def copy_pairs(caches, of, stage, lane, whole):
        """Start the copies of a tile's scales with their zeros."""
        token0, of_token = first_of(of.tile, of.tokens), c.scale_pitch // c.scale_chunk
        granules = c.scale_chunk // 4  # per copy
        for j in kv.static(range(cdiv(TT * of_token, 32))):
            row, chunk, page, size = scales_of_lane(of, token0, lane, j, (of_token, c.scale_chunk), whole)
            source = caches.keys.scales_block_paged_ptr(
                of.b, token0 + row, caches.head, chunk * (granules * spec.granularity), page=page
            )
            for half, start in ((0, source), (1, source + caches.to_value_scales)):
                to = scale_at(stage, half, 0, row) + chunk * c.scale_chunk
                kv.cp_async(to, start, c.scale_chunk, zero_fill_size=size, l2_prefetch=c.scale_prefetch)

    @kv.func
    def pairs(stage, half, token):
        """The words (scale, zero) of a tile's token, one per granule."""
        words, wide = [], c.scale_chunk // 4
        for g in kv.static(range(0, c.granules, wide)):
            loaded = scale_at(stage, half, g, token).load(kv.i32, wide)
            words.extend([loaded[i] for i in range(wide)] if wide > 1 else [loaded])
        return words

    @kv.func
    def clear_columns(stages, lane):
        """Zero the padding columns of all stages; copies do not touch them."""
        whole, row_chunks = c.stored_bytes // 16, c.row_bytes // 16
        if whole < row_chunks:
            missing = row_chunks - whole
            for s in kv.static(range(c.stages)):
                for i in range(lane, TT * missing, 32):
                    place = stages + s * c.stage_bytes + shared_offset(i // missing, whole + i % missing)
                    place.store(kv.vector(kv.i32, 4))

    @kv.func
    def load_scales(caches, of, lane):
        """A lane's scales of a tile, K's and then V's; 0 for tokens out of range."""
        b, tile, end, pages, tokens, keys, first = of.b, of.tile, of.last, of.pages, of.tokens, of.keys, of.first
        found, token0 = [], first_of(tile, tokens)
        for s in kv.static(range(scale_turns)):
            token = token0 + s * 32 + lane % scale_lanes  # with lists, the index that finds its slot
            position = token_of(tile, s * 32 + lane % scale_lanes, tokens)
            counts = (tile < end) & (position < keys) & (position >= first)
            page = pages if one_page else kv.shuffle_idx(pages, token // P - token0 // P)
            for cache in kv.static((caches.keys, caches.values)):
                for g in kv.static(range(0, GC, widest)):
                    scales = [kv.f32(0.0)] * widest
                    if counts:
                        loaded = kv.f32(
                            cache.load_scale(b, caches.head, token, g * spec.granularity, width=widest, page=page)
                        )
                        for w in kv.static(range(widest)):
                            scales[w] = loaded[w] if widest > 1 else loaded
                    for w in kv.static(range(widest)):
                        found.append(scales[w])
        return found

    @kv.func
    def store_scales(stage, scales, lane):
        """Store a lane's scales where :func:`scale_at` finds them."""
        for s in kv.static(range(scale_turns)):
            for i in kv.static(range(2 * GC)):
                scale_at(stage, i // GC, i % GC, s * 32 + lane % scale_lanes).store(scales[s * 2 * GC + i])

    @kv.func
    def scale_at(stage, half, granule, token):
        """Pointer to the scale of a tile's token, of K or (``half`` 1) V; with zeros, to the word (scale, zero)."""
        # Copied scales lie by tokens, as in the pool; others by granules.
        next_granule, next_token = (4, c.scale_pitch) if c.scales_copied else (4 * TT, 4)
        start = 2 * c.half_stage + half * (TT * c.scale_pitch if c.scales_copied else GC * 4 * TT)
        if kv.static(isinstance(granule, int)):
            return stage + (start + granule * next_granule) + token * next_token
        return stage + start + granule * next_granule + token * next_token

    @kv.func
    def largest_scale(stage, half, lane):
        """The largest magnitude of a tile's scales, of K or (``half`` 1) V."""
        top, width = kv.f32(0.0), 4 if c.scales_copied else 1
        for t in kv.static(range(0, TT, 32)):
            token = lane % TT if TT < 32 else lane + t
            for g in kv.static(range(0, GC, width)):
                loaded = scale_at(stage, half, g, token).load(kv.f32, width)
                for i in kv.static(range(width)):
                    top = kv.math.max(top, kv.math.abs(loaded[i] if width > 1 else loaded))
        return kv.warp_reduce(top, "max")

    @kv.func
    def issue(caches, of, stage, lane, often):
        """Start copying a tile, if the unit has it; ``often`` selects the fast path without unneeded checks.

        ``of`` is the tile: its number, the unit's ``last`` of the sequence b, its pages and tokens (:func:`pages_of`),
        and the range of valid keys from ``first`` up.
        """
        if of.tile < of.last:
            if often:
                if within(of.tile, of.tokens, lane, of.first, of.keys):
                    copy_tile(caches, of, stage, lane, True)
                else:
                    copy_tile(caches, of, stage, lane, False)
            else:
                copy_tile(caches, of, stage, lane, False)
        kv.cp_async_commit()

    return SimpleNamespace(
        shared_offset=shared_offset, pages_of=pages_of, token_of=token_of, within=within, load_scales=load_scales,
        store_scales=store_scales, scale_at=scale_at, largest_scale=largest_scale,
        held_scales=0 if c.scales_copied else 2 * GC * scale_turns, issue=issue, clear_columns=clear_columns,
        seen_whole=seen_whole, pairs=pairs,
    )  # fmt: skip
