# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Weights of a softmax: how they are made of scores; of 8 bits, what sums up their rows, and whether one is too large.

``kv.tile_weights`` says what a weight is, of every finite score. The others are what passes make of the sums and maxima
of an online softmax (``sum-kv-weights``, ``skip-kv-maxima``).
"""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import Pure
from ..ext import Operand, Result
from .tile import IN_SHARED, SHARED, layout_of, tile_of, tile_type

COLUMNS = 8  # of the narrowest product
LARGE = 2.0**27  # a maximum from which weights by a fused multiply-add would be off by 2^8: f16 could not hold them
LARGEST = 3.4e38  # of a score in powers of two, and of its negative: what would be more is that


class TileWeightsOp(Kv.Operation, name="tile_weights", traits=[Pure]):
    """The weights of scores under a maximum a row: 2^(score * unit - maximum), where products are rounded once.

    Exactly 1 where the product is the maximum: a difference of the exact product to a rounded maximum would be up to
    half a unit in the last place of the maximum, which is 64 of 1e9. Products of finite scores beyond +-3.4e38 are
    that, so every finite score has a weight under the maximum of its row, and no difference is NaN. Minus infinity has
    the weight 0; plus infinity and NaN make weights that are no numbers. A maximum of less than 2^27 may be taken off
    the exact product: all weights of a row are then off by one factor between 1/16 and 16, which a normalisation takes
    out.

    Operands: scores, a tile of f32; unit, positive, and maximum, one f32 a row. Result: a tile of the scores' type.
    """

    scores: Operand[Any]
    unit: Operand[Any]
    maximum: Operand[Any]
    weights: Result[Any]

    def verify_invariants(self) -> bool:
        scores = tile_of(self.scores)
        if scores is None or scores.rank != 2 or str(scores.element_type) != "f32":
            return verify.fail(self, f"scores must be a tile of rank 2 of f32, got {self.scores.type}")
        for name, value in (("unit", self.unit), ("maximum", self.maximum)):
            rows = tile_of(value)
            if rows is None or list(rows.shape) != [scores.shape[0]] or str(rows.element_type) != "f32":
                return verify.fail(self, f"{name} must be {scores.shape[0]} x f32, got {value.type}")
        got = self.operation.results[0].type
        return got == self.scores.type or verify.fail(self, f"the result must be {self.scores.type}, got {got}")


class TileOnesOp(Kv.Operation, name="tile_ones", traits=[Pure]):
    """A tile in shared memory of which every element is 1: as B of a product, what sums up the rows of A.

    All threads of the block fill it, before roles part. The result is a tile of f8E4M3FN with the layout ``shared``.
    """

    tile: Result[Any]

    def verify_invariants(self) -> bool:
        got = self.operation.results[0].type
        tile = tile_of(self.operation.results[0])
        if tile is None or tile.rank != 2 or str(tile.element_type) != "f8E4M3FN" or layout_of(tile) != SHARED:
            return verify.fail(self, f"the result must be a tile of rank 2 of f8E4M3FN with layout {SHARED}, got {got}")
        return True


class TileSaturatedOp(Kv.Operation, name="tile_saturated", traits=[Pure]):
    """Of every row, whether an element that this thread holds is the largest of its type, 448: it may have been larger.

    Operand: a tile of f8E4M3FN in registers, none of whose elements is negative. Result: tensor<Mxi1>. Threads that
    share a row may differ: for ``kv.warp_any``.
    """

    source: Operand[Any]
    mask: Result[Any]

    def verify_invariants(self) -> bool:
        source, mask = tile_of(self.source), tile_of(self.operation.results[0])
        if source is None or source.rank != 2 or str(source.element_type) != "f8E4M3FN":
            return verify.fail(self, f"the operand must be a tile of rank 2 of f8E4M3FN, got {self.source.type}")
        if layout_of(source) in IN_SHARED:
            return verify.fail(self, f"the operand must be a tile in registers, got {source}")
        if mask is None or list(mask.shape) != [source.shape[0]] or str(mask.element_type) != "i1":
            got = self.operation.results[0].type
            return verify.fail(self, f"the result must be {source.shape[0]} x i1, got {got}")
        return True


def tile_ones(rows: int, columns: int) -> ir.Value:
    """A tile of ones in shared memory."""
    return TileOnesOp(tile_type([rows, columns], ir.Float8E4M3FNType.get(), SHARED)).operation.results[0]


def tile_saturated(source: ir.Value, like: ir.Value) -> ir.Value:
    """Which rows of a tile have an element that is the largest of its type; with the layout of a vector of rows."""
    of_rows = ir.RankedTensorType(like.type)
    mask = tile_type(list(of_rows.shape), ir.IntegerType.get_signless(1), layout_of(of_rows))
    return TileSaturatedOp(source, mask).operation.results[0]


def tile_weights(scores: ir.Value, unit: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of a tile of scores; ``unit`` and ``maximum`` have a number a row."""
    return TileWeightsOp(scores, unit, maximum, scores.type).operation.results[0]
