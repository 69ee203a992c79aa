# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stream of a launch: the caller's, or the current one of the caller's framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

ACCEPTED = "None, an int, an object with __cuda_stream__, a torch.cuda.Stream or a cupy.cuda.Stream"
# Handles that name no stream object: the default stream, the legacy one and the per-thread one.
LAST_SPECIAL = 2


def handle_of(stream: Any) -> int:
    """The driver's handle of a caller's stream.

    Raises
    ------
    TypeError
        If the object is not a stream; the message lists what is accepted.
    """
    if stream.__class__ is int:
        if stream < 0:
            raise ValueError(f"a stream handle must not be negative, got {stream}")
        return stream
    protocol: Any = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # Early implementations have an attribute where the protocol now has a method.
        found: Any = protocol() if callable(protocol) else protocol
        version, handle = found
        if version != 0:
            raise TypeError(f"__cuda_stream__ must have version 0, got {version} of {type(stream).__qualname__}")
        return int(handle)
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        handle: Any = getattr(stream, attribute, None)
        if handle.__class__ is int:
            return handle
    raise TypeError(f"stream must be {ACCEPTED}, got {type(stream).__qualname__}: {stream!r}")


_torch_stream: Callable[[int], int] | None = None


def _find_torch_stream(torch: Any) -> Callable[[int], int] | None:
    """A function that returns torch's current stream of a device as a handle. None until torch initialises CUDA."""
    if not torch.cuda.is_initialized():
        return None
    # The public API builds a Stream object, at ten times the cost.
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def current_stream(args: Sequence[Any], ordinal: int) -> int:
    """The current stream of the arguments' framework.

    torch's if torch is loaded, unless an argument is a CuPy array; CuPy's if only CuPy is loaded; otherwise 0, the
    legacy default stream.
    """
    global _torch_stream
    if _torch_stream is not None and "cupy" not in sys.modules:
        return _torch_stream(ordinal)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        array = getattr(cupy, "ndarray", ())
        if "torch" not in sys.modules or any(isinstance(a, array) for a in args):
            return cupy.cuda.get_current_stream().ptr
    if _torch_stream is not None:
        return _torch_stream(ordinal)
    torch = sys.modules.get("torch")
    # torch has no cuda module yet while another thread imports it.
    if torch is not None and hasattr(torch, "cuda"):
        _torch_stream = _find_torch_stream(torch)
        if _torch_stream is not None:
            return _torch_stream(ordinal)
    return 0
