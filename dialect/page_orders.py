# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kinds of caches that other packages add: pages whose elements lie in an order of their own.

``kvarn.dialect.layout`` asks the formulas here for such a kind. Accesses and look-ups take it; what moves rows or tiles
refuses it (``kvarn.dialect.verify.added_kinds``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import CacheSpec


@dataclass(frozen=True)
class PageOrder:
    """A kind of paged caches whose elements lie in another order inside a page of P * H * D elements.

    Attributes
    ----------
    name : str
        The kind, as in ``CacheSpec(name, ...)``.
    element : callable
        ``element(spec, slot, head, dim)``, the offset in the page, by ``+ * // %`` only, as all formulas here.
    run : callable
        ``run(spec)``, the elements of a head that lie together, which a vector does not cross. Runs begin at multiples
        of it in ``dim`` and in memory.
    problem : callable, optional
        ``problem(spec)``, what is wrong with a spec, or None.
    """

    name: str
    element: Callable[[CacheSpec, Any, Any, Any], Any]
    run: Callable[[CacheSpec], int]
    problem: Callable[[CacheSpec], str | None] = lambda spec: None


added: dict[str, PageOrder] = {}
reserved: set[str] = set()  # names of kinds of our own: layout.py, which asks this module, puts them here
listeners: list[Callable[[PageOrder], None]] = []  # are told of every kind that is added
# The ops that know nothing of the order of a page's elements, or ask the formulas here; others refuse added kinds.
ADDED_TAKE = frozenset({
    "cache_length", "cache_lengths", "field", "is_empty", "load", "load_pages", "max_context_length",
    "max_prompt_length", "page", "raw_page", "store",
})  # fmt: skip


def add_kind(order: PageOrder) -> PageOrder:
    """Make a kind known; one of the same package, edited, takes its place. ValueError when the name is another's."""
    other = added.get(order.name)
    if order.name in reserved or (other is not None and other.element.__module__ != order.element.__module__):
        raise ValueError(f"kind {order.name!r} is taken: choose another name")
    added[order.name] = order
    for tell in listeners:
        tell(order)
    return order


__all__ = ["ADDED_TAKE", "PageOrder", "add_kind", "added", "listeners"]
