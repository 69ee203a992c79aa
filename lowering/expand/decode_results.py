# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What decode attention does with a split's result: writes it, leaves it as a partial result, or combines."""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv

from .decode_fixed_splits import fixed_splits
from .decode_schedule import COLUMNS, NEVER, Config
from .partial_results import added, finished, log_sum_exp, weight, with_prior


def results(c: Config, work: SimpleNamespace) -> SimpleNamespace:
    """The functions over a warp's running maxima m, sums l and outputs o, for a configuration and its scheduler.

    ``head`` is a KV head and ``row0`` the first of a sequence's query rows that the warp has; ``part`` tells both.
    """
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    # Splits whose loads are under way together: what registers allow.
    TOGETHER = max(1, min(4, 24 // KS)) if c.blocks * c.warps <= 8 else 1

    WIDE = KS > 16  # no registers for a split that is loaded ahead

    @kv.func
    def rows_here(nt, row0, n, lane):
        """Whether a lane's columns of a tile hold rows of the sequence."""
        return row0 + nt * COLUMNS + (lane & 3) * 2 < n * G

    @kv.func
    def prior_pair(prior, token, h, t, first, lane):
        """A lane's two elements of a step of the output in a prior result; for those of no head some others."""
        ds = [t * 16 + ((lane >> 2) * 2 + half if c.narrow else (lane >> 2) + 8 * half) for half in range(2)]
        return [prior[(*token, h, kv.math.max(kv.math.min(d - first, c.spec.head_size - 1), 0))] for d in ds]

    @kv.func
    def write_own(out, token, h, t, first, pair, lane):
        """Write a lane's two elements of a step, of joined heads, where they are of the row's own head."""
        if c.narrow:
            d = t * 16 + (lane >> 2) * 2 - first
            if (d >= 0) & (d < c.spec.head_size):
                out.store(*token, h, d, value=kv.from_lanes(pair, c.out), alignment=c.pair_alignment)
        else:
            for half in kv.static(range(2)):
                d = t * 16 + (lane >> 2) + 8 * half - first
                if (d >= 0) & (d < c.spec.head_size):
                    out[(*token, h, d)] = pair[half]

    @kv.func
    def write_out(out, sinks, lse, prior, prior_lse, queries, b, head, row0, n, m, l, o, lane):
        """Normalise and write the rows of one sequence and KV head, each lane its own elements."""
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                row = row0 + nt * COLUMNS + (lane & 3) * 2 + u
                slot = 2 * nt + u
                if row < n * G:
                    token, h = queries.at(queries.base(b), row // G), head * G + row % G
                    sink, before = (
                        None if sinks is None else sinks[h],
                        None if prior is None else prior_lse[(*token, h)],
                    )
                    top, total, factor, of_prior = finished(m[slot], l[slot], sink, before)
                    first = row % G // c.group * c.spec.head_size if c.joined > 1 else 0
                    for t in kv.static(range(KS)):
                        pair = [o[(nt * KS + t) * 4 + 2 * half + u] * factor for half in range(2)]
                        if prior is not None:
                            of_pair = prior_pair(prior, token, h, t, first, lane)
                            pair = [with_prior(x, y, of_prior) for x, y in zip(pair, of_pair, strict=True)]
                        pair = [c.out(x) for x in pair]
                        left = c.size - t * 16  # columns that there are from this step on
                        if c.joined > 1:
                            write_own(out, token, h, t, first, pair, lane)
                        elif c.narrow:  # the lane's two elements are neighbours
                            d, both = t * 16 + (lane >> 2) * 2, kv.from_lanes(pair, c.out)
                            if left >= 16:
                                out.store(*token, h, d, value=both, alignment=c.pair_alignment)
                            else:
                                if d < c.size:
                                    out.store(*token, h, d, value=both, alignment=c.pair_alignment)
                        else:
                            out[(*token, h, t * 16 + (lane >> 2))] = pair[0]
                            if left >= 16:
                                out[(*token, h, t * 16 + (lane >> 2) + 8)] = pair[1]
                    if lse is not None:
                        if lane < 4:
                            lse[(*token, h)] = log_sum_exp(top, total)

    @kv.func
    def write_partial(to, row0, m, l, o, n, lane):
        """Leave a partial result, as the lanes hold it; of no number of queries all lanes do."""
        for nt in kv.static(range(NT)):
            if True if n is None else rows_here(nt, row0, n, lane):
                for t in kv.static(range(KS)):
                    four = kv.from_lanes([o[(nt * KS + t) * 4 + i] for i in range(4)], kv.f32)
                    (to + (nt * (KS + 1) + t) * 512).store(four)
                four = kv.from_lanes([m[2 * nt], m[2 * nt + 1], l[2 * nt], l[2 * nt + 1]], kv.f32)
                (to + (nt * (KS + 1) + KS) * 512).store(four)

    @kv.func
    def fetch(units, partials, tile_indptr, b, part, nt, r, last, lane):
        """Load ``TOGETHER`` splits from r on, whose loads wait for memory together: [split][quad]."""
        found = []
        for j in kv.static(range(TOGETHER)):
            of = work.partial_of(units, partials, tile_indptr, b, part, kv.math.min(r + j, last), lane)
            found.append([(of + (nt * (KS + 1) + t) * 512).load(kv.f32, 4) for t in range(KS + 1)])
        return found

    @kv.func
    def maxima(units, partials, tile_indptr, b, part, nt, first, last, lane):
        """Largest scores over all splits: of lanes with the same rows, every fourth, each looks at other splits."""
        top = [kv.f32(NEVER), kv.f32(NEVER)]
        for r in range(first, last + 1, 8):
            of = work.partial_of(units, partials, tile_indptr, b, part, kv.math.min(r + (lane >> 2), last), lane)
            ml = (of + (nt * (KS + 1) + KS) * 512).load(kv.f32, 4)
            for u in kv.static(range(2)):
                top[u] = kv.math.max(top[u], ml[u])
        for u in kv.static(range(2)):
            for k in kv.static((4, 8, 16)):
                top[u] = kv.math.max(top[u], kv.shuffle_xor(top[u], k))
        return top

    @kv.func
    def combine(units, partials, tile_indptr, b, part, row0, n, first, last, m, l, o, lane):
        """Combine a sequence's partial results, this warp's own with them, in order.

        Lanes without rows read what their neighbours do: theirs was never written, and memory need not move it.
        """
        for nt in kv.static(range(NT)):
            holder = kv.where(rows_here(nt, row0, n, lane), lane, lane & ~3)
            held = fetch(units, partials, tile_indptr, b, part, nt, first, last, holder)
            top = maxima(units, partials, tile_indptr, b, part, nt, first, last, holder)
            total = [kv.f32(0.0), kv.f32(0.0)]
            sums = [kv.f32(0.0)] * (4 * KS)
            for r in range(first, last + 1, TOGETHER):
                for j in kv.static(range(TOGETHER)):
                    ml = held[j][KS]
                    weights = [weight(ml[u], top[u], r + j <= last) for u in range(2)]
                    total = added(total, [ml[2], ml[3]], weights)
                    sums = added(sums, [held[j][t][i] for t in range(KS) for i in range(4)], weights)
                if r + TOGETHER <= last:
                    held = fetch(units, partials, tile_indptr, b, part, nt, r + TOGETHER, last, holder)
            for u in kv.static(range(2)):
                m[2 * nt + u], l[2 * nt + u] = top[u], total[u]
            for i in kv.static(range(4 * KS)):
                o[nt * KS * 4 + i] = sums[i]

    @kv.func
    def combine_wide(units, partials, tile_indptr, b, part, row0, n, first, last, m, l, o, lane):
        """:func:`combine` for heads whose partial results leave no registers for those that come next."""
        for nt in kv.static(range(NT)):
            holder = kv.where(rows_here(nt, row0, n, lane), lane, lane & ~3)
            top = maxima(units, partials, tile_indptr, b, part, nt, first, last, holder)
            total = [kv.f32(0.0), kv.f32(0.0)]
            sums = [kv.f32(0.0)] * (4 * KS)
            for r in range(first, last + 1):
                of = work.partial_of(units, partials, tile_indptr, b, part, r, holder) + nt * (KS + 1) * 512
                ml = (of + KS * 512).load(kv.f32, 4)
                weights = [weight(ml[u], top[u]) for u in range(2)]
                total = added(total, [ml[2], ml[3]], weights)
                for t in kv.static(range(KS)):
                    four = (of + t * 512).load(kv.f32, 4)
                    sums[4 * t : 4 * t + 4] = added(sums[4 * t : 4 * t + 4], [four[i] for i in range(4)], weights)
            for u in kv.static(range(2)):
                m[2 * nt + u], l[2 * nt + u] = top[u], total[u]
            for i in kv.static(range(4 * KS)):
                o[nt * KS * 4 + i] = sums[i]

    @kv.func
    def finish(units, partials, counters, tile_indptr, b, part, row0, own, taken, more, m, l, o, n, lane):
        """Whether this warp has the whole result of a sequence, its own or combined; if not, it has left its part.

        ``own`` is the split that the registers hold, the last of ``taken`` that the work unit has had of the sequence;
        ``more`` are to come.
        """
        first, last = work.units_of(units, tile_indptr, b)
        whole = first == last
        if first != last:
            write_partial(work.partial_of(units, partials, tile_indptr, b, part, own, lane), row0, m, l, o, n, lane)
            if not c.combine:
                if not more:
                    others = last + 1 - first - taken  # splits that other work units have
                    counter = counters.address(0) + (b * c.row_groups + part) * 4
                    arrived = kv.i32(0)
                    if others > 0:
                        if lane == 0:
                            arrived = counter.load(kv.i32, order="acquire")
                        arrived = kv.shuffle_idx(arrived, 0)
                        if arrived != others:  # somebody is still at work: tell of this part, and look again
                            kv.syncwarp()
                            if lane == 0:
                                arrived = counter.atomic("add", taken, order="acq_rel")
                            arrived = kv.shuffle_idx(arrived, 0)
                    if arrived == others:
                        kv.syncwarp()
                        if (lane == 0) & (others > 0):
                            counter.store(kv.i32(0))
                        whole = kv.bool(True)
                        combining = combine_wide if WIDE else combine
                        combining(units, partials, tile_indptr, b, part, row0, n, first, last, m, l, o, lane)
        return whole

    fixed = fixed_splits(c, work, write_partial, rows_here)
    return SimpleNamespace(write_out=write_out, finish=finish, finish_fixed=fixed.finish)
