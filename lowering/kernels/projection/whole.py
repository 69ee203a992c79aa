# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append in one kernel whose blocks have all of K of their columns: kind ``whole``.

Where heads are neither normalised nor quantized a column needs only the one that it is rotated with. So columns go in
units of 16: 8 of a head and the 8 that they are turned with, or their neighbours. A block has some units, reads their
rows of the weight once, and writes what they give to queries and cache by itself: no partial result leaves it, no
workspace, and no other kernel. As many units a block as make even rounds of the device may belong to several heads.

Up to 16 tokens are multiplied by mma.sync (projection/whole_mma.py), more by wgmma (projection/whole_tiles.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f8e4m3, f16, f32
from kvarn.dialect.layout import cdiv
from kvarn.lowering.schedules.tables import measured

from ..append.head_writer import HeadWriter, LoadedAngles
from ..base import Expansion
from ..common import CachedHead, Head, StoredHead, as_vector, row_alignment
from ..rope.rotation import Angles
from .common import KEPT, QUERY, Destination, Projection, Written, operand_problems
from .tiles import MULTIPROCESSORS, cycles

HALF = 8  # columns that lie together
UNIT = 2 * HALF
ANGLE_BYTES = UNIT * 4  # of a unit of a token: as many cosines and sines as it has columns
MMA_TOKENS = (8, 16)  # of 16 bits by mma.sync: what max_tokens is rounded up to
MMA_UNITS = 6  # at most
MOST_UNITS = {128: 15, 192: 12, 256: 12}  # of tiles of so many tokens by wgmma: what registers hold
FULL = 128  # tokens up to which a tile has all
KINDS = ("query", "key", "value")


def problems(op: Any, case: Projection, at: Expansion) -> list[str]:
    """Why the kernel does not take a case, one sentence each; empty when it does."""
    if not at.target.has("mma_bf16"):
        return [f"needs a GPU, got {at.target.name}"]
    tokens = at.schedule.get("max_tokens")
    if tokens is None:
        return ["needs max_tokens"]
    if not by_mma(case, tokens) and not at.target.has("wgmma"):
        return [f"needs a GPU with wgmma, got {at.target.name} for {tokens} tokens of {case.x.name}"]
    found = operand_problems(case, row_alignment(op), (bf16, f16, f8e4m3))
    if case.scaling not in ("none", "tensor", "row"):
        found.append(f"needs scales of tensors or rows, or none, got scaling {case.scaling}")
    if case.index is not None:
        found.append("needs a case without an indexer")
    if op.q_gamma is not None:
        found.append("needs heads without norms")
    if case.spec.quantized:
        found.append("needs a cache without scales")
    if found:
        return found
    writer = units_of(op, at, case).writer
    uneven = any(b.size % UNIT for b in case.bands) or any(r.width != HALF or not r.paired for r in writer.rotations)
    if uneven or writer.rows.width != HALF:
        found.append(f"needs heads, and dims that are rotated, of a multiple of {UNIT} elements")
    return found


def by_mma(case: Projection, tokens: int) -> bool:
    """Whether products of at most ``tokens`` are mma.sync's."""
    return case.x is not f8e4m3 and tokens <= MMA_TOKENS[-1]


def rounds_of(case: Projection, tokens: int, rows: int, units: int) -> int:
    """Tiles of the busiest multiprocessor."""
    return cdiv(cdiv(tokens, rows) * cdiv(case.columns // UNIT, units), MULTIPROCESSORS)


def even(case: Projection, tokens: int, rows: int, units: int) -> bool:
    """Whether two rounds of tiles give the busiest multiprocessor about its even share of the products."""
    rounds = rounds_of(case, tokens, rows, units)
    busiest = rounds * MULTIPROCESSORS * rows * units * UNIT / (tokens * case.columns)
    return rounds <= 2 and busiest <= measured("projected_uneven")


def tile_for(case: Projection, tokens: int, rows: int | None = None, units: int | None = None) -> tuple[int, int]:
    """(tokens, units) of a tile, those that are given or with which the device is done soonest.

    Up to FULL tokens that is where multiprocessors read evenly of the weight; beyond, even tiles that take the fewest
    ``projection_tiles.cycles``, and of those the ones that copy least. Operands of 8 bits have tiles of FULL tokens.
    """
    heights = [rows] if rows else [FULL] if tokens <= FULL or case.x is f8e4m3 else list(MOST_UNITS)
    most = dict.fromkeys(heights, MMA_UNITS) if by_mma(case, tokens) else {64: MOST_UNITS[FULL], **MOST_UNITS}
    choices = [(r, u) for r in heights for u in ([units] if units else range(1, most[r] + 1))]

    def order(choice: tuple[int, int]) -> tuple[float, ...]:
        r, u = choice
        rounds = rounds_of(case, tokens, r, u)
        if tokens <= FULL:
            return rounds * u, rounds
        return not even(case, tokens, r, u), cycles(case, r, u * UNIT, 0, tokens), rounds * (r + u * UNIT)

    return min(choices, key=order)


@dataclass(frozen=True)
class UnitHead(StoredHead):
    """The columns of a token that a unit has, in shared memory, elements of what products are rounded to.

    The two halves are of the head's dims ``starts``.
    """

    array: Any
    first: Any
    starts: tuple[Any, Any]
    dtype: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d on, as they are stored."""
        place = self.first + kv.where(d == self.starts[0], 0, HALF)
        return as_vector((self.array + place * self.dtype.itemsize).load(self.dtype, n))


@dataclass(frozen=True)
class Units:
    """Where units lie, and how they are written: those of queries, of keys and of values, one head after the other."""

    case: Projection
    bands: Written
    writer: HeadWriter

    @property
    def count(self) -> int:
        """Of all columns."""
        return self.case.columns // UNIT

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self.bands, kind) is not None]

    def joined(self, kind: str) -> bool:
        """Whether both halves of a unit are written as one."""
        return kind != "value" and not self.writer.rotations[kind != "query"].interleaved

    def parts(self, kind: str) -> int:
        """Items of a unit, as the writer has them."""
        return 1 if self.joined(kind) else 2

    @kv.func
    def split(self, kind: str, unit: Any) -> tuple[Any, Any, Any]:
        """(whether a unit is of a kind, its head, its number in the head)."""
        first = 0
        for other in self.kinds[: self.kinds.index(kind)]:
            band = getattr(self.bands, other)
            first += band.heads * band.size // UNIT
        band = getattr(self.bands, kind)
        number = unit - first
        of_head = band.size // UNIT
        return (number >= 0) & (number < band.heads * of_head), number // of_head, number % of_head

    @kv.func
    def starts(self, kind: str, number: Any) -> tuple[Any, Any]:
        """The dims that the halves of a head's unit start at."""
        if kind == "value":
            return number * UNIT, number * UNIT + HALF
        rotation = self.writer.rotations[kind != "query"]
        if rotation.interleaved:
            return rotation.starts(number * 2)[0], rotation.starts(number * 2 + 1)[0]
        d, e = rotation.starts(number)
        return d, e

    @kv.func
    def number(self, unit: Any) -> Any:
        """A unit's number in its head."""
        found = kv.i32(0)
        for kind in self.kinds:
            mine, _, number = self.split(kind, unit)
            found = kv.where(mine, number, found)
        return found

    @kv.func
    def columns(self, unit: Any) -> list[Any]:
        """The columns that the halves of a unit start at."""
        found = [kv.i32(0), kv.i32(0)]
        for kind in self.kinds:
            band = getattr(self.bands, kind)
            mine, head, number = self.split(kind, unit)
            at = self.starts(kind, number)
            found = [kv.where(mine, band.first + head * band.size + d, x) for d, x in zip(at, found, strict=True)]
        return found

    @kv.func
    def angles(self, unit: Any, freqs: Any, position: Any) -> list[Any]:
        """(cosines, sines) of the items of a unit, queries' or keys': those of both turn alike."""
        rotation, found = self.writer.rotations[1], []
        if rotation.turning:
            at, number = Angles(freqs, self.writer.rows, (position,)), self.number(unit)
            for part in kv.static(range(self.parts("key"))):
                found.append(rotation.angles_of(number * self.parts("key") + part, at))
        return found

    @property
    def angle_lanes(self) -> int:
        """Cosines of an item; 0 where nothing turns."""
        rotation = self.writer.rotations[1]
        return rotation.lanes if rotation.turning else 0

    @kv.func
    def keep_angles(self, place: Any, unit: Any, freqs: Any, position: Any) -> None:
        """Put what :meth:`angles` gives into shared memory, ANGLE_BYTES of it."""
        for cos, sin in kv.static(self.angles(unit, freqs, position)):
            place.store(cos)
            (place + self.angle_lanes * 4).store(sin)
            place = place + 2 * self.angle_lanes * 4

    @kv.func
    def kept_angles(self, place: Any) -> list[Any]:
        """What :meth:`keep_angles` has put there."""
        lanes, found = self.angle_lanes, []
        for part in kv.static(range(self.parts("key") if lanes else 0)):
            at = place + part * 2 * lanes * 4
            found.append((at.load(f32, lanes), (at + lanes * 4).load(f32, lanes)))
        return found

    @kv.func
    def write(
        self, to: Destination, source: Any, place: Any, unit: Any, token: Any, known: list[Any], angles: list[Any]
    ) -> None:  # fmt: skip
        """Write a unit of a token whose columns lie from ``place`` on in shared memory, at ``source``."""
        b, position, page, flags = known
        for kind in kv.static(self.kinds):
            mine, head, number = self.split(kind, unit)
            columns = UnitHead(source, place, self.starts(kind, number), self.case.rounded)
            if mine:
                for part in kv.static(range(self.parts(kind))):
                    at = LoadedAngles(angles[part]) if angles and kind != "value" else None
                    item = number * self.parts(kind) + part
                    if kind == "query":
                        target = Head(self.writer.rows, to.query_out, token, head)
                        self.writer.query(columns, target, at, None, item, flags & QUERY != 0)
                    elif kind == "key":
                        key = CachedHead(to.cache("key"), b, position, head, page)
                        self.writer.key(columns, key, at, None, item, flags & KEPT != 0)
                    else:
                        value = CachedHead(to.cache("value"), b, position, head, page)
                        self.writer.value(columns, value, item, flags & KEPT != 0)


def units_of(op: Any, at: Expansion, case: Projection) -> Units:
    """The units of a call without an indexer, whose columns are of one kind of bands, and who writes them."""
    (bands,) = Written.all_of(case)
    return Units(case, bands, bands.writer(op, at, case.rounded))
