# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands of products with scales per group of K: formats of weights, and the layouts of scales.

A value is element * scale, minus the group's minimum if there is one. Elements are of an 8-bit type, or 4-bit with two
per byte, the first in the low half: ``uint4b8`` (0 to 15, minus 8: GPTQ, GGUF's q4_0), ``int4`` (two's complement),
``uint4`` (0 to 15, for weights with minima) and ``e2m1`` (FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign).

Pure Python: the verifiers, the run-time checks and the expansions use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"  # elements have the buffer's type
PACKED = ("uint4b8", "int4", "uint4", "e2m1")
FORMATS = (PLAIN, *PACKED)
PLAIN_TYPES = ("i8", "f8e4m3", "f8e5m2")
SCALE_TYPES = ("f32", "f16", "bf16", "f8e4m3", "f8e8m0")
INTERLEAVED = {"f8e4m3": 16, "f8e8m0": 32}  # elements per group, of scales in the order that sm_100 reads
ATOM_ROWS, ATOM_GROUPS, ATOM = 128, 4, (32, 4, 4)  # rows and groups of an atom of interleaved scales, and its shape
MULTIPLE = 8  # of the elements per group


@dataclass(frozen=True)
class Groups:
    """The scale groups in the rows of one operand.

    Attributes
    ----------
    count, size : int
        Groups per row, and elements per group.
    interleaved : bool
        Whether scales are [ceil(rows / 128), ceil(count / 4), 32, 4, 4], the scale of row r and group g at [r / 128, g
        / 4, r % 32, r / 32 % 4, g % 4]; otherwise they are [rows, count].
    """

    count: int
    size: int
    interleaved: bool

    def index(self, row: Any, group: Any) -> tuple[Any, ...]:
        """The index of a group's scale, for ints or values of a kernel."""
        if not self.interleaved:
            return row, group
        return row // ATOM_ROWS, group // ATOM_GROUPS, row % 32, row // 32 % 4, group % ATOM_GROUPS


def packed(weight_format: str) -> bool:
    """Whether a format has two elements per byte."""
    return weight_format != PLAIN


def groups_of(shape: Sequence[int | None], element: str, rows: int | None, k: int, name: str) -> Groups | str:
    """The groups that follow from the scales' shape and type, or what is wrong; None is an unknown extent."""
    if element not in SCALE_TYPES:
        return f"{name} must have element type {' or '.join(SCALE_TYPES)}, got {element}"
    got = [s if s is not None else "?" for s in shape]
    if len(shape) == 2 + len(ATOM):
        size = INTERLEAVED.get(element)
        if size is None:
            return f"{name} of rank {len(shape)} must be of {' or '.join(INTERLEAVED)}, got {element}"
        if k % size:
            return f"{name} must have groups of {size} that divide K = {k}"
        count = k // size
        wanted = (None if rows is None else -(-rows // ATOM_ROWS), -(-count // ATOM_GROUPS), *ATOM)
    elif len(shape) == 2 and shape[1] is not None:
        count = shape[1]
        if not count or k % count or k // count % MULTIPLE:
            return f"{name} must have groups of a multiple of {MULTIPLE} elements that divide K = {k}, got {count}"
        size, wanted = k // count, (rows, count)
    else:
        return f"{name} must be [rows, groups] or [ceil(rows / 128), ceil(groups / 4), 32, 4, 4], got {got}"
    for want, is_ in zip(wanted, shape, strict=True):
        if want is not None and is_ is not None and want != is_:
            return f"{name} must have shape {[w if w is not None else '?' for w in wanted]}, got {got}"
    return Groups(count, size, len(shape) != 2)
