# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Device buffers with a host copy, for records that kernels and the host share."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np

from . import device as devices, driver
from .binding import HOST


class Memory:
    """An array of integers in a device's memory; ``array`` is the host's copy, or the memory itself on the host.

    Parameters
    ----------
    count : int
    dtype : numpy dtype
    ordinal : int
    """

    def __init__(self, count: int, dtype: Any, ordinal: int) -> None:
        self.ordinal, self.array = ordinal, np.zeros(max(count, 1), dtype)
        self.address = self.array.ctypes.data
        if ordinal != HOST:
            with devices.device(ordinal).active():
                self.address = int(driver.call("cuMemAlloc", self.array.nbytes))
                weakref.finalize(self, _free, self.address, ordinal).atexit = False
            self.push()

    def push(self) -> None:
        """Copy the host's array to the device, after all work queued there."""
        if self.ordinal != HOST:
            with devices.device(self.ordinal).active():
                driver.call("cuCtxSynchronize")
                driver.call("cuMemcpyHtoD", self.address, self.array.ctypes.data, self.array.nbytes)

    def pull(self) -> None:
        """Copy the device's array to the host, after all work queued there."""
        if self.ordinal != HOST:
            with devices.device(self.ordinal).active():
                driver.call("cuCtxSynchronize")
                driver.call("cuMemcpyDtoH", self.array.ctypes.data, self.address, self.array.nbytes)


def _free(address: int, ordinal: int) -> None:
    with contextlib.suppress(driver.DriverError, RuntimeError), devices.device(ordinal).active():
        driver.call("cuMemFree", address)
