# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The blocks of the kernel over latent rows with swapped operands: their threads, registers and shared memory."""

from __future__ import annotations

from kvarn.dialect.layout import align_up
from kvarn.dialect.shared_layout import SharedLayout

from . import stored as latent_stored
from .common import KEYS, MOST_ROWS, LatentConfig

SMALL_BYTES = 6144  # more than maxima, factors, sums and barriers take
# Registers of a thread of scores, of values and of the producer with many query rows; where it does more than to start
# copies by TMA; where keys and values have several scales. Then the first two for more: :func:`few_for_values`.
REGISTERS, NOTED, SEVERAL = (120, 184, 24), (112, 184, 32), (136, 176, 24)
MORE, MORE_NOTED = (152, 168, 24), (144, 168, 32)
HELD = (136, 176, 24)  # where nearly all of the query is in registers: :func:`holds_query`
TILES = 4  # that the ring holds at most
LISTS = 8  # tiles whose listed keys and scales are known: more than the ring holds


def blocks_of(c: LatentConfig) -> int:
    """Blocks of a cluster, which share the keys of a split."""
    return 2 if c.rows <= MOST_ROWS else 1


def value_groups(c: LatentConfig) -> int:
    """Warpgroups that multiply values: two where they convert them, too."""
    return 2 if c.stored else 1


def consumers_of(c: LatentConfig) -> int:
    """Threads of scores and values."""
    return 128 * (1 + value_groups(c))


def threads_of(c: LatentConfig) -> int:
    """Scores, values, and the producer's warps: a whole warpgroup where registers move."""
    producers = c.producer_warps + (c.scaled and c.copy == "tma")
    return consumers_of(c) + (32 * producers if registers_of(c) is None else 128)


def registers_of(c: LatentConfig) -> tuple[int, int, int] | None:
    """Of a thread of scores, of values and of the producer; None where all have the same."""
    if c.rows <= MOST_ROWS:
        return None
    if few_for_values(c):
        return MORE if c.copy == "tma" else MORE_NOTED
    if c.granules:
        return SEVERAL
    if holds_query(c):
        return HELD
    return REGISTERS if c.copy == "tma" else NOTED


def few_for_values(c: LatentConfig) -> bool:
    """Whether scores needs so many registers that values has few: for sums of several scales, or functions."""
    return c.stored and (c.case.functions or (c.granules > 0 and latent_stored.direct(c)))


def holds_query(c: LatentConfig) -> bool:
    """Whether scores has nearly all of a query of 8 bits in registers, and values loads later, which takes fewer."""
    return c.narrow and c.copy == "tma" and latent_stored.upright(c) and not c.case.functions


def column_tiles(c: LatentConfig) -> int:
    """Tiles of eight columns that query rows are."""
    return c.rows // 8


def owners_of(c: LatentConfig) -> int:
    """Groups of lanes that each own the columns of a tile of eight, or of none."""
    return 1 << (column_tiles(c) - 1).bit_length()


def width_of(c: LatentConfig) -> int:
    """Columns that are owned, with those that there are not."""
    return 8 * owners_of(c)


def takes_turns(c: LatentConfig) -> bool:
    """Whether values waits with a tile until the keys of the next one are multiplied, so that neither slows the other.

    With many query rows the tensor cores are what both need, and only values can use them during a softmax. Where
    several scales multiply what is converted, values takes longer than that; where query rows are rows, keys are
    multiplied during a softmax.
    """
    return c.rows > MOST_ROWS and not c.granules and not latent_stored.upright(c)


def value_steps(c: LatentConfig) -> int:
    """Steps of 16 keys whose values are multiplied at a time, where they are converted."""
    return 1 if few_for_values(c) else 2


def weights_layout_of(c: LatentConfig) -> SharedLayout:
    """A tile's weights: a row a query row."""
    return SharedLayout(c.rows, KEYS, 2, 128)


def query_bytes(c: LatentConfig) -> int:
    """The query's, up to where weights may lie."""
    return align_up(query_layout_of(c).bytes, weights_layout_of(c).alignment)


def query_layout_of(c: LatentConfig) -> SharedLayout:
    return latent_stored.query_layout(c) if c.stored else SharedLayout(c.rows, c.case.size, 2, 128)


def ring_boxes(c: LatentConfig, shared_bytes: int) -> int:
    """Slots of the ring: of whole tiles where it holds several, so that none of a tile has to ask where it ends."""
    used = query_bytes(c) + 2 * 128 * c.rows + SMALL_BYTES + LISTS * c.notes_bytes
    slots = min(TILES * c.slots, (shared_bytes - used) // c.box.bytes)
    return slots // c.slots * c.slots if c.stored else slots
