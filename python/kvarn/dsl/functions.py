# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Score and mask functions of attention: their registry, and the arrays that they read.

An op names a function by a string, ``name@digest``, and this module maps the string to the Python function. The digest
covers the function's code and everything it captures, so equal strings mean equal functions, in the compile cache too.
IR with such a name can be parsed, printed and verified in any process, but expanded only where the function was given.
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
    """A registered score or mask function.

    Attributes
    ----------
    function : callable
        The function that the front end traces.
    arrays : int
        Number of arrays that follow the positions in its parameters.
    first, end : callable or None
        For a mask: the first key that a query may see, and the end of the keys that it may see (exclusive).
    portable : bool
        Whether the name identifies the same function in other processes.
    by_head : bool
        For a mask: whether it depends on the query head.
    interval : bool
        For a mask: whether each query sees every key in ``[first, end)``.
    outer : callable or None
        For a mask: a function of positions alone, without arrays, that is true wherever the mask is true.
    elements : tuple of (DType, int)
        The dtype and number of dimensions of each array at the score's first use.
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
    """Register a function under its name."""
    if not is_function(name):
        raise ValueError(f"the name of a function must be NAME@DIGEST, got {name!r}")
    _registered[name] = what


def registered(name: str) -> Registered:
    """The function registered under a name.

    Raises
    ------
    ValueError
        If no function was registered under the name in this process.
    """
    if name not in _registered:
        raise ValueError(
            f"function {name!r} must have been given to an operation in this process, got a name only: the IR does not "
            "hold the function; call the operation with it, or load a file that does with --load-pass"
        )
    return _registered[name]


def known(name: str) -> Registered | None:
    """The function registered under a name; None if this process has none."""
    return _registered.get(name)


def is_interval(name: str) -> bool:
    """Whether the bounds of a mask determine it completely; False for names that are not registered here."""
    return name in _registered and _registered[name].interval


def are_portable(attributes: Iterable[Any]) -> bool:
    """Whether all functions named by the attributes are identified in other processes too."""
    return all(_registered[a].portable for a in attributes if isinstance(a, str) and a in _registered)


_reusing: list[ir.Block] = []


@contextmanager
def reusing_reads() -> Iterator[None]:
    """A context in which reads of an :class:`Array` at equal indices return the first read's value.

    It is meant for code before a loop that reads the same elements again. Reads inside branches and loops of that code
    are not reused, since they may not have run.
    """
    _reusing.append(ir.InsertionPoint.current.block)
    try:
        yield
    finally:
        _reusing.pop()


class Array:
    """An array argument of a score or mask function: ``a[i, j]`` with scalars and tiles that broadcast.

    Indices are clamped to the array as by ``numpy.clip``: the function is also evaluated at positions out of range,
    whose keys are masked afterwards.
    """

    __slots__ = ("_buffer", "_reads")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._reads: dict[tuple[Any, ...], Any] = {}  # elements read so far, by their indices

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
        if not all(isinstance(i, (int, v.Value)) for i in plain):  # passes analyse the indices of tiles
            return self._read(index)
        key = tuple(i.ir if isinstance(i, v.Value) else i for i in plain)
        if key in self._reads:
            return self._reads[key]
        found = self._read(index)
        if _reusing and ir.InsertionPoint.current.block == _reusing[-1]:
            self._reads[key] = found
        return found

    def _read(self, index: tuple[Any, ...]) -> Any:
        return self._buffer[tuple(self._inside(i, d) for d, i in enumerate(index))]

    def _inside(self, index: Any, dimension: int) -> Any:
        """An index clamped to the extent, in the index's own type: a cast could map another number into the array."""
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


__all__ = ["Array", "Registered", "are_portable", "is_interval", "known", "register", "registered", "reusing_reads"]
