# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write docs/parity.md from the rows of parity_rows.py and from the code: make docs, or python docs/parity.py [--check]

A row names, for one member of the cache structs or one kernel over them, the operation of the dialect, the method of
the kernel language, the one in Python, the lit file and the tests. Each of them is looked up in the code; what is not
there is an error, so that the page cannot promise what the code has lost. ``--check`` writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parity_kernels import KERNELS
from parity_rows import (
    COLLECTION,
    CONTINUOUS,
    FA3,
    NEEDS_BLACKWELL,
    OPERAND_ROWS,
    PAGED,
    ROWS_,
    SECTIONS,
    No,
    Refused,
    Row,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parity.md"
ROWS: list[Row] = [*PAGED, *CONTINUOUS, *FA3, *COLLECTION, *ROWS_, *OPERAND_ROWS, *KERNELS]
CELLS = ("op", "dsl", "host", "lit", "test")  # what a row must have to be complete on the host


# --- looking things up -----------------------------------------------------------------------------


@functools.cache
def operations() -> frozenset[str]:
    """Names of the dialect's operations and types."""
    importlib.import_module("kvarn.dialect.kv")
    kv = importlib.import_module("kvarn.dialect.base").Kv
    return frozenset({op.OPERATION_NAME for op in kv.operations} | {f"!{t.TYPE_NAME}" for t in kv.types}
                     | {f"!kv.{t.TYPE_NAME}" for t in kv.types})  # fmt: skip


@functools.cache
def exists(path: str) -> bool:
    """Whether ``module:Class.attribute`` can be reached; an attribute of instances counts when it is declared."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    for name in names.split("."):
        if not hasattr(found, name):
            declared = getattr(found, "__mro__", ())
            slots = {s for c in declared for s in getattr(c, "__slots__", ())}
            hints = {n for c in declared for n in getattr(c, "__annotations__", {})}
            made = {n for c in declared for n in _set_in(c)}
            return name in slots | hints | made
        found = getattr(found, name)
    return True


@functools.cache
def _set_in(cls: type) -> frozenset[str]:
    """Attributes that the methods of a class of ours set on self."""
    if not cls.__module__.startswith("kvarn."):
        return frozenset()
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            return frozenset(n.attr for n in stored if getattr(n.value, "id", "") == "self")
    return frozenset()


@functools.cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def tests_of(file: str) -> frozenset[str]:
    """Names of the test functions of a file, those that it takes from suites ``unit.test_...`` included.

    Tests with a parameter ``stand_in`` are those of no GPU: no file takes them over.
    """
    tree = ast.parse(_text(file))
    found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    left_out = [
        word for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NOT_HERE"
        for word in (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)) if isinstance(word, str)
    ]  # fmt: skip
    taken = _suites(tree)
    for suite in (s for s in strings if s in taken):
        names = tests_of(f"tests/{suite.replace('.', '/')}.py")
        found |= {n for n in names - _with_stand_ins(suite) if not any(word in n for word in left_out)}
    return frozenset(found)


def _with_stand_ins(suite: str) -> set[str]:
    """Names of a suite's tests of what stands in for the driver."""
    tree = ast.parse(_text(f"tests/{suite.replace('.', '/')}.py"))
    functions = (n for n in tree.body if isinstance(n, ast.FunctionDef))
    return {n.name for n in functions if "stand_in" in {a.arg for a in n.args.args}}


def _suites(tree: ast.Module) -> set[str]:
    """Modules whose tests a file takes over: what it calls SUITE or SUITES."""
    return {
        n.value for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("SUITE", "SUITES")
        for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }  # fmt: skip


def has_test(identity: str) -> bool:
    file, _, name = identity.partition("::")
    return name in tests_of(file)


def problems(row: Row) -> list[str]:
    """What a row names and the code does not have."""
    where, found = f"{SECTIONS[row.section]}: {row.member}", []
    if isinstance(row.op, str):
        if row.op not in operations():
            found.append(f"{where}: the dialect has no {row.op}")
        needle = f'"{row.op}"' if row.op.startswith("kv.") else f"{row.op}<"
    elif isinstance(row.op, Refused):
        needle = row.op.error
    else:
        needle = None
    for name in ("dsl", "host"):
        path = getattr(row, name)
        if isinstance(path, str) and not exists(path):
            found.append(f"{where}: there is no {path}")
    if isinstance(row.lit, str) and needle is not None:
        text = _text(row.lit)
        expected = [m for m in re.findall(r"expected-error[^{]*\{\{(.*)\}\}", text)]
        if isinstance(row.op, Refused):
            if not any(needle in line for line in expected):
                found.append(f"{where}: {row.lit} expects no error {needle!r}")
        elif needle not in text:
            found.append(f"{where}: {row.lit} does not have {needle}")
    for name in ("test", "gpu"):
        identity = getattr(row, name)
        if isinstance(identity, str) and not has_test(identity):
            found.append(f"{where}: there is no test {identity}")
    return found


# --- the page --------------------------------------------------------------------------------------


def complete_on_host(row: Row) -> bool:
    return all(getattr(row, cell) is not None for cell in CELLS)


def complete_on_gpu(row: Row) -> bool:
    """Also has a test that runs on a GPU, or nothing to run there; what only another GPU can run does not count."""
    return complete_on_host(row) and row.gpu is not None and not needs_another(row)


def needs_another(row: Row) -> bool:
    """Whether only a GPU that the tests have not can run it: its code is assembled, and run in the interpreter."""
    return complete_on_host(row) and row.gpu == NEEDS_BLACKWELL


def cell(value: Any) -> str:
    if value is None:
        return "**missing**"
    if isinstance(value, No):
        return f"({value.why})"
    if isinstance(value, Refused):
        return f"refused: {value.error}"
    text = str(value)
    if "::" in text:
        file, _, name = text.partition("::")
        return f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"
    if text.endswith(".mlir"):
        return f"[{text.removeprefix('tests/')}](../{text})"
    return f"`{text.partition(':')[2].removeprefix('handles:') if ':' in text else text}`"


def counts(rows: Iterable[Row]) -> tuple[int, int, int, int]:
    """Rows, complete on the host, complete on a GPU, and complete but for a GPU that the tests have not."""
    listed = list(rows)
    host, gpu, another = (sum(map(f, listed)) for f in (complete_on_host, complete_on_gpu, needs_another))
    return len(listed), host, gpu, another


def page() -> str:
    """The text of docs/parity.md."""
    total, host, gpu, another = counts(ROWS)
    left = total - gpu - another
    out = [
        "<!-- Written by docs/parity.py from docs/parity_rows.py and the code: edit the rows, then make docs. -->\n",
        "# Members of the caches, and where they are\n",
        f"**{total} rows; {host} complete on the host, {gpu} on a GPU; {another} more need sm_100a; "
        f"{left or 'none'} {'is' if left < 2 else 'are'} open.**\n",
        "A row is complete on the host when it names an operation (or the error that refuses the member), its\n"
        "method in kernels and in Python, its lit test and a test of its numbers; on a GPU when a test runs it there\n"
        "too. Tests of the host also run the code for GPUs in an interpreter of PTX. What only sm_100a has was never\n"
        "run on one: it is assembled, and run in the interpreter. What is named is looked up in the code: a test\n"
        "fails when it is gone. Cells in brackets say why there is nothing.\n",
        "| section | rows | host | GPU | needs sm_100a |\n|---|---|---|---|---|",
    ]
    for key, title in SECTIONS.items():
        numbers = counts(r for r in ROWS if r.section == key)
        if numbers[0]:
            out.append(f"| [{title}](#{anchor(title)}) | {' | '.join(map(str, numbers))} |")
    for key, title in SECTIONS.items():
        rows = [r for r in ROWS if r.section == key]
        if not rows:
            continue
        out.append(f"\n## {title}\n\n| member | dialect | kernels | Python | lit | test | GPU test |\n|{'---|' * 7}")
        for r in rows:
            name = r.member + (f" ({r.note})" if r.note else "")
            cells = [name, *map(cell, (r.op, r.dsl, r.host, r.lit, r.test, r.gpu))]
            out.append(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |")
    return "\n".join(out) + "\n"


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the page is out of date; write nothing")
    options = parser.parse_args(argv)
    wrong = [p for row in ROWS for p in problems(row)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    text = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        print("out of date: docs/parity.md: run make docs", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print("wrote docs/parity.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
