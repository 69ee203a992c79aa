# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A KV cache with nothing to go wrong in it: one contiguous NumPy array a sequence, attention as the formula says.

`--check` compares the paged cache with this one, and the model's and scheduler's tests run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .model import rope_frequencies
from .weights import ModelConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rotate(x: NDArray[np.float32], frequencies: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn the pairs (2k, 2k + 1) of x [T, heads, D] by the angles of `frequencies` [T, D] (cos, sin interleaved)."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    cos, sin = frequencies[:, None, 0::2], frequencies[:, None, 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = real * cos - imaginary * sin
    turned[..., 1::2] = real * sin + imaginary * cos
    return turned


class PlainCache:
    """Contiguous f32 keys and values, [sequence] → [layers, 2, capacity, kv_heads, head_size].

    Parameters
    ----------
    config : ModelConfig
    capacity : int
        The most tokens that a sequence may have.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.config = config
        self.capacity = capacity
        self._frequencies = rope_frequencies(config, capacity)
        self._data: dict[int, NDArray[np.float32]] = {}
        self._lengths: dict[int, int] = {}
        self._step: list[tuple[int, int]] = []  # sequence, its new tokens

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        """See `KVCache.open`; this cache has no use for the tokens."""
        del tokens
        if sequence in self._data:
            raise ValueError(f"open: the sequence must be new, got {sequence}, which is open")
        config = self.config
        shape = (config.layers, 2, self.capacity, config.kv_heads, config.head_size)
        self._data[sequence] = np.zeros(shape, np.float32)
        self._lengths[sequence] = 0

    def fork(self, parent: int, sequence: int) -> None:
        """See `KVCache.fork`; everything is copied."""
        self.open(sequence, ())
        self._data[sequence][:] = self._data[parent]
        self._lengths[sequence] = self._lengths[parent]

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """See `KVCache.extend`; there is nothing to do."""

    def reserve(self, sequence: int, count: int) -> int:
        """See `KVCache.reserve`; nothing is ever shared, so the answer is 0."""
        length = self._lengths[sequence]
        if length + count > self.capacity:
            raise ValueError(
                f"reserve: sequence {sequence} must fit in {self.capacity} tokens, got {length} cached and {count} new"
            )
        return 0

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """See `KVCache.begin_step`."""
        self._step = list(batch)
        return np.cumsum([0, *(count for _, count in batch)], dtype=np.int32)

    def attend(
        self, layer: int, query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """See `KVCache.attend`."""
        out = np.empty_like(query)
        first = 0
        for sequence, count in self._step:
            rows = slice(first, first + count)
            start = self._lengths[sequence]
            angles = self._frequencies[start : start + count]
            keys, values = self._data[sequence][layer]
            keys[start : start + count] = rotate(key[rows], angles)
            values[start : start + count] = value[rows]
            end = start + count
            out[rows] = self._attention(rotate(query[rows], angles), keys[:end], values[:end], start)
            first += count
        return out

    def _attention(
        self, query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], start: int
    ) -> NDArray[np.float32]:
        count, heads, size = query.shape
        kv_heads = keys.shape[1]
        # [kv_heads, queries of the group, D] x [kv_heads, D, keys]: query head q reads kv head q // (heads / kv_heads).
        grouped = query.reshape(count, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)
        scores = (grouped @ keys.transpose(1, 2, 0)[:, None]) * np.float32(size**-0.5)
        visible = np.arange(len(keys))[None, :] <= start + np.arange(count)[:, None]
        scores = np.where(visible, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(count, heads, size)

    def end_step(self) -> None:
        """See `KVCache.end_step`."""
        for sequence, count in self._step:
            self._lengths[sequence] += count
        self._step = []

    def close(self, sequence: int) -> None:
        """See `KVCache.close`."""
        del self._data[sequence], self._lengths[sequence]
