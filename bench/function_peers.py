# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What others take for masks and scores that are functions: FlashInfer's packed mask, torch's flex attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .functions import FARTHEST
from .kvarn_rows import Offer

TOLERANCE = 0.02
FLEX_PAGE = 128  # tokens: a tile of keys


def flashinfer(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    """A custom mask over pages: a bit for every query and key, packed by the plan."""
    shape, pages, (keys, values) = p.row.shape, p.cached.pages, p.cached.parts

    def make() -> Callable[[int], Any]:
        w = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        w.plan(
            p.offsets, pages.starts, pages.order, pages.last, shape.query_heads, shape.heads, shape.size, shape.page,
            custom_mask=_seen(p), q_data_type=p.query.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        return lambda layer: w.run(p.query, (keys[layer], values[layer]), out=p.out)

    yield Offer("FlashInfer, custom mask", make, TOLERANCE)


def _seen(p: Any) -> Any:
    """What each query sees, a bool for every key of its sequence, end to end."""
    torch = p.arrays.torch
    if p.row.kind == "tree":
        each = [p.seen_of(int(length)).reshape(-1) for length in p.lengths]
        return torch.as_tensor(np.concatenate(each), device=p.arrays.device)
    at = torch.arange(p.longest, device=p.arrays.device)
    same = p.documents[:, :, None] == p.documents[:, None, :]
    return (same & (at[:, None] >= at[None])).flatten()


def flex(p: Any) -> Iterator[Offer]:
    """torch's flex attention, compiled, over keys and values that are dense: each head's rows end to end."""
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    torch, shape, batch, length = p.arrays.torch, p.row.shape, len(p.lengths), p.longest
    ids, bias, buckets = p.documents, p.bias, p.buckets
    found: dict[str, Any] = {}

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[b, q] == ids[b, k])

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + bias[h, buckets[(q - k).clamp(0, FARTHEST - 1)]]

    def dense(rows: Any, heads: int) -> Any:
        return rows.reshape(batch, -1, heads, shape.size)[:, :length].transpose(1, 2).contiguous()

    def make() -> Callable[[int], Any]:
        mask = seen if shape.documents else causal
        tiles = attention.create_block_mask(
            mask, batch if shape.documents else None, None, length, length, device=p.arrays.device
        )
        run = torch.compile(attention.flex_attention, dynamic=False)
        query = dense(p.query, shape.query_heads)
        table = p.cached.pages.device_table.long()
        parts = [dense(part[0][table], shape.heads) for part in p.cached.parts]
        options = {} if bias is None else {"score_mod": biased}

        def call(layer: int) -> None:
            found["out"] = run(query, *parts, block_mask=tiles, enable_gqa=True, scale=p.scale, **options)

        return call

    def error() -> float:
        p.out = found["out"].transpose(1, 2).reshape(p.out.shape)
        return p.error()

    yield Offer("torch flex, dense", make, TOLERANCE, error)
    yield Offer("torch flex, pages of 128", lambda: _flex_over_pages(p, seen, causal, biased, found), TOLERANCE, error)


def _flex_over_pages(p: Any, seen: Any, causal: Any, biased: Any, found: dict[str, Any]) -> Callable[[int], Any]:
    """The same over pages, as torch's experimental ``PagedAttention`` converts masks and scores for them.

    Its pages are as long as tiles of keys; keys and values are [1, heads, all slots, size].
    """
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    paged = importlib.import_module("torch.nn.attention.experimental._paged_attention").PagedAttention
    torch, shape, batch, length = p.arrays.torch, p.row.shape, len(p.lengths), p.longest
    count = -(-length // FLEX_PAGE)
    pages = paged(batch * count, FLEX_PAGE, batch, device=p.arrays.device)
    order = torch.as_tensor(np.random.default_rng(8).permutation(batch * count), device=p.arrays.device)
    pages.page_table[:, :count] = order.view(batch, count)
    numbers = torch.arange(count, device=p.arrays.device)
    for b in range(batch):
        pages.physical_to_logical[b, pages.page_table[b, :count]] = numbers
    table = p.cached.pages.device_table.long()

    def stored(part: Any) -> Any:
        of = {"dtype": part.dtype, "device": p.arrays.device}
        rows = torch.zeros(batch, count * FLEX_PAGE, shape.heads, shape.size, **of)
        rows[:, :length] = part[0][table].reshape(batch, -1, shape.heads, shape.size)[:, :length]
        made = torch.empty(batch * count, FLEX_PAGE, shape.heads, shape.size, **of)
        made[order] = rows.view(made.shape)
        return made.view(1, -1, shape.heads, shape.size).transpose(1, 2).contiguous()

    mask = attention.create_block_mask(
        seen if shape.documents else causal, batch, None, length, length, device=p.arrays.device
    )
    lengths = torch.full((batch,), length, device=p.arrays.device)
    options = {"block_mask": pages.convert_logical_block_mask(mask, kv_len=lengths)}
    if p.bias is not None:
        options["score_mod"] = pages.get_score_mod(biased, kv_len=lengths)
    run, parts = torch.compile(attention.flex_attention, dynamic=False), [stored(part) for part in p.cached.parts]
    query = p.query.view(batch, length, shape.query_heads, shape.size).transpose(1, 2).contiguous()

    def call(layer: int) -> None:
        found["out"] = run(query, *parts, enable_gqa=True, scale=p.scale, **options)

    return call
