# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The combine kernel of decode attention's partial results, for batches of few sequences.

A block takes one tile of the output (16 elements of the head dimension, the 8 query rows of a column tile) of one
sequence and KV head. Its ``combine`` warps share the partial results, combine them online, and stage what each has in
shared memory; those of fixed splits are staged one by one and added in order. Sequences of one split were written by
the first kernel.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv

from .attention_queries import queries_of
from .chosen_pages import chosen_pages
from .decode_schedule import COLUMNS, MOST_SPLITS, NEVER, Config
from .decode_split_kv import split_kv
from .partial_results import added, finished, log_sum_exp, weight, with_prior


def combine_kernel(c: Config) -> Any:
    """The combine kernel of a configuration."""
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    work, WARPS = split_kv(c), c.combine
    TOGETHER = 4  # splits whose loads a warp has under way

    @kv.func
    def fetch(units, partials, tile_indptr, b, part, nt, t, r, last, lane):
        """Load every ``WARPS``-th split from r on, ``TOGETHER`` of them: (maximum, maximum, sum, sum) and outputs.

        Where there are no more it is the last one again.
        """
        found = []
        for j in kv.static(range(TOGETHER)):
            of = work.partial_of(units, partials, tile_indptr, b, part, kv.math.min(r + j * WARPS, last), lane)
            found.append([(of + (nt * (KS + 1) + quad) * 512).load(kv.f32, 4) for quad in (KS, t)])
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
    def stage(units, partials, tile_indptr, b, part, nt, t, first, last, staged, lane, warp):
        """Stage every split's (maximum, maximum, sum, sum, four outputs) in shared memory."""
        for r in range(first + warp, last + 1, TOGETHER * WARPS):
            held = fetch(units, partials, tile_indptr, b, part, nt, t, r, last, lane)
            for j in kv.static(range(TOGETHER)):
                slot = kv.math.min(r + j * WARPS, last) - first
                for i in kv.static(range(4)):
                    staged[slot, i, lane] = held[j][0][i]
                    staged[slot, 4 + i, lane] = held[j][1][i]

    @kv.func
    def finish(out, sinks, lse, prior, prior_lse, queries, b, head, row0, n, nt, t, staged, count, lane, u):
        """Combine the first ``count`` that are staged, in order; write rows u, u + 2, ...: each lane its own elements.

        Of splits, this adds as the first kernel does: which of them combines changes no bit.
        """
        row = row0 + nt * COLUMNS + (lane & 3) * 2 + u
        if row < n * G:
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
        collection, extents, kv_offsets, out, partials, max_units, max_splits, sinks, lse, prior, prior_lse, pages,
        page_counts,
    ):  # fmt: skip
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = queries_of(c.padded, extents, out, kv_offsets)
        batch = queries.sequences
        staged = kv.shared((MOST_SPLITS if c.split else WARPS, 8, 32), kv.f32)
        # The first kernel started when everything before it was done, so lengths and offsets may be read already.
        chosen = chosen_pages(collection, pages, page_counts)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, WARPS)
        units = work.work_units(max_units, max_splits, total, tile_indptr, batch)
        tile = kv.block_id.x
        t, rest = tile % KS, tile // KS
        nt, rest = rest % NT, rest // NT
        part, b = rest % c.row_groups, rest // c.row_groups
        head, row0 = part // c.parts, part % c.parts * c.warp_rows
        n = queries.length(b)
        first, last = kv.i32(0), kv.i32(0)
        if (tile_indptr[b + 1] > tile_indptr[b]) & (row0 < n * G):
            first, last = work.splits(units, tile_indptr, b)
        # Every block waits, so that this kernel ends after the first one, whatever there is to combine.
        if c.programmatic:
            kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        if first != last:
            count = last - first + 1
            if c.split:
                stage(units, partials, tile_indptr, b, part, nt, t, first, last, staged, lane, warp)
            else:
                m, l, o = combined(units, partials, tile_indptr, b, part, nt, t, first, last, lane, warp)
                for i, x in kv.static(enumerate([*m, *l, *o])):
                    staged[warp, i, lane] = x
                count = kv.i32(WARPS)
            kv.barrier()
            for u in range(warp, 2, WARPS):
                finish(out, sinks, lse, prior, prior_lse, queries, b, head, row0, n, nt, t, staged, count, lane, u)

    @kv.kernel(block=(32 * WARPS, 1, 1), min_blocks=max(1, 32 // WARPS))
    def attention_combine(
        collection: kv.KVCacheCollection, extents: kv.Buffer[kv.i32, 1], kv_offsets: kv.Optional[kv.Buffer[kv.i32, 1]],
        out: kv.Buffer[c.out, c.rank], partials: kv.Buffer[kv.i8, 1], max_units: kv.i32, max_splits: kv.i32,
        sinks: kv.Optional[kv.Buffer[kv.f32, 1]], lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]],
        prior: kv.Optional[kv.Buffer[kv.f32, c.rank]], prior_lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]],
        pages: kv.Optional[kv.Buffer[kv.i32, 3]], page_counts: kv.Optional[kv.Buffer[kv.i32, 2]],
    ):  # fmt: skip
        rest = max_units, max_splits, sinks, lse, prior, prior_lse, pages, page_counts
        body(collection, extents, kv_offsets, out, partials, *rest)

    return attention_combine
