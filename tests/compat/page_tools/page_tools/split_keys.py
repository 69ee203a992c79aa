# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kind of caches: keys split into chunks of 16 bytes, [N, H, D / x, P, x], as the first paged attention had them.

A warp whose lanes have a token each then reads 16 bytes of 32 tokens that lie side by side.
"""

from typing import Any

import kvarn as kv
from kvarn.dialect import page_orders


def chunk(spec: kv.CacheSpec) -> int:
    """x, the elements of 16 bytes."""
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
