# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions of the front end: names, operators, calls, comprehensions.

Over Python values an expression is Python; over values of the kernel, operators and functions of the DSL emit ops.
"""

from __future__ import annotations

import ast
import builtins
import operator
import sys
import types as _types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mlir import ir

from kvarn.dialect.dtypes import DType, bool_, f32, i32, i64

from . import arithmetic as _a
from . import control
from . import math as kv_math
from .source import FunctionNode, FunctionSource, Liveness, source_of
from .state import Undefined, truth
from .values import Numeric, Value, Vector, as_value, cast, constant, describe, number_dtype, plain, where

if TYPE_CHECKING:
    from .frontend import Frame

# Functions of these packages are called, not interpreted (unless marked with @kv.func).
NATIVE_PACKAGES = frozenset(["kvarn", "mlir", "numpy", "ml_dtypes", "torch", "jax", "cupy", "pytest"]) | sys.stdlib_module_names

_BINARY: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ast.Add: (operator.add, operator.iadd), ast.Sub: (operator.sub, operator.isub), ast.Mult: (operator.mul, operator.imul),
    ast.Div: (operator.truediv, operator.itruediv), ast.FloorDiv: (operator.floordiv, operator.ifloordiv),
    ast.Mod: (operator.mod, operator.imod), ast.Pow: (operator.pow, operator.ipow), ast.MatMult: (operator.matmul, operator.imatmul),
    ast.BitAnd: (operator.and_, operator.iand), ast.BitOr: (operator.or_, operator.ior), ast.BitXor: (operator.xor, operator.ixor),
    ast.LShift: (operator.lshift, operator.ilshift), ast.RShift: (operator.rshift, operator.irshift),
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_REFUSED_CALLS = {
    print: "print(): use kv.printf", input: "input()", open: "open()", eval: "eval()", exec: "exec()", globals: "globals()",
    locals: "locals()", vars: "vars()", super: "super()", compile: "compile()", __import__: "__import__()",
    breakpoint: "breakpoint()",
}  # fmt: skip


def static(x: Any) -> Any:
    """``x`` computed at compile time: in a kernel, ``for i in kv.static(range(4))`` unrolls.

    Inside the parentheses Python functions are called rather than inlined, so all of Python may be used there.
    """
    if isinstance(x, RuntimeRange) or isinstance(x, Numeric):
        raise TypeError(f"kv.static needs values known at compile time, got {describe(x)}")
    return tuple(x) if isinstance(x, range) else x


def func(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a helper of a library as one to inline into kernels, with run-time ``if``, ``for`` and ``while``.

    The helpers of user code need no mark. Outside of kernels a marked function stays as it is.
    """
    function.__kv_func__ = True  # type: ignore[attr-defined]
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
            if isinstance(x, bool) or not isinstance(x, int | Value) or (isinstance(x, Value) and not x.dtype.is_integer):
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
                found = x.dtype if found is None else _a.common_dtype("range", found, x.dtype)
        if found is None:
            return i64 if any(number_dtype(x) is i64 for x in (self.start, self.stop, self.step)) else i32
        return found if found.bits >= 32 else i32

    def bounds(self) -> tuple[Value, Value, Value, Callable[[Value], Value]]:
        """Lower and upper bound and positive step of the loop, and what an induction value stands for."""
        dtype = self.dtype()
        down = isinstance(self.step, int) and self.step < 0
        if down and dtype.kind == "u":
            raise TypeError(f"a range of {dtype.name} cannot go down: write kv.i32(...) around its bounds")

        def bring(x: Any) -> Value:
            return cast(x, dtype) if isinstance(x, Value) else constant(x, dtype)

        start, stop, step = bring(self.start), bring(self.stop), bring(-self.step if down else self.step)
        if not down:
            nonneg = _a.is_nonneg(self.start) and (isinstance(self.step, int) or self.step.nonneg)
            start = Value(start.ir, dtype, nonneg)
            return start, stop, step, lambda i: i
        count = kv_math.max((start - stop + (step - 1)) // step, 0)
        first = Value(constant(0, dtype).ir, dtype, nonneg=True)
        return first, count, constant(1, dtype), lambda i: start - i * step

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a range of values of the kernel can only be the range of a for statement")

    def __len__(self) -> int:
        raise TypeError("the length of a range of values of the kernel is not known at compile time")


@dataclass(eq=False)
class Closure:
    """A function defined inside a kernel."""

    interpreter: Expressions
    node: FunctionNode
    name: str
    frame: Frame
    defaults: list[Any]
    kw_defaults: list[Any]
    flow: Liveness = field(init=False)

    def __post_init__(self) -> None:
        self.flow = _flow_of(self.node)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.interpreter.call_closure(self, args, kwargs, None)


def _flow_of(node: FunctionNode) -> Liveness:
    found = getattr(node, "_kv_flow", None)
    if found is None:
        found = node._kv_flow = Liveness(node)  # type: ignore[union-attr]
    return found


def lookup_of(function: _types.FunctionType) -> Callable[[str], Any]:
    """How a function finds names that are not its own: its closure, its module, the builtins."""
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
    """The source of a function that is to be inlined; None for one to call."""
    if not isinstance(function, _types.FunctionType):
        return None
    if not hasattr(function, "__kv_func__") and (function.__module__ or "").partition(".")[0] in NATIVE_PACKAGES:
        return None
    return source_of(function)


def bind(name: str, a: ast.arguments, defaults: list[Any], kw_defaults: list[Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a call by name, as Python binds them; TypeError for a wrong arity."""
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
        if value is not _MISSING:
            found.setdefault(p.arg, value)
    missing = [p for p in (*positional, *(k.arg for k in a.kwonlyargs)) if p not in found]
    if missing:
        raise TypeError(f"{name}() needs {', '.join(missing)}, which the call does not give")
    return found


_MISSING = object()


class Expressions:
    """Evaluates expressions; the statements are in :class:`kvarn.dsl.frontend.Interpreter`."""

    frames: list[Frame]
    native: int
    at: Callable[[ast.AST], Any]
    refuse: Callable[[ast.AST, str], Exception]
    inline: Callable[..., Any]
    assign: Callable[[ast.AST, Any], None]
    locals: dict[str, Any]
    roots: Callable[[], list[Any]]

    def eval(self, node: ast.expr) -> Any:
        return _EXPRESSIONS.get(type(node), Expressions._refused_expression)(self, node)

    # --- names and constants -----------------------------------------------------------------------

    def name(self, name: str) -> Any:
        """The value of a variable."""
        frame = self.frames[-1]
        if name in frame.locals:
            value = frame.locals[name]
        elif name in frame.flow.assigned:
            raise NameError(f"variable {name!r} has no value yet")
        else:
            value = frame.lookup(name)
        if isinstance(value, Undefined):
            raise TypeError(value.reason)
        return value

    def _name(self, node: ast.Name) -> Any:
        frame = self.frames[-1]
        value = frame.locals.get(node.id, _MISSING)
        if value is not _MISSING and type(value) is not Undefined:
            return value
        with self.at(node):
            return self.name(node.id)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _attribute(self, node: ast.Attribute) -> Any:
        base = self.eval(node.value)
        with self.at(node):
            return getattr(base, node.attr)

    def _named(self, node: ast.NamedExpr) -> Any:
        value = self.eval(node.value)
        self.assign(node.target, value)
        return value

    def _starred(self, node: ast.Starred) -> Any:
        raise self.refuse(node, "* here")

    # --- operators ---------------------------------------------------------------------------------

    def operate(self, op: ast.operator, a: Any, b: Any, in_place: bool = False) -> Any:
        return _BINARY[type(op)][in_place and not isinstance(a, Numeric)](a, b)

    def _binary(self, node: ast.BinOp) -> Any:
        a, b = self.eval(node.left), self.eval(node.right)
        with self.at(node):
            return _BINARY[type(node.op)][0](a, b)

    def _unary(self, node: ast.UnaryOp) -> Any:
        x = self.eval(node.operand)
        with self.at(node):
            if isinstance(node.op, ast.Not):
                if isinstance(x, Vector):
                    return ~cast(x, bool_)
                x = truth(x)
                return not x if isinstance(x, bool) else ~x
            if isinstance(node.op, ast.USub):
                return -x
            return +x if isinstance(node.op, ast.UAdd) else ~x

    def _compare(self, node: ast.Compare) -> Any:
        return self._chain(node, self.eval(node.left), 0)

    def _chain(self, node: ast.Compare, left: Any, i: int) -> Any:
        right = self.eval(node.comparators[i])
        with self.at(node):
            result = self._compare_two(node.ops[i], left, right)
        if i + 1 == len(node.ops):
            return result
        if not isinstance(result, Numeric):
            return self._chain(node, right, i + 1) if result else result
        with self.at(node):
            return control.logical_and(self, result, lambda: self._chain(node, right, i + 1))

    @staticmethod
    def _compare_two(op: ast.cmpop, a: Any, b: Any) -> Any:
        if not isinstance(op, ast.In | ast.NotIn):
            return _COMPARE[type(op)](a, b)
        if isinstance(a, Numeric) or (isinstance(b, list | tuple) and any(isinstance(x, Numeric) for x in b)):
            if not isinstance(b, list | tuple):
                raise TypeError(f"in over a value of the kernel needs a tuple or list, got {describe(b)}")
            found: Any = False
            for x in b:
                found = (a == x) | found
            return found if isinstance(op, ast.In) else (~found if isinstance(found, Numeric) else not found)
        return a in b if isinstance(op, ast.In) else a not in b

    def _bool(self, node: ast.BoolOp) -> Any:
        return self._bool_from(node, 0)

    def _bool_from(self, node: ast.BoolOp, i: int) -> Any:
        value = self.eval(node.values[i])
        if i + 1 == len(node.values):
            return value
        is_and = isinstance(node.op, ast.And)
        if not isinstance(value, Numeric):
            return self._bool_from(node, i + 1) if bool(value) is is_and else value
        with self.at(node):
            combine = control.logical_and if is_and else control.logical_or
            return combine(self, truth(value), lambda: self._bool_from(node, i + 1))

    def _if(self, node: ast.IfExp) -> Any:
        test = self.eval(node.test)
        with self.at(node):
            if isinstance(test, Vector):
                return where(test, self.eval(node.body), self.eval(node.orelse))
            return control.if_value(self, test, lambda: self.eval(node.body), lambda: self.eval(node.orelse))

    # --- items -------------------------------------------------------------------------------------

    def item(self, base: Any, index: Any) -> Any:
        if isinstance(base, list | tuple) and isinstance(index, Numeric):
            raise TypeError(
                f"an index of {describe(base)} must be known at compile time, got {describe(index)}: "
                "unroll the loop with kv.static(range(...)), or keep the values in kv.shared"
            )
        return base[index]

    def set_item(self, base: Any, index: Any, value: Any) -> None:
        if isinstance(base, list) and isinstance(index, Numeric):
            self.item(base, index)
        base[index] = value

    def _subscript(self, node: ast.Subscript) -> Any:
        base, index = self.eval(node.value), self.eval(node.slice)
        with self.at(node):
            return self.item(base, index)

    def _slice(self, node: ast.Slice) -> slice:
        return slice(*(None if part is None else self.eval(part) for part in (node.lower, node.upper, node.step)))

    # --- displays and comprehensions -----------------------------------------------------------------

    def _elements(self, nodes: list[ast.expr]) -> list[Any]:
        out: list[Any] = []
        for n in nodes:
            if isinstance(n, ast.Starred):
                with self.at(n):
                    out.extend(self.eval(n.value))
            else:
                out.append(self.eval(n))
        return out

    def _tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self._elements(node.elts))

    def _list(self, node: ast.List) -> list[Any]:
        return self._elements(node.elts)

    def _set(self, node: ast.Set) -> set[Any]:
        with self.at(node):
            return set(self._elements(node.elts))

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                out.update(self.eval(value))
            else:
                out[self.eval(key)] = self.eval(value)
        return out

    def _comprehend(self, generators: list[ast.comprehension], element: Callable[[], None]) -> None:
        names = {n.id for g in generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        saved = {n: self.locals[n] for n in names if n in self.locals}

        def run(i: int) -> None:
            if i == len(generators):
                element()
                return
            g = generators[i]
            if g.is_async:
                raise self.refuse(g.iter, "async comprehensions")
            with self.at(g.iter):
                items = list(self.eval(g.iter))
            for item in items:
                self.assign(g.target, item)
                tests = [truth(self.eval(t)) for t in g.ifs]
                if any(isinstance(t, Numeric) for t in tests):
                    raise self.refuse(g.ifs[0], "a comprehension with a condition on a value of the kernel: use a loop with if")
                if all(tests):
                    run(i + 1)

        run(0)
        for n in names:
            self.locals.pop(n, None)
        self.locals.update(saved)

    def _list_comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
        out: list[Any] = []
        self._comprehend(node.generators, lambda: out.append(self.eval(node.elt)))
        return out

    def _set_comprehension(self, node: ast.SetComp) -> set[Any]:
        out: set[Any] = set()
        self._comprehend(node.generators, lambda: out.add(self.eval(node.elt)))
        return out

    def _dict_comprehension(self, node: ast.DictComp) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        self._comprehend(node.generators, lambda: out.__setitem__(self.eval(node.key), self.eval(node.value)))
        return out

    def _joined(self, node: ast.JoinedStr) -> str:
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = self.eval(part.value)
            if isinstance(value, Numeric):
                raise self.refuse(node, "values of the kernel in an f-string: pass them to kv.printf(format, value)")
            if part.conversion != -1:
                value = {"r": repr, "s": str, "a": ascii}[chr(part.conversion)](value)
            parts.append(format(value, self.eval(part.format_spec) if part.format_spec else ""))
        return "".join(parts)

    # --- functions -----------------------------------------------------------------------------------

    def closure(self, node: FunctionNode, name: str) -> Closure:
        """A function of the kernel's own, with its defaults evaluated now."""
        kw = [_MISSING if d is None else self.eval(d) for d in node.args.kw_defaults]
        return Closure(self, node, name, self.frames[-1], [self.eval(d) for d in node.args.defaults], kw)

    def _lambda(self, node: ast.Lambda) -> Closure:
        return self.closure(node, "<lambda>")

    def call_closure(self, c: Closure, args: Any, kwargs: dict[str, Any], node: ast.AST | None) -> Any:
        variables = bind(c.name, c.node.args, c.defaults, c.kw_defaults, args, kwargs)
        outer = c.frame

        def lookup(name: str) -> Any:
            frame: Frame | None = outer
            if name in outer.locals:
                return outer.locals[name]
            assert frame is not None
            return frame.lookup(name)

        return self.inline(c.name, c.node, outer.file, c.flow, variables, lookup, node, outer)

    def call_function(self, function: _types.FunctionType, source: FunctionSource, args: Any, kwargs: dict[str, Any], node: ast.AST | None) -> Any:
        a = source.node.args
        kw_defaults = [(function.__kwdefaults__ or {}).get(p.arg, _MISSING) for p in a.kwonlyargs]
        variables = bind(source.name, a, list(function.__defaults__ or ()), kw_defaults, args, kwargs)
        return self.inline(source.name, source.node, source.file, source.flow, variables, lookup_of(function), node)

    def _call(self, node: ast.Call) -> Any:
        callee = self.eval(node.func)
        if callee is static:
            self.native += 1
            try:
                args, kwargs = self._arguments(node)
            finally:
                self.native -= 1
        else:
            args, kwargs = self._arguments(node)
        with self.at(node):
            return self.call(callee, args, kwargs, node)

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        kwargs: dict[str, Any] = {}
        args = self._elements(node.args)
        for keyword in node.keywords:
            value = self.eval(keyword.value)
            if keyword.arg is None:
                kwargs.update(value)
            else:
                kwargs[keyword.arg] = value
        return args, kwargs

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """Call anything callable in a kernel."""
        if isinstance(callee, Closure):
            return self.call_closure(callee, args, kwargs, node)
        if isinstance(callee, partial):
            return self.call(callee.func, [*callee.args, *args], {**callee.keywords, **kwargs}, node)
        if isinstance(callee, _types.MethodType):
            source = interpretable(callee.__func__) if not self.native else None
            if source is not None:
                return self.call_function(callee.__func__, source, [callee.__self__, *args], kwargs, node)
            return callee(*args, **kwargs)
        if isinstance(callee, _types.FunctionType):
            source = interpretable(callee) if not self.native else None
            return callee(*args, **kwargs) if source is None else self.call_function(callee, source, args, kwargs, node)
        inner = getattr(callee, "__kv_kernel__", None)
        if inner is not None:
            return self.call(inner, args, kwargs, node)
        try:
            special = _SPECIAL_CALLS.get(callee)
            refused = _REFUSED_CALLS.get(callee)
        except TypeError:  # not hashable
            special = refused = None
        if refused is not None:
            raise self.refuse(node, refused)
        if special is not None:
            return special(self, *args, **kwargs)
        if not callable(callee):
            raise TypeError(f"{describe(callee)} cannot be called")
        return callee(*args, **kwargs)

    def _refused_expression(self, node: ast.expr) -> Any:
        what = {ast.Await: "await", ast.Yield: "yield", ast.YieldFrom: "yield from"}.get(type(node), type(node).__name__)
        raise self.refuse(node, f"{what}: kernels have no generators or coroutines")


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
            result = _a.binary(symbol, as_value(result, bool_), truth(v))
        return result

    return call


def _length(_: Expressions, x: Any) -> Any:
    from .memory import Buffer

    return x.shape[0] if isinstance(x, Buffer) else len(x)


_SPECIAL_CALLS: dict[Any, Callable[..., Any]] = {
    range: _range,
    min: _extremum(min, kv_math.min),
    max: _extremum(max, kv_math.max),
    int: _converted(int, lambda x: x if x.dtype.is_integer else cast(x, i32)),
    float: _converted(float, lambda x: x if x.dtype.is_float and x.dtype.bits > 8 else cast(x, f32)),
    bool: _converted(bool, truth),
    any: _quantified(any, "|"),
    all: _quantified(all, "&"),
    len: _length,
}

_EXPRESSIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Name: Expressions._name,
    ast.Constant: Expressions._constant,
    ast.Attribute: Expressions._attribute,
    ast.NamedExpr: Expressions._named,
    ast.Starred: Expressions._starred,
    ast.BinOp: Expressions._binary,
    ast.UnaryOp: Expressions._unary,
    ast.Compare: Expressions._compare,
    ast.BoolOp: Expressions._bool,
    ast.IfExp: Expressions._if,
    ast.Subscript: Expressions._subscript,
    ast.Slice: Expressions._slice,
    ast.Tuple: Expressions._tuple,
    ast.List: Expressions._list,
    ast.Set: Expressions._set,
    ast.Dict: Expressions._dict,
    ast.ListComp: Expressions._list_comprehension,
    ast.GeneratorExp: Expressions._list_comprehension,
    ast.SetComp: Expressions._set_comprehension,
    ast.DictComp: Expressions._dict_comprehension,
    ast.JoinedStr: Expressions._joined,
    ast.Lambda: Expressions._lambda,
    ast.Call: Expressions._call,
}

__all__ = ["Closure", "Expressions", "RuntimeRange", "func", "interpretable", "ir", "lookup_of", "static"]
