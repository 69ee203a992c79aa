# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Counts of passes' rewrites by pass and rule, with an optional limit.

An optional pass calls :func:`performs` before each change:

    if loop is not None and performs(op, "hoist"):
        op.move_before(loop)

Outside of :func:`collect` the answer is true, at the cost of a call. Inside, every rewrite is counted, and rewrites
beyond a limit are refused, so that bisection finds the rewrite that breaks a kernel (``kv-opt --kv-bisect-limit``).
Rules of lowerings are counted by :class:`~kvarn.lowering.rewrite.Rules` and never refused.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .collecting import Collector


@dataclass
class Rewrites:
    """The rewrites inside a :func:`collect`.

    Attributes
    ----------
    limit : int or None
        The most rewrites to allow, of those that can be refused.
    counts : Counter
        By (pass, rule).
    asked, refused : int
        Rewrites that could have been refused, and that were refused.
    last : str
        The last allowed rewrite: its pass, rule, op and location.
    """

    limit: int | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    asked: int = 0
    refused: int = 0
    last: str = ""
    inside: str = ""  # the running pass


_collector: Collector[Rewrites] = Collector()
current, within = _collector.current, _collector.within


def collect(limit: int | None = None) -> contextlib.AbstractContextManager[Rewrites]:
    """Count the rewrites of this thread's passes, and refuse those beyond a limit."""
    return _collector.collect(Rewrites(limit))


def performs(op: Any, rule: str) -> bool:
    """Whether to do a rewrite at an op; if so, it is counted."""
    found = current()
    if found is None:
        return True
    found.asked += 1
    if found.limit is not None and found.asked > found.limit:
        found.refused += 1
        return False
    found.counts[found.inside, rule] += 1
    if found.limit is not None and found.asked == found.limit:
        operation = op.operation
        found.last = f"{found.inside}: {rule} of '{operation.name}' at {operation.location}"
    return True


def done(rule: str) -> None:
    """Count a rewrite that cannot be refused."""
    found = current()
    if found is not None:
        found.counts[found.inside, rule] += 1


__all__ = ["Rewrites", "collect", "current", "done", "performs", "within"]
