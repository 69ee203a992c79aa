# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLA: latent rows of all heads, which vLLM's layer writes in one call and attends to in the next."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

import kvarn as kv
from kvarn.dispatch import FixedSchedule

from . import support
from .pages import CALLS, KvarnMetadata, LayerPages, Scales


class KvarnMla(MLAAttentionImpl[KvarnMetadata]):
    """MLA of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 0,
        qk_rope_head_dim: int = 0,
        qk_head_dim: int = 0,
        v_head_dim: int = 0,
        kv_b_proj: Any = None,
        **more: Any,
    ) -> None:
        asked = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name, **more,
        }  # fmt: skip
        found = [f"MLA with {name}={value!r}" for name, value in asked.items() if value not in (None, False, -1)]
        if attn_type != AttentionType.DECODER:
            found.append(f"MLA of type {attn_type}")
        if found:
            raise NotImplementedError(f"kvarn-vllm does not serve {', '.join(found)}; {support.INSTEAD_OF_MLA}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype, self.kv_lora_rank = float(scale), kv_cache_dtype, kv_lora_rank
        self.kind = ("MLA", num_heads, head_size, kv_lora_rank, kv_cache_dtype)
        self._options = {"schedule": FixedSchedule(batch_invariant=True)} if envs.VLLM_BATCH_INVARIANT else {}
        self._pages = LayerPages("MLA", kv_cache_dtype)
        self._scales = Scales()
        self._rows: torch.Tensor | None = None

    def prepare(self, layer: Any, device: torch.device) -> None:
        """Put on the device what a layer's calls read beside the step's tensors."""
        self._scales.of(layer, device)

    def run_empty(self, layer: Any, pool: torch.Tensor, step: KvarnMetadata, dtype: torch.dtype) -> None:
        """Run a step without tokens, which compiles and loads what a step of its shape needs."""
        self._rows = torch.zeros(1, 1, self.head_size, dtype=dtype, device=pool.device)
        query = torch.zeros(1, self.num_heads, self.head_size, dtype=dtype, device=pool.device)
        self.forward_mqa(query, pool, step, layer)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Keep the step's rows for the call of attention that follows, which knows sequences and not slots alone."""
        self._rows = torch.cat([kv_c_normed.unsqueeze(1), k_pe.view(-1, 1, k_pe.shape[-1])], -1)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: KvarnMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the step's rows and attend to all, decodes and chunks of prompts alike."""
        step, rows = attn_metadata, self._rows
        assert rows is not None
        self._rows = None
        pages = self._pages.of(kv_c_and_k_pe_cache, step)
        row_scale, scales = 1.0, None
        if self.kv_cache_dtype in support.FP8:
            row_scale, _, scales = self._scales.of(layer, rows.device)
        kv.ops.append(pages, 0, rows, None, step.offsets, tensor_scales=scales)
        query = q if isinstance(q, torch.Tensor) else torch.cat(q, -1)
        size, scale = self.kv_lora_rank, self.scale * row_scale
        out = kv.ops.mla_attention(pages, 0, query, step.offsets, value_size=size, scale=scale, **self._options)
        if row_scale != 1.0:  # values are the rows' first columns
            out.mul_(row_scale)
        CALLS["decodes" if step.most == 1 else "prefills"] += 1
        return out, None
