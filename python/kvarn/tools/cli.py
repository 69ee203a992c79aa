# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The ``kvarn`` command. Subcommands are imported on demand, so that ``kvarn --help`` is fast."""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.env import env
from kvarn.files import run_file, write_output
from kvarn.tools.input_options import arguments_of
from kvarn.tools.pass_options import add_pass_options, given_name, passes_of

COMMANDS = {
    "demo": ("kvarn.chat", "generate text with SmolLM2 through the paged cache"),
    "compile": ("kvarn.tools.cli:compile_main", "compile a kernel of a Python file, and print one of its stages"),
    "explain": ("kvarn.inspect.explain", "report how a kernel is compiled, pass by pass"),
    "ablate": ("kvarn.tools.ablate", "measure the effect of each optional pass on a kernel"),
    "bisect": ("kvarn.tools.bisect", "find the pass that changes what a kernel computes"),
    "trace": ("kvarn.tools.trace", "run a program, and write a timeline of its kernels' phases"),
    "tune": ("kvarn.measure.tune", "measure schedules of attention on this GPU, and save the best"),
    "doctor": ("kvarn.tools.doctor", "check the installation and suggest fixes"),
    "cache": ("kvarn.tools.cli:cache_main", "show the on-disk compile cache, or clear it"),
}
_STATIC = (int, float, bool, str, tuple)
STAGES = ("kv", "gpu", "nvvm", "llvm", "ptx", "cubin", "sass", "stats")


class UsageError(Exception):
    """A command line that refers to something that does not exist."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 after an error, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = "\n".join(f"  {name:9} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvarn",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="kvarn COMMAND ...",
        description="Compile, inspect and tune KV-cache kernels.",
        epilog=f"commands:\n{commands}\n\nkvarn COMMAND --help describes a command. See also kv-opt and kv-reduce.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), metavar="COMMAND")
    # Only options before the command are parsed here; the others are the command's.
    split = next((i for i, a in enumerate(arguments) if not a.startswith("-")), len(arguments))
    options = parser.parse_args(arguments[: split + 1])
    if options.version:
        from kvarn._version import __version__

        print(f"kvarn {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    module, _, function = COMMANDS[options.command][0].partition(":")
    try:
        return int(getattr(importlib.import_module(module), function or "main")(arguments[split + 1 :]) or 0)
    except UsageError as e:
        print(f"kvarn {options.command}: error: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        if env.debug:
            traceback.print_exc()
        text = str(e) or type(e).__name__
        if isinstance(e, MemoryError | OverflowError):
            text = f"there is not enough memory: {text}"
        elif not isinstance(e, ValueError | TypeError | RuntimeError | OSError | ImportError):
            text = f"{type(e).__name__}: {text} (KVARN_DEBUG=1 shows where)"
        # Errors in a kernel already start with file, line and column.
        located = ": error: " in text.splitlines()[0]
        print(text if located else f"kvarn {options.command}: error: {text.removeprefix('error: ')}", file=sys.stderr)
        return 1


# --- kvarn cache ---------------------------------------------------------------------------------


def cache_main(argv: Sequence[str]) -> int:
    from kvarn.compilation.disk_cache import compile_cache
    from kvarn.tools.doctor import human

    parser = argparse.ArgumentParser(prog="kvarn cache", description="Show the on-disk compile cache, or clear it.")
    parser.add_argument("action", nargs="?", choices=("info", "clear"), default="info", help="(default: info)")
    options = parser.parse_args(argv)
    info = compile_cache.info()
    if options.action == "clear":
        removed = compile_cache.clear()
        print(f"removed {removed} kernels ({human(info.bytes)}) from {info.directory}")
        return 0
    print(f"folder   {info.directory}")
    print(f"kernels  {info.entries}")
    print(f"size     {human(info.bytes)} of {human(info.limit) if info.limit > 0 else '0 (off)'}")
    return 0


# --- kvarn compile -------------------------------------------------------------------------------


def add_kernel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a kernel and its target."""
    parser.add_argument(
        "kernel", nargs="?", type=given_name, metavar="FILE.py:KERNEL", help="a @kv.kernel function of a Python file"
    )
    parser.add_argument(
        "--op",
        type=given_name,
        metavar="NAME",
        help="instead, an operation: a function of kv.ops (attention), MODULE:FUNCTION or FILE.py:FUNCTION; "
        "--spec and --static then need argument names: --spec 'query=buffer(bf16, (none, 32, 128))'",
    )
    parser.add_argument("--target", type=given_name, help="sm_80, sm_90a, sm_100a or host (default: this machine's)")
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="[NAME=]SPEC",
        help="the spec of an argument, in order or by name: bf16, buffer(i32, 2), "
        "paged(bf16, num_heads=8, head_size=128, page_size=16), collection(paged(...)). "
        "Not needed for arguments annotated with a dtype or a kv.Buffer",
    )
    parser.add_argument(
        "--static",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the value of an argument annotated with int, float, bool, str or tuple: bins=16",
    )
    add_pass_options(parser.add_argument)


def compile_named(options: argparse.Namespace) -> Any:
    """The ``kvarn.compilation.driver.Kernel`` that the options of `add_kernel_options` select."""
    compiler = importlib.import_module("kvarn.compilation.driver")
    passes = passes_of(options)
    kernel, specs = named(options)
    return compiler.compile(kernel, *specs, target=options.target, passes=passes, disable=options.disable)


def named(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The kernel and specs that the options of `add_kernel_options` select, or IR without specs, for ``kv.compile``."""
    if (options.op is None) == (options.kernel is None):
        raise UsageError("give a kernel, FILE.py:KERNEL, or an operation, --op attention")
    if options.op is not None:
        source, inputs = map(importlib.import_module, ("kvarn.tools.operation_source", "kvarn.tools.random_inputs"))
        given = inputs.InputOptions(arguments_of(options), lenient=True)
        return source.operation_source(options.op, options.spec, options.static, options.target, given), []
    if options.kernel.endswith(".mlir"):
        path = Path(options.kernel)
        if not path.is_file():
            raise UsageError(f"there is no file {options.kernel!r}")
        try:
            return path.read_text(encoding="utf-8"), []
        except UnicodeDecodeError as error:
            raise ValueError(f"{options.kernel} must be text in UTF-8: {error}") from None
    kernel = find_kernel(options.kernel)
    return kernel, complete_specs(kernel, options.spec, options.static)


def compile_main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvarn compile",
        description="Compile a kernel of a Python file, and print one of its stages.",
        epilog="example: kvarn compile kernels.py:scale --target sm_90a "
        "--spec 'paged(bf16, num_heads=8, head_size=128, page_size=16)' --emit ptx",
    )
    add_kernel_options(parser)
    parser.add_argument("--emit", choices=STAGES, default="ptx", help="the stage to print (default: ptx)")
    parser.add_argument("-o", "--output", type=given_name, metavar="FILE", help="write the stage to a file")
    parser.add_argument(
        "--save", type=given_name, metavar="FILE", help="write a bundle, which kv.load runs without MLIR"
    )
    options = parser.parse_args(argv)
    kernel = compile_named(options)
    if options.save:
        kernel.save(options.save)
        print(f"saved {options.save}", file=sys.stderr)
        if options.output is None and "--emit" not in " ".join(argv):
            return 0
    if options.emit == "stats":
        found: Any = "".join(f"{name}: {value}\n" for name, value in kernel.stats.items())
    elif options.emit in ("ptx", "cubin", "sass") and kernel.target == "host":
        raise UsageError(f"--emit {options.emit} needs a GPU target, got host: use --target sm_90a, or --emit llvm")
    else:
        found = kernel.asm[options.emit]
    data = found if isinstance(found, bytes) else found.encode()
    if options.output is not None:
        write_output(options.output, data)
    elif isinstance(found, bytes) and sys.stdout.isatty():
        raise UsageError(f"--emit {options.emit} is binary: give a file with -o")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data if data.endswith(b"\n") or isinstance(found, bytes) else data + b"\n")
    return 0


def find_kernel(place: str) -> Any:
    """The kernel of ``FILE.py:NAME``; without a name, the only kernel of the file."""
    file, _, name = place.rpartition(":") if ":" in place else (place, "", "")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}: give FILE.py:KERNEL")
    # A unique module name, so that a file called numpy.py does no harm.
    unique = f"kvarn_file_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    module = run_file(path, unique, import_folder=True)
    kernels = {
        n: v
        for n, v in vars(module).items()
        if hasattr(v, "trace_into") and not isinstance(v, type) and not n.startswith("_")
    }
    if not name and len(kernels) == 1:
        return next(iter(kernels.values()))
    if name not in kernels:
        have = ", ".join(kernels) or "no @kv.kernel function"
        raise UsageError(
            f"{file} has no kernel {name!r}: it has {have}" if name else f"{file} has {have}: name one, as {file}:NAME"
        )
    return kernels[name]


def complete_specs(kernel: Any, texts: Sequence[str], statics: Sequence[str] = ()) -> list[Any]:
    """One spec per parameter, from ``NAME=SPEC`` and ``SPEC`` texts, ``NAME=VALUE`` texts of static arguments, and
    annotations that determine the spec. Fields of a struct are named ``struct.field``.
    """
    from kvarn.dialect.dtypes import DType
    from kvarn.tools.specs import parse_spec

    names = [leaf.name for leaf in kernel.leaves]
    static = {leaf.name: leaf.annotation for leaf in kernel.leaves if leaf.annotation in _STATIC}
    named: dict[str, Any] = {}
    positional = []
    for text in texts:
        name, equals, rest = text.partition("=")
        if equals and name.strip().replace(".", "").isidentifier():
            if name.strip() not in names:
                raise UsageError(f"the kernel has no argument {name.strip()!r}: it has {', '.join(names)}")
            if name.strip() in static:
                raise UsageError(f"{name.strip()} is a Python value: --static {name.strip()}={rest}")
            named[name.strip()] = parse_spec(rest)
        else:
            positional.append(parse_spec(text))
    for text in statics:
        name, _, rest = text.partition("=")
        if name.strip() not in static:
            have = ", ".join(static) or "none"
            raise UsageError(f"--static takes NAME=VALUE of a static argument ({have}), got {text!r}")
        named[name.strip()] = _static_value(static[name.strip()], rest)
    defaults = {p.name: p.default for p in kernel.parameters if p.default is not p.empty}
    specs, missing = [], []
    for leaf in kernel.leaves:
        name, annotation = leaf.name, leaf.annotation
        if name in named:
            specs.append(named[name])
        elif not leaf.optional and (isinstance(annotation, DType) or type(annotation).__name__ == "BufferSpec"):
            specs.append(annotation)
        elif positional and name not in static:
            specs.append(positional.pop(0))
        elif name in defaults or leaf.optional:
            specs.append(defaults.get(name))
        else:
            missing.append(name)
    for option, of in (("static", [m for m in missing if m in static]), ("spec", missing)):
        if of:
            example = "16" if option == "static" else "paged(bf16, num_heads=8, head_size=128, page_size=16)"
            raise UsageError(f"--{option} is needed for {', '.join(of)}, such as --{option} '{of[0]}={example}'")
    if positional:
        raise UsageError(f"--spec was given {len(positional)} times too often: the kernel has {', '.join(names)}")
    return kernel.built(specs)


def _static_value(annotation: type, text: str) -> Any:
    """The value of a static argument, in Python syntax; a string needs no quotes."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        if annotation is str:
            return text
        raise UsageError(f"a static {annotation.__name__} must be in Python syntax, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
