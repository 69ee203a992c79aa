# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lists of a block mask as an operand: their shape, their checks, and the mask that attention takes with them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from kvarn.block_mask import BlockMask
from kvarn.caches import MHAOperand
from kvarn.dialect.layout import RAGGED
from kvarn.dialect.ops.attention import BLOCK_TILE
from kvarn.dsl.functions import registered

from . import checks


def check_blocks(seen: SimpleNamespace, name: str, tile: tuple[int, int], by_head: bool) -> None:
    """What the lists of a block mask must be, of a collection and a query that were checked."""
    source, given = checks.handle_of(seen), getattr(seen, name)
    pages = seen.pages.shape if name == "blocks" and seen.pages is not None else None
    shape = blocks_shape(source, seen.query.shape, tile, by_head, pages)
    if pages is None and len(given.shape) == 3:  # heads may have lists each, and lists of pages be longer
        heads = given.shape[1] if given.shape[1] == source.num_heads else shape[1]
        shape = (shape[0], heads, shape[2] if name == "blocks" else max(shape[2], given.shape[2]))
    checks.array(seen, name, shape)
    if math.prod(shape) >= 2**31:
        raise ValueError(
            f"{seen.title}: {name} must have fewer than 2**31 elements, got shape {list(shape)}: split the call"
        )


def check_block_mask(seen: SimpleNamespace) -> None:
    """What the block mask of an attention must be, of a query that was checked."""
    if getattr(seen, "block_mask", None) is not None:
        by_head = registered(seen.attributes["mask"]).by_head
        tile = tuple(seen.attributes[name] for name in BLOCK_TILE)
        check_blocks(seen, "block_mask", tile, by_head)


def blocks_shape(
    source: Any, query: tuple[int, ...], tile: tuple[int, int], by_head: bool, pages: tuple[int, ...] | None = None
) -> tuple[int, int, int]:
    """The shape of the lists of a block mask: as many tiles as attention numbers, each with room for all keys.

    ``pages``: the shape of lists of pages, of which every KV head has its own.
    """
    (rows, keys), batch = tile, source.batch_size
    group = query[-2] // source.num_heads
    tiles = batch * -(-(query[1] * group) // rows) if len(query) == 4 else query[0] * group // rows + batch
    most = -(-_slots(source) // keys)
    if pages is not None:
        most = max(most, pages[2] * (source.page_size // keys))
    return tiles, source.num_heads if by_head or pages is not None else 1, 1 + most


def _slots(source: Any) -> int:
    """Tokens that a sequence of a collection or an operand has room for."""
    of_operand = isinstance(source, MHAOperand)
    spec, at = (source.spec.cache, source._model._at) if of_operand else (source.cache_spec, source._at)
    if spec.kind == RAGGED:
        return at["num_blocks"]
    return at["lookup_columns"] * spec.page_size if spec.paged else at["capacity"]


def mask_of(block_mask: Any, others: tuple[Any, ...], title: str) -> tuple[Any, ...]:
    """The mask of a block mask, beside which nothing else says what is seen."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"{title}: block_mask must be a kv.BlockMask, got a {type(block_mask).__name__}")
    mask, *rest = others
    if mask.__class__ is not str or mask != "causal" or any(x is not None for x in rest):
        raise ValueError(
            f"{title}: mask, window, chunk, tree and pages must be left out beside block_mask, which has a mask: give "
            "what they say to kv.ops.block_mask"
        )
    return block_mask.mask
