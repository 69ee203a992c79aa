# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""vLLM's CPU platform without vLLM's compiled parts: a few torch functions stand in for what the engine calls of them.

The platform asks the backend what it serves, as the platform of CUDA does.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

_library = torch.library.Library("_C", "FRAGMENT")


def _define(schema: str, function: Any) -> None:
    name = schema.split("(")[0]
    if not hasattr(torch.ops._C, name):
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")


def _slots(offsets: Any, positions: Any, block_table: Any, slot_mapping: Any, block_size: int) -> None:
    starts = offsets.tolist()
    slot_mapping.fill_(-1)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        p = positions[a:b]
        slot_mapping[a:b] = block_table[i, p // block_size].long() * block_size + p % block_size


def _sampled(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    gumbel = (
        -torch.empty_like(logits).exponential_().log()
    )  # one generator, whatever the seeds are: no test repeats one
    return (logits + gumbel).argmax(-1)


def _gated(activation: Any) -> Any:
    def function(out: torch.Tensor, x: torch.Tensor) -> None:
        half = x.shape[-1] // 2
        out.copy_(activation(x[..., :half]) * x[..., half:])

    return function


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


class _NoPrefill:
    """In place of a library for prompts over expanded keys, which kvarn's backend does not use."""

    def __init__(self, **sizes: Any) -> None:
        pass


class TestPlatform(CpuPlatform):
    __test__ = False  # pytest

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        backend = resolve_obj_by_qualname(selected_backend.get_path())
        wrong = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if wrong:
            raise ValueError(f"Selected backend {selected_backend} is not valid. Reason: {wrong}")
        return selected_backend.get_path()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's, which takes chunks of prompts from MLA on the CPU, where no backend of its own has it."""
        scheduler = vllm_config.scheduler_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            from vllm.model_executor.layers.attention import mla_attention

            mla_attention.get_mla_prefill_backend = lambda config: _NoPrefill
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked

    @classmethod
    def import_kernels(cls) -> None:
        gated = "(Tensor(a!) out, Tensor input) -> ()"
        _define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
        _define(
            "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
            "Tensor(a!) slot_mapping, int block_size) -> ()",
            _slots,
        )
        _define("greedy_argmax(Tensor logits) -> Tensor", lambda x: x.argmax(-1))
        _define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", _sampled)
        _define(f"silu_and_mul{gated}", _gated(torch.nn.functional.silu))
        _define(f"gelu_tanh_and_mul{gated}", _gated(_gelu_tanh))
        _define(f"gelu_and_mul{gated}", _gated(torch.nn.functional.gelu))


TestPlatform.import_kernels()
