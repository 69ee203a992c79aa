# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records: what one token and head of a cache stores, as one declaration.

Pure Python. A :class:`Record` names the elements, the scales, the zeros, and how elements are packed into bytes; the
shapes of a pool, the values that elements stand for, and the problems of a declaration follow from it. Today's storage
types are records as well: ``Record("bf16")``, ``Record("f8e4m3", scale="f32", group=128)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import dtypes
from .dtypes import DType

__all__ = ["NAMED", "Record", "named", "problems"]

ELEMENTS = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "i16", "i32")
SCALE_DTYPES = ("f32", "f16", "bf16", "f8e8m0", "f8e4m3")
# The sum of a 4-bit element and one of these is exact in f32, so that every reader rounds the same way.
ZERO_DTYPES = ("f16",)
MOST_VALUE = 2.0**15  # the largest magnitude of a value of a group with zeros: readers may have it as f16
ROW_BYTES = 16  # a row of packed elements is a multiple of this: the widest copy
LEAST_GROUP = 16  # packed elements per scale


@dataclass(frozen=True, init=False)
class Record:
    """What one token and head of a cache stores.

    An element ``n`` of a group with scale ``s`` and zero ``z`` stands for ``(n + z) * s``, computed in f32 and rounded
    once. Without a scale an element stands for itself.

    Parameters
    ----------
    elements : DType, name, sequence of 16 numbers, or kv.Code
        Type of an element: f32, f16, bf16, f8e4m3, f8e5m2, i8, i16, i32, or one of 4 bits: u4, f4e2m1, or a codebook,
        given as 16 ascending numbers, which are rounded to f16; or a ``kv.Code``, elements of one's own. Two elements
        of 4 bits share a byte: that of the even index is in the low half.
    scale : DType or name, optional
        Type of the scales: f32, f16, bf16, f8e8m0 or f8e4m3; f16 with zeros. Scales are in a buffer beside the pool.
    group : int
        Consecutive elements of the head that share a scale.
    zero : bool
        Whether each scale is followed by a zero of its type: what is added to elements, so in units of the scale. Of
        u4, and of no others. Values saturate at a magnitude of 2^15.
    rotation : int
        Of u4, f4e2m1 and codebooks: elements per block that a Hadamard matrix rotates before they are quantized, a
        power of two that divides the group; 0 for none. Outliers of single channels are spread over their block. Loads
        give rotated values; attention rotates the query and the output.

    Raises
    ------
    ValueError
        If no kernel can read such a record, with what must hold.
    """

    elements: DType
    scale: DType | None = None
    group: int = 1
    zero: bool = False
    rotation: int = 0

    def __init__(self, elements: Any, scale: Any = None, group: int = 1, zero: bool = False, rotation: int = 0) -> None:
        for name, number in (("group", group), ("rotation", rotation)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, got {number!r}")
        given = dtypes.stored(elements), None if scale is None else dtypes.of(scale), group, bool(zero), rotation
        for problem in problems(*given):
            raise ValueError(problem)
        for name, value in zip(("elements", "scale", "group", "zero", "rotation"), given, strict=True):
            object.__setattr__(self, name, value)

    @property
    def quantized(self) -> bool:
        """Whether elements are multiplied by scales."""
        return self.scale is not None

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.elements.packed

    @property
    def keeps_zero_scales(self) -> bool:
        """Whether the scale of a group of zeros is zero, as in NVFP4; of other records it is one."""
        return self.packed and self.scale is dtypes.f8e4m3

    @property
    def group_scales(self) -> int:
        """Entries of the scale buffer per group: the scale and, if there is one, the zero."""
        return 1 + self.zero

    def groups(self, head_size: int) -> int:
        """Groups of a head; the last one may be short."""
        return -(-head_size // self.group)

    def row_shape(self, head_size: int) -> tuple[DType, int]:
        """(type, extent) of a pool's last dimension: elements, or bytes of packed elements."""
        return self.elements.unit, self.elements.units(head_size)

    def scales_shape(self, head_size: int) -> tuple[DType, int] | None:
        """(type, extent) of the last dimension of the scales' buffer; None without scales."""
        return None if self.scale is None else (self.scale, self.groups(head_size) * self.group_scales)


def problems(
    elements: DType, scale: DType | None, group: int, zero: bool, rotation: int = 0, head_size: int | None = None,
    of_cache: bool = True,
) -> list[str]:  # fmt: skip
    """What is wrong with a record, one sentence per problem; for heads of a size, if it is given.

    ``of_cache``: whether the record is a cache's; other operands of attention may have scales of wider elements.
    """
    found = []
    if scale is not None:
        if scale.name not in SCALE_DTYPES:
            found.append(f"scale dtype must be one of {', '.join(SCALE_DTYPES)}, got {scale.name}")
        if elements.bits > 8 and of_cache:
            found.append(f"a quantized cache must store an 8-bit type, got {elements.name}")
    packed, affine = elements.packed, elements is dtypes.u4
    if group < 1:
        found.append(f"granularity must be positive, got {group}")
    if elements.name not in ELEMENTS and not packed:
        found.append(f"cache dtype must be {', '.join(ELEMENTS[:-1])} or {ELEMENTS[-1]}, got {elements.name}")
    if zero != affine or (zero and (scale is None or scale.name not in ZERO_DTYPES)):
        got = f"{elements.name} with {'no scales' if scale is None else f'scales of {scale.name}'}"
        found.append(
            f"elements of u4, and no others, have zeros, with scales of {' or '.join(ZERO_DTYPES)}, got {got}"
            f"{' and' if zero else ' without'} zeros"
        )
    elif packed and scale is None:
        found.append(f"elements of {elements.name} need scales, got none")
    found += _group_problems(elements, group, head_size) if packed else []
    if rotation and not (
        packed and not elements.code and rotation > 1 and rotation & (rotation - 1) == 0 and group % rotation == 0
    ):
        found.append(
            "a rotation needs elements of u4, f4e2m1 or a codebook, and blocks of a power of two that divides the group"
            f", got {rotation} in groups of {group} of {elements.name}"
        )
    return found


def _group_problems(elements: DType, group: int, head_size: int | None) -> list[str]:
    """What is wrong with the groups of packed elements, and with the head, if its size is given."""
    step = ROW_BYTES * 8 // math.gcd(ROW_BYTES * 8, elements.bits)
    least = step if elements is dtypes.u4 else LEAST_GROUP
    if group < 1 or group % least:
        of = f"{least} elements, {elements.bytes_of(least)} bytes"
        return [f"a group of {elements.name} must be a multiple of {of}, got {group}"]
    if head_size is None:
        return []
    found = []
    if head_size % group:
        found.append(f"groups of {elements.name} must divide the head, got groups of {group} in a head of {head_size}")
    if head_size % step:
        found.append(
            f"a head of {elements.name} must be a multiple of {step} elements, {ROW_BYTES} bytes, got {head_size}"
        )
    return found


# Records by name: a cache's dtype may be one of these names, or the name of an element type.
NAMED = {
    "int4": Record(dtypes.u4, dtypes.f16, 128, zero=True),
    "mxfp4": Record(dtypes.f4e2m1, dtypes.f8e8m0, 32),
    "nvfp4": Record(dtypes.f4e2m1, dtypes.f8e4m3, 16),
}


def named(what: Any) -> Record:
    """The record of a record, of a name in :data:`NAMED`, or of an element type in any form."""
    if isinstance(what, Record):
        return what
    if isinstance(what, str) and what in NAMED:
        return NAMED[what]
    return Record(what)
