# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Elements of a user's own for records: two functions over eight of them, which kernels inline."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn import dsl as kv
from kvarn.dialect import codes, dtypes
from kvarn.dialect.dtypes import CODED, DType

from .functions import digest_of


@dataclass(frozen=True)
class Code:
    """Elements of 2 to 7 bits that two functions read and write, in place of a type of kvarn.

    Eight neighbouring elements of a head are ``bits`` bytes, whose meaning only the functions know. They are traced as
    parts of kernels, as plain Python over values of the kernel language: with loops of a fixed count, and without
    ``if`` over values (``kv.where``). The NumPy model runs them on the host. A record with such elements,
    ``kv.Record(kv.Code(...), "f16", 32)``, has scales like any other; all operations on caches of packed elements
    take it, by their general kernels.

    Parameters
    ----------
    name : str
        Of letters, digits and underscores; types and error messages show it.
    bits : int
        Bits per element, 2 to 7.
    largest : float
        The largest magnitude of an element: a scale is the largest magnitude of its group divided by it.
    encode : callable
        ``encode(x)``: eight numbers, a f32 vector, already divided by their scale, as ``bits`` bytes, a u8 vector.
    decode : callable
        ``decode(data)``: the inverse, from a u8 vector to a f32 vector.
    """

    name: str
    bits: int
    largest: float
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.name):
            raise ValueError(f"name of a code must be of letters, digits and underscores, got {self.name!r}")
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 7:
            raise ValueError(f"bits of a code must be from 2 to 7, got {self.bits!r}")
        if not 0 < self.largest < float("inf"):
            raise ValueError(f"largest of a code must be positive and finite, got {self.largest!r}")
        for what in ("encode", "decode"):
            if not callable(getattr(self, what)):
                raise TypeError(f"{what} of a code must be a function, got {getattr(self, what)!r}")
        codes.registered[self.coded.code] = self

    @functools.cached_property
    def coded(self) -> DType:
        """The type of its elements; of equal functions it is the same type."""
        return dtypes.coded(f"{self.name}@{digest_of(self.encode, self.decode)}", self.bits, self.largest)

    @kv.intrinsic
    def encoded(self, x: Any) -> Any:
        """``encode`` of eight f32 values of a kernel, checked."""
        return _checked(self.encode(x), kv.u8, self.bits, f"encode of the code {self.name}")

    @kv.intrinsic
    def decoded(self, data: Any) -> Any:
        """``decode`` of the bytes of a kernel, checked."""
        return _checked(self.decode(data), kv.f32, CODED, f"decode of the code {self.name}")

    def to_bytes(self, x: np.ndarray) -> np.ndarray:
        """f32 [..., 8] as uint8 [..., bits], on the host."""
        out = np.empty((*x.shape[:-1], self.bits), np.uint8)
        self._run(x.astype(np.float32), out, "encoded")
        return out

    def to_numbers(self, data: np.ndarray) -> np.ndarray:
        """uint8 [..., bits] as f32 [..., 8], on the host."""
        out = np.empty((*data.shape[:-1], CODED), np.float32)
        self._run(data, out, "decoded")
        return out

    def _run(self, source: np.ndarray, out: np.ndarray, which: str) -> None:
        rows = out.size // out.shape[-1]
        if rows:
            flat = np.ascontiguousarray(source).reshape(rows, -1)
            _converter(self, which)[rows, 1](flat, out.reshape(rows, -1))


@functools.cache
def _converter(code: Code, which: str) -> Any:
    """The host kernel that encodes or decodes one row per block."""
    read, written = (CODED, code.bits) if which == "encoded" else (code.bits, CODED)
    convert = getattr(code, which)

    @kv.kernel
    def converter(source, out):
        row = kv.block_id.x
        x = kv.from_lanes([source[row, i] for i in range(read)], source.dtype)
        found = convert(x)
        for i in kv.static(range(written)):
            out[row, i] = found[i]

    return converter


def _checked(found: Any, dtype: DType, lanes: int, what: str) -> Any:
    if not isinstance(found, kv.Vector) or found.dtype is not dtype or len(found) != lanes:
        got = f"{len(found)} of {found.dtype.name}" if isinstance(found, kv.Vector) else type(found).__name__
        raise TypeError(f"{what} must give a vector of {lanes} {dtype.name}, got {got}")
    return found


__all__ = ["Code"]
