# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Code by lines, each with its place in the source: IR, PTX and machine code.

A place is a file and a line. Lines of IR have a chain of them, the innermost first, then the calls through which it was
reached; the assembler keeps the innermost only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Place = tuple[str, int]
Chain = tuple[Place, ...]


@dataclass
class Line:
    """A line of code.

    Attributes
    ----------
    text : str
    chain : tuple of (str, int)
        File and line, the innermost first; empty when nothing is known.
    number : int
        Of PTX, the line in the text that was assembled; of machine code, the line of that text that it was made from
        (0: not known).
    """

    text: str
    chain: Chain = ()
    number: int = 0


# --- IR ------------------------------------------------------------------------------------------

_ALIAS = re.compile(r"(#loc\d*) = loc\((.*)\)$")
_NAMED = re.compile(r" loc\((#loc\d*)\)")
_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):\d+(?: to (?::?\d+)?:?\d+)?')


class _Locations:
    """The locations of an IR text, read as they are asked for."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases, self._chains = aliases, dict[str, Chain]()

    def chain(self, text: str) -> Chain:
        """The places that a location names, as ``kvarn.errors.source_locations`` has them."""
        text = text.strip()
        if text not in self._chains:
            self._chains[text] = ()  # no endless way, whatever the text
            self._chains[text] = self._read(text)
        return self._chains[text]

    def _read(self, text: str) -> Chain:
        if text.startswith("#loc"):
            return self.chain(self._aliases.get(text, ""))
        if text.startswith("callsite("):
            callee, _, caller = _split(text[len("callsite(") : -1], " at ")
            return self.chain(callee) + self.chain(caller)
        if text.startswith("fused"):
            inner = text[text.index("[") + 1 : text.rindex("]")] if "[" in text else ""
            while inner:
                first, _, inner = _split(inner, ",")
                if found := self.chain(first):
                    return found
            return ()
        if found := _FILE.match(text):
            return ((found[1], int(found[2])),)
        if text.startswith('"') and text.endswith(")"):  # a name, and what it names
            return self.chain(_split(text, "(")[2][:-1])
        return ()


def _split(text: str, by: str) -> tuple[str, str, str]:
    """`str.partition` outside of strings and brackets."""
    depth, i, quoted = 0, 0, False
    while i < len(text):
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif depth == 0 and text.startswith(by, i):
            return text[:i], by, text[i + len(by) :]
        elif c == '"':
            quoted = True
        else:
            depth += (c in "([<{") - (c in ")]>}")
        i += 1
    return text, "", ""


def _without_locations(line: str, locations: _Locations) -> tuple[str, Chain]:
    """A line of IR without its locations, and the last of them."""
    chain: Chain = ()
    at = line.find(" loc(")
    while at >= 0:
        if named := _NAMED.match(line, at):
            inner, end = named[1], named.end()
        else:
            inner = _split(line[at + len(" loc(") :], ")")[0]
            end = at + len(" loc(") + len(inner) + 1
        chain = locations.chain(inner)
        line = line[:at] + line[end:]
        at = line.find(" loc(", at)
    return line, chain


def ir_lines(text: str) -> list[Line]:
    """The lines of IR that was printed with its locations, without them.

    An operation with regions has its location where it ends; it is that of the line where it begins too.
    """
    aliases, code = {}, []
    for line in text.rstrip("\n").split("\n"):
        if alias := _ALIAS.match(line):
            aliases[alias[1]] = alias[2]
        else:
            code.append(line)
    locations, found = _Locations(aliases), list[Line]()
    opened: list[list[Line]] = []  # lines of operations that have not ended
    for line in code:
        made = Line(*_without_locations(line, locations))
        found.append(made)
        stripped = made.text.strip()
        ends, begins = stripped.startswith("}"), stripped.endswith("{")
        if ends and opened:
            opened[-1].append(made)
            if not begins:
                for of in opened.pop():
                    of.chain = made.chain
        elif begins and not stripped.startswith("^"):
            opened.append([made])
    return found


# --- PTX and machine code ------------------------------------------------------------------------

_PTX_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_PTX_NOISE = re.compile(r"\s*(?:\$L__(?:tmp|func_begin|func_end)\d+:|\.loc\s|\.file\s)|\s*//\s*\.globl\b")


def ptx_lines(ptx: str) -> list[Line]:
    """The lines of PTX, without those that are there for debuggers only."""
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
    """The instructions and labels of machine code, disassembled with the lines of PTX (``nvdisasm -gp``).

    Kernels, ``entries``, come before the functions that the assembler adds.
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
    """The files that lines name, each once."""
    yield from dict.fromkeys(file for line in lines for file, _ in line.chain)


__all__ = ["Chain", "Line", "Place", "files_of", "ir_lines", "ptx_lines", "sass_lines"]
