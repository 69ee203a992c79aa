# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rotary embedding of one head, in f32.

The rotation is divided into units, which can be computed in place and in any order: a *rotated* unit has the real and
imaginary parts of ``lanes`` pairs, a *plain* unit as many elements outside of the rotated dims (half as many if their
number is odd). Interleaved pairs (2k, 2k+1) of the last R dims are adjacent, split pairs (k, k + R/2) of the first R
dims are not. It can also be divided into chunks of consecutive dims, which read the other parts of their pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import lowbit

from ..common import Rows

# Maps (dim, n) to n f32 elements from dim up.
Read = Callable[[Any, int], Any]
Write = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of a token, from ``freqs`` [positions, R]: pairs (cos, sin).

    ``positions`` has one position, clamped to the table, or one per section; ``sections`` counts the pairs of each.
    """

    freqs: Any
    rows: Rows
    positions: tuple[Any, ...]
    sections: tuple[int, ...] = ()

    @kv.func
    def of(self, pair: Any, n: int) -> tuple[Any, Any]:
        """The cosines and sines of n pairs from ``pair`` up, all in one section."""
        position, end = self.positions[0], 0
        for s in kv.static(range(1, len(self.positions))):
            end += self.sections[s - 1]
            position = kv.where(pair >= end, self.positions[s], position)
        row = kv.math.min(kv.math.max(position, 0), self.freqs.shape[0] - 1)
        found = self.rows.load(self.freqs, row, pair * 2, width=2 * n)
        return even(found), odd(found)


@dataclass(frozen=True)
class Rotation:
    """How the elements of a head are rotated.

    Attributes
    ----------
    size : int
        Elements per head.
    rotated : int
        R, rotated dims.
    interleaved : bool
    lanes : int
        Elements in a vector of real or imaginary parts: half of a unit.
    """

    size: int
    rotated: int
    interleaved: bool
    lanes: int

    @staticmethod
    def of(size: int, rotated: int, interleaved: bool, most: int) -> Rotation:
        """The rotation with the widest units, for accesses of at most ``most`` elements; or a rotation of 0 dims."""
        if interleaved:  # one access has both parts, and twice the lanes
            lanes = max(1, min(lowbit(math.gcd(size, rotated)), most) // 2)
        else:
            lanes = min(lowbit(math.gcd(size, rotated // 2)), most)
            if (size - rotated) % 2 == 0:
                lanes = min(lanes, lowbit(math.gcd((size - rotated) // 2, rotated // 2)))
        return Rotation(size, rotated, interleaved, lanes)

    @property
    def first(self) -> int:
        """The first rotated dim."""
        return self.size - self.rotated if self.interleaved else 0

    @property
    def rotated_units(self) -> int:
        """Rotated units per head."""
        return self.rotated // 2 // self.lanes

    @property
    def paired(self) -> bool:
        """Whether plain units are as long as rotated ones: possible for every head of even size."""
        return (self.size - self.rotated) % (2 * self.lanes) == 0

    @property
    def units(self) -> int:
        """Units per head; the rotated ones come first."""
        return self.rotated_units + (self.size - self.rotated) // (self.lanes * (2 if self.paired else 1))

    @kv.func
    def unit(self, number: Any, angles: Angles, read: Read, write: Write) -> None:
        """Process one unit."""
        if self.paired:
            self.put(number, self.rotate(number, self.angles_of(number, angles), self.fetch(number, read)), write)
        elif self.rotated_units == 0:
            write(number, read(number, 1))
        elif number < self.rotated_units:
            self._rotate_odd(number, angles, read, write)
        else:
            d = number - self.rotated_units + (0 if self.interleaved else self.rotated)
            write(d, read(d, 1))

    @kv.func
    def fetch(self, number: Any, read: Read) -> list[Any]:
        """The vectors of a unit of a paired rotation: one with its pairs, or one of real and one of imaginary parts."""
        return [read(d, self.width) for d in self.starts(number)]

    @kv.func
    def put(self, number: Any, vectors: list[Any], write: Write) -> None:
        """Write the vectors of :func:`fetch`."""
        for d, x in kv.static(list(zip(self.starts(number), vectors, strict=True))):
            write(d, x)

    @property
    def width(self) -> int:
        """Elements per vector of a unit."""
        return 2 * self.lanes if self.interleaved else self.lanes

    @kv.func
    def starts(self, number: Any) -> list[Any]:
        """The dims at which the vectors of a unit start."""
        n, whole = self.lanes, self.rotated_units == self.units
        if self.interleaved:
            d = number * (2 * n)
            if not whole:
                d = kv.where(number < self.rotated_units, d + self.first, d - self.rotated_units * (2 * n))
            return [d]
        d, far = number * n, self.rotated // 2
        if not whole:
            rotates = number < self.rotated_units
            d, far = kv.where(rotates, d, number * (2 * n)), kv.where(rotates, far, n)
        return [d, d + far]

    @kv.func
    def angles_of(self, number: Any, angles: Angles) -> tuple[Any, Any] | None:
        """(cosines, sines) of a unit; for a plain unit, those of another."""
        if self.rotated_units == 0:
            return None
        rotated_number = number if self.rotated_units == self.units else kv.math.min(number, self.rotated_units - 1)
        return angles.of(rotated_number * self.lanes, self.lanes)

    @kv.func
    def rotate(self, number: Any, angle: tuple[Any, Any] | None, vectors: list[Any]) -> list[Any]:
        """The f32 vectors of a unit, rotated if it is a rotated one."""
        if angle is None:
            return vectors
        cos, sin = angle
        re, im = (even(vectors[0]), odd(vectors[0])) if self.interleaved else vectors
        rotated = [re * cos - im * sin, re * sin + im * cos]
        if self.interleaved:
            rotated = [alternate(*rotated)]
        if self.rotated_units < self.units:
            rotated = [kv.where(number < self.rotated_units, x, y) for x, y in zip(rotated, vectors, strict=True)]
        return rotated

    @kv.func
    def _rotate_odd(self, number: Any, angles: Angles, read: Read, write: Write) -> None:
        """Process one pair of a head of odd size."""
        cos, sin = angles.of(number, 1)
        d = self.first + number * 2 if self.interleaved else number
        e = d + (1 if self.interleaved else self.rotated // 2)
        re, im = read(d, 1), read(e, 1)
        write(d, re * cos - im * sin)
        write(e, re * sin + im * cos)

    def chunk_width(self, *extents: int, most: int) -> int:
        """Elements of a chunk that divides the extents and is entirely inside or outside of the rotated dims."""
        if self.interleaved:
            width = min(lowbit(math.gcd(self.size, self.rotated, *extents)), most)
        else:
            width = min(lowbit(math.gcd(self.size, self.rotated // 2, *extents)), most)
        return width

    @kv.func
    def chunk(self, d: Any, width: int, angles: Angles, read: Read) -> Any:
        """The rotated elements of dims [d, d + width); d is a multiple of width."""
        x = read(d, width)
        if self.rotated == 0:
            return x
        if self.rotated == self.size:
            x = self._turned_chunk(x, d, width, angles, read)
        elif (d >= self.first) & (d < self.first + self.rotated):
            x = self._turned_chunk(x, d, width, angles, read)
        return x

    @kv.func
    def angles_of_chunk(self, d: Any, width: int, angles: Any) -> tuple[Any, Any] | None:
        """(cosines, sines) of a chunk; outside of the rotated dims, those of another."""
        if self.rotated == 0:
            return None
        place = kv.math.min(kv.math.max(d - self.first, 0), self.rotated - width)
        if self.interleaved:
            return angles.of(place // 2, max(width // 2, 1))
        half = self.rotated // 2
        return angles.of(kv.where(place >= half, place - half, place), width)

    @kv.func
    def _turned_chunk(self, x: Any, d: Any, width: int, angles: Angles, read: Read) -> Any:
        if not self.interleaved:
            half = self.rotated // 2
            second = d >= half
            other = read(kv.where(second, d - half, d + half), width)
            cos, sin = angles.of(kv.where(second, d - half, d), width)
            return x * cos + other * sin * kv.where(second, 1.0, -1.0)
        place = d - self.first
        if width > 1:
            cos, sin = angles.of(place // 2, width // 2)
            re, im = even(x), odd(x)
            return alternate(re * cos - im * sin, re * sin + im * cos)
        second = (place & 1) == 1
        other = read(kv.where(second, d - 1, d + 1), 1)
        cos, sin = angles.of(place // 2, 1)
        return x * cos + other * sin * kv.where(second, 1.0, -1.0)


def even(x: Any) -> Any:
    """Even lanes of a vector."""
    return x[0::2]


def odd(x: Any) -> Any:
    """Odd lanes of a vector."""
    return x[1::2]


def alternate(a: Any, b: Any) -> Any:
    """Lanes of two vectors, alternating."""
    return kv.vector(a.dtype, [lane for pair in zip(a, b, strict=True) for lane in pair])


@dataclass(frozen=True)
class RotatedHead:
    """A head after rotation, read by chunks."""

    rotation: Rotation
    angles: Angles
    head: Any

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32; d is a multiple of n."""
        return self.rotation.chunk(d, n, self.angles, self.head.read)
