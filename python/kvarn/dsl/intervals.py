# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Interval analysis of integers while a kernel is traced.

Integers wrap around, so bounds of a sum or product are known only if every possible result fits in its type; otherwise
the result may be any number of the type. Unsigned divisions, shifts and array reads without a lower bound rely on a
number being non-negative, and only these bounds may say so.

Library code counts existing rows, tokens and tiles, and such counts fit their types: inside :func:`counting`, sums and
products of non-negative numbers are taken to be non-negative, and divisors to be nonzero. User functions are evaluated
outside of it (:class:`wrapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvarn.dialect.dtypes import DType

from .builder import state

Interval = tuple[int, int]  # (least, largest), both inclusive

ANY = "kv.any"  # attribute of a product in a user's function, which may be any number of its type

BLOCKS = 2**31 - 1  # largest grid in x; grids in y and z are below 2^24
OTHER_BLOCKS = 2**24
THREADS = 2**24  # bound on the threads of a block; emulated blocks may be larger than a device's
SMALL = 2**23
POSITIONS = (0, 2**31 - 2 * SMALL)
"""Positions of queries and keys, lengths, and counts of tokens: a cache has at most 2**30 tokens per sequence, and
kernels evaluate rows and tiles only shortly beyond that. The remaining range is for sums with small numbers.
"""


class wrapping:
    """A context in which integers wrap around, for the evaluation of user functions."""

    kernel_scope = True  # kernels may enter this context manager

    def __enter__(self) -> None:
        self._before = state.counting, state.asking
        state.counting, state.asking = False, True

    def __exit__(self, *_: object) -> None:
        state.counting, state.asking = self._before


@contextmanager
def counting(function: Callable[..., object]) -> Iterator[None]:
    """A context for tracing or running library code, whose counts fit their types, or a user's function."""
    before = state.counting, state.asking
    state.asking, state.counting = False, (getattr(function, "__module__", None) or "").startswith("kvarn.lowering.")
    try:
        yield
    finally:
        state.counting, state.asking = before


def of_dtype(dtype: DType) -> Interval:
    """All numbers of an integer type; (0, 0), which is unused, for other types."""
    if dtype.kind == "i":
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, ((1 << dtype.bits) - 1 if dtype.kind in "ub" else 0)


def wrapped(least: int, largest: int, dtype: DType, counts: bool = False) -> Interval:
    """The interval of a wrapping operation with bounds ``least``, ``largest``; ``counts``: it cannot overflow."""
    low, high = of_dtype(dtype)
    if low <= least and largest <= high:
        return least, largest
    return (least, high) if counts and state.counting and 0 <= least <= high else (low, high)


def either(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def after(op: str, a: Interval, b: Interval, dtype: DType) -> Interval:
    """The interval of ``a op b``, for Python operators and ``"max"``, ``"min"``."""
    found = _after(op, a, b, dtype)
    if state.counting and found[0] >= 0 and not _counted(op, a[0] >= 0, b[0] >= 0):
        return of_dtype(dtype)
    return found


def _counted(op: str, a: bool, b: bool) -> bool:
    """Whether library code takes a result to be non-negative, given whether its operands are.

    Operations with tighter known bounds, such as a maximum, are not listed here.
    """
    if op == "&":
        return a or b
    return b if op == "%" else a if op == ">>" else a and b and op not in ("-", "<<")


def _after(op: str, a: Interval, b: Interval, dtype: DType) -> Interval:
    if op in ("+", "-"):
        moved = b if op == "+" else (-b[1], -b[0])
        return wrapped(a[0] + moved[0], a[1] + moved[1], dtype, op == "+")
    if op == "*":
        corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
        return wrapped(min(corners), max(corners), dtype, True)
    if op == "max":
        return max(a[0], b[0]), max(a[1], b[1])
    if op == "min":
        return min(a[0], b[0]), min(a[1], b[1])
    if op == "//":
        return _quotient(a, b, dtype)
    if op == "%":
        rest = min(b[0] + 1, 0), max(b[1] - 1, 0)
        return (0, min(a[1], rest[1])) if a[0] >= 0 and b[0] >= 0 else rest
    if op in ("&", "|", "^"):
        return _bitwise(op, a, b, dtype)
    if op in ("<<", ">>"):
        return _shifted(op, a, b, dtype)
    return of_dtype(dtype)


def ends(start: Interval, stop: Interval, step: Interval, dtype: DType) -> bool:
    """Whether the variable of a loop that goes up is behind the last number before it passes the end of its type."""
    if state.counting:
        return True
    return step[0] > 0 and (step[1] == 1 or max(start[0], stop[1] - 1) + step[1] <= of_dtype(dtype)[1])


def of_loop(start: Interval, stop: Interval, step: Interval, dtype: DType) -> Interval:
    """The interval of a loop variable: the loop ends before the step after the last one would wrap around."""
    found = start[0], max(start[0], stop[1] - 1)
    return found if step[0] >= 0 and ends(start, stop, step, dtype) else of_dtype(dtype)


def _quotient(a: Interval, b: Interval, dtype: DType) -> Interval:
    divisors = [d for d in (*b, -1, 1) if d and b[0] <= d <= b[1]]
    found = [x // d for x in a for d in divisors]
    if b[0] <= 0 <= b[1]:  # division by zero gives zero
        found.append(0)
    return wrapped(min(found), max(found), dtype)


def _bitwise(op: str, a: Interval, b: Interval, dtype: DType) -> Interval:
    if op == "&" and (a[0] >= 0 or b[0] >= 0):  # one non-negative operand suffices
        return 0, min(x[1] for x in (a, b) if x[0] >= 0)
    if a[0] < 0 or b[0] < 0:
        return of_dtype(dtype)
    return 0, (1 << max(a[1], b[1]).bit_length()) - 1


def _shifted(op: str, a: Interval, count: Interval, dtype: DType) -> Interval:
    if op == ">>":
        fewest = count[0] if 0 <= count[0] < dtype.bits and count[1] < dtype.bits else 0
        return min(a[0] >> fewest, 0) if a[0] < 0 else 0, max(a[1] >> fewest, 0)
    if not 0 <= count[0] <= count[1] < dtype.bits:
        return of_dtype(dtype)
    return wrapped(min(a[0] << c for c in count), max(a[1] << c for c in count), dtype)
