# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The query rows of a batch's sequences in the attention kernels' buffers: ragged, or padded to one width.

Both forms have the same interface, and a kernel is traced for one of them, so that the other costs nothing.
Buffers of a ragged batch are [T, heads, ...], those of a padded batch [B, S, heads, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.layout import cdiv

from ..base import Expansion
from ..common import at_most
from ..scans import sums_before
from .case import Division, last_not_above, sequence_of_query, tile_count, tile_place

TOGETHER = 8  # lengths whose loads a lane has in flight


@dataclass(frozen=True)
class RaggedQueries:
    """Ragged rows: sequence b has the rows [offsets[b], offsets[b + 1]).

    Offsets are clamped to the ``rows`` of the buffers. A sequence that ends before its start is empty. ``most``: the
    most rows of any sequence, if known, which simplifies the numbering of tiles. ``division``: which sequences have
    rows; all do without it.
    """

    offsets: Any
    rows: Any
    kv_offsets: Any = None
    most: int | None = None
    division: Division | None = None

    @property
    def sequences(self) -> Any:
        return self.offsets.shape[0] - 1

    def whole_length(self, b: Any) -> Any:
        """Rows of a sequence, whichever kernel has them."""
        return kv.math.max(self.base(b + 1) - self.base(b), 0)

    def length(self, b: Any) -> Any:
        """Rows of a sequence."""
        rows = self.whole_length(b)
        return rows if self.division is None else self.division.own_rows(rows)

    def new_keys(self, b: Any) -> Any:
        """Keys of a sequence after its cached ones: as many as it has rows, unless kv_offsets are given."""
        return new_keys(self, b)

    def base(self, b: Any) -> Any:
        """The first row of a sequence, for :meth:`at`."""
        return at_most(self.offsets[b], self.rows)

    def at(self, base: Any, t: Any) -> tuple[Any, ...]:
        """The leading buffer indices of row t of a sequence."""
        return (base + t,)

    def numbered(self, row: Any) -> tuple[Any, ...]:
        """The leading buffer indices of a row by its number; the row may belong to no sequence."""
        return (row,)

    def in_range(self, row: Any) -> Any:
        """Whether a row of the buffers belongs to a sequence."""
        return (row >= self.base(0)) & (row < self.base(self.sequences))

    @kv.func
    def sequence(self, row: Any) -> Any:
        """The sequence of a row."""
        return sequence_of_query(self.offsets, row)

    def token(self, b: Any, row: Any) -> Any:
        """The number of a row within its sequence."""
        return row - self.base(b)

    @kv.func
    def tile(self, number: Any, group: int, size: int) -> tuple[Any, Any, Any, Any]:
        """As :func:`tile_place`, with the base of the sequence; with ``most``, sequences have equally many tiles."""
        if self.most is None:
            b, base, row0, count = tile_place(self.offsets, self.rows, number, group, size)
            return b, base, row0, count if self.division is None else self.division.own_rows(count, group)
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
    """Ragged rows with lists: each row counts as a sequence whose keys are the pool rows in its list.

    ``lists`` is [T, K], of which the first ``counts`` [T] entries are valid; without counts, all are.
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
        """As :func:`tile_place`, with the row in place of the sequence."""
        tiles = cdiv(group, size)
        row = self.base(0) + number // tiles
        exists = row < self.base(self.sequences)
        row = kv.math.min(row, self.rows - 1)
        return row, row, number % tiles * size, kv.where(exists, kv.i32(group), 0)


@dataclass(frozen=True)
class PaddedQueries:
    """Padded rows: sequence b has the first lengths[b] of ``width`` rows."""

    lengths: Any
    width: Any
    kv_offsets: Any = None
    division: Division | None = None

    @property
    def sequences(self) -> Any:
        return self.lengths.shape[0]

    def whole_length(self, b: Any) -> Any:
        return kv.math.clamp(self.lengths[b], 0, self.width)

    def length(self, b: Any) -> Any:
        rows = self.whole_length(b)
        return rows if self.division is None else self.division.own_rows(rows)

    def new_keys(self, b: Any) -> Any:
        return new_keys(self, b)

    def base(self, b: Any) -> Any:
        return b

    def at(self, base: Any, t: Any) -> tuple[Any, ...]:
        return (base, t)

    def numbered(self, row: Any) -> tuple[Any, ...]:
        return (row // self.width, row % self.width)

    def in_range(self, row: Any) -> Any:
        """For a row past the last sequence, the last sequence's length is used."""
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
        """Tiles per sequence."""
        return (self.width * group + (size - 1)) // size


Queries = RaggedQueries | PaddedQueries


@kv.func
def classes(queries: Queries) -> tuple[Any, Any]:
    """Whether this kernel has rows of a divided batch, and whether the other one has; all lanes of a warp ask."""
    own, others = kv.bool(False), kv.bool(False)
    for base in range(0, queries.sequences, (32 * TOGETHER)):
        for i in kv.static(range(TOGETHER)):
            b = kv.math.min(base + (32 * i + kv.lane_id()), queries.sequences - 1)
            of_own, of_others = queries.division.exists(queries.whole_length(b))
            own, others = own | of_own, others | of_others
    return kv.ballot(own) != 0, kv.ballot(others) != 0


@dataclass(frozen=True)
class TilesOfMany:
    """The tiles of rows of a divided batch, numbered over the sequences that the kernel computes alone.

    Attributes
    ----------
    queries : Queries
    group, size : int
        Query rows per new token, and rows per tile.
    table : shared i32 [B + 1]
        Tiles of the sequences before each sequence.
    count : i32
        Tiles of all sequences.
    alone : bool
        Whether the other kernel has no sequence.
    """

    queries: Queries
    group: int
    size: int
    table: Any
    count: Any
    alone: Any

    @kv.func
    def tile(self, number: Any) -> tuple[Any, Any, Any, Any]:
        """As :func:`tile_place`."""
        b = last_not_above(self.table, self.queries.sequences, number)
        row0 = (number - self.table[b]) * self.size
        return b, self.queries.base(b), row0, self.queries.length(b) * self.group

    @kv.func
    def number_in_batch(self, b: Any, row0: Any) -> Any:
        """The number of a tile over all sequences, by which block masks and partial results are found."""
        return self.queries.first_tile(b, self.group, self.size) + row0 // self.size


@kv.func
def tiles_of_sequence(queries, group, size, b):
    """Tiles of ``size`` rows that hold a sequence's rows, ``group`` per new token."""
    return (queries.length(b) * group + (size - 1)) // size


@kv.func
def tiles_of_many(queries, most, group, size, warps):
    """The tiles of a divided batch of up to ``most`` sequences, which a block of ``warps`` warps counts."""
    own, others = classes(queries)
    batch = kv.where(own, queries.sequences, 0)  # a kernel without rows ends at once
    table, count = sums_before(partial(tiles_of_sequence, queries, group, size), batch, most, warps)
    return TilesOfMany(queries, group, size, table, count, ~others)


def new_keys(queries: Queries, b: Any) -> Any:
    """Keys of a sequence after its cached ones."""
    offsets = queries.kv_offsets
    return queries.length(b) if offsets is None else offsets[b + 1] - offsets[b]


def queries_of(
    padded: bool, extents: Any, rows: Any, kv_offsets: Any = None, lists: Any = None, counts: Any = None,
    most: int | None = None, division: Division | None = None,
) -> Queries:  # fmt: skip
    """The queries of a kernel: ``extents`` are row offsets or valid lengths, ``rows`` is a buffer of query rows.

    With ``lists`` and their ``counts``, each row attends to the pool rows in its list. ``most``: a bound of rows.
    ``division``: which sequences the kernel has.
    """
    if lists is not None:
        return ListedQueries(extents, rows.shape[0], lists=lists, counts=counts)
    if padded:
        return PaddedQueries(extents, rows.shape[1], kv_offsets, division)
    return RaggedQueries(extents, rows.shape[0], kv_offsets, most, division)


# --- outside of kernels ----------------------------------------------------------------------------


def is_padded(op: Any) -> bool:
    """Whether an attention, or an operation on its rows, has a padded batch."""
    return getattr(op, "valid_lengths", None) is not None


def extents_of(op: Any) -> ir.Value:
    """The row offsets or the valid lengths of an attention."""
    return op.valid_lengths if is_padded(op) else op.row_offsets


def heads_of(op: Any, at: Expansion) -> int:
    """Query heads of an attention."""
    return at.static_dim(op.query, 2 if is_padded(op) else 1)


def batch_of(op: Any, at: Expansion) -> Any:
    """Sequences of an attention."""
    if has_lists(op):
        return at.dim(op.query, 0)
    count = at.dim(extents_of(op), 0)
    return count if is_padded(op) else count - 1


def has_lists(op: Any) -> bool:
    """Whether an attention has lists of the pool rows that each query row attends to."""
    return getattr(op, "indices", None) is not None


def row_count(query: ir.Value, at: Expansion) -> Any:
    """Rows of a query, including those of no sequence."""
    rows = at.dim(query, 0)
    return rows * at.dim(query, 1) if ir.MemRefType(query.type).rank == 4 else rows


def tiles_of(op: Any, at: Expansion, group: int, size: int, most: int | None = None) -> Any:
    """The number of tiles that the kernels' ``tile`` numbers, for sequences of at most ``most`` rows."""
    if is_padded(op):
        return batch_of(op, at) * ((at.dim(op.query, 1) * group + (size - 1)) // size)
    if has_lists(op):
        return batch_of(op, at) * cdiv(group, size)
    if most is not None:
        return batch_of(op, at) * cdiv(most * group, size)
    return tile_count(at.dim(op.query, 0), batch_of(op, at), group, size)
