# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sources of key tiles for attention over tiles: a whole sequence, listed pages, a block mask, an MLA chunk.

A source knows which tiles some query rows visit (:meth:`Keys.part`, for one of several splits), loads them one by one
(:meth:`Keys.tiles`), and masks the scores (:meth:`Keys.hide`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.lowering.tiles.cache_rows import is_in_pool

from .arguments import AttentionArguments
from .chosen_pages import ChosenPages, chosen_pages
from .key_splits import key_range, split_of
from .key_tiles import BY_POSITIONS, KeyTiles
from .softmax import outer_of, seen_by, seen_by_positions
from .specialisation import TileArguments, TileKernel


@dataclass(frozen=True)
class KeyTile:
    """A tile of keys [N, D] and of values [N, V], with the positions [N] of the keys.

    ``whole``: no element is masked. ``by_positions``: the mask's conditions on positions alone decide. For block masks.
    """

    k: Any
    v: Any
    at: Any
    whole: Any = None
    by_positions: Any = None


@dataclass(frozen=True)
class Keys:
    """All keys of a sequence, in order; the base of the other sources.

    Attributes
    ----------
    s : TileKernel
    a : AttentionArguments
    t : TileArguments
    rows : attention_tiles.QueryRows
        The query rows that visit the keys.
    split : i32
        The index of this split, out of ``t.splits``.
    columns : int
        Columns per key tile.
    keys, values : caches or operands
        The source of the tiles.
    begin : i32
        The first key that any of the rows may attend to.
    """

    s: TileKernel
    a: AttentionArguments
    t: TileArguments
    rows: Any
    split: Any
    columns: int
    keys: Any
    values: Any
    begin: Any

    @kv.func
    def count(self) -> Any:
        """Tiles that the rows visit."""
        return (self.rows.num_keys + (self.s.keys - 1)) // self.s.keys

    @kv.func
    def range(self) -> tuple[Any, Any]:
        """[first, end) of the tiles, without those that all rows mask at either end."""
        rows = self.rows
        return key_range(self.s.case, self.s.keys, self.s.rows, rows.start, rows.row0, rows.count, rows.num_keys)

    @kv.func
    def part(self) -> tuple[Any, Any, Any]:
        """(first, end, whether there are other splits) of this split's tiles."""
        if self.t.splits is None:
            return 0, self.count(), False
        low, high = self.range()
        return split_of(self.s.least, low, high, self.t.splits, self.split)

    @kv.func
    def end(self) -> Any:
        """The end of the keys whose values are read: values past it are zeros."""
        rows = self.rows
        if not self.s.on_host and not self.s.values_end_with_mask:
            return rows.num_keys
        last = (kv.math.min(rows.row0 + self.s.rows, rows.count) - 1) // self.s.case.group
        return self.s.case.mask.end(rows.start + last, rows.num_keys)

    @kv.func
    def load(self, first: Any, until: Any, at: Any, whole: Any = None, by_positions: Any = None) -> KeyTile:
        """The tile with the keys [first, until), at positions from ``at`` up."""
        s, rows = self.s, self.rows
        of_row = {"rows": s.keys, "rope": s.case.row.rope, "inline_scales": s.case.row.inline}
        if self.a.lists is not None:
            of_row = {**of_row, "lists": self.a.lists}
        of_keys = {"columns": self.columns, "tail": "any", "descriptor": self.t.key_map, **s.of_keys, **of_row}
        of_values = {"begin": self.begin, "descriptor": self.t.value_map, **s.of_values, **of_row}
        k = self.keys.tile(rows.b, rows.head, first, until, **of_keys)
        v = self.values.tile(rows.b, rows.head, first, until, **of_values)
        return KeyTile(k, v, at + kv.tile_index(s.keys), whole, by_positions)

    @kv.func
    def tiles(self, low: Any, high: Any) -> Any:
        """The tiles [low, high) in order."""
        end = self.end()
        for j in range(low, high):
            first = j * self.s.keys
            yield self.load(first, end, first)

    @kv.func
    def hide(self, x: Any, tile: KeyTile, at: tuple[Any, ...], arrays: Any) -> Any:
        """The scores [M, N] of a tile with minus infinity for masked keys.

        ``at``: (sequence, query heads, positions of queries, positions of keys).
        """
        seen = seen_by(self.s.case, *at, self.rows.num_keys, arrays)
        if self.a.lists is not None:
            seen = seen & self.named(tile)[None, :]
        return kv.masked(x, seen)

    @kv.func
    def named(self, tile: KeyTile) -> Any:
        """Whether each key of a tile is a valid pool row, where lists name the keys."""
        lists, count, at = self.a.lists, self.rows.num_keys, tile.at
        return is_in_pool(self.keys, lists.gather(self.rows.b, kv.math.min(at, count - 1), mask=at < count))


@dataclass(frozen=True)
class PageKeys(Keys):
    """The keys of listed pages, ``chosen``."""

    chosen: ChosenPages

    @kv.func
    def count(self) -> Any:
        listed = kv.i32(0)
        if self.rows.num_keys > 0:
            listed = self.chosen.count(self.rows.b, self.rows.head)
        return listed * (self.s.case.spec.page_size // self.s.keys)

    @kv.func
    def tiles(self, low: Any, high: Any) -> Any:
        end, per_page = self.end(), self.s.case.spec.page_size // self.s.keys
        for j in range(low, high):
            at = self.chosen.first_token_of(self.rows.b, self.rows.head, j // per_page)
            there = at < self.rows.num_keys
            at = kv.where(there, at + j % per_page * self.s.keys, at)
            yield self.load(kv.where(there, at, 0), kv.where(there, end, 0), at)


@dataclass(frozen=True)
class BlockKeys(Keys):
    """The keys of the tiles in a block mask, ``blocks``."""

    blocks: KeyTiles

    @kv.func
    def count(self) -> Any:
        return self.blocks.count(self.rows.number, self.rows.head)

    @kv.func
    def range(self) -> tuple[Any, Any]:
        return kv.i32(0), self.count()

    @kv.func
    def tiles(self, low: Any, high: Any) -> Any:
        end, has_outer = self.end(), outer_of(self.s.case) is not None
        for j in range(low, high):
            entry = self.blocks.entry(self.rows.number, self.rows.head, j)
            at, there, whole = self.blocks.of(entry, self.rows.num_keys)
            by_positions = has_outer and (entry & BY_POSITIONS) != 0
            yield self.load(kv.where(there, at, 0), kv.where(there, end, 0), at, whole, by_positions)

    @kv.func
    def hide(self, x: Any, tile: KeyTile, at: tuple[Any, ...], arrays: Any) -> Any:
        if self.s.on_host:
            return kv.masked(x, seen_by(self.s.case, *at, self.rows.num_keys, arrays))
        return self.hide_in_part(x, tile, at, arrays)

    @kv.func
    def hide_in_part(self, x: Any, tile: KeyTile, at: tuple[Any, ...], arrays: Any) -> Any:
        """As :meth:`hide`, for tiles that are not whole."""
        if ~tile.whole:
            if tile.by_positions:
                x = kv.masked(x, seen_by_positions(self.s.case, *at, self.rows.num_keys))
            else:
                x = kv.masked(x, seen_by(self.s.case, *at, self.rows.num_keys, arrays))
        return x


@dataclass(frozen=True)
class ChunkKeys(Keys):
    """The keys of an MLA prefill's chunk: rows of a buffer from ``row`` up, latent rows from ``token`` up."""

    row: Any
    token: Any

    @kv.func
    def tiles(self, low: Any, high: Any) -> Any:
        s, a, rows, chunk = self.s, self.a, self.rows, self.s.case.of_chunk
        of_latent = {"columns": chunk.rope, "first_column": chunk.first_column, "rope": chunk.latent.rope}
        for j in range(low, high):
            first = j * s.keys
            at = first + kv.tile_index(s.keys)
            row, there = self.row + at, at < rows.num_keys
            left = s.dtype(a.chunk_keys.load_rows(row, rows.head, mask=there, columns=chunk.nope))
            of_rows = {"rows": s.keys, "tail": "any", "dtype": s.dtype, **of_latent}
            right = self.keys.tile(rows.b, 0, self.token + first, self.token + rows.num_keys, **of_rows)
            of_values = {"columns": s.value_columns, "stored": s.values}
            v = s.of_weights(a.chunk_values.load_rows(row, rows.head, mask=there, **of_values))
            yield KeyTile(kv.concatenate(left, right), v, at)


def source_of(s: TileKernel, a: AttentionArguments, t: TileArguments, rows: Any, split: Any, columns: int) -> Keys:
    """The source of keys for a kernel's arguments; products read ``columns`` columns of a key."""
    if s.case.chunk is not None:
        row, token = a.chunk_rows(rows.b)[0], a.chunk_start(rows.b)
        return ChunkKeys(s, a, t, rows, split, columns, a.collection.get_key_cache(a.layer), None, None, row, token)
    given = s, a, t, rows, split, columns, *a.caches(s.case), s.case.mask.first(rows.start + rows.row0 // s.case.group)
    if a.pages is not None:
        return PageKeys(*given, chosen_pages(a.collection, a.pages, a.page_counts))
    return Keys(*given) if a.block_mask is None else BlockKeys(*given, KeyTiles(a.block_mask, s.keys))


__all__ = ["BlockKeys", "ChunkKeys", "KeyTile", "Keys", "PageKeys", "source_of"]
