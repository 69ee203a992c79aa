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
# Attributes of LLVM functions that a kernel may have by name: LLVM's verifier ends the process on a wrong value.
_DENORMAL = ("denormal-fp-math", "denormal-fp-math-f32")
_DENORMAL_MODES = re.compile(
    r"(ieee|preserve-sign|positive-zero|dynamic)(,(ieee|preserve-sign|positive-zero|dynamic))?"
)


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
        if op.name == "llvm.func":
            _check_function(op)
        if op.name == "llvm.inline_asm":
            _check_assembly(op)
        if op.name == "llvm.shufflevector":
            _check_shuffle(op)
        if op.name not in _CASTS:
            continue
        source, result = op.operands[0].type, op.results[0].type
        kinds, widths = zip(_kind_and_bits(source), _kind_and_bits(result), strict=True)
        wanted, other, holds = _CASTS[op.name]
        if kinds != (wanted, other) or not holds(*widths) or _lanes(source) != _lanes(result):
            fail(op, f"cannot cast {source} to {result}")


def _check_function(op: ir.Operation) -> None:
    """Attributes that a function passes through to LLVM IR are modes of denormals, with values that LLVM knows."""
    given = [
        [str(part) for part in entry] if isinstance(entry, ir.ArrayAttr) else [str(entry)]
        for entry in (ir.ArrayAttr(op.attributes["passthrough"]) if "passthrough" in op.attributes else ())
    ]
    written = {f'"{name}"': name.replace("-", "_") for name in _DENORMAL}
    given += [[name, str(op.attributes[own])] for name, own in written.items() if own in op.attributes]
    for entry in given:
        if len(entry) != 2 or entry[0] not in written or not _DENORMAL_MODES.fullmatch(entry[1].strip('"')):
            what = " ".join(entry)
            fail(op, f"a function passes through {' and '.join(_DENORMAL)} with a mode or two of denormals, got {what}")


# One constraint of inline assembly that LLVM accepts: registers by letter or name, or the number of an output.
_REGISTER = r"(?:\{[^{}]*\}|[A-Za-z]|\^[A-Za-z]{2})+"
_CONSTRAINT = re.compile(
    rf"(?P<output>=&?{_REGISTER})|(?P<input>%?{_REGISTER})|(?P<same>\d+)|(?P<clobber>~\{{[^{{}}]*\}})"
)
_OPERAND = re.compile(r"\$(?:\$|(?P<number>\d+)|\{(?P<modified>\d+):\w\}|(?P<other>.?))", re.DOTALL)


def _check_assembly(op: ir.Operation) -> None:
    """The constraints of inline assembly fit its operands and results, and its text names only them.

    LLVM asserts the first and ends the process on the second.
    """
    text = ir.StringAttr(op.attributes["constraints"]).value
    found = [_CONSTRAINT.fullmatch(one) for one in text.split(",")] if text else []
    kinds = [match.lastgroup for match in found if match is not None]
    order = ["output" if kind == "output" else "clobber" if kind == "clobber" else "input" for kind in kinds]
    if len(kinds) != len(found) or order != sorted(order, key=("output", "input", "clobber").index):
        fail(op, f"constraints must be outputs, inputs and clobbers, in this order, got '{text}'")
    outputs, inputs = order.count("output"), order.count("input")
    same = [int(match["same"]) for match in found if match is not None and match["same"]]
    if len(set(same)) != len(same) or max(same, default=-1) >= outputs:
        fail(op, f"constraints that are numbers must name different outputs, got '{text}'")
    results = _results(op)
    if (outputs, inputs) != (results, len(op.operands)):
        fail(op, f"constraints must be of {results} outputs and {len(op.operands)} inputs, got {outputs} and {inputs}")
    for match in _OPERAND.finditer(ir.StringAttr(op.attributes["asm_string"]).value):
        number = match["number"] or match["modified"]
        if match["other"] is not None or (number is not None and int(number) >= outputs + inputs):
            fail(op, f"its text must name one of {outputs + inputs} operands, got '{match.group()}'")


def _results(op: ir.Operation) -> int:
    """The number of results of inline assembly: a struct is one for each of its elements."""
    if not op.results:
        return 0
    type_ = op.results[0].type
    if not str(type_).startswith("!llvm.struct"):
        return 1
    count = len(llvm.StructType(type_).body or ())
    if count < 2:
        fail(op, f"must give one result itself, got {type_}")
    return count


def _check_shuffle(op: ir.Operation) -> None:
    """The mask of a shuffle names lanes of its two vectors; -1 is any."""
    lanes = 2 * ir.VectorType(op.operands[0].type).shape[0]
    outside = [lane for lane in ir.DenseI32ArrayAttr(op.attributes["mask"]) if not -1 <= lane < lanes]
    if outside:
        fail(op, f"mask must have numbers in [-1, {lanes}), the lanes of both vectors, got {outside[0]}")


def _translates(type_: ir.Type) -> bool:
    """Whether a type is one of LLVM IR, or one of the LLVM dialect, which verifies it itself."""
    if isinstance(type_, ir.VectorType) and ir.VectorType(type_).rank != 1:
        return False
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
