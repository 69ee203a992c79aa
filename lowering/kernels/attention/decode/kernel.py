# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention: few query rows per sequence, limited by memory bandwidth.

Tiles of 64 or more query rows would leave most of an MMA empty, and one block per sequence and head leaves the device
unevenly loaded. This kernel keeps only enough copies in flight to reach the memory bandwidth, and balances the batch:

1. Split-KV scheduler (:mod:`decode.split_kv`). The sequences' visible keys are cut into tiles of ``tile`` tokens; the
   tiles of the whole batch, in order, are divided into work units, one per group of blocks. The device computes this
   from the cache lengths, so that one captured graph serves all batches of a shape, ragged or not.
2. Warps. Each warp has up to 16 query rows of one KV head and works alone; neighbouring blocks read the other heads
   of the same tokens, which keeps DRAM pages open. Heads with more rows are read by several warps, through the L2. Two
   or four warps share a head that is too wide for one warp's registers: each computes the scores of its own columns,
   adds the other warps' from shared memory, and continues with identical scores.
3. Copies (:mod:`decode.streaming`). A warp copies tiles through its own circular buffer of ``stages`` cp.async stages,
   which continues into the next sequence without a gap; page ids are prefetched one tile ahead. Keys and values that
   only one warp reads are evicted from the L2 first, so that tables and partial results stay in it.
4. Products (:mod:`decode.products`). Scores are K Q^T by m16n8k16, with the group's query rows as the 8 columns;
   movmatrix turns the weights into the operand of V^T P^T, so that maxima and sums stay in the lanes that need them.
   The softmax is online, in base 2.
5. Combination. A sequence within one work unit is written at once. Otherwise each unit stores a partial result in the
   workspace, and the last warp to finish (an atomic counter per sequence and head) combines them in the units' order
   (:mod:`decode.results`; fixed splits: :mod:`decode.fixed_splits`). Batches of few sequences have many partial results
   each, which a second kernel combines, with a block per 16 elements of the head; it is launched early (PDL) and waits
   on the device for the first kernel.

8-bit and 4-bit elements are converted to f16 in pairs (:mod:`decode.products`). K's scales multiply the scores; V's
multiply the weights, divided by the largest power of two so far, which keeps them in f16's range. Where 16 elements
have several scales, the scales multiply the elements, K's divided by such a power of two of the tile. Zeros never meet
elements: K's multiply sums of the query, and V's are summed with the scaled weights beside the output, both by mma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.dialect.ops.attention import ARRAYS
from kvarn.dsl.values import rounded_product
from kvarn.lowering.index import Ix
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.kernels.common import row_alignment
from kvarn.lowering.schedules.decode import COLUMNS, NEVER, DecodeConfig, configured, entries_of_few

from ... import hadamard
from ...elements import factors_of_word, scaled_by
from ..arguments import AttentionArguments
from ..case import Case, last_not_above
from ..queries import batch_of, classes
from ..softmax import array_read, hoist_query_reads, modified_one, modifies, scale_log2_of, shown
from .combine import combine_kernel
from .partials import lane_sum
from .products import products
from .results import results
from .split_kv import Own, lists_of, split_kv
from .streaming import streaming


def decode_kernel(c: DecodeConfig) -> Any:
    """The kernel for a configuration."""
    G, NT, TT, NS = c.head_rows, c.column_tiles, c.tile, c.stages
    NW, MT, KS = c.warps, c.tile // 16, c.row_steps
    HG = c.row_groups // NW  # blocks per work unit, each with other heads
    threads, GC, ZS, ZC = 32 * NW, c.scales, c.zero_sums, c.zero_columns
    # What scores lack where no scale has it; beside several zeros, which do not lack it, products already multiply it.
    LACKS = 1.0 if c.scaled_elements else scaled_by(c.spec.dtype)
    work = split_kv(c)
    stream, results_of = streaming(c), results(c, work)
    multiply = products(c, stream)

    @kv.func
    def query_of(nt, i, lane, head, row0, start):
        """(query head, position) of the query row of one of the lane's scores."""
        row = row0 + nt * COLUMNS + (lane & 3) * 2 + i % 2
        return head * G + row % G, start + row // G

    @kv.func
    def masked(s, token, b, place, keys, arrays):
        """A score; minus infinity where the query row may not attend to the token."""
        seen = (token < keys) & shown(c.case, b, *place, token, arrays)
        return kv.where(seen, s, float("-inf"))

    @kv.func
    def query_positions(slopes, arrays, b, head, row0, start, lane, keys):
        """(query head, position) of each of the lane's query rows; none unless functions are evaluated per key."""
        found = []
        if modifies(c.case) or c.case.mask.evaluated:
            for nt in kv.static(range(NT)):
                for u in kv.static(range(2)):
                    found.append(query_of(nt, u, lane, head, row0, start))
            hoist_query_reads(c.case, b, found, keys, slopes, arrays)
        return found

    @kv.func
    def add_lanes(l):
        for u in kv.static(range(2 * NT)):
            l[u] = lane_sum(l[u])

    @kv.func
    def rescale(o, by):
        for i in kv.static(range(4 * NT * KS)):
            o[i] = o[i] * by

    @kv.func
    def rescale_halves(o):
        """The finished output of u4 elements, whose odd elements have another factor than the even ones."""
        for i in kv.static(range(4 * NT * KS)):
            o[i] = o[i] * (scaled_by(c.spec.dtype) / factors_of_word(c.spec.dtype)[i % 4 // 2])

    @kv.func
    def rotate_back(o, lane):
        """Rotate the blocks of the output: element ``c.pair_of(t, lane) + half``."""
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                at = [(nt * KS + t) * 4 + 2 * half + u for t in range(KS) for half in range(2)]
                four = [o[i] for i in at]  # a lane's elements: four neighbours of each 32
                quads = [kv.from_lanes(four[i : i + 4], kv.f32) for i in range(0, len(four), 4)]
                quads = hadamard.of_vectors(quads, c.spec.rotation, 8, lane, 4)
                for n, i in kv.static(enumerate(at)):
                    o[i] = quads[n // 4][n % 4]

    @kv.func
    def power_above(top):
        """The smallest power of two that is at least a scale."""
        above = (kv.bitcast(top, kv.i32) + 0x7FFFFF) & 0x7F800000
        return kv.bitcast(kv.math.min(above, 0x7E800000), kv.f32)

    @kv.func
    def power_of_keys(stage, lane):
        """A power of two that is at least every scale of a tile of K, and its inverse."""
        power = power_above(kv.math.max(stream.largest_scale(stage, 0, lane), 2.0**-100))
        return power, kv.bitcast(0x7F000000 - kv.bitcast(power, kv.i32), kv.f32)

    @kv.func
    def follow_scales(stage, o, power, lane):
        """Make power[0] a power of two >= every scale of V so far, power[1] its inverse; o is divided by it."""
        top = stream.largest_scale(stage, 1, lane)
        if top > power[0]:
            power_of_values = power_above(top)
            rescale(o, power[0] / power_of_values)
            power[0], power[1] = power_of_values, 1.0 / power_of_values

    @kv.func
    def score_exchange(stages, number, mt):
        """(memory of the first of the warps that share a head, offset in it of a stage's scores of a row tile, this
        warp's number among them).
        """
        slice = kv.warp_id() % c.slices
        place = c.stages * c.stage_bytes + c.query_bytes
        return stages.ptr((kv.warp_id() - slice) * c.warp_bytes), place + (number * MT + mt) * (NT * 512), slice

    @kv.func
    def needs_mask(tile, tokens, lane, start, keys):
        """Whether some row of a tile does not see all its keys: only tiles at the ends of the bounds need the mask."""
        # All rows attend to [last row's first, first row's end).
        seen_first, seen_end = c.case.mask.first(start + c.max_queries - 1), c.case.mask.end(start, keys)
        if c.case.by_lists:
            edge = ~stream.within(tile, tokens, lane, seen_first, seen_end)
        else:
            edge = tile * TT + TT > seen_end
            if c.case.mask.has_first:
                edge = edge | (tile * TT < seen_first)
        if c.case.blocks:
            edge = ~stream.seen_whole(tokens, keys)
        elif c.case.mask.evaluated:
            edge = True
        return edge

    @kv.func
    def attend(a, own, here, query, m, l, o, scaling, of, functions):
        """Process one tile: scores, online softmax, weighted values.

        ``here`` is (the tile's number, its tokens, all stages, the stage's number and address), ``query`` the query and
        its address, ``of`` the sequence: b, keys, first visible key, position of its first query, rows' (head,
        position); ``functions`` is (slopes, arrays). ``scaling`` is (power, sums of weights times V's zeros).
        Changes m, l, o and scaling.
        """
        (tile, tokens, stages, number, stage), (q, q_place), (b, keys, _, start, places) = here, query, of
        scale, (slopes, arrays), (power, zeros) = a.scale * scale_log2_of(c.case), functions, scaling
        if LACKS != 1.0 and ZS < 2:
            scale = scale * LACKS
        lane, head, row0 = own.lane, own.head, own.row0
        scores = []
        of_keys = power_of_keys(stage, lane) if c.scaled_elements else None
        for mt in kv.static(range(MT)):
            of_tile = multiply.scores(q, q_place, stage, mt, of_keys, lane)
            if c.slices > 1:
                of_tile = multiply.whole_scores(of_tile, *score_exchange(stages, number, mt), lane)
            for nt in kv.static(range(NT)):
                found = of_tile[nt]
                for i in kv.static(range(4)):
                    scores.append(rounded_product(found[i], scale))
                    if modifies(c.case):
                        token = stream.token_of(tile, mt * 16 + (lane >> 2) + 8 * (i // 2), tokens)
                        place = places[2 * nt + i % 2]
                        scores[-1] = modified_one(c.case, scores[-1], b, *place, token, slopes, arrays)
        if needs_mask(tile, tokens, lane, start, keys):
            for mt in kv.static(range(MT)):
                for nt in kv.static(range(NT)):
                    for i in kv.static(range(4)):
                        token = stream.token_of(tile, mt * 16 + (lane >> 2) + 8 * (i // 2), tokens)
                        slot = (mt * NT + nt) * 4 + i
                        place = places[2 * nt + i % 2] if places else query_of(nt, i, lane, head, row0, start)
                        scores[slot] = masked(scores[slot], token, b, place, keys, arrays)
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
                        slot = (mt * NT + nt) * 4 + 2 * half + u
                        scores[slot] = kv.ex2(scores[slot] - top)
                        total = total + scores[slot]
                l[2 * nt + u] = total
        # Maxima rarely change after the first tiles; the output is rescaled only where one did.
        changed = alphas[0] != 1.0
        for x in kv.static(range(1, 2 * NT)):
            changed = changed | (alphas[x] != 1.0)
        if kv.ballot(changed) != 0:
            for nt in kv.static(range(NT)):
                for t in kv.static(range(KS)):
                    for i in kv.static(range(4)):
                        o[(nt * KS + t) * 4 + i] = o[(nt * KS + t) * 4 + i] * alphas[2 * nt + i % 2]
                if ZS:
                    rescale_zeros(zeros, nt, alphas, lane)
        if GC and not ZS:
            follow_scales(stage, o, power, lane)
        for mt in kv.static(range(MT)):
            p = [[scores[(mt * NT + nt) * 4 + i] for i in range(4)] for nt in range(NT)]
            multiply.add_values(p, stage, mt, o, scaling, lane)

    @kv.func
    def rescale_zeros(zeros, nt, alphas, lane):
        """Rescale the sums of weights times V's zeros, of query row ``lane / 4``, by the row's factor."""
        pair = [kv.shuffle_idx(alphas[2 * nt + u], lane >> 3) for u in range(2)]
        own = kv.where((lane & 4) != 0, pair[1], pair[0])
        for i in kv.static(range(nt * ZC, (nt + 1) * ZC)):
            zeros[i] = zeros[i] * own

    @kv.func
    def add_sums_of_zeros(o, zeros, lane):
        """Add the sums of weights times V's zeros to the output; ``products.add_zeros`` says where they are."""
        for nt in kv.static(range(NT)):
            for g in kv.static(range(ZS)):
                at = nt * ZC + g // 4 * 4
                own = zeros[at] + zeros[at + 3]
                for u in kv.static(range(2)):
                    total = kv.shuffle_idx(own, (2 * (lane & 3) + u) * 4 + g % 4)
                    for t in kv.static(t for t in range(KS) if multiply.granule_of(t) == g):
                        for half in kv.static(range(2)):
                            at = (nt * KS + t) * 4 + 2 * half + u
                            o[at] = o[at] + total

    @kv.func
    def segment(collection, queries, tile_indptr, b, batch_tile, end, row0):
        """The part of sequence b in [batch_tile, end): its extent, and the sequence's tiles from ``tile`` to ``last``.

        A warp without rows of the sequence has no tiles of it.
        """
        keys, first, start, n = work.extent(collection, queries, b)
        base = work.first_tile(first) - tile_indptr[b]  # sequence tile = base + batch tile
        until = kv.math.min(end, tile_indptr[b + 1])
        last = base + until
        if c.parts > 1:
            last = kv.where(row0 < n * G, last, base + batch_tile)
        return keys, first, start, n, base + batch_tile, last, until

    @kv.func
    def next_tile(collection, queries, tile_indptr, fetched, end, row0):
        """At the end of a sequence, continue with the work unit's next sequence in which this warp has tiles."""
        if c.max_batch > 1:
            while (fetched.tile >= fetched.last) & (fetched.until < end):
                b = work.sequence_from(tile_indptr, fetched.b, fetched.until)
                keys, first, _, _, tile, last, until = segment(
                    collection, queries, tile_indptr, b, fetched.until, end, row0
                )
                fetched.b, fetched.keys, fetched.first = b, keys, first
                fetched.tile, fetched.last, fetched.until = tile, last, until

    @kv.func
    def prefetch(caches, a, queries, lists, fetched, mine, stage, held, own, often=True):
        """Start copying the work unit's next tile, of any sequence, into a stage, and look up the pages of the tile
        after it.

        ``held`` is (scales of the previous tile, which are stored now; tokens of list tiles in flight, oldest first);
        returns the new state. Code that does not run ``often`` is kept short, since its fetch dominates.
        """
        (chosen, tile_indptr, end), (scales, copied), lane = lists, held, own.lane
        if stream.held_scales:
            before = kv.where(stage == 0, NS - 1, stage - 1)
            stream.store_scales(mine + before * c.stage_bytes, scales, lane)
        stream.issue(caches, fetched, mine + stage * c.stage_bytes, lane, often)
        if stream.held_scales:
            scales = stream.load_scales(caches, fetched, lane)
        fetched.tile = fetched.tile + 1
        next_tile(a.collection, queries, tile_indptr, fetched, end, own.row0)
        if c.case.by_lists:
            copied = [*copied[1:], fetched.tokens]
        fetched.pages, fetched.tokens = stream.pages_of(caches.keys, chosen, fetched.b, own.head, fetched.tile, lane)
        return scales, copied

    @kv.func
    def start_next():
        kv.griddepcontrol_wait()
        kv.griddepcontrol_launch_dependents()

    @kv.kernel(block=(threads, 1, 1), min_blocks=c.blocks)
    def attention_decode(a: AttentionArguments):
        lane, warp = kv.lane_id(), kv.warp_id()
        collection, functions = a.collection, (array_read(a.slopes), a.arrays)
        queries = a.queries(c.case, many=False)
        stages = kv.shared(NW * c.warp_bytes + c.padding, kv.u8, alignment=128)
        # From here on, the writes of earlier kernels (lengths, new tokens, the query) are visible.
        if c.programmatic and not c.early:
            start_next()
        chosen, batch = lists_of(c, a, queries), queries.sequences
        if queries.division is not None:  # without rows the kernel ends at once
            batch = kv.where(classes(queries)[0], batch, 0)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, NW)

        # The distance from a key to its value is constant: K and V share pages and strides.
        k_cache, v_cache = collection.get_key_cache(a.layer), collection.get_value_cache(a.layer)
        first_page = kv.i32(0)
        k_address, v_address = [x.block_paged_ptr(0, 0, 0, page=first_page).address() for x in (k_cache, v_cache)]
        # Rows that no other warp reads are evicted from the L2 first: tables, lengths and partial results stay.
        policy = kv.l2_policy("evict_first") if c.reads_once else None
        part = (kv.block_id.x % HG) * NW + warp
        head, row0, column0 = work.place_of(part)
        caches = SimpleNamespace(
            keys=k_cache, values=v_cache, to_values=v_address - k_address, policy=policy, column0=column0, head=head
        )
        if c.spec.zero:
            starts = [x.scales_block_paged_ptr(0, 0, 0, page=first_page).address() for x in (k_cache, v_cache)]
            caches.to_value_scales = starts[1] - starts[0]
        own = Own(part, head, row0, column0, lane)
        r = kv.block_id.x // HG
        units = work.work_units(kv.grid_dim.x // HG, total, tile_indptr, batch)
        begin, end, found = kv.i32(0), kv.i32(0), kv.i32(0)
        if (r < units.count) & (total > 0):
            if c.split:
                begin, end, found = work.fixed_bounds(units, tile_indptr, batch, r)
            else:
                begin, end = work.even_bounds(units, r)
        if begin < end:
            mine = stages.ptr(warp * c.warp_bytes)
            stream.clear_columns(mine, lane)
            batch_tile, stage = begin, kv.i32(0)
            b = found if c.split else last_not_above(tile_indptr, batch, begin)
            keys, first, start, n, tile, last, until = segment(
                collection, queries, tile_indptr, b, batch_tile, end, row0
            )
            fetched = SimpleNamespace(b=b, keys=keys, first=first, tile=tile, last=last, until=until, pages=kv.i32(0))
            fetched.tokens = kv.i32(0)
            if c.parts > 1:
                next_tile(collection, queries, tile_indptr, fetched, end, row0)
            if c.programmatic and c.early:
                # Cached tokens may be read already; new tokens are visible only after the previous kernel has ended.
                if ((tile + (NS - 1)) * TT > start) | (fetched.b != b):
                    kv.griddepcontrol_wait()
            fetched.pages, fetched.tokens = stream.pages_of(k_cache, chosen, fetched.b, head, fetched.tile, lane)
            scales, copied = [kv.f32(0.0)] * stream.held_scales, [kv.i32(0)] * (NS if c.case.by_lists else 0)
            lists = chosen, tile_indptr, end
            for s in range(NS - 1):
                ahead = scales, copied
                scales, copied = prefetch(caches, a, queries, lists, fetched, mine, s, ahead, own, often=False)
            if c.programmatic and c.early:
                start_next()
            q, q_place = multiply.empty_query(), mine + c.stages * c.stage_bytes
            taken = kv.i32(0)  # splits of the sequence that this work unit has finished
            held, own = SimpleNamespace(), replace(own, sums=q_place + (c.query_bytes + c.score_bytes + lane * 16))
            if c.split:
                results_of.begin_fixed(held, own.sums, tile_indptr, b, batch_tile)
            while batch_tile < end:
                if c.split:
                    if taken == 0:
                        q = multiply.query(a.query, queries, b, head, row0, n, lane, q_place, column0)
                else:
                    q = multiply.query(a.query, queries, b, head, row0, n, lane, q_place, column0)
                m, l, o = [kv.f32(NEVER)] * (2 * NT), [kv.f32(0.0)] * (2 * NT), [kv.f32(0.0)] * (4 * NT * KS)
                power = [kv.f32(2.0**-100), kv.f32(2.0**100)]
                zeros = [kv.f32(0.0)] * (NT * ZC)
                places = query_positions(*functions, b, head, row0, start, lane, keys)
                split_end = kv.math.min(batch_tile + held.each, until) if c.split else until
                split_last = kv.math.min(tile + (split_end - batch_tile), last)
                for i in range(tile, split_last):
                    to = kv.where(stage == 0, NS - 1, stage - 1)
                    kv.syncwarp()
                    with kv.trace("start copies"):
                        scales, copied = prefetch(caches, a, queries, lists, fetched, mine, to, (scales, copied), own)
                    with kv.trace("wait for copies"):
                        kv.cp_async_wait(NS - 1)
                        kv.syncwarp()
                    here = mine + stage * c.stage_bytes
                    tokens = copied[0] if c.case.by_lists else None
                    with kv.trace("products and softmax"):
                        attend(
                            a, own, (i, tokens, stages, stage, here), (q, q_place), m, l, o, (power, zeros),
                            (b, keys, first, start, places), functions,
                        )  # fmt: skip
                    stage = kv.where(stage == NS - 1, 0, stage + 1)
                done, rows = b, n
                batch_tile, tile, taken = split_end, split_last, taken + 1
                more = batch_tile < until
                if c.max_batch > 1:
                    if (batch_tile == until) & (batch_tile < end):
                        b = work.sequence_from(tile_indptr, b, batch_tile)
                        keys, first, start, n, tile, last, until = segment(
                            collection, queries, tile_indptr, b, batch_tile, end, row0
                        )
                if not c.split:  # weights of fixed splits are summed over lanes only after all splits
                    add_lanes(l)
                if ZS:
                    rescale_halves(o)
                    add_sums_of_zeros(o, zeros, lane)
                elif GC:
                    rescale(o, power[0] if LACKS == 1.0 else power[0] * LACKS)
                if c.spec.rotation:
                    rotate_back(o, lane)
                # A warp without rows of the sequence stores nothing, and no warp waits for it.
                if row0 < rows * G:
                    with kv.trace("combine and write"):
                        m, l, o = results_of.redistributed(m, l, o, lane)
                        if c.split:
                            whole = results_of.finish_fixed(
                                units, a, tile_indptr, (done, rows), own, r, (held, more), m, l, o
                            )
                        else:
                            whole = results_of.finish(units, a, tile_indptr, done, own, rows, r, m, l, o)
                        if whole:
                            with kv.trace("write"):
                                if c.split:
                                    results_of.write_sums(a, queries, done, own, rows, own.sums)
                                else:
                                    results_of.write_out(a, queries, done, own, rows, m, l, o)
                if c.split:
                    held.split = held.split + 1
                    if b != done:
                        taken = kv.i32(0)
                        results_of.begin_fixed(held, own.sums, tile_indptr, b, batch_tile)
            kv.cp_async_wait(0)
        else:
            if c.programmatic and c.early:
                start_next()

    return attention_decode


def launch(case: Case, at: Expansion, op: Any, few: Ix | None = None) -> Callable[[], None]:
    """Launch the kernel, and return what launches the combine kernel, if the schedule has one.

    With ``few``, only over sequences of at most ``few`` new tokens (0: none), on a share of the multiprocessors:
    another kernel, which may be launched in between, has the other sequences.
    """
    element, divides = case.out.itemsize, few is not None

    def divided(count: Ix) -> Ix:
        return count if few is None else few.least(1) * count

    config = configured(
        at.target,
        DecodeConfig(
            case,
            at.schedule["decode_threshold" if divides else "max_queries"],
            programmatic=at.target.has("pdl"),
            pair_alignment=max(element, min(2 * element, row_alignment(op))),
            query_alignment=max(case.query.itemsize, min(16, row_alignment(op))) if case.spec.packed else 1,
        ),
        entries_of_few(at.schedule) if divides else at.schedule,
    )
    if case.by_lists:  # the previous kernel wrote the lists, so nothing can be read before it ends
        config = replace(config, early=0)
    head_blocks = config.row_groups // config.warps
    one = at.constant(1)
    slots = at.device("multiprocessors") * config.blocks
    if divides:
        slots = slots * at.schedule["decode_share"] // 16
    max_units = (slots // head_blocks).greatest(one)  # one where the heads alone are more blocks than scheduled
    batch = batch_of(op, at)
    blocks = divided(max_units * head_blocks)
    partial_results = max_units * 2
    if config.stores_splits:
        partial_results = batch * config.most_splits
    partials = at.workspace(partial_results * (config.row_groups * config.quads * 512))
    counters = at.workspace(batch * (4 * config.row_groups), zeroed=True)
    a = replace(AttentionArguments.of(op), partials=partials, counters=counters, few=few)
    threads, early = (config.warps * 32, 1, 1), config.programmatic
    at.launch(decode_kernel(config), [a], (blocks, 1, 1), threads, key=(config, divides), programmatic=early)

    def combine() -> None:
        outputs = config.row_groups * config.column_tiles * config.row_steps * config.row_blocks
        grid = divided(batch * outputs), 1, 1
        left = replace(a, max_units=max_units).without("layer", "query", "scale", "counters", "slopes", *ARRAYS)
        threads = (32 * config.combine, 1, 1)
        at.launch(combine_kernel(config), [left], grid, threads, key=(config, divides), programmatic=early)

    return combine if config.combine else lambda: None
