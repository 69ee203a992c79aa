# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The merge of decode attention's partial results, for batches of few sequences.

A block takes one piece (16 elements of the head dimension, the 8 query rows of a column tile) of one sequence and KV
head. Its ``combine`` warps share the ranges' partial results, merge them online, and meet in shared memory; those of
fixed splits meet there each and are added in order. Sequences of one piece were written by the first kernel.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv

from .attention_common import ended, log_sum_exp
from .attention_queries import queries_of
from .decode_division import division
from .decode_schedule import COLUMNS, MOST_SPLITS, NEVER, Config


def combine_kernel(c: Config) -> Any:
    """The merging kernel of a configuration."""
    G, NT, KS = c.group, c.column_tiles, c.row_steps
    work, WARPS = division(c), c.combine
    TOGETHER = 4  # pieces whose loads a warp has under way

    @kv.func
    def fetch(cut, partials, prefix, b, part, nt, t, r, last, lane):
        """Load every ``WARPS``-th piece from r on, ``TOGETHER`` of them: (maximum, maximum, sum, sum) and outputs.

        Where there are no more it is the last one again.
        """
        found = []
        for j in kv.static(range(TOGETHER)):
            of = work.partial_of(cut, partials, prefix, b, part, kv.math.min(r + j * WARPS, last), lane)
            found.append([(of + (nt * (KS + 1) + quad) * 512).load(kv.f32, 4) for quad in (KS, t)])
        return found

    @kv.func
    def gather(cut, partials, prefix, b, part, nt, t, first, last, lane, warp):
        """This warp's share of the partial results, merged: (maximum, maximum, sum, sum, four outputs)."""
        m, l, o = [kv.f32(NEVER)] * 2, [kv.f32(0.0)] * 2, [kv.f32(0.0)] * 4
        for r in range(first + warp, last + 1, TOGETHER * WARPS):
            held = fetch(cut, partials, prefix, b, part, nt, t, r, last, lane)
            for u in kv.static(range(2)):
                top = m[u]
                for j in kv.static(range(TOGETHER)):
                    top = kv.math.max(top, held[j][0][u])
                mine = kv.ex2(m[u] - top)
                m[u], l[u] = top, l[u] * mine
                for half in kv.static(range(2)):
                    o[2 * half + u] = o[2 * half + u] * mine
                for j in kv.static(range(TOGETHER)):
                    ml, theirs = held[j]
                    weight = kv.where(r + j * WARPS <= last, kv.ex2(ml[u] - top), 0.0)
                    l[u] = kv.math.fma(ml[2 + u], weight, l[u])
                    for half in kv.static(range(2)):
                        o[2 * half + u] = kv.math.fma(theirs[2 * half + u], weight, o[2 * half + u])
        return m, l, o

    @kv.func
    def collect(cut, partials, prefix, b, part, nt, t, first, last, meeting, lane, warp):
        """Bring every piece's (maximum, maximum, sum, sum, four outputs) into shared memory."""
        for r in range(first + warp, last + 1, TOGETHER * WARPS):
            held = fetch(cut, partials, prefix, b, part, nt, t, r, last, lane)
            for j in kv.static(range(TOGETHER)):
                slot = kv.math.min(r + j * WARPS, last) - first
                for i in kv.static(range(4)):
                    meeting[slot, i, lane] = held[j][0][i]
                    meeting[slot, 4 + i, lane] = held[j][1][i]

    @kv.func
    def finish(out, sinks, lse, queries, b, head, row0, n, nt, t, meeting, count, lane, u):
        """Merge the first ``count`` of what met, in order, and write rows u, u + 2, ...: each lane its own elements.

        Of pieces, this adds as the kernel's own merge does: which of them merges changes no bit.
        """
        row = row0 + nt * COLUMNS + (lane & 3) * 2 + u
        if row < n * G:
            top = kv.f32(NEVER)
            for w in range(0, count, 4):
                for j in kv.static(range(4)):
                    top = kv.math.max(top, meeting[kv.math.min(w + j, count - 1), u, lane])
            total, o = kv.f32(0.0), [kv.f32(0.0), kv.f32(0.0)]
            for w in range(0, count, 4):
                for j in kv.static(range(4)):
                    here = kv.math.min(w + j, count - 1)
                    weight = kv.where(w + j < count, kv.ex2(meeting[here, u, lane] - top), 0.0)
                    total = kv.math.fma(meeting[here, 2 + u, lane], weight, total)
                    for half in kv.static(range(2)):
                        o[half] = kv.math.fma(meeting[here, 4 + 2 * half + u, lane], weight, o[half])
            h = head * G + row % G
            top, total, inverse = ended(top, total, sinks, h)
            token = queries.at(queries.base(b), row // G)
            for half in kv.static(range(2)):
                d = t * 16 + ((lane >> 2) * 2 + half if c.narrow else (lane >> 2) + 8 * half)
                if c.size == c.columns:
                    out[(*token, h, d)] = c.query(o[half] * inverse)
                else:
                    if d < c.size:
                        out[(*token, h, d)] = c.query(o[half] * inverse)
            if lse is not None:
                if (t == 0) & (lane < 4):
                    lse[(*token, h)] = log_sum_exp(top, total)

    @kv.func
    def body(collection, extents, out, partials, ranges, most, sinks, lse):
        lane, warp = kv.lane_id(), kv.warp_id()
        queries = queries_of(c.padded, extents, out)
        batch = queries.sequences
        meeting = kv.shared((MOST_SPLITS if c.split else WARPS, 8, 32), kv.f32)
        # The first kernel started when everything before it was done, so lengths and offsets may be read already.
        prefix, total = work.count_tiles(collection, queries, batch, WARPS)
        cut = work.cut_of(ranges, most, total, prefix, batch)
        piece = kv.block_id.x
        t, rest = piece % KS, piece // KS
        nt, rest = rest % NT, rest // NT
        part, b = rest % c.work_heads, rest // c.work_heads
        head, row0 = part // c.parts, part % c.parts * c.warp_rows
        n = queries.length(b)
        first, last = kv.i32(0), kv.i32(0)
        if (prefix[b + 1] > prefix[b]) & (row0 < n * G):
            first, last = work.pieces(cut, prefix, b)
        # Every block waits, so that this kernel ends after the first one, whatever there is to merge.
        if c.programmatic:
            kv.griddepcontrol_wait()
            kv.griddepcontrol_launch_dependents()
        if first != last:
            count = last - first + 1
            if c.split:
                collect(cut, partials, prefix, b, part, nt, t, first, last, meeting, lane, warp)
            else:
                m, l, o = gather(cut, partials, prefix, b, part, nt, t, first, last, lane, warp)
                for i, x in kv.static(enumerate([*m, *l, *o])):
                    meeting[warp, i, lane] = x
                count = kv.i32(WARPS)
            kv.barrier()
            for u in range(warp, 2, WARPS):
                finish(out, sinks, lse, queries, b, head, row0, n, nt, t, meeting, count, lane, u)

    @kv.kernel(block=(32 * WARPS, 1, 1), min_blocks=max(1, 32 // WARPS))
    def attention_combine(
        collection: kv.KVCacheCollection, extents: kv.Buffer[kv.i32, 1], out: kv.Buffer[c.query, c.rank],
        partials: kv.Buffer[kv.i8, 1], ranges: kv.i32, most: kv.i32, sinks: kv.Optional[kv.Buffer[kv.f32, 1]],
        lse: kv.Optional[kv.Buffer[kv.f32, c.rank - 1]],
    ):  # fmt: skip
        body(collection, extents, out, partials, ranges, most, sinks, lse)

    return attention_combine
