# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of positions that attention is given: their names in the IR, and the arrays as they see them.

An op names a function by a string, ``name@digest``; the function itself is kept here. The digest stands for its code
and for all that it closes over, so that equal strings are equal functions, in the compile cache too. IR with such a
name can be parsed, printed and verified anywhere, and expanded where the function was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import DType, i32
from kvarn.dialect.ops.attention import is_function

from . import intervals, math as kv_math, values as v
from .memory import Buffer, Shape


@dataclass(frozen=True)
class Registered:
    """A function under its name.

    Attributes
    ----------
    function : callable
        As the front end traces it.
    arrays : int
        Arrays that it takes after the positions.
    first, end : callable or None
        Of a mask: the first key that a query may see, and the end of those.
    portable : bool
        Whether the name means the same in another process.
    by_head : bool
        Of a mask: whether it looks at the query head.
    interval : bool
        Of a mask: whether a query sees every key from the first that it may see up to the end of those.
    outer : callable or None
        Of a mask: one of positions alone, without arrays, that shows all that it shows.
    elements : tuple of (DType, int)
        Of each array that a score was first given with: its dtype and its number of dimensions.
    """

    function: Callable[..., Any]
    arrays: int
    first: Callable[[Any], Any] | None = None
    portable: bool = True
    by_head: bool = True
    end: Callable[[Any], Any] | None = None
    interval: bool = False
    elements: tuple[tuple[DType, int], ...] = ()
    outer: Callable[..., Any] | None = None


_registered: dict[str, Registered] = {}


def register(name: str, what: Registered) -> None:
    """Keep a function under its name."""
    if not is_function(name):
        raise ValueError(f"the name of a function must be NAME@DIGEST, got {name!r}")
    _registered[name] = what


def registered(name: str) -> Registered:
    """The function of a name.

    Raises
    ------
    ValueError
        If no function was registered under it in this process.
    """
    if name not in _registered:
        raise ValueError(
            f"function {name!r} must have been given to an operation in this process, got a name only: the IR does not "
            "hold the function; call the operation with it, or load a file that does with --load-pass"
        )
    return _registered[name]


def known(name: str) -> Registered | None:
    """The function of a name; None of one that this process was not given."""
    return _registered.get(name)


def is_interval(name: str) -> bool:
    """Whether the bounds of a mask's name tell all of it: of one that this process was not given they may not."""
    return name in _registered and _registered[name].interval


def are_portable(attributes: Iterable[Any]) -> bool:
    """Whether all functions that attributes name mean the same in another process."""
    return all(_registered[a].portable for a in attributes if isinstance(a, str) and a in _registered)


_holding: list[ir.Block] = []


@contextmanager
def held() -> Iterator[None]:
    """What is read of an :class:`Array` here is read once: the same indices give what was read, from here on.

    That is for what stands before a loop in which the same is read again. What is read inside of branches and loops of
    this code is not kept, since it may not have been read.
    """
    _holding.append(ir.InsertionPoint.current.block)
    try:
        yield
    finally:
        _holding.pop()


class Array:
    """An array that a function of positions reads: ``a[i, j]`` with scalars and tiles that broadcast.

    Indices are brought into the array, as ``numpy.clip`` would: a function is also asked about positions that there
    are not, whose keys are not seen.
    """

    __slots__ = ("_buffer", "_held")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._held: dict[tuple[Any, ...], Any] = {}  # what was read already, by its indices

    @property
    def dtype(self) -> Any:
        return self._buffer.dtype

    @property
    def ndim(self) -> int:
        return self._buffer.rank

    @property
    def shape(self) -> Shape:
        """Extents, as i32 values."""
        return self._buffer.shape

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise TypeError(f"an array of {self.ndim} dimensions needs {self.ndim} indices, got {len(index)}")
        plain = [v.plain(i) for i in index]
        if not all(isinstance(i, (int, v.Value)) for i in plain):  # tiles, which passes look into
            return self._read(index)
        key = tuple(i.ir if isinstance(i, v.Value) else i for i in plain)
        if key in self._held:
            return self._held[key]
        found = self._read(index)
        if _holding and ir.InsertionPoint.current.block == _holding[-1]:
            self._held[key] = found
        return found

    def _read(self, index: tuple[Any, ...]) -> Any:
        return self._buffer[tuple(self._inside(i, d) for d, i in enumerate(index))]

    def _inside(self, index: Any, dimension: int) -> Any:
        """An index held to the array: in its own type, since a cast would bring another number inside."""
        index = v.plain(index)
        if isinstance(index, bool) or not isinstance(index, (int, v.Numeric)):
            raise TypeError(f"an index of an array must be an integer, got {v.describe(index)}")
        if isinstance(index, int) and index < 0:
            raise IndexError(f"an index of an array must not be negative, got {index}")
        if isinstance(index, v.Numeric):
            if not index.dtype.is_integer:
                raise TypeError(f"an index of an array must be an integer, got {v.describe(index)}: write kv.i32(...)")
            if index.dtype.bits < 32:
                index = v.cast(index, i32)
        last = self.shape[dimension] - 1
        if isinstance(index, int):
            return kv_math.min(min(index, intervals.of_dtype(i32)[1]), last)
        inside = kv_math.min(index, v.cast(last, index.dtype))
        return v.cast(inside if index.nonneg else kv_math.max(inside, 0), i32)

    def __iter__(self) -> Any:
        raise TypeError("an array cannot be iterated: index it with positions")

    def __repr__(self) -> str:
        return f"<{self.dtype.name} array of {self.ndim} dimensions>"


__all__ = ["Array", "Registered", "are_portable", "held", "is_interval", "known", "register", "registered"]
