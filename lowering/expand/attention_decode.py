# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention: few query rows a sequence, read at the rate of the memory.

Work. Every sequence's visible keys are cut into tiles of ``tile`` tokens; the tiles of the whole batch, laid end to end,
are cut into equal ranges, one a block. The division is made on the device from the cache lengths, so that one
captured graph serves every batch of a shape class and a ragged batch is as even as a uniform one. A block's warps
take one KV head each and share nothing: neighbouring blocks read the other heads of the same tokens, which keeps
DRAM pages open.

Streaming. A warp copies its tiles through a private ring of ``stages`` cp.async stages; the page ids of the next
tile are looked up one step ahead, so that no copy waits for the table. Scores are K Q^T with the query rows of the
group in the 8 columns of m16n8k16; the probabilities turn into the second product's operand with movmatrix; the
output is V^T P^T, so that maxima and sums stay in the lanes that need them. Softmax is online, in base 2.

Merging. A sequence inside one range is written at once. Otherwise each range leaves a partial result in the
workspace, and the warp that finds itself last (an atomic counter a sequence and head) merges them in range order.

8-bit floats are converted to f16 in pairs. K's bytes keep their order in a register, which permutes the head
dimension inside each 16; the query is read with the same permutation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import kvarn as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.lowering.expand.base import Expansion
from kvarn.lowering.target import Target

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
NEVER = -1.0e30  # a running maximum that any score exceeds, finite so that differences are
COLUMNS = 8  # query rows of one mma


@dataclass(frozen=True)
class Config:
    """What a decode kernel is specialised for."""

    spec: CacheSpec
    query: DType
    group: int
    max_queries: int
    mask: str = "causal"
    span: int = 0
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = False
    warps: int = 4
    stages: int = 2
    tile: int = 16
    blocks: int = 3
    min_tiles: int = 4
    max_batch: int = 128

    @property
    def heads(self) -> int:
        return self.spec.num_heads

    @property
    def size(self) -> int:
        return self.spec.head_size

    @property
    def narrow(self) -> bool:
        """Whether the cache holds 8-bit floats."""
        return self.spec.dtype.bits == 8

    @property
    def rows(self) -> int:
        return self.group * self.max_queries

    @property
    def column_tiles(self) -> int:
        return cdiv(self.rows, COLUMNS)

    @property
    def row_bytes(self) -> int:
        return self.size * self.spec.dtype.itemsize

    @property
    def swizzled(self) -> bool:
        return self.row_bytes % 128 == 0

    @property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory; padding keeps rows that cannot be swizzled off one bank."""
        return self.row_bytes if self.swizzled else self.row_bytes + 16

    @property
    def half_stage(self) -> int:
        """Bytes of one tile of K, or of V."""
        return self.tile * self.pitch

    @property
    def stage_bytes(self) -> int:
        return 2 * self.half_stage

    @property
    def warp_bytes(self) -> int:
        """Shared memory of one warp: its ring, which the output passes through at the end."""
        return max(self.stages * self.stage_bytes, self.column_tiles * COLUMNS * self.size * 4)

    @property
    def quads(self) -> int:
        """Four-float pieces of one lane's partial result: output, then (max, max, sum, sum), for each column tile."""
        return self.column_tiles * (self.size // 16 + 1)

    @property
    def mma(self) -> DType:
        return kv.f16 if self.narrow else self.spec.dtype


def supports(spec: CacheSpec, query: DType, group: int, max_queries: int, target: Target) -> bool:
    """Whether this kernel takes a case; the others go to the general kernels."""
    if target.is_host or not target.has("cp_async") or spec.is_mla or spec.quantized:
        return False
    if group * max_queries > 2 * COLUMNS or not 16 <= spec.head_size <= 256:
        return False
    if spec.dtype in (kv.f8e4m3, kv.f8e5m2):
        return target.has("f8_convert") and query in (kv.bf16, kv.f16) and spec.head_size % 32 == 0
    return spec.dtype in (kv.bf16, kv.f16) and query is spec.dtype and spec.head_size % 16 == 0


def decode_kernel(c: Config) -> Any:
    """The kernel of a configuration."""
    spec, D, G, NT, TT, NS = c.spec, c.size, c.group, c.column_tiles, c.tile, c.stages
    NW, MT, KS, H = c.warps, c.tile // 16, c.size // 16, c.heads
    HG = H // NW  # blocks that share a range, each with other heads
    item = spec.dtype.itemsize
    chunks = c.row_bytes // 16  # 16-byte pieces of a row
    copies = TT * chunks // 32  # of one lane, for K and again for V
    P = spec.page_size
    one_page = not spec.paged or P % TT == 0  # a tile lies in one page
    straight = 32 % chunks == 0 and one_page  # a lane's copies differ by whole rows: constant distances
    threads = 32 * NW
    token_bytes = spec.token_stride * item
    causal = c.mask != "null"

    @kv.func
    def extent(collection, row_offsets, b):
        """(keys, first visible key, position of query 0, queries) of a sequence; nothing when it has no query."""
        start = collection.cache_length(b)
        n = row_offsets[b + 1] - row_offsets[b]
        keys = kv.where(n > 0, start + n, 0)
        first = start * 0
        if c.mask == "sliding_window":
            first = kv.math.max(start - (c.span - 1), 0)
        if c.mask == "chunked":
            first = (start // c.span) * c.span
        return keys, kv.math.min(first, keys), start, n

    @kv.func
    def tile_count(collection, row_offsets, b):
        keys, first, _, _ = extent(collection, row_offsets, b)
        return kv.where(keys > 0, (keys + (TT - 1)) // TT - first // TT, 0)

    @kv.func
    def count_tiles(collection, row_offsets, batch, prefix, sums):
        """prefix[b] = tiles of the sequences before b; returns the total."""
        tid, lane, warp = kv.thread_id.x, kv.lane_id(), kv.warp_id()
        if tid == 0:
            prefix[0] = 0
        running = kv.i32(0)
        for base in range(0, batch, threads):
            b = base + tid
            n = kv.i32(0)
            if b < batch:
                n = tile_count(collection, row_offsets, b)
            x = n
            for k in kv.static((1, 2, 4, 8, 16)):
                y = kv.shuffle_up(x, k)
                x = kv.where(lane >= k, x + y, x)
            if lane == 31:
                sums[warp] = x
            kv.barrier()
            for w in kv.static(range(NW)):
                s = sums[w]
                x = x + kv.where(warp > w, s, 0)
            if b < batch:
                prefix[b + 1] = running + x
            for w in kv.static(range(NW)):
                running = running + sums[w]
            kv.barrier()
        return running

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
    def copy_tile(k_cache, v_cache, b, head, tile, pages, stage, lane, keys, first, whole):
        """Start the copies of one tile's K and V; tokens that do not count become zeros unless ``whole``."""
        token0 = tile * TT
        row0, chunk0 = lane // chunks, lane % chunks
        if straight:
            elements = chunk0 * (16 // item)
            k_from = k_cache.block_paged_ptr(b, token0 + row0, head, elements, page=pages)
            v_from = v_cache.block_paged_ptr(b, token0 + row0, head, elements, page=pages)
        for j in kv.static(range(copies)):
            if straight:
                row, chunk = row0 + j * (32 // chunks), chunk0
                source_k, source_v = k_from + j * (32 // chunks) * token_bytes, v_from + j * (32 // chunks) * token_bytes
            else:
                index = lane + 32 * j
                row, chunk = index // chunks, index % chunks
                token = token0 + row
                page = pages
                if not one_page:
                    page = kv.shuffle_idx(pages, token // P - token0 // P)
                elements = chunk * (16 // item)
                source_k = k_cache.block_paged_ptr(b, token, head, elements, page=page)
                source_v = v_cache.block_paged_ptr(b, token, head, elements, page=page)
            to = stage + shared_offset(row, chunk)
            if whole:
                kv.cp_async(to, source_k)
                kv.cp_async(to + c.half_stage, source_v)
            else:
                token = token0 + row
                size = kv.where((token < keys) & (token >= first), 16, 0)
                kv.cp_async(to, source_k, zero_fill_size=size)
                kv.cp_async(to + c.half_stage, source_v, zero_fill_size=size)

    @kv.func
    def issue(k_cache, v_cache, b, head, tile, end, pages, stage, lane, keys, first):
        """Start copying a tile, when the range has it."""
        if tile < end:
            inside = (tile * TT >= first) & (tile * TT + TT <= keys)
            if inside:
                copy_tile(k_cache, v_cache, b, head, tile, pages, stage, lane, keys, first, True)
            else:
                copy_tile(k_cache, v_cache, b, head, tile, pages, stage, lane, keys, first, False)
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
        if causal:
            seen = seen & (token <= position)
        if c.mask == "sliding_window":
            seen = seen & (token > position - c.span)
        if c.mask == "chunked":
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
        edge = tile * TT + TT > (start + 1 if causal else keys)
        if c.mask == "sliding_window":
            edge = edge | (tile * TT < start + c.max_queries - c.span)
        if c.mask == "chunked":
            edge = edge | (tile * TT < first) | ((start + c.max_queries - 1) // c.span != start // c.span)
        if edge:
            for mt in kv.static(range(MT)):
                for nt in kv.static(range(NT)):
                    for i in kv.static(range(4)):
                        token = tile * TT + mt * 16 + (lane >> 2) + 8 * (i // 2)
                        at = (mt * NT + nt) * 4 + i
                        scores[at] = masked(scores[at], token, nt, i, lane, keys, start)
        weights = []
        for nt in kv.static(range(NT)):
            alpha = []
            for u in kv.static(range(2)):
                top = kv.math.max(scores[nt * 4 + u], scores[nt * 4 + 2 + u])
                for mt in kv.static(range(1, MT)):
                    top = kv.math.max(top, scores[(mt * NT + nt) * 4 + u], scores[(mt * NT + nt) * 4 + 2 + u])
                for k in kv.static((4, 8, 16)):
                    top = kv.math.max(top, kv.shuffle_xor(top, k))
                top = kv.math.max(top, m[2 * nt + u])
                alpha.append(kv.ex2(m[2 * nt + u] - top))
                m[2 * nt + u] = top
                total = l[2 * nt + u] * alpha[u]
                for mt in kv.static(range(MT)):
                    for half in kv.static(range(2)):
                        at = (mt * NT + nt) * 4 + 2 * half + u
                        scores[at] = kv.ex2(scores[at] - top)
                        total = total + scores[at]
                l[2 * nt + u] = total
            for t in kv.static(range(KS)):
                for i in kv.static(range(4)):
                    o[(nt * KS + t) * 4 + i] = o[(nt * KS + t) * 4 + i] * alpha[i % 2]
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
    def write_out(out, sinks, lse, row_offsets, b, head, n, m, l, o, staging, lane):
        """Normalise and write the rows of one sequence and KV head."""
        kv.syncwarp()
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                row = nt * COLUMNS + (lane & 3) * 2 + u
                at = 2 * nt + u
                factor = kv.f32(1.0)
                if c.sinks:
                    sink = sinks[head * G + row % G] * LOG2E
                    top = kv.math.max(m[at], sink)
                    factor = kv.ex2(m[at] - top)
                    l[at] = l[at] * factor + kv.ex2(sink - top)
                    m[at] = top
                inverse = kv.where(l[at] > 0.0, factor / l[at], 0.0)
                for t in kv.static(range(KS)):
                    for half in kv.static(range(2)):
                        if c.narrow:
                            d = t * 16 + (lane >> 2) * 2 + half
                        else:
                            d = t * 16 + (lane >> 2) + 8 * half
                        (staging + (row * D + d) * 4).store(o[(nt * KS + t) * 4 + 2 * half + u] * inverse)
                if c.lse:
                    if (lane < 4) & (row < n * G):
                        value = kv.where(l[at] > 0.0, (m[at] + kv.math.log2(l[at])) * LN2, float("-inf"))
                        lse[row_offsets[b] + row // G, head * G + row % G] = value
        kv.syncwarp()
        pieces = D // 8
        for piece in range(lane, n * (G * pieces), 32):
            row, d = piece // pieces, (piece % pieces) * 8
            value = (staging + (row * D + d) * 4).load(kv.f32, 8)
            out.store(row_offsets[b] + row // G, head * G + row % G, d, value=c.query(value))
        kv.syncwarp()

    @kv.func
    def piece_of(partials, which, head, lane):
        """Where a lane's part of a partial result starts."""
        return partials.address(0) + (kv.i64(which * H + head) * (c.quads * 32 * 16) + kv.i64(lane * 16))

    @kv.func
    def write_partial(partials, which, head, m, l, o, n, lane):
        """Leave a partial result in the workspace, as the lanes hold it."""
        to = piece_of(partials, which, head, lane)
        for nt in kv.static(range(NT)):
            if nt * COLUMNS + (lane & 3) * 2 < n * G:
                for t in kv.static(range(KS)):
                    four = kv.from_lanes([o[(nt * KS + t) * 4 + i] for i in range(4)], kv.f32)
                    (to + (nt * (KS + 1) + t) * 512).store(four)
                four = kv.from_lanes([m[2 * nt], m[2 * nt + 1], l[2 * nt], l[2 * nt + 1]], kv.f32)
                (to + (nt * (KS + 1) + KS) * 512).store(four)

    @kv.func
    def merge(partials, prefix, b, head, r_first, r_last, total, ranges, m, l, o, n, lane):
        """Merge the partial results of a sequence into m, l and o, in range order."""
        for at in kv.static(range(2 * NT)):
            m[at] = kv.f32(NEVER)
            l[at] = kv.f32(0.0)
        for at in kv.static(range(4 * NT * KS)):
            o[at] = kv.f32(0.0)
        for r in range(r_first, r_last + 1):
            # A range's first sequence uses slot 0, its last one, when another, slot 1.
            begins = kv.i32((kv.i64(total) * kv.i64(r)) // kv.i64(ranges))
            slot = kv.where(begins >= prefix[b], 0, 1)
            of = piece_of(partials, r * 2 + slot, head, lane)
            for nt in kv.static(range(NT)):
                if nt * COLUMNS + (lane & 3) * 2 < n * G:
                    ml = (of + (nt * (KS + 1) + KS) * 512).load(kv.f32, 4)
                    theirs = [(of + (nt * (KS + 1) + t) * 512).load(kv.f32, 4) for t in range(KS)]
                    mine, other = [], []
                    for u in kv.static(range(2)):
                        top = kv.math.max(m[2 * nt + u], ml[u])
                        mine.append(kv.ex2(m[2 * nt + u] - top))
                        other.append(kv.ex2(ml[u] - top))
                        m[2 * nt + u] = top
                        l[2 * nt + u] = l[2 * nt + u] * mine[u] + ml[2 + u] * other[u]
                    for t in kv.static(range(KS)):
                        for i in kv.static(range(4)):
                            at = (nt * KS + t) * 4 + i
                            o[at] = o[at] * mine[i % 2] + theirs[t][i] * other[i % 2]

    @kv.func
    def body(collection, layer, query, row_offsets, scale, out, partials, counters, sinks, lse):
        lane, warp = kv.lane_id(), kv.warp_id()
        batch = row_offsets.shape[0] - 1
        ring = kv.shared((NW, c.warp_bytes), kv.u8, alignment=128)
        prefix = kv.shared(c.max_batch + 1, kv.i32)
        sums = kv.shared(NW, kv.i32)
        total = count_tiles(collection, row_offsets, batch, prefix, sums)
        kv.barrier()

        k_cache, v_cache = collection.get_key_cache(layer), collection.get_value_cache(layer)
        head = (kv.block_id.x % HG) * NW + warp
        r = kv.block_id.x // HG
        ranges = kv.math.min(kv.grid_dim.x // HG, kv.math.max((total + (c.min_tiles - 1)) // c.min_tiles, 1))
        if r < ranges:
            at = kv.i32((kv.i64(total) * kv.i64(r)) // kv.i64(ranges))
            end = kv.i32((kv.i64(total) * kv.i64(r + 1)) // kv.i64(ranges))
            started = at
            low, high = kv.i32(0), batch
            while high - low > 1:  # the last sequence that starts at or before this range
                middle = (low + high) >> 1
                if prefix[middle] <= at:
                    low = middle
                else:
                    high = middle
            b = low
            mine = ring.ptr(warp, 0)
            qk_scale = scale * LOG2E
            while at < end:
                before = prefix[b]
                until = kv.math.min(end, prefix[b + 1])
                if until > at:
                    keys, first, start, n = extent(collection, row_offsets, b)
                    base = first // TT - before  # tile of the sequence = base + tile of the batch
                    q = query_fragments(query, row_offsets, b, head, n, lane)
                    m, l, o = [kv.f32(NEVER)] * (2 * NT), [kv.f32(0.0)] * (2 * NT), [kv.f32(0.0)] * (4 * NT * KS)
                    tile, last = base + at, base + until
                    pages = pages_of(k_cache, b, tile, lane)
                    for s in kv.static(range(NS - 1)):
                        issue(k_cache, v_cache, b, head, tile + s, last, pages, mine + s * c.stage_bytes, lane, keys, first)
                        pages = pages_of(k_cache, b, tile + s + 1, lane)
                    stage = kv.i32(0)
                    for i in range(tile, last):
                        ahead = stage + (NS - 1)
                        ahead = kv.where(ahead >= NS, ahead - NS, ahead)
                        kv.syncwarp()
                        issue(k_cache, v_cache, b, head, i + (NS - 1), last, pages, mine + ahead * c.stage_bytes, lane, keys, first)
                        pages = pages_of(k_cache, b, i + NS, lane)
                        kv.cp_async_wait(NS - 1)
                        kv.syncwarp()
                        attend(i, mine + stage * c.stage_bytes, q, m, l, o, qk_scale, lane, keys, first, start)
                        stage = kv.where(stage == NS - 1, 0, stage + 1)
                    for u in kv.static(range(2 * NT)):
                        for k in kv.static((4, 8, 16)):
                            l[u] = l[u] + kv.shuffle_xor(l[u], k)
                    kv.cp_async_wait(0)
                    r_first = kv.i32((kv.i64(before + 1) * kv.i64(ranges) - 1) // kv.i64(total))
                    r_last = kv.i32((kv.i64(prefix[b + 1]) * kv.i64(ranges) - 1) // kv.i64(total))
                    finish = r_first == r_last
                    if r_first != r_last:
                        write_partial(partials, r * 2 + kv.where(started >= before, 0, 1), head, m, l, o, n, lane)
                        kv.syncwarp()
                        arrived = kv.i32(0)
                        if lane == 0:
                            counter = counters.address(0) + (b * H + head) * 4
                            arrived = counter.atomic("add", kv.i32(1), order="acq_rel")
                            if arrived == r_last - r_first:
                                counter.store(kv.i32(0))
                        arrived = kv.shuffle_idx(arrived, 0)
                        kv.syncwarp()
                        if arrived == r_last - r_first:
                            finish = kv.bool(True)
                            merge(partials, prefix, b, head, r_first, r_last, total, ranges, m, l, o, n, lane)
                    if finish:
                        write_out(out, sinks, lse, row_offsets, b, head, n, m, l, o, mine, lane)
                at = until
                b = b + 1

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


def warps_of(heads: int) -> int:
    """Warps of a block, each with a KV head: the most that divide the heads, up to 4."""
    return next(w for w in (4, 3, 2, 1) if heads % w == 0)


def choose(target: Target, config: Config, schedule: dict[str, Any]) -> Config:
    """A configuration whose blocks fit the target: the schedule's own entries stay as they are given."""
    given = {k: v for k, v in schedule.items() if k in TUNABLE}
    config = replace(config, warps=warps_of(config.heads), tile=32 if config.narrow else 16, **given)
    while "warps" not in given and config.warps > 1 and config.warps * config.warp_bytes > target.shared_bytes // 2:
        config = replace(config, warps=next(w for w in (2, 1) if w < config.warps and config.heads % w == 0))
    # What a block holds: its rings, the tile counts of the batch, and 1 KiB that the hardware keeps.
    block_bytes = config.warps * config.warp_bytes + 4 * (config.max_batch + 1) + 128 + 1024
    registers = 168 if config.column_tiles * config.size <= 128 else 255
    fits = min(target.shared_bytes // block_bytes, 65536 // (config.warps * 32 * registers))
    if fits < 1:
        raise ValueError(f"a block of the decode kernel needs {block_bytes} bytes of shared memory, the target has {target.shared_bytes}")
    return config if "blocks" in given else replace(config, blocks=min(config.blocks, fits))


TUNABLE = ("warps", "stages", "tile", "blocks", "min_tiles", "max_batch")


def expand_decode(op: Any, at: Expansion) -> None:
    """Expand ``kv.attention`` for few query rows a sequence."""
    spec, attributes = at.spec(op.collection), op.operation.attributes
    config = choose(at.target, Config(
        spec, at.dtype(op.query), at.static_dim(op.query, 1) // spec.num_heads, attributes["max_queries"].value,
        op.mask.value, op.span.value, op.softcap.value, op.sinks is not None, op.lse is not None,
    ), at.schedule)  # fmt: skip
    head_blocks = spec.num_heads // config.warps
    ranges = at.device("multiprocessors") * config.blocks // head_blocks
    partials = at.workspace(ranges * (2 * spec.num_heads * config.quads * 512))
    counters = at.workspace((at.dim(op.row_offsets, 0) - 1) * (4 * spec.num_heads) + 4, zeroed=True)
    args = [op.collection, op.layer, op.query, op.row_offsets, op.scale, op.out, partials, counters]
    args += [v for v in (op.sinks, op.lse) if v is not None]
    at.launch(decode_kernel(config), args, (ranges * head_blocks, 1, 1), (config.warps * 32, 1, 1), key=config)
