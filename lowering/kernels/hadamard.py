# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rotation of blocks of a head by a Hadamard matrix over the square root of its order, in f32.

The rotation is its own inverse: sums and differences of elements at growing distances, then a factor. Where the
elements of a block lie decides how a step is taken: within vectors, between values of a thread, or between lanes.
"""

from __future__ import annotations

from typing import Any

import kvarn as kv


def factor(block: int) -> float:
    """The factor after the last step."""
    return block**-0.5


def within(x: Any, distance: int) -> Any:
    """A step between elements of a vector."""
    lanes = [x[i] for i in range(len(x))]
    return kv.from_lanes(between(lanes, distance), x.dtype)


def between(values: list[Any], distance: int) -> list[Any]:
    """A step between the values of a list, whose length is a multiple of twice the distance."""
    found = list(values)
    for i in range(len(values)):
        if not i & distance:
            low, high = values[i], values[i + distance]
            found[i], found[i + distance] = low + high, low - high
    return found


def across(values: list[Any], distance: int, lane: Any) -> list[Any]:
    """A step between lanes at a distance, for each value or vector; every lane of a warp must take it."""
    sign, found = kv.where((lane & distance) != 0, -1.0, 1.0), []
    for x in values:
        if isinstance(x, kv.Vector):
            parts = across([x[i] for i in range(len(x))], distance, lane)
            found.append(kv.from_lanes(parts, x.dtype))
        else:
            found.append(kv.math.fma(x, sign, kv.shuffle_xor(x, distance)))
    return found


def of_vectors(vectors: list[Any], block: int, lanes: int = 1, lane: Any = None, apart: int = 1) -> list[Any]:
    """Rotate the blocks of elements in vectors: a lane's first, those of ``lanes`` lanes ``apart``, then its next."""
    width, distance = len(vectors[0]), 1
    while distance < block:
        if distance < width:
            vectors = [within(x, distance) for x in vectors]
        elif distance < width * lanes:
            vectors = across(vectors, distance // width * apart, lane)
        else:
            vectors = between(vectors, distance // (width * lanes))
        distance *= 2
    return [x * factor(block) for x in vectors]
