# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The circular buffer of the kernel over latent rows with swapped operands, and the producers that fill it.

A slot has a box of 64 keys and 64 columns, and two barriers: ``full`` and ``empty``. The boxes of a tile come in one
order; those that are no values first, since they are read first and for the last time.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarn import dsl as kv
from kvarn.lowering.tile_ir import BARRIER_BYTES

from . import latent_copies, latent_stored
from .common import advance
from .latent_blocks import LISTS
from .latent_common import KEYS, LatentConfig


@dataclass(frozen=True)
class Ring:
    """A circular buffer of ``slots`` boxes."""

    c: LatentConfig
    slots: int

    @property
    def rest(self) -> int:
        """Boxes of a tile that are no values."""
        return self.c.boxes - self.c.value_boxes

    @property
    def order(self) -> list[int]:
        """The boxes of a tile."""
        return [*range(self.c.value_boxes, self.c.boxes), *range(self.c.value_boxes)]


@kv.func
def release(barrier, lane):
    kv.mbarrier_arrive(barrier, lane == 0)


@kv.func
def note(r, notes_at, notes_full, scales, i, lane):
    """A warp writes the scales of tile i, behind its boxes: what was there is read."""
    latent_stored.write_notes(r.c, notes_at + (i & (LISTS - 1)) * r.c.notes_bytes, scales, lane)
    release(notes_full + (i & (LISTS - 1)) * BARRIER_BYTES, lane)


@kv.func
def produce_by_tma(r, key_map, cache, ring, full, empty, span, b, lane):
    _, last, _, _, walk, tiles = span
    following = walk.base(walk.entry(0))
    pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
    slot, phase = kv.i32(0), kv.i32(1)
    for i in range(tiles):
        here, base = pages, walk.base(walk.entry(i)) if walk.lists is None else following
        following = base + KEYS if walk.lists is None else walk.base(walk.entry(i + 1))
        pages = latent_copies.pages_of(key_map, cache, b, following, last, lane)
        for j in kv.static(r.order):
            kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase)
            place, barrier = ring + slot * r.c.box.bytes, full + slot * BARRIER_BYTES
            latent_copies.boxes_by_tma(r.c, key_map, cache, place, barrier, here, base, (j, 1), lane)
            slot, phase = advance(r.slots, slot, phase, 1)


@kv.func
def produce_notes(r, rows, notes_at, full, notes_full, span, lane):
    """A warp beside that of the copies: once a tile's first box is there, what lay where its notes go is read."""
    walk, tiles = span[4], span[5]
    following = latent_stored.places_of(rows, walk.base(walk.entry(0)), lane)
    slot, phase = kv.i32(0), kv.i32(0)
    for i in range(tiles):
        scales = latent_stored.load_scales(r.c, rows, following)
        following = latent_stored.places_of(rows, walk.base(walk.entry(i + 1)), lane)
        kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase)
        note(r, notes_at, notes_full, scales, i, lane)
        slot, phase = advance(r.slots, slot, phase, r.c.boxes)


@kv.func
def produce_rows(r, rows, ring, seen_at, notes_at, full, empty, notes_full, span, thread):
    walk, tiles = span[4], span[5]
    base = walk.base(walk.entry(0))
    following = latent_copies.places_of(r.c, rows, base, thread)
    scaled = latent_stored.places_of(rows, base, thread & 31) if r.c.scaled else []
    slot, phase = kv.i32(0), kv.i32(1)
    for i in range(tiles):
        places, of_tile, base = following, i & (LISTS - 1), walk.base(walk.entry(i + 1))
        following = latent_copies.places_of(r.c, rows, base, thread)
        scales = latent_stored.load_scales(r.c, rows, scaled) if r.c.scaled else []
        if r.c.scaled:
            scaled = latent_stored.places_of(rows, base, thread & 31)
        for n in kv.static(range(r.c.boxes)):
            kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase)
            place, barrier = ring + slot * r.c.box.bytes, full + slot * BARRIER_BYTES
            latent_copies.copy_boxes(r.c, rows, places, place, barrier, (r.order[n], 1), thread)
            slot, phase = advance(r.slots, slot, phase, 1)
        if r.c.listed:
            notes_of_tile = notes_full + of_tile * BARRIER_BYTES
            latent_copies.note_rows(r.c, places, seen_at + of_tile * 8, notes_of_tile, thread)
        if r.c.scaled:
            if thread < 32:
                note(r, notes_at, notes_full, scales, i, thread)
