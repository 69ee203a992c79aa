# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The options that say what a kernel is run on, the same in every command: ``--grid``, ``--arg``, ``--lengths``, ..."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any


def add_input_options(add: Callable[..., Any]) -> None:
    """The options that say what a kernel is run on."""
    add("--grid", type=_extents, metavar="N[xN]", help="blocks of a kernel's grid: 8, or 8x4")
    add("--block", type=_extents, metavar="N[xN]", help="threads of a block, if the kernel does not say")
    add(
        "--arg", action="append", default=[], metavar="NAME=VALUE",
        help="an argument that is not made by itself: a number, a buffer's shape (8x128), or its elements (0,1,5)",
    )  # fmt: skip
    add("--lengths", type=_counts, metavar="N,N", help="tokens cached of each sequence (37,0,18)")
    add("--new", type=_counts, metavar="N,N", help="tokens of the step of each sequence (3,1,2)")
    add("--seed", type=int, default=0, help="of the random arguments (0)")


def values_of(options: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of ``kvarn.tools.random_inputs.InputOptions`` that were given."""
    values = {}
    for text in options.arg:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg takes NAME=VALUE, got {text!r}")
        values[name.strip()] = value.strip()
    given = {n: getattr(options, n) for n in ("lengths", "new") if getattr(options, n) is not None}
    if "lengths" in given and "new" not in given:
        given["new"] = (1,) * len(given["lengths"])
    return {"values": values, "seed": options.seed, **given}


def _extents(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"must be one to three counts such as 8x4, got {text!r}")
    return (*map(int, text.split("x")), 1, 1)[:3]


def _counts(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"must be counts such as 37,0,18, got {text!r}")
    return tuple(map(int, text.split(",")))


__all__ = ["add_input_options", "values_of"]
