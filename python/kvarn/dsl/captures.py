# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values that compiled code depends on besides its arguments: one rule for kernels, score functions and mask functions.

Compiled code is cached under the key that :func:`captured` computes, so code compiled for other values is never reused.
The key covers the function's code, the variables it closes over, its defaults, its attributes and the globals it names,
and the same of every function reached through them. Numbers, strings, dtypes, tuples and NumPy scalars are compared by
value. Lists, dictionaries, sets, small NumPy arrays, classes and objects are compared by contents; of modules, classes
and objects only the attributes that the code names are read. Any other value is refused, unless every use of it is
within ``kv.static(...)``: it is then compared by identity, and its contents are read when the kernel is traced.

The traversal takes about 100 us. It generates a check of a few comparisons per name (:meth:`Captured.same`); the
traversal is repeated only when the check fails.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import dis
import functools
import importlib
import itertools
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, CollectionSpec, OperandSpec
from kvarn.dialect.tma_layout import TmaSpec

from .builder import OfTrace
from .calls import NATIVE_PACKAGES
from .identity import identity
from .masks import Mask
from .memory import BufferSpec
from .source import source_of

MOST_VALUES = 2000  # values in the containers and objects of one function
MOST_BYTES = 1 << 14  # bytes of one array
_PLANS = 64  # checks cached per code object, e.g. of a lambda that closes over different numbers

_LEAVES = frozenset((
    int, bool, str, bytes, float, complex, type(None), type(...), type(NotImplemented), range, DType, BufferSpec,
    CacheSpec, CollectionSpec, OperandSpec, TmaSpec,
))  # fmt: skip
# Immutable objects implemented in C, compared by identity.
_FIXED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType,
    types.GenericAlias, types.UnionType, type(vars(collections.namedtuple("_", "x"))["x"]),
)  # fmt: skip
# Builtins that read attributes whose names do not occur in the code.
_DYNAMIC = frozenset((
    "getattr", "hasattr", "vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__", "asdict",
    "astuple", "getmembers", "getattr_static",
))  # fmt: skip
Chains = frozenset[tuple[str, ...]]  # the attribute chains that follow a name, one per use
BARE: tuple[str, ...] = ()  # a use of the value itself, without an attribute
_WHOLE: Chains = frozenset([BARE])
_MISSING = object()


class Opaque:
    """A value compared by identity, without a name in other processes."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Named(Opaque):
    """A value compared by identity in this process, and by its name in other processes."""

    __slots__ = ("name",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value)
        self.name = name

    def __repr__(self) -> str:
        return f"named:{self.name}"


class Code:
    """A code object, as a number that equal code objects share: hashing code is slow."""

    __slots__ = ("code", "number")
    _numbers: dict[int, tuple[types.CodeType, int]] = {}
    _equal: dict[types.CodeType, int] = {}

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        found = self._numbers.get(id(code))
        if found is None:
            found = self._numbers[id(code)] = code, self._equal.setdefault(code, len(self._equal))
        self.number = found[1]

    def __eq__(self, other: object) -> bool:
        return type(other) is Code and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Captured:
    """The values that a function's code depended on when it was traversed.

    Attributes
    ----------
    number : int
        Equal for equal captured values, and only for them.
    key : hashable
        The captured values, as tuples of plain values, :class:`Code`, :class:`Named` and :class:`Opaque`.
    modules : frozenset of str
        Modules of the function and of the functions that it reads.
    unnamed : str
        A captured value without a name in other processes, and the path to it; "" if there is none.
    """

    __slots__ = ("_lines", "_same", "key", "modules", "number", "unnamed")

    def __init__(self, walk: _Walk, key: Hashable) -> None:
        number = _keys.get(key)
        if number is None:
            if len(_keys) >= 1 << 14:
                _keys.clear()
            number = _keys[key] = next(_numbers)
        self.key, self.number, self.unnamed = key, number, walk.unnamed
        self.modules = frozenset(str(f.__globals__.get("__name__")) for f in walk.functions)
        self._lines: tuple[list[str], list[Any]] = walk.lines
        self._same: Callable[[types.FunctionType], bool] | None = None

    @property
    def same(self) -> Callable[[types.FunctionType], bool]:
        """A predicate ``same(function)``: whether a function with this code captures the same values."""
        if self._same is None:  # compiled at its first use
            self._same = _checker(*self._lines)
        return self._same

    def same_of(self, function: types.FunctionType) -> Callable[[types.FunctionType], bool]:
        """:attr:`same` for this function object only, which the predicate keeps alive.

        Checks of what cannot change are omitted, and plain values are compared by identity.
        """
        lines, looked = self._lines
        constants = [*looked, function, *(function.__closure__ or ())]
        own = [
            _CELL.sub(lambda found: f"c{len(looked) + 1 + int(found[1])}", line)
            for line in lines
            if not line.startswith(_OF_GLOBALS)
        ]
        conditions = _conditions(own, constants, function)
        if conditions is not None and _native is not None:
            return _native(function, conditions)
        return _checker([f"if f is not c{len(looked)}: return False", *own], constants)


_keys: dict[Hashable, int] = {}
_numbers = itertools.count()
_known: dict[int, tuple[types.CodeType, list[Captured]]] = {}  # by id of the code object


def captured(function: types.FunctionType, arrays: bool = True) -> Captured:
    """The values that a function's code depends on besides its arguments.

    Parameters
    ----------
    function : function
    arrays : bool
        Whether small NumPy arrays are compared by contents; otherwise they are refused.

    Raises
    ------
    TypeError
        For a mutable value that cannot be compared; the message names it.
    """
    code = function.__code__
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = code, []
    plans = known[1]
    for plan in plans:
        if plan.same(function):
            return plan
    attributes, dynamic = _names(code).attributes, _names(code).dynamic
    while True:  # functions found by a traversal name further attributes
        walk = _Walk(attributes, dynamic, arrays)
        key = walk.root(function)
        names = [_names(f.__code__) for f in walk.functions]
        more = attributes.union(*(n.attributes for n in names))
        if more == attributes and dynamic == any(n.dynamic for n in names):
            break
        attributes, dynamic = more, any(n.dynamic for n in names)
    found = Captured(walk, key)
    if len(plans) >= _PLANS:
        del plans[-_PLANS // 2 :]
    plans.insert(0, found)
    return found


def value_key(value: Any, path: str) -> Hashable:
    """The key of a static argument's value, by the same rule, reading all of its contents."""
    return _Walk(frozenset(), True, True).value(value, path, _WHOLE)


# --- names in code ---------------------------------------------------------------------------------


class _Names(NamedTuple):
    """Names read by a code object and the code objects nested in it, each with the attribute chains that follow it."""

    chains: dict[str, Chains]
    cells: frozenset[str]  # the names that are variables of an enclosing function
    attributes: frozenset[str]
    dynamic: bool


_LOADS = frozenset((
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS",
    "LOAD_FROM_DICT_OR_DEREF",
))  # fmt: skip
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_names_of: dict[int, tuple[types.CodeType, _Names]] = {}


def _names(code: types.CodeType) -> _Names:
    found = _names_of.get(id(code))
    if found is None:
        found = _names_of[id(code)] = code, _read_names(code)
    return found[1]


def _read_names(code: types.CodeType) -> _Names:
    chains: dict[str, set[tuple[str, ...]]] = {}
    attributes: set[str] = set()
    cells = {*code.co_freevars, *code.co_cellvars}
    name = ""
    chain: list[str] = []

    def end() -> None:
        if name:
            chains.setdefault(name, set()).add(tuple(chain))

    for i in dis.get_instructions(code):
        if i.opname in _ATTRIBUTES:
            attributes.add(i.argval)
            if name:
                chain.append(i.argval)
        elif i.opname in _LOADS:
            end()
            name, chain = i.argval, []
        elif i.opname not in ("EXTENDED_ARG", "CACHE"):
            end()
            name, chain = "", []
            if isinstance(i.argval, str) and "ATTR" in i.opname:
                attributes.add(i.argval)
    end()
    dynamic = not _DYNAMIC.isdisjoint((*chains, *attributes))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = _names(inner)
            attributes |= found.attributes
            cells |= found.cells
            dynamic |= found.dynamic
            for n, c in found.chains.items():
                chains.setdefault(n, set()).update(c)
    read = {n: frozenset(c) for n, c in chains.items()}
    return _Names(read, frozenset(cells), frozenset(attributes), dynamic)


def _promised(function: types.FunctionType, name: str) -> bool:
    """Whether a function reads a name only within ``kv.static(...)``."""
    source = source_of(function)
    if source is None:
        return False
    within: set[int] = set()
    for node in ast.walk(source.node):
        if isinstance(node, ast.Call):
            f = node.func
            if (f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")) == "static":
                within.update(id(n) for argument in node.args for n in ast.walk(argument))
    uses = [n for n in ast.walk(source.node) if isinstance(n, ast.Name) and n.id == name]
    return bool(uses) and all(id(n) in within for n in uses)


# --- traversal ---------------------------------------------------------------------------------------


class Refused(TypeError):
    """A value that cannot be compared."""


class _Walk:
    """One traversal of a function's captured values. It yields a key and the source text of a check.

    A value reached through the root's own cells and defaults (``fresh``) may be a different object of equal value at
    the next call.

    Parameters
    ----------
    attributes : frozenset of str
        Attribute names in the code. They are read from every value that is used without an attribute.
    dynamic : bool
        Whether the code can read attributes that it does not name.
    arrays : bool
        Whether small NumPy arrays are compared by contents; otherwise they are refused.
    """

    def __init__(self, attributes: frozenset[str], dynamic: bool, arrays: bool) -> None:
        self.attributes, self.dynamic, self.arrays = attributes, dynamic, arrays
        self.functions: list[types.FunctionType] = []
        self.unnamed = ""
        self._met: dict[Any, tuple[Any, int]] = {}
        self._places: dict[int, str] = {}  # variables of the check that refer to functions, by the function's id
        self._lines: list[str] = []
        self._constants: list[Any] = []
        self._spots: dict[int, str] = {}
        self._locals = self._count = 0
        self._promised = False

    @property
    def lines(self) -> tuple[list[str], list[Any]]:
        """The check: its text, and its constants."""
        return self._lines, self._constants

    def root(self, function: types.FunctionType) -> Hashable:
        return self._function(function, function.__name__, "f", True)

    # --- the check's text ---

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _spot(self, value: Any) -> str:
        """The variable of the check that refers to an object."""
        found = self._spots.get(id(value))
        if found is None:
            kept, call = value, ""
            if not isinstance(value, _KEPT) and type(value) not in _LEAVES:
                with contextlib.suppress(TypeError):  # the class has no weak references
                    kept, call = weakref.ref(value), "()"  # a check keeps no object alive
            found = self._spots[id(value)] = self._constant(kept) + call
        return found

    def _need(self, condition: str) -> None:
        line = f"if not ({condition}): return False"
        if line not in self._lines:
            self._lines.append(line)

    def _at(self, source: str, value: Any, path: str, chains: Chains, fresh: bool = False) -> Hashable:
        """The key of a value, and a check that the expression ``source`` still evaluates to it."""
        if fresh and type(value) is types.FunctionType:
            self._locals += 1
            local = f"x{self._locals}"
            self._lines.append(f"{local} = {source}")
            self._need(f"type({local}) is FunctionType")
            return self._function(value, path, local, True)
        if _is_handle(value):
            self._need(f"type({source}) is {self._spot(type(value))} and {source}.spec == {self._constant(value.spec)}")
            self._need(f"{source}.fields() == {self._constant(value.fields())}")
            return self.value(value, path, chains)
        at = self._spot(value)
        plain = fresh and (type(value) in _LEAVES or _of_numpy(type(value)) == "generic")
        self._need(f"{source} is {at}" + f" or like({source}, {at})" * plain)
        return self.value(value, path, chains)

    # --- functions ---

    def _function(self, f: types.FunctionType, path: str, at: str, fresh: bool) -> Hashable:
        again = self._again(f)
        if again is not None:
            if fresh:
                self._need(f"{at} is {self._places[id(f)]}")
            return again
        self._places[id(f)] = at
        self.functions.append(f)
        code, names = f.__code__, _names(f.__code__)
        self._need(f"{at}.__code__ is {self._spot(code)}")
        if fresh:
            self._need(f"{at}.__globals__ is {self._spot(f.__globals__)}")
        key: list[Hashable] = [Code(code)]
        for i, (name, cell) in enumerate(zip(code.co_freevars, f.__closure__ or (), strict=True)):
            try:
                content = cell.cell_contents
            except ValueError:
                raise Refused(f"it closes over {name!r}, a variable that has no value yet") from None
            chains = names.chains.get(name, _WHOLE)
            key.append(self._named(f, name, content, chains, f"{at}.__closure__[{i}].cell_contents", fresh))
        key.append(self._defaults(f, at, fresh))
        if not _ours(f):
            key.append(tuple(self._globals(f, names)))
        members = {n: v for n, v in vars(f).items() if n not in _MARKS}
        if members or not fresh:
            self._need(f"len({at}.__dict__) == {len(vars(f))}" if vars(f) else f"not {at}.__dict__")
        for name, v in members.items():
            key.append((name, self._at(f"{at}.__dict__[{name!r}]", v, f"{path}.{name}", _WHOLE, fresh)))
        return ("function", *key)

    def _defaults(self, f: types.FunctionType, at: str, fresh: bool) -> Hashable:
        values, named = f.__defaults__, f.__kwdefaults__
        if fresh and values:
            self._need(f"len({at}.__defaults__) == {len(values)}")
        else:
            self._need(f"{at}.__defaults__ is {self._spot(values)}")
        if named is None or not fresh:
            self._need(f"{at}.__kwdefaults__ is {self._spot(named)}")
        key: list[Hashable] = []
        first = f.__code__.co_argcount - len(values or ())
        for i, v in enumerate(values or ()):
            path = f"the default of {f.__code__.co_varnames[first + i]}"
            key.append(self._at(f"{at}.__defaults__[{i}]", v, path, _WHOLE, fresh))
        if named is not None:
            self._need(f"len({at}.__kwdefaults__) == {len(named)}")
            for n, v in named.items():
                key.append((n, self._at(f"{at}.__kwdefaults__[{n!r}]", v, f"the default of {n}", _WHOLE, fresh)))
        return tuple(key)

    def _globals(self, f: types.FunctionType, names: _Names) -> Iterator[Hashable]:
        """The globals that a user's function reads."""
        space, at = f.__globals__, self._spot(f.__globals__)
        for name in sorted(names.chains):
            if name in space:
                yield name, self._named(f, name, space[name], names.chains[name], f"{at}[{name!r}]", False)
            elif name not in names.cells:
                self._need(f"{name!r} not in {at}")
                value = getattr(builtins, name, _MISSING)
                if value is not _BUILTINS.get(name, _MISSING):
                    yield name, self._at(f"getattr(builtins, {name!r})", value, name, names.chains[name])

    def _named(
        self, f: types.FunctionType, name: str, value: Any, chains: Chains, source: str, fresh: bool
    ) -> Hashable:
        """A value read by name; compared by identity if it is only used within ``kv.static`` and has no other key."""
        before, place = self._promised, self._place()
        try:
            return self._at(source, value, name, chains, fresh)
        except Refused:
            if before or not _promised(f, name):
                raise
            self._rewind(place)
            self._promised = True
            return self._at(source, value, name, chains, fresh)
        finally:
            self._promised = before

    def _place(self) -> tuple[Any, ...]:
        return len(self._lines), len(self._constants), len(self.functions), self._count, dict(self._met), self.unnamed

    def _rewind(self, place: tuple[Any, ...]) -> None:
        lines, constants, functions, self._count, self._met, self.unnamed = place
        del self._lines[lines:], self._constants[constants:], self.functions[functions:]
        self._spots = {i: at for i, at in self._spots.items() if int(at[1:].removesuffix("()")) < constants}

    # --- values ---

    def _again(self, value: Any, how: Hashable = None) -> Hashable | None:
        """The key of an object that was visited before; otherwise None, and the object is marked as visited."""
        found = self._met.get((id(value), how))
        if found is None:
            self._met[id(value), how] = value, len(self._met)
        return None if found is None else ("again", found[1])

    def value(self, v: Any, path: str, chains: Chains) -> Hashable:
        """The key of a value."""
        cls = type(v)
        if cls in _LEAVES or _of_numpy(cls) == "generic":
            return identity(v)
        if cls is types.FunctionType:
            return self._function(v, path, self._spot(v), False)
        if isinstance(v, types.ModuleType):
            return self._module(v, path, chains)
        if isinstance(v, type):
            return self._class(v, path, chains, False)
        if isinstance(v, _FIXED) or cls is object:
            name = getattr(v, "__qualname__", "" if cls is object else cls.__name__)
            return Named(v, f"{getattr(v, '__module__', '')}.{name}") if name else self._opaque(v, path)
        parts = _parts(v)
        if parts is None:
            return self._object(v, path, chains)
        again = self._again(v)
        return again if again is not None else (cls.__name__, *(self.value(x, path, _WHOLE) for x in parts))

    def _opaque(self, v: Any, path: str) -> Hashable:
        self.unnamed = self.unnamed or f"{path!r}, a {type(v).__name__}"
        return Opaque(v)

    def _refuse(self, v: Any, what: str, path: str) -> Hashable:
        """Refuse a value, or compare it by identity where that is allowed."""
        if self._promised:
            return self._opaque(v, path)
        if not self.arrays and getattr(v, "shape", ()) != ():
            raise Refused(
                f"{path!r} is an array, which must be a parameter, given with the function as (function, array)"
            )
        raise Refused(
            f"{path!r} is {what}, which can change without being seen: read what is needed of it into numbers, strings "
            "or tuples, pass it as an argument, or write kv.static(...) around it where it is read, which takes it as "
            "it is when the code is made"
        )

    def _items(self, v: Any, path: str, at: str | None) -> Hashable:
        """A sequence or set, by its items. Items are compared by value if ``at`` names the container in the check."""
        self._count += len(v)
        if self._count > MOST_VALUES:
            return self._refuse(v, f"a {type(v).__name__} of many values (more than {MOST_VALUES} in all)", path)
        snapshot = tuple(v)
        if at is not None:
            self._need(f"items({at}, {self._constant(snapshot)})")
        found = [self.value(x, f"{path}[{i}]", _WHOLE) for i, x in enumerate(snapshot)]
        if isinstance(v, (set, frozenset)):
            return ("set", *sorted(found, key=repr))
        return ("items", *found)

    def _pairs(self, v: Mapping[Any, Any], path: str, at: str) -> Hashable:
        keys, values = tuple(v), tuple(v.values())
        self._count += 2 * len(keys)
        if self._count > MOST_VALUES:
            return self._refuse(v, f"a {type(v).__name__} of many values (more than {MOST_VALUES} in all)", path)
        self._need(f"items({at}, {self._constant(keys)}) and items({at}.values(), {self._constant(values)})")
        return ("pairs", *(
            (self.value(k, path, _WHOLE), self.value(x, f"{path}[{k!r}]", _WHOLE))
            for k, x in zip(keys, values, strict=True)
        ))  # fmt: skip

    def _wanted(self, chains: Chains, more: Iterable[str] = ()) -> dict[str, Chains]:
        """The attributes read from a value, in order, each with the attribute chains that follow it."""
        found: dict[str, set[tuple[str, ...]]] = {}
        for chain in chains:
            if chain:
                found.setdefault(chain[0], set()).add(chain[1:])
        if BARE in chains:
            for name in (*self.attributes, *more):
                found.setdefault(name, set()).add(BARE)
        return {n: frozenset(found[n]) for n in sorted(found)}

    def _module(self, v: types.ModuleType, path: str, chains: Chains) -> Hashable:
        name, space, key = v.__name__, vars(v), []
        if name.partition(".")[0] in ("kvarn", "mlir"):
            return ("module", name)
        again = self._again(v, chains)
        if again is not None:
            return again
        library, at = name.partition(".")[0] in NATIVE_PACKAGES, self._spot(space)
        for first, rest in self._wanted(chains, space if self.dynamic and not library else ()).items():
            if first in space:
                found = space[first]
                if found is os.getenv:  # os.getenv reads another name of the module
                    key.append(self.value(os.environ, "os.environ", _WHOLE))
                if library and callable(found):
                    self._need(f"{at}[{first!r}] is {self._spot(found)}")
                    key.append((first, Named(found, f"{name}.{first}")))
                else:
                    key.append((first, self._part(f"{at}[{first!r}]", found, f"{path}.{first}", rest, first)))
            elif first in {c[0] for c in chains if c} or not library:
                self._need(f"{first!r} not in {at}")
                if "__getattr__" in space and (found := getattr(v, first, _MISSING)) is not _MISSING:
                    read = f"getattr({self._spot(v)}, {first!r})"
                    key.append((first, self._at(read, found, f"{path}.{first}", rest)))
        return ("module", name, *key)

    def _class(self, v: type, path: str, chains: Chains, of_object: bool) -> Hashable:
        """A class, by the attributes read from it. If the class itself is used, its special methods count too."""
        named = Named(v, f"{v.__module__}.{v.__qualname__}")
        if _is_library(v):
            return named
        again = self._again(v, (chains, of_object))
        if again is not None:
            return again
        classes: list[type] = [*v.__mro__, *type.mro(type(v))]
        users = [c for c in classes if not _is_library(c)]
        names = {n for c in users for n in vars(c)}
        special = [n for n in names if n.startswith("__") and n not in _NOT_READ and not (of_object and n in _MAKING)]
        wanted = self._wanted(chains, (*special, *(n for n in names if self.dynamic and not n.startswith("_abc_"))))
        key: list[Hashable] = [named]
        code_runs = False
        for name, rest in wanted.items():
            if name in _NOT_READ:
                continue
            where = f"{path}.{name}"
            home = next((c for c in users if name in vars(c)), None)
            for c in users[: None if home is None else users.index(home)]:
                self._need(f"{name!r} not in {self._space(c)}")
            if home is not None:
                found = vars(home)[name]
                code_runs |= isinstance(found, (classmethod, property)) or home not in v.__mro__
                key.append((name, self._part(f"{self._space(home)}[{name!r}]", found, where, rest, name)))
            elif BARE not in chains and _member(classes, name) is _MISSING:
                if (found := getattr(v, name, _MISSING)) is not _MISSING:  # an attribute of the metaclass's __getattr__
                    key.append((name, self._at(f"getattr({self._spot(v)}, {name!r})", found, where, rest)))
        if code_runs and BARE not in chains:
            key.append(self._class(v, path, _WHOLE, of_object))
        return ("class", *key)

    def _space(self, cls: type) -> str:
        """The variable of the check that refers to a class's namespace; the mapping proxy is always up to date."""
        found = self._spots.get(id(cls) + 1)
        if found is None:
            found = self._spots[id(cls) + 1] = self._constant(vars(cls))
        return found

    def _object(self, v: Any, path: str, chains: Chains) -> Hashable:
        cls = type(v)
        if isinstance(v, OfTrace) or cls.__module__.startswith("kvarn.dsl."):
            raise Refused(
                f"{path!r} is {v!r} of an earlier trace: a function of a kernel must not keep its values, in a list, "
                "an attribute or a global, from one call to another"
            )
        again = self._again(v, chains)
        if again is not None:
            return again
        if _is_handle(v):
            self.unnamed = self.unnamed or f"{path!r}, a {cls.__name__}"
            return (Named(cls, cls.__qualname__), identity(v.spec), v.fields())
        at = self._spot(v)
        if _of_numpy(cls) == "ndarray" and (self.arrays or v.shape == ()):
            return self._array(v, path, at)
        if all(_member(cls.__mro__, n) is not _MISSING for n in ("shape", "dtype")):
            return self._refuse(v, f"an array of {cls.__module__.partition('.')[0]}", path)
        whole = BARE in chains
        if not _is_library(cls):
            self._need(f"type({at}) is {self._spot(cls)}")
        key: list[Hashable] = [self._class(cls, path, _WHOLE if whole else frozenset(), True)]
        plain = next((c for c in _PLAIN if isinstance(v, c)), None)
        if isinstance(v, (tuple, frozenset)):
            key.append(self._items(v, path, None))
        elif isinstance(v, (list, collections.deque, bytearray, set)):
            key.append(self._items(v, path, at))
        elif isinstance(v, (dict, types.MappingProxyType)):
            key.append(self._pairs(v, path, at))
        elif plain is not None:
            key.append(identity(plain(v)))  # pyright: ignore[reportArgumentType, reportCallIssue]
        elif any(not _is_written_in_python(c) for c in cls.__mro__) and (whole or not hasattr(v, "__dict__")):
            return self._of_c(v, path)
        return self._attributes(v, path, chains, key)

    def _attributes(self, v: Any, path: str, chains: Chains, key: list[Hashable]) -> Hashable:
        """An object, by its attributes."""
        cls, at, whole = type(v), self._spot(v), BARE in chains
        own: dict[str, Any] | None = getattr(v, "__dict__", None)
        slots = [n for c in cls.__mro__ for n, m in vars(c).items() if type(m) is types.MemberDescriptorType]
        self._count += len(own or ()) + len(slots)
        if self._count > MOST_VALUES:
            return self._refuse(v, f"a {cls.__name__} of many values (more than {MOST_VALUES} in all)", path)
        if own and whole:
            self._need(f"len({at}.__dict__) == {len(own)}")
        code_runs = False
        asked = {c[0] for c in chains if c}
        for name, rest in self._wanted(chains, (*(own or ()), *slots)).items():
            where, member = f"{path}.{name}", _member(cls.__mro__, name)
            if name in slots:
                if hasattr(v, name):
                    key.append((name, self._part(f"{at}.{name}", getattr(v, name), where, rest, name)))
                else:
                    self._need(f"not hasattr({at}, {name!r})")
                continue
            if own is not None and name in own and not isinstance(member, property):
                key.append((name, self._part(f"{at}.__dict__[{name!r}]", own[name], where, rest, name)))
                continue
            if own is not None:
                self._need(f"{name!r} not in {at}.__dict__")
            if member is not _MISSING:
                if not whole:
                    key.append((name, self._class(cls, path, frozenset((name, *c) for c in rest), True)))
                code_runs |= hasattr(type(member), "__get__") and not isinstance(member, staticmethod)
            elif name in asked and (found := getattr(v, name, _MISSING)) is not _MISSING:  # an attribute of __getattr__
                key.append((name, self._at(f"getattr({at}, {name!r})", found, where, rest)))
                code_runs = True
        if code_runs and not whole:  # the object's code may read every attribute
            key.append(self._object(v, path, _WHOLE))
        return ("object", *key)

    def _part(self, source: str, value: Any, path: str, chains: Chains, name: str) -> Hashable:
        """The key of an attribute. An attribute that no code names and that cannot be compared is left out."""
        place = self._place()
        try:
            return self._at(source, value, path, chains)
        except Refused:
            if name in self.attributes:
                raise
            self._rewind(place)
            return "not read"

    def _array(self, v: Any, path: str, at: str) -> Hashable:
        if v.nbytes > MOST_BYTES or v.dtype.hasobject:
            return self._refuse(v, f"an array of {v.nbytes} bytes", path)
        self._need(f"{at}.shape == {self._constant(v.shape)} and {at}.dtype is {self._constant(v.dtype)}")
        self._need(f"{at}.tobytes() == {self._constant(v.tobytes())}")
        return identity(v)

    def _of_c(self, v: Any, path: str) -> Hashable:
        """An object implemented in C: compared by value if it is immutable or defines equality by value."""
        cls = type(v)
        top = cls.__module__.partition(".")[0]
        if cls.__module__ == "torch" and cls.__name__ in ("dtype", "device", "layout", "memory_format"):
            return Named(v, repr(v))
        if callable(v) and _is_library(cls):
            return Named(v, f"{getattr(v, '__module__', '')}.{getattr(v, '__qualname__', cls.__name__)}")
        if _of_numpy(cls) == "dtype":
            return ("numpy.dtype", repr(v))
        if top in _BY_VALUE and cls.__hash__ not in (object.__hash__, None):
            if top == "re":  # repr of a pattern prints only its beginning
                self.unnamed = self.unnamed or f"{path!r}, a {cls.__name__}"
            return (Named(cls, cls.__qualname__), v)
        if top in ("kvarn", "mlir", "numpy"):
            return self._opaque(v, path)
        return self._refuse(v, f"a {cls.__name__}", path)


def _is_handle(v: Any) -> bool:
    """Whether a value is a cache, a collection or an operand; all are immutable."""
    return type(v).__module__.startswith("kvarn.caches.") and hasattr(v, "fields") and hasattr(v, "spec")


def _parts(v: Any) -> tuple[Any, ...] | None:
    """The components of an immutable callable wrapper, such as a bound method or partial; None of any other value."""
    if isinstance(v, Mask):
        return v.function, v.by_head, v.interval
    if isinstance(v, types.MethodType):
        return v.__func__, v.__self__
    if isinstance(v, functools.partial):
        return v.func, v.args, v.keywords
    if isinstance(v, (staticmethod, classmethod)):
        return (v.__func__,)
    if isinstance(v, property):
        return (v.fget,)
    if isinstance(v, functools.cached_property):
        return (v.func,)
    if not _is_library(type(v)):
        return None
    inner = getattr(v, "__kv_kernel__", None) or getattr(v, "__wrapped__", None)
    return (inner,) if isinstance(inner, types.FunctionType) else None


_KEPT = (types.FunctionType, types.ModuleType, types.CodeType, type)  # what checks keep alive; code is kept anyway
_OF_GLOBALS = "if not (f.__globals__ "
_CELL = re.compile(r"\bf\.__closure__\[(\d+)\]")
_BUILTINS = dict(vars(builtins))
_MARKS = ("__kv_func__", "__kv_intrinsic__")
_PLAIN = (bool, int, float, str, bytes, complex)
# Classes implemented in C whose contents the traversal reads.
_SEEN = frozenset((
    object, list, dict, set, tuple, frozenset, bytearray, collections.deque, collections.OrderedDict,
    collections.defaultdict, types.MappingProxyType, types.SimpleNamespace, *_PLAIN,
))  # fmt: skip
# Libraries whose hashable objects are immutable.
_BY_VALUE = frozenset(("fractions", "decimal", "pathlib", "datetime", "uuid", "re", "numpy"))
# Class members that compiled code never calls, and members that only construction calls.
_NOT_READ = frozenset((
    "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slots__", "__qualname__",
    "__firstlineno__", "__static_attributes__", "__abstractmethods__", "__parameters__", "__orig_bases__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__class_getitem__", "__init_subclass__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__replace__", "__getnewargs__", "__subclasshook__",
))  # fmt: skip
_HEAP = 1 << 9  # CPython's flag of classes made at run time
_MAKING = frozenset(("__init__", "__new__", "__post_init__"))


def _member(classes: Iterable[type], name: str) -> Any:
    """The first definition of a name in some classes, without binding it."""
    return next((vars(c)[name] for c in classes if name in vars(c)), _MISSING)


@functools.lru_cache(maxsize=4096)
def _is_written_in_python(cls: type) -> bool:
    """Whether all state of a class's objects is in attributes, or in containers that the traversal reads."""
    if cls in _SEEN or not cls.__flags__ & _HEAP:
        return cls in _SEEN
    return not any(
        isinstance(m, (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType))
        and m.__objclass__ is cls
        for m in vars(cls).values()
    )


@functools.lru_cache(maxsize=4096)
def _is_library(cls: type) -> bool:
    """Whether a class belongs to a library, whose classes are taken to be immutable."""
    return cls.__module__.partition(".")[0] in NATIVE_PACKAGES


@functools.lru_cache(maxsize=4096)
def _of_numpy(cls: type) -> str:
    """The NumPy base class of a class: "generic" (a scalar), "ndarray", "dtype" or "ufunc"; "" if it has none."""
    kinds = ("generic", "ndarray", "dtype", "ufunc")
    return next((c.__name__ for c in cls.__mro__ if c.__module__ == "numpy" and c.__name__ in kinds), "")


def _ours(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in NATIVE_PACKAGES


# --- the check ---------------------------------------------------------------------------------------


def _like(a: Any, b: Any) -> bool:
    """Whether two plain values are equal and of one type."""
    return type(a) is type(b) and identity(a) == identity(b)


def _same_items(container: Iterable[Any], snapshot: tuple[Any, ...]) -> bool:
    """Whether a container has the same objects in the same order as ``snapshot``."""
    return len(container) == len(snapshot) and all(map(_is, container, snapshot))  # type: ignore[arg-type]


def _is(a: Any, b: Any) -> bool:
    return a is b


_HELPERS = {"like": _like, "items": _same_items, "FunctionType": types.FunctionType, "builtins": builtins}


@functools.lru_cache(maxsize=1024)
def _factory(lines: str, count: int) -> Callable[..., Callable[[Any], bool]]:
    """A function that builds a check from its constants. Checks with equal text are compiled once."""
    names = ", ".join([f"c{i}" for i in range(count)])
    body = lines.replace("\n", "\n   ")
    source = (
        f"def make({names}):\n def same(f):\n  try:\n   {body}\n   return True\n"
        "  except (AttributeError, KeyError, IndexError, TypeError, ValueError):\n   return False\n return same\n"
    )
    scope: dict[str, Any] = dict(_HELPERS)
    exec(source, scope)
    return scope["make"]


# Lines of a check that the native part knows.
_ATTRIBUTE = re.compile(r"if not \((f|c\d+)\.(\w+) is c(\d+)(?: or like\([^()]*\))?\): return False")
_ITEM = re.compile(r"if not \(c(\d+)\['(\w+)'\] is c(\d+)\): return False")
_EMPTY = re.compile(r"if not \(not (f|c\d+)\.__dict__\): return False")
try:
    _native: Any = getattr(importlib.import_module("kvarn.runtime._launches"), "check", None)
except ImportError:
    _native = None


def _conditions(lines: Iterable[str], constants: Sequence[Any], function: Any) -> list[tuple[Any, ...]] | None:
    """A check as the native part takes it; None where a line of it is Python's."""
    found: list[tuple[Any, ...]] = []

    def at(name: str) -> Any:
        return function if name == "f" else constants[int(name.removeprefix("c"))]

    for line in lines:
        if match := _ATTRIBUTE.fullmatch(line):
            found.append((0, at(match[1]), sys.intern(match[2]), at(match[3])))
        elif (match := _ITEM.fullmatch(line)) and type(at(match[1])) is dict:
            found.append((1, at(match[1]), sys.intern(match[2]), at(match[3])))
        elif match := _EMPTY.fullmatch(line):
            found.append((2, at(match[1]), "__dict__", None))
        else:
            return None
    return found


def _checker(lines: Sequence[str], constants: Sequence[Any]) -> Callable[[Any], bool]:
    return _factory("\n".join(lines), len(constants))(*constants)


__all__ = ["Captured", "Code", "Named", "Opaque", "Refused", "captured", "value_key"]
