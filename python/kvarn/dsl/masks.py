# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention masks as functions of positions, ``kv.masks``: which keys a query sees.

A mask is called with ``(b, h, q, k, *arrays)``: sequence, query head, absolute query and key positions, and the arrays
passed with it. Masks, and plain functions with them, combine by ``&``, ``|`` and ``~``; each operand takes its own
arrays from the list, in order.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from . import math as kv_math
from .calls import func
from .values import where

__all__ = ["Mask", "causal", "chunked", "chunked_causal", "sliding_window", "tree"]

POSITIONS = ("b", "h", "q", "k")


class Mask:
    """A mask that combines with others: ``kv.masks.causal & document``, ``~kv.masks.Mask(hidden)``.

    Parameters
    ----------
    function : callable
        ``mask(b, h, q, k, *arrays) -> bool``, with one parameter per array.
    first : callable, optional
        ``first(q)``: no query at position q or later sees a key before it. Keys before it are not read, and their
        pages may belong to other sequences.
    end : callable, optional
        ``end(q)``: no query at position q or earlier sees this key or a later one.
    interval : bool
        Whether a query at position q sees every existing key in ``[first(q), end(q))``. Kernels then need not evaluate
        the mask per key.

    Attributes
    ----------
    arrays : int
        Number of arrays that the mask takes.
    outer : callable or None
        ``outer(b, h, q, k)``: a mask of positions alone that is true wherever this mask is: the operands of a
        conjunction that take no arrays.
    by_head : bool
        Whether the mask depends on the query head.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        first: Callable[[Any], Any] | None = None,
        arrays: int | None = None,
        by_head: bool | None = None,
        end: Callable[[Any], Any] | None = None,
        interval: bool = False,
        outer: Callable[..., Any] | None = None,
    ) -> None:
        self.function, self.first, self.end, self.interval = function, first, end, interval
        self.arrays = array_count(function, POSITIONS) if arrays is None else arrays
        self.by_head = looks_at_head(function) if by_head is None else by_head
        self.outer = outer if self.arrays else function
        self.depth = 0  # nesting depth of masks
        self.inverse: Mask | None = None  # the mask of which this is the negation

    def __call__(self, b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
        return self.function(b, h, q, k, *arrays)

    def __and__(self, other: Any) -> Mask:
        return _Joined("&", self, _mask(other))

    def __rand__(self, other: Any) -> Mask:
        return _Joined("&", _mask(other), self)

    def __or__(self, other: Any) -> Mask:
        return _Joined("|", self, _mask(other))

    def __ror__(self, other: Any) -> Mask:
        return _Joined("|", _mask(other), self)

    def __invert__(self) -> Mask:
        if self.inverse is not None:
            return self.inverse
        one = self.function

        @func
        def inverted(b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
            return ~one(b, h, q, k, *arrays)

        made = Mask(inverted, arrays=self.arrays, by_head=self.by_head)
        made.depth, made.inverse = _nested(self.depth + 1), self
        return made

    def __repr__(self) -> str:
        return f"<mask {getattr(self.function, '__name__', type(self.function).__name__)}>"


def array_count(function: Callable[..., Any], leading: tuple[str, ...]) -> int:
    """Number of arrays that follow the leading parameters of a function; TypeError for another signature."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"a function of positions must be made by def or lambda, got a {type(function).__name__}")
    code = function.__code__
    count = code.co_argcount - len(leading)
    if count < 0 or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        name = function.__name__
        raise TypeError(
            f"{name} must have parameters ({', '.join(leading)}) and then one parameter an array, "
            f"got {name}{inspect.signature(function)}"
        )
    return count


def looks_at_head(function: types.FunctionType) -> bool:
    """Whether a mask's code reads its parameter for the query head; False only if it never does."""
    code = function.__code__
    found = _heads_of.get(id(code))
    if found is None:
        head = code.co_varnames[POSITIONS.index("h")]
        read = any(
            head in (x if isinstance(x, tuple) else (x,)) for x in (i.argval for i in dis.get_instructions(code))
        )
        found = _heads_of[id(code)] = (code, read)
    return found[1]


_heads_of: dict[int, tuple[types.CodeType, bool]] = {}  # by identity, since hashing code objects is slow


def _mask(x: Any) -> Mask:
    return x if isinstance(x, Mask) else Mask(x)


MOST_NESTED = 40  # largest nesting depth of masks; each level is a nested function call during tracing


def _nested(depth: int) -> int:
    if depth > MOST_NESTED:
        raise ValueError(
            f"masks must not nest more than {MOST_NESTED} deep in &, | and ~: conjunctions and disjunctions of any "
            "length are one level; write the rest as one function"
        )
    return depth


class _Joined(Mask):
    """Any number of masks joined by ``&`` or ``|``. Its functions are built on demand, as a balanced tree."""

    def __init__(self, op: str, *masks: Mask) -> None:
        parts = [p for m in masks for p in (m.parts if isinstance(m, _Joined) and m.op == op else (m,))]
        self.op, self.parts = op, parts
        self.arrays, self.by_head = sum(p.arrays for p in parts), any(p.by_head for p in parts)
        self.interval = op == "&" and all(p.interval for p in parts)
        self.depth, self.inverse = _nested(1 + max(p.depth for p in parts)), None

    @functools.cached_property
    def function(self) -> Callable[..., Any]:  # type: ignore[override]
        return _halved([(p.function, p.arrays) for p in self.parts], _conjunction if self.op == "&" else _disjunction)[
            0
        ]

    @functools.cached_property
    def first(self) -> Callable[[Any], Any] | None:  # type: ignore[override]
        known = [p.first for p in self.parts if p.first is not None and self.op == "&"]
        return _halved(known, _folded(kv_math.max)) if known else None

    @functools.cached_property
    def end(self) -> Callable[[Any], Any] | None:  # type: ignore[override]
        known = [p.end for p in self.parts if p.end is not None and self.op == "&"]
        return _halved(known, _folded(kv_math.min)) if known else None

    @functools.cached_property
    def outer(self) -> Callable[..., Any] | None:  # type: ignore[override]
        if not self.arrays:
            return self.function
        known = [(p.outer, 0) for p in self.parts if p.outer is not None and self.op == "&"]
        return _halved(known, _conjunction)[0] if known else None


def _halved(items: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Join items pairwise as a balanced tree, so that few calls nest."""
    if len(items) == 1:
        return items[0]
    middle = (len(items) + 1) // 2
    return join(_halved(items[:middle], join), _halved(items[middle:], join))


_Part = tuple[Callable[..., Any], int]  # a function and its number of arrays


def _conjunction(a: _Part, b: _Part) -> _Part:
    (one, split), (other, rest) = a, b

    @func
    def both(b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
        return one(b, h, q, k, *arrays[:split]) & other(b, h, q, k, *arrays[split:])

    return both, split + rest


def _disjunction(a: _Part, b: _Part) -> _Part:
    (one, split), (other, rest) = a, b

    @func
    def either(b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
        return one(b, h, q, k, *arrays[:split]) | other(b, h, q, k, *arrays[split:])

    return either, split + rest


def _folded(fold: Any) -> Any:
    return lambda a, b: lambda q: fold(a(q), b(q))


# --- masks -----------------------------------------------------------------------------------------


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


causal = Mask(_causal, end=lambda q: q + 1, interval=True)
"""A query sees the keys up to its own position."""


def sliding_window(size: int) -> Mask:
    """A query sees itself and the ``size - 1`` keys before it."""
    size = _positive(size, "sliding_window")

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - size)

    return Mask(window, lambda q: q - (size - 1), end=lambda q: q + 1, interval=True)


def chunked(size: int) -> Mask:
    """A query sees the keys of its chunk of ``size`` positions."""
    size = _positive(size, "chunked")

    def chunk(b: Any, h: Any, q: Any, k: Any) -> Any:
        first = (q // size) * size
        return (k >= first) & (k < first + size)

    return Mask(chunk, lambda q: (q // size) * size, end=lambda q: (q // size) * size + size, interval=True)


def chunked_causal(size: int) -> Mask:
    """A query sees the keys of its chunk of ``size`` positions up to its own position."""
    size = _positive(size, "chunked_causal")

    def chunk(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k >= (q // size) * size)

    return Mask(chunk, lambda q: (q // size) * size, end=lambda q: q + 1, interval=True)


def named(name: str, span: int) -> Mask | None:
    """The mask of a dialect name with its window or chunk size; None if every key is seen."""
    made = {"sliding_window": sliding_window, "chunked": chunked, "chunked_causal": chunked_causal}
    return made[name](span) if name in made else causal if name == "causal" else None


_HELD_WORDS = 4  # rows of up to this many words stay in registers instead of being read again per key
_WORD = 32


@functools.cache
def tree(words: int, padded: bool = False) -> Mask:
    """A query sees all cached keys, and of the step's own tokens those whose bits are set: a tree of draft tokens.

    Its arrays are the bits, i32 [T, words], the step's row offsets and the cache lengths; with ``padded``, bits
    [B, S, words] and the cache lengths. Bit j % 32 of word j // 32 of a query's row says whether it sees new token j of
    its sequence. ``tree=`` of ``kv.ops.attention`` uses this mask.
    """
    words = _positive(words, "tree")

    def seen(k: Any, start: Any, row: Callable[[Any], Any]) -> Any:
        token = k - start
        if words <= _HELD_WORDS:
            word = row(0)
            for n in range(1, words):
                word = where(token >= _WORD * n, row(n), word)
        else:
            word = row(token >> 5)
        return (k < start) | (((word >> (token & (_WORD - 1))) & 1 != 0) & (token < _WORD * words))

    def rows(b: Any, h: Any, q: Any, k: Any, bits: Any, row_offsets: Any, cache_lengths: Any) -> Any:
        start = cache_lengths[b]
        return seen(k, start, lambda word: bits[row_offsets[b] + (q - start), word])

    def batch(b: Any, h: Any, q: Any, k: Any, bits: Any, cache_lengths: Any) -> Any:
        start = cache_lengths[b]
        return seen(k, start, lambda word: bits[b, q - start, word])

    return Mask(batch if padded else rows)


def _positive(size: Any, name: str) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__") or not 1 <= size.__index__() < 2**31:
        raise ValueError(f"kv.masks.{name} takes a positive number of positions, an int of 31 bits, got {size!r}")
    return size.__index__()
