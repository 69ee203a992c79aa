# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Threads, registers and shared memory of the latent kernel with swapped operands."""

from __future__ import annotations

from kvarn.dialect.layout import align_up
from kvarn.dialect.shared_layout import SharedLayout

from . import stored as latent_stored
from .common import KEYS, MOST_ROWS, LatentConfig

SMALL_BYTES = 6144  # upper bound of maxima, factors, sums and barriers
# Registers per thread of scores, values and producer, with many query rows: the base case; if the producer does more
# than start TMA copies; if keys and values have several scales. Then more for scores: :func:`few_for_values`.
REGISTERS, NOTED, SEVERAL = (120, 184, 24), (112, 184, 32), (136, 176, 24)
MORE, MORE_NOTED = (152, 168, 24), (144, 168, 32)
HELD = (136, 176, 24)  # if most of the query is in registers: :func:`query_in_registers`
TILES = 4  # the most tiles in the ring
LISTS = 8  # tiles whose list entries and scales are stored: more than the ring has


def blocks_of(c: LatentConfig) -> int:
    """Blocks per cluster, which share the keys of a split."""
    return 2 if c.rows <= MOST_ROWS else 1


def value_groups(c: LatentConfig) -> int:
    """Warpgroups of the values role: two if they also convert."""
    return 2 if c.stored else 1


def consumers_of(c: LatentConfig) -> int:
    """Threads of scores and values."""
    return 128 * (1 + value_groups(c))


def threads_of(c: LatentConfig) -> int:
    """Threads of scores, values and producer; the producer is a whole warpgroup if registers are reallocated."""
    producers = c.producer_warps + (c.scaled and c.copy == "tma")
    return consumers_of(c) + (32 * producers if registers_of(c) is None else 128)


def registers_of(c: LatentConfig) -> tuple[int, int, int] | None:
    """Registers per thread of scores, values and producer; None without reallocation."""
    if c.rows <= MOST_ROWS:
        return None
    if few_for_values(c):
        return MORE if c.copy == "tma" else MORE_NOTED
    if c.granules:
        return SEVERAL
    if query_in_registers(c):
        return HELD
    return REGISTERS if c.copy == "tma" else NOTED


def few_for_values(c: LatentConfig) -> bool:
    """Whether scores needs so many registers that values gets few: with sums of several scales, or functions."""
    return c.stored and (c.case.functions or (c.granules > 0 and latent_stored.direct(c)))


def query_in_registers(c: LatentConfig) -> bool:
    """Whether scores has most of an 8-bit query in registers; values then loads later, which takes fewer registers."""
    return c.narrow and c.copy == "tma" and latent_stored.unswapped(c) and not c.case.functions


def column_tiles(c: LatentConfig) -> int:
    """Tiles of eight columns for the query rows."""
    return c.rows // 8


def owners_of(c: LatentConfig) -> int:
    """Groups of lanes that each own the columns of one tile of eight, or none."""
    return 1 << (column_tiles(c) - 1).bit_length()


def width_of(c: LatentConfig) -> int:
    """Columns with an owner, including padding."""
    return 8 * owners_of(c)


def alternates(c: LatentConfig) -> bool:
    """Whether values waits with a tile until the next tile's keys are multiplied, so that the products do not compete.

    With many query rows both roles need the tensor cores, and only values can use them during a softmax. With several
    scales, values takes longer than the softmax, because of conversion; with query rows as rows, keys are multiplied
    during the softmax: neither waits.
    """
    return c.rows > MOST_ROWS and not c.granules and not latent_stored.unswapped(c)


def value_steps(c: LatentConfig) -> int:
    """Steps of 16 keys whose converted values are multiplied at a time."""
    return 1 if few_for_values(c) else 2


def weights_layout_of(c: LatentConfig) -> SharedLayout:
    """The layout of a tile's weights, with one row per query row."""
    return SharedLayout(c.rows, KEYS, 2, 128)


def query_bytes(c: LatentConfig) -> int:
    """Bytes of the query, aligned for the weights that follow."""
    return align_up(query_layout_of(c).bytes, weights_layout_of(c).alignment)


def query_layout_of(c: LatentConfig) -> SharedLayout:
    return latent_stored.query_layout(c) if c.stored else SharedLayout(c.rows, c.case.size, 2, 128)


def ring_boxes(c: LatentConfig, shared_bytes: int) -> int:
    """Slots of the ring: whole tiles if it has room for several, so that no tile wraps around."""
    used = query_bytes(c) + 2 * 128 * c.rows + SMALL_BYTES + LISTS * c.tile_scales_bytes
    slots = min(TILES * c.slots, (shared_bytes - used) // c.box.bytes)
    return slots // c.slots * c.slots if c.stored else slots
