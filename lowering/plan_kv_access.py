# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decide how each access touches memory: its alignment, and whether it may use the read-only path.

Alignment: dim is a multiple of width by the dialect's contract, rows and pages are whole multiples of the head, and
bases are 16-byte aligned (the loader checks), so an access is aligned to the largest power of two that divides both
width and head size in bytes, up to 16. Scales are alike, with those of a token and head in the place of its elements.
Read-only: a kernel in which no op writes caches of that storage type reads them through ``ld.global.nc``; buffers
are read-only when nothing in the kernel writes a buffer of their element type, or when they are declared so. What an op
writes is what it declares (``memory_effects``): one of which nothing is known, on a handle, writes everything. Without
this pass accesses are aligned to one element and use the ordinary path.

Before:  "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8}
After:   "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8, kv.alignment = 16, kv.read_only}
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import effects, layout, types, verify
from kvarn.dialect.effects import MEMORY, LooksUpPage

from . import memory_effects
from .pass_base import kv_pass
from .remarks import remark
from .rewrite import kernels, walk
from .rewrites import performs

_WIDEST = 16  # bytes of an access


@dataclass(frozen=True)
class Options:
    """read_only: use the read-only path where it is allowed. max_alignment: bytes; 16 is the widest access."""

    read_only: bool = True
    max_alignment: int = 16


def alignment(width: int, extent: int, itemsize: int, limit: int) -> int:
    """Bytes that an access of ``width`` of ``extent`` elements is aligned to."""
    return min(layout.lowbit(math.gcd(width, extent) * itemsize), limit)


def written_elements(found: Sequence[ir.Operation]) -> tuple[set[str], set[str], set[str]] | None:
    """Element types that a kernel's ops write: (through caches, through scales, through buffers); None: any may be."""
    caches, scales, buffers = set(), set(), set()
    for op in found:
        written = memory_effects.writes(op)
        if written.everything:
            return None
        caches.update(types.spec_of(v.type).dtype.mlir for v in written.elements)
        for handle in written.scales:
            spec = types.spec_of(handle.type)
            if spec.scale_dtype is not None:
                scales.add(spec.scale_dtype.mlir)
        buffers.update(str(ir.MemRefType(v.type).element_type) for v in written.buffers)
    return caches, scales, buffers


def is_access(name: str) -> bool:
    """Whether an op reads or writes elements, or scales, of a cache at a page, which is what gets a plan."""
    found = effects.class_of(name) if effects.has(name, LooksUpPage) else None
    declared = None if found is None else effects.of_class(found)
    if declared is None or not {"head", "dim"} <= {f.name for f in found.FIELDS}:
        return False
    return any(e.resource != MEMORY for e in declared.effects)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    with ir.Location.unknown():
        i64 = ir.IntegerType.get_signless(64)
        access, writer = functools.cache(is_access), functools.cache(memory_effects.may_write)
        for function in kernels(module):
            found = walk(function, lambda name: access(name) or writer(name))
            written = written_elements([op for op in found if writer(op.name)])
            if not options.read_only:
                written = None
            for op in found:
                if access(op.name) and performs(op, "plan"):
                    plan_access(op, options, i64, written)
            if options.read_only and performs(function, "mark read-only buffers"):
                mark_buffers(function, None if written is None else written[2])


def plan_access(
    op: ir.Operation, options: Options, i64: ir.Type, written: tuple[set[str], set[str], set[str]] | None
) -> None:
    """Annotate one access; ``written`` None: nothing is read-only."""
    spec = types.spec_of(op.operands[0].type)
    only_scales = effects.acts_on_scales_only(op.name)
    of_scales = only_scales or spec.kind == layout.SCALES
    if layout.loads_no_scales(spec) and only_scales:
        return  # zeros
    dtype, extent = (spec.scale_dtype, spec.num_scales) if of_scales else (spec.dtype, layout.run_of(spec))
    value = op.results[0] if len(op.results) else op.opview.value
    width = verify.element_and_width(value.type)[1]
    bytes_ = alignment(width, extent, dtype.itemsize, options.max_alignment)
    op.attributes["kv.alignment"] = ir.IntegerAttr.get(i64, bytes_)
    _say_width(op, width, dtype.itemsize, bytes_, extent, "granules" if of_scales else "head size")
    if not len(op.results) or written is None:
        return
    caches, scales, _ = written
    if dtype.mlir in (scales if of_scales else caches):
        remark(op, "missed", f"not by the read-only path: the kernel writes {dtype.mlir} through a cache")
    else:
        op.attributes["kv.read_only"] = ir.UnitAttr.get()
        if spec.quantized and not of_scales and spec.scale_dtype.mlir not in scales:
            op.attributes["kv.scales_read_only"] = ir.UnitAttr.get()


def _say_width(op: ir.Operation, width: int, itemsize: int, bytes_: int, extent: int, what: str) -> None:
    """A remark on how wide an access will be."""
    whole = width * itemsize
    verb = "load" if len(op.results) else "store"
    numbers = {"bytes": whole, "access_bytes": bytes_}
    if whole > bytes_ and bytes_ < _WIDEST:
        text = f"{verb} of {whole} bytes is {-(-whole // bytes_)} of {bytes_}: {what} is {extent}, width {width}"
        remark(op, "missed", text, **numbers)
    elif whole < _WIDEST:
        text = f"{verb} width is {whole} bytes, of {_WIDEST}: {width} elements of {itemsize} bytes"
        remark(op, "missed", text, **numbers)
    else:
        remark(op, "passed", f"{verb} of {whole} bytes in {-(-whole // bytes_)} of {bytes_}", **numbers)


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
