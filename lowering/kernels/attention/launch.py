# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launches of attention over tiles: grid, splits, partial results and descriptors, by a schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dialect.ops.attention import ARRAYS
from kvarn.lowering.index import Ix
from kvarn.lowering.schedules.attention import TileConfig, copies_by_tma, staged_by_tma
from kvarn.lowering.schedules.limits import columns_at_a_time, columns_behind
from kvarn.lowering.schedules.tables import by_bits, measured
from kvarn.lowering.tiles.boxes import swizzle_of_boxes
from kvarn.lowering.tiles.ir import MMA, SWIZZLE
from kvarn.lowering.tiles.transposition import GROUP

from ..base import Expansion
from .arguments import AttentionArguments
from .kernel import attention_kernel
from .key_splits import COMBINING, WARPS, combine_kernel
from .queries import batch_of, tiles_of
from .specialisation import TileArguments, TileKernel
from .split_counts import halved, longest_of, splits_for


def launch(config: TileConfig, at: Expansion, op: Any, few: Ix | None = None) -> None:
    """Launch the attention kernel and, where keys are split, the combine kernel.

    With ``few``, only over sequences of more than ``few`` new tokens: the kernel launched before has the others, and
    this one runs on the multiprocessors that it leaves.
    """
    a = replace(AttentionArguments.of(op), few=few)
    if config.case.spec.rotation:  # the query was rotated to where the output will be
        a = replace(a, query=a.out)
    # Block masks fix the numbering of tiles, and with lists each row is a sequence: max_queries does not apply.
    numbered = config.case.padded or a.block_mask is not None or a.lists is not None
    most = None if numbered else at.schedule.get("max_queries")
    tiles, multiprocessors = tiles_of(op, at, config.case.group, config.rows, most), at.device("multiprocessors")
    splits = alone = most_split_tiles = None
    if config.splits != 1:
        # A lower bound of the tiles that contain rows. In a divided batch most sequences are assumed to have few rows,
        # one each, and so no tile.
        rows = at.dim(op.query, 0) * (at.dim(op.query, 1) if config.case.padded else at.constant(1))
        batch = batch_of(op, at)
        if few is not None:
            none = few.least(1) * batch
            rows, batch = rows.greatest(none) - none, batch - none
        filled = tiles if config.case.padded else ((rows * config.case.group + (config.rows - 1)) // config.rows)
        filled = filled.greatest(batch).greatest(at.constant(1)) * config.case.spec.num_heads
        splits = at.constant(config.splits or 1)
        if not config.splits:
            longest, slots, least = (
                longest_of(op, at),
                multiprocessors * config.occupancy,
                config.least(at.target) * config.keys,
            )
            splits = splits_for(filled, batch_of(op, at), longest, slots, least, at.target)
            if config.occupancy > 1:
                splits = splits.greatest(halved(filled, slots, longest, least))
            if few is not None:  # multiprocessors are free for tiles at different times: several short ones each
                waves = slots * by_bits("divided_waves", at.target, config.case.spec.converted) // filled
                waves = waves.least(longest // least).least(at.constant(measured("splits_by_shape", at.target)))
                alone, splits = splits, splits.greatest(few.least(1) * waves)
                most_split_tiles = (filled * 2).least(tiles * config.case.spec.num_heads)
    t = TileArguments(
        tiles, *descriptors(config, at, a), splits=splits, splits_alone=alone, most_split_tiles=most_split_tiles
    )
    for column_range in config.column_ranges:
        _launch_columns(config, column_range, at, a, t, most)


def _launch_columns(
    config: TileConfig,
    column_range: tuple[int, int],
    at: Expansion,
    a: AttentionArguments,
    t: TileArguments,
    most: int | None,
) -> None:
    """Launch the kernel for some value columns, of at most ``most`` new tokens."""
    case, tiles, multiprocessors, splits = config.case, t.tiles, at.device("multiprocessors"), t.splits
    spare = config.most_shared_bytes(at.target) - config.shared_bytes
    schedule = {"consumers": config.consumers, "spare": max(spare, 0), **config.entries()}
    if config.narrow:
        schedule["promote"] = columns_at_a_time(config.value_columns)
        schedule["behind"] = columns_behind(config.value_columns)
    if config.across > 1:
        schedule["across"] = config.across
    by_mma = config.instruction == MMA
    s = TileKernel(
        case, config.rows, config.keys, config.threads, config.blocks(at.target), values_end_with_mask=by_mma,
        least=config.least(at.target), persistent=config.persistent or not by_mma, column_range=column_range, most=most,
        stored_keys=config.stored_keys, weights=config.weights, sequences=config.sequences,
        overlaps=a.few is not None and at.target.has("pdl") and column_range == config.column_ranges[0],
    )  # fmt: skip
    if config.narrow and a.lse is None:  # lse needs the weights before rounding
        schedule["row_sums"] = True
    if column_range[0] > 0:
        a = a.without("lse")  # the kernel of the first columns writes it
    units, at_once = tiles * case.spec.num_heads, multiprocessors * config.occupancy
    blocks = units.least(at_once) if config.persistent else units
    several = None
    if splits is not None:
        several = (splits - 1).least(at.constant(1))
        split_tiles = units if t.most_split_tiles is None else t.most_split_tiles
        slots = several * split_tiles * splits * config.rows + 1
        partials = at.workspace(slots, dtype=f32, columns=config.value_columns)
        t = replace(t, partials=partials, ends=at.workspace(slots, dtype=f32, columns=2))
        units_of_all = units * splits
        blocks = units_of_all.least(at_once) if config.persistent else units_of_all
    if config.persistent and config.producer:
        t = replace(t, queue=at.workspace(4, zeroed=True))
    key, kernel = (config, column_range, most, a.few is None), attention_kernel(s)
    at.launch(
        kernel, [a, t], (blocks, 1, 1), (config.threads, 1, 1), key=key, programmatic=s.overlaps,
        attributes={"kv.schedule": schedule},
    )  # fmt: skip
    if several is None:
        return
    a = a.without("query", "scale", "slopes", "pages", "page_counts", *ARRAYS)
    t = replace(t, key_map=None, value_map=None, queue=None)
    grid, early = several * units * (config.rows // WARPS), at.target.has("pdl")
    if config.sequences:  # most tiles may be of sequences that another kernel has
        grid = grid.least(multiprocessors * COMBINING)
    at.launch(combine_kernel(s, early), [a, t], (grid, 1, 1), (32 * WARPS, 1, 1), key=key, programmatic=early)


def descriptors(config: TileConfig, at: Expansion, a: AttentionArguments) -> list[Any]:
    """TMA descriptors of keys and values; None where TMA cannot copy them."""
    rows, staged, found = config.box_rows, staged_by_tma(config), []
    if not (copies_by_tma(config) or staged):
        return [None, None]
    for handle, half in ((a.collection or a.keys, "key"), (a.collection or a.values, "value")):
        as_stored = not staged or (config.stored_keys and half == "key")
        swizzle = f"{SWIZZLE if as_stored else swizzle_of_boxes(config.case.spec)}B"
        box = math.gcd(rows, GROUP) if config.narrow and half == "value" else rows  # the rows that one warp transposes
        if at.why_no_tensor_map(handle, rows=box, swizzle=swizzle) is not None:
            return [None, None]
        if config.case.spec.is_mla and half == "value":  # which are columns of the keys
            return [*found, None]
        whose = {} if a.layer is None else {"layer": a.layer, "half": half}
        found.append(at.tensor_map(handle, rows=box, swizzle=swizzle, **whose))
    return found
