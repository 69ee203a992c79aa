# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""GPU code without a GPU: the PTX of kernels and operations, interpreted on NumPy arrays.

``kernel.emulate(grid, block, ...)`` and ``with kv.emulated(...)`` are the way in; ``docs/emulator.md`` says what they
report. Modules: ``run`` (kernels, operations, the context), ``ptx`` (a launch), ``text`` (PTX to instructions),
``cluster`` and ``block`` (who runs), ``instructions``, ``barriers``, ``tma``, ``wgmma`` (what they do), ``memory``,
``report`` (what is counted), ``races``. MLIR is needed to compile, not to run what is compiled.
"""

from __future__ import annotations

from .cluster import Order
from .ptx_parser import EmulationError
from .report import EmulationHazard, Hazard, Report, Traffic
from .run import emulated

__all__ = ["EmulationError", "EmulationHazard", "Hazard", "Order", "Report", "Traffic", "emulated"]
