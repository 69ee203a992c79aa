# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of MLIR text before MLIR parses it, for input that crashes the parser of 22.1."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

# An op name with nothing after the dialect prefix: "kv."(...) is a fatal error.
_NAMELESS = re.compile(rb'"[A-Za-z_][\w$-]*\."(?=\s*\()')
# Address spaces that are too large for LLVM: an assertion failure when the module is translated.
_SPACE = re.compile(rb"(?:\bptr<|\bmemref<(?:[^<>]|<[^<>]*>)*?,)\s*(-\d+|0x[0-9A-Fa-f]+|\d{8,})\s*(?::\s*\w+\s*)?>")
_MOST_SPACES = 1 << 24
# Brackets nested deeper than in any real IR: the recursive parser, or code that visits its result, overflows the stack.
MOST_NESTED = 300
_IGNORED = re.compile(rb'"(?:[^"\\\n]|\\.)*"|//[^\n]*|->|>=|<=')
_STEPS = {**dict.fromkeys(b"([{<", 1), **dict.fromkeys(b")]}>", -1)}
_NO_BRACKET = bytes(set(range(256)) - _STEPS.keys())
_SIGNS = re.compile(rb"(?:-\s*){1000}")
# An array attribute of index elements is an assertion failure; one of an element type that has no Python class is a
# TypeError in code that reads it. The element type may be an alias.
_ARRAY = re.compile(rb"(?<![\w.])(?:builtin\.)?array\s*<\s*(!?[\w$.-]+)\s*(?=[>:])")
# Positions in structs, which MLIR casts to 32 bits after it has checked them.
_POSITION = re.compile(rb"\b(?:llvm\.(?:extract|insert)value\b[^\[\n]*\[|position\s*=\s*array<i64\s*:)([-\s\d,]*)[\]>]")
_MOST_POSITIONS = 1 << 31
_NUMBER = re.compile(rb"-?(?:0x[0-9A-Fa-f]+|\d+)")
_ALIAS = re.compile(rb"(![\w$.-]+)\s*=\s*([\w$.-]+)")
_ARRAY_ELEMENTS = ("i1", "i8", "i16", "i32", "i64", "f32", "f64")


class Problem(NamedTuple):
    """A position in the text (line and column count from 1) and the message."""

    line: int
    column: int
    message: str

    @staticmethod
    def at(data: bytes, offset: int, message: str) -> Problem:
        """A problem at an offset in the text."""
        return Problem(data.count(b"\n", 0, offset) + 1, offset - data.rfind(b"\n", 0, offset), message)


def problem(text: bytes | str) -> Problem | None:
    """The first problem that the parser would not survive, or None. Comments are ignored."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    aliases = dict(_ALIAS.findall(data))
    elements = [name.encode() for name in _ARRAY_ELEMENTS]
    expected = f"array attribute must have an element type of {', '.join(_ARRAY_ELEMENTS)}"
    for pattern, message, legal in (
        (_NAMELESS, "operation name must have a part after the dialect's", ()),
        (_ARRAY, expected, elements),
    ):
        for match in pattern.finditer(data):
            if legal and aliases.get(match[1], match[1]) in legal:
                continue
            start = data.rfind(b"\n", 0, match.start()) + 1
            if b"//" not in data[start : match.start()]:
                got = match[match.lastindex or 0].decode().strip()
                return Problem.at(data, match.start(), f"{message}, got {got}")
    for pattern, what, most in ((_SPACE, "address space", _MOST_SPACES), (_POSITION, "position", _MOST_POSITIONS)):
        for match in pattern.finditer(data):
            for number in _NUMBER.findall(match.group(1)):
                if not 0 <= int(number, 16 if b"x" in number else 10) < most:
                    text = f"{what} must be in [0, {most}), got {number.decode()}"
                    return Problem.at(data, match.start(1), text)
    if (match := _SIGNS.search(data)) is not None:
        return Problem(data.count(b"\n", 0, match.start()) + 1, 1, "more than 1000 consecutive minus signs")
    return _nested(data)


def _nested(data: bytes) -> Problem | None:
    """The first bracket that is nested too deeply."""

    def depths(text: bytes) -> Iterator[int]:
        return itertools.accumulate(map(_STEPS.__getitem__, text.translate(None, _NO_BRACKET)))

    if max(depths(data.replace(b"->", b"")), default=0) <= MOST_NESTED:  # quick: strings and comments count too
        return None
    plain = _IGNORED.sub(lambda m: b" " * len(m.group()), data)
    deep = next((i for i, depth in enumerate(depths(plain)) if depth > MOST_NESTED), None)
    if deep is None:
        return None
    place = next(itertools.islice(re.finditer(rb"[()\[\]{}<>]", plain), deep, None)).start()
    return Problem.at(data, place, f"brackets must be nested at most {MOST_NESTED} deep")
