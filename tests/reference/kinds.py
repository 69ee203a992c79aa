# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of attention that tests run, by name: kinds of a schedule, and ``"mma"``, tiles by mma.sync."""

from __future__ import annotations

from typing import Any

MMA = {"kind": "tile", "instruction": "mma.sync"}


def schedule_for(kind: str) -> dict[str, Any]:
    """The schedule of a kernel."""
    return dict(MMA) if kind == "mma" else {"kind": kind}
