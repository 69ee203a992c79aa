# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random elements with scales by groups of K, as they are stored, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.dialect import dtypes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Grouped:
    """Elements, scales and minima as they are stored, and the values [rows, k] that they are, float64."""

    elements: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    values: np.ndarray


def random_groups(
    rng: np.random.Generator, rows: int, k: int, size: int, element: str, scale: str, *, interleaved: bool = False,
    minima: bool = False,
) -> Grouped:  # fmt: skip
    """Random rows; ``element`` is a format of 4 bits or a dtype. Scales are powers of two, so that sums are exact."""
    if element in ("uint4b8", "int4", "uint4", "e2m1"):
        codes = rng.integers(0, 16, (rows, k))
        elements = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
        values = {
            "uint4b8": codes - 8, "uint4": codes, "int4": np.where(codes < 8, codes, codes - 16),
            "e2m1": np.where(codes < 8, 1, -1) * E2M1[codes & 7],
        }[element].astype(np.float64)  # fmt: skip
    else:
        elements = (rng.integers(-8, 9, (rows, k)) / (1 if element == "i8" else 4)).astype(np.float32)
        elements = elements.astype(dtypes.of(element).numpy)
        values = elements.astype(np.float64)
    stored = dtypes.of(scale).numpy
    scales = (2.0 ** rng.integers(-3, 2, (rows, k // size))).astype(np.float32).astype(stored)
    lows = (2.0 ** rng.integers(-2, 1, scales.shape)).astype(np.float32).astype(stored) if minima else None
    values = values * np.repeat(scales.astype(np.float64), size, 1)
    if lows is not None:
        values = values - np.repeat(lows.astype(np.float64), size, 1)
    if interleaved:
        scales, lows = _interleaved(scales), None if lows is None else _interleaved(lows)
    return Grouped(elements, scales, lows, values)


def _interleaved(scales: np.ndarray) -> np.ndarray:
    """[rows, groups] as [ceil(rows / 128), ceil(groups / 4), 32, 4, 4]; what is missing is NaN, or for e8m0 too."""
    rows, groups = scales.shape
    high, wide = -(-rows // 128), -(-groups // 4)
    whole: Any = np.full((high * 128, wide * 4), np.nan, np.float32).astype(scales.dtype)
    whole[:rows, :groups] = scales
    return np.ascontiguousarray(whole.reshape(high, 4, 32, wide, 4).transpose(0, 3, 2, 1, 4))
