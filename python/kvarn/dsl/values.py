# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values of a kernel: scalars and vectors known at run time, their conversions and operators.

A :class:`Value` is an SSA value and the dtype that gives it a sign. Python numbers stay Python numbers until they
meet a value, whose dtype they then take. Two values mix by these rules, the same for scalars and vectors:

- two float types never mix: the error says which cast to write. bf16 and f16 compute in their own precision;
  8-bit floats only convert;
- a float and an integer never mix;
- integers promote to the wider type when that is exact (i8 with i32, u32 with i64, bool with any); i32 with u32,
  or anything signed with u64, does not mix;
- ``/`` is for floats; ``//`` and ``%`` are for integers and round down as Python's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlir import ir

from kvarn.dialect import dtypes
from kvarn.dialect.dtypes import DType, bf16, bool_, f16, f32, i32, i64

from . import arithmetic as _a
from .builder import Lanes, emit_value, types

Number = (bool, int, float)


class Numeric:
    """What scalars and vectors share: the operators of Python.

    Attributes
    ----------
    ir : mlir.ir.Value
    dtype : DType
    lanes : int
        0 for a scalar.
    nonneg : bool
        Known not to be negative, which makes ``//`` and ``%`` cheap.
    """

    __slots__ = ()
    __array_priority__ = 1000  # NumPy scalars leave the operator to us
    ir: ir.Value
    dtype: DType
    lanes: int
    nonneg: bool

    def __add__(self, other: Any) -> Any:
        return _a.binary("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return _a.binary("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return _a.binary("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _a.binary("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return _a.binary("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _a.binary("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _a.quotient(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _a.quotient(other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _a.binary("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _a.binary("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return _a.binary("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _a.binary("%", other, self)

    def __divmod__(self, other: Any) -> Any:
        return _a.binary("//", self, other), _a.binary("%", self, other)

    def __and__(self, other: Any) -> Any:
        return _a.binary("&", self, other)

    def __rand__(self, other: Any) -> Any:
        return _a.binary("&", other, self)

    def __or__(self, other: Any) -> Any:
        return _a.binary("|", self, other)

    def __ror__(self, other: Any) -> Any:
        return _a.binary("|", other, self)

    def __xor__(self, other: Any) -> Any:
        return _a.binary("^", self, other)

    def __rxor__(self, other: Any) -> Any:
        return _a.binary("^", other, self)

    def __lshift__(self, other: Any) -> Any:
        return _a.binary("<<", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return _a.binary("<<", other, self)

    def __rshift__(self, other: Any) -> Any:
        return _a.binary(">>", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return _a.binary(">>", other, self)

    def __pow__(self, exponent: Any) -> Any:
        if not isinstance(exponent, int) or not 1 <= exponent <= 8:
            raise TypeError(
                f"** needs a Python int from 1 to 8 as exponent, got {exponent!r}: use kv.math.exp2 and log2"
            )
        result = self
        for _ in range(exponent - 1):
            result = result * self
        return result

    def __neg__(self) -> Any:
        return _a.negate(self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _a.absolute(self)

    def __invert__(self) -> Any:
        return _a.invert(self)

    def __eq__(self, other: Any) -> Any:
        return _a.compare("==", self, other)

    def __ne__(self, other: Any) -> Any:
        return _a.compare("!=", self, other)

    def __lt__(self, other: Any) -> Any:
        return _a.compare("<", self, other)

    def __le__(self, other: Any) -> Any:
        return _a.compare("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return _a.compare(">", self, other)

    def __ge__(self, other: Any) -> Any:
        return _a.compare(">=", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError(
            "a value of a kernel has no truth value while the kernel is traced; in a function without source text, "
            "or one called natively, use kv.if_, kv.while_ and kv.where (or mark the function with @kv.func)"
        )

    def __index__(self) -> int:
        raise TypeError(
            "an int known at compile time is needed here, got a value of the kernel: "
            "to index a Python list or size something, iterate with kv.static(range(...))"
        )

    def __int__(self) -> int:
        raise TypeError("a value of the kernel is not a Python int: use kv.i32(x)")

    def __float__(self) -> float:
        raise TypeError("a value of the kernel is not a Python float: use kv.f32(x), and kv.math for functions")

    def to(self, dtype: DType) -> Any:
        """This value converted to ``dtype``, as ``dtype(value)``."""
        return cast(self, dtype)


class Value(Numeric):
    """A scalar known at run time."""

    __slots__ = ("dtype", "ir", "nonneg")
    lanes = 0

    def __init__(self, value: ir.Value, dtype: DType, nonneg: bool = False) -> None:
        self.ir, self.dtype = value, dtype
        self.nonneg = nonneg or dtype.kind in "ub"

    def __repr__(self) -> str:
        return f"<{self.dtype.name} value>"


class Weak(Value):
    """A loop-carried variable that began as a Python number: it takes the dtype of the first value that needs another.

    ``retype`` has the loop traced again with that dtype; it returns when the number cannot have it.
    """

    __slots__ = ("retype",)

    def __init__(self, value: ir.Value, dtype: DType, nonneg: bool, retype: Callable[[DType], None]) -> None:
        super().__init__(value, dtype, nonneg)
        self.retype = retype


class Vector(Numeric):
    """A vector of a fixed number of lanes. ``v[i]`` reads a lane; in a kernel ``v[i] = x`` rebinds ``v``: vectors
    are values, other names for the old vector keep it."""

    __slots__ = ("dtype", "ir", "lanes", "nonneg")

    def __init__(self, value: ir.Value, dtype: DType, lanes: int, nonneg: bool = False) -> None:
        self.ir, self.dtype, self.lanes = value, dtype, lanes
        self.nonneg = nonneg or dtype.kind in "ub"

    def __len__(self) -> int:
        return self.lanes

    def __iter__(self) -> Iterator[Value]:
        return iter([self[i] for i in range(self.lanes)])

    def __setitem__(self, index: Any, value: Any) -> None:
        # In interpreted code the name gets a new vector; here there is no name.
        raise TypeError("a vector is a value: outside of a kernel's source write v = v.set(index, value)")

    def __getitem__(self, index: Any) -> Any:
        """Lane ``index``, or the vector of a slice with Python bounds."""
        if isinstance(index, slice):
            picked = range(self.lanes)[index]
            return from_lanes([self[i] for i in picked], self.dtype)
        position, operands = self._position(index)
        lane = emit_value("vector.extract", types().of(self.dtype), [self.ir, *operands], {"static_position": position})
        return Value(lane, self.dtype, self.nonneg)

    def set(self, index: Any, value: Any) -> Vector:
        """A copy with lane ``index`` replaced."""
        position, operands = self._position(index)
        value = _a.scalar_of(value, self.dtype)
        attributes = {"static_position": position}
        new = emit_value("vector.insert", types().of(self.dtype, self.lanes), [value, self.ir, *operands], attributes)
        return Vector(new, self.dtype, self.lanes)

    def _position(self, index: Any) -> tuple[ir.Attribute, list[ir.Value]]:
        if isinstance(index, int):
            if not -self.lanes <= index < self.lanes:
                raise IndexError(f"lane must be in [0, {self.lanes}), got {index}")
            return ir.DenseI64ArrayAttr.get([index % self.lanes]), []
        return ir.DenseI64ArrayAttr.get([ir.ShapedType.get_dynamic_size()]), [index_value(index)]

    def reduce(self, op: str = "add") -> Value:
        """All lanes folded with ``"add"``, ``"mul"``, ``"max"`` or ``"min"``, in a tree."""
        lanes = list(self)
        while len(lanes) > 1:
            pairs = [_a.fold(op, a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=False)]
            lanes = pairs + lanes[len(lanes) & ~1 :]
        return lanes[0]

    def __repr__(self) -> str:
        return f"<{self.lanes} x {self.dtype.name} vector>"


def wrap(value: ir.Value, dtype: DType, lanes: Lanes = 0, nonneg: bool = False) -> Any:
    """A Value or, with lanes, a Vector; with a shape, a Tile."""
    if isinstance(lanes, tuple):
        from .tiles import Tile

        return Tile(value, dtype, lanes, nonneg)
    return Vector(value, dtype, lanes, nonneg) if lanes else Value(value, dtype, nonneg)


def constant(value: Any, dtype: DType, lanes: Lanes = 0) -> Any:
    """A Python number as a runtime value of ``dtype``."""
    return wrap(_a.literal(value, dtype, lanes), dtype, lanes, nonneg=value >= 0)


def number_dtype(value: Any) -> DType:
    """The dtype that a Python number takes when nothing else decides: bool, i32 (i64 when it does not fit), f32."""
    if isinstance(value, bool):
        return bool_
    if isinstance(value, float):
        return f32
    return i32 if -(2**31) <= value < 2**31 else i64


def as_value(value: Any, dtype: DType | None = None, what: str = "the value") -> Any:
    """A runtime value: itself, or a Python number as a constant of ``dtype`` (default: :func:`number_dtype`).

    Raises
    ------
    TypeError
        For anything else, and for a runtime value of another dtype than ``dtype``.
    """
    if isinstance(value, Numeric):
        if dtype is not None and value.dtype is not dtype:
            raise TypeError(f"{what} must be {dtype.name}, got {value.dtype.name}: write {dtype!r}(...)")
        return value
    value = plain(value)
    if isinstance(value, Number):
        dtype = dtype or number_dtype(value)
        if isinstance(value, float) and not dtype.is_float:
            raise TypeError(f"{what} must be {dtype.name}, got the float {value}")
        return constant(value, dtype)
    raise TypeError(f"{what} must be a number or a value of the kernel, got {describe(value)}")


def plain(value: Any) -> Any:
    """A NumPy scalar as a Python number; anything else unchanged."""
    if type(value) in Number or isinstance(value, Numeric) or not hasattr(value, "item"):
        return value
    return value.item() if getattr(value, "ndim", None) == 0 else value


def i32_value(value: Any, what: str = "the index") -> ir.Value:
    """An i32 SSA value of an int or an integer value of at most 32 bits."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | Value):
        raise TypeError(f"{what} must be an integer, got {describe(value)}")
    if isinstance(value, int):
        return _a.literal(value, i32)
    if not value.dtype.is_integer:
        raise TypeError(f"{what} must be an integer, got a value of type {value.dtype.name}: write kv.i32(...)")
    if value.dtype.bits > 32:
        raise TypeError(f"{what} must be a 32-bit integer, got {value.dtype.name}: write kv.i32(...)")
    return value.ir if value.dtype.bits == 32 else cast(value, i32).ir


def index_value(value: Any, what: str = "the index") -> ir.Value:
    """An ``index`` SSA value of an int or an integer value."""
    value = plain(value)
    t = types()
    if isinstance(value, int) and not isinstance(value, bool):
        return emit_value("arith.constant", t.index, (), {"value": ir.IntegerAttr.get(t.index, value)})
    if not isinstance(value, Value) or not value.dtype.is_integer:
        got = f"a value of type {value.dtype.name}: write kv.i32(...)" if isinstance(value, Value) else describe(value)
        raise TypeError(f"{what} must be an integer, got {got}")
    op = "arith.index_castui" if value.dtype.kind == "u" else "arith.index_cast"
    return emit_value(op, t.index, [value.ir])


def describe(value: Any) -> str:
    """A short name of any Python or kernel value, for error messages."""
    if isinstance(value, Numeric):
        if isinstance(value.lanes, tuple):
            return f"a {value.dtype.name} tile of shape {value.lanes}"
        return f"a {value.dtype.name} {'vector' if value.lanes else 'value'}"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"a {type(value).__name__}"


# --- vectors -----------------------------------------------------------------------------------------


def vector(dtype: DType, lanes: Any, fill: Any = 0) -> Vector:
    """A vector of ``lanes`` lanes of ``fill``, or one made of the scalars in the sequence ``lanes``.

    ``kv.vector(kv.f32, 8)`` is eight zeros, ``kv.vector(kv.f32, [a, b])`` two lanes.
    """
    if isinstance(lanes, Sequence):
        return from_lanes(lanes, dtype)
    if not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"the number of lanes must be a positive int known at compile time, got {describe(lanes)}")
    if isinstance(fill, Numeric):
        return _a.broadcast(as_value(fill, dtype, "fill"), lanes)
    return constant(plain(fill), dtype, lanes)


def from_lanes(lanes: Sequence[Any], dtype: DType) -> Vector:
    """A vector of scalars."""
    if not lanes:
        raise ValueError("a vector needs at least one lane, got none")
    values = [as_value(x, dtype, "a lane").ir for x in lanes]
    result = types().of(dtype, len(values))
    return Vector(emit_value("vector.from_elements", result, values), dtype, len(values))


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``; both are evaluated. Scalars or vectors of one dtype."""
    if isinstance(condition, bool):
        return a if condition else b
    if not isinstance(condition, Numeric) or condition.dtype is not bool_:
        raise TypeError(f"kv.where needs a bool condition, got {describe(condition)}")
    x, y, dtype, lanes = _a.promote("kv.where", a, b, lanes=condition.lanes)
    if condition.lanes and condition.lanes != lanes:
        condition = _a.broadcast(condition, lanes)
    chosen = emit_value("arith.select", types().of(dtype, lanes), [condition.ir, x, y])
    return wrap(chosen, dtype, lanes, _a.is_nonneg(a) and _a.is_nonneg(b))


# --- conversions -------------------------------------------------------------------------------------


def cast(value: Any, dtype: DType) -> Any:
    """Convert to ``dtype``; what ``kv.f32(x)`` does.

    To a narrower integer: drops high bits. Float to integer: towards zero, undefined when it does not fit, except
    that 8-bit integers and 8-bit floats saturate. Integer to bool: whether it is not zero. Vectors go lane by lane.
    """
    value = plain(value)
    if not isinstance(value, Numeric):
        if not isinstance(value, Number):
            raise TypeError(f"{dtype!r}(...) needs a number or a value of the kernel, got {describe(value)}")
        if dtype is bool_:
            return constant(bool(value), dtype)
        return constant(value if dtype.is_float else _a.wrapped(int(value), dtype), dtype)
    source = value.dtype
    if source is dtype:
        return value
    fits = dtype.bits > source.bits or (dtype.bits == source.bits and source.kind == dtype.kind)
    return wrap(_convert(value, dtype), dtype, value.lanes, value.nonneg and dtype.is_integer and fits)


def _convert(value: Any, dtype: DType) -> ir.Value:
    source, result = value.dtype, types().of(dtype, value.lanes)
    if dtype is bool_:
        return _a.compare("!=", value, 0.0 if source.is_float else 0).ir
    if source.is_float and dtype.is_float:
        return _float_to_float(value, dtype, result)
    if source.is_float:
        return _float_to_int(value, dtype, result)
    if dtype.is_float:
        if dtype.bits == 8:
            return cast(cast(value, f32), dtype).ir
        return emit_value("arith.sitofp" if source.kind == "i" else "arith.uitofp", result, [value.ir])
    if source.bits == dtype.bits:  # the sign changes, the bits do not
        return value.ir
    if source.bits > dtype.bits:
        return emit_value("arith.trunci", result, [value.ir])
    return emit_value("arith.extsi" if source.kind == "i" else "arith.extui", result, [value.ir])


def _float_to_float(value: Any, dtype: DType, result: ir.Type) -> ir.Value:
    source = value.dtype
    if source.bits == 8 or dtype.bits == 8:
        from kvarn.dialect import ops

        return ops.cast(value.ir, dtype)
    if {source, dtype} == {bf16, f16}:
        return cast(cast(value, f32), dtype).ir
    return emit_value("arith.extf" if dtype.bits > source.bits else "arith.truncf", result, [value.ir])


def _float_to_int(value: Any, dtype: DType, result: ir.Type) -> ir.Value:
    if value.dtype.bits == 8:
        return cast(cast(value, f32), dtype).ir
    if dtype.bits == 8:
        from kvarn.dialect import ops

        if dtype.kind == "i":
            return ops.cast(value.ir, dtype)
        wide = _a.fold("min", _a.fold("max", cast(value, f32), 0.0), 255.0)  # u8 saturates too
        return emit_value("arith.fptoui", result, [wide.ir])
    return emit_value("arith.fptosi" if dtype.kind == "i" else "arith.fptoui", result, [value.ir])


def bitcast(value: Any, dtype: DType) -> Any:
    """The same bits as ``dtype``; lanes widen or narrow so that the total size stays.

    ``kv.bitcast(x, kv.f16)`` of a u32 gives two f16 lanes; of a vector of two bf16 with ``kv.u32``, one u32 scalar.
    """
    if not isinstance(value, Numeric):
        raise TypeError(f"kv.bitcast needs a value of the kernel, got {describe(value)}")
    if dtype is bool_ or value.dtype is bool_:
        raise TypeError("kv.bitcast does not take bool: write kv.i8(x)")
    bits = value.dtype.bits * max(value.lanes, 1)
    if bits % dtype.bits:
        raise ValueError(f"kv.bitcast must keep the size: {bits} bits are not whole lanes of {dtype.name}")
    lanes, t = bits // dtype.bits, types()
    out_lanes = lanes if lanes > 1 or value.lanes == 1 else 0
    if value.dtype.mlir == dtype.mlir:
        return wrap(value.ir, dtype, value.lanes)
    source = value.ir
    if value.lanes == 0 and out_lanes == 0:
        return Value(emit_value("arith.bitcast", t.of(dtype), [source]), dtype)
    if value.lanes == 0:
        source = emit_value("vector.from_elements", t.of(value.dtype, 1), [source])
    result = emit_value("vector.bitcast", t.of(dtype, lanes), [source])
    return Vector(result, dtype, out_lanes) if out_lanes else Vector(result, dtype, 1)[0]


DTYPES = {t.name: t for t in dtypes.ALL}
