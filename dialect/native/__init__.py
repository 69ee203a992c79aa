# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loader of the native library, which attaches effects and speculatability to ops that Python declares, and walks IR.

The library is optional. Without it the upstream passes do not transform the kv ops (no CSE, no dead code elimination,
no hoisting), which is safe, and walks take longer; :func:`available` says why it is missing.

It is C++ code against the MLIR of one release of the bindings, and any other release is refused. It is loaded with
``RTLD_LOCAL``: the bindings export over a hundred thousand LLVM symbols, which must not be mixed with the LLVM of
another package in the same process.
"""

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlir import ir

LIBRARY = "libkvarn_effects.so"
BINDINGS = "xtc-mlir-python-bindings"
MAX_EFFECTS = 8

_KINDS = {"read": 0, "write": 1, "allocate": 2, "free": 3}
_RESOURCES = {"memory": 0, "cache": 1, "elements": 1, "scales": 1}  # MLIR sees a cache as one resource
_STATUS = {
    1: "the operation is not registered in the context: load the dialect first",
    2: "the operation does not belong to a dialect that was loaded from IRDL",
    3: "an effect has an unknown kind, resource or a negative operand",
    4: f"an operation has at most {MAX_EFFECTS} effects",
    5: "the operation has an effect interface of another library",
}
_EQUALITY_NOT_PATCHED = 6


class EffectLike(Protocol):
    """One effect: ``kind`` is read, write, allocate or free; ``resource`` is one of the dialect's; operand index."""

    @property
    def kind(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def operand(self) -> Any: ...


class EffectsLike(Protocol):
    """The effects of one op, and whether it may be speculated."""

    @property
    def effects(self) -> Sequence[EffectLike]: ...
    @property
    def speculatable(self) -> bool: ...


class _Native(NamedTuple):
    library: ctypes.CDLL | None
    reason: str | None


@functools.lru_cache(maxsize=1)
def _native() -> _Native:
    # An editable install has the sources in one folder of the package's path and the built library in another.
    candidates = [Path(folder) / LIBRARY for folder in __path__]
    found = [path for path in candidates if path.is_file()]
    if not found:
        return _Native(None, f"{LIBRARY} was not built with this installation (it needs a C++17 compiler)")
    try:
        version = importlib.metadata.version(BINDINGS)
    except importlib.metadata.PackageNotFoundError:
        return _Native(None, f"the mlir package in use is not from {BINDINGS}, for which {LIBRARY} was built")
    try:
        library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        return _Native(None, f"{found[0]} does not load: {error}")
    library.kvarn_native_version.argtypes = []
    library.kvarn_native_version.restype = ctypes.c_char_p
    built = library.kvarn_native_version().decode()
    if built != version:
        return _Native(
            None, f"{found[0]} was built for {BINDINGS} {built}, but {version} is installed: reinstall kvarn"
        )
    integers = ctypes.POINTER(ctypes.c_int)
    library.kvarn_attach_effects.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int,
        integers,
        integers,
        integers,
        ctypes.c_int,
    ]
    library.kvarn_attach_effects.restype = ctypes.c_int
    return _Native(library, None)


def available() -> str | None:
    """None when the native library can be used, else the reason in one line."""
    return _native().reason


@functools.lru_cache(maxsize=1)
def walker() -> Callable[[Any, Any, Callable[[str], bool] | None], list[ir.Operation]] | None:
    """The native walk: from an operation's capsule, the maker of operations from capsules, and which names are wanted
    (None: all), to the operations under and with it in program order, outer before inner. None without the library, or
    where it was built without Python's headers."""
    library = _native().library
    if library is None or not hasattr(library, "kvarn_walk"):
        return None
    walk = ctypes.PyDLL(library._name).kvarn_walk  # with the GIL: it makes and calls objects of Python
    walk.restype, walk.argtypes = ctypes.py_object, [ctypes.py_object] * 3
    return walk


def attach(context: ir.Context, effects: Mapping[str, EffectsLike]) -> bool:
    """Attach declared effects to the dynamic operations of a context; repeating it replaces them.

    Parameters
    ----------
    context : mlir.ir.Context
        A context in which the operations' dialect is loaded, and in which no pass is running.
    effects : mapping
        Operation name (``"kv.load"``) to its effects, as :func:`kvarn.dialect.effects.table` gives it.
        Ops that are not in the mapping keep unknown effects. An effect's ``operand`` is an operand's
        index, or None for the whole resource. An allocation is taken to be the operation's results.

    Returns
    -------
    bool
        False when the native library is not available (:func:`available` says why) and nothing was done.

    Raises
    ------
    TypeError, ValueError
        On a malformed declaration or an operation that the context does not have.
    """
    library = _native().library
    if library is None:
        return False
    encoded = [(name, *_encode(name, declared)) for name, declared in effects.items()]
    pointer = _pointer(context)
    for name, columns, count, speculatable in encoded:
        status = library.kvarn_attach_effects(pointer, name.encode(), count, *columns, int(speculatable))
        if status == _EQUALITY_NOT_PATCHED:
            raise RuntimeError(f"{name}: the equality of dynamic operations is not what {LIBRARY} was built for")
        if status:
            raise ValueError(f"{name}: {_STATUS[status]}")
    return True


def _encode(name: str, declared: EffectsLike) -> tuple[list[Any], int, bool]:
    """The C arrays of kinds, operands and resources, their length, and the speculation flag."""
    kinds, operands, resources = [], [], []
    for effect in declared.effects:
        if effect.kind not in _KINDS:
            raise ValueError(f"{name}: an effect is one of {', '.join(_KINDS)}, got {effect.kind!r}")
        if effect.resource not in _RESOURCES:
            raise ValueError(f"{name}: a resource is one of {', '.join(_RESOURCES)}, got {effect.resource!r}")
        if effect.operand is not None and (not isinstance(effect.operand, int) or effect.operand < 0):
            raise TypeError(f"{name}: an effect's operand is an index or None, got {effect.operand!r}")
        kinds.append(_KINDS[effect.kind])
        operands.append(-1 if effect.operand is None else effect.operand)
        resources.append(_RESOURCES[effect.resource])
    if len(kinds) > MAX_EFFECTS:
        raise ValueError(f"{name}: {_STATUS[4]}, got {len(kinds)}")
    array = ctypes.c_int * max(len(kinds), 1)
    return [array(*column) for column in (kinds, operands, resources)], len(kinds), bool(declared.speculatable)


def _pointer(context: ir.Context) -> int:
    if not isinstance(context, ir.Context):
        raise TypeError(f"attach takes an mlir.ir.Context, got {type(context).__name__}")
    return behind(context)


def behind(bound: Any) -> int:
    """Address of the C++ object behind one of the bindings' (a context, an operation), for MLIR's C API; ValueError
    when it is no longer alive."""
    capsule = bound._CAPIPtr
    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer = python.PyCapsule_GetPointer(capsule, python.PyCapsule_GetName(capsule))
    if not pointer:
        raise ValueError(f"the {type(bound).__name__.lower()} is no longer alive")
    return pointer
