# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the combine kernel adds fixed splits, which decode attention has left one by one: in bins, like its warps do.

A lane has a query row and two of its values, whose splits the block's warps share. All splits are known before one is
added, so their exponents come first, from all warps through shared memory: the bins of all warps are of one exponent,
and adding them takes no more than adding numbers, each bin by a warp of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.dialect.layout import cdiv

from .binned_sums import BITS, NO_EXPONENT, add_value, empty, factors
from .decode_fixed_splits import weight_sum
from .decode_schedule import Config

_EXPONENTS = 2  # of a lane: of its values, and of its sums of weights
_NUMBERS = 3  # that are summed: the weights, two values


@kv.func
def ordered(bits):
    """The bits of a float as an integer of the same order; of such an integer, the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def fixed_combining(c: Config, work: SimpleNamespace) -> SimpleNamespace:
    """The functions for a configuration and its scheduler.

    ``shared`` is what :func:`begin` gives: the exponents of all splits, what each warp has summed, the whole sums.
    """
    K, WARPS = c.bins, c.combine
    EACH = cdiv(c.most_splits, WARPS)  # splits of a warp, whose loads all are under way together

    @kv.func
    def begin(lane, warp):
        """Shared memory for :func:`combined`, before any warp is there."""
        exponents = kv.shared((_EXPONENTS, 32), kv.i32)
        staged, sums = kv.shared((WARPS, _NUMBERS * K, 32), kv.f32), kv.shared((_NUMBERS * K, 32), kv.f32)
        if warp == 0:
            for i in kv.static(range(_EXPONENTS)):
                exponents[i, lane] = ordered(kv.bitcast(kv.f32(NO_EXPONENT), kv.i32))
        kv.barrier()
        return exponents, staged, sums

    @kv.func
    def row_of(which, t, lane):
        """(row of the two that a lane has in a partial result, the lane that left it, which of that one's steps).

        Of a block ``which`` has one of the rows, unless two lanes share the columns of each.
        """
        if c.row_blocks > 1:
            return which, lane, t
        other = t >= c.sum_steps
        return (lane >> 1) & 1, (lane & ~2) | kv.where(other, 2, 0), t - kv.where(other, c.sum_steps, 0)

    @kv.func
    def load(partials, b, part, nt, t, which, count, lane, warp):
        """This warp's splits: (exponents, numbers) of each; no exponents of those that there are not."""
        u, holder, t = row_of(which, t, lane)
        held = []
        for j in kv.static(range(EACH)):
            s = kv.math.min(warp + j * WARPS, count - 1)
            of = work.slot_of(partials, b * c.most_splits + s, part, holder) + nt * ((c.sum_steps + 2) * 512)
            ends = (of + u * 512).load(kv.f32, 4)
            pair = (of + ((2 + t) * 512 + u * 256) - holder * 8).load(kv.f32, 2)
            own = [kv.where(warp + j * WARPS < count, ends[i], NO_EXPONENT) for i in range(_EXPONENTS)]
            held.append((own, (ends[2], pair[0], pair[1])))
        return held

    @kv.func
    def whole_exponents(exponents, held, lane):
        """The largest exponents of all warps' splits."""
        for i in kv.static(range(_EXPONENTS)):
            top = held[0][0][i]
            for own, _ in kv.static(held[1:]):
                top = kv.math.max(top, own[i])
            exponents.ptr(i, lane).atomic("max", ordered(kv.bitcast(top, kv.i32)), scope="block")
        kv.barrier()
        return [kv.bitcast(ordered(exponents[i, lane]), kv.f32) for i in range(_EXPONENTS)]

    @kv.func
    def combined(shared, partials, b, part, nt, t, which, count, lane, warp):
        """(maximum, sum of weights, two values) of a lane's row over all splits, in warp 0."""
        exponents, staged, sums = shared
        with kv.trace("load splits"):
            held = load(partials, b, part, nt, t, which, count, lane, warp)
            tops = whole_exponents(exponents, held, lane)
        bins = [kv.f32(empty(k)) for _ in range(_NUMBERS) for k in range(K)]
        for j, (own, numbers) in kv.static(enumerate(held)):
            if warp + j * WARPS < count:
                by = [factors(K, x - y) for x, y in zip(tops, own, strict=True)]
                for i, x in kv.static(enumerate(numbers)):
                    bins[i * K : i * K + K] = add_value(bins[i * K : i * K + K], x, by[0 if i else 1])
        for i in kv.static(range(_NUMBERS * K)):
            staged[warp, i, lane] = bins[i] - empty(i % K)
        kv.barrier()
        for i in range(warp, _NUMBERS * K, WARPS):
            of_bin = staged[0, i, lane]
            for w in kv.static(range(1, WARPS)):
                of_bin = of_bin + staged[w, i, lane]
            sums[i, lane] = of_bin
        kv.barrier()
        numbers = []
        for i in kv.static(range(_NUMBERS)):
            x = kv.f32(0.0)
            for k in kv.static(range(K - 1, -1, -1)):
                x = x + sums[i * K + k, lane]
            numbers.append(x)
        top, weights = weight_sum(tops[1], numbers[0])
        by = kv.ex2(tops[0] * BITS - top)
        return top, weights, [x * by for x in numbers[1:]]

    @kv.func
    def column_of(which, lane):
        """The query row of a lane in its column tile."""
        return (lane & 1) * 2 + ((lane >> 1) & 1) if c.halves > 1 else (lane & 3) * 2 + which

    return SimpleNamespace(begin=begin, combined=combined, column_of=column_of)
