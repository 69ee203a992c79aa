# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check that compiled code is unchanged: python -m bench.identity [--write FILE | --against FILE] [--only REGEX]

Compiles the programs of ``identity_programs.py`` for each target, without the disk cache, and prints one line each:
digest, target, name. The digest covers the PTX (on the host: the LLVM IR), without comments, debug information and
kernel names, and the launch parameters. If a program does not compile for a target, its line has the class of the
error instead. For a refactoring, write the lines before it and compare after it; the exit status is 1 if a program is
changed, new or gone. No GPU is needed; the run takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import kvarn as kv
from kvarn import dispatch
from kvarn.artifact import Artifact
from kvarn.compilation import driver as compiler
from kvarn.compilation.specialisation import Specialisation

from .identity_programs import TARGETS, Make, programs

Line = tuple[str, str, str]  # digest, target, name

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DEBUG = re.compile(r"^\s*\.(?:file|loc)\b[^\n]*\n", re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_DEFINED = re.compile(r"^define [^@\n]*@([\w.$]+)\(", re.M)
_METADATA = re.compile(r"^![^\n]*\n|^(?:source_filename|; ModuleID)[^\n]*\n|, ![\w.]+ ![\w.]+|(?<= )!dbg !\d+ ", re.M)


def plain(text: str, launches: str, on_host: bool) -> str:
    """Code without comments, locations and metadata, followed by its launches; kernels are named by number."""
    text = _METADATA.sub("", text) if on_host else _DEBUG.sub("", _COMMENT.sub("", text))
    text += launches
    names = dict.fromkeys((_DEFINED if on_host else _ENTRY).findall(text))
    if names:
        numbers = {name: f"kernel{i}" for i, name in enumerate(names)}
        either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        of_kernel = re.compile(rf"(?<![\w$.])({either})(?=_param_\d|(?![\w$]))")
        text = of_kernel.sub(lambda found: numbers[found[1]], text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def digest_of(make: Make, target: str) -> str:
    """The digest of one program, or the class of the exception that compiling it raises."""
    try:
        what = make(target)
        if isinstance(what, Specialisation):
            return _digest_of_operation(what)
        return _digest(kv.compile(*what, target=target).artifact)
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error).__name__


@functools.cache
def _digest_of_operation(what: Specialisation) -> str:
    return _digest(dispatch.compile_operation(what).artifact)


def _digest(artifact: Artifact) -> str:
    on_host = artifact.target == "host"
    code = str(artifact.code["llvm" if on_host else "ptx"])
    text = compiler.llvm_ir_of(code) if on_host else code
    launches = "\n".join(map(repr, (*artifact.steps, *artifact.workspaces)))
    return hashlib.sha256(plain(text, launches, on_host).encode()).hexdigest()[:16]


def lines(targets: Sequence[str], only: str = "", share: int = 0, shares: int = 1) -> list[Line]:
    """The lines of the programs whose names match ``only``, or one share of them."""
    os.environ.update(KVARN_ALWAYS_COMPILE="1", KVARN_CACHE_SIZE="0")
    found = []
    for i, (name, its_targets, make) in enumerate(programs()):
        if i % shares == share and re.search(only, name):
            found += [(digest_of(make, target), target, name) for target in its_targets if target in targets]
    return found


def read(text: str) -> dict[tuple[str, str], str]:
    """Digests by target and name, read from a file of ``--write``."""
    made = (line.split(maxsplit=2) for line in text.splitlines())
    return {(target, name): digest for digest, target, name in made}


def differences(before: Mapping[tuple[str, str], str], now: Mapping[tuple[str, str], str]) -> list[str]:
    """One line per program that is changed, new or gone."""
    found = []
    for target, name in sorted(before.keys() | now.keys()):
        old, new = before.get((target, name)), now.get((target, name))
        if old != new:
            what = "new" if old is None else "gone" if new is None else f"changed: {old} -> {new}"
            found.append(f"{target:8}  {name}: {what}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the lines to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="print the differences from a file of --write")
    parser.add_argument("--only", default="", metavar="REGEX", help="only programs whose names match")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options = parser.parse_args(argv)
    targets = options.target or TARGETS
    shares = [(targets, options.only, i, options.jobs) for i in range(options.jobs)]
    if options.jobs == 1:
        found = lines(*shares[0])
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
            found = [line for part in pool.map(lines, *zip(*shares, strict=True)) for line in part]
    made = {(target, name): digest for digest, target, name in found}
    if len(made) != len(found):
        raise ValueError("two programs have one name")
    text = "".join(f"{made[key]:16}  {key[0]:8}  {key[1]}\n" for key in sorted(made, key=lambda k: (k[1], k[0])))
    if options.write:
        options.write.write_text(text)
    if not options.against:
        if not options.write:
            print(text, end="")
        return 0
    before = read(options.against.read_text())
    before = {k: v for k, v in before.items() if k[0] in targets and re.search(options.only, k[1])}
    different = differences(before, made)
    print("\n".join([*different, f"{len(made)} programs, {len(different)} differ"]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
