# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The combine kernel of decode attention's partial results, for batches of few sequences.

A block takes one tile of the output (16 elements of the head dimension, the 8 query rows of a column tile) of one
sequence and KV head. Its ``combine`` warps share the partial results, combine them online, and stage what each has in
shared memory; those of fixed splits are staged one by one and added as the first kernel would. Sequences of one split
were written by the first kernel.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv

from .attention_queries import queries_of
from .decode_partials import lane_sum
from .decode_schedule import COLUMNS, MOST_SPLITS, NEVER, RADIX, TREE_LEVELS, Config
from .decode_split_kv import lists_of, split_kv
from .partial_results import added, finished, log_sum_exp, of_both, weight, with_prior


def combine_kernel(c: Config) -> Any:
    """The combine kernel of a configuration."""
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    work, WARPS = split_kv(c), c.combine
    TOGETHER = 4  # splits whose loads a warp has under way

    @kv.func
    def load(of, nt, t):
        """((maximum, maximum, sum, sum), four outputs) of a partial result."""
        return [(of + (nt * (KS + 1) + quad) * 512).load(kv.f32, 4) for quad in (KS, t)]

    @kv.func
    def fetch(units, partials, tile_indptr, b, part, nt, t, r, last, lane):
        """Load every ``WARPS``-th split from r on, ``TOGETHER`` of them: (maximum, maximum, sum, sum) and outputs.

        Where there are no more it is the last one again.
        """
        found = []
        for j in kv.static(range(TOGETHER)):
            of = work.partial_of(units, partials, tile_indptr, b, part, kv.math.min(r + j * WARPS, last), lane)
            found.append(load(of, nt, t))
        return found

    @kv.func
    def combined(units, partials, tile_indptr, b, part, nt, t, first, last, lane, warp):
        """This warp's share of the partial results, combined: (maximum, maximum, sum, sum, four outputs)."""
        m, l, o = [kv.f32(NEVER)] * 2, [kv.f32(0.0)] * 2, [kv.f32(0.0)] * 4
        for r in range(first + warp, last + 1, TOGETHER * WARPS):
            held = fetch(units, partials, tile_indptr, b, part, nt, t, r, last, lane)
            for u in kv.static(range(2)):
                top = m[u]
                for j in kv.static(range(TOGETHER)):
                    top = kv.math.max(top, held[j][0][u])
                mine = weight(m[u], top)
                m[u], l[u] = top, l[u] * mine
                for half in kv.static(range(2)):
                    o[2 * half + u] = o[2 * half + u] * mine
                for j in kv.static(range(TOGETHER)):
                    ml, theirs = held[j]
                    of_it = weight(ml[u], top, r + j * WARPS <= last)
                    l[u], o[u], o[2 + u] = added([l[u], o[u], o[2 + u]], [ml[2 + u], theirs[u], theirs[2 + u]], [of_it])
        return m, l, o

    @kv.func
    def stage(partials, b, part, nt, t, count, staged, lane, warp):
        """Stage every split's (maximum, maximum, sum, sum, four outputs) in shared memory."""
        for s in range(warp, count, TOGETHER * WARPS):
            places = [kv.math.min(s + j * WARPS, count - 1) for j in range(TOGETHER)]
            held = [load(work.slot_of(partials, b * c.most_splits + place, part, lane), nt, t) for place in places]
            for place, (ml, four) in kv.static(zip(places, held, strict=True)):
                for i in kv.static(range(4)):
                    staged[place, i, lane] = ml[i]
                    staged[place, 4 + i, lane] = four[i]

    @kv.func
    def node(staged, first, step, count, lane, u):
        """(maximum, sum, outputs) of row u of the splits staged at ``first`` and the next in steps, in order."""
        found = [[staged[first + i * step, k + u, lane] for k in (0, 2, 4, 6)] for i in range(RADIX)]
        m, *sums = found[0]
        for i in kv.static(range(1, RADIX)):
            if first + i * step < count:
                m, sums = of_both(m, sums, found[i][0], found[i][1:])
        return m, sums

    @kv.func
    def tree(staged, count, lane, warp):
        """Add the splits of each node but the root, a warp a node and row: its result is staged where it begins."""
        for level in kv.static(range(1, TREE_LEVELS)):
            for task in range(warp, 2 * (MOST_SPLITS // RADIX**level), WARPS):
                first, u = task // 2 * RADIX**level, task % 2
                if first < count:
                    m, sums = node(staged, first, RADIX ** (level - 1), count, lane, u)
                    for k, x in kv.static(zip((0, 2, 4, 6), [m, *sums], strict=True)):
                        staged[first, k + u, lane] = x
            kv.barrier()

    @kv.func
    def sums_of(staged, count, lane, u):
        """(maximum, sum, outputs) of row u after the first ``count`` that are staged, each warp's."""
        top = kv.f32(NEVER)
        for w in range(0, count, 4):
            for j in kv.static(range(4)):
                top = kv.math.max(top, staged[kv.math.min(w + j, count - 1), u, lane])
        total, o = kv.f32(0.0), [kv.f32(0.0), kv.f32(0.0)]
        for w in range(0, count, 4):
            for j in kv.static(range(4)):
                here = kv.math.min(w + j, count - 1)
                of_it = weight(staged[here, u, lane], top, w + j < count)
                theirs = [staged[here, i + u, lane] for i in (2, 4, 6)]
                total, o[0], o[1] = added([total, *o], theirs, [of_it])
        return top, [total, *o]

    @kv.func
    def finish(out, sinks, lse, prior, prior_lse, queries, b, head, row0, n, nt, t, staged, count, lane, u):
        """Combine what is staged, in order; write rows u, u + 2, ...: each lane its own elements.

        Of fixed splits, this adds as the first kernel does: which of them combines changes no bit.
        """
        if c.split:
            top, (total, *o) = node(staged, 0, MOST_SPLITS // RADIX, count, lane, u)
            total = lane_sum(total)
        else:
            top, (total, *o) = sums_of(staged, kv.i32(WARPS), lane, u)
        row = row0 + nt * COLUMNS + (lane & 3) * 2 + u
        if row < n * G:
            h = head * G + row % G
            token = queries.at(queries.base(b), row // G)
            sink, before = None if sinks is None else sinks[h], None if prior is None else prior_lse[(*token, h)]
            top, total, factor, of_prior = finished(top, total, sink, before)
            for half in kv.static(range(2)):
                d = t * 16 + ((lane >> 2) * 2 + half if c.narrow else (lane >> 2) + 8 * half)
                if c.joined > 1:
                    d = d - row % G // c.group * c.spec.head_size
                if (c.size % 16 == 0) & (c.joined == 1):
                    out[(*token, h, d)] = element(o[half] * factor, prior, of_prior, token, h, d)
                else:
                    if (d >= 0) & (d < c.spec.head_size):
                        out[(*token, h, d)] = element(o[half] * factor, prior, of_prior, token, h, d)
            if lse is not None:
                if (t == 0) & (lane < 4):
                    lse[(*token, h)] = log_sum_exp(top, total)

    @kv.func
    def element(x, prior, of_prior, token, h, d):
        """An element of the output, of normalised values."""
        if prior is not None:
            x = with_prior(x, prior[(*token, h, d)], of_prior)
        return c.out(x)

    @kv.func
    def body(
        collection, extents, kv_offsets, out, partials, max_units, sinks, lse, prior, prior_lse, pages,
        page_counts, block_mask,
    ):  # fmt: skip
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = queries_of(c.padded, extents, out, kv_offsets)
        batch = queries.sequences
        staged = kv.shared((MOST_SPLITS if c.split else WARPS, 8, 32), kv.f32)
        # The first kernel started when everything before it was done, so lengths and offsets may be read already.
        chosen = lists_of(c, collection, queries, pages, page_counts, block_mask)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, WARPS)
        units = work.work_units(max_units, total, tile_indptr, batch)
        tile = kv.block_id.x
        t, rest = tile % KS, tile // KS
        nt, rest = rest % NT, rest // NT
        part, b = rest % c.row_groups, rest // c.row_groups
        head, row0 = part // c.parts, part % c.parts * c.warp_rows
        n = queries.length(b)
        first, last = kv.i32(0), kv.i32(0)
        if (tile_indptr[b + 1] > tile_indptr[b]) & (row0 < n * G):
            if c.split:
                last = work.split_count(tile_indptr, b) - 1
            else:
                first, last = work.units_of(units, tile_indptr, b)
        # Every block waits, so that this kernel ends after the first one, whatever there is to combine.
        if c.programmatic:
            kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        if first != last:
            if c.split:
                stage(partials, b, part, nt, t, last + 1, staged, lane, warp)
            else:
                m, l, o = combined(units, partials, tile_indptr, b, part, nt, t, first, last, lane, warp)
                for i, x in kv.static(enumerate([*m, *l, *o])):
                    staged[warp, i, lane] = x
            kv.barrier()
            if c.split:
                tree(staged, last + 1, lane, warp)
            for u in range(warp, 2, WARPS):
                finish(out, sinks, lse, prior, prior_lse, queries, b, head, row0, n, nt, t, staged, last + 1, lane, u)

    @kv.kernel(block=(32 * WARPS, 1, 1), min_blocks=max(1, 32 // WARPS))
    def attention_combine(
        collection: kv.KVCacheCollection, extents: kv.Buffer[kv.i32, 1], kv_offsets: kv.Optional[kv.Buffer[kv.i32, 1]],
        out: kv.Buffer[c.out, c.rank], partials: kv.Buffer[kv.i8, 1], max_units: kv.i32,
        sinks: kv.Optional[kv.Buffer[kv.f32, 1]], lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]],
        prior: kv.Optional[kv.Buffer[kv.f32, c.rank]], prior_lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]],
        pages: kv.Optional[kv.Buffer[kv.i32, 3]], page_counts: kv.Optional[kv.Buffer[kv.i32, 2]],
        block_mask=None,
    ):  # fmt: skip
        rest = max_units, sinks, lse, prior, prior_lse, pages, page_counts, block_mask
        body(collection, extents, kv_offsets, out, partials, *rest)

    return attention_combine
