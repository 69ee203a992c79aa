# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CUDA driver, through cuda-python: detection, and calls that raise exceptions.

All calls use ``cuda.bindings.driver``, except the two of every launch. Their addresses come from the bindings once and
are called through ctypes, at 0.2 µs per call, since the bindings build a Python object per struct.

Importing this module loads nothing. The driver library is looked up by a plain ``dlopen`` before the bindings are used:
on a machine without one, a failing first call of the bindings can make the next one hang.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn.forks import reinit_after_fork

# cuLibrary* and cuLaunchKernelEx with library kernels exist since CUDA 12.0.
OLDEST_DRIVER = (12, 0)
# PTX ISA of the driver of each CUDA 12 release. From 13.0 on, minor versions are equal.
_ISA_OF_CUDA_12 = ((8, 0), (8, 1), (8, 2), (8, 3), (8, 4), (8, 5), (8, 5), (8, 6), (8, 7), (8, 8))

_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "a process that was forked after CUDA started cannot use it: start it with 'spawn'",
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver library and kernel module differ: reboot, or reinstall the driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or use smaller buffers",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "registers times threads is more than the device has: use a smaller block",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel launched before accessed memory out of bounds: run with KVARN_CHECK=1",
    "CUDA_ERROR_INVALID_PTX": "compile again for this device, or update the driver",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the driver, or compile for a lower PTX ISA",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile for this device's chip",
}


class DriverError(RuntimeError):
    """A driver call failed. ``code`` is the number, ``name`` its CUDA_ERROR_ name."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        self.call, self.code = call, code
        self.name, text = _describe(code)
        hint = _HINTS.get(self.name)
        super().__init__(
            f"{call} failed: {self.name} ({code}): {text}"
            + (f"; {hint}" if hint else "")
            + (f"\n{detail}" if detail else "")
        )


def _describe(code: int) -> tuple[str, str]:
    try:
        bindings = _bindings()
        error = bindings.CUresult(code)
        name, text = bindings.cuGetErrorName(error)[1], bindings.cuGetErrorString(error)[1]
        return (name or b"").decode() or error.name, (text or b"").decode()
    except (ValueError, AttributeError, RuntimeError):
        return f"CUDA error {code}", "unknown to the installed cuda-bindings"


@dataclass(frozen=True)
class Status:
    """Whether kernels can run on a GPU of this machine, and why not.

    Attributes
    ----------
    usable : bool
    reason : str
        What is missing and how to fix it; empty if usable.
    version : tuple of int or None
        CUDA version of the driver, such as ``(13, 0)``.
    devices : int
        Number of GPUs.
    bindings : str
        Version of cuda-bindings; empty if it is not installed.
    """

    usable: bool
    reason: str = ""
    version: tuple[int, int] | None = None
    devices: int = 0
    bindings: str = ""


@functools.cache
def _bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


_status: Status | None = None
_lock = reinit_after_fork(threading.RLock())


def status() -> Status:
    """Probe for a driver and a device. A positive result is cached; a negative one is probed again."""
    global _status
    with _lock:
        if _status is None or not _status.usable:
            _status = _probe()
        return _status


def _probe() -> Status:
    if not _installed():
        return Status(False, "cuda-bindings is not installed: pip install 'kvarn[cuda]'")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Status(
            False,
            "no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use target='host'",
            bindings=_bindings_version(),
        )
    try:
        bindings = _bindings()
    except Exception as e:
        return Status(False, f"cuda-bindings cannot be imported: {type(e).__name__}: {e}")
    facts: dict[str, Any] = {"bindings": _bindings_version()}
    code = int(bindings.cuInit(0)[0])
    if code:
        return Status(False, str(DriverError("cuInit", code)), **facts)
    code, number = bindings.cuDriverGetVersion()
    if int(code):
        return Status(False, str(DriverError("cuDriverGetVersion", int(code))), **facts)
    facts["version"] = (number // 1000, number % 1000 // 10)
    if facts["version"] < OLDEST_DRIVER:
        return Status(
            False,
            f"the driver must be of CUDA {_dotted(OLDEST_DRIVER)} or newer, got one of CUDA "
            f"{_dotted(facts['version'])}: update it",
            **facts,
        )
    code, devices = bindings.cuDeviceGetCount()
    if int(code) or not devices:
        return Status(False, str(DriverError("cuDeviceGetCount", int(code) or 100)), **facts)
    return Status(True, devices=devices, **facts)


def _bindings_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return "unknown"


def require() -> Any:
    """The ``cuda.bindings.driver`` module with a working driver; RuntimeError with the reason otherwise."""
    found = status()
    if not found.usable:
        raise RuntimeError(f"no GPU can be used: {found.reason}")
    return _bindings()


def call(name: str, *args: Any) -> Any:
    """Call a driver function by name.

    Returns
    -------
    object
        Its results: None, one value or a tuple.

    Raises
    ------
    DriverError
        If it fails.
    """
    code, *results = getattr(require(), name)(*args)
    if int(code):
        raise DriverError(name, int(code))
    return results[0] if len(results) == 1 else tuple(results) or None


def has(name: str) -> bool:
    """Whether the driver has a function. The bindings define more functions than an old driver has."""
    bindings = require()
    if not hasattr(bindings, name):
        return False
    code, address, _ = bindings.cuGetProcAddress(name.encode(), 13000, 0)
    return int(code) == 0 and bool(address)


def max_isa(version: tuple[int, int]) -> tuple[int, int] | None:
    """The highest PTX ISA of a driver of a CUDA version; None if unknown."""
    major, minor = version
    if major == 12:
        return _ISA_OF_CUDA_12[minor] if minor < len(_ISA_OF_CUDA_12) else None
    return (9, minor) if major == 13 else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# --- the two calls of every launch ---------------------------------------------------------------

_POINTER = ctypes.c_void_p


def _address(name: str) -> int:
    bindings = require()
    # With this flag, stream 0 is the legacy default stream whatever the bindings' build options.
    legacy = bindings.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    code, address, _ = bindings.cuGetProcAddress(name.encode(), 12000, legacy)
    if int(code) or not address:
        raise DriverError(f"cuGetProcAddress({name})", int(code) or 500)
    return int(address)


@functools.cache
def launch_function() -> Callable[..., int]:
    """``cuLaunchKernelEx(*arguments)`` with the result of :func:`launch_arguments`; returns the error code.

    The call releases the GIL: a launch waits while the device's queue is full.
    """
    # No argument types: converting addresses at every call would add a third to the time of the ctypes call.
    return ctypes.CFUNCTYPE(ctypes.c_int)(_address("cuLaunchKernelEx"))


@functools.cache
def launch_addresses() -> tuple[int, int]:
    """Addresses of ``cuLaunchKernelEx`` and ``cuCtxGetCurrent``, for the native part."""
    return _address("cuLaunchKernelEx"), _address("cuCtxGetCurrent")


LaunchArguments = tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None]


def launch_arguments(config: int, kernel: int, pointers: int) -> LaunchArguments:
    """The arguments of a launch, from the addresses of its configuration and of the pointers to its parameters."""
    return _POINTER(config), _POINTER(kernel), _POINTER(pointers), None


@functools.cache
def _context_function() -> Callable[[Any], int]:
    return ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)(_address("cuCtxGetCurrent"))


def current_context() -> int:
    """The calling thread's current context; 0 if it has none."""
    found = _POINTER()
    code = _context_function()(ctypes.addressof(found))
    if code:
        raise DriverError("cuCtxGetCurrent", code)
    return found.value or 0
