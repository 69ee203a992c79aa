# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the backend serves. An engine that asks for anything else is refused when it starts, with what serves it."""

from __future__ import annotations

from typing import Any

import torch

TESTED = ((0, 26), (0, 33))  # vLLM's first and last minor version that the tests have run with
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CACHE_DTYPES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
FP8 = ("fp8", "fp8_e4m3")
BLOCKS = 16  # tokens: block sizes are multiples
HEADS = 8  # elements: head sizes are multiples
LARGEST_HEAD = 256
CAPABILITY = (8, 0)
INSTEAD = "use FLASH_ATTN, FLASHINFER or TRITON_ATTN"
INSTEAD_OF_MLA = "use FLASHMLA or FLASH_ATTN_MLA"
LONGEST_ROW = 576  # elements of a latent row

# Arguments of vLLM's validate_configuration that may be set. Those that are not known are refused where they are set.
_SERVED = {"has_sink", "has_sliding_window", "use_batch_invariant", "use_mla"}
_NAMES = {
    "use_sparse": "sparse attention: use FLASHMLA_SPARSE",
    "use_mm_prefix": "bidirectional attention between a prompt's image tokens",
    "use_per_head_quant_scales": "scales per head of an fp8 cache: scales per tensor are served",
    "use_non_causal": "attention that is not causal",
    "use_kv_connector": "a KV connector",
    "use_pcp": "prefill context parallelism",
}


def unknown_version(version: str) -> str | None:
    """Why a version of vLLM is not served, or None."""
    numbers = version.split("+")[0].split(".")[:2]
    first, last = TESTED
    if all(n.isdigit() for n in numbers) and first <= tuple(map(int, numbers)) <= last:
        return None
    known = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
    return f"kvarn-vllm knows vLLM {known}, and this is {version}: {INSTEAD}, or another version of kvarn-vllm"


def reasons(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None,
    attn_type: str,
    device_capability: Any,
    asked: dict[str, Any],
) -> list[str]:
    """Why a layer is not served, each with what serves it; ``asked`` are the options of its attention by name."""
    found, mla = [], bool(asked.get("use_mla"))
    if mla and not supports_row_size(head_size):
        found.append(f"MLA rows of {head_size}: multiples of {HEADS} above {LARGEST_HEAD} up to {LONGEST_ROW}")
    elif not mla and not supports_head_size(head_size):
        found.append(f"head size {head_size}: sizes are multiples of {HEADS} up to {LARGEST_HEAD}")
    if dtype not in DTYPES:
        found.append(f"dtype {dtype}: {_listed(DTYPES)} are served")
    if kv_cache_dtype is not None and kv_cache_dtype not in CACHE_DTYPES:
        found.append(f"kv_cache_dtype {kv_cache_dtype}: {_listed(CACHE_DTYPES)} are served")
    own = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(str(kv_cache_dtype), dtype)
    if own != dtype:
        found.append(f"kv_cache_dtype {kv_cache_dtype} for a model of {dtype}: a cache of floats has the model's type")
    if block_size is not None and block_size % BLOCKS:
        found.append(f"block_size {block_size}: sizes are multiples of {BLOCKS}")
    if attn_type != "decoder":
        found.append(f"attention of type {attn_type}: only decoder attention is served")
    if device_capability is not None and tuple(device_capability) < CAPABILITY:
        found.append(f"compute capability {tuple(device_capability)}: at least {CAPABILITY}")
    for name, value in asked.items():
        if value and name not in _SERVED:
            found.append(_NAMES.get(name, f"{name}={value!r}"))
    return [f"kvarn-vllm does not serve {reason}; {INSTEAD_OF_MLA if mla else INSTEAD}" for reason in found]


def supports_row_size(size: int) -> bool:
    return size % HEADS == 0 and LARGEST_HEAD < size <= LONGEST_ROW


def supports_head_size(size: int) -> bool:
    return size % HEADS == 0 and 0 < size <= LARGEST_HEAD


def check_engine(config: Any, spec: Any) -> None:
    """Refuse the options of an engine, and the pages of a group of layers, that the backend has no answer to."""
    parallel, cache = config.parallel_config, config.cache_config
    found = []
    if parallel.data_parallel_size > 1:
        found.append("data parallelism")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        found.append("context parallelism")
    if getattr(cache, "calculate_kv_scales", False):
        found.append("calculate_kv_scales: scales come from the checkpoint or are 1")
    if getattr(cache, "kv_sharing_fast_prefill", False):
        found.append("kv_sharing_fast_prefill")
    if getattr(config.model_config, "rswa_window", None) is not None:
        found.append("a sliding window with a prompt that stays visible")
    if getattr(spec, "head_size_v", None) not in (None, spec.head_size) and spec.head_size <= LARGEST_HEAD:
        found.append(f"values of {spec.head_size_v} elements with keys of {spec.head_size}")
    if found:
        raise ValueError("; ".join(f"kvarn-vllm does not serve {reason}; {INSTEAD}" for reason in found))


def _listed(things: list[Any]) -> str:
    return ", ".join(map(str, things))
