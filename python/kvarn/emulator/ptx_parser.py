# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A parser of PTX for the interpreter in ``kvarn.emulator.grid``.

A comment ``// kv.barrier NAME`` names the barrier of the instructions on its line or, alone on a line, of the next
instruction, for reports. ``.loc`` lines give source lines.
"""

from __future__ import annotations

import bisect
import functools
import re
import sys
from dataclasses import dataclass, field

import numpy as np

from kvarn.dialect.chips import REGISTERS

LOCAL = 0x10CA1 << 40  # base address of a thread's local memory
GUARDED, JUMP, TOGETHER = 1, 2, 4  # kinds of instructions: with a guard, end of a basic block, needs whole warps
_BRACE = re.compile("[{}]")
# A label, a brace, a directive that ends with its line, or a statement that ends with a semicolon.
_PART = re.compile(r"([$\w]+):(?!:)|([{}])|(\.(?:loc|file|pragma)[^\n]*)(?=\n)|([^;\s][^;]*)(?:;|\Z)")
_LABEL, _BRACES, _LINE = 1, 2, 3  # groups of _PART
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_NOTE = re.compile(r"\s*kv\.barrier\s+(\S+)")
_NARROW = {"8": 1, "16": 2}  # bytes, by the end of the type of an access to shared memory
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class EmulationError(RuntimeError):
    """An illegal operation of the kernel, or an unsupported instruction.

    Attributes
    ----------
    kernel : str
        Its name, if it was launched by name.
    """

    kernel: str = ""


@dataclass
class Instruction:
    text: str
    name: tuple[str, ...]  # the opcode's parts
    operands: list[str]
    guard: tuple[str, bool] | None
    line: int = 0  # PTX line
    source: str = ""  # source file and line, if the PTX has them
    barrier: str = ""  # the name of its barrier from a comment
    scope: tuple[int, ...] = ()  # the enclosing braces
    index: int = 0  # index in the kernel's code

    @property
    def short(self) -> str:
        return self.text if len(self.text) < 120 else self.text[:100] + "…"

    @property
    def space(self) -> str:
        """The state space of an access."""
        if "shared::cluster" in self.name:
            return "cluster"
        if "local" in self.name:
            return "local"
        return "shared" if "shared" in self.name or "shared::cta" in self.name else "global"

    @property
    def where(self) -> str:
        return f"PTX line {self.line}" + (f", {self.source}" if self.source else "")


@dataclass
class Kernel:
    """A parsed entry of a PTX module."""

    params: list[str]
    code: list[Instruction]
    labels: dict[str, int]
    shared: dict[str, int] = field(default_factory=dict)  # offsets of shared variables
    shared_bytes: int = 0
    cluster: tuple[int, ...] | None = None  # blocks per cluster, if the PTX declares it
    registers: int | None = None  # registers per thread at launch, if the directives determine them
    # Registers of asynchronous products, and registers moved from or to them, numbered from 0.
    tracked: dict[str, int] = field(default_factory=dict)
    text: str = ""  # the whole PTX
    symbols: dict[str, int] = field(default_factory=dict)  # addresses of constants and of threads' local memory
    constants: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    local_bytes: int = 0  # per thread
    launches: int = 0  # number of launches
    kinds: list[int] = field(default_factory=list)  # of each instruction: GUARDED, JUMP, TOGETHER
    # Operands as a register or symbol, and an offset.
    addresses: dict[str, tuple[str, np.uint64]] = field(default_factory=dict)

    @functools.cached_property
    def grain(self) -> int:
        """Granularity of accesses to shared memory, in bytes: no access splits a grain."""
        found = 4
        for i in self.code:
            if i.name[0] in ("ld", "st", "atom", "red") and i.space != "global":
                found = min(found, _NARROW.get(i.name[-1][1:], 4))
        return found

    @functools.cached_property
    def reads_async(self) -> bool:
        """Whether the asynchronous proxy reads shared memory: products of warpgroups, and bulk copies from there."""
        return any(i.name[0] == "wgmma" or (i.name[0] == "cp" and "bulk" in i.name) for i in self.code)

    @functools.cached_property
    def has_clock(self) -> bool:
        """Whether it looks at the time."""
        return any("%clock64" in i.operands for i in self.code)

    def address(self, operand: str) -> tuple[str, np.uint64]:
        """The base and offset of an operand ``[base+offset]``, cached."""
        base, sign, offset = operand.strip("[]").strip().partition("+")
        if not sign and "-" in base[1:]:
            base, _, offset = base.rpartition("-")
            offset = "-" + offset
        number = np.uint64((int(offset, 0) if offset else 0) & (1 << 64) - 1)
        found = self.addresses[operand] = (base.strip(), number)
        return found

    def symbol(self, offset: int) -> str:
        """A place in shared memory, as its variable and an offset."""
        found = max(((at, name) for name, at in self.shared.items() if at <= offset), default=(0, "shared"))
        return found[1] + (f"+{offset - found[0]}" if offset > found[0] else "")


def parse(text: str, entry: str) -> Kernel:
    """Parse the entry of the given name."""
    whole = text
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    notes: dict[int, str] = {}
    for number, line in enumerate(text.split("\n") if "kv.barrier" in text else (), 1):
        code, _, note = line.partition("//")
        named = _NOTE.match(note)
        if named:
            notes[number if code.strip() else -number] = named[1]  # negative: of the next instruction
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.M))
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(r"\.entry\s+" + re.escape(entry) + r"\s*\(([^)]*)\)", text)
    if not found:
        raise EmulationError(f"the PTX has no entry {entry}")
    params = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", found[1].strip())
    start = text.index("{", found.end())
    depth, end = 1, start + 1
    while depth:
        brace = _BRACE.search(text, end)
        if brace is None:
            raise EmulationError(f"the entry {entry} has no end")
        depth += 1 if brace[0] == "{" else -1
        end = brace.end()
    kernel = Kernel(params, [], {}, text=whole)
    offset = 0
    for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\]", text):
        offset = -(-offset // int(align)) * int(align)
        kernel.shared[name] = offset
        offset += int(size or 0)
    kernel.shared_bytes = offset
    _constants(kernel, text)
    for align, name, size in re.findall(r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", text[start:end]):
        kernel.local_bytes += -kernel.local_bytes % int(align)
        kernel.symbols[name] = LOCAL + kernel.local_bytes
        kernel.local_bytes += int(size)
    _directives(kernel, text[found.end() : start])
    _statements(kernel, text, start + 1, end - 1, files)
    _name_barriers(kernel, notes)
    kernel.tracked = _tracked(kernel.code)
    kernel.kinds = [_kind(i) for i in kernel.code]
    return kernel


def _kind(i: Instruction) -> int:
    """The kind of an instruction, which determines how it is scheduled."""
    jumps = i.name[0] in ("bra", "ret", "exit")
    # A part of a warp may arrive at the barrier of all threads, which counts threads. A barrier of some threads needs
    # whole warps, which reconverge there only after all earlier branches: PTX blocks have no order that ensures it.
    barrier = i.name[0] in ("bar", "barrier") and i.name[1] not in ("warp", "cluster")
    aligned = (i.name[0] == "bar" or "aligned" in i.name) and len(i.operands) > 1
    together = aligned if barrier else "sync" in i.name
    return GUARDED * (i.guard is not None) + JUMP * jumps + TOGETHER * together


def _constants(kernel: Kernel, text: str) -> None:
    """Bytes of a module, such as strings, at host addresses aligned to 16."""
    found = re.findall(r"\.(?:global|const) \.align \d+ \.b8 (\w+)\[(\d+)\](?:\s*=\s*\{([^}]*)\})?;", text)
    data, at = bytearray(), {}
    for name, size, values in found:
        at[name] = len(data)
        given = bytes(int(v) for v in values.split(",") if v.strip())
        data += given.ljust(-(-int(size) // 16) * 16, b"\0")
    kernel.constants = np.frombuffer(bytes(data), np.uint8).copy()
    kernel.symbols |= {name: kernel.constants.ctypes.data + offset for name, offset in at.items()}


def _directives(kernel: Kernel, text: str) -> None:
    values = {n: [int(x) for x in re.findall(r"\d+", v)] for n, v in re.findall(r"\.(\w+)\s+([\d, ]+)", text)}
    if "reqnctapercluster" in values:
        kernel.cluster = tuple([*values["reqnctapercluster"], 1, 1][:3])
    threads = 1
    for x in values.get("reqntid") or values.get("maxntid") or [0]:
        threads *= x
    if "maxnreg" in values:
        kernel.registers = values["maxnreg"][0]
    elif threads and "minnctapersm" in values:  # as many as fit: ptxas's rule for a kernel with setmaxnreg
        kernel.registers = min(255, REGISTERS // (threads * values["minnctapersm"][0]) // 8 * 8)


def _statements(kernel: Kernel, text: str, at: int, end: int, files: dict[str, str]) -> None:
    newlines = [m.start() for m in re.finditer("\n", text)]
    scope: list[int] = []
    scopes = 0
    labels: dict[tuple[tuple[int, ...], str], int] = {}
    source = ""
    for found in _PART.finditer(text, at, end):
        kind, part = found.lastindex, found[found.lastindex or 0]
        if kind == _LABEL:
            labels[tuple(scope), part] = len(kernel.code)
        elif part == "{":
            scopes += 1
            scope.append(scopes)
        elif kind == _BRACES:
            scope.pop()
        elif kind == _LINE:
            loc = _LOC.match(part)
            if loc:
                source = f"{files.get(loc[1], 'file ' + loc[1]).rsplit('/', 1)[-1]}:{loc[2]}"
        elif part[0] != ".":
            i = _instruction(part.rstrip())
            i.line, i.source, i.scope = bisect.bisect(newlines, found.start() - 1) + 1, source, tuple(scope)
            i.index = len(kernel.code)
            kernel.code.append(i)
    for (inside, name), place in labels.items():
        kernel.labels[name if not inside else f"{name}@{inside[-1]}"] = place
    for i in kernel.code:  # a label in braces is local to them
        if i.name[0] == "bra":
            inner = next((s for s in reversed(i.scope) if f"{i.operands[0]}@{s}" in kernel.labels), None)
            i.operands[0] += "" if inner is None else f"@{inner}"


def _name_barriers(kernel: Kernel, notes: dict[int, str]) -> None:
    lines = [i.line for i in kernel.code]
    for number, name in notes.items():
        first = bisect.bisect_left(lines, abs(number))
        line = number if number > 0 else lines[first] if first < len(lines) else 0
        for i in kernel.code[first:]:
            if i.line != line:
                break
            if i.name[0] in ("mbarrier", "bar", "barrier", "cp", "st"):
                i.barrier = name


def _tracked(code: list[Instruction]) -> dict[str, int]:
    """Operands of asynchronous products, and registers moved from or to them."""
    found = {
        r for i in code if i.name[:2] == ("wgmma", "mma_async") for o in i.operands[:2] if "{" in o for r in parts(o)
    }
    moves = [i.operands for i in code if i.name[0] == "mov" and all(o.startswith("%") for o in i.operands)]
    size = -1
    while found and size != len(found):
        size = len(found)
        for d, a in moves:
            if d in found or a in found:
                found |= {d, a}
    return {name: n for n, name in enumerate(sorted(found))}


def parts(operand: str) -> list[str]:
    """The registers of a vector operand."""
    return [p.strip() for p in operand.strip("{}").split(",")] if operand.startswith("{") else [operand]


def _instruction(text: str) -> Instruction:
    guard, body = None, text
    if text.startswith("@"):
        predicate, body = text.split(None, 1)
        guard = (predicate.lstrip("@!"), "!" in predicate)
    name, *rest = body.split(None, 1)
    given = rest[0] if rest else ""
    plain = "[" not in given and "{" not in given  # then commas part the operands
    operands = [o.strip() for o in (given.split(",") if plain else _OPERAND.findall(given))] if given else []
    return Instruction(text, _parts_of(name), operands, guard)


@functools.cache
def _parts_of(name: str) -> tuple[str, ...]:
    """The parts of an opcode."""
    return tuple(map(sys.intern, name.split(".")))
