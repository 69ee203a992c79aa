# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Signatures and documentation derived from other operations: padded batches, and shared sections of docstrings.

An operation on a padded batch takes the arguments of the one on a ragged batch, with ``valid_lengths`` in place of
``row_offsets``. Its function and docstring spell out only the differences.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

_SECTION = "    Parameters\n    ----------\n"
_NAMES = re.compile(r"^    (\w+(?:, \w+)*)(?: : .*)?$", re.M)
_RAISES = """

    Raises
    ------
    TypeError, ValueError, IndexError
        If an argument is not as above; nothing was launched.
    """


def of_padded_batches(
    ragged: Callable[..., Any], without: Sequence[str] = (), apart: Sequence[str] = ("stream",), **annotations: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an operation on padded batches, implemented by a function of a tuple of its arguments.

    The signature is that of ``ragged``, without the parameters ``without`` and with other ``annotations``; parameters
    that the function does not document keep the documentation of ``ragged``. The tuple is in the order of ``ragged``,
    with None for omitted ones; the function takes the parameters ``apart`` after it.
    """

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        name, code = run.__name__, ragged.__code__
        renamed = {n: "valid_lengths" if n == "row_offsets" else n for n in parameters_of(ragged) if n not in without}
        first, rest = list(renamed.values())[: code.co_argcount], list(renamed.values())[code.co_argcount :]
        scope: dict[str, Any] = {"run": run}
        others = (renamed.get(n, "None") for n in parameters_of(ragged) if n not in apart)
        given = f"({', '.join(others)}), {', '.join(apart)}"
        exec(f"def {name}({', '.join([*first, '*', *rest])}):\n    return run({given})\n", scope)
        made = scope[name]
        made.__kwdefaults__ = {n: d for n, d in (ragged.__kwdefaults__ or {}).items() if n in renamed}
        made.__annotations__ = {new: ragged.__annotations__[n] for n, new in renamed.items()} | annotations
        made.__annotations__["return"] = ragged.__annotations__["return"]
        made.__doc__, made.__module__ = run.__doc__, run.__module__
        document(made, parameters_of(made), ragged.__name__)
        return made

    return declare


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters, in order."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def document(function: Any, shared: Sequence[str] = ("schedule", "stream"), like: str = "append") -> None:
    """Complete an operation's docstring: undocumented ``shared`` parameters refer to another operation."""
    before, section, after = (function.__doc__ or "").partition(_SECTION)
    if not section or "schedule" not in parameters_of(function):
        return
    described, gap, rest = after.partition("\n\n")
    described = described.rstrip(" \n")
    known = {name for names in _NAMES.findall(described) for name in names.split(", ")}
    missing = ", ".join(name for name in shared if name not in known)
    for line in textwrap.wrap(missing, 112):
        described += f"\n    {line.rstrip(',')}\n        As in :func:`{like}`."
    function.__doc__ = before + section + described + (gap + rest.rstrip(" \n") if gap else "")
    function.__doc__ += "\n    " if "    Raises\n" in rest else _RAISES
