# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The front end interprets a kernel's AST and emits ops. Statements are here, expressions in ``expressions``.

Python values are computed while tracing; values of the kernel become ops at the node's source location. ``if``,
``while`` and ``range`` loops over kernel values become scf ops (``control``); over Python values they run while
tracing. A call of a user's function is interpreted too, which inlines it with its control flow.
"""

from __future__ import annotations

import ast
import types as _types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlir import ir

from kvarn.errors import KernelError, SourceLocation, UnsupportedError, located

from . import control
from .calls import NATIVE_PACKAGES
from .control import LEFT, RESULT, RETURNED
from .expressions import visitors
from .loops import PASSED_THROUGH, Flow, Generator, Loops
from .source import FunctionNode, FunctionSource, Liveness, terminates
from .state import Undefined, items_of, truth
from .values import Numeric, Value, Vector, describe

_REFUSED = {
    ast.Try: "try: errors cannot be caught in a kernel; test the condition with if",
    ast.Raise: "raise under run-time control flow: use kv.device_assert(condition, message)",
    ast.Global: "global: pass the value as an argument, or close over it",
    ast.Nonlocal: "nonlocal: return the new value, or keep it in a list",
    ast.ClassDef: "class: define it outside the kernel",
    ast.AsyncFunctionDef: "async def: kernels have no coroutines",
    ast.AsyncFor: "async for: kernels have no coroutines",
    ast.AsyncWith: "async with: kernels have no coroutines",
    ast.Import: "import: import the module outside the kernel",
    ast.ImportFrom: "import: import the module outside the kernel",
    ast.Match: "match: use if and elif",
}


MOST_STATEMENTS = 500_000  # statements interpreted for one kernel


@dataclass
class Frame:
    """A function being interpreted."""

    name: str
    code: Any  # the AST node of the function
    file: str
    flow: Liveness
    locals: dict[str, Any]
    lookup: Callable[[str], Any]  # the lookup of free names; raises NameError
    node: ast.AST
    caller: ir.Location | None
    parent: Frame | None = None  # the frame in which a closure was defined
    callee: Any = None  # the function object, by which recursion is recognized: several closures may share this code
    places: dict[int, ir.Location] = field(default_factory=dict)  # by id of the node; unrolled code visits a node often


class Interpreter(Loops):
    """Traces one kernel at the current insertion point."""

    def __init__(self, block: tuple[int, int, int] | None = None) -> None:
        self.frames: list[Frame] = []
        self.suspended: list[Frame] = []  # frames of generators that for statements are reading
        self.native = 0  # nesting depth of kv.static(...), in which functions are called rather than interpreted
        self.block = block
        self.made = self.ran = 0  # ops and statements so far; tracing stops at a limit
        self._changed: dict[int, set[str]] = {}  # names changed in place, by id of a function's node
        self._locations: dict[int, ir.Location] = {}  # by id of the node, without the callers of its function

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    # --- source locations --------------------------------------------------------------------------

    def place(self) -> SourceLocation | None:
        """The source location of the innermost statement or expression being interpreted."""
        return _place(self.frame, self.frame.node) if self.frames else None

    def place_of(self, node: ast.AST) -> SourceLocation:
        return _place(self.frame, node)

    def callers(self) -> list[SourceLocation]:
        return [_place(f, f.node) for f in reversed(self.frames[:-1])]

    def location(self, node: ast.AST) -> ir.Location:
        frame = self.frames[-1]
        found = frame.places.get(id(node))
        if found is None:
            found = self._locations.get(id(node))
            if found is None:
                found = ir.Location.file(frame.file, getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)
                self._locations[id(node)] = found
            if frame.caller is not None:
                found = ir.Location.callsite(found, [frame.caller])
            frame.places[id(node)] = found
        return found

    def failed(self, error: Exception, node: ast.AST) -> Exception:
        """The error of a node that built no ops, with the node's source location."""
        if isinstance(error, (KernelError, *PASSED_THROUGH)):
            return error
        return located(error, _place(self.frame, node), self.callers())

    def at(self, node: ast.AST) -> _At:
        """A context in which ops and errors have the node's source location."""
        return _At(self, node)

    def refuse(self, node: ast.AST, text: str) -> UnsupportedError:
        return UnsupportedError(f"kernels do not support {text}", _place(self.frame, node), self.callers())

    # --- functions ---------------------------------------------------------------------------------

    def run(self, source: FunctionSource, variables: dict[str, Any], lookup: Callable[[str], Any]) -> None:
        """Trace a kernel."""
        frame = Frame(source.name, source.node, source.file, source.flow, variables, lookup, source.node, None)
        result = self._function(frame, source.node)
        if result is not None:
            raise KernelError("a kernel returns nothing: write results to a buffer", _place(frame, source.node))

    def inline(
        self, name: str, node: FunctionNode, file: str, flow: Liveness, variables: dict[str, Any],
        lookup: Callable[[str], Any], call: ast.AST | None, callee: Any, parent: Frame | None = None,
    ) -> Any:  # fmt: skip
        """Interpret a call of a function. ``callee`` is the function object: closures may share its source."""
        if any(f.callee is callee for f in self.frames):
            raise TypeError(f"{name}() calls itself: kernels do not support recursion, use a loop")
        caller = self.location(call) if call is not None else ir.Location.current
        frame = Frame(name, node, file, flow, variables, lookup, node, caller, parent, callee)
        return Generator.of(frame, node) if flow.yields else self._function(frame, node)

    def _function(self, frame: Frame, node: FunctionNode) -> Any:
        self.frames.append(frame)
        try:
            if isinstance(node, ast.Lambda):
                return self.eval(node.body)
            flow = self.block_of(node.body) or {}
            value = frame.locals.get(RESULT)
            if isinstance(value, Undefined):
                reason = value.reason.replace(repr(RESULT), "the returned value")
                raise KernelError(reason, _place(frame, node), self.callers())
            if value is not None and flow.get("return") is not True:
                raise KernelError(
                    f"{frame.name}() returns a value on some paths only", _place(frame, node), self.callers()
                )
            return value
        finally:
            self.frames.pop()

    # --- statements --------------------------------------------------------------------------------

    def block_of(self, statements: Sequence[ast.stmt], start: int = 0) -> Flow | None:
        """Interpret statements. The result says how control left them; None if it reached their end."""
        statement: ast.stmt = self.frames[-1].code
        try:
            for i in range(start, len(statements)):
                statement = statements[i]
                self.ran += 1
                if self.ran > MOST_STATEMENTS:
                    raise ValueError(
                        f"tracing the kernel takes more than {MOST_STATEMENTS} statements: loops over Python values "
                        "are unrolled; use range(...), or compute the values outside the kernel"
                    )
                if type(statement) is ast.If:
                    test = self._test(statement.test)
                    if isinstance(test, bool):
                        flow = self.block_of(statement.body if test else statement.orelse)
                    elif not self.frame.flow.leaves[id(statement)]:
                        self._runtime_if(statement, test)
                        flow = None
                    elif terminates(statement.body) or terminates(statement.orelse):
                        return self._guard_form(statement, test, statements, i)
                    else:
                        flow = self._branches(
                            statement,
                            test,
                            lambda s=statement: self.block_of(s.body),
                            lambda s=statement: self.block_of(s.orelse),
                        )
                else:
                    flow = _STATEMENTS.get(type(statement), Interpreter._refused)(self, statement)
                if flow:
                    if any(v is True for v in flow.values()):
                        return flow
                    return self._guarded(
                        statement, flow, lambda n=i: self.block_of(statements, n + 1), i + 1 < len(statements)
                    )
        except (KernelError, *PASSED_THROUGH):
            raise
        except Exception as error:  # an error of an expression without a source location
            raise self.failed(error, statement) from error
        return None

    def _test(self, node: ast.expr) -> Any:
        with self.at(node):
            return truth(self.eval(node))

    def _runtime_if(self, node: ast.If, test: Value) -> None:
        def side(body: Sequence[ast.stmt]) -> Callable[[], object]:
            return lambda: self.block_of(body)

        with self.at(node):
            control.branches(self, test, side(node.body), side(node.orelse), self.frame.flow.after[id(node)])

    def _guard_form(self, node: ast.If, test: Value, statements: Sequence[ast.stmt], i: int) -> Flow | None:
        """``if c: return`` followed by statements: these become the other branch."""

        def side(body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> Callable[[], Flow | None]:
            if terminates(body) or not terminates(other):
                return lambda: self.block_of(body)

            def run() -> Flow | None:
                flow = self.block_of(body)
                if not flow:
                    return self.block_of(statements, i + 1)
                if any(v is True for v in flow.values()):
                    return flow
                return self._guarded(node, flow, lambda: self.block_of(statements, i + 1), i + 1 < len(statements))

            return run

        last = statements[-1]
        live = self.frame.flow.after[id(last)] | self.frame.flow.after[id(node)]
        return self._branches(node, test, side(node.body, node.orelse), side(node.orelse, node.body), live)

    def _branches(
        self, node: ast.stmt, test: Value, then: Callable[[], Flow | None], otherwise: Callable[[], Flow | None],
        live: frozenset[str] | None = None,
    ) -> Flow | None:  # fmt: skip
        """Both branches of a condition where control may leave the block; flags record how it left."""
        kinds = ("return", "break", "continue")

        def side(body: Callable[[], Flow | None]) -> Callable[[], None]:
            def run() -> None:
                flow = body() or {}
                for kind in kinds:
                    self.locals[f" {kind}"] = flow.get(kind, False)

            return run

        with self.at(node):
            control.branches(
                self, test, side(then), side(otherwise), self.frame.flow.after[id(node)] if live is None else live
            )
        flow = {kind: self.locals.pop(f" {kind}") for kind in kinds}
        return {k: v for k, v in flow.items() if v is not False} or None

    def _guarded(self, node: ast.stmt, flow: Flow, rest: Callable[[], Flow | None], more: bool) -> Flow | None:
        """Interpret the statements that follow one that control may have left, guarded by its flags."""
        if not more:
            return flow
        with self.at(node):
            left: Any = None
            for flag in flow.values():
                left = flag if left is None else left | flag
            stays = ~left
        live = frozenset().union(*self.frame.flow.after.values())
        rest_flow: Flow = {}

        def run() -> Flow:
            rest_flow.update(rest() or {})
            return rest_flow

        def gone() -> None:
            self.locals[LEFT] = RETURNED if flow.keys() == {"return"} else "loop"

        after = self._branches(node, stays, run, gone, live) or {}
        with self.at(node):
            for kind, flag in flow.items():
                if len(flow) == 1 and rest_flow.get(kind) is True:
                    after[kind] = True  # control that has not left before leaves here
                else:
                    after[kind] = flag if kind not in after else after[kind] | flag
        return after

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.eval(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.eval(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target = node.target
        with self.at(node):
            if isinstance(target, ast.Name):
                old = self.name(target.id)
                self.locals[target.id] = self.operate(node.op, old, self.eval(node.value), in_place=True)
            elif isinstance(target, ast.Subscript):
                base, index = self.eval(target.value), self.eval(target.slice)
                new = self.operate(node.op, self.item(base, index), self.eval(node.value), in_place=True)
                self._store_item(target, base, index, new)
            else:
                base = self.eval(target.value)
                new = self.operate(node.op, getattr(base, target.attr), self.eval(node.value), in_place=True)
                setattr(base, target.attr, new)

    def assign(self, target: ast.AST, value: Any) -> None:
        """Bind a target: a name, an item, an attribute, or a sequence of targets."""
        if type(target) is ast.Name:
            self.locals[target.id] = value
            return
        with self.at(target):
            if isinstance(target, ast.Subscript):
                self._store_item(target, self.eval(target.value), self.eval(target.slice), value)
            elif isinstance(target, ast.Attribute):
                base = self.eval(target.value)
                if isinstance(base, Numeric | _types.ModuleType | type):
                    raise TypeError(f"attributes of {describe(base)} cannot be set in a kernel")
                setattr(base, target.attr, value)
            elif isinstance(target, ast.Tuple | ast.List):
                self._unpack(target.elts, value)
            else:
                raise TypeError(f"cannot assign to {type(target).__name__}")

    def _unpack(self, targets: Sequence[ast.expr], value: Any) -> None:
        if isinstance(value, Value) or not hasattr(value, "__iter__"):
            raise TypeError(f"cannot unpack {describe(value)} into {len(targets)} variables")
        values = items_of(value)
        starred = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
        if starred is None and len(values) != len(targets):
            raise ValueError(f"cannot unpack {len(values)} values into {len(targets)} variables")
        if starred is not None:
            tail = len(targets) - starred - 1
            if len(values) < len(targets) - 1:
                raise ValueError(f"cannot unpack {len(values)} values into at least {len(targets) - 1} variables")
            values[starred : len(values) - tail] = [values[starred : len(values) - tail]]
        for t, v in zip(targets, values, strict=True):
            self.assign(t.value if isinstance(t, ast.Starred) else t, v)

    def _store_item(self, target: ast.Subscript, base: Any, index: Any, value: Any) -> None:
        if isinstance(base, Vector):  # a vector is a value: the name is bound to a new vector
            self.assign(target.value, base.set(index, value))
        elif isinstance(base, tuple | str):
            raise TypeError(f"an item of {describe(base)} cannot be set: use a list")
        else:
            self.set_item(base, index, value)

    def visit_Return(self, node: ast.Return) -> Flow:
        value = self.eval(node.value) if node.value is not None else None
        if value is not None:
            self.locals[RESULT] = value
        return {"return": True}

    def visit_Break(self, node: ast.Break) -> Flow:
        return {"break": True}

    def visit_Continue(self, node: ast.Continue) -> Flow:
        return {"continue": True}

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            raise self.refuse(node, "decorators on functions inside kernels")
        self.locals[node.name] = self.closure(node, node.name)

    def visit_Assert(self, node: ast.Assert) -> None:
        with self.at(node):
            test = self._test(node.test)
            if not isinstance(test, bool):
                raise self.refuse(node, "assert on a value of the kernel: use kv.device_assert(condition, message)")
            if not test:
                raise ValueError(f"assertion failed: {self.eval(node.msg) if node.msg else ast.unparse(node.test)}")

    def visit_Raise(self, node: ast.Raise) -> None:
        with self.at(node):
            error = self.eval(node.exc) if node.exc else RuntimeError("raise")
            if isinstance(error, type) and issubclass(error, BaseException):
                error = error()
            if not isinstance(error, BaseException):
                raise TypeError(f"raise needs an exception, got {describe(error)}")
            raise error

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                raise self.refuse(node, "del of anything but a variable")
            self.locals[target.id] = Undefined(f"{target.id!r} was deleted")

    def visit_With(self, node: ast.With) -> Flow | None:
        with self.at(node):
            managers = []
            for item in node.items:
                manager = self.eval(item.context_expr)
                if not getattr(manager, "kernel_scope", False):
                    raise self.refuse(node, f"with over {describe(manager)}: only context managers made for kernels")
                managers.append((manager, item.optional_vars))
            for manager, name in managers:
                value = manager.__enter__()
                if name is not None:
                    self.assign(name, value)
            flow = self.block_of(node.body)
            for manager, _ in reversed(managers):
                manager.__exit__(None, None, None)
        return flow

    def _refused(self, node: ast.stmt) -> None:
        raise self.refuse(node, _REFUSED.get(type(node), type(node).__name__))


_STATEMENTS = visitors(Loops) | visitors(Interpreter)


class _At:
    """Enters a node: sets the MLIR location and the source location of errors. A callee keeps its caller's node."""

    __slots__ = ("_frame", "_interpreter", "_location", "_outer")

    def __init__(self, interpreter: Interpreter, node: ast.AST) -> None:
        self._interpreter, self._frame = interpreter, interpreter.frames[-1]
        self._outer, self._frame.node = self._frame.node, node
        self._location = interpreter.location(node)

    def __enter__(self) -> None:
        self._location.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._location.__exit__(kind, error, traceback)
        node, self._frame.node = self._frame.node, self._outer
        if kind is None or issubclass(kind, (KernelError, *PASSED_THROUGH)) or not issubclass(kind, Exception):
            return
        place, callers = _place(self._frame, node), self._interpreter.callers()
        inner = _called(traceback)
        raise located(error, inner or place, [place, *callers] if inner else callers) from error


def _called(traceback: Any) -> SourceLocation | None:
    """Where an error was in a function that ran as it is, such as one without text, called by what is interpreted."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        name = frame.f_globals.get("__name__", "")
        if name == "__main__" or name.partition(".")[0] not in NATIVE_PACKAGES:
            found = SourceLocation(frame.f_code.co_filename, traceback.tb_lineno, 1)
        traceback = traceback.tb_next
    return found


def _place(frame: Frame, node: ast.AST) -> SourceLocation:
    line = getattr(node, "lineno", 1)
    end = getattr(node, "end_col_offset", None) if getattr(node, "end_lineno", None) == line else None
    return SourceLocation(frame.file, line, getattr(node, "col_offset", 0) + 1, None if end is None else end + 1)


__all__ = ["Frame", "Interpreter"]
