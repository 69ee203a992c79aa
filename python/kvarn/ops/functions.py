# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Score and mask functions passed to a call: their names in the IR, and their arrays.

Functions share a name, and compiled code, only if no captured value distinguishes them, by the rule of
``kvarn.dsl.captures``. The name is computed for every call, so an equal lambda finds its compiled code, and a changed
captured number is noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import replace
from typing import Any

from kvarn.compilation import extensions
from kvarn.dialect.ops.attention import ARRAY_ELEMENTS, ARRAYS
from kvarn.dsl import captures
from kvarn.dsl.functions import Registered, known, register
from kvarn.dsl.masks import POSITIONS, Mask, array_count, looks_at_head
from kvarn.runtime.buffers import BufferView, view

from . import checks

ELEMENTS = (*ARRAY_ELEMENTS, "u32")  # a u32 array is read as i32
LOCAL = "local"  # prefix of the name of a function without a digest

_REMEMBER = 1 << 14  # number of cached names
_names: dict[Any, str] = {}
_unshared = itertools.count()


def given(what: Any, role: str, title: str) -> tuple[str | None, tuple[Any, ...]]:
    """The name of a function or mask, and its arrays.

    Parameters
    ----------
    what : None, str, function, or a tuple of a function and its arrays
    role : {"score", "mask"}
    title : str
        Start of error messages.
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
        raise TypeError(f"{title}: {role} takes {found.arrays} arrays, got {len(arrays)}: pass ({role}, *arrays)")
    before = known(name)
    elements = () if before is None else before.elements
    if role == "score" and len(elements) != len(arrays):
        elements = tuple((v.dtype, len(v.shape)) for v in (view(a, name=f"{title}: an array of score") for a in arrays))
    register(name, replace(found, portable=f"@{LOCAL}" not in name, elements=elements))
    return name, tuple(arrays)


def joined(score: tuple[Any, ...], mask: tuple[Any, ...], title: str) -> tuple[Any, ...]:
    """The arrays of both functions, in the order of the op's operands."""
    if len(score) + len(mask) > len(ARRAYS):
        raise ValueError(
            f"{title}: score and mask must take at most {len(ARRAYS)} arrays together, got {len(score) + len(mask)}: "
            "put some into one"
        )
    return (*score, *mask)


def seen_and_scored(
    score: Any, mask: Any, window: Any, chunk: Any, title: str
) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...], tuple[Any, ...]]:
    """The mask attributes, the score attributes, and the arrays of functions."""
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
    """Check an array of a score or mask function; ``name`` starts the error message."""
    if view is None:
        return
    checks.has_dtype(view, ELEMENTS, name)
    if view.size == 0:
        raise ValueError(f"{name} must have at least one element, got shape {list(view.shape)}")


def _unwrapped(function: Any, role: str) -> Registered:
    """A function's registry entry: the function to trace and, for a mask, its bounds."""
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
    """The name of a function with its bounds; equal code and captured values give equal names."""
    functions = (what.function, what.first, what.end)
    found = [None if f is None else captures.captured(f, arrays=False) for f in functions]
    key = (*[None if c is None else c.number for c in found], what.interval)
    name = _names.get(key)
    if name is None:
        if len(_names) >= _REMEMBER:
            _names.clear()
        title = re.sub(r"\W", "", what.function.__name__) or "function"
        digest = _digest([c for c in found if c is not None], key) or f"{LOCAL}{next(_unshared)}"
        name = _names[key] = f"{title}@{digest}"
    return name


def digest_of(*functions: Any) -> str:
    """What identifies functions in names: equal code and captured values give equal digests.

    In all processes, or, after a warning, in this one.
    """
    found = [captures.captured(f, arrays=False) for f in functions]
    key = tuple(c.number for c in found)
    if key not in _names:
        _names[key] = _digest(found, (*key, False)) or f"{LOCAL}{next(_unshared)}"
    return _names[key]


def _digest(found: list[captures.Captured], key: Any) -> str | None:
    """A digest of functions, captured values and the sources of their modules, valid in all processes, or None."""
    for c in found:
        if c.unnamed:
            extensions.warn_undigestible(f"{c.unnamed}, which a function of positions reads, has no digest")
            return None
    present = [part is not None for part in key]
    modules = frozenset().union(*(c.modules for c in found))
    text = repr(([_plain(c.key) for c in found], present, key[-1], extensions.sources_digest_of(modules)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(key: Any) -> Any:
    """A key with digests in place of code objects, which prints the same in every process."""
    if isinstance(key, tuple):
        return tuple(_plain(k) for k in key)
    return extensions.code_digest(key.code) if isinstance(key, captures.Code) else key


__all__ = ["check", "digest_of", "given", "joined", "seen_and_scored"]
