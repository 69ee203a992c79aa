# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attention backend: kvarn's append and attention over vLLM's packed pools, in place.

vLLM calls :meth:`KvarnBuilder.build` once per step and :meth:`KvarnAttention.forward` once per layer and step. The
step's lengths are computed by one kernel per step. A layer keeps a collection for every shape of a step that it has
seen, over the engine's own pool and tables, so a repeated shape costs a dictionary lookup and two launches. A captured
CUDA graph reads lengths, tables and offsets at replay, from buffers that stay where they are.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
import vllm
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import kvarn as kv
from kvarn.dispatch import FixedSchedule

from . import support
from .mla import KvarnMla
from .pages import CALLS, COLLECTIONS, KvarnMetadata, LayerPages, Scales

if reason := support.unknown_version(vllm.__version__):
    raise RuntimeError(reason)

_FEW = 16  # new tokens of a sequence up to which kvarn's programs have a bound of their own
_BATCHES = (1, 4, 8, 16, 128, 1024)  # sequences up to which one program of kvarn serves
_INVARIANT = FixedSchedule(batch_invariant=True)


class KvarnBackend(AttentionBackend):
    """What vLLM asks of a backend before the engine starts."""

    supported_dtypes: ClassVar[list[torch.dtype]] = support.DTYPES
    supported_kv_cache_dtypes: ClassVar[list[Any]] = support.CACHE_DTYPES
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return KvarnMla if get_current_vllm_config().model_config.use_mla else KvarnAttention

    @staticmethod
    def get_builder_cls() -> type[KvarnBuilder]:
        return KvarnBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(support.BLOCKS)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return support.supports_head_size(head_size)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        attn_type: str = AttentionType.DECODER,
        device_capability: Any = None,
        **asked: Any,
    ) -> list[str]:
        return support.reasons(head_size, dtype, kv_cache_dtype, block_size, attn_type, device_capability, asked)

    # --- the pool's layout: pages, heads, tokens, a key and its value. vLLM asks by these two up to 0.32 ---

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if head_size > support.LARGEST_HEAD:  # latent rows, the only ones that long
            return num_blocks, block_size, head_size
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"

    # --- and by this one from 0.33 on ---

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        from vllm.v1.kv_cache_layout import KVCacheLayout  # type: ignore[import-not-found]

        return (KVCacheLayout.LBHNC,)


def tokens_before(seq_lens: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """The tokens of each sequence before the step's own; 0 for the sequences that pad a graph's batch.

    Two launches of torch, which take the host less than one of a kernel of kvarn's language.
    """
    torch.add(seq_lens, starts, out=out)
    torch.sub(out, ends, out=out)


class KvarnBuilder(AttentionMetadataBuilder[KvarnMetadata]):
    """Makes the metadata of a step, for all layers of a group."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        support.check_engine(vllm_config, kv_cache_spec)
        self._lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        # Without drafts a step of a few new tokens is rare: one program serves all of them.
        self._few = _FEW if vllm_config.speculative_config is None else 1
        self._compile(layer_names, vllm_config)

    def _most(self, tokens: int) -> int:
        """The bound of a step's new tokens of a sequence: few values, so that few collections serve all steps."""
        return 1 if tokens == 1 else max(1 << (tokens - 1).bit_length(), self._few)

    def _compile(self, layer_names: list[str], vllm_config: Any) -> None:
        """Compile and load what steps of any size need, by steps without tokens, so that no request waits for it."""
        limits, spec = vllm_config.scheduler_config, self.kv_cache_spec
        layers = vllm_config.compilation_config.static_forward_context
        batches = [min(n, limits.max_num_seqs) for n in _BATCHES if n < limits.max_num_seqs * 8]
        bounds = {self._most(n) for n in (1, 2, 4, 8, 16, 32, 64, 512, limits.max_num_batched_tokens)}
        done = set()
        for layer in (layers[name] for name in layer_names):
            impl = layer.impl
            if not isinstance(impl, (KvarnAttention, KvarnMla)):
                continue
            impl.prepare(layer, self.device)  # before a capture, in which nothing is copied from the host
            if impl.kind in done:
                continue
            done.add(impl.kind)
            shape = KvarnBackend.get_kv_cache_shape(2, spec.block_size, impl.num_kv_heads, impl.head_size)
            pool = torch.zeros(shape, dtype=spec.dtype, device=self.device)
            for n, most in itertools.product(dict.fromkeys(batches), sorted(bounds)):
                zeros = torch.zeros(n + 1, dtype=torch.int32, device=self.device)
                step = KvarnMetadata(zeros, zeros[:n], zeros[:n, None], most, (n, most))
                impl.run_empty(layer, pool, step, vllm_config.model_config.dtype)
        CALLS.clear()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KvarnMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise NotImplementedError(f"kvarn-vllm does not serve attention that is not causal; {support.INSTEAD}")
        n, offsets, table = step.num_reqs, step.query_start_loc, step.block_table_tensor
        views = self._views.get((n, offsets.data_ptr()))
        if views is None:
            views = self._views_of(n, offsets)
        starts, ends, lengths = views
        tokens_before(step.seq_lens, starts, ends, lengths)
        most = self._most(step.max_query_len)
        CALLS["steps"] += 1
        key = (n, most, lengths.data_ptr(), table.data_ptr(), table.shape[1], table.stride(0))
        return KvarnMetadata(offsets, lengths, table, most, key, step.num_actual_tokens)

    def _views_of(self, n: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first and last rows of n sequences, and their lengths, at one address for every step of n sequences.

        A batch of virtual sequences, which no graph has, may have more sequences than the engine.
        """
        fits = n <= self._lengths.shape[0]
        lengths = self._lengths[:n] if fits else torch.zeros(n, dtype=torch.int32, device=self.device)
        views = offsets[:n], offsets[1 : n + 1], lengths
        if fits and len(self._views) < COLLECTIONS:
            self._views[n, offsets.data_ptr()] = views
        return views


class KvarnAttention(AttentionImpl[KvarnMetadata]):
    """Attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> None:
        found = [f"{name}={value!r}" for name, value in more.items() if value not in (None, False, -1)]
        if attn_type != AttentionType.DECODER:
            found.append(f"attention of type {attn_type}")
        if found:
            raise NotImplementedError(f"kvarn-vllm does not serve {', '.join(found)}; {support.INSTEAD}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.shares = kv_sharing_target_layer_name is not None
        self._options: dict[str, Any] = {}
        if sliding_window is not None:
            self._options["window"] = sliding_window
        if logits_soft_cap:
            self._options["softcap"] = float(logits_soft_cap)
        if alibi_slopes is not None:
            self._options["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        if envs.VLLM_BATCH_INVARIANT:
            self._options["schedule"] = _INVARIANT
        self.kind = (  # layers of one kind have the same programs
            num_heads, self.num_kv_heads, head_size, kv_cache_dtype, sliding_window, logits_soft_cap,
            alibi_slopes is None, sinks is None,
        )  # fmt: skip
        self._scales = Scales()
        self._pages = LayerPages("packed", kv_cache_dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is None:
            return
        if "sinks" in self._options:  # weights that are loaded again: captured graphs read the same memory
            self._options["sinks"].copy_(self.sinks.detach())
        else:
            self._options["sinks"] = self.sinks.detach().float()

    def prepare(self, layer: Any, device: torch.device) -> None:
        """Put on the device what a layer's calls read beside the step's tensors."""
        self._scales.of(layer, device)

    def run_empty(self, layer: Any, pool: torch.Tensor, step: KvarnMetadata, dtype: torch.dtype) -> None:
        """Run a step without tokens, which compiles and loads what a step of its shape needs."""
        query, rows, out = (
            torch.zeros(1, heads, self.head_size, dtype=dtype, device=pool.device)
            for heads in (self.num_heads, self.num_kv_heads, self.num_heads)
        )
        self.forward(layer, query, rows, rows, pool, step, out)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KvarnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows after the step's last, which pad a graph's batch, are neither read nor written."""
        step = attn_metadata
        if step is None:  # a run that measures memory, before there are pages
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"kvarn-vllm does not serve an output of 8 bits; {support.INSTEAD}")
        if "alibi_slopes" in self._options and not self._pages.has(kv_cache):
            self._options["alibi_slopes"] = self._options["alibi_slopes"].to(kv_cache.device)
        pages = self._pages.of(kv_cache, step)
        scale, value_scale, scales = self.scale, 1.0, None
        if self.kv_cache_dtype in support.FP8:
            key_scale, value_scale, scales = self._scales.of(layer, output.device)
            scale *= key_scale
        if not self.shares:
            kv.ops.append(pages, 0, key, value, step.offsets, tensor_scales=scales)
        kv.ops.attention(pages, 0, query, step.offsets, scale=scale, out=output, **self._options)
        if value_scale != 1.0:
            output.mul_(value_scale)
        CALLS["decodes" if step.most == 1 else "prefills"] += 1
        return output
