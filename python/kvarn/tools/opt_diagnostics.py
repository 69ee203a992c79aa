# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Diagnostics in mlir-opt's format, and the check of expected ones (``--verify-diagnostics``).

A :class:`Source` is the parser's input; a :class:`Collector` collects the diagnostics while it is processed. ``render``
prints a diagnostic with its source line and a caret; ``check_expected`` compares the diagnostics with the
``expected-error {{...}}`` comments of the source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlir import ir

from kvarn.errors import SourceLocation, advised, source_locations

# MLIR's name of a source parsed from a string.
STRING_NAME = "-"


@dataclass(frozen=True)
class Diagnostic:
    """One diagnostic, detached from MLIR so that it outlives its context."""

    severity: str  # error, warning, note, remark
    message: str
    position: SourceLocation | None
    where: str  # the location's text, if it names no file
    notes: tuple[Diagnostic, ...] = ()


@dataclass
class Source:
    """The text of the parser's input.

    ``name`` is the file's name as the user wrote it. A chunk of a split file is padded with empty lines, so that its
    line numbers are the file's.
    """

    name: str
    data: bytes
    path: str | None = None  # parse this file by name instead of the bytes

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.data.decode("utf-8", "replace").split("\n")

    def is_name(self, filename: str) -> bool:
        return filename in (STRING_NAME, self.name)


def split(source: Source, marker: str) -> list[Source]:
    """The chunks of a source between lines that contain only the marker."""
    cut = re.compile(rb"^" + re.escape(marker.encode()) + rb"[ \t]*\r?$\n?", re.MULTILINE)
    chunks, start = [], 0
    for match in [*cut.finditer(source.data), None]:
        end = match.start() if match else len(source.data)
        padding = b"\n" * source.data.count(b"\n", 0, start)
        chunks.append(Source(source.name, padding + source.data[start:end]))
        start = match.end() if match else end
    if len(chunks) > 1 and not chunks[0].data.strip() and source.data.lstrip().startswith(marker.encode()):
        chunks.pop(0)  # a marker on the first line starts the first chunk
    return chunks


# --- collecting ------------------------------------------------------------------------------------


def position_of(location: ir.Location) -> SourceLocation | None:
    """The first file position in a location, in MLIR's search order."""
    return next(iter(source_locations(location)), None)


def _callers(location: ir.Location) -> Iterator[ir.Location]:
    """The call sites around a location, inner first."""
    while True:
        if location.is_a_name():
            location = location.child_loc
        elif location.is_a_callsite():
            location = location.caller
            yield location
        else:
            return


def detach(diagnostic: Any) -> Diagnostic:
    """A copy of MLIR's diagnostic, with a note for each call site of its location."""
    location = diagnostic.location
    notes = [detach(note) for note in diagnostic.notes]
    for caller in list(_callers(location))[:10]:
        found = position_of(caller)
        if found is not None:
            notes.append(Diagnostic("note", "called from", found, str(caller)))
    severity = str(diagnostic.severity).rpartition(".")[2].lower()
    where = "" if str(location) == "loc(unknown)" else str(location)
    return Diagnostic(severity, advised(str(diagnostic.message)), position_of(location), where, tuple(notes))


@dataclass
class Collector:
    """Collects a context's diagnostics in a ``with`` block."""

    context: ir.Context
    found: list[Diagnostic] = field(default_factory=list)

    def __enter__(self) -> Collector:
        self._handler = self.context.attach_diagnostic_handler(self._take)
        return self

    def __exit__(self, *_: Any) -> None:
        self._handler.detach()  # pyright: ignore[reportAttributeAccessIssue]

    def _take(self, diagnostic: Any) -> bool:
        # MLIR's parser warns of the resources that kv-opt reads itself.
        if str(diagnostic.message) != "ignoring unknown external resources for 'mlir_reproducer'":
            self.found.append(detach(diagnostic))
        return True

    @property
    def errors(self) -> int:
        return sum(d.severity == "error" for d in self.found)

    def take(self) -> list[Diagnostic]:
        """The diagnostics so far; the collector starts over."""
        taken, self.found[:] = list(self.found), []
        return taken


# --- printing --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _file_lines(filename: str) -> tuple[str, ...]:
    try:
        return tuple(Path(filename).read_text("utf-8", "replace").split("\n"))
    except (OSError, ValueError):
        return ()


def _snippet(source: Source, position: SourceLocation) -> str:
    """The source line and the caret under its column, or nothing if the file cannot be read."""
    lines = source.lines if source.is_name(position.file) else _file_lines(position.file)
    if not 1 <= position.line <= len(lines):
        return ""
    line = lines[position.line - 1].rstrip("\r")
    # Columns count bytes; tabs are kept so that the caret is under its character.
    before = line.encode("utf-8", "surrogateescape")[: max(position.column - 1, 0)].decode("utf-8", "replace")
    padding = "".join("\t" if c == "\t" else " " for c in before)
    return f"{line}\n{padding}^\n"


def render(diagnostic: Diagnostic, source: Source, snippet: bool = True) -> str:
    """A diagnostic and its notes in mlir-opt's format: a note at the same location does not repeat the line."""
    position = diagnostic.position
    if position is None:
        where = f"{diagnostic.where}: " if diagnostic.where else ""
        text = f"<unknown>:0: {diagnostic.severity}: {where}{diagnostic.message}\n"
    else:
        name = source.name if source.is_name(position.file) else position.file
        text = f"{name}:{position.line}:{position.column}: {diagnostic.severity}: {diagnostic.message}\n"
        text += _snippet(source, position) if snippet else ""
    last = position
    for note in diagnostic.notes:
        text += render(note, source, note.position != last)
        last = note.position
    return text


# --- expected diagnostics --------------------------------------------------------------------------

_EXPECTED = re.compile(
    r"(?:^|//) *expected-(error|note|remark|warning)(-re)? *(@([+-][0-9]+|above|below|unknown))? *\{\{(.*)\}\}$"
)


@dataclass
class Expected:
    """One ``expected-...`` comment."""

    severity: str
    pattern: str
    is_regex: bool
    line: int | None  # None: a diagnostic without a file position
    at: SourceLocation
    matched: bool = False

    def matches(self, message: str) -> bool:
        if not self.is_regex:
            return self.pattern in message
        return re.search(_regex(self.pattern), message, re.DOTALL) is not None


def _regex(pattern: str) -> str:
    """``text {{regex}} text`` as one regular expression."""
    parts = re.split(r"\{\{(.*?)\}\}", pattern)
    return "".join(f"(?:{part})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def expected_in(source: Source) -> tuple[list[Expected], list[Diagnostic]]:
    """The expected diagnostics of a source, and errors about unusable comments."""
    found: list[Expected] = []
    bad: list[Diagnostic] = []
    above = 1  # the last line without a comment, as in MLIR: the first line if there is none
    below: list[Expected] = []  # comments for the next line without one
    for number, raw in enumerate(source.lines, 1):
        line = raw.rstrip()
        match = _EXPECTED.search(line)
        if match is None:
            above = number
            for waiting in below:
                waiting.line = number
            below.clear()
            continue
        severity, is_regex, _, offset, pattern = match.groups()
        at = SourceLocation(source.name, number, line.index("expected-", match.start()) + 1)
        expected = Expected(severity, pattern, is_regex is not None, number, at)
        if offset == "unknown":
            expected.line = None
        elif offset == "above":
            expected.line = above
        elif offset == "below":
            below.append(expected)
        elif offset is not None:
            expected.line = number + int(offset)
        if expected.is_regex:
            try:
                re.compile(_regex(pattern))
            except re.error as error:
                bad.append(Diagnostic("error", f"invalid regex: {error}", at, ""))
                continue
        found.append(expected)
    return found, bad


def check_expected(diagnostics: list[Diagnostic], source: Source, only_expected: bool = False) -> list[Diagnostic]:
    """Errors for expected diagnostics that are missing, and (unless ``only_expected``) for unexpected ones."""
    expected, problems = expected_in(source)
    for diagnostic in _flat(diagnostics):
        position = diagnostic.position
        known = position is not None and source.is_name(position.file)
        line = position.line if known and position is not None else None
        near = None
        for candidate in expected:
            if candidate.matched or candidate.line != line or not candidate.matches(diagnostic.message):
                continue
            if candidate.severity == diagnostic.severity:
                candidate.matched = True
                break
            near = candidate
        else:
            if near is not None:
                near.matched = True
                message = f"'{diagnostic.severity}' diagnostic emitted when expecting a '{near.severity}'"
                problems.append(Diagnostic("error", message, position, diagnostic.where))
            elif not only_expected and not _ignored(diagnostic):
                message = f"unexpected {diagnostic.severity}: {diagnostic.message}"
                problems.append(Diagnostic("error", message, position, diagnostic.where))
    for missing in expected:
        if not missing.matched:
            problems.append(
                Diagnostic("error", f'expected {missing.severity} "{missing.pattern}" was not produced', missing.at, "")
            )
    return problems


def _ignored(diagnostic: Diagnostic) -> bool:
    """Whether a diagnostic is a note that mlir-opt adds by itself, which no comment expects."""
    return diagnostic.severity == "note" and diagnostic.message.startswith(("see current operation", "called from"))


def _flat(diagnostics: list[Diagnostic]) -> Iterator[Diagnostic]:
    for diagnostic in diagnostics:
        yield diagnostic
        yield from _flat(list(diagnostic.notes))
