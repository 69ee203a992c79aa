# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Extensions: code outside of kvarn that takes part in compilations, and its digests for cache keys.

:func:`extend` loads modules that add ops, rules, expansions and passes. A digest identifies code, not names: a module's
source and its functions' code (which differ if the file was edited after its import), the variables a function closes
over, its defaults, and, without source as in a notebook, the globals that it reads. Code without a digest keeps a
compilation out of the disk cache, with a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import operator
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvarn.dialect import installed, page_orders
from kvarn.dialect.base import Kv
from kvarn.lowering import kernels, loading, registry
from kvarn.lowering.pass_base import Pass, as_pass
from kvarn.lowering.pipeline import Insertion, Settings
from kvarn.lowering.pipeline_parser import Step
from kvarn.lowering.rewrite import Rules

# Packages that trace and lower kernels; patches of their members are part of the key.
_PATCHED = ("kvarn.dialect.", "kvarn.dsl.", "kvarn.lowering.")
_OURS = frozenset({"kvarn", "mlir", "nanobind", "numpy", "ml_dtypes", "builtins", *sys.stdlib_module_names}) - {
    "__main__"
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range)


_EXTENSION = "kvarn_extension_"  # prefix of the module name of an extension file
_OF_FILES = ("kvarn_extension_", "kvarn_file_", "kvarn_user_pass_")  # not importable by name


# Class members that are irrelevant to the digest or, for operations, implied by the fields.
_NO_PART = ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "_parameters")


class _Undigestible(Exception):
    """A value without a digest that is equal in every process."""


def extend(extension: types.ModuleType | str | Path) -> types.ModuleType:
    """Load an extension: a module that adds operations, rules, expansions, kinds of caches or passes to kvarn.

    Later compilations, in any thread, use it. An edited file may be loaded again. Installed packages may declare
    extensions by the entry point group ``kvarn.extensions``; these load without a call.

    Parameters
    ----------
    extension : module, str or path
        A module, its name, or a Python file. Importing it declares what it adds: classes of ``Kv.Operation``, functions
        decorated with ``lowers`` and ``expands``, ``page_orders.add_kind``. Its functions decorated with ``kv_pass``
        are registered by name.

    Returns
    -------
    module
        The extension.

    Raises
    ------
    ValueError
        If it cannot be loaded, or adds nothing.
    TypeError
        If it declares a name that is in use.
    """
    installed.load()
    if isinstance(extension, types.ModuleType):
        loaded, what = extension, extension.__name__
    elif isinstance(extension, Path) or extension.endswith(".py"):
        loaded, what = loading.import_file(Path(extension), "extension", _EXTENSION), str(Path(extension).resolve())
    else:
        what = extension
        try:
            loaded = importlib.import_module(extension)
        except ImportError as error:
            raise ValueError(f"extension {extension!r} cannot be imported: {error}") from error
    found = [registry.register(as_pass(f)) for f in loading.passes_in(loaded)]
    if not found and not any(_is_part_of(thing, loaded.__name__) for _, thing in registered()):
        raise ValueError(f"extension {what} declares no operation, rule, expansion, kind of caches or pass")
    if loaded.__name__ != "__main__":
        installed.given[what] = None
    return loaded


def of_files() -> list[types.ModuleType]:
    """The extensions that are Python files."""
    return [
        m for name, m in list(sys.modules.items()) if name.startswith(_EXTENSION) and isinstance(m, types.ModuleType)
    ]


def _is_part_of(thing: Any, module: str) -> bool:
    home = str(_home(thing))
    return home == module or home.startswith(module + ".")


def needed() -> list[str]:
    """The arguments for ``extend`` in another process that reads and lowers this process's IR."""
    found = dict(installed.given)
    for op_class in Kv.operations:
        if is_outside(op_class) and op_class.__module__ != "__main__":
            file = str(getattr(sys.modules.get(op_class.__module__), "__file__", None) or "")
            name = file if op_class.__module__.startswith(_OF_FILES) else op_class.__module__
            found[name] = None
    return list(found)


def is_outside(thing: Any) -> bool:
    """Whether a function, a class or an object comes from outside kvarn's own sources."""
    return not _is_ours(_home(thing))


@functools.cache
def _is_ours(module: str | None) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _OURS


def _home(thing: Any) -> str | None:
    """The module that defines an object's code; for a wrapper, the module of the wrapped function."""
    # functools.wraps copies __module__, so the code's globals are used instead.
    if type(thing) is types.FunctionType:
        return thing.__globals__.get("__name__")
    if isinstance(thing, type):
        return thing.__module__
    inner = _wrapped(thing)
    return type(thing).__module__ if inner is None else _home(inner)


def _wrapped(thing: Any) -> Any:
    """The function that a method, a partial, a cached function or a kernel wraps; None for other objects."""
    for name in ("__func__", "__wrapped__", "func", "function", "fget"):
        inner = getattr(thing, name, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return None


def registered() -> Iterator[tuple[str, Any]]:
    """Op classes, rules and expansions from outside, and replaced members of kvarn, each with a description."""
    installed.load()
    yield from ((c.OPERATION_NAME, c) for c in Kv.operations if is_outside(c))
    for order in page_orders.added.values():
        yield from ((f"kind {order.name}: {what}", f) for what, f in vars(order).items() if callable(f))
    yield from ((f"expansion of {n}", f) for n, f in kernels.found().items() if is_outside(f))
    for name, module in list(sys.modules.items()):
        if name.startswith(_PATCHED) and module is not None:
            yield from _foreign(name, vars(module))


# Types of values that contain no code.
_INERT = frozenset(
    {types.BuiltinFunctionType, types.ModuleType, str, int, float, bool, tuple, dict, frozenset, list, set}
)


def _foreign(place: str, members: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is from outside in a module of kvarn, in its classes and in its tables of rules."""
    # Whenever something is compiled, every value of every module passes here: only what changed is looked at.
    names, values = list(members), list(members.values())
    known = _looked.get(place)
    if known is None or known.names != names or not all(map(operator.is_, known.values, values)):
        known = _looked[place] = _look(place, names, values)
    yield from known.outside
    for inner, held in known.holders:
        yield from _foreign(inner, held.table if type(held) is Rules else vars(held))


@dataclasses.dataclass
class _Looked:
    """The members of a module, class or table when they were last looked at."""

    names: list[str]
    values: list[Any]
    outside: list[tuple[str, Any]]
    holders: list[tuple[str, Any]]  # classes and tables among them, which change by themselves


_looked: dict[str, _Looked] = {}


def _look(place: str, names: list[str], values: list[Any]) -> _Looked:
    of_module, of_rules = place in sys.modules, place.endswith(":")
    found = _Looked(names, values, [], [])
    for name, v in zip(names, values, strict=True):
        kind, at = type(v), f"{place} {name}" if of_rules else f"{place}.{name}"
        if kind is types.FunctionType or of_rules:
            if is_outside(v):
                found.outside.append((at, v))
        elif not of_module or kind in _INERT or name.startswith("__"):
            continue
        elif kind is Rules:
            found.holders.append((f"{at}:", v))
        elif isinstance(v, type) and v.__module__ == place:
            found.holders.append((at, v))
        elif callable(v) and is_outside(v):
            found.outside.append((at, v))
    return found


def digest_of(things: Iterable[tuple[str, Any]]) -> str | None:
    """A digest of code with its descriptions, equal in every process; None, after a warning, if there is none."""
    digester = _Digester()
    try:
        parts = sorted({f"{place}: {digester.value(thing)}" for place, thing in things})
    except _Undigestible as problem:
        warn_undigestible(str(problem))
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def sources_digest_of(modules: Iterable[str]) -> list[str]:
    """Digests of the sources of outside modules, and of the modules of their package or folder that they use."""
    digester = _Digester()
    return sorted({digester.module(name) for name in modules if not _is_ours(name)})


@functools.cache
def warn_undigestible(problem: str) -> None:
    """Warn once why the compile cache cannot be used."""
    warnings.warn(
        f"the compile cache is not used, since {problem}: move what passes, rules and expansions use into a module, or "
        "make them numbers, strings and functions",
        RuntimeWarning,
        stacklevel=4,
    )


def key() -> str | None:
    """The contribution of outside code to a disk cache key; "" without such code, None if the cache cannot be used."""
    return digest_of(registered())


def identity(settings: Settings) -> Any:
    """A key that distinguishes settings in this process; a pass without a digest is identified by object identity."""
    inserted = tuple(
        (anchor, after, tuple((text, step.given if digest is None else digest) for text, digest, step in steps))
        for anchor, after, steps in ((i.anchor, i.after, _steps(i)) for i in settings.inserted)
    )
    return (
        tuple(sorted(settings.disable)),
        tuple(sorted(settings.options.items())),
        settings.check,
        settings.trace,
        inserted,
    )


def _steps(insertion: Insertion) -> list[tuple[str, str | None, Step]]:
    """The steps of an insertion: text, digest of the outside pass, the step."""
    found = []
    for step in insertion.steps:
        found.append((step.text, "" if step.kv is None else digest_of(_parts(step.kv)), step))
    return found


def _parts(found: Pass) -> list[tuple[str, Any]]:
    parts = (("function", found.function), ("options", found.options_class))
    return [(place, thing) for place, thing in parts if is_outside(thing)]


# --- digests -------------------------------------------------------------------------------------


class _Digester:
    """Computes digests of values and of everything that functions refer to; each function and module once."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.modules: dict[str, str] = {}

    def value(self, v: Any) -> str:
        """A text that is equal for equal values, in every process."""
        if isinstance(v, _PLAIN):
            return f"{type(v).__name__}:{v!r}"
        if isinstance(v, (tuple, list)):
            return f"{type(v).__name__}({','.join(map(self.value, v))})"
        if isinstance(v, (set, frozenset)):
            return f"set({','.join(sorted(map(self.value, v)))})"
        if isinstance(v, Mapping):
            return f"map({','.join(sorted(self.value(k) + '=' + self.value(x) for k, x in v.items()))})"
        if isinstance(v, types.ModuleType):
            return f"module:{v.__name__}" if _is_ours(v.__name__) else self.module(v.__name__)
        if isinstance(v, property):
            return self.value((v.fget, v.fset))
        if isinstance(v, functools.partial):
            return self.value((v.func, v.args, v.keywords))
        if isinstance(v, types.MethodType):
            return self.value((v.__func__, v.__self__))
        if isinstance(v, (types.FunctionType, type)):
            return self.definition(v)
        if (inner := _wrapped(v)) is not None:
            return f"{type(v).__qualname__}({self.value((inner, getattr(v, 'options', None)))})"
        if isinstance(v, types.BuiltinFunctionType):
            return f"builtin:{v.__module__}.{v.__qualname__}"
        if dataclasses.is_dataclass(v):
            return self.value((type(v), [getattr(v, f.name) for f in dataclasses.fields(v)]))
        if isinstance(v, (types.GenericAlias, types.UnionType)) or type(v).__module__ == "typing":
            return f"annotation:{v!r}"
        if type(v).__module__.startswith("kvarn."):
            own = type(v).__repr__ is not object.__repr__
            return f"{type(v).__qualname__}:{v!r}" if own else self.value((type(v), vars(v)))
        if callable(v) and is_outside(type(v)) and hasattr(v, "__dict__"):
            return self.value((type(v), vars(v)))
        raise _Undigestible(f"a {type(v).__name__} that they use has no digest")

    def definition(self, v: Any) -> str:
        """A function or class: by name if it is kvarn's, else by its code and its module."""
        home = _home(v)
        name = f"{home}.{v.__qualname__}"
        if _is_ours(home):
            return f"named:{name}"
        if id(v) in self.known:
            return self.known[id(v)]
        self.known[id(v)] = f"again:{name}"  # for recursive references
        module = self.module(str(home))
        if isinstance(v, type):
            body = self.value([self.definition_of_member(n, m, bool(module)) for n, m in sorted(vars(v).items())])
            body += self.value(v.__bases__)
        else:
            body = self.function(v, bool(module))
        found = self.known[id(v)] = f"{name}[{_sha(body)}]{module}"
        return found

    def definition_of_member(self, name: str, member: Any, has_source: bool) -> str:
        """A member of a class. If the source is available, it covers members without a digest."""
        if name in _NO_PART:
            return name
        try:
            return f"{name}={self.value(member)}"
        except _Undigestible:
            if not has_source:
                raise
            return name

    def function(self, f: types.FunctionType, has_source: bool) -> str:
        parts = [code_digest(f.__code__), self.value(f.__defaults__), self.value(f.__kwdefaults__)]
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                parts.append(f"{name}={self.value(cell.cell_contents)}")
            except ValueError:
                parts.append(f"{name} unset")
        if not has_source:
            for name in sorted(names_of(f.__code__)):
                if name in f.__globals__ and not name.startswith("__"):
                    parts.append(f"{name}={self.value(f.__globals__[name])}")
        return "\n".join(parts)

    def module(self, name: str) -> str:
        """The sources of a module and of the modules of its package or folder that it uses, and their functions' code.

        "" for a module without source.
        """
        if name not in self.modules:
            self.modules[name] = "".join(_module(n) for n in sorted(_together(name)))
        return self.modules[name]


def _file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None or not file.endswith(".py") else Path(file)


def _together(name: str) -> set[str]:
    """A module and, transitively, the modules of its package or folder that it refers to."""
    first, top, found = _file(name), name.partition(".")[0], {name}
    queue = [name]
    while queue:
        for v in list(vars(sys.modules.get(queue.pop(), object)).values()):
            other = v.__name__ if isinstance(v, types.ModuleType) else getattr(v, "__module__", None)
            if not isinstance(other, str) or other in found or _is_ours(other):
                continue
            file = _file(other)
            near = file is not None and first is not None and file.is_relative_to(first.parent)
            if near or other.partition(".")[0] == top:
                found.add(other)
                queue.append(other)
    return found


def _module(name: str) -> str:
    module, file = sys.modules.get(name), _file(name)
    if file is None or not file.is_file():
        return ""
    codes = [code_digest(v.__code__) for v in vars(module).values() if _defined_in(v, name)]
    for cls in (v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name):
        codes += [code_digest(v.__code__) for v in vars(cls).values() if _defined_in(v, name)]
    return f"{name}:{hashlib.sha256(file.read_bytes()).hexdigest()}:{_sha(''.join(codes))}"


def _defined_in(v: Any, name: str) -> bool:
    return isinstance(v, types.FunctionType) and v.__module__ == name


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def code_digest(code: types.CodeType) -> str:
    """The digest of code, independent of its source location."""
    consts = [code_digest(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    parts: list[Any] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, consts]
    parts += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_name]
    return _sha(repr(parts))


def _constant(c: Any) -> str:
    return repr(sorted(map(_constant, c))) if isinstance(c, frozenset) else f"{type(c).__name__}:{c!r}"


def names_of(code: types.CodeType) -> set[str]:
    """Globals that code may read, including nested functions."""
    found = set(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            found |= names_of(c)
    return found


__all__ = [
    "code_digest", "digest_of", "extend", "identity", "is_outside", "key", "names_of", "needed", "of_files",
    "registered", "sources_digest_of", "warn_undigestible",
]  # fmt: skip
