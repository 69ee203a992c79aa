# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiny random models, engines of them, and what transformers says of the tokens that an engine chose."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from kvarn_vllm.backend import CALLS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
_GEMMA = {**_COMMON, "num_hidden_layers": 4, "sliding_window": 24, "query_pre_attn_scalar": 64}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**_COMMON),
    "qwen3": lambda: hf.Qwen3Config(**_COMMON),
    "mistral": lambda: hf.MistralConfig(**{**_COMMON, "sliding_window": 20, "num_attention_heads": 6}),  # 3 per group
    "gemma2": lambda: hf.Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=30.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GEMMA),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=256, n_layer=3, n_head=4, bos_token_id=1, initializer_range=0.2
    ),
    "deepseek": lambda: hf.DeepseekV3Config(  # MLA; no experts, which need vLLM's compiled part
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 64}, first_k_dense_replace=3, kv_lora_rank=512,
        q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, n_routed_experts=8, n_group=1,
        topk_group=1, num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**_COMMON, "intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2, sliding_window=24
    ),
}  # fmt: skip


@functools.cache
def saved(name: str) -> str:
    """The folder of a model, made once."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
            if name.startswith("gemma"):  # whose tokens, embedded by a table that is the output's too, repeat otherwise
                if key == "model.embed_tokens.weight":
                    parameter.mul_(0.1)
                if key == "model.norm.weight":
                    parameter.fill_(20.0)
    folder = str(Path(tempfile.mkdtemp(prefix="kvarn-vllm-")) / name)
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def engine(name: str, **options: Any) -> Iterator[LLM]:
    """An engine with chunks of 32 tokens, so that prompts are split and steps mix prompts with decodes."""
    given: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0, "block_size": 16,
        "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 32, "enable_prefix_caching": True,
        "attention_config": {"backend": "CUSTOM"}, "compilation_config": {"custom_ops": ["none"], "mode": 0},
        "enforce_eager": True,
    }  # fmt: skip
    llm = None
    try:
        llm = LLM(saved(name), skip_tokenizer_init=True, **{**given, **options})
        CALLS.clear()
        yield llm
    finally:
        del llm
        cleanup_dist_env_and_memory()


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in lengths]


@dataclasses.dataclass
class Answer:
    """A completion: the prompt, the chosen tokens, their log-probabilities, and tokens found in the prefix cache."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cached: int


def answers(llm: LLM, given: list[list[int]], count: int = 24, **sampling: Any) -> list[Answer]:
    params = SamplingParams(
        **{"temperature": 0.0, **sampling}, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0
    )
    made = []
    for prompt, out in zip(
        given, llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False), strict=True
    ):
        for one in out.outputs:
            tokens = list(one.token_ids)
            logprobs = [step[t].logprob for step, t in zip(one.logprobs, tokens, strict=True)]
            made.append(Answer(prompt, tokens, logprobs, out.num_cached_tokens))
    return made


def wrong(
    name: str,
    found: list[Answer],
    bound: float = 2e-3,
    greedy: bool = True,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    logprobs: bool = True,
) -> list[str]:
    """What transformers, given the engine's own tokens, says otherwise: another best token, another log-probability.

    ``dtype`` is the engine's: transformers computes with its weights, in float32, and an engine may be as far from that
    as twice what transformers is in that type.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype, attn_implementation=attention)
    longest = max((answer.prompt + answer.tokens for answer in found), key=len)
    if dtype != torch.float32:
        narrow, wide = (
            model.to(t)(torch.tensor([longest])).logits.float().log_softmax(-1) for t in (dtype, torch.float32)
        )
        bound = 2 * (narrow - wide).abs().max().item()
    problems = []
    model.float()
    for i, answer in enumerate(found):
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt + answer.tokens])).logits[0, len(answer.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = torch.tensor(answer.tokens)[:, None]
        gap = (expected.max(-1).values - expected.gather(1, chosen)[:, 0]).max().item()
        logged = expected.gather(1, chosen)[:, 0] - torch.tensor(answer.logprobs) if logprobs else torch.zeros(1)
        far = logged.abs().max().item()
        if greedy and gap > bound:
            problems.append(f"prompt {i}: the chosen token is {gap:.3g} below the best")
        if far > bound:
            problems.append(f"prompt {i}: a log-probability is {far:.3g} off")
    return problems


def distance(name: str, found: list[Answer]) -> float:
    """How far log-probabilities of a bf16 engine are from those of its weights in float32, root mean square."""
    model = hf.AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.bfloat16, attn_implementation="eager")
    model.float()
    squares = []
    for answer in found:
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt + answer.tokens])).logits[0, len(answer.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        squares.append((expected - torch.tensor(answer.logprobs)).square())
    return torch.cat(squares).mean().sqrt().item()


def rounded(scales: tuple[float, float]) -> str:
    """The name of an attention of transformers over keys and values that an fp8 cache has stored with two scales."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        stored = [
            (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
            for x, s in zip((key, value), scales, strict=True)
        ]
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *stored, mask, **options)

    name = f"sdpa_fp8_{scales[0]}_{scales[1]}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    hf.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, hf.masking_utils.sdpa_mask)
    return name
