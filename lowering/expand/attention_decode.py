# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention: few query rows a sequence, read at the rate of the memory.

Work. Every sequence's visible keys are cut into tiles of ``tile`` tokens; the tiles of the whole batch, laid end to
end, are cut into ranges, one a block (:mod:`decode_division`). The division is made on the device from the cache
lengths, so that one captured graph serves every batch of a shape class and a ragged batch is as even as a uniform one.
A block's warps take up to 16 query rows of one KV head each and share nothing: neighbouring blocks read the other heads
of the same tokens, which keeps DRAM pages open. Heads with more rows are read by several warps, from the L2.

Streaming. A warp copies its tiles through a private ring of ``stages`` cp.async stages (:mod:`decode_streaming`), which
goes on into the next sequence without a gap; the page ids of the next tile are looked up one step ahead, so that no
copy waits for the table. What is read once leaves the L2 first, which keeps tables and partial results there. Scores
are K Q^T with the query rows of the group in the 8 columns of m16n8k16; the probabilities turn into the second
product's operand with movmatrix; the output is V^T P^T, so that maxima and sums stay in the lanes that need them.
Softmax is online, in base 2.

Merging. A sequence inside one range is written at once. Otherwise each range leaves a partial result in the
workspace, and the warp that finds itself last (an atomic counter a sequence and head) merges them in range order
(:mod:`decode_results`). Batches of few sequences have many partial results each: there a second kernel merges them,
with a block for each piece of the head, launched programmatically so that it waits on the device when the first ends.

8-bit elements are converted to f16 in pairs. K's bytes keep their order in a register, which permutes the head
dimension inside each 16; the query is read with the same permutation. Scales of K multiply the scores; those of V
multiply the probabilities, over the largest power of two of those met so far, which keeps them in f16's range.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvarn as kv

from .attention_combine import combine_kernel
from .attention_common import LN2, LOG2E, last_not_above, sloped
from .attention_queries import batch_of, extents_of, heads_of, is_padded, queries_of
from .base import Expansion
from .common import row_alignment
from .decode_division import division
from .decode_products import products
from .decode_results import results
from .decode_schedule import COLUMNS, MOST_SPLITS, NEVER, SHORT_SPLITS, Config, configured
from .decode_streaming import streaming


def decode_kernel(c: Config) -> Any:
    """The kernel of a configuration."""
    G, NT, TT, NS = c.group, c.column_tiles, c.tile, c.stages
    NW, MT, KS = c.warps, c.tile // 16, c.row_steps
    HG = c.work_heads // NW  # blocks that share a range, each with other heads
    threads, GC = 32 * NW, c.scales
    work = division(c)
    ring_of, results_of = streaming(c), results(c, work)
    multiply = products(c, ring_of)

    @kv.func
    def masked(s, token, nt, i, lane, row0, keys, start):
        """A score, minus infinity where the query row may not see the token."""
        position = start + (row0 + nt * COLUMNS + (lane & 3) * 2 + i % 2) // G
        seen = token < keys
        if c.causal:
            seen = seen & (token <= position)
        if c.mask == "sliding_window":
            seen = seen & (token > position - c.span)
        if c.chunked:
            seen = seen & (token // c.span == position // c.span)
        return kv.where(seen, s, float("-inf"))

    @kv.func
    def alibi_of(slopes, head, row0, start, lane):
        """(slope, position) of each of the lane's query rows; none without slopes."""
        found = []
        if slopes is not None:
            for nt in kv.static(range(NT)):
                for u in kv.static(range(2)):
                    row = row0 + nt * COLUMNS + (lane & 3) * 2 + u
                    found.append((slopes[head * G + row % G] * LOG2E, start + row // G))
        return found

    @kv.func
    def rescale(o, by):
        for i in kv.static(range(4 * NT * KS)):
            o[i] = o[i] * by

    @kv.func
    def follow_scales(stage, o, unit, lane):
        """Make unit[0] a power of two that no scale of V met so far exceeds, unit[1] its inverse; o is in this unit."""
        top = kv.f32(0.0)
        for t in kv.static(range(0, TT, 32)):
            for g in kv.static(range(GC)):
                token = lane % TT if TT < 32 else lane + t
                top = kv.math.max(top, kv.math.abs(ring_of.scale_at(stage, GC + g, token).load(kv.f32)))
        top = kv.warp_reduce(top, "max")
        if top > unit[0]:
            above = (kv.bitcast(top, kv.i32) + 0x7FFFFF) & 0x7F800000
            unit_of = kv.bitcast(kv.math.min(above, 0x7E800000), kv.f32)
            rescale(o, unit[0] / unit_of)
            unit[0], unit[1] = unit_of, 1.0 / unit_of

    @kv.func
    def attend(tile, stage, q, q_place, m, l, o, unit, scale, lane, row0, keys, first, start, alibi):
        """One tile: scores, online softmax, weighted values. Changes m, l, o and unit."""
        scores = []
        for mt in kv.static(range(MT)):
            of_tile = multiply.scores(q, q_place, stage, mt, lane)
            for nt in kv.static(range(NT)):
                found = of_tile[nt]
                for i in kv.static(range(4)):
                    if c.softcap:
                        scores.append(kv.math.tanh(found[i] * (scale * (LN2 / c.softcap))) * (c.softcap * LOG2E))
                    else:
                        scores.append(found[i] * scale)
                    if alibi:
                        slope, position = alibi[2 * nt + i % 2]
                        at = tile * TT + mt * 16 + (lane >> 2) + 8 * (i // 2)
                        scores[-1] = sloped(scores[-1], slope, at, position)
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
                        scores[at] = masked(scores[at], token, nt, i, lane, row0, keys, start)
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
        if GC:
            follow_scales(stage, o, unit, lane)
        for mt in kv.static(range(MT)):
            p = [[scores[(mt * NT + nt) * 4 + i] for i in range(4)] for nt in range(NT)]
            multiply.add_values(p, stage, mt, o, unit, lane)

    @kv.func
    def segment(collection, queries, prefix, b, at, end, row0):
        """What of sequence b lies in [at, end): its extent, and the sequence's tiles from ``tile`` to ``last``.

        A warp without rows of the sequence has no tiles of it either.
        """
        keys, first, start, n = work.extent(collection, queries, b)
        base = first // TT - prefix[b]  # tile of the sequence = base + tile of the batch
        until = kv.math.min(end, prefix[b + 1])
        last = base + until
        if c.parts > 1:
            last = kv.where(row0 < n * G, last, base + at)
        return keys, first, start, n, base + at, last, until

    @kv.func
    def sequence_from(prefix, b, at):
        """The sequence after b that tile ``at`` of the batch belongs to: those without tiles are passed over."""
        b = b + 1
        while prefix[b + 1] <= at:
            b = b + 1
        return b

    @kv.func
    def next_tile(collection, queries, prefix, ahead, end, row0):
        """Where a sequence ends, go on with the next one of the range that this warp has tiles of."""
        if c.max_batch > 1:
            while (ahead.tile >= ahead.last) & (ahead.until < end):
                b = sequence_from(prefix, ahead.b, ahead.until)
                keys, first, _, _, tile, last, until = segment(
                    collection, queries, prefix, b, ahead.until, end, row0
                )  # fmt: skip
                ahead.b, ahead.keys, ahead.first = b, keys, first
                ahead.tile, ahead.last, ahead.until = tile, last, until

    @kv.func
    def copy_ahead(caches, collection, queries, prefix, ahead, end, row0, head, mine, stage, scales, lane, often=True):
        """Start copying the range's next tile into a stage, whatever its sequence, and look up the pages after it.

        ``scales`` are those of the tile before, which are stored now; gives those of this one. What is not done
        ``often`` is short code, whose loading takes longer than it runs.
        """
        if ring_of.held_scales:
            before = kv.where(stage == 0, NS - 1, stage - 1)
            ring_of.store_scales(mine + before * c.stage_bytes, scales, lane)
        tile = (caches, ahead.b, head, ahead.tile, ahead.last, ahead.pages)
        ring_of.issue(*tile, mine + stage * c.stage_bytes, lane, ahead.keys, ahead.first, often)
        if ring_of.held_scales:
            scales = ring_of.load_scales(*tile, lane, ahead.keys, ahead.first)
        ahead.tile = ahead.tile + 1
        next_tile(collection, queries, prefix, ahead, end, row0)
        ahead.pages = ring_of.pages_of(caches.keys, ahead.b, ahead.tile, lane)
        return scales

    @kv.func
    def start_next():
        kv.griddepcontrol_wait()
        kv.griddepcontrol_launch_dependents()

    @kv.func
    def body(collection, layer, query, extents, scale, out, partials, counters, most, sinks, lse, slopes):
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = queries_of(c.padded, extents, query)
        batch = queries.sequences
        ring = kv.shared(NW * c.warp_bytes + c.padding, kv.u8, alignment=128)
        # What the kernels before wrote (lengths, new tokens, the query) is visible from here on.
        if c.programmatic and not c.early:
            start_next()
        prefix, total = work.count_tiles(collection, queries, batch, NW)

        # Values lie as far from their keys everywhere: K and V share pages and strides.
        k_cache, v_cache = collection.get_key_cache(layer), collection.get_value_cache(layer)
        first_page = kv.i32(0)
        k_address, v_address = [x.block_paged_ptr(0, 0, 0, page=first_page).address() for x in (k_cache, v_cache)]
        # Rows that no other warp reads leave the L2 first: tables, lengths and partial results stay.
        policy = kv.l2_policy("evict_first") if c.reads_once else None
        caches = SimpleNamespace(keys=k_cache, values=v_cache, to_values=v_address - k_address, policy=policy)
        part = (kv.block_id.x % HG) * NW + warp
        head, row0 = part // c.parts, part % c.parts * c.warp_rows
        r = kv.block_id.x // HG
        cut = work.cut_of(kv.grid_dim.x // HG, most, total, prefix, batch)
        begin, end = kv.i32(0), kv.i32(0)
        if (r < cut.ranges) & (total > 0):
            begin, end = work.bounds(cut, prefix, batch, r)
        if begin < end:
            mine = ring.ptr(warp * c.warp_bytes)
            ring_of.clear_columns(mine, lane)
            at, b, stage = begin, last_not_above(prefix, batch, begin), kv.i32(0)
            keys, first, start, n, tile, last, until = segment(collection, queries, prefix, b, at, end, row0)
            ahead = SimpleNamespace(b=b, keys=keys, first=first, tile=tile, last=last, until=until, pages=kv.i32(0))
            if c.parts > 1:
                next_tile(collection, queries, prefix, ahead, end, row0)
            if c.programmatic and c.early:
                # Cached tokens may be read already; new ones are only there when the kernel before has ended.
                if ((tile + (NS - 1)) * TT > start) | (ahead.b != b):
                    kv.griddepcontrol_wait()
            ahead.pages = ring_of.pages_of(k_cache, ahead.b, ahead.tile, lane)
            scales = [kv.f32(0.0)] * ring_of.held_scales
            for s in range(NS - 1):
                scales = copy_ahead(
                    caches, collection, queries, prefix, ahead, end, row0, head, mine, s, scales, lane, often=False
                )
            if c.programmatic and c.early:
                start_next()
            q, q_place = multiply.empty_query(), mine + c.stages * c.stage_bytes
            taken = kv.i32(0)  # pieces that this range has had of the sequence
            while at < end:
                if c.split:
                    if taken == 0:
                        q = multiply.query(query, queries, b, head, row0, n, lane, q_place)
                else:
                    q = multiply.query(query, queries, b, head, row0, n, lane, q_place)
                m, l, o = [kv.f32(NEVER)] * (2 * NT), [kv.f32(0.0)] * (2 * NT), [kv.f32(0.0)] * (4 * NT * KS)
                unit = [kv.f32(2.0**-100), kv.f32(2.0**100)]
                alibi = alibi_of(slopes, head, row0, start, lane)
                piece_end = work.piece_end(cut, prefix, b, at, until)
                piece_last = kv.math.min(tile + (piece_end - at), last)
                for i in range(tile, piece_last):
                    to = kv.where(stage == 0, NS - 1, stage - 1)
                    kv.syncwarp()
                    scales = copy_ahead(
                        caches, collection, queries, prefix, ahead, end, row0, head, mine, to, scales, lane
                    )
                    kv.cp_async_wait(NS - 1)
                    kv.syncwarp()
                    here = mine + stage * c.stage_bytes
                    attend(i, here, q, q_place, m, l, o, unit, scale * LOG2E, lane, row0, keys, first, start, alibi)
                    stage = kv.where(stage == NS - 1, 0, stage + 1)
                done, rows, own = b, n, work.piece_of(cut, prefix, b, at, r)
                at, tile, taken = piece_end, piece_last, taken + 1
                more = at < until
                if c.max_batch > 1:
                    if (at == until) & (at < end):
                        b = sequence_from(prefix, b, at)
                        keys, first, start, n, tile, last, until = segment(
                            collection, queries, prefix, b, at, end, row0
                        )
                for u in kv.static(range(2 * NT)):
                    for k in kv.static((4, 8, 16)):
                        l[u] = l[u] + kv.shuffle_xor(l[u], k)
                if GC:
                    rescale(o, unit[0])
                # A warp without rows of the sequence leaves nothing, and nobody waits for it.
                if row0 < rows * G:
                    if results_of.finish(
                        cut, partials, counters, prefix, done, part, row0, own, taken, more, m, l, o, rows, lane
                    ):
                        results_of.write_out(out, sinks, lse, queries, done, head, row0, rows, m, l, o, lane)
                if b != done:
                    taken = kv.i32(0)
            kv.cp_async_wait(0)
        else:
            if c.programmatic and c.early:
                start_next()

    @kv.kernel(block=(threads, 1, 1), min_blocks=c.blocks)
    def attention_decode(
        collection: kv.KVCacheCollection, layer: kv.i32, query: kv.Buffer[c.query, c.rank],
        extents: kv.Buffer[kv.i32, 1], scale: kv.f32, out: kv.Buffer[c.query, c.rank], partials: kv.Buffer[kv.i8, 1],
        counters: kv.Buffer[kv.i8, 1], most: kv.i32, sinks: kv.Optional[kv.Buffer[kv.f32, 1]],
        lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]], slopes: kv.Optional[kv.Buffer[kv.f32, 1]],
    ):  # fmt: skip
        body(collection, layer, query, extents, scale, out, partials, counters, most, sinks, lse, slopes)

    return attention_decode


def expand_decode(op: Any, at: Expansion) -> None:
    """Expand an attention for few query rows a sequence: the schedule's ``max_queries`` says how many tokens."""
    spec, query = at.spec(op.collection), at.dtype(op.query)
    aligned = row_alignment(op)
    config = configured(at.target, Config(
        spec, query, heads_of(op, at) // spec.num_heads, at.schedule["max_queries"], op.mask.value,
        op.span.value, op.softcap.value, padded=is_padded(op), programmatic=at.target.has("pdl"),
        pair_alignment=max(query.itemsize, min(2 * query.itemsize, aligned)),
    ), at.schedule)  # fmt: skip
    head_blocks = config.work_heads // config.warps
    one = at.constant(1)
    ranges = at.device("multiprocessors") * config.blocks // head_blocks
    ranges = ranges + (one - ranges.least(one))  # where the heads alone are more blocks than the device is to have
    batch = batch_of(op, at)
    most, pieces = ranges, ranges * 2  # a range leaves two partial results at most
    if config.split:
        capacity = at.field(op.collection, "capacity")
        if spec.paged:
            capacity = capacity * at.field(op.collection, "lookup_columns")
        # No fewer than any length that the table holds is cut into: a sequence's splits must not follow the capacity.
        most = (capacity // config.split_tokens + SHORT_SPLITS + 1).least(MOST_SPLITS)
        pieces = most * batch
    partials = at.workspace(pieces * (config.work_heads * config.quads * 512))
    counters = at.workspace(batch * (4 * config.work_heads), zeroed=True)
    args = [op.collection, op.layer, op.query, extents_of(op), op.scale, op.out, partials, counters, most]
    args += [op.sinks, op.lse, op.alibi_slopes]
    threads, early = (config.warps * 32, 1, 1), config.programmatic
    at.launch(decode_kernel(config), args, (ranges * head_blocks, 1, 1), threads, key=config, programmatic=early)
    if config.combine:
        blocks = batch * (config.work_heads * config.column_tiles * config.row_steps)
        args = [op.collection, extents_of(op), op.out, partials, ranges, most, op.sinks, op.lse]
        threads = (32 * config.combine, 1, 1)
        at.launch(combine_kernel(config), args, (blocks, 1, 1), threads, key=config, programmatic=early)
