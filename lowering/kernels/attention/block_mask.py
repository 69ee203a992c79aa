# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.block_mask: the key tiles that a tile of query rows attends to, found by evaluating the mask for every pair.

There are two kernels. In the first, a warp has one tile of rows and keys and a lane some of the keys; the warp
evaluates the mask row by row until it has found both an unmasked and a masked element, and writes the result at the
tile's position of the list. In the second, a warp compacts a list in place. On the host one thread does both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.ops.attention import ARRAYS
from kvarn.dsl import functions

from .. import expands
from ..base import Expansion
from ..common import WARP, begin, starts_early
from ..scans import warp_scan
from .arguments import AttentionArguments
from .case import Case, Masking, start_of
from .chosen_pages import chosen_pages
from .key_tiles import BY_POSITIONS, WHOLE
from .queries import heads_of, is_padded, tiles_of
from .softmax import outer_of, shown

WARPS = 4  # per block
CHUNK = 8  # key tiles per block
SEEN = 2  # what the first kernel stores for a tile, possibly with WHOLE or BY_POSITIONS; 0: all masked


@dataclass(frozen=True)
class Tiles:
    """What the kernels are specialised for: a case, of which they read mask and heads, and the tiles' extents.

    Key tiles are numbered along the sequence or, with lists of pages, along the pages of the list.

    ``by_head``: the mask depends on the query head. ``lanes`` threads share a tile.
    """

    case: Case
    rows: int
    keys: int
    by_head: bool
    lanes: int

    @property
    def per_page(self) -> int:
        """Key tiles per listed page."""
        return self.case.spec.page_size // self.keys

    @kv.func
    def rows_to_evaluate(self, row0: Any, count: Any) -> tuple[Any, Any]:
        """(first, end) of the rows for which the mask is evaluated, or of the tokens if heads do not matter."""
        end = kv.math.min(row0 + self.rows, count)
        if self.by_head:
            return row0, end
        return row0 // self.case.group, (end + (self.case.group - 1)) // self.case.group

    @kv.func
    def position(self, head: Any, start: Any, row: Any) -> tuple[Any, Any]:
        """(query head, absolute position) of such a row or token; the head is 0 if the mask does not depend on it."""
        if self.by_head:
            return head * self.case.group + row % self.case.group, start + row // self.case.group
        return kv.i32(0), start + row

    @kv.func
    def any_lane(self, condition: Any) -> Any:
        if self.lanes > 1:
            return kv.ballot(condition) != 0
        return condition

    @kv.func
    def state(self, b: Any, head: Any, start: Any, row0: Any, count: Any, num_keys: Any, tile: Any, arrays: Any) -> Any:
        """The state of a key tile: 0, SEEN, or SEEN with WHOLE or BY_POSITIONS."""
        lane = kv.lane_id() if self.lanes > 1 else kv.i32(0)
        row, end = self.rows_to_evaluate(row0, count)
        some, whole = kv.bool(False), tile * self.keys + self.keys <= num_keys
        outer = outer_of(self.case)
        by_positions = kv.bool(outer is not None)
        while (row < end) & ~(some & ~whole & ~by_positions):
            h, q = self.position(head, start, row)
            mine, all_of_mine, mine_by_positions = kv.bool(False), kv.bool(True), kv.bool(True)
            for i in range(lane, self.keys, self.lanes):
                k = tile * self.keys + i
                seen = shown(self.case, b, h, q, k, arrays) & (k < num_keys)
                mine, all_of_mine = mine | seen, all_of_mine & seen
                if outer is not None:
                    mine_by_positions = mine_by_positions & (seen | ~(outer(b, h, q, k) & (k < num_keys)))
            if outer is not None:
                by_positions = by_positions & ~self.any_lane(~mine_by_positions)
            some, whole = some | self.any_lane(mine), whole & ~self.any_lane(~all_of_mine)
            row = row + 1
        part = kv.where(by_positions, kv.i32(SEEN + BY_POSITIONS), SEEN)
        return kv.where(some, kv.where(whole, SEEN + WHOLE, part), 0)

    @kv.func
    def extent(self, collection: Any, queries: Any, number: Any, head: Any, chosen: Any) -> tuple[Any, ...]:
        """(sequence, position of its first query, first row, rows, keys, first key tile, end of the key tiles to
        evaluate) of a tile of rows; without rows there are no key tiles.
        """
        b, _, row0, count = queries.tile(number, self.case.group, self.rows)
        start, num_keys = start_of(self.case, collection, collection, queries, b)
        first = kv.i32(self.case.mask.first(start + row0 // self.case.group)) // self.keys
        if chosen is None:
            tiles = (num_keys + (self.keys - 1)) // self.keys
        else:
            tiles = chosen.count(b, head) * self.per_page
        return b, start, row0, count, num_keys, first, kv.where(row0 < count, tiles, 0)

    @kv.func
    def tile(self, chosen: Any, b: Any, head: Any, i: Any) -> Any:
        """The number of a key tile in its sequence."""
        if chosen is None:
            return i
        return chosen.first_token_of(b, head, i // self.per_page) // self.keys + i % self.per_page


def ask_kernel(t: Tiles, early: bool) -> Any:
    """The kernel that evaluates tiles: each list has ``chunks`` blocks of :data:`CHUNK` tiles."""

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def ask_block_mask(a: AttentionArguments, chunks: kv.i32):
        begin(early)
        blocks = a.block_mask
        chunk, place = kv.block_id.x % chunks * CHUNK, kv.block_id.x // chunks
        head, number = place % blocks.shape[1], place // blocks.shape[1]
        queries, chosen = a.queries(t.case), chosen_pages(a.collection, a.pages, a.page_counts)
        b, start, row0, count, num_keys, first, end = t.extent(a.collection, queries, number, head, chosen)
        end = kv.math.min(kv.math.min(end, blocks.shape[2] - 1), chunk + CHUNK)
        arrays = a.arrays
        for i in range(chunk + kv.warp_id(), end, WARPS):
            tile, found = t.tile(chosen, b, head, i), kv.i32(0)
            if tile >= first:
                found = t.state(b, head, start, row0, count, num_keys, tile, arrays)
            if kv.lane_id() == 0:
                blocks[number, head, 1 + i] = found

    return ask_block_mask


def list_kernel(t: Tiles, early: bool) -> Any:
    """The kernel that compacts lists: one warp per list."""

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def list_block_mask(a: AttentionArguments):
        begin(early)
        blocks = a.block_mask
        place, lane = kv.block_id.x * WARPS + kv.warp_id(), kv.lane_id()
        if place < blocks.shape[0] * blocks.shape[1]:
            head, number = place % blocks.shape[1], place // blocks.shape[1]
            queries, chosen = a.queries(t.case), chosen_pages(a.collection, a.pages, a.page_counts)
            b, *_, end = t.extent(a.collection, queries, number, head, chosen)
            end, listed = kv.math.min(end, blocks.shape[2] - 1), kv.i32(0)
            for first in range(0, end, WARP):
                i, found = first + lane, kv.i32(0)
                if i < end:
                    found = blocks[number, head, 1 + i]
                # After the scan all lanes have read their entries, and entries move down or stay.
                last = warp_scan(kv.where(found != 0, 1, 0))
                if found != 0:
                    blocks[number, head, listed + last] = t.tile(chosen, b, head, i) * 2 + (found & ~SEEN)
                listed = listed + kv.shuffle_idx(last, WARP - 1)
            if lane == 0:
                blocks[number, head, 0] = listed

    return list_block_mask


def host_kernel(t: Tiles) -> Any:
    """The host's kernel: one thread per list."""

    @kv.kernel
    def block_mask(a: AttentionArguments):
        head, number, blocks = kv.block_id.x, kv.block_id.y, a.block_mask
        queries, chosen = a.queries(t.case), chosen_pages(a.collection, a.pages, a.page_counts)
        b, start, row0, count, num_keys, first, end = t.extent(a.collection, queries, number, head, chosen)
        arrays, listed = a.arrays, kv.i32(0)
        for i in range(first if chosen is None else 0, kv.math.min(end, blocks.shape[2] - 1)):
            tile, found = t.tile(chosen, b, head, i), kv.i32(0)
            if tile >= first:
                found = t.state(b, head, start, row0, count, num_keys, tile, arrays)
            if found != 0:
                listed = listed + 1
                blocks[number, head, listed] = tile * 2 + (found & ~SEEN)
        blocks[number, head, 0] = listed

    return block_mask


@expands("kv.block_mask")
def expand(op: Any, at: Expansion) -> None:
    spec, host, heads = at.spec(op.collection), at.target.is_host, heads_of(op, at)
    plain, mask = Case.plain(spec, at.dtype(op.query), heads), Masking(op.mask.value)
    case, by_head = replace(plain, mask=mask, padded=is_padded(op)), functions.registered(mask.name).by_head
    t = Tiles(case, op.rows.value, op.keys.value, by_head, 1 if host else WARP)
    tiles, lists = tiles_of(op, at, case.group, t.rows), at.dim(op.blocks, 1)
    a = replace(AttentionArguments.of(op), block_mask=op.blocks, keys=None)  # the op's attribute keys is a tile extent
    if host:
        at.launch(host_kernel(t), [a], (lists, tiles, 1), (1, 1, 1), key=t)
        return
    chunks, early, threads = (at.dim(op.blocks, 2) + (CHUNK - 2)) // CHUNK, starts_early(at), (WARPS * WARP, 1, 1)
    at.launch(ask_kernel(t, early), [a, chunks], (tiles * lists * chunks, 1, 1), threads, key=t, programmatic=early)
    blocks = (tiles * lists + (WARPS - 1)) // WARPS
    at.launch(list_kernel(t, early), [a.without(*ARRAYS)], (blocks, 1, 1), threads, key=t, programmatic=early)
