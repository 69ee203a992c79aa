# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""transformers' continuous batching through kvarn: the tokens of a plain generation, in the cache's own pages."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

from kvarn import ops  # noqa: E402
from kvarn.torch import huggingface  # noqa: E402
from kvarn.torch.huggingface import continuous  # noqa: E402

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_hidden_layers=2),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, num_hidden_layers=2),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, num_hidden_layers=4, sliding_window=12, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_hidden_layers=2, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip
LENGTHS, NEW = (5, 23, 1, 40), 10


def made(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
    g = torch.Generator().manual_seed(1)
    return model, [torch.randint(1, 128, (n,), generator=g).tolist() for n in LENGTHS]


def expected(model, prompts):
    model.set_attn_implementation("eager")
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        whole = model.generate(given, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(given))
        found.append(whole[0, len(prompt) :].tolist())
    return found


def batched(model, prompts):
    """Tokens of ``generate_batch``; a batch of at most 16 tokens, so that prompts come in chunks beside decodes."""
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16, auto_switch_to_flash=False)
    outputs = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=size, progress_bar=False
    )
    return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))]


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_batch_gives_the_tokens_of_a_plain_generation(name, monkeypatch):
    model, prompts = made(name)
    wanted = expected(model, prompts)
    calls = []
    append = ops.append
    monkeypatch.setattr(continuous.ops, "append", lambda *given: (calls.append(given[1]), append(*given))[1])
    assert batched(huggingface.use_in_generate_batch(model), prompts) == wanted
    full = sum(
        kind == "full_attention" for kind in getattr(model.config, "layer_types", None) or ["full_attention"] * 2
    )
    assert set(calls) == set(range(full))
    assert len(calls) >= NEW * full


def test_a_wrong_table_is_noticed(monkeypatch):
    model, prompts = made("llama")
    wanted = expected(model, prompts)
    made_pages = continuous.ForeignPages

    def shifted(blocks, lengths, table, **options):
        return made_pages(blocks, (lengths - 1).clamp(min=0), table, **options)

    monkeypatch.setattr(continuous, "ForeignPages", shifted)
    assert batched(huggingface.use_in_generate_batch(model), prompts) != wanted


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.22.1")
    with pytest.raises(RuntimeError, match=r"needs transformers 5.23 or later, got 5.22.1: use sdpa"):
        huggingface.use_in_generate_batch(made("llama")[0])
