# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mathematical functions of kernels, ``kv.math``: scalars or vectors of f32, f64, f16 or bf16, in the argument's type.

Functions of Python numbers are computed at compile time. The accuracy is that of the target's math library: on a GPU
``exp``, ``exp2``, ``log``, ``sin`` and so on are the precise versions; approximate ones are PTX intrinsics
(``kv.ex2``). On tiles and in score functions of attention these functions are the approximate ones, and ``tanh`` has an
error of at most 1e-5.
"""

from __future__ import annotations

import builtins as _builtins
import math as _math
from collections.abc import Callable
from typing import Any

from .builder import emit_value, types
from .values import Numeric, Value, binary, computed_by, describe, f32, joined, literal, plain, promote, replaced, wrap

__all__ = [
    "abs", "ceil", "clamp", "cos", "erf", "exp", "exp2", "floor", "fma", "log", "log2", "max", "min", "round",
    "rsqrt", "sin", "sqrt", "tanh", "trunc",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def _unary(op: str, name: str, on_numbers: Callable[[float], float], doc: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        x = plain(x)
        if isinstance(x, int | float):
            return on_numbers(x)
        if not isinstance(x, Numeric):
            raise TypeError(f"kv.math.{name} needs a float, got {describe(x)}")
        if not x.dtype.is_float or x.dtype.bits == 8:
            raise TypeError(f"kv.math.{name} needs f32, f64, f16 or bf16, got {x.dtype.name}: write kv.f32(x)")
        instead = replaced(name)
        if instead is not None and isinstance(x, Value) and x.dtype is f32:
            with computed_by({}):
                return instead(x)
        return wrap(emit_value(op, types().of(x.dtype, x.lanes), [x.ir]), x.dtype, x.lanes)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


exp = _unary("math.exp", "exp", _math.exp, "e to the x.")
exp2 = _unary("math.exp2", "exp2", lambda x: 2.0**x, "2 to the x.")
log = _unary("math.log", "log", _math.log, "Natural logarithm.")
log2 = _unary("math.log2", "log2", _math.log2, "Logarithm to base 2.")
sqrt = _unary("math.sqrt", "sqrt", _math.sqrt, "Square root.")
rsqrt = _unary("math.rsqrt", "rsqrt", lambda x: 1.0 / _math.sqrt(x), "One over the square root.")
tanh = _unary("math.tanh", "tanh", _math.tanh, "Hyperbolic tangent.")
sin = _unary("math.sin", "sin", _math.sin, "Sine, of radians.")
cos = _unary("math.cos", "cos", _math.cos, "Cosine, of radians.")
erf = _unary("math.erf", "erf", _math.erf, "Error function.")
floor = _unary("math.floor", "floor", lambda x: float(_math.floor(x)), "Largest whole number not above x, as a float.")
ceil = _unary("math.ceil", "ceil", lambda x: float(_math.ceil(x)), "Smallest whole number not below x, as a float.")
trunc = _unary("math.trunc", "trunc", lambda x: float(_math.trunc(x)), "x without its fraction.")
round = _unary("math.roundeven", "round", lambda x: float(_builtins.round(x)), "Nearest whole number, ties to even.")


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once. The operands have one float type."""
    numeric = [x for x in (a, b, c) if isinstance(x, Numeric)]
    if not numeric:
        return a * b + c
    x, y, dtype, lanes = promote("kv.math.fma", a, b, lanes=_lanes_of(numeric))
    if not isinstance(a, Numeric) and not isinstance(b, Numeric):
        dtype = numeric[0].dtype
        x, y = literal(a, dtype, lanes), literal(b, dtype, lanes)
    if not dtype.is_float or dtype.bits == 8:
        raise TypeError(f"kv.math.fma needs f32, f64, f16 or bf16, got {dtype.name}")
    marker = wrap(x, dtype, lanes)
    _, z, out, _ = promote("kv.math.fma", marker, c)
    return wrap(emit_value("math.fma", types().of(out, lanes), [x, y, z]), out, lanes)


def _lanes_of(values: list[Numeric]) -> Any:
    """The lanes or shape that the operands broadcast to."""
    found: Any = 0
    for x in values:
        found = joined("kv.math.fma", found, x.lanes) if isinstance(x.lanes, tuple) else found or x.lanes
    return found


def _extremum(op: str, first: Any, rest: tuple[Any, ...]) -> Any:
    for other in rest:
        a, b = plain(first), plain(other)
        if isinstance(a, int | float) and isinstance(b, int | float):
            first = (a if a >= b else b) if op == "max" else (a if a <= b else b)
            continue
        first = binary(op, a, b)
        if first is NotImplemented:
            raise TypeError(f"kv.math.{op} needs numbers or values of the kernel, got {describe(a)} and {describe(b)}")
    return first


def max(first: Any, *rest: Any) -> Any:
    """The largest operand; a NaN operand is ignored, as by ``numpy.fmax``."""
    return _extremum("max", first, rest)


def min(first: Any, *rest: Any) -> Any:
    """The smallest operand; a NaN operand is ignored, as by ``numpy.fmin``."""
    return _extremum("min", first, rest)


def abs(x: Any) -> Any:
    """Absolute value, of floats and integers."""
    return x.__abs__()


def clamp(x: Any, low: Any, high: Any) -> Any:
    """``x`` clamped to [low, high]."""
    return min(max(x, low), high)
