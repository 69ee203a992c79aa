# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stages of a compilation as files (``KVARN_DUMP_TO``, ``KVARN_OVERRIDE_DIR``), and reproducers.

Each compilation has a folder, ``<kernel>-<target>-<8 digits>``; the digits are a hash of the input, so the next
compilation of the same kernel uses the same folder. ``00_input.mlir`` is the input of the first pass,
``01_verify_kv.mlir`` its output, and so on to the PTX, as ``kv-opt --dump-dir`` numbers them.

A file with the same folder and name under ``KVARN_OVERRIDE_DIR`` replaces the stage, and later stages are made from it.
Copy only edited files there: a copy of a later stage would replace the result of an earlier edit.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mlir import ir

from kvarn import errors
from kvarn.dialect import reading
from kvarn.env import env
from kvarn.lowering import pipeline_parser
from kvarn.lowering.pipeline_parser import Step
from kvarn.lowering.rewrite import walk


def wanted() -> bool:
    """Whether compilations write or read stages; kernels then do not come from the compile cache."""
    return bool(env.dump_to or env.override_dir)


def _read(path: Path, context: ir.Context) -> ir.Module:
    try:
        return reading.parse(path.read_bytes(), context, str(path))
    except reading.TextError as error:
        found = error.problem
        raise errors.KernelError(found.message, errors.SourceLocation(str(path), found.line, found.column)) from None


class StageFiles:
    """The stages of one compilation.

    Parameters
    ----------
    module : mlir.ir.Module
        The input.
    target : str
    """

    def __init__(self, module: ir.Module, target: str) -> None:
        digest = hashlib.sha256(f"{target}\n{module}".encode()).hexdigest()[:8]
        self.title = f"{_symbol(module)}-{target}"
        self.folder = f"{self.title}-{digest}"
        self._count = 0

    def stage(self, name: str, module: ir.Module) -> None:
        """Write a stage, or replace ``module`` by its edited file."""
        file = self._next(name, "mlir")
        edited = self._edited(file)
        if edited is not None:
            with module.context:
                _replace(module, _read(edited, module.context))
        if env.dump_to:
            self._write(file, name, str(module).rstrip("\n") + "\n")

    def code(self, kind: str, text: str) -> str:
        """Write code such as PTX; returns the edited text if there is a file."""
        file = self._next(f"emit-{kind}", kind)
        edited = self._edited(file)
        if edited is not None:
            text = edited.read_text(encoding="utf-8")
        if env.dump_to:
            self._write(file, f"emit-{kind}", text)
        return text

    def _next(self, name: str, suffix: str) -> str:
        file = f"{self._count:02d}_{name.replace('-', '_')}.{suffix}"
        self._count += 1
        return file

    def _edited(self, file: str) -> Path | None:
        if not env.override_dir:
            return None
        path = Path(env.override_dir, self.folder, file)
        if not path.is_file():
            return None
        # Printed, so that a forgotten environment variable is noticed.
        print(f"kvarn: {self.title} takes {path}", file=sys.stderr)
        return path

    def _write(self, file: str, name: str, text: str) -> None:
        if env.dump_to == "-":
            print(f"// -----// {self.title}: {name} //----- //\n{text}", file=sys.stderr)
            return
        folder = Path(env.dump_to, self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


def _symbol(module: ir.Module) -> str:
    """The name of the first kernel or function."""
    for op in walk(module, lambda name: name in ("gpu.func", "func.func")):
        return re.sub(r"[^A-Za-z0-9_$.-]|^\.", "_", ir.StringAttr(op.attributes["sym_name"]).value)  # a file name
    return "module"


def _replace(module: ir.Module, other: ir.Module) -> None:
    """Replace the attributes and contents of a module by those of another."""
    attributes, theirs = module.operation.attributes, other.operation.attributes
    for name in [a for a in attributes]:
        del attributes[name]
    for name in [a for a in theirs]:
        attributes[name] = theirs[name]
    for op in list(module.body.operations):
        op.operation.erase()
    for op in list(other.body.operations):
        module.body.append(op.operation)


# --- reproducers -----------------------------------------------------------------------------------


def reproducer(module: ir.Module, passes: Sequence[Step], verify_each: bool = True) -> str:
    """A module and the passes to run on it, in the format of MLIR's reproducers, with locations."""
    pipeline_text = pipeline_parser.text(passes).replace("\\", "\\\\").replace('"', '\\"')
    asm = str(module.operation.get_asm(enable_debug_info=True)).rstrip("\n")
    return (
        f"{asm}\n\n{{-#\n  external_resources: {{\n    mlir_reproducer: {{\n"
        f'      pipeline: "{pipeline_text}",\n'
        "      disable_threading: true,\n"
        f"      verify_each: {str(verify_each).lower()}\n    }}\n  }}\n#-}}\n"
    )


def write_reproducer(path: str | Path, text: str, options: str = "") -> str:
    """Write a reproducer and return the command that runs it, which is also its first line."""
    command = f"kv-opt {path} --run-reproducer{options}"
    Path(path).write_text(f"// {command}\n{text}", encoding="utf-8")
    return command
