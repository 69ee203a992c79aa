# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Managers for models whose layers differ: groups of layers with their own pages and attention spans."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.caches.checks import count
from kvarn.paging.manager import PagedKVCacheManager
from kvarn.paging.page_pool import NO_HIT, Hit, InsufficientBlocksError
from kvarn.paging.step_inputs import RuntimeInputs
from kvarn.runtime.copying import NoShallowCopies


class LayerGroup:
    """Layers whose keys and values are in one pool.

    Parameters
    ----------
    layers : sequence of int
        Layer numbers in the model, in the order of the pool's layers.
    blocks : array-like, optional
        The pool, as in :class:`PagedKVCacheManager`.
    **options
        Other pool options of that manager: ``params``, ``num_pages``, ``page_size``, ``dtype``, ``scales``,
        ``scale_dtype``, ``quantization_granularity``, ``window`` or ``chunk``, ``copy_pages``, ``upload``.
    """

    def __init__(self, layers: Sequence[int], blocks: Any = None, **options: Any) -> None:
        if isinstance(layers, (str, bytes)) or not hasattr(layers, "__iter__"):
            raise TypeError(f"layers must be a sequence of int, got {layers!r}")
        self.layers = tuple(count(layer, "layers") for layer in layers)
        if not self.layers:
            raise ValueError("a group must have a layer, got none")
        self.blocks, self.options = blocks, options

    def manager(self, **common: Any) -> PagedKVCacheManager:
        """The manager of the group's pool."""
        own = {} if self.blocks is not None else {"num_layers": len(self.layers)}
        made = PagedKVCacheManager(self.blocks, **own, **self.options, **common)
        if made.num_layers != len(self.layers):
            raise ValueError(f"blocks must have the group's {len(self.layers)} layers, got {made.num_layers}")
        return made


@dataclass(frozen=True)
class HybridInputs:
    """The inputs of the kernels of one step, for each group of layers.

    Attributes
    ----------
    groups : tuple of RuntimeInputs
        In the order of the manager's groups; row b is the b-th request of the call.
    places : dict
        (group, layer of its pool) of each of the model's layers.
    """

    groups: tuple[RuntimeInputs, ...]
    places: dict[int, tuple[int, int]]

    @property
    def row_offsets(self) -> np.ndarray:
        """[B + 1]: the rows of each request's new tokens, equal in all groups."""
        return self.groups[0].row_offsets

    @property
    def cache_lengths(self) -> np.ndarray:
        """[B]: tokens cached before the step, equal in all groups."""
        return self.groups[0].cache_lengths

    def of_layer(self, layer: int) -> tuple[Any, int]:
        """The collection of a model's layer, and the layer's number in it: the first operands of ``kv.ops`` functions.

        Raises
        ------
        IndexError
            If no group has the layer.
        """
        if layer not in self.places:
            raise IndexError(f"layer must be one of the groups' {sorted(self.places)}, got {layer}")
        group, local = self.places[layer]
        return self.groups[group].collection, local


def _once(tokens: Iterable[int] | int) -> list[int] | int:
    """Tokens as a list, since every group reads them and an iterator can be read once."""
    if isinstance(tokens, int):
        return tokens
    return int(tokens) if isinstance(tokens, np.integer) else list(tokens)


class HybridKVCacheManager(NoShallowCopies):
    """Manages the pools of a model with several kinds of layers: a request has pages in each pool.

    Each group has its own page size, heads and attention span. Pages that no later query sees, before a window or
    chunk, are freed after each step, and the group's table then has the null page for them. A cached prefix is reused
    up to the length for which every group has the pages that its queries see. Methods and the life cycle of requests
    are those of :class:`PagedKVCacheManager`.

    Parameters
    ----------
    groups : sequence of LayerGroup
    shared_layers : mapping of int to int, optional
        Layers without keys and values of their own, each with the layer whose keys and values it reads.
    max_batch_size, prefix_caching, salt, table_dtype
        As in :class:`PagedKVCacheManager`.

    Raises
    ------
    ValueError, TypeError
        If a layer is in two groups, a shared layer reads a layer of no group, or a group's options do not match.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        shared_layers: Mapping[int, int] | None = None,
        max_batch_size: int | None = None,
        prefix_caching: bool = False,
        salt: str | bytes = b"",
        table_dtype: Any = np.uint32,
    ) -> None:
        groups = list(groups)
        if not groups:
            raise ValueError("groups must have a group of layers, got none")
        self.prefix_caching = prefix_caching
        self.places: dict[int, tuple[int, int]] = {}
        for g, group in enumerate(groups):
            if not isinstance(group, LayerGroup):
                raise TypeError(f"groups must be kv.LayerGroup objects, got a {type(group).__name__} as group {g}")
            for local, layer in enumerate(group.layers):
                if layer in self.places:
                    raise ValueError(f"layer {layer} must be in one group, got it in {self.places[layer][0]} and {g}")
                self.places[layer] = g, local
        for layer, read in (shared_layers or {}).items():
            if layer in self.places or read not in self.places:
                raise ValueError(f"shared layer {layer} must be in no group and read one that is, got {read}")
            self.places[layer] = self.places[read]
        common = {
            "max_batch_size": max_batch_size,
            "prefix_caching": prefix_caching,
            "salt": salt,
            "table_dtype": table_dtype,
        }
        self.managers = tuple(group.manager(**common) for group in groups)

    # --- queries ---

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        """Free pages of each group's pool."""
        return tuple(m.num_free_pages for m in self.managers)

    def __contains__(self, request: Hashable) -> bool:
        return request in self.managers[0]

    def __len__(self) -> int:
        return len(self.managers[0])

    def pages(self, request: Hashable, group: int) -> tuple[int, ...]:
        """Page numbers of a request in a group; the null page for pages before the window."""
        return self.managers[group].pages(request)

    def processed(self, request: Hashable) -> int:
        """Tokens of a request that are in its pages."""
        return self.managers[0].processed(request)

    def active(self, request: Hashable) -> int:
        """Tokens of a request that are still to be processed."""
        return self.managers[0].active(request)

    def tokens(self, request: Hashable) -> tuple[int | None, ...]:
        """Tokens of a request; None for tokens that are not known yet."""
        return self.managers[0].tokens(request)

    # --- life cycle of a request ---

    def claim(
        self, request: Hashable, tokens: Iterable[int] | int = (), *, salt: str | bytes = b"", dummy: bool = False
    ) -> None:
        """Register a request."""
        tokens = _once(tokens)
        for m in self.managers:
            m.claim(request, tokens, salt=salt, dummy=dummy)

    def extend(self, request: Hashable, tokens: Iterable[int] | int) -> None:
        """Append tokens to a request; an int stands for that many tokens that are not known yet."""
        tokens = _once(tokens)
        for m in self.managers:
            m.extend(request, tokens)

    def realise(self, request: Hashable, tokens: Iterable[int]) -> None:
        """Set the first tokens that are not known yet."""
        tokens = list(tokens)
        for m in self.managers:
            m.realise(request, tokens)

    def alloc(self, request: Hashable, max_new: int | None = None, *, num_draft: int = 0) -> int:
        """Allocate the pages of a request's next step, in all groups or, after an error, in none.

        Parameters and errors as in :meth:`PagedKVCacheManager.alloc`.

        Returns
        -------
        int
            Tokens taken from cached pages: the longest prefix for which each group has the visible pages.
        """
        found = [m._get(request) for m in self.managers]
        if found[0].dummy:
            return max(m.alloc(request) for m in self.managers)
        self.managers[0]._check_alloc(request, found[0], max_new, num_draft)
        plans = []
        for g, (m, own, hit) in enumerate(zip(self.managers, found, self._common_hit(found), strict=True)):
            try:
                plans.append(m._plan(request, own, max_new, num_draft, hit))
            except InsufficientBlocksError as error:
                raise InsufficientBlocksError(f"group {g}: {error}", error.needed, error.free) from None
        for m, own, plan in zip(self.managers, found, plans, strict=True):
            m._own_copies(own, plan.copied)  # if a copy fails, pages copied before belong to the request
        return max(m._carry_out(own, plan) for m, own, plan in zip(self.managers, found, plans, strict=True))

    def _common_hit(self, found: list[Any]) -> list[Hit]:
        """The longest cached continuation available in every group."""
        most = len(found[0].tokens) - 1
        while True:
            hits = [m._longest_hit(own, most) for m, own in zip(self.managers, found, strict=True)]
            least = min(hit.tokens for hit in hits)
            if least == 0:
                return [NO_HIT] * len(hits)
            if all(hit.tokens == least for hit in hits):
                return hits
            most = least

    def runtime_inputs(
        self,
        requests: Iterable[Hashable],
        *,
        num_draft: int = 0,
        max_prompt_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> HybridInputs:
        """The tables of a step, for requests that were allocated for it, in every group."""
        names = list(requests)
        options = {"max_prompt_length": max_prompt_length, "max_cache_length": max_cache_length}
        made = (m.runtime_inputs(names, num_draft=num_draft, **options) for m in self.managers)
        return HybridInputs(tuple(made), self.places)

    def step(self, requests: Iterable[Hashable], accepted: Mapping[Hashable, int] | None = None) -> None:
        """Mark the step's tokens as stored in the pages, and free the pages that no later query sees."""
        names = list(requests)
        for m in self.managers:  # check all groups before anything changes
            m._accepted(*m._batch(names), accepted)
        for m in self.managers:
            m.step(names, accepted)

    def fork(self, request: Hashable, child: Hashable) -> None:
        """Register a request that continues another one from its current state, with the same tokens and pages."""
        done = []
        try:
            for m in self.managers:
                m.fork(request, child)
                done.append(m)
        except ValueError:
            for m in done:
                m.release(child)
            raise

    def release(self, request: Hashable) -> None:
        """Remove a request and free its pages."""
        for m in self.managers:
            m.release(request)

    def check(self) -> None:
        """Verify that the records are consistent; for tests and debugging."""
        for m in self.managers:
            m.check()
            if m._requests.keys() != self.managers[0]._requests.keys():
                raise RuntimeError("groups must have the same requests")
        for name in self.managers[0]._requests:
            if len({(m.processed(name), m.active(name)) for m in self.managers}) != 1:
                raise RuntimeError("a request must have as many tokens processed in every group")
