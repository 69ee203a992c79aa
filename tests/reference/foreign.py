# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pools in other libraries' layouts, built from a packed one by plain NumPy: what operations are compared with.

A layout says how keys and values [N, P, H, D] become the buffers of a library, what a user gives of these, and which
layer they are. Buffers of several layers hold a pattern in the others, so that a byte written there shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.caches import ForeignPages, PagedKVCacheCollection

from .places import Place, bits

LAYERS = 3  # of buffers that hold several
LAYER = 1  # the one that is meant


@dataclass(frozen=True)
class Layout:
    """One library's layout.

    Attributes
    ----------
    build : function
        Keys and values [N, P, H, D] to the library's buffers.
    data : function
        Those buffers, in place, to what a user gives.
    make : function
        That, lengths, table and the rest to a collection.
    layer : int
        The collection's layer that keys and values are.
    table : function
        A lookup table to the library's.
    """

    build: Callable[[np.ndarray, np.ndarray], list[np.ndarray]]
    data: Callable[[Sequence[Any]], Any]
    make: Callable[..., ForeignPages]
    options: dict[str, Any] = field(default_factory=dict)
    layer: int = 0
    table: Callable[[np.ndarray, int], np.ndarray] = lambda table, page: table


def whole(buffers: Sequence[Any]) -> Any:
    return buffers[0]


def permuted(*axes: int) -> Callable[[Sequence[Any]], Any]:
    """A view in another order, as torch or NumPy makes it."""

    def view(buffers: Sequence[Any]) -> Any:
        x = buffers[0]
        return x.permute(*axes) if hasattr(x, "permute") else x.transpose(axes)

    return view


def among_layers(x: np.ndarray, axis: int) -> np.ndarray:
    """A buffer of several layers, of which one is x and the others are 0x5A."""
    stacked = np.stack([np.full_like(np.ascontiguousarray(x).view(np.uint8), 0x5A).view(x.dtype)] * LAYERS, axis)
    np.moveaxis(stacked, axis, 0)[LAYER] = x
    return stacked


def stack(axis: int, *order: int) -> Callable[[np.ndarray, np.ndarray], list[np.ndarray]]:
    """Keys and values along an axis of the transposed halves."""

    def build(key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
        return [np.stack([x.transpose(order) if order else x for x in (key, value)], axis)]

    return build


def slots(key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Rows of all pages, and some more that make no page."""
    n, page, heads, size = key.shape
    more = np.full((page // 2, heads, size), 3, key.dtype)
    return [np.concatenate([x.reshape(n * page, heads, size), more]) for x in (key, value)]


def every_slot(table: np.ndarray, page: int) -> np.ndarray:
    """Slots of tokens, of pages."""
    wide = table[:, :, None].astype(np.int64) * page + np.arange(page)
    return wide.reshape(len(table), -1).astype(table.dtype)


def halves_of_chunks(key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """[N, 2, L, T, H * D]."""
    n, page, heads, size = key.shape
    return [among_layers(np.stack([key, value], 1).reshape(n, 2, page, heads * size), 2)]


def fused_rows(key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """[N, P, H, 2 D]."""
    return [np.concatenate([key, value], -1)]


F = ForeignPages
LAYOUTS: dict[str, Layout] = {
    "vllm NHD": Layout(stack(0), whole, F.vllm),
    "vllm HND": Layout(stack(0, 0, 2, 1, 3), whole, F.vllm, {"layout": "HND"}),
    "vllm HND as NHD": Layout(stack(0, 0, 2, 1, 3), permuted(0, 1, 3, 2, 4), F.vllm),
    "vllm packed": Layout(
        lambda k, v: [np.ascontiguousarray(fused_rows(k, v)[0].transpose(0, 2, 1, 3))], whole, F.vllm,
        {"layout": "packed"},
    ),
    "vllm packed, tokens first": Layout(fused_rows, permuted(0, 2, 1, 3), F.vllm, {"layout": "packed"}),
    "vllm layers in pages": Layout(
        lambda k, v: [among_layers(stack(1)(k, v)[0], 1)], lambda buffers: buffers[0][:, LAYER], F.flashinfer
    ),
    "flashinfer NHD": Layout(stack(1), whole, F.flashinfer),
    "flashinfer HND": Layout(stack(1, 0, 2, 1, 3), whole, F.flashinfer, {"layout": "HND"}),
    "flashinfer pair NHD": Layout(lambda k, v: [k.copy(), v.copy()], tuple, F.flashinfer),
    "flashinfer pair HND": Layout(
        lambda k, v: [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (k, v)], tuple, F.flashinfer,
        {"layout": "HND"},
    ),
    "sglang": Layout(slots, list, F.sglang, {"page_size": 0}),
    "sglang, page 1": Layout(slots, list, F.sglang, table=every_slot),
    "tensorrt_llm": Layout(
        lambda k, v: [among_layers(stack(1, 0, 2, 1, 3)(k, v)[0], 1)], whole, F.tensorrt_llm, layer=LAYER
    ),
    "tensorrt_llm, one layer": Layout(
        lambda k, v: [among_layers(stack(1, 0, 2, 1, 3)(k, v)[0], 1)], lambda buffers: buffers[0][:, LAYER],
        F.tensorrt_llm,
    ),
    "lmcache": Layout(halves_of_chunks, whole, F.lmcache, {"num_heads": 0}, layer=LAYER),
    "lmcache, by tokens": Layout(
        lambda k, v: [np.stack([x.reshape(*x.shape[:2], -1) for x in (k, v)], 2)], whole, F.lmcache,
        {"num_heads": 0, "layout": "KV_T2D"},
    ),
    "lmcache, heads apart": Layout(stack(2), whole, F.lmcache, {"layout": "KV_T2D"}),
    "heads in front": Layout(
        lambda k, v: [np.stack([x.transpose(2, 0, 1, 3) for x in (k, v)], 1)], whole, F, {"dims": "H2NPD"}
    ),
}  # fmt: skip


@dataclass
class Pool:
    """A pool in a layout, in place, and what its buffers should hold.

    Attributes
    ----------
    collection : ForeignPages
    layer : int
        Of the collection, that is the packed one's layer 0.
    """

    place: Place
    layout: Layout
    collection: ForeignPages
    buffers: list[Any]

    @property
    def layer(self) -> int:
        return self.layout.layer

    @property
    def key(self) -> Any:
        return self.collection.get_key_cache(self.layer)

    @property
    def value(self) -> Any:
        return self.collection.get_value_cache(self.layer)

    def found(self) -> list[np.ndarray]:
        """The buffers as they are now."""
        return [self.place.get(x) for x in self.buffers]

    def scales(self) -> np.ndarray:
        """The scales as they are now, [N, 2, P, H, G]."""
        pair = [self.place.get(x) for x in self.collection.scales]
        return np.stack([x[LAYER] if self.layer else x for x in pair], 1)

    def expected(self, packed: PagedKVCacheCollection) -> list[np.ndarray]:
        """The buffers that say what the packed collection does."""
        blocks = np.asarray(packed.blocks)
        return self.layout.build(blocks[:, 0, 0], blocks[:, 1, 0])

    def assert_same(self, packed: PagedKVCacheCollection) -> None:
        """Every bit is that of the packed collection, in other layers and behind the last page too."""
        for a, b in zip(self.found(), self.expected(packed), strict=True):
            wrong = np.argwhere(bits(a) != bits(b))
            assert not len(wrong), (
                f"{len(wrong)} of {a.size} elements differ, the first at {wrong[0]} of {a.shape}: "
                f"{a[tuple(wrong[0])]} is not {b[tuple(wrong[0])]}"
            )


def pool_of(place: Place, name: str, packed: PagedKVCacheCollection) -> Pool:
    """A packed collection of one layer, in a layout."""
    layout, spec = LAYOUTS[name], packed.cache_spec
    blocks = np.asarray(packed.blocks)
    assert blocks.shape[1:3] == (2, 1), "one layer, keys and values"
    buffers = [place.put(np.ascontiguousarray(x)) for x in layout.build(blocks[:, 0, 0], blocks[:, 1, 0])]
    table = layout.table(np.asarray(packed.lookup_table), spec.page_size)
    known = {"num_heads": spec.num_heads, "page_size": spec.page_size}
    options = {n: known.get(n, v) for n, v in layout.options.items()}
    made = layout.make(
        layout.data(buffers), place.put(np.asarray(packed.cache_lengths)), place.put(table), **options,
        max_seq_length=packed.max_seq_length, max_cache_length=packed.max_cache_length,
        scales=_scales(place, layout, packed),
    )  # fmt: skip
    return Pool(place, layout, made, buffers)


def _scales(place: Place, layout: Layout, packed: PagedKVCacheCollection) -> Any:
    """Buffers of scales [N, P, H, G], of several layers where the layout has those."""
    if packed.scales is None:
        return None
    pair = [np.ascontiguousarray(np.asarray(packed.scales)[:, half, 0]) for half in range(2)]
    return tuple(place.put(among_layers(x, 0) if layout.layer else x) for x in pair)
