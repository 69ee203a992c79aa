# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the query rows of a batch's sequences lie, for the attention kernels: end to end, or padded to one width.

Every kernel asks the same questions of either form, and is traced for one: a ragged batch pays nothing for the other.
Buffers of a ragged batch are [T, heads, ...], those of a padded one [B, S, heads, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.layout import cdiv

from ..base import Expansion
from ..common import at_most
from .case import Division, sequence_of_query, tile_count, tile_place


@dataclass(frozen=True)
class RaggedQueries:
    """Rows end to end: those of sequence b are [offsets[b], offsets[b + 1]).

    Offsets are held to the ``rows`` of the buffers: none leads out of them. A sequence that ends before it begins is
    empty. ``most``: no sequence has more rows, which makes tiles easier to number. ``division``: which sequences have
    rows, all without one.
    """

    offsets: Any
    rows: Any
    kv_offsets: Any = None
    most: int | None = None
    division: Division | None = None

    @property
    def sequences(self) -> Any:
        return self.offsets.shape[0] - 1

    def length(self, b: Any) -> Any:
        """Rows of a sequence."""
        rows = kv.math.max(self.base(b + 1) - self.base(b), 0)
        return rows if self.division is None else self.division.kept(rows)

    def new_keys(self, b: Any) -> Any:
        """Keys of a sequence after its cached ones: as many as rows, or what offsets of their own say."""
        return new_keys(self, b)

    def base(self, b: Any) -> Any:
        """What :meth:`at` finds the rows of a sequence by: the first of them."""
        return at_most(self.offsets[b], self.rows)

    def at(self, base: Any, t: Any) -> tuple[Any, ...]:
        """The leading indices of a sequence's row t in the buffers."""
        return (base + t,)

    def numbered(self, row: Any) -> tuple[Any, ...]:
        """The leading indices of a row of the buffers, which may be one of no sequence."""
        return (row,)

    def holds(self, row: Any) -> Any:
        """Whether a row of the buffers is one of a sequence."""
        return (row >= self.base(0)) & (row < self.base(self.sequences))

    @kv.func
    def sequence(self, row: Any) -> Any:
        """The sequence of a row."""
        return sequence_of_query(self.offsets, row)

    def token(self, b: Any, row: Any) -> Any:
        """Which of its sequence's rows a row is."""
        return row - self.base(b)

    @kv.func
    def tile(self, number: Any, group: int, size: int) -> tuple[Any, Any, Any, Any]:
        """As :func:`tile_place`, with the base of the sequence; where none has more rows, each has as many tiles."""
        if self.most is None:
            b, base, row0, count = tile_place(self.offsets, self.rows, number, group, size)
            return b, base, row0, count if self.division is None else self.division.kept(count, group)
        tiles = cdiv(self.most * group, size)
        b = number // tiles
        return b, self.base(b), (number % tiles) * size, self.length(b) * group

    @kv.func
    def first_tile(self, b: Any, group: int, size: int) -> Any:
        """The number of a sequence's first tile."""
        if self.most is not None:
            return b * cdiv(self.most * group, size)
        return ((self.base(b) - self.base(0)) * group) // size + b


@dataclass(frozen=True)
class ListedQueries(RaggedQueries):
    """Rows end to end, each of which counts as a sequence: its keys are the rows of the pool that its list names.

    ``lists`` [T, K], of which the first ``counts`` [T] count; None: all of them.
    """

    lists: Any = None
    counts: Any = None

    def sequence(self, row: Any) -> Any:
        return row

    def token(self, b: Any, row: Any) -> Any:
        return kv.i32(0)

    @kv.func
    def keys(self, b: Any) -> Any:
        """Entries of a row's list."""
        if self.counts is None:
            return self.lists.shape[1]
        return kv.math.clamp(self.counts[b], 0, self.lists.shape[1])

    @kv.func
    def tile(self, number: Any, group: int, size: int) -> tuple[Any, Any, Any, Any]:
        """As :func:`tile_place`, with the row in the place of the sequence."""
        tiles = cdiv(group, size)
        row = self.base(0) + number // tiles
        exists = row < self.base(self.sequences)
        row = kv.math.min(row, self.rows - 1)
        return row, row, number % tiles * size, kv.where(exists, kv.i32(group), 0)


@dataclass(frozen=True)
class PaddedQueries:
    """Rows padded to one width: those of sequence b are the first lengths[b] of its ``width``."""

    lengths: Any
    width: Any
    kv_offsets: Any = None
    division: Division | None = None

    @property
    def sequences(self) -> Any:
        return self.lengths.shape[0]

    def length(self, b: Any) -> Any:
        rows = kv.math.clamp(self.lengths[b], 0, self.width)
        return rows if self.division is None else self.division.kept(rows)

    def new_keys(self, b: Any) -> Any:
        return new_keys(self, b)

    def base(self, b: Any) -> Any:
        return b

    def at(self, base: Any, t: Any) -> tuple[Any, ...]:
        return (base, t)

    def numbered(self, row: Any) -> tuple[Any, ...]:
        return (row // self.width, row % self.width)

    def holds(self, row: Any) -> Any:
        """Also of a row past the last, which has the last one's length."""
        b, last = row // self.width, self.sequences - 1
        return (b <= last) & (row % self.width < self.lengths[kv.math.min(b, last)])

    def sequence(self, row: Any) -> Any:
        return row // self.width

    def token(self, b: Any, row: Any) -> Any:
        return row % self.width

    def tile(self, number: Any, group: int, size: int) -> tuple[Any, Any, Any, Any]:
        """As :func:`tile_place`; every sequence has the tiles of a full one."""
        tiles = self.tiles(group, size)
        b = number // tiles
        return b, b, (number % tiles) * size, self.length(b) * group

    def first_tile(self, b: Any, group: int, size: int) -> Any:
        """The number of a sequence's first tile."""
        return b * self.tiles(group, size)

    def tiles(self, group: int, size: int) -> Any:
        """Tiles of a sequence."""
        return (self.width * group + (size - 1)) // size


Queries = RaggedQueries | PaddedQueries


def new_keys(queries: Queries, b: Any) -> Any:
    """Keys of a sequence after its cached ones."""
    offsets = queries.kv_offsets
    return queries.length(b) if offsets is None else offsets[b + 1] - offsets[b]


def queries_of(
    padded: bool, extents: Any, rows: Any, kv_offsets: Any = None, lists: Any = None, counts: Any = None,
    most: int | None = None, division: Division | None = None,
) -> Queries:  # fmt: skip
    """The queries of a kernel: ``extents`` are row offsets or valid lengths, ``rows`` a buffer with their rows.

    With ``lists``, and their ``counts``, each row sees what its list says. ``most``: no sequence has more rows.
    ``division``: which sequences the kernel has.
    """
    if lists is not None:
        return ListedQueries(extents, rows.shape[0], lists=lists, counts=counts)
    if padded:
        return PaddedQueries(extents, rows.shape[1], kv_offsets, division)
    return RaggedQueries(extents, rows.shape[0], kv_offsets, most, division)


# --- outside kernels -------------------------------------------------------------------------------


def is_padded(op: Any) -> bool:
    """Whether an attention, or what is of its rows, takes a padded batch."""
    return getattr(op, "valid_lengths", None) is not None


def extents_of(op: Any) -> ir.Value:
    """The row offsets or the valid lengths of an attention."""
    return op.valid_lengths if is_padded(op) else op.row_offsets


def heads_of(op: Any, at: Expansion) -> int:
    """Query heads of an attention."""
    return at.static_dim(op.query, 2 if is_padded(op) else 1)


def batch_of(op: Any, at: Expansion) -> Any:
    """The sequences of an attention."""
    if has_lists(op):
        return at.dim(op.query, 0)
    count = at.dim(extents_of(op), 0)
    return count if is_padded(op) else count - 1


def has_lists(op: Any) -> bool:
    """Whether lists say which rows of the pool a query row of an attention sees."""
    return getattr(op, "indices", None) is not None


def row_count(query: ir.Value, at: Expansion) -> Any:
    """The rows of a query, those of no sequence too."""
    rows = at.dim(query, 0)
    return rows * at.dim(query, 1) if ir.MemRefType(query.type).rank == 4 else rows


def tiles_of(op: Any, at: Expansion, group: int, size: int, most: int | None = None) -> Any:
    """Tiles that the kernels' ``tile`` numbers, of sequences that have no more than ``most`` rows."""
    if is_padded(op):
        return batch_of(op, at) * ((at.dim(op.query, 1) * group + (size - 1)) // size)
    if has_lists(op):
        return batch_of(op, at) * cdiv(group, size)
    if most is not None:
        return batch_of(op, at) * cdiv(most * group, size)
    return tile_count(at.dim(op.query, 0), batch_of(op, at), group, size)
