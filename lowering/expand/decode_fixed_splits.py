# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fixed splits of decode attention: their partial results are added as a tree that a sequence's length alone decides.

``RADIX`` neighbouring splits are a node, ``RADIX`` of these a node of the next level, and the root has the rest; what a
node has is that of its parts, added from left to right. A work unit keeps the nodes that begin in it in shared memory
and adds to them whenever a split ends, so that a sequence in one unit never leaves the multiprocessor. Where a unit
begins or ends inside a sequence, it leaves an *item* in the workspace for each run of splits that it has added:

- a node whose parent begins before the unit: :data:`ORPHAN` s, in ascending and then descending sizes;
- at its end, the nodes that are not complete.

Batches of few sequences leave every split, which a second kernel adds as the tree has them
(:mod:`attention_combine`).

So a cut costs a few items, whatever it is between. The warp that finds itself last goes through a sequence's items in
order and adds each where the tree has it: the same operations on the same numbers, whoever has done which of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvarn as kv

from .decode_schedule import RADIX, TREE_LEVELS, Config

OPEN, ORPHAN, WHOLE = range(3)  # a result is in a node that has others to come; is to be left; is the sequence's
SHIFT = RADIX.bit_length() - 1
ROOT = TREE_LEVELS - 1  # the level of the root's parts


@kv.func
def item_size(p: Any, end: Any, count: Any) -> Any:
    """Splits of the item that begins at p, of a unit that has a sequence's splits up to ``end`` of ``count``.

    The largest node that begins there, if the unit has it whole; else as many whole parts of it as there are.
    """
    size, left = kv.i32(1), end - p
    parts = left
    for k in kv.static(range(1, TREE_LEVELS)):
        size = kv.where((p & (RADIX**k - 1)) == 0, RADIX**k, size)
        parts = kv.where(left >= RADIX**k, left & -(RADIX**k), parts)
    size = kv.where(p == 0, RADIX**TREE_LEVELS, size)
    return kv.where((end == count) | (size <= left), kv.math.min(size, left), parts)


@kv.func
def first_slot(own: Any) -> Any:
    """Where a unit's items of a sequence are, of which it has the splits from ``own`` on: it begins one at most."""
    return kv.where(own == 0, RADIX * TREE_LEVELS, 0)


@kv.func
def level_of(size: Any) -> Any:
    """The level of the parts that an item consists of."""
    found = kv.i32(0)
    for k in kv.static(range(1, TREE_LEVELS)):
        found = found + kv.i32(size >= RADIX**k)
    return found


def fixed_splits(c: Config, work: SimpleNamespace, partial: SimpleNamespace) -> Any:
    """What begins a sequence and ends a split, for a configuration, its scheduler and functions of partial results.

    ``nodes`` are the warp's places in shared memory, one a level; ``held`` what a unit remembers of a sequence: tiles
    of a split (``each``), splits (``count``), the first that it has (``own``), the one that it is at (``split``), the
    first that no item has (``item``), and where the next item goes (``slot``).
    """
    # Items whose loads are under way together: what registers allow.
    TOGETHER = max(1, min(3, 24 // (c.row_steps * c.column_tiles)))

    @kv.func
    def push(nodes, m, l, o, level, p, end, own, count):
        """Add the result of the splits [p, end), which are parts of a level, to its node, and that to its parent, ...

        m, l and o become those of the splits up to ``end`` that the last of these nodes has.
        """
        outcome, going = kv.i32(OPEN), kv.bool(True)
        while going:
            parts = kv.i32(1) << ((level + 1) * SHIFT)
            node = kv.where(level == ROOT, 0, p & -parts)
            place = nodes + level * (c.quads * 512)
            if node < own:
                outcome, going = kv.i32(ORPHAN), kv.bool(False)
            else:
                if node != p:
                    partial.add(partial.load(place), m, l, o)
                if (end == count) | ((level < ROOT) & ((end & (parts - 1)) == 0)):
                    going = level < ROOT
                    outcome = kv.where(going, OPEN, WHOLE)
                    p, level = node, level + 1
                else:
                    partial.keep(place, m, l, o)
                    going = kv.bool(False)
        return outcome

    @kv.func
    def leave_item(units, partials, part, row0, r, held, end, m, l, o, n, lane):
        """Leave the item of the splits up to ``end``."""
        to = work.slot_of(partials, r * c.unit_slots + held.slot, part, lane)
        partial.leave(to, m, l, o, row0, n, lane)
        held.slot, held.item = held.slot + 1, end

    @kv.func
    def leave_nodes(units, partials, part, row0, r, held, end, nodes, n, lane):
        """Leave what the nodes have that others complete."""
        while held.item < end:
            size = item_size(held.item, end, held.count)
            m, l, o = partial.load(nodes + level_of(size) * (c.quads * 512))
            leave_item(units, partials, part, row0, r, held, held.item + size, m, l, o, n, lane)

    @kv.func
    def take(units, partials, tile_indptr, b, part, at, count, lane):
        """The next item of a sequence: (its first split, how many, its result); none when there are no more."""
        p, size = at.p, kv.where(at.p < count, item_size(at.p, at.end, count), 0)
        found = partial.load(work.slot_of(partials, at.r * c.unit_slots + at.slot, part, lane))
        if p + size < count:
            at.p, at.slot = p + size, at.slot + 1
            while at.p >= at.end:
                at.slot = kv.i32(0)
                at.r, at.end = at.r + 1, work.split_at(units, tile_indptr, b, at.r + 2)
        else:
            at.p = count
        return p, size, found

    @kv.func
    def combine(units, partials, tile_indptr, b, part, row0, n, begin, count, nodes, m, l, o, lane):
        """Add a sequence's items from split ``begin`` on, in order, to the nodes of those before."""
        holder = partial.holder(row0, n, lane)
        r, _ = work.units_of(units, tile_indptr, b)
        end = work.split_at(units, tile_indptr, b, r + 1)
        while end <= begin:
            r = r + 1
            end = work.split_at(units, tile_indptr, b, r + 1)
        at = SimpleNamespace(r=r, p=begin, end=end, slot=first_slot(begin))
        while at.p < count:
            items = [take(units, partials, tile_indptr, b, part, at, count, holder) for _ in range(TOGETHER)]
            for p, size, found in kv.static(items):
                if size > 0:
                    for mine, theirs in kv.static(zip((m, l, o), found, strict=True)):
                        for i, x in kv.static(enumerate(theirs)):
                            mine[i] = x
                    push(nodes, m, l, o, level_of(size), p, p + size, 0, count)

    @kv.func
    def begin(held, tile_indptr, b, batch_tile):
        """Remember a sequence of which a tile is the unit's first."""
        held.each, held.count = work.tiles_of_split(tile_indptr, b), work.split_count(tile_indptr, b)
        held.own = work.split_of(tile_indptr, b, batch_tile)
        held.split, held.item, held.slot = held.own, held.own, first_slot(held.own)

    @kv.func
    def finish(units, partials, counters, tile_indptr, b, part, row0, r, held, more, nodes, m, l, o, n, lane):
        """Whether this warp has the whole result of a sequence, after one of its splits; if not, it has left its part.

        ``more`` splits of the sequence are to come in this unit.
        """
        whole = held.count == 1
        if c.combine:
            if ~whole:
                to = work.slot_of(partials, b * c.most_splits + held.split, part, lane)
                partial.leave(to, m, l, o, row0, n, lane)
        else:
            end = held.split + 1
            outcome = push(nodes, m, l, o, kv.i32(0), held.split, end, held.own, held.count)
            if outcome == ORPHAN:
                leave_item(units, partials, part, row0, r, held, end, m, l, o, n, lane)
            whole = outcome == WHOLE
            if ~(more | whole):
                whole = last(
                    units, partials, counters, tile_indptr, b, part, row0, r, held, end, nodes, m, l, o, n, lane
                )
        return whole

    @kv.func
    def last(units, partials, counters, tile_indptr, b, part, row0, r, held, end, nodes, m, l, o, n, lane):
        """Whether this warp is the last to end with a sequence, of which it has no more: then it combines all of it."""
        taken = end - held.own
        others = held.count - taken
        counter = counters.address(0) + (b * c.row_groups + part) * 4
        arrived, first = partial.arrived(counter, lane), end
        # The last one goes on from its nodes where these are of all splits before.
        if (arrived != others) | (held.own > 0):
            first = kv.i32(0)
            leave_nodes(units, partials, part, row0, r, held, end, nodes, n, lane)
            if arrived != others:  # somebody is still at work: tell of this part, and look again
                arrived = partial.tell(counter, taken, lane)
        if arrived == others:
            partial.begin_again(counter, lane)
            combine(units, partials, tile_indptr, b, part, row0, n, first, held.count, nodes, m, l, o, lane)
        return arrived == others

    return SimpleNamespace(begin=begin, finish=finish)
