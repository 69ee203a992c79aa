# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The command line of kv-opt: mlir-opt's flags, and the name of any pass as a flag.

Options are accepted with one dash or two, as by LLVM's tools. A flag that is not an option of kv-opt is a pass:
``--cse``, ``--lower-kv-access='target=sm_90a'``. Passes run in the order in which they are written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from kvarn.dialect.chips import COMPILED_FOR

from .input_options import add_input_options, add_model_option
from .pass_options import add_pass_options, given_name

EMIT = ("mlir", "llvm", "ptx", "sass", "cubin", "bytecode")
TARGETS = (*reversed(COMPILED_FOR), "host")
DEFAULT_MARKER = "// -----"


class UsageError(ValueError):
    """An unusable command line; the message says why."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def _switch(text: str) -> bool:
    if text.lower() not in ("", "true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() in ("", "true", "1")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        problem = f"a filter of remarks must be a regular expression: {error}, got {text!r}"
        raise argparse.ArgumentTypeError(problem) from None
    return text


_SWITCH: dict[str, Any] = {"nargs": "?", "type": _switch, "const": True, "metavar": "true|false"}


def build_parser() -> argparse.ArgumentParser:
    """The parser of kv-opt's own options."""
    parser = _Parser(
        prog="kv-opt",
        allow_abbrev=False,
        description="Run kv and upstream MLIR passes on a file, and print the result.",
        epilog="Any pass is a flag; passes run in order: --lower-kv-access='option=value' --cse. See --list-passes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", nargs="*", help="the input file, MLIR text or bytecode; - or none: stdin")

    def group(title: str):
        section = parser.add_argument_group(title)

        def switch(name: str, text: str, default: bool = False, dest: str | None = None) -> None:
            section.add_argument("--" + name, dest=dest, default=default, help=text, **_SWITCH)

        return section.add_argument, switch

    add, switch = group("pipeline")
    add("--pass-pipeline", metavar="TEXT", help="passes to run: 'builtin.module(a,gpu.module(b),c{option=value})'")
    switch("kv-pipeline", "run the default pipeline of --target")
    add("--target", metavar="|".join(TARGETS), help="target of --kv-pipeline and --emit")
    add("--start-after", metavar="PASS", help="run --kv-pipeline from after this pass, which has run on the IR")
    add("--stop-after", metavar="PASS", help="run the pipeline up to and including this pass")
    add_pass_options(add)
    switch("verify-each", "verify after each pass (default: true)", default=True)
    switch("check-semantics-each", "run the kernel after each pass on random caches, and fail if its answer changes")
    add(
        "--check-semantics-of",
        action="append",
        default=[],
        metavar="PASS",
        help="check only this pass, which must change the kernel; may be repeated",
    )
    add("--stage", metavar="PASS", help="the last pass that has run on the input (default: as the given passes need)")
    add_model_option(add)
    add("--kv-bisect-limit", type=int, metavar="N", help="apply only the first N counted rewrites of passes")
    switch("run-reproducer", "run the pipeline at the end of the input")
    switch("allow-unregistered-dialect", "accept operations of unknown dialects", dest="allow_unregistered")
    switch("mlir-disable-threading", "accepted for compatibility with mlir-opt: kv-opt runs on one thread")

    add, switch = group("arguments of the kernel (--check-semantics-each, --check-semantics-of)")
    add_input_options(add)

    add, switch = group("input")
    add(
        "--split-input-file",
        nargs="?",
        const=DEFAULT_MARKER,
        metavar="MARKER",
        help=f"split the input at lines with the marker ({DEFAULT_MARKER}), and process the chunks one by one",
    )
    add(
        "--verify-diagnostics", nargs="?", const="all", choices=("all", "only-expected"), metavar="all|only-expected",
        help="compare the diagnostics with the input's expected-error {{...}} comments",
    )  # fmt: skip
    add(
        "--irdl-file",
        type=given_name,
        action="append",
        default=[],
        metavar="FILE",
        help="load the dialects of an IRDL file",
    )
    switch("verify-roundtrip", "check that the printed module parses to the same module")

    add, switch = group("output")
    add("-o", dest="output", type=given_name, default="-", metavar="FILE", help="output file (default: stdout)")
    add("--emit", choices=EMIT, default="mlir", metavar="|".join(EMIT), help="the form of the output")
    switch("emit-bytecode", "the same as --emit=bytecode")
    add("--output-split-marker", default=DEFAULT_MARKER, metavar="MARKER", help="line between chunks in the output")
    add("--dump-dir", type=given_name, metavar="DIR", help="write the module after each pass to DIR/NN_pass.mlir")
    switch("mlir-print-op-generic", "print operations in generic form", dest="generic")
    switch("named-operands", "print optional and variadic operands of kv operations by name")
    switch("mlir-print-debuginfo", "print locations", dest="debug_info")
    switch("mlir-print-local-scope", "print types and attributes in place, without aliases", dest="local_scope")

    add, switch = group("debugging (on stderr)")
    for when in ("before", "after"):
        add(
            f"--mlir-print-ir-{when}", dest=f"print_{when}", action="append", default=[], metavar="PASS",
            help=f"print the module {when} this pass",
        )  # fmt: skip
        switch(f"mlir-print-ir-{when}-all", f"print the module {when} each pass", dest=f"print_{when}_all")
    for name, text in (
        ("after-change", "when printing after passes, print only if the pass changed the module"),
        ("after-failure", "print the module after a pass that fails"),
        ("module-scope", "print the whole module, also for a nested pass"),
    ):
        switch(f"mlir-print-ir-{name}", text, dest=f"print_{name.replace('-', '_')}")
    add(
        "--mlir-print-ir-tree-dir",
        dest="print_tree",
        type=given_name,
        metavar="DIR",
        help="print to files in DIR instead of stderr",
    )
    add(
        "--remarks-filter",
        type=_pattern,
        metavar="RE",
        help="print the remarks of passes with matching names: what they did and missed, and why",
    )
    add(
        "--remarks-output",
        type=given_name,
        metavar="FILE",
        help="write these remarks to a file: FILE.yaml, FILE.json, or text",
    )
    switch("mlir-timing", "print the time of each pass")
    switch("mlir-pass-statistics", "print the statistics of upstream passes", dest="statistics")
    add(
        "--mlir-generate-reproducer",
        type=given_name,
        dest="reproducer",
        metavar="FILE",
        help="write the input and the pipeline to FILE",
    )
    add(
        "--mlir-pass-pipeline-crash-reproducer",
        type=given_name,
        dest="crash_reproducer",
        metavar="FILE",
        help="the same, only if a pass fails",
    )
    switch("dump-pass-pipeline", "print the pipeline with all options")

    add, switch = group("about")
    switch("list-passes", "list the kv and upstream passes, and exit")
    switch("show-dialects", "list the dialects, and exit")
    switch("emit-irdl", "print kv.irdl.mlir, with which mlir-opt --irdl-file parses kv IR, and exit")
    switch("version", "print the versions of kvarn and MLIR, and exit")
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """(options, pass flags as (name, options text) in order). Raises :class:`UsageError`."""
    parser = build_parser()
    own, flags = [], []
    rest = list(arguments)
    known = {s.lstrip("-"): action for s, action in parser._option_string_actions.items()}
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            own += ["--", *rest]
            break
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or argument == "-":
            own.append(argument)
            continue
        action = known.get(name)
        if action is None:
            if argument.startswith("-o") and not argument.startswith("--") and not equals and "-" not in name:
                raise UsageError(f"unknown option {argument!r}: write -o FILE")
            flags.append((name, value))
        elif action.nargs == 0:
            own.append(action.option_strings[0])
        elif equals or action.nargs == "?":
            own.append(f"{action.option_strings[-1]}={value if equals else _const(action)}")
        elif not rest:
            raise UsageError(f"option {action.option_strings[-1]} needs a value")
        else:
            own.append(f"{action.option_strings[-1]}={rest.pop(0)}")
    return parser.parse_args(_unjoin(own)), flags


def _const(action: argparse.Action) -> str:
    return "true" if action.const is True else str(action.const)


def _unjoin(own: list[str]) -> list[str]:
    """``-o=FILE`` as two arguments, as argparse requires for a one-letter option."""
    found: list[str] = []
    for argument in own:
        found += ["-o", argument[3:]] if argument.startswith("-o=") else [argument]
    return found


__all__ = ["DEFAULT_MARKER", "EMIT", "TARGETS", "UsageError", "build_parser", "parse"]
