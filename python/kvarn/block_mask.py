# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks: which tiles of keys the tiles of a step's queries see, by a mask that is a function."""

from __future__ import annotations

from typing import Any


class BlockMask:
    """What ``kv.ops.block_mask`` made of a mask for a step: ``kv.ops.attention(..., block_mask=...)`` walks over it.

    It is of the queries, lengths and arrays that it was made of: a step makes it once, and each layer takes it. It can
    be made anew in the same memory, in a CUDA graph too.

    Attributes
    ----------
    blocks : int32 array-like [tiles, 1 or H, 1 + most]
        Of each tile of query rows, and KV head where the mask looks at the head: how many tiles of keys it sees
        anything in, and these in ascending order, each as ``2 * number + whole``, where ``whole`` is 1 if every row of
        the tile sees every key of it. 2**30 is added where not every row does, but all that the mask's parts without
        arrays show it: of ``kv.masks.causal & document`` a tile at the diagonal within one document.
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
