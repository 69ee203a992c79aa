# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decide how each access touches memory: its alignment, and whether it may use the read-only path.

Alignment: dim is a multiple of width by the dialect's contract, rows and pages are whole multiples of the head, and
bases are 16-byte aligned (the loader checks), so an access is aligned to the largest power of two that divides both
width and head size in bytes, up to 16. Scales are alike, with those of a token and head in the place of its elements.
Read-only: a kernel in which no kv op writes caches of that storage type reads them through ``ld.global.nc``; buffers
are read-only when nothing in the kernel writes a buffer of their element type, or when they are declared so. Without
this pass accesses are aligned to one element and use the ordinary path.

Before:  "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8}
After:   "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8, kv.alignment = 16, kv.read_only}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import layout, types, verify

from .pass_base import kv_pass
from .rewrite import kernels, walk

_LOADS = ("kv.load", "kv.load_raw")
_SCALE_LOADS = ("kv.load_scale",)
_STORES = ("kv.store", "kv.store_tile")
_SCALE_STORES = ("kv.store_scale",)
# Ops whose target cannot be told from their operands: after one of them nothing is read-only.
OPAQUE_WRITES = ("llvm.store", "llvm.atomicrmw", "llvm.cmpxchg", "kv.tma_store")
BUFFER_WRITES = ("memref.store", "vector.store", "vector.maskedstore", "memref.atomic_rmw", "memref.generic_atomic_rmw")
# Accesses that get a plan, and everything that the pass looks at.
_PLANNED = frozenset((*_LOADS, *_SCALE_LOADS, "kv.store", *_SCALE_STORES))
_LOOKED_AT = _PLANNED | {*_STORES, *OPAQUE_WRITES, *BUFFER_WRITES}


@dataclass(frozen=True)
class Options:
    """read_only: use the read-only path where it is allowed. max_alignment: bytes; 16 is the widest access."""

    read_only: bool = True
    max_alignment: int = 16


def alignment(width: int, extent: int, itemsize: int, limit: int) -> int:
    """Bytes that an access of ``width`` of ``extent`` elements is aligned to."""
    return min(layout.lowbit(math.gcd(width, extent) * itemsize), limit)


def written_elements(found: Sequence[ir.Operation]) -> tuple[set[str], set[str], set[str]]:
    """Element types that a kernel's ops write: (through caches, through scales, through buffers)."""
    caches, scales, buffers = set(), set(), set()
    for op in found:
        if op.name in _STORES:
            caches.add(types.spec_of(op.operands[0].type).dtype.mlir)
        elif op.name in _SCALE_STORES:
            scales.add(types.spec_of(op.operands[0].type).scale_dtype.mlir)
        elif op.name in BUFFER_WRITES:
            for operand in op.operands:
                if isinstance(operand.type, ir.MemRefType):
                    buffers.add(str(ir.MemRefType(operand.type).element_type))
    return caches, scales, buffers


def writes_through_pointers(found: Sequence[ir.Operation]) -> bool:
    """Whether one of a kernel's ops writes device memory through a raw pointer: it may point into a cache."""
    for op in found:
        if op.name not in OPAQUE_WRITES:
            continue
        address = op.operands[1] if op.name == "llvm.store" else op.operands[0]
        if str(address.type) != "!llvm.ptr<3>":
            return True
    return False


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    with ir.Location.unknown():
        i64 = ir.IntegerType.get_signless(64)
        for function in kernels(module):
            found = walk(function, _LOOKED_AT.__contains__)
            caches, scales, buffers = written_elements(found)
            allowed = options.read_only and not writes_through_pointers(found)
            for op in found:
                plan_access(op, options, i64, caches if allowed else None, scales if allowed else None)
            if options.read_only:
                mark_buffers(function, buffers if allowed else None)


def plan_access(
    op: ir.Operation, options: Options, i64: ir.Type, caches: set[str] | None, scales: set[str] | None
) -> None:
    """Annotate one access; ``caches``/``scales`` None: nothing is read-only."""
    if op.name not in _PLANNED:
        return
    spec = types.spec_of(op.operands[0].type)
    of_scales = op.name in _SCALE_LOADS + _SCALE_STORES or spec.kind == layout.SCALES
    if layout.loads_no_scales(spec) and op.name in _SCALE_LOADS:
        return  # zeros
    dtype, extent = (spec.scale_dtype, spec.num_scales) if of_scales else (spec.dtype, spec.head_size)
    value = op.results[0] if len(op.results) else op.operands[5]
    width = verify.element_and_width(value.type)[1]
    bytes_ = alignment(width, extent, dtype.itemsize, options.max_alignment)
    op.attributes["kv.alignment"] = ir.IntegerAttr.get(i64, bytes_)
    written = scales if of_scales else caches
    if len(op.results) and written is not None and dtype.mlir not in written:
        op.attributes["kv.read_only"] = ir.UnitAttr.get()
        if spec.quantized and not of_scales and scales is not None and spec.scale_dtype.mlir not in scales:
            op.attributes["kv.scales_read_only"] = ir.UnitAttr.get()


def mark_buffers(function: ir.Operation, written: set[str] | None) -> None:
    """List the kernel's read-only buffer arguments in ``kv.read_only_args``; None: only what is declared so."""
    if not len(function.regions[0].blocks):
        return
    records = list(ir.ArrayAttr(function.attributes["kv.args"])) if "kv.args" in function.attributes else []
    declared = {i for i, record in enumerate(records) if "access" in ir.DictAttr(record)}
    readable = [
        i for i, a in enumerate(function.regions[0].blocks[0].arguments)
        if isinstance(a.type, ir.MemRefType) and (
            i in declared or (written is not None and str(ir.MemRefType(a.type).element_type) not in written)
        )
    ]  # fmt: skip
    if readable or written is not None:
        function.attributes["kv.read_only_args"] = ir.DenseI64ArrayAttr.get(readable)
