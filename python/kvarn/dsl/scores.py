# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Score functions of attention, ``kv.scores``: the functions behind ``softcap=`` and ``alibi_slopes=``.

A score function is called with ``(score, b, h, q, k, *arrays)``: scaled score, sequence, query head, absolute query and
key positions, and the arrays passed with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from . import math as kv_math
from .values import f32, where

LARGEST_CAP = 3.4028234663852886e38
_NEAR = 0.08  # relative to the cap: where two terms of the series are as accurate as the exponential form
_LEAST_CAP = 16.0  # for smaller caps an error of 3e-7 of the cap is below 1e-5
_ODD_CAPS = 2.0**-60, 2.0**60  # range of caps whose squares and inverse squares are normal f32 numbers

__all__ = ["alibi", "named", "softcap"]


def softcap(cap: float) -> Callable[..., Any]:
    """``cap * tanh(score / cap)`` as a function for ``score=``: scores stay between ``-cap`` and ``cap``."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
        raise ValueError(f"kv.scores.softcap takes a positive number, got {cap!r}")
    cap = float(cap)
    if not cap <= LARGEST_CAP:
        raise ValueError(f"kv.scores.softcap takes a number that f32 holds, got {cap!r}: leave softcap out for no cap")

    def softcapped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return capped(score, cap)

    return softcapped


def capped(x: Any, cap: float = 1.0, exp2: Any = kv_math.exp2, inverse: Any = lambda x: 1.0 / x) -> Any:
    """``cap * tanh(x / cap)`` with an error of at most 1e-5 ``max(1, |x|)``; for the default cap, 1e-5 ``|x|``.

    1 - 2 / (1 + e^2y) is exact at both ends and takes two fast instructions, but near 0 its absolute error is the
    rounding error near 1, 3e-7. Unless the cap is small, that is too much for a small ``x``, and a series that is exact
    at 0 is used there. Intermediate values stay in the range of f32.
    """
    small = cap <= _LEAST_CAP and cap != 1.0
    if _ODD_CAPS[0] <= cap <= _ODD_CAPS[1]:
        e = exp2(x * (2.0 * math.log2(math.e) / cap))
        far = cap - inverse(e + 1.0) * (2.0 * cap)
        near = None if small else x * kv_math.fma(x * x, -1.0 / (3.0 * cap * cap), 1.0)
    else:
        shift = 2.0 ** round(math.log2(cap) / 2)
        y = x * (1.0 / shift) * (shift / cap)
        e = exp2(y * (2.0 * math.log2(math.e)))
        far = (1.0 - inverse(e + 1.0) * 2.0) * cap
        near = None if small else x * kv_math.fma(y * y, -1.0 / 3.0, 1.0)
    return far if near is None else where(kv_math.abs(x) < _NEAR * cap, near, far)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    """ALiBi (Press et al., 2021): ``score + slopes[h] * (k - q)``, with the array ``slopes``, f32 [Hq]."""
    return score + slopes[h] * f32(k - q)


def named(cap: float, slopes: Any) -> list[tuple[Callable[..., Any], list[Any]]]:
    """The score functions of ``softcap=`` (0: none) and ``alibi_slopes=``, in order, each with its arrays."""
    found: list[tuple[Callable[..., Any], list[Any]]] = [(softcap(cap), [])] if cap else []
    return found if slopes is None else [*found, (alibi, [slopes])]
