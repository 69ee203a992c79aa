# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The combine kernel of decode attention's partial results, for batches of few sequences.

A block takes one tile of the output (16 elements of the head dimension, the 8 query rows of a column tile) of one
sequence and KV head. Its ``combine`` warps share the partial results, combine them online, and stage what each has in
shared memory; those of fixed splits are summed in bins, as the first kernel does (:mod:`combine_fixed_splits`): which
of them combines changes no bit. Sequences of one work unit were written by the first kernel, but for fixed splits of
one sequence, which are left one by one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.lowering.schedules.decode import COLUMNS, NEVER, DecodeConfig

from ..partials import added, finished, log_sum_exp, weight, with_prior
from ..queries import queries_of
from .combine_fixed_splits import fixed_combining
from .split_kv import lists_of, split_kv


def combine_kernel(c: DecodeConfig) -> Any:
    """The combine kernel of a configuration."""
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    work, WARPS = split_kv(c), c.combine
    TOGETHER = 4  # splits whose loads a warp has under way
    fixed = fixed_combining(c, work)

    @kv.func
    def load(of, nt, t):
        """((maximum, maximum, sum, sum), four outputs) of a partial result."""
        return [(of + (nt * (c.sum_steps + 1) + quad) * 512).load(kv.f32, 4) for quad in (c.sum_steps, t)]

    @kv.func
    def held_by(t, lane):
        """(the lane that left what a lane combines of a step, which of its own steps that is)."""
        if c.halves == 1:
            return lane, t
        other = t >= c.sum_steps
        return (lane & ~2) | kv.where(other, 2, 0), t - kv.where(other, c.sum_steps, 0)

    @kv.func
    def fetch(units, partials, tile_indptr, b, part, nt, t, r, last, lane):
        """Load every ``WARPS``-th split from r on, ``TOGETHER`` of them: (maximum, maximum, sum, sum) and outputs.

        Where there are no more it is the last one again.
        """
        found = []
        lane, t = held_by(t, lane)
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
        return top, total, o

    @kv.func
    def finish(
        out, sinks, lse, prior, prior_lse, queries, b, head, column0, row0, n, nt, t, lane, column, first, found
    ):
        """Write the rows of a column: each lane its own elements. ``found`` is (maximum, sum of weights, values): both
        of a lane, or the ``first`` of them alone.
        """
        top, weights, o = found
        row = row0 + nt * COLUMNS + column
        if row < n * G:
            h = head * G + row % G
            token = queries.at(queries.base(b), row // G)
            sink, before = None if sinks is None else sinks[h], None if prior is None else prior_lse[(*token, h)]
            top, weights, factor, of_prior = finished(top, weights, sink, before)
            for i in kv.static(range(len(o))):
                half = first + i
                d = t * 16 + ((lane >> 2) * 2 + half if c.narrow else (lane >> 2) + 8 * half)
                if c.joined > 1:
                    d = d - row % G // c.case.group * c.spec.head_size
                if (c.size % 16 == 0) & (c.joined == 1):
                    out[(*token, h, d + column0)] = element(o[i] * factor, prior, of_prior, token, h, d + column0)
                else:
                    if (d >= 0) & (d < c.spec.head_size):
                        out[(*token, h, d)] = element(o[i] * factor, prior, of_prior, token, h, d)
            if lse is not None:
                if (t == 0) & (lane < 4) & (column0 == 0) & (first == 0):
                    lse[(*token, h)] = log_sum_exp(top, weights)

    @kv.func
    def element(x, prior, of_prior, token, h, d):
        """An element of the output, of normalised values."""
        if prior is not None:
            x = with_prior(x, prior[(*token, h, d)], of_prior)
        return c.case.out(x)

    @kv.func
    def body(
        collection, extents, kv_offsets, out, partials, max_units, sinks, lse, prior, prior_lse, pages,
        page_counts, block_mask,
    ):  # fmt: skip
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = queries_of(c.case.padded, extents, out, kv_offsets)
        batch = queries.sequences
        staged = fixed.begin(lane, warp) if c.split else kv.shared((WARPS, 8, 32), kv.f32)
        # The first kernel started when everything before it was done, so lengths and offsets may be read already.
        chosen = lists_of(c, collection, queries, pages, page_counts, block_mask)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, WARPS)
        units = work.work_units(max_units, total, tile_indptr, batch)
        tile, which = kv.block_id.x // c.row_blocks, kv.block_id.x % c.row_blocks
        t, rest = tile % KS, tile // KS
        nt, rest = rest % NT, rest // NT
        part, b = rest % c.row_groups, rest // c.row_groups
        head, row0, column0 = work.place_of(part)
        n = queries.length(b)
        left = SimpleNamespace(first=kv.i32(0), last=kv.i32(0), there=kv.u32(0), begin=kv.u32(0))
        if (tile_indptr[b + 1] > tile_indptr[b]) & (row0 < n * G):
            if c.split:
                fixed.find(left, units, tile_indptr, b, lane, warp)
            else:
                left.first, left.last = work.units_of(units, tile_indptr, b)
        # Every block waits, so that this kernel ends after the first one, whatever there is to combine.
        if c.programmatic:
            with kv.trace("wait for partial results"):
                kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        if left.first != left.last:
            at = out, sinks, lse, prior, prior_lse, queries, b, head, column0, row0, n, nt, t, lane
            if c.split:
                of = tile_indptr, b, part, nt, t, which, left
                fixed.gather(staged, units, partials, *of, lane, warp)
                for half in range(warp, 2, WARPS):
                    top, weights, value = fixed.combined(staged, half, lane)
                    finish(*at, fixed.column_of(which, lane), half, (top, weights, [value]))
            else:
                m, l, o = combined(units, partials, tile_indptr, b, part, nt, t, left.first, left.last, lane, warp)
                for i, x in kv.static(enumerate([*m, *l, *o])):
                    staged[warp, i, lane] = x
                kv.barrier()
                for row in range(warp, 2, WARPS):
                    finish(*at, (lane & 3) * 2 + row, 0, sums_of(staged, kv.i32(WARPS), lane, row))

    @kv.kernel(block=(32 * WARPS, 1, 1), min_blocks=max(1, (16 if c.leaves_splits else 32) // WARPS))
    def attention_combine(
        collection: kv.KVCacheCollection, extents: kv.Buffer[kv.i32, 1], kv_offsets: kv.Optional[kv.Buffer[kv.i32, 1]],
        out: kv.Buffer[c.case.out, c.case.rank], partials: kv.Buffer[kv.i8, 1], max_units: kv.i32,
        sinks: kv.Optional[kv.Buffer[kv.f32, 1]], lse: kv.Optional[kv.Buffer[kv.f32, c.case.rank - 1]],
        prior: kv.Optional[kv.Buffer[kv.f32, c.case.rank]], prior_lse: kv.Optional[kv.Buffer[kv.f32, c.case.rank - 1]],
        pages: kv.Optional[kv.Buffer[kv.i32, 3]], page_counts: kv.Optional[kv.Buffer[kv.i32, 2]],
        block_mask=None,
    ):  # fmt: skip
        rest = max_units, sinks, lse, prior, prior_lse, pages, page_counts, block_mask
        body(collection, extents, kv_offsets, out, partials, *rest)

    return attention_combine
