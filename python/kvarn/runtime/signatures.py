# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Signatures: what the checks and the code of a call depend on, of each argument, by its class.

A signer gives its part of the key and appends the first of the argument's values: the fields of a handle, the number
of a scalar, the address of a buffer, whose other fields the signature determines. This runs at every launch: what is
asked of a torch tensor, and in which order of cost, is measured (``python bench/launch.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import CacheSpec

from . import buffers
from .binding import is_torch

Signer = Callable[[Any, list[Any]], Any]
signers: dict[type, Signer] = {}
_BATCH = [f.name for f in layout.cache_fields(CacheSpec(layout.PAGED, dtypes.f32, 1, 1, 1))].index("batch")
_REMEMBER = 4096  # specs
_specs: dict[int, tuple[Any, Any]] = {}  # by identity: the spec itself, and the first one that was equal to it
_equal_specs: dict[Any, Any] = {}


def find_signer(cls: type) -> Signer:
    """The signer of a class, which goes to ``signers``."""
    if cls is type(None):
        found: Signer = _sign_none
    elif cls in (int, float):
        found = _sign_number
    elif is_torch(cls):
        found = _sign_torch
    elif hasattr(cls, "fields") and callable(cls.fields):
        found = _sign_operand if hasattr(cls, "capacity") else _sign_handle
    else:
        found = _sign_other
    signers[cls] = found
    return found


def _sign_none(operand: None, values: list[Any]) -> Any:
    return None


def _sign_number(operand: Any, values: list[Any]) -> Any:
    values.append((operand,))
    return operand.__class__ if operand else repr(operand)  # zeros are equal and not the same


def _sign_handle(operand: Any, values: list[Any]) -> Any:
    fields = operand.fields()
    values.append(fields)
    spec = operand.spec
    found = _specs.get(id(spec)) or _remember_spec(spec)
    return id(found[1]), fields[_BATCH], operand.readonly, operand.device


def _sign_operand(operand: Any, values: list[Any]) -> Any:
    values.append(operand.fields())
    spec = operand.spec
    found = _specs.get(id(spec)) or _remember_spec(spec)
    return id(found[1]), operand.batch_size, operand.capacity, operand.device


def _remember_spec(spec: Any) -> tuple[Any, Any]:
    """Equal specs share an identity, which is cheaper to look up than their values. Those that are met are kept."""
    if len(_specs) >= _REMEMBER:
        _specs.clear()
    found = _specs[id(spec)] = (spec, _equal_specs.setdefault(spec, spec))
    return found


def _sign_torch(operand: Any, values: list[Any]) -> Any:
    try:
        address = operand.data_ptr()
        # The strides of a contiguous tensor follow from its shape, but for extents of one, whose strides nothing uses.
        # A tensor without an address may be of a device that is none.
        key = (
            operand.shape,
            operand.is_contiguous() or operand.stride(),
            operand.dtype,
            operand.get_device() if address else operand.device,
            address & 15,
            operand.is_neg(),
        )
    except RuntimeError:  # a tensor without a pointer: the reader says what is wrong with it
        return _sign_other(operand, values)
    values.append(address)
    return key


def _sign_other(operand: Any, values: list[Any]) -> Any:
    try:
        view = buffers.view(operand)
    except (TypeError, ValueError):
        return object()  # a signature of its own: learning it says which operand is wrong, and how
    values.append(view.data)
    return view.shape, view.strides, view.dtype.name, view.device, view.data & 15, view.readonly
