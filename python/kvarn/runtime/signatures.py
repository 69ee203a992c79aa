# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Signatures: what the checks and the code of a call depend on, of each argument, by its class.

A signer gives its part of the key and appends the first of the argument's values: the fields of a handle, the number
of a scalar, the address of a buffer, whose other fields the signature determines. This runs at every launch: what is
asked of a torch tensor, and in which order of cost, is measured (``python bench/launch.py``).

Calls whose arguments have the same classes share a function that asks all of them without a loop and without calls of
Python: its text is put together once, from the parts that the signers of these classes have (:data:`_TEXTS`). Nothing
of an argument is remembered from call to call: an object may be resized, or freed and its place taken by another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import CacheSpec

from . import buffers
from .binding import is_torch

Signer = Callable[[Any, list[Any]], Any]
signers: dict[type, Signer] = {}
_BATCH = [f.name for f in layout.cache_fields(CacheSpec(layout.PAGED, dtypes.f32, 1, 1, 1))].index("batch")
_REMEMBER = 4096  # specs
specs: dict[int, tuple[Any, Any]] = {}  # by identity: the spec itself, and the first one that was equal to it
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
        found = _sign_operand if hasattr(cls, "capacity") else sign_handle
    else:
        found = _sign_other
    signers[cls] = found
    return found


def _sign_none(operand: None, values: list[Any]) -> Any:
    return None


def _sign_number(operand: Any, values: list[Any]) -> Any:
    values.append((operand,))
    return operand.__class__ if operand else repr(operand)  # zeros are equal and not the same


def sign_handle(operand: Any, values: list[Any]) -> Any:
    fields = operand.fields()
    values.append(fields)
    spec = operand.spec
    found = specs.get(id(spec)) or _remember_spec(spec)
    return id(found[1]), fields[_BATCH], operand.readonly, operand.device


def _sign_operand(operand: Any, values: list[Any]) -> Any:
    values.append(operand.fields())
    spec = operand.spec
    found = specs.get(id(spec)) or _remember_spec(spec)
    return id(found[1]), operand.batch_size, operand.capacity, operand.device


def _remember_spec(spec: Any) -> tuple[Any, Any]:
    """Equal specs share an identity, which is cheaper to look up than their values. Those that are met are kept."""
    if len(specs) >= _REMEMBER:
        specs.clear()
    found = specs[id(spec)] = (spec, _equal_specs.setdefault(spec, spec))
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


# Of signers: statements, parts of the key and the value of argument n. What they say is what the signer does.
_TEXTS: dict[Signer, tuple[str, str, str]] = {
    _sign_none: ("", "", ""),
    _sign_number: ("", "True if o{n} else repr(o{n}),", "(o{n},),"),
    sign_handle: (
        "f{n} = o{n}.fields(); s{n} = o{n}.spec; e{n} = specs(id(s{n})) or remember(s{n})",
        f"id(e{{n}}[1]), f{{n}}[{_BATCH}], o{{n}}.readonly, o{{n}}.device,",
        "f{n},",
    ),
    _sign_torch: (
        "a{n} = o{n}.data_ptr()",
        "o{n}.shape, o{n}.is_contiguous() or o{n}.stride(), o{n}.dtype, "
        "o{n}.get_device() if a{n} else o{n}.device, a{n} & 15, o{n}.is_neg(),",
        "a{n},",
    ),
}
_ANY = ("v{n} = []; k{n} = sign{n}(o{n}, v{n})", "k{n},", "*v{n},")  # of any other signer, which is called

Signed = tuple[tuple[Any, ...], list[Any]]
_plans: dict[tuple[type, ...], Callable[[Sequence[Any], Any], Signed]] = {}
_numbers = itertools.count()  # of plans: keys of one are like those of no other


def signed(args: Sequence[Any], prefix: Any) -> Signed:
    """The signature of arguments behind ``prefix``, and the first value of each that is not None."""
    classes = tuple(map(type, args))
    plan = _plans.get(classes) or _make_plan(classes)
    try:
        return plan(args, prefix)
    except RuntimeError:  # a tensor without a pointer: the signer says what becomes of it
        values: list[Any] = []
        return (prefix, *[(signers.get(cls) or find_signer(cls))(o, values) for cls, o in zip(classes, args)]), values  # noqa: B905


def _make_plan(classes: tuple[type, ...]) -> Callable[[Sequence[Any], Any], Signed]:
    found = [signers.get(cls) or find_signer(cls) for cls in classes]
    texts = [[part.format(n=n) for part in _TEXTS.get(signer, _ANY)] for n, signer in enumerate(found)]
    names = "".join(f"o{n}, " for n in range(len(classes)))
    lines = [f"{names}= args" if names else "", *(text[0] for text in texts)]
    key, values = "".join(text[1] for text in texts), "".join(text[2] for text in texts)
    body = "".join(f"    {line}\n" for line in lines if line)
    source = f"def plan(args, prefix):\n{body}    return ({next(_numbers)}, prefix, {key}), [{values}]\n"
    scope: dict[str, Any] = {"specs": specs.get, "remember": _remember_spec}
    scope |= {f"sign{n}": signer for n, signer in enumerate(found)}
    exec(source, scope)
    if len(_plans) >= _REMEMBER:
        _plans.clear()
    plan = _plans[classes] = scope["plan"]
    return plan
