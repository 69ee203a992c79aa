# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native launch cache (``launches.cpp``): replays a call whose signature is known, with one C call.

The native part is optional. Without it, for unsupported classes of operands, and at the first call with a signature,
Python checks and binds the operands and packs the launches, which are then cached here. Calls with equal signatures may
differ in buffer addresses only. Supported operands are torch tensors on a GPU, read by DLPack's exchange table, caches
and collections, ints, floats and None.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from . import driver, signatures, streams
from .binding import is_torch
from .overlap import Meeting
from .packing import Bound

# The values of launches.cpp.
_OTHER, _TENSOR, _HANDLE = 0, 1, 2
_TENSORS = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
MAX_BYTES, MAX_PARAMETERS, MAX_OPERANDS = 4608, 512, 64

MODULE = "kvarn.runtime._launches"
try:
    _native: Any = importlib.import_module(MODULE)
except ImportError:
    _native = None


def available() -> bool:
    """Whether the native part is available."""
    return _native is not None


def table() -> Any:
    """A new launch cache, or None without the native part. Needs a driver."""
    if _native is None:
        return None
    return _native.Launches(*driver.launch_addresses(), _kind_of, signatures.specs)


def _kind_of(cls: type) -> int:
    """The way in which the native part reads operands of a class."""
    key_function = signatures.key_of.get(cls) or signatures.find_key(cls)
    if key_function is signatures.sign_handle:
        return _HANDLE
    # Exactly torch's Tensor (and its parameter class): other subclasses may wrap another tensor.
    return _TENSOR if (cls.__module__, cls.__qualname__) in _TENSORS and is_torch(cls) else _OTHER


def remember(
    calls: Any,
    key: bytes,
    attributes: Any,
    schedule: Any,
    bounds: Iterable[Bound],
    places: Sequence[int | None],
    context: int = 0,
    lock: Any = None,
    meetings: Iterable[Meeting] = (),
) -> None:
    """Cache the launches of a call under the key that ``calls.launch`` returned.

    Parameters
    ----------
    calls : Launches
        From :func:`table`.
    key : bytes
    attributes, schedule : object
        Further parts of the signature, as passed to ``calls.launch``.
    bounds : iterable of Bound
        The launches. Launches that do more than call the driver's function are not cached.
    places : sequence of int or None
        See :func:`places_of`.
    context : int
        The context that must be current for a launch, or 0. See :func:`context_of`.
    lock : Lock, optional
        Held during a call with several launches.
    meetings : iterable of Meeting
        Address ranges that need the full overlap check, with operand numbers as in ``places``.
    """
    apart = [(places[w], -1 if r is None else places[r], low, high) for w, r, low, high in meetings]
    if apart and (any(None in one for one in apart) or not hasattr(_native, "MEETINGS")):
        return
    steps, plain = [], driver.launch_function()
    for bound in bounds:
        packet, memory = bound.memory, bytes(bound.memory.memory)
        parameters = tuple(p - packet.address for p in packet.pointers if p is not None)
        if bound.launch is not plain or len(memory) > MAX_BYTES or len(parameters) > MAX_PARAMETERS:
            return
        words, given = tuple(8 * word for word, _ in bound.moves), tuple(places[i] for _, i in bound.moves)
        if any(i is None or i >= MAX_OPERANDS for i in given):
            return
        kernel: ctypes.c_void_p = bound.arguments[1]
        steps.append((kernel.value, memory, parameters, words, given, bound.after_failure))
    calls.remember(
        key, attributes, schedule, context, lock if len(steps) > 1 else None, steps, *([apart] if apart else ())
    )


def places_of(
    names: Sequence[str], operands: Sequence[Any], names_given: Sequence[str], given: Sequence[Any]
) -> list[int | None]:
    """For each present operand, its index among the present arguments; None if it is not an argument."""
    places: dict[str, int] = {}
    for name, argument in zip(names_given, given):  # noqa: B905 (trailing ones may be omitted)
        if argument is not None:
            places[name] = len(places)
    arguments = dict(zip(names_given, given))  # noqa: B905
    return [
        places[name] if arguments.get(name) is operand else None
        for name, operand in zip(names, operands)  # noqa: B905
        if operand is not None
    ]


def context_of(device: Any, stream: int) -> int:
    """The context that must be current for a launch on a stream of a device; 0 if the stream determines the device."""
    return 0 if stream > streams.LAST_SPECIAL or device.alone else device.primary


__all__ = ["available", "context_of", "places_of", "remember", "table"]
