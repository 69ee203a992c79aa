# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Allocation of arrays by the caller's library: torch, CuPy or NumPy."""

from __future__ import annotations

import sys
from typing import Any

from kvarn.dialect.dtypes import DType

from . import buffers
from .binding import is_torch


def empty(beside: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    """A new array of ``beside``'s library, on its device; ``dtype`` defaults to that of ``beside``."""
    return _allocated("empty", beside, shape, dtype, name, title)


def zeros(beside: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    """Like :func:`empty`, filled with zeros."""
    return _allocated("zeros", beside, shape, dtype, name, title)


def _allocated(make: str, beside: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    library = type(beside).__module__.partition(".")[0]
    if is_torch(type(beside)):
        torch = sys.modules["torch"] if dtype is not None else None
        options = {} if torch is None else {"dtype": getattr(torch, dtype.foreign)}  # type: ignore[union-attr]
        try:
            return getattr(beside, f"new_{make}")(shape, **options)
        except (RuntimeError, TypeError):
            buffers.view(beside, name=f"{title}: what {name} is allocated beside")  # raises a specific error
            raise
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with beside.device:
            return getattr(cupy, make)(shape, beside.dtype if dtype is None else dtype.numpy)
    if hasattr(beside, "__array_interface__") and hasattr(beside, "dtype"):
        import numpy as np

        return getattr(np, make)(shape, beside.dtype if dtype is None else dtype.numpy)
    raise TypeError(f"{title}: {name} must be given: a {type(beside).__qualname__} cannot be allocated")


__all__ = ["empty", "zeros"]
