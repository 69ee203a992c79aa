# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How many splits of the keys of its tiles a launch of attention over tiles asks for: by shapes, on the host."""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect.layout import RAGGED
from kvarn.lowering.index import Ix, const
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target

from ..base import Expansion
from .queries import has_lists


def splits_for(tiles: Ix, batch: Ix, longest: Ix, multiprocessors: Ix, least_keys: int, target: Target) -> Ix:
    """Splits of the keys of each of so many tiles of rows, at most: 1 where the tiles fill the device.

    What a launch knows: the shapes, and ``longest``, the keys that no sequence has more of. A multiprocessor takes one
    tile at a time; tiles cut s-fold take ceil(s * tiles / multiprocessors) rounds of 1/s, and some time besides to
    write, read and combine partial results, more the more there are. So one round is best where it is nearly full (s =
    multiprocessors / tiles), else two.

    More tiles than that are cut for another reason: of several sequences one may be much longer than the others, and
    its tiles alone would be at work in the end. Splits of ``long_split_keys`` bound what is waited for. Each costs a
    look even where nobody is as long, which is why there are no more than ``long_split_units`` a multiprocessor.

    ``least_keys``: of a split, at least. How long the keys of a tile are is known on the device alone, where one with
    few of them has fewer splits.
    """
    one, (units, long) = Ix(const(1)), (measured(name, target) for name in ("long_split_units", "long_split_keys"))

    def chosen(condition: ir.Value, a: Ix, b: Ix) -> Ix:
        return Ix(arith.select(condition, a.value, b.value))

    once, twice = multiprocessors // tiles, multiprocessors * 2 // tiles
    few = chosen((once * tiles * 8).below(multiprocessors * 7), chosen(twice.below(3), one, twice), once)
    many = chosen(batch.below(2), one, (multiprocessors * units // tiles).least(longest // long))
    found = few.greatest(many).least(longest // least_keys).least(Ix(const(measured("splits_by_shape", target))))
    return found.greatest(one)


def halved(tiles: Ix, slots: Ix, longest: Ix, least_keys: int) -> Ix:
    """Splits of the keys of tiles that several blocks of a multiprocessor take: 2 where rounds of halves are fewer.

    384 tiles for 264 blocks are two rounds of tiles, the second of which is half empty, or three of halves.
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
