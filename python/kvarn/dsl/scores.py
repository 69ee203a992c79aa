# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of attention as functions, ``kv.scores``: what ``softcap=`` and ``alibi_slopes=`` stand for.

A score function is called with ``(score, b, h, q, k, *arrays)``: the scaled score, the sequence and the query head,
absolute positions of queries and keys, and the arrays that were given beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from . import math as kv_math
from .values import f32

__all__ = ["alibi", "named", "softcap"]


def softcap(cap: float) -> Callable[..., Any]:
    """``cap * tanh(score / cap)``, as a function for ``score=``: scores stay between ``-cap`` and ``cap``."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
        raise ValueError(f"kv.scores.softcap takes a positive number, got {cap!r}")
    cap = float(cap)

    def softcapped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        # tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, and two of the fast instructions.
        e = kv_math.exp2(score * (2.0 * math.log2(math.e) / cap))
        return cap - 2.0 * cap / (e + 1.0)

    return softcapped


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    """ALiBi (Press et al., 2021): ``score + slopes[h] * (k - q)``, with slopes f32 [Hq] beside it."""
    return score + slopes[h] * f32(k - q)


def named(cap: float, slopes: Any) -> list[tuple[Callable[..., Any], list[Any]]]:
    """What ``softcap=`` (0: none) and ``alibi_slopes=`` stand for, in order: functions, and the arrays of each."""
    found: list[tuple[Callable[..., Any], list[Any]]] = [(softcap(cap), [])] if cap else []
    return found if slopes is None else [*found, (alibi, [slopes])]
