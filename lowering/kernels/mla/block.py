# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A block of the latent kernel with swapped operands: shared memory, barriers and work item of its roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.lowering.tiles.ir import BARRIER_BYTES

from . import block_sizes as latent_blocks, copies as latent_copies, ring as latent_ring
from .block_sizes import LISTS
from .common import KEYS, SCORES_BARRIER, LatentConfig, clear_rows
from .ring import Ring


@dataclass(frozen=True)
class Block:
    """Addresses and barriers in shared memory, and the block's work item.

    Attributes
    ----------
    q_tile, scales_log2 :
        The query, and per query row the factor that makes products powers of two.
    weights, factors, p_full, p_empty :
        Two buffers of a tile's weights and of the factors of the accumulators, with their barriers.
    final, ends :
        Per row: the factor of the final accumulators, and the log-sum-exp.
    maxima, sums_at, flags :
        Exchanged between the scores warps where query rows are columns.
    seen_at, tile_scales_at, tile_scales_full :
        Which listed keys of the last tiles exist; the tiles' scales (:func:`~.stored.write_tile_scales`); barriers.
    values_start :
        Barriers on which the values role waits before it multiplies, where both roles alternate.
    keys, place, extents :
        Results of :func:`~.common.keys_of`, :func:`~.common.place_of` and :func:`~.common.extents_of`.
    functions : tuple
        (sequence, arrays that the functions read).
    """

    c: LatentConfig
    r: Ring
    ring: Any
    q_tile: Any
    scales_log2: Any
    weights: Any
    factors: Any
    final: Any
    ends: Any
    maxima: Any
    sums_at: Any
    flags: Any
    seen_at: Any
    tile_scales_at: Any
    full: Any
    p_full: Any
    p_empty: Any
    values_start: Any
    tile_scales_full: Any
    keys: Any
    place: Any
    extents: Any
    scale: Any
    functions: Any
    warp: Any
    lane: Any

    @property
    def by_row(self) -> bool:
        """Whether each query row has its own factor."""
        return self.c.stored and not self.c.narrow

    @kv.func
    def box(self, j: int, slot: Any, phase: Any) -> Any:
        """Wait for box j of a tile, whose first slot is given; returns its address."""
        place, barrier, parity = latent_ring.at(self.r, self.ring, self.full, slot, phase, self.r.place_of(j))
        if self.c.part_of(j) == 0:
            latent_copies.wait_for(self.c, barrier, parity)
        return place

    @kv.func
    def release_rest(self, slot: Any) -> None:
        """Release the boxes of a tile that are no values."""
        for j in kv.static(range(self.r.rest)):
            _, barrier, _ = latent_ring.at(self.r, self.full, self.full, slot, kv.i32(0), j)
            latent_ring.release(self.r.empty_of(barrier), self.lane)

    @kv.func
    def tile_scales(self, i: Any) -> Any:
        """Wait for the tile scales of tile i; returns their address."""
        of_tile = i & (LISTS - 1)
        if self.c.scaled or self.c.case.listed:
            kv.mbarrier_wait(self.tile_scales_full + of_tile * BARRIER_BYTES, (i // LISTS) & 1)
        return self.tile_scales_at + of_tile * self.c.tile_scales_bytes

    @kv.func
    def hide(self, s: Any, i: Any, slot: Any, base: Any, masked: Any) -> None:
        """Mask a tile's scores by ``masked``, and zero its values for keys that no row attends to."""
        first, last, whole_first, whole_end, _, _ = self.keys
        if self.c.copy == "tma" and self.c.case.spec.dtype.is_float:  # integers have no NaN
            if (base < first) | (base + KEYS > last):
                kv.named_barrier(SCORES_BARRIER, 128)  # all scores warps have multiplied the keys
                for n in kv.static(range(self.c.value_slots)):
                    box = latent_ring.at(self.r, self.ring, self.ring, slot, kv.i32(0), self.r.rest + n)[0]
                    thread = self.warp * 32 + self.lane
                    clear_rows(self.c.box, box, 1, first - base, last - base, thread, 128)
        seen = []
        if self.c.case.listed:
            seen_at = self.seen_at + (i & (LISTS - 1)) * 8
            seen = [seen_at.load(kv.u32), (seen_at + 4).load(kv.u32)]
            some = (seen[0] & seen[1]) != 0xFFFFFFFF
        else:
            some = (base < whole_first) | (base + KEYS > whole_end)
        if some:
            masked(self.c, s, seen, *self.extents, self.place[2], self.place[3], base, self.warp, self.lane)

    @kv.func
    def change_of(self, tile_scales: Any, highest: Any) -> Any:
        """The factor of the accumulators when ``highest``, the power of two above all scales so far, rises."""
        above = kv.math.max(highest[0], tile_scales.load(kv.i32))
        change = kv.bitcast(kv.math.max(127 + highest[0] - above, 0) << 23, f32)
        highest[0] = above
        return change

    @kv.func
    def weights_of(self, i: Any) -> tuple[Any, Any, Any]:
        """(weights, factors, their barrier) of tile i, after their buffer is free."""
        which = i & 1
        kv.mbarrier_wait(self.p_empty + which * BARRIER_BYTES, ((i >> 1) & 1) ^ 1)
        weights = self.weights + which * latent_blocks.weights_layout_of(self.c).bytes
        return weights, self.factors + which * (latent_blocks.width_of(self.c) * 4), self.p_full + which * BARRIER_BYTES

    @kv.func
    def publish(self, p_full: Any) -> None:
        """Signal the values warpgroups that a warp's weights and factors are stored."""
        kv.fence_proxy_async()
        kv.syncwarp()
        latent_ring.release(p_full, self.lane)
