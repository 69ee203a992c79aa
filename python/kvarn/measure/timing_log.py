# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A log of measurements, one JSON object per line, with the machine and its clocks."""

from __future__ import annotations

import ctypes
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvarn

from .arrays import Arrays

_SM, _MEMORY = 1, 2  # NVML's clock ids


def machine(library: Any) -> dict[str, Any]:
    """Device and versions."""
    made = {
        "device": library.name,
        "kvarn": kvarn.__version__,
        "python": platform.python_version(),
        "host": platform.machine(),
    }
    if hasattr(library, "torch"):
        made["torch"] = library.torch.__version__
    if library.on_gpu:
        from kvarn.runtime import driver

        properties = library.torch.cuda.get_device_properties(0)
        made |= {
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "driver": ".".join(map(str, driver.status().version or ())),
        }
    return made


def clocks() -> dict[str, int]:
    """Current clocks of the first device's multiprocessors and memory in MHz, from NVML; empty without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    device, found = ctypes.c_void_p(), {}
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return {}
    for name, which in (("sm_mhz", _SM), ("memory_mhz", _MEMORY)):
        value = ctypes.c_uint()
        if not nvml.nvmlDeviceGetClockInfo(device, which, ctypes.byref(value)):
            found[name] = value.value
    return found


class Log:
    """Appends to a file; without a file, does nothing."""

    def __init__(self, path: Path | None, library: Arrays | None) -> None:
        self.path = path
        self._machine = machine(library) if path is not None and library is not None else {}

    def put(self, record: Mapping[str, Any]) -> None:
        """Add a measurement, with the clocks right after it."""
        if self.path is None:
            return
        full = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self._machine, **clocks(), **record}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(full) + "\n")
