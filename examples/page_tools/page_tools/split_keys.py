# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A cache kind with keys split into 16-byte chunks, [N, H, D / x, P, x], the layout of the first paged attention.

A warp with one token per lane then reads 32 contiguous chunks of 16 bytes.
"""

from typing import Any

import kvarn as kv
from kvarn.dialect import page_orders


def chunk(spec: kv.CacheSpec) -> int:
    """x: the elements in 16 bytes."""
    return 16 // spec.dtype.itemsize


def element(spec: kv.CacheSpec, slot: Any, head: Any, dim: Any) -> Any:
    x = chunk(spec)
    return (head * (spec.head_size // x) + dim // x) * (spec.page_size * x) + slot * x + dim % x


def problem(spec: kv.CacheSpec) -> str | None:
    if spec.head_size % chunk(spec):
        return f"head_size of a split_keys cache must be a multiple of {chunk(spec)}, got {spec.head_size}"
    return None


page_orders.add_kind(page_orders.PageOrder("split_keys", element, chunk, problem))


class SplitKeys(kv.PagedKVCache):
    """One layer's keys as [N, H, D / x, P, x]; the arguments are those of ``kv.PagedKVCache``."""

    kind = "split_keys"

    def __init__(self, blocks: Any, *args: Any, **kwargs: Any) -> None:
        pages, heads, chunks, slots, x = blocks.shape
        super().__init__(blocks.reshape(pages, slots, heads, chunks * x), *args, **kwargs)
