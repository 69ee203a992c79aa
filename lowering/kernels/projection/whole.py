# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append in one kernel whose blocks multiply all of K for their columns: kind ``full_k``.

Splitting K (stream-K) needs partial results in a workspace, and a second kernel. If heads are neither normalised nor
quantized, a column depends only on the column that it is rotated with. So columns form units of 16: 8 columns of a head
with the 8 that they are rotated with, or with their neighbours. A block has some units, reads their rows of the weight
once, and writes the results to queries and cache itself. The number of units per block, which may belong to several
heads, gives all multiprocessors equally many.

Up to 16 tokens use mma.sync (projection/whole_mma.py), more tokens wgmma (projection/whole_tiles.py).
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

HALF = 8  # contiguous columns
UNIT = 2 * HALF
ANGLE_BYTES = UNIT * 4  # per unit of a token: as many cosines and sines as columns
MMA_TOKENS = (8, 16)  # what max_tokens is rounded up to, for 16-bit products by mma.sync
MMA_UNITS = 6  # at most
MOST_UNITS = {128: 15, 192: 12, 256: 12}  # by tokens per tile, for wgmma: limited by registers
FULL = 128  # tokens up to which one tile has all of them
KINDS = ("query", "key", "value")


def problems(op: Any, case: Projection, at: Expansion) -> list[str]:
    """Why the kernel does not support a case, one sentence per reason; empty if it does."""
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
    """Whether products of at most ``tokens`` tokens use mma.sync."""
    return case.x is not f8e4m3 and tokens <= MMA_TOKENS[-1]


def waves_of(case: Projection, tokens: int, rows: int, units: int) -> int:
    """Tiles of the busiest multiprocessor."""
    return cdiv(cdiv(tokens, rows) * cdiv(case.columns // UNIT, units), MULTIPROCESSORS)


def even(case: Projection, tokens: int, rows: int, units: int) -> bool:
    """Whether in two waves of tiles the busiest multiprocessor gets about the average share of the products."""
    waves = waves_of(case, tokens, rows, units)
    busiest = waves * MULTIPROCESSORS * rows * units * UNIT / (tokens * case.columns)
    return waves <= 2 and busiest <= measured("projected_uneven")


def tile_for(case: Projection, tokens: int, rows: int | None = None, columns: int | None = None) -> tuple[int, int]:
    """(tokens, units of 16 columns) per tile: the given tile, or the tile with which the device finishes soonest.

    Up to FULL tokens these distribute the reads of the weight evenly; beyond, they are even tiles with the fewest
    ``projection_tiles.cycles``, and among them those that copy least. 8-bit operands have tiles of FULL tokens.
    """
    heights = [rows] if rows else [FULL] if tokens <= FULL or case.x is f8e4m3 else list(MOST_UNITS)
    most = dict.fromkeys(heights, MMA_UNITS) if by_mma(case, tokens) else {64: MOST_UNITS[FULL], **MOST_UNITS}
    choices = [(r, u) for r in heights for u in ([columns // UNIT] if columns else range(1, most[r] + 1))]

    def order(choice: tuple[int, int]) -> tuple[float, ...]:
        r, u = choice
        waves = waves_of(case, tokens, r, u)
        if tokens <= FULL:
            return waves * u, waves
        return not even(case, tokens, r, u), cycles(case, r, u * UNIT, 0, tokens), waves * (r + u * UNIT)

    return min(choices, key=order)


@dataclass(frozen=True)
class UnitHead(StoredHead):
    """The columns of a token in a unit, in shared memory, in the type that products are rounded to.

    The two halves are at the head's dims ``starts``.
    """

    array: Any
    first: Any
    starts: tuple[Any, Any]
    dtype: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d up, without conversion."""
        place = self.first + kv.where(d == self.starts[0], 0, HALF)
        return as_vector((self.array + place * self.dtype.itemsize).load(self.dtype, n))


@dataclass(frozen=True)
class Units:
    """The positions of units, and how they are written: units of queries, of keys and of values, head by head."""

    case: Projection
    bands: Written
    writer: HeadWriter

    @property
    def count(self) -> int:
        """Units over all columns."""
        return self.case.columns // UNIT

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self.bands, kind) is not None]

    def joined(self, kind: str) -> bool:
        """Whether both halves of a unit are written as one."""
        return kind != "value" and not self.writer.rotations[kind != "query"].interleaved

    def parts(self, kind: str) -> int:
        """Items per unit, as the writer divides it."""
        return 1 if self.joined(kind) else 2

    @kv.func
    def split(self, kind: str, unit: Any) -> tuple[Any, Any, Any]:
        """(whether a unit is of a kind, its head, its number within the head)."""
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
        """The dims at which the halves of a head's unit start."""
        if kind == "value":
            return number * UNIT, number * UNIT + HALF
        rotation = self.writer.rotations[kind != "query"]
        if rotation.interleaved:
            return rotation.starts(number * 2)[0], rotation.starts(number * 2 + 1)[0]
        d, e = rotation.starts(number)
        return d, e

    @kv.func
    def number(self, unit: Any) -> Any:
        """A unit's number within its head."""
        found = kv.i32(0)
        for kind in self.kinds:
            mine, _, number = self.split(kind, unit)
            found = kv.where(mine, number, found)
        return found

    @kv.func
    def columns(self, unit: Any) -> list[Any]:
        """The columns at which the halves of a unit start."""
        found = [kv.i32(0), kv.i32(0)]
        for kind in self.kinds:
            band = getattr(self.bands, kind)
            mine, head, number = self.split(kind, unit)
            at = self.starts(kind, number)
            found = [kv.where(mine, band.first + head * band.size + d, x) for d, x in zip(at, found, strict=True)]
        return found

    @kv.func
    def angles(self, unit: Any, freqs: Any, position: Any) -> list[Any]:
        """(cosines, sines) of the items of a unit of queries or keys, which are rotated alike."""
        rotation, found = self.writer.rotations[1], []
        if rotation.rotated_units:
            at, number = Angles(freqs, self.writer.rows, (position,)), self.number(unit)
            for part in kv.static(range(self.parts("key"))):
                found.append(rotation.angles_of(number * self.parts("key") + part, at))
        return found

    @property
    def angle_lanes(self) -> int:
        """Cosines per item; 0 without rotation."""
        rotation = self.writer.rotations[1]
        return rotation.lanes if rotation.rotated_units else 0

    @kv.func
    def store_angles(self, place: Any, unit: Any, freqs: Any, position: Any) -> None:
        """Store the result of :meth:`angles` to shared memory, ANGLE_BYTES of it."""
        for cos, sin in kv.static(self.angles(unit, freqs, position)):
            place.store(cos)
            (place + self.angle_lanes * 4).store(sin)
            place = place + 2 * self.angle_lanes * 4

    @kv.func
    def stored_angles(self, place: Any) -> list[Any]:
        """The stored result of :meth:`angles`."""
        lanes, found = self.angle_lanes, []
        for part in kv.static(range(self.parts("key") if lanes else 0)):
            at = place + part * 2 * lanes * 4
            found.append((at.load(f32, lanes), (at + lanes * 4).load(f32, lanes)))
        return found

    @kv.func
    def write(
        self, to: Destination, source: Any, place: Any, unit: Any, token: Any, known: list[Any], angles: list[Any]
    ) -> None:  # fmt: skip
        """Write a unit of a token, whose columns are in shared memory at ``source``, from ``place`` up."""
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
    """The units of a call without an indexer, and their writers."""
    (bands,) = Written.all_of(case)
    return Units(case, bands, bands.writer(op, at, case.rounded))
