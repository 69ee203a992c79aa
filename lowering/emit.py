# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a lowered module to text, LLVM IR or PTX: the last step of the GPU pipeline. The module does not change."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from mlir import ir
from mlir.dialects import llvm
from mlir.passmanager import PassManager

from . import nvptx
from .pass_base import fail
from .rewrite import in_modules, walk
from .target import ISA_MARKS, LATER_ISA_MARKS, OP_NEEDS, Target, runs

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.M)


def required_isa(ptx: str, target: Target) -> tuple[int, int]:
    """The lowest PTX ISA that the text needs: the target's own, or that of a newer instruction in the text."""
    later = (isa for chip, mark, isa in LATER_ISA_MARKS if chip == target.name and mark in ptx)
    return max([target.isa, *(isa for mark, isa in ISA_MARKS if mark in ptx), *later])


def isa_for(module: ir.Module, target: Target) -> tuple[int, int]:
    """The PTX ISA for code generation: the target's, or that of an op; PassFailure for an op that the target lacks."""
    highest = target.isa
    for op in walk(module, OP_NEEDS.__contains__):
        if op.name == "nvvm.fence.proxy" and "alias" in str(op.attributes["kind"]):
            continue  # the proxy that older chips have, too
        chip, isa = OP_NEEDS[op.name]
        if not runs(target, chip):
            fail(op, f"needs {chip} or later, got target {target.name}")
        highest = max(highest, isa)
    return highest


# Bit widths that LLVM asserts for casts, which MLIR's verifiers do not check.
_CASTS: dict[str, tuple[str, str, Callable[[int, int], bool]]] = {
    "llvm.trunc": ("int", "int", operator.gt), "llvm.zext": ("int", "int", operator.lt),
    "llvm.sext": ("int", "int", operator.lt), "llvm.fptrunc": ("float", "float", operator.gt),
    "llvm.fpext": ("float", "float", operator.lt), "llvm.fptosi": ("float", "int", lambda a, b: True),
    "llvm.fptoui": ("float", "int", lambda a, b: True), "llvm.sitofp": ("int", "float", lambda a, b: True),
    "llvm.uitofp": ("int", "float", lambda a, b: True), "llvm.ptrtoint": ("ptr", "int", lambda a, b: True),
    "llvm.inttoptr": ("int", "ptr", lambda a, b: True), "llvm.addrspacecast": ("ptr", "ptr", lambda a, b: True),
}  # fmt: skip
_ALIGNED = frozenset(["llvm.load", "llvm.store", "llvm.alloca", "llvm.atomicrmw", "llvm.cmpxchg", "llvm.mlir.global"])
_MOST_ALIGNMENT = 1 << 32
_TYPED = ("elem_type", "global_type")  # attributes with a type of memory


def check_translatable(module: ir.Module) -> None:
    """Refuse IR that crashes MLIR's translation to LLVM IR and that no verifier refuses.

    Only IR that was written by hand can be wrong here.

    Raises
    ------
    PassFailure
        At the first such op.
    """
    known: dict[ir.Type, bool] = {}
    for op in walk(module, lambda name: name.startswith(("llvm.", "nvvm."))):
        values = [*op.results, *(a for region in op.regions for block in region.blocks for a in block.arguments)]
        written = [ir.TypeAttr(op.attributes[name]).value for name in _TYPED if name in op.attributes]
        for type_ in [*(value.type for value in values), *written]:
            if type_ not in known:
                known[type_] = _translates(type_)
            if not known[type_]:
                fail(op, f"speaks of type {type_}, which LLVM IR does not have")
        if op.name in _ALIGNED:
            attribute = op.attributes["alignment"] if "alignment" in op.attributes else None
            alignment = attribute.value if isinstance(attribute, ir.IntegerAttr) else 0
            if not 0 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
                fail(op, f"alignment must be a power of two of at most {_MOST_ALIGNMENT}, got {alignment}")
            continue
        if op.name not in _CASTS:
            continue
        source, result = op.operands[0].type, op.results[0].type
        kinds, widths = zip(_kind_and_bits(source), _kind_and_bits(result), strict=True)
        wanted, other, holds = _CASTS[op.name]
        if kinds != (wanted, other) or not holds(*widths) or _lanes(source) != _lanes(result):
            fail(op, f"cannot cast {source} to {result}")


def _translates(type_: ir.Type) -> bool:
    """Whether a type is one of LLVM IR, or one of the LLVM dialect, which verifies it itself."""
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    if isinstance(element, ir.IntegerType):
        return element.is_signless
    return str(element) in ("f16", "bf16", "f32", "f64", "f80", "f128") or str(element).startswith("!llvm.")


def _lanes(type_: ir.Type) -> list[int]:
    return list(ir.VectorType(type_).shape) if isinstance(type_, ir.VectorType) else []


def _kind_and_bits(type_: ir.Type) -> tuple[str, int]:
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    if isinstance(element, ir.IntegerType):
        return "int", element.width
    if isinstance(element, ir.FloatType):
        return "float", element.width
    return ("ptr" if str(element).startswith("!llvm.ptr") else "other"), 0


# Adds what LLVM needs for ``.loc`` lines, and no more: the code does not change.
_LINES = "builtin.module(ensure-debug-info-scope-on-llvm-func{emission-kind=DebugDirectivesOnly})"


def ptx(module: ir.Module, target: Target, lineinfo: bool = False) -> str:
    """PTX of a module in the LLVM dialect, with ``.loc`` lines on request; the module does not change."""
    with module.context, ir.Location.unknown():
        if not in_modules(module, "gpu.module"):
            raise ValueError("the module has no gpu.module to emit")
        major, minor = isa_for(module, target)
        flat = _flat(module)
        if lineinfo:
            PassManager.parse(_LINES).run(flat.operation)
        text = nvptx.ptx(flat, target.name, f"+ptx{major}{minor}")
        major, minor = required_isa(text, target)
        return _VERSION.sub(f".version {major}.{minor}", text, count=1)


def llvm_ir(module: ir.Module) -> str:
    """LLVM IR of a module in the LLVM dialect, with the contents of a GPU module at the top level."""
    with module.context, ir.Location.unknown():
        return llvm.translate_module_to_llvmir(_flat(module).operation)


def _flat(module: ir.Module) -> ir.Module:
    """A copy of the module, with the contents of its GPU module, if any, at the top level."""
    flat = ir.Module.create()
    scopes = in_modules(module, "gpu.module")
    source = scopes[0].regions[0].blocks[0] if scopes else module.body
    for op in source.operations:
        flat.body.append(op.operation.clone())
    return flat


def isa_of(text: str) -> str:
    """The ``.version`` of PTX text."""
    found = _VERSION.search(text)
    return f"{found[1]}.{found[2]}" if found else ""
