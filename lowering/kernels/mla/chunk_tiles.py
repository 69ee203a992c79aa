# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLA attention of a prefill's chunk by the kernel over tiles: keys of a buffer beside columns of the latent rows.

A tile is ``rows`` query tokens of one head; a block's tiles come one head after another, of each the longest first. The
producer's threads copy keys and values row by row by cp.async, for the buffers may be slices of one, and the last
columns of the keys from the pages. By wgmma.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import RAGGED, OperandData
from kvarn.lowering.schedules import attention as tile_schedule
from kvarn.lowering.schedules.limits import MOST_OF_VALUES
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import SWIZZLE, WGMMA

from ..attention.arguments import AttentionArguments
from ..attention.case import Case
from ..attention.kernel import attention_kernel
from ..attention.queries import tiles_of
from ..attention.specialisation import ChunkColumns, TileArguments, TileKernel
from ..base import Expansion
from .chunk_rows import Chunk

FIXED = {"producer": True, "instruction": WGMMA, "splits": 1}  # of a schedule
# Entries where nothing is given. H200, 4096 causal tokens of 128 heads: 1242 us; with products that overlap, which keep
# two stages of values busy, 1518; with one warpgroup that copies 1320; by 64 keys in four stages 1340.
CHOSEN, PRODUCERS = {"overlap": False}, 2


def case_of(chunk: Chunk) -> Case:
    """The case that schedules of attention over tiles are chosen for: ragged keys of all columns."""
    case = chunk.case
    spec = OperandData(RAGGED, case.query, case.heads, chunk.columns)
    return Case(spec=spec, query=case.query, out=case.out, heads=case.heads, value_size=case.value_size, lse=True)


def problems(chunk: Chunk, target: Target) -> list[str]:
    """Why the kernel does not take a chunk, one sentence each; empty when it does."""
    case = chunk.case
    if not target.has("wgmma"):
        return [f"needs a GPU with {WGMMA}, got {target.name}"]
    if case.query is f32:
        return ["needs a query of bf16 or f16 for products by wgmma, got f32"]
    found, panel = tile_schedule.problems(case_of(chunk), target, chunk.alignment), SWIZZLE // case.query.itemsize
    if chunk.nope % panel or chunk.rope % 16:
        got = f"{chunk.nope} and {chunk.rope}"
        found.append(f"needs keys of a multiple of {panel} columns and of 16 from the latent rows, got {got}")
    if case.value_size > MOST_OF_VALUES:
        found.append(f"needs values of up to {MOST_OF_VALUES} columns, got {case.value_size}")
    if not found:
        try:
            config_of(chunk, target, {})
        except ValueError as error:
            found.append(f"does not fit: {error}")
    return found


def config_of(chunk: Chunk, target: Target, schedule: Mapping[str, Any]) -> tile_schedule.TileConfig:
    """The entries that are given, and the best for the others; ValueError where what is given does not fit."""
    for name, value in FIXED.items():
        if schedule.get(name, value) != value:
            raise ValueError(f"the schedule's {name} must be {value} for a prefill's chunk, got {schedule[name]}")
    case = case_of(chunk)
    producers = min(PRODUCERS, tile_schedule.TileConfig(case).most_producers)
    entries = {"producers": producers, **CHOSEN, **schedule, **FIXED}
    return tile_schedule.chosen(case, target, entries)


def choose(chunk: Chunk, target: Target, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of :func:`config_of`, for ``select-kv-schedule`` to write."""
    return config_of(chunk, target, schedule).entries()


def launch(chunk: Chunk, at: Expansion, op: Any) -> None:
    """Launch the kernel, persistent unless the schedule says otherwise."""
    config = tile_schedule.configured(case_of(chunk), at.target, at.schedule)
    tiles, heads = tiles_of(op, at, 1, config.rows), chunk.case.heads
    units = tiles * heads * at.dim(op.cache_offsets, 0).least(at.constant(1))
    blocks = units.least(at.device("multiprocessors") * config.occupancy) if config.persistent else units
    spare = max(config.most_shared_bytes(at.target) - config.shared_bytes, 0)
    schedule = {"consumers": config.consumers, "spare": spare, **config.entries()}
    t = TileArguments(tiles, queue=at.workspace(4, zeroed=True) if config.persistent else None)
    launched = (blocks, 1, 1), (config.threads, 1, 1)
    kernel = attention_kernel(specialised(chunk, config))
    at.launch(
        kernel, [AttentionArguments.of(op), t], *launched, key=(chunk, config), attributes={"kv.schedule": schedule}
    )


def specialised(chunk: Chunk, config: tile_schedule.TileConfig) -> TileKernel:
    """What the kernel over tiles is specialised for."""
    case = chunk.case
    first_column = case.content if case.rope else case.spec.head_size - chunk.rope
    of_cache = {"columns": chunk.rope, "first_column": first_column, "rope": case.rope, "dtype": case.query}
    columns = ChunkColumns(chunk.nope, tuple(of_cache.items()))
    return TileKernel(
        case_of(chunk), config.rows, config.keys, config.threads, config.occupancy, chunk=columns,
        accumulate=chunk.accumulate,
    )  # fmt: skip
