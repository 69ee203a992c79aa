# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values of a kernel: scalars and vectors known at run time, their conversions and operators.

A :class:`Value` is an SSA value with a dtype, which gives an integer its sign. A Python number stays one until it
meets a value, whose dtype it then takes. Two values, scalars or vectors, mix by these rules:

- two float types never mix: the error says which cast to write. bf16 and f16 compute in their own precision;
  8-bit floats only convert;
- a float and an integer never mix;
- integers promote to the wider type when that is exact (i8 with i32, u32 with i64, bool with any); i32 with u32,
  or anything signed with u64, does not mix;
- ``/`` is for floats; ``//`` and ``%`` are for integers and round down as Python's do.

An operator promotes its operands, then builds one arith op or a short sequence. Float ``+``, ``-`` and ``*`` allow
contraction into fused multiply-adds, as GPU compilers do. Integers wrap around. Division by a positive power of two
becomes a shift, and division of operands known to be non-negative an unsigned division.

Integer results are the same on every target, namely NumPy's: ``x // 0`` and ``x % 0`` are 0, the least number
``// -1`` is itself and ``% -1`` is 0, and a shift by a negative count or by at least the type's width shifts every bit
out. The selects that these cases need are omitted where intervals (``intervals.py``) exclude them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from mlir import ir

from kvarn.dialect import dtypes, ops
from kvarn.dialect.dtypes import DType, bf16, bool_, f16, f32, i32, i64

from . import intervals
from .builder import Lanes, OfTrace, emit_value, state, types
from .intervals import Interval

__all__ = ["Value", "Vector", "bitcast", "cast", "from_lanes", "vector", "where"]

Number = (bool, int, float)
DTYPES = {t.name: t for t in dtypes.ALL}

# operator: (float op, signed op, unsigned op); None: chosen by ``binary``, or refused.
_OPS: dict[str, tuple[str | None, str | None, str | None]] = {
    "+": ("arith.addf", "arith.addi", "arith.addi"),
    "-": ("arith.subf", "arith.subi", "arith.subi"),
    "*": ("arith.mulf", "arith.muli", "arith.muli"),
    "/": ("arith.divf", None, None),
    "//": (None, "arith.floordivsi", "arith.divui"),
    "%": (None, "arith.remsi", "arith.remui"),
    "&": (None, "arith.andi", "arith.andi"),
    "|": (None, "arith.ori", "arith.ori"),
    "^": (None, "arith.xori", "arith.xori"),
    "<<": (None, "arith.shli", "arith.shli"),
    ">>": (None, "arith.shrsi", "arith.shrui"),
    "max": ("arith.maxnumf", "arith.maxsi", "arith.maxui"),
    "min": ("arith.minnumf", "arith.minsi", "arith.minui"),
}
_CONTRACT = ("+", "-", "*")
_BITWISE = ("&", "|", "^")
# Operators with one op for both signs: (integer op, float op).
_PLAIN = {op: (_OPS[op][1] or "", _OPS[op][0] or "") for op in ("+", "-", "*", "&", "|", "^")}
# Predicates of arith.cmpf (ordered, except une) and arith.cmpi.
_CMPF = {"==": 1, ">": 2, ">=": 3, "<": 4, "<=": 5, "!=": 13}
_CMPI = {"==": 0, "!=": 1, "<": 2, "<=": 3, ">": 4, ">=": 5}
_UNSIGNED_OF = {t: DTYPES[f"u{t.bits}"] for t in dtypes.ALL if t.is_integer}
_UNSIGNED = 4  # difference of cmpi's unsigned and signed ordering predicates


_Method = Callable[[Any, Any], Any]


def _operator(op: str) -> tuple[_Method, _Method]:
    """The methods of a Python operator: for a value on its left, and for a value on its right."""
    return lambda self, other: binary(op, self, other), lambda self, other: binary(op, other, self)


def _comparison(op: str) -> _Method:
    return lambda self, other: compare(op, self, other)


class Numeric(OfTrace):
    """Python's operators, for scalars, vectors and tiles.

    Attributes
    ----------
    ir : mlir.ir.Value
    dtype : DType
    lanes : int
        0 for a scalar.
    bounds : (int, int)
        For integers, the least and the largest possible number.
    """

    __slots__ = ()
    __array_priority__ = 1000  # NumPy scalars defer to these operators
    dtype: DType
    lanes: int
    bounds: Interval
    of_shape: ClassVar[Callable[..., Any]]  # builds a value whose lanes are a shape; set by tiles.py

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __floordiv__, __rfloordiv__ = _operator("//")
    __mod__, __rmod__ = _operator("%")
    __and__, __rand__ = _operator("&")
    __or__, __ror__ = _operator("|")
    __xor__, __rxor__ = _operator("^")
    __lshift__, __rlshift__ = _operator("<<")
    __rshift__, __rrshift__ = _operator(">>")
    __eq__, __ne__ = _comparison("=="), _comparison("!=")
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    __hash__ = None  # type: ignore[assignment]

    @property
    def nonneg(self) -> bool:
        """Whether it is known to be non-negative, which makes ``//`` and ``%`` cheap."""
        return self.bounds[0] >= 0 and not self.dtype.is_float

    def __truediv__(self, other: Any) -> Any:
        return quotient(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return quotient(other, self)

    def __divmod__(self, other: Any) -> Any:
        return binary("//", self, other), binary("%", self, other)

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
        return negate(self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return absolute(self)

    def __invert__(self) -> Any:
        return invert(self)

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
        """This value converted to ``dtype``, like ``dtype(value)``."""
        return cast(self, dtype)


class Value(Numeric):
    """A scalar known at run time."""

    __slots__ = ("bounds", "dtype")
    lanes = 0

    def __init__(self, value: ir.Value, dtype: DType, nonneg: bool = False, bounds: Interval | None = None) -> None:
        self.ir, self.dtype = value, dtype
        self.bounds = bounds or _bounds(dtype, nonneg)

    def __repr__(self) -> str:
        return f"<{self.dtype.name} value>"


class Weak(Value):
    """A loop variable that started as a Python number: it adopts the dtype of the first value that needs another.

    ``retype`` raises to have the loop traced again with that dtype; it returns if the number cannot have the dtype.
    """

    __slots__ = ("retype",)

    def __init__(
        self, value: ir.Value, dtype: DType, retype: Callable[[DType], None], bounds: Interval | None = None
    ) -> None:
        super().__init__(value, dtype, bounds=bounds)
        self.retype = retype


class Vector(Numeric):
    """A vector of a fixed number of lanes. ``v[i]`` reads a lane; in a kernel ``v[i] = x`` rebinds ``v``.

    Vectors are values: other names keep the old vector.
    """

    __slots__ = ("bounds", "dtype", "lanes")

    def __init__(self, value: ir.Value, dtype: DType, lanes: int, bounds: Interval | None = None) -> None:
        self.ir, self.dtype, self.lanes = value, dtype, lanes
        self.bounds = bounds or _bounds(dtype)

    def __len__(self) -> int:
        return self.lanes

    def __iter__(self) -> Iterator[Value]:
        return iter([self[i] for i in range(self.lanes)])

    def __setitem__(self, index: Any, value: Any) -> None:
        # Interpreted code rebinds the name to a new vector; here the name is unknown.
        raise TypeError("a vector is a value: outside of a kernel's source write v = v.set(index, value)")

    def __getitem__(self, index: Any) -> Any:
        """Lane ``index``, or the vector of a slice with Python bounds."""
        if isinstance(index, slice):
            picked = range(self.lanes)[index]
            return from_lanes([self[i] for i in picked], self.dtype)
        position, operands = self._position(index)
        lane = emit_value("vector.extract", types().of(self.dtype), [self.ir, *operands], {"static_position": position})
        return Value(lane, self.dtype, bounds=self.bounds)

    def set(self, index: Any, value: Any) -> Vector:
        """A copy with lane ``index`` replaced."""
        position, operands = self._position(index)
        value = scalar_of(value, self.dtype)
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
        """Reduce all lanes by ``"add"``, ``"mul"``, ``"max"`` or ``"min"``, as a tree."""
        lanes = list(self)
        while len(lanes) > 1:
            pairs = [fold(op, a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=False)]
            lanes = pairs + lanes[len(lanes) & ~1 :]
        return lanes[0]

    def __repr__(self) -> str:
        return f"<{self.lanes} x {self.dtype.name} vector>"


def _bounds(dtype: DType, nonneg: bool = False) -> Interval:
    """All numbers of a type, or its non-negative numbers."""
    low, high = intervals.of_dtype(dtype)
    return (0 if nonneg else low), high


def wrap(value: ir.Value, dtype: DType, lanes: Lanes = 0, bounds: Interval | None = None) -> Any:
    """A Value; with lanes, a Vector; with a shape, a Tile."""
    if isinstance(lanes, tuple):
        return Numeric.of_shape(value, dtype, lanes, bounds)
    return Vector(value, dtype, lanes, bounds) if lanes else Value(value, dtype, bounds=bounds)


def constant(value: Any, dtype: DType, lanes: Lanes = 0) -> Any:
    """A Python number as a run-time value of ``dtype``."""
    return wrap(literal(value, dtype, lanes), dtype, lanes, bounds_of(value, dtype))


def number_dtype(value: Any) -> DType:
    """The default dtype of a Python number: bool, i32 (i64 if it does not fit), f32."""
    if isinstance(value, bool):
        return bool_
    if isinstance(value, float):
        return f32
    return i32 if -(2**31) <= value < 2**31 else i64


def as_value(value: Any, dtype: DType | None = None, what: str = "the value") -> Any:
    """A run-time value: ``value``, or a Python number as a constant of ``dtype`` (default: :func:`number_dtype`).

    Raises
    ------
    TypeError
        For any other object, and for a run-time value of a dtype other than ``dtype``.
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
    """An i32 SSA value from an int or an integer value of at most 32 bits."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | Value):
        raise TypeError(f"{what} must be an integer, got {describe(value)}")
    if isinstance(value, int):
        return literal(value, i32)
    if not value.dtype.is_integer:
        raise TypeError(f"{what} must be an integer, got a value of type {value.dtype.name}: write kv.i32(...)")
    if value.dtype.bits > 32:
        raise TypeError(f"{what} must be a 32-bit integer, got {value.dtype.name}: write kv.i32(...)")
    return value.ir if value.dtype.bits == 32 else cast(value, i32).ir


def index_value(value: Any, what: str = "the index") -> ir.Value:
    """An ``index`` SSA value from an int or an integer value."""
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
    """A short description of any Python or kernel value, for error messages."""
    if isinstance(value, Numeric):
        if isinstance(value.lanes, tuple):
            return f"a {value.dtype.name} tile of shape {value.lanes}"
        return f"a {value.dtype.name} {'vector' if value.lanes else 'value'}"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"a {type(value).__name__}"


# --- vectors -----------------------------------------------------------------------------------------


def vector(dtype: DType, lanes: Any, fill: Any = 0) -> Vector:
    """A vector of ``lanes`` lanes filled with ``fill``, or a vector of the scalars in the sequence ``lanes``.

    ``kv.vector(kv.f32, 8)`` is eight zeros, ``kv.vector(kv.f32, [a, b])`` two lanes.
    """
    if isinstance(lanes, Sequence):
        return from_lanes(lanes, dtype)
    if not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"the number of lanes must be a positive int known at compile time, got {describe(lanes)}")
    if isinstance(fill, Numeric):
        return broadcast(as_value(fill, dtype, "fill"), lanes)
    return constant(plain(fill), dtype, lanes)


def from_lanes(lanes: Sequence[Any], dtype: DType) -> Vector:
    """A vector of scalars."""
    if not lanes:
        raise ValueError("a vector needs at least one lane, got none")
    values = [as_value(x, dtype, "a lane").ir for x in lanes]
    result = types().of(dtype, len(values))
    return Vector(emit_value("vector.from_elements", result, values), dtype, len(values))


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition is true, else ``b``; both are evaluated. Scalars, vectors or tiles of one dtype."""
    if isinstance(condition, bool):
        return a if condition else b
    if not isinstance(condition, Numeric) or condition.dtype is not bool_:
        raise TypeError(f"kv.where needs a bool condition, got {describe(condition)}")
    x, y, dtype, lanes = promote("kv.where", a, b, lanes=condition.lanes)
    if condition.lanes and condition.lanes != lanes:
        condition = broadcast(condition, lanes)
    chosen = emit_value("arith.select", types().of(dtype, lanes), [condition.ir, x, y])
    return wrap(chosen, dtype, lanes, intervals.either(bounds_of(a, dtype), bounds_of(b, dtype)))


# --- arithmetic ------------------------------------------------------------------------------------

_instead: list[Mapping[str, Callable[..., Any]]] = []


@contextmanager
def computed_by(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A context that replaces functions of ``kv.math`` (and ``"divide"``, for ``/``) on f32 scalars."""
    _instead.append(functions)
    try:
        yield
    finally:
        _instead.pop()


def replaced(name: str) -> Callable[..., Any] | None:
    """The replacement of a function in this context; None if there is none."""
    return _instead[-1].get(name) if _instead else None


def quotient(a: Any, b: Any) -> Any:
    """``a / b``; where division is replaced, a product with the reciprocal of a constant."""
    divide, by_number = replaced("divide"), isinstance(b, (int, float))
    if divide is None or not (_is_f32(a) or isinstance(a, (int, float))) or not ((by_number and b) or _is_f32(b)):
        return binary("/", a, b)
    if by_number:
        return a * (1.0 / b)
    with computed_by({}):
        return divide(a, b)


def _is_f32(x: Any) -> bool:
    return isinstance(x, Value) and x.dtype is f32


def wrapped(value: int, dtype: DType) -> int:
    """An int wrapped to the range of an integer type, as by a cast."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "i" and value >> (dtype.bits - 1) else value


def literal(value: Any, dtype: DType, lanes: Lanes = 0, bits: bool = False) -> ir.Value:
    """A constant from a Python number; with ``bits`` an integer may be any bit pattern of the type's width."""
    t = types()
    element = t.of(dtype)
    if dtype.is_float:
        if isinstance(value, int) and value.bit_length() > 1024:
            raise ValueError(f"{_shown(value)} does not fit in {dtype.name}")
        attribute = (
            ir.FloatAttr.get(element, float(value)) if dtype.bits > 8 else _small_float(float(value), dtype, element)
        )
    else:
        if isinstance(value, float):
            raise TypeError(f"the float {value} does not mix with {dtype.name}: convert the value, as kv.f32(x)")
        if dtype is bool_:
            attribute = ir.IntegerAttr.get(element, int(bool(value)))
        else:
            low = -(1 << (dtype.bits - 1)) if dtype.kind == "i" else 0
            high = (1 << dtype.bits) - 1 if dtype.kind == "u" or bits else (1 << (dtype.bits - 1)) - 1
            if not low <= value <= high:
                raise ValueError(
                    f"{_shown(value)} does not fit in {dtype.name}: cast the other operand to a wider type"
                )
            pattern = wrapped(value, dtype) if value > 0 and bits else value
            attribute = ir.IntegerAttr.get(element, _signed(pattern, dtype))
    result = element
    if lanes:
        result = t.of(dtype, lanes)
        attribute = ir.DenseElementsAttr.get_splat(result, attribute)
    return emit_value("arith.constant", result, (), {"value": attribute})


def _shown(value: int) -> str:
    """A number for a message; Python refuses to print very large ones."""
    bits = int(value).bit_length()
    return str(value) if bits <= 256 else f"an integer of {bits} bits"


def _signed(value: int, dtype: DType) -> int:
    """The signed int of the same bits, as attributes of signless integers print it."""
    return value - (1 << dtype.bits) if value >> (dtype.bits - 1) == 1 else value


def _small_float(value: float, dtype: DType, element: ir.Type) -> ir.Attribute:
    """An 8-bit float constant, rounded to nearest even and saturated like a cast."""
    if value == value:
        value = max(-dtype.largest, min(dtype.largest, value))
    return ir.FloatAttr.get(element, value)


def mismatch(what: str, a: DType, b: DType) -> TypeError:
    """The error for two dtypes that do not mix."""
    if a.is_float and b.is_float:
        wide, narrow = (a, b) if a.bits >= b.bits else (b, a)
        if wide.bits == narrow.bits:
            return TypeError(f"{what} of {a.name} and {b.name}: float types do not mix, cast both, as kv.f32(x)")
        return TypeError(
            f"{what} of {a.name} and {b.name}: float types do not mix, write {wide!r}(x) around the {narrow.name}"
        )
    if a.is_float or b.is_float:
        real, integer = (a, b) if a.is_float else (b, a)
        return TypeError(f"{what} of {a.name} and {b.name}: write {real!r}(x) around the {integer.name}")
    return TypeError(
        f"{what} of {a.name} and {b.name}: signs do not mix, write {a!r}(x) or {b!r}(x) around one of them"
    )


def common_dtype(what: str, a: DType, b: DType) -> DType:
    """The dtype that two dtypes promote to; TypeError if they do not mix."""
    if a is b:
        return a
    if a.is_float or b.is_float:
        raise mismatch(what, a, b)
    if a is bool_ or b is bool_:
        return b if a is bool_ else a
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.bits > unsigned.bits:
        return signed
    raise mismatch(what, a, b)


def _mixed(what: str, a: Numeric, b: Numeric) -> DType:
    """The common dtype of two values; a loop variable that started as a Python number adapts first."""
    try:
        found = common_dtype(what, a.dtype, b.dtype)
    except TypeError:
        for x, other in ((a, b), (b, a)):
            if isinstance(x, Weak):
                x.retype(other.dtype)
        raise
    for x in (a, b):
        if isinstance(x, Weak) and x.dtype is not found:
            x.retype(found)
    return found


def _checked(what: str, value: Any) -> Any:
    value = plain(value)
    if not isinstance(value, (Numeric, bool, int, float)):
        raise TypeError(f"{what} needs numbers or values of the kernel, got {describe(value)}")
    return value


def promote(what: str, a: Any, b: Any, lanes: Lanes = 0, bits: bool = False) -> tuple[ir.Value, ir.Value, DType, Lanes]:
    """Both operands as SSA values of one dtype and one number of lanes."""
    a, b = _checked(what, a), _checked(what, b)
    left, right = isinstance(a, Numeric), isinstance(b, Numeric)
    if left and right:
        dtype = a.dtype if a.dtype is b.dtype else _mixed(what, a, b)
    elif left or right:
        dtype = a.dtype if left else b.dtype
        number = b if left else a
        if dtype is bool_ and not isinstance(number, bool):
            dtype = number_dtype(number)
        if isinstance(number, float) and not dtype.is_float:
            raise TypeError(f"{what} of {dtype.name} and the float {number}: write kv.f32(x) around the {dtype.name}")
    else:
        dtype = number_dtype(a if isinstance(a, float) else b)
    for x in (a, b):
        n = x.lanes if isinstance(x, Numeric) else 0
        if isinstance(n, tuple) or isinstance(lanes, tuple):
            lanes = joined(what, lanes, n)
            continue
        if n and lanes and n != lanes:
            raise TypeError(f"{what} of vectors of {lanes} and {n} lanes: the lanes must match")
        lanes = lanes or n
    return _operand(a, dtype, lanes, bits), _operand(b, dtype, lanes, bits), dtype, lanes


def _operand(x: Any, dtype: DType, lanes: Lanes, bits: bool) -> ir.Value:
    if not isinstance(x, Numeric):
        return literal(x, dtype, lanes, bits)
    if x.dtype is not dtype:
        x = cast(x, dtype)
    return broadcast(x, lanes).ir if lanes and x.lanes != lanes else x.ir


def scalar_of(x: Any, dtype: DType) -> ir.Value:
    """A scalar of ``dtype`` from a number or a value that promotes to it."""
    return as_value(x, dtype).ir


def broadcast(x: Any, lanes: Lanes) -> Any:
    """A vector with the scalar ``x`` in all lanes; for a shape, a tile from the scalar or tile ``x``."""
    if isinstance(lanes, tuple):
        return stretched(x, lanes)
    return Vector(emit_value("vector.broadcast", types().of(x.dtype, lanes), [x.ir]), x.dtype, lanes, x.bounds)


def is_nonneg(x: Any) -> bool:
    return x.nonneg if isinstance(x, Numeric) else x >= 0


def bounds_of(x: Any, dtype: DType) -> Interval:
    """The least and largest value of an operand as an integer of a type that it promotes to."""
    if isinstance(x, Numeric):
        return x.bounds
    if dtype.is_float:
        return 0, 0
    value = wrapped(int(x), dtype) if dtype is not bool_ else int(bool(x))
    return value, value


def _computes(what: str, dtype: DType) -> None:
    if dtype.is_float and dtype.bits == 8:
        raise TypeError(f"{what} on {dtype.name}: 8-bit floats only convert, write kv.f32(x) first")


def binary(op: str, a: Any, b: Any) -> Any:
    """``a op b``, for Python operators and ``"max"``, ``"min"``."""
    if type(a) is Value and type(b) is Value and a.dtype is b.dtype and op in _PLAIN:  # no promotion needed
        dtype = a.dtype
        if dtype.kind == "i" or dtype.kind == "u":
            bounds = intervals.after(op, a.bounds, b.bounds, dtype)
            made = emit_value(
                _PLAIN[op][0], a.ir.type, (a.ir, b.ir), _marked(bounds) if state.asking and op == "*" else None
            )
            return Value(made, dtype, bounds=bounds)
        if dtype.kind == "f" and dtype.bits > 8 and op not in _BITWISE:
            attributes = {"fastmath": types().attribute("#arith.fastmath<contract>")}
            return Value(emit_value(_PLAIN[op][1], a.ir.type, (a.ir, b.ir), attributes), dtype)
    for x in (a, b):  # pointers, buffers and the like define their own operators
        if not isinstance(plain(x), (Numeric, bool, int, float)):
            return NotImplemented
    if op in ("<<", ">>"):
        return _shift(op, a, b)
    x, y, dtype, lanes = promote(op, a, b, bits=op in _BITWISE)
    _computes(op, dtype)
    if dtype is bool_ and op not in _BITWISE:
        raise TypeError(f"{op} of two bools: write kv.i32(x) first")
    name = _OPS[op][0 if dtype.is_float else 1 if dtype.kind == "i" else 2]
    if name is None:
        hint = {"/": "use // for integers, or kv.f32(x)"}.get(op, "it is for integers")
        raise TypeError(f"{op} does not take {dtype.name}: {hint}")
    if op in ("//", "%"):
        return _divide(op, a, b, x, y, dtype, lanes)
    attributes = (
        {"fastmath": types().attribute("#arith.fastmath<contract>")} if dtype.is_float and op in _CONTRACT else None
    )
    bounds = None if dtype.is_float else intervals.after(op, bounds_of(a, dtype), bounds_of(b, dtype), dtype)
    if bounds is not None and not lanes and op == "*" and state.asking:
        attributes = _marked(bounds)
    result = emit_value(name, types().of(dtype, lanes), [x, y], attributes)
    for one, other in ((a, b), (b, a)):  # a loop variable and a number: the variable may still change its dtype
        if isinstance(one, Weak) and not isinstance(other, Numeric) and dtype is one.dtype:
            return Weak(result, dtype, one.retype, bounds)
    return wrap(result, dtype, lanes, bounds)


def _marked(bounds: Interval) -> dict[str, ir.Attribute] | None:
    """The mark of a product in a user's function, which may be any number; passes take other products for positions."""
    far = max(-bounds[0], bounds[1]) > intervals.POSITIONS[1] + intervals.SMALL
    return {intervals.ANY: types().unit} if far else None


def rounded_product(a: Any, b: Any) -> Any:
    """``a * b`` of floats, rounded before it is added to anything: never contracted into a fused multiply-add."""
    if not isinstance(a, Numeric) and not isinstance(b, Numeric):
        return a * b
    x, y, dtype, lanes = promote("*", a, b)
    return wrap(emit_value("arith.mulf", types().of(dtype, lanes), [x, y]), dtype, lanes)


def _divide(op: str, a: Any, b: Any, x: ir.Value, y: ir.Value, dtype: DType, lanes: Lanes) -> Any:
    """// and %, rounding down; arith's slow general form is avoided where possible."""
    result, b = types().of(dtype, lanes), plain(b)
    of_a, of_b = bounds_of(a, dtype), bounds_of(b, dtype)
    bounds = intervals.after(op, of_a, of_b, dtype)

    def made(name: str, *operands: ir.Value) -> ir.Value:
        return emit_value(name, result, operands)

    if isinstance(b, int):
        if b == 0:
            raise ZeroDivisionError(f"{op} by zero")
        if b > 0 and b & (b - 1) == 0:
            if op == "%":
                return wrap(made("arith.andi", x, literal(b - 1, dtype, lanes)), dtype, lanes, bounds)
            if b == 1:
                return wrap(x, dtype, lanes, bounds)
            name = "arith.shrui" if of_a[0] >= 0 else "arith.shrsi"
            return wrap(made(name, x, literal(b.bit_length() - 1, dtype, lanes)), dtype, lanes, bounds)
        if b == -1:
            zero = literal(0, dtype, lanes)
            return wrap(zero if op == "%" else made("arith.subi", zero, x), dtype, lanes, bounds)
    unsigned = of_a[0] >= 0 and of_b[0] >= 0
    by_zero = of_b[0] <= 0 <= of_b[1] and not state.counting
    overflows = of_b[0] <= -1 <= of_b[1] and of_a[0] == intervals.of_dtype(dtype)[0] and not state.counting
    special: ir.Value | None = None  # undefined operands: divided by 1, without a remainder
    if by_zero or overflows:
        one, given = literal(1, dtype, lanes), wrap(y, dtype, lanes)
        if unsigned or not overflows:
            special = (given == 0).ir
        else:  # 0 or -1
            special = compare("<=", cast(wrap(made("arith.addi", y, one), dtype, lanes), _UNSIGNED_OF[dtype]), 1).ir
        y = made("arith.select", special, one, y)
    if unsigned:
        found = made("arith.divui" if op == "//" else "arith.remui", x, y)
    elif op == "//":
        found = made("arith.floordivsi", x, y)
    elif isinstance(b, int) and b > 0:  # a negative remainder is increased by the divisor
        rest = made("arith.remsi", x, y)
        found = made("arith.select", (wrap(rest, dtype, lanes) < 0).ir, made("arith.addi", rest, y), rest)
    else:
        found = made("arith.subi", x, made("arith.muli", made("arith.floordivsi", x, y), y))
    if special is not None and op == "//":  # the product is right: 0 for 0, wrapping for -1
        found = made("arith.select", special, made("arith.muli", x, given.ir), found)
    return wrap(found, dtype, lanes, bounds)


def _shift(op: str, a: Any, b: Any) -> Any:
    """A shift keeps the left operand's type and converts the count to it."""
    a, b = plain(a), plain(b)
    if not isinstance(a, Numeric):
        a = as_value(a) if not b.lanes else constant(a, number_dtype(a), b.lanes)
    if not a.dtype.is_integer or (isinstance(b, Numeric) and not b.dtype.is_integer) or isinstance(b, float):
        raise TypeError(f"{op} needs integers, got {describe(a)} and {describe(b)}")
    dtype, bits = a.dtype, a.dtype.bits
    inside: Any = None
    if isinstance(b, int):
        if not 0 <= b < bits:
            raise ValueError(f"{op} of {dtype.name} needs a count in [0, {bits}), got {b}")
        count, lanes = literal(b, dtype, a.lanes), a.lanes
    else:
        if not (b.bounds[0] >= 0 and b.bounds[1] < bits) and not state.counting:
            inside = compare("<", cast(b, _UNSIGNED_OF[b.dtype]), bits)
        if b.lanes and a.lanes != b.lanes:
            a = broadcast(a, joined(op, a.lanes, b.lanes) if isinstance(b.lanes, tuple) else b.lanes)
        lanes = a.lanes
        count = _operand(cast(b, dtype), dtype, lanes, False)
        inside = (
            broadcast(inside, lanes).ir if inside is not None and inside.lanes != lanes else getattr(inside, "ir", None)
        )
    result, arithmetic = types().of(dtype, lanes), op == ">>" and not a.nonneg
    if inside is not None and bits == 64 and not arithmetic:
        # Two shifts by at most 32: LLVM would replace the select by PTX's clamping shift, whose count has 32 bits.
        return _shifted_twice(op, a, b)
    if inside is not None:  # a count that shifts every bit out
        most = literal(bits - 1 if arithmetic else 0, dtype, lanes)
        count = emit_value("arith.select", result, [inside, count, most])
    name = "arith.shli" if op == "<<" else "arith.shrsi" if arithmetic else "arith.shrui"
    shifted = emit_value(name, result, [a.ir, count])
    if inside is not None and not arithmetic:
        shifted = emit_value("arith.select", result, [inside, shifted, literal(0, dtype, lanes)])
    return wrap(shifted, dtype, lanes, intervals.after(op, a.bounds, bounds_of(b, i64), dtype))


def _shifted_twice(op: str, a: Any, b: Any) -> Any:
    """A shift by any count; counts of 64 and more shift every bit out."""
    unsigned = cast(a, DTYPES["u64"])
    count = binary("min", cast(cast(b, _UNSIGNED_OF[b.dtype]), unsigned.dtype), 64)
    half = binary(">>", count, 1)
    rest = count - half
    rest = wrap(rest.ir, rest.dtype, rest.lanes, (0, 32))
    return cast(_shift(op, _shift(op, unsigned, half), rest), a.dtype)


def compare(op: str, a: Any, b: Any) -> Any:
    """``a op b`` as a bool value or bool vector."""
    for x in (a, b):
        if not isinstance(plain(x), (Numeric, bool, int, float)):
            return NotImplemented
    x, y, dtype, lanes = promote(op, a, b)
    _computes(op, dtype)
    if dtype.is_float:
        name, predicate = "arith.cmpf", _CMPF[op]
    else:
        name, predicate = "arith.cmpi", _CMPI[op]
        if predicate > 1 and dtype.kind != "i":
            predicate += _UNSIGNED
    t = types()
    return wrap(emit_value(name, t.of(bool_, lanes), [x, y], {"predicate": t.i64_attr(predicate)}), bool_, lanes)


def negate(x: Numeric) -> Any:
    if not isinstance(x.lanes, tuple):  # passes negate tiles of 8-bit floats by flipping signs
        _computes("-", x.dtype)
    if x.dtype.is_float:
        return wrap(emit_value("arith.negf", types().of(x.dtype, x.lanes), [x.ir]), x.dtype, x.lanes)
    return binary("-", 0, x)


def absolute(x: Numeric) -> Any:
    """|x|; the least integer is its own absolute value."""
    _computes("abs", x.dtype)
    if x.dtype.kind in "ub":
        return x
    name = "math.absf" if x.dtype.is_float else "math.absi"
    made = emit_value(name, types().of(x.dtype, x.lanes), [x.ir])
    if x.dtype.is_float:
        return wrap(made, x.dtype, x.lanes)
    low, high = x.bounds
    return wrap(made, x.dtype, x.lanes, intervals.wrapped(max(low, -high, 0), max(-low, high), x.dtype, counts=True))


def invert(x: Numeric) -> Any:
    if x.dtype.is_float:
        raise TypeError(f"~ needs an integer or a bool, got {x.dtype.name}")
    return binary("^", x, True if x.dtype is bool_ else (1 << x.dtype.bits) - 1)


def fold(op: str, a: Any, b: Any) -> Any:
    """One step of a reduction: ``"add"``, ``"mul"``, ``"max"``, ``"min"``, ``"and"``, ``"or"``, ``"xor"``."""
    symbols = {"add": "+", "mul": "*", "max": "max", "min": "min", "and": "&", "or": "|", "xor": "^"}
    if op not in symbols:
        raise ValueError(f"a reduction must be one of {', '.join(symbols)}, got {op!r}")
    return binary(symbols[op], a, b)


def float_bits(value: float) -> int:
    """The bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def joined(what: str, a: Any, b: Any) -> Any:
    """The shape that two operands broadcast to by NumPy's rule; 0 is the shape of a scalar."""
    if a == b or not b:
        return a
    if not a:
        return b
    if isinstance(a, int) or isinstance(b, int):
        raise TypeError(f"{what} of a tile and a vector: a vector belongs to one thread and does not mix with tiles")
    if len(a) != len(b):
        raise TypeError(f"{what} of tiles of shapes {a} and {b}: write x[:, None] or x[None, :] around the vector")
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise TypeError(f"{what} of tiles of shapes {a} and {b}: the shapes must match")
    return tuple(max(m, n) for m, n in zip(a, b, strict=True))


def stretched(x: Any, shape: tuple[int, ...]) -> Any:
    """A scalar or a tile broadcast to a shape."""
    if x.lanes == shape:
        return x
    result = types().of(x.dtype, shape)
    if not x.lanes:
        return wrap(emit_value("tensor.splat", result, [x.ir]), x.dtype, shape, x.bounds)
    dimension = 0 if x.lanes[1] == 1 else 1
    made = ops.tile_broadcast(x.ir, dimension, shape[1 - dimension])
    return wrap(made, x.dtype, shape, x.bounds)


# --- conversions -------------------------------------------------------------------------------------


@dtypes.casts_by
def cast(value: Any, dtype: DType) -> Any:
    """Convert to ``dtype``: ``kv.f32(x)``.

    To a narrower integer: high bits are dropped. Float to integer: rounds towards zero; undefined if it does not fit,
    except that 8-bit integers and 8-bit floats saturate. Integer to bool: whether it is nonzero. Vectors convert lane
    by lane.
    """
    value = plain(value)
    if not isinstance(value, Numeric):
        if not isinstance(value, Number):
            raise TypeError(f"{dtype!r}(...) needs a number or a value of the kernel, got {describe(value)}")
        if dtype is bool_:
            return constant(bool(value), dtype)
        return constant(value if dtype.is_float else wrapped(int(value), dtype), dtype)
    source = value.dtype
    if source is dtype:
        return value
    counted, wider = dtype.is_integer and not source.is_float, (dtype.bits, dtype.kind) >= (source.bits, source.kind)
    bounds = intervals.wrapped(*value.bounds, dtype) if counted and (wider or not state.counting) else None
    return wrap(_convert(value, dtype), dtype, value.lanes, bounds)


def _convert(value: Any, dtype: DType) -> ir.Value:
    source, result = value.dtype, types().of(dtype, value.lanes)
    if dtype is bool_:
        return compare("!=", value, 0.0 if source.is_float else 0).ir
    if source.is_float and dtype.is_float:
        return _float_to_float(value, dtype, result)
    if source.is_float:
        return _float_to_int(value, dtype, result)
    if dtype.is_float:
        if dtype.bits == 8:
            return cast(cast(value, f32), dtype).ir
        return emit_value("arith.sitofp" if source.kind == "i" else "arith.uitofp", result, [value.ir])
    if source.bits == dtype.bits:  # only the sign interpretation changes
        return value.ir
    if source.bits > dtype.bits:
        return emit_value("arith.trunci", result, [value.ir])
    return emit_value("arith.extsi" if source.kind == "i" else "arith.extui", result, [value.ir])


def _float_to_float(value: Any, dtype: DType, result: ir.Type) -> ir.Value:
    source = value.dtype
    if source.bits == 8 or dtype.bits == 8:
        return ops.cast(value.ir, dtype)
    if {source, dtype} == {bf16, f16}:
        return cast(cast(value, f32), dtype).ir
    return emit_value("arith.extf" if dtype.bits > source.bits else "arith.truncf", result, [value.ir])


def _float_to_int(value: Any, dtype: DType, result: ir.Type) -> ir.Value:
    if value.dtype.bits == 8:
        return cast(cast(value, f32), dtype).ir
    if dtype.bits == 8:
        if dtype.kind == "i":
            return ops.cast(value.ir, dtype)
        wide = fold("min", fold("max", cast(value, f32), 0.0), 255.0)  # u8 saturates too
        return emit_value("arith.fptoui", result, [wide.ir])
    return emit_value("arith.fptosi" if dtype.kind == "i" else "arith.fptoui", result, [value.ir])


def bitcast(value: Any, dtype: DType) -> Any:
    """The same bits as ``dtype``; the number of lanes changes so that the total size stays.

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
