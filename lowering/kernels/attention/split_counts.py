# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How many splits of the keys of its tiles a launch of attention over tiles asks for: by shapes, on the host."""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.layout import RAGGED
from kvarn.lowering.index import Ix, const

from ..base import Expansion
from .key_splits import LEAST_KEYS
from .queries import has_lists

MOST_BY_SHAPE = 16  # splits that shapes ask for
LONG_SPLIT, UNITS = 8192, 12


def splits_for(tiles: Ix, batch: Ix, longest: Ix, multiprocessors: Ix, least_keys: int = LEAST_KEYS) -> Ix:
    """Splits of the keys of each of so many tiles of rows, at most: 1 where the tiles fill the device.

    What a launch knows: the shapes, and ``longest``, the keys that no sequence has more of. A multiprocessor takes one
    tile at a time; tiles cut s-fold take ceil(s * tiles / multiprocessors) rounds of 1/s, and some 5 us besides to
    write, read and combine partial results, more the more there are. So one round is best where it is nearly full (s =
    multiprocessors / tiles), else two (measured on an H200, 64 tokens over 100k keys: 1180 us, 177 us by 8 splits of
    one round, 185 us by 16 of two, 217 us by 32).

    More tiles than that are cut for another reason: of several sequences one may be much longer than the others, and
    its tiles alone would be at work in the end. Splits of :data:`LONG_SPLIT` keys bound what is waited for (two prompts
    of 512 beside 64 tokens over 100k keys: 1307 us, 496 us with up to 4 splits). Each costs a look even where nobody is
    as long, which is why there are no more than :data:`UNITS` a multiprocessor.

    ``least_keys``: of a split, at least. How long the keys of a tile are is known on the device alone, where one with
    few of them has fewer splits.
    """
    one = Ix(const(1))

    def chosen(condition: ir.Value, a: Ix, b: Ix) -> Ix:
        return Ix(arith.select(condition, a.value, b.value))

    once, twice = multiprocessors // tiles, multiprocessors * 2 // tiles
    few = chosen((once * tiles * 8).below(multiprocessors * 7), chosen(twice.below(3), one, twice), once)
    many = chosen(batch.below(2), one, (multiprocessors * UNITS // tiles).least(longest // LONG_SPLIT))
    found = few.greatest(many).least(longest // least_keys).least(Ix(const(MOST_BY_SHAPE)))
    return found.greatest(one)


def halved(tiles: Ix, slots: Ix, longest: Ix, least_keys: int) -> Ix:
    """Splits of the keys of tiles that several blocks of a multiprocessor take: 2 where rounds of halves are fewer.

    384 tiles for 264 blocks are two rounds of tiles, the second of which is half empty, or three of halves (H200, 16
    tokens over 48 x 4k, heads of 64: 104.5 us, 94.6 so).
    """
    once, twice = ((tiles * s + (slots - 1)) // slots for s in (1, 2))
    fewer = arith.select(twice.below(once * 2), const(2), const(1))
    return Ix(arith.select(slots.below(tiles), fewer, const(1))).least((longest // least_keys).greatest(Ix(const(1))))


def longest_of(op: Any, at: Expansion) -> Ix:
    """Keys that no sequence has more of, as the collection or the operand says: kernels do not rely on it."""
    if has_lists(op):
        return at.dim(op.indices, 1)
    handle = op.keys if op.operation.name == "kv.operand_attention" else op.collection
    spec = at.spec(handle)
    if spec.of_cache:
        return at.field(handle, "max_cache_length")
    return at.field(handle, "num_blocks" if spec.kind == RAGGED else "capacity")
