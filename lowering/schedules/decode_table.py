# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules of decode attention: measured entries by batch class, and a rule for the other cases.

Four warps per multiprocessor with two 8 KiB copies in flight each reach the memory bandwidth with 16-bit caches; more
in flight makes the multiprocessors' shares of the bandwidth less equal, and the slowest ends later. 8-bit caches and
pages smaller than a tile need more instructions per byte and use eight warps, as do rows of 64 bytes; rows of 32 bytes
use twelve. Few sequences leave many partial results each, which a second kernel combines faster than the last warp to
finish. The numbers are in ``tables``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvarn.dialect import schedules
from kvarn.lowering.target import Target

from . import tuned
from .decode import SECTOR, DecodeConfig, fitted, invariant, tile_of, warps_of
from .tables import by_bits, measured

SECTOR_HEADS = SECTOR // 4  # heads whose scales and zeros share a sector, of f16 and one of each per head


def entries(target: Target, config: DecodeConfig, batch_invariant: bool = False) -> dict[str, Any]:
    """The chosen entries of a case; of the configuration only the case is read."""
    warps = warps_of(config)
    tile = tile_of(config)
    small_pages = config.spec.paged and config.spec.page_size < 16
    busy = config.narrow or small_pages or config.column_tiles > 1
    stage = 2 * tile * config.row_bytes
    # Tiles below 8 KiB need more copies in flight; larger tiles fewer, down to what a pipeline needs. Warps that
    # convert 8 bits are busy already: more warps are slower.
    wanted = (8 if busy else 4) * (1 if config.narrow else max(1, measured("decode_tile_bytes", target) // stage))
    found = {"warps": warps, "tile": tile, "blocks": max(1, wanted // warps), "stages": 2, "combine": 0}
    for most, combine_warps, min_tiles in measured("decode_few", target):
        if config.max_batch <= most:
            found |= {"combine": combine_warps, "min_tiles": min_tiles}
            if most == 1:
                found["blocks"] = max(1, 4 // warps)
            break
    else:
        usual = config.column_tiles == 1 and not (small_pages or batch_invariant)
        plain = usual and not config.scales
        # Scales as large as the elements leave room for half the blocks, which halves the bytes in flight already.
        scaled = usual and config.scaled_elements and config.scales_copied and 4 * config.scales < config.row_bytes
        if config.narrow and config.row_bytes == 128 and (plain or scaled):
            found["tile"] = 16  # halves the bytes in flight
        if usual and config.spec.zero and config.row_groups % SECTOR_HEADS == 0:
            # The scale and zero of a head are a part of a memory sector: its other heads are read by the same block.
            # Several of them are as many copies as the elements: fewer stages in flight are faster then.
            stages = 3 if config.granules == 1 else 2
            found |= {"warps": SECTOR_HEADS, "blocks": 1, "tile": min(tile, 32), "stages": stages}
        if plain and config.stored_bytes == config.row_bytes:
            full_rows = measured("decode_full_rows", target)
            found["blocks"] = max(found["blocks"], full_rows.get(str(config.row_bytes), 0) // warps)
    return found | invariant(config, tile) if batch_invariant else found


def beside_tiles(target: Target, config: DecodeConfig, given: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """(sixteenths of the multiprocessors for the decode kernel of a divided batch, entries of the kernel there).

    One block per multiprocessor, with the copies in flight that reach the memory bandwidth from a share of them: two
    blocks would be placed on twice as many multiprocessors, where tiles then find no room. Without such a block the
    kernel has all multiprocessors, and tiles follow.
    """
    config = replace(config, max_batch=given.get("max_batch", config.max_batch))
    stage = 2 * given.get("tile", entries(target, config)["tile"]) * config.row_bytes
    for warps in by_bits("decode_beside_warps", target, config.narrow):
        stages = max(2, by_bits("decode_beside_bytes", target, config.narrow) // (warps * stage))
        found = {"warps": warps, "blocks": 1, "stages": stages}
        if schedules.why_unsupported("kv.attention", {**found, **given}, target, "decode", config) is None:
            return by_bits("decode_share", target, config.narrow), found
    return schedules.DECODE_SHARE.most, {}


def choose(target: Target, config: DecodeConfig, schedule: Mapping[str, Any], by_user: bool = False) -> dict[str, Any]:
    """The entries of a decode from the tables, reduced as far as the target and the given entries require.

    The user's tuning table is read if ``by_user``, for operations that are declared as tuned.

    Raises
    ------
    ValueError
        If a given entry is illegal for the case.
    """
    config = replace(config, max_batch=schedule.get("max_batch", config.max_batch))
    problem = schedules.why_unsupported("kv.attention", schedule, target, "decode", config)
    if problem is not None:
        raise ValueError(f"the schedule's {problem}")
    fixed = bool(schedule.get("batch_invariant"))
    found = tuned.entries(target, config, fixed) if by_user else {}
    names = schedules.DECODE.names
    given = {name: value for name, value in schedule.items() if name in names}
    chosen_by_table = {**entries(target, config, fixed), **found}
    if config.case.blocks:  # a tile must not cross an entry of a block mask's list
        chosen_by_table["tile"] = math.gcd(chosen_by_table["tile"], config.case.blocks[1])
    config = replace(config, **{**chosen_by_table, **given})
    if config.case.blocks and config.case.blocks[1] % config.tile:
        raise ValueError(
            f"the schedule's tile must divide the block mask's {config.case.blocks[1]} keys, got {config.tile}"
        )
    # The tile fixes the order of additions, which must not depend on the batch if the result is to be invariant.
    config = fitted(target, config, {*given, *(("tile",) if fixed else ())}, "blocks" in found)
    return {name: getattr(config, name) for name in (*names, "max_batch")}
