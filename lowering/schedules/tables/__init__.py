# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measured numbers: one file per target, ``sm_90a.json``, with each entry's meaning and the row that it comes from.

``limits.py`` says which schedules are *legal* on a chip; these numbers select the fast ones among them. Targets without
a file use the numbers of sm_90a, since nobody has measured there. Times are of kernels alone, in microseconds, on the
GPU that the file names; a row is sequences x keys, with 32 query heads, 8 KV heads of 128 elements and 16 tokens per
page unless it says otherwise.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kvarn.lowering.target import Target

MEASURED = "sm_90a"  # the target whose numbers other targets use


@functools.cache
def entries(name: str) -> dict[str, Any]:
    """The entries of a target's table."""
    folder = Path(__file__).parent
    path = folder / f"{name}.json"
    return json.loads((path if path.exists() else folder / f"{MEASURED}.json").read_text())["entries"]


def measured(name: str, target: Target | None = None) -> Any:
    """The value of an entry in a target's table; by default of the target that the table is measured for."""
    return entries(MEASURED if target is None else target.name)[name]["value"]


def by_bits(name: str, target: Target, narrow: bool) -> Any:
    """The value of an entry for caches whose elements have at most 8 bits (``narrow``), or 16."""
    return measured(name, target)["8" if narrow else "16"]


def by_most(name: str, target: Target, count: int) -> Any:
    """The value of the first pair (most, value) of an entry with ``most`` >= ``count``; null: no bound."""
    return next(value for most, value in measured(name, target) if most is None or count <= most)
