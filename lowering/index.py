# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Index arithmetic for lowerings: non-negative integers with Python's operators.

``Ix`` wraps an i32 or i64 value and folds constants, so that the formulas of ``dialect.layout`` can be written once and
give short code. Operands are non-negative by the dialect's contracts: division and remainder are unsigned, and shifts
and masks for powers of two. Mixed widths are extended to 64 bits.
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def const(value: int, bits: int = 32) -> ir.Value:
    """An integer constant."""
    return arith.constant(ir.IntegerType.get_signless(bits), value)


def as_index(value: ir.Value) -> ir.Value:
    """An integer as MLIR's index."""
    return arith.index_cast(ir.IndexType.get(), value)


class Ix:
    """A 32-bit or 64-bit MLIR value as an index (see the module)."""

    __slots__ = ("bits", "value")

    def __init__(self, value: ir.Value):
        self.value = value
        self.bits = ir.IntegerType(value.type).width

    @property
    def wide(self) -> Ix:
        """The same index in 64 bits."""
        return self if self.bits == 64 else Ix(arith.extui(i64(), self.value))

    def _pair(self, other: Any) -> tuple[ir.Value, ir.Value]:
        if isinstance(other, int):
            return self.value, const(other, self.bits)
        if self.bits == other.bits:
            return self.value, other.value
        return self.wide.value, other.wide.value

    def __add__(self, other: Any) -> Ix:
        return self if isinstance(other, int) and other == 0 else Ix(arith.addi(*self._pair(other)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Ix:
        return self if isinstance(other, int) and other == 0 else Ix(arith.subi(*self._pair(other)))

    def __mul__(self, other: Any) -> Ix:
        if isinstance(other, int):
            if other == 1:
                return self
            if other > 0 and other & (other - 1) == 0:
                return Ix(arith.shli(self.value, const(other.bit_length() - 1, self.bits)))
        return Ix(arith.muli(*self._pair(other)))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Ix:
        if isinstance(other, int):
            if other == 1:
                return self
            if other & (other - 1) == 0:
                return Ix(arith.shrui(self.value, const(other.bit_length() - 1, self.bits)))
        return Ix(arith.divui(*self._pair(other)))

    def __mod__(self, other: Any) -> Ix:
        if isinstance(other, int):
            if other == 1:
                return Ix(const(0, self.bits))
            if other & (other - 1) == 0:
                return Ix(arith.andi(self.value, const(other - 1, self.bits)))
        return Ix(arith.remui(*self._pair(other)))

    def __rshift__(self, bits: int) -> Ix:
        return self // (1 << bits)

    def __lshift__(self, bits: int) -> Ix:
        return self * (1 << bits)

    def __and__(self, other: Any) -> Ix:
        return Ix(arith.andi(*self._pair(other)))

    def __xor__(self, other: Any) -> Ix:
        return Ix(arith.xori(*self._pair(other)))

    __rand__, __rxor__ = __and__, __xor__

    def below(self, other: Any) -> ir.Value:
        """self < other, unsigned, i1."""
        return arith.cmpi(arith.CmpIPredicate.ult, *self._pair(other))

    def least(self, other: Any) -> Ix:
        return Ix(arith.minui(*self._pair(other)))

    def greatest(self, other: Any) -> Ix:
        return Ix(arith.maxui(*self._pair(other)))


def pointer(space: int = 1) -> ir.Type:
    """``!llvm.ptr`` of an address space: 1 device memory, 3 shared."""
    return ir.Type.parse(f"!llvm.ptr<{space}>")


def offset(base: ir.Value, index: Ix, element: ir.Type) -> ir.Value:
    """The address ``index`` elements after ``base``."""
    dynamic = ir.DenseI32ArrayAttr.get([-2147483648])
    return llvm.getelementptr(base.type, base, [index.value], dynamic, element, None)


def load(address: ir.Value, type_: ir.Type, alignment: int, invariant: bool = False) -> ir.Value:
    """``llvm.load``; an invariant load uses the read-only path."""
    return llvm.load(type_, address, alignment=alignment, invariant=invariant or None)


def store(value: ir.Value, address: ir.Value, alignment: int) -> None:
    llvm.store(value, address, alignment=alignment)
