# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of attention as functions, ``kv.scores``: what ``softcap=`` and ``alibi_slopes=`` stand for.

A score function is called with ``(score, b, h, q, k, *arrays)``: the scaled score, the sequence and the query head,
absolute positions of queries and keys, and the arrays that were given beside it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from . import math as kv_math
from .values import f32

__all__ = ["alibi", "softcap"]


def softcap(
    cap: float, exp2: Callable[..., Any] | None = None, divide: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``cap * tanh(score / cap)``, as a function for ``score=``: scores stay between ``-cap`` and ``cap``.

    ``exp2`` and ``divide`` are what it is computed by, when not by ``kv.math.exp2`` and ``/``.
    """
    exp2, divide = exp2 or kv_math.exp2, divide or operator.truediv
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
        raise ValueError(f"kv.scores.softcap takes a positive number, got {cap!r}")
    cap = float(cap)

    def softcapped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        # tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, and two of the fast instructions.
        e = exp2(score * (2.0 * math.log2(math.e) / cap))
        return cap - divide(2.0 * cap, e + 1.0)

    return softcapped


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    """ALiBi (Press et al., 2021): ``score + slopes[h] * (k - q)``, with slopes f32 [Hq] beside it."""
    return score + slopes[h] * f32(k - q)
