# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows: what the kernels support, the choice among them, and their launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvarn.dialect.dtypes import bf16, f8e4m3, f16, f32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.dialect.schedules import TILED, written
from kvarn.lowering.kernels.attention.arguments import AttentionArguments
from kvarn.lowering.kernels.attention.case import Case, tile_count
from kvarn.lowering.kernels.attention.key_splits import MOST_SPLITS
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.kernels.mla import (
    block_sizes as latent_blocks,
    combine as latent_combine,
    few as latent_few,
    stored as latent_stored,
    wide as latent_wide,
)
from kvarn.lowering.kernels.mla.common import BOX_COLUMNS, KEYS, MOST_ROWS, WIDE, LatentConfig, ends_in_combine
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import MMA, WGMMA

from . import attention as tile_schedule
from .limits import ATOM_ROWS, MOST_OF_VALUES
from .tables import measured

PARTS_OF_KEYS = 3  # parts of a tile of latent rows that scores wait for one by one
MOST_TILES = 16  # per sequence with a known bound of new tokens: more are found through the row offsets
BY_MMA = {"instruction": MMA}  # of the kernel over tiles; entry splits belongs to kind latent
OF_TILES = tuple(name for name in TILED.names if name != "splits")
BY_WGMMA = ("rows", "tiles", "box_rows")


def problems(case: Case, target: Target, row_alignment: int) -> list[str]:
    """Why the kernels by wgmma do not support a case, one sentence per reason; empty if they do."""
    spec, found = case.spec, []
    if not target.has("wgmma"):
        return [f"needs a GPU with wgmma, got {target.name}"]
    if case.query is not f8e4m3 and (case.query not in (bf16, f16) or case.out not in (case.query, f32)):
        found.append(
            f"needs a query of bf16, f16 or f8e4m3 and an output of its type or f32, got {case.query.name} and "
            f"{case.out.name}"
        )
    if spec.dtype is not case.query and not spec.converted:
        found.append(f"needs a cache of the query's type or of 8 bits, got {spec.dtype.name}")
    if spec.converted and (spec.head_size | case.row.rope | case.row.rope_start) % 16:
        found.append(
            f"needs 8-bit rows with all parts at multiples of 16 bytes, got {spec.head_size} bytes with bf16 "
            f"keys from byte {case.row.rope_start} on"
        )
    if case.row.rope and case.content % BOX_COLUMNS:
        found.append(f"needs a multiple of {BOX_COLUMNS} columns before bf16 keys, got {case.content}")
    if spec.quantized and spec.granularity < spec.head_size and spec.granularity % latent_stored.VECTOR:
        found.append(f"needs scales of a row or of a multiple of 16 elements, got one for {spec.granularity}")
    if case.size % 16 or case.value_size % (2 * BOX_COLUMNS) or not 0 < case.value_size <= 512:
        found.append(
            f"needs a query of a multiple of 16 columns and values of 128, 256, 384 or 512, got {case.size} and "
            f"{case.value_size}"
        )
    if row_alignment < 16:
        found.append(f"needs query and output rows aligned to 16 bytes, got {row_alignment}")
    if not found:
        config = LatentConfig(case, WIDE)
        if not fits(config, target):
            found.append(f"needs query and two tiles in {target.shared_bytes} bytes of shared memory, got {case.size}")
    return found


def fits(c: LatentConfig, target: Target) -> bool:
    """Whether the query and the required stages of keys fit shared memory."""
    if c.few:
        return latent_blocks.ring_boxes(c, target.shared_bytes) >= 2 * c.slots
    return latent_wide.shared_bytes(c) <= target.shared_bytes


def box_rows(case: Case, query_rows: int, at: Expansion, handle: Any) -> int:
    """Rows per TMA box, for blocks of ``query_rows``; 0 where TMA cannot copy."""
    rows = math.gcd(case.spec.page_size, KEYS) if case.spec.paged else KEYS
    swizzle = swizzle_of(LatentConfig(case, query_rows))
    if case.listed or rows % ATOM_ROWS or at.why_no_tensor_map(handle, rows=rows, swizzle=swizzle) is not None:
        return 0
    return rows


def swizzle_of(c: LatentConfig) -> str:
    return f"{c.box.swizzle}B"


def rows_of(case: Case, most: int) -> int:
    """Query rows per block, for at most ``most`` rows per sequence; 0 means no bound."""
    few = WIDE if case.spec.converted else MOST_ROWS
    rows = align_up(most, 8) if 0 < most <= few else WIDE
    return WIDE if latent_stored.unswapped(LatentConfig(case, rows)) else rows


def by_tiles(case: Case, target: Target, schedule: Mapping[str, Any]) -> tile_schedule.TileConfig:
    """The configuration of the kernel over tiles by mma.sync; ValueError for an illegal block mask or entry."""
    given = {**schedule, **BY_MMA}
    if "splits" in given:
        given["splits"] = min(given["splits"], MOST_SPLITS)
    return tile_schedule.chosen(case, target, given)


def of_tiles(case: Case, target: Target, schedule: Mapping[str, Any]) -> tile_schedule.TileConfig:
    """The configuration of the kernel over tiles by wgmma; ValueError where an entry is not legal.

    One warpgroup has all columns of few rows, with swapped operands, whose first is the tile of keys as a whole.
    """
    few = schedule.get("rows", WIDE) < WIDE
    split = tile_schedule.TileConfig(case, rows=WIDE, keys=schedule.get("keys", KEYS), split_columns=True)
    wide = (
        align_up(case.value_size, COLUMN_STEP) > MOST_OF_VALUES
        and tile_schedule.why_not_split(split) is None
        and not few
    )
    parts = PARTS_OF_KEYS if tile_schedule.copies_by_tma(split) and not few else 1
    chosen = {"rows": WIDE, "keys": KEYS, "split_columns": wide, "parts": parts}
    return tile_schedule.chosen(case, target, {**chosen, **schedule, "instruction": WGMMA})


def choose(case: Case, at: Expansion, op: Any, by_wgmma: bool) -> dict[str, Any]:
    """The entries of the kernels by wgmma, or of the kernel over tiles, for a case and the schedule's promises."""
    if not by_wgmma:
        config = by_tiles(case, at.target, at.schedule)
        return {name: getattr(config, name) for name in OF_TILES}
    most = case.heads if case.listed else at.schedule.get("max_queries", 0) * case.heads
    rows = rows_of(case, most)
    tiles = 0 if case.listed or cdiv(most, rows) > MOST_TILES else cdiv(most, rows)
    copied = box_rows(case, rows, at, op.collection)
    return {"instruction": WGMMA, "rows": rows, "tiles": tiles, "box_rows": copied}


def configured(case: Case, at: Expansion, op: Any) -> LatentConfig | tile_schedule.TileConfig:
    """The configuration of a complete schedule, of a kernel by wgmma or of the kernel over tiles.

    Raises
    ------
    ValueError
        If an entry is missing, or the entries do not fit.
    """
    if written(at.schedule, ["instruction"])["instruction"] == WGMMA:
        entries = written(at.schedule, BY_WGMMA)
        return LatentConfig(case, partial=ends_in_combine(case, op), **entries)
    splits = min(at.schedule.get("splits", 0), MOST_SPLITS)
    return tile_schedule.configured(case, at.target, {**at.schedule, "splits": splits})


def launch(config: LatentConfig, at: Expansion, op: Any) -> None:
    """Launch the attention kernel and, where keys are split, the combine kernel."""
    case, one = config.case, at.constant(1)
    tokens, batch = at.dim(op.query, 0), at.dim(op.row_offsets, 0) - 1
    blocks = latent_blocks.blocks_of(config) if config.few else 1  # blocks per partial result
    if config.case.listed:
        tiles = needed = tokens * cdiv(case.heads, config.rows)
    elif config.tiles:
        tiles = needed = batch * config.tiles
    else:
        tiles = tile_count(tokens, batch, case.heads, config.rows)
        needed = (tokens * case.heads + (config.rows - 1)) // config.rows
    needed = needed + (one - needed.least(one))
    if "splits" in at.schedule:
        splits = at.constant(at.schedule["splits"])
    else:
        splits = (at.device("multiprocessors") // (needed * blocks)).least(at.constant(latent_combine.MOST_SPLITS))
        longest = at.dim(op.indices, 1) if config.case.listed else at.field(op.collection, "max_cache_length")
        least = measured("latent_split_tiles", at.target) * KEYS * blocks
        splits = splits.least((longest + (least - 1)) // least)
        splits = splits + (one - splits.least(one))
    several = one if config.partial else (splits - 1).least(one)
    parts = at.workspace((several * tiles).wide * splits * config.part_bytes + 16)  # with many tiles more than 2 GiB
    key_map = (
        at.tensor_map(op.collection, rows=config.box_rows, swizzle=swizzle_of(config), layer=op.layer, half="key")
        if config.copy == "tma"
        else None
    )
    a = AttentionArguments.of(op).without("sinks", "lse", "prior", "prior_lse", *(["out"] if config.partial else []))
    a = replace(a, partials=parts, key_map=key_map)
    if config.few:
        kernel, threads = latent_few.latent_kernel(config, at.target.shared_bytes), latent_blocks.threads_of(config)
    else:
        kernel, threads = latent_wide.latent_kernel(config), latent_wide.threads_of(config)
    for waits, launched in ((False, one - several), (True, several)):  # long kernels gain nothing from an early start
        extents = tiles * launched, splits * blocks, 1
        at.launch(kernel, [a], extents, (threads, 1, 1), key=config, programmatic=waits)
    blocks, columns = latent_combine.grid(config, tiles, splits)
    combined = [op.row_offsets, op.out, parts, tiles, splits, op.sinks, op.lse, op.prior, op.prior_lse]
    threads = (32 * latent_combine.WARPS, 1, 1)
    at.launch(latent_combine.combine_kernel(config), combined, (several * blocks, columns, 1), threads, key=config)
