# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel that combines decode attention's partial results, for batches of few sequences.

A block has one tile of the output (16 elements of the head dimension, the 8 query rows of a column tile) of one
sequence and KV head. Its ``combine`` warps divide the partial results, combine their shares online, and exchange the
results through shared memory. Fixed splits are summed in bins as in the first kernel (:mod:`combine_fixed_splits`), so
that it does not matter for any bit which kernel combines. The first kernel has already written sequences of a single
work unit, except for the fixed splits of a single sequence, which are stored one by one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.lowering.schedules.decode import COLUMNS, NEVER, DecodeConfig

from ..arguments import AttentionArguments
from ..partials import added, finished, log_sum_exp, weight, with_prior
from .combine_fixed_splits import fixed_combining
from .split_kv import Own, lists_of, split_kv


def combine_kernel(c: DecodeConfig) -> Any:
    """The combine kernel for a configuration."""
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    work, WARPS = split_kv(c), c.combine
    TOGETHER = 4  # splits whose loads a warp has in flight
    fixed = fixed_combining(c, work)

    @kv.func
    def load(of, nt, t):
        """((maximum, maximum, sum, sum), four outputs) of a partial result."""
        return [(of + (nt * (c.sum_steps + 1) + quad) * 512).load(kv.f32, 4) for quad in (c.sum_steps, t)]

    @kv.func
    def held_by(t, lane):
        """(the lane that stored the part of a step that a lane combines, the index of the step in that lane)."""
        if c.halves == 1:
            return lane, t
        other = t >= c.sum_steps
        return (lane & ~2) | kv.where(other, 2, 0), t - kv.where(other, c.sum_steps, 0)

    @kv.func
    def fetch(units, partials, tile_indptr, b, own, tile, r, last):
        """Load ``TOGETHER`` splits, every ``WARPS``-th from r up: (maximum, maximum, sum, sum) and outputs.

        Past the last split, the last one is loaded again.
        """
        (nt, t), found = tile, []
        lane, t = held_by(t, own.lane)
        for j in kv.static(range(TOGETHER)):
            of = work.partial_of(units, partials, tile_indptr, b, own.part, kv.math.min(r + j * WARPS, last), lane)
            found.append(load(of, nt, t))
        return found

    @kv.func
    def combined(units, partials, tile_indptr, b, own, tile, left, warp):
        """This warp's share of the partial results, combined: (maximum, maximum, sum, sum, four outputs)."""
        first, last = left.first, left.last
        m, l, o = [kv.f32(NEVER)] * 2, [kv.f32(0.0)] * 2, [kv.f32(0.0)] * 4
        for r in range(first + warp, last + 1, TOGETHER * WARPS):
            held = fetch(units, partials, tile_indptr, b, own, tile, r, last)
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
        """(maximum, sum, outputs) of row u, combined over the first ``count`` warps in shared memory."""
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
    def finish(a, queries, b, own, n, tile, column, first, found):
        """Write the rows of a tile's column, each lane its own elements.

        ``found`` is (maximum, sum of weights, values): both values of a lane, or one of them, number ``first``.
        """
        (top, weights, o), (nt, t), lane, column0 = found, tile, own.lane, own.column0
        row = own.row0 + nt * COLUMNS + column
        if row < n * G:
            h = own.head * G + row % G
            token = queries.at(queries.base(b), row // G)
            sink = None if a.sinks is None else a.sinks[h]
            before = None if a.prior is None else a.prior_lse[(*token, h)]
            top, weights, factor, of_prior = finished(top, weights, sink, before)
            for i in kv.static(range(len(o))):
                half = first + i
                d = c.element_of(t, lane, half)
                if c.joined > 1:
                    d = d - row % G // c.case.group * c.spec.head_size
                if (c.size % 16 == 0) & (c.joined == 1):
                    a.out[(*token, h, d + column0)] = element(o[i] * factor, a.prior, of_prior, token, h, d + column0)
                else:
                    if (d >= 0) & (d < c.spec.head_size):
                        a.out[(*token, h, d)] = element(o[i] * factor, a.prior, of_prior, token, h, d)
            if a.lse is not None:
                if (t == 0) & (lane < 4) & (column0 == 0) & (first == 0):
                    a.lse[(*token, h)] = log_sum_exp(top, weights)

    @kv.func
    def element(x, prior, of_prior, token, h, d):
        """An element of the output from normalised values."""
        if prior is not None:
            x = with_prior(x, prior[(*token, h, d)], of_prior)
        return c.case.out(x)

    @kv.kernel(block=(32 * WARPS, 1, 1), min_blocks=max(1, (16 if c.stores_splits else 32) // WARPS))
    def attention_combine(a: AttentionArguments):
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = a.queries(c.case, many=False)
        collection = a.collection
        batch = queries.sequences
        staged = fixed.begin(lane, warp) if c.split else kv.shared((WARPS, 8, 32), kv.f32)
        # The first kernel started after everything before it was done, so lengths and offsets may be read already.
        chosen = lists_of(c, a, queries)
        tile_indptr, total = work.count_tiles(collection, queries, chosen, batch, WARPS)
        units = work.work_units(a.max_units, total, tile_indptr, batch)
        tile, which = kv.block_id.x // c.row_blocks, kv.block_id.x % c.row_blocks
        t, rest = tile % KS, tile // KS
        nt, rest = rest % NT, rest // NT
        part, b = rest % c.row_groups, rest // c.row_groups
        head, row0, column0 = work.place_of(part)
        own, n = Own(part, head, row0, column0, lane), queries.length(b)
        left = SimpleNamespace(first=kv.i32(0), last=kv.i32(0), there=kv.u32(0), begin=kv.u32(0))
        if (tile_indptr[b + 1] > tile_indptr[b]) & (row0 < n * G):
            if c.split:
                fixed.find(left, units, tile_indptr, b, lane, warp)
            else:
                left.first, left.last = work.units_of(units, tile_indptr, b)
        # Every block waits, even without work, so that this kernel ends after the first one.
        if c.programmatic:
            with kv.trace("wait for partial results"):
                kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        if left.first != left.last:
            at = a, queries, b, own, n, (nt, t)
            if c.split:
                fixed.gather(staged, units, a.partials, tile_indptr, b, own, (nt, t, which), left, warp)
                for half in range(warp, 2, WARPS):
                    top, weights, value = fixed.combined(staged, half, lane)
                    finish(*at, fixed.column_of(which, lane), half, (top, weights, [value]))
            else:
                m, l, o = combined(units, a.partials, tile_indptr, b, own, (nt, t), left, warp)
                for i, x in kv.static(enumerate([*m, *l, *o])):
                    staged[warp, i, lane] = x
                kv.barrier()
                for row in range(warp, 2, WARPS):
                    finish(*at, (lane & 3) * 2 + row, 0, sums_of(staged, kv.i32(WARPS), lane, row))

    return attention_combine
