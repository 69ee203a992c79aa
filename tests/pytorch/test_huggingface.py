# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hugging Face models whose attention is kvarn's: the logits of eager attention, with and without pages."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

import kvarn.torch.huggingface as kvhf  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
STEPS = 12


def model_of(family: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    t = transformers
    torch.manual_seed(0)
    if family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**SIZES))
    elif family == "gemma2":  # softcaps, windows, a scale of its own
        config = t.Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)
        model = t.Gemma2ForCausalLM(config)
    else:
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=KINDS))
    return model.eval().to(device, dtype)


def prompts(device: str, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def shuffled(cache: Any) -> Any:
    """The cache with its free pages in random order, and NaN in all memory."""
    order = torch.randperm(len(cache._free), generator=torch.Generator().manual_seed(2)).tolist()
    cache._free = [cache._free[i] for i in order]
    cache.blocks.fill_(float("nan"))
    return cache


def generated(model: Any, inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.generate(
        **inputs, max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_prefill_and_decode_through_pages_give_the_logits_of_eager_attention(family, padded, device):
    model, inputs = model_of(family, device), prompts(device, padded)
    model.set_attn_implementation("eager")
    tokens, expected = generated(model, inputs)
    model.set_attn_implementation(kvhf.NAME)
    cache = shuffled(kvhf.PagedCache(model.config, 2, 40, page_size=4, device=device))
    found, logits = generated(model, inputs, past_key_values=cache)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert found.equal(tokens)
    missing = 4 if padded else 0  # padding is not stored; the last token's keys are of a step that never came
    assert cache.lengths.tolist() == [11 + STEPS - 2 - missing, 11 + STEPS - 2]
    assert cache.get_seq_length() == 11 + STEPS - 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_attention_without_a_cache_gives_the_logits_of_eager_attention(family, device):
    model, inputs = model_of(family, device), prompts(device, True)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs, use_cache=False).logits
        model.set_attn_implementation(kvhf.NAME)
        found = model(**inputs, use_cache=False).logits
    there = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[there], expected[there], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_on_a_gpu_is_near_float32(family):
    inputs = prompts("cuda", True)
    exact, model = model_of(family, "cuda"), model_of(family, "cuda", torch.bfloat16)
    exact.set_attn_implementation("eager")
    model.set_attn_implementation(kvhf.NAME)
    with torch.no_grad():
        expected = exact(**inputs, use_cache=False).logits
        cache = shuffled(kvhf.PagedCache(model.config, 2, 40, dtype=torch.bfloat16, device="cuda"))
        found = model(**inputs, past_key_values=cache).logits.float()
    there = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[there], expected[there], rtol=0, atol=0.05)


def test_an_8_bit_cache_with_scales_is_near(device):
    model, inputs = model_of("llama", device), prompts(device, False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        model.set_attn_implementation(kvhf.NAME)
        cache = kvhf.PagedCache(model.config, 2, 16, dtype=torch.float8_e4m3fn, granularity=16, device=device)
        found = model(**inputs, past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert not found.equal(expected)


# --- what is refused -----------------------------------------------------------------------------


def test_a_cache_that_no_attention_reads_is_an_error():
    model, inputs = model_of("llama", "cpu"), prompts("cpu", False)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(RuntimeError, match="set_attn_implementation"):
        generated(model, inputs, past_key_values=kvhf.PagedCache(model.config, 2, 40))


def test_beams_are_refused():
    model, inputs = model_of("llama", "cpu"), prompts("cpu", False)
    model.set_attn_implementation(kvhf.NAME)
    cache = kvhf.PagedCache(model.config, 4, 40)
    with pytest.raises(NotImplementedError, match="beams are not supported"):
        model.generate(**inputs, max_new_tokens=4, num_beams=2, past_key_values=cache)
