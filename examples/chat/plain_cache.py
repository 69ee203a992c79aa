# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A simple reference KV cache: one contiguous NumPy array per sequence, attention by its definition.

`--check` compares the paged cache with this one; the methods are those of `KVCache`.
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
    """Rotate the pairs (2k, 2k + 1) of x [T, heads, D] by the angles of `frequencies` [T, D] (cos, sin interleaved)."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    cos, sin = frequencies[:, None, 0::2], frequencies[:, None, 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = real * cos - imaginary * sin
    turned[..., 1::2] = real * sin + imaginary * cos
    return turned


class PlainCache:
    """f32 keys and values of each sequence, [layers, 2, capacity, kv_heads, head_size]; nothing is shared."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self._shape = (config.layers, 2, capacity, config.kv_heads, config.head_size)
        self._frequencies = rope_frequencies(config, capacity)
        self._data: dict[int, NDArray[np.float32]] = {}
        self._lengths: dict[int, int] = {}
        self._step: list[tuple[int, int]] = []  # sequence, its new tokens

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        self._data[sequence] = np.zeros(self._shape, np.float32)
        self._lengths[sequence] = 0

    def fork(self, parent: int, sequence: int) -> None:
        self._data[sequence] = self._data[parent].copy()
        self._lengths[sequence] = self._lengths[parent]

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        pass

    def reserve(self, sequence: int, count: int) -> int:
        return 0

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        self._step = list(batch)
        return np.cumsum([0, *(count for _, count in batch)], dtype=np.int32)

    def attend(
        self, layer: int, query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        out, first = np.empty_like(query), 0
        for sequence, count in self._step:
            rows = slice(first, first + count)
            start = self._lengths[sequence]
            end = start + count
            angles = self._frequencies[start:end]
            keys, values = self._data[sequence][layer]
            keys[start:end] = rotate(key[rows], angles)
            values[start:end] = value[rows]
            out[rows] = attention(rotate(query[rows], angles), keys[:end], values[:end], start)
            first += count
        return out

    def end_step(self) -> None:
        for sequence, count in self._step:
            self._lengths[sequence] += count

    def close(self, sequence: int) -> None:
        del self._data[sequence], self._lengths[sequence]


def attention(
    query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], start: int
) -> NDArray[np.float32]:
    """Causal attention of query [T, Hq, D], whose first row is at position `start`, over keys and values [S, H, D]."""
    count, heads, size = query.shape
    kv_heads = keys.shape[1]
    # [H, Hq / H, T, D] x [H, 1, D, S]: query head q reads kv head q // (Hq / H).
    grouped = query.reshape(count, kv_heads, heads // kv_heads, size).transpose(1, 2, 0, 3)
    scores = (grouped @ keys.transpose(1, 2, 0)[:, None]) * np.float32(size**-0.5)
    visible = np.arange(len(keys))[None, :] <= start + np.arange(count)[:, None]
    scores = np.where(visible, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(count, heads, size)
