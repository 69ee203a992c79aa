# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode attention: few query rows a sequence, read at the rate of the memory.

Work. Every sequence's visible keys are cut into tiles of ``tile`` tokens; the tiles of the whole batch, laid end to
end, are cut into work units, one a block (:mod:`decode.split_kv`). The schedule is made on the device from the cache
lengths, so that one captured graph serves every batch of a shape class and a ragged batch is as even as a uniform one.
A block's warps take up to 16 query rows of one KV head each and share nothing: neighbouring blocks read the other heads
of the same tokens, which keeps DRAM pages open. Heads with more rows are read by several warps, from the L2. Of heads
wider than a warp has registers for, two or four warps have some columns each: each finds the part of a tile's scores
that its columns give, adds the others' from shared memory, and goes on as if the head were its own.

Streaming. A warp copies its tiles through a private circular buffer of ``stages`` cp.async stages
(:mod:`decode.streaming`), which goes on into the next sequence without a gap; the page ids of the next tile are
prefetched, so that no copy waits for the table. What is read once leaves the L2 first, which keeps tables and partial
results there. Scores are K Q^T with the query rows of the group in the 8 columns of m16n8k16; the probabilities turn
into the second product's operand with movmatrix; the output is V^T P^T, so that maxima and sums stay in the lanes that
need them. Softmax is online, in base 2.

Combining. A sequence inside one work unit is written at once. Otherwise each unit leaves a partial result in the
workspace, and the warp that finds itself last (an atomic counter a sequence and head) combines them in the units' order
(:mod:`decode.results`; where splits are fixed, :mod:`decode.fixed_splits`). Batches of few sequences have many partial
results each: there a second kernel combines them, with a block for every 16 elements of the head, launched
programmatically so that it waits on the device when the first ends.

8-bit elements are converted to f16 in pairs. K's bytes keep their order in a register, which permutes the head
dimension inside each 16; the query is read with the same permutation. Scales of K multiply the scores; those of V
multiply the probabilities, over the largest power of two of those met so far, which keeps them in f16's range. Where 16
elements have several scales, elements are multiplied by them, K's over such a power of two of the tile.
"""

from __future__ import annotations

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

from ..arguments import AttentionArguments
from ..case import Case, last_not_above
from ..queries import batch_of
from ..softmax import array_read, hold, modified_one, modifies, score_unit, shown
from .combine import combine_kernel
from .partials import lane_sum
from .products import products
from .results import results
from .split_kv import Own, lists_of, split_kv
from .streaming import streaming


def decode_kernel(c: DecodeConfig) -> Any:
    """The kernel of a configuration."""
    G, NT, TT, NS = c.head_rows, c.column_tiles, c.tile, c.stages
    NW, MT, KS = c.warps, c.tile // 16, c.row_steps
    HG = c.row_groups // NW  # blocks that share a work unit, each with other heads
    threads, GC = 32 * NW, c.scales
    work = split_kv(c)
    stream, results_of = streaming(c), results(c, work)
    multiply = products(c, stream)

    @kv.func
    def query_of(nt, i, lane, head, row0, start):
        """(query head, position) of the query row that one of the lane's scores is of."""
        row = row0 + nt * COLUMNS + (lane & 3) * 2 + i % 2
        return head * G + row % G, start + row // G

    @kv.func
    def masked(s, token, b, place, keys, arrays):
        """A score, minus infinity where the query row may not see the token."""
        seen = (token < keys) & shown(c.case, b, *place, token, arrays)
        return kv.where(seen, s, float("-inf"))

    @kv.func
    def queries_held(slopes, arrays, b, head, row0, start, lane, keys):
        """(query head, position) of each of the lane's query rows, if functions are asked at every key; else none."""
        found = []
        if modifies(c.case) or c.case.mask.asked:
            for nt in kv.static(range(NT)):
                for u in kv.static(range(2)):
                    found.append(query_of(nt, u, lane, head, row0, start))
            hold(c.case, b, found, keys, slopes, arrays)
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
    def unit_above(top):
        """The power of two that a scale does not exceed."""
        above = (kv.bitcast(top, kv.i32) + 0x7FFFFF) & 0x7F800000
        return kv.bitcast(kv.math.min(above, 0x7E800000), kv.f32)

    @kv.func
    def unit_of_keys(stage, lane):
        """A power of two that no scale of a tile of K exceeds, and its inverse."""
        unit = unit_above(kv.math.max(stream.largest_scale(stage, 0, lane), 2.0**-100))
        return unit, kv.bitcast(0x7F000000 - kv.bitcast(unit, kv.i32), kv.f32)

    @kv.func
    def follow_scales(stage, o, unit, lane):
        """Make unit[0] a power of two that no scale of V met so far exceeds, unit[1] its inverse; o is in this unit."""
        top = stream.largest_scale(stage, 1, lane)
        if top > unit[0]:
            unit_of = unit_above(top)
            rescale(o, unit[0] / unit_of)
            unit[0], unit[1] = unit_of, 1.0 / unit_of

    @kv.func
    def sharers(stages, number, mt):
        """(memory of the first of the warps that share a head, where in it scores of a stage's row tile go, which one
        this warp is).
        """
        slice = kv.warp_id() % c.slices
        place = c.stages * c.stage_bytes + c.query_bytes
        return stages.ptr((kv.warp_id() - slice) * c.warp_bytes), place + (number * MT + mt) * (NT * 512), slice

    @kv.func
    def attend(a, own, here, query, m, l, o, unit, of, functions):
        """One tile, which is ``here``: (its number, tokens, all stages, its own number and itself); scores, online
        softmax, weighted values.

        ``query`` is the query and where it lies, ``of`` the sequence: b, keys, the first that is seen, position of its
        first query, places of the lane's rows; ``functions`` (slopes, arrays). Changes m, l, o and unit.
        """
        (tile, tokens, stages, number, stage), (q, q_place), (b, keys, _, start, places) = here, query, of
        scale, (slopes, arrays) = a.scale * score_unit(c.case), functions
        lane, head, row0 = own.lane, own.head, own.row0
        scores = []
        of_keys = unit_of_keys(stage, lane) if c.scaled_elements else None
        for mt in kv.static(range(MT)):
            of_tile = multiply.scores(q, q_place, stage, mt, of_keys, lane)
            if c.slices > 1:
                of_tile = multiply.whole_scores(of_tile, *sharers(stages, number, mt), lane)
            for nt in kv.static(range(NT)):
                found = of_tile[nt]
                for i in kv.static(range(4)):
                    scores.append(rounded_product(found[i], scale))
                    if modifies(c.case):
                        token = stream.token_of(tile, mt * 16 + (lane >> 2) + 8 * (i // 2), tokens)
                        place = places[2 * nt + i % 2]
                        scores[-1] = modified_one(c.case, scores[-1], b, *place, token, slopes, arrays)
        # Only tiles at the ends of what rows see need the mask: every row sees [last row's first, first row's end).
        seen_first, seen_end = c.case.mask.first(start + c.max_queries - 1), c.case.mask.end(start, keys)
        if c.case.by_lists:
            edge = ~stream.within(tile, tokens, lane, seen_first, seen_end)
        else:
            edge = tile * TT + TT > seen_end
            if c.case.mask.has_first:
                edge = edge | (tile * TT < seen_first)
        if c.case.blocks:
            edge = ~stream.seen_whole(tokens, keys)
        elif c.case.mask.asked:
            edge = True
        if edge:
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
    def segment(collection, queries, tile_indptr, b, batch_tile, end, row0):
        """What of sequence b lies in [batch_tile, end): its extent, and the sequence's tiles from ``tile`` to ``last``.

        A warp without rows of the sequence has no tiles of it either.
        """
        keys, first, start, n = work.extent(collection, queries, b)
        base = work.first_tile(first) - tile_indptr[b]  # tile of the sequence = base + tile of the batch
        until = kv.math.min(end, tile_indptr[b + 1])
        last = base + until
        if c.parts > 1:
            last = kv.where(row0 < n * G, last, base + batch_tile)
        return keys, first, start, n, base + batch_tile, last, until

    @kv.func
    def next_tile(collection, queries, tile_indptr, fetched, end, row0):
        """Where a sequence ends, go on with the next one of the work unit that this warp has tiles of."""
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
        """Start copying the work unit's next tile into a stage, whatever its sequence, and look up the pages after it.

        ``held`` are (scales of the tile before, which are stored now; tokens of the tiles of lists that are on their
        way, the first in front); gives those of this one, and what they are now. What is not done ``often`` is short
        code, whose loading takes longer than it runs.
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
        batch = queries.sequences
        stages = kv.shared(NW * c.warp_bytes + c.padding, kv.u8, alignment=128)
        # What the kernels before wrote (lengths, new tokens, the query) is visible from here on.
        if c.programmatic and a.few is not None:
            kv.griddepcontrol_launch_dependents()
        elif c.programmatic and not c.early:
            start_next()
        chosen = lists_of(c, a, queries)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, NW)

        # Values lie as far from their keys everywhere: K and V share pages and strides.
        k_cache, v_cache = collection.get_key_cache(a.layer), collection.get_value_cache(a.layer)
        first_page = kv.i32(0)
        k_address, v_address = [x.block_paged_ptr(0, 0, 0, page=first_page).address() for x in (k_cache, v_cache)]
        # Rows that no other warp reads leave the L2 first: tables, lengths and partial results stay.
        policy = kv.l2_policy("evict_first") if c.reads_once else None
        part = (kv.block_id.x % HG) * NW + warp
        head, row0, column0 = work.place_of(part)
        caches = SimpleNamespace(
            keys=k_cache, values=v_cache, to_values=v_address - k_address, policy=policy, column0=column0, head=head
        )
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
                # Cached tokens may be read already; new ones are only there when the kernel before has ended.
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
            taken = kv.i32(0)  # splits that this work unit has had of the sequence
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
                unit = [kv.f32(2.0**-100), kv.f32(2.0**100)]
                places = queries_held(*functions, b, head, row0, start, lane, keys)
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
                            a, own, (i, tokens, stages, stage, here), (q, q_place), m, l, o, unit,
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
                if not c.split:  # weights of fixed splits stay those of lanes until all are added
                    add_lanes(l)
                if GC:
                    rescale(o, unit[0])
                # A warp without rows of the sequence leaves nothing, and nobody waits for it.
                if row0 < rows * G:
                    with kv.trace("combine and write"):
                        m, l, o = results_of.shared_out(m, l, o, lane)
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
        if c.programmatic and a.few is not None:
            # The kernel ahead has other sequences, and started when all before it had ended. Whoever waits for this
            # kernel waits for both.
            kv.griddepcontrol_wait()

    return attention_decode


def launch(case: Case, at: Expansion, op: Any, few: Ix | None = None) -> None:
    """Launch the kernel, and where the schedule says so the one that combines partial results.

    With ``few``, over the sequences of as many new tokens at most, beside a kernel that has the others; of 0, none.
    """
    element, divides = case.out.itemsize, few is not None
    config = configured(
        at.target,
        DecodeConfig(
            case,
            at.schedule["few" if divides else "max_queries"],
            programmatic=at.target.has("pdl"),
            pair_alignment=max(element, min(2 * element, row_alignment(op))),
        ),
        entries_of_few(at.schedule) if divides else at.schedule,
    )
    if case.by_lists or divides:  # what made the lists is the kernel before, so nothing can be read while it runs
        config = replace(config, early=0)
    head_blocks = config.row_groups // config.warps
    one = at.constant(1)
    max_units = at.device("multiprocessors") * config.blocks // head_blocks
    max_units = max_units + (
        one - max_units.least(one)
    )  # where the heads alone are more blocks than the device is to have
    batch = batch_of(op, at)
    blocks = max_units * head_blocks if few is None else few.least(1) * max_units * head_blocks
    partial_results = max_units * 2
    if config.leaves_splits:
        partial_results = batch * config.most_splits
    partials = at.workspace(partial_results * (config.row_groups * config.quads * 512))
    counters = at.workspace(batch * (4 * config.row_groups), zeroed=True)
    a = replace(AttentionArguments.of(op), partials=partials, counters=counters, few=few)
    threads, early = (config.warps * 32, 1, 1), config.programmatic
    at.launch(decode_kernel(config), [a], (blocks, 1, 1), threads, key=(config, divides), programmatic=early)
    if config.combine:
        outputs = config.row_groups * config.column_tiles * config.row_steps * config.row_blocks
        blocks = batch * outputs if few is None else few.least(1) * batch * outputs
        left = replace(a, max_units=max_units).without("layer", "query", "scale", "counters", "slopes", *ARRAYS)
        threads = (32 * config.combine, 1, 1)
        at.launch(combine_kernel(config), [left], (blocks, 1, 1), threads, key=(config, divides), programmatic=early)
