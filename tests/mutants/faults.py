# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The planted faults, and where in the sources each is."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("dialect", "passes", "kernels", "runtime", "caches", "manager", "emulator", "tools", "pytorch")
OF_TORCH = "pytorch"  # the area whose tests need torch and transformers
LIT = (".mlir", ".test")


@dataclass(frozen=True)
class Fault:
    """A mistake: ``old``, which stands once in the source of ``symbol``, is replaced by ``new``."""

    name: str  # area/file
    symbol: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        """Pytest's names of ``caught_by``: a lit file is a case of one test."""
        return tuple(
            f"tests/test_lit.py::test_lit[{name.removeprefix('tests/')}]" if name.endswith(LIT) else name
            for name in self.caught_by
        )

    def planted(self) -> tuple[str, str]:
        """The file that has the symbol, from the root, and its text with the fault; ValueError when it does not fit."""
        module, _, symbol = self.symbol.partition(":")
        path = _file_of(module)
        text = (ROOT / path).read_text()
        start, end = (_in_python if path.endswith(".py") else _in_c)(text, symbol)
        lines = text.splitlines(keepends=True)
        source = "".join(lines[start:end])
        if source.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: OLD stands {source.count(self.old)} times in {self.symbol}, not once")
        return path, "".join([*lines[:start], source.replace(self.old, self.new), *lines[end:]])


def faults() -> list[Fault]:
    """All planted faults, by name."""
    found = []
    for area in AREAS:
        for file in sorted((Path(__file__).parent / area).glob("*.py")):
            of = runpy.run_path(str(file))
            found.append(Fault(f"{area}/{file.stem}", of["SYMBOL"], of["OLD"], of["NEW"], tuple(of["CAUGHT_BY"])))
    return found


def _file_of(module: str) -> str:
    """Where a module, or a file of C++, lies, from the root."""
    if "/" in module:
        return module
    _, *names = module.split(".")
    stem = "/".join(names if names[0] in ("dialect", "lowering") else ["python", "kvarn", *names])
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if (ROOT / path).is_file():
            return path
    raise ValueError(f"there is no module {module}")


def _in_python(text: str, symbol: str) -> tuple[int, int]:
    """The lines of a symbol: of what has its last name inside what has the names before."""
    node: ast.AST = ast.parse(text)
    for name in symbol.split("."):
        direct = [n for n in ast.iter_child_nodes(node) if name in _names(n)]
        found = direct or [n for n in ast.walk(node) if name in _names(n)]
        if len(found) != 1:
            raise ValueError(f"{name} of {symbol} is defined {len(found)} times, not once")
        node = found[0]
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
    return first - 1, node.end_lineno  # type: ignore[attr-defined]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _in_c(text: str, symbol: str) -> tuple[int, int]:
    """The lines of a function at the outermost level, by clang-format: its last line is a brace at the margin."""
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if re.match(rf"\w[^;]*\b{symbol}\([^;]*$", line)]
    if len(found) != 1:
        raise ValueError(f"{symbol} is defined {len(found)} times, not once")
    return found[0], next(i for i in range(found[0], len(lines)) if lines[i] == "}") + 1
