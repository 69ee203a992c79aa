# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Legality limits: registers, columns, rows and boxes, for schedules, passes, the tuner and error texts.

Each limit is defined once. Facts of chips are in ``lowering/target.py``; limits of a tile's layout, its staging memory
or an instruction are in ``lowering/tiles/``. The choice among legal schedules is in the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.dialect.ops.tile import COLUMN_STEP

from .tables import measured

# --- heads -----------------------------------------------------------------------------------------

MOST_COLUMNS = 512  # of a head
MOST_OF_VALUES = 256  # of values for which a warpgroup has accumulator registers
MOST_HELD = 128  # of query rows that warps have in registers as operand A of mma.sync
MOST_FRAGMENTS = 64  # registers per thread for the converted elements of one operand A

# --- decode ----------------------------------------------------------------------------------------

MOST_QUERIES = 8  # the most new tokens of a sequence that is a decode
WARP_ROWS = 16  # the most query rows per warp of a decode; several warps share a head with more
WARP_OUTPUTS = 2560  # accumulator elements per warp of a decode, over all its query rows
MOST_SCALES = 64  # the most scales of a token that a lane has in registers on their way to shared memory
TRIED_REGISTERS = 96  # per thread of a decode: the tuner tries nothing with fewer
DECODE_GRANULE = 4  # elements of a row that a lane of a decode multiplies per step, and so the fewest per scale


def decode_registers(held: int) -> int:
    """Registers per thread of a decode whose warp has accumulators of ``held`` columns over all query rows."""
    return 168 if held <= 128 else 255


# --- copies ----------------------------------------------------------------------------------------

BOX_ROWS = 64  # the most rows of a TMA box
ATOM_ROWS = 8  # a tile of several boxes needs boxes of whole swizzle periods
BOX_GRANULE: int = measured("box_granule")  # the fewest elements per scale for scales that are copied alongside boxes
LEAST_LISTED = 16  # keys per tile, a divisor of a listed page

# --- registers of warpgroups -----------------------------------------------------------------------


@dataclass(frozen=True)
class Registers:
    """Registers per thread, for one division of a block into consumers and producers.

    Attributes
    ----------
    tiles : int
        For a consumer's scores, weights and accumulators; its other registers are for addresses.
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
SHARED_COLUMNS = 192  # of a product for which four warpgroups' initial registers suffice
TWO_PRODUCERS_COLUMNS = 64  # most value columns with two producers and three consumers
# Registers per thread for scores, weights and accumulators, besides fragments of B, by number of mma.sync warpgroups.
REGISTERS_BY_MMA = {1: 160, 2: 160, 3: 96}


def tile_registers(consumers: int, producers: int, occupancy: int) -> int:
    """Registers per consumer thread for scores, weights and accumulators; 0 for an unsupported division of a block."""
    found = BLOCK_REGISTERS.get((consumers, producers, occupancy))
    if found is None and occupancy == 1:  # more producers than there are registers for
        found = BLOCK_REGISTERS[consumers, 1, 1]
    return found.tiles if found is not None else 0


def role_registers(
    consumers: int, producers: int, occupancy: int, copies: str, addressed: bool
) -> tuple[int, int] | None:
    """(registers per producer thread, per consumer thread); None where all threads keep their initial number."""
    found = BLOCK_REGISTERS.get((consumers, producers, occupancy))
    if found is None:
        return None
    return found.roles.get("addressed" if addressed and "addressed" in found.roles else copies)


# --- sums of 8-bit products ------------------------------------------------------------------------


def why_not_by_mma(schedule: Mapping[str, object]) -> str | None:
    """Why the entries of a schedule are illegal for products by mma.sync; None if they are legal."""
    for name in ("producer", "overlap", "ping_pong"):
        if schedule.get(name):
            return f"{name} must be false by mma.sync, whose products are synchronous"
    return None


def columns_at_a_time(columns: int) -> int:
    """The number of a product's columns that use fresh accumulators at a time (``promote-kv-sums``).

    The largest for which two such products fit the registers next to scores and accumulators.
    """
    return max(n for n in (COLUMN_STEP, measured("promoted_columns")) if columns % n == 0)


def columns_behind(columns: int) -> int:
    """The number of a product's columns that are computed after the next tile's scores."""
    step = columns_at_a_time(columns)
    return step if columns > step else 0
