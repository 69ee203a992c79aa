# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kv dialect as one module: what MLIR finds under the name ``kv``.

``load(context)`` makes the dialect known to a context; calling it again does nothing. ``make_context()``
gives a context that is ready for compiling.
"""

import os
import threading
from typing import Any

from mlir import ir
from mlir._mlir_libs import _mlir as _cext

from . import effects, installed, ops
from .base import Kv
from .ops.access import *  # noqa: F403  the classes and wrappers of every group, under one name
from .ops.addressing import *  # noqa: F403
from .ops.attention import *  # noqa: F403
from .ops.drafts import *  # noqa: F403
from .ops.fragments import *  # noqa: F403
from .ops.lines import *  # noqa: F403
from .ops.metadata import *  # noqa: F403
from .ops.mla import *  # noqa: F403
from .ops.operations import *  # noqa: F403
from .ops.pages import *  # noqa: F403
from .ops.projection import *  # noqa: F403
from .ops.ragged import *  # noqa: F403
from .ops.rotary import *  # noqa: F403
from .ops.shared import *  # noqa: F403
from .ops.sharing import *  # noqa: F403
from .ops.staging import *  # noqa: F403
from .ops.tables import *  # noqa: F403
from .ops.terms import *  # noqa: F403
from .ops.tile import *  # noqa: F403
from .ops.tma import *  # noqa: F403
from .ops.trace import *  # noqa: F403
from .ops.weights import *  # noqa: F403
from .types import CacheType, CodebookType, CodeType, CollectionType, OperandType, RowsType, TmaType  # noqa: F401

# MLIR wraps parsed ops in their Python classes when it can import `<prefix>.<dialect namespace>`.
_cext.globals.append_dialect_search_prefix("kvarn.dialect")
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def load(context: ir.Context | None = None) -> None:
    """Load the dialect into a context (default: the current one); idempotent and thread-safe.

    Attaches the declared effects too when the native library is there, so that upstream passes drop dead
    kv ops and hoist invariant ones.
    """
    context = context or ir.Context.current
    installed.load()
    with _lock:
        if Kv.is_loaded(context):
            return
        setattr(context, _GENERATION, Kv.generation)
        Kv.load(context)
        from . import native

        native.attach(context, effects.table(Kv))


def make_context() -> ir.Context:
    """A context with the dialect loaded, set up so that no diagnostic can end the process.

    The bindings abort when an error diagnostic is left over from a pass that succeeded; with diagnostics
    emitted to a handler they are not left over. The handler stores them on ``context_diagnostics(context)``.
    """
    if _prepared and is_current(_prepared[-1]):
        return _prepared.pop()
    context = ir.Context()
    # Modules of one or two kernels gain nothing from a thread pool, and a forked child would wait for its threads.
    context.enable_multithreading(False)
    context.emit_error_diagnostics = True
    found: list[tuple[str, str, ir.Location]] = []

    def keep(diagnostic: Any) -> bool:
        found.append(
            (str(diagnostic.severity).rpartition(".")[2].lower(), str(diagnostic.message), diagnostic.location)
        )
        return True

    context.attach_diagnostic_handler(keep)
    setattr(context, _DIAGNOSTICS, found)
    load(context)
    return context


_prepared: list[ir.Context] = []


def prepare_context() -> None:
    """Make the next context now, for a process whose forks each need one."""
    _prepared.append(make_context())


def is_current(context: ir.Context) -> bool:
    """Whether a context of :func:`load` has every declared operation; one that lacks some is never updated."""
    return context.__dict__.get(_GENERATION) == Kv.generation


_GENERATION = "kvarn_generation"
_DIAGNOSTICS = "kvarn_diagnostics"  # attribute of the context: freed with it


def context_diagnostics(context: ir.Context) -> list[tuple[str, str, ir.Location]]:
    """Diagnostics (severity, message, location) of a context of :func:`make_context`; the caller clears the list.

    Locations keep their context alive: a context whose list is not cleared is never freed. Other contexts have no list,
    and get an empty one.
    """
    return context.__dict__.setdefault(_DIAGNOSTICS, [])


__all__ = ["Kv", "context_diagnostics", "is_current", "load", "make_context", "ops", "prepare_context"]
