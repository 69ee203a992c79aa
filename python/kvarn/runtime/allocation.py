# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Allocation of arrays by the caller's library: torch, CuPy or NumPy."""

from __future__ import annotations

import sys
from typing import Any

from kvarn.dialect.dtypes import DType

from . import buffers
from .binding import is_torch


def empty(like: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    """A new array of ``like``'s library, on its device; ``dtype`` defaults to that of ``like``."""
    return _allocated("empty", like, shape, dtype, name, title)


def zeros(like: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    """Like :func:`empty`, filled with zeros."""
    return _allocated("zeros", like, shape, dtype, name, title)


def _allocated(make: str, like: Any, shape: tuple[int, ...], dtype: DType | None, name: str, title: str) -> Any:
    library = type(like).__module__.partition(".")[0]
    if is_torch(type(like)):
        torch = sys.modules["torch"] if dtype is not None else None
        options = {} if torch is None else {"dtype": getattr(torch, dtype.foreign)}  # type: ignore[union-attr]
        try:
            return getattr(like, f"new_{make}")(shape, **options)
        except (RuntimeError, TypeError):
            buffers.view(like, name=f"{title}: the array that {name} is allocated like")  # raises a specific error
            raise
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with like.device:
            return getattr(cupy, make)(shape, like.dtype if dtype is None else dtype.numpy)
    if hasattr(like, "__array_interface__") and hasattr(like, "dtype"):
        import numpy as np

        return getattr(np, make)(shape, like.dtype if dtype is None else dtype.numpy)
    raise TypeError(f"{title}: {name} must be given: a {type(like).__qualname__} cannot be allocated")


__all__ = ["empty", "zeros"]
