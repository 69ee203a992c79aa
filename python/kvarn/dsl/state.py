# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""State carried by loops and branches: Python objects as trees whose leaves are values of the kernel.

Leaves are scalars, vectors, pointers and Python numbers. Lists, tuples, dicts, dataclasses and namespaces are inner
nodes. All other objects are opaque: they may be used, but must not change under run-time control flow.

A *plan* is a tree with a :class:`Slot` for every leaf that becomes an SSA value; :func:`fill` builds the object.
"""

from __future__ import annotations

import dataclasses
import itertools
import types as _types
from collections.abc import Iterable
from typing import Any, Protocol

from mlir import ir

from kvarn.dialect.dtypes import DType, bool_, f32

from .builder import Lanes, types
from .memory import Pointer
from .tiles import Tile
from .values import Numeric, Value, Vector, Weak, broadcast, cast, describe, literal, number_dtype, plain, wrap

_ATOMS = frozenset(
    [
        int,
        float,
        bool,
        str,
        type(None),
        Value,
        Weak,
        Vector,
        Tile,
        Pointer,
        _types.FunctionType,
        _types.ModuleType,
        type,
        DType,
    ]
)
NUMBERS = (bool, int, float)
MOST_ITEMS = 100_000  # items of an iterable that tracing unpacks, and iterations of a loop that runs while tracing


def items_of(values: Iterable[Any]) -> list[Any]:
    """The items of a Python iterable that is unpacked while tracing."""
    found = list(itertools.islice(values, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise ValueError(f"{describe(values)} has more than {MOST_ITEMS} items, which tracing would take one by one")
    return found


class Undefined:
    """A variable without a value at this point; ``reason`` says why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


# --- containers ----------------------------------------------------------------------------------


def children(x: Any) -> list[Any] | None:
    """The items of a container; None for any other object."""
    kind = type(x)
    if kind in _ATOMS:
        return None
    if isinstance(x, list | tuple):
        return list(x)
    if kind is dict:
        return list(x.values())
    if is_record(x):
        return list(vars(x).values())
    return None


def is_record(x: Any) -> bool:
    """Whether ``x`` is a dataclass instance or a namespace, whose attributes are its items."""
    if getattr(type(x), "OPAQUE", False):
        return False
    return (dataclasses.is_dataclass(x) and not isinstance(x, type | DType) and hasattr(x, "__dict__")) or isinstance(
        x, _types.SimpleNamespace
    )


def is_mutable(x: Any) -> bool:
    """Whether ``x`` is a container that can be changed in place."""
    if type(x) in _ATOMS or isinstance(x, tuple):
        return False
    if isinstance(x, list) or type(x) is dict:
        return True
    return is_record(x) and not getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False)


def shape_of(x: Any) -> Any:
    """A key that two containers must share to be merged item by item."""
    if isinstance(x, list | tuple):
        return type(x), len(x)
    return type(x), tuple(x if type(x) is dict else vars(x))


def part_name(x: Any, i: int) -> str:
    if isinstance(x, list | tuple):
        return f"[{i}]"
    return f"[{list(x)[i]!r}]" if type(x) is dict else f".{list(vars(x))[i]}"


def rebuilt(x: Any, parts: list[Any]) -> Any:
    """A container like ``x`` with other items."""
    if isinstance(x, tuple):
        make = getattr(type(x), "_make", tuple)  # a namedtuple
        return make(parts)
    if isinstance(x, list):
        return list(parts)
    if type(x) is dict:
        return dict(zip(x, parts, strict=True))
    new = object.__new__(type(x))
    vars(new).update(zip(vars(x), parts, strict=True))
    return new


def write_parts(x: Any, parts: list[Any]) -> None:
    """Replace the items of a mutable container."""
    if isinstance(x, list):
        x[:] = parts
    elif type(x) is dict:
        for key, part in zip(list(x), parts, strict=True):
            x[key] = part
    else:
        for key, part in zip(list(vars(x)), parts, strict=True):
            vars(x)[key] = part


def restore(x: Any, keys: Any, parts: list[Any]) -> None:
    """Restore the keys and items of a mutable container."""
    if isinstance(x, list):
        x[:] = parts
        return
    target = x if type(x) is dict else vars(x)
    target.clear()
    target.update(zip(keys, parts, strict=True))


def mutables(roots: Iterable[Any]) -> dict[int, Any]:
    """All mutable containers reachable from some values, by id."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [r for r in roots if type(r) not in _ATOMS]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        parts = children(x)
        if parts is None:
            continue
        seen.add(id(x))
        if is_mutable(x):
            found[id(x)] = x
        stack.extend(p for p in parts if type(p) not in _ATOMS)
    return found


class Variables(Protocol):
    """Variables, and the root values from which mutable containers are reachable: the state of control flow."""

    @property
    def locals(self) -> dict[str, Any]: ...

    def roots(self) -> Iterable[Any]: ...


class Snapshot:
    """The variables of a scope, and the items of every mutable container reachable from it."""

    def __init__(self, scope: Variables) -> None:
        self.scope = scope
        self.locals = dict(scope.locals)
        self.objects = mutables(scope.roots())
        self.parts = {key: children(x) or [] for key, x in self.objects.items()}
        self.keys = {
            key: None if isinstance(x, list) else list(x if type(x) is dict else vars(x))
            for key, x in self.objects.items()
        }

    def now(self) -> tuple[dict[str, Any], dict[int, list[Any]]]:
        """The current variables and container items."""
        return dict(self.scope.locals), {key: children(x) or [] for key, x in self.objects.items()}

    def restore(self) -> None:
        self.scope.locals.clear()
        self.scope.locals.update(self.locals)
        for key, x in self.objects.items():
            restore(x, self.keys[key], self.parts[key])


class Scope:
    """The variables of control flow written as functions."""

    def __init__(self, variables: dict[str, Any] | None = None, others: Iterable[Any] = ()) -> None:
        self.locals = {} if variables is None else variables
        self._others = list(others)

    def roots(self) -> Iterable[Any]:
        return [*self.locals.values(), *self._others]


# --- leaves --------------------------------------------------------------------------------------


@dataclasses.dataclass
class LeafType:
    """The type of a leaf as an SSA value: a scalar or vector dtype, or a pointer's address space."""

    dtype: DType | None
    lanes: Lanes = 0
    space: int = 0

    def mlir(self) -> ir.Type:
        return types().of(self.dtype, self.lanes) if self.dtype else types().pointers[self.space]

    def wrap(self, value: ir.Value) -> Any:
        return wrap(value, self.dtype, self.lanes) if self.dtype else Pointer(value, self.space)

    def __str__(self) -> str:
        if self.dtype is None:
            return "a pointer"
        if isinstance(self.lanes, tuple):
            return f"a {self.dtype.name} tile of shape {self.lanes}"
        return f"{self.dtype.name} x {self.lanes}" if self.lanes else self.dtype.name


def is_leaf(x: Any) -> bool:
    return isinstance(x, (Numeric, Pointer, *NUMBERS)) or (hasattr(x, "item") and isinstance(plain(x), NUMBERS))


def leaf_type(x: Any) -> LeafType:
    """The type of a leaf as an SSA value; Python numbers have their default dtype."""
    x = plain(x)
    if isinstance(x, Numeric):
        return LeafType(x.dtype, x.lanes)
    if isinstance(x, Pointer):
        return LeafType(None, 0, x.space)
    return LeafType(number_dtype(x))


def adopts(number: Any, kind: LeafType) -> bool:
    """Whether a Python number can become a constant of a leaf type."""
    if kind.dtype is None:
        return False
    if isinstance(number, bool):
        return kind.dtype is bool_
    if kind.dtype is bool_:
        return False
    return isinstance(number, int) or kind.dtype.is_float


def unify(a: Any, b: Any) -> LeafType | str:
    """The common leaf type of two leaves, or the reason why there is none."""
    a, b = plain(a), plain(b)
    static_a, static_b = isinstance(a, NUMBERS), isinstance(b, NUMBERS)
    x, y = leaf_type(a), leaf_type(b)
    if static_a and static_b:
        if isinstance(a, bool) != isinstance(b, bool):
            return f"it is {a!r} on one side and {b!r} on the other"
        if isinstance(a, float) or isinstance(b, float):
            return LeafType(f32)
        return x if x.dtype and y.dtype and x.dtype.bits >= y.dtype.bits else y
    if static_a or static_b:
        number, kind = (a, y) if static_a else (b, x)
        return kind if adopts(number, kind) else f"it is {number!r} on one side and {kind} on the other: write the cast"
    if x == y:
        return x
    if x.dtype is y.dtype and x.dtype is not None and 0 in (x.lanes, y.lanes):
        return x if x.lanes else y
    return f"it is {x} on one side and {y} on the other: cast one of them"


def to_ir(x: Any, kind: LeafType) -> ir.Value:
    """A leaf as an SSA value of a compatible leaf type."""
    x = plain(x)
    if isinstance(x, NUMBERS):
        return literal(x, kind.dtype, kind.lanes)  # type: ignore[arg-type]
    if isinstance(x, Numeric) and kind.lanes and not x.lanes:
        return broadcast(x, kind.lanes).ir
    return x.ir


def zero(kind: LeafType) -> ir.Value:
    """A placeholder value of a leaf type, where the value is not read."""
    if kind.dtype is None:
        from .builder import emit_value

        return emit_value("llvm.mlir.zero", kind.mlir())
    return literal(False if kind.dtype is bool_ else 0, kind.dtype, kind.lanes)


# --- plans ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Slot:
    """The position of a leaf in a plan."""

    number: int


@dataclasses.dataclass
class Fresh:
    """A container in a plan: of the type of ``template``, with new items."""

    template: Any
    parts: list[Any]


@dataclasses.dataclass
class Same:
    """An object in a plan that is kept unchanged."""

    value: Any


def fill(plan: Any, values: list[Any]) -> Any:
    """Build the object of a plan from ``values`` for its slots."""
    if isinstance(plan, Slot):
        return values[plan.number]
    if isinstance(plan, Fresh):
        return rebuilt(plan.template, [fill(p, values) for p in plan.parts])
    return plan.value if isinstance(plan, Same) else plan


def same(a: Any, b: Any) -> bool:
    """Whether two compile-time values are identical."""
    if a is b:
        return True
    if isinstance(a, (Numeric, Pointer)) or isinstance(b, (Numeric, Pointer)) or type(a) is not type(b):
        return False
    if isinstance(a, (*NUMBERS, str)):
        return a == b and str(a) == str(b)  # 0.0 is not -0.0
    return isinstance(a, _types.MethodType | _types.BuiltinMethodType) and a == b


def truth(x: Any) -> Any:
    """A condition as a Python bool or a bool value; a number is true if it is nonzero."""
    if not isinstance(x, Numeric):
        if isinstance(x, Pointer):
            raise TypeError("a pointer is not a condition")
        return bool(x)
    if isinstance(x.lanes, tuple):
        raise TypeError(
            f"a condition must be a scalar, got {describe(x)}: of tiles write a & b, a | b, ~a, (a <= b) & (b < c), "
            "and kv.where for if"
        )
    if x.lanes:
        raise TypeError(f"a condition must be a scalar, got {describe(x)}: reduce it first")
    return x if x.dtype is bool_ else cast(x, bool_)
