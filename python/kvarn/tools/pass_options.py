# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Command-line options that change a pipeline, for all commands: ``--extend``, ``--load-pass``, ``--disable``, ..."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def given_name(text: str) -> str:
    """The type of options with a name of a file, a folder, a pass or an operation, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be a name, got nothing")
    if "\0" in text:
        raise argparse.ArgumentTypeError("must be a name without NUL bytes")
    return text


def given_path(text: str) -> Path:
    """The same, as a path."""
    return Path(given_name(text))


def add_pass_options(add: Callable[..., Any]) -> None:
    """Add the options by a parser's (or a group's) ``add_argument``."""
    add(
        "--disable",
        type=given_name,
        action="append",
        default=[],
        metavar="PASS",
        help="omit an optional pass of the pipeline",
    )
    add(
        "--load-pass",
        type=given_name,
        action="append",
        default=[],
        metavar="FILE.py",
        help="register the passes of a Python file: its run(), or the function of its name, by the file's stem, "
        "and functions decorated with kv_pass",
    )
    add(
        "--extend",
        type=given_name,
        action="append",
        default=[],
        metavar="MODULE|FILE.py",
        help="load an extension with operations, lowering rules, expansions and passes",
    )
    for where in ("after", "before"):
        add(
            f"--insert-{where}",
            action="append",
            default=[],
            metavar="PASS=NAME[{options}]",
            help=f"run a pass {where} one of the pipeline; may be repeated",
        )


def load_extensions(options: argparse.Namespace) -> None:
    """Load the extensions of ``--extend``; ValueError for an invalid one."""
    if options.extend:
        from kvarn.compilation import extensions

        for what in options.extend:
            extensions.extend(what)


def passes_of(options: argparse.Namespace) -> Mapping[str, list[str]]:
    """The ``passes`` argument of ``kv.pipeline``, after loading the files; ValueError for an invalid option."""
    load_extensions(options)
    if options.load_pass:
        from kvarn.lowering import loading

        for path in options.load_pass:
            loading.load_passes(path)
    found: dict[str, list[str]] = {}
    for where in ("after", "before"):
        for text in getattr(options, f"insert_{where}"):
            anchor, equals, name = text.partition("=")
            if not equals or not anchor or not name:
                raise ValueError(f"--insert-{where} takes PASS=NAME, such as hoist-kv-lookups=my-pass, got {text!r}")
            found.setdefault(f"{where}:{anchor}", []).append(name)
    return found


__all__ = ["add_pass_options", "given_name", "given_path", "load_extensions", "passes_of"]
