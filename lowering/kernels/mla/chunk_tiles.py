# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLA attention of a prefill's chunk over tiles by wgmma: keys of a buffer beside columns of the latent rows.

A tile is ``rows`` query tokens of one head. The producer's threads copy keys and values row by row by cp.async, for the
buffers may be slices of one, and the last columns of the keys from the pages; the rest are the passes of attention over
tiles, and its schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import RAGGED, OperandData
from kvarn.lowering.schedules import attention as tile_schedule
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import SWIZZLE, WGMMA

from ..attention.case import Case
from ..attention.partials import LOG2E, LOWEST, NO_VALUE, finished, log_sum_exp
from ..attention.queries import RaggedQueries, tiles_of
from ..attention.softmax import online_softmax
from ..base import Expansion
from .chunk_rows import Chunk, ChunkArguments

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
    if case.value_size > tile_schedule.MOST_OF_VALUES:
        found.append(f"needs values of up to {tile_schedule.MOST_OF_VALUES} columns, got {case.value_size}")
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


def launch(chunk: Chunk, at: Expansion, op: Any) -> None:
    """Launch the kernel, persistent unless the schedule says otherwise."""
    config = config_of(chunk, at.target, at.schedule)
    tiles, heads = tiles_of(op, at, 1, config.rows), chunk.case.heads
    units = tiles * heads * at.dim(op.cache_offsets, 0).least(at.constant(1))
    blocks = units.least(at.device("multiprocessors") * config.occupancy) if config.persistent else units
    spare = max(config.most_shared_bytes(at.target) - config.shared_bytes, 0)
    schedule = {"consumers": config.consumers, "spare": spare, **config.entries()}
    args = [ChunkArguments.of(op), tiles, at.workspace(4, zeroed=True) if config.persistent else None]
    kernel = chunk_kernel(chunk, config)
    launched = (blocks, 1, 1), (config.threads, 1, 1)
    at.launch(kernel, args, *launched, key=(chunk, config), attributes={"kv.schedule": schedule})


def chunk_kernel(chunk: Chunk, config: tile_schedule.TileConfig) -> Any:
    """The kernel: a linear grid over heads and tiles of query tokens, a head's one after another, the longest first."""
    case, M, N, V = chunk.case, config.rows, config.keys, config.value_columns
    first_column = case.content if case.rope else case.spec.head_size - chunk.rope
    of_cache = {"columns": chunk.rope, "first_column": first_column, "rope": case.rope, "dtype": case.query}

    @kv.kernel(block=(config.threads, 1, 1), min_blocks=config.occupancy)
    def mla_chunk_tiles(a: ChunkArguments, tiles: kv.i32, queue: kv.Optional[kv.Buffer[kv.i8, 1]]):
        scale, queries = a.scale, RaggedQueries(a.row_offsets, a.query.shape[0])
        cache = a.collection.get_key_cache(a.layer)
        held = kv.math.min(a.key.shape[0], a.value.shape[0])  # no offset leads out of the buffers
        units = tiles * case.heads
        for i in range(kv.block_id.x, units, kv.grid_dim.x):
            work = i if queue is None else kv.take_round(queue, i, units)
            h = work // tiles
            b, base, row0, count = queries.tile(tiles - 1 - (work - h * tiles), 1, M)
            first_row = kv.math.clamp(a.buffer_row_offsets[b], 0, held)
            num_keys = kv.math.clamp(a.buffer_row_offsets[b + 1], first_row, held) - first_row
            taken = kv.math.max(a.cache_offsets[b], 0)
            start = a.collection.cache_length(b) - taken
            num_keys = kv.where(row0 < count, num_keys, 0)
            token = row0 + kv.tile_index(M)
            exists, token = token < count, kv.math.max(kv.math.min(token, count - 1), 0)
            place = base + token, h
            q = a.query.load_rows(*place, mask=exists, columns=chunk.columns)
            if scale < 0.0:  # maxima are found before scores are scaled
                q = -q
            unit = kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E
            m, l, o = kv.full(M, LOWEST), kv.full(M, 0.0), kv.full((M, V), 0.0)
            if chunk.accumulate:
                before, d = a.lse.gather(*place, mask=exists), kv.tile_index(V)[None, :]
                some = before != NO_VALUE
                m, l = kv.where(some, before * LOG2E, LOWEST), kv.where(some, 1.0, l)
                there = (some & exists)[:, None] & (d < case.value_size)
                o = kv.f32(a.out.gather(place[0][:, None], h, d, mask=there))
            q_at = (start + token)[:, None]
            for j in range(0, (num_keys + (N - 1)) // N):
                k_at = j * N + kv.tile_index(N)
                row, there = first_row + k_at, k_at < num_keys
                nope = a.key.load_rows(row, h, mask=there, columns=chunk.nope)
                token0 = taken + j * N
                rope = cache.tile(b, 0, token0, taken + num_keys, rows=N, tail="any", **of_cache)
                v = a.value.load_rows(row, h, mask=there, columns=V, stored=case.value_size)
                x = kv.dot(q, kv.beside(nope, rope).T)
                with kv.trace("mask"):
                    x = kv.masked(x, (k_at[None, :] <= q_at) & there[None, :])
                with kv.trace("softmax"):
                    m, l, p, alpha = online_softmax(m, l, x, unit)
                o = kv.dot(case.query(p), v, o * alpha[:, None])
            m, l, factor, _ = finished(m, l, None, None, kv.math.exp2)
            a.out.store_rows(*place, value=case.out(o * factor[:, None]), mask=exists, stored=case.value_size)
            a.lse.scatter(*place, value=log_sum_exp(m, l), mask=exists)

    return mla_chunk_tiles
