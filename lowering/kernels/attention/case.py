# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the attention kernels share: the case they are specialised for, and the keys that a query row sees.

A mask has bounds, [first, end) of each row, clipped to the keys that exist. The simple kernels never touch a key
outside them; the tiled ones test against them in tiles that they cut. Where they do not tell all of a mask, it is asked
about each key between them.

Scores are kept in base 2: the query's factor is scale * log2(e), so that one exp2 a score suffices.
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
    """A position of a query or a key, as functions get it; of a query that has no key before it, it may be negative."""
    if isinstance(x, int):
        return x
    most = intervals.POSITIONS[1]
    return wrap(x.ir, x.dtype, x.lanes, (0 if x.nonneg else -most, most))


def asked(bound: Any, q: Any) -> Any:
    """What a mask says of a query's position, where a user's integers wrap around."""
    with intervals.wrapping():
        return bound(position(q))


@dataclass(frozen=True)
class Masking:
    """Which of the keys a query row sees, by their positions.

    Attributes
    ----------
    name : str
        Of a mask, or of a function of positions (``NAME@DIGEST``), as in ``kv.attention``.
    span : int
        The window or the chunk of a mask that has one.
    """

    name: str = "causal"
    span: int = 0

    @property
    def function(self) -> masks.Mask | functions.Registered | None:
        """The function that was given, or that of a name; None where every key is seen."""
        return functions.registered(self.name) if is_function(self.name) else masks.named(self.name, self.span)

    @property
    def asked(self) -> bool:
        """Whether the function is to be asked about each key: its bounds do not tell all of it."""
        if is_function(self.name):
            return not functions.is_interval(self.name)
        mask = self.function
        return mask is not None and not mask.interval

    @property
    def has_first(self) -> bool:
        """Whether the mask says which key is the first."""
        mask = self.function
        return mask is not None and mask.first is not None

    def first(self, q: Any) -> Any:
        """The first key that a query at a position, or a later one, may see, as far as the mask says."""
        return kv.math.max(asked(self.function.first, q), 0) if self.has_first else kv.i32(0)

    def end(self, q: Any, num_keys: Any) -> Any:
        """The end of the keys that a query at a position, or an earlier one, may see, as far as the mask says."""
        mask = self.function
        return num_keys if mask is None or mask.end is None else kv.math.min(num_keys, asked(mask.end, q))

    def interval(self, position: Any, num_keys: Any) -> tuple[Any, Any]:
        """The keys that a query at an absolute position may see: (first, end); none when end <= first.

        It sees all of them, unless the mask is to be asked about each (:attr:`asked`).
        """
        return self.first(position), self.end(position, num_keys)


@dataclass(frozen=True)
class Chunk:
    """Where the keys of a prefill's chunk over latent rows (MLA) lie: columns of a buffer, then of latent rows.

    Attributes
    ----------
    latent : RowFormat
        Of the rows that have the last columns of the keys.
    nope, rope : int
        Columns of the buffer, and those of the latent rows.
    alignment : int
        Bytes that rows of the buffers, and of the query and the output, are aligned to.
    accumulate : bool
        The output and its log-sum-exp hold a result over other keys, which the keys here are added to.
    """

    latent: RowFormat
    nope: int
    rope: int
    alignment: int
    accumulate: bool

    @property
    def first_column(self) -> int:
        """The first of the columns of the latent rows."""
        return self.latent.content if self.latent.rope else self.latent.spec.head_size - self.rope


@dataclass(frozen=True)
class Case:
    """What an attention is, as far as kernels are specialised for it and schedules are chosen by it.

    Configurations (:class:`DecodeConfig`, :class:`TileConfig`, :class:`LatentConfig`) are a case with the entries of a
    schedule.

    Attributes
    ----------
    row : RowFormat
        What lies in a row of the keys: of the collection, or of the operands; of a chunk's keys, which lie in two
        places, as if they were ragged ones of all columns.
    query, out : DType
    heads : int
        Query heads, a multiple of the KV heads.
    value_size : int
        Columns of a value; less than the head size for latent rows only.
    mask : Masking
    softcap : float
    score : str
        The function that changes scores; empty: none does.
    alibi : bool
        Whether scores have a slope a head.
    padded : bool
        Whether the rows are those of a padded batch.
    pages : bool
        Whether lists say which pages a sequence and KV head sees (:mod:`chosen_pages`).
    blocks : tuple of int, optional
        Of a block mask (:mod:`key_tiles`) the query rows and keys of a tile.
    listed : bool
        Whether lists say which rows of the pool a query row sees.
    chunk : Chunk, optional
        Of a prefill's chunk over latent rows.
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

    @property
    def of_chunk(self) -> Chunk:
        """The chunk of a case that has one."""
        assert self.chunk is not None
        return self.chunk

    @staticmethod
    def plain(spec: CacheSpec, query: DType, heads: int) -> Case:
        """The case of a causal attention over keys and values, whose output has the query's type."""
        return Case(RowFormat(spec), query, query, heads, spec.head_size)

    @property
    def spec(self) -> CacheSpec:
        """Of the collection, or of the operands."""
        return self.row.spec

    @property
    def rank(self) -> int:
        """Dimensions of the query and the output."""
        return 4 if self.padded else 3

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.spec.num_heads

    @property
    def size(self) -> int:
        """Columns of a query."""
        return self.row.size

    @property
    def content(self) -> int:
        """Columns of a query whose keys are elements of the cache."""
        return self.row.content

    @property
    def functions(self) -> bool:
        """Whether functions are to be asked at every pair of positions."""
        return bool(self.score) or self.mask.asked

    @property
    def by_lists(self) -> bool:
        """Whether lists say which tokens a sequence and KV head visits: of pages, or of a block mask's tiles."""
        return self.pages or self.blocks is not None


@dataclass(frozen=True)
class Division:
    """Which sequences of a batch a kernel has, by their new tokens; to it the others have no rows.

    Attributes
    ----------
    few : i32
        New tokens up to which a sequence is one of few.
    many : bool
        Whether the kernel has the others.
    """

    few: Any
    many: bool

    def kept(self, rows: Any, group: int = 1) -> Any:
        """The rows of a sequence: tokens, or each a ``group`` of them."""
        few = rows <= self.few * group
        return kv.where(few, 0, rows) if self.many else kv.where(few, rows, 0)


@kv.func
def last_not_above(table, count, value):
    """The largest i < count with table[i] <= value, where the entries of table ascend; 0 when there is none."""
    return narrowed(table, kv.i32(0), count, value)[0]


@kv.func
def sequence_of_query(row_offsets, row):
    """The sequence of a row: the largest b with row_offsets[b] <= row < row_offsets[B]."""
    return last_not_above(row_offsets, row_offsets.shape[0] - 1, row)


@kv.func
def start_of(case, source, values, queries, b):
    """(absolute position of its first query, keys) of a sequence; ``source`` is the collection or the keys' operand.

    A cache's lengths count the keys of earlier steps, and the step's follow them. Those of dense and ragged operands
    count all keys, of which the last are the queries' own; values that are fewer end them, as they end their buffer.
    No length and no offset makes them more than there is room for. Keys of lists are numbered as the lists have them.
    """
    if case.listed:
        return kv.i32(0), queries.keys(b)
    count = source.cache_length(b)
    if not case.spec.of_cache:  # which have all keys, and not only those of earlier steps
        count = kv.math.min(count, values.cache_length(b))
        return count - queries.length(b), count
    return count, at_most(count + queries.new_keys(b), source.token_capacity())


@kv.func
def place_of(case, source, values, queries, row):
    """(sequence, absolute position, keys of the sequence) of a row."""
    b = queries.sequence(row)
    start, num_keys = start_of(case, source, values, queries, b)
    return b, start + queries.token(b, row), num_keys


@kv.func
def tile_place(row_offsets, tokens, number, group, size):
    """(sequence, its first token, first row of the tile in the sequence, rows of the sequence) of a tile of rows.

    A row is a token and a query head of one KV head. Sequence b owns the tiles of ``size`` rows from
    ``(row_offsets[b] - row_offsets[0]) * group // size + b`` on, one more than it may need: the first row of a tile
    that is not needed lies at or past the rows of its sequence. Offsets are held to the batch's ``tokens``.
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
    end = row_offsets[kv.math.min(low + 1, row_offsets.shape[0] - 1)]  # of no sequences there is one offset
    return low, token, row, (at_most(end, tokens) - token) * group


def tile_count(tokens: Any, batch: Any, group: int, size: int) -> Any:
    """Tiles that :func:`tile_place` numbers."""
    return (tokens * group) // size + batch


def caches_of(case: Case, collection: Any, layer: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Where keys and values come from: operands, or a layer's caches, one and the same for latent rows."""
    if collection is None:
        return keys, values
    keys = collection.get_key_cache(layer)
    return keys, keys if case.spec.is_mla else collection.get_value_cache(layer)


def column_vectors(size: int, widest: int) -> list[tuple[int, int]]:
    """Cut [0, size) into (start, width), widths powers of two, the widest first; a start is a multiple of its width."""
    found, at = [], 0
    while at < size:
        width = min(widest, 1 << (size - at).bit_length() - 1)
        found.append((at, width))
        at += width
    return found
