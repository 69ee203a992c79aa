# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the pages name exists: commands with their flags, files, passes, names of kvarn, variables, schedule entries."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
from reference.pages import PAGES, ROOT, blocks, name_of

import kvarn as kv
from kvarn import env
from kvarn.dialect import annotations, kv as dialect, schedules
from kvarn.lowering import registry
from kvarn.tools import cli, opt_args, reduce

HAND_WRITTEN = [*(p for p in PAGES if p.parent.name != "reference"), ROOT / "bench" / "RESULTS.md"]
_FENCE = re.compile(r"^ *```.*?^ *```$", re.S | re.M)
_PROGRAMS = ("kvarn", "kv-opt", "kv-reduce", "make", "python", "pip", "torchrun", "lit")
pytestmark = pytest.mark.whole

# Passes of readers' own files, and of an example's package, in the commands of pages.
_OF_READERS = {"my-pass", "widen", "look-ahead", "count-loads", "drop-prefetches"}


def prose(path: Path) -> str:
    """A page without its fenced blocks, whose lines are empty."""
    return _FENCE.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))


def spans(path: Path) -> Iterator[str]:
    """The inline code of a page."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^    .*$", "", prose(path), flags=re.M)):
        for found in re.findall(r"`([^`]+)`", paragraph):
            yield " ".join(found.split()).replace("\\|", "|")


def commands(path: Path) -> Iterator[list[str]]:
    """The words of every command on a page: lines of indented blocks, inline code, and RUN lines."""
    lines = re.sub(r"\\\n\s*", " ", prose(path)).splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines if re.match(r"    \S", line)]
    found += [
        line.partition("RUN:")[2] for _, info, code in blocks(path) if info == "mlir" for line in code.splitlines()
    ]
    for text in [*found, *spans(path)]:
        for one in re.split(r" \| | 2>&1", text):
            try:
                words = shlex.split(one, comments=True)
            except ValueError:  # an apostrophe: prose that is indented
                continue
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables of the command
                words = words[1:]
            words = [Path(words[0]).name, *words[1:]] if words else words
            if len(words) > 1 and words[0] in _PROGRAMS and not re.search(r"[─►]", one):
                yield words


@functools.cache
def flags_of(command: str) -> set[str]:
    """The flags that a command of kvarn lists in its help."""
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        cli.main([command, "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", out.getvalue()))


@functools.cache
def flags_of_kv_opt() -> set[str]:
    return {flag for action in opt_args.build_parser()._actions for flag in action.option_strings}


def is_pass(name: str) -> bool:
    return name in registry.names() or name in _OF_READERS or registry._is_upstream(name)


def unknown_flags(words: list[str]) -> list[str]:
    """The flags of a command line that its program does not have."""
    given = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    if words[0] == "kvarn":
        return [flag for flag in given if flag not in flags_of(words[1])] if words[1] in cli.COMMANDS else given
    if words[0] == "kv-opt":
        return [f for f in given if f not in flags_of_kv_opt() and not is_pass(f.lstrip("-").partition("{")[0])]
    if words[0] == "kv-reduce":
        out = io.StringIO()
        with redirect_stdout(out), pytest.raises(SystemExit):
            reduce.main(["--help"])
        return [flag for flag in given if flag not in out.getvalue()]
    return []


def in_folders(name: str) -> bool:
    """Whether a file or a pattern, from the root, from docs or from lowering/passes of kvarn, names a file."""
    pattern = re.sub(r"<[^>]*>|\{[^}]*\}|NAME\b|SUITE\b", "*", name.rstrip("/"))
    return any(any(folder.glob(pattern)) for folder in (ROOT, ROOT / "docs", ROOT / "python"))


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_a_command_has_the_flags_that_its_program_has(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    for words in commands(path):
        line = " ".join(words)
        assert unknown_flags(words) == [], line
        if words[0] == "kvarn":
            assert words[1] in (*cli.COMMANDS, "--version", "--help", "COMMAND"), line
        if words[0] == "make":
            assert words[1] in targets or "=" in words[1], line
        if words[0] == "pip" and "[" in line:
            assert set(re.search(r"\[([\w,]+)\]", line)[1].split(",")) <= set(extras), line
        if words[0] in ("python", "torchrun") and "-m" not in words:
            script = next((word for word in words[1:] if word.endswith(".py")), "")
            assert not script or in_folders(script) or script == "decode.py", line


def test_a_flag_that_a_program_does_not_have_is_found():
    assert unknown_flags(["kvarn", "compile", "f.py:f", "--emti", "kv"]) == ["--emti"]
    assert unknown_flags(["kv-opt", "k.mlir", "--lower-kv-acces", "--cse", "--target=host"]) == ["--lower-kv-acces"]
    assert unknown_flags(["kv-reduce", "k.mlir", "--interested=x"]) == ["--interested"]
    assert unknown_flags(["kvarn", "compiel", "--emit"]) == ["--emit"]


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_a_file_that_a_page_names_is_there(path):
    """Files of the repository, by their folder; a name alone is one of the reader's or of a dump."""
    folders = "dialect|lowering|python|tests|bench|docs|examples|release|kvarn"
    for span in spans(path):
        for name in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./*<>{{}},-]*", span):
            if not name.startswith("bench/results/"):  # the next run of a suite writes them
                assert in_folders(name), f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_a_pass_that_a_page_names_is_one(path):
    for span in spans(path):
        for name, options in re.findall(r"(?<![\w-])([a-z]+-kv-[a-z-]+)(?:\{([^}]*)\})?", span):
            if path.name == "CHANGELOG.md" and name in (*registry.RENAMED, "mark-kv-descriptors"):
                continue
            assert name in registry.NAMES, f"{name_of(path)}: {name}"
            known = {field.replace("_", "-") for field in registry.find(name).options_class.__dataclass_fields__}
            assert set(re.findall(r"([a-z-]+)=", options)) <= known, f"{name_of(path)}: {name}{{{options}}}"


def resolves(name: str) -> bool:
    """Whether a dotted name of kvarn is a value, an operation of the dialect or an attribute of its kernels."""
    first, *rest = name.split(".")
    short = ".".join(rest)
    if first == "kv":
        if short in OPERATIONS or name in annotations.KINDS or name in ATTRIBUTES:
            return True
    found = kv
    if rest[0] in ("parallel", "torch"):  # which import torch
        code = "".join(p.read_text() for p in (ROOT / "python" / "kvarn" / rest[0]).rglob("*.py"))
        return all(re.search(rf"\b{part}\b", code) for part in rest[1:])
    for n, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(["kvarn", *rest[: n + 1]]))
            except ImportError:
                return False
    return True


OPERATIONS = {op.OPERATION_NAME.removeprefix("kv.") for op in dialect.Kv.operations} | {"prefetch_page", "page_bounds"}
ATTRIBUTES = {"kv.tiled", "kv.inputs", "kv.loads", "kv.roles", "kv.space", "kv.irdl", "kv.same_page", "kv.field"}


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_a_name_of_kvarn_that_a_page_uses_is_there(path):
    gone = {
        "kv.beside",
        "kv.take_round",
        "kvarn.dsl.machine",
        "kvarn.programs",
        "kvarn.lowering.package_version",
        "kvarn.inspect.Passport",
    }
    for span in spans(path):
        for name in re.findall(r"(?<![\w./!:-])(?:kv|kvarn)(?:\.[A-Za-z_]\w*)+(?![\w/-])", span):
            if re.search(r"\.(?:py|mlir|html|kvarn|passes|extensions)$", name) or (
                path.name == "CHANGELOG.md" and name in gone
            ):
                continue
            assert resolves(name), f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_a_variable_that_a_page_names_is_read(path):
    known = set(re.findall(r'"(KVARN_\w+)"', Path(env.__file__).read_text())) | {"KVARN_TEST_ALL"}
    assert set(re.findall(r"KVARN_[A-Z_]+", path.read_text())) <= known


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)
def test_schedule_entries_that_a_page_shows_are_known(path):
    known = {name for found in schedules.OPERATIONS.values() for kind in found.kinds for name in found.names(kind)}
    for text in re.findall(r"schedule=(\{\"[^}]*\})", path.read_text()):
        assert set(ast.literal_eval(text.replace(", ...", ""))) <= known, f"{name_of(path)}: {text}"


def test_every_kind_of_statement_that_is_checked_stands_on_some_page():
    """A pattern that matches nothing would test nothing."""
    every = [span for path in HAND_WRITTEN for span in spans(path)]
    assert sum(len(list(commands(path))) for path in HAND_WRITTEN) > 100
    for pattern, least in (
        (r"lowering/\w+", 30),
        (r"[a-z]+-kv-[a-z]+", 60),
        (r"\bkv\.\w+", 200),
        (r"KVARN_[A-Z]+", 20),
    ):
        assert sum(re.search(pattern, span) is not None for span in every) > least, pattern
