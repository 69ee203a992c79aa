# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention's arithmetic over tiles, each step once: masks, score modifications, online softmax, the end of a row.

Masks and modifications are functions of (sequence, query head, query position, key position), absolute positions,
traced over tiles: a mask ``mask(b, h, q, k) -> bool``, a modification ``score(x, b, h, q, k) -> x`` of the scaled
score. The built-in ones have the form of those that a call gives.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bool_, f32
from kvarn.dsl import functions, scores, tiles
from kvarn.dsl.values import describe

from .attention_common import Case, mask_of
from .partial_results import LN2, LOG2E, weight

SLACK = 8.0  # how far, in powers of two, scores may exceed the running maximum before it moves: weights stay below 2^8


# --- masks -----------------------------------------------------------------------------------------


@kv.func
def seen_by(case: Case, b: Any, h: Any, q: Any, k: Any, num_keys: Any, arrays: Any) -> Any:
    """Which keys queries see: those that the mask shows, of those that there are."""
    exists, mask = k < num_keys, mask_of(case)
    if mask is None:
        return exists
    return returned("mask", "a bool", mask.function(b, h, q, k, *arrays[: mask.arrays]), bool_) & exists


@kv.func
def shown(case: Case, b: Any, h: Any, q: Any, k: Any, arrays: Any) -> Any:
    """Whether the mask shows one key to one query."""
    mask = mask_of(case)
    if mask is None:
        return True
    return returned("mask", "a bool", mask.function(b, h, q, k, *arrays[len(arrays) - mask.arrays :]), bool_)


# --- score modifications -----------------------------------------------------------------------------


def modifies(case: Case) -> bool:
    """Whether anything changes a case's scores."""
    return bool(case.softcap or case.alibi or case.score)


@kv.func
def modified(case: Case, x: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, arrays: Any) -> Any:
    """Scaled scores after all that changes them: softcap, slopes, the function that was given."""
    if case.softcap:
        x = scores.softcap(case.softcap)(x, b, h, q, k)
    if slopes is not None:
        x = scores.alibi(x, b, h, q, k, slopes)
    if case.score:
        score = functions.registered(case.score)
        made = returned("score", "the new score, an f32", score.function(x, b, h, q, k, *arrays[: score.arrays]), f32)
        x = tiles.stretched(made, tiles.joined("a score and what its function returns:", x.shape, made.lanes))
    return x


@kv.func
def modified_one(case: Case, x: Any, b: Any, h: Any, q: Any, k: Any, arrays: Any) -> Any:
    """One score in powers of two, after the function that was given, if one was."""
    if not case.score:
        return x
    score = functions.registered(case.score)
    made = score.function(x * LN2, b, h, q, k, *arrays[: score.arrays])
    return returned("score", "the new score, an f32", made, f32) * LOG2E


def arrays_read(*given: Any) -> list[functions.Array]:
    """The arrays of a kernel's functions, of its arguments."""
    return [functions.Array(a) for a in given if a is not None]


def returned(role: str, what: str, value: Any, dtype: DType) -> Any:
    """What a function of positions returned, checked; a number is a constant."""
    value = dtype(value) if isinstance(value, (bool, int, float)) else value
    if getattr(value, "dtype", None) is not dtype:
        raise TypeError(f"a {role} function must return {what}, got {describe(value)}")
    return value


# --- softmax ---------------------------------------------------------------------------------------


@kv.func
def online_softmax(m: Any, l: Any, x: Any, unit: Any, above: float = 0.0) -> Any:
    """One tile of an online softmax in base 2: (m, l, weights, what earlier sums are to be multiplied by).

    ``x`` times ``unit`` (positive) are scores in powers of two. The maximum stays while no score exceeds it by
    :data:`SLACK`, which keeps weights small enough and most rescales away; it moves to ``above`` powers below the
    highest score, so that weights are larger by so much: where they are of few bits, fewer of them become zeros.
    """
    top = x.max(axis=1) * unit
    m_new = kv.where(top > m + SLACK, top - above if above else top, m)
    alpha = weight(m, m_new, exp2=kv.math.exp2)
    p = kv.math.exp2(x * unit - m_new[:, None])
    return m_new, l * alpha + p.sum(axis=1), p, alpha
