# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decode over per-head page lists with libraries that lack them: each KV head of each sequence becomes a sequence.

Its page table is the head's list, over one-head pages: [pages, heads, page size, head size] viewed as a pool of pages
times heads. Quest's own kernels do the same. Only the last page of a list may be partial.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .vllm_peers import Fa3, vllm_library


class ListedHeads:
    """A problem's pool with one head per page, and the lists [B, H, K] with counts [B, H] as its page tables."""

    def __init__(self, p: Any) -> None:
        self.p, self.torch, shape = p, p.arrays.torch, p.row.shape
        self.heads, self.page = shape.heads, shape.page
        self.parts = [[self._of_layer(half, layer) for layer in range(p.layers)] for half in range(2)]
        self.query = p.query.view(-1, shape.query_heads // shape.heads, shape.size)
        self.out = p.out.view(self.query.shape)

    def _of_layer(self, half: int, layer: int) -> Any:
        found = self.p.cached.blocks[:, half, layer].transpose(1, 2).contiguous()
        return found.view(-1, self.page, 1, found.shape[-1])

    def take(self, lists: np.ndarray, counts: np.ndarray) -> None:
        """Set the tables from lists, and copy layer 0 again, which is poisoned for these lists."""
        for half in range(2):
            self.parts[half][0] = self._of_layer(half, 0)
        table, batch = self.p.cached.pages.table, np.arange(len(lists))[:, None, None]
        ids = table[batch, np.maximum(lists, 0)].astype(np.int64) * self.heads + np.arange(self.heads)[None, :, None]
        self.ids = np.where(lists >= 0, ids, 0).reshape(-1, lists.shape[2]).astype(np.int32)
        self.counts = counts.reshape(-1)
        missing = -self.p.lengths % self.page  # unused slots of the last page, which every list ends with
        self.lengths = self.counts * self.page - np.repeat(missing, self.heads)

    def keys_and_values(self, layer: int) -> tuple[Any, Any]:
        return self.parts[0][layer], self.parts[1][layer]


def fa3(listed: ListedHeads) -> Callable[[int], Any]:
    """FlashAttention-3 of vLLM."""
    vllm_library("_vllm_fa3_C*.so")
    p, ops, integers = listed.p, listed.torch.ops, listed.p.arrays.integers
    sequences = len(listed.lengths)
    part = Fa3(
        listed.query, integers(np.arange(sequences + 1)), integers(listed.lengths), integers(listed.ids), 1,
        int(listed.lengths.max()), listed.page, p.scale,
    )  # fmt: skip
    part.plan(ops, 1)
    return lambda layer: part.run(ops, *listed.keys_and_values(layer), listed.out)


def flashinfer(listed: ListedHeads) -> Callable[[int], Any]:
    """FlashInfer's tensor-core decode."""
    fi, p, integers = importlib.import_module("flashinfer"), listed.p, listed.p.arrays.integers
    workspace = listed.torch.zeros(512 << 20, dtype=listed.torch.uint8, device=p.arrays.device)
    w = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
    order = np.concatenate([ids[:count] for ids, count in zip(listed.ids, listed.counts, strict=True)])
    last = (listed.lengths - 1) % listed.page + 1
    w.plan(
        integers(np.concatenate([[0], np.cumsum(listed.counts)])), integers(order), integers(last),
        listed.query.shape[1], 1, listed.query.shape[2], listed.page, q_data_type=listed.query.dtype,
        kv_data_type=listed.parts[0][0].dtype, o_data_type=listed.query.dtype,
    )  # fmt: skip
    return lambda layer: w.run(listed.query, listed.keys_and_values(layer), out=listed.out)


PEERS: dict[str, tuple[str, Callable[[ListedHeads], Callable[[int], Any]]]] = {
    "fa3": ("FA3 of vLLM, one head per page", fa3),
    "flashinfer": ("FlashInfer fa2, one head per page", flashinfer),
}
