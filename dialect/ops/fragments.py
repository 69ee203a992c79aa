# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operand A of products from registers, of tiles that lie in shared memory with the 8-bit elements of their cache.

``assign-kv-layouts`` makes both operations; kernels have ``kv.tile_load``, which yields dequantized elements.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import CACHE, READ, Effect, EffectModel, ReadsMemory
from ..ext import I32, Operand, Result
from .common import i64_attr
from .tile import IN_SHARED, SHARED, layout_of, tile_of, tile_type

BYTES = ("f8E4M3FN", "f8E5M2", "i8")  # elements that become 16 bits in registers


class _LoadsScales(EffectModel):
    """Reads a cache."""

    effects = (Effect(READ, CACHE),)


class TileFragmentsOp(Kv.Operation, name="tile_fragments", traits=[ReadsMemory]):
    """A tile of 8-bit elements as operand A that threads hold, each element converted exactly.

    Operand: a tile of f8E4M3FN, f8E5M2 or i8 in shared memory. Result: a tile of bf16 or f16 of the same shape, in
    registers. An e4m3 NaN becomes 480 as bf16. When it is there, all lanes of a warp have read what they need.
    """

    source: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        source, tile = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or source.rank != 2 or str(source.element_type) not in BYTES:
            return verify.fail(
                self, f"the operand must be a tile of rank 2 of {', '.join(BYTES)}, got {self.source.type}"
            )
        if layout_of(source) not in (None, SHARED):
            return verify.fail(self, f'the operand must have the layout "{SHARED}", got {source}')
        if tile is None or list(tile.shape) != list(source.shape) or str(tile.element_type) not in ("bf16", "f16"):
            got = self.operation.results[0].type
            return verify.fail(self, f"the result must be a tile of the operand's shape of bf16 or f16, got {got}")
        return layout_of(tile) not in IN_SHARED or verify.fail(self, f"the result must be in registers, got {tile}")


class TileScalesOp(Kv.Operation, name="tile_scales", traits=[_LoadsScales]):
    """The scales of the tokens [first, first + M) of a head of a quantized cache, as f32: one per token.

    Operands: as of ``kv.tile_load``; tokens from ``count`` up repeat the last token's scale. Attribute: first_column
    of the head dimension, in the granule whose scale is meant. Result: tensor<Mxf32>.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    first_column: ir.IntegerAttr
    scales: Result[Any]

    def verify_invariants(self) -> bool:
        spec, scales = verify.handle(self, self.cache, verify.CACHE_LIKE), tile_of(self.operation.results[0])
        if spec is None:
            return False
        if not spec.quantized:
            return verify.fail(self, f"needs a quantized cache (one with scales), got {self.cache.type}")
        column = verify.integer(self.first_column)
        if column is None or not 0 <= column < spec.head_size:
            return verify.fail(self, f"first_column must lie in the head's {spec.head_size}, got {self.first_column}")
        if scales is None or scales.rank != 1 or str(scales.element_type) != "f32":
            return verify.fail(self, f"the result must be a vector of f32, got {self.operation.results[0].type}")
        return True


def tile_fragments(source: ir.Value, element: ir.Type) -> ir.Value:
    """A tile in shared memory as operand A of an element type."""
    result = tile_type(ir.RankedTensorType(source.type).shape, element)
    return TileFragmentsOp(source, result).operation.results[0]


def tile_scales(of_tokens: Sequence[ir.Value], first_column: int, rows: int) -> ir.Value:
    """The scales of so many tokens from the first on: ``of_tokens`` are (cache, batch, head, first, count)."""
    result = tile_type([rows], ir.F32Type.get())
    return TileScalesOp(*of_tokens, i64_attr(first_column), result).operation.results[0]
