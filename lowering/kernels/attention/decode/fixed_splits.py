# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fixed splits of decode attention: a sequence's result does not depend on how its splits are divided among units.

The splits follow from the sequence's length alone, and their partial results are summed in bins (:mod:`binned_sums`),
so that the order of additions changes no bit. A warp has the bins of its sequence in shared memory and adds each split
as it ends: a sequence within one work unit never leaves the multiprocessor; a unit that starts or ends within a
sequence stores one sum, as units of an even division store one partial result. The last warp to finish a sequence adds
the other warps' sums to its own.

For batches of few sequences a second kernel adds the units' sums; for one sequence, whose units have one split each, it
adds the splits themselves (:mod:`decode.combine`).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.dialect.layout import cdiv
from kvarn.lowering.schedules.decode import DecodeConfig

from .binned_sums import (
    BITS,
    LEAST_EXPONENT,
    NO_EXPONENT,
    add_bins,
    add_value,
    empty,
    exponent,
    factors,
    lowered,
    scale,
    sum_of,
)
from .partials import lane_sum, rows_of


@kv.func
def row_exponents(c: DecodeConfig, m: Any, l: Any, o: Any, nt: int) -> Any:
    """The exponents of the values of a lane's two rows in a column tile, and those of their sums of weights."""
    of_values, of_weights = [], []
    for u in kv.static(range(2)):
        largest = kv.f32(0.0)
        for i in kv.static(rows_of(c, nt, u)):
            largest = kv.math.max(largest, kv.math.abs(o[i]))
        of_values.append(exponent(m[2 * nt + u], largest))
        of_weights.append(exponent(m[2 * nt + u], l[2 * nt + u]))
    return of_values + of_weights


@kv.func
def weight_sum(exponents: Any, sums: Any) -> Any:
    """(maximum, sum) of a row's weights over its lanes; the maximum is an upper bound, not necessarily a score."""
    top = exponents
    for k in kv.static((4, 8, 16)):
        top = kv.math.max(top, kv.shuffle_xor(top, k))
    return top * BITS, lane_sum(sums * kv.ex2((exponents - top) * BITS))


def fixed_splits(c: DecodeConfig, work: SimpleNamespace, partial: SimpleNamespace) -> Any:
    """The start of a sequence and the end of a split, for a configuration, its scheduler and its partial results.

    ``held`` is a unit's state of a sequence: tiles per split (``each``), splits (``count``), its first split (``own``),
    its current split (``split``); ``sums`` is the lane's part of the warp's sums, in shared memory.
    """
    NT, KS, K = c.column_tiles, c.sum_steps, c.bins
    # Steps of the head and sums whose loads are in flight at the same time.
    STEPS = KS if KS <= 8 else math.gcd(KS, 4)
    TOGETHER = 4 if STEPS <= 4 else 2
    WIDE = math.gcd(KS, 2)
    ENDS = 1 + cdiv(2 * K, 4)  # float4 vectors besides the values: exponents, and bins of the sums of weights

    # Layout of a column tile's sum: for each step of the head the bins, four values each; the exponents of the values
    # and of the sums of weights, for two rows; the bins of these sums, two per vector.

    def four_at(place, nt, i):
        return place + (nt * (KS * K + ENDS) + i) * 512

    @kv.func
    def load(place, nt, i):
        four = four_at(place, nt, i).load(kv.f32, 4)
        return [four[j] for j in range(4)]

    @kv.func
    def store(place, nt, i, four):
        four_at(place, nt, i).store(kv.from_lanes(four, kv.f32))

    @kv.func
    def load_weights(place, nt):
        """The bins of the sum of weights, for each of two rows."""
        pairs = []
        for i in kv.static(range(ENDS - 1)):
            four = load(place, nt, KS * K + 1 + i)
            pairs.extend([four[:2], four[2:]])
        return [[pairs[k][u] for k in range(K)] for u in range(2)]

    @kv.func
    def store_weights(place, nt, rows):
        flat = [rows[u][k] for k in range(K) for u in range(2)]
        flat = flat + [kv.f32(0.0)] * (4 * (ENDS - 1) - 2 * K)
        for i in kv.static(range(ENDS - 1)):
            store(place, nt, KS * K + 1 + i, flat[4 * i : 4 * i + 4])

    @kv.func
    def values_at(fours, j):
        """The bins of value j of a step."""
        return [four[j] for four in fours]

    # Code that does not run for every split is kept short by loops over the steps: fetching unrolled code would take
    # longer than running it.

    @kv.func
    def clear(sums):
        """Clear the sums for a new sequence."""
        for nt in kv.static(range(NT)):
            for t in range(KS):
                for k in kv.static(range(K)):
                    store(sums, nt, t * K + k, [kv.f32(empty(k))] * 4)
            store(sums, nt, KS * K, [kv.f32(NO_EXPONENT)] * 4)
            store_weights(sums, nt, [[kv.f32(empty(k)) for k in range(K)]] * 2)

    @kv.func
    def lower(sums, nt, by):
        """Increase the exponents of a column tile's sums."""
        for t in range(KS):
            fours = [load(sums, nt, t * K + k) for k in range(K)]
            new = [lowered(values_at(fours, j), by[j % 2]) for j in range(4)]
            for k in kv.static(range(K)):
                store(sums, nt, t * K + k, [new[j][k] for j in range(4)])
        weights = load_weights(sums, nt)
        store_weights(sums, nt, [lowered(weights[u], by[2 + u]) for u in range(2)])

    @kv.func
    def risen(sums, nt, exponents):
        """The exponents of a column tile's sums after adding numbers with these exponents."""
        before = load(sums, nt, KS * K)
        found = [kv.math.max(x, y) for x, y in zip(before, exponents, strict=True)]
        rises = kv.bool(False)
        for i in kv.static(range(4)):
            rises = rises | ((found[i] > before[i]) & (before[i] > LEAST_EXPONENT))
        if kv.ballot(rises) != 0:
            lower(sums, nt, [x - y for x, y in zip(found, before, strict=True)])
        store(sums, nt, KS * K, found)
        return found

    @kv.func
    def add_split(sums, m, l, o):
        """Add a split's partial result; l has one sum per lane."""
        for nt in kv.static(range(NT)):
            own = row_exponents(c, m, l, o, nt)
            of_sum = risen(sums, nt, own)
            scales = [scale(m[2 * nt + i % 2], own[i]) for i in range(4)]
            by = [factors(K, of_sum[i] - own[i]) for i in range(4)]
            for t in kv.static(range(KS)):
                fours = [load(sums, nt, t * K + k) for k in range(K)]
                x = [o[(nt * KS + t) * 4 + j] * scales[j % 2] for j in range(4)]
                new = [add_value(values_at(fours, j), x[j], by[j % 2]) for j in range(4)]
                for k in kv.static(range(K)):
                    store(sums, nt, t * K + k, [new[j][k] for j in range(4)])
            weights = load_weights(sums, nt)
            x = [l[2 * nt + u] * scales[2 + u] for u in range(2)]
            store_weights(sums, nt, [add_value(weights[u], x[u], by[2 + u]) for u in range(2)])

    @kv.func
    def load_steps(places, nt, first, count):
        """The bins of some steps of the sums at some addresses."""
        return [[[load(place, nt, (first + i) * K + k) for k in range(K)] for i in range(count)] for place in places]

    @kv.func
    def add_alike(sums, nt, first, loaded, exist):
        """Add steps of sums with equal exponents, if they exist."""
        mine = load_steps([sums], nt, first, len(loaded[0]))[0]
        for others, there in kv.static(zip(loaded, exist, strict=True)):
            if there:
                for i in kv.static(range(len(mine))):
                    for k in kv.static(range(K)):
                        mine[i][k] = [x + (y - empty(k)) for x, y in zip(mine[i][k], others[i][k], strict=True)]
        for i in kv.static(range(len(mine))):
            for k in kv.static(range(K)):
                store(sums, nt, (first + i) * K + k, mine[i][k])

    @kv.func
    def add_step(sums, nt, t, loaded, by):
        """Add a step of other sums, whose exponents are ``by`` below."""
        mine = load_steps([sums], nt, t, 1)[0][0]
        new = [values_at(mine, j) for j in range(4)]
        for which, others in kv.static(enumerate(loaded)):
            of_it = [lowered(values_at(others[0], j), by[which][j % 2]) for j in range(4)]
            new = [add_bins(x, y) for x, y in zip(new, of_it, strict=True)]
        for k in kv.static(range(K)):
            store(sums, nt, t * K + k, [new[j][k] for j in range(4)])

    @kv.func
    def add_sums(sums, places, exist):
        """Add the sums that other warps have stored, if they exist; a missing one has the address of another."""
        for nt in kv.static(range(NT)):
            # A memory access takes about a microsecond, so all loads are started before the first is needed.
            theirs = [load(place, nt, KS * K) for place in places]
            weights = [load_weights(place, nt) for place in places]
            loaded = load_steps(places, nt, 0, STEPS)
            theirs = [[kv.where(e, x, NO_EXPONENT) for x in four] for e, four in zip(exist, theirs, strict=True)]
            own = theirs[0]
            for other in kv.static(theirs[1:]):
                own = [kv.math.max(x, y) for x, y in zip(own, other, strict=True)]
            of_sum = risen(sums, nt, own)
            by = [[x - y for x, y in zip(of_sum, four, strict=True)] for four in theirs]
            below = kv.bool(False)
            for e, four in kv.static(zip(exist, by, strict=True)):
                below = below | (e & ((four[0] != 0.0) | (four[1] != 0.0)))
            if kv.ballot(below) == 0:  # nearly always true
                add_alike(sums, nt, 0, loaded, exist)
                for first in range(STEPS, KS, STEPS):
                    add_alike(sums, nt, first, load_steps(places, nt, first, STEPS), exist)
            else:
                for t in range(KS):
                    add_step(sums, nt, t, load_steps(places, nt, t, 1), by)
            new = load_weights(sums, nt)
            for which, others in kv.static(enumerate(weights)):
                new = [add_bins(new[u], lowered(others[u], by[which][2 + u])) for u in range(2)]
            store_weights(sums, nt, new)

    @kv.func
    def store_sum(place, sums, row0, n, lane):
        """Copy the sums of existing rows to the workspace."""
        for nt in kv.static(range(NT)):
            if partial.rows_here(nt, row0, n, lane):
                for i in range(0, KS * K, WIDE * K):
                    for k in kv.static(range(WIDE * K)):
                        store(place, nt, i + k, load(sums, nt, i + k))
                for i in kv.static(range(ENDS)):
                    store(place, nt, KS * K + i, load(sums, nt, KS * K + i))

    @kv.func
    def store_rows(place, sums, row0, n, lane):
        """Store the sums in the layout of the combine kernel: per row (exponent of the values, exponent of the weights;
        bins of the weights); then, per step of the head and bin, the two values of each row.
        """
        fours = cdiv(2 + K, 4)
        for nt in kv.static(range(NT)):
            if partial.rows_here(nt, row0, n, lane):
                exponents, weights = load(sums, nt, KS * K), load_weights(sums, nt)
                of = place + nt * ((KS * K + 2 * fours) * 512)
                for u in kv.static(range(2)):
                    ends = [exponents[u], exponents[2 + u], *weights[u]] + [kv.f32(0.0)] * (4 * fours - 2 - K)
                    for i in kv.static(range(fours)):
                        (of + (u * fours + i) * 512).store(kv.from_lanes(ends[4 * i : 4 * i + 4], kv.f32))
                for i in range(KS):
                    for k in kv.static(range(K)):
                        four = load(sums, nt, i * K + k)
                        for u in kv.static(range(2)):
                            to = of + (2 * fours + i * K + k) * 512 + (u * 256 - lane * 8)
                            to.store(kv.from_lanes([four[u], four[2 + u]], kv.f32))

    @kv.func
    def weights_of(sums, nt):
        """For each of a column tile's two rows: the maximum, the sum over the lanes, the factor of the values."""
        exponents, weights, found = load(sums, nt, KS * K), load_weights(sums, nt), []
        for u in kv.static(range(2)):
            m, l = weight_sum(exponents[2 + u], sum_of(weights[u]))
            found.append((m, l, kv.ex2(exponents[u] * BITS - m)))
        return found

    @kv.func
    def values_of(sums, nt, t):
        """The four values of a step."""
        fours = [load(sums, nt, t * K + k) for k in range(K)]
        return [sum_of(values_at(fours, j)) for j in range(4)]

    @kv.func
    def store_split(place, m, l, o, row0, n, lane):
        """Store a split's partial result in the layout of the combine kernel: per row (exponent of the values, exponent
        of the weights; sum of weights); then, per step of the head, the two values of each row.
        """
        for nt in kv.static(range(NT)):
            if partial.rows_here(nt, row0, n, lane):
                own, of = row_exponents(c, m, l, o, nt), place + nt * ((KS + 2) * 512)
                scales = [scale(m[2 * nt + i % 2], own[i]) for i in range(4)]
                for u in kv.static(range(2)):
                    ends = [own[u], own[2 + u], l[2 * nt + u] * scales[2 + u], kv.f32(0.0)]
                    (of + u * 512).store(kv.from_lanes(ends, kv.f32))
                for t in kv.static(range(KS)):
                    for u in kv.static(range(2)):
                        pair = [o[(nt * KS + t) * 4 + 2 * half + u] * scales[u] for half in range(2)]
                        (of + ((2 + t) * 512 + u * 256) - lane * 8).store(kv.from_lanes(pair, kv.f32))

    @kv.func
    def begin(held, sums, tile_indptr, b, batch_tile):
        """Start a sequence with a tile of the unit, and clear its sums."""
        held.each = work.tiles_of_split(tile_indptr, b)
        held.count = work.split_count(tile_indptr, b, held.each)
        held.own = work.split_of(tile_indptr, b, batch_tile, held.each)
        held.split = held.own
        if not c.stores_splits:
            clear(sums)

    @kv.func
    def finish(units, a, tile_indptr, of, own, unit, split, m, l, o):
        """Finish a split: whether this warp has the sums of the whole sequence; if not, it has stored its part.

        ``of`` is the sequence: b, and its query tokens; ``unit`` is the work unit, and ``split`` is (the unit's state
        of the sequence, whether more of its splits follow).
        """
        (b, n), (held, more) = of, split
        whole, sums, part, row0, lane = kv.bool(False), own.sums, own.part, own.row0, own.lane
        if c.stores_splits:
            store_split(work.slot_of(a.partials, b * c.most_splits + held.split, part, lane), m, l, o, row0, n, lane)
        else:
            with kv.trace("add split"):
                add_split(sums, m, l, o)
            if ~more:
                taken = held.split + 1 - held.own
                whole = taken == held.count
                if ~whole:
                    if c.combine:
                        store_rows(work.fixed_partial_of(a.partials, unit, held.own, part, lane), sums, row0, n, lane)
                    else:
                        whole = last(units, a, tile_indptr, b, own, n, unit, held, taken)
        return whole

    @kv.func
    def units_with_splits(units, tile_indptr, b, each, count, r):
        """32 work units, one per lane, as bits of words: units with splits of a sequence, units that do not start
        within it, and units that do not end before its end.
        """
        split, until = [work.split_at(units, tile_indptr, b, r + x, each, count) for x in range(2)]
        return kv.ballot(split < until), kv.ballot(split == 0), kv.ballot(until == count)

    @kv.func
    def next_sums(partials, part, found, holder):
        """The next units in ``found``: the addresses of their sums, and whether they exist; the first one does."""
        places, exist, first = [], [], found.others & (0 - found.others)
        for _ in kv.static(range(TOGETHER)):
            bit = found.others & (0 - found.others)  # the lowest bit
            found.others = found.others ^ bit
            exist.append(bit != 0)
            bit = kv.where(bit != 0, bit, first)
            number = (kv.bitcast(kv.f32(bit), kv.i32) >> 23) - 127  # of the bit: the exponent of its float
            split = kv.where((found.begin & bit) != 0, 0, 1)
            places.append(work.fixed_partial_of(partials, found.first + number, split, part, holder))
        return places, exist

    @kv.func
    def last(units, a, tile_indptr, b, own, n, unit, held, taken):
        """Whether this warp is the last to finish a sequence; then it adds the other warps' sums."""
        others, sums, part, row0, lane = held.count - taken, own.sums, own.part, own.row0, own.lane
        counter = a.counters.address(0) + (b * c.row_groups + part) * 4
        arrived = partial.arrived(counter, lane)
        if arrived != others:  # another warp is still working: publish this part, then check again
            with kv.trace("leave sum"):
                store_sum(work.fixed_partial_of(a.partials, unit, held.own, part, lane), sums, row0, n, lane)
                arrived = partial.publish(counter, taken, lane)
        if arrived == others:
            partial.reset_counter(counter, lane)
            holder = partial.holder(row0, n, lane)
            first, more = work.first_unit_of(units, tile_indptr, b), kv.bool(True)
            while more:
                bits, begin, end = units_with_splits(units, tile_indptr, b, held.each, held.count, first + lane)
                more = end == 0
                found = SimpleNamespace(first=first, others=bits & ~kv.ballot(first + lane == unit), begin=begin)
                while found.others != 0:
                    with kv.trace("add sums"):
                        add_sums(sums, *next_sums(a.partials, part, found, holder))
                first = first + 32
        return arrived == others

    return SimpleNamespace(
        begin=begin, finish=finish, weights_of=weights_of, values_of=values_of, units_with_splits=units_with_splits
    )
