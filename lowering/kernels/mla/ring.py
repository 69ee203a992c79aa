# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The circular buffer of the latent kernel with swapped operands, and the producers that fill it.

A slot has a box of 64 keys and 64 columns, and two mbarriers: ``full`` and ``empty``. The boxes of a tile are in a
fixed order, those that are no values first, since they are released first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from ..common import advance
from . import copies as latent_copies, stored as latent_stored
from .block_sizes import LISTS
from .common import KEYS, LatentConfig


@dataclass(frozen=True)
class Ring:
    """A circular buffer of ``slots`` boxes."""

    c: LatentConfig
    slots: int

    @property
    def whole(self) -> bool:
        """Whether a tile's slots are contiguous, at constant distances from its first slot."""
        return self.slots % self.c.slots == 0

    def place_of(self, box: int) -> int:
        """The index among a tile's slots of a box."""
        values = self.c.value_boxes
        return (box - values) // self.c.together if box >= values else self.c.rest_slots + box // self.c.together

    def empty_of(self, full: Any) -> Any:
        """The ``empty`` barrier of a slot, given its ``full`` barrier."""
        return full + self.slots * BARRIER_BYTES

    @property
    def rest(self) -> int:
        """Slots per tile that have no values."""
        return self.c.rest_slots

    @property
    def order(self) -> list[int]:
        """The boxes of a tile in order."""
        return [*range(self.c.value_boxes, self.c.boxes), *range(self.c.value_boxes)]


def at(r: Ring, ring: Any, barriers: Any, slot: Any, phase: Any, count: int) -> tuple[Any, Any, Any]:
    """(address, barrier, phase) of the slot ``count`` after another of its tile."""
    if not r.whole:
        slot, phase = advance(r.slots, slot, phase, count)
        count = 0
    size = r.c.box.bytes
    return ring + slot * size + count * size, barriers + slot * BARRIER_BYTES + count * BARRIER_BYTES, phase


def behind(r: Ring, slot: Any, phase: Any, count: Any) -> tuple[Any, Any]:
    """(slot, phase) of the slot ``count`` after another of its tile."""
    return (slot + count, phase) if r.whole else advance(r.slots, slot, phase, count)


def next_tile(r: Ring, slot: Any, phase: Any) -> tuple[Any, Any]:
    """(slot, phase) of the next tile's first slot."""
    return advance(r.slots, slot, phase, r.c.slots)


@kv.func
def release(barrier, lane):
    kv.mbarrier_arrive(barrier, lane == 0)


@kv.func
def publish_scales(r, tile_scales_at, tile_scales_full, scales, i, lane):
    """Store the scales of tile i by one warp, after its boxes have arrived; the old scales have been read by then."""
    latent_stored.write_tile_scales(r.c, tile_scales_at + (i & (LISTS - 1)) * r.c.tile_scales_bytes, scales, lane)
    release(tile_scales_full + (i & (LISTS - 1)) * BARRIER_BYTES, lane)


@kv.func
def produce_by_tma(r, key_map, cache, ring, full, keys, b, lane):
    tiles, last = keys.tiles, keys.end
    following = tiles.base(tiles.entry(0))
    pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
    slot, phase = kv.i32(0), kv.i32(1)
    for i in range(keys.num_tiles):
        here, base = pages, tiles.base(tiles.entry(i)) if tiles.lists is None else following
        following = base + KEYS if tiles.lists is None else tiles.base(tiles.entry(i + 1))
        pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
        for j in kv.static([j for j in r.order if r.c.part_of(j) == 0]):
            place, barrier, parity = at(r, ring, full, slot, phase, r.place_of(j))
            kv.mbarrier_wait(r.empty_of(barrier), parity)
            latent_copies.boxes_by_tma(r.c, key_map, cache, place, barrier, here, base, (j, 1), lane)
        slot, phase = next_tile(r, slot, phase)


@kv.func
def produce_scales(r, rows, tile_scales_at, full, tile_scales_full, keys, lane):
    """Store tile scales in a separate warp, once a tile's first box has arrived and its old scales were read."""
    tiles = keys.tiles
    following = latent_stored.places_of(rows, tiles.base(tiles.entry(0)), lane)
    slot, phase = kv.i32(0), kv.i32(0)
    for i in range(keys.num_tiles):
        scales = latent_stored.load_scales(r.c, rows, following)
        following = latent_stored.places_of(rows, tiles.base(tiles.entry(i + 1)), lane)
        kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
        publish_scales(r, tile_scales_at, tile_scales_full, scales, i, lane)
        slot, phase = next_tile(r, slot, phase)


@kv.func
def produce_rows(r, rows, ring, seen_at, tile_scales_at, full, tile_scales_full, keys, thread):
    tiles = keys.tiles
    base = tiles.base(tiles.entry(0))
    following = latent_copies.places_of(r.c, rows, base, thread)
    scaled = latent_stored.places_of(rows, base, thread & 31) if r.c.scaled else []
    slot, phase = kv.i32(0), kv.i32(1)
    for i in range(keys.num_tiles):
        places, of_tile, base = following, i & (LISTS - 1), tiles.base(tiles.entry(i + 1))
        following = latent_copies.places_of(r.c, rows, base, thread)
        scales = latent_stored.load_scales(r.c, rows, scaled) if r.c.scaled else []
        if r.c.scaled:
            scaled = latent_stored.places_of(rows, base, thread & 31)
        for n in kv.static(range(r.c.boxes)):
            place, barrier, parity = at(r, ring, full, slot, phase, n)
            kv.mbarrier_wait(r.empty_of(barrier), parity)
            latent_copies.copy_boxes(r.c, rows, places, place, barrier, (r.order[n], 1), thread)
        slot, phase = next_tile(r, slot, phase)
        if r.c.case.listed:
            barrier_of_tile = tile_scales_full + of_tile * BARRIER_BYTES
            latent_copies.record_existing_rows(r.c, places, seen_at + of_tile * 8, barrier_of_tile, thread)
        if r.c.scaled:
            if thread < 32:
                publish_scales(r, tile_scales_at, tile_scales_full, scales, i, thread)
