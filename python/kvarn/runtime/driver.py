# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CUDA driver, through cuda-python: found, probed, and called with errors as exceptions.

Everything goes through ``cuda.bindings.driver`` but two calls on the path of every launch, whose addresses
are asked of the bindings once and which are then called through ctypes: there a call costs 0.2 µs, where
the bindings build a Python object for each struct.

Importing this module loads nothing. The driver library is looked for with a plain ``dlopen`` before the
bindings are touched: on a machine without one, their first failing call can make the next one hang.
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

from kvarn.forks import renewed

# cuLibrary* and cuLaunchKernelEx with library kernels came with CUDA 12.0.
OLDEST_DRIVER = (12, 0)
# PTX ISA that the driver of each CUDA release reads. From 13.0 on, minor versions have gone together.
_ISA_OF_CUDA_12 = ((8, 0), (8, 1), (8, 2), (8, 3), (8, 4), (8, 5), (8, 5), (8, 6), (8, 7), (8, 8))

_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "a process that was forked after CUDA started cannot use it: start it with 'spawn'",
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver library and kernel module differ: reboot, or reinstall the driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or use smaller buffers",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "registers times threads is more than the device has: use a smaller block",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel launched before touched memory that is not its own: run with KVARN_CHECK=1",
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
    """Whether kernels can run on a GPU here, and if not, why.

    Attributes
    ----------
    usable : bool
    reason : str
        What is missing and what to do; empty when usable.
    version : tuple of int or None
        CUDA version of the driver, such as ``(13, 0)``.
    devices : int
        Number of GPUs.
    bindings : str
        Version of cuda-bindings; empty when it is not installed.
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
_lock = renewed(threading.RLock())


def status() -> Status:
    """Probe for a driver and a device. The answer is kept once it is good; a bad one is asked again."""
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
    """The ``cuda.bindings.driver`` module, of a driver that works; RuntimeError with the reason otherwise."""
    found = status()
    if not found.usable:
        raise RuntimeError(f"no GPU can be used: {found.reason}")
    return _bindings()


def call(name: str, *args: Any) -> Any:
    """Call a driver function by name.

    Returns
    -------
    object
        What it gives: nothing, one value or a tuple.

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
    """Whether the driver has a function. The bindings know more names than an old driver does."""
    bindings = require()
    if not hasattr(bindings, name):
        return False
    code, address, _ = bindings.cuGetProcAddress(name.encode(), 13000, 0)
    return int(code) == 0 and bool(address)


def max_isa(version: tuple[int, int]) -> tuple[int, int] | None:
    """Highest PTX ISA that a driver of a CUDA version reads; None where that is not known."""
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
    # The flag makes stream 0 the legacy default stream whatever the bindings were built with.
    legacy = bindings.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    code, address, _ = bindings.cuGetProcAddress(name.encode(), 12000, legacy)
    if int(code) or not address:
        raise DriverError(f"cuGetProcAddress({name})", int(code) or 500)
    return int(address)


@functools.cache
def launch_function() -> Callable[..., int]:
    """``cuLaunchKernelEx(*arguments)``, with what :func:`launch_arguments` makes; returns the error code.

    The interpreter's lock is released during the call: a launch waits when the device's queue is full.
    """
    # Without argument types: converting addresses at every call takes a third of what ctypes adds to the driver's time.
    return ctypes.CFUNCTYPE(ctypes.c_int)(_address("cuLaunchKernelEx"))


@functools.cache
def launch_addresses() -> tuple[int, int]:
    """Where ``cuLaunchKernelEx`` and ``cuCtxGetCurrent`` are, for the native part."""
    return _address("cuLaunchKernelEx"), _address("cuCtxGetCurrent")


LaunchArguments = tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None]


def launch_arguments(config: int, kernel: int, pointers: int) -> LaunchArguments:
    """The arguments of a launch, of the addresses of its configuration and of the pointers to its parameters."""
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
