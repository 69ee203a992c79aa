# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decide how each access is made: its alignment, and whether it may use the read-only path.

Alignment: dim is a multiple of width by the dialect's contract, rows and pages are whole multiples of the head, and
bases are 16-byte aligned (the loader checks them), so an access is aligned to the largest power of two that divides
both width and head size in bytes, up to 16. The same holds for scales, with the scales of a token and head in place of
its elements. Read-only: if no op of a kernel writes caches of a storage type, the kernel reads them by
``ld.global.nc``; a buffer is read-only if no op writes a buffer of its element type, or if it is declared read-only.
The loader refuses to write either through another argument (``kv.read_only_args``). Writes are those that ops declare
(``memory_effects``); an op on a handle without declared effects writes everything. Without this pass accesses are
aligned to one element and use the ordinary path. Ops of other packages, whose rules will emit accesses, get their plan
from the kernel's ``kv.access_plan`` (``access_plan``).

Before:  "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8}
After:   "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8, kv.alignment = 16, kv.read_only}
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import types
from kvarn.dialect.layout import HANDLE_FIELDS
from kvarn.lowering import memory_effects
from kvarn.lowering.access_plan import Plan, Written, is_access, written_elements
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import kernels, walk
from kvarn.lowering.rewrite_counts import performs

from . import lower_kv_access


@dataclass(frozen=True)
class Options:
    """read_only: use the read-only path where it is allowed. max_alignment: in bytes; 16 is the widest access."""

    read_only: bool = True
    max_alignment: int = 16


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    with ir.Location.unknown():
        access, writer = functools.cache(is_access), functools.cache(memory_effects.may_write)
        others = lower_kv_access.RULES.outside
        for function in kernels(module):
            found = walk(function, lambda name: access(name) or writer(name) or name in others)
            written = written_elements([op for op in found if writer(op.name)]) if options.read_only else None
            plan = Plan(options.max_alignment, written)
            for op in found:
                if access(op.name) and performs(op, "plan"):
                    plan.apply_to(op)
            if any(op.name in others for op in found):
                plan.leave_on(function)
            if options.read_only and performs(function, "mark read-only buffers"):
                mark_read_only(function, written)


def mark_read_only(function: ir.Operation, written: Written | None) -> None:
    """List the buffers and handles that the kernel's code reads as read-only in ``kv.read_only_args``.

    With None, anything may be written, and only those declared read-only are listed.
    """
    if not len(function.regions[0].blocks):
        return
    records = list(ir.ArrayAttr(function.attributes["kv.args"])) if "kv.args" in function.attributes else []
    declared = {i for i, record in enumerate(records) if "access" in ir.DictAttr(record)}
    readable = [
        i
        for i, a in enumerate(function.regions[0].blocks[0].arguments)
        if i in declared or (written is not None and _nothing_writes(a.type, written))
    ]
    if readable or written is not None:
        function.attributes["kv.read_only_args"] = ir.DenseI64ArrayAttr.get(readable)


def _nothing_writes(type_: ir.Type, written: Written) -> bool:
    """Whether nothing is written of the elements of a buffer, or of a handle's elements and scales."""
    if isinstance(type_, ir.MemRefType):
        return str(ir.MemRefType(type_).element_type) not in written.buffers
    if types.type_name(type_) not in HANDLE_FIELDS:
        return False
    spec = types.spec_of(type_)
    scales = spec.scale_dtype is not None and spec.scale_dtype.mlir in written.scales
    return spec.dtype.mlir not in written.caches and not scales
