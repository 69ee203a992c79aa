# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks in the attention kernels: the list of key tiles for each tile of query rows.

The lists were computed from the mask, once per step (:mod:`block_mask`). A stale list gives wrong results, but no
out-of-bounds access: tiles past the keys are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv

from .chosen_pages import NOWHERE

WHOLE = 1  # flag of an entry: nothing in the tile is masked; the bits above are the tile's number
# Flag of an entry that is not whole: the mask's conditions on positions alone decide.
BY_POSITIONS = 1 << 30


@dataclass(frozen=True)
class KeyTiles:
    """The lists of a batch inside a kernel: ``blocks`` [tiles, 1 or KV heads, 1 + most], tiles of ``keys`` keys."""

    blocks: Any
    keys: int

    @kv.func
    def count(self, tile: Any, head: Any) -> Any:
        """Key tiles in the list of a tile of query rows and a KV head."""
        return kv.math.clamp(self.blocks[tile, self._list(head), 0], 0, self.blocks.shape[2] - 1)

    @kv.func
    def at(self, tile: Any, head: Any, i: Any, num_keys: Any) -> tuple[Any, Any, Any]:
        """(first token, whether the tile has keys, whether nothing in it is masked) of entry i."""
        return self.of(self.entry(tile, head, i), num_keys)

    @kv.func
    def entry(self, tile: Any, head: Any, i: Any) -> Any:
        """Entry i of a list; past the end, the last entry."""
        return self.blocks[tile, self._list(head), kv.math.min(i + 1, self.blocks.shape[2] - 1)]

    @kv.func
    def of(self, entry: Any, num_keys: Any) -> tuple[Any, Any, Any]:
        """As :meth:`at`, for an entry that was read."""
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
        """The index of a head's list: masks that do not depend on the head have one list."""
        return kv.math.min(head, self.blocks.shape[1] - 1)


@dataclass(frozen=True)
class TilesOfSequences:
    """The lists of a batch with one tile of query rows per sequence, with the interface of :class:`ChosenPages`.

    ``rows``: of a tile, at least as many as a sequence has. ``capacity``: the most tokens of a sequence.
    """

    tiles: KeyTiles
    queries: Any
    group: int
    rows: int
    capacity: Any

    @property
    def unit(self) -> int:
        """Tokens per entry."""
        return self.tiles.keys

    @kv.func
    def of(self, b: Any) -> Any:
        """The index of a sequence's lists."""
        return self.queries.first_tile(b, self.group, self.rows)

    @kv.func
    def count(self, tile: Any, head: Any) -> Any:
        return self.tiles.count(tile, head)

    @kv.func
    def longest(self, tile: Any, heads: int) -> Any:
        return self.tiles.longest(tile, heads)

    @kv.func
    def first_token(self, tile: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry, plus :data:`WHOLE` if nothing is masked; past all tokens after the list."""
        found = kv.i32(NOWHERE)
        if entry < count:
            first, there, whole = self.tiles.at(tile, head, entry, self.capacity)
            found = kv.where(there & whole, first + WHOLE, first)
        return found


@dataclass(frozen=True)
class TilesOfRow:
    """The lists of one query row in the tile ``number``, with the interface of :class:`ChosenPages`."""

    tiles: KeyTiles
    number: Any
    num_keys: Any

    @property
    def unit(self) -> int:
        """Tokens per entry."""
        return self.tiles.keys

    @kv.func
    def count(self, b: Any, head: Any) -> Any:
        return self.tiles.count(self.number, head)

    @kv.func
    def first_token(self, b: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry."""
        return self.tiles.at(self.number, head, entry, self.num_keys)[0]
