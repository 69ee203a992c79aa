# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The number of key splits for a launch of attention over tiles, computed on the host from the shapes."""

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
    """The most splits per tile of query rows; 1 if the tiles fill the device.

    The launch knows the shapes and ``longest``, a bound on the keys of any sequence. A multiprocessor processes one
    tile at a time; with s splits per tile, a device needs ceil(s * tiles / multiprocessors) waves, each of 1/s of a
    tile's time, plus the time for writing, reading and combining partial results, which grows with their number. So one
    wave is best if it is nearly full (s = multiprocessors / tiles), otherwise two.

    With more tiles than that, splits serve another purpose: one of several sequences may be much longer than the
    others, and its tiles would run alone at the end. Splits of ``long_split_keys`` bound that tail. Even an empty split
    costs a check, so there are at most ``long_split_units`` per multiprocessor.

    ``least_keys`` is the minimum per split. The number of keys of a tile is known only on the device, where a tile with
    few keys uses fewer splits.
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
    """The number of splits where several blocks share a multiprocessor: 2 if waves of halves take less time.

    384 tiles on 264 blocks take two waves, the second half empty, or three waves of half tiles.
    """
    once, twice = ((tiles * s + (slots - 1)) // slots for s in (1, 2))
    fewer = arith.select(twice.below(once * 2), const(2), const(1))
    return Ix(arith.select(slots.below(tiles), fewer, const(1))).least((longest // least_keys).greatest(Ix(const(1))))


def longest_of(op: Any, at: Expansion) -> Ix:
    """A bound on the keys of any sequence, from the collection or operand; kernels do not rely on it."""
    if has_lists(op):
        return at.dim(op.indices, 1)
    handle = op.keys if op.operation.name == "kv.operand_attention" else op.collection
    spec = at.spec(handle)
    if spec.of_cache:
        return at.field(handle, "max_cache_length")
    return at.field(handle, "num_blocks" if spec.kind == RAGGED else "capacity")
