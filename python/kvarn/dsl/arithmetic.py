# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arithmetic on values: promotion, then one arith op (or a short sequence).

Float ``+``, ``-`` and ``*`` allow contraction into fused multiply-adds, as GPU compilers do. Integers wrap around.
Division by a positive power of two, and of operands known not to be negative, is a shift or an unsigned division.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlir import ir

from kvarn.dialect.dtypes import DType, bool_, f32

from . import (
    tiles,  # tiles and values import this module too: their names are used in functions only
    values as v,
)
from .builder import Lanes, emit_value, types

if TYPE_CHECKING:
    from .values import Numeric

# operator: (float op, signed op, unsigned op); None: decided below or refused.
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
# Operators whose op does not depend on the sign: (integer op, float op).
_PLAIN = {op: (_OPS[op][1] or "", _OPS[op][0] or "") for op in ("+", "-", "*", "&", "|", "^")}
# Operators that keep "not negative" when both operands have it. "-" and "<<" do not.
_KEEPS_NONNEG = ("+", "*", "//", "%", "&", "|", "^", ">>", "max", "min")
# Predicates of arith.cmpf (ordered, but une) and arith.cmpi.
_CMPF = {"==": 1, ">": 2, ">=": 3, "<": 4, "<=": 5, "!=": 13}
_CMPI = {"==": 0, "!=": 1, "<": 2, "<=": 3, ">": 4, ">=": 5}
_UNSIGNED = 4  # what turns a signed ordering predicate of cmpi into the unsigned one


_instead: list[Mapping[str, Callable[..., Any]]] = []


@contextmanager
def computed_by(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Compute f32 scalars here by other functions, by the names of those of ``kv.math``; ``"divide"`` for ``/``."""
    _instead.append(functions)
    try:
        yield
    finally:
        _instead.pop()


def replaced(name: str) -> Callable[..., Any] | None:
    """What a function is computed by here; None where nothing was said."""
    return _instead[-1].get(name) if _instead else None


def quotient(a: Any, b: Any) -> Any:
    """``a / b``, by a product with one over a number where division is replaced."""
    divide, by_number = replaced("divide"), isinstance(b, (int, float))
    if divide is None or not (_is_f32(a) or isinstance(a, (int, float))) or not ((by_number and b) or _is_f32(b)):
        return binary("/", a, b)
    if by_number:
        return a * (1.0 / b)
    with computed_by({}):
        return divide(a, b)


def _is_f32(x: Any) -> bool:
    return isinstance(x, v.Value) and x.dtype is f32


def wrapped(value: int, dtype: DType) -> int:
    """An int brought into the range of an integer type, as a cast does."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "i" and value >> (dtype.bits - 1) else value


def literal(value: Any, dtype: DType, lanes: Lanes = 0, bits: bool = False) -> ir.Value:
    """A constant of a Python number; with ``bits`` an integer may be any pattern of the type's width."""
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
            attribute = ir.IntegerAttr.get(
                element, wrapped(value, dtype) if value > 0 and bits else _signed(value, dtype)
            )
    result = element
    if lanes:
        result = t.of(dtype, lanes)
        attribute = ir.DenseElementsAttr.get_splat(result, attribute)
    return emit_value("arith.constant", result, (), {"value": attribute})


def _shown(value: int) -> str:
    """A number for a message; Python does not write the largest ones."""
    bits = int(value).bit_length()
    return str(value) if bits <= 256 else f"an integer of {bits} bits"


def _signed(value: int, dtype: DType) -> int:
    """The signed int of the same bits: what attributes of signless integers print."""
    return value - (1 << dtype.bits) if value >> (dtype.bits - 1) == 1 else value


def _small_float(value: float, dtype: DType, element: ir.Type) -> ir.Attribute:
    """An 8-bit float constant, rounded to nearest even and saturated as a cast is."""
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
    """The dtype that two values of these dtypes promote to; TypeError when they do not mix."""
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
    """The common dtype of two values; a loop variable that began as a Python number gives way first."""
    try:
        found = common_dtype(what, a.dtype, b.dtype)
    except TypeError:
        for x, other in ((a, b), (b, a)):
            if isinstance(x, v.Weak):
                x.retype(other.dtype)
        raise
    for x in (a, b):
        if isinstance(x, v.Weak) and x.dtype is not found:
            x.retype(found)
    return found


def _checked(what: str, value: Any) -> Any:
    value = v.plain(value)
    if not isinstance(value, (v.Numeric, bool, int, float)):
        raise TypeError(f"{what} needs numbers or values of the kernel, got {v.describe(value)}")
    return value


def promote(what: str, a: Any, b: Any, lanes: Lanes = 0, bits: bool = False) -> tuple[ir.Value, ir.Value, DType, Lanes]:
    """Both operands as SSA values of one dtype and one number of lanes."""
    a, b = _checked(what, a), _checked(what, b)
    left, right = isinstance(a, v.Numeric), isinstance(b, v.Numeric)
    if left and right:
        dtype = a.dtype if a.dtype is b.dtype else _mixed(what, a, b)
    elif left or right:
        dtype = a.dtype if left else b.dtype
        number = b if left else a
        if dtype is bool_ and not isinstance(number, bool):
            dtype = v.number_dtype(number)
        if isinstance(number, float) and not dtype.is_float:
            raise TypeError(f"{what} of {dtype.name} and the float {number}: write kv.f32(x) around the {dtype.name}")
    else:
        dtype = v.number_dtype(a if isinstance(a, float) else b)
    for x in (a, b):
        n = x.lanes if isinstance(x, v.Numeric) else 0
        if isinstance(n, tuple) or isinstance(lanes, tuple):
            lanes = tiles.joined(what, lanes, n)
            continue
        if n and lanes and n != lanes:
            raise TypeError(f"{what} of vectors of {lanes} and {n} lanes: the lanes must match")
        lanes = lanes or n
    return _operand(a, dtype, lanes, bits), _operand(b, dtype, lanes, bits), dtype, lanes


def _operand(x: Any, dtype: DType, lanes: Lanes, bits: bool) -> ir.Value:
    if not isinstance(x, v.Numeric):
        return literal(x, dtype, lanes, bits)
    if x.dtype is not dtype:
        x = v.cast(x, dtype)
    return broadcast(x, lanes).ir if lanes and x.lanes != lanes else x.ir


def scalar_of(x: Any, dtype: DType) -> ir.Value:
    """A scalar of ``dtype`` from a number or a value that promotes to it."""
    return v.as_value(x, dtype).ir


def broadcast(x: Any, lanes: Lanes) -> Any:
    """A vector with all lanes the scalar ``x``; a tile of ``x``, a scalar or tile, for a shape."""
    if isinstance(lanes, tuple):
        return tiles.stretched(x, lanes)
    return v.Vector(emit_value("vector.broadcast", types().of(x.dtype, lanes), [x.ir]), x.dtype, lanes, x.nonneg)


def is_nonneg(x: Any) -> bool:
    return x.nonneg if isinstance(x, v.Numeric) else x >= 0


def _computes(what: str, dtype: DType) -> None:
    if dtype.is_float and dtype.bits == 8:
        raise TypeError(f"{what} on {dtype.name}: 8-bit floats only convert, write kv.f32(x) first")


def binary(op: str, a: Any, b: Any) -> Any:
    """``a op b`` for operators of Python, and ``"max"``, ``"min"``."""
    if type(a) is v.Value and type(b) is v.Value and a.dtype is b.dtype and op in _PLAIN:  # the common case, quickly
        dtype = a.dtype
        if (dtype.kind == "i" or dtype.kind == "u") or (dtype.kind == "f" and dtype.bits > 8 and op not in _BITWISE):
            name, attributes = _PLAIN[op][dtype.kind == "f"], None
            if dtype.kind == "f":
                attributes = {"fastmath": types().attribute("#arith.fastmath<contract>")}
            nonneg = (a.nonneg and b.nonneg and op in _KEEPS_NONNEG) or (op == "&" and (a.nonneg or b.nonneg))
            return v.Value(emit_value(name, a.ir.type, (a.ir, b.ir), attributes), dtype, nonneg)
    for x in (a, b):  # pointers, buffers and the like define their own operators
        if not isinstance(v.plain(x), (v.Numeric, bool, int, float)):
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
    if op in ("//", "%") and dtype.kind == "i":
        divided = _divide(op, a, b, x, y, dtype, lanes)
        if divided is not None:
            return divided
    attributes = (
        {"fastmath": types().attribute("#arith.fastmath<contract>")} if dtype.is_float and op in _CONTRACT else None
    )
    nonneg = op in _KEEPS_NONNEG and not dtype.is_float and is_nonneg(a) and is_nonneg(b)
    if op == "&" and not dtype.is_float:  # one operand suffices
        nonneg = is_nonneg(a) or is_nonneg(b)
    result = emit_value(name, types().of(dtype, lanes), [x, y], attributes)
    for one, other in ((a, b), (b, a)):  # a loop variable and a number: still open to another dtype
        if isinstance(one, v.Weak) and not isinstance(other, v.Numeric) and dtype is one.dtype:
            return v.Weak(result, dtype, nonneg, one.retype)
    return v.wrap(result, dtype, lanes, nonneg)


def _divide(op: str, a: Any, b: Any, x: ir.Value, y: ir.Value, dtype: DType, lanes: Lanes) -> Any:
    """Signed // and %, rounding down, without arith's slow general form where that is possible; else None for //."""
    result = types().of(dtype, lanes)
    b = v.plain(b)
    if isinstance(b, int) and b == 0:
        raise ZeroDivisionError(f"{op} by zero")
    if isinstance(b, int) and b > 0 and b & (b - 1) == 0:
        nonneg = is_nonneg(a)
        if op == "%":
            return v.wrap(emit_value("arith.andi", result, [x, literal(b - 1, dtype, lanes)]), dtype, lanes, True)
        if b == 1:
            return v.wrap(x, dtype, lanes, nonneg)
        shift = literal(b.bit_length() - 1, dtype, lanes)
        name = "arith.shrui" if nonneg else "arith.shrsi"
        return v.wrap(emit_value(name, result, [x, shift]), dtype, lanes, nonneg)
    if is_nonneg(a) and is_nonneg(b):
        return v.wrap(emit_value("arith.divui" if op == "//" else "arith.remui", result, [x, y]), dtype, lanes, True)
    if op == "//":
        return None
    rest = emit_value("arith.remsi", result, [x, y])
    if isinstance(b, int) and b > 0:  # a negative rest moves up by the divisor
        negative = v.wrap(rest, dtype, lanes) < 0
        moved = emit_value("arith.addi", result, [rest, y])
        return v.wrap(emit_value("arith.select", result, [negative.ir, moved, rest]), dtype, lanes, True)
    quotient = emit_value("arith.floordivsi", result, [x, y])
    whole = emit_value("arith.muli", result, [quotient, y])
    return v.wrap(emit_value("arith.subi", result, [x, whole]), dtype, lanes, is_nonneg(b))


def _shift(op: str, a: Any, b: Any) -> Any:
    """Shifts keep the left operand's type; the count is brought to it."""
    a, b = v.plain(a), v.plain(b)
    if not isinstance(a, v.Numeric):
        a = v.as_value(a) if not b.lanes else v.constant(a, v.number_dtype(a), b.lanes)
    if not a.dtype.is_integer or (isinstance(b, v.Numeric) and not b.dtype.is_integer) or isinstance(b, float):
        raise TypeError(f"{op} needs integers, got {v.describe(a)} and {v.describe(b)}")
    if isinstance(b, int):
        if not 0 <= b < a.dtype.bits:
            raise ValueError(f"{op} of {a.dtype.name} needs a count in [0, {a.dtype.bits}), got {b}")
        count = literal(b, a.dtype, a.lanes)
    else:
        if b.lanes and a.lanes != b.lanes:
            a = broadcast(a, tiles.joined(op, a.lanes, b.lanes) if isinstance(b.lanes, tuple) else b.lanes)
        count = _operand(v.cast(b, a.dtype), a.dtype, a.lanes, False)
    name = "arith.shli" if op == "<<" else "arith.shrui" if a.nonneg else "arith.shrsi"
    shifted = emit_value(name, types().of(a.dtype, a.lanes), [a.ir, count])
    return v.wrap(shifted, a.dtype, a.lanes, op == ">>" and a.nonneg)


def compare(op: str, a: Any, b: Any) -> Any:
    """``a op b`` as a bool value, or a bool vector."""
    for x in (a, b):
        if not isinstance(v.plain(x), (v.Numeric, bool, int, float)):
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
    return v.wrap(emit_value(name, t.of(bool_, lanes), [x, y], {"predicate": t.i64_attr(predicate)}), bool_, lanes)


def negate(x: Numeric) -> Any:
    if not isinstance(x, tiles.Tile):  # of a tile of 8-bit floats passes change the signs
        _computes("-", x.dtype)
    if x.dtype.is_float:
        return v.wrap(emit_value("arith.negf", types().of(x.dtype, x.lanes), [x.ir]), x.dtype, x.lanes)
    return binary("-", 0, x)


def absolute(x: Numeric) -> Any:
    """|x|; of the least integer, itself."""
    _computes("abs", x.dtype)
    if x.dtype.kind in "ub":
        return x
    name = "math.absf" if x.dtype.is_float else "math.absi"
    return v.wrap(emit_value(name, types().of(x.dtype, x.lanes), [x.ir]), x.dtype, x.lanes, True)


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
