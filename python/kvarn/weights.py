# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversion of quantized weights for ``kv.ops.project_append``: elements, scales by groups of K, minima.

Each function returns a dictionary of keyword arguments with NumPy arrays, to be copied to the cache's device:
``project_append(..., **w)``. Nothing is rounded, and 4-bit elements stay 4-bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["from_gguf", "from_gptq"]

PACK = 8  # elements per word of GPTQ


def packed(codes: np.ndarray) -> np.ndarray:
    """4-bit elements [N, K], 0 to 15, packed two per byte: [N, K / 2], the first in the low half."""
    codes = codes.astype(np.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def from_gptq(qweight: Any, scales: Any) -> dict[str, Any]:
    """A symmetric weight of GPTQ with ordered groups (no ``g_idx``) and without zero points.

    Parameters
    ----------
    qweight : int32 array-like [K / 8, N]
        Eight elements of K per word, the first in the lowest bits.
    scales : f16 array-like [K / g, N]

    Returns
    -------
    dict
        ``weight`` uint8 [N, K / 2], ``weight_scale`` [N, K / g] and ``weight_format`` ``"uint4b8"``.

    Raises
    ------
    ValueError
        If a shape or the dtype differs.
    """
    words, factors = np.asarray(qweight), np.asarray(scales)
    if words.ndim != 2 or words.dtype not in (np.int32, np.uint32):
        raise ValueError(f"qweight must be an int32 array [K / 8, N], got {words.dtype} {list(words.shape)}")
    k, n = words.shape[0] * PACK, words.shape[1]
    if factors.ndim != 2 or factors.shape[1] != n or not len(factors) or k % len(factors):
        raise ValueError(f"scales must be [K / g, {n}] with groups that divide K = {k}, got {list(factors.shape)}")
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[None, :, None]
    codes = (words.astype(np.uint32)[:, None] >> shifts) & 15
    elements = packed(codes.reshape(k, n).T)
    return {"weight": elements, "weight_scale": np.ascontiguousarray(factors.T), "weight_format": "uint4b8"}


def from_gguf(blocks: Any, type: str) -> dict[str, Any]:
    """A quantized tensor of GGUF.

    Parameters
    ----------
    blocks : uint8 array-like [N, bytes of a row]
        The tensor's data, from ``gguf.GGUFReader``.
    type : {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"}

    Returns
    -------
    dict
        ``weight``, ``weight_scale``, ``weight_format`` and, for types with minima, ``weight_min``. Q4 types stay 4-bit,
        Q8_0 and Q6_K become int8; scales of K types, which are products of two, become f32.

    Raises
    ------
    ValueError
        If the type is unknown, or rows are not whole blocks.
    """
    if type not in _BLOCKS:
        raise ValueError(f"type must be one of {', '.join(_BLOCKS)}, got {type!r}")
    size, read = _BLOCKS[type]
    data = np.asarray(blocks)
    if data.ndim != 2 or data.dtype != np.uint8 or data.shape[1] % size or not data.shape[1]:
        raise ValueError(
            f"blocks must be a uint8 array [N, bytes of a row] of whole blocks of {size} bytes, got {data.dtype} "
            f"{list(data.shape)}"
        )
    found = read(data.reshape(data.shape[0], -1, size))
    return {name: np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for name, a in found.items()}


def _halves(part: np.ndarray) -> np.ndarray:
    """The f16 in the last dimension's bytes, [..., bytes / 2]."""
    return np.ascontiguousarray(part).view(np.float16)


def _rows(part: np.ndarray) -> np.ndarray:
    return part.reshape(len(part), -1)


def _nibbles(part: np.ndarray) -> np.ndarray:
    """The low halves of a block's bytes, then the high halves."""
    return np.concatenate([part & 15, part >> 4], -1)


def _q4_0(blocks: np.ndarray) -> dict[str, Any]:
    codes = packed(_rows(_nibbles(blocks[..., 2:])))
    return {"weight": codes, "weight_scale": _rows(_halves(blocks[..., :2])), "weight_format": "uint4b8"}


def _q4_1(blocks: np.ndarray) -> dict[str, Any]:
    scales, codes = _halves(blocks[..., :4]), packed(_rows(_nibbles(blocks[..., 4:])))
    minima = -_rows(scales[..., 1:])  # GGUF adds minima; project_append subtracts them
    return {"weight": codes, "weight_scale": _rows(scales[..., :1]), "weight_min": minima, "weight_format": "uint4"}


def _q8_0(blocks: np.ndarray) -> dict[str, Any]:
    codes = _rows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8))
    return {"weight": codes, "weight_scale": _rows(_halves(blocks[..., :2])), "weight_format": "plain"}


def _q4_k(blocks: np.ndarray) -> dict[str, Any]:
    both, bits = _halves(blocks[..., :4]).astype(np.float32), blocks[..., 4:16]
    low, middle, high = bits[..., :4], bits[..., 4:8], bits[..., 8:]
    # Eight 6-bit scales and eight 6-bit minima; the upper two bits of the last four are stored above the first four.
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], -1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return {
        "weight": packed(_rows(codes)),
        "weight_scale": _rows(both[..., :1] * scales),
        "weight_min": _rows(both[..., 1:] * minima),
        "weight_format": "uint4",
    }


def _q6_k(blocks: np.ndarray) -> dict[str, Any]:
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 2, 32)  # per half of a block
    low = np.concatenate([low & 15, low >> 4], -2)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (low | ((high & 3) << 4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8) * _halves(blocks[..., 208:]).astype(np.float32)
    return {"weight": _rows(codes), "weight_scale": _rows(scales), "weight_format": "plain"}


# Bytes of a block, and its conversion.
_BLOCKS: dict[str, tuple[int, Callable[[np.ndarray], dict[str, Any]]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q8_0": (34, _q8_0), "Q4_K": (144, _q4_k), "Q6_K": (210, _q6_k),
}  # fmt: skip
