# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run-time control flow: scf ops whose results and loop-carried values are found by tracing.

A branch is traced into its block first, then variables and containers are compared and what differs becomes a result.
A loop body is traced with the variables that its AST binds as arguments; when the trace shows that something else
changed (a list through another name, an int in it), or that a Python number meets another dtype, it is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import DType, bool_

from . import intervals
from .builder import emit, emit_value, types
from .state import (
    NUMBERS,
    Fresh,
    LeafType,
    Same,
    Slot,
    Snapshot,
    Undefined,
    Variables,
    adopts,
    children,
    fill,
    is_leaf,
    is_mutable,
    leaf_type,
    part_name,
    same,
    shape_of,
    to_ir,
    truth,
    unify,
    write_parts,
    zero,
)
from .values import Value, Weak, describe, plain

RESULT = " result"  # the variable that keeps the value an inlined function returned
LEFT = " left"  # the variable set by a branch that control leaves: RETURNED or "loop"
RETURNED = "return"
DEAD = Undefined("it has no value here")  # the value of a variable that is bound again before it is read
_ABSENT = Undefined("absent")
# Ops that may run even if Python would not have evaluated them.
_SPECULATABLE = (
    "arith.", "math.", "vector.from_elements", "vector.broadcast", "vector.extract", "vector.insert", "vector.bitcast",
    "gpu.thread_id", "gpu.block_id", "gpu.block_dim", "gpu.grid_dim", "llvm.getelementptr",
)  # fmt: skip
_FAULTING = frozenset(
    ["arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.floordivsi", "arith.ceildivsi"]
)
_HOISTED_OPS = 12


# --- branches ------------------------------------------------------------------------------------


@dataclass
class _Merge:
    """Compares the variables after two branches and collects the leaves that become results."""

    first: dict[int, list[Any]]
    second: dict[int, list[Any]]
    pairs: list[tuple[Any, Any, LeafType]] = field(default_factory=list)
    _known: dict[tuple[int, int], Slot] = field(default_factory=dict)

    def plan(self, a: Any, b: Any, name: str) -> Any:
        if same(a, b):
            return Same(a)
        if isinstance(a, Undefined) or isinstance(b, Undefined):
            return Same(a if isinstance(a, Undefined) else b)
        if is_leaf(a) and is_leaf(b):
            return self._leaf(a, b, name)
        x, y = self.first.get(id(a), children(a)), self.second.get(id(b), children(b))
        if x is None or y is None or len(x) != len(y) or shape_of(a) != shape_of(b):
            return Same(
                Undefined(
                    f"{name!r} differs between the branches of a run-time condition ({describe(a)}, {describe(b)})"
                )
            )
        return Fresh(
            a, [self.plan(p, q, f"{name}{part_name(a, i)}") for i, (p, q) in enumerate(zip(x, y, strict=True))]
        )

    def _leaf(self, a: Any, b: Any, name: str) -> Any:
        key = (id(a), id(b))
        if key not in self._known or isinstance(a, NUMBERS) or isinstance(b, NUMBERS):
            kind = unify(a, b)
            if isinstance(kind, str):
                return Same(Undefined(f"{name!r} has no one type after a run-time condition: {kind}"))
            self.pairs.append((a, b, kind))
            self._known[key] = Slot(len(self.pairs) - 1)
        return self._known[key]

    def one_sided(self, value: Any, first: bool) -> Any:
        """The plan for a value of one branch that is not read after the other branch."""
        if isinstance(value, (*NUMBERS, Undefined)) or id(value) in self.first:
            return Same(value)
        if is_leaf(value):
            kind = leaf_type(value)
            self.pairs.append((value, None, kind) if first else (None, value, kind))
            return Slot(len(self.pairs) - 1)
        parts = (self.first if first else self.second).get(id(value), children(value))
        return Same(value) if parts is None else Fresh(value, [self.one_sided(p, first) for p in parts])

    def object_plan(
        self, x: Any, old: list[Any], a: list[Any], b: list[Any], left: tuple[str, str]
    ) -> list[Any] | None:
        """Plans for the items of a container that existed before the branches; None if neither branch changed it."""

        def unchanged(p: list[Any], q: list[Any]) -> bool:
            return len(p) == len(q) and all(i is j for i, j in zip(p, q, strict=True))

        if unchanged(a, old) and unchanged(b, old):
            return None
        if unchanged(a, b):
            return [Same(p) for p in a]
        if RETURNED in left:
            kept = b if left[0] == RETURNED else a
            return [self.one_sided(p, first=left[0] != RETURNED) for p in kept]
        if not len(a) == len(b) == len(old):
            raise TypeError(
                f"{describe(x)} changes its length under a run-time condition: its length must be known at compile time"
            )
        return [self.plan(p, q, f"an element of {describe(x)}") for p, q in zip(a, b, strict=True)]


def _left(variables: dict[str, Any]) -> str:
    """How control leaves a branch: RETURNED, ``"loop"`` (break or continue), or ``""`` if it may reach the end."""
    if LEFT in variables:
        return variables[LEFT]
    if variables.get(" return") is True:
        return RETURNED
    return "loop" if variables.get(" break") is True or variables.get(" continue") is True else ""


def branches(
    scope: Variables, condition: Value, then: Callable[[], object], otherwise: Callable[[], object],
    live: Iterable[str] | None = None, hoist: bool = False,
) -> None:  # fmt: skip
    """Trace both branches of a run-time condition and merge their effects into the scope.

    Parameters
    ----------
    live : iterable of str, optional
        Variables that are read later; other variables that differ are dropped. None: all are read.
    hoist : bool
        If both branches are a few ops without side effects, compute both and select.
    """
    before = Snapshot(scope)
    shell = emit("scf.if", (), [condition.ir], regions=2)
    first = _traced(shell.regions[0], then)
    locals_1, parts_1 = before.now()
    before.restore()
    second = _traced(shell.regions[1], otherwise)
    locals_2, parts_2 = before.now()
    before.restore()

    merge = _Merge(parts_1, parts_2)
    left = _left(locals_1), _left(locals_2)
    wanted = None if live is None else {*live}
    plans: dict[str, Any] = {}
    for name in {**locals_1, **locals_2}:
        sides = locals_1.get(name, _ABSENT), locals_2.get(name, _ABSENT)
        internal = name.startswith(" ")
        if name == LEFT:
            continue
        if sides[0] is sides[1]:
            plans[name] = Same(sides[0])
        elif RETURNED in left and not internal:
            kept = sides[left[0] == RETURNED]
            if kept is not _ABSENT and kept is not DEAD:
                plans[name] = merge.one_sided(kept, first=left[0] != RETURNED)
        elif wanted is not None and name not in wanted and not internal:
            plans[name] = Same(DEAD)
        elif sides[0] is DEAD or sides[1] is DEAD:
            plans[name] = merge.one_sided(sides[sides[0] is DEAD], first=sides[0] is not DEAD)
        elif sides[0] is _ABSENT or sides[1] is _ABSENT:
            missing = int(sides[1] is _ABSENT)
            if name == RESULT or left[missing]:  # the variable is not read after that branch
                plans[name] = merge.one_sided(sides[1 - missing], first=missing == 1)
            else:
                plans[name] = Same(Undefined(f"{name!r} is set in one branch of a run-time condition only"))
        else:
            plans[name] = merge.plan(*sides, name)
    objects = [
        (x, parts)
        for key, x in before.objects.items()
        if (parts := merge.object_plan(x, before.parts[key], parts_1[key], parts_2[key], left)) is not None
    ]

    results = _finish_if(shell, condition, first, second, merge.pairs, hoist)
    scope.locals.clear()
    scope.locals.update({name: fill(plan, results) for name, plan in plans.items()})
    for x, parts in objects:
        write_parts(x, [fill(p, results) for p in parts])


def _traced(region: ir.Region, body: Callable[[], object]) -> ir.Block:
    block = region.blocks.append()
    with ir.InsertionPoint(block):
        body()
    return block


def _finish_if(
    shell: ir.Operation,
    condition: Value,
    first: ir.Block,
    second: ir.Block,
    pairs: list[tuple[Any, Any, LeafType]],
    hoist: bool,
) -> list[Any]:
    """Add yields to the branches and results to the op, or replace the op by selects."""
    yields: list[list[ir.Value]] = []
    for side, block in enumerate((first, second)):
        with ir.InsertionPoint(block):
            yields.append([zero(p[2]) if p[side] is None else to_ir(p[side], p[2]) for p in pairs])
    if hoist and _speculatable(first, second):
        for block in (first, second):
            for op in list(block.operations):
                op.operation.move_before(shell)
        shell.erase()
        return [k.wrap(_select(condition, a, b, k)) for (_, _, k), a, b in zip(pairs, *yields, strict=True)]
    op = emit("scf.if", [kind.mlir() for _, _, kind in pairs], [condition.ir], regions=2)
    empty = not pairs and not len(second.operations)
    for region, block, values in zip(op.regions, (first, second), yields, strict=True):
        if block is second and empty:
            continue
        with ir.InsertionPoint(block):
            emit("scf.yield", (), values)
        block.append_to(region)
    shell.erase()
    return [kind.wrap(r) for (_, _, kind), r in zip(pairs, op.results, strict=True)]


def _speculatable(*blocks: ir.Block) -> bool:
    ops = [op.operation.name for b in blocks for op in b.operations]
    return len(ops) <= _HOISTED_OPS and all(n.startswith(_SPECULATABLE) and n not in _FAULTING for n in ops)


def _select(condition: Value, a: ir.Value, b: ir.Value, kind: LeafType) -> ir.Value:
    return emit_value("arith.select", kind.mlir(), [condition.ir, a, b])


def if_value(
    scope: Variables,
    condition: Any,
    then: Callable[[], Any],
    otherwise: Callable[[], Any],
    live: Iterable[str] | None = None,
) -> Any:
    """The value of one of two expressions. Only the chosen one is evaluated, unless evaluating both has no effect."""
    condition = truth(condition)
    if isinstance(condition, bool):
        return then() if condition else otherwise()
    name = " value"

    def bind(expression: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            scope.locals[name] = expression()

        return run

    branches(scope, condition, bind(then), bind(otherwise), live, hoist=True)
    value = scope.locals.pop(name)
    if isinstance(value, Undefined):
        raise TypeError(value.reason.replace(repr(name), "the value"))
    return value


def logical_and(scope: Variables, a: Any, b: Callable[[], Any]) -> Any:
    """``a and b()``; ``b`` is not evaluated when ``a`` is false, unless its evaluation has no effect."""
    return if_value(scope, a, lambda: truth(b()), lambda: False)


def logical_or(scope: Variables, a: Any, b: Callable[[], Any]) -> Any:
    return if_value(scope, a, lambda: True, lambda: truth(b()))


# --- loops ---------------------------------------------------------------------------------------


class _Again(Exception):
    """Raised when the body of a loop must be traced again, with more carried values or another dtype."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop


@dataclass
class _Carried:
    """One loop-carried leaf."""

    init: Any
    kind: LeafType
    name: str
    key: Any


class Loop:
    """The loop-carried values of one loop, found over repeated traces of its body.

    Parameters
    ----------
    scope : Scope
    names : iterable of str
        Variables that the body binds or changes and that are read at its head or after the loop.
    rebound : iterable of str
        The subset of ``names`` bound by assignment (the others are changed through an index or attribute).
    needed : iterable of str or None
        Variables that the body may read before it binds them; None: all.
    """

    def __init__(
        self, scope: Variables, names: Iterable[str], rebound: Iterable[str], needed: Iterable[str] | None = None
    ) -> None:
        self.scope, self.needed = scope, None if needed is None else {*needed}
        self.names = [n for n in names if n in scope.locals and not isinstance(scope.locals[n], Undefined)]
        self.rebound = {*rebound}
        self.kinds: dict[Any, LeafType] = {}  # dtypes found by an earlier trace
        self.promoted: set[Any] = set()  # Python ints in containers that the body changes
        self.objects: dict[int, Any] = {}  # containers changed in place
        for n in self.names:
            if n not in self.rebound:
                self._add_object(scope.locals[n])
        self.before = Snapshot(scope)

    def _add_object(self, x: Any) -> None:
        parts = children(x)
        if parts is None or id(x) in self.objects:
            return
        if is_mutable(x):
            self.objects[id(x)] = x
        for part in parts:
            self._add_object(part)

    def run(self, attempt: Callable[[Loop], list[Any]]) -> None:
        """Trace with ``attempt`` (it calls :meth:`enter` and :meth:`leave`, and returns results) until it settles."""
        for _ in range(32):
            self._plan()
            try:
                results = attempt(self)
            except _Again as again:
                if again.loop is not self:
                    raise
                self.before.restore()
                continue
            self._after(results)
            return
        raise TypeError("the types of the variables of a loop do not settle: cast them before the loop")

    def _plan(self) -> None:
        self.carried: list[_Carried] = []
        self.plans: dict[str, Any] = {}
        self.object_plans: dict[int, list[Any]] = {}
        self.broken: dict[str, str] = {}
        for n in self.names:
            value = self.scope.locals[n]
            if n in self.rebound or (is_leaf(value) and not is_mutable(value)):
                self.plans[n] = self._leaf_plan(value, n, (n,), fresh=True)
        for key, x in self.objects.items():
            self.object_plans[key] = [
                self._leaf_plan(p, f"{describe(x)}, element {part_name(x, i)}", (key, i), fresh=False)
                for i, p in enumerate(children(x) or [])
            ]

    def _leaf_plan(self, value: Any, name: str, key: Any, fresh: bool) -> Any:
        if is_leaf(value):
            number = isinstance(plain(value), NUMBERS)
            if number and len(key) > 1 and not isinstance(plain(value), float) and key not in self.promoted:
                return Same(value)
            kind = self.kinds.get(key) or leaf_type(value)
            self.carried.append(_Carried(value, kind, name, key))
            return Slot(len(self.carried) - 1)
        parts = children(value)
        if parts is None or (is_mutable(value) and not fresh):
            return Same(value)
        return Fresh(
            value, [self._leaf_plan(p, f"{name}{part_name(value, i)}", (*key, i), fresh) for i, p in enumerate(parts)]
        )

    def inits(self) -> list[ir.Value]:
        return [to_ir(c.init, c.kind) for c in self.carried]

    def types(self) -> list[ir.Type]:
        return [c.kind.mlir() for c in self.carried]

    def enter(self, arguments: Iterable[ir.Value]) -> None:
        """Set the scope to a block's arguments."""
        self._set([self._argument(c, a) for c, a in zip(self.carried, arguments, strict=True)])
        self._entered = Snapshot(self.scope)

    def _argument(self, c: _Carried, argument: ir.Value) -> Any:
        """The value of a carried leaf inside the body."""
        value, init = c.kind.wrap(argument), plain(c.init)
        if not isinstance(value, Value) or not isinstance(init, (*NUMBERS, Weak)):
            return value

        def retype(dtype: DType) -> None:
            if isinstance(init, Weak):
                init.retype(dtype)  # a variable of the enclosing loop
            elif adopts(init, LeafType(dtype)) and c.key not in self.kinds:
                self.kinds[c.key] = LeafType(dtype)
                raise _Again(self)

        return Weak(value.ir, value.dtype, retype)

    def _set(self, values: list[Any]) -> None:
        self.arguments = values
        for n, plan in self.plans.items():
            self.scope.locals[n] = fill(plan, values)
        for key, plans in self.object_plans.items():
            write_parts(self.objects[key], [fill(p, values) for p in plans])

    def leave(self) -> list[ir.Value]:
        """The values that the body yields, read from the scope at its end."""
        ends: list[Any] = list(self.arguments)
        again = False
        for n, plan in self.plans.items():
            value = self.scope.locals.get(n, DEAD)
            if value is DEAD:  # control does not reach the end of the body, so the yielded value is not read
                continue
            problem = self._match(plan, value, (n,), ends, n)
            if problem is not None and (self.needed is None or n in self.needed or n.startswith(" ")):
                raise TypeError(problem)
            if problem is not None:
                self.broken[n] = problem
        for key, plans in self.object_plans.items():
            x = self.objects[key]
            parts = children(x) or []
            if len(parts) != len(plans):
                raise TypeError(
                    f"{describe(x)} changes its length in a run-time loop: its length must be known at compile time"
                )
            for i, (plan, value) in enumerate(zip(plans, parts, strict=True)):
                if (
                    problem := self._match(plan, value, (key, i), ends, f"element {part_name(x, i)} of {describe(x)}")
                ) is not None:
                    raise TypeError(problem)
        for key, x in self._entered.objects.items():  # a container that the body changed and that is not carried yet
            if key in self.before.objects and key not in self.objects:
                now = children(x) or []
                then = self._entered.parts[key]
                if len(now) != len(then) or any(not same(a, b) for a, b in zip(now, then, strict=True)):
                    self.objects[key] = x
                    again = True
        again = self._settle(ends) or again
        if again:
            raise _Again(self)
        return [to_ir(end, c.kind) for end, c in zip(ends, self.carried, strict=True)]

    def _match(self, plan: Any, value: Any, key: Any, ends: list[Any], name: str) -> str | None:
        """Collect the leaves of ``value`` into the slots of a plan; the mismatch as text, or None."""
        if isinstance(plan, Slot):
            if isinstance(value, Undefined):
                return f"{value.reason}, and the next iteration needs it"
            if not is_leaf(value):
                return _changed(name, self.carried[plan.number].kind, describe(value))
            ends[plan.number] = value
            return None
        if isinstance(plan, Fresh):
            parts = children(value)
            if parts is None or shape_of(value) != shape_of(plan.template):
                return _changed(name, describe(plan.template), describe(value))
            for i, (p, part) in enumerate(zip(plan.parts, parts, strict=True)):
                if (problem := self._match(p, part, (*key, i), ends, f"{name}{part_name(value, i)}")) is not None:
                    return problem
            return None
        if same(plan.value, value):
            return None
        if isinstance(plain(plan.value), NUMBERS) and is_leaf(value):
            self.promoted.add(key)
            raise _Again(self)
        return value.reason if isinstance(value, Undefined) else _changed(name, describe(plan.value), describe(value))

    def _settle(self, ends: list[Any]) -> bool:
        """Check the types of the yielded values; True if a Python number must start with another type."""
        again = False
        for end, c in zip(ends, self.carried, strict=True):
            end, init = plain(end), plain(c.init)
            if isinstance(end, NUMBERS):
                if adopts(end, c.kind):
                    continue
                kind = leaf_type(end)
            else:
                kind = leaf_type(end)
                if kind == c.kind or (kind.dtype is c.kind.dtype and c.kind.lanes and not kind.lanes):
                    continue
            widens = kind.dtype is c.kind.dtype and not c.kind.lanes
            if not (isinstance(init, NUMBERS) and adopts(init, kind)) and not widens:
                raise TypeError(
                    f"{c.name!r} is {c.kind} when an iteration starts and {kind} when it ends: "
                    "cast it to one type before the loop"
                )
            self.kinds[c.key] = kind
            again = True
        return again

    def _after(self, results: list[Any]) -> None:
        """Set the scope to the state after the loop."""
        changed = dict(self.scope.locals)
        self.before.restore()
        for n, value in changed.items():
            if n in self.plans or value is self._entered.locals.get(n):
                continue
            if n in self.before.locals:  # not carried, so it is not read later
                self.scope.locals[n] = DEAD
            else:
                self.scope.locals[n] = Undefined(f"{n!r} is set only inside a run-time loop, which may not run")
        self._set(results)
        for n, problem in self.broken.items():
            self.scope.locals[n] = Undefined(problem)


def _changed(name: str, start: Any, end: Any) -> str:
    return (
        f"{name!r} is {start} when an iteration starts and {end} when it ends: a run-time loop carries numbers, "
        "vectors, pointers, and lists, tuples and dicts of them that keep their shape"
    )


def for_loop(loop: Loop, start: Value, stop: Value, step: Value, body: Callable[[Value], None]) -> None:
    """Build an scf.for over integers of one type. ``body`` gets the induction variable; ``step`` must be positive."""
    dtype = start.dtype
    bounds = intervals.of_loop(start.bounds, stop.bounds, step.bounds, dtype)

    def attempt(loop: Loop) -> list[Any]:
        inits = loop.inits()
        attributes: Any = {"unsignedCmp": types().unit} if dtype.kind == "u" else None
        op = emit("scf.for", loop.types(), [start.ir, stop.ir, step.ir, *inits], attributes, regions=1)
        arguments = [start.ir.type, *loop.types()]
        place = [ir.Location.current] * len(arguments)
        block = ir.Block.create_at_start(op.regions[0], arguments, place)
        try:
            with ir.InsertionPoint(block):
                loop.enter(list(block.arguments)[1:])
                body(Value(block.arguments[0], dtype, bounds=bounds))
                emit("scf.yield", (), loop.leave())
        except _Again:
            op.erase()
            raise
        return [c.kind.wrap(r) for c, r in zip(loop.carried, op.results, strict=True)]

    loop.run(attempt)


def while_loop(loop: Loop, test: Callable[[], Any], body: Callable[[], object]) -> None:
    """Build an scf.while. ``test`` computes the condition."""

    def attempt(loop: Loop) -> list[Any]:
        op = emit("scf.while", loop.types(), loop.inits(), regions=2)
        place = [ir.Location.current] * len(loop.carried)
        try:
            check = ir.Block.create_at_start(op.regions[0], loop.types(), place)
            with ir.InsertionPoint(check):
                loop.enter(check.arguments)
                condition = truth(test())
                if isinstance(condition, bool):
                    condition = Value(to_ir(condition, LeafType(bool_)), bool_)
                emit("scf.condition", (), [condition.ir, *check.arguments])
            block = ir.Block.create_at_start(op.regions[1], loop.types(), place)
            with ir.InsertionPoint(block):
                loop.enter(block.arguments)
                body()
                emit("scf.yield", (), loop.leave())
        except _Again:
            op.erase()
            raise
        return [c.kind.wrap(r) for c, r in zip(loop.carried, op.results, strict=True)]

    loop.run(attempt)
