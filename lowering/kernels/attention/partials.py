# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partial results of attention, and how they are combined: the arithmetic of every kernel that has several.

The partial result of a query row over some keys is (m, l, o): a maximum of its scores, in powers of two; the sum of the
weights 2^(score - m); the values times their weights. Over no key it is (a finite maximum below any score, 0, 0).
Combining scales each by 2^(m - the maximum of all) and adds; a sink is a partial result of one score without a value.
Normalised, a partial result is o / l and its log-sum-exp: m is then log2 of the whole sum, and l is 1.

A score in powers of two is a product that is rounded once (:func:`in_powers`), wherever it is compared or subtracted:
taken off an exact product, a maximum of 1e9 would leave 64, of 1e30 infinity. So the largest score of a row has
weight 1 before results are normalised, and of finite scores no weight is NaN. Scores beyond 3.4e38 / log2(e) count as
that.

The functions take numbers and tiles alike. ``exp2`` is the exponential of the kernel's target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.ops.weights import LARGE, LARGEST
from kvarn.dsl.values import rounded_product

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
LOWEST = -LARGEST  # a running maximum that no score is below, finite so that its difference to itself is 0
NO_VALUE = float("-inf")  # the score of a key that is not seen, the log-sum-exp of no score
# A line that bounds scores in powers of two: below it where 1.44 times a score is within f32, and within f32 itself.
_SLOPE, _OFFSET = 0.03125, 3.25e38


def in_powers(score: Any) -> Any:
    """A natural score in powers of two, rounded once: finite of a finite one; infinities and NaN stay what they are."""
    line = score * _SLOPE
    return kv.math.min(kv.math.max(rounded_product(score, LOG2E), line - _OFFSET), line + _OFFSET)


def is_large(m: Any) -> Any:
    """Whether a maximum that a score has moved is too large, by its last place, to be taken off an exact product."""
    return (kv.math.abs(m) > LARGE) & (m > LOWEST)


@kv.func
def are_large(maxima: Any) -> Any:
    """Whether the executing warp has such a maximum.

    Each row is still computed by its own form then: the bits of a row do not depend on other rows.
    """
    some = kv.bool(False)
    for m in kv.static(maxima):
        some = some | is_large(m)
    return kv.ballot(some) != 0


def weight(m: Any, m_new: Any, exists: Any = True, exp2: Any = kv.ex2) -> Any:
    """What a partial result of maximum ``m`` is multiplied by under another maximum; 0 of one that does not exist."""
    found = exp2(m - m_new)
    return found if exists is True else kv.where(exists, found, 0.0)


def added(sums: Sequence[Any], values: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """``sums`` plus a partial result's ``values``; these have the weights in turn."""
    return [kv.math.fma(x, weights[i % len(weights)], s) for i, (s, x) in enumerate(zip(sums, values, strict=True))]


def of_both(
    m: Any, sums: Sequence[Any], other: Any, values: Sequence[Any], exp2: Any = kv.ex2
) -> tuple[Any, list[Any]]:
    """(m, sums) of a row after two partial results of it, one after the other: of m and sums, and other and values."""
    m_new = kv.math.max(m, other)
    alpha, beta = weight(m, m_new, exp2=exp2), weight(other, m_new, exp2=exp2)
    return m_new, added([s * alpha for s in sums], values, [beta])


def with_score(m: Any, l: Any, score: Any, exp2: Any = kv.ex2) -> tuple[Any, Any, Any, Any]:
    """(m, l, weight of what there was, weight of the score) after one more score, in base 2."""
    m_new = kv.math.max(m, score)
    alpha, beta = weight(m, m_new, exp2=exp2), weight(score, m_new, exp2=exp2)
    return m_new, kv.math.fma(l, alpha, beta), alpha, beta


def finished(m: Any, l: Any, sink: Any = None, prior: Any = None, exp2: Any = kv.ex2) -> tuple[Any, Any, Any, Any]:
    """What becomes of a row after its last key: (m, l, factor of its values' sums, factor of the prior result's row).

    ``sink``: the logit of its head; ``prior``: the log-sum-exp of a normalised result over other keys.
    """
    factor, of_prior = kv.f32(1.0), None
    if sink is not None:
        m, l, factor, _ = with_score(m, l, in_powers(sink), exp2)
    if prior is not None:
        m, l, alpha, of_prior = with_score(m, l, in_powers(prior), exp2)
        factor, of_prior = factor * alpha, normalizer(l, of_prior)
    return m, l, normalizer(l, factor), of_prior


def with_prior(o: Any, prior: Any, of_prior: Any) -> Any:
    """Normalised values plus those of a prior result, which may be anything where their factor is 0."""
    return kv.math.fma(kv.where(of_prior == 0.0, 0.0, prior), of_prior, o)


def normalizer(l: Any, factor: Any = 1.0) -> Any:
    """``factor / l``: 0 where nothing was seen, NaN of NaN."""
    return kv.where(l == 0.0, 0.0, factor / l)


def log_sum_exp(m: Any, l: Any) -> Any:
    """The natural log-sum-exp of a base-2 maximum and the sum over it: minus infinity of nothing, NaN of NaN."""
    return kv.where(l == 0.0, NO_VALUE, (m + kv.math.log2(l)) * LN2)
