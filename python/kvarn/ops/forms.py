# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is said once of many operations: the signatures of those on padded batches, and what their documentation shares.

An operation on a padded batch takes the arguments of the one on a ragged batch, with ``valid_lengths`` in place of
``row_offsets``. Only how it runs, and what is different for the caller, is written down.
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
    ragged: Callable[..., Any], without: Sequence[str] = (), apart: Sequence[str] | None = None, **annotations: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the form of an operation for padded batches: a function of its arguments, by name.

    The signature is that of ``ragged``, without some parameters and with other ``annotations`` of some; so is the
    documentation of parameters that the function does not describe. ``apart``: the function takes these, behind a tuple
    of all others in the order of ``ragged``, None for those that are left out.
    """

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        name, code = run.__name__, ragged.__code__
        renamed = {n: "valid_lengths" if n == "row_offsets" else n for n in parameters_of(ragged) if n not in without}
        first, rest = list(renamed.values())[: code.co_argcount], list(renamed.values())[code.co_argcount :]
        scope: dict[str, Any] = {"run": run}
        given = "{" + ", ".join(f"'{n}': {n}" for n in renamed.values()) + "}"
        if apart is not None:
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
    """Complete the documentation of an operation: ``shared`` parameters that it does not describe are another's."""
    before, section, after = (function.__doc__ or "").partition(_SECTION)
    if not section or "schedule" not in parameters_of(function):
        return
    described, gap, rest = after.partition("\n\n")
    described = described.rstrip(" \n")
    known = {name for names in _NAMES.findall(described) for name in names.split(", ")}
    missing = ", ".join(name for name in shared if name not in known)
    for line in textwrap.wrap(missing, 112):
        described += f"\n    {line.rstrip(',')}\n        As of :func:`{like}`."
    function.__doc__ = before + section + described + (gap + rest.rstrip(" \n") if gap else "")
    function.__doc__ += "\n    " if "    Raises\n" in rest else _RAISES
