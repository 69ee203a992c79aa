# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What to look for in MLIR text before MLIR parses it: input on which the parser of 22.1 ends the process."""

from __future__ import annotations

import re
from typing import NamedTuple

# An op name with nothing after the dialect's: "kv."(...) creates an operation of no dialect, a fatal error.
_NAMELESS = re.compile(rb'"[A-Za-z_][\w$-]*\."(?=\s*\()')
# An array attribute of indices, spelled out or through an alias of the type: an assertion.
_INDEX_ALIAS = re.compile(rb"(![\w$.-]+)\s*=\s*index\b")


class Problem(NamedTuple):
    """A place in the text (line and column count from 1) and what is wrong there."""

    line: int
    column: int
    message: str


def problem(text: bytes | str) -> Problem | None:
    """The first place in the text that must not reach the parser, or None. Comments are left alone."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    names = b"|".join([b"index", *map(re.escape, _INDEX_ALIAS.findall(data))])
    arrays = re.compile(rb"\barray\s*<\s*(?:" + names + rb")\s*(?=[>:])")
    for pattern, message in (
        (_NAMELESS, "operation name must have a part after the dialect's, got {}"),
        (arrays, "array attribute must have an integer or float element type, got {}"),
    ):
        for match in pattern.finditer(data):
            start = data.rfind(b"\n", 0, match.start()) + 1
            if b"//" not in data[start : match.start()]:
                line = data.count(b"\n", 0, match.start()) + 1
                return Problem(line, match.start() - start + 1, message.format(match.group().decode().strip()))
    return None
