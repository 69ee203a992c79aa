# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Signatures: per argument class, the properties on which a call's checks and code depend.

The key function of an argument class returns the argument's part of the signature and appends its first value: the
fields of a handle, a scalar, or the address of a buffer, whose other fields follow from the signature. It runs at every
launch; the properties read from a torch tensor, and their order, are chosen by ``python bench/launch.py``.

Calls whose arguments have equal classes share a generated function that computes the signature without loops and Python
calls, assembled once from the texts of these classes (:data:`_TEXTS`). No argument is cached between calls: an object
may be resized, or freed and replaced by another at the same address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import CacheSpec

from . import buffers
from .binding import is_torch

KeyFunction = Callable[[Any, list[Any]], Any]
key_of: dict[type, KeyFunction] = {}
_BATCH = [f.name for f in layout.cache_fields(CacheSpec(layout.PAGED, dtypes.f32, 1, 1, 1))].index("batch")
_REMEMBER = 4096  # number of cached specs
specs: dict[int, tuple[Any, Any]] = {}  # by id: the spec, and the first spec that was equal to it
_equal_specs: dict[Any, Any] = {}


def find_key(cls: type) -> KeyFunction:
    """Find the key function of a class and add it to ``key_of``."""
    if cls is type(None):
        found: KeyFunction = _sign_none
    elif cls in (int, float):
        found = _sign_number
    elif is_torch(cls):
        found = _sign_torch
    elif hasattr(cls, "fields") and callable(cls.fields):
        found = _sign_operand if hasattr(cls, "capacity") else sign_handle
    else:
        found = _sign_other
    key_of[cls] = found
    return found


def _sign_none(operand: None, values: list[Any]) -> Any:
    return None


def _sign_number(operand: Any, values: list[Any]) -> Any:
    values.append((operand,))
    return operand.__class__ if operand else repr(operand)  # 0.0 and -0.0 are equal but differ


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
    """Equal specs share an identity, which is cheaper to look up than their values. Seen specs are kept alive."""
    if len(specs) >= _REMEMBER:
        specs.clear()
    found = specs[id(spec)] = (spec, _equal_specs.setdefault(spec, spec))
    return found


def _sign_torch(operand: Any, values: list[Any]) -> Any:
    try:
        address = operand.data_ptr()
        # Strides of a contiguous tensor follow from its shape, except for extents of 1, whose strides are not used.
        # A tensor without an address may be on an invalid device.
        key = (
            operand.shape,
            operand.is_contiguous() or operand.stride(),
            operand.dtype,
            operand.get_device() if address else operand.device,
            address & 15,
            operand.is_neg(),
        )
    except RuntimeError:  # a tensor without a pointer, for which the reader raises a specific error
        return _sign_other(operand, values)
    values.append(address)
    return key


def _sign_other(operand: Any, values: list[Any]) -> Any:
    try:
        view = buffers.view(operand)
    except (TypeError, ValueError):
        return object()  # a unique signature: checking it raises an error that names the operand
    values.append(view.data)
    return view.shape, view.strides, view.dtype.name, view.device, view.data & 15, view.readonly


# For key functions: statements, parts of the key and the value of argument n, as the function computes them.
_TEXTS: dict[KeyFunction, tuple[str, str, str]] = {
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
_ANY = ("v{n} = []; k{n} = sign{n}(o{n}, v{n})", "k{n},", "*v{n},")  # calls any other key function

Signed = tuple[tuple[Any, ...], list[Any]]
_plans: dict[tuple[type, ...], Callable[[Sequence[Any], Any], Signed]] = {}
_numbers = itertools.count()  # numbers of the generated functions, which keep their keys distinct


def signed(args: Sequence[Any], prefix: Any) -> Signed:
    """The signature of arguments, prefixed by ``prefix``, and the first value of each argument that is not None."""
    classes = tuple(map(type, args))
    plan = _plans.get(classes) or _make_plan(classes)
    try:
        return plan(args, prefix)
    except RuntimeError:  # a tensor without a pointer, handled by its key function
        values: list[Any] = []
        return (prefix, *[(key_of.get(cls) or find_key(cls))(o, values) for cls, o in zip(classes, args)]), values  # noqa: B905


def _make_plan(classes: tuple[type, ...]) -> Callable[[Sequence[Any], Any], Signed]:
    found = [key_of.get(cls) or find_key(cls) for cls in classes]
    texts = [[part.format(n=n) for part in _TEXTS.get(key_function, _ANY)] for n, key_function in enumerate(found)]
    names = "".join(f"o{n}, " for n in range(len(classes)))
    lines = [f"{names}= args" if names else "", *(text[0] for text in texts)]
    key, values = "".join(text[1] for text in texts), "".join(text[2] for text in texts)
    body = "".join(f"    {line}\n" for line in lines if line)
    source = f"def plan(args, prefix):\n{body}    return ({next(_numbers)}, prefix, {key}), [{values}]\n"
    scope: dict[str, Any] = {"specs": specs.get, "remember": _remember_spec}
    scope |= {f"sign{n}": key_function for n, key_function in enumerate(found)}
    exec(source, scope)
    if len(_plans) >= _REMEMBER:
        _plans.clear()
    plan = _plans[classes] = scope["plan"]
    return plan
