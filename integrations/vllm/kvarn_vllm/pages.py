# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A step's tensors, and the collections over a layer's pool that are made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import kvarn as kv

from . import support

CALLS: Counter[str] = Counter()  # steps and layers that were computed here, by kind: tests read it
COLLECTIONS = 512  # shapes of a step that a layer keeps a collection for


@dataclass
class KvarnMetadata:
    """A step: the tensors that collections are made of, and the key of the collections over them.

    The last four are what vLLM's layer of MLA reads of any backend: every token is one of a decode, whose query it
    multiplies into the latent space, since kvarn's kernels take decodes and chunks of prompts in one batch.
    """

    offsets: torch.Tensor  # i32 [B + 1]
    lengths: torch.Tensor  # i32 [B]: tokens before the step
    table: torch.Tensor  # i32 [B, columns]
    most: int  # no sequence has more new tokens
    key: tuple[int, ...]
    num_actual_tokens: int = 0
    num_prefills: int = 0
    prefill: None = None

    @property
    def num_decodes(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> KvarnMetadata:
        return self


class LayerPages:
    """A layer's pages: a collection for every shape of a step that was seen, over the engine's own pool and tables."""

    def __init__(self, layout: str, cache_dtype: str) -> None:
        self._pool: tuple[int, torch.Size] | None = None
        self._layout, self._narrow = layout, cache_dtype in support.FP8
        self._pages: Any = None
        self._made: dict[tuple[int, ...], kv.ForeignPages] = {}

    def has(self, pool: torch.Tensor) -> bool:
        """Whether the pages are those of a pool; vLLM may make a view of it anew for every call."""
        return self._pool == (pool.data_ptr(), pool.shape)

    def of(self, pool: torch.Tensor, step: KvarnMetadata) -> kv.ForeignPages:
        """The pages with the tables of a step; a repeated shape costs a dictionary lookup."""
        same = self.has(pool)
        made = self._made.get(step.key) if same else None
        if made is not None:
            return made
        if not same:
            data = pool.view(torch.float8_e4m3fn) if self._narrow else pool
            self._pages = kv.ForeignPages.vllm(data, step.lengths, step.table, layout=self._layout)
            self._pool = pool.data_ptr(), pool.shape
            self._made.clear()
        elif len(self._made) >= COLLECTIONS:
            self._made.clear()
        longest = step.table.shape[1] * pool.shape[-2]
        made = self._made[step.key] = self._pages.with_tables(
            step.lengths, step.table, max_seq_length=step.most, max_cache_length=longest
        )
        return made


class Scales:
    """The scales of a layer's fp8 cache."""

    def __init__(self) -> None:
        self._found: tuple[float, float, torch.Tensor | None] = (1.0, 1.0, None)

    def of(self, layer: Any, device: torch.device) -> tuple[float, float, torch.Tensor | None]:
        """Those of keys and values, and the tensor of both for an append if they are not 1."""
        found = layer._k_scale_float, layer._v_scale_float
        if found != self._found[:2]:
            both = None if found == (1.0, 1.0) else torch.tensor(found, dtype=torch.float32, device=device)
            self._found = (*found, both)
        return self._found
