# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arithmetic of attention over tiles: masks, score modifications, online softmax, the end of a row.

Masks and modifications are functions of (sequence, query head, query position, key position), absolute positions,
traced over tiles: a mask ``mask(b, h, q, k) -> bool``, a modification ``score(x, b, h, q, k) -> x`` of the scaled
score. Built-in and user functions have the same form.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bool_, f32
from kvarn.dsl import functions, intervals, ptx, scores, tiles
from kvarn.dsl.values import computed_by, describe, joined, plain, stretched

from .case import Case, position
from .partials import LN2, LOG2E, in_powers

# --- masks -----------------------------------------------------------------------------------------


@kv.func
def seen_by(case: Case, b: Any, h: Any, q: Any, k: Any, num_keys: Any, arrays: Any) -> Any:
    """Which keys the queries attend to: existing keys that the mask allows."""
    exists, mask = k < num_keys, case.mask.function
    if mask is None:
        return exists
    with intervals.wrapping():
        seen = mask.function(b, h, position(q), position(k), *arrays[: mask.arrays])
    return returned("mask", "a bool", seen, bool_, mask.function) & exists


@kv.func
def shown(case: Case, b: Any, h: Any, q: Any, k: Any, arrays: Any) -> Any:
    """Whether the mask allows one key for one query."""
    mask = case.mask.function
    if mask is None:
        return True
    with intervals.wrapping():
        seen = mask.function(b, h, position(q), position(k), *arrays[len(arrays) - mask.arrays :])
    return returned("mask", "a bool", seen, bool_, mask.function)


def outer_of(case: Case) -> Any:
    """A mask on positions alone that allows everything that the case's mask allows.

    None if there is none, or if the case's mask depends on positions alone itself.
    """
    mask = case.mask.function
    return mask.outer if mask is not None and mask.arrays else None


@kv.func
def seen_by_positions(case: Case, b: Any, h: Any, q: Any, k: Any, num_keys: Any) -> Any:
    """Which keys the queries attend to, under the mask's conditions on positions alone."""
    with intervals.wrapping():
        seen = outer_of(case)(b, h, position(q), position(k))
    return returned("mask", "a bool", seen, bool_, outer_of(case)) & (k < num_keys)


# --- score modifications -----------------------------------------------------------------------------


def modifies(case: Case) -> bool:
    """Whether scores are modified."""
    return bool(case.softcap or case.alibi or case.score)


@kv.func
def modified(case: Case, x: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, arrays: Any) -> Any:
    """Scaled scores after all modifications: softcap and slopes, then the score function."""
    for function, own in kv.static(scores.named(case.softcap, slopes)):
        x = function(x, b, h, q, k, *own)
    if case.score:
        score = functions.registered(case.score)
        with intervals.wrapping():
            made = score.function(x, b, h, position(q), position(k), *arrays[: score.arrays])
        made = returned("score", "the new score, an f32", made, f32, score.function)
        if not isinstance(x, tiles.Tile):
            return made
        x = stretched(made, joined("a score and what its function returns:", x.shape, made.lanes))
    return x


# A GPU's fast math for score functions: within 2^-21 for results near 1; tanh with a relative error of 1e-5.
FAST = MappingProxyType(
    {
        "exp2": kv.ex2,
        "exp": lambda x: kv.ex2(x * LOG2E),
        "log2": ptx.lg2,
        "log": lambda x: ptx.lg2(x) * LN2,
        "tanh": lambda x: scores.capped(x, exp2=kv.ex2, inverse=kv.rcp),
        "divide": lambda a, b: kv.rcp(b) * a,
    }
)


def scale_log2_of(case: Case) -> float:
    """The factor of the query that makes scores powers of two, where no modification needs natural scores."""
    return 1.0 if modifies(case) else LOG2E


def modified_one(
    case: Case, x: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, arrays: Any, by: Any = FAST, factor: float = 1.0
) -> Any:
    """One modified score in powers of two; ``x`` times ``factor`` is scaled by :func:`scale_log2_of`.

    ``by`` implements the functions' math. (For tiles, passes choose fast instructions.)
    """
    if not modifies(case):
        return x
    with computed_by(by):
        made = modified(case, x if factor == 1.0 else x * factor, b, h, q, k, slopes, arrays)
    return in_powers(made)


def hoist_query_reads(case: Case, b: Any, places: Any, k: Any, slopes: Any, arrays: Any) -> None:
    """Hoist the array reads that depend only on a query's (head, position) out of the loop over keys.

    ``k`` is an arbitrary key position: code that depends on it is dead.
    """
    with functions.reusing_reads():
        for h, q in places:
            if modifies(case):
                modified(case, kv.f32(0.0), b, h, q, k, slopes, arrays)
            if case.mask.evaluated:
                shown(case, b, h, q, k, arrays)


def array_read(given: Any) -> functions.Array | None:
    """A kernel argument as an array of the functions; None for an absent one."""
    return None if given is None else functions.Array(given)


def arrays_read(*given: Any) -> list[functions.Array]:
    """The kernel arguments as arrays of the functions."""
    return [array_read(a) for a in given if a is not None]


def returned(role: str, what: str, value: Any, dtype: DType, function: Any) -> Any:
    """What a function of positions returned, checked; a number becomes a constant, a mask's must be True or False."""
    value = plain(value)
    if isinstance(value, bool) or (dtype is not bool_ and isinstance(value, (int, float))):
        value = dtype(value)
    if getattr(value, "dtype", None) is not dtype:
        code = getattr(function, "__code__", None)
        where = "" if code is None else f" from {function.__name__} of {code.co_filename}:{code.co_firstlineno}"
        raise TypeError(f"a {role} function must return {what}, got {describe(value)}{where}")
    return value
