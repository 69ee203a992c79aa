# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records that kernels and the host share: memory where the kernels run, and a copy of it here."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np

from . import device as devices, driver
from .binding import HOST


class Memory:
    """An array of integers that the kernels of a place see; ``array`` is the host's copy of it, or itself.

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
        """Give the host's copy to the device, after all that runs there."""
        if self.ordinal != HOST:
            with devices.device(self.ordinal).active():
                driver.call("cuCtxSynchronize")
                driver.call("cuMemcpyHtoD", self.address, self.array.ctypes.data, self.array.nbytes)

    def pull(self) -> None:
        """Take what the device has, after all that runs there."""
        if self.ordinal != HOST:
            with devices.device(self.ordinal).active():
                driver.call("cuCtxSynchronize")
                driver.call("cuMemcpyDtoH", self.array.ctypes.data, self.address, self.array.nbytes)


def _free(address: int, ordinal: int) -> None:
    with contextlib.suppress(driver.DriverError, RuntimeError), devices.device(ordinal).active():
        driver.call("cuMemFree", address)
