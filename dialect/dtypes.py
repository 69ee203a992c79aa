# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Element types: one table for the dialect, the DSL, the caches and the loader.

Pure Python: importing this module imports neither MLIR nor a GPU library, so that a compiled artifact
can be bound to buffers where MLIR is not installed.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DType", "bf16", "bool_", "f8e4m3", "f8e5m2", "f8e8m0", "f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16",
    "u32", "u64",
]  # fmt: skip

PACKED_HELP = "this reads a cache's elements one by one, so convert to a cache of bf16 first (kv.ops.convert)"
OUTSIDE_KERNEL = "values of a kernel are made while a kernel is traced, or inside `with context:`"
_cast_in_kernel: Callable[[Any, DType], Any] | None = None  # the kernel language's, once it is imported


def casts_by(cast: Callable[[Any, DType], Any]) -> Callable[[Any, DType], Any]:
    """Declare what ``kv.f32(x)`` does inside a kernel; a decorator of the kernel language."""
    global _cast_in_kernel
    _cast_in_kernel = cast
    return cast


@dataclass(frozen=True, eq=False)
class DType:
    """An element type.

    Attributes
    ----------
    name : str
        The name in the Python API, such as ``"bf16"`` (``kv.bf16``).
    bits : int
        Width in bits; a bool takes 8 in memory.
    kind : str
        ``"f"`` float, ``"i"`` signed integer, ``"u"`` unsigned integer, ``"b"`` bool.
    mlir : str
        The MLIR type. MLIR integers carry no sign; ``kind`` keeps it.
    largest : float
        Largest finite value; the quantization formulas of the caches divide by it.
    table : tuple of float
        The numbers that the elements 0, 1, ... of a 4-bit type stand for; empty for other types.
    code : str
        The name of the code of a user's own elements (:func:`coded`); empty for other types.

    Calling a dtype casts a value inside a kernel: ``kv.f32(x)``.
    """

    name: str
    bits: int
    kind: str
    mlir: str
    largest: float
    table: tuple[float, ...] = ()
    code: str = ""

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, DType) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are the type itself: code compares types by identity."""
        return element_by_name, (self.name,)

    @property
    def itemsize(self) -> int:
        """Bytes that one element takes in memory; ValueError for elements that share a byte."""
        if self.packed:
            raise ValueError(f"an element of {self.name} is {self.bits} bits, and has no size in bytes: {PACKED_HELP}")
        return max(self.bits, 8) // 8

    @property
    def packed(self) -> bool:
        """Whether elements share bytes, as elements of 2 to 7 bits do."""
        return 1 < self.bits < 8

    @property
    def step(self) -> int:
        """The fewest elements that fill whole units of memory: 2 of 4 bits, 4 of 6 bits, 1 of whole bytes."""
        return 8 // math.gcd(8, self.bits) if self.packed else 1

    @property
    def step_units(self) -> int:
        """Units of memory that :attr:`step` elements take."""
        return self.step * self.bits // 8 if self.packed else 1

    @property
    def unit(self) -> DType:
        """The type of the units in memory: bytes for elements that share one, otherwise the type itself."""
        return u8 if self.packed else self

    def units(self, elements: Any) -> Any:
        """Units of memory that a number of elements takes, or the offset of an element; whole steps of packed ones."""
        return _times(elements // self.step, self.step_units) if self.packed else elements

    def elements(self, units: Any) -> Any:
        """The inverse of :meth:`units`."""
        return _times(units if self.step_units == 1 else units // self.step_units, self.step)

    def bytes_of(self, elements: Any) -> Any:
        """Bytes that a number of elements takes, or the byte offset of an element; whole steps of packed elements."""
        if not self.packed:
            return elements * self.itemsize
        return _times(elements >> (self.step.bit_length() - 1), self.step_units)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"

    @functools.cached_property
    def foreign(self) -> str:
        """The name of the type in NumPy, ml_dtypes, torch and CuPy: ``"float8_e4m3fn"``."""
        return next((name for name, of in _FOREIGN.items() if of is self), self.name)

    @functools.cached_property
    def numpy(self) -> Any:
        """The NumPy dtype; the small floats come from ml_dtypes."""
        import numpy as np

        try:
            return np.dtype(self.foreign)
        except TypeError:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.foreign))

    def __call__(self, value: Any) -> Any:
        """Cast ``value`` to this type inside a kernel."""
        if _cast_in_kernel is None:
            raise ValueError(OUTSIDE_KERNEL)
        return _cast_in_kernel(value, self)

    def __repr__(self) -> str:
        return f"kv.{self.name}"


def _times(x: Any, factor: int) -> Any:
    """A product, without one by 1: of ints, of arrays, and of values of a kernel."""
    return x if factor == 1 else x * factor


f64 = DType("f64", 64, "f", "f64", 1.7976931348623157e308)
f32 = DType("f32", 32, "f", "f32", 3.4028234663852886e38)
f16 = DType("f16", 16, "f", "f16", 65504.0)
bf16 = DType("bf16", 16, "f", "bf16", 3.3895313892515355e38)
f8e4m3 = DType("f8e4m3", 8, "f", "f8E4M3FN", 448.0)
f8e5m2 = DType("f8e5m2", 8, "f", "f8E5M2", 57344.0)
f8e8m0 = DType("f8e8m0", 8, "f", "f8E8M0FNU", 1.7014118346046923e38)
i8 = DType("i8", 8, "i", "i8", 127.0)
i16 = DType("i16", 16, "i", "i16", 32767.0)
i32 = DType("i32", 32, "i", "i32", 2147483647.0)
i64 = DType("i64", 64, "i", "i64", 9223372036854775807.0)
u8 = DType("u8", 8, "u", "i8", 255.0)
u16 = DType("u16", 16, "u", "i16", 65535.0)
u32 = DType("u32", 32, "u", "i32", 4294967295.0)
u64 = DType("u64", 64, "u", "i64", 18446744073709551615.0)
bool_ = DType("bool", 1, "b", "i1", 1.0)
# Of a cache's record only: no kernel has a value of a 4-bit type.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
u4 = DType("u4", 4, "u", "ui4", 15.0, tuple(float(n) for n in range(16)))
f4e2m1 = DType("f4e2m1", 4, "f", "f4E2M1FN", 6.0, _E2M1 + tuple(-x for x in _E2M1))

ALL = (f64, f32, f16, bf16, f8e4m3, f8e5m2, f8e8m0, i8, i16, i32, i64, u8, u16, u32, u64, bool_)
_BY_NAME = {t.name: t for t in ALL}
_BY_MLIR = {t.mlir: t for t in ALL if t.kind != "u"}
# Names that other libraries give the same types (the part after the last dot, as torch.bfloat16).
_FOREIGN = {
    "float64": f64, "float32": f32, "float16": f16, "bfloat16": bf16, "float8_e4m3fn": f8e4m3,
    "float8_e5m2": f8e5m2, "float8_e8m0fnu": f8e8m0, "int8": i8, "int16": i16, "int32": i32, "int64": i64,
    "uint8": u8, "uint16": u16, "uint32": u32, "uint64": u64, "double": f64, "float": f32, "half": f16,
}  # fmt: skip


def is_name(name: str) -> bool:
    """Whether a dtype has this name."""
    return name in _BY_NAME


def by_name(name: str) -> DType:
    """The dtype of a name such as ``"bf16"``."""
    if name not in _BY_NAME:
        raise ValueError(f"dtype must be one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name]


_PACKED = {u4.name: u4, f4e2m1.name: f4e2m1, "e2m1": f4e2m1}  # types of a cache's elements only, by their names
_CODEBOOK = "!kv.codebook<array<f32: "  # the beginning of a codebook's MLIR type
_codebooks: dict[tuple[float, ...], DType] = {}
_CODE = "!kv.code<"  # the beginning of the MLIR type of a user's own elements
_coded: dict[tuple[str, int, float], DType] = {}
CODED = 8  # elements of a user's own code that are read and written together


def codebook(numbers: Iterable[float]) -> DType:
    """The type of 4-bit elements that stand for 16 ascending numbers, which are rounded to f16."""
    given = tuple(numbers)
    try:
        table = tuple(struct.unpack("<e", struct.pack("<e", x))[0] for x in given)
    except (OverflowError, struct.error):
        table = ()
    if len(table) != 16 or any(not a < b for a, b in itertools.pairwise(table)) or not all(map(math.isfinite, table)):
        raise ValueError(f"a codebook must have 16 ascending numbers that f16 tells apart, got {given}")
    if table not in _codebooks:  # one object per type: code compares types by identity
        text = ", ".join(map(repr, table))
        largest = max(abs(x) for x in table)
        _codebooks[table] = DType(f"codebook[{text}]", 4, "f", f"{_CODEBOOK}{text}>>", largest, table)
    return _codebooks[table]


def coded(name: str, bits: int, largest: float) -> DType:
    """The type of elements of a user's own code (``kv.Code``), which are packed by eight into ``bits`` bytes."""
    key = name, bits, float(largest)
    if not 2 <= bits <= 7 or not 0 < key[2] < math.inf:
        raise ValueError(f"a code must have 2 to 7 bits and a positive largest number, got {bits} and {largest}")
    if key not in _coded:
        text = f"{name}, {bits}, {key[2]!r}"
        mlir = f'{_CODE}"{name}", {bits} : i64, "{key[2]!r}">'
        _coded[key] = DType(f"code[{text}]", bits, "f", mlir, key[2], code=name)
    return _coded[key]


def bounds(dtype: DType) -> tuple[list[float], bool]:
    """How a number is rounded to the 4-bit elements of a table: by the count of bounds that are not above it.

    Returns
    -------
    tuple
        Ascending bounds, exact in f32; and whether they are those of magnitudes, to which bit 3 adds a sign. A number
        halfway between two elements becomes that of the even code, and of a codebook the greater one.
    """
    signed = dtype is f4e2m1
    table = dtype.table[:8] if signed else dtype.table
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    if not signed:
        return middles, False
    # Above an even code, a tie is not above the bound: the bound is the next f32.
    return [x if code % 2 else x * (1 + 2.0**-23) for code, x in enumerate(middles)], True


def stored(dtype: Any) -> DType:
    """The dtype of a record's elements, in any form of :func:`of`, a 4-bit type's name, or a codebook's numbers."""
    if isinstance(dtype, (list, tuple)):
        return codebook(dtype)
    if isinstance(own := getattr(dtype, "coded", None), DType):  # of a Code
        return own
    return _PACKED[dtype] if isinstance(dtype, str) and dtype in _PACKED else of(dtype)


def stored_by_mlir(text: str) -> DType:
    """The dtype of a record's elements, given as the text of an MLIR type."""
    if text.startswith(_CODEBOOK):
        return codebook(float(x) for x in text[len(_CODEBOOK) :].removesuffix(">>").split(","))
    if text.startswith(_CODE):
        name, bits, largest = text[len(_CODE) :].removesuffix(">").split(", ")
        return coded(name.strip('"'), int(bits.removesuffix(" : i64")), float(largest.strip('"')))
    return next((t for t in _PACKED.values() if t.mlir == text), None) or by_mlir(text)


def element_by_name(name: str) -> DType:
    """The dtype of a record's elements, by its name."""
    if name.startswith("codebook["):
        return codebook(float(x) for x in name[len("codebook[") : -1].split(","))
    if name.startswith("code["):
        of, bits, largest = name[len("code[") : -1].split(", ")
        return coded(of, int(bits), float(largest))
    return _PACKED.get(name) or by_name(name)


def by_mlir(text: str) -> DType:
    """The (signed, for integers) dtype of an MLIR scalar type, given as text."""
    if text not in _BY_MLIR:
        raise ValueError(f"element type must be one of {', '.join(_BY_MLIR)}, got {text}")
    return _BY_MLIR[text]


def of(dtype: Any) -> DType:
    """The kvarn dtype of a kvarn, NumPy, ml_dtypes or torch dtype, or of a name."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    text = str(dtype) if not isinstance(dtype, type) else dtype.__name__
    text = text.rpartition(".")[2]
    if text == "bool":
        return bool_
    if text in _FOREIGN:
        return _FOREIGN[text]
    try:
        import numpy as np

        return _FOREIGN[np.dtype(dtype).name]
    except (KeyError, TypeError):
        raise TypeError(
            f"dtype must be one of {', '.join(_BY_NAME)} or its NumPy or torch equal, got {dtype!r}"
        ) from None
