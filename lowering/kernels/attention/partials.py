# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partial results of attention and their combination: the arithmetic of every kernel that splits keys.

The partial result of a query row over some keys is (m, l, o): the maximum of its scores, in powers of two; the sum of
the weights 2^(score - m); the values times their weights. Over no keys it is (a finite maximum below any score, 0, 0).
Combining partial results scales each by 2^(m - overall maximum) and adds them; a sink is a partial result of one score
without a value. Normalised, a partial result is o / l with its log-sum-exp: m is log2 of the whole sum, and l is 1.

A score in powers of two is a product that is rounded once (:func:`in_powers`), wherever it is compared or subtracted:
the difference of an exact product and a rounded maximum of 1e9 could be 64, of 1e30 infinity. With rounding, the
largest score of a row has weight 1 before normalisation, and finite scores give no NaN weight. Scores beyond
3.4e38 / log2(e) are clamped to it.

The functions work on numbers and tiles alike. ``exp2`` is the exponential of the kernel's target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.ops.weights import LARGE, LARGEST
from kvarn.dsl.values import rounded_product

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
LOWEST = -LARGEST  # the initial running maximum: below every score, and finite so that m - m is 0
NO_VALUE = float("-inf")  # the score of a masked key, and the log-sum-exp of no keys
# Scores in powers of two are clamped to score * _SLOPE +- _OFFSET, which is finite, and beyond them where they are.
_SLOPE, _OFFSET = 0.03125, 3.25e38


def in_powers(score: Any) -> Any:
    """A natural score in powers of two, rounded once; finite scores stay finite, infinities and NaN stay themselves."""
    line = score * _SLOPE
    return kv.math.min(kv.math.max(rounded_product(score, LOG2E), line - _OFFSET), line + _OFFSET)


def is_large(m: Any) -> Any:
    """Whether a maximum that a score has moved is too large for its rounding error to be subtracted with it."""
    return (kv.math.abs(m) > LARGE) & (m > LOWEST)


@kv.func
def are_large(maxima: Any) -> Any:
    """Whether the warp has such a maximum.

    Even then, each row uses the form for its own maximum: the bits of a row do not depend on other rows.
    """
    some = kv.bool(False)
    for m in kv.static(maxima):
        some = some | is_large(m)
    return kv.ballot(some) != 0


def weight(m: Any, m_new: Any, exists: Any = True, exp2: Any = kv.ex2) -> Any:
    """The factor of a partial result of maximum ``m`` under the maximum ``m_new``; 0 if it does not exist."""
    found = exp2(m - m_new)
    return found if exists is True else kv.where(exists, found, 0.0)


def added(sums: Sequence[Any], values: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """``sums`` plus a partial result's ``values``, the values multiplied by the weights, which repeat cyclically."""
    return [kv.math.fma(x, weights[i % len(weights)], s) for i, (s, x) in enumerate(zip(sums, values, strict=True))]


def of_both(
    m: Any, sums: Sequence[Any], other: Any, values: Sequence[Any], exp2: Any = kv.ex2
) -> tuple[Any, list[Any]]:
    """(m, sums) of two partial results (m, sums) and (other, values) of one row."""
    m_new = kv.math.max(m, other)
    alpha, beta = weight(m, m_new, exp2=exp2), weight(other, m_new, exp2=exp2)
    return m_new, added([s * alpha for s in sums], values, [beta])


def with_score(m: Any, l: Any, score: Any, exp2: Any = kv.ex2) -> tuple[Any, Any, Any, Any]:
    """(m, l, factor of the old sums, weight of the score) after adding one score, in base 2."""
    m_new = kv.math.max(m, score)
    alpha, beta = weight(m, m_new, exp2=exp2), weight(score, m_new, exp2=exp2)
    return m_new, kv.math.fma(l, alpha, beta), alpha, beta


def finished(m: Any, l: Any, sink: Any = None, prior: Any = None, exp2: Any = kv.ex2) -> tuple[Any, Any, Any, Any]:
    """The end of a row: (m, l, factor of the values' sums, factor of the prior result's row).

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
    """Normalised values plus those of a prior result, which may be undefined where its factor is 0."""
    return kv.math.fma(kv.where(of_prior == 0.0, 0.0, prior), of_prior, o)


def normalizer(l: Any, factor: Any = 1.0) -> Any:
    """``factor / l``; 0 if no key was attended to, NaN for NaN."""
    return kv.where(l == 0.0, 0.0, factor / l)


def log_sum_exp(m: Any, l: Any) -> Any:
    """The natural log-sum-exp of a base-2 maximum and its sum: minus infinity over no keys, NaN for NaN."""
    return kv.where(l == 0.0, NO_VALUE, (m + kv.math.log2(l)) * LN2)
