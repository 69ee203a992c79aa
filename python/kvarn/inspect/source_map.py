# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Code lines with their source locations: IR, PTX and machine code.

A location is a file and a line. A line of IR has a chain of locations, the innermost first, followed by the calls
through which it was inlined; the assembler keeps only the innermost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mlir import ir

from kvarn.errors import source_locations

Place = tuple[str, int]
Chain = tuple[Place, ...]


@dataclass
class Line:
    """A line of code.

    Attributes
    ----------
    text : str
    chain : tuple of (str, int)
        File and line, the innermost first; empty if unknown.
    number : int
        For PTX, the line in the assembled text; for machine code, the line of that text from which it was made (0:
        unknown).
    """

    text: str
    chain: Chain = ()
    number: int = 0


# --- IR ------------------------------------------------------------------------------------------

_ALIAS = re.compile(r"#loc\d* = loc\(.*\)$")
_STRING = r'"(?:[^"\\]|\\.)*"'
_LOCATION = re.compile(rf' loc\((?:#loc\d*|(?:{_STRING}|\((?:{_STRING}|[^()"])*\)|[^()"])*)\)')


def _chains(aliases: Iterable[str], locations: Iterable[str]) -> Iterator[Chain]:
    """The chains of textual locations, parsed by MLIR together with the aliases in them."""
    from kvarn.compilation import driver as compiler

    context = compiler.context()
    text = "\n".join([*aliases, f"module attributes {{builtin.locations = [{','.join(locations)}]}} {{}}"])
    for attribute in ir.ArrayAttr(ir.Module.parse(text, context).operation.attributes["builtin.locations"]):
        places = source_locations(ir.Location.from_attr(attribute, context))
        yield tuple((place.file, place.line) for place in places)


def ir_lines(text: str) -> list[Line]:
    """The lines of IR that was printed with locations, without them.

    An operation with regions has its location on its last line; the line on which it begins gets the same.
    """
    aliases, code = list[str](), list[str]()
    for line in text.rstrip("\n").split("\n"):
        (aliases if _ALIAS.match(line) else code).append(line)
    of = [_LOCATION.findall(line) for line in code]
    locations = dict.fromkeys(places[-1] for places in of if places)
    chains = dict(zip(locations, _chains(aliases, locations), strict=True))
    found = list[Line]()
    opened: list[list[Line]] = []  # lines of operations that have not ended
    for line, places in zip(code, of, strict=True):
        made = Line(_LOCATION.sub("", line), chains[places[-1]]) if places else Line(line)
        found.append(made)
        stripped = made.text.strip()
        ends, begins = stripped.startswith("}"), stripped.endswith("{")
        if ends and opened:
            opened[-1].append(made)
            if not begins:
                for line_of_op in opened.pop():
                    line_of_op.chain = made.chain
        elif begins and not stripped.startswith("^"):
            opened.append([made])
    return found


# --- PTX and machine code ------------------------------------------------------------------------

_PTX_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_PTX_NOISE = re.compile(r"\s*(?:\$L__(?:tmp|func_begin|func_end)\d+:|\.loc\s|\.file\s)|\s*//\s*\.globl\b")


def ptx_lines(ptx: str) -> list[Line]:
    """The lines of PTX, without debug directives."""
    text = ptx.split("\n")
    files = {m[1]: m[2] for line in text if (m := _PTX_FILE.match(line))}
    found: list[Line] = []
    chain: Chain = ()
    for number, line in enumerate(text, 1):
        if loc := _PTX_LOC.match(line):
            chain = ((files.get(loc[1], "?"), int(loc[2])),) if int(loc[2]) else ()
        elif line.startswith("\t.section"):
            break
        elif not _PTX_NOISE.match(line):
            code = line.strip().endswith(";") and not line.strip().startswith(".")
            found.append(Line(line.expandtabs(4).rstrip(), chain if code else (), number))
        if line.startswith("}"):
            chain = ()
    while found and not found[-1].text:
        found.pop()
    return found


_SASS_SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+),")
_SASS_LINE = re.compile(r'\s*//## File "[^"]*", line (\d+)')
_SASS_CODE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*$")
_SASS_LABEL = re.compile(r"(\.L_x?_?\w+):")


def sass_lines(text: str, ptx: Iterable[Line], entries: Iterable[str] = ()) -> list[Line]:
    """The instructions and labels of machine code, disassembled with lines of PTX (``nvdisasm -gp``).

    Kernels, ``entries``, precede functions that the assembler adds.
    """
    by_number = {line.number: line.chain for line in ptx}
    sections: dict[str, list[Line]] = {name: [] for name in entries}
    found: list[Line] = []
    number = 0
    for line in text.split("\n"):
        if section := _SASS_SECTION.match(line):
            found = sections.setdefault(section[1], [])
            found.append(Line(f"{section[1]}:"))
            number = 0
        elif at := _SASS_LINE.match(line):
            number = int(at[1])
        elif code := _SASS_CODE.match(line):
            found.append(Line(f"  {code[1]}  {code[2]}", by_number.get(number, ()), number))
        elif label := _SASS_LABEL.match(line):
            found.append(Line(f"{label[1]}:"))
    return [line for lines in sections.values() for line in lines]


def files_of(lines: Iterable[Line]) -> Iterator[str]:
    """The distinct files that lines name."""
    yield from dict.fromkeys(file for line in lines for file, _ in line.chain)


__all__ = ["Chain", "Line", "Place", "files_of", "ir_lines", "ptx_lines", "sass_lines"]
