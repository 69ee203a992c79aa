# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers that were measured: one file a target, ``sm_90a.json``, with what each says and the row that it came from.

What is *legal* follows from a chip and is in ``limits.py``; these say which of the legal schedules is fast. A target
without a file has the numbers of sm_90a: nobody has measured there. Times are of kernels alone, in microseconds, on the
GPU that the file names; a row is sequences x keys, of 32 query and 8 KV heads of
128 elements and 16 tokens a page where it does not say otherwise.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kvarn.lowering.target import Target

MEASURED = "sm_90a"  # whose numbers other targets have


@functools.cache
def entries(name: str) -> dict[str, Any]:
    """The entries of the table of a target of this name."""
    folder = Path(__file__).parent
    path = folder / f"{name}.json"
    return json.loads((path if path.exists() else folder / f"{MEASURED}.json").read_text())["entries"]


def measured(name: str, target: Target | None = None) -> Any:
    """The value of an entry in the table of a target; without one, of the target whose instructions alone it is of."""
    return entries(MEASURED if target is None else target.name)[name]["value"]


def by_most(name: str, target: Target, count: int) -> Any:
    """The value of the first pair (most, value) of an entry whose ``most``, null for any, is not below ``count``."""
    return next(value for most, value in measured(name, target) if most is None or count <= most)
