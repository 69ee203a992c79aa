# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops of the front end: loops that run while tracing, and loops that become scf ops.

``range`` makes a loop of the kernel (scf.for; scf.while if ``break`` or ``return`` may leave it), other iterables are
unrolled. A ``while`` loops at run time if its condition is a value of the kernel or the literal True.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlir import ir

from kvarn.errors import KernelError

from . import control
from .calls import Closure, RuntimeRange, interpretable, lookup_of
from .control import Loop
from .expressions import Expressions
from .source import Changes, FunctionNode, bound, escapes, flow_of, loaded
from .state import MOST_ITEMS, Snapshot, Undefined
from .values import Numeric, Value, as_value, describe

if TYPE_CHECKING:
    from .frontend import Frame

Take = Callable[[Any], None]  # binds the target of a for statement to an item
Flow = dict[str, Any]  # "return" | "break" | "continue" -> True or a bool value: how control left a block


@dataclass(eq=False)
class Generator:
    """A call of a generator function: one loop whose iterations each end with a yield. A for statement reads it.

    Its loop becomes the loop of the for statement: an iteration runs the generator's body in the generator's frame,
    then the statement's body in its own.
    """

    frame: Frame
    loop: ast.For
    value: ast.expr

    @classmethod
    def of(cls, frame: Frame, node: FunctionNode) -> Generator:
        """The generator of a function's frame; TypeError for a function of another form."""
        yields = [n for n in ast.walk(node) if isinstance(n, ast.Yield | ast.YieldFrom)]
        body = [] if isinstance(node, ast.Lambda) else node.body
        loop = body[-1] if body else None
        end = loop.body[-1] if isinstance(loop, ast.For) else None
        value = end.value if isinstance(end, ast.Expr) else None
        if (
            yields != [value]
            or not isinstance(loop, ast.For)
            or not isinstance(value, ast.Yield)
            or value.value is None
            or loop.orelse
            or escapes(loop.body)
            or escapes(body[:-1])
        ):
            raise TypeError(
                f"{frame.name}() yields: a generator of a kernel ends with a for statement, whose last statement is "
                "its one yield of a value, and nothing leaves it before"
            )
        return cls(frame, loop, value.value)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{self.frame.name}() yields: only a for statement reads it, as for x in f(...)")


class _RunTimeExit(Exception):
    """Raised when a while that started to run while tracing turns out to depend on values of the kernel."""


class _Attempt:
    """A trace that may be discarded: :meth:`undo` restores the variables and erases the ops built since.

    The ops are inserted into the kernel from the start, so after an error no op outside the kernel uses its values.
    """

    def __init__(self, scope: Expressions) -> None:
        self._before, self._block = Snapshot(scope), ir.InsertionPoint.current.block
        self._made = len(self._block.operations)

    def undo(self) -> None:
        self._before.restore()
        for op in reversed(list(self._block.operations)[self._made :]):
            op.operation.erase()


PASSED_THROUGH = (control._Again, _RunTimeExit)  # internal control flow of the front end rather than a user's error


class Loops(Expressions):
    """The loop statements; :class:`kvarn.dsl.frontend.Interpreter` has the other statements."""

    block_of: Callable[..., Flow | None]
    _test: Callable[[ast.expr], Any]
    _guarded: Callable[..., Flow | None]
    _changed: dict[int, set[str]]

    def visit_For(self, node: ast.For) -> Flow | None:
        if node.orelse:
            raise self.refuse(node, "for ... else: set a flag before break, and test it after the loop")
        before = len(self.suspended)
        take: Take = lambda item: self.assign(node.target, item)  # noqa: E731
        with self.at(node.iter):
            items = self.eval(node.iter)
            if isinstance(items, Generator):
                generator, items = items, self._begun(items)
                self.suspended.append(generator.frame)
                take = lambda item: self.assign(node.target, self._yielded(generator, item))  # noqa: E731
            if isinstance(items, range):
                items = RuntimeRange.of(items.start, items.stop, items.step)
            if not isinstance(items, RuntimeRange):
                if isinstance(items, Value):
                    raise TypeError(f"for needs a range or a Python sequence, got {describe(items)}: write range(n)")
                items = iter(items)
        try:
            if isinstance(items, RuntimeRange):
                with self.at(node):
                    return self._range_loop(node, items, take)
            return self._unrolled(node, items, take, 0)
        finally:
            del self.suspended[before:]

    def _begun(self, generator: Generator) -> Any:
        """Run a generator up to its loop and return what the loop iterates over."""
        self.frames.append(generator.frame)
        try:
            self.block_of(generator.frame.code.body[:-1])
            with self.at(generator.loop.iter):
                return self.eval(generator.loop.iter)
        finally:
            self.frames.pop()

    def _yielded(self, generator: Generator, item: Any) -> Any:
        """Run an iteration of a generator's loop up to its yield and return the value; its variables are restored."""
        frame, loop = generator.frame, generator.loop
        before = dict(frame.locals)
        self.frames.append(frame)
        try:
            for name in frame.flow.loops[id(loop)].rebound & before.keys():
                frame.locals[name] = Undefined(
                    f"{name!r}: a generator keeps no variable from one iteration to the next, carry it in the loop "
                    "that reads it"
                )
            self.assign(loop.target, item)
            self.block_of(loop.body[:-1])
            return self.eval(generator.value)
        finally:
            self.frames.pop()
            frame.locals.clear()
            frame.locals.update(before)

    def _unrolled(self, node: ast.For, items: Iterator[Any], take: Take, count: int) -> Flow | None:
        for item in items:
            count += 1
            if count > MOST_ITEMS:
                text = f"a loop that runs at compile time exceeds {MOST_ITEMS} iterations"
                raise KernelError(text, self.place_of(node))
            take(item)
            flow = {k: v for k, v in (self.block_of(node.body) or {}).items() if k != "continue"}
            if not flow:
                continue
            if any(v is True for v in flow.values()):
                return {k: v for k, v in flow.items() if k != "break"} or None
            after = self._guarded(node, flow, lambda c=count: self._unrolled(node, items, take, c), True)
            return {k: v for k, v in (after or {}).items() if k != "break"} or None
        return None

    def _loop(self, node: ast.For | ast.While, extra: tuple[str, ...] = ()) -> Loop:
        flow = self.frames[-1].flow
        target = bound(node.target) if isinstance(node, ast.For) else frozenset()
        changes = flow.loops[id(node)]
        changed = changes.bound | self._changed_by_calls(changes, self.name_or_none)
        names = [n for n in self.locals if n in changed and n in flow.head[id(node)] and n not in target]
        return Loop(self, [*names, *extra], {*changes.rebound, *extra}, flow.entry[id(node)])

    def name_or_none(self, name: str) -> Any:
        """The current value of a name; None if it has no value."""
        try:
            return self.name(name)
        except (NameError, TypeError):
            return None

    def _changed_by_calls(self, changes: Changes, resolve: Callable[[str], Any]) -> set[str]:
        """Variables that calls in a loop's body may change in place, judged by the source text.

        This is a first guess: a variable that it misses costs another trace of the body.
        """
        found: set[str] = set()
        for call in changes.calls:
            assert isinstance(call.func, ast.Name)
            callee = resolve(call.func.id)
            if isinstance(callee, Closure):
                node, inner = callee.node, _resolver(callee)
            elif (source := interpretable(callee)) is not None:
                node, inner = source.node, _quiet(lookup_of(callee))
            else:
                continue
            changed = self._changed_in_function(node, inner)
            parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            given = [*zip(parameters, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
            found |= {a.id for p, a in given if p in changed and isinstance(a, ast.Name)}
            found |= changed - {*parameters}
        return found

    def _changed_in_function(self, node: FunctionNode, resolve: Callable[[str], Any]) -> set[str]:
        """Parameters and variables of enclosing functions that a function may change in place."""
        known = self._changed.get(id(node))
        if known is None:
            known = self._changed[id(node)] = set()
            changes = flow_of(node).changes
            known |= (changes.bound | self._changed_by_calls(changes, resolve)) - changes.rebound
        return known

    def _range_loop(self, node: ast.For, r: RuntimeRange, take: Take) -> Flow | None:
        left = self.frames[-1].flow.leaves[id(node)] & {"break", "return"}
        if left:
            return self._leaving_loop(node, left, r, take)
        start, stop, step, index = r.bounds()

        def body(i: Value) -> None:
            take(index(i))
            self.block_of(node.body)

        control.for_loop(self._loop(node), start, stop, step, body)
        self._loop_target(node)
        return None

    def _loop_target(self, node: ast.For) -> None:
        for name in bound(node.target):
            self.locals[name] = Undefined(f"{name!r} is the variable of a run-time loop and has no value after it")

    def _leaving_loop(
        self, node: ast.For | ast.While, left: frozenset[str], r: RuntimeRange | None = None, take: Take | None = None
    ) -> Flow | None:
        """A loop that ``break`` or ``return`` may leave: an scf.while with flags."""
        if "return" in left and any(
            isinstance(n, ast.Return) and n.value is not None for s in node.body for n in ast.walk(s)
        ):
            raise self.refuse(node, "return of a value inside a run-time loop: assign it to a variable and break")
        tag = f" loop{id(node)}"
        going, returned, position = f"{tag}.going", f"{tag}.returned", f"{tag}.i"
        self.locals[going], self.locals[returned] = True, False
        extra: tuple[str, ...] = (going, returned)
        if r is not None:
            start, stop, step, index = r.bounds()
            self.locals[position] = start
            extra = (*extra, position)

        def test() -> Any:
            def holds() -> Any:
                if r is not None:
                    return self.locals[position] < stop
                assert isinstance(node, ast.While)
                return self._test(node.test)

            flag = self.locals[going]
            return flag & holds() if r is not None else control.logical_and(self, as_value(flag), holds)

        def body() -> None:
            if take is not None:
                take(index(self.locals[position]))
            flow = self.block_of(node.body) or {}
            gone = flow.get("return", False)
            stopped = flow.get("break", False)
            self.locals[returned] = gone
            if gone is True or stopped is True:
                self.locals[going] = False
            else:
                leaves = [f for f in (gone, stopped) if f is not False]
                self.locals[going] = ~(leaves[0] if len(leaves) == 1 else leaves[0] | leaves[1]) if leaves else True
            if r is not None:
                self.locals[position] = self.locals[position] + step

        control.while_loop(self._loop(node, extra), test, body)
        flag = self.locals[returned]
        for name in extra:
            del self.locals[name]
        if r is not None:
            assert isinstance(node, ast.For)
            self._loop_target(node)
        return {"return": flag} if "return" in left else None

    def visit_While(self, node: ast.While) -> Flow | None:
        if node.orelse:
            raise self.refuse(node, "while ... else: set a flag before break, and test it after the loop")
        if any(isinstance(n, ast.NamedExpr) for n in ast.walk(node.test)):
            raise self.refuse(
                node.test, ":= in the condition of a while: assign before the loop and at the end of its body"
            )
        first = self._static_test(node)
        if first is False:
            return None
        if first is not None:
            attempt = _Attempt(self)
            try:
                return self._static_while(node, first)
            except _RunTimeExit:  # its condition, or an exit from it, depends on values of the kernel
                attempt.undo()
        left = self.frames[-1].flow.leaves[id(node)] & {"break", "return"}
        with self.at(node):
            if left:
                return self._leaving_loop(node, left)
            control.while_loop(self._loop(node), lambda: self._test(node.test), lambda: self.block_of(node.body))
        return None

    def _static_test(self, node: ast.While) -> bool | None:
        """A while's condition if it is a Python value now; None for a loop of the kernel, including ``while True``."""
        if isinstance(node.test, ast.Constant):
            return None if node.test.value else False
        if any(isinstance(self.locals.get(n), Numeric) for n in loaded(node.test)):
            return None
        attempt = _Attempt(self)
        test = self._test(node.test)
        if isinstance(test, bool):
            return test
        attempt.undo()
        return None

    def _static_while(self, node: ast.While, test: Any) -> Flow | None:
        for _ in range(MOST_ITEMS):
            if not isinstance(test, bool):
                raise _RunTimeExit
            if not test:
                return None
            flow = {k: v for k, v in (self.block_of(node.body) or {}).items() if k != "continue"}
            if any(v is True for v in flow.values()):
                return {k: v for k, v in flow.items() if k != "break"} or None
            if flow:
                raise _RunTimeExit
            test = self._test(node.test)
        raise KernelError(
            f"a while that runs at compile time exceeds {MOST_ITEMS} iterations", self.place_of(node), self.callers()
        )


def _resolver(closure: Closure) -> Callable[[str], Any]:
    """The name lookup of a closure, for analysis of its source."""
    frame = closure.frame
    return lambda name: frame.locals[name] if name in frame.locals else _quiet(frame.lookup)(name)


def _quiet(lookup: Callable[[str], Any]) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        try:
            return lookup(name)
        except NameError:
            return None

    return find
