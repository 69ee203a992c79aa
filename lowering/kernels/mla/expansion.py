# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand ``kv.mla_attention``, ``kv.mla_prefill_chunk`` and ``kv.mla_decompress``.

Latent rows are keys whose first ``value_size`` columns are the values. On GPUs with wgmma the kernels of ``mla.wide``
and ``mla.few`` run the shapes that they support. Other shapes and other GPUs use the kernel over tiles, with products
by mma.sync; so does the host. A prefill's chunk uses ``mla.chunk_tiles`` if wgmma is available. The row kernels of
``attention.rows`` support everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import i32
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import RAGGED, CacheSpec, OperandData, lowbit
from kvarn.dialect.ops.attention import block_tile, score_of
from kvarn.dialect.ops.mla import inline_content, inline_scales_of
from kvarn.lowering.schedules import attention as tile_schedule, mla as latent_schedule
from kvarn.lowering.schedules.limits import MOST_COLUMNS
from kvarn.lowering.tiles.ir import WGMMA

from .. import expands
from ..attention import kernel as attention_tiles, launch as tile_launch
from ..attention.case import Case, Chunk, Masking
from ..attention.expansion import WIDEST_ROWS, Place, launch_rows
from ..attention.queries import RaggedQueries
from ..base import Expansion
from ..common import BYTES, row_alignment
from . import chunk_tiles as mla_chunk_tiles
from .common import KEYS, LatentConfig

THREADS = 128
ROWS_TILE = (16, 32)  # query rows and keys per tile of a block mask, for kernels that process one row at a time


def case_of(op: Any, at: Expansion) -> Case:
    """The case of an attention over latent rows."""
    spec, columns, inline = at.spec(op.collection), at.static_dim(op.query, 2), inline_scales_of(op)
    rope = columns - inline_content(spec, columns, inline) if inline else spec.head_size - columns
    return Case(
        RowFormat(spec, rope, inline), query=at.dtype(op.query), out=at.dtype(op.out), heads=at.static_dim(op.query, 1),
        value_size=op.value_size.value, mask=Masking(op.mask.value, op.span.value), score=score_of(op),
        blocks=block_tile(op), listed=op.indices is not None, aligned=row_alignment(op) >= BYTES,
    )  # fmt: skip


def latent_problems(op: Any, at: Expansion) -> list[str]:
    """Why no tile kernel over latent rows supports an operation, one sentence per reason; empty if one does.

    On GPUs with wgmma the wgmma kernels are tried first, then the tile kernel by mma.sync.
    """
    return wgmma_problems(op, at) and tile_problems(op, at)


def wgmma_problems(op: Any, at: Expansion) -> list[str]:
    """Why the kernels by wgmma do not support an operation, one sentence per reason; empty if they do."""
    case, tile = case_of(op, at), block_tile(op)
    found = latent_schedule.problems(case, at.target, row_alignment(op))
    if tile is not None and at.target.has("wgmma"):
        wanted = _tile_by_wgmma(case, at.schedule)
        if tile != wanted:
            found.append(f"needs a block mask of tiles of {wanted[0]} query rows and {wanted[1]} keys, got {tile}")
    return found


def _tile_by_wgmma(case: Case, schedule: Mapping[str, Any]) -> tuple[int, int]:
    """Query rows and keys per tile of the kernels by wgmma."""
    return latent_schedule.rows_of(case, schedule.get("max_queries", 0) * case.heads), KEYS


def block_extents(case: Case, place: Place) -> tuple[int, int]:
    """(query rows, keys) per tile of a block mask for an attention over latent rows.

    Without wgmma they are those of the kernel over tiles, which follow from the number of columns. Kernels that process
    one row at a time accept any.
    """
    if place.target.is_host or place.schedule.get("kind") == "simt":
        return ROWS_TILE
    if place.target.has("wgmma"):
        return _tile_by_wgmma(case, place.schedule)
    case = replace(case, value_size=min(case.value_size, MOST_COLUMNS))
    if tile_schedule.problems(case, place.target, WIDEST_ROWS, latent_schedule.BY_MMA):
        return ROWS_TILE
    config = latent_schedule.by_tiles(case, place.target, place.schedule)
    return config.rows, config.keys


def tile_problems(op: Any, at: Expansion) -> list[str]:
    """Why the kernel over tiles by mma.sync does not support an operation; empty if it does."""
    case = case_of(op, at)
    found = tile_schedule.problems(case, at.target, row_alignment(op), latent_schedule.BY_MMA)
    if not found and case.blocks:
        try:
            latent_schedule.by_tiles(case, at.target, at.schedule)
        except ValueError as error:
            found.append(f"does not fit: {error}")
    return found


def tiled_problems(op: Any, at: Expansion) -> list[str]:
    """Why the kernel over tiles does not take an operation by wgmma, one sentence each; empty when it does."""
    case = case_of(op, at)
    found = tile_schedule.problems(case, at.target, row_alignment(op), {"instruction": WGMMA})
    if case.listed or case.blocks:
        found.append("takes neither lists of rows nor block masks of latent rows")
    return found


def kind_of(op: Any, at: Expansion) -> str:
    """The schedule's kind, or the choice for the target; ValueError if the given kind does not support the case."""
    kind = at.schedule.get("kind")
    if at.target.is_host or kind == "simt":
        return kind or "host"
    if kind == "tile":
        for problem in tiled_problems(op, at):
            raise ValueError(f"a schedule of kind tile {problem}")
        return kind
    problems = latent_problems(op, at)
    for problem in problems if kind == "latent" else ():
        raise ValueError(f"a schedule of kind latent {problem}")
    return "simt" if problems else "latent"


def slower_than(op: Any, at: Expansion) -> list[str]:
    """Why a faster kind was not chosen, one sentence per reason; empty for the fastest kind."""
    if at.target.is_host or "kind" in at.schedule:
        return []
    if at.target.has("wgmma"):
        return [f"that of kind latent on wgmma {problem}" for problem in wgmma_problems(op, at)]
    return [f"that of kind latent {problem}" for problem in latent_problems(op, at)]


@expands("kv.mla_attention")
def expand_attention(op: Any, at: Expansion) -> None:
    case, kind = case_of(op, at), at.kind
    if kind == "latent":
        config = latent_schedule.configured(case, at, op)
        if isinstance(config, LatentConfig):
            latent_schedule.launch(config, at, op)
        else:
            tile_launch.launch(config, at, op)
    elif kind == "tile":
        tile_launch.launch(tile_schedule.configured(case, at.target, at.schedule), at, op)
    elif kind == "host" and attention_tiles.fits_host(case):
        attention_tiles.launch_host(case, at, op)
    else:
        launch_rows(kind, case, at, op)


def chunk_case(op: Any, at: Expansion) -> Case:
    """The case of a prefill's chunk."""
    query, nope = at.dtype(op.query), at.static_dim(op.key, 2)
    heads, columns = (at.static_dim(op.query, dim) for dim in (1, 2))
    rope = columns - nope
    latent = RowFormat(at.spec(op.collection), rope if op.bf16_rope.value else 0)
    return Case(
        RowFormat(OperandData(RAGGED, query, heads, columns)), query, at.dtype(op.out), heads,
        value_size=at.static_dim(op.value, 2), chunk=Chunk(latent, nope, rope, row_alignment(op), op.accumulate.value),
    )  # fmt: skip


def chunk_problems(op: Any, at: Expansion) -> list[str]:
    """Why the kernel over tiles does not support a prefill's chunk, one sentence per reason; empty if it does."""
    return mla_chunk_tiles.problems(chunk_case(op, at), at.target)


@expands("kv.mla_prefill_chunk")
def expand_prefill_chunk(op: Any, at: Expansion) -> None:
    case = chunk_case(op, at)
    if at.kind == "tile":
        mla_chunk_tiles.launch(case, at, op)
    elif at.kind == "host" and attention_tiles.fits_host(case):
        attention_tiles.launch_host(case, at, op)
    else:
        launch_rows(at.kind, case, at, op)


def decompress_kernel(spec: CacheSpec) -> Any:
    """Copies latent rows, one vector of at most 16 bytes per thread; rows of no sequence are not written."""
    width = min(16 // spec.dtype.itemsize, lowbit(spec.head_size))
    columns = spec.head_size // width

    @kv.kernel
    def mla_decompress(
        cache: kv.KVCache,
        row_offsets: kv.Buffer[i32, 1],
        cache_offsets: kv.Buffer[i32, 1],
        out: kv.Buffer[spec.dtype, 2],
    ):
        item = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
        row, d = item // columns, item % columns * width
        rows = RaggedQueries(row_offsets, out.shape[0])
        if rows.in_range(row):
            b = rows.sequence(row)
            token = rows.token(b, row) + cache_offsets[b]
            if spec.quantized:
                vector = cache.load_quantized(b, 0, token, d, width=width)
            else:
                vector = cache.load(b, 0, token, d, width=width)
            out.store(row, d, value=vector, alignment=spec.dtype.itemsize)

    return mla_decompress


@expands("kv.mla_decompress")
def expand_decompress(op: Any, at: Expansion) -> None:
    spec = at.spec(op.cache)
    columns = spec.head_size // min(16 // spec.dtype.itemsize, lowbit(spec.head_size))
    threads = 1 if at.target.is_host else THREADS
    blocks = (at.dim(op.out, 0) * columns + (threads - 1)) // threads
    at.launch(
        decompress_kernel(spec),
        [op.cache, op.row_offsets, op.cache_offsets, op.out],
        (blocks, 1, 1),
        (threads, 1, 1),
        key=spec,
    )
