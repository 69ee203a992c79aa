# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Control flow as functions, for code without source text (a REPL, ``exec``) and for builders.

``kv.if_``, ``kv.for_`` and ``kv.while_`` take Python functions. State is passed in and returned as values; the
functions may also change lists that they close over in place, if the lists keep their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlir import ir

from . import control, intervals
from .builder import emit, types
from .calls import Closure, RuntimeRange
from .control import Loop
from .state import Scope, truth
from .values import Value, as_value

__all__ = ["for_", "if_", "loop", "when", "while_"]

_STATE = " state"


def _scope(variables: dict[str, Any], *functions: Any) -> Scope:
    """A scope with the variables that the functions close over."""
    others: list[Any] = []
    for f in functions:
        if isinstance(f, Closure):
            others += [f.frame.locals]
        for cell in getattr(f, "__closure__", None) or ():
            try:
                others.append(cell.cell_contents)
            except ValueError:
                continue
    return Scope(variables, others)


def if_(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any] | None = None) -> Any:
    """The value of ``then()`` or ``otherwise()``; only one of them runs. Both return the same structure, or None."""
    otherwise = otherwise or (lambda: None)
    return control.if_value(_scope({}, then, otherwise), condition, then, otherwise)


def for_(start: Any, stop: Any = None, step: Any = 1, *, body: Callable[..., Any], init: Any = ()) -> Any:
    """Run ``body(i, *init)`` for i in ``range(start, stop, step)``; ``for_(n, body=f)`` starts at 0.

    With ``init`` (a value or a tuple) ``body`` returns the values of the next iteration, and ``for_`` returns the last.
    """
    r = RuntimeRange.of(start) if stop is None else RuntimeRange.of(start, stop, step)
    scope, single = _scope({_STATE: init if isinstance(init, tuple) else (init,)}, body), not isinstance(init, tuple)
    low, high, by, index = r.bounds()

    def run(i: Value) -> None:
        _advance(scope, body(index(i), *scope.locals[_STATE]), single)

    control.for_loop(Loop(scope, [_STATE], [_STATE]), low, high, by, run)
    return scope.locals[_STATE][0] if single else scope.locals[_STATE]


def while_(test: Callable[..., Any], body: Callable[..., Any], init: Any = ()) -> Any:
    """Run ``body(*init)``, which returns the next values, while ``test(*init)`` is true; return the last values."""
    scope, single = (
        _scope({_STATE: init if isinstance(init, tuple) else (init,)}, test, body),
        not isinstance(init, tuple),
    )
    control.while_loop(
        Loop(scope, [_STATE], [_STATE]),
        lambda: test(*scope.locals[_STATE]),
        lambda: _advance(scope, body(*scope.locals[_STATE]), single),
    )
    return scope.locals[_STATE][0] if single else scope.locals[_STATE]


def _advance(scope: Scope, returned: Any, single: bool) -> None:
    state = (
        (returned,)
        if single
        else ()
        if returned is None
        else tuple(returned)
        if isinstance(returned, list | tuple)
        else (returned,)
    )
    if len(state) != len(scope.locals[_STATE]):
        raise TypeError(
            f"the body of a loop must return {len(scope.locals[_STATE])} values, as many as init has, got {len(state)}"
        )
    scope.locals[_STATE] = state


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """``with kv.when(c):`` runs its block if the condition is true. Values made in the block are local to it."""
    condition = truth(condition)
    condition = as_value(condition)
    op = emit("scf.if", (), [condition.ir], regions=2)
    with ir.InsertionPoint(op.regions[0].blocks.append()):
        yield
        emit("scf.yield")


@contextmanager
def loop(start: Any, stop: Any = None, step: Any = 1) -> Iterator[Value]:
    """``with kv.loop(n) as i:`` runs its block for each i. Nothing is carried from iteration to iteration.

    For functions without source text; in a kernel with source, write ``for``.
    """
    r = RuntimeRange.of(start) if stop is None else RuntimeRange.of(start, stop, step)
    low, high, by, index = r.bounds()
    attributes: Any = {"unsignedCmp": types().unit} if low.dtype.kind == "u" else None
    op = emit("scf.for", (), [low.ir, high.ir, by.ir], attributes, regions=1)
    block = ir.Block.create_at_start(op.regions[0], [low.ir.type], [ir.Location.current])
    with ir.InsertionPoint(block):
        bounds = intervals.of_loop(low.bounds, high.bounds, by.bounds, low.dtype)
        yield index(Value(block.arguments[0], low.dtype, bounds=bounds))
        emit("scf.yield")
