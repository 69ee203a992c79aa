# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversions of caches: to a storage type (saturating), and from quantized values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect import dtypes
from kvarn.dialect.dtypes import DType


def saturating_cast(values: Any, dtype: DType) -> np.ndarray:
    """Convert to a storage type, like kernels.

    Parameters
    ----------
    values : array-like
        Numbers of any dtype and shape.
    dtype : DType
        Target. An 8-bit float: round to nearest even, and saturate to the largest finite value, infinities too; NaN
        stays NaN. An integer: round to nearest even and saturate; NaN becomes 0. A wider float: round.

    Returns
    -------
    numpy.ndarray
        Of ``dtype.numpy``.
    """
    array = np.asarray(values)
    if array.dtype == dtype.numpy:
        return array
    if dtype.is_integer:
        wide = array.astype(np.float64)
        info = np.iinfo(dtype.numpy)
        return np.clip(np.rint(np.where(np.isnan(wide), 0.0, wide)), info.min, info.max).astype(dtype.numpy)
    if array.dtype.kind not in "fiu" or array.dtype.itemsize < 4:
        array = array.astype(np.float32)  # the small floats of ml_dtypes are exact in f32
    if dtype.bits == 8:
        array = np.clip(array, -dtype.largest, dtype.largest)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy)


def dequantize(stored: np.ndarray, scale: np.ndarray, dtype: DType) -> np.ndarray:
    """``stored * scale``, computed in f32 for every scale type, rounded once to ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):
        return saturating_cast(stored.astype(np.float32) * scale.astype(np.float32), dtype)


def default_load_dtype(storage: DType, quantized: bool) -> DType:
    """The default result type of a load: the storage type, or f32 for a quantized cache."""
    return dtypes.f32 if quantized else storage
