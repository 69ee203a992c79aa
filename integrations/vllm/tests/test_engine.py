# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Engines with kvarn's attention choose the tokens that transformers chooses, and a wrong copy is noticed."""

from __future__ import annotations

import pytest
import torch
import vllm
from kvarn_vllm import backend
from kvarn_vllm.backend import CALLS
from models import answers, engine, prompts, rounded, wrong
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import kvarn as kv

# vLLM computes Bloom's GELU without the approximation that transformers makes.
BOUNDS = {"bloom": 2e-2}
# vLLM's experts need its compiled part from 0.33 on.
WITH_EXPERTS = pytest.param("gpt_oss", marks=pytest.mark.skipif(vllm.__version__ > "0.26.9", reason="compiled experts"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "bloom", "deepseek", WITH_EXPERTS])
def test_an_engine_chooses_the_tokens_of_transformers(name):
    """Prompts in chunks, chunks beside decodes, and a prompt whose beginning is cached; every layer is kvarn's."""
    with engine(name) as llm:
        given = prompts(5, 17, 40, 70)
        given.append(given[3][:48] + given[0])
        found = answers(llm, given)
        groups = len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
        layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
    assert wrong(name, found, BOUNDS.get(name, 2e-3)) == []
    assert CALLS["decodes"] >= 20 * layers
    assert CALLS["prefills"] >= 4 * layers
    assert (CALLS["decodes"] + CALLS["prefills"]) * groups == CALLS["steps"] * layers


@pytest.mark.parametrize("caching", [True, False])
def test_prefixes_are_cached_or_not(caching):
    with engine("llama", enable_prefix_caching=caching) as llm:
        first = prompts(70)
        found = answers(llm, first) + answers(llm, [first[0][:64] + p for p in prompts(3, 20)])
    assert [answer.cached for answer in found] == [0, *[64 * caching] * 2]
    assert wrong("llama", found) == []


def test_preempted_sequences_are_computed_again():
    with engine("llama", num_gpu_blocks_override=14, max_model_len=160, enable_prefix_caching=False) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, count = scheduler._preempt_request, []
        scheduler._preempt_request = lambda *given, **more: (count.append(1), preempt(*given, **more))[1]
        found = answers(llm, prompts(60, 50, 55, 45), count=40)
    assert count
    assert wrong("llama", found) == []


def test_parallel_samples_have_the_probabilities_of_transformers():
    with engine("qwen3") as llm:
        found = answers(llm, prompts(21, 50), count=16, n=3, temperature=1.0)
    assert len({tuple(answer.tokens) for answer in found}) == 6
    assert wrong("qwen3", found, greedy=False) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_caches(dtype):
    with engine("llama", dtype=dtype, block_size=48) as llm:
        assert llm.llm_engine.model_config.dtype == getattr(torch, dtype)
        found = answers(llm, prompts(5, 40, 70))
    assert wrong("llama", found, dtype=getattr(torch, dtype)) == []


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.04, 0.02)])
def test_fp8_caches_with_their_scales(scales):
    with engine("llama", kv_cache_dtype="fp8") as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        for layer in layers:
            layer._k_scale_float, layer._v_scale_float = scales
        found = answers(llm, prompts(5, 40, 70))
        assert {layer.kv_cache.dtype.itemsize for layer in layers} == {1}
    assert wrong("llama", found, 0.05, attention=rounded(scales)) == []
    assert wrong("llama", found, 0.05) != []  # a cache of floats differs by more


# --- a wrong copy is noticed


@pytest.mark.parametrize("scale", [1.0, 0.04])
def test_fp8_rows_of_mla_with_their_scale(scale, monkeypatch):
    def stored(x):
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    with engine("deepseek", kv_cache_dtype="fp8") as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        for layer in layers:
            layer._k_scale_float = scale
        found = answers(llm, prompts(5, 40, 70))
        assert {layer.kv_cache.dtype.itemsize for layer in layers} == {1}
    assert wrong("deepseek", found, 0.05) != []  # rows of floats differ by more
    norm = modeling_deepseek_v3.DeepseekV3RMSNorm.forward
    monkeypatch.setattr(
        modeling_deepseek_v3.DeepseekV3RMSNorm,
        "forward",
        lambda self, x: stored(norm(self, x)) if x.shape[-1] == 512 else norm(self, x),
    )
    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        rotate = getattr(modeling_deepseek_v3, name)

        def rotated(*given, rotate=rotate, **more):
            query, key = rotate(*given, **more)
            return query, stored(key)

        monkeypatch.setattr(modeling_deepseek_v3, name, rotated)
    assert wrong("deepseek", found, 0.05) == []


def one_token_less(seq_lens, starts, ends, out):
    out.copy_((seq_lens + starts - ends - 1).clamp(min=0))


def _changed(name="attention", **change):
    attention = getattr(kv.ops, name)

    def changed(*given, **options):
        return attention(*given, **{**options, **change})

    return changed


@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        ("llama", "tokens_before", one_token_less),
        ("llama", "attention", _changed(mask=lambda b, h, q, k: k < q)),
        ("gemma2", "attention", _changed(softcap=None)),
        ("gemma3", "attention", _changed(window=None)),
        ("bloom", "attention", _changed(alibi_slopes=None)),
        pytest.param(*("gpt_oss", "attention", _changed(sinks=None)), marks=WITH_EXPERTS.marks),
        ("deepseek", "mla_attention", _changed("mla_attention", scale=0.05)),
    ],
    ids=["lengths", "mask", "softcap", "window", "slopes", "sinks", "scale"],
)
def test_a_wrong_copy_is_noticed(name, place, change, monkeypatch):
    monkeypatch.setattr(backend if place == "tokens_before" else kv.ops, place, change)
    with engine(name) as llm:
        found = answers(llm, prompts(5, 40, 70))
    assert wrong(name, found, 2e-2) != []
