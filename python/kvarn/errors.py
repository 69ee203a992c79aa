# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Errors of kernels, with the user's file, line and column, the source line and a caret.

An error occurs while a kernel is traced (the front end knows the AST node), or in a later pass (the op's MLIR location
is the node's). Both become a :class:`KernelError`.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlir import ir


@dataclass(frozen=True)
class SourceLocation:
    """A location in a source file; lines and columns start at 1, ``end_column`` (or None) is exclusive."""

    file: str
    line: int
    column: int
    end_column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def snippet(self) -> str:
        """The source line with a caret under the column; empty if the file cannot be read."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        if not text.strip():
            return ""
        indent = len(text) - len(text.lstrip())
        column = max(self.column - 1, indent)
        width = max(1, min(self.end_column or 0, len(text) + 1) - 1 - column)
        return f"    {text[indent:]}\n    {' ' * (column - indent)}^{'~' * (width - 1)}"


class KernelError(ValueError):
    """A kernel that cannot be compiled, with a location in the user's source.

    Attributes
    ----------
    message : str
        The requirement, the actual value, and the remedy.
    location : SourceLocation or None
        None if no source is known.
    callers : tuple of SourceLocation
        The calls through which an inlined function was reached, innermost first.
    """

    def __init__(
        self, message: str, location: SourceLocation | None = None, callers: Iterable[SourceLocation] = ()
    ) -> None:
        self.message, self.location, self.callers = message, location, tuple(callers)
        super().__init__(message)

    def __str__(self) -> str:
        lines = [f"{self.location}: error: {self.message}" if self.location else f"error: {self.message}"]
        if self.location and self.location.snippet():
            lines.append(self.location.snippet())
        for caller in self.callers:
            lines.append(f"{caller}: note: called from here")
            if caller.snippet():
                lines.append(caller.snippet())
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """The traceback that notebooks show: the kernel's location, without the front end (KVARN_DEBUG shows both)."""
        from kvarn.env import env

        if env.debug:
            raise NotImplementedError  # IPython then writes the whole traceback
        return [f"{type(self).__name__}: {self}"]


class KernelTypeError(KernelError, TypeError):
    """A type error in a kernel; also a ``TypeError``."""


class UnsupportedError(KernelError, NotImplementedError):
    """A Python construct that kernels do not support; the message names the alternative."""


def suggestion(error: BaseException) -> str:
    """``; did you mean 'load'?`` for a misspelt attribute, else empty."""
    name, owner = getattr(error, "name", None), getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not isinstance(name, str) or owner is None:
        return ""
    return meant(name, [n for n in dir(owner) if not n.startswith("_")])


def meant(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'load'?`` for a name that is close to a known one, else empty."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def located(
    error: BaseException, location: SourceLocation | None, callers: Iterable[SourceLocation] = ()
) -> KernelError:
    """``error``, raised while a kernel was traced, as a :class:`KernelError` with a source location."""
    text = (str(error) if str(error) else type(error).__name__) + suggestion(error)
    kind: type[KernelError] = KernelError
    if isinstance(error, TypeError):
        kind = KernelTypeError
    elif isinstance(error, NotImplementedError):
        kind = UnsupportedError
    elif isinstance(error, KeyError):
        text = f"KeyError: {text}"
    elif not isinstance(error, ValueError) and type(error).__name__ not in text:
        text = f"{type(error).__name__}: {text}"
    return kind(text, location, callers)


def source_locations(location: ir.Location) -> list[SourceLocation]:
    """The source locations in an MLIR location: the innermost first, then its callers; empty if there are none."""
    if location.is_a_file():
        return [SourceLocation(location.filename, location.start_line, location.start_col)]
    if location.is_a_callsite():
        return source_locations(location.callee) + source_locations(location.caller)
    if location.is_a_name():
        return source_locations(location.child_loc)
    if location.is_a_fused():
        for child in location.locations:
            if places := source_locations(child):
                return places
    return []


def advised(message: str) -> str:
    """A diagnostic of MLIR, with a remedy that MLIR cannot know."""
    if message.startswith("unregistered operation 'kv."):
        return f"{message}; an extension that declares it is loaded by --extend, or kv.extend"
    return message


def from_mlir(error: Exception, diagnostics: Iterable[tuple[str, str, Any]] = ()) -> KernelError:
    """The diagnostics of a failed pass, verifier or parser as one error with a location.

    Parameters
    ----------
    error : mlir.ir.MLIRError
        The exception of the bindings.
    diagnostics : iterable of (severity, message, location)
        The diagnostics collected by a context from ``kvarn.dialect.kv.make_context``.

    Returns
    -------
    KernelError
        At the first diagnostic with a source location. Further errors are listed in the message.
    """
    found: list[tuple[str, Any]] = [
        (advised(text), place) for severity, text, place in diagnostics if severity == "error"
    ]
    for diagnostic in getattr(error, "error_diagnostics", ()):
        found.append((advised(str(diagnostic.message)), diagnostic.location))
    if not found:
        return KernelError(str(error))
    places = [source_locations(place) for _, place in found]
    first = next((i for i, p in enumerate(places) if p), 0)
    text = found[first][0]
    for i, (other, _) in enumerate(found):
        if i != first and other != text:
            text += f"\n  also: {places[i][0]}: {other}" if places[i] else f"\n  also: {other}"
    place = places[first]
    return KernelError(text, place[0] if place else None, place[1:])
