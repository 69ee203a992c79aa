# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launches of attention over tiles: blocks, splits, memory of partial results and descriptors, by a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import f32
from kvarn.dialect.ops.attention import arrays_of
from kvarn.lowering.index import Ix
from kvarn.lowering.promote_kv_sums import columns_at_a_time, columns_behind
from kvarn.lowering.tile_boxes import swizzle_of_boxes
from kvarn.lowering.tile_ir import MMA, SWIZZLE
from kvarn.lowering.tile_transposition import GROUP

from .attention_queries import batch_of, tiles_of
from .attention_tiles import attention_kernel
from .base import Expansion
from .key_splits import WARPS, combine_kernel
from .tile_schedule import TileConfig, copies_by_tma, staged_by_tma
from .tile_splits import halved, longest_of, splits_for


def launch(
    config: TileConfig, at: Expansion, op: Any, args: list[ir.Value | None], source: tuple[Any, ...],
    lists: Sequence[ir.Value | None] = (),
) -> None:  # fmt: skip
    """Launch the kernel; ``source`` is (keys, values, layer), the collection twice where they are its, ``lists`` those
    of pages, and the block mask, and those of rows.
    """
    # A block mask has numbered tiles of rows, whatever is promised; lists have rows for sequences.
    numbered = config.case.padded or any(x is not None for x in lists[2:])
    most = None if numbered else at.schedule.get("max_queries")
    tiles, multiprocessors = tiles_of(op, at, config.case.group, config.rows, most), at.device("multiprocessors")
    splits = None
    if config.splits != 1:
        # Rows fill no fewer tiles than this, and every sequence of a batch has one.
        rows = at.dim(op.query, 0) * (at.dim(op.query, 1) if config.case.padded else at.constant(1))
        filled = tiles if config.case.padded else ((rows * config.case.group + (config.rows - 1)) // config.rows)
        filled = filled.greatest(batch_of(op, at)).greatest(at.constant(1)) * config.case.spec.num_heads
        splits = at.constant(config.splits or 1)
        if not config.splits:
            longest, slots, least = longest_of(op, at), multiprocessors * config.occupancy, config.least * config.keys
            splits = splits_for(filled, batch_of(op, at), longest, slots, least)
            if config.occupancy > 1:
                splits = splits.greatest(halved(filled, slots, longest, least))
    maps = descriptors(config, at, *source)
    for section in config.sections:
        _launch_section(config, section, at, op, args, (tiles, multiprocessors, splits, most), maps, lists)


def _launch_section(
    config: TileConfig, section: tuple[int, int], at: Expansion, op: Any, args: list[ir.Value | None],
    counts: tuple[Ix, Ix, Ix | None, int | None], maps: list[Any], lists: Sequence[ir.Value | None],
) -> None:  # fmt: skip
    """Launch the kernel of some columns of values; ``counts``: tiles, multiprocessors, splits, a sequence's tokens."""
    case, (tiles, multiprocessors, splits, most) = config.case, counts
    spare = config.most_shared_bytes(at.target) - config.shared_bytes
    schedule = {"consumers": config.consumers, "spare": max(spare, 0), **config.entries()}
    if config.narrow:
        schedule["promote"] = columns_at_a_time(config.value_columns)
        schedule["behind"] = columns_behind(config.value_columns)
    if config.across > 1:
        schedule["across"] = config.across
    options = {"min_blocks": config.blocks(at.target)}
    kernel = attention_kernel(
        case, config.rows, config.keys, config.threads, options, least=config.least, bounded=config.instruction == MMA,
        looped=config.persistent or config.instruction != MMA, section=section, most=most,
        stored_keys=config.stored_keys, weights=config.weights,
    )  # fmt: skip
    collection, layer, keys, values, query, extents, kv_offsets, scale, out, sinks, lse, slopes, *prior = args
    if config.narrow and lse is None:  # which is of weights before they were rounded
        schedule["row_sums"] = True
    lse = lse if section[0] == 0 else None  # which the first of several writes
    args = [collection, layer, keys, values, query, extents, kv_offsets, scale, out, sinks, lse, slopes, *prior]
    units, at_once = tiles * case.spec.num_heads, multiprocessors * config.occupancy
    blocks = units.least(at_once) if config.persistent else units
    parts: list[Any] = [None, None, None]
    several = None
    if splits is not None:
        several = (splits - 1).least(at.constant(1))
        slots = several * units * splits * config.rows + 1
        parts = [
            at.workspace(slots, dtype=f32, columns=config.value_columns),
            at.workspace(slots, dtype=f32, columns=2),
            splits,
        ]
        units_of_all = units * splits
        blocks = units_of_all.least(at_once) if config.persistent else units_of_all
    queue = at.workspace(4, zeroed=True) if config.persistent and config.producer else None
    given = [*args, tiles, *maps, *parts, queue, *arrays_of(op), *lists]
    key = config, section, most
    at.launch(kernel, given, (blocks, 1, 1), (config.threads, 1, 1), key=key, attributes={"kv.schedule": schedule})
    if several is None:
        return
    before = [collection, layer, keys, values, extents, kv_offsets, out, sinks, lse, *prior]
    combined = [*before, *parts, tiles, *lists[2:]]
    grid = several * units * (config.rows // WARPS)
    early = at.target.has("pdl")
    kernel = combine_kernel(case, config.rows, config.keys, config.least, early, section, most)
    at.launch(kernel, combined, (grid, 1, 1), (32 * WARPS, 1, 1), key=key, programmatic=early)


def descriptors(config: TileConfig, at: Expansion, keys: ir.Value, values: ir.Value, layer: Any) -> list[Any]:
    """Tensor maps of keys and values; None where copies by TMA cannot be."""
    rows, staged, found = config.box_rows, staged_by_tma(config), []
    if not (copies_by_tma(config) or staged):
        return [None, None]
    for handle, half in ((keys, "key"), (values, "value")):
        as_stored = not staged or (config.stored_keys and half == "key")
        swizzle = f"{SWIZZLE if as_stored else swizzle_of_boxes(config.case.spec)}B"
        box = math.gcd(rows, GROUP) if config.narrow and half == "value" else rows  # of what a warp transposes
        if at.why_no_tensor_map(handle, rows=box, swizzle=swizzle) is not None:
            return [None, None]
        whose = {} if layer is None else {"layer": layer, "half": half}
        found.append(at.tensor_map(handle, rows=box, swizzle=swizzle, **whose))
    return found
