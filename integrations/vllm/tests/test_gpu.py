# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""On a GPU: CUDA graphs give the tokens of eager steps, and kvarn is as near to float32 as vLLM's own backends."""

from __future__ import annotations

import pytest
import torch
from kvarn_vllm.backend import CALLS
from models import answers, distance, engine, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

_DECODES = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
GRAPHS = {"enforce_eager": False, "compilation_config": {"custom_ops": ["none"], "mode": 0, **_DECODES}}
# A model, the type of its cache, and the backend of vLLM that kvarn is compared with.
KINDS = [
    ("llama", "auto", "FLASH_ATTN"),
    ("llama", "fp8", "FLASH_ATTN"),
    ("mistral", "auto", "FLASH_ATTN"),
    ("gemma2", "auto", "FLASH_ATTN"),
    ("bloom", "auto", "TRITON_ATTN"),
    ("gpt_oss", "auto", "FLASH_ATTN"),
    ("deepseek", "auto", "TRITON_MLA"),
]
# Over fp8 caches FLASH_ATTN rounds queries too, so that this bound is wide there.
FARTHER = 1.25


@pytest.mark.parametrize(("name", "cache"), [(name, cache) for name, cache, _ in KINDS] + [("deepseek", "fp8")])
def test_graphs_give_the_tokens_of_eager_steps(name, cache):
    found = []
    for options in ({}, GRAPHS):
        with engine(name, dtype="bfloat16", kv_cache_dtype=cache, **options) as llm:
            # Lengths change from step to step: a graph that kept those of its capture would choose other tokens.
            found.append([answer.tokens for answer in answers(llm, prompts(5, 17, 40, 70), count=32)])
    assert found[0] == found[1]
    assert CALLS["steps"]


@pytest.mark.parametrize(("name", "cache", "other"), KINDS)
def test_log_probabilities_are_as_near_to_float32_as_those_of_another_backend(name, cache, other):
    far = []
    for backend in ("CUSTOM", other):
        options = {"attention_config": {"backend": backend}, **GRAPHS}
        with engine(name, dtype="bfloat16", kv_cache_dtype=cache, **options) as llm:
            far.append(distance(name, answers(llm, prompts(5, 17, 40, 70, 100, 33), count=32)))
    assert far[0] <= FARTHER * far[1] + 1e-3
