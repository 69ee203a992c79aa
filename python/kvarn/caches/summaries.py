# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Summaries of pages, by which ``kv.ops.select_pages`` selects pages."""

from __future__ import annotations

from typing import Any

from kvarn.dialect.dtypes import bf16
from kvarn.dialect.layout import CacheSpec
from kvarn.runtime import allocation
from kvarn.runtime.copying import NoShallowCopies

KINDS = {"min_max": 2, "mean": 1}  # rows of a summary


class PageSummaries(NoShallowCopies):
    """For every page of a pool, layer and KV head: the least and the largest element of its keys, or their mean.

    Summaries are indexed by page number, so requests that share pages share their summaries.
    ``kv.ops.summarize_pages`` updates those of the pages that a step has written.

    Parameters
    ----------
    collection : KV cache collection
        With pages, and with values (not MLA).
    kind : {"min_max", "mean"}
        ``"min_max"`` (Quest) gives an upper bound on the scores of a page's keys. ``"mean"`` takes half the memory and
        gives no bound.
    data : array-like [pages of the pool, layers, H, R, D], optional
        f32, f16 or bf16, R = 2 for ``"min_max"`` (least, largest) and 1 for ``"mean"``. By default zeros of the
        collection's library and float type, bf16 for 8-bit caches.

    Attributes
    ----------
    data : array-like
    kind : str

    Raises
    ------
    ValueError, TypeError
        If the collection has no pages or no values, or data does not match it.
    """

    def __init__(self, collection: Any, kind: str = "min_max", data: Any = None) -> None:
        title, spec = "kv.PageSummaries", getattr(getattr(collection, "spec", None), "cache", None)
        if not isinstance(spec, CacheSpec) or not hasattr(collection, "num_layers"):
            raise TypeError(f"{title}: collection must be a KV cache collection, got {type(collection).__name__}")
        if kind not in KINDS:
            raise ValueError(f"{title}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if not spec.paged or spec.is_mla:
            raise ValueError(
                f"{title}: collection must have pages and values, got a {'MLA' if spec.is_mla else spec.kind} one"
            )
        shape = (collection.num_blocks, collection.num_layers, spec.num_heads, KINDS[kind], spec.head_size)
        if data is None:
            blocks = getattr(collection, "blocks", None)
            like = blocks[0] if isinstance(blocks, (list, tuple)) else blocks
            data = allocation.zeros(like, shape, bf16 if spec.converted else spec.dtype, "data", title)
        elif tuple(data.shape) != shape:
            raise ValueError(f"{title}: data must have shape {list(shape)}, got {list(data.shape)}")
        self.kind, self.data = kind, data

    def __repr__(self) -> str:
        pages, layers = self.data.shape[:2]
        return f"PageSummaries({self.kind}, {pages} pages, {layers} layers)"
