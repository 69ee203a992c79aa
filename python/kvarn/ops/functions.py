# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of positions that a call gives: what they are called in the IR, and the arrays beside them.

Two functions share a name, and compiled code, only where nothing could tell them apart: their code, what they close
over, defaults, and the numbers and functions that they read of their module. A name is found for every call, so that a
lambda written in the call is known again, and a number that has changed is not missed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvarn.compilation import extensions
from kvarn.dialect.ops.attention import ARRAY_ELEMENTS, ARRAYS
from kvarn.dsl.calls import NATIVE_PACKAGES
from kvarn.dsl.functions import Registered, known, register
from kvarn.dsl.identity import identity
from kvarn.dsl.masks import POSITIONS, Mask, array_count, looks_at_head
from kvarn.runtime.buffers import BufferView, view

from . import checks

ELEMENTS = (*ARRAY_ELEMENTS, "u32")  # the bits of an i32 are read
LOCAL = "local"  # begins what stands for the digest of a function that has none

_names: dict[Any, str] = {}
_unshared = itertools.count()
_globals_of: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


def given(what: Any, role: str, title: str) -> tuple[str | None, tuple[Any, ...]]:
    """The name of a function, or of a mask, and its arrays.

    Parameters
    ----------
    what : None, str, function, or a tuple of a function and its arrays
    role : {"score", "mask"}
    title : str
        What begins a message.
    """
    function, *arrays = what if isinstance(what, tuple) and what else (what,)
    if function is None or isinstance(function, str):
        if arrays:
            raise TypeError(f"{title}: arrays go with a {role} that is a function, got {function!r} with {len(arrays)}")
        return function, ()
    if not callable(function):
        raise TypeError(
            f"{title}: {role} must be a {'name or a ' * (role == 'mask')}function, or a tuple of one and its arrays, "
            f"got {type(function).__name__}"
        )
    try:
        found = _unwrapped(function, role)
        name = _name(found)
    except TypeError as error:
        raise TypeError(f"{title}: {role}: {error}") from None
    if found.arrays != len(arrays):
        raise TypeError(f"{title}: {role} takes {found.arrays} arrays, which must stand beside it, got {len(arrays)}")
    before = known(name)
    elements = () if before is None else before.elements
    if role == "score" and len(elements) != len(arrays):
        elements = tuple((v.dtype, len(v.shape)) for v in (view(a, name=f"{title}: an array of score") for a in arrays))
    register(name, replace(found, portable=f"@{LOCAL}" not in name, elements=elements))
    return name, tuple(arrays)


def joined(score: tuple[Any, ...], mask: tuple[Any, ...], title: str) -> tuple[Any, ...]:
    """The arrays of both functions, as the op has them."""
    if len(score) + len(mask) > len(ARRAYS):
        raise ValueError(
            f"{title}: score and mask must take at most {len(ARRAYS)} arrays together, got {len(score) + len(mask)}: "
            "put some into one"
        )
    return (*score, *mask)


def seen_and_scored(
    score: Any, mask: Any, window: Any, chunk: Any, title: str
) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...], tuple[Any, ...]]:
    """The attributes of a mask, those of a score, and the arrays of both where they are functions."""
    if score.__class__ is str:
        raise TypeError(f"{title}: score must be a function, or a tuple of one and its arrays, got {score!r}")
    of_score, read_by_score = given(score, "score", title)
    of_mask, read_by_mask = given(mask, "mask", title)
    if of_mask is mask:
        seen = checks.masked(mask, window, chunk, title)
    elif window is not None or chunk is not None:
        raise ValueError(f"{title}: window and chunk must be None for a mask that is a function: it has the number")
    else:
        seen = (("mask", of_mask), ("span", 0))
    scored = () if of_score is None else (("score", of_score),)
    return seen, scored, joined(read_by_score, read_by_mask, title)


def check(view: BufferView | None, name: str) -> None:
    """What an array must be; ``name`` begins the message."""
    if view is None:
        return
    checks.has_dtype(view, ELEMENTS, name)
    if view.size == 0:
        raise ValueError(f"{name} must have at least one element, got shape {list(view.shape)}")


def _unwrapped(function: Any, role: str) -> Registered:
    """What is kept of a function: that to trace, and what its mask says of it."""
    if isinstance(function, Mask):
        if role != "mask":
            raise TypeError(f"{function!r} is a mask, which goes to mask=")
        mask = function
        return Registered(
            mask.function, mask.arrays, mask.first, True, mask.by_head, mask.end, mask.interval, outer=mask.outer
        )
    if role != "mask":
        return Registered(function, array_count(function, ("score", *POSITIONS)))
    return Registered(function, array_count(function, POSITIONS), by_head=looks_at_head(function))


# --- names -----------------------------------------------------------------------------------------


def _name(what: Registered) -> str:
    """The name of a function and its bounds: the same for the same code and values, and for no other."""
    met: list[types.FunctionType] = []
    bounds = [None if f is None else _identity(f, met) for f in (what.first, what.end)]
    key = (_identity(what.function, met), *bounds, what.interval)
    found = _names.get(key)
    if found is None:
        digests = [_digest(f) for f in met]
        number = {f.__code__: i for i, f in enumerate(met)}
        text = repr((_plain(key, number), digests))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if None in digests:
            digest = f"{LOCAL}{next(_unshared)}"
        title = re.sub(r"\W", "", what.function.__name__) or "function"
        found = _names[key] = f"{title}@{digest}"
    return found


def _identity(function: types.FunctionType, met: list[types.FunctionType]) -> Any:
    """A hashable key of a function and of all that it closes over or reads; ``met`` gets the functions, in order."""
    code = function.__code__
    if any(f.__code__ is code and f.__closure__ == function.__closure__ for f in met):
        return code  # one that calls itself
    met.append(function)
    closure = function.__closure__ or ()
    cells = [_value(name, _content(cell), met) for name, cell in zip(code.co_freevars, closure, strict=True)]
    defaults = [_value("a default", v, met) for v in (function.__defaults__ or ())]
    return code, tuple(cells), tuple(defaults), tuple(_read(function, met))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise TypeError("it closes over a variable that has no value yet") from None


def _value(name: str, value: Any, met: list[types.FunctionType]) -> Any:
    """The part of a key that stands for a value."""
    if isinstance(value, Mask):
        value = value.function
    if isinstance(value, types.FunctionType):
        return _identity(value, met)
    if getattr(value, "shape", ()) != ():
        raise TypeError(
            f"{name!r} is an array, which must be a parameter and stand beside the function: (function, array)"
        )
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
        return f"{getattr(value, '__module__', '')}.{value.__name__}"
    try:
        return identity(value)
    except TypeError:
        raise TypeError(
            f"{name!r} must be a number, a string, a function or a tuple of them, got a {type(value).__name__}"
        ) from None


def _read(function: types.FunctionType, met: list[types.FunctionType]) -> Iterator[Any]:
    """Numbers and functions that a function of a user reads of its module."""
    if _ours(function):
        return
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, (bool, int, float, str, tuple, Mask)) or (
            isinstance(value, types.FunctionType) and not _ours(value)
        ):
            yield name, _value(name, value, met)


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may read of its module; remembered by identity, since hashing code is slow."""
    found = _globals_of.get(id(code))
    if found is None:
        found = _globals_of[id(code)] = (code, tuple(sorted(extensions.names_of(code))))
    return found[1]


def _ours(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in NATIVE_PACKAGES


def _digest(function: types.FunctionType) -> str | None:
    """What stands for a function's code in every process; None where nothing does."""
    if not extensions.is_outside(function):
        return f"{function.__module__}.{function.__qualname__}"  # the cache's key has kvarn's sources
    return extensions.digest_of([(function.__qualname__, function)])


def _plain(key: Any, number: dict[Any, int]) -> Any:
    """A key with functions' numbers for their code, which prints the same in every process."""
    if isinstance(key, tuple):
        return tuple(_plain(k, number) for k in key)
    return number.get(key, key) if isinstance(key, types.CodeType) else key


__all__ = ["check", "given", "joined", "seen_and_scored"]
