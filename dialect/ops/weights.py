# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Weights of a softmax: how they follow from scores and, for 8-bit weights, their row sums and saturation.

``kv.tile_weights`` defines a weight for every finite score. Passes make the others from the sums and maxima of an
online softmax (``sum-kv-weights``, ``skip-kv-maxima``).
"""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import Pure
from ..ext import Operand, Result
from .tile import IN_SHARED, SHARED, layout_of, tile_of, tile_type

COLUMNS = 8  # of the narrowest product
LARGE = 2.0**27  # from this maximum up, a fused multiply-add would put weights off by 2^8, which f16 has no range for
LARGEST = 3.4e38  # bound on the magnitude of a score in powers of two: beyond it, scores are clamped to it


class TileWeightsOp(Kv.Operation, name="tile_weights", traits=[Pure]):
    """The weights of scores under a row maximum: 2^(score * scale_log2 - maximum), with a rounded product.

    A weight is exactly 1 where the product equals the maximum: the difference of an exact product and a rounded maximum
    could be half a unit in the last place of the maximum, which is 64 at 1e9. Products of finite scores are clamped to
    +-3.4e38, so every finite score has a weight under its row's maximum, and no difference is NaN. Minus infinity has
    weight 0; plus infinity and NaN give weights of infinity or NaN. An implementation may subtract a maximum below 2^27
    from the exact product: all weights of a row then differ by one common factor between 1/16 and 16, which the
    softmax's normalisation removes.

    Operands: scores, a tile of f32; scale_log2, positive, and maximum, one f32 per row. Result: a tile of the scores'
    type.
    """

    scores: Operand[Any]
    scale_log2: Operand[Any]
    maximum: Operand[Any]
    weights: Result[Any]

    def verify_invariants(self) -> bool:
        scores = tile_of(self.scores)
        if scores is None or scores.rank != 2 or str(scores.element_type) != "f32":
            return verify.fail(self, f"scores must be a tile of rank 2 of f32, got {self.scores.type}")
        for name, value in (("scale_log2", self.scale_log2), ("maximum", self.maximum)):
            rows = tile_of(value)
            if rows is None or list(rows.shape) != [scores.shape[0]] or str(rows.element_type) != "f32":
                return verify.fail(self, f"{name} must be {scores.shape[0]} x f32, got {value.type}")
        got = self.operation.results[0].type
        return got == self.scores.type or verify.fail(self, f"the result must be {self.scores.type}, got {got}")


class TileOnesOp(Kv.Operation, name="tile_ones", traits=[Pure]):
    """A tile of ones in shared memory: as B of a product, it sums the rows of A.

    All threads fill it before roles diverge. The result is a tile of f8E4M3FN with the layout ``shared``.
    """

    tile: Result[Any]

    def verify_invariants(self) -> bool:
        got = self.operation.results[0].type
        tile = tile_of(self.operation.results[0])
        if tile is None or tile.rank != 2 or str(tile.element_type) != "f8E4M3FN" or layout_of(tile) != SHARED:
            return verify.fail(self, f"the result must be a tile of rank 2 of f8E4M3FN with layout {SHARED}, got {got}")
        return True


class TileSaturatedOp(Kv.Operation, name="tile_saturated", traits=[Pure]):
    """Per row, whether an element in this thread's registers is the largest of its type, 448, and may have saturated.

    Operand: a tile of f8E4M3FN in registers without negative elements. Result: tensor<Mxi1>. Threads that share a row
    may have different results; use ``kv.warp_any`` on them.
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
    """The rows of a tile with an element that is the largest of its type; the result has ``like``'s layout."""
    of_rows = ir.RankedTensorType(like.type)
    mask = tile_type(list(of_rows.shape), ir.IntegerType.get_signless(1), layout_of(of_rows))
    return TileSaturatedOp(source, mask).operation.results[0]


def tile_weights(scores: ir.Value, scale_log2: ir.Value, maximum: ir.Value) -> ir.Value:
    """The weights of a tile of scores; ``scale_log2`` and ``maximum`` have one number per row."""
    return TileWeightsOp(scores, scale_log2, maximum, scores.type).operation.results[0]
