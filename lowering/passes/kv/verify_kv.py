# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check the kv ops of a module: each op's verifier, the kv types, and the origin of handles.

On MLIR 22.1 ops of a Python-declared dialect have no verifier beyond IRDL's, so this pass runs their
``verify_invariants``. It also checks a rule that no single op can: a handle (a value of type ``!kv.cache``,
``!kv.collection``, ``!kv.operand`` or ``!kv.tma``) is a function argument or the result of a kv op, never a
loop-carried value, a branch's argument or the result of ``scf.if``, so that every pass finds a handle's run-time fields
at the one op, or argument, that makes it.

It also checks the attributes that passes leave for one another (:mod:`kvarn.dialect.annotations`).

Every problem is reported at its op before the pass fails. The IR is not changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mlir import ir

from kvarn.dialect import annotations, effects, kv, types, verify
from kvarn.dialect.verify import ANY_HANDLE
from kvarn.lowering.pass_base import NoOptions, PassFailure, kv_pass
from kvarn.lowering.rewrite import called_for_each, defining_op, enclosing

# Types of values that only function arguments and kv ops may be: handles and TMA descriptors.
HANDLES = (*ANY_HANDLE, "tma")
# Ops with a region whose first block has a function's arguments.
FUNCTIONS = ("func.func", "gpu.func", "llvm.func")
# Ops other than kv ones that may make a handle: passes leave casts while they change types.
MAKERS = ("builtin.unrealized_conversion_cast",)
_ORIGIN = "must be a function argument or the result of a kv op"


def _a(kind: str | None) -> str:
    return f"an {kind}" if kind == "operand" else f"a {kind}"


_BINARY: dict[str, Callable[[int, int], int]] = {
    "arith.addi": operator.add, "arith.subi": operator.sub, "arith.muli": operator.mul, "arith.andi": operator.and_,
    "arith.ori": operator.or_, "arith.xori": operator.xor, "arith.minsi": min, "arith.maxsi": max,
}  # fmt: skip
_CASTS = ("arith.index_cast", "arith.extsi")


def folded(value: ir.Value, depth: int = 8) -> int | None:
    """The number that MLIR folds a value to, from constants and arithmetic on them; None if it is not constant."""
    op = defining_op(value)
    if op is None or depth == 0:
        return None
    if op.name == "arith.constant":
        attribute = op.attributes["value"]
        return ir.IntegerAttr(attribute).value if isinstance(attribute, ir.IntegerAttr) else None
    if op.name in _CASTS:
        return folded(op.operands[0], depth - 1)
    if op.name == "arith.select":
        of = [folded(x, depth - 1) for x in op.operands]
        return of[1] if of[1] == of[2] or of[0] else of[2] if of[0] == 0 else None
    if op.name not in _BINARY:
        return None
    left, right = (folded(x, depth - 1) for x in op.operands)
    if left is None or right is None:
        return None
    return (_BINARY[op.name](left, right) + 2**63) % 2**64 - 2**63


class _Checker:
    """Visits a module once; ``problems`` counts the errors emitted."""

    def __init__(self) -> None:
        self.problems = 0
        self._kinds: dict[ir.Type, str | None] = {}
        self._reported: set[ir.Type] = set()

    def error(self, op: ir.Operation, sentence: str) -> None:
        op.location.emit_error(f"'{op.name}' op {sentence}")
        self.problems += 1

    def kind(self, type_: ir.Type) -> str | None:
        """``types.type_name``, cached, since most values share few types."""
        if type_ not in self._kinds:
            self._kinds[type_] = types.type_name(type_)
        return self._kinds[type_]

    def well_formed(self, op: ir.Operation, type_: ir.Type, what: str) -> None:
        """Report a kv type with wrong parameters, once per module."""
        if self.kind(type_) is None or type_ in self._reported:
            return
        problem = types.type_problem(type_)
        if problem is not None:
            self._reported.add(type_)
            self.error(op, f"{what} has a malformed type: {problem}; got {type_}")

    def visit(self, op: ir.Operation) -> ir.WalkResult:
        own = op.name.startswith("kv.")
        before = self.problems
        for index, result in enumerate(op.results):
            self.well_formed(op, result.type, f"result #{index}")
            if not own and self.kind(result.type) in HANDLES and op.name not in MAKERS:
                self.error(op, f"cannot give {_a(self.kind(result.type))} (result #{index}): it {_ORIGIN}")
        for problem in annotations.problems(op):
            self.error(op, f"attribute {problem}")
        if op.name in FUNCTIONS:
            self.signature(op)
        if effects.has(op.name, effects.TierOne) and enclosing(op, "gpu.func") is not None:
            self.error(op, "must be outside kernels (gpu.func): it becomes kernels of its own")
        if op.name == "kv.tensor_map" and enclosing(op, "gpu.func") is not None:
            self.error(op, "must be outside kernels (gpu.func): the host makes a descriptor at launch, pass it on")
        if op.name == "memref.dim":
            self.extent(op)
        for region in op.regions:
            self.blocks(op, region)
        # The op's own verifier would report a malformed result again.
        if own and self.problems == before:
            self.invariants(op)
        return ir.WalkResult.ADVANCE

    def signature(self, op: ir.Operation) -> None:
        """The types of a function, with or without a body."""
        function_type = op.attributes["function_type"].value if "function_type" in op.attributes else None
        if not isinstance(function_type, ir.FunctionType):
            return
        kernel = op.name == "gpu.func" and "gpu.kernel" in op.attributes
        for index, type_ in enumerate(function_type.inputs):
            self.well_formed(op, type_, f"argument #{index}")
            buffer = isinstance(type_, (ir.MemRefType, ir.UnrankedMemRefType))
            if kernel and buffer and (not isinstance(type_, ir.MemRefType) or type_.rank == 0):
                self.error(op, f"argument #{index} of a kernel must be a memref of rank 1 or more, got {type_}")
        for index, type_ in enumerate(function_type.results):
            if self.kind(type_) in HANDLES:
                self.error(op, f"cannot return {_a(self.kind(type_))} (result #{index}): it {_ORIGIN}")

    def extent(self, op: ir.Operation) -> None:
        """The index of ``memref.dim``: MLIR's verifier accepts any number, and its folder crashes on some."""
        type_, index = op.operands[0].type, folded(op.operands[1])
        if index is not None and isinstance(type_, ir.MemRefType) and not 0 <= index < type_.rank:
            self.error(op, f"index must be in [0, {type_.rank}), the dimensions of {type_}, got {index}")

    def blocks(self, op: ir.Operation, region: ir.Region) -> None:
        """Block arguments: only those of functions may be handles."""
        for number, block in enumerate(region.blocks):
            if number == 0 and op.name in FUNCTIONS:
                continue
            for index, argument in enumerate(block.arguments):
                if self.kind(argument.type) in HANDLES:
                    where = "block" if op.name in FUNCTIONS else "region"
                    kind = _a(self.kind(argument.type))
                    self.error(op, f"cannot carry {kind} ({where} argument #{index}): it {_ORIGIN}")

    def invariants(self, op: ir.Operation) -> None:
        """Run the verifier of a kv op; an unexpected exception becomes an error, too."""
        view = op.opview
        if not isinstance(view, kv.Kv.Operation):
            self.error(op, "is not an operation of the kv dialect")
            return
        try:
            takes = verify.added_kinds(view) and verify.packed_elements(view)
            if takes and view.verify_invariants() and verify.schedule(view):
                return
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            self.error(op, f"could not be verified: {type(error).__name__}: {error}")
            return
        self.problems += 1  # the verifier has emitted the error


def count_problems(module: Any) -> int:
    """Check a module (or any op), emit an error for each problem, and return their number."""
    checker = _Checker()
    called_for_each(module, checker.visit)
    return checker.problems


@kv_pass()
def run(module: ir.Module, options: NoOptions) -> None:
    """Check every kv op and handle of a module."""
    problems = count_problems(module)
    if problems:
        raise PassFailure(f"verify-kv found {problems} problem{'s' if problems > 1 else ''}")
