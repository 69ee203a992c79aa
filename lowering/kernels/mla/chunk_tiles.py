# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLA attention of a prefill's chunk by the kernel over tiles: keys from a buffer, completed by latent columns.

A tile is ``rows`` query tokens of one head; a block's work items are ordered by head, the longest first within a head.
The producer's threads copy keys and values row by row by cp.async, since the buffers may be slices of one tensor, and
the last key columns from the cache's pages. Without wgmma, all threads load both parts to registers, and from there
write keys to shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.lowering.schedules import attention as tile_schedule
from kvarn.lowering.schedules.limits import MOST_OF_VALUES
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import MMA, SWIZZLE, WGMMA

from ..attention.arguments import AttentionArguments
from ..attention.case import Case
from ..attention.kernel import attention_kernel
from ..attention.queries import tiles_of
from ..attention.specialisation import TileArguments, TileKernel
from ..base import Expansion

KEYS_BY_MMA = 64  # keys of a tile whose parts warps load to registers: rows of all warps


def fixed(target: Target) -> dict[str, Any]:
    """The schedule entries that a chunk fixes."""
    by_wgmma = target.has("wgmma")
    return {"producer": by_wgmma, "instruction": WGMMA if by_wgmma else MMA, "splits": 1}


def problems(case: Case, target: Target) -> list[str]:
    """Why the kernel does not support a chunk, one sentence per reason; empty if it does."""
    if case.query is f32:
        return ["needs a query of bf16 or f16, got f32"]
    found = tile_schedule.problems(case, target, case.of_chunk.alignment, {"instruction": fixed(target)["instruction"]})
    by_wgmma = target.has("wgmma")
    panel = SWIZZLE // case.query.itemsize if by_wgmma else COLUMN_STEP
    nope, rope = case.of_chunk.nope, case.of_chunk.rope
    if nope % panel or rope % COLUMN_STEP:
        got = f"{nope} and {rope}"
        found.append(f"needs keys of a multiple of {panel} columns and of 16 from the latent rows, got {got}")
    if not by_wgmma and not case.of_chunk.latent.plain:
        found.append(f"needs latent rows of one type for products by {MMA}")
    if case.value_size > MOST_OF_VALUES:
        found.append(f"needs values of up to {MOST_OF_VALUES} columns, got {case.value_size}")
    if not found:
        try:
            config_of(case, target, {})
        except ValueError as error:
            found.append(f"does not fit: {error}")
    return found


def config_of(case: Case, target: Target, schedule: Mapping[str, Any]) -> tile_schedule.TileConfig:
    """The given entries, completed by the best ones; ValueError if the given entries do not fit."""
    fixing = fixed(target)
    for name, value in fixing.items():
        if schedule.get(name, value) != value:
            raise ValueError(f"the schedule's {name} must be {value} for a prefill's chunk, got {schedule[name]}")
    if fixing["instruction"] == MMA:
        config = tile_schedule.chosen(case, target, {"keys": KEYS_BY_MMA, **schedule, **fixing})
        if config.keys % KEYS_BY_MMA:
            raise ValueError(f"the schedule's keys must be a multiple of {KEYS_BY_MMA}, got {config.keys}")
        return config
    producers = min(measured("chunk_producers", target), tile_schedule.TileConfig(case).most_producers)
    entries = {"producers": producers, "overlap": measured("chunk_overlap", target), **schedule, **fixing}
    return tile_schedule.chosen(case, target, entries)


def choose(case: Case, target: Target, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of :func:`config_of`, for ``select-kv-schedule`` to write."""
    return config_of(case, target, schedule).entries()


def launch(case: Case, at: Expansion, op: Any) -> None:
    """Launch the kernel, persistent unless the schedule says otherwise."""
    config = tile_schedule.configured(case, at.target, at.schedule)
    tiles = tiles_of(op, at, 1, config.rows)
    scales_log2 = tiles * case.heads * at.dim(op.cache_offsets, 0).least(at.constant(1))
    blocks = scales_log2.least(at.device("multiprocessors") * config.occupancy) if config.persistent else scales_log2
    spare = max(config.most_shared_bytes(at.target) - config.shared_bytes, 0)
    schedule = {"consumers": config.consumers, "spare": spare, **config.entries()}
    t = TileArguments(tiles, queue=at.workspace(4, zeroed=True) if config.persistent else None)
    launched = (blocks, 1, 1), (config.threads, 1, 1)
    kernel = attention_kernel(
        TileKernel(
            case, config.rows, config.keys, config.threads, config.blocks(at.target), persistent=config.persistent
        )
    )
    args = [AttentionArguments.of(op), t]
    at.launch(kernel, args, *launched, key=config, attributes={"kv.schedule": schedule})
