# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipeline of a thread's compilations, and the contexts that change it: ``with kv.pipeline(...)``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvarn.compilation.extensions import identity
from kvarn.env import OWNERSHIP
from kvarn.lowering.pipeline import Settings, insertions
from kvarn.settings import LOCAL, emulation, traced


def current() -> Settings:
    """The settings of this thread's compilations: those of the innermost ``kv.pipeline``, else the defaults."""
    found = LOCAL.settings
    if found is None:
        return Settings()
    return found if LOCAL.check is not None else dataclasses.replace(found, check=Settings().check)


def extended(
    passes: Mapping[str, Any] | None = None,
    disable: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    check: bool | str | None = None,
    trace: int | None = None,
) -> Settings:
    """The current settings with added passes, disabled passes and options; see :func:`pipeline`."""
    if check not in (None, False, True, OWNERSHIP):
        raise ValueError(f'check must be True, False or "{OWNERSHIP}", got {check!r}')
    for name, text in (options or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(
                f'options must be text by the name of a pass, as "read-only=false", got {text!r} of {name!r}'
            )
    outer = current()
    inserted = insertions(passes, outer.inserted) if passes else ()
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
    """Change the pipeline of this thread's compilations inside: launches, ``kv.ops`` and ``kv.compile``.

    Contexts nest: an inner one adds to the outer ones. Kernels compiled with other settings are compiled again inside,
    and reused outside.

    Parameters
    ----------
    passes : mapping
        ``"after:PASS"`` or ``"before:PASS"`` to what runs there: a function ``p(module)`` or ``p(module, options)``, a
        pass's name with or without options (``"my-pass{max-width=4}"``, ``"cse"``), or a list of them.
    disable : sequence of str
        Optional passes to omit.
    options : mapping of str to str
        Options by pass name.
    check : bool or "ownership", optional
        Whether kernels check their cache accesses at run time; ``"ownership"`` also checks them against the owners of
        pages, as in ``kv.sanitize``.

    Raises
    ------
    ValueError
        For an unknown position, pass, option or kind of check.
    """
    with _applied(extended(passes, disable, options, check), check):
        yield


@contextlib.contextmanager
def tracing(marks: int) -> Iterator[None]:
    """Compile with trace marks inside: kernels record the begin and end of phases, ``marks`` marks per warp."""
    before = traced()
    LOCAL.trace = marks
    try:
        with _applied(extended(trace=marks), None):
            yield
    finally:
        LOCAL.trace = before


@contextlib.contextmanager
def _applied(made: Settings, check: bool | str | None) -> Iterator[None]:
    before = LOCAL.settings, LOCAL.check, LOCAL.token
    LOCAL.token = (identity(made), getattr(emulation(), "target", None))
    LOCAL.settings, LOCAL.check = made, before[1] if check is None else check
    try:
        yield
    finally:
        LOCAL.settings, LOCAL.check, LOCAL.token = before


__all__ = ["current", "extended", "pipeline", "tracing"]
