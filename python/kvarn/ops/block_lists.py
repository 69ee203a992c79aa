# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lists of a block mask as an operand of attention: their shape, their checks, and the mask that goes with them."""

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
    """Check the lists of a block mask against a checked collection and query."""
    source, given = checks.handle_of(seen), getattr(seen, name)
    pages = seen.pages.shape if name == "blocks" and seen.pages is not None else None
    shape = blocks_shape(source, seen.query.shape, tile, by_head, pages)
    if pages is None and len(given.shape) == 3:  # lists may be per head; lists of pages may be longer
        heads = given.shape[1] if given.shape[1] == source.num_heads else shape[1]
        shape = (shape[0], heads, shape[2] if name == "blocks" else max(shape[2], given.shape[2]))
    checks.array(seen, name, shape)
    if math.prod(shape) >= 2**31:
        raise ValueError(
            f"{seen.title}: {name} must have fewer than 2**31 elements, got shape {list(shape)}: split the call"
        )


def check_block_mask(seen: SimpleNamespace) -> None:
    """Check the block mask of an attention against its checked query."""
    if getattr(seen, "block_mask", None) is not None:
        by_head = registered(seen.attributes["mask"]).by_head
        tile = tuple(seen.attributes[name] for name in BLOCK_TILE)
        check_blocks(seen, "block_mask", tile, by_head)


def blocks_shape(
    source: Any, query: tuple[int, ...], tile: tuple[int, int], by_head: bool, pages: tuple[int, ...] | None = None
) -> tuple[int, int, int]:
    """The shape of a block mask's lists: one list per tile of query rows of attention, with room for all tiles of keys.

    ``pages``: the shape of the page lists, which are per KV head.
    """
    (rows, keys), batch = tile, source.batch_size
    group = query[-2] // source.num_heads
    tiles = batch * -(-(query[1] * group) // rows) if len(query) == 4 else query[0] * group // rows + batch
    most = -(-_slots(source) // keys)
    if pages is not None:
        most = max(most, pages[2] * (source.page_size // keys))
    return tiles, source.num_heads if by_head or pages is not None else 1, 1 + most


def _slots(source: Any) -> int:
    """Capacity of a sequence of a collection or operand, in tokens."""
    of_operand = isinstance(source, MHAOperand)
    spec, at = (source.spec.cache, source._model._at) if of_operand else (source.cache_spec, source._at)
    if spec.kind == RAGGED:
        return at["num_blocks"]
    return at["lookup_columns"] * spec.page_size if spec.paged else at["capacity"]


def mask_of(block_mask: Any, others: tuple[Any, ...], title: str) -> tuple[Any, ...]:
    """The mask arguments of an attention with a block mask; no other argument may restrict what a query sees."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"{title}: block_mask must be a kv.BlockMask, got a {type(block_mask).__name__}")
    mask, *rest = others
    if mask.__class__ is not str or mask != "causal" or any(x is not None for x in rest):
        raise ValueError(
            f"{title}: mask, window, chunk, tree and pages must be left out with block_mask, which has a mask: pass "
            "them to kv.ops.block_mask"
        )
    return block_mask.mask
