# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What compilations of a thread are made with besides what is compiled: ``with kv.pipeline(...)``.

Everything that keeps compiled code in memory asks :func:`token` and keeps it apart by that; importing this costs
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.env import OWNERSHIP, encoded, env, given

if TYPE_CHECKING:
    from kvarn.lowering.pipeline import Settings


class _Local(threading.local):
    """What holds in a thread. The defaults are the class's: every launch asks, and a missing attribute is slow."""

    token: Hashable = None
    settings: Settings | None = None
    check: bool | str | None = None
    emulation: Any = None
    trace: int = 0


_local = _Local()
_CHECK = encoded("KVARN_CHECK")
_generation = 0  # of the code that other packages have declared


def declared(code: Any) -> None:
    """Code that compilations run has been declared: where it is another package's, what was compiled before is old."""
    global _generation
    if not code.__module__.startswith("kvarn."):
        _generation += 1


def token() -> Hashable:
    """What to keep compiled code apart by: equal while the same passes, options and declarations apply."""
    found = _local.token
    return _generation if found is None else (_generation, found)


def plain() -> int | None:
    """A number of the declared code, where nothing else is asked for, by a thread or by the environment; else None."""
    if _local.token is not None or env.overrides or _CHECK in given:
        return None
    return _generation


def traced() -> int:
    """The marks that a warp keeps of its phases in what this thread compiles; 0: none."""
    return _local.trace


def emulation() -> Any:
    """What stands for the GPU in this thread, in a ``with kv.emulated(...)``; None outside."""
    return _local.emulation


@contextlib.contextmanager
def emulating(what: Any) -> Iterator[None]:
    """Launches of this thread go to ``what`` inside, and what is looked up for them is kept apart."""
    before = emulation(), _local.token
    _local.emulation, _local.token = what, ("emulated", what.target, before[1])
    try:
        yield
    finally:
        _local.emulation, _local.token = before


def current() -> Settings:
    """The settings of this thread's compilations: those of the innermost ``kv.pipeline``, else the defaults."""
    found = _local.settings
    lowering = importlib.import_module("kvarn.lowering.pipeline")
    if found is None:
        return lowering.Settings()
    return found if _local.check is not None else dataclasses.replace(found, check=lowering.Settings().check)


def extended(
    passes: Mapping[str, Any] | None = None,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    check: bool | str | None = None,
    trace: int | None = None,
) -> Settings:
    """The current settings with more passes, passes left out and options; see :func:`pipeline`."""
    if check not in (None, False, True, OWNERSHIP):
        raise ValueError(f'check must be True, False or "{OWNERSHIP}", got {check!r}')
    outer = current()
    inserted = importlib.import_module("kvarn.lowering.pipeline").insertions(passes, outer.inserted) if passes else ()
    return dataclasses.replace(
        outer,
        disable=outer.disable | frozenset([disable] if isinstance(disable, str) else disable),
        options={**outer.options, **(options or {})},
        inserted=(*outer.inserted, *inserted),
        check=outer.check if check is None else check,
        trace=outer.trace if trace is None else trace,
    )


@contextlib.contextmanager
def pipeline(
    passes: Mapping[str, Any] | None = None,
    *,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    check: bool | str | None = None,
) -> Iterator[None]:
    """Change the pipeline of everything that this thread compiles inside: launches, ``kv.ops`` and ``kv.compile``.

    Contexts nest: an inner one adds to what holds around it. What has been compiled otherwise is compiled anew inside,
    and is found again outside.

    Parameters
    ----------
    passes : mapping
        ``"after:PASS"`` or ``"before:PASS"`` to what runs there: a function ``p(module)`` or ``p(module, options)``, a
        pass's name with or without options (``"my-pass{max-width=4}"``, ``"cse"``), or a list of them.
    disable : sequence of str
        Optional passes to leave out.
    options : mapping of str to str
        Options by pass name.
    check : bool or "ownership", optional
        Whether accesses to caches are checked when kernels run; ``"ownership"``: also against who owns the pages, as
        ``kv.sanitize`` has it.

    Raises
    ------
    ValueError
        For a place, a pass, an option or a kind of check that there is not.
    """
    with _applied(extended(passes, disable, options, check), check):
        yield


@contextlib.contextmanager
def tracing(marks: int) -> Iterator[None]:
    """What this thread compiles inside notes when its phases begin and end: the last ``marks`` marks of a warp."""
    before = traced()
    _local.trace = marks
    try:
        with _applied(extended(trace=marks), None):
            yield
    finally:
        _local.trace = before


@contextlib.contextmanager
def _applied(made: Settings, check: bool | str | None) -> Iterator[None]:
    before = _local.settings, _local.check, _local.token
    _local.token = (importlib.import_module("kvarn.extensions").identity(made), getattr(emulation(), "target", None))
    _local.settings, _local.check = made, before[1] if check is None else check
    try:
        yield
    finally:
        _local.settings, _local.check, _local.token = before


__all__ = [
    "current", "declared", "emulating", "emulation", "extended", "pipeline", "plain", "token", "traced", "tracing",
]  # fmt: skip
