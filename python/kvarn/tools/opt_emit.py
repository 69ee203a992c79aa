# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``--emit``: code from a module in the LLVM dialect, generated in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Callable
from typing import NoReturn

from mlir import ir

from kvarn.lowering import emit as lowered
from kvarn.lowering.pass_base import PassFailure
from kvarn.lowering.rewrite import walk
from kvarn.lowering.target import Target

from .apart import Died, apart

# Dialects that MLIR translates to LLVM IR; it ends the process on any other.
_TRANSLATED = ("llvm", "nvvm")
_AROUND = ("builtin.module", "gpu.module", "gpu.module_end")


class EmitError(Exception):
    """The module cannot be emitted; a diagnostic has been emitted if it refers to an op."""


def emit(module: ir.Module, kind: str, target: Target) -> str | bytes:
    """The code of a module: ``llvm``, ``ptx`` and ``sass`` as text, ``cubin`` as bytes.

    Raises
    ------
    EmitError
        If the module is not in the LLVM dialect, or the target has no such code, after an error diagnostic.
    """
    _check_lowered(module, kind)
    try:
        lowered.check_translatable(module)
        if kind == "llvm":
            return _survived(module, lambda: lowered.llvm_ir(module))
        if target.is_host:
            _fail(module.operation, f"--emit={kind} needs a GPU target, got host: use --emit=llvm")
        if not walk(module, lambda name: name == "gpu.module"):
            _fail(module.operation, f"has no gpu.module: --emit={kind} emits the kernels in one")
        text = _survived(module, lambda: lowered.ptx(module, target))
    except PassFailure as error:  # its diagnostic has been emitted
        raise EmitError(str(error)) from error
    if kind == "ptx":
        return text
    from kvarn.runtime import assemble

    try:
        cubin = assemble.assemble(text, target.name).cubin
        return cubin if kind == "cubin" else assemble.disassemble(cubin)
    except (RuntimeError, ValueError, OSError) as error:
        _fail(module.operation, f"cannot be assembled: {error}")


def _survived(module: ir.Module, generate: Callable[[], str]) -> str:
    """The code that a function generates, in a child process: LLVM ends its process on IR that it does not expect.

    What the function raises in the child it raises here, too, so that diagnostics are those of this process.
    """
    with tempfile.TemporaryFile() as said:

        def generated() -> str | None:
            faulthandler.disable()
            os.dup2(said.fileno(), 2)
            try:
                return generate()
            except Exception:
                return None

        try:
            code = apart(generated)
        except Died as death:
            said.seek(0)
            first = said.read().decode(errors="replace").partition("\n")[0] or "nothing"
            _fail(module.operation, f"ends LLVM, {death.how}, which said: {first}")
    return generate() if code is None else code


def _check_lowered(module: ir.Module, kind: str) -> None:
    """Refuse a module that is not in the LLVM dialect, at the first such op."""
    left = walk(module, lambda name: name not in _AROUND and name.partition(".")[0] not in _TRANSLATED)
    if left:
        _fail(left[0], f"is not in the LLVM dialect, which --emit={kind} needs: run --kv-pipeline")


def _fail(op: ir.Operation, sentence: str) -> NoReturn:
    op.location.emit_error(f"'{op.name}' op {sentence}")
    raise EmitError(sentence)
