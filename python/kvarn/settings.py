# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a thread's compilations are made with besides what is compiled, as one token for caches of compiled code.

Everything that keeps compiled code in memory asks :func:`token` and keeps it apart by that; importing this costs
nothing. ``kvarn.pipelines`` has the contexts that change it, which need the passes.
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
    """What holds in a thread. The defaults are the class's: every launch asks, and a missing attribute is slow."""

    token: Hashable = None
    settings: Settings | None = None
    check: bool | str | None = None
    emulation: Any = None
    trace: int = 0


LOCAL = _Local()  # written by the contexts here and in kvarn.pipelines
_CHECK = encoded("KVARN_CHECK")
_generation = 0  # of the code that other packages have declared


def declared(code: Any) -> None:
    """Code that compilations run has been declared: where it is another package's, what was compiled before is old."""
    global _generation
    if not code.__module__.startswith("kvarn."):
        _generation += 1


def token() -> Hashable:
    """What to keep compiled code apart by: equal while the same passes, options and declarations apply."""
    found = LOCAL.token
    return _generation if found is None else (_generation, found)


def plain() -> int | None:
    """A number of the declared code, where nothing else is asked for, by a thread or by the environment; else None."""
    if LOCAL.token is not None or env.overrides or _CHECK in given:
        return None
    return _generation


def traced() -> int:
    """The marks that a warp keeps of its phases in what this thread compiles; 0: none."""
    return LOCAL.trace


def emulation() -> Any:
    """What stands for the GPU in this thread, in a ``with kv.emulated(...)``; None outside."""
    return LOCAL.emulation


@contextlib.contextmanager
def emulating(what: Any) -> Iterator[None]:
    """Launches of this thread go to ``what`` inside, and what is looked up for them is kept apart."""
    before = emulation(), LOCAL.token
    LOCAL.emulation, LOCAL.token = what, ("emulated", what.target, before[1])
    try:
        yield
    finally:
        LOCAL.emulation, LOCAL.token = before


__all__ = ["LOCAL", "declared", "emulating", "emulation", "plain", "token", "traced"]
