# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A softmax over tiles of scores that come one after the other: one rule for built-in kernels and one's own."""

from __future__ import annotations

from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dialect.ops.weights import LARGEST, tile_weights

from . import math, tiles
from .calls import func
from .values import rounded_product, where

__all__ = ["online_softmax"]

SLACK = 8.0  # how far, in powers of two, scores may exceed the running maximum before it moves: weights stay below 2^8


@func
def online_softmax(m: Any, total: Any, x: Any, scale_log2: Any, slack: float = SLACK, above: float = 0.0) -> Any:
    """One tile of an online softmax in base 2: (m, total, weights, factor of the earlier sums).

    ``m`` and ``total`` are the running maximum and sum of each row, -3e38 and 0 at first. ``x`` times ``scale_log2``
    (positive; for all rows or per row) are scores in powers of two; hidden ones are minus infinity (:func:`masked`).
    The maximum stays while no score exceeds it by ``slack``, which bounds the weights and avoids most rescales. When it
    moves, it becomes the highest score minus ``above``, so that low-precision weights are larger and fewer become
    zeros. ``kv.tile_weights`` defines the weight of every finite score.
    """
    of_rows = scale_log2 if isinstance(scale_log2, tiles.Tile) else tiles.full(m.shape, scale_log2)
    top = math.min(rounded_product(x.max(axis=1), of_rows), LARGEST)
    m_new = where(top > m + slack, top - above if above else top, m)
    alpha = math.exp2(m - m_new)
    p = tiles.Tile(tile_weights(x.ir, of_rows.ir, m_new.ir), f32, x.shape)
    return m_new, total * alpha + p.sum(axis=1), p, alpha
