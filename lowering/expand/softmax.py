# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention's arithmetic over tiles, each piece once: masks, score modifications, online softmax, the end of a row.

Masks and modifications are functions of (sequence, query head, query position, key position), absolute positions,
traced over tiles: a mask ``mask(b, h, q, k) -> bool``, a modification ``score(x, b, h, q, k) -> x`` of the scaled
score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvarn import dsl as kv

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
LOWEST = -3.0e38  # a running maximum below any score, finite so that its difference to itself is 0
SLACK = 8.0  # how far, in powers of two, scores may exceed the running maximum before it moves: weights stay below 2^8

Function = Callable[..., Any]


# --- masks -----------------------------------------------------------------------------------------


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A query sees the keys up to its own position."""
    return k <= q


def sliding_window(size: int) -> Function:
    """A query sees itself and the ``size - 1`` keys before it."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - size)

    return _from(mask, lambda q: q - (size - 1))


def chunked(size: int) -> Function:
    """A query sees the keys of its own chunk of ``size`` positions."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        first = (q // size) * size
        return (k >= first) & (k < first + size)

    return _from(mask, lambda q: (q // size) * size)


def chunked_causal(size: int) -> Function:
    """A query sees the keys of its own chunk of ``size`` positions, up to its own."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k >= (q // size) * size)

    return _from(mask, lambda q: (q // size) * size)


def _from(mask: Function, first: Function) -> Function:
    """A mask that tells the first key of a query too: what lies before may be anything, pages of others as well."""
    mask.first = first  # type: ignore[attr-defined]
    return mask


def first_key(mask: Function | None, q: Any) -> Any:
    """The first key that a query at a position, or a later one, may see."""
    first = getattr(mask, "first", None)
    return 0 if first is None else kv.math.max(first(q), 0)


def mask_named(name: str, span: int) -> Function | None:
    """The function of a mask's name; None where every key is seen."""
    made = {"sliding_window": sliding_window, "chunked": chunked, "chunked_causal": chunked_causal}
    if name in made:
        return made[name](span)
    return causal if name == "causal" else None


# --- score modifications -----------------------------------------------------------------------------


def softcap(cap: float) -> Function:
    """``cap * tanh(x / cap)``."""

    def score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        # tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, and two of the fast instructions.
        e = kv.math.exp2(x * (2.0 * LOG2E / cap))
        return cap - (2.0 * cap) / (e + 1.0)

    return score


def alibi(slopes: Any) -> Function:
    """A slope a head times the distance from the query: ``x + slopes[h] * (k - q)``."""

    def score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return x + slopes[h] * kv.f32(k - q)

    return score


# --- softmax ---------------------------------------------------------------------------------------


@kv.func
def online_softmax(m: Any, l: Any, x: Any, unit: Any) -> Any:
    """One tile of an online softmax in base 2: (m, l, weights, what earlier sums are to be multiplied by).

    ``x`` times ``unit`` (positive) are scores in powers of two. The maximum stays while no score exceeds it by
    :data:`SLACK`, which keeps weights small enough and most rescales away.
    """
    top = x.max(axis=1) * unit
    m_new = kv.where(top > m + SLACK, top, m)
    alpha = kv.math.exp2(m - m_new)
    p = kv.math.exp2(x * unit - m_new[:, None])
    return m_new, l * alpha + p.sum(axis=1), p, alpha


@kv.func
def with_sink(m: Any, l: Any, sink: Any) -> Any:
    """(m, l, factor of the output) after one more score a row that has no value."""
    sink = sink * LOG2E
    m_new = kv.math.max(m, sink)
    alpha = kv.math.exp2(m - m_new)
    return m_new, l * alpha + kv.math.exp2(sink - m_new), alpha


@kv.func
def log_sum_exp(m: Any, l: Any) -> Any:
    """The natural log-sum-exp of a base-2 maximum and the sum over it: minus infinity of nothing."""
    return kv.where(l == 0.0, float("-inf"), (m + kv.math.log2(l)) * LN2)
