# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls inside kernels: inlined user functions, closures, and builtins over values of the kernel."""

from __future__ import annotations

import builtins
import sys
import types as _types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvarn.dialect.dtypes import DType, bool_, f32, i32, i64

from . import intervals, math as kv_math
from .builder import state
from .handles import PAGED, SCALES, Cache, annotation_of, matches, operand
from .memory import Buffer
from .source import FunctionNode, FunctionSource, Liveness, flow_of, source_of
from .state import items_of, truth
from .values import (
    DTYPES,
    Numeric,
    Value,
    Vector,
    as_value,
    binary,
    cast,
    common_dtype,
    constant,
    describe,
    number_dtype,
    plain,
    where,
)

__all__ = ["func", "intrinsic", "static"]

if TYPE_CHECKING:
    import ast

    from .expressions import Expressions
    from .frontend import Frame

# Functions of these packages are called, not interpreted (unless marked with @kv.func).
NATIVE_PACKAGES = (
    frozenset(["kvarn", "mlir", "numpy", "ml_dtypes", "torch", "jax", "cupy", "pytest"]) | sys.stdlib_module_names
)

REFUSED_CALLS = {
    print: "print(): use kv.printf", input: "input()", open: "open()", eval: "eval()", exec: "exec()",
    globals: "globals()", locals: "locals()",
    vars: "vars()", super: "super()", compile: "compile()", __import__: "__import__()",
    breakpoint: "breakpoint()",
}  # fmt: skip


def static(x: Any) -> Any:
    """Compute ``x`` at compile time: in a kernel, ``for i in kv.static(range(4))`` unrolls.

    Inside the parentheses Python functions are called rather than inlined, so all of Python may be used there. An
    object that cannot be compared between launches, such as a long list or an object of another library, is read when
    the kernel is compiled: another object makes it compile again, changed contents of the same object do not.
    """
    if isinstance(x, RuntimeRange) or isinstance(x, Numeric):
        raise TypeError(f"kv.static needs values known at compile time, got {describe(x)}")
    return tuple(items_of(x)) if isinstance(x, range) else x


def func(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of a library as one that kernels inline, with run-time ``if``, ``for`` and ``while``.

    Functions of user code need no mark. Outside of kernels a marked function is unchanged.
    """
    function.__kv_func__ = True  # type: ignore[attr-defined]
    return function


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that builds ops: kernels call it instead of interpreting its source.

    Its arguments are the kernel's values; ``ir`` of a handle or value is the MLIR value. The function builds ops at the
    current insertion point and location, and returns values of the DSL, or None.
    """
    function.__kv_intrinsic__ = True  # type: ignore[attr-defined]
    return function


@dataclass
class RuntimeRange:
    """``range`` as a loop of the kernel."""

    start: Any
    stop: Any
    step: Any

    @classmethod
    def of(cls, *arguments: Any) -> RuntimeRange:
        if not 1 <= len(arguments) <= 3:
            raise TypeError(f"range takes 1 to 3 arguments, got {len(arguments)}")
        for x in arguments:
            x = plain(x)
            if (
                isinstance(x, bool)
                or not isinstance(x, int | Value)
                or (isinstance(x, Value) and not x.dtype.is_integer)
            ):
                raise TypeError(f"range takes integers, got {describe(x)}")
        start, stop = (0, arguments[0]) if len(arguments) == 1 else arguments[:2]
        step = arguments[2] if len(arguments) == 3 else 1
        if isinstance(plain(step), int) and step == 0:
            raise ValueError("the step of a range must not be zero")
        return cls(plain(start), plain(stop), plain(step))

    def dtype(self) -> DType:
        found: DType | None = None
        for x in (self.start, self.stop, self.step):
            if isinstance(x, Value):
                found = x.dtype if found is None else common_dtype("range", found, x.dtype)
        if found is None:
            return i64 if any(number_dtype(x) is i64 for x in (self.start, self.stop, self.step)) else i32
        return found if found.bits >= 32 else i32

    def bounds(self) -> tuple[Value, Value, Value, Callable[[Value], Value]]:
        """Lower bound, upper bound and positive step of the loop, and a map from its induction variable to the item."""
        dtype = self.dtype()
        down = isinstance(self.step, int) and self.step < 0
        if down and dtype.kind == "u":
            raise TypeError(f"a range of {dtype.name} cannot go down: write kv.i32(...) around its bounds")

        def bound(x: Any) -> Value:
            return cast(x, dtype) if isinstance(x, Value) else constant(x, dtype)

        start, stop = bound(self.start), bound(self.stop)
        if down and state.counting:
            step = bound(-self.step)
            count = kv_math.max((start - stop + (step - 1)) // step, 0)
            first = Value(constant(0, dtype).ir, dtype, nonneg=True)
            return first, count, constant(1, dtype), lambda i: start - i * step
        step = bound(self.step)
        if intervals.ends(start.bounds, stop.bounds, step.bounds, dtype):
            return start, stop, step, lambda i: i
        return _counted(start, stop, step)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a range of values of the kernel can only be the range of a for statement")

    def __len__(self) -> int:
        raise TypeError("the length of a range of values of the kernel is not known at compile time")


def _counted(start: Value, stop: Value, step: Value) -> tuple[Value, Value, Value, Callable[[Value], Value]]:
    """The loop of a range whose variable could pass the end of its type: over the numbers of the iterations."""
    dtype, (least, largest) = start.dtype, step.bounds
    unsigned = DTYPES[f"u{dtype.bits}"]
    if least >= 0:
        some, span, size = start < stop, stop - start, step
    elif largest <= 0:
        some, span, size = stop < start, start - stop, 0 - step
    else:
        up = step > 0
        some = (up & (start < stop)) | ((step < 0) & (stop < start))
        span, size = where(up, stop - start, start - stop), where(up, step, 0 - step)
    if least == 0:
        some = some & (step > 0)
    span, size = cast(span, unsigned), cast(size, unsigned)  # the distance, and the step's size, also of 2**31
    if least > 0 or largest < 0:
        size = Value(size.ir, unsigned, bounds=(1, intervals.of_dtype(unsigned)[1]))
    count = where(some, (span - 1) // size + 1, constant(0, unsigned))
    (low, high), (first, last) = start.bounds, stop.bounds
    within = low if least >= 0 else min(low, first + 1), high if largest <= 0 else max(high, last - 1)

    def number(i: Value) -> Value:
        return Value((start + cast(i, dtype) * step).ir, dtype, bounds=within)

    return constant(0, unsigned), count, constant(1, unsigned), number


@dataclass(eq=False)
class Closure:
    """A function defined inside a kernel. Control flow passes it on unchanged."""

    OPAQUE = True

    interpreter: Expressions
    node: FunctionNode
    name: str
    frame: Frame
    defaults: list[Any]
    kw_defaults: list[Any]
    flow: Liveness = field(init=False)

    def __post_init__(self) -> None:
        self.flow = flow_of(self.node)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.interpreter.call_closure(self, args, kwargs, None)


def lookup_of(function: _types.FunctionType) -> Callable[[str], Any]:
    """The lookup of a function's free names: its closure, its module, the builtins."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    module = function.__globals__

    def lookup(name: str) -> Any:
        if name in cells:
            try:
                return cells[name].cell_contents
            except ValueError:
                raise NameError(f"name {name!r} is not defined yet") from None
        if name in module:
            return module[name]
        try:
            return getattr(builtins, name)
        except AttributeError:
            raise NameError(f"name {name!r} is not defined") from None

    return lookup


def interpretable(function: Any) -> FunctionSource | None:
    """The source of a function that kernels inline; None for a function that kernels call."""
    if not isinstance(function, _types.FunctionType) or hasattr(function, "__kv_intrinsic__"):
        return None
    if not hasattr(function, "__kv_func__") and (function.__module__ or "").partition(".")[0] in NATIVE_PACKAGES:
        return None
    return source_of(function)


def bind(
    name: str, a: ast.arguments, defaults: list[Any], kw_defaults: list[Any], args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind the arguments of a call to parameter names as Python does; TypeError for a wrong number of arguments."""
    positional = [p.arg for p in (*a.posonlyargs, *a.args)]
    found = dict(zip(positional, args, strict=False))
    if len(args) > len(positional):
        if a.vararg is None:
            raise TypeError(f"{name}() takes {len(positional)} arguments, got {len(args)}")
        found[a.vararg.arg] = tuple(args[len(positional) :])
    elif a.vararg is not None:
        found[a.vararg.arg] = ()
    by_name = {p.arg for p in (*a.args, *a.kwonlyargs)}
    rest: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key not in by_name:
            if a.kwarg is None:
                raise TypeError(f"{name}() has no parameter {key!r}")
            rest[key] = value
        elif key in found:
            raise TypeError(f"{name}() got two values for {key!r}")
        else:
            found[key] = value
    if a.kwarg is not None:
        found[a.kwarg.arg] = rest
    for key, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        found.setdefault(key, value)
    for p, value in zip(a.kwonlyargs, kw_defaults, strict=True):
        if value is not MISSING:
            found.setdefault(p.arg, value)
    missing = [p for p in (*positional, *(k.arg for k in a.kwonlyargs)) if p not in found]
    if missing:
        raise TypeError(f"{name}() needs {', '.join(missing)}, which the call does not give")
    return found


MISSING = object()


# --- builtins over values of the kernel ------------------------------------------------------------


def _range(_: Expressions, *args: Any) -> Any:
    return RuntimeRange.of(*args) if any(isinstance(a, Numeric) for a in args) else range(*args)


def _extremum(native: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(_: Expressions, *args: Any, **kwargs: Any) -> Any:
        values = list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple | Vector) else list(args)
        if not any(isinstance(v, Numeric) for v in values):
            return native(*args, **kwargs)
        if kwargs:
            raise TypeError(f"{native.__name__} of values of the kernel takes no keywords")
        return ours(*values)

    return call


def _converted(native: type, ours: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(_: Expressions, *args: Any, **kwargs: Any) -> Any:
        return ours(args[0]) if len(args) == 1 and isinstance(args[0], Numeric) else native(*args, **kwargs)

    return call


def _quantified(native: Callable[[Any], bool], symbol: str) -> Callable[..., Any]:
    def call(_: Expressions, values: Any) -> Any:
        values = list(values)
        if not any(isinstance(v, Numeric) for v in values):
            return native(values)
        result = truth(values[0])
        for v in values[1:]:
            result = binary(symbol, as_value(result, bool_), truth(v))
        return result

    return call


def _length(_: Expressions, x: Any) -> Any:
    return x.shape[0] if isinstance(x, Buffer) else len(x)


SPECIAL_CALLS: dict[Any, Callable[..., Any]] = {
    range: _range,
    min: _extremum(min, kv_math.min),
    max: _extremum(max, kv_math.max),
    int: _converted(int, lambda x: x if x.dtype.is_integer else cast(x, i32)),
    float: _converted(float, lambda x: x if x.dtype.is_float and x.dtype.bits > 8 else cast(x, f32)),
    bool: _converted(bool, truth),
    any: _quantified(any, "|"),
    all: _quantified(all, "&"),
    len: _length,
    isinstance: lambda _, value, cls: matches(value, cls),
}


def handle_call(callee: Any, args: list[Any]) -> Any:
    """``kv.KVCacheMHAOperand(cache)`` or ``kv.KVCacheScalesMHAOperand(cache)`` in a kernel; None for other calls."""
    if isinstance(callee, type) and len(args) == 1 and isinstance(args[0], Cache):
        kind, kinds = annotation_of(callee) or ("", ())
        if kind == "operand" and (PAGED in kinds) != (SCALES in kinds):
            return operand(args[0], scales=SCALES in kinds)
    return None
