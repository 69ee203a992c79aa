# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Remarks, as in LLVM: what passes did, did not do, and why.

    remark(op, "missed", f"stays in the loop: its token changes in it", loops=2)

Outside of :func:`collect` a remark costs one call. Its location is the op's, so that it names the line of the kernel.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvarn.errors import SourceLocation, source_locations

from .collecting import Collector

KINDS = ("passed", "missed", "analysis")
FORMATS = ("text", "yaml", "json")


@dataclass(frozen=True)
class Remark:
    """One remark.

    Attributes
    ----------
    pass_name : str
    kind : {"passed", "missed", "analysis"}
        Something was done; something was not, for the reason in the message; information.
    op : str
        The operation's name.
    message : str
    location : SourceLocation or None
    values : tuple of (str, int, float or str)
        The numbers of the message, by name.
    count : int
        How often it was made at its location.
    """

    pass_name: str
    kind: str
    op: str
    message: str
    location: SourceLocation | None = None
    values: tuple[tuple[str, Any], ...] = ()
    count: int = field(default=1, compare=False)

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        place = f"{self.location}: " if self.location else ""
        return f"{place}remark: {self.kind}: {self.message} [{self.pass_name}]{times}"


class Remarks:
    """Remarks in order, equal ones once."""

    def __init__(self) -> None:
        self.inside = ""  # the running pass
        self._found: dict[Remark, int] = {}

    def add(self, made: Remark) -> None:
        self._found[made] = self._found.get(made, 0) + 1

    def matching(self, pattern: str = "") -> list[Remark]:
        """The remarks that :func:`filtered` selects, each with its count."""
        return filtered((replace(r, count=count) for r, count in self._found.items()), pattern)


def filtered(remarks: Iterable[Remark], pattern: str) -> list[Remark]:
    """The remarks whose pass, or pass and kind such as ``hoist-kv-lookups:missed``, matches a regular expression.

    Raises
    ------
    ValueError
        For an invalid regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a filter of remarks must be a regular expression: {error}, got {pattern!r}") from None
    return [r for r in remarks if compiled.search(f"{r.pass_name}:{r.kind}")]


_collector: Collector[Remarks] = Collector()
current, within = _collector.current, _collector.within


def collect() -> contextlib.AbstractContextManager[Remarks]:
    """Collect the remarks of this thread's passes."""
    return _collector.collect(Remarks())


def remark(op: Any, kind: str, message: str, **values: Any) -> None:
    """Report what a pass did at an op, or why it did not.

    Parameters
    ----------
    op : operation
        Provides name and location.
    kind : {"passed", "missed", "analysis"}
    message : str
    values
        Numbers of the message, for programs that read remarks.

    Raises
    ------
    ValueError
        For another kind, or an erased op, even outside of :func:`collect`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind of a remark must be one of {', '.join(KINDS)}, got {kind!r}")
    try:
        operation, location = op.operation, op.location
    except RuntimeError:
        raise ValueError("a remark must be of an op that is there, and this one was erased: say it before") from None
    found = current()
    if found is None:
        return
    places = source_locations(location)
    place = places[0] if places else None
    found.add(Remark(found.inside, kind, operation.name, message, place, tuple(sorted(values.items()))))


# --- as text ----------------------------------------------------------------------------------------


def written(remarks: Iterable[Remark], form: str = "text") -> str:
    """Remarks as text, as the YAML documents that LLVM's tools read, or as a JSON list."""
    if form == "json":
        return json.dumps([_record(r) for r in remarks], indent=2) + "\n"
    if form == "yaml":
        return "".join(map(_document, remarks))
    if form != "text":
        raise ValueError(f"form of remarks must be one of {', '.join(FORMATS)}, got {form!r}")
    return "".join(f"{r}\n" for r in remarks)


def _record(r: Remark) -> dict[str, Any]:
    at = r.location
    place = None if at is None else {"file": at.file, "line": at.line, "column": at.column}
    return {
        "pass": r.pass_name, "kind": r.kind, "op": r.op, "message": r.message, "location": place,
        "values": dict(r.values), "count": r.count,
    }  # fmt: skip


def _document(r: Remark) -> str:
    lines = [f"--- !{r.kind.capitalize()}", f"Pass: {r.pass_name}", f"Name: {json.dumps(r.op)}"]
    if r.location is not None:
        place = r.location
        lines.append(f"DebugLoc: {{ File: {json.dumps(place.file)}, Line: {place.line}, Column: {place.column} }}")
    lines += [f"Hotness: {r.count}", "Args:", f"  - String: {json.dumps(r.message)}"]
    lines += [f"  - {name}: {json.dumps(value)}" for name, value in r.values]
    return "\n".join(lines) + "\n...\n"


__all__ = ["FORMATS", "KINDS", "Remark", "Remarks", "collect", "current", "filtered", "remark", "within", "written"]
