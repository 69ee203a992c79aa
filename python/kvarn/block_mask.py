# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks: the tiles of keys that each tile of a step's queries sees under a mask function."""

from __future__ import annotations

from typing import Any


class BlockMask:
    """The result of ``kv.ops.block_mask`` for a step: the tiles that ``kv.ops.attention(..., block_mask=...)`` visits.

    It is valid for the queries, lengths and arrays from which it was computed: a step computes it once, and every layer
    uses it. It can be recomputed in the same memory, also in a CUDA graph.

    Attributes
    ----------
    blocks : int32 array-like [tiles, 1 or H, 1 + most]
        For each tile of query rows (and each KV head if the mask depends on the head): the number of tiles of keys with
        a visible key, then these tiles in ascending order, each as ``2 * number + whole``, where ``whole`` is 1 if
        every row of the tile sees every key of it. 2**30 is added for a tile that is not whole but in which everything
        that the mask's operands without arrays show is visible: for ``kv.masks.causal & document``, a tile at the
        diagonal within one document.
    rows, keys : int
        Query rows (tokens times the query heads of a KV head) and keys of a tile.
    mask : tuple
        The function and its arrays.
    """

    __slots__ = ("blocks", "keys", "mask", "rows")

    def __init__(self, blocks: Any, rows: int, keys: int, mask: tuple[Any, ...]) -> None:
        from kvarn.caches.checks import count

        for name, number in (("rows", rows), ("keys", keys)):
            if count(number, f"kv.BlockMask: {name}") < 2:
                raise ValueError(f"kv.BlockMask: {name} must be at least 2, got {number}")
        shape = list(getattr(blocks, "shape", ()))
        if len(shape) != 3:
            raise TypeError(
                f"kv.BlockMask: blocks must be an int32 array of three dimensions, got a {type(blocks).__name__} of "
                f"shape {shape}"
            )
        mask = mask if isinstance(mask, tuple) else (mask,)
        if not mask or not callable(mask[0]):
            raise TypeError(f"kv.BlockMask: mask must be a tuple of a function and its arrays, got {mask!r}")
        self.blocks, self.rows, self.keys, self.mask = blocks, rows, keys, mask

    def __repr__(self) -> str:
        return f"BlockMask(blocks={list(self.blocks.shape)}, rows={self.rows}, keys={self.keys}, mask={self.mask[0]!r})"
