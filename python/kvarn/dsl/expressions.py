# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions of the front end: names, operators, calls, comprehensions.

Python evaluates expressions over Python values; operators and DSL functions over values of the kernel emit ops.
"""

from __future__ import annotations

import ast
import operator
import types as _types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarn.dialect.dtypes import bool_

from . import control
from .calls import MISSING, REFUSED_CALLS, SPECIAL_CALLS, Closure, bind, handle_call, interpretable, lookup_of, static
from .source import FunctionNode, FunctionSource
from .state import MOST_ITEMS, Undefined, items_of, truth
from .values import Numeric, Vector, cast, describe, where

if TYPE_CHECKING:
    from .frontend import Frame

_BINARY: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ast.Add: (operator.add, operator.iadd), ast.Sub: (operator.sub, operator.isub),
    ast.Mult: (operator.mul, operator.imul), ast.Div: (operator.truediv, operator.itruediv),
    ast.FloorDiv: (operator.floordiv, operator.ifloordiv), ast.Mod: (operator.mod, operator.imod),
    ast.Pow: (operator.pow, operator.ipow), ast.MatMult: (operator.matmul, operator.imatmul),
    ast.BitAnd: (operator.and_, operator.iand), ast.BitOr: (operator.or_, operator.ior),
    ast.BitXor: (operator.xor, operator.ixor), ast.LShift: (operator.lshift, operator.ilshift),
    ast.RShift: (operator.rshift, operator.irshift),
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_GROWING = frozenset([ast.Mult, ast.Pow, ast.LShift])
_MOST_BITS = 1 << 16  # bits of a Python integer computed while tracing
_TAKES_APART = frozenset([list, tuple, set, frozenset, sorted, sum, min, max, any, all, dict, bytes, bytearray])
_PYTHON = frozenset([int, float, bool, str, tuple, list])  # operands whose operators emit nothing


def _check_size(op: ast.operator, a: Any, b: Any) -> None:
    """Refuse Python computations that would exhaust memory or never finish."""
    if isinstance(a, int) and isinstance(b, int):
        if isinstance(op, ast.Mult):
            bits = a.bit_length() + b.bit_length()
        elif isinstance(op, ast.LShift):
            bits = a.bit_length() + b if a else 0
        else:
            bits = a.bit_length() * b if abs(a) > 1 else 0
        if bits > _MOST_BITS:
            raise ValueError(f"a Python integer of a kernel must have at most {_MOST_BITS} bits, this has about {bits}")
    elif isinstance(op, ast.Mult):
        items, times = (a, b) if isinstance(b, int) else (b, a)
        if isinstance(items, list | tuple | str | bytes) and isinstance(times, int):
            size = len(items) * times
            if size > MOST_ITEMS:
                raise ValueError(
                    f"a {type(items).__name__} of a kernel must have at most {MOST_ITEMS} items, got {size}"
                )


class Expressions:
    """Evaluates expressions; the statements are in :class:`kvarn.dsl.frontend.Interpreter`."""

    frames: list[Frame]
    suspended: list[Frame]
    native: int
    at: Callable[[ast.AST], Any]
    place_of: Callable[[ast.AST], Any]
    callers: Callable[[], list[Any]]
    failed: Callable[[Exception, ast.AST], Exception]
    refuse: Callable[[ast.AST, str], Exception]
    inline: Callable[..., Any]
    assign: Callable[[ast.AST, Any], None]

    @property
    def locals(self) -> dict[str, Any]:
        """The variables of the function being interpreted."""
        return self.frames[-1].locals

    def roots(self) -> list[Any]:
        """Every value that interpreted code can reach by name."""
        return [value for frame in (*self.frames, *self.suspended) for value in frame.locals.values()]

    def eval(self, node: ast.expr) -> Any:
        kind = type(node)
        if kind is ast.Constant:
            return node.value  # pyright: ignore[reportAttributeAccessIssue]
        if kind is ast.Name:  # most nodes are names
            value = self.frames[-1].locals.get(node.id, MISSING)  # pyright: ignore[reportAttributeAccessIssue]
            if value is not MISSING and type(value) is not Undefined:
                return value
        return _EXPRESSIONS.get(kind, Expressions._refused_expression)(self, node)

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

    def visit_Name(self, node: ast.Name) -> Any:
        try:
            return self.name(node.id)
        except Exception as error:
            raise self.failed(error, node) from error

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        base = self.eval(node.value)
        if type(base) is _types.ModuleType:
            try:
                return getattr(base, node.attr)
            except Exception as error:
                raise self.failed(error, node) from error
        with self.at(node):
            return getattr(base, node.attr)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.eval(node.value)
        self.assign(node.target, value)
        return value

    def visit_Starred(self, node: ast.Starred) -> Any:
        raise self.refuse(node, "* here")

    # --- operators ---------------------------------------------------------------------------------

    def operate(self, op: ast.operator, a: Any, b: Any, in_place: bool = False) -> Any:
        if type(op) in _GROWING:
            _check_size(op, a, b)
        return _BINARY[type(op)][in_place and not isinstance(a, Numeric)](a, b)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        a, b = self.eval(node.left), self.eval(node.right)
        if type(a) in _PYTHON and type(b) in _PYTHON:
            try:
                return self.operate(node.op, a, b)
            except Exception as error:
                raise self.failed(error, node) from error
        with self.at(node):
            return _BINARY[type(node.op)][0](a, b)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
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

    def visit_Compare(self, node: ast.Compare) -> Any:
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

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
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

    def visit_IfExp(self, node: ast.IfExp) -> Any:
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

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        base, index = self.eval(node.value), self.eval(node.slice)
        if (type(base) is list or type(base) is tuple) and type(index) is int:
            try:
                return base[index]
            except IndexError as error:
                raise self.failed(error, node) from error
        with self.at(node):
            return self.item(base, index)

    def visit_Slice(self, node: ast.Slice) -> slice:
        return slice(*(None if part is None else self.eval(part) for part in (node.lower, node.upper, node.step)))

    # --- displays and comprehensions -----------------------------------------------------------------

    def _elements(self, nodes: list[ast.expr]) -> list[Any]:
        out: list[Any] = []
        for n in nodes:
            if type(n) is ast.Starred:
                with self.at(n):
                    out.extend(items_of(self.eval(n.value)))
            else:
                out.append(self.eval(n))
        return out

    def visit_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self._elements(node.elts))

    def visit_List(self, node: ast.List) -> list[Any]:
        return self._elements(node.elts)

    def visit_Set(self, node: ast.Set) -> set[Any]:
        with self.at(node):
            return set(self._elements(node.elts))

    def visit_Dict(self, node: ast.Dict) -> dict[Any, Any]:
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
                items = items_of(self.eval(g.iter))
            for item in items:
                self.assign(g.target, item)
                tests = [truth(self.eval(t)) for t in g.ifs]
                if any(isinstance(t, Numeric) for t in tests):
                    raise self.refuse(
                        g.ifs[0], "a comprehension with a condition on a value of the kernel: use a loop with if"
                    )
                if all(tests):
                    run(i + 1)

        run(0)
        for n in names:
            self.locals.pop(n, None)
        self.locals.update(saved)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
        out: list[Any] = []
        self._comprehend(node.generators, lambda: out.append(self.eval(node.elt)))
        return out

    visit_GeneratorExp = visit_ListComp

    def visit_SetComp(self, node: ast.SetComp) -> set[Any]:
        out: set[Any] = set()
        self._comprehend(node.generators, lambda: out.add(self.eval(node.elt)))
        return out

    def visit_DictComp(self, node: ast.DictComp) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        self._comprehend(node.generators, lambda: out.__setitem__(self.eval(node.key), self.eval(node.value)))
        return out

    def visit_JoinedStr(self, node: ast.JoinedStr) -> str:
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
        """A function defined inside the kernel; its default values are evaluated now."""
        kw = [MISSING if d is None else self.eval(d) for d in node.args.kw_defaults]
        return Closure(self, node, name, self.frames[-1], [self.eval(d) for d in node.args.defaults], kw)

    def visit_Lambda(self, node: ast.Lambda) -> Closure:
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

        return self.inline(c.name, c.node, outer.file, c.flow, variables, lookup, node, c, outer)

    def call_function(
        self,
        function: _types.FunctionType,
        source: FunctionSource,
        args: Any,
        kwargs: dict[str, Any],
        node: ast.AST | None,
    ) -> Any:
        a = source.node.args
        kw_defaults = [(function.__kwdefaults__ or {}).get(p.arg, MISSING) for p in a.kwonlyargs]
        variables = bind(source.name, a, list(function.__defaults__ or ()), kw_defaults, args, kwargs)
        lookup = lookup_of(function)
        return self.inline(source.name, source.node, source.file, source.flow, variables, lookup, node, function)

    def visit_Call(self, node: ast.Call) -> Any:
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
        if (made := handle_call(callee, args)) is not None:
            return made
        inner = getattr(callee, "__kv_kernel__", None)
        if inner is not None:
            return self.call(inner, args, kwargs, node)
        try:
            special = SPECIAL_CALLS.get(callee)
            refused = REFUSED_CALLS.get(callee)
            if callee in _TAKES_APART:
                args = [items_of(a) if isinstance(a, range) or hasattr(a, "__next__") else a for a in args]
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
        what = {ast.Await: "await", ast.Yield: "yield", ast.YieldFrom: "yield from"}.get(
            type(node), type(node).__name__
        )
        raise self.refuse(node, f"{what}: kernels have no generators or coroutines")


def visitors(cls: type) -> dict[type, Callable[[Any, Any], Any]]:
    """The methods of a class named after AST nodes, such as ``visit_Name``, by node class."""
    return {getattr(ast, name[6:]): method for name, method in vars(cls).items() if name.startswith("visit_")}


_EXPRESSIONS = visitors(Expressions)
