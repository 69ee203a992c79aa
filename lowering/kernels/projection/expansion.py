# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append and kv.project_append_padded: products whose columns are written to queries and a cache.

A product kernel computes C = x weight^T, and a :class:`HeadWriter` writes its heads to the query output and the cache.
For many tokens (projection/heads.py) and for kind ``full_k`` one kernel does both; otherwise rounded products go
through a workspace.
"""

from __future__ import annotations

import math
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f8e4m3, f32
from kvarn.dialect.ops.projection import BLOCK
from kvarn.dialect.schedules import OPERATIONS
from kvarn.lowering.schedules.projection import complete, stream_k_by_wgmma
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.tiles.ir import MMA, WGMMA

from .. import expands
from ..base import Expansion
from ..common import WARP, Group, Rows, row_alignment, vector_width
from . import (
    full_k as projection_full_k,
    full_k_mma as projection_full_k_mma,
    full_k_tiles as projection_full_k_tiles,
    heads as projection_heads,
    stream_k as projection_stream_k,
    stream_k_mma as projection_stream_k_mma,
    stream_k_stored as projection_stream_k_stored,
    tiles as projection_tiles,
)
from .common import Projection, Scales, divisor, finish, scaled, scaled_tile, wgmma_problems
from .groups import plain_case, with_floats, with_values

HOST_ROWS, HOST_COLUMNS, HOST_STEP = 16, 64, 64  # of a tile on the host
SIMT_ROWS, SIMT_WARPS = 8, 4  # tokens per warp of the simt product, and warps per block


# --- products into a workspace -------------------------------------------------------------------------


def host_kernel(case: Projection, columns: int, step: int) -> Any:
    """The product as a tile kernel with tiles of HOST_ROWS x ``columns``, ``step`` elements of K at a time."""
    M, N = HOST_ROWS, columns
    element = f32 if case.x.bits == 8 else case.x

    @kv.kernel(block=(1, 1, 1))
    def project(
        x: kv.Buffer[case.x, 2], weight: kv.Buffer[case.x, 2], products: kv.Buffer[case.rounded, 2], scales: Scales
    ):
        tokens, first, panel = x.shape[0], kv.block_id.x * M, kv.block_id.y
        left = kv.buffer_operand(x, case.k // step, step)
        right = kv.buffer_operand(weight, case.k // step, step)
        row, column = first + kv.tile_index(M), panel * N + kv.tile_index(N)
        exists = row < tokens
        c = kv.full((M, N), 0.0)
        for j in range(0, case.k // step):
            a = left.tile(0, j, first, tokens, rows=M, dtype=element)
            b = right.tile(0, j, panel * N, case.columns, rows=N, dtype=element)
            c = kv.dot(a, b.T, c)
        c = scaled_tile(case, c, row, exists, column, scales)
        products.store_rows(panel * tokens + row, value=case.rounded(c), mask=exists)

    return project


def simt_kernel(case: Projection, lanes: int, rows: Rows) -> Any:
    """The product by scalar multiplications, for every case: ``lanes`` threads share a column of SIMT_ROWS tokens."""
    width = rows.width
    group = Group(lanes)

    @kv.kernel
    def project(
        x: kv.Buffer[case.x, 2], weight: kv.Buffer[case.x, 2], products: kv.Buffer[case.rounded, 2], scales: Scales
    ):
        lane = kv.thread_id.x % lanes
        column = kv.math.min(kv.block_id.x * (kv.block_dim.x // lanes) + kv.thread_id.x // lanes, case.columns - 1)
        tokens, first = x.shape[0], kv.block_id.y * SIMT_ROWS
        sums = [kv.f32(0.0) for _ in range(SIMT_ROWS)]
        for d in range(lane * width, case.k, lanes * width):
            w = kv.f32(rows.load(weight, column, d))
            scale = kv.f32(1.0) if case.scaling != "block" else scales.weight_scale[column // BLOCK, d // BLOCK]
            for n in kv.static(range(SIMT_ROWS)):
                row = kv.math.min(first + n, tokens - 1)
                more = (kv.f32(rows.load(x, row, d)) * w).reduce("add")
                if case.scaling == "block":
                    more = more * (scale * scales.x_scale[row, d // BLOCK])
                sums[n] = sums[n] + more
        for n in kv.static(range(SIMT_ROWS)):
            c = group.sum(sums[n])
            row = first + n
            if (row < tokens) & (lane == 0):
                products[row, column] = case.rounded(scaled(case, c, row, column, scales))

    return project


def products_of(op: Any, case: Projection, at: Expansion) -> tuple[ir.Value, int]:
    """Launch the product into a workspace; returns the workspace and the columns per panel."""
    tokens = at.dim(op.x, 0)
    scales = Scales.of(op)
    columns = divisor(math.gcd(*(b.size for b in case.bands)), HOST_COLUMNS)
    step = divisor(case.k, HOST_STEP)
    if at.target.is_host and min(columns, step) >= 2 and case.scaling != "block":
        panels = case.columns // columns
        products = at.workspace(tokens * panels, dtype=case.rounded, columns=columns)
        grid = ((tokens + (HOST_ROWS - 1)) // HOST_ROWS, panels, 1)
        kernel = host_kernel(case, columns, step)
        at.launch(kernel, [op.x, op.weight, products, scales], grid, (1, 1, 1), key=(case, columns, step))
        return products, columns
    products = at.workspace(tokens, dtype=case.rounded, columns=case.columns)
    lanes, threads = (1, 1) if at.target.is_host else (WARP, WARP * SIMT_WARPS)
    extents = (case.k, BLOCK) if case.scaling == "block" else (case.k,)
    rows = Rows(vector_width(*extents, types=(case.x,)), row_alignment(at.op))
    grid = ((case.columns * lanes + threads - 1) // threads, (tokens + (SIMT_ROWS - 1)) // SIMT_ROWS, 1)
    args = [op.x, op.weight, products, scales]
    at.launch(simt_kernel(case, lanes, rows), args, grid, (threads, 1, 1), key=(case, rows))
    return products, case.columns


def kind_of(op: Any, at: Expansion, case: Projection) -> str:
    """The schedule's kind, checked to support the case, or the choice for the target.

    Raises
    ------
    ValueError
        If the given kind does not support the case.
    """
    kind, tokens = at.schedule.get("kind"), at.schedule.get("max_tokens")
    alignment, by_wgmma = row_alignment(op), stream_k_by_wgmma(case, at.target)
    if by_wgmma:
        of_stream_k = wgmma_problems(case, at.target, alignment)
    else:
        stored = projection_stream_k_mma.stored_weight(op, at, case)
        of_stream_k = projection_stream_k_mma.problems(case, stored, at.target, alignment)
    if tokens is None or tokens > projection_stream_k.TOKENS[-1]:
        of_stream_k.append(f"needs max_tokens of at most {projection_stream_k.TOKENS[-1]}, got {tokens}")
    of_full_k = projection_full_k.problems(op, case, at)
    of_tiles = projection_tiles.problems(plain_case(case), at.target, alignment)
    why = {"stream_k": of_stream_k, "full_k": of_full_k, "tile": of_tiles}
    if kind is not None:
        for problem in why.get(kind, ()):
            raise ValueError(f"a schedule of kind {kind} {problem}")
        return kind
    if at.target.is_host:
        return "host"
    declared = OPERATIONS[op.operation.name]
    entries_fit = at.schedule.keys() <= set(declared.names(declared.kind("full_k")))
    if by_wgmma and not of_full_k and entries_fit and tokens <= measured("full_k_tokens", at.target):
        return "full_k"
    best = measured("stream_k_tokens", at.target)[WGMMA if by_wgmma else MMA]
    if not by_wgmma and projection_stream_k_stored.takes(op, case, at):
        best = measured("stream_k_stored_tokens", at.target)
    first = "stream_k" if tokens is not None and tokens <= best else "tile"
    return next((kind for kind in (first, "tile", "stream_k") if not why[kind]), "simt")


def launch_few(op: Any, case: Projection, at: Expansion) -> None:
    """Launch the product of few tokens with a weight that is converted in registers, and the finishing kernel."""
    config, given = projection_stream_k_mma.chosen(op, case, at), op
    op, scales, minima = projection_stream_k_mma.converted(op, config, at)
    if at.schedule["instruction"] == WGMMA:
        by_wgmma = projection_stream_k_stored.configured(given, config, at)
        projection_stream_k_stored.launch(op, given, by_wgmma, scales, minima, at)
    else:
        projection_stream_k_mma.launch(op, given, config, scales, minima, at)


@expands("kv.project_append", "kv.project_append_padded")
def project_append(op: Any, at: Expansion) -> None:
    case = Projection.of(op, at)
    schedule = complete(case, at)
    if at.kind == "full_k":
        if projection_full_k.by_mma(case, schedule["max_tokens"]):
            projection_full_k_mma.launch(op, projection_full_k_mma.configured(case, schedule), at)
        else:
            projection_full_k_tiles.launch(op, projection_full_k_tiles.chosen(case, schedule, at.target), at)
        return
    if at.kind == "stream_k" and not stream_k_by_wgmma(case, at.target):
        launch_few(op, case, at)
        return
    if case.scaling == "group":
        op, case = with_values(op, at, "x", "weight"), plain_case(case)
    if at.kind == "stream_k":
        projection_stream_k.launch(op, projection_stream_k.chosen(case, schedule), at)
        return
    if at.kind == "tile":
        by_mma = projection_tiles.instruction_for(case, at.target) == MMA
        if by_mma and case.x is f8e4m3:
            op, case = with_floats(op, at, "x", "weight"), projection_tiles.multiplied_by_mma(case)
        config = projection_tiles.chosen(case, at.target, schedule)
        if isinstance(config, projection_heads.Config):
            projection_heads.launch(op, config, at)
        else:
            projection_tiles.launch(op, config, at)
        return
    finish(op, case, at, *products_of(op, case, at))
