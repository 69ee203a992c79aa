# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.index_scores over tiles: what the kernel on tensor cores of :mod:`indexer` does not take.

A block has a query row, whose heads are the rows of a tile, and :data:`CHUNK` tokens, :data:`KEYS` at a time: products,
relu, weights of the heads, and a sum along the rows. Operands are swapped: tokens are the rows of the instruction, so
that four lanes have a token's heads. Keys of 8 bits come as they are stored and are converted in registers; the scale
of a token multiplies products of 8-bit numbers, which are exact.
"""

from __future__ import annotations

import math
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f16, f32, i32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.lowering.schedules.limits import ATOM_ROWS
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import MMA, SWAPPED, SWIZZLE, WARPGROUP, WGMMA

from ..attention.queries import RaggedQueries
from ..base import Expansion
from ..common import BYTES, begin
from .indexer_case import CHUNK, OPERAND_BYTES, UNSEEN, Case, relu, seen_tokens
from .row_products import MOST_COLUMNS

KEYS = 64  # of a tile
STAGES = 4  # tiles on their way
BLOCKS = 4  # per multiprocessor, whose latencies overlap, if a tile has up to FEW_HEADS heads; otherwise half as many
FEW_HEADS = 64
COLUMN_STEP = 32  # of heads, which products take as a whole; of a query that is converted twice as much
ROW_STEP = 8  # of rows of a tile whose operands are swapped


def rows_of(c: Case) -> int:
    """Heads, rounded up to rows of a tile."""
    return align_up(c.heads, ROW_STEP)


def takes(c: Case, target: Target) -> bool:
    """Whether the kernel takes a case."""
    spec = c.spec
    return (
        not target.is_host
        and target.has("mma_bf16")
        and c.size % (COLUMN_STEP if loads_rows(c, products_of(c, target)) else 2 * COLUMN_STEP) == 0
        and c.size <= MOST_COLUMNS
        and (c.narrow or spec.dtype in (bf16, f16))
        and not (c.narrow and c.query is f32)
        and not (spec.quantized and (spec.num_scales != 1 or not c.narrow))
        and rows_of(c) * c.size * 2 <= OPERAND_BYTES
    )


def loads_rows(c: Case, products: DType) -> bool:
    """Whether rows of the query are loaded as they are; otherwise elements are loaded one by one, and converted."""
    return c.query is products and c.alignment >= BYTES


def products_of(c: Case, target: Target) -> DType:
    """What is multiplied: of 8-bit keys what has them and the query exactly."""
    if not c.narrow:
        return c.spec.dtype
    return f16 if c.query is f16 or (c.query.bits == 8 and target.has("f8_convert")) else bf16


def instruction_of(c: Case, target: Target) -> str:
    """Of the products: with short rows of 8 bits mma.sync, whose operands are converted in registers then too."""
    return WGMMA if target.has("wgmma") and not (c.narrow and c.size < SWIZZLE) else MMA


def tile_kernel(c: Case, products: DType) -> Any:
    rows = rows_of(c)

    @kv.kernel(block=(WARPGROUP, 1, 1), min_blocks=BLOCKS if rows <= FEW_HEADS else BLOCKS // 2)
    def index_scores(
        collection,
        layer: i32,
        query,
        weights: kv.Buffer[f32, 2],
        row_offsets,
        out: kv.Buffer[f32, 2],
        chunks: i32,
        boxes,
    ):
        begin(c.early)
        row, chunk = kv.block_id.x // chunks, kv.block_id.x % chunks * CHUNK
        b, seen = seen_tokens(collection, RaggedQueries(row_offsets, query.shape[0]), row)
        keys, end = collection.get_key_cache(layer), kv.math.min(chunk + CHUNK, out.shape[1])
        head, token = kv.tile_index(rows), kv.tile_index(KEYS)
        tiles = cdiv(kv.math.max(kv.math.min(end, seen) - chunk, 0), KEYS)
        if tiles > 0:
            exists = head < c.heads
            if kv.static(loads_rows(c, products)):
                q = query.load_rows(row, head, mask=exists, columns=c.size)
            else:
                q = products(query.gather(row, head[:, None], kv.tile_index(c.size)[None, :], mask=exists[:, None]))
            w = weights.gather(row, head, mask=exists)[:, None]
            for i in range(0, tiles):
                first = chunk + i * KEYS
                k = keys.tile(b, 0, first, seen, rows=KEYS, dtype=products, tail="any", descriptor=boxes)
                x = relu(kv.dot(q, k.T)) * w
                if kv.static(rows > c.heads):  # of whose zeros numbers that are not finite would make NaN
                    x = kv.where(exists[:, None], x, 0.0)
                score = kv.where(first + token < seen, x.sum(axis=0), UNSEEN)
                out.scatter(row, first + token, value=score, mask=first + token < end)
        for i in range(tiles, cdiv(kv.math.max(end - chunk, 0), KEYS)):
            at = chunk + i * KEYS + token
            out.scatter(row, at, value=kv.full(KEYS, UNSEEN), mask=at < end)

    return index_scores


def boxes_of(c: Case, at: Expansion, op: Any) -> Any:
    """The TMA descriptor of the keys; None if TMA does not copy their tiles."""
    rows = math.gcd(c.spec.page_size, KEYS) if c.spec.paged else KEYS
    if instruction_of(c, at.target) != WGMMA or rows % ATOM_ROWS:
        return None
    if at.why_no_tensor_map(op.collection, rows=rows, swizzle=f"{SWIZZLE}B") is not None:
        return None
    return at.tensor_map(op.collection, rows=rows, swizzle=f"{SWIZZLE}B", layer=op.layer, half="key")


def launch(c: Case, at: Expansion, op: Any) -> None:
    """Launch the kernel."""
    chunks = (at.dim(op.out, 1) + (CHUNK - 1)) // CHUNK
    schedule = {"consumers": 1, "stages": STAGES, SWAPPED: True, "instruction": instruction_of(c, at.target)}
    args = [op.collection, op.layer, op.query, op.weights, op.row_offsets, op.out, chunks, boxes_of(c, at, op)]
    at.launch(
        tile_kernel(c, products_of(c, at.target)), args, (at.dim(op.query, 0) * chunks, 1, 1), (WARPGROUP, 1, 1),
        key=c, programmatic=c.early, attributes={"kv.schedule": schedule},
    )  # fmt: skip
