# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the kernels of attention over latent rows share: work items, visible keys, the query, and stored results.

Keys and values are one tile of :data:`KEYS` tokens in shared memory, as boxes of 64 columns, each of which is a swizzle
atom: TMA writes them, and wgmma reads them as keys and, transposed, as values. A producer copies boxes ahead; the
consumers release them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f16, f32
from kvarn.dialect.layout import cdiv
from kvarn.dialect.shared_layout import SharedLayout

from ..attention.case import Case, start_of
from ..attention.key_tiles import KeyTiles
from ..attention.partials import LN2
from ..attention.queries import RaggedQueries
from ..attention.softmax import modified_one, shown

KEYS = 64  # tokens per tile
WIDE = 64  # query rows per block; fewer with swapped operands
MOST_ROWS = 32  # query rows per block with swapped operands and 16-bit keys
BOX_COLUMNS = 64
BOX = SharedLayout(KEYS, BOX_COLUMNS, 2, 128)
BYTE_BOX = SharedLayout(KEYS, BOX_COLUMNS, 1, 64)  # of 8-bit rows
BYTE_BOXES = SharedLayout(KEYS, 2 * BOX_COLUMNS, 1, 128)  # two of them in one copy
CHUNK = 8  # elements of a 16-byte chunk
CONSUMERS = 256  # threads of the two consumer warpgroups: scores, and values
SCORES_BARRIER, CONSUMERS_BARRIER = 1, 2  # named barriers of the scores warpgroup, and of both consumers
NEVER = -3.402e38  # the base-2 log-sum-exp of no keys: below every score


@dataclass(frozen=True)
class LatentConfig:
    """What a kernel over latent rows is specialised for.

    Attributes
    ----------
    case : Case
    rows : int
        Query rows (tokens times heads) per block.
    tiles : int
        Tiles of query rows per sequence; 0: from the row offsets.
    box_rows : int
        Rows per TMA box; 0: threads copy row by row.
    partial : bool
        Whether even a single split stores a partial result, since the combine kernel has more to do than combining.
    """

    case: Case
    rows: int
    tiles: int = 0
    box_rows: int = KEYS
    partial: bool = False

    @property
    def part(self) -> DType:
        """The element type of a partial result."""
        return part_of_query(self.case)

    @property
    def narrow(self) -> bool:
        """Whether the query is 8-bit like the rows, so that products read both unconverted."""
        return self.case.query.bits == 8

    @property
    def products(self) -> DType:
        """The type of products with 8-bit rows: that of weights and converted values."""
        return f16 if self.stored else self.case.query

    @property
    def stored(self) -> bool:
        """Whether rows are 8-bit, and unconverted in shared memory (:mod:`mla.stored`)."""
        return self.case.spec.converted

    @property
    def few(self) -> bool:
        """Whether the case uses the kernel with swapped operands."""
        return self.stored or self.rows < WIDE

    @property
    def copy(self) -> str:
        """How the producer copies: ``"tma"`` or ``"rows"``."""
        return "tma" if self.box_rows else "rows"

    @property
    def producer_warps(self) -> int:
        return 1 if self.copy == "tma" else 4

    @property
    def arrivals(self) -> int:
        """Arrivals on a box's barrier: of one thread that expects bytes, or of all producer threads."""
        return 1 if self.copy == "tma" else 128

    @property
    def together(self) -> int:
        """Boxes per copy: two 64-byte boxes take TMA as long as one.

        Each of two value warpgroups needs whole copies. Many query rows with converted values have no registers for it.
        """
        case, few = self.case, self.rows <= MOST_ROWS
        whole = self.value_boxes % 4 == 0 and not (case.row.rope and case.content % BYTE_BOXES.columns)
        return 2 if self.stored and self.copy == "tma" and few and whole else 1

    @property
    def box(self) -> SharedLayout:
        """The layout of one copy."""
        if self.stored:
            return BYTE_BOXES if self.together > 1 else BYTE_BOX
        return BOX

    def part_of(self, box: int) -> int:
        """The index of a box within its copy."""
        return (box - self.value_boxes * (box >= self.value_boxes)) % self.together

    @property
    def slots(self) -> int:
        """Copies per tile."""
        return self.rest_slots + self.value_slots

    @property
    def rest_slots(self) -> int:
        """Copies per tile of boxes that are no values."""
        return cdiv(self.boxes - self.value_boxes, self.together)

    @property
    def value_slots(self) -> int:
        return cdiv(self.value_boxes, self.together)

    @property
    def boxes(self) -> int:
        """Boxes per tile; bf16 keys after 8-bit elements have boxes of their own."""
        if self.stored:
            return cdiv(self.case.content, BOX_COLUMNS) + cdiv(2 * self.case.row.rope, BOX_COLUMNS)
        return cdiv(self.case.size, BOX_COLUMNS)

    def column(self, box: int) -> int:
        """The first element of the stored row in a box."""
        behind = box - cdiv(self.case.content, BOX_COLUMNS)
        return self.case.row.rope_start + behind * BOX_COLUMNS if self.stored and behind >= 0 else box * BOX_COLUMNS

    def end(self, box: int) -> int:
        """The end of a box's elements in the stored row."""
        if not self.stored:
            return self.case.size
        return self.case.spec.head_size if self.column(box) >= self.case.row.rope_start else self.case.content

    @property
    def scaled(self) -> bool:
        return self.case.spec.quantized or self.case.row.inline > 0

    @property
    def granule(self) -> int:
        """Elements per scale."""
        return self.case.row.inline or self.case.spec.granularity

    @property
    def granules(self) -> int:
        """Scales per row; 0 for rows with at most one."""
        whole = not self.scaled or (not self.case.row.inline and self.granule >= self.case.spec.head_size)
        return 0 if whole else cdiv(self.case.content, self.granule)

    @property
    def remainders_at(self) -> int:
        """Bytes of a tile's scales before the remainders: the common exponent, and one factor per row."""
        return 16 + 4 * KEYS

    @property
    def tile_scales_bytes(self) -> int:
        return self.remainders_at + 2 * KEYS * self.granules if self.scaled else 0

    @property
    def value_boxes(self) -> int:
        return self.case.value_size // BOX_COLUMNS

    @property
    def part_bytes(self) -> int:
        """Bytes of a block's partial result: normalised rows in the query's type, and one log-sum-exp each."""
        return self.rows * (self.case.value_size * self.part.itemsize + 4)


def pack(dtype: DType, a: Any, b: Any) -> Any:
    """Two f32 as one word of 16-bit floats, the first in the low half."""
    return kv.pack_f16x2(a, b) if dtype is f16 else kv.pack_bf16x2(a, b)


# --- work items ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A work item: a tile of query rows, and a split of the keys that they attend to.

    Attributes
    ----------
    b : i32
        The sequence.
    place : tuple of i32
        (number, the sequence's first token, first row in the sequence, rows of the sequence).
    extents : tuple of i32
        (position of the sequence's first query, its keys).
    keys : SplitKeys
        The keys of the split.
    splits : i32
        The number of splits.
    """

    b: Any
    place: tuple[Any, Any, Any, Any]
    extents: tuple[Any, Any]
    keys: SplitKeys
    splits: Any


@kv.func
def tile_of(c, a, queries, b, place, extents, splits):
    """A block's work item, whose rows exist; ``extents`` are passed if they are known already, otherwise None."""
    _, token0, row0, rows = place
    if extents is None:
        extents = extents_of(c, a, queries, b, token0)
    listed = lists_of_rows(c, a.block_mask, queries, b, row0)
    keys = keys_of(c, *extents, row0, rows, splits, kv.block_id.y, listed)
    return Tile(b, place, extents, keys, splits)


@kv.func
def place_of(c, queries, number):
    """(sequence, its first token, first row of the tile in the sequence, rows of the sequence) of a tile of rows.

    With lists, each token has its own tiles and counts as a sequence.
    """
    heads = c.case.heads
    if c.case.listed:
        tiles = cdiv(heads, c.rows)
        token = queries.base(0) + number // tiles
        exists = token < queries.base(queries.sequences)
        return kv.i32(0), token, number % tiles * c.rows, kv.where(exists, kv.i32(heads), 0)
    if c.tiles:
        b = number // c.tiles
        return b, queries.base(b), number % c.tiles * c.rows, queries.length(b) * heads
    return queries.tile(number, heads, c.rows)


@kv.func
def extents_of(c, a, queries, b, token0):
    """(position of the sequence's first query, keys) of a tile; with lists, the keys are the list entries."""
    if not c.case.listed:
        return start_of(c.case, a.collection, None, queries, b)
    count = a.lists.shape[1]
    if a.list_counts is not None:
        count = kv.math.min(kv.math.max(a.list_counts[token0], 0), count)
    return kv.i32(0), count


@dataclass(frozen=True)
class SplitTiles:
    """The key tiles of a split: from tile ``begin`` up, or the entries of a block mask's list from there up.

    ``lists`` are the block mask's lists, ``number`` is the tile of query rows, which attends to keys up to ``last``.
    """

    begin: Any
    last: Any
    lists: KeyTiles | None = None
    number: Any = None

    @kv.func
    def entry(self, i: Any) -> Any:
        """The list entry of tile i, for prefetching; without lists, i itself."""
        if self.lists is None:
            return self.begin + i
        return self.lists.entry(self.number, 0, self.begin + i)

    @kv.func
    def base(self, entry: Any) -> Any:
        """The first key of a tile; past all keys if there is none."""
        if self.lists is None:
            return entry * KEYS
        return self.lists.of(entry, self.last)[0]

    @kv.func
    def whole(self, entry: Any) -> Any:
        """Whether, by the list, nothing is masked in a tile."""
        return False if self.lists is None else self.lists.of(entry, self.last)[2]


class SplitKeys(NamedTuple):
    """The keys that a tile of query rows attends to, and the key tiles of one split.

    Some row attends to the keys from ``first`` up to ``end``, every row to those from ``whole_first`` up to
    ``whole_end``. The split has ``num_tiles`` tiles.
    """

    first: Any
    end: Any
    whole_first: Any
    whole_end: Any
    tiles: SplitTiles
    num_tiles: Any


def lists_of_rows(c: LatentConfig, block_mask: Any, queries: Any, b: Any, row0: Any) -> Any:
    """The lists of a kernel's block mask, and the number of the tile of rows in it; None without a block mask."""
    if block_mask is None:
        return None
    rows, keys = c.case.blocks
    return KeyTiles(block_mask, keys), queries.first_tile(b, c.case.heads, rows) + row0 // rows


@kv.func
def keys_of(c, start, num_keys, row0, rows, splits, split, listed=None):
    """The keys of a tile of query rows, and the key tiles of one of its splits."""
    heads = c.case.heads
    first, whole_end = c.case.mask.interval(start + row0 // heads, num_keys)
    whole_first, last = c.case.mask.interval(start + (kv.math.min(row0 + c.rows, rows) - 1) // heads, num_keys)
    if listed is None:
        begin, end = first // KEYS, (last + (KEYS - 1)) // KEYS
    else:
        begin, end = kv.i32(0), listed[0].count(listed[1], 0)
    share = (kv.math.max(end - begin, 0) + (splits - 1)) // splits
    begin = begin + split * share
    tiles = SplitTiles(begin, last, *(listed or ()))
    return SplitKeys(first, last, whole_first, whole_end, tiles, kv.math.min(end, begin + share) - begin)


@kv.func
def of_functions(c, s, scales_log2, elements, b, place, start, base, arrays, whole=False):
    """Scores in powers of two after the score function, minus infinity where the mask function hides a key.

    ``scales_log2`` makes products powers of two; ``elements`` are the (row, key) of the scores in the tile. The mask is
    not evaluated in a tile that is known to be ``whole``.
    """
    _, _, row0, rows = place
    for k in kv.static(range(len(s))):
        row, key = elements[k]
        at = kv.math.min(row0 + row, rows - 1)
        h, q, token = at % c.case.heads, start + at // c.case.heads, base + key
        s[k] = modified_one(c.case, s[k] * scales_log2[k], b, h, q, token, None, arrays, factor=LN2)
        if c.case.mask.evaluated and not c.case.blocks:
            s[k] = kv.where(shown(c.case, b, h, q, token, arrays), s[k], float("-inf"))
    if c.case.mask.evaluated and c.case.blocks:
        if ~whole:
            for k in kv.static(range(len(s))):
                row, key = elements[k]
                at = kv.math.min(row0 + row, rows - 1)
                h, q, token = at % c.case.heads, start + at // c.case.heads, base + key
                s[k] = kv.where(shown(c.case, b, h, q, token, arrays), s[k], float("-inf"))


# --- query rows and values -------------------------------------------------------------------------


@kv.func
def load_query(c, a, tile, layout, place, thread, threads):
    """Copy query rows to shared memory; rows past the last repeat it, and are not written back.

    Maxima are found before scores are scaled, so a negative scale negates the query.
    """
    _, token0, row0, rows = place
    heads, elements = c.case.heads, 16 // c.case.query.itemsize
    held = chunks = c.case.size // elements
    if c.narrow:
        chunks = layout.panels * layout.pitch // 16  # products of 8 bits read whole panels
    for i in range(thread, c.rows * chunks, threads):
        row, chunk = i // chunks, i % chunks
        at = kv.math.min(row0 + row, rows - 1)
        column, size = chunk * elements, None
        if chunks > held:
            column, size = kv.math.min(column, (held - 1) * elements), kv.where(chunk < held, 16, kv.i32(0))
        source = a.query.address(token0 + at // heads, at % heads, column)
        kv.cp_async(tile + layout.chunk_offset(row, chunk), source, zero_fill_size=size)
    kv.cp_async_commit()
    kv.cp_async_wait(0)
    if a.scale < 0.0:
        for i in range(thread, c.rows * chunks, threads):
            at = tile + layout.chunk_offset(i // chunks, i % chunks)
            at.store(at.load(kv.u32, 4) ^ (0x80808080 if c.narrow else 0x80008000))
    kv.fence_proxy_async()


@kv.func
def clear_rows(layout, place, boxes, begin, end, thread, threads):
    """Zero the rows outside of [begin, end) in adjacent boxes: a weight of zero times NaN would be NaN."""
    for low, high in kv.static(((kv.i32(0), kv.math.min(begin, KEYS)), (kv.math.max(end, 0), kv.i32(KEYS)))):
        of_row, chunks = layout.pitch // 16, boxes * (layout.pitch // 16)
        for i in range(low * chunks + thread, high * chunks, threads):
            row, chunk = i // chunks, i % chunks
            at = chunk // of_row * layout.bytes + layout.chunk_offset(row, chunk % of_row)
            (place + at).store(kv.vector(kv.i32, 4))


# --- results ---------------------------------------------------------------------------------------


def ends_in_combine(case: Case, op: Any) -> bool:
    """Whether a row's result depends on more than its keys, which the combine kernel then adds."""
    return case.out is not part_of_query(case) or any(x is not None for x in (op.sinks, op.lse, op.prior))


def part_of_query(case: Case) -> DType:
    """The element type of a partial result: the query's, or for an 8-bit query the output's if that is 16-bit."""
    if case.query.bits != 8:
        return case.query
    return bf16 if case.out is f32 else case.out


def writes_results(c: LatentConfig, splits: Any) -> Any:
    """Whether a block writes the final results of its rows."""
    return False if c.partial else splits == 1


def writes_partials(c: LatentConfig, splits: Any) -> Any:
    """Whether a block stores partial results."""
    return True if c.partial else splits > 1


def part_of(c: LatentConfig, parts: Any, number: Any, splits: Any, split: Any, row: Any) -> Any:
    """The address of a row of a partial result."""
    pitch = c.case.value_size * c.part.itemsize
    return parts.address(0) + kv.i64((number * splits + split) * c.rows + row) * pitch


def lse_of(c: LatentConfig, parts: Any, tiles: Any, number: Any, splits: Any, split: Any, row: Any) -> Any:
    """The address of its base-2 log-sum-exp, after all rows."""
    behind = kv.i64(tiles * splits * c.rows) * (c.case.value_size * c.part.itemsize)
    return parts.address(0) + (behind + kv.i64((number * splits + split) * c.rows + row) * 4)


@kv.func
def write_rows(c, vector, parts, out, place, row, column, splits, split):
    """Write 8 columns of a tile's row to the output, or to a split's partial result."""
    number, token0, row0, rows = place
    at = row0 + row
    if at < rows:
        if writes_results(c, splits):
            out.store(token0 + at // c.case.heads, at % c.case.heads, column, value=vector)
        else:
            (part_of(c, parts, number, splits, split, row) + column * c.part.itemsize).store(vector)


def queries_of(query: Any, row_offsets: Any, kv_offsets: Any = None) -> RaggedQueries:
    return RaggedQueries(row_offsets, query.shape[0], kv_offsets)
