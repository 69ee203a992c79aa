# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is legal: registers, columns, rows and boxes, as schedules, passes, the tuner and texts of errors ask.

A limit stands here once. What a chip has is in ``lowering/target.py``; what a tile's layout, its staging memory or an
instruction has is in ``lowering/tiles/``. What is *chosen* within the limits is in the schedules beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.dialect.ops.tile import COLUMN_STEP

from .tables import measured

# --- heads -----------------------------------------------------------------------------------------

MOST_COLUMNS = 512  # of a head
MOST_OF_VALUES = 256  # columns of values that the registers of a warpgroup have sums of
MOST_HELD = 128  # columns of rows of a buffer that warps hold in registers as operand A of mma.sync
MOST_FRAGMENTS = 64  # registers of a thread for what it converts of one operand A

# --- decode ----------------------------------------------------------------------------------------

MOST_QUERIES = 8  # new tokens of a sequence that still count as a decode
WARP_ROWS = 16  # most query rows of a warp of a decode; a head with more is shared by several
WARP_OUTPUTS = 2560  # that a warp of a decode has registers for, of all its query rows
HELD_SCALES = 64  # scales of a tile's token that a lane has on their way to shared memory, at most
TRIED_REGISTERS = 96  # of a thread of a decode: the tuner tries nothing with fewer
DECODE_GRANULE = 4  # elements that a lane of a decode has of a row in one step, and so of a scale at least


def decode_registers(held: int) -> int:
    """Registers of a thread of a decode whose warp holds so many columns of all query rows."""
    return 168 if held <= 128 else 255


# --- copies ----------------------------------------------------------------------------------------

BOX_ROWS = 64  # most rows of a TMA box
ATOM_ROWS = 8  # a box that is no multiple of the swizzle's period cannot be one of several
BOX_GRANULE: int = measured("box_granule")  # elements of a scale that is copied beside boxes, at least
LEAST_LISTED = 16  # keys of a tile, which divide a page of a list

# --- registers of warpgroups -----------------------------------------------------------------------


@dataclass(frozen=True)
class Registers:
    """Registers of a thread, for one way to share a block among warpgroups.

    Attributes
    ----------
    tiles : int
        Of a consumer for scores, weights and sums: the rest of what it has is for addresses.
    roles : mapping
        (of the producer, of a consumer) by how tiles are copied: ``tma``, by ``rows`` that the producer addresses,
        ``staged`` tiles that it converts or ``transposed`` ones; ``addressed``: staged rows or scales that it addresses
        besides. Without an entry every thread keeps what it starts with.
    """

    tiles: int
    roles: Mapping[str, tuple[int, int]] = field(default_factory=dict)


# By warpgroups that consume, warpgroups that produce, and blocks of a multiprocessor. Of one consumer and one producer
# alone every thread has the most from the start.
BLOCK_REGISTERS = {
    (1, 1, 1): Registers(208),
    (1, 1, 2): Registers(160, {"tma": (40, 216), "rows": (56, 200), "staged": (80, 176)}),
    (1, 1, 3): Registers(88, {"tma": (32, 128), "rows": (40, 120), "staged": (40, 120)}),
    (1, 2, 1): Registers(208, {"rows": (72, 240), "staged": (104, 240)}),
    (1, 3, 1): Registers(208, {"rows": (72, 240), "staged": (88, 240)}),
    (2, 1, 1): Registers(208, {"tma": (40, 232), "rows": (56, 224), "staged": (72, 216), "transposed": (88, 208)}),
    (2, 2, 1): Registers(208, {"rows": (40, 216), "staged": (64, 192)}),
    (3, 1, 1): Registers(
        128, {"tma": (32, 160), "rows": (56, 152), "staged": (56, 152), "addressed": (80, 144), "transposed": (56, 152)}
    ),
    (3, 2, 1): Registers(104, {"staged": (56, 120), "addressed": (72, 112)}),
    (4, 1, 1): Registers(92, {"tma": (32, 112), "staged": (56, 104), "addressed": (64, 104)}),
}
SHARED_COLUMNS = 192  # of a product that has enough of the registers with which threads of four warpgroups start
TWO_BESIDE_THREE = 64  # columns of values of which there are registers for two producers beside three that multiply
# Of a thread for scores, weights and sums beside words of B on their way, by warpgroups whose products are mma.sync's.
REGISTERS_BY_MMA = {1: 160, 2: 160, 3: 96}


def tile_registers(consumers: int, producers: int, occupancy: int) -> int:
    """Registers of a consumer's thread for scores, weights and sums; 0 where a block is shared in no such way."""
    found = BLOCK_REGISTERS.get((consumers, producers, occupancy))
    if found is None and occupancy == 1:  # of more producers than that there are registers for
        found = BLOCK_REGISTERS[consumers, 1, 1]
    return found.tiles if found is not None else 0


def role_registers(
    consumers: int, producers: int, occupancy: int, copies: str, addressed: bool
) -> tuple[int, int] | None:
    """(of the producer's threads, of the consumers'); None where all keep what they start with."""
    found = BLOCK_REGISTERS.get((consumers, producers, occupancy))
    if found is None:
        return None
    return found.roles.get("addressed" if addressed and "addressed" in found.roles else copies)


# --- sums of 8-bit products ------------------------------------------------------------------------


def columns_at_a_time(columns: int) -> int:
    """How many of a product's columns go to fresh accumulators at a time (``promote-kv-sums``).

    So many that there are registers for two such products beside scores and sums.
    """
    return max(n for n in (COLUMN_STEP, measured("promoted_columns")) if columns % n == 0)


def columns_behind(columns: int) -> int:
    """How many of a product's columns come behind the scores of the next tile, in registers that are free by then."""
    step = columns_at_a_time(columns)
    return step if columns > step else 0
