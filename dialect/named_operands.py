# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations in text with operands by name: translation to the positional form that MLIR parses, and back.

Operations that are declared through IRDL have the generic form only: an operand is identified by its position, and
``operandSegmentSizes`` says which optional operands are present. With names both follow from the declaration:

    "kv.append"(collection = %c, layer = %l, key = %k, row_offsets = %o, value = %v) : (...) -> ()
    "kv.tma_load_box"(map = %m, destination = %d, barrier = %b, coordinates = [%x, %y]) {...} : (...) -> ()

Operands may be written in any order, with the types in the same order. An absent optional operand is left out; a
variadic operand is a list in brackets, which may be empty or left out. Every operation of kv, including those of
extensions, may be written this way; an operation has names for all of its operands or for none.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .base import Kv
from .ext import is_segmented, operand_fields

SIZES = "operandSegmentSizes"
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*')  # strings, among them the names of operations, and comments
_OPERATION = re.compile(r'"([A-Za-z_][\w$]*(?:\.[\w$-]+)+)"\s*\(', re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_VALUE = re.compile(r"%(?:\d+|[A-Za-z_$.-][\w$.-]*)(?:#\d+)?", re.ASCII)
# An operand list with a name in it. Unnamed values before the name match too, so that parsing reports the mixture.
_NAMED = re.compile(rf"{_OPERATION.pattern}\s*(?:{_VALUE.pattern}\s*,\s*)*{_NAME.pattern}\s*=", re.ASCII)
_SPACE = re.compile(r"\s*")
_BRACKETS = re.compile(rf"{_LITERAL.pattern}|->|>=|<=|[()\[\]{{}}<>,]")
_SIZES_ENTRY = re.compile(rf'"?{SIZES}"?\s*=\s*array<i32(?::([^<>]*))?>')


class Mistake(ValueError):
    """Operands that cannot be parsed: the offset in the text, and the message."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset, self.message = offset, message


class Span(NamedTuple):
    start: int
    end: int

    def of(self, text: str) -> str:
        return text[self.start : self.end]


class _Group(NamedTuple):
    """A name with its values."""

    name: Span
    equals: int
    values: list[Span]
    brackets: tuple[int, int] | None


class _Rest(NamedTuple):
    """What follows an operation's operands: the attributes in braces, if there are any, and the types."""

    attributes: Span | None
    entries: list[Span]  # of the attributes
    parenthesis: int  # offset of the one before the types
    types: list[Span]


Edit = tuple[int, int, str]


# --- names to positions ----------------------------------------------------------------------------


def positional(text: str) -> str:
    """The text in MLIR's generic form; the same object when no operation has named operands.

    Line numbers do not change. Columns do not change either before an operation's attributes, or, where names are not
    in
    the declaration's order, before its first operand. Raises :class:`Mistake`.
    """
    plain = _without_comments(text)
    if _NAMED.search(plain) is None:
        return text
    edits: list[Edit] = []
    for match in _operations(plain, _NAMED):
        edits += _without_names(plain, match)
    return _edited(text, edits) if edits else text


def _without_names(text: str, match: re.Match[str]) -> list[Edit]:
    title, opening = match[1], _OPERATION.match(text, match.start()).end()  # type: ignore[union-attr]
    op_class = next((c for c in Kv.operations if c.OPERATION_NAME == title), None)
    if op_class is None:
        close = difflib.get_close_matches(title, [c.OPERATION_NAME for c in Kv.operations], 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise Mistake(match.start(), f"operands have names in operations of kv, and '{title}' is none{hint}")
    fields = operand_fields(op_class)
    groups, separators, end = _groups(text, opening)
    _check(title, fields, groups, text, match.start())
    rest = _rest(text, end, title)
    given = {g.name.of(text): g.values for g in groups}
    written = [v for g in groups for v in g.values]
    declared = [v for f in fields for v in given.get(f.name, [])]
    if len(rest.types) != len(written):
        message = f"'{title}' op must have as many types as operands, {len(written)}, got {len(rest.types)}"
        raise Mistake(rest.parenthesis, message)
    edits = [_blank(*g.name) for g in groups] + [_blank(g.equals, g.equals + 1) for g in groups]
    edits += [_blank(i, i + 1) for g in groups if g.brackets for i in g.brackets]
    earlier = False
    for group, comma in zip(groups, [None, *separators], strict=True):
        if comma is not None and not (group.values and earlier):
            edits.append(_blank(comma, comma + 1))
        earlier = earlier or bool(group.values)
    if declared != written:
        type_of = dict(zip(written, rest.types, strict=True))
        for spans in ((written, declared), (rest.types, [type_of[v] for v in declared])):
            edits += [(place.start, place.end, value.of(text)) for place, value in zip(*spans, strict=True)]
    if is_segmented(fields):
        sizes = ", ".join(str(len(given.get(f.name, []))) for f in fields)
        entry = f"{SIZES} = array<i32: {sizes}>"
        if rest.attributes is None:
            edits.append((end, end, f" {{{entry}}}"))
        else:
            entry += ", " if rest.entries else ""
            edits.append((rest.attributes.start, rest.attributes.start, entry))
    return edits


def _groups(text: str, at: int) -> tuple[list[_Group], list[int], int]:
    """The named operands from an offset on, the commas between them, and the offset after the closing parenthesis."""
    groups: list[_Group] = []
    separators: list[int] = []
    while True:
        name = _expect(_NAME, text, at, "expected the name of an operand: all operands have names, or none")
        equals = _symbol("=", text, name.end(), f"expected '=' behind '{name[0]}': all operands have names, or none")
        start = _skip(text, equals + 1)
        if text.startswith("[", start):
            values, end = _list(text, start)
            group = _Group(Span(*name.span()), equals, values, (start, end))
            at = end + 1
        else:
            value = _expect(_VALUE, text, start, "expected a value (%name), or values in brackets")
            group = _Group(Span(*name.span()), equals, [Span(*value.span())], None)
            at = value.end()
        groups.append(group)
        at = _skip(text, at)
        if text.startswith(")", at):
            return groups, separators, at + 1
        separators.append(_symbol(",", text, at, "expected ',' or ')' behind an operand"))
        at += 1


def _list(text: str, opening: int) -> tuple[list[Span], int]:
    """The values between brackets, and the offset of the closing one."""
    values: list[Span] = []
    at = _skip(text, opening + 1)
    if text.startswith("]", at):
        return values, at
    while True:
        value = _expect(_VALUE, text, at, "expected a value (%name)")
        values.append(Span(*value.span()))
        at = _skip(text, value.end())
        if text.startswith("]", at):
            return values, at
        at = _symbol(",", text, at, "expected ',' or ']' behind a value") + 1


def _check(title: str, fields: Sequence[Any], groups: Sequence[_Group], text: str, offset: int) -> None:
    """Check names and value counts against the declaration."""
    known = {f.name: f for f in fields}
    seen: set[str] = set()
    for group in groups:
        name, at = group.name.of(text), group.name.start
        field = known.get(name)
        if field is None:
            raise Mistake(at, f"'{title}' op has no operand '{name}'; {_legal(fields)}")
        if name in seen:
            raise Mistake(at, f"'{title}' op has operand '{name}' twice")
        seen.add(name)
        if field.variadic and group.brackets is None:
            raise Mistake(at, f"'{title}' op takes a list for '{name}': write {name} = [{group.values[0].of(text)}]")
        if not field.variadic and group.brackets is not None:
            raise Mistake(at, f"'{title}' op takes one value for '{name}': write {name} = %value, without brackets")
    missing = [f.name for f in fields if f.name not in seen and not (f.optional or f.variadic)]
    if missing:
        names = ", ".join(f"'{n}'" for n in missing)
        raise Mistake(offset, f"'{title}' op needs {names}; {_legal(fields)}")


def _legal(fields: Sequence[Any]) -> str:
    if not fields:
        return "it has no operands"
    kinds = [f"{f.name}{' (optional)' if f.optional else ' (list)' if f.variadic else ''}" for f in fields]
    return f"its operands are {', '.join(kinds)}"


def _rest(text: str, at: int, title: str) -> _Rest:
    """An operation's attributes and operand types, parsed from the end of its operands."""
    start = _skip(text, at)
    attributes, entries = None, []
    if text.startswith("{", start):
        end, entries = _enclosed(text, start)
        attributes = Span(start + 1, end)
        for entry in entries:
            if re.match(rf'"?{SIZES}\b', entry.of(text)):
                raise Mistake(entry.start, f"operands of '{title}' have names, which say the sizes: leave out {SIZES}")
        start = _skip(text, end + 1)
    colon = _symbol(":", text, start, f"expected attributes or ':' behind the operands of '{title}'")
    opening = _symbol("(", text, colon + 1, f"expected the types of the operands of '{title}' in parentheses")
    return _Rest(attributes, entries, opening, _enclosed(text, opening)[1])


# --- positions to names ----------------------------------------------------------------------------


def named(text: str) -> str:
    """The generic form with operand names added to the operations that have ``operandSegmentSizes``.

    An operation that does not match its declaration stays unchanged. :func:`positional` is the inverse.
    """
    classes = {c.OPERATION_NAME: operand_fields(c) for c in Kv.operations}
    edits: list[Edit] = []
    plain = _without_comments(text)
    for match in _operations(plain, _OPERATION):
        if is_segmented(fields := classes.get(match[1], [])):
            try:
                edits += _with_names(plain, match, fields)
            except Mistake:  # not in generic form
                continue
    return _edited(text, edits)


def _with_names(text: str, match: re.Match[str], fields: Sequence[Any]) -> list[Edit]:
    closing, operands = _enclosed(text, match.end() - 1)
    start = _skip(text, closing + 1)
    if not text.startswith("{", start):
        return []
    end, entries = _enclosed(text, start)
    found = [(e, m) for e in entries if (m := _SIZES_ENTRY.fullmatch(e.of(text))) is not None]
    if len(found) != 1:
        return []
    entry, sizes = found[0][0], [int(n) for n in (found[0][1][1] or "").split(",") if n.strip()]
    if len(sizes) != len(fields) or sum(sizes) != len(operands) or any(n < 0 for n in sizes):
        return []
    if any(n != 1 and not (f.variadic or (f.optional and n == 0)) for f, n in zip(fields, sizes, strict=True)):
        return []
    edits: list[Edit] = []
    ends = itertools.accumulate(sizes)
    for field, count, last in zip(fields, sizes, ends, strict=True):
        if count:
            first, final = operands[last - count], operands[last - 1]
            opened, closed = ("[", "]") if field.variadic else ("", "")
            edits.append((first.start, first.start, f"{field.name} = {opened}"))
            edits.append((final.end, final.end, closed))
    if len(entries) == 1:
        edits.append((closing + 1, end + 1, ""))
    else:
        i = entries.index(entry)
        edits.append((entry.start, entries[i + 1].start, "") if i == 0 else (entries[i - 1].end, entry.end, ""))
    return edits


# --- text ------------------------------------------------------------------------------------------


def _without_comments(text: str) -> str:
    """The text with comments replaced by spaces, so that offsets stay valid."""
    return _LITERAL.sub(lambda m: " " * len(m[0]) if m[0].startswith("//") else m[0], text)


def _operations(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Operations that match a pattern, outside of string literals."""
    for literal in _LITERAL.finditer(text):
        found = pattern.match(text, literal.start())
        if found is not None:
            yield found


def _enclosed(text: str, opening: int) -> tuple[int, list[Span]]:
    """The offset of the closing bracket, and the stripped spans between commas inside the brackets."""
    depth, start, parts = 0, opening + 1, []
    for match in _BRACKETS.finditer(text, opening):
        if match[0] in ("(", "[", "{", "<"):
            depth += 1
        elif match[0] in (")", "]", "}", ">"):
            depth -= 1
        if depth == 0 or (depth == 1 and match[0] == ","):
            first = _skip(text, start)
            part = Span(first, first + len(text[first : match.start()].rstrip()))
            if part.end > part.start or parts or match[0] == ",":
                parts.append(part)
            start = match.end()
        if depth == 0:
            return match.start(), parts
    raise Mistake(opening, f"'{text[opening]}' is not closed")


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _expect(pattern: re.Pattern[str], text: str, at: int, message: str) -> Any:
    at = _skip(text, at)
    found = pattern.match(text, at)
    if found is None:
        raise Mistake(at, message)
    return found


def _symbol(symbol: str, text: str, at: int, message: str) -> int:
    """The offset of a symbol that must come next."""
    at = _skip(text, at)
    if not text.startswith(symbol, at):
        raise Mistake(at, message)
    return at


def _blank(start: int, end: int) -> Edit:
    return (start, end, " " * (end - start))


def _edited(text: str, edits: Sequence[Edit]) -> str:
    """The text with non-overlapping spans replaced."""
    parts, at = [], 0
    for start, end, replacement in sorted(edits, key=lambda e: e[:2]):
        parts += [text[at:start], replacement]
        at = end
    return "".join([*parts, text[at:]])
