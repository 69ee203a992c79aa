# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether operands of an operation share memory, by their addresses and strides: memory is not looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvarn.dialect import dtypes
from kvarn.dialect.layout import CacheSpec, cache_fields, joined

from .buffers import BufferView, strided_array

_BYTE = dtypes.by_name("u8")
_FAR = 1 << 48  # some address that any distance may be added to: NumPy compares addresses


class Extent(NamedTuple):
    """The memory of an operand from its first element on: extents of its dimensions, and their distances in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The first byte, which lies before the first element where a stride is negative, and the end."""
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + 1


def of_buffer(view: BufferView) -> Extent:
    """The memory of a buffer."""
    item = view.dtype.itemsize
    return Extent((*view.shape, item), (*(s * item for s in view.strides), 1))


def of_cache(spec: CacheSpec, fields: Sequence[int]) -> tuple[int, Extent]:
    """The address and the memory of a cache's elements."""
    at = dict(zip((f.name for f in cache_fields(spec)), fields, strict=True))
    item = spec.dtype.itemsize
    dims = ((at["capacity"], (spec.token_stride,)), (spec.num_heads, (spec.head_stride,)))
    run, rest = joined(spec.head_size, dims)
    return at["base"], Extent(
        (at["num_blocks"], *(n for n, _ in rest), run * item),
        (at["stride0"] * item, *(s * item for _, (s,) in rest), 1),
    )


def share(a: Extent, b: Extent, distance: int) -> bool:
    """Whether two operands have a byte in common; ``distance`` is from the first element of a to that of b."""
    if 0 in a.shape or 0 in b.shape:
        return False
    (a_first, a_end), (b_first, b_end) = a.ends, b.ends
    if distance + b_first >= a_end or a_first >= distance + b_end:
        return False
    first, other = (strided_array(x, *e, _BYTE, True, None) for e, x in ((a, _FAR), (b, _FAR + distance)))
    return bool(np.shares_memory(first, other))


def overlaps_itself(view: BufferView) -> bool:
    """Whether elements of a buffer may share memory: a stride is shorter than what lies between two of its steps."""
    span = 1
    for stride, extent in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True)):
        if extent > 1 and view.size:
            if stride < span:
                return True
            span += stride * (extent - 1)
    return False


Check = Callable[[Sequence[Sequence[Any]]], None]


class NoAlias(NamedTuple):
    """An operand that is written must not share memory with one that is read; it may be that very one if ``same``."""

    written: str
    read: str
    same: bool = False


def check_of(title: str, rule: NoAlias, places: tuple[int, int], operands: tuple[Any, Any]) -> Check:
    """A check of the field values of a call, for two operands: buffers, or a cache's handle and anything.

    Parameters
    ----------
    places : tuple of int
        Of the operands among the values.
    operands : tuple
        BufferViews, of which all but the address counts, or caches.
    """
    i, j = places
    extents = [of_buffer(o) if isinstance(o, BufferView) else None for o in operands]
    specs: list[Any] = [None if isinstance(o, BufferView) else o.spec for o in operands]
    known: dict[int, bool] = {}  # by distance, of buffers

    def wrong(distance: int, a: Extent, b: Extent) -> bool:
        return share(a, b, distance) and not (rule.same and distance == 0 and a == b)

    def check(values: Sequence[Sequence[Any]]) -> None:
        if extents[0] is not None and extents[1] is not None:
            distance = values[j][0] - values[i][0]
            found = known.get(distance)
            if found is None:
                if len(known) >= 1024:
                    known.clear()
                found = known[distance] = wrong(distance, extents[0], extents[1])
        else:
            (x, a), (y, b) = (
                (values[k][0], e) if e is not None else of_cache(s, values[k])
                for k, e, s in zip(places, extents, specs, strict=True)
            )
            found = wrong(y - x, a, b)
        if found:
            raise ValueError(
                f"{title}: {rule.written} must not share memory with {rule.read}, which is read while it is written"
                f"{f', unless it is {rule.read} itself' if rule.same else ''}: give it memory of its own"
            )

    return check
