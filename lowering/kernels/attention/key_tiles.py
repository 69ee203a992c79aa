# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks as attention reads them: the tiles of keys that a tile of query rows sees, listed.

What is listed was computed from the mask, once a step (:mod:`block_mask`). A list of another step gives other results,
and touches nothing that there is not: tiles past the keys are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv

from .chosen_pages import NOWHERE

WHOLE = 1  # of an entry: every row of the tile sees every key; above it is the tile's number
# Of an entry that is not whole: every row sees all that the mask's parts without arrays show it.
BY_POSITIONS = 1 << 30


@dataclass(frozen=True)
class KeyTiles:
    """The lists of a batch inside a kernel: ``blocks`` [tiles, 1 or KV heads, 1 + most], tiles of ``keys`` keys."""

    blocks: Any
    keys: int

    @kv.func
    def count(self, tile: Any, head: Any) -> Any:
        """Tiles of keys that a tile of query rows of a KV head walks over."""
        return kv.math.clamp(self.blocks[tile, self._list(head), 0], 0, self.blocks.shape[2] - 1)

    @kv.func
    def at(self, tile: Any, head: Any, i: Any, num_keys: Any) -> tuple[Any, Any, Any]:
        """(first token, whether there is such a key, whether all of the tile is seen) of entry i."""
        return self.of(self.entry(tile, head, i), num_keys)

    @kv.func
    def entry(self, tile: Any, head: Any, i: Any) -> Any:
        """Entry i of a list, whose last stands for those behind it."""
        return self.blocks[tile, self._list(head), kv.math.min(i + 1, self.blocks.shape[2] - 1)]

    @kv.func
    def of(self, entry: Any, num_keys: Any) -> tuple[Any, Any, Any]:
        """As :meth:`at`, of an entry that was read."""
        first = ((entry & ~BY_POSITIONS) >> 1) * self.keys
        there = kv.u32(first) < kv.u32(num_keys)
        whole = there & ((entry & WHOLE) != 0) & (first + self.keys <= num_keys)
        return kv.where(there, first, NOWHERE), there, whole

    @kv.func
    def longest(self, tile: Any, heads: int) -> Any:
        """Entries of the longest list of a tile of query rows."""
        found = self.count(tile, 0)
        if self.blocks.shape[1] > 1:
            for head in kv.static(range(1, heads)):
                found = kv.math.max(found, self.count(tile, head))
        return found

    def _list(self, head: Any) -> Any:
        """Masks that do not depend on the head have one list for all."""
        return kv.math.min(head, self.blocks.shape[1] - 1)


@dataclass(frozen=True)
class TilesOfSequences:
    """The lists of a batch of which every sequence has one tile of query rows: lists as :class:`ChosenPages` are.

    ``rows``: of a tile, at least as many as a sequence has. ``capacity``: tokens that a sequence has room for.
    """

    tiles: KeyTiles
    queries: Any
    group: int
    rows: int
    capacity: Any

    @property
    def unit(self) -> int:
        """Tokens of an entry."""
        return self.tiles.keys

    @kv.func
    def of(self, b: Any) -> Any:
        """What the lists of a sequence are found by."""
        return self.queries.first_tile(b, self.group, self.rows)

    @kv.func
    def count(self, tile: Any, head: Any) -> Any:
        return self.tiles.count(tile, head)

    @kv.func
    def longest(self, tile: Any, heads: int) -> Any:
        return self.tiles.longest(tile, heads)

    @kv.func
    def first_token(self, tile: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry, plus :data:`WHOLE` where it is seen whole; past all tokens behind the list."""
        found = kv.i32(NOWHERE)
        if entry < count:
            first, there, whole = self.tiles.at(tile, head, entry, self.capacity)
            found = kv.where(there & whole, first + WHOLE, first)
        return found


@dataclass(frozen=True)
class TilesOfRow:
    """The lists of one query row, whose tile is ``number``; as :class:`ChosenPages` are asked."""

    tiles: KeyTiles
    number: Any
    num_keys: Any

    @property
    def unit(self) -> int:
        """Tokens of an entry."""
        return self.tiles.keys

    @kv.func
    def count(self, b: Any, head: Any) -> Any:
        return self.tiles.count(self.number, head)

    @kv.func
    def first_token(self, b: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry."""
        return self.tiles.at(self.number, head, entry, self.num_keys)[0]
