# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One block of a small kernel in the PTX interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvarn as kv
from kvarn.emulator import Order, Report, run


def run_block(
    kernel: Any,
    block: int,
    *arrays: np.ndarray,
    target: str = "sm_80",
    order: Order | None = None,
    report: Report | None = None,
) -> None:
    """Compile a kernel over buffers of f32 and i32 and run one block of it."""
    specs = [kv.Buffer[getattr(kv, {"f": "f32", "i": "i32"}[a.dtype.kind]), a.ndim] for a in arrays]
    made = kv.compile(kernel, *specs, target=target, lineinfo=report is not None)
    run.launch(made, 1, block, arrays, order, report)
