# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The settings of a thread's compilations, as a key for caches of compiled code.

All in-memory caches of compiled code include :func:`specialisation_key` in their keys; importing this module is cheap.
``kvarn.pipelines`` has the contexts that change settings, which need the passes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from kvarn.env import encoded, env, given

if TYPE_CHECKING:
    from kvarn.lowering.pipeline import Settings


class _Local(threading.local):
    """The settings of a thread. Defaults are class attributes, since reading a missing attribute is slow."""

    token: Hashable = None
    settings: Settings | None = None
    check: bool | str | None = None
    emulation: Any = None
    trace: int = 0


LOCAL = _Local()  # written by the contexts here and in kvarn.pipelines
_CHECK = encoded("KVARN_CHECK")
_generation = 0  # incremented when other packages declare code


def declared(code: Any) -> None:
    """Note that code of compilations was declared: another package's code invalidates earlier compilations."""
    global _generation
    if not code.__module__.startswith("kvarn."):
        _generation += 1


def specialisation_key() -> Hashable:
    """The part of a cache key for settings: equal for equal passes, options, checks and declarations.

    A number, the generation of declared code, where no context and no environment variable changes the defaults.
    """
    token = LOCAL.token
    if token is None and not env.overrides and _CHECK not in given:
        return _generation
    return _generation if token is None and env.check is False else (_generation, token, env.check)


def traced() -> int:
    """Trace marks per warp in this thread's compilations; 0: no tracing."""
    return LOCAL.trace


def emulation() -> Any:
    """The emulator of this thread, inside ``with kv.emulated(...)``; None outside."""
    return LOCAL.emulation


@contextlib.contextmanager
def emulating(what: Any) -> Iterator[None]:
    """A context in which this thread's launches go to ``what``, with separate launch caches."""
    before = emulation(), LOCAL.token
    LOCAL.emulation, LOCAL.token = what, ("emulated", what.target, before[1])
    try:
        yield
    finally:
        LOCAL.emulation, LOCAL.token = before


__all__ = ["LOCAL", "declared", "emulating", "emulation", "specialisation_key", "traced"]
