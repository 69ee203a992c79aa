# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lowering of the kv dialect to PTX and to host code: one pass a file, found by name.

Passes of other packages join through the entry point group ``kvarn.passes``: the entry's name is the pass's name,
its value a module with a ``run`` function decorated with ``kvarn.lowering.pass_base.kv_pass`` (or a plain
``run(module, pass_)`` function). A name that is taken is an error that names both packages.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from .pass_base import NoOptions, Pass

# In pipeline order; pipeline.py says why each stands where it does.
NAMES = (
    "verify-kv",
    "select-kv-schedule",
    "expand-kv-operations",
    "extract-kv-program",
    "check-kv-access",
    "split-kv-loops",
    "lower-kv-tiles-to-linalg",
    "assign-kv-layouts",
    "select-kv-copies",
    "specialize-kv-warps",
    "defer-kv-reductions",
    "pipeline-kv-loops",
    "skip-kv-rescales",
    "simplify-kv-tiles",
    "distribute-kv-tiles",
    "lower-kv-tiles",
    "expand-kv-tma",
    "hoist-kv-lookups",
    "vectorize-kv-lookups",
    "plan-kv-access",
    "lower-kv-access",
    "lower-kv-tma",
    "lower-kv-casts",
    "lower-kv-buffers",
    "allocate-kv-shared",
    "flatten-kv-types",
    "map-gpu-to-host",
    "vectorize-kv-tiles",
    "check-kv-lowered",
    "mark-kv-descriptors",
)

_extra: dict[str, Pass] = {}


def register(name: str, run: Callable[..., None], summary: str = "") -> Pass:
    """Make a user's pass known by name; ValueError when the name is taken."""
    if name in NAMES or name in _extra:
        raise ValueError(f"pass name {name!r} is taken: choose another")
    declared = getattr(run, "kv_pass", None)
    if declared is not None:
        found = Pass(name, declared.function, declared.options_class, declared.summary)
    else:
        found = Pass(
            name,
            lambda module, options: run(module, options),
            NoOptions,
            summary or (run.__doc__ or "").strip().split("\n")[0],
        )
    _extra[name] = found
    return found


@functools.cache
def _entry_points() -> dict[str, Any]:
    import importlib.metadata  # takes 10 ms, which only other packages' passes are worth

    found: dict[str, Any] = {}
    for entry in importlib.metadata.entry_points(group="kvarn.passes"):
        if entry.name in NAMES or entry.name in found:
            other = found[entry.name].dist.name if entry.name in found else "kvarn"
            raise ValueError(
                f"pass {entry.name!r} is given by two packages: {other} and {entry.dist.name if entry.dist else '?'}"
            )
        found[entry.name] = entry
    return found


def names() -> tuple[str, ...]:
    """All pass names: ours in pipeline order, then others."""
    return (*NAMES, *_entry_points(), *_extra)


def find(name: str) -> Pass | None:
    """The pass of a name, imported now; None when there is none."""
    if name in NAMES:
        return importlib.import_module("." + name.replace("-", "_"), __name__).run.kv_pass
    if name in _extra:
        return _extra[name]
    entry = _entry_points().get(name)
    if entry is None:
        return None
    loaded = entry.load()
    return register(name, getattr(loaded, "run", loaded))
