# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is not served is refused when the engine starts, by name, with what serves instead."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
import vllm
from kvarn_vllm import backend, support
from kvarn_vllm.backend import KvarnBackend
from models import CONFIGS, engine
from vllm import envs

SERVED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
    "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": (9, 0), "attn_type": "decoder", "has_sliding_window": True, "use_batch_invariant": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_size": 100}, "head size 100"),
        ({"head_size": 512}, "head size 512"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "turboquant_k8v4"),
        ({"kv_cache_dtype": "float16"}, "for a model of torch.bfloat16"),
        ({"block_size": 24}, "block_size 24"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"device_capability": (7, 5)}, r"\(7, 5\)"),
        ({"use_mm_prefix": True}, "image tokens"),
        ({"use_per_head_quant_scales": True}, "scales per tensor"),
        ({"use_non_causal": True}, "not causal"),
        ({"use_something_new": True}, "use_something_new"),
    ],
)
def test_a_layer_is_refused_by_name(change, named):
    assert KvarnBackend.validate_configuration(**SERVED) == []
    (reason,) = KvarnBackend.validate_configuration(**{**SERVED, **change})
    assert re.search(named, reason)
    assert support.INSTEAD in reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_size": 128}, "MLA rows of 128"),
        ({"head_size": 640}, "MLA rows of 640"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla"),
        ({"use_sparse": True}, "FLASHMLA_SPARSE"),
    ],
)
def test_a_layer_of_mla_is_refused_by_name(change, named):
    served = {**SERVED, "use_mla": True, "head_size": 576, "kv_cache_dtype": "auto"}
    assert KvarnBackend.validate_configuration(**served) == []
    (reason,) = KvarnBackend.validate_configuration(**{**served, **change})
    assert re.search(named, reason)
    assert support.INSTEAD_OF_MLA in reason


@pytest.mark.parametrize(
    ("options", "named"), [({"block_size": 8}, "block_size 8"), ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2")]
)
def test_an_engine_is_refused_when_it_starts(options, named):
    with pytest.raises((ValueError, RuntimeError), match=named), engine("llama", **options):
        pass


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"rswa_window": 64}, "sliding window with a prompt"),
        ({"head_size_v": 64}, "values of 64 elements with keys of 128"),
    ],
)
def test_options_of_an_engine_are_refused(change, named):
    served = {"data_parallel_size": 1, "decode_context_parallel_size": 1, "head_size": 128, "head_size_v": 128}
    every = SimpleNamespace(**served)
    config = SimpleNamespace(parallel_config=every, cache_config=every, model_config=every)
    support.check_engine(config, every)
    vars(every).update(change)
    with pytest.raises(ValueError, match=f"{named}.*{support.INSTEAD}"):
        support.check_engine(config, every)


def test_batch_invariance_is_asked_of_every_kernel(monkeypatch):
    assert KvarnBackend.supports_batch_invariance()
    sizes = {"num_heads": 4, "head_size": 576, "scale": 1.0, "num_kv_heads": 1, "kv_lora_rank": 512}
    none = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    for invariant in (False, True):
        monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
        mla = backend.KvarnMla(**sizes, **none, kv_cache_dtype="auto", attn_type="decoder")
        for layer in (backend.KvarnAttention(4, 64, 1.0, 2), mla):
            schedule = layer._options.get("schedule", {})
            assert dict(schedule) == ({"batch_invariant": True} if invariant else {})


def test_a_model_of_other_heads_is_refused_when_it_starts(monkeypatch):
    made = CONFIGS["llama"]()
    made.head_dim = 60
    monkeypatch.setitem(CONFIGS, "llama60", lambda: made)
    with pytest.raises(ValueError, match=r"head size 60.*use FLASH_ATTN"), engine("llama60"):
        pass


@pytest.mark.parametrize("version", ["0.25.3", "0.34.0", "1.0", "dev"])
def test_an_unknown_version_is_refused_by_the_backend(version, monkeypatch):
    assert support.unknown_version(vllm.__version__) is None
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=f"knows vLLM 0.26 to 0.33, and this is {version}.*use FLASH_ATTN"):
        importlib.reload(backend)
