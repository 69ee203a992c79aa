# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands with scales per group of K: their formats, and their dequantized values in a workspace.

:func:`dequantized` writes the values of the weight, and of quantized tokens, in the type of the products, which every
product kernel can then read. For few tokens a kernel reads the unconverted weight instead (projection/stream_k_mma.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f32
from kvarn.dialect.ops.projection import groups_in, quantized_x
from kvarn.dialect.ops.weight_groups import PLAIN, Groups

from ..base import Expansion
from ..common import THREADS, Rows, row_alignment

MOST = 8  # elements that a thread converts at a time


@dataclass(frozen=True)
class Stored:
    """The format of an operand with group scales.

    Attributes
    ----------
    format : str
        One of ``weight_groups.FORMATS``.
    dtype, scale : DType
        The types of the buffer and of the scales (None without).
    k : int
        Elements per row.
    groups : Groups
    minimum : bool
        Whether groups have minima.
    """

    format: str
    dtype: DType
    scale: DType | None
    k: int
    groups: Groups
    minimum: bool = False

    @staticmethod
    def of(op: Any, at: Expansion, name: str) -> Stored:
        """The format of ``x`` or ``weight`` of an operation."""
        groups = groups_in(op, name)
        assert isinstance(groups, Groups), groups
        minimum = name == "weight" and op.weight_min is not None
        dtype, scale = at.dtype(getattr(op, name)), at.dtype(getattr(op, f"{name}_scale"))
        return Stored(op.weight_format.value, dtype, scale, groups.count * groups.size, groups, minimum)

    @property
    def packed(self) -> bool:
        return self.format != PLAIN


@kv.func
def values_of(stored: Stored, held: Any) -> list[Any]:
    """The elements of a vector of buffer values, in order, each as f32."""
    if not stored.packed:
        return [kv.f32(held[i]) for i in range(held.lanes)]
    found = []
    for i in kv.static(range(held.lanes)):
        byte = kv.i32(held[i])
        for shift in kv.static((0, 4)):
            found.append(_of_four_bits(stored.format, (byte >> shift) & 15))
    return found


@kv.func
def _of_four_bits(weight_format: str, n: Any) -> Any:
    """The f32 value of 4 bits, given as an i32 from 0 to 15."""
    if weight_format == "uint4":
        return kv.f32(n)
    if weight_format == "uint4b8":
        return kv.f32(n - 8)
    if weight_format == "int4":
        return kv.f32((n ^ 8) - 8)
    m = n & 7  # up to 2 in steps of one half, then 3, 4 and 6
    magnitude = kv.where(m <= 4, kv.f32(m) * 0.5, kv.where(m == 7, kv.f32(6.0), kv.f32(m - 2)))
    return kv.where(n >= 8, -magnitude, magnitude)


def dequantize_kernel(stored: Stored, dtype: DType, alignment: int) -> Any:
    """Writes the values of the rows, one block per row, rounded to ``dtype``."""
    width = math.gcd(MOST, stored.groups.size)
    of_buffer = Rows(width // 2 if stored.packed else width, alignment)
    of_out = Rows(width, 16)

    @kv.kernel
    def dequantize(elements, out: kv.Buffer[dtype, 2], scales=None, minima=None):
        row = kv.block_id.x
        for unit in range(kv.thread_id.x, stored.k // width, kv.block_dim.x):
            at = stored.groups.index(row, unit * width // stored.groups.size)
            found = values_of(stored, of_buffer.load(elements, row, unit * of_buffer.width))
            if scales is not None:
                scale = kv.f32(scales[at])
                found = [x * scale for x in found]
            if minima is not None:
                low = kv.f32(minima[at])
                found = [x - low for x in found]
            of_out.store(out, row, unit * width, value=dtype(kv.vector(f32, found)))

    return dequantize


class WithOperands:
    """An operation with some operands replaced."""

    def __init__(self, op: Any, others: Mapping[str, Any]) -> None:
        self._op, self._others = op, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._op, name)


def computed_with(op: Any, at: Expansion) -> DType:
    """The type of the values in products."""
    return bf16 if quantized_x(op) else at.dtype(op.x)


def plain_case(case: Any) -> Any:
    """The case after dequantization of group scales, with one number for all products if there is one."""
    return case if case.scaling != "group" else replace(case, scaling="total" if case.total else "none")


def with_values(op: Any, at: Expansion, *names: str) -> WithOperands:
    """Launch the dequantization of the named operands, ``x`` or ``weight``; returns the operation with the values.

    Its ``weight_scale`` is the one number that multiplies the products, if any.
    """
    others: dict[str, Any] = {"x_scale": None, "weight_scale": op.tensor_scale}
    for name in names:
        if name == "weight" or quantized_x(op):
            minima = op.weight_min if name == "weight" else None
            scales = getattr(op, f"{name}_scale")
            others[name] = _written(op, at, name, Stored.of(op, at, name), computed_with(op, at), scales, minima)
    return WithOperands(op, others)


def plain_weight(op: Any, at: Expansion) -> Stored:
    """The format of a weight, and of matching tokens, without group scales."""
    k = at.static_dim(op.weight, 1)
    return Stored(PLAIN, at.dtype(op.weight), None, k, Groups(1, k, False))


def with_floats(op: Any, at: Expansion, *names: str) -> WithOperands:
    """Launch the conversion of the named f8e4m3 operands to bf16, which is exact; their scales do not change."""
    stored = plain_weight(op, at)
    return WithOperands(op, {name: _written(op, at, name, stored, bf16, None, None) for name in names})


def _written(op: Any, at: Expansion, name: str, stored: Stored, dtype: DType, scales: Any, minima: Any) -> ir.Value:
    elements = getattr(op, name)
    rows, alignment = at.dim(elements, 0), row_alignment(at.op)
    out = at.workspace(rows, dtype=dtype, columns=stored.k)
    kernel, threads = dequantize_kernel(stored, dtype, alignment), 1 if at.target.is_host else THREADS
    args = [elements, out, scales, minima]
    at.launch(kernel, args, (rows, 1, 1), (threads, 1, 1), key=(stored, dtype, alignment))
    return out
