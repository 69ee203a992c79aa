# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes by name: kvarn's, users' and other packages'.

Passes of other packages join through the entry point group ``kvarn.passes``: the entry's name is the pass's name, its
value a module with a function ``run`` decorated with ``kvarn.lowering.pass_base.kv_pass`` (or a plain ``run(module)``
or ``run(module, pass_)``). If a name is taken, an error names both packages.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import warnings
from typing import Any

from mlir import ir
from mlir.passmanager import PassManager

from kvarn.dialect import deprecated

from . import passes
from .pass_base import Pass, as_pass

# In pipeline order; pipeline.py has the reasons. The last one is in no built-in pipeline.
NAMES = (
    "verify-kv",
    "select-kv-schedule",
    "expand-kv-operations",
    "extract-kv-program",
    "check-kv-access",
    "check-kv-ownership",
    "split-kv-loops",
    "narrow-kv-tiles",
    "tabulate-kv-scores",
    "reverse-kv-loops",
    "lower-kv-tiles-to-linalg",
    "assign-kv-layouts",
    "select-kv-copies",
    "specialize-kv-warps",
    "promote-kv-sums",
    "sum-kv-weights",
    "defer-kv-reductions",
    "pipeline-kv-loops",
    "queue-kv-work",
    "skip-kv-maxima",
    "fold-kv-scores",
    "skip-kv-rescales",
    "simplify-kv-tiles",
    "start-kv-work",
    "trace-kv-phases",
    "distribute-kv-tiles",
    "lower-kv-tiles",
    "expand-kv-tma",
    "hoist-kv-lookups",
    "vectorize-kv-lookups",
    "plan-kv-access",
    "lower-kv-access",
    "lower-kv-tma",
    "check-kv-waits",
    "lower-kv-trace",
    "lower-kv-casts",
    "lower-kv-buffers",
    "allocate-kv-shared",
    "flatten-kv-types",
    "map-gpu-to-host",
    "vectorize-kv-tiles",
    "check-kv-lowered",
    "record-kv-abi",
    "mark-kv-grid-constants",
    "index-kv-loops",
)

# Passes of earlier versions, and their replacements. For one release such a name is accepted and ignored.
DELETED: dict[str, str] = {}
# Passes by their names in earlier versions. For one release such a name is accepted.
RENAMED = {"queue-kv-rounds": "queue-kv-work", "start-kv-rounds": "start-kv-work"}

_extra: dict[str, Pass] = {}  # of users' files and modules, and of packages once imported
_of_packages: dict[str, Pass] = {}


def register(found: Pass, in_place: bool = False) -> Pass:
    """Register a user's pass by its name; a pass from the same file, such as an edited version, is replaced.

    ``in_place`` also allows replacing an installed package's pass, with a warning. ValueError if another pass has the
    name: kvarn's, MLIR's, a package's or one from another file.
    """
    check_name(found.name)
    other = _extra.get(found.name)
    if other is not None and other is _of_packages.get(found.name):
        other = None  # imported earlier by `find`
    if other is not None and _origin(other) != _origin(found):
        raise ValueError(f"pass name {found.name!r} is taken by {_origin(other)[0]}: choose another")
    entry = _entry_points().get(found.name)
    if other is None and entry is not None:
        if not in_place:
            raise ValueError(f"pass name {found.name!r} is taken by {_package(entry)}: choose another")
        text = f"pass {found.name!r} of {_origin(found)[0]} takes the place of that of the package {_package(entry)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    _extra[found.name] = found
    return found


def check_name(name: str) -> None:
    """ValueError for a name that a user's pass cannot have: a name of kvarn's or MLIR's passes, or an invalid one."""
    if name in NAMES:
        raise ValueError(f"pass name {name!r} is taken: choose another")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"pass name must be letters, digits and dashes, got {name!r}: give the function a name")
    if _is_upstream(name):
        raise ValueError(f"pass name {name!r} is taken by a pass of MLIR: choose another")


def deleted(name: str) -> bool:
    """Whether a name is that of a deleted pass; if so, the caller of kvarn gets a DeprecationWarning."""
    if name not in DELETED or name in names():
        return False
    deprecated.warn(f"pass {name!r} is ignored: {DELETED[name]}; the name is an error from the next release on")
    return True


def current(name: str) -> str:
    """The name that a pass has now; the caller of kvarn gets a DeprecationWarning for an earlier one."""
    if name not in RENAMED or name in names():
        return name
    deprecated.warn_renamed("the pass", name, RENAMED[name])
    return RENAMED[name]


@functools.cache
def _is_upstream(name: str) -> bool:
    with ir.Context():
        try:
            PassManager("builtin.module").add(name)
        except ValueError as error:
            return "does not refer to a registered pass" not in str(error)  # otherwise it is a pass with another anchor
    return True


def _origin(found: Pass) -> tuple[str, str]:
    """The origin of a pass: its file and its name in the file, which do not change when it is edited."""
    code = getattr(found.function, "__code__", None)
    module = getattr(found.function, "__module__", "")
    file = "" if code is None or code.co_filename.startswith("<") else code.co_filename
    return file or module, getattr(found.function, "__qualname__", "")


def _package(entry: Any) -> str:
    return entry.dist.name if entry.dist else "?"


@functools.cache
def _entry_points() -> dict[str, Any]:
    import importlib.metadata  # imported here: it takes 10 ms, and only other packages' passes need it

    found: dict[str, Any] = {}
    for entry in importlib.metadata.entry_points(group="kvarn.passes"):
        if entry.name in NAMES or entry.name in found:
            other = _package(found[entry.name]) if entry.name in found else "kvarn"
            raise ValueError(f"pass {entry.name!r} is given by two packages: {other} and {_package(entry)}")
        found[entry.name] = entry
    return found


def names() -> tuple[str, ...]:
    """All pass names: kvarn's in pipeline order, then the others."""
    return tuple(dict.fromkeys((*NAMES, *_entry_points(), *_extra)))


@functools.cache
def _modules() -> dict[str, str]:
    """Modules of kvarn's passes by their names, which follow from the stems of their files."""
    folders = [f"{__package__}.passes.{folder.name}" for folder in pkgutil.iter_modules(passes.__path__)]
    files = [(f, m.name) for f in folders for m in pkgutil.iter_modules(importlib.import_module(f).__path__)]
    return {stem.replace("_", "-"): f"{folder}.{stem}" for folder, stem in files}


def module_of(name: str) -> str:
    """The module of one of kvarn's passes: ``split-kv-loops`` is ``kvarn.lowering.passes.tiles.split_kv_loops``."""
    return _modules()[name]


def of_tiles(name: str) -> bool:
    """Whether a pass is one of kvarn's over tiles, which change kernels with the attribute ``kv.tiled`` alone."""
    return name in NAMES and ".tiles." in module_of(name)


def find(name: str) -> Pass | None:
    """The pass with a name, imported now; None if there is none."""
    if name in NAMES:
        return importlib.import_module(module_of(name)).run.kv_pass
    if name in _extra:
        return _extra[name]
    entry = _entry_points().get(name)
    if entry is None:
        return None
    check_name(name)
    loaded = entry.load()
    _extra[name] = _of_packages[name] = as_pass(getattr(loaded, "run", loaded), name)
    return _extra[name]
