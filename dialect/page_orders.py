# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cache kinds that other packages add: pages with another order of elements.

``kvarn.dialect.layout`` calls the formulas here for such a kind. Element accesses and lookups support added kinds;
ops that move rows or tiles refuse them (``kvarn.dialect.verify.added_kinds``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import CacheSpec


@dataclass(frozen=True)
class PageOrder:
    """A kind of paged cache with another order of the P * H * D elements of a page.

    Attributes
    ----------
    name : str
        The kind, as in ``CacheSpec(name, ...)``.
    element : callable
        ``element(spec, slot, head, dim)``, the offset in the page. It may use ``+ * // %`` only, as all formulas here.
    run : callable
        ``run(spec)``, the number of contiguous elements of a head, which a vector does not cross. Runs begin at
        multiples
        of this number, in ``dim`` and in memory.
    problem : callable, optional
        ``problem(spec)``, what is wrong with a spec, or None.
    """

    name: str
    element: Callable[[CacheSpec, Any, Any, Any], Any]
    run: Callable[[CacheSpec], int]
    problem: Callable[[CacheSpec], str | None] = lambda spec: None


added: dict[str, PageOrder] = {}
reserved: set[str] = set()  # names of the built-in kinds, added by layout.py, which imports this module
listeners: list[Callable[[PageOrder], None]] = []  # called with every kind that is added
# The ops that do not depend on the order of a page's elements, or ask the formulas here; other ops refuse added kinds.
ADDED_TAKE = frozenset({
    "cache_length", "cache_lengths", "field", "is_empty", "load", "load_pages", "max_context_length",
    "max_prompt_length", "page", "raw_page", "store",
})  # fmt: skip
# The ops that read and write elements that share bytes, or no elements at all; other ops refuse caches of them.
PACKED_TAKE = ADDED_TAKE | {
    "append", "attention", "attention_padded", "block_ptr", "convert", "copy_pages", "copy_start", "gather",
    "key_cache", "load_raw", "load_scale", "make_cache", "make_collection", "rope_append", "scale_block_ptr",
    "scales_base", "store_scale", "tile_load", "transfer_pages", "value_cache",
}  # fmt: skip


def add_kind(order: PageOrder) -> PageOrder:
    """Register a kind, in place of an old one of the same package; ValueError if another package has the name."""
    other = added.get(order.name)
    if order.name in reserved or (other is not None and other.element.__module__ != order.element.__module__):
        raise ValueError(f"kind {order.name!r} is taken: choose another name")
    added[order.name] = order
    for tell in listeners:
        tell(order)
    return order


__all__ = ["ADDED_TAKE", "PACKED_TAKE", "PageOrder", "add_kind", "added", "listeners"]
