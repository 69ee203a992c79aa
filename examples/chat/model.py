# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A LLaMA-like transformer over a ragged batch.

RoPE, append and attention are methods of the cache, called through `KVCache.attend`, so that the same model runs on
the paged cache and on the plain one used for checking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .arrays import NumpyArrays, TorchArrays
from .weights import ModelConfig, ModelWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray


class KVCache(Protocol):
    """The storage of keys and values. Callers identify sequences by ints of their choice."""

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        """Create a sequence that starts with `tokens`."""
        ...

    def fork(self, parent: int, sequence: int) -> None:
        """Create a sequence with the tokens of `parent`, all of which must be in the cache."""
        ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append token ids to a sequence; they are not computed yet."""
        ...

    def reserve(self, sequence: int, count: int) -> int:
        """Reserve slots for at most `count` more tokens in the next step.

        Returns the number of next tokens whose keys and values are already in the cache: these need no computation, and
        the slots are for the tokens after them. At least one token is left to compute.
        """
        ...

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """Start a step of (sequence, number of new tokens), all reserved; return the row offsets, int32 [B + 1]."""
        ...

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """Rotate query [T, Hq, D] and key [T, H, D], append key and value [T, H, D], attend causally: [T, Hq, D]."""
        ...

    def end_step(self) -> None:
        """Finish the step; its tokens are then in the cache."""
        ...

    def close(self, sequence: int) -> None:
        """Close a sequence and free its memory."""
        ...


def rope_frequencies(config: ModelConfig, positions: int) -> NDArray[np.float32]:
    """Return the rotary table, f32 [positions, head_size]: cos and sin of each pair's angle, interleaved."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    angles = np.arange(positions, dtype=np.float64)[:, None] * config.rope_base**-exponents
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(positions, config.head_size).astype(np.float32)


class Model:
    """SmolLM2. The weights are host arrays, uploaded to the device of `arrays`."""

    def __init__(self, weights: ModelWeights, arrays: NumpyArrays | TorchArrays) -> None:
        self.config = weights.config
        self._arrays = arrays
        self._embedding = arrays.upload(weights.embedding)
        self._output_norm = arrays.upload(weights.output_norm)
        self._layers = [{name: arrays.upload(x) for name, x in layer.items()} for layer in weights.layers]

    def forward(self, tokens: Sequence[int], cache: KVCache, wanted: Sequence[int]) -> NDArray[np.float32]:
        """Run the new tokens of a step whose `cache.begin_step` has been called.

        Parameters
        ----------
        tokens : sequence of int
            The T new tokens of all sequences, one after another, in the step's order.
        cache : KVCache
        wanted : sequence of int
            The W rows to compute logits for; the output matrix is the largest, so other rows skip it.

        Returns
        -------
        float32 [W, vocabulary]
            On the host.
        """
        config, count = self.config, len(tokens)
        end_of_query = config.query_heads * config.head_size
        end_of_key = end_of_query + config.kv_heads * config.head_size
        x = self._embedding[self._index(tokens)]
        for number, layer in enumerate(self._layers):
            joined = self._norm(x, layer["attention_norm"]) @ layer["query_key_value"].T
            query = joined[:, :end_of_query].reshape(count, config.query_heads, config.head_size)
            key = joined[:, end_of_query:end_of_key].reshape(count, config.kv_heads, config.head_size)
            value = joined[:, end_of_key:].reshape(count, config.kv_heads, config.head_size)
            attended = cache.attend(number, query, key, value).reshape(count, end_of_query)
            x = x + attended @ layer["attention_output"].T
            joined = self._norm(x, layer["feed_forward_norm"]) @ layer["gate_up"].T
            x = x + self._swiglu(joined) @ layer["down"].T
        last = self._norm(x[self._index(wanted)], self._output_norm)
        return self._arrays.download(last @ self._embedding.T)

    def _index(self, numbers: Sequence[int]) -> Any:
        return self._arrays.upload(np.array(numbers, np.int64))

    def _norm(self, x: Any, weight: Any) -> Any:
        """RMSNorm over the last axis."""
        return x * ((x * x).mean(-1) + self.config.norm_eps)[:, None] ** -0.5 * weight

    def _swiglu(self, joined: Any) -> Any:
        """silu(first half) * second half, over the last axis; tanh instead of exp, which can overflow."""
        gate, up = joined[:, : joined.shape[1] // 2], joined[:, joined.shape[1] // 2 :]
        return gate * (0.5 * self._arrays.tanh(0.5 * gate) + 0.5) * up
