# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The command line of kv-opt: mlir-opt's flags, and any pass's name as a flag.

Options are taken with one dash or two, as LLVM's tools do. A flag that is no option of kv-opt is a pass:
``--cse``, ``--lower-kv-access='target=sm_90a'``. Passes keep the order in which they are written.
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
    """A command line that cannot be used; the message says why."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

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
        description="Run kv and upstream MLIR passes on a file, and show what comes out.",
        epilog="Any pass is a flag too, in order: --lower-kv-access='option=value' --cse. See --list-passes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", nargs="*", help="the file to read, MLIR text or bytecode; - or nothing: stdin")

    def group(title: str):
        section = parser.add_argument_group(title)

        def switch(name: str, text: str, default: bool = False, dest: str | None = None) -> None:
            section.add_argument("--" + name, dest=dest, default=default, help=text, **_SWITCH)

        return section.add_argument, switch

    add, switch = group("pipeline")
    add("--pass-pipeline", metavar="TEXT", help="passes to run: 'builtin.module(a,gpu.module(b),c{option=value})'")
    switch("kv-pipeline", "run the default pipeline of --target")
    add("--target", metavar="|".join(TARGETS), help="what --kv-pipeline and --emit compile for")
    add("--start-after", metavar="PASS", help="of --kv-pipeline, run what comes after this pass, which the IR has seen")
    add("--stop-after", metavar="PASS", help="run the pipeline up to and including this pass")
    add_pass_options(add)
    switch("verify-each", "verify after each pass (default: true)", default=True)
    switch("check-semantics-each", "run the kernel after each pass on random caches, and fail when its answer changes")
    add(
        "--check-semantics-of",
        action="append",
        default=[],
        metavar="PASS",
        help="the same for this pass alone, which must change the kernel; may be repeated",
    )
    add("--stage", metavar="PASS", help="the input is what this pass left (default: it is ready for the passes named)")
    add_model_option(add)
    add("--kv-bisect-limit", type=int, metavar="N", help="let passes do only the first N rewrites that they count")
    switch("run-reproducer", "run the pipeline that is written at the end of the input")
    switch("allow-unregistered-dialect", "accept operations of unknown dialects", dest="allow_unregistered")
    switch("mlir-disable-threading", "accepted for mlir-opt's sake: kv-opt runs on one thread")

    add, switch = group("arguments of the kernel (--check-semantics-each, --check-semantics-of)")
    add_input_options(add)

    add, switch = group("input")
    add(
        "--split-input-file",
        nargs="?",
        const=DEFAULT_MARKER,
        metavar="MARKER",
        help=f"process the chunks between lines that hold the marker ({DEFAULT_MARKER}) one by one",
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
        help="make the dialects of this IRDL file known",
    )
    switch("verify-roundtrip", "check that the printed module reads back as itself")

    add, switch = group("output")
    add("-o", dest="output", type=given_name, default="-", metavar="FILE", help="file to write; default: stdout")
    add("--emit", choices=EMIT, default="mlir", metavar="|".join(EMIT), help="what to write")
    switch("emit-bytecode", "the same as --emit=bytecode")
    add("--output-split-marker", default=DEFAULT_MARKER, metavar="MARKER", help="line between the chunks of the output")
    add("--dump-dir", type=given_name, metavar="DIR", help="write the module after each pass to DIR/NN_pass.mlir")
    switch("mlir-print-op-generic", "print operations in generic form", dest="generic")
    switch("named-operands", "print operands of kv operations that may be absent, or several, by name")
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
        ("after-change", "when printing after passes, only if the pass changed the module"),
        ("after-failure", "print the module after a pass that fails"),
        ("module-scope", "print the whole module even for a nested pass"),
    ):
        switch(f"mlir-print-ir-{name}", text, dest=f"print_{name.replace('-', '_')}")
    add(
        "--mlir-print-ir-tree-dir",
        dest="print_tree",
        type=given_name,
        metavar="DIR",
        help="print into files of DIR instead of stderr",
    )
    add(
        "--remarks-filter",
        type=_pattern,
        metavar="RE",
        help="print what the passes whose name matches did and missed, and why",
    )
    add(
        "--remarks-output",
        type=given_name,
        metavar="FILE",
        help="write these remarks there: FILE.yaml, FILE.json, or text",
    )
    switch("mlir-timing", "print how long each pass took")
    switch("mlir-pass-statistics", "print the statistics of upstream passes", dest="statistics")
    add(
        "--mlir-generate-reproducer",
        type=given_name,
        dest="reproducer",
        metavar="FILE",
        help="write the input with its pipeline to FILE",
    )
    add(
        "--mlir-pass-pipeline-crash-reproducer",
        type=given_name,
        dest="crash_reproducer",
        metavar="FILE",
        help="the same, but only when a pass fails",
    )
    switch("dump-pass-pipeline", "print the pipeline, every option spelled out")

    add, switch = group("about")
    switch("list-passes", "list the kv passes and those of MLIR, and stop")
    switch("show-dialects", "list the dialects and stop")
    switch("emit-irdl", "print kv.irdl.mlir, with which a stock mlir-opt --irdl-file reads kv IR, and stop")
    switch("version", "print the versions of kvarn and MLIR, and stop")
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
    """``-o=FILE`` as two arguments, which is the form argparse takes for a one-letter option."""
    found: list[str] = []
    for argument in own:
        found += ["-o", argument[3:]] if argument.startswith("-o=") else [argument]
    return found


__all__ = ["DEFAULT_MARKER", "EMIT", "TARGETS", "UsageError", "build_parser", "parse"]
