# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A LLaMA-like transformer over a ragged batch.

Everything that touches the KV cache (RoPE, append, attention) is the cache's; the dense layers run in NumPy or in
torch. Both sides meet in `KVCache.attend`, so the same model runs on the paged cache and on the plain one that it is
checked against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .weights import ModelConfig, ModelWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class KVCache(Protocol):
    """Where keys and values live. A sequence is known by an int that the caller picks."""

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        """Begin a sequence; `tokens` are those of its first tokens that are known."""
        ...

    def fork(self, parent: int, sequence: int) -> None:
        """Begin a sequence that goes on from where another one is, all of whose tokens are in the cache."""
        ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tell further tokens of a sequence."""
        ...

    def reserve(self, sequence: int, count: int) -> int:
        """Make room for at most `count` more tokens of a sequence in the next step.

        Returns how many of its tokens need not be computed, because the cache holds their keys and values already; at
        least one is left to compute, and the room is for what follows them.
        """
        ...

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """Start a step of (sequence, number of new tokens), all reserved; return the row offsets, int32 [B + 1]."""
        ...

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """Rotate query and key, append key and value, and attend causally.

        Query is [T, Hq, D], key and value are [T, H, D], in what the dense layers compute with; so is the result,
        [T, Hq, D].
        """
        ...

    def end_step(self) -> None:
        """Finish the step: its tokens are in the cache."""
        ...

    def close(self, sequence: int) -> None:
        """End a sequence and give its memory back."""
        ...


def rope_frequencies(config: ModelConfig, positions: int) -> NDArray[np.float32]:
    """Return the rotary table, f32 [positions, head_size]: cos and sin of each pair's angle, interleaved."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    angles = np.arange(positions, dtype=np.float64)[:, None] * config.rope_base**-exponents
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(positions, config.head_size).astype(np.float32)


class NumpyDense:
    """Dense layers in NumPy, f32."""

    device = "cpu"

    def tensor(self, array: NDArray[np.float32]) -> Any:
        """Bring a weight to where and to the dtype in which the layers compute."""
        return array

    def to_numpy(self, x: Any) -> NDArray[np.float32]:
        """Return a result as f32 on the host."""
        return x

    def embed(self, table: Any, tokens: NDArray[np.int64]) -> Any:
        """Pick rows of `table`."""
        return table[tokens]

    def rows(self, x: Any, index: NDArray[np.int64]) -> Any:
        """Pick rows of `x`."""
        return x[index]

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        """x / sqrt(mean(x²) + eps) * weight, over the last axis."""
        return x * (weight / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)))

    def linear(self, x: Any, matrix: Any) -> Any:
        """x @ matrix.T."""
        return x @ matrix.T

    def swiglu(self, gate_up: Any) -> Any:
        """silu(first half) * second half, over the last axis."""
        gate, up = np.split(gate_up, 2, axis=-1)
        # tanh instead of exp: it cannot overflow.
        return gate * (0.5 * np.tanh(0.5 * gate) + 0.5) * up


class TorchDense:
    """Dense layers in torch, f32: the model is small, and the check then sees what the cache does and nothing else.

    Parameters
    ----------
    device : str
        torch's name of the device, "cuda" as a rule.
    """

    def __init__(self, device: str) -> None:
        import torch  # type: ignore[import-not-found]  # optional; cli.py has checked that it is there

        self._torch = torch
        self.device = device

    def tensor(self, array: NDArray[np.float32]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def to_numpy(self, x: Any) -> NDArray[np.float32]:
        return x.cpu().numpy()

    def embed(self, table: Any, tokens: NDArray[np.int64]) -> Any:
        return self.rows(table, tokens)

    def rows(self, x: Any, index: NDArray[np.int64]) -> Any:
        return x[self._torch.from_numpy(np.asarray(index, dtype=np.int64)).to(self.device)]

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return x * self._torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def linear(self, x: Any, matrix: Any) -> Any:
        return x @ matrix.T

    def swiglu(self, gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._torch.nn.functional.silu(gate) * up


class Model:
    """SmolLM2.

    Parameters
    ----------
    weights : ModelWeights
        Host arrays; they are brought to the dense layers' device here.
    dense : NumpyDense or TorchDense
    """

    def __init__(self, weights: ModelWeights, dense: NumpyDense | TorchDense) -> None:
        self.config = weights.config
        self.dense = dense
        put = dense.tensor
        self._embedding = put(weights.embedding)
        self._output_norm = put(weights.output_norm)
        self._layers = [
            {name: put(getattr(layer, name)) for name in layer.__dataclass_fields__} for layer in weights.layers
        ]

    def forward(self, tokens: NDArray[np.int64], cache: KVCache, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the new tokens of a step whose `cache.begin_step` has been called.

        Parameters
        ----------
        tokens : int64 [T]
            The new tokens of all sequences, one after another, in the step's order.
        cache : KVCache
        wanted : int64 [W]
            The rows whose logits are asked for; the output matrix is the largest of all, so only those go through it.

        Returns
        -------
        float32 [W, vocabulary]
            On the host.
        """
        config, dense = self.config, self.dense
        count = len(tokens)
        query_size, kv_size = config.query_heads * config.head_size, config.kv_heads * config.head_size
        x = dense.embed(self._embedding, tokens)
        for index, layer in enumerate(self._layers):
            normed = dense.rms_norm(x, layer["attention_norm"], config.norm_eps)
            joined = dense.linear(normed, layer["query_key_value"])
            query = joined[:, :query_size].reshape(count, config.query_heads, config.head_size)
            key = joined[:, query_size : query_size + kv_size].reshape(count, config.kv_heads, config.head_size)
            value = joined[:, query_size + kv_size :].reshape(count, config.kv_heads, config.head_size)
            attended = cache.attend(index, query, key, value).reshape(count, query_size)
            x = x + dense.linear(attended, layer["attention_output"])
            normed = dense.rms_norm(x, layer["feed_forward_norm"], config.norm_eps)
            x = x + dense.linear(dense.swiglu(dense.linear(normed, layer["gate_up"])), layer["down"])
        last = dense.rms_norm(dense.rows(x, wanted), self._output_norm, config.norm_eps)
        return dense.to_numpy(dense.linear(last, self._embedding))
