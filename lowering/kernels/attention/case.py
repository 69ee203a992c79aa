# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the attention kernels share: the case that they are specialised for, and the keys of each query row.

A mask has bounds, the keys [first, end) of each row, clipped to the sequence's keys. The row kernels never read a key
outside of the bounds; the tile kernels compare positions with them in tiles that a bound cuts. Where the bounds are not
the whole mask, the mask function is also evaluated for every key between them.

Scores are computed in base 2: the query is scaled by scale * log2(e), so that one exp2 per score suffices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.ops.attention import is_function
from kvarn.dsl import functions, intervals, masks
from kvarn.dsl.values import wrap

from ..common import at_most, narrowed


def position(x: Any) -> Any:
    """A query's or key's position as functions get it; a query without any key before it may have a negative one."""
    if isinstance(x, int):
        return x
    most = intervals.POSITIONS[1]
    return wrap(x.ir, x.dtype, x.lanes, (0 if x.nonneg else -most, most))


def bound_at(bound: Any, q: Any) -> Any:
    """A mask's bound for a query position; the user's integer arithmetic may wrap around."""
    with intervals.wrapping():
        return bound(position(q))


@dataclass(frozen=True)
class Masking:
    """Which keys a query row attends to, by positions.

    Attributes
    ----------
    name : str
        The name of a mask, or of a function of positions (``NAME@DIGEST``), as in ``kv.attention``.
    span : int
        The window or chunk of a mask that has one.
    """

    name: str = "causal"
    span: int = 0

    @property
    def function(self) -> masks.Mask | functions.Registered | None:
        """The mask function, given by the user or built in; None where every key is attended to."""
        return functions.registered(self.name) if is_function(self.name) else masks.named(self.name, self.span)

    @property
    def evaluated(self) -> bool:
        """Whether the function must be evaluated for each key, since the bounds are not the whole mask."""
        if is_function(self.name):
            return not functions.is_interval(self.name)
        mask = self.function
        return mask is not None and not mask.interval

    @property
    def has_first(self) -> bool:
        """Whether the mask bounds the first key."""
        mask = self.function
        return mask is not None and mask.first is not None

    def first(self, q: Any) -> Any:
        """The first key that a query at position q, or a later one, may attend to under the mask."""
        return kv.math.max(bound_at(self.function.first, q), 0) if self.has_first else kv.i32(0)

    def end(self, q: Any, num_keys: Any) -> Any:
        """The end of the keys that a query at position q, or an earlier one, may attend to under the mask."""
        mask = self.function
        return num_keys if mask is None or mask.end is None else kv.math.min(num_keys, bound_at(mask.end, q))

    def interval(self, position: Any, num_keys: Any) -> tuple[Any, Any]:
        """The bounds of the keys of a query at an absolute position: (first, end), empty if end <= first.

        The query attends to all keys between them, unless the function must be evaluated (:attr:`evaluated`).
        """
        return self.first(position), self.end(position, num_keys)


@dataclass(frozen=True)
class Chunk:
    """The keys of an MLA prefill's chunk: columns of a buffer, followed by columns of latent rows.

    Attributes
    ----------
    latent : RowFormat
        The format of the rows with the last columns of the keys.
    nope, rope : int
        Columns from the buffer, and from the latent rows.
    alignment : int
        Row alignment in bytes of the buffers, the query and the output.
    accumulate : bool
        Whether output and log-sum-exp contain a result over other keys, with which this one is combined.
    """

    latent: RowFormat
    nope: int
    rope: int
    alignment: int
    accumulate: bool

    @property
    def first_column(self) -> int:
        """The first key column that is in the latent rows."""
        return self.latent.content if self.latent.rope else self.latent.spec.head_size - self.rope


@dataclass(frozen=True)
class Case:
    """The properties of an attention that kernels are specialised for and schedules depend on.

    Configurations (:class:`DecodeConfig`, :class:`TileConfig`, :class:`LatentConfig`) add a schedule.

    Attributes
    ----------
    row : RowFormat
        The format of a key's row, in the collection or operand. The keys of a chunk, which are in two places, are
        described as if they were ragged rows with all columns.
    query, out : DType
    heads : int
        Query heads, a multiple of the KV heads.
    value_size : int
        Columns of a value; fewer than the head size only for latent rows.
    mask : Masking
    softcap : float
    score : str
        The name of the score function; empty without one.
    alibi : bool
        Whether scores have a slope per head.
    padded : bool
        Whether the query rows are a padded batch.
    pages : bool
        Whether each sequence and KV head has a list of pages (:mod:`chosen_pages`).
    blocks : tuple of int, optional
        Query rows and keys per tile of a block mask (:mod:`key_tiles`).
    listed : bool
        Whether each query row has a list of pool rows.
    chunk : Chunk, optional
        The chunk, for an MLA prefill's chunk.
    aligned : bool
        Whether the rows of query and output are aligned to 16 bytes, and have a multiple of 8 columns.
    """

    row: RowFormat
    query: DType
    out: DType
    heads: int
    value_size: int
    mask: Masking = field(default_factory=Masking)
    softcap: float = 0.0
    score: str = ""
    alibi: bool = False
    padded: bool = False
    pages: bool = False
    blocks: tuple[int, int] | None = None
    listed: bool = False
    chunk: Chunk | None = None
    aligned: bool = True

    def alignment_of(self, dtype: DType) -> int | None:
        """Alignment in bytes of a vector of a query's or an output's elements; None: that of the whole vector."""
        return None if self.aligned else dtype.itemsize

    @property
    def of_chunk(self) -> Chunk:
        """The chunk of a case, which must have one."""
        assert self.chunk is not None
        return self.chunk

    @staticmethod
    def plain(spec: CacheSpec, query: DType, heads: int) -> Case:
        """The case of a causal attention over keys and values with an output of the query's type."""
        return Case(RowFormat(spec), query, query, heads, spec.head_size)

    @property
    def spec(self) -> CacheSpec:
        """The spec of the collection or the operands."""
        return self.row.spec

    @property
    def rank(self) -> int:
        """Rank of the query and the output."""
        return 4 if self.padded else 3

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.spec.num_heads

    @property
    def size(self) -> int:
        """Columns of a query."""
        return self.row.size

    @property
    def content(self) -> int:
        """Query columns that multiply elements of the cache."""
        return self.row.content

    @property
    def functions(self) -> bool:
        """Whether a mask or score function is evaluated for pairs of positions."""
        return bool(self.score) or self.mask.evaluated

    @property
    def by_lists(self) -> bool:
        """Whether lists name the tokens that a sequence and KV head visits, by pages or by tiles of a block mask."""
        return self.pages or self.blocks is not None


@dataclass(frozen=True)
class Division:
    """The sequences of a batch that a kernel computes, by their new tokens. The other sequences have no rows for it.

    Attributes
    ----------
    few : i32
        The most new tokens of a sequence of few.
    many : bool
        Whether the kernel computes the sequences of more than ``few`` new tokens, rather than those of few.
    """

    few: Any
    many: bool

    def exists(self, rows: Any) -> tuple[Any, Any]:
        """Whether a sequence of ``rows`` rows has rows for the kernel, and for the other one."""
        few, many = (rows > 0) & (rows <= self.few), rows > self.few
        return (many, few) if self.many else (few, many)

    def own_rows(self, rows: Any, group: int = 1) -> Any:
        """The rows that the kernel has of a sequence of ``rows`` rows: ``group`` rows per new token."""
        few = rows <= self.few * group
        return kv.where(few, 0, rows) if self.many else kv.where(few, rows, 0)


@kv.func
def last_not_above(table, count, value):
    """The largest i < count with table[i] <= value, for an ascending table; 0 if there is none."""
    return narrowed(table, kv.i32(0), count, value)[0]


@kv.func
def sequence_of_query(row_offsets, row):
    """The sequence of a row: the largest b with row_offsets[b] <= row < row_offsets[B]."""
    return last_not_above(row_offsets, row_offsets.shape[0] - 1, row)


@kv.func
def start_of(case, source, values, queries, b):
    """(absolute position of its first query, keys) of a sequence; ``source``: the collection or key operand.

    A cache's lengths count the keys of earlier steps; the step's keys follow them. Lengths of dense and ragged operands
    count all keys, and the last ones belong to the queries; fewer values than keys reduce the number, as the values'
    buffer ends. All counts are clamped to the buffers. Keys in lists are numbered by their list index.
    """
    if case.listed:
        return kv.i32(0), queries.keys(b)
    count = source.cache_length(b)
    if not case.spec.of_cache:  # operands contain all keys, including the step's
        count = kv.math.min(count, values.cache_length(b))
        return count - queries.length(b), count
    return count, at_most(count + queries.new_keys(b), source.token_capacity())


@kv.func
def tile_place(row_offsets, tokens, number, group, size):
    """(sequence, its first token, first row of the tile in the sequence, rows of the sequence) of a tile of rows.

    A row is a token and a query head of one KV head. Sequence b has the tiles of ``size`` rows from number
    ``(row_offsets[b] - row_offsets[0]) * group // size + b`` up, which is one more than it may need: the first row of a
    superfluous tile is at or past the end of the sequence's rows. Offsets are clamped to the batch's ``tokens``.
    """
    origin = at_most(row_offsets[0], tokens)
    low, high = kv.i32(0), row_offsets.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if ((at_most(row_offsets[middle], tokens) - origin) * group) // size + middle <= number:
            low = middle
        else:
            high = middle
    token = at_most(row_offsets[low], tokens)
    row = (number - (((token - origin) * group) // size + low)) * size
    end = row_offsets[kv.math.min(low + 1, row_offsets.shape[0] - 1)]  # an empty batch has one offset
    return low, token, row, (at_most(end, tokens) - token) * group


def tile_count(tokens: Any, batch: Any, group: int, size: int) -> Any:
    """The number of tiles that :func:`tile_place` numbers."""
    return (tokens * group) // size + batch


def caches_of(case: Case, collection: Any, layer: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """The caches or operands of keys and values; for latent rows both are the same."""
    if collection is None:
        return keys, values
    keys = collection.get_key_cache(layer)
    return keys, keys if case.spec.is_mla else collection.get_value_cache(layer)


def column_vectors(size: int, widest: int) -> list[tuple[int, int]]:
    """Cut [0, size) into (start, width) pieces, power-of-two widths, widest first; widths divide starts."""
    found, at = [], 0
    while at < size:
        width = min(widest, 1 << (size - at).bit_length() - 1)
        found.append((at, width))
        at += width
    return found
