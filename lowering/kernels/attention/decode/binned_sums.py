# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reproducible summation of partial results: the same bits for any order and grouping.

Float addition is exact if all addends are multiples of one quantum and no sum exceeds the mantissa. So a value is cut
at positions that do not depend on other values: into *bins* of :data:`BITS` bits whose edges are multiples of
:data:`BITS`. A value keeps its ``count`` highest bins, rounded downwards (Demmel, Ahrens, Nguyen: "Efficient
Reproducible Floating Point Summation and BLAS", 2016). Each bin is summed separately. The sum has the bins of its
largest value; the parts of smaller values below these bins are dropped, whether the values come before or after.

Values come in groups that share an exponent: the :func:`exponent` of the largest, in whole bins. Relative to
2^(BITS * exponent) they are less than 1, and bin k has the quantum 2^(-BITS * (k + 1)). A bin is stored as its sum plus
1.5 times 2^23 quanta, a float whose last place is the quantum: adding a value with rounding downwards adds exactly the
part that belongs to the bin. Up to :data:`MOST_VALUES` values may be added; the largest loses at most
2^(BITS * (1 - count)) of itself, and usually only 2^-BITS of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn import dsl as kv
from kvarn.dsl.ptx import fma_rm

BITS = 16
MOST_VALUES = 1 << (22 - BITS)
NO_EXPONENT = -3.0e38  # below that of any value
LEAST_EXPONENT = -2.11e37  # of a nonzero sum: above that of an initial maximum, below that of any score


def empty(k: int) -> float:
    """Bin k of an empty sum."""
    return 1.5 * 2.0 ** (23 - BITS * (k + 1))


@kv.func
def exponent(m: Any, largest: Any) -> Any:
    """The exponent, in bins, of values with magnitudes up to ``largest``, in units of 2^m."""
    # One half more than the float's own exponent, since m + of_largest is rounded.
    of_largest = kv.f32(kv.bitcast(largest, kv.i32) >> 23) - 125.5
    return kv.math.ceil((m + of_largest) * (1.0 / BITS))


@kv.func
def scale(m: Any, exponent: Any) -> Any:
    """The factor that makes values in units of 2^m relative to their exponent."""
    return kv.ex2(m - exponent * BITS)


@kv.func
def factors(count: int, below: Any) -> list[Any]:
    """The factors of a value for each bin of a sum whose exponent is ``below`` (>= 0) above the value's own."""
    found, here = [], kv.f32(0.0)
    for k in kv.static(range(count)):
        here = kv.where(below == k, 2.0 ** (-BITS * k), here)
        found.append(here)
    return found


@kv.func
def add_value(bins: Sequence[Any], x: Any, by: Sequence[Any]) -> list[Any]:
    """The bins of a sum after adding x, which is relative to its own exponent; ``by`` are its :func:`factors`."""
    found, rest = [], kv.f32(0.0)
    taken, before = rest, rest
    for k in kv.static(range(len(bins))):
        if k == 2:
            # A value that starts below the first bin contributes its own leading part, not the remainder of a rounding.
            first = by[0] != 0.0
            rest = fma_rm(x, kv.where(first, 0.0, by[2]), kv.where(first, before, 0.0) - taken)
        elif k == 1:
            rest = fma_rm(x, by[1], -taken)
        new = fma_rm(rest, 1.0, bins[k]) if k else fma_rm(x, by[0], bins[0])
        found.append(new)
        taken, before = new - bins[k], rest
    return found


@kv.func
def lowered(bins: Sequence[Any], by: Any) -> list[Any]:
    """The bins of a sum after its exponent is increased by ``by``."""
    found = []
    for k in kv.static(range(len(bins))):
        here = kv.f32(empty(k))
        for j in kv.static(range(k + 1)):
            here = kv.where(by == j, bins[k - j] * 2.0 ** (-BITS * j), here)
        found.append(here)
    return found


@kv.func
def add_bins(bins: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The bins of the sum of two sums with the same exponent."""
    return [x + (y - empty(k)) for k, (x, y) in enumerate(zip(bins, others, strict=True))]


@kv.func
def sum_of(bins: Sequence[Any]) -> Any:
    """The value of a sum, relative to 2^(BITS * its exponent)."""
    found = kv.f32(0.0)
    for k in kv.static(range(len(bins) - 1, -1, -1)):
        found = found + (bins[k] - empty(k))
    return found
