# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a lowered module to text: LLVM IR and PTX. The last step of the GPU pipeline; the module stays as it is."""

from __future__ import annotations

import re

from mlir import ir
from mlir.dialects import gpu, llvm
from mlir.passmanager import PassManager

from .pass_base import fail
from .rewrite import in_modules, walk
from .target import ISA_MARKS, OP_NEEDS, Target, runs

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.M)


def required_isa(ptx: str, target: Target) -> tuple[int, int]:
    """The lowest PTX ISA that the text needs: its target's own, or that of a newer instruction in it."""
    return max([target.isa, *(isa for mark, isa in ISA_MARKS if mark in ptx)])


def isa_for(module: ir.Module, target: Target) -> tuple[int, int]:
    """The PTX ISA to generate code with: the target's own, or that of an op; PassFailure for an op it does not have."""
    highest = target.isa
    for op in walk(module, OP_NEEDS.__contains__):
        if op.name == "nvvm.fence.proxy" and "alias" in str(op.attributes["kind"]):
            continue  # the one proxy that older chips have
        chip, isa = OP_NEEDS[op.name]
        if not runs(target, chip):
            fail(op, f"needs {chip} or later, got target {target.name}")
        highest = max(highest, isa)
    return highest


def ptx(module: ir.Module, target: Target, level: int = 3) -> str:
    """PTX of a module in the LLVM dialect; the module is left as it was."""
    with module.context, ir.Location.unknown():
        major, minor = isa_for(module, target)
        copy = module.operation.clone()
        features = f"+ptx{major}{minor}"
        attribute = ir.Attribute.parse(f'#nvvm.target<chip="{target.name}", features="{features}", O={level}>')
        for scope in in_modules(copy, "gpu.module"):
            scope.attributes["targets"] = ir.ArrayAttr.get([attribute])
        PassManager.parse("builtin.module(gpu-module-to-binary{format=isa opts= section= toolkit=})").run(
            copy.operation
        )
        for binary in in_modules(copy, "gpu.binary"):
            code = gpu.ObjectAttr(binary.opview.objects[0]).object
            text = (code if isinstance(code, str) else bytes(code).decode()).rstrip("\0")
            major, minor = required_isa(text, target)
            return _VERSION.sub(f".version {major}.{minor}", text, count=1)
    raise ValueError("the module has no gpu.module to emit")


def llvm_ir(module: ir.Module) -> str:
    """LLVM IR of a module in the LLVM dialect, a GPU module's contents lifted out."""
    with module.context, ir.Location.unknown():
        flat = ir.Module.create()
        scopes = in_modules(module, "gpu.module")
        source = scopes[0].regions[0].blocks[0] if scopes else module.body
        for op in source.operations:
            flat.body.append(op.operation.clone())
        return llvm.translate_module_to_llvmir(flat.operation)


def isa_of(text: str) -> str:
    """The ``.version`` of PTX text."""
    found = _VERSION.search(text)
    return f"{found[1]}.{found[2]}" if found else ""
