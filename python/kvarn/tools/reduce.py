# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv-reduce``: make IR smaller while a command still finds it interesting.

It removes functions, operations, loops and branches, arguments, attributes and constants, in chunks of halving size,
until nothing more can be removed. Candidates are verified before the command runs. Uses of a removed value get an
operand of the same type, a zero, or another argument instead.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn import errors
from kvarn.compilation import driver as compiler
from kvarn.files import write_output
from kvarn.lowering.passes.kv import verify_kv
from kvarn.lowering.rewrite import functions, walk

from . import opt_server
from .pass_options import given_name, load_extensions

Interesting = Callable[[str], bool]
Edit = Callable[[], bool]  # changes its module; returns whether it did

_FRAMES = ("builtin.module", "gpu.module", "func.func", "gpu.func")  # operations that contain others
_PLAIN = (ir.IntegerType, ir.IndexType, ir.F16Type, ir.BF16Type, ir.F32Type, ir.F64Type)


class Reducer:
    """Reduces one text.

    Parameters
    ----------
    text : str
        Interesting IR.
    interesting : callable
        Whether a text is interesting. Called once per text.
    tell : callable, optional
        ``tell(what, operations)``, called after each success.
    """

    def __init__(
        self, text: str, interesting: Interesting, tell: Callable[[str, int], None] = lambda what, count: None
    ) -> None:
        self.text, self._interesting, self._tell = text, interesting, tell
        self._seen: dict[str, bool] = {}
        self.asked = 0

    def run(self) -> str:
        """The smallest text found.

        Raises
        ------
        ValueError
            If the initial text is not interesting.
        """
        self.text = self._printed(self._parsed())
        if not self._asks(self.text):
            raise ValueError("the input is not interesting: the command must succeed on it")
        before = ""
        while before != self.text:
            before = self.text
            for what, edits in _KINDS:
                self._reduce(what, edits)
        return self.text

    def _reduce(self, what: str, edits: Callable[[ir.Module], Sequence[Edit]]) -> None:
        """Try edits of a kind in chunks of halving size."""
        size = max(len(edits(self._parsed())) // 2, 1)
        while True:
            start, count = 0, len(edits(self._parsed()))
            while start < count:
                # The last chunk first, so that the indices of remaining edits do not change.
                stop = count - start
                if self._try(what, edits, range(max(stop - size, 0), stop)):
                    now = len(edits(self._parsed()))
                    start = max(start - max(now - count + size, 0), 0) if now < count else start + size
                    count = now
                else:
                    start += size
            if size == 1:
                return
            size //= 2

    def _try(self, what: str, edits: Callable[[ir.Module], Sequence[Edit]], numbers: range) -> bool:
        module = self._parsed()
        with module.context, ir.Location.unknown(module.context):
            found = edits(module)
            changed = [found[n]() for n in reversed(numbers) if n < len(found)]
            if not any(changed) or not _is_valid(module):
                return False
        text = self._printed(module)
        if len(text) >= len(self.text) and what != "constants":
            return False
        if text == self.text or not self._asks(text):
            return False
        self.text = text
        self._tell(what, len(walk(module)))
        return True

    def _asks(self, text: str) -> bool:
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._seen:
            self.asked += 1
            self._seen[key] = self._interesting(text)
        return self._seen[key]

    def _parsed(self) -> ir.Module:
        return compiler.parse(self.text)

    def _printed(self, module: ir.Module) -> str:
        return str(module).rstrip("\n") + "\n"


def _is_valid(module: ir.Module) -> bool:
    """Whether MLIR and the kv verifiers accept a module; diagnostics are dropped."""
    handler: Any = module.context.attach_diagnostic_handler(lambda diagnostic: True)
    try:
        module.operation.verify()
        return not verify_kv.count_problems(module)
    except ir.MLIRError:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    finally:
        handler.detach()


# --- edits ------------------------------------------------------------------------------------------


def _whole_functions(module: ir.Module) -> list[Edit]:
    return [partial(_erase, f) for f in functions(module)]


def _erase(op: ir.Operation) -> bool:
    op.erase()
    return True


def _operations(module: ir.Module) -> list[Edit]:
    """The operations of functions, without terminators."""
    found: list[Edit] = []
    for op in walk(module, lambda name: name not in _FRAMES):
        block = op.block
        if block is None or block.operations[len(block.operations) - 1].operation != op or not _ends(op):
            found.append(partial(_drop, op))
    return found


def _ends(op: ir.Operation) -> bool:
    name = op.name.rpartition(".")[2]
    return name in ("return", "yield", "br", "cond_br", "condition", "unreachable", "switch", "reduce", "terminator")


def _drop(op: ir.Operation) -> bool:
    if not _is_there(op):
        return False
    values = [_stand_in(op, result) if _used(result) else None for result in op.results]
    if any(v is None and _used(r) for v, r in zip(values, op.results, strict=True)):
        return False
    for result, value in zip(op.results, values, strict=True):
        if value is not None:
            result.replace_all_uses_with(value)
    op.erase()
    return True


def _is_there(op: ir.Operation) -> bool:
    """Whether an op still exists: an enclosing op may have been erased."""
    try:
        return op.parent is not None
    except (RuntimeError, ValueError):
        return False


def _used(value: ir.Value) -> bool:
    return any(True for _ in value.uses)


def _stand_in(op: ir.Operation, result: ir.Value) -> ir.Value | None:
    """A value of a result's type that does not depend on the op."""
    for operand in op.operands:
        if operand.type == result.type:
            return operand
    with ir.InsertionPoint(op), op.location:
        return _zero(result.type) or _argument(op, result.type)


def _zero(type_: ir.Type) -> ir.Value | None:
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    if not isinstance(element, _PLAIN):
        return None
    zero = ir.FloatAttr.get(element, 0.0) if isinstance(element, ir.FloatType) else ir.IntegerAttr.get(element, 0)
    if isinstance(type_, ir.VectorType):
        return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, zero))
    return arith.constant(type_, zero)


def _argument(op: ir.Operation, type_: ir.Type) -> ir.Value | None:
    """An argument of the function around an op."""
    around = op.parent
    while around is not None and around.operation.name not in ("func.func", "gpu.func"):
        around = around.operation.parent
    if around is None:
        return None
    return next((a for a in around.operation.regions[0].blocks[0].arguments if a.type == type_), None)


def _bodies(module: ir.Module) -> list[Edit]:
    """Replace loops by one iteration, and branches by one side."""
    found = []
    for op in walk(module, lambda name: name in ("scf.for", "scf.if")):
        found += [partial(_inline, op, n) for n in range(len(op.regions))]
    return found


def _inline(op: ir.Operation, number: int) -> bool:
    if not _is_there(op) or not len(op.regions[number].blocks):
        return False
    block = op.regions[number].blocks[0]
    given = [op.operands[0], *list(op.operands)[3:]] if op.name == "scf.for" else []
    for argument, value in zip(block.arguments, given, strict=True):
        argument.replace_all_uses_with(value)
    *inner, last = [o.operation for o in block.operations]
    results = list(last.operands)
    for o in inner:
        o.move_before(op)
    for result, value in zip(op.results, results, strict=True):
        result.replace_all_uses_with(value)
    op.erase()
    return True


def _arguments(module: ir.Module) -> list[Edit]:
    """Unused arguments."""
    found = []
    for function in functions(module):
        block = function.regions[0].blocks[0] if len(function.regions[0].blocks) else None
        for n in range(0 if block is None else len(block.arguments)):
            found.append(partial(_drop_argument, function, n))
    return found


def _drop_argument(function: ir.Operation, number: int) -> bool:
    block = function.regions[0].blocks[0]
    if number >= len(block.arguments) or _used(block.arguments[number]):
        return False
    for name in ("kv.args", "arg_attrs"):
        if name in function.attributes:
            records = list(ir.ArrayAttr(function.attributes[name]))
            if number < len(records):
                function.attributes[name] = ir.ArrayAttr.get(records[:number] + records[number + 1 :])
    block.erase_argument(number)
    old = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    made = ir.FunctionType.get([a.type for a in block.arguments], old.results)
    function.attributes["function_type"] = ir.TypeAttr.get(made)
    return True


_KEPT = ("sym_name", "function_type", "value", "gpu.kernel", "gpu.container_module", "operandSegmentSizes", "kv.args",
         "kv.inputs")  # fmt: skip


def _attributes(module: ir.Module) -> list[Edit]:
    found = []
    for op in walk(module):
        for name in list(op.attributes):
            # Attributes that an upstream op declares may be required.
            if name not in _KEPT and ("." in name or op.name.startswith("kv.")):
                found.append(partial(_drop_attribute, op, name))
    return found


def _drop_attribute(op: ir.Operation, name: str) -> bool:
    if name not in op.attributes:
        return False
    del op.attributes[name]
    return True


def _constants(module: ir.Module) -> list[Edit]:
    """Replace integers by 0, 1, or half their value."""
    found: list[Edit] = []
    for op in walk(module, lambda name: name == "arith.constant"):
        value = op.attributes["value"]
        if isinstance(value, ir.IntegerAttr) and not isinstance(value, ir.BoolAttr):
            number = value.value
            smaller = [n for n in dict.fromkeys((number // 2, 1, 0)) if abs(n) < abs(number)]
            found += [partial(_set, op, value.type, n) for n in smaller]
    return found


def _set(op: ir.Operation, type_: ir.Type, number: int) -> bool:
    op.attributes["value"] = ir.IntegerAttr.get(type_, number)
    return True


_KINDS: tuple[tuple[str, Callable[[ir.Module], list[Edit]]], ...] = (
    ("functions", _whole_functions), ("operations", _operations), ("bodies", _bodies), ("operations", _operations),
    ("arguments", _arguments), ("attributes", _attributes), ("constants", _constants),
)  # fmt: skip


# --- command ------------------------------------------------------------------------------------------


def command_of(command: str, timeout: float, tools: str = "") -> Interesting:
    """Whether a shell command succeeds on a file with the text; the file's name replaces ``{}``, else it is appended.

    ``tools`` is a folder for the front of the command's PATH.
    """
    path = os.pathsep.join(filter(None, (tools, os.environ.get("PATH", os.defpath))))

    def interesting(text: str) -> bool:
        with tempfile.TemporaryDirectory(prefix="kv-reduce-") as folder:
            file = Path(folder, "candidate.mlir")
            file.write_text(text)
            name = shlex.quote(str(file))
            line = command.replace("{}", name) if "{}" in command else f"{command} {name}"
            nothing = subprocess.DEVNULL
            # In a session of its own, so that a time-out also ends the shell's children.
            with subprocess.Popen(
                line, shell=True, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
                env={**os.environ, "PATH": path},
            ) as shell:  # fmt: skip
                try:
                    return shell.wait(timeout) == 0
                except BaseException as error:
                    os.killpg(shell.pid, signal.SIGKILL)
                    if not isinstance(error, subprocess.TimeoutExpired):
                        raise
        return False

    return interesting


def _seconds(text: str) -> float:
    found = float(text)
    if not 0 < found < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, more than 0, got {text!r}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 with a result, 1 if the input is not usable."""
    parser = argparse.ArgumentParser(
        prog="kv-reduce",
        description="Make IR smaller while a command still succeeds on it.",
        epilog="example: kv-reduce big.mlir --interesting='! kv-opt --my-pass' -o small.mlir",
    )
    parser.add_argument("input", type=given_name, metavar="FILE.mlir")
    parser.add_argument(
        "--interesting",
        type=given_name,
        required=True,
        metavar="CMD",
        help="a shell command that succeeds on interesting files; the file's name is appended, or replaces {}. A "
        "kv-opt in it runs in one server process",
    )
    parser.add_argument(
        "--extend",
        type=given_name,
        action="append",
        default=[],
        metavar="MODULE|FILE.py",
        help="load an extension with operations of the IR",
    )
    parser.add_argument(
        "-o", dest="output", type=given_name, metavar="FILE",
        help="output file, which always has the smallest IR so far; default: stdout, at the end",
    )  # fmt: skip
    parser.add_argument("--timeout", type=_seconds, default=60, metavar="SECONDS", help="time limit (default: 60)")
    parser.add_argument("--quiet", action="store_true", help="do not report progress")
    options = parser.parse_args(argv)
    try:
        load_extensions(options)
        text = _read(options.input)
        with contextlib.ExitStack() as stack:
            tools = stack.enter_context(opt_server.on_path()) if "kv-opt" in options.interesting else ""
            found = _reduced(options, text, tools)
    except (OSError, errors.KernelError, ValueError, RuntimeError) as error:
        print(f"kv-reduce: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.output is None:
        sys.stdout.write(found)
    return 0


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', '') or error}") from None


def _reduced(options: argparse.Namespace, text: str, tools: str) -> str:
    """The result; an output file always has the smallest IR so far."""

    def tell(what: str, count: int) -> None:
        if options.output is not None:
            write_output(options.output, reducer.text)
        if not options.quiet:
            print(f"kv-reduce: {what}: {count} operations are left", file=sys.stderr, flush=True)

    reducer = Reducer(text, command_of(options.interesting, options.timeout, tools), tell)
    try:
        found = reducer.run()
    except KeyboardInterrupt:
        if options.output is None:
            sys.stdout.write(reducer.text)
        raise
    if options.output is not None:
        write_output(options.output, found)
    return found


__all__ = ["Reducer", "command_of", "main"]


if __name__ == "__main__":
    sys.exit(main())
