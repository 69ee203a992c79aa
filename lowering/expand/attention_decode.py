# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention: few query rows a sequence, read at the rate of the memory.

Work. Every sequence's visible keys are cut into tiles of ``tile`` tokens; the tiles of the whole batch, laid end to
end, are cut into equal ranges, one a block. The division is made on the device from the cache lengths, so that one
captured graph serves every batch of a shape class and a ragged batch is as even as a uniform one. A block's warps
take one KV head each and share nothing: neighbouring blocks read the other heads of the same tokens, which keeps
DRAM pages open.

Streaming. A warp copies its tiles through a private ring of ``stages`` cp.async stages; the page ids of the next
tile are looked up one step ahead, so that no copy waits for the table. Scores are K Q^T with the query rows of the
group in the 8 columns of m16n8k16; the probabilities turn into the second product's operand with movmatrix; the
output is V^T P^T, so that maxima and sums stay in the lanes that need them. Softmax is online, in base 2.

Merging. A sequence inside one range is written at once. Otherwise each range leaves a partial result in the
workspace, and the warp that finds itself last (an atomic counter a sequence and head) merges them in range order.
Batches of few sequences have many partial results each: there a second kernel merges them, with a block for each
piece of the head, launched programmatically so that it waits on the device when the first one ends.

8-bit floats are converted to f16 in pairs. K's bytes keep their order in a register, which permutes the head
dimension inside each 16; the query is read with the same permutation.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv

from .attention_combine import combine_kernel
from .base import Expansion
from .decode_division import division
from .decode_schedule import COLUMNS, LN2, LOG2E, NEVER, Config, choose, supports

__all__ = ["Config", "choose", "decode_kernel", "expand_decode", "supports"]


def decode_kernel(c: Config) -> Any:
    """The kernel of a configuration."""
    spec, G, NT, TT, NS = c.spec, c.group, c.column_tiles, c.tile, c.stages
    NW, MT, KS, H = c.warps, c.tile // 16, c.size // 16, c.heads
    HG = H // NW  # blocks that share a range, each with other heads
    item = spec.dtype.itemsize
    chunks = c.row_bytes // 16  # 16-byte pieces of a row
    copies = TT * chunks // 32  # of one lane, for K and again for V
    P = spec.page_size
    one_page = not spec.paged or P % TT == 0  # a tile lies in one page
    turn = 32 // chunks if 32 % chunks == 0 else 0  # rows that a warp copies at a time, when it copies whole ones
    segment_rows = TT if one_page else P  # of a tile, in one page
    # A lane's copies of one page differ by whole turns: one address a page, and constant distances from it.
    straight = turn > 0 and TT % segment_rows == 0 and segment_rows % turn == 0
    threads = 32 * NW
    token_bytes = spec.token_stride * item
    work = division(c)

    @kv.func
    def shared_offset(row, chunk):
        """Byte of a 16-byte chunk of a token's row in a tile."""
        if c.swizzled:
            return row * c.pitch + ((chunk ^ (row & 7)) << 4)
        return row * c.pitch + (chunk << 4)

    @kv.func
    def pages_of(k_cache, b, tile, lane):
        """The page ids that this lane looks up for a tile: its own, or one a token for the shuffles."""
        if one_page:
            return k_cache.page(b, tile * TT)
        return k_cache.page(b, ((tile * TT) // P + lane) * P)

    @kv.func
    def copy_tile(k_cache, to_values, b, head, tile, pages, stage, lane, keys, first, whole):
        """Start the copies of a tile's K and V; tokens that do not count become zeros unless ``whole``."""
        token0 = tile * TT
        row0, chunk0 = lane // chunks, lane % chunks
        k_from = []
        if straight:
            for s in kv.static(range(TT // segment_rows)):
                page = pages if one_page else kv.shuffle_idx(pages, s)
                token, elements = token0 + s * segment_rows + row0, chunk0 * (16 // item)
                k_from.append(k_cache.block_paged_ptr(b, token, head, elements, page=page))
        for j in kv.static(range(copies)):
            if straight:
                row, chunk, s = row0 + j * turn, chunk0, j * turn // segment_rows
                distance = (j * turn - s * segment_rows) * token_bytes
                source = k_from[s] + distance
            else:
                index = lane + 32 * j
                row, chunk = index // chunks, index % chunks
                token = token0 + row
                page = pages if one_page else kv.shuffle_idx(pages, token // P - token0 // P)
                elements = chunk * (16 // item)
                source = k_cache.block_paged_ptr(b, token, head, elements, page=page)
            to = stage + shared_offset(row, chunk)
            if whole:
                kv.cp_async(to, source)
                kv.cp_async(to + c.half_stage, source + to_values)
            else:
                token = token0 + row
                size = kv.where((token < keys) & (token >= first), 16, 0)
                kv.cp_async(to, source, zero_fill_size=size)
                kv.cp_async(to + c.half_stage, source + to_values, zero_fill_size=size)

    @kv.func
    def issue(k_cache, to_values, b, head, tile, end, pages, stage, lane, keys, first):
        """Start copying a tile, when the range has it."""
        if tile < end:
            inside = (tile * TT >= first) & (tile * TT + TT <= keys)
            if inside:
                copy_tile(k_cache, to_values, b, head, tile, pages, stage, lane, keys, first, True)
            else:
                copy_tile(k_cache, to_values, b, head, tile, pages, stage, lane, keys, first, False)
        kv.cp_async_commit()

    @kv.func
    def query_fragments(query, row_offsets, b, head, n, lane):
        """The query rows as the second operand of the first product: [column tile][step][2] words."""
        found = []
        for nt in kv.static(range(NT)):
            row = nt * COLUMNS + (lane >> 2)
            exists = row < n * G
            safe = kv.where(exists, row, 0)
            token = row_offsets[b] + safe // G
            h = head * G + safe % G
            words = []
            for ks in kv.static(range(KS)):
                for u in kv.static(range(2)):
                    if c.narrow:
                        pair = query.load(token, h, ks * 16 + (lane & 3) * 4 + 2 * u, width=2)
                        if c.query is not kv.f16:
                            pair = kv.f16(kv.f32(pair))
                    else:
                        pair = query.load(token, h, ks * 16 + (lane & 3) * 2 + 8 * u, width=2)
                    word = kv.bitcast(pair, kv.i32)
                    words.append(kv.where(exists, word, 0))
            found.append(words)
        return found

    @kv.func
    def widen(word):
        """Four 8-bit floats as two pairs of f16."""
        if spec.dtype is kv.f8e5m2:
            return kv.cvt_e5m2x4_to_f16x4(word)
        return kv.cvt_e4m3x4_to_f16x4(word)

    @kv.func
    def key_fragments(stage, mt, lane):
        """K as the first operand of the first product: [step][4] words."""
        row = mt * 16 + (lane & 7) + ((lane >> 3) & 1) * 8
        found = []
        if c.narrow:
            for k in kv.static(range(KS // 2)):
                words = [widen(w) for w in kv.ldmatrix(stage + shared_offset(row, 2 * k + (lane >> 4)))]
                for u in kv.static(range(2)):
                    found.append([words[2 * u][0], words[2 * u + 1][0], words[2 * u][1], words[2 * u + 1][1]])
        else:
            for k in kv.static(range(KS)):
                found.append(kv.ldmatrix(stage + shared_offset(row, 2 * k + (lane >> 4))))
        return found

    @kv.func
    def value_fragments(stage, mt, t, lane):
        """V transposed as the first operand of the second product: one or two head-size steps of 4 words."""
        base = stage + c.half_stage
        if c.narrow:
            row = mt * 16 + (lane & 7) + ((lane >> 3) & 1) * 8
            loaded = kv.ldmatrix(base + shared_offset(row, 2 * t + (lane >> 4)), trans=True)
            words = [widen(kv.prmt(w, 0, 0x3120)) for w in loaded]
            return [[words[2 * u][0], words[2 * u][1], words[2 * u + 1][0], words[2 * u + 1][1]] for u in range(2)]
        row = mt * 16 + (lane & 7) + (lane >> 4) * 8
        return [kv.ldmatrix(base + shared_offset(row, 2 * t + ((lane >> 3) & 1)), trans=True)]

    @kv.func
    def pack(a, b):
        return kv.pack_f16x2(a, b) if c.mma is kv.f16 else kv.pack_bf16x2(a, b)

    @kv.func
    def masked(s, token, nt, i, lane, keys, start):
        """A score, minus infinity where the query row may not see the token."""
        position = start + (nt * COLUMNS + (lane & 3) * 2 + i % 2) // G
        seen = token < keys
        if c.causal:
            seen = seen & (token <= position)
        if c.mask == "sliding_window":
            seen = seen & (token > position - c.span)
        if c.chunked:
            seen = seen & (token // c.span == position // c.span)
        return kv.where(seen, s, float("-inf"))

    @kv.func
    def attend(tile, stage, q, m, l, o, scale, lane, keys, first, start):
        """One tile: scores, online softmax, weighted values. Changes m, l and o."""
        scores = []
        for mt in kv.static(range(MT)):
            a = key_fragments(stage, mt, lane)
            for nt in kv.static(range(NT)):
                even, odd = [kv.f32(0.0)] * 4, [kv.f32(0.0)] * 4
                for ks in kv.static(range(KS)):
                    if ks % 2 == 0:
                        even = kv.mma_m16n8k16(a[ks], [q[nt][2 * ks], q[nt][2 * ks + 1]], even, c.mma)
                    else:
                        odd = kv.mma_m16n8k16(a[ks], [q[nt][2 * ks], q[nt][2 * ks + 1]], odd, c.mma)
                for i in kv.static(range(4)):
                    s = even[i] + odd[i] if KS > 1 else even[i]
                    if c.softcap:
                        s = kv.math.tanh(s * (scale * (LN2 / c.softcap))) * (c.softcap * LOG2E)
                    else:
                        s = s * scale
                    scores.append(s)
        # Only tiles at the ends of what rows see need the mask: every row sees [last row's first, first row's end).
        edge = tile * TT + TT > (start + 1 if c.causal else keys)
        if c.mask == "sliding_window":
            edge = edge | (tile * TT < start + c.max_queries - c.span)
        if c.chunked:
            edge = edge | (tile * TT < first) | ((start + c.max_queries - 1) // c.span != start // c.span)
        if edge:
            for mt in kv.static(range(MT)):
                for nt in kv.static(range(NT)):
                    for i in kv.static(range(4)):
                        token = tile * TT + mt * 16 + (lane >> 2) + 8 * (i // 2)
                        at = (mt * NT + nt) * 4 + i
                        scores[at] = masked(scores[at], token, nt, i, lane, keys, start)
        alphas = []
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                top = kv.math.max(scores[nt * 4 + u], scores[nt * 4 + 2 + u])
                for mt in kv.static(range(1, MT)):
                    top = kv.math.max(top, scores[(mt * NT + nt) * 4 + u], scores[(mt * NT + nt) * 4 + 2 + u])
                for k in kv.static((4, 8, 16)):
                    top = kv.math.max(top, kv.shuffle_xor(top, k))
                top = kv.math.max(top, m[2 * nt + u])
                alpha = kv.ex2(m[2 * nt + u] - top)
                alphas.append(alpha)
                m[2 * nt + u] = top
                total = l[2 * nt + u] * alpha
                for mt in kv.static(range(MT)):
                    for half in kv.static(range(2)):
                        at = (mt * NT + nt) * 4 + 2 * half + u
                        scores[at] = kv.ex2(scores[at] - top)
                        total = total + scores[at]
                l[2 * nt + u] = total
        # Maxima rarely change after the first tiles; the output is scaled only where one did.
        changed = alphas[0] != 1.0
        for x in kv.static(range(1, 2 * NT)):
            changed = changed | (alphas[x] != 1.0)
        if kv.ballot(changed) != 0:
            for nt in kv.static(range(NT)):
                for t in kv.static(range(KS)):
                    for i in kv.static(range(4)):
                        o[(nt * KS + t) * 4 + i] = o[(nt * KS + t) * 4 + i] * alphas[2 * nt + i % 2]
        for mt in kv.static(range(MT)):
            b = []
            for nt in kv.static(range(NT)):
                p = [scores[(mt * NT + nt) * 4 + i] for i in range(4)]
                b.append([kv.movmatrix(pack(p[0], p[1])), kv.movmatrix(pack(p[2], p[3]))])
            step = 2 if c.narrow else 1
            for t in kv.static(range(KS // step)):
                fragments = value_fragments(stage, mt, t, lane)
                for u in kv.static(range(step)):
                    for nt in kv.static(range(NT)):
                        at = (nt * KS + t * step + u) * 4
                        result = kv.mma_m16n8k16(fragments[u], b[nt], [o[at], o[at + 1], o[at + 2], o[at + 3]], c.mma)
                        for i in kv.static(range(4)):
                            o[at + i] = result[i]

    @kv.func
    def write_out(out, sinks, lse, row_offsets, b, head, n, m, l, o, lane):
        """Normalise and write the rows of one sequence and KV head, each lane its own elements."""
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                row = nt * COLUMNS + (lane & 3) * 2 + u
                at = 2 * nt + u
                if row < n * G:
                    token, h = row_offsets[b] + row // G, head * G + row % G
                    top, total, factor = m[at], l[at], kv.f32(1.0)
                    if c.sinks:
                        sink = sinks[h] * LOG2E
                        top = kv.math.max(m[at], sink)
                        factor = kv.ex2(m[at] - top)
                        total = l[at] * factor + kv.ex2(sink - top)
                    inverse = kv.where(total > 0.0, factor / total, 0.0)
                    for t in kv.static(range(KS)):
                        pair = [c.query(o[(nt * KS + t) * 4 + 2 * half + u] * inverse) for half in range(2)]
                        if c.narrow:  # the lane's two elements are neighbours
                            d, both = t * 16 + (lane >> 2) * 2, kv.from_lanes(pair, c.query)
                            out.store(token, h, d, value=both, alignment=c.pair_alignment)
                        else:
                            out[token, h, t * 16 + (lane >> 2)] = pair[0]
                            out[token, h, t * 16 + (lane >> 2) + 8] = pair[1]
                    if c.lse:
                        if lane < 4:
                            lse[token, h] = kv.where(total > 0.0, (top + kv.math.log2(total)) * LN2, float("-inf"))

    @kv.func
    def write_partial(partials, which, head, m, l, o, n, lane):
        """Leave a partial result in the workspace, as the lanes hold it."""
        to = work.piece_of(partials, which, head, lane)
        for nt in kv.static(range(NT)):
            if nt * COLUMNS + (lane & 3) * 2 < n * G:
                for t in kv.static(range(KS)):
                    four = kv.from_lanes([o[(nt * KS + t) * 4 + i] for i in range(4)], kv.f32)
                    (to + (nt * (KS + 1) + t) * 512).store(four)
                four = kv.from_lanes([m[2 * nt], m[2 * nt + 1], l[2 * nt], l[2 * nt + 1]], kv.f32)
                (to + (nt * (KS + 1) + KS) * 512).store(four)

    @kv.func
    def merge(partials, prefix, b, head, own, r_first, r_last, total, ranges, m, l, o, n, lane):
        """Merge a sequence's partial results with this warp's own, in range order; maxima first: no load waits."""
        for nt in kv.static(range(NT)):
            if nt * COLUMNS + (lane & 3) * 2 < n * G:
                top = [m[2 * nt], m[2 * nt + 1]]
                for r in range(r_first, r_last + 1, 4):
                    for j in kv.static(range(4)):
                        here = kv.math.min(r + j, r_last)
                        of = work.partial_of(partials, prefix, b, head, here, total, ranges, lane)
                        ml = (of + (nt * (KS + 1) + KS) * 512).load(kv.f32, 4)
                        for u in kv.static(range(2)):
                            top[u] = kv.math.max(top[u], kv.where(here == own, NEVER, ml[u]))
                total_l = [kv.f32(0.0), kv.f32(0.0)]
                sums = [kv.f32(0.0)] * (4 * KS)
                for r in range(r_first, r_last + 1, 2):
                    for j in kv.static(range(2)):
                        here = kv.math.min(r + j, r_last)
                        of = work.partial_of(partials, prefix, b, head, here, total, ranges, lane)
                        ml = (of + (nt * (KS + 1) + KS) * 512).load(kv.f32, 4)
                        weight = []
                        for u in kv.static(range(2)):
                            their_top = kv.where(here == own, m[2 * nt + u], ml[u])
                            weight.append(kv.where(r + j <= r_last, kv.ex2(their_top - top[u]), 0.0))
                            total_l[u] = total_l[u] + kv.where(here == own, l[2 * nt + u], ml[2 + u]) * weight[u]
                        for t in kv.static(range(KS)):
                            theirs = (of + (nt * (KS + 1) + t) * 512).load(kv.f32, 4)
                            for i in kv.static(range(4)):
                                one = kv.where(here == own, o[(nt * KS + t) * 4 + i], theirs[i])
                                sums[4 * t + i] = sums[4 * t + i] + one * weight[i % 2]
                for u in kv.static(range(2)):
                    m[2 * nt + u] = top[u]
                    l[2 * nt + u] = total_l[u]
                for i in kv.static(range(4 * KS)):
                    o[nt * KS * 4 + i] = sums[i]

    @kv.func
    def finish(partials, counters, prefix, b, head, r, slot, total, ranges, m, l, o, n, lane):
        """Whether this warp has the whole result of a sequence, its own or merged; if not, it has left its part."""
        r_first = work.range_with(prefix[b], total, ranges)
        r_last = work.range_with(prefix[b + 1] - 1, total, ranges)
        others = r_last - r_first
        whole = others == 0
        if others > 0:
            if c.combine:
                write_partial(partials, r * 2 + slot, head, m, l, o, n, lane)
            else:
                counter = counters.address(0) + (b * H + head) * 4
                arrived = kv.i32(0)
                if lane == 0:
                    arrived = counter.load(kv.i32, order="acquire")
                arrived = kv.shuffle_idx(arrived, 0)
                if arrived != others:  # somebody is still at work: leave this part, and look again
                    write_partial(partials, r * 2 + slot, head, m, l, o, n, lane)
                    kv.syncwarp()
                    if lane == 0:
                        arrived = counter.atomic("add", kv.i32(1), order="acq_rel")
                    arrived = kv.shuffle_idx(arrived, 0)
                if arrived == others:
                    kv.syncwarp()
                    if lane == 0:
                        counter.store(kv.i32(0))
                    whole = kv.bool(True)
                    merge(partials, prefix, b, head, r, r_first, r_last, total, ranges, m, l, o, n, lane)
        return whole

    @kv.func
    def segment(collection, row_offsets, prefix, b, at, end):
        """What of sequence b lies in [at, end): its extent, and the tiles of the sequence from ``tile`` to ``last``."""
        keys, first, start, n = work.extent(collection, row_offsets, b)
        base = first // TT - prefix[b]  # tile of the sequence = base + tile of the batch
        until = kv.math.min(end, prefix[b + 1])
        return keys, first, start, n, base + at, base + until, until

    @kv.func
    def fill(k_cache, to_values, b, head, tile, last, mine, stage, lane, keys, first):
        """Start the copies of a segment's first tiles, from ring position ``stage`` on; gives the next page ids."""
        pages = pages_of(k_cache, b, tile, lane)
        for s in kv.static(range(NS - 1)):
            to = kv.where(stage + s >= NS, stage + (s - NS), stage + s)
            issue(k_cache, to_values, b, head, tile + s, last, pages, mine + to * c.stage_bytes, lane, keys, first)
            pages = pages_of(k_cache, b, tile + s + 1, lane)
        return pages

    @kv.func
    def body(collection, layer, query, row_offsets, scale, out, partials, counters, sinks, lse):
        lane, warp = kv.lane_id(), kv.warp_id()
        batch = row_offsets.shape[0] - 1
        ring = kv.shared((NW, c.warp_bytes), kv.u8, alignment=128)
        prefix = kv.shared(c.max_batch + 1, kv.i32)
        sums = kv.shared(NW, kv.i32)
        # What the kernels before wrote (lengths, new tokens, the query) is visible from here on.
        if c.programmatic:
            kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        total = work.count_tiles(collection, row_offsets, batch, prefix, sums, NW)

        # Values lie as far from their keys everywhere: K and V share pages and strides.
        k_cache, v_cache = collection.get_key_cache(layer), collection.get_value_cache(layer)
        first_page = kv.i32(0)
        k_address, v_address = [x.block_paged_ptr(0, 0, 0, page=first_page).address() for x in (k_cache, v_cache)]
        to_values = v_address - k_address
        head = (kv.block_id.x % HG) * NW + warp
        r = kv.block_id.x // HG
        ranges = work.ranges_of(kv.grid_dim.x // HG, total)
        if (r < ranges) & (total > 0):
            begin = work.range_start(r, total, ranges)
            end = work.range_start(r + 1, total, ranges)
            low, high = kv.i32(0), batch
            while high - low > 1:  # the last sequence that starts at or before this range
                middle = (low + high) >> 1
                if prefix[middle] <= begin:
                    low = middle
                else:
                    high = middle
            mine = ring.ptr(warp, 0)
            at, b, stage = begin, low, kv.i32(0)
            keys, first, start, n, tile, last, until = segment(collection, row_offsets, prefix, b, at, end)
            pages = fill(k_cache, to_values, b, head, tile, last, mine, stage, lane, keys, first)
            while at < end:
                q = query_fragments(query, row_offsets, b, head, n, lane)
                m, l, o = [kv.f32(NEVER)] * (2 * NT), [kv.f32(0.0)] * (2 * NT), [kv.f32(0.0)] * (4 * NT * KS)
                for i in range(tile, last):
                    ahead = kv.where(stage == 0, NS - 1, stage - 1)
                    kv.syncwarp()
                    to = mine + ahead * c.stage_bytes
                    issue(k_cache, to_values, b, head, i + (NS - 1), last, pages, to, lane, keys, first)
                    pages = pages_of(k_cache, b, i + NS, lane)
                    kv.cp_async_wait(NS - 1)
                    kv.syncwarp()
                    attend(i, mine + stage * c.stage_bytes, q, m, l, o, scale * LOG2E, lane, keys, first, start)
                    stage = kv.where(stage == NS - 1, 0, stage + 1)
                # The next sequence's first tiles are on their way while this one's result is written.
                done, rows, slot = b, n, kv.where(begin >= prefix[b], 0, 1)
                at = until
                if at < end:
                    b = b + 1
                    while prefix[b + 1] <= at:
                        b = b + 1
                    keys, first, start, n, tile, last, until = segment(collection, row_offsets, prefix, b, at, end)
                    kv.syncwarp()
                    pages = fill(k_cache, to_values, b, head, tile, last, mine, stage, lane, keys, first)
                for u in kv.static(range(2 * NT)):
                    for k in kv.static((4, 8, 16)):
                        l[u] = l[u] + kv.shuffle_xor(l[u], k)
                if finish(partials, counters, prefix, done, head, r, slot, total, ranges, m, l, o, rows, lane):
                    write_out(out, sinks, lse, row_offsets, done, head, rows, m, l, o, lane)
            kv.cp_async_wait(0)

    # The optional operands are parameters only where they are given.
    bounds = {"block": (threads, 1, 1), "min_blocks": c.blocks}
    if c.sinks and c.lse:

        @kv.kernel(**bounds)
        def attention_decode(collection, layer, query, row_offsets, scale, out, partials, counters, sinks, lse):
            body(collection, layer, query, row_offsets, scale, out, partials, counters, sinks, lse)
    elif c.sinks:

        @kv.kernel(**bounds)
        def attention_decode(collection, layer, query, row_offsets, scale, out, partials, counters, sinks):
            body(collection, layer, query, row_offsets, scale, out, partials, counters, sinks, None)
    elif c.lse:

        @kv.kernel(**bounds)
        def attention_decode(collection, layer, query, row_offsets, scale, out, partials, counters, lse):
            body(collection, layer, query, row_offsets, scale, out, partials, counters, None, lse)
    else:

        @kv.kernel(**bounds)
        def attention_decode(collection, layer, query, row_offsets, scale, out, partials, counters):
            body(collection, layer, query, row_offsets, scale, out, partials, counters, None, None)

    return attention_decode


def expand_decode(op: Any, at: Expansion) -> None:
    """Expand ``kv.attention`` for few query rows a sequence: the schedule's ``max_queries`` says how many tokens."""
    spec, query = at.spec(op.collection), at.dtype(op.query)
    attributes = op.operation.attributes
    aligned = attributes["kv.row_alignment"].value if "kv.row_alignment" in attributes else 16
    config = choose(at.target, Config(
        spec, query, at.static_dim(op.query, 1) // spec.num_heads, at.schedule["max_queries"], op.mask.value,
        op.span.value, op.softcap.value, op.sinks is not None, op.lse is not None, programmatic=at.target.has("pdl"),
        pair_alignment=max(query.itemsize, min(2 * query.itemsize, aligned)),
    ), at.schedule)  # fmt: skip
    head_blocks = spec.num_heads // config.warps
    ranges = at.device("multiprocessors") * config.blocks // head_blocks
    partials = at.workspace(ranges * (2 * spec.num_heads * config.quads * 512))
    counters = at.workspace(at.dim(op.row_offsets, 0) * (4 * spec.num_heads), zeroed=True)
    rest = [v for v in (op.sinks, op.lse) if v is not None]
    args = [op.collection, op.layer, op.query, op.row_offsets, op.scale, op.out, partials, counters, *rest]
    threads, early = (config.warps * 32, 1, 1), config.programmatic
    at.launch(decode_kernel(config), args, (ranges * head_blocks, 1, 1), threads, key=config, programmatic=early)
    if config.combine:
        pieces = (at.dim(op.row_offsets, 0) - 1) * (spec.num_heads * config.column_tiles * (config.size // 16))
        args = [op.collection, op.row_offsets, op.out, partials, ranges, *rest]
        threads = (32 * config.combine, 1, 1)
        at.launch(combine_kernel(config), args, (pieces, 1, 1), threads, key=config, programmatic=early)
