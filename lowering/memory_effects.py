# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What an op in a kernel may write, by the declared effects of kv ops and by rules for MLIR's own dialects.

An op of another dialect, or a kv op without declared effects, may write anything if one of its operands is a handle, a
buffer or a pointer to device memory. So may a call, and a store through a pointer, which may point into any cache or
buffer. Inline assembly is judged by its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import effects, types
from kvarn.dialect.effects import CACHE, ELEMENTS, MEMORY, SCALES, WRITE
from kvarn.dialect.verify import ANY_HANDLE

# Ops of MLIR that write memory, and the index of the operand that they write to.
_BUFFER_WRITES = {
    "memref.store": 1, "memref.atomic_rmw": 1, "memref.generic_atomic_rmw": 0, "memref.copy": 1, "vector.store": 1,
    "vector.maskedstore": 0, "vector.scatter": 0, "vector.compressstore": 0, "vector.transfer_write": 1,
}  # fmt: skip
_POINTER_WRITES = {
    "llvm.store": 1, "llvm.atomicrmw": 0, "llvm.cmpxchg": 0, "llvm.intr.memcpy": 0, "llvm.intr.memmove": 0,
    "llvm.intr.memset": 0, "llvm.intr.masked.store": 1, "llvm.intr.masked.scatter": 1,
    "llvm.intr.masked.compressstore": 1,
}  # fmt: skip
_CALLS = ("func.call", "func.call_indirect", "llvm.call", "llvm.invoke", "llvm.call_intrinsic")
_ASSEMBLY = "llvm.inline_asm"
# Stores and atomics outside of shared memory, and bulk copies from shared memory.
_ASSEMBLY_WRITES = re.compile(r"\b(?:st|red|atom|multimem)\.(?!\S*shared)|\.global\.shared|\breduce\.async")
_ASSEMBLY_READS = re.compile(r"\b(?:ld|cp\.async|prefetch)\.")
_POINTER_READS = ("llvm.load", "nvvm.cp.async.shared.global", "nvvm.prefetch")
_NVVM_WRITES = (".global.shared", ".reduce")
# Dialects whose other ops write nothing but, at most, shared memory.
_KNOWN = frozenset({
    "affine", "arith", "builtin", "cf", "complex", "func", "gpu", "index", "llvm", "math", "memref", "nvgpu", "nvvm",
    "scf", "ub", "vector",
})  # fmt: skip

_HANDLES = (*ANY_HANDLE, "tma")


@dataclass(frozen=True)
class Writes:
    """What an op may write: the ``elements`` or ``scales`` of handles, ``buffers``, or ``everything``."""

    everything: bool = False
    elements: tuple[ir.Value, ...] = ()
    scales: tuple[ir.Value, ...] = ()
    buffers: tuple[ir.Value, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.everything or self.elements or self.scales or self.buffers)


def may_write(name: str) -> bool:
    """Whether an op of this name may write, so that :func:`writes` must be called on it."""
    if name in _BUFFER_WRITES or name in _POINTER_WRITES or name in _CALLS or name == _ASSEMBLY:
        return True
    dialect = name.partition(".")[0]
    if dialect == "nvvm":
        return any(mark in name for mark in _NVVM_WRITES)
    if dialect in _KNOWN:
        return False
    found = effects.class_of(name)
    declared = None if found is None else effects.of_class(found)
    return declared is None or any(e.kind == WRITE for e in declared.effects)


def writes(op: ir.Operation) -> Writes:
    """What an op may write."""
    name, operands = op.name, list(op.operands)
    if name in _BUFFER_WRITES:
        target = operands[_BUFFER_WRITES[name]]
        return Writes(buffers=(target,) if isinstance(target.type, ir.MemRefType) else ())  # or a tensor
    if name in _POINTER_WRITES:
        return Writes(everything=_is_device_pointer(operands[_POINTER_WRITES[name]]))
    if name == _ASSEMBLY:
        return Writes(everything=_ASSEMBLY_WRITES.search(ir.StringAttr(op.attributes["asm_string"]).value) is not None)
    found = effects.class_of(name)
    declared = None if found is None else effects.of_class(found)
    if declared is None:
        return Writes(everything=any(map(_reaches_memory, operands)))
    resources: dict[str, list[ir.Value]] = {CACHE: [], ELEMENTS: [], SCALES: [], MEMORY: []}
    everything = False
    for effect in declared.effects:
        if effect.kind != WRITE:
            continue
        targets = _targets(op, effect)
        resources[effect.resource] += targets
        # The written cache is not an operand: the op reaches it by a descriptor or a pointer.
        everything |= effect.resource != MEMORY and not any(map(_is_handle, targets))
        everything |= effect.resource == MEMORY and any(map(_is_device_pointer, targets))
    return Writes(
        everything,
        tuple(v for v in (*resources[CACHE], *resources[ELEMENTS]) if _is_handle(v)),
        tuple(v for v in (*resources[CACHE], *resources[SCALES]) if _is_handle(v)),
        tuple(v for v in resources[MEMORY] if isinstance(v.type, ir.MemRefType)),
    )


def _targets(op: ir.Operation, effect: effects.Effect) -> Sequence[ir.Value]:
    """The operands that an effect acts on: the named one, otherwise all."""
    if effect.operand is None:
        return list(op.operands)
    found = getattr(op.opview, effect.operand)
    return [] if found is None else list(found) if isinstance(found, list) else [found]


def exposes(name: str) -> bool:
    """Whether an op of this name may write, or returns an address that may be written through."""
    return effects.has(name, effects.GivesAddress) or may_write(name)


def exposed(op: ir.Operation) -> list[ir.Value]:
    """The handles and buffers that an op may write, or whose addresses it returns may be written through."""
    if effects.has(op.name, effects.GivesAddress):
        return [op.operands[0]] if any(map(_may_be_written_through, op.results)) else []
    if not may_write(op.name):
        return []
    found = writes(op)
    seen = list(op.operands) if found.everything else [*found.elements, *found.scales, *found.buffers]
    return [v for v in seen if isinstance(v.type, ir.MemRefType) or types.type_name(v.type) in _HANDLES]


def _may_be_written_through(address: ir.Value) -> bool:
    """Whether an address may reach a write: unless all of its uses are loads and copies from device memory."""
    for use in address.uses:
        op = use.owner.operation
        if op.name == "llvm.getelementptr":
            if any(map(_may_be_written_through, op.results)):
                return True
        elif op.name == _ASSEMBLY:
            text = ir.StringAttr(op.attributes["asm_string"]).value
            # A result could be the address in another form.
            gives = any(str(r.type) == "i64" or str(r.type).startswith("!llvm.") for r in op.results)
            if gives or _ASSEMBLY_READS.search(text) is None or _ASSEMBLY_WRITES.search(text) is not None:
                return True
        elif op.name not in _POINTER_READS:
            return True
    return False


def _is_handle(value: ir.Value) -> bool:
    return types.type_name(value.type) in ANY_HANDLE


def _is_device_pointer(value: ir.Value) -> bool:
    text = str(value.type)
    return text.startswith("!llvm.ptr") and text not in (
        "!llvm.ptr<3>",
        "!llvm.ptr<7>",
    )  # shared memory of the block or cluster


def _reaches_memory(value: ir.Value) -> bool:
    return (
        isinstance(value.type, (ir.MemRefType, ir.UnrankedMemRefType))
        or types.type_name(value.type) in _HANDLES
        or _is_device_pointer(value)
    )
