# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The combine kernel's sums of fixed splits: in bins, as in decode attention's own warps.

With one sequence it adds the splits one by one, with several the sums of work units: splits may be so short that all
units are equally long. A lane has a query row and two of its values, for which each of the block's warps adds some
splits or sums; then two warps add the warps' results, one value each. One sequence has many splits per block, so the
warps first agree on exponents; adding bins then takes no longer than adding numbers, with one warp per bin.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.dialect.layout import cdiv
from kvarn.lowering.schedules.decode import DecodeConfig

from .binned_sums import BITS, NO_EXPONENT, add_bins, add_value, empty, factors, lowered, sum_of
from .fixed_splits import fixed_splits, weight_sum
from .partials import partials_of


@kv.func
def ordered(bits):
    """The bits of a float as an integer with the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


_EXPONENTS = 2  # per lane: of its values, and of its sums of weights
_NUMBERS = 3  # summed numbers per lane: the weights, two values


def fixed_combining(c: DecodeConfig, work: SimpleNamespace) -> SimpleNamespace:
    """The functions for a configuration and its scheduler.

    ``shared`` is the result of :func:`begin`: exponents of each warp's sums or of all, and the bins.
    """
    K, WARPS = c.bins, c.combine
    EACH = cdiv(c.most_splits, WARPS)  # splits per warp, whose loads are all in flight
    UNITS = 4  # units per warp whose loads are in flight
    KS, sums = c.sum_steps, fixed_splits(c, work, partials_of(c))

    @kv.func
    def begin(lane, warp):
        """Allocate shared memory for the warps' sums."""
        exponents = kv.shared((WARPS, _EXPONENTS, 32), kv.f32)
        if c.stores_splits:
            if warp == 0:
                for i in kv.static(range(_EXPONENTS)):
                    exponents[0, i, lane] = kv.bitcast(ordered(kv.bitcast(kv.f32(NO_EXPONENT), kv.i32)), kv.f32)
            kv.barrier()
        return exponents, kv.shared((WARPS + 1, _NUMBERS * K, 32), kv.f32)

    @kv.func
    def agreed(exponents, own, lane):
        """The largest exponents over all warps."""
        for i in kv.static(range(_EXPONENTS)):
            bits = ordered(kv.bitcast(own[i], kv.i32))
            exponents.ptr(0, i, lane).atomic("max", bits, scope="block")
        kv.barrier()
        return [kv.bitcast(ordered(kv.bitcast(exponents[0, i, lane], kv.i32)), kv.f32) for i in range(_EXPONENTS)]

    @kv.func
    def row_of(which, t, lane):
        """(which of a lane's two rows in a partial result, the lane that stored it, the index of the step in that
        lane).

        Block number ``which`` has one of the rows, unless two lanes share the columns of each row.
        """
        if c.row_blocks > 1:
            return which, lane, t
        other = t >= c.sum_steps
        return (lane >> 1) & 1, (lane & ~2) | kv.where(other, 2, 0), t - kv.where(other, c.sum_steps, 0)

    @kv.func
    def of_splits(exponents, partials, b, own_part, place, count, warp):
        """The exponents that all warps agree on, and the bins of this warp's splits of a sequence."""
        (nt, t, which), part, lane = place, own_part.part, own_part.lane
        u, holder, t = row_of(which, t, lane)
        held, own, bins = [], [kv.f32(NO_EXPONENT)] * _EXPONENTS, no_bins()
        with kv.trace("load splits"):
            for j in kv.static(range(EACH)):
                s = kv.math.min(warp + j * WARPS, count - 1)
                of = work.slot_of(partials, b * c.most_splits + s, part, holder) + nt * ((KS + 2) * 512)
                ends = (of + u * 512).load(kv.f32, 4)
                pair = (of + ((2 + t) * 512 + u * 256) - holder * 8).load(kv.f32, 2)
                of_it = [kv.where(warp + j * WARPS < count, ends[i], NO_EXPONENT) for i in range(_EXPONENTS)]
                held.append((of_it, (ends[2], pair[0], pair[1])))
            for of_it, _ in kv.static(held):
                own = [kv.math.max(x, y) for x, y in zip(own, of_it, strict=True)]
            own = agreed(exponents, own, lane)
        for j, (of_it, numbers) in kv.static(enumerate(held)):
            if warp + j * WARPS < count:
                by = [factors(K, x - y) for x, y in zip(own, of_it, strict=True)]
                for i, x in kv.static(enumerate(numbers)):
                    bins[i * K : i * K + K] = add_value(bins[i * K : i * K + K], x, by[0 if i else 1])
        return own, bins

    @kv.func
    def units_from(units, tile_indptr, b, base, lane, warp):
        """This warp's next units from ``base`` up, as bits of words: the units with a sum of the sequence, and the
        units that do not start within it.
        """
        each, count = splits_of(tile_indptr, b)
        return sums.units_with_splits(units, tile_indptr, b, each, count, base + warp + lane * WARPS)[:2]

    @kv.func
    def of_sums(units, partials, tile_indptr, b, own_part, place, left, warp):
        """The exponents and bins of this warp's sums of units."""
        (nt, t, which), part, lane = place, own_part.part, own_part.lane
        u, holder, t = row_of(which, t, lane)
        own, bins = [kv.f32(NO_EXPONENT)] * _EXPONENTS, no_bins()
        there, begin = left.there, left.begin
        with kv.trace("load sums"):
            for base in range(left.first, left.last + 1, WARPS * UNITS):
                held, tops, below = [], own, kv.bool(False)
                for j in kv.static(range(UNITS)):
                    r = kv.math.min(base + warp + j * WARPS, left.last)  # a unit that may have stored nothing
                    found = loaded(partials, part, r, begin & (1 << j), u, nt, t, holder)
                    held.append(((there & (1 << j)) != 0, *found))
                for exists, of_it, _ in kv.static(held):
                    tops = [kv.where(exists, kv.math.max(x, y), x) for x, y in zip(tops, of_it, strict=True)]
                for exists, of_it, _ in kv.static(held):
                    below = below | (exists & ((of_it[0] != tops[0]) | (of_it[1] != tops[1])))
                bins = lowered_by(bins, own, tops)
                alike = kv.ballot(below) == 0  # nearly always true
                for exists, of_it, theirs in kv.static(held):
                    if exists:
                        if ~alike:
                            theirs = lowered_by(theirs, of_it, tops)
                        for i in kv.static(range(0, _NUMBERS * K, K)):
                            bins[i : i + K] = add_bins(bins[i : i + K], theirs[i : i + K])
                own = tops
                if base + WARPS * UNITS <= left.last:
                    there, begin = units_from(units, tile_indptr, b, base + WARPS * UNITS, lane, warp)
        return own, bins

    @kv.func
    def loaded(partials, part, r, begins, u, nt, t, holder):
        """(exponents, bins) of a row's step as a unit stored them."""
        fours = cdiv(_EXPONENTS + K, 4)
        of = work.fixed_partial_of(partials, r, kv.where(begins != 0, 0, 1), part, holder)
        of, ends, values = of + nt * ((KS * K + 2 * fours) * 512), [], []
        for i in kv.static(range(fours)):
            four = (of + (u * fours + i) * 512).load(kv.f32, 4)
            ends.extend([four[j] for j in range(4)])
        for k in kv.static(range(K)):
            pair = (of + ((2 * fours + k) * 512 + t * (K * 512) + u * 256) - holder * 8).load(kv.f32, 2)
            values.append((pair[0], pair[1]))
        bins = ends[_EXPONENTS : _EXPONENTS + K] + [values[k][half] for half in range(2) for k in range(K)]
        return ends[:_EXPONENTS], bins

    @kv.func
    def no_bins():
        return [kv.f32(empty(k)) for _ in range(_NUMBERS) for k in range(K)]

    @kv.func
    def lowered_by(bins, before, tops):
        """The bins after their numbers' exponents are increased; the first number is the sum of weights."""
        found = []
        for i in kv.static(range(_NUMBERS)):
            of = 0 if i else 1
            found.extend(lowered(bins[i * K : i * K + K], tops[of] - before[of]))
        return found

    @kv.func
    def splits_of(tile_indptr, b):
        """(tiles per split, splits) of a sequence."""
        each = work.tiles_of_split(tile_indptr, b)
        return each, work.split_count(tile_indptr, b, each)

    @kv.func
    def find(left, units, tile_indptr, b, lane, warp):
        """Find the partial results of a sequence with tiles: the ``first`` to the ``last`` split, or unit.

        Both units are the same if one unit has the whole sequence.
        """
        if c.stores_splits:
            left.last = splits_of(tile_indptr, b)[1]
        else:
            left.first, left.last = work.units_of(units, tile_indptr, b)
            each, count = splits_of(tile_indptr, b)
            for base in range(left.first, left.last + 1, 32):
                _, begin, end = sums.units_with_splits(units, tile_indptr, b, each, count, base + lane)
                if (begin & end) != 0:
                    left.last = left.first
            left.there, left.begin = units_from(units, tile_indptr, b, left.first, lane, warp)

    @kv.func
    def gather(shared, units, partials, tile_indptr, b, own_part, place, left, warp):
        """Sum this warp's share of a sequence's partial results and publish it to all warps.

        ``own_part`` is the part that the block combines, ``place`` is (column tile, step of the head, query row).
        """
        (exponents, staged), lane = shared, own_part.lane
        if c.stores_splits:
            _, bins = of_splits(exponents, partials, b, own_part, place, left.last, warp)
        else:
            own, bins = of_sums(units, partials, tile_indptr, b, own_part, place, left, warp)
            for i in kv.static(range(_EXPONENTS)):
                exponents[warp, i, lane] = own[i]
        for i in kv.static(range(_NUMBERS * K)):
            staged[warp, i, lane] = bins[i]
        kv.barrier()
        if c.stores_splits:
            for i in range(warp, _NUMBERS * K, WARPS):
                nothing = kv.where(i % K == 0, empty(0), empty(1))
                if K > 2:
                    nothing = kv.where(i % K == 2, empty(K - 1), nothing)
                of_bin = staged[0, i, lane]
                for w in kv.static(range(1, WARPS)):
                    of_bin = of_bin + (staged[w, i, lane] - nothing)
                staged[WARPS, i, lane] = of_bin
            kv.barrier()

    @kv.func
    def combined(shared, half, lane):
        """(maximum, sum of weights, one of two values) of a lane's row over all warps' sums."""
        exponents, staged = shared
        first = [0, K + half * K]  # the first bins of the weights and of the value
        if c.stores_splits:
            tops = [kv.bitcast(ordered(kv.bitcast(exponents[0, i, lane], kv.i32)), kv.f32) for i in range(_EXPONENTS)]
            bins = [staged[WARPS, at + k, lane] for at in first for k in range(K)]
        else:
            tops, bins = all_bins(exponents, staged, first, lane)
        top, weights = weight_sum(tops[1], sum_of(bins[:K]))
        return top, weights, sum_of(bins[K:]) * kv.ex2(tops[0] * BITS - top)

    @kv.func
    def all_bins(exponents, staged, first, lane):
        """The exponents and bins of two numbers over all warps' sums; their bins start at ``first``."""
        of, tops, below = [], [kv.f32(NO_EXPONENT)] * _EXPONENTS, kv.bool(False)
        for w in kv.static(range(WARPS)):
            of.append([exponents[w, i, lane] for i in range(_EXPONENTS)])
            tops = [kv.math.max(x, y) for x, y in zip(tops, of[w], strict=True)]
        for w in kv.static(range(WARPS)):
            for i in kv.static(range(_EXPONENTS)):
                below = below | (of[w][i] != tops[i])
        bins = [kv.f32(empty(k)) for _ in range(2) for k in range(K)]
        if kv.ballot(below) == 0:
            for w in kv.static(range(WARPS)):
                theirs = [staged[w, at + k, lane] for at in first for k in range(K)]
                bins = [x + (y - empty(i % K)) for i, (x, y) in enumerate(zip(bins, theirs, strict=True))]
        else:
            for w in range(WARPS):
                for n in kv.static(range(2)):
                    theirs = [staged[w, first[n] + k, lane] for k in range(K)]
                    theirs = lowered(theirs, tops[1 - n] - exponents[w, 1 - n, lane])
                    bins[n * K : n * K + K] = add_bins(bins[n * K : n * K + K], theirs)
        return tops, bins

    @kv.func
    def column_of(which, lane):
        """The query row of a lane in its column tile."""
        return (lane & 1) * 2 + ((lane >> 1) & 1) if c.halves > 1 else (lane & 3) * 2 + which

    return SimpleNamespace(begin=begin, find=find, gather=gather, combined=combined, column_of=column_of)
