# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Emulator of GPU code: the PTX of kernels and operations, interpreted on NumPy arrays, without a GPU.

Use ``kernel.emulate(grid, block, ...)`` or ``with kv.emulated(...)``; ``docs/emulator.md`` describes the report.
Modules: ``run`` (kernels, operations, the context), ``grid`` (a launch), ``ptx_parser``, ``cluster`` and ``block``
(scheduling of threads), ``instructions``, ``barriers``, ``tma``, ``wgmma`` (semantics), ``memory``, ``report``
(counts), ``races``. Compiling needs MLIR, running does not.
"""

from __future__ import annotations

from .cluster import Order
from .ptx_parser import EmulationError
from .report import EmulationHazard, Hazard, Report, Traffic
from .run import emulated

__all__ = ["EmulationError", "EmulationHazard", "Hazard", "Order", "Report", "Traffic", "emulated"]
