# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Formats of other libraries, byte for byte: written and read in place, against codecs made from their descriptions.

The codecs are plain NumPy in float64, without the library's own model of records.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference.records import PLACES, at

import kvarn as kv

PAGES, PAGE, HEADS, SIZE = 5, 16, 2, 128
LENGTHS, NEW = np.array([5, 18], np.uint32), (3, 1)
TABLE = np.array([[4, *[0] * 23], [2, 1, *[0] * 22]], np.uint32)
OFFSETS = np.cumsum([0, *NEW]).astype(np.uint32)


# --- NVFP4: FlashInfer's pair of tensors, vLLM's pages of data and scales -------------------------------


def nvfp4(x: np.ndarray, outer: float) -> tuple[np.ndarray, np.ndarray]:
    """Two e2m1 per byte, the first in the low half, and an e4m3 scale per 16: the largest magnitude over 6.

    Values are first divided by the scale of the whole tensor.
    """
    groups = (x.astype(np.float64) / outer).reshape(*x.shape[:-1], -1, 16)
    scales = (np.abs(groups).max(-1) / 6).astype(ml_dtypes.float8_e4m3fn)
    divisor = scales.astype(np.float64)[..., None]
    quotients = np.divide(groups, divisor, out=np.zeros_like(groups), where=divisor != 0)
    codes = np.clip(quotients, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def of_nvfp4(data: np.ndarray, scales: np.ndarray, outer: float) -> np.ndarray:
    """The numbers of :func:`nvfp4`, float64."""
    codes = np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return numbers * np.repeat(scales.astype(np.float64), 16, -1) * outer


def flashinfer(memory: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Data [pages, 2, P, H, D / 2] and scales [pages, 2, P, H, D / 16], linear in both halves."""
    memory["data"] = np.full((PAGES, 2, PAGE, HEADS, SIZE // 2), 0xEE, np.uint8)
    memory["scales"] = np.full((PAGES, 2, PAGE, HEADS, SIZE // 16), 0x7F, np.uint8)
    return memory["data"], memory["scales"].view(ml_dtypes.float8_e4m3fn)


def vllm(memory: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pages of [K's data | K's scales | V's data | V's scales], tokens before heads, and scales linear."""
    data, scales = PAGE * HEADS * SIZE // 2, PAGE * HEADS * SIZE // 16
    memory["pages"] = np.full((PAGES, 2, data + scales), 0x7F, np.uint8)
    halves = memory["pages"][..., :data], memory["pages"][..., data:]
    shapes = [(PAGES, 2, PAGE, HEADS, n) for n in (SIZE // 2, SIZE // 16)]
    views = [
        np.lib.stride_tricks.as_strided(half, shape, (*half.strides[:2], HEADS * shape[-1], shape[-1], 1))
        for half, shape in zip(halves, shapes, strict=True)
    ]
    return views[0], views[1].view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", [flashinfer, vllm], ids=["flashinfer", "vllm"])
def test_nvfp4_is_written_and_read_in_place(place: str, layout: Any) -> None:
    rng, memory, outer = np.random.default_rng(0), {}, (2.0**-5, 2.0**-3)
    data, scales = layout(memory)
    expected: list[Any] = []
    tokens = int(sum(LENGTHS) + sum(NEW))
    halves = [rng.standard_normal((tokens, HEADS, SIZE)).astype(np.float32) * np.float32(s) for s in outer]
    halves[0][:, 1, :16] = 0  # a group of zeros has the scale zero
    ends = np.cumsum(LENGTHS + np.array(NEW))
    places = [(b, t) for b in range(2) for t in range(LENGTHS[b] + NEW[b])]
    pages, slots = np.array([(TABLE[b, t // PAGE], t % PAGE) for b, t in places]).T
    cached = np.array([t < LENGTHS[b] for b, t in places])
    for half, x in enumerate(halves):  # the other library has written what is cached
        of = pages[cached], half, slots[cached]
        data[of], scales[of] = nvfp4(x[cached], outer[half])
    for half, x in enumerate(halves):  # what the whole memory must be in the end
        of = pages[~cached], half, slots[~cached]
        kept = data[of].copy(), scales[of].copy()
        data[of], scales[of] = nvfp4(x[~cached], outer[half])
        expected.append((of, kept))
    after = {name: x.copy() for name, x in memory.items()}
    for of, kept in expected:
        data[of], scales[of] = kept
    found = kv.PagedKVCacheCollection(
        data[:, :, None], LENGTHS, TABLE, max(NEW), 32, scales=scales[:, :, None], record="nvfp4"
    )
    query = rng.standard_normal((sum(NEW), 4 * HEADS, SIZE)).astype(ml_dtypes.bfloat16)
    with at(place):
        new = [x[~cached] for x in halves]
        kv.ops.append(found, 0, *new, OFFSETS, tensor_scales=np.array(outer, np.float32))
        out = kv.ops.attention(found, 0, query, OFFSETS, scale=outer[0] * SIZE**-0.5).astype(np.float64) * outer[1]

    for name, x in memory.items():
        np.testing.assert_array_equal(x, after[name])
    values = [of_nvfp4(*nvfp4(x, s), s) for x, s in zip(halves, outer, strict=True)]
    for row, (b, t) in enumerate(p for p, c in zip(places, cached, strict=True) if not c):
        first = int(ends[b] - LENGTHS[b] - NEW[b])
        keys, vals = (v[first : first + t + 1] for v in values)
        for h in range(4 * HEADS):
            scores = keys[:, h // 4] @ query[row, h].astype(np.float64) * SIZE**-0.5
            weights = np.exp(scores - scores.max())
            want = weights @ vals[:, h // 4] / weights.sum()
            np.testing.assert_allclose(out[row, h], want, atol=1e-2 * outer[1] * 8)


# --- DeepSeek's rows of 656 bytes ----------------------------------------------------------------------


def test_rows_of_656_bytes_are_read_in_place() -> None:
    """512 e4m3, their 4 scales of f32 (the largest magnitude of 128 over 448), and 64 bf16 keys turned by RoPE."""
    rng, tokens = np.random.default_rng(1), 18
    content, turned = rng.standard_normal((tokens, 512)) * 3, rng.standard_normal((tokens, 64))
    scales = (np.abs(content).reshape(tokens, 4, 128).max(-1) / 448).astype(np.float32)
    wide = np.repeat(scales.astype(np.float64), 128, -1)
    elements, keys = (content / wide).astype(ml_dtypes.float8_e4m3fn), turned.astype(ml_dtypes.bfloat16)
    rows = np.concatenate([x.view(np.uint8) for x in (elements, scales, keys)], -1)
    assert rows.shape == (tokens, 656)
    blocks = np.full((PAGES, 1, 1, PAGE, 1, 656), 0x7F, np.uint8)
    blocks[2, 0, 0, :, 0], blocks[1, 0, 0, : tokens - PAGE, 0] = rows[:PAGE], rows[PAGE:]
    found = kv.PagedKVCacheCollection(
        blocks.view(ml_dtypes.float8_e4m3fn), np.array([tokens - 1], np.uint32), TABLE[1:], 1, 32
    )
    query = rng.standard_normal((1, 4, 576)).astype(ml_dtypes.bfloat16)
    out = kv.ops.mla_attention(
        found, 0, query, np.array([0, 1], np.uint32), value_size=512, scale=576**-0.5, inline_scales=128
    )
    values = elements.astype(np.float64) * wide
    whole = np.concatenate((values, keys.astype(np.float64)), -1)
    scores = query[0].astype(np.float64) @ whole.T * 576**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(out[0].astype(np.float64), want, atol=2e-2, rtol=1e-2)
