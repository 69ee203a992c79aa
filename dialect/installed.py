# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Extensions of other packages: found by the entry point group ``kvarn.extensions``, loaded before the first context.

An entry names a module, whose import declares the operations, rules, expansions and cache kinds that it adds, or
``module:function``, a function without parameters that declares them. ``KVARN_EXTENSIONS=0`` skips all extensions.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from kvarn.env import env

GROUP = "kvarn.extensions"
given: dict[str, None] = {}  # arguments of `kvarn.extend`, in order, in the form that --extend takes
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_loaded = False


class ExtensionError(RuntimeError):
    """An extension failed to load."""


def load() -> None:
    """Load the extensions of installed packages, once. When one of them fails, every call raises ExtensionError."""
    global _loaded
    if _loaded or not env.extensions:
        return
    with _lock:
        if _loaded:
            return
        _loaded = True  # set before the modules run, since they may ask for a context
        for entry in entries():
            try:
                found = entry.load()
                if callable(found):
                    found()
            except Exception as error:
                _loaded = False
                package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
                raise ExtensionError(
                    f"extension {entry.name!r}{package} ({entry.value}) cannot be loaded: {type(error).__name__}: "
                    f"{error}; KVARN_EXTENSIONS=0 leaves extensions out"
                ) from error


def entries() -> list[Any]:
    """The entry points, in the order of their names."""
    if not any(map(_may_have_some, sys.path)):
        return []
    import importlib.metadata  # imported here: it takes 50 ms, more than the check of whether it is needed

    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name)


def _may_have_some(folder: str) -> bool:
    """Whether a package under an entry of ``sys.path`` may have an entry point of the group."""
    try:
        infos = [Path(e.path) for e in os.scandir(folder or ".") if e.name.endswith((".dist-info", ".egg-info"))]
    except NotADirectoryError:
        return True  # a zip archive: not searched
    except OSError:
        return False
    for info in infos:
        try:
            if GROUP.encode() in (info / "entry_points.txt").read_bytes():
                return True
        except OSError:
            continue
    return False


__all__ = ["GROUP", "ExtensionError", "entries", "given", "load"]
