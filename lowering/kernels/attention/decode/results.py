# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The end of a decode split: write its result, store it as a partial result, or combine partial results."""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.lowering.schedules.decode import COLUMNS, NEVER, DecodeConfig

from ..partials import finished, log_sum_exp, with_prior
from .fixed_splits import fixed_splits
from .partials import partials_of


def results(c: DecodeConfig, work: SimpleNamespace) -> SimpleNamespace:
    """The functions over a warp's running maxima m, sums l and outputs o, for a configuration and its scheduler.

    ``a`` are the kernel's arguments, ``own`` describes the warp's part of a sequence b of n query tokens.
    """
    G, NT, KS = c.head_rows, c.column_tiles, c.row_steps
    # Partial results whose loads are in flight together, as registers allow.
    TOGETHER = max(1, min(8, 32 // (c.sum_steps * NT))) if c.blocks * c.warps <= 8 else 1
    partial = partials_of(c)

    @kv.func
    def prior_pair(prior, token, h, t, first, lane):
        """A lane's two elements of a step in a prior result; arbitrary for columns of no head."""
        ds = [c.element_of(t, lane, half) for half in range(2)]
        return [prior[(*token, h, kv.math.max(kv.math.min(d - first, c.spec.head_size - 1), 0))] for d in ds]

    @kv.func
    def write_own(out, token, h, t, first, pair, lane):
        """Write a lane's two elements of a step of joined heads, if they belong to the row's own head."""
        if c.narrow:
            d = c.pair_of(t, lane) - first
            if (d >= 0) & (d < c.spec.head_size):
                out.store(*token, h, d, value=kv.from_lanes(pair, c.case.out), alignment=c.pair_alignment)
        else:
            for half in kv.static(range(2)):
                d = t * 16 + (lane >> 2) + 8 * half - first
                if (d >= 0) & (d < c.spec.head_size):
                    out[(*token, h, d)] = pair[half]

    @kv.func
    def row_of(a, queries, b, head, row, n, m, l):
        """((token, query head) of a row, final maximum and sum, factors of its values and of those of a prior result).

        For a missing row, those of the first row.
        """
        row = kv.where(row < n * G, row, 0)
        token, h = queries.at(queries.base(b), row // G), head * G + row % G
        sink = None if a.sinks is None else a.sinks[h]
        before = None if a.prior_lse is None else a.prior_lse[(*token, h)]
        return (token, h), *finished(m, l, sink, before)

    @kv.func
    def write_pair(a, place, row, t, column0, pair, of_prior, lane):
        """Write a lane's two elements of a step of a row; ``t`` may be a run-time value."""
        out, prior, (token, h) = a.out, a.prior, place
        # The first of the row's own columns among the warp's columns, of several heads or a slice.
        first = row % G // c.case.group * c.spec.head_size if c.joined > 1 else -column0
        if prior is not None:
            of_pair = prior_pair(prior, token, h, t, first, lane)
            pair = [with_prior(x, y, of_prior) for x, y in zip(pair, of_pair, strict=True)]
        pair = [c.case.out(x) for x in pair]
        whole = c.size % 16 == 0 or (isinstance(t, int) and c.size - t * 16 >= 16)  # without padding columns
        if c.joined > 1:
            write_own(out, token, h, t, first, pair, lane)
        elif c.narrow:  # the lane's two elements are neighbours
            d, both = c.pair_of(t, lane), kv.from_lanes(pair, c.case.out)
            if whole:
                out.store(*token, h, d + column0, value=both, alignment=c.pair_alignment)
            else:
                if d < c.size:
                    out.store(*token, h, d + column0, value=both, alignment=c.pair_alignment)
        else:
            d = t * 16 + (lane >> 2) + column0
            out[(*token, h, d)] = pair[0]
            if whole:
                out[(*token, h, d + 8)] = pair[1]
            elif not isinstance(t, int):  # a head size of an odd multiple of 8 ends within its last step
                if t < KS - 1:
                    out[(*token, h, d + 8)] = pair[1]

    @kv.func
    def write_lse(lse, place, column0, m, l, lane):
        if lse is not None:
            if (lane < 4) & (column0 == 0):
                lse[(*place[0], place[1])] = log_sum_exp(m, l)

    @kv.func
    def write_out(a, queries, b, own, n, m, l, o):
        """Normalise and write the rows of one sequence and KV head, each lane its own elements."""
        row0, column0, lane = own.row0, own.column0, own.lane
        for nt in kv.static(range(NT)):
            rows, found = [row0 + nt * COLUMNS + partial.first_row(lane) + u for u in range(2)], []
            for u in kv.static(range(2)):
                found.append(row_of(a, queries, b, own.head, rows[u], n, m[2 * nt + u], l[2 * nt + u]))
            if a.prior_lse is not None:  # prior_lse may be lse: all lanes have read it before one writes
                kv.syncwarp()
            for u, (place, top, total, factor, of_prior) in kv.static(enumerate(found)):
                if rows[u] < n * G:
                    write_lse(a.lse, place, column0, top, total, lane)
                    for t in kv.static(range(c.sum_steps)):
                        step = partial.step_of(t, lane)
                        pair = [o[(nt * c.sum_steps + t) * 4 + 2 * half + u] * factor for half in range(2)]
                        if KS % c.halves == 0:
                            write_pair(a, place, rows[u], step, column0, pair, of_prior, lane)
                        else:
                            if step < KS:
                                write_pair(a, place, rows[u], step, column0, pair, of_prior, lane)

    @kv.func
    def write_sums(a, queries, b, own, n, sums):
        """The same for sums of fixed splits, step by step."""
        row0, column0, lane = own.row0, own.column0, own.lane
        for nt in kv.static(range(NT)):
            rows, found = [row0 + nt * COLUMNS + partial.first_row(lane) + u for u in range(2)], []
            for u, (m, l, by) in kv.static(enumerate(fixed.weights_of(sums, nt))):
                found.append((by, *row_of(a, queries, b, own.head, rows[u], n, m, l)))
            if a.prior_lse is not None:
                kv.syncwarp()
            for u, (_, place, top, total, _, _) in kv.static(enumerate(found)):
                if rows[u] < n * G:
                    write_lse(a.lse, place, column0, top, total, lane)
            for t in range(c.sum_steps):
                values, step = fixed.values_of(sums, nt, t), partial.step_of(t, lane)
                for u, (by, place, _, _, factor, of_prior) in kv.static(enumerate(found)):
                    if (rows[u] < n * G) & (step < KS):
                        pair = [values[2 * half + u] * (by * factor) for half in range(2)]
                        write_pair(a, place, rows[u], step, column0, pair, of_prior, lane)

    @kv.func
    def combine(units, a, tile_indptr, b, own, n, span, m, l, o):
        """Combine the partial results of a span of units in order."""
        (first, last), holder = span, partial.holder(own.row0, n, own.lane)
        for r in range(first, last + 1, TOGETHER):
            held = [
                partial.load(
                    work.partial_of(units, a.partials, tile_indptr, b, own.part, kv.math.min(r + j, last), holder)
                )
                for j in range(TOGETHER)
            ]
            for j in kv.static(range(TOGETHER)):
                if r + j <= last:
                    before = list(m), list(l), list(o)
                    for mine, theirs in kv.static(zip((m, l, o), held[j], strict=True)):
                        mine[:] = theirs
                    partial.add(before, m, l, o)

    @kv.func
    def finish(units, a, tile_indptr, b, own, n, unit, m, l, o):
        """Whether this warp has the whole result of a sequence, its own or combined; if not, it has stored its part.

        ``unit`` is the work unit.
        """
        row0, lane = own.row0, own.lane
        first, last = work.units_of(units, tile_indptr, b)
        whole = first == last
        if first != last:
            place = work.partial_of(units, a.partials, tile_indptr, b, own.part, unit, lane)
            if c.combine:
                partial.store_existing(place, m, l, o, row0, n, lane)
            else:
                others = last - first  # the number of other units with parts of the sequence
                counter = a.counters.address(0) + (b * c.row_groups + own.part) * 4
                arrived, begin = partial.arrived(counter, lane), unit + 1
                # The last warp starts from its own result if its unit is the first.
                if (arrived != others) | (unit > first):
                    begin = first
                    partial.store_existing(place, m, l, o, row0, n, lane)
                    if arrived != others:  # another warp is still working: publish this part, then check again
                        arrived = partial.publish(counter, 1, lane)
                if arrived == others:
                    partial.reset_counter(counter, lane)
                    whole = kv.bool(True)
                    if begin == first:
                        for x, nothing in kv.static(((m, NEVER), (l, 0.0), (o, 0.0))):
                            for i in kv.static(range(len(x))):
                                x[i] = kv.f32(nothing)
                    combine(units, a, tile_indptr, b, own, n, (begin, last), m, l, o)
        return whole

    fixed = fixed_splits(c, work, partial)
    return SimpleNamespace(
        redistributed=partial.redistributed, write_out=write_out, finish=finish, begin_fixed=fixed.begin,
        finish_fixed=fixed.finish, write_sums=write_sums,
    )  # fmt: skip
